"""Saves states under automatic names, or continues from the last one: saved_states.py FOLDER save|load."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from record import record, record_weights
from torch.utils.data import DataLoader, TensorDataset

folder = sys.argv[1]
set_seed(1)
acc = Accelerator(
    cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
)
data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.2))
opt = torch.optim.Adam(model.parameters())
sch = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
model, opt, dl, sch = acc.prepare(model, opt, DataLoader(data, batch_size=4, shuffle=True), sch)


class Counter:
    def __init__(self):
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


counter = Counter()
acc.register_for_checkpointing(counter)


def step(x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    acc.backward(loss)
    opt.step()
    sch.step()
    opt.zero_grad()
    counter.n += 1
    record("step", loss, sch.get_last_lr(), counter.n)


if sys.argv[2] == "save":
    for i, (x, y) in enumerate(dl):
        step(x, y)
        if i in (1, 2, 3):
            acc.save_state()
    acc.wait_for_everyone()
    record("folders", sorted(os.listdir(os.path.join(folder, "checkpoints"))))
else:
    acc.load_state()
    for x, y in acc.skip_first_batches(dl, 4):
        step(x, y)
record_weights(acc.unwrap_model(model))
acc.end_training()
