"""A program on Fabric: two models and optimizers, accumulation, clipping, callbacks, a logger, saving and loading.

`two_models.py FOLDER` prints what it found as JSON, and leaves its logs and checkpoints in the folder.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x):
        return self.net(x)


class Watch:
    """A callback: any object with methods."""

    def __init__(self):
        self.calls = []

    def on_train_start(self, fabric, **kwargs):
        self.calls.append(["start", fabric.world_size, sorted(kwargs)])

    def on_epoch_end(self, epoch, losses):
        self.calls.append(["epoch", epoch, [round(loss, 5) for loss in losses]])


class Other:
    """Has one of the methods."""

    def on_epoch_end(self, epoch, **kwargs):
        self.last = epoch


def train(fabric, student, teacher, optimizers, loader, state, until):
    own, others = optimizers
    norms = []
    for epoch in range(state["epoch"], until):
        losses = []
        for index, (x, y) in enumerate(loader):
            is_accumulating = (index + 1) % 3 != 0 and index + 1 != len(loader)
            with fabric.no_backward_sync(teacher, enabled=is_accumulating):
                loss = F.cross_entropy(teacher(x), y)
                fabric.backward(loss / 3)
            with fabric.no_backward_sync(student, enabled=is_accumulating):
                with torch.no_grad():
                    target = teacher(x)
                matched = F.mse_loss(student(x), target)
                fabric.backward(matched / 3)
            losses.append(matched.item())
            if is_accumulating:
                continue
            norms.append(float(fabric.clip_gradients(teacher, others, max_norm=0.5)))
            fabric.clip_gradients(student, own, clip_val=0.05)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            state["step"] += 1
            fabric.log_dict({"teacher": loss, "student": matched}, step=state["step"])
        fabric.call("on_epoch_end", epoch=epoch, losses=losses)
        state["epoch"] = epoch + 1
    return norms


def make(fabric):
    with fabric.init_module():
        student, teacher = Student(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    student = fabric.setup(student, move_to_device=True)
    own = fabric.setup_optimizers(torch.optim.Adam(student.parameters(), lr=0.02))
    teacher, others = fabric.setup(teacher, torch.optim.SGD(teacher.parameters(), lr=0.1, momentum=0.9))
    return student, teacher, (own, others)


def main(folder):
    seed_everything(11)
    watch, other = Watch(), Other()
    logger = CSVLogger(root_dir=folder, name="pair", flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed", callbacks=[watch, other], loggers=logger)
    fabric.launch()
    student, teacher, optimizers = make(fabric)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(56, 4, generator=generator)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8))
    fabric.call("on_train_start", fabric=fabric, extra=1)
    state = {"epoch": 0, "step": 0}
    found = {"norms": train(fabric, student, teacher, optimizers, loader, state, 2)}
    path = Path(folder) / "pair.ckpt"
    everything = {"student": student, "teacher": teacher, "own": optimizers[0], "others": optimizers[1], **state}
    fabric.save(path, everything, filter={"teacher": lambda name, value: True})
    found["later"] = train(fabric, student, teacher, optimizers, loader, state, 4)
    found["weights"] = [
        round(p.detach().float().sum().item(), 5) for p in (*student.parameters(), *teacher.parameters())
    ]

    student, teacher, optimizers = make(fabric)
    loaded = {"student": student, "teacher": teacher, "own": optimizers[0], "others": optimizers[1], "epoch": 0}
    rest = fabric.load(path, loaded)
    found["rest"] = [sorted(rest), loaded["epoch"], rest.get("step")]
    state = {"epoch": loaded["epoch"], "step": rest["step"]}
    found["again"] = train(fabric, student, teacher, optimizers, loader, state, 4)
    found["same"] = [round(p.detach().float().sum().item(), 5) for p in (*student.parameters(), *teacher.parameters())]
    raw = fabric.load(path)
    found["raw"] = [sorted(raw), sorted(raw["student"]), raw["epoch"], sorted(raw["own"])]
    found["calls"], found["last"] = watch.calls, other.last
    found["dtypes"] = [str(student(x[:2]).dtype), str(next(student.parameters()).dtype)]
    with fabric.autocast():
        found["dtypes"].append(str((x[:2] @ x[:2].T).dtype))
    found["gathered"] = list(fabric.all_gather(torch.ones(2)).shape)
    found["reduced"] = fabric.all_reduce({"a": torch.tensor(3.0)}, reduce_op="sum")["a"].item()
    found["names"] = [type(optimizers[0]).__name__, len(loader), isinstance(student.module, Student)]
    found["root"] = [Path(logger.root_dir) == Path(folder), logger.name, logger.version, fabric.logger is logger]
    found["files"] = sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())
    found["csv"] = (Path(folder) / "pair" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    found["norms"], found["later"], found["again"] = (
        [round(v, 4) for v in found[k]] for k in ("norms", "later", "again")
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
