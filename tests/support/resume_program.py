"""Small trainings that use random numbers wherever they can, run to be killed and resumed.

`python resume_program.py SCENARIO ROOT [FAULT]` trains one of SCENARIOS in the folder ROOT, goes on with its newest
checkpoint if there is one, and writes ROOT/report.json when it is done. `python resume_program.py --serve` reads such
commands as JSON from its input and runs each in a forked child: torch is imported once. Used by test_resume.py,
test_kill.py and test_interrupt.py.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

import loopwright as lw
from loopwright.callbacks import Checkpoint
from loopwright.checkpoint import storage

Batch = dict[str, Tensor]


# --- data ------------------------------------------------------------------------------------------------------------


def sample(index: int) -> dict[str, Any]:
    """Return one sample, augmented by three generators."""
    base = torch.sin(torch.arange(4, dtype=torch.float32) * (index + 1))
    noise = 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * float(np.random.rand())
    return {"id": index, "x": base + noise, "y": base.sum()}


class Augmented(Dataset[dict[str, Any]]):
    """`count` samples with random augmentation."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(int(index))


class OwnGenerators(Augmented):
    """Draws from generators in its attributes too."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.torch_generator = torch.Generator().manual_seed(5)
        self.numpy_generator = np.random.default_rng(6)
        self.python_generator = random.Random(7)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        shift = float(self.numpy_generator.normal()) + self.python_generator.random()
        item["x"] = item["x"] + 0.1 * torch.randn(4, generator=self.torch_generator) + 0.1 * shift
        return item


class Endless(IterableDataset[dict[str, Any]]):
    """A stream of unknown length that draws which samples come."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.count):
            yield sample(random.randrange(100))


class DrawingSampler(Sampler[int]):
    """Draws each index from the global generator when it is asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            yield int(torch.randint(self.count, (1,)))


def loader(count: int = 38, batch_size: int = 4, *, shuffle: bool = True, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(count), batch_size=batch_size, shuffle=shuffle, **kwargs)


def parts(batch: Any) -> list[Batch]:
    """Return the batches in a collection of batches."""
    if isinstance(batch, dict) and "x" in batch:
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch
    return [part for value in values if value is not None for part in parts(value)]


# --- modules ---------------------------------------------------------------------------------------------------------


class Net(lw.Module):
    """Dropout and batch norm; `configure` makes optimizer and schedules."""

    def __init__(self, configure: Callable[[nn.Module], Any] | None = None) -> None:
        super().__init__()
        self.configure = configure
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))

    def loss(self, batch: Any) -> Tensor:
        errors = [(self.net(part["x"])[:, 0] - part["y"]).square() for part in parts(batch)]
        return torch.cat(errors).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Evaluation draws too: training must not notice.
        self.log("val_loss", self.loss(batch) + 0.01 * random.random() + 0.01 * torch.rand(()))

    def configure_optimizers(self) -> Any:
        if self.configure is None:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return self.configure(self)


class ReducedNet(Net):
    """Logs by every reduction, and metric objects."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanMetric, MeanSquaredError

        self.error = MeanSquaredError()
        self.average = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for name in ("mean", "sum", "min", "max"):
            self.log(f"loss_{name}", loss, on_step=False, on_epoch=True, reduce_fx=name)
        self.log("count", float(batch_idx), on_step=True, on_epoch=True, reduce_fx="sum")
        self.average(loss)
        self.log("average", self.average, on_step=True, on_epoch=True)
        self.error.update(self.net(batch["x"])[:, 0], batch["y"])
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("weighted", lw.Loss(loss * 2, torch.tensor(2.0)), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_epoch_end(self) -> None:
        self.log("closing", torch.rand(()))


class ManualNet(Net):
    """Two optimizers and two schedules, stepped by hand; the second one every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=1.0)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        other = (self.other(batch["x"])[:, 0] - batch["y"]).square().mean()
        self.manual_backward(other / 2)
        if batch_idx % 2:
            second.step()
            second.zero_grad()
            for schedule in self.lr_schedulers():
                schedule.step()
        self.log_dict({"loss": loss.detach(), "other": other.detach()}, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.net.parameters(), lr=0.01)
        second = torch.optim.SGD(self.other.parameters(), lr=0.05, momentum=0.9)
        return [first, second], [StepLR(first, 3, 0.9), StepLR(second, 2, 0.8)]


class SkippingNet(Net):
    """Has no loss for some batches, by chance."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if random.random() < 0.4:
            return None
        return super().training_step(batch, batch_idx)


def one_cycle(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = OneCycleLR(optimizer, 0.02, total_steps=100)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def plateau(module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def joint(module: nn.Module) -> Any:
    parameters = list(module.parameters())
    muon = torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=0.02)
    adamw = torch.optim.AdamW([one for one in parameters if one.ndim != 2], lr=0.01)
    plateaus = ReduceLROnPlateau(muon, factor=0.5, patience=0, threshold=0.2)
    steps = {"scheduler": OneCycleLR(adamw, 0.02, total_steps=100), "interval": "step"}
    return [{"optimizer": muon, "lr_scheduler": plateaus, "monitor": "val_loss"},
            {"optimizer": adamw, "lr_scheduler": steps}]  # fmt: skip


def by_epoch(module: nn.Module) -> Any:
    optimizer = torch.optim.RMSprop(module.parameters(), lr=0.01)
    return [optimizer], [StepLR(optimizer, 1, 0.7)]


def lbfgs(module: nn.Module) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.05, max_iter=3, history_size=3)


# --- callbacks -------------------------------------------------------------------------------------------------------


class Journal(lw.Callback):
    """Keeps which samples were trained on, and how they were augmented, in its state."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.inputs: list[Tensor] = []
        self.epoch_starts: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epoch_starts.append(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for part in parts(batch):
            self.rows.append([trainer.current_epoch, batch_idx, *part["id"].tolist()])
            self.inputs.append(part["x"].double().sum())

    def state_dict(self) -> dict[str, Any]:
        inputs = torch.stack(self.inputs) if self.inputs else torch.empty(0, dtype=torch.float64)
        return {"rows": [list(row) for row in self.rows], "inputs": inputs, "epoch_starts": list(self.epoch_starts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [list(row) for row in state_dict["rows"]]
        self.inputs = list(state_dict["inputs"].unbind())
        self.epoch_starts = list(state_dict["epoch_starts"])


class Saver(Checkpoint):
    """Calls `save(trainer)` after every event that a checkpoint may be taken at; runs last of all."""

    def __init__(self, save: Callable[[lw.Trainer], None]) -> None:
        self.save = save

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.at_step_boundary:
            self.save(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer)


class Thaw(lw.Callback):
    """Trains the last layer first; from epoch 1 on the others too, but for the batch norm."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.net[:4].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch > 0)
        pl_module.net[1].eval()


class FaultAt(lw.Callback):
    """Calls `act` in the batch number `at` of training: before its step, or at its end."""

    def __init__(self, at: int, act: Callable[[], None], *, hook: str = "on_train_batch_end") -> None:
        self.at = at
        setattr(self, hook, self._look)
        self.act = act

    def _look(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        progress = trainer.progress
        if progress.total_batches >= self.at:
            self.act()


# --- scenarios -------------------------------------------------------------------------------------------------------


@dataclass
class Scenario:
    """One training. Functions, so that every run builds everything anew.

    Attributes:
        module: Makes the module.
        train: Makes what is passed as train_dataloaders.
        validation: Makes the validation loaders.
        trainer: Arguments of the Trainer.
        callbacks: Makes further callbacks.
        checkpoint: Arguments of ModelCheckpoint.
    """

    module: Callable[[], lw.Module] = Net
    train: Callable[[], Any] = loader
    validation: Callable[[], Any] = lambda: loader(10, shuffle=False)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[lw.Callback]] = list
    checkpoint: dict[str, Any] = field(default_factory=dict)


def _rich_callbacks() -> list[lw.Callback]:
    return [lw.EMA(decay=0.8), lw.LearningRateMonitor(), lw.Timer("00:01:00:00")]


_BEST = {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{step}-{val_loss:.4f}"}
_RICH: dict[str, Any] = {
    "module": lambda: Net(one_cycle),
    "trainer": {"max_epochs": 3, "accumulate_grad_batches": 3, "val_check_interval": 0.4, "gradient_clip_val": 0.5},
    "callbacks": _rich_callbacks,
    "checkpoint": {**_BEST, "every_n_train_steps": 2},
}


def _combined(mode: str) -> Callable[[], Any]:
    return lambda: lw.CombinedLoader({"a": loader(14, 2), "b": [loader(20, 4)]}, mode=mode)


class StatefulData(lw.DataModule):
    """Counts its loaders, and says so in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return loader(12 + 4 * self.made)

    def val_dataloader(self) -> Any:
        return [loader(6, shuffle=False), loader(5, 2)]

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made = state_dict["made"] - 1  # the loader of the open epoch is asked for again


class MultiNet(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))


SCENARIOS: dict[str, Scenario] = {
    "rich": Scenario(**_RICH),
    "workers": Scenario(**{**_RICH, "train": lambda: loader(30, num_workers=2)}),
    "persistent": Scenario(
        train=lambda: loader(20, num_workers=2, persistent_workers=True),
        validation=lambda: loader(8, num_workers=1, persistent_workers=True),
        trainer={"max_epochs": 3, "val_check_interval": 2},
        checkpoint=_BEST,
    ),
    "plateau": Scenario(
        module=lambda: Net(plateau),
        train=lambda: loader(20),
        trainer={"max_epochs": 20},
        callbacks=lambda: [lw.EarlyStopping("val_loss", patience=2, min_delta=0.2), lw.LearningRateMonitor("epoch")],
        checkpoint=_BEST,
    ),
    "across_epochs": Scenario(
        module=lambda: Net(by_epoch),
        train=lambda: loader(22, generator=torch.Generator().manual_seed(3)),
        trainer={"max_epochs": 4, "val_check_interval": 7, "check_val_every_n_epoch": None},
        callbacks=lambda: [lw.GradientAccumulationScheduler({0: 1, 2: 4}), lw.EMA(0.5, update_every_n_steps=2)],
        checkpoint={"every_n_train_steps": 3, "save_top_k": -1},
    ),
    "reductions": Scenario(
        module=ReducedNet,
        validation=lambda: [loader(6, shuffle=False), loader(7, 2)],
        trainer={"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 5},
        checkpoint={"every_n_train_steps": 2, "save_last": "link"},
    ),
    "half": Scenario(
        module=lambda: Net(one_cycle),
        trainer={"max_epochs": 2, "precision": "16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        callbacks=lambda: [lw.EMA(0.8)],
        checkpoint={"every_n_train_steps": 2, "save_last": True},
    ),
    "manual": Scenario(
        module=ManualNet, trainer={"max_epochs": 2, "val_check_interval": 4}, checkpoint={"every_n_train_steps": 3}
    ),
    "joint": Scenario(
        module=lambda: Net(joint),
        trainer={"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        callbacks=_rich_callbacks,
        checkpoint={"every_n_train_steps": 2},
    ),
    "lbfgs": Scenario(
        module=lambda: Net(lbfgs),
        train=lambda: loader(20),
        trainer={"max_epochs": 2, "accumulate_grad_batches": 2},
        checkpoint={"every_n_train_steps": 2},
    ),
    "skipping": Scenario(
        module=SkippingNet,
        trainer={"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 3},
        checkpoint={"every_n_train_steps": 2, "save_last": True},
    ),
    "cycled": Scenario(
        train=_combined("max_size_cycle"),
        trainer={"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 3},
        checkpoint={"every_n_train_steps": 2},
    ),
    "max_size": Scenario(train=_combined("max_size"), trainer={"max_epochs": 2}, checkpoint=_BEST),
    "min_size": Scenario(train=_combined("min_size"), trainer={"max_epochs": 2}, checkpoint=_BEST),
    "sequential": Scenario(
        train=_combined("sequential"),
        trainer={"max_epochs": 2, "accumulate_grad_batches": 3},
        checkpoint={"every_n_train_steps": 2},
    ),
    "iterable": Scenario(
        train=lambda: DataLoader(Endless(30), batch_size=4),
        trainer={"max_epochs": 3, "accumulate_grad_batches": 3, "val_check_interval": 4},
        checkpoint={"every_n_train_steps": 2, "save_last": True},
    ),
    "iterable_workers": Scenario(
        train=lambda: DataLoader(Endless(20), batch_size=4, num_workers=2),
        trainer={"max_epochs": 2, "val_check_interval": 3, "limit_train_batches": 7},
        checkpoint={"every_n_train_steps": 2},
    ),
    "weighted": Scenario(
        train=lambda: DataLoader(
            OwnGenerators(20),
            batch_size=3,
            drop_last=True,
            sampler=WeightedRandomSampler([i + 1.0 for i in range(20)], 26),
        ),
        trainer={"max_epochs": 2, "accumulate_grad_batches": 3},
        checkpoint={"every_n_train_steps": 1},
    ),
    "drawing_sampler": Scenario(
        train=lambda: DataLoader(Augmented(22), batch_size=3, sampler=DrawingSampler(22)),
        trainer={"max_epochs": 2, "accumulate_grad_batches": 2, "limit_train_batches": 0.8},
        checkpoint={"every_n_train_steps": 1},
    ),
    "reloaded": Scenario(
        module=MultiNet,
        train=StatefulData,
        validation=lambda: None,
        trainer={"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
        checkpoint={"every_n_train_steps": 2},
    ),
    "finetuned": Scenario(
        train=lambda: loader(20),
        trainer={"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 2},
        callbacks=lambda: [Thaw()],
        checkpoint={"every_n_train_steps": 2},
    ),
    "overfit": Scenario(
        train=lambda: loader(shuffle=False),
        trainer={"max_epochs": 3, "overfit_batches": 4, "accumulate_grad_batches": 3}, checkpoint={"save_last": True}
    ),
    "steps": Scenario(
        trainer={"max_steps": 17, "accumulate_grad_batches": 2, "val_check_interval": 0.5, "log_every_n_steps": 3},
        checkpoint={"every_n_train_steps": 4, "save_last": True, "save_top_k": 1},
    ),
    "val_every_second_epoch": Scenario(
        module=lambda: Net(plateau),
        train=lambda: loader(16),
        trainer={"max_epochs": 5, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
        checkpoint={"every_n_epochs": 1, "save_last": True},
    ),
}  # fmt: skip


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Made:
    """Everything of one run, made anew."""

    trainer: lw.Trainer
    module: lw.Module
    train: Any
    validation: Any
    journal: Journal

    def fit(self, ckpt_path: str | Path | None) -> None:
        self.trainer.fit(self.module, self.train, self.validation, ckpt_path=ckpt_path)


def make(
    name: str,
    root: str | Path,
    extra: list[lw.Callback] | None = None,
    *,
    saves_on_exception: bool = False,
    **kwargs: Any,
) -> Made:
    """Build a scenario; `extra` callbacks go first, except checkpoint callbacks, which go last."""
    scenario = SCENARIOS[name]
    root = str(root)
    os.makedirs(root, exist_ok=True)
    lw.seed_everything(3, verbose=False)
    journal = Journal()
    firsts = [callback for callback in extra or [] if not isinstance(callback, Checkpoint)]
    lasts = [callback for callback in extra or [] if isinstance(callback, Checkpoint)]
    checkpoint = {
        "dirpath": f"{root}/checkpoints",
        "save_on_exception": saves_on_exception,
        **scenario.checkpoint,
    }
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": [lw.CSVLogger(root, name="csv"), lw.TensorBoardLogger(root, name="tb")],
        "callbacks": [*firsts, journal, *scenario.callbacks(), lw.ModelCheckpoint(**checkpoint), *lasts],
        "log_every_n_steps": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        **scenario.trainer,
        **kwargs,
    }
    return Made(lw.Trainer(**arguments), scenario.module(), scenario.train(), scenario.validation(), journal)


def digest(value: Any) -> str:
    """Return a hash of nested plain values and tensors, bit for bit."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()[:16]


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            sha.update(repr(key).encode())
            _feed(sha, value[key])
        sha.update(b"}")
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(sha, item)
        sha.update(b"]")
    else:
        sha.update(repr(value).encode())


def report(made: Made, root: str | Path) -> dict[str, Any]:
    """Return all that a resumed run must have in common with an uninterrupted one."""
    trainer, root = made.trainer, str(root)
    folder = f"{root}/checkpoints"
    return {
        "weights": digest(made.module.state_dict()),
        "optimizers": [digest(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "schedules": [digest(_without(config.scheduler.state_dict())) for config in trainer.lr_scheduler_configs],
        "scaler": trainer.scaler.state_dict() if trainer.scaler is not None else None,
        "callbacks": {
            callback.state_key: digest(callback.state_dict())
            for callback in trainer.callbacks
            if callback.state_dict() and not isinstance(callback, lw.Timer | Journal)
        },
        "journal": {
            "rows": made.journal.rows,
            "inputs": digest(made.journal.inputs),
            "starts": made.journal.epoch_starts,
        },
        "progress": {name: value for name, value in trainer.progress.state_dict().items() if name != "validated_s"},
        "metrics": digest(trainer.callback_metrics),
        "draws": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        "csv": Path(newest_version(f"{root}/csv"), "metrics.csv").read_text(),
        "files": {name: _content(f"{folder}/{name}") for name in sorted(os.listdir(folder))},
    }  # fmt: skip


def _without(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not callable(value)}


def _content(path: str) -> str:
    """Return a hash of a checkpoint, without what depends on the clock, or on earlier fits of the process."""
    checkpoint = torch.load(path, weights_only=True)
    own = checkpoint["loopwright"]
    own["progress"].pop("validated_s")
    own.get("program", {}).pop("fit", None)
    own["loggers"] = {key: state.get("rows", state["step"]) for key, state in own.get("loggers", {}).items()}
    checkpoint["callbacks"] = {
        key: state for key, state in checkpoint.get("callbacks", {}).items() if not key.startswith("Timer")
    }
    return digest(checkpoint)


def newest_version(folder: str) -> str:
    """Return a logger's newest folder: a run that was killed before its first checkpoint has left an older one."""
    return f"{folder}/version_{max(int(name.removeprefix('version_')) for name in os.listdir(folder))}"


def points(root: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Return TensorBoard's points by tag, as TensorBoard would show them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(newest_version(f"{root}/tb"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


# --- faults ----------------------------------------------------------------------------------------------------------


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full_at(number: int) -> None:
    """Let the N-th save from now on find no room."""
    left = [number]

    def reached(stage: str) -> None:
        left[0] -= stage == "opened"
        if left[0] == 0 and stage == "opened":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage.reached = reached


def _plan(fault: str) -> tuple[list[lw.Callback], Callable[[], None]]:
    """Return the callbacks that a fault needs, and what to call right before fit.

    A fault is "batch:N" (killed at the end of batch N of training), "stage:NAME:N" (the N-th time that a save reaches
    a stage), "call:N" (at the N-th call of any function), "SIGINT:N" and "SIGTERM:N" (that signal instead of a kill),
    "full:N" (the N-th save finds the disk full), or "count" (none; says how many calls there are).
    """
    kind, _, rest = fault.partition(":")
    if kind == "batch":
        return [FaultAt(int(rest), die)], lambda: None
    if kind == "full":
        disk_full_at(int(rest))
        return [], lambda: None
    if kind == "stage":
        stage, _, number = rest.partition(":")
        left = [int(number)]

        def reached(name: str) -> None:
            left[0] -= name == stage
            if name == stage and left[0] == 0:
                die()

        storage.reached = reached
        return [], lambda: None
    limit = int(rest) if rest else 1 << 60
    number = getattr(signal, kind, signal.SIGKILL)
    COUNT[0] = 0
    process = os.getpid()

    def count(frame: Any, event: str, argument: Any) -> None:
        COUNT[0] += 1
        if COUNT[0] == limit and os.getpid() == process:  # not in a worker of the loader
            os.kill(process, number)

    return [], lambda: sys.setprofile(count)


COUNT = [0]


def run(name: str, root: str, fault: str = "") -> None:
    """Train a scenario to its end, or to its fault; write the report."""
    extra, begin = _plan(fault) if fault else ([], lambda: None)
    made = make(name, root, extra, saves_on_exception="SIG" in fault)
    begin()
    made.fit("last")
    sys.setprofile(None)
    text = json.dumps({**report(made, root), "calls": COUNT[0]})
    Path(root, "report.json").write_text(text)


def serve() -> None:
    """Run each command of the input in a child; answer with its exit status, negative for a signal."""
    torch.set_num_threads(1)
    _warm_up()
    for line in sys.stdin:
        arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            _run_in_child(arguments)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def result(root: Path) -> dict[str, Any]:
    """Return the report of a run that is done, TensorBoard's points, and which unfinished files are left."""
    found = json.loads((root / "report.json").read_text())
    found["points"] = {tag: [list(point) for point in of_tag] for tag, of_tag in points(root).items()}
    found["left"] = sorted(path.name for path in (root / "checkpoints").iterdir() if ".tmp" in path.name)
    return dict(found)


class Server:
    """Runs resume_program.py in forked children, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, root: Path, fault: str = "") -> int:
        """Return the exit status; negative for a signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, str(root), fault]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate("")


def _warm_up() -> None:
    """Import what a training imports late; without threads, since the process will be forked."""
    for name in ("torch.utils.tensorboard", "torchmetrics"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as root:
        arguments = {"logger": False, "max_epochs": 1, "max_steps": 2, "enable_checkpointing": False}
        for scenario in ("rich", "reductions", "half"):
            make(scenario, root, **arguments, callbacks=[]).fit(None)


def _run_in_child(arguments: list[str]) -> None:
    try:
        with open(f"{arguments[1]}.log", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            run(*arguments)
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else error.code if isinstance(error, SystemExit) else 1
        os._exit(int(code or 0))
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "--serve":
        serve()
    else:
        run(*sys.argv[1:])
