"""Programs that the tests of Ray run in its workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import loopwright as lw
from loopwright.integrations.ray import RayReport, data_shard, resume_path

Config = dict[str, Any]
SAMPLES = 48
GLOBAL_BATCH = 8


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Samples that say their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(4.0, dtype=torch.float64) + index)


class Net(lw.Module):
    """A model that notes each step, and kills its process where it is told to.

    Args:
        config: "folder" for the notes; "dropout"; "pause_s" between steps, or "waits_for": a file until
            which they are slow; "kills": of (attempt, rank, place, step); "error": one of these that raises.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(config.get("dropout", 0.0)), torch.nn.Linear(8, 1)
        ).double()
        self.rank = int(os.environ["RANK"])
        self.attempt = config["attempt"]
        self.ids: list[int] = []

    def at(self, place: str) -> None:
        """Die here if the test says so."""
        for attempt, rank, where, step in self.config.get("kills", ()):
            if (attempt, rank, where) == (self.attempt, self.rank, place) and step == self.trainer.global_step:
                die(Path(self.config["folder"]), f"{attempt} {rank} {where} {step}")
        if (self.attempt, self.rank, place, self.trainer.global_step) == tuple(self.config.get("error", ())):
            raise ValueError("a bad sample")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        index, x = (batch["id"], batch["x"]) if isinstance(batch, dict) else batch
        self.ids += index.tolist()
        self.at("step")
        loss = self.layers(x).pow(2).mean()
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.at("backward"))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("validation")
        self.log("val_loss", self.layers(batch[1]).abs().mean())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.at_step_boundary:
            with open(Path(self.config["folder"]) / f"steps-{self.rank}", "a") as file:
                loss = float(self.trainer.callback_metrics["loss"])
                print(self.attempt, self.trainer.global_step, self.trainer.world_size, loss, *self.ids, file=file)
            self.ids.clear()
            waits = "waits_for" in self.config and not Path(self.config["waits_for"]).exists()
            time.sleep(2 if waits else self.config.get("pause_s", 0))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at("save")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def count_attempt(folder: Path) -> int:
    """Return how often this rank has started before."""
    attempt = starts(folder, int(os.environ["RANK"]))
    with open(folder / f"starts-{os.environ['RANK']}", "a") as notes:
        print(os.getpid(), file=notes)
    return attempt


def starts(folder: Path, rank: int) -> int:
    """Return how often a rank has started."""
    file = folder / f"starts-{rank}"
    return len(file.read_text().splitlines()) if file.exists() else 0


def die(folder: Path, note: str) -> None:
    """Note where, and kill this process."""
    with open(folder / "died", "a") as notes:
        print(note, file=notes)
    os.kill(os.getpid(), signal.SIGKILL)


def train(config: Config) -> None:
    """Train in a worker: `config["resume"]` is "last" or "ray"."""
    folder = Path(config["folder"])
    config = {**config, "attempt": count_attempt(folder)}
    lw.seed_everything(1)
    model = Net(config)
    for attempt, rank, place, _ in config.get("kills", ()):
        if (attempt, rank, place) == (model.attempt, model.rank, "start"):
            while any(starts(folder, other) <= attempt for other in range(int(os.environ["WORLD_SIZE"]))):
                time.sleep(0.1)  # else a rank that has not begun would count one attempt less
            die(folder, f"{attempt} {rank} start 0")
    callbacks: list[lw.Callback] = []
    ckpt_path: str | None = "last"
    if config["resume"] == "last":
        callbacks = [lw.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=config.get("every", 1))]
    else:
        callbacks, ckpt_path = [RayReport(every=config.get("every"))], resume_path()
    loader = DataLoader(Numbers(), batch_size=config.get("batch_size", 2), shuffle=True)
    if config.get("from_ray_data"):
        loader = data_shard("train", batch_size=config["batch_size"], dtypes={"id": torch.int64, "x": torch.float64})
    trainer = lw.Trainer(
        max_epochs=config.get("max_epochs", 2),
        accelerator="cpu",
        global_batch_size=None if config.get("from_ray_data") else GLOBAL_BATCH,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        strategy=lw.FSDPStrategy(state_dict_type="sharded") if config.get("is_sharded") else "auto",
    )
    trainer.fit(model, loader, DataLoader(Numbers(), batch_size=8), ckpt_path=ckpt_path)
    state = trainer.full_state_dict()
    if trainer.is_global_zero:
        torch.save(state, folder / "end.pt")


def rows_of_data() -> list[dict[str, Any]]:
    """Return `Numbers` as rows for Ray Data."""
    return [{"id": int(index), "x": x.numpy()} for index, x in map(Numbers().__getitem__, range(SAMPLES))]


class Trial(lw.Module):
    """A model whose metric is worse with a larger learning rate."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layer = torch.nn.Linear(4, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[1]).pow(2).mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.lr + 1 / (1 + self.trainer.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr / 100)


def run_trial(config: Config) -> None:
    """Train in a trial of Ray Tune."""
    with open(Path(config["folder"]) / "trials", "a") as notes:
        print(os.getpid(), file=notes)
    trainer = lw.Trainer(
        max_epochs=8, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[RayReport()]
    )
    loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH)
    trainer.fit(Trial(config["lr"]), loader, loader, ckpt_path=resume_path())


def steps(folder: Path) -> dict[int, tuple[list[float], list[int]]]:
    """Return, for each step, the loss of each rank and the indices that all ranks read, as last made."""
    rows: dict[int, dict[int, tuple[float, list[int]]]] = {}
    for rank, words in _rows(folder):
        rows.setdefault(int(words[1]), {})[rank] = (float(words[3]), [int(word) for word in words[4:]])
        for other in range(int(words[2]), 8):  # of an attempt with more workers
            rows[int(words[1])].pop(other, None)
    return {
        step: ([ranks[rank][0] for rank in sorted(ranks)], sorted(i for _, ids in ranks.values() for i in ids))
        for step, ranks in sorted(rows.items())
    }


def sizes(folder: Path) -> list[tuple[int, int]]:
    """Return step and number of workers of each step that rank 0 has made."""
    return [(int(words[1]), int(words[2])) for rank, words in _rows(folder) if rank == 0]


def first_step(folder: Path, attempt: int) -> int:
    """Return the first step of an attempt."""
    return min(int(words[1]) for _, words in _rows(folder) if int(words[0]) == attempt)


def _rows(folder: Path) -> Iterator[tuple[int, list[str]]]:
    notes = [(rank, folder / f"steps-{rank}") for rank in range(8)]
    found = [(rank, line.split()) for rank, file in notes if file.exists() for line in file.read_text().splitlines()]
    return iter(sorted(found, key=lambda row: int(row[1][0])))
