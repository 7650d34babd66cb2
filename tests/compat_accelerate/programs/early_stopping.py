"""Stops on all processes when one of them has seen enough."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from record import record, record_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EarlyStoppingCallback:
    def __init__(self, min_delta=0.0, patience=2):
        self.min_delta, self.patience, self.counter, self.lowest_loss = min_delta, patience, 0, float("inf")

    def check_early_stopping(self, eval_loss):
        delta = self.lowest_loss - eval_loss
        if delta >= self.min_delta:
            self.lowest_loss, self.counter = eval_loss, 0
            return False
        self.counter += 1
        return self.counter >= self.patience


accelerator = Accelerator(cpu=True)
set_seed(5)
data = TensorDataset(torch.randn(60, 5), torch.randn(60, 1))
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
loader = DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
callback = EarlyStoppingCallback(0.3, patience=3)
steps = 0
for epoch in range(6):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        steps += 1
        record("step", epoch, steps, loss, scheduler.get_last_lr())
        # Each process looks at its own loss; one that triggers stops all of them.
        if callback.check_early_stopping(loss.item()) and accelerator.is_last_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    else:
        continue
    break
record("stopped", epoch, steps, accelerator.check_trigger())
total = accelerator.reduce(torch.tensor(float(steps)), reduction="mean")
record("reduced", total, accelerator.gather(loss.detach()).shape, accelerator.gather(loss.detach().reshape(1)))
record_weights(accelerator.unwrap_model(model))
accelerator.end_training()
