"""`plan_fit`: the plan of a fit that is not run."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.limit import find_length
from ..data.module import DataModule
from ..errors import DataError
from ..planning.planner import choices, plan_choices
from ..planning.simulation import Training

if TYPE_CHECKING:
    from ..planning.table import Plan
    from .view import TrainerView

__all__ = ["plan_fit", "training_of"]

# Any in this file: loaders and batches.


def plan_fit(
    trainer: TrainerView, module: nn.Module, data: Any, *, devices: int, num_nodes: int, **options: Any
) -> Plan:
    """Return what a fit of the Trainer would need with each strategy; see `Trainer.plan`."""
    training, _ = training_of(trainer, module, data)
    return plan_choices(training, choices(devices, num_nodes), devices=devices * num_nodes, **options)


def training_of(trainer: TrainerView, module: nn.Module, data: Any) -> tuple[Training, int | None]:
    """Return what a fit of the Trainer trains, and its batches of an epoch in one process; None if unknown."""
    batch, num_batches = _first_batch(module, data)

    def build() -> nn.Module:
        copied = _without_values(module)
        if hasattr(copied, "_lw_trainer"):
            copied.__dict__["_lw_trainer"] = trainer
        configure = getattr(copied, "configure_model", None)
        if callable(configure):
            configure()
        return copied

    training = Training(
        build, batch, trainer.fabric.strategy.precision.precision, accumulate=trainer.accumulate_grad_batches
    )
    return training, num_batches


def _first_batch(module: nn.Module, data: Any) -> tuple[Any, int | None]:
    """Return the first training batch, on the host, and the number of batches; None if the loader does not know it."""
    loader = data
    source = data if isinstance(data, DataModule) else module if data is None else None
    if source is not None:
        if isinstance(source, DataModule):
            source.prepare_data()
            source.setup("fit")
        loader = getattr(source, "train_dataloader", lambda: None)()
    for batch in loader if loader is not None else ():
        return batch, find_length(loader)
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
