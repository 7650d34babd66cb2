"""Names that Lightning gives to types. Programs annotate with them; nothing here checks one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, Union, runtime_checkable

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

from ....protocols import AnyLoaders, Closure, StateDict

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
TRAIN_DATALOADERS = AnyLoaders
EVAL_DATALOADERS = AnyLoaders
CollectibleGroup = ProcessGroup
RedOpType = ReduceOp
ReduceLROnPlateau = TorchReduceLROnPlateau
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerPLType = LRSchedulerTypeUnion
_PATH = Union[str, Path]  # noqa: UP007
_DEVICE = Union[torch.device, str, int]  # noqa: UP007
_MAP_LOCATION_TYPE = Union[  # noqa: UP007
    torch.device, str, int, Callable[[UntypedStorage, str], UntypedStorage | None], dict[_DEVICE, _DEVICE], None
]
_METRIC = Any  # torchmetrics' Metric, which need not be installed, a tensor or a number
_NUMBER = Union[int, float]  # noqa: UP007
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = Union[list[Any], list[list[Any]]]  # noqa: UP007
_PARAMETERS = Iterator[nn.Parameter]


class LRSchedulerConfigType(TypedDict, total=False):
    """A schedule as `configure_optimizers` may return it."""

    scheduler: LRSchedulerTypeUnion
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
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: NotRequired[str]


OptimizerLRScheduler = Union[  # noqa: UP007
    Optimizer,
    Sequence[Optimizer],
    tuple[Sequence[Optimizer], Sequence[LRSchedulerTypeUnion | LRSchedulerConfigType]],
    OptimizerConfig,
    OptimizerLRSchedulerConfig,
    Sequence[OptimizerConfig],
    Sequence[OptimizerLRSchedulerConfig],
    None,
]


@runtime_checkable
class Steppable(Protocol):
    """What has a `step`, as optimizers do."""

    def step(self, closure: Closure | None = None) -> object:
        """Take a step."""


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """What an optimizer has."""

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """Parameters, and their options."""

    @property
    def defaults(self) -> Mapping[str, object]:
        """Options of groups that do not set them."""

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """State by parameter."""

    def state_dict(self) -> StateDict:
        """Return the state."""

    def load_state_dict(self, state_dict: StateDict, /) -> None:
        """Restore the state."""
