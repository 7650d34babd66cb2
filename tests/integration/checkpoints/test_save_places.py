"""A checkpoint that a callback or the module takes in its own hook is exact on two ranks, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from integration.trainer.test_trainer import Net, data
from ranks import run_ranks
from torch.utils.data import DataLoader

import loopwright as lw

PLACES = (
    ("first", "on_train_batch_end", 2), ("module", "on_train_batch_end", 3), ("first", "on_train_epoch_start", 1),
    ("first", "on_validation_epoch_end", 0), ("second", "on_validation_end", 0), ("first", "on_train_epoch_end", 0),
)  # fmt: skip


class Told(lw.Callback):
    """Keeps what it hears, with a random number, and saves where it is asked to."""

    def __init__(self, name: str, folder: str | None) -> None:
        self.name, self.folder = name, folder
        self.trace: list[list[Any]] = []
        self.times: dict[str, int] = {}
        for event in {event for _, event, _ in PLACES}:
            setattr(self, event, lambda trainer, module, *_, event=event: self.hear(trainer, module, event))

    @property
    def state_key(self) -> str:
        return self.name

    def hear(self, trainer: Any, module: Any, event: str) -> None:
        if trainer.sanity_checking:
            return
        self.trace.append([event, trainer.current_epoch, trainer.global_step])
        if event == "on_train_batch_end":
            module.log(f"{self.name}_count", float(len(self.trace)), on_epoch=True)
        save(self, trainer, self.name, event)

    def state_dict(self) -> dict[str, Any]:
        return {"trace": [list(entry) for entry in self.trace]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.trace = [list(entry) for entry in state_dict["trace"]]


def save(owner: Any, trainer: Any, who: str, event: str) -> None:
    """Save at this place, if it is one of PLACES."""
    number = owner.times.get(event, 0)
    owner.times[event] = number + 1
    if owner.folder is not None and (who, event, number) in PLACES:
        trainer.save_checkpoint(f"{owner.folder}/{who}-{event}.ckpt")


class Model(Net):
    """Hears the end of its batches itself."""

    def __init__(self, folder: str | None) -> None:
        super().__init__(dropout=0.1)
        self.folder = folder
        self.times: dict[str, int] = {}
        self.ends: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(float(outputs["loss"]))
        save(self, self.trainer, "module", "on_train_batch_end")


def run(root: str, folder: str | None, ckpt_path: str | None = None) -> dict[str, Any]:
    """Train two epochs on both ranks; return what has to be equal."""
    lw.seed_everything(3, verbose=False)
    module = Model(folder)
    callbacks = [Told("first", folder), Told("second", folder)]
    trainer = lw.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, log_every_n_steps=1, precision="64-true",
        logger=lw.CSVLogger(root, "csv", version=0), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, default_root_dir=root,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(), 4, shuffle=True), DataLoader(data(8), 4), ckpt_path=ckpt_path)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "traces": [callback.trace for callback in callbacks],
        "ends": module.ends[-1:],
        # Rank 0 writes them; the other may be here before it is done, or when it has begun the next run.
        "rows": Path(root, "csv/version_0/metrics.csv").read_text() if trainer.is_global_zero else "",
        "steps": trainer.global_step,
    }


def saved_and_resumed(rank: int, size: int, root: str, folder: str) -> list[str]:
    expected = run(root, None)
    again = run(f"{root}-saving", folder)
    problems = [] if same(again, expected) else ["the run that saves"]
    for who, event, _ in PLACES:
        found = run(f"{root}-saving", None, f"{folder}/{who}-{event}.ckpt")
        if not same(found, expected):
            names = [name for name in found if name != "weights" and found[name] != expected[name]]
            problems.append(f"{who} {event}: {names}")
    return problems


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether weights are equal bit for bit, and all else."""
    weights = all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    return weights and all(one[name] == other[name] for name in one if name != "weights")


def test_saves_in_hooks_are_exact_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for problems in run_ranks(saved_and_resumed, 2, str(tmp_path / "run"), str(tmp_path / "files"), connect=False):
        assert problems == []
