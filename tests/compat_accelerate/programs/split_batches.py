"""Splits each batch over the processes; data with a seed of their own; gradients clipped by value."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from record import record, record_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=99, non_blocking=True)
accelerator = Accelerator(cpu=True, dataloader_config=config)
set_seed(2)
data = TensorDataset(torch.randn(46, 3), torch.randn(46, 2))
model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train = DataLoader(data, batch_size=8, shuffle=True)
weighted = DataLoader(data, batch_size=6, sampler=WeightedRandomSampler(torch.arange(1.0, 47.0), 20))
valid = DataLoader(data, batch_size=12)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=len(train) * 2 + len(weighted))
model, optimizer, train, weighted, valid, scheduler = accelerator.prepare(
    model, optimizer, train, weighted, valid, scheduler
)
record("lengths", len(train), len(weighted), len(valid), accelerator.split_batches, accelerator.even_batches)
for loader in (train, train, weighted):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        record("step", len(x), x.sum(), loss, scheduler.get_last_lr())
model.eval()
with torch.inference_mode():
    for x, y in valid:
        prediction, target = accelerator.gather_for_metrics((model(x), y))
        record("valid", prediction, target)
rank = accelerator.process_index
padded = accelerator.pad_across_processes(torch.full((rank + 1, 2), float(rank)), dim=0, pad_index=-1)
first = accelerator.pad_across_processes(torch.full((2, rank + 2), rank), dim=1, pad_first=True)
record("padded", padded, first, accelerator.gather(padded))
record(
    "reduced", accelerator.reduce({"a": torch.tensor([1.0, float(rank)])}, "mean"), accelerator.reduce(loss.detach())
)
record_weights(accelerator.unwrap_model(model))
accelerator.end_training()
