"""Trains on a stream, which rank 0 reads for all processes."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from record import record, record_weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for _ in range(self.length):
            x = torch.randn(4, generator=generator)
            yield {"x": x, "y": x.sum()[None]}


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
set_seed(6)
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
train, valid = DataLoader(Stream(37), batch_size=4), DataLoader(Stream(11), batch_size=4)
model, optimizer, train, valid, scheduler = accelerator.prepare(model, optimizer, train, valid, scheduler)
for _epoch in range(2):
    for batch in train:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        record("step", len(batch["x"]), loss, scheduler.get_last_lr(), accelerator.sync_gradients)
    for batch in valid:
        with torch.no_grad():
            found = model(batch["x"])
        found, wanted = accelerator.gather_for_metrics((found, batch["y"]))
        record("valid", found, wanted)
for batch in accelerator.skip_first_batches(train, 2):
    record("skipped", batch["x"])
record_weights(accelerator.unwrap_model(model))
accelerator.end_training()
