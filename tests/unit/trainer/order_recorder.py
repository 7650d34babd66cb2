"""Listeners that override every hook of the lifecycle's table and note each call; used by the order tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.trainer.lifecycle import EVENTS, hook_names

from .order_model import Call, Plan, samples_of

FEATURES = 2

# Which arguments of a hook are noted, by their position.
DETAILS: dict[str, Callable[..., tuple[object, ...]]] = {
    "setup": lambda stage: (stage,),
    "teardown": lambda stage: (stage,),
    "on_before_batch_transfer": lambda batch, loader: (loader,),
    "transfer_batch_to_device": lambda batch, device, loader: (loader,),
    "on_after_batch_transfer": lambda batch, loader: (loader,),
    "on_train_batch_start": lambda batch, index: (index,),
    "on_train_batch_end": lambda outputs, batch, index: (index,),
    "training_step": lambda batch, index: (index,),
    "optimizer_zero_grad": lambda epoch, index, optimizer: (epoch, index),
    "optimizer_step": lambda epoch, index, optimizer, closure=None: (epoch, index),
    "lr_scheduler_step": lambda scheduler, metric: (getattr(scheduler, "number", None),),
}
for _stage in ("validation", "test", "predict"):
    DETAILS[f"on_{_stage}_batch_start"] = lambda batch, index, loader=0: (index, loader)
    DETAILS[f"on_{_stage}_batch_end"] = lambda outputs, batch, index, loader=0: (index, loader)
    DETAILS[f"{_stage}_step"] = lambda batch, index, loader=0: (index, loader)


class Journal:
    """What was called, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.counts: dict[str, int] = {}
        self.trainer: Any = None

    def note(self, who: str, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Note a call and return its number: 0 for the first call of this hook on this listener."""
        detail = DETAILS[hook](*args, **kwargs) if hook in DETAILS else ()
        trainer = self.trainer
        step, epoch = (trainer.global_step, trainer.current_epoch) if trainer is not None else (0, 0)
        self.calls.append(Call(who, hook, detail, step, epoch))
        name = f"{who}.{hook}"
        number = self.counts[name] = self.counts.get(name, -1) + 1
        return number

    def names(self) -> list[str]:
        """Return `who.hook` of each call."""
        return [f"{call.who}.{call.hook}" for call in self.calls]


# --- callbacks ------------------------------------------------------------------------------------------------------


class _Recording(lw.Callback):
    """A callback that is called `who` in the journal; `_after` is what it does in a hook, by name and call number."""

    def __init__(self, who: str, journal: Journal) -> None:
        self._who, self._journal = who, journal
        self._after: dict[tuple[str, int], Callable[[Any], None]] = {}

    @property
    def state_key(self) -> str:
        return self._who

    def state_dict(self) -> dict[str, Any]:
        self._journal.note(self._who, "state_dict", (), {})
        return {"name": self._who}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._journal.note(self._who, "load_state_dict", (), {})
        assert state_dict == {"name": self._who}


def _callback_hook(name: str) -> Callable[..., None]:
    def hook(self: _Recording, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        number = self._journal.note(self._who, name, args, kwargs)
        action = self._after.get((name, number))
        if action is not None:
            action(trainer)

    hook.__name__ = name
    return hook


_CALLBACK_HOOKS = {
    name: _callback_hook(name) for name in hook_names("callbacks") if name not in ("state_dict", "load_state_dict")
}
Recorder = type("Recorder", (_Recording,), _CALLBACK_HOOKS)
LateRecorder = type("LateRecorder", (Recorder,), {"runs_last": True})


def make_callbacks(journal: Journal) -> list[lw.Callback]:
    """Return the three callbacks of the model: two that come before the module, and one that runs last."""
    # The late one is given first: its place is not that in the list.
    return [LateRecorder("late", journal), Recorder("first", journal), Recorder("second", journal)]


# --- the module -----------------------------------------------------------------------------------------------------


class Counting:
    """A schedule that counts its steps; no torch schedule, so `lr_scheduler_step` steps it."""

    def __init__(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        self.number, self.optimizer, self.steps = number, optimizer, 0

    def step(self, metric: Any = None) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class _Training(lw.Module):
    def __init__(self, plan: Plan, journal: Journal) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1)
        self.plan, self.journal = plan, journal
        self.automatic_optimization = not plan.is_manual
        self.schedules: list[Counting] = []
        self.error: tuple[str, int] | None = None

    def note(self, hook: str, *args: Any, **kwargs: Any) -> int:
        number = self.journal.note("module", hook, args, kwargs)
        if self.error == (hook, number):
            raise ZeroDivisionError(hook)
        return number

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        number = self.note("training_step", batch, batch_idx)
        assert len(batch) == samples_of(batch_idx)
        if number in self.plan.without_loss:
            return None
        loss = self.layer(batch).square().mean()
        if self.plan.is_manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        number = self.note("on_train_batch_start", batch, batch_idx)
        return -1 if number in self.plan.leaves_epoch else None

    def configure_optimizers(self) -> Any:
        self.note("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.schedules = [Counting(number, optimizer) for number in range(len(self.plan.schedules))]
        configs = [
            {"scheduler": counting, "interval": schedule.interval, "frequency": schedule.frequency}
            for counting, schedule in zip(self.schedules, self.plan.schedules, strict=True)
        ]
        return [optimizer], configs

    def configure_callbacks(self) -> list[lw.Callback]:
        self.note("configure_callbacks")
        return []

    def configure_model(self) -> None:
        self.note("configure_model")

    def train_dataloader(self) -> Any:
        self.note("train_dataloader")
        return training_batches(self.plan)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.note("predict_step", batch, batch_idx, dataloader_idx)
        return batch


# Every hook that the class above does not define: noted, then the default.
def _module_hook(name: str) -> Callable[..., Any]:
    default = getattr(lw.Module, name)

    def hook(self: _Training, *args: Any, **kwargs: Any) -> Any:
        self.note(name, *args, **kwargs)
        return default(self, *args, **kwargs)

    hook.__name__ = name
    return hook


def _eval_step(name: str) -> Callable[..., None]:
    def step(self: _Training, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(name, batch, batch_idx, dataloader_idx)

    return step


def _eval_loaders(name: str) -> Callable[..., Any]:
    def loaders(self: _Training) -> Any:
        self.note(name)
        return evaluation_batches(self.plan)

    return loaders


_OPTIONAL = ("validation_step", "val_dataloader", "test_step", "test_dataloader", "predict_dataloader")
_MODULE_HOOKS = {
    name: _module_hook(name) for name in hook_names("module") if name not in vars(_Training) and name not in _OPTIONAL
}
RecordingModule = type("RecordingModule", (_Training,), _MODULE_HOOKS)
EvaluatingModule = type(
    "EvaluatingModule",
    (RecordingModule,),
    {name: (_eval_step if name.endswith("_step") else _eval_loaders)(name) for name in _OPTIONAL},
)


# --- the data module ------------------------------------------------------------------------------------------------


class _Data(lw.DataModule):
    def __init__(self, plan: Plan, journal: Journal) -> None:
        super().__init__()
        self._plan, self._journal = plan, journal

    def train_dataloader(self) -> Any:
        self._journal.note("data", "train_dataloader", (), {})
        return training_batches(self._plan)

    def state_dict(self) -> dict[str, Any]:
        self._journal.note("data", "state_dict", (), {})
        return {"some": 1}


def _data_hook(name: str) -> Callable[..., Any]:
    default = getattr(lw.DataModule, name)

    def hook(self: _Data, *args: Any, **kwargs: Any) -> Any:
        self._journal.note("data", name, args, kwargs)
        if name.endswith("_dataloader"):
            return evaluation_batches(self._plan)
        return default(self, *args, **kwargs)

    return hook


RecordingData = type(
    "RecordingData", (_Data,), {name: _data_hook(name) for name in hook_names("datamodule") if name not in vars(_Data)}
)


# --- data -----------------------------------------------------------------------------------------------------------


class Unsized:
    """Batches of which nobody knows how many there are."""

    def __init__(self, items: list[Tensor]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._items)


class Sized(Unsized):
    """Batches with a length."""

    def __len__(self) -> int:
        return len(self._items)


def training_batches(plan: Plan) -> Unsized:
    """Return the training loader."""
    items = [torch.ones(samples_of(index), FEATURES) for index in range(plan.batches)]
    return (Sized if plan.is_sized else Unsized)(items)


def evaluation_batches(plan: Plan) -> Any:
    """Return the loaders of validation, test and prediction."""
    loaders = [DataLoader(torch.ones(length, FEATURES)) for length in plan.validation]
    return loaders[0] if len(loaders) == 1 else loaders


# --- fit ------------------------------------------------------------------------------------------------------------

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
ARGUMENTS = (
    "limit_train_batches", "limit_val_batches", "accumulate_grad_batches", "max_epochs", "max_steps", "min_epochs",
    "min_steps", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps",
)  # fmt: skip


def make_trainer(plan: Plan, journal: Journal, **more: Any) -> lw.Trainer:
    """Return a trainer with the plan's arguments and the three recording callbacks."""
    callbacks = make_callbacks(journal)
    arguments = {name: getattr(plan, name) for name in ARGUMENTS}
    trainer = lw.Trainer(callbacks=callbacks, **{**QUIET, **arguments, **more})
    journal.trainer = trainer
    for hook, number in plan.stops:
        do(trainer, "first", hook, number, _stop)
    return trainer


def do(trainer: Any, who: str, hook: str, number: int, action: Callable[[Any], None]) -> None:
    """Let a recording callback do something with the trainer in one of its calls (from 0)."""
    next(callback for callback in trainer.callbacks if callback._who == who)._after[hook, number] = action


def make_module(plan: Plan, journal: Journal) -> Any:
    """Return a module that records everything; it validates where the plan does."""
    return (EvaluatingModule if plan.validation else RecordingModule)(plan, journal)


def _stop(trainer: Any) -> None:
    trainer.should_stop = True


def is_complete() -> bool:
    """Whether every hook of the table is recorded by somebody who may define it."""
    return all(
        name in dir(kind) and getattr(kind, name) is not getattr(base, name, None)
        for event in EVENTS
        for listener, kind, base in (
            ("callbacks", Recorder, lw.Callback),
            ("module", EvaluatingModule, lw.Module),
            ("datamodule", RecordingData, lw.DataModule),
        )
        for name in [event.name]
        if listener in event.listeners
    )
