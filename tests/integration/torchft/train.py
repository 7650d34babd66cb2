"""One replica group of the tests: `python train.py FOLDER CONFIG`. It kills itself where the file `turn` says so."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.trainer.checkpointing.saving import Saving
from loopwright.trainer.replica_groups import groups, healing

FOLDER, CONFIG = Path(sys.argv[1]), json.loads(sys.argv[2])
GROUP = os.environ.get("REPLICA_GROUP_ID", "reference")
IS_PLAIN = GROUP == "reference"
DTYPE = torch.float32 if CONFIG.get("precision") else torch.float64


def turns() -> list[str]:
    try:
        return (FOLDER / "turn").read_text().splitlines()
    except FileNotFoundError:
        return []


def die_at(place: str) -> None:
    """End this process as a power cut does, if it is its turn."""
    if f"{GROUP}-{os.environ.get('RANK', '0')} {place}" in turns():
        (FOLDER / f"died-{GROUP}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def watched(owner: Any, name: str, place: str) -> None:
    original: Callable[..., object] = getattr(owner, name)

    def function(*args: object, **kwargs: object) -> object:
        die_at(place)
        return original(*args, **kwargs)

    setattr(owner, name, function)


for owner, name, place in (
    (groups.ReplicaGroups, "_sum_bucket", "reduce"),
    (groups.ReplicaGroups, "join", "quorum"),
    (healing, "put", "healing"),
    (healing, "take", "sending"),
    (Saving, "write_to", "save"),
):
    watched(owner, name, place)


def connect_late(self: groups.ReplicaGroups) -> None:
    """Connect when another group is ahead, if someone is to die while this group heals: else it might be up to date."""

    def is_behind() -> bool:
        rows = [path.read_text().split("\n")[:-1] for path in FOLDER.glob("steps-*.jsonl") if GROUP not in path.stem]
        return any(json.loads(one[-1])["step"] > self.run.progress.steps for one in rows if one)

    while any(line.endswith(("healing", "sending")) for line in turns()) and not is_behind():
        time.sleep(0.01)
    connect(self)


connect = groups.ReplicaGroups._connect
groups.ReplicaGroups._connect = connect_late  # type: ignore[method-assign]


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 16).to(DTYPE), torch.nn.Dropout(CONFIG.get("dropout", 0.0))
        self.second = torch.nn.Linear(16, 1).to(DTYPE)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.second(self.norm(self.first(batch[0]).tanh()))
        return (out - batch[0].sum(1, keepdim=True)).pow(2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | lw.Loss:
        die_at("forward")
        time.sleep(CONFIG.get("sleep_s", 0.0))
        losses = self.loss(batch)
        loss = lw.Loss(losses.sum(), float(len(losses))) if CONFIG.get("sums") else losses.mean()
        self.log("loss", losses.mean(), on_step=True, on_epoch=True)
        samples = {"step": self.trainer.global_step, "batch": batch_idx, "epoch": self.current_epoch}
        with open(FOLDER / f"read-{GROUP}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({**samples, "ids": batch[1].tolist()}) + "\n")
        return loss

    def on_after_backward(self) -> None:
        die_at("backward")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        die_at("commit")

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        die_at("validation")
        self.log("val_loss", self.loss(batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=CONFIG.get("factor", 0.1))
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10, CONFIG.get("gamma", 0.95)),
                "interval": "step",
            },
            {"scheduler": plateau, "monitor": "loss_epoch", "interval": "epoch"},
        ]


class Watch(lw.Callback):
    """Stops at the step that the file `stop` names; writes a row for each step."""

    def on_train_batch_end(self, trainer: lw.Trainer, *_: object) -> None:
        if not trainer.at_step_boundary:
            return
        row = {
            "step": trainer.global_step,
            "at": time.time(),
            "loss": float(trainer.callback_metrics.get("loss_step", 0)),
        }
        run = trainer.present_run()
        if isinstance(run.groups, groups.ReplicaGroups):
            row |= {"size": run.groups.size, "rank": run.groups.rank, "pid": os.getpid()}
        with open(FOLDER / f"steps-{GROUP}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if (FOLDER / "stop").exists():
            trainer.fit_loop.max_steps = int((FOLDER / "stop").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    die_at("start")
    lw.seed_everything(3)
    if CONFIG.get("differs") and GROUP not in ("0", "reference"):
        torch.manual_seed(100)
    module = Net()
    lw.seed_everything(3)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(96, 8, generator=generator, dtype=torch.float64).to(DTYPE), torch.arange(96))
    rounds = CONFIG.get("rounds", {})  # the arguments of TorchFT for separate steps
    averages = [] if rounds else [lw.EMA(decay=0.9)]
    folder = FOLDER / ("files" if not IS_PLAIN else "files-reference")
    checkpoint = lw.ModelCheckpoint(folder, every_n_train_steps=5, save_last=True)
    trainer = lw.Trainer(
        max_steps=CONFIG.get("max_steps", 100_000),
        accelerator="cpu",
        devices=CONFIG.get("devices", 1),
        strategy=CONFIG.get("strategy", "ddp"),
        accumulate_grad_batches=CONFIG.get("micro_batches", 2),
        gradient_clip_val=1.0,
        precision=CONFIG.get("precision"),
        compile=CONFIG.get("compile", False),
        callbacks=[Watch(), *averages, checkpoint],
        logger=lw.CSVLogger(folder / "logs", flush_logs_every_n_steps=1),
        log_every_n_steps=rounds.get("sync_every", 1),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        fault_tolerance=None if IS_PLAIN else lw.TorchFT(min_replicas=1, timeout=20, quorum_timeout=60, **rounds),
    )
    loaders = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=48)
    trainer.fit(module, *loaders, ckpt_path=None if IS_PLAIN else "last")
    weights = trainer.full_state_dict(module)
    if trainer.is_global_zero:
        end = {
            "weights": weights,
            "average": averages[0].state_dict() if averages and CONFIG.get("strategy") != "fsdp" else None,
            "optimizer": trainer.optimizers[0].state_dict()["state"] if CONFIG.get("strategy") != "fsdp" else None,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "counts": [trainer.global_step, trainer.current_epoch, trainer.progress.samples],
            "metrics": trainer.callback_metrics,
            "best": Path(checkpoint.best_model_path).name,
        }
        torch.save(end, FOLDER / f"end-{GROUP}.pt")
