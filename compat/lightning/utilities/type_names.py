"""Names that Lightning gives to types. Programs annotate with them; nothing here checks one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, Union, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

__all__ = [
    "CollectibleGroup",
    "DistributedDataParallel",
    "LRSchedulerConfigType",
    "Optimizable",
    "OptimizerConfig",
    "OptimizerLRSchedulerConfig",
    "ReduceOp",
    "Steppable",
]

# Any: these are the types' own contents, which are the program's.
STEP_OUTPUT = Union[Tensor, Mapping[str, Any], None]  # noqa: UP007  # programs write STEP_OUTPUT | None, too
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any
CollectibleGroup = ProcessGroup
RedOpType = ReduceOp
ReduceLROnPlateau = TorchReduceLROnPlateau
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerPLType = LRSchedulerTypeUnion
OptimizerLRScheduler = Any
_PATH = Union[str, Path]  # noqa: UP007
_DEVICE = Union[torch.device, str, int]  # noqa: UP007
_MAP_LOCATION_TYPE = Any
_METRIC = Any
_NUMBER = Union[int, float]  # noqa: UP007
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = Any
_PARAMETERS = Any


class LRSchedulerConfigType(TypedDict, total=False):
    """A schedule as `configure_optimizers` may return it."""

    scheduler: Any
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """An optimizer in a dictionary."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """An optimizer and its schedule in a dictionary."""

    optimizer: Optimizer
    lr_scheduler: Any
    monitor: NotRequired[str]


@runtime_checkable
class Steppable(Protocol):
    """What has a `step`, as optimizers do."""

    def step(self, closure: Any = None) -> Any:
        """Take a step."""


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """What an optimizer has."""

    param_groups: Sequence[Any]
    defaults: dict[Any, Any]
    state: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put the state back."""
