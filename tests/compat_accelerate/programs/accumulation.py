"""Accumulates gradients over two batches, with a last window of one."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from record import record, record_weights
from torch.utils.data import DataLoader, TensorDataset

acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
data = TensorDataset(torch.randn(53, 4), torch.randint(3, (53,)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
sch = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=20)
model, opt, dl, sch = acc.prepare(model, opt, DataLoader(data, batch_size=4, shuffle=True), sch)
for _epoch in range(2):
    for x, y in dl:
        with acc.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            acc.backward(loss)
            norm = None
            if acc.sync_gradients:
                norm = acc.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sch.step()
            opt.zero_grad()
        record("step", loss, norm, sch.get_last_lr(), acc.sync_gradients, acc.gradient_state.end_of_dataloader)
n = 0
for x, y in acc.prepare(DataLoader(data, batch_size=8)):
    with torch.no_grad():
        p = model(x).argmax(1)
    p, y = acc.gather_for_metrics((p, y))
    n += len(y)
record("end", n, acc.distributed_type, acc.num_processes)
record_weights(acc.unwrap_model(model))
acc.end_training()
