"""Protocols shared by all parts of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import torch

T = TypeVar("T")

Batch: TypeAlias = object  # what a loader yields: a tensor, a tuple, a mapping, or an object of a class of the user's
StepOutput: TypeAlias = object  # what a step returns: a loss, a mapping that holds one, predictions, or None
Tree: TypeAlias = object  # tensors and plain values, nested in dicts, lists, tuples and sets
Indices: TypeAlias = object  # what a sampler yields: the index of a sample, or those of a batch
Loaders: TypeAlias = object  # one loader, or loaders nested in lists, tuples and dicts
StorageOptions: TypeAlias = Mapping[str, object]  # arguments of an fsspec file system: credentials, endpoints
TrustedClasses: TypeAlias = Iterable[type[object] | ModuleType]  # a module is trusted with all of its classes
Devices: TypeAlias = int | str | Sequence[int]
"""Devices of this node: their number, "auto", -1 for all, or indices as a list or text."""
ReduceOp: TypeAlias = "str | torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType"
"""How tensors are reduced: "mean" ("avg"), "sum", "min", "max", "product", or torch's own."""
MapLocation: TypeAlias = (
    "Callable[[torch.types.Storage, str], torch.types.Storage] | torch.device | str | dict[str, str] | None"
)
"""Where torch.load puts tensors: a device, its name, names by name, or a function of a storage and its device."""

# Any, because users declare these: an override of a hook or step may name the class of its batch, and whoever calls
# super() gets what it passes on. torch's `state_dict` says dict[str, Any].
AnyBatch: TypeAlias = Any
AnyOutput: TypeAlias = Any
AnyLoaders: TypeAlias = Any
AnySampler: TypeAlias = Any  # a sampler, or a batch sampler: any iterable of indices
AnyDataset: TypeAlias = Any  # whatever a DataLoader accepts, and what a user's class derives from that
AnyFunction: TypeAlias = Callable[..., Any]  # of torch's or the user's, with any arguments
Args: TypeAlias = tuple[Any, ...]  # positional arguments of a function of the user's or torch's
Kwargs: TypeAlias = dict[str, Any]  # its keyword arguments
Call: TypeAlias = tuple[Args, Kwargs]
Advance: TypeAlias = Callable[[int], object]  # called with numbers of bytes, as they are done
StepFunction: TypeAlias = Callable[..., Any]
StateDict: TypeAlias = dict[str, Any]  # tensors, numbers, strings, and containers of these
ParamGroup: TypeAlias = dict[str, Any]  # of an optimizer: its parameters and their options
Owner: TypeAlias = object  # a listener or holder of settings: a module, a data module or a callback of the user's
Closure: TypeAlias = Callable[[], object]  # evaluates the model for an optimizer, and returns the loss
Options: TypeAlias = dict[str, Any]  # arguments by name, of a function or class that the user or a setting chooses


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded as tensors and plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, strings, and containers of these."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Load a state returned by `state_dict`."""
        ...


@runtime_checkable
class WritesHyperparameters(Protocol):
    """A module or data module that writes its hyperparameters into a checkpoint by its own rules."""

    def checkpoint_hyperparameters(self, prefix: str) -> dict[str, Any]:
        """Return the entries of a checkpoint.

        Args:
            prefix: How keys begin: "" for a module, "datamodule_" for a data module.
        """
        ...


@runtime_checkable
class Loader(Protocol):
    """A source of batches that can be iterated repeatedly."""

    def __iter__(self) -> Iterator[Any]:
        """Start a new pass over the data."""
        ...


class StatefulLoader(Stateful, Loader, Protocol):
    """A loader that saves and loads its position."""


class Gather(Protocol):
    """A function that returns the objects of all ranks in rank order, on every rank."""

    def __call__(self, obj: T, /) -> list[T]:
        """Return this rank's object among those of the others."""
        ...


class TensorInFile(Protocol):
    """A tensor in a file; slices of it can be read."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor's elements."""
        ...

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the slice at `offsets` of these sizes, by default all of it, on the CPU with separate memory."""
        ...

    def view_slice(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
        """Return the slice in the memory that its file is mapped to; None if that is not possible."""
        ...


class CheckpointPlugin(Protocol):
    """Saves, loads and removes checkpoints for a strategy: a `CheckpointIO`, or any object with its methods."""

    def save_checkpoint(self, checkpoint: StateDict, path: str | Path, /, storage_options: Any = None) -> object:
        """Write a checkpoint; when this returns, it is written or being written."""
        ...

    @property
    def load_checkpoint(self) -> Callable[..., Any]:
        """Returns the checkpoint at a path; called with those of the arguments of `CheckpointIO` that it accepts."""
        ...

    def remove_checkpoint(self, path: str | Path, /) -> object:
        """Remove the checkpoint at a path."""
        ...


class BackgroundPlugin(CheckpointPlugin, Protocol):
    """A plugin whose `save_checkpoint` returns before the file is complete, such as `AsyncCheckpointIO`."""

    on_failure: Callable[[], None] | None
    """Called in the thread that writes when a save failed; set by the Trainer."""

    @property
    def is_writing(self) -> bool:
        """Whether the last save is not complete yet."""
        ...

    def save_checkpoint(
        self,
        checkpoint: StateDict,
        path: str | Path,
        /,
        storage_options: Any = None,
        *,
        also_to: Sequence[str | Path] = ...,
    ) -> object:
        """Begin to write a checkpoint to `path`, and after that to the paths in `also_to`."""
        ...

    def wait(self, *, before_save: bool = ...) -> object:
        """Wait for the pending save, and raise its error."""
        ...

    def wait_for(self, path: str | Path, /) -> object:
        """Return when no save is pending; raise the error of the save to this very path."""
        ...


class Rendezvous(Protocol):
    """The address and the ranks with which a process connects to the others."""

    @property
    def main_address(self) -> str:
        """Host name or address of the process with global rank 0."""
        ...

    @property
    def main_port(self) -> int:
        """Port on which the process with global rank 0 listens; 0 if the launcher opens one later, or it is alone."""
        ...

    def world_size(self) -> int:
        """Return the number of processes."""
        ...

    def global_rank(self) -> int:
        """Return the rank among all processes."""
        ...


class Cluster(Rendezvous, Protocol):
    """Ranks, sizes, and the address of rank 0: a `ClusterEnvironment`, or any object with its methods."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether another program (torchrun, SLURM) starts all processes."""
        ...

    def set_world_size(self, size: int, /) -> None:
        """Set the number of processes, if Loopwright starts them."""
        ...

    def set_global_rank(self, rank: int, /) -> None:
        """Set the rank among all processes, if Loopwright starts them."""
        ...

    def local_rank(self) -> int:
        """Return the rank among the processes of this node."""
        ...

    def node_rank(self) -> int:
        """Return the rank of this node."""
        ...

    def validate_settings(self, num_devices: int, num_nodes: int, /) -> None:
        """Raise an error if the started processes differ from the arguments."""
        ...

    def teardown(self) -> None:
        """Undo what this object changed in the process."""
        ...
