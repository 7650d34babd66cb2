"""Optional parts of a strategy: a strategy that defines the methods of one of these protocols has that part.

Trainer, Fabric and registry check for them during setup and bind their methods; a step checks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ..protocols import AnyBatch, Batch, Options, StateDict, Stateful, StepFunction
from .traits import MemoryShares, TrainerConfig

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from ..precision import Precision
    from .base import Strategy

T = TypeVar("T")

# Any in this file: constructor arguments, batches, and what `configure_optimizers` returns.


# -- before processes start ------------------------------------------------------------------------------------------


@runtime_checkable
class ReadsOptions(Protocol):
    """Accepts options after its registered name, such as "fsdp=2" in "mesh:fsdp=2"."""

    @classmethod
    def read_options(cls, text: str) -> Options:
        """Return constructor arguments from the options.

        Raises:
            ConfigError: The text has another form.
        """
        ...


@runtime_checkable
class ChecksProcesses(Protocol):
    """Requires certain numbers of processes."""

    def check_processes(self, num_processes: int, num_nodes: int) -> None:
        """Raise an error if the strategy does not support the number of processes. Called before they start.

        Args:
            num_processes: Number of processes on all nodes together.
            num_nodes: Number of nodes.

        Raises:
            ConfigError: The strategy cannot use that number of processes.
            MissingDependency: It needs a package that is not installed.
        """
        ...


@runtime_checkable
class ChecksLayers(Protocol):
    """Cannot run every module."""

    def check_layers(self, module: nn.Module) -> None:
        """Raise an error for a module whose layers this strategy cannot run. Does not communicate.

        The Trainer calls it before processes start, unless the module gets its layers later, in `configure_model`.

        Raises:
            ModuleError: Names the layers.
        """
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """Spreads parameters, gradients or optimizer state over processes, or needs buffers for them."""

    def memory_shares(self, num_processes: int, num_nodes: int) -> MemoryShares:
        """Return their distribution over processes, for plans; called before processes start.

        Args:
            num_processes: Number of processes on all nodes together.
            num_nodes: Number of nodes.
        """
        ...


def memory_shares(strategy: Strategy, num_processes: int, num_nodes: int) -> MemoryShares:
    """Return how a strategy distributes memory; without `SharesMemory`, each process holds everything."""
    if isinstance(strategy, SharesMemory):
        return strategy.memory_shares(num_processes, num_nodes)
    return MemoryShares()


@runtime_checkable
class MakesPrecision(Protocol):
    """Casts and scales in an engine."""

    def make_precision(self, name: str, device_type: str) -> Precision:
        """Return the precision for a name.

        Args:
            name: A full name, such as "bf16-mixed".
            device_type: Type of the devices, such as "cuda".

        Raises:
            ConfigError: The engine, or the device, does not support it.
        """
        ...


@runtime_checkable
class TakesTrainerConfig(Protocol):
    """Has its own configuration that must agree with the Trainer's arguments."""

    def apply_trainer_config(self, config: TrainerConfig) -> TrainerConfig:
        """Take the Trainer's arguments, before processes start.

        Returns:
            Accumulation and clipping that the Trainer must take over from the engine's configuration; else empty.

        Raises:
            ConfigError: The engine's configuration differs; names both values. Or the engine does not support them.
        """
        ...


# -- processes -------------------------------------------------------------------------------------------------------


@runtime_checkable
class HasTimeouts(Protocol):
    """Limits the time that ranks wait."""

    @property
    def timeout(self) -> timedelta | float | None:
        """Time after which a rank that waits for another one fails, a timedelta or seconds; None: 30 minutes."""
        ...

    @property
    def stall_timeout(self) -> timedelta | float | None:
        """Time without progress after which every rank reports its position; None: chosen from `timeout`."""
        ...


@runtime_checkable
class HasMesh(Protocol):
    """Arranges the devices in a mesh with named axes."""

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh, for `module.device_mesh`; None before the processes are connected."""
        ...

    @property
    def batch_norm_group(self) -> ProcessGroup | None:
        """The ranks over which batch norms are synchronized: those with the same layers that read different data.

        None: all ranks.
        """
        ...


# -- the model -------------------------------------------------------------------------------------------------------


@runtime_checkable
class ChangesLater(Protocol):
    """Builds modules without values in `init_context`."""

    def change_context(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which a module that was built in `init_context` may be changed before it is set up."""
        ...


def changing(strategy: Strategy, module: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which a module may be changed before the strategy sets it up."""
    return strategy.change_context(module) if isinstance(strategy, ChangesLater) else nullcontext()


@runtime_checkable
class ConfiguresOptimizers(Protocol):
    """Has a configuration that may name optimizers, so that the module need not configure any."""

    def default_optimizers(self, module: nn.Module) -> Any:
        """Return optimizers for a module that configures none, in a form of `configure_optimizers`; None for none."""
        ...


@runtime_checkable
class SetsUpTogether(Protocol):
    """Creates one engine from a module and its optimizers."""

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Set up a module and its optimizers in one call; Fabric calls it instead of `setup_module`."""
        ...


# -- state -----------------------------------------------------------------------------------------------------------


def strategy_state(strategy: Strategy) -> StateDict:
    """Return the strategy's state for a resume; {} without one. Call it on every rank: it may communicate."""
    return strategy.state_dict() if isinstance(strategy, Stateful) else {}


def load_strategy_state(strategy: Strategy, state: StateDict) -> None:
    """Load what `strategy_state` returned, now or when the module is set up."""
    if isinstance(strategy, Stateful):
        strategy.load_state_dict(state)


@runtime_checkable
class SavesShards(Protocol):
    """Supports checkpoints in which every rank writes its shards."""

    def saves_shards(self, default: str) -> bool:
        """Return whether the checkpoint IO is called on every rank, with the local shards of tensors.

        Args:
            default: "full" or "sharded", where the user does not choose.
        """
        ...

    def arrange_shards(self, state: T) -> T:
        """Return this rank's state for the checkpoint IO if all ranks write; its structure is equal on all ranks.

        Call it on every rank: it may communicate. Tensors that only other ranks have are `RemoteShards`.
        """
        ...


def saves_shards(strategy: Strategy, default: str) -> bool:
    """Return whether every rank writes its shards; see `SavesShards`."""
    return isinstance(strategy, SavesShards) and strategy.saves_shards(default)


def written_state(strategy: Strategy, state: T, default: str) -> T:
    """Return the state that this rank writes: its shards, or on rank 0 full tensors. Call it on every rank."""
    if isinstance(strategy, SavesShards) and strategy.saves_shards(default):
        return strategy.arrange_shards(state)
    return strategy.gather_state(state)


@runtime_checkable
class ChecksStates(Protocol):
    """Checks in the first step that the states of optimizers can be saved."""

    saves_optimizers: bool
    """Whether the run saves them: what cannot be saved is an error then, else a warning. The Trainer sets it."""


@runtime_checkable
class HasEveryWeight(Protocol):
    """Omits entries from `module_state_dict`."""

    def every_weight(self, module: nn.Module) -> StateDict:
        """Return the state of a module as `module_state_dict` does, with what checkpoints may leave out."""
        ...


def every_weight(strategy: Strategy, module: nn.Module) -> StateDict:
    """Return the state of a module as `module_state_dict` does, including entries that checkpoints may omit."""
    if isinstance(strategy, HasEveryWeight):
        return strategy.every_weight(module)
    return strategy.module_state_dict(module)


# -- steps -----------------------------------------------------------------------------------------------------------


@runtime_checkable
class PlacesBatches(Protocol):
    """Moves batches to devices itself."""

    def place_batch(self, batch: AnyBatch) -> Any:
        """Return a batch whose tensors are on their devices already; Fabric moves the others."""
        ...


@runtime_checkable
class RunsWindows(Protocol):
    """Runs the micro-batches of accumulation windows itself, as a pipeline does."""

    def run_window(self, batches: Sequence[Batch], step: StepFunction, share: Callable[[Any], Tensor]) -> Sequence[Any]:
        """Run the forward and backward passes of all micro-batches of an accumulation window.

        The Trainer zeroes gradients before the call, and scales, clips and steps after it.

        Args:
            batches: The micro-batches, on the device, in order.
            step: Runs `training_step` on a micro-batch, given with its number in the window: `step(batch, number)`.
                Returns its loss (a tensor or `lw.Loss`), None where it has none, or `NoLoss` where the strategy's own
                `bind_step` or `without_data` returned one. `step(batch, number, counts=False)` runs it on a pipeline
                stage before the last: it returns what `bind_step` returned, and nothing that it logs counts.
            share: Returns what backward is called on for a loss: its share of the window's loss, shape (), with its
                graph, scaled where the precision scales. Called once for each loss that `step` returned.

        Returns:
            What `step` returned for each micro-batch, in order.
        """
        ...


@runtime_checkable
class RejoinsPasses(Protocol):
    """Communicates within forward and backward passes, and can rejoin a pass that an error interrupted on this rank."""

    def count_collectives(self) -> dict[str, int]:
        """Return the number of collectives that this rank has begun, by process group."""
        ...

    def skip_collectives(self, counts: Mapping[str, int]) -> AbstractContextManager[object]:
        """Return a context that skips the next collectives of each process group: this rank took part before."""
        ...

    def break_off(self, module: nn.Module) -> None:
        """Free the state and the gradients of an interrupted pass, so that another pass can begin.

        Does not communicate.

        Args:
            module: The result of `setup_module`.
        """
        ...


@runtime_checkable
class HasStages(Protocol):
    """Has ranks with different layers (pipeline stages). Losses are on the last stage."""

    @property
    def has_last_stage(self) -> bool:
        """Whether steps run to the end on this rank.

        On stages before the last, they do not: they return nothing, and values that they log do not count.
        """
        ...

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """Return the last stage's tensor, on every rank of its pipeline.

        Args:
            tensor: A tensor of the same shape and dtype on all stages.
        """
        ...

    def of_stages(self, module: nn.Module, facts: dict[str, T]) -> dict[str, T]:
        """Return facts about a module, its submodules and parameters, each from the ranks that hold them.

        Call it on every rank: it communicates.

        Args:
            module: The module as it was set up.
            facts: By path or name in the module as the user wrote it.
        """
        ...


def stages_of(strategy: Strategy) -> HasStages | None:
    """Return the strategy if it has pipeline stages; None if each rank has all layers."""
    return strategy if strategy.traits.has_stages and isinstance(strategy, HasStages) else None


@runtime_checkable
class NotesAbsence(Protocol):
    """Counts, without a collective, the ranks that had no loss in a window."""

    def note_absence(self, window: str) -> Callable[[], int] | None:
        """Notify the other ranks that this rank had no loss in a window.

        Called on such ranks only, before the backward pass that reduces the window's gradients.

        Args:
            window: A unique name of the window, the same on all ranks.

        Returns:
            A function that returns the number of ranks without a loss, called after that pass when the device has been
            waited for. None if the number is unavailable.
        """
        ...


@runtime_checkable
class EvaluatesWithoutData(Protocol):
    """Communicates in evaluation steps, as with sharded parameters, so that ranks without a batch must take part."""

    @property
    def helps_in_evaluation(self) -> bool:
        """Whether this rank can call `evaluate_without_data` now; otherwise it must evaluate a batch first."""
        ...

    def evaluate_without_data(self, module: nn.Module | None) -> None:
        """Take part in an evaluation step for which other ranks have a batch and this rank has none.

        Args:
            module: The result of `setup_module` or `place_module`; None for all evaluated modules.
        """
        ...


def evaluation_of(strategy: Strategy) -> EvaluatesWithoutData | None:
    """Return the strategy if ranks without a batch must take part in evaluation steps; else None."""
    return strategy if strategy.traits.shards_parameters and isinstance(strategy, EvaluatesWithoutData) else None
