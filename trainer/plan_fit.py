"""`plan_fit`: the plan of a fit that is not run."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.combined import CombinedLoader
from ..data.limit import find_length
from ..data.module import DataModule
from ..data.tree import is_collection
from ..errors import DataError
from ..planning.planner import choices, plan_choices
from ..planning.simulation import Training

if TYPE_CHECKING:
    from ..planning.table import Plan
    from .view import TrainerView


# Any in this file: loaders and batches.


def plan_fit(
    trainer: TrainerView, module: nn.Module, data: Any, *, devices: int, num_nodes: int, **options: Any
) -> Plan:
    """Return what a fit of the Trainer would need with each strategy; see `Trainer.plan`."""
    training, _ = training_of(trainer, module, data)
    return plan_choices(training, choices(devices, num_nodes), devices=devices * num_nodes, **options)


def training_of(trainer: TrainerView, module: nn.Module, data: Any) -> tuple[Training, int | None]:
    """Return what a fit of the Trainer trains, and its batches of an epoch in one process; None if unknown."""
    if data is None:
        module = _without_values(module)  # its own hooks are called, and the module is not changed
    batch, num_batches = _first_batch(module, data)
    seen = _SeenTrainer(trainer, num_batches)

    def build() -> nn.Module:
        copied = _without_values(module)
        if hasattr(copied, "_lw_trainer"):
            copied.__dict__["_lw_trainer"] = seen
        configure = getattr(copied, "configure_model", None)
        if callable(configure):
            configure()
        return copied

    training = Training(
        build, batch, trainer.fabric.strategy.precision.precision, accumulate=trainer.accumulate_grad_batches
    )
    return training, num_batches


class _SeenTrainer:
    """The Trainer as a module sees it in a plan: its fit has a number of steps before it begins.

    Args:
        trainer: Everything else is its own.
        num_batches: Of an epoch in one process; None if unknown.
    """

    def __init__(self, trainer: TrainerView, num_batches: int | None) -> None:
        self._trainer, self._num_batches = trainer, num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The steps of a fit in one process: schedules are built with it, whose length takes no memory."""
        loop, by_epochs = self._trainer.fit_loop, math.inf
        if self._num_batches is not None and loop.epoch_limit != -1:
            by_epochs = -(-self._num_batches // self._trainer.accumulate_grad_batches) * loop.epoch_limit
        return min(by_epochs, loop.max_steps if loop.max_steps != -1 else math.inf)


def _first_batch(module: nn.Module, data: Any) -> tuple[Any, int | None]:
    """Return the first training batch, on the host, and the number of batches; None if the loader does not know it."""
    loader = data
    source = data if isinstance(data, DataModule) else module if data is None else None
    if source is not None:
        for name, arguments in (("prepare_data", ()), ("setup", ("fit",))):
            getattr(source, name, lambda *_: None)(*arguments)
        loader = getattr(source, "train_dataloader", lambda: None)()
    if is_collection(loader):  # as fit reads them
        loader = CombinedLoader(loader, "max_size_cycle")
    for batch in loader if loader is not None else ():
        return batch[0] if isinstance(loader, CombinedLoader) else batch, find_length(loader)
    raise DataError(
        f"Expected a training batch to plan with, got none from {type(data if data is not None else module).__name__}.",
        fix="pass a loader, or a data module whose train_dataloader returns batches.",
    )


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(module, memo)
