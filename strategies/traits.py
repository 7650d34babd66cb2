"""Declared capabilities: what Trainer, Fabric, callbacks and tuner may ask of any strategy, with defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypedDict, TypeVar

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..accelerators import Accelerator
    from ..precision import Precision
    from ..protocols import CheckpointPlugin, Cluster

__all__ = ["Capabilities", "Given", "Launcher", "MemoryShares", "TrainerConfig"]

T = TypeVar("T")


class Launcher(Protocol):
    """How the processes of a strategy start."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook."""
        ...

    def launch(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Run the function in all processes and return what it returned on rank 0."""
        ...


class TrainerConfig(TypedDict, total=False):
    """Trainer arguments that matter to an engine with a configuration of its own.

    Attributes:
        accumulate_grad_batches: Micro-batches per optimizer step; None where that is not known before the launch.
        global_batch_size: Samples per optimizer step over all ranks; None if the user did not set it.
        gradient_clip_val: Threshold; None or 0 does not clip.
        gradient_clip_algorithm: "norm" or "value"; None is "norm".
        micro_batch_size: Samples per batch of one process; None if the loader does not provide it.
        is_automatic: Whether the trainer makes the optimizer steps; False in manual optimization.
        grad_accumulation_dtype: "fp32", or None for the dtype of the parameters.
    """

    accumulate_grad_batches: int | None
    global_batch_size: int | None
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    micro_batch_size: int | None
    is_automatic: bool
    grad_accumulation_dtype: str | None


@dataclass(frozen=True, slots=True)
class Given:
    """Parts that the user gave to a strategy, which win over the choices of Fabric. None: Fabric chooses.

    Attributes:
        accelerator: The kind of device.
        device: The device of this process.
        parallel_devices: The devices of this node.
        precision: The precision.
        checkpoint_io: Reads and writes checkpoints.
        cluster_environment: Provides ranks and addresses.
    """

    accelerator: Accelerator | None = None
    device: torch.device | None = None
    parallel_devices: tuple[torch.device, ...] | None = None
    precision: Precision | None = None
    checkpoint_io: CheckpointPlugin | None = None
    cluster_environment: Cluster | None = None


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """How the memory of a training is spread over processes: what `Strategy.memory_shares` returns.

    Attributes:
        weights: Number of processes that share the parameters.
        gradients: Number of processes that share the gradients, after a backward pass.
        optimizer: Number of processes that share the optimizer's state.
        activations: Number of processes that share the activations of a micro-batch.
        buckets: Bytes of the buffers in which gradients are reduced, as a multiple of the gradients' bytes.
        has_float32_copies: Whether the optimizer keeps float32 copies of the parameters that it updates.
        formula: Bytes of parameters, gradients and AdamW's state in float32, of P parameters on N processes.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    activations: int = 1
    buckets: int = 0
    has_float32_copies: bool = False
    formula: str = "16 P"


class Capabilities:
    """Attributes with defaults that hold for one process on one device; a strategy overrides what differs."""

    strategy_name: str = "custom"
    """Name for logs and reports. Behavior depends on the capabilities below, not on the name."""

    # -- devices and processes -----------------------------------------------------------------------------------

    accelerator_kind: str | None = None
    """Name of the only accelerator that the strategy runs on, such as "xla"; None: any."""
    has_several_devices: bool = False
    """Whether the strategy uses all devices of `devices=`; if False, `devices="auto"` is one device."""
    start_method: str | None = None
    """How processes start: "popen", "spawn", "fork" or "forkserver"; None: there is one process."""
    launcher: Launcher | None = None
    """Starts the processes; None: Fabric chooses a launcher that fits `start_method` and the environment."""
    device_mesh: DeviceMesh | None = None
    """The devices as a mesh with named axes, for `module.device_mesh`; None: there is no mesh."""

    # -- data ----------------------------------------------------------------------------------------------------

    uneven_choices: tuple[str, ...] = ()
    """Values of `uneven` that this strategy can follow; empty if it has no ranks."""

    uneven: str = "stop_all"
    """Policy for ranks with unequal numbers of training batches: "stop_all", "cycle" or "zero_weight"."""
    reporting_ranks: Sequence[int] | None = None
    """Global ranks whose logged values, losses and samples count: one for each share of the data, in their order.
    None: all ranks."""
    batch_norm_group: ProcessGroup | None = None
    """The ranks over which batch norms are synchronized: those with the same layers that read different data. None:
    all ranks."""
    copies_draw_alike: bool = False
    """Whether ranks that read the same data draw the same random numbers."""
    has_stages: bool = False
    """Whether ranks hold different layers (pipeline stages), so that parameters and their groups differ over ranks."""
    runs_windows: bool = True
    """Whether `run_window`, where a strategy defines it, takes over the inside of accumulation windows."""
    parts_per_batch: int = 1
    """Number of parts into which each batch is split for `run_window`: the micro-batches that it gets."""

    # -- parameters ----------------------------------------------------------------------------------------------

    shards_parameters: bool = False
    """Whether each rank holds a shard of every parameter. Evaluation steps then communicate, all ranks must run
    equally many of them, and checkpoints are read in shards."""
    holds_parameters: bool = False
    """Whether an engine owns the parameters, so that their tensors must not be replaced or averaged in place."""
    helps_in_evaluation: bool = True
    """Whether this rank can run `evaluate_without_data` where `shards_parameters`; else it needs a batch first."""
    has_inference_mode: bool = True
    """Whether evaluation may run under `torch.inference_mode`; else it runs under `torch.no_grad`."""

    model_axes: Mapping[str, int] = MappingProxyType({})
    """Sizes of the axes of a mesh that split one copy of a module ("pp", "cp", "tp", "ep"), without those of size 1;
    -1: known when the number of processes is."""
    keeps_packed_weights: bool = True
    """Whether weights that are packed to fewer bits than their dtype says stay as they are."""

    # -- gradients -----------------------------------------------------------------------------------------------

    holds_gradients: bool = False
    """Whether an engine holds the gradients, instead of the `grad` of an optimizer's parameters."""
    traces_lazily: bool = False
    """Whether operations are traced into graphs (lazy tensors) in which the gradients of a window lie."""
    reduces_every_step: bool = True
    """Whether each window ends with a reduction of gradients over all ranks, in which they wait for each other."""
    sums_gradients_itself: bool = False
    """Whether the engine sums gradients in `accumulate_dtype`; else the training loop does."""
    accumulate_dtype: torch.dtype | None = None
    """Dtype of gradient sums over a window and over ranks; None: the parameters'. Set before `setup_module`."""
    saves_optimizers: bool = False
    """Whether the run saves states of optimizers: what cannot be saved is refused in the first step. The Trainer's."""

    # -- optimizers and compilation ------------------------------------------------------------------------------

    rebuilds_optimizers: bool = False
    """Whether each fit builds a new engine, whose optimizer states start from zero."""
    adds_param_groups: bool = True
    """Whether parameter groups can be added to optimizers during training."""
    has_module_hooks: bool = False
    """Whether hooks of submodules communicate: `compile=` then compiles submodules instead of steps."""
    compile_refusal: tuple[str, str] | None = None
    """Why `compile=` cannot be used, and the remedy; None where it can."""
