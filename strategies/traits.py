"""`Traits`, the properties in which strategies differ, and the records that a strategy and its callers exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypedDict, TypeVar

if TYPE_CHECKING:
    import torch

    from ..accelerators import Accelerator
    from ..precision import Precision
    from ..protocols import CheckpointPlugin, Cluster

T = TypeVar("T")


class Launcher(Protocol):
    """Starts the processes of a strategy."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook."""
        ...

    def launch(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Run the function in all processes and return rank 0's result."""
        ...


class TrainerConfig(TypedDict, total=False):
    """Trainer arguments that matter to an engine with its own configuration.

    Attributes:
        accumulate_grad_batches: Micro-batches per optimizer step; None if unknown before the launch.
        global_batch_size: Samples per optimizer step over all ranks; None if the user did not set it.
        gradient_clip_val: Threshold; None or 0 does not clip.
        gradient_clip_algorithm: "norm", "value" or "agc"; None is "norm".
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
    """Objects that the user passed to a strategy, which take precedence over Fabric's choices. None: Fabric chooses.

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
    """The distribution of a training's memory over processes: the result of `SharesMemory.memory_shares`.

    Attributes:
        weights: Number of processes that share the parameters.
        gradients: Number of processes that share the gradients, after a backward pass.
        optimizer: Number of processes that share the optimizer's state.
        activations: Number of processes that share the activations of a micro-batch.
        buckets: Bytes of the buffers in which gradients are reduced, as a multiple of the gradients' bytes.
        has_float32_copies: Whether the optimizer keeps float32 copies of the parameters that it updates.
        casts_parameters: Whether the strategy itself casts parameters in mixed precision, on a GPU: then autocast keeps
            no 16-bit copies of them for the backward pass.
        formula: Bytes of parameters, gradients and AdamW's state in float32, of P parameters on N processes.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    activations: int = 1
    buckets: int = 0
    has_float32_copies: bool = False
    casts_parameters: bool = False
    formula: str = "16 P"


Refusal = tuple[str, str]
"""Why something cannot be done, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a strategy that Trainer, Fabric, callbacks, recipes and tuner read; by default of one device.

    A class defines them in the attribute `traits`. An instance sets others if they depend on arguments.

    Attributes:
        accelerator_kind: Name of the only accelerator that the strategy runs on, such as "xla"; None for any.
        has_several_devices: Whether all devices of `devices=` are used; if False, `devices="auto"` is one device.
        uneven_choices: Values of `uneven` that the strategy supports; empty if it has one rank.
        copies_draw_alike: Whether ranks that read the same data draw the same random numbers.
        has_stages: Whether ranks hold different layers (pipeline stages), so that parameters and their groups differ.
        runs_windows: Whether `run_window`, where it is defined, takes over the inside of accumulation windows.
        parts_per_batch: Number of parts into which each batch is split for `run_window`: the micro-batches it gets.
        shards_parameters: Whether each rank holds a shard of every parameter. Evaluation steps then communicate, all
            ranks must run equally many of them, and checkpoints are read in shards.
        holds_parameters: Whether an engine owns the parameters, so that their tensors must not be replaced or averaged
            in place.
        keeps_packed_weights: Whether weights that are packed into fewer bits than their dtype has are not changed.
        model_axes: Sizes of the axes of a mesh that split one copy of a module ("pp", "cp", "tp", "ep"), without axes
            of size 1. -1 is resolved when the number of processes is known.
        owns_optimizers: Whether an engine steps. It then holds gradients instead of the `grad` of parameters, accepts
            no further parameter groups, and is created again by each fit, so that optimizer states start from zero.
        traces_lazily: Whether operations are traced into graphs (lazy tensors) that include the gradients of a window.
            Evaluation then runs under `torch.no_grad` instead of `torch.inference_mode`.
        reduces_every_step: Whether each window ends with a reduction of gradients over all ranks, in which they wait
            for each other.
        sums_gradients_itself: Whether the engine sums gradients in `accumulate_dtype`; else the training loop does.
        averages_after_backward: Whether gradients can be averaged over ranks after all backward passes of a window.
        accumulation_refusal: Reason why gradients cannot be summed in float32; None if they can.
        sums_in_tree: Whether gradients can be summed over ranks by a fixed tree; see distributed/tree_sum.py.
        has_module_hooks: Whether hooks of submodules communicate: `compile=` then compiles submodules instead of steps.
        compile_refusal: Reason why `compile=` cannot be used; None if it can.
    """

    accelerator_kind: str | None = None
    has_several_devices: bool = False
    uneven_choices: tuple[str, ...] = ()
    copies_draw_alike: bool = False
    has_stages: bool = False
    runs_windows: bool = True
    parts_per_batch: int = 1
    shards_parameters: bool = False
    holds_parameters: bool = False
    keeps_packed_weights: bool = True
    model_axes: Mapping[str, int] = field(default_factory=dict)
    owns_optimizers: bool = False
    traces_lazily: bool = False
    reduces_every_step: bool = True
    sums_gradients_itself: bool = False
    averages_after_backward: bool = False
    accumulation_refusal: Refusal | None = None
    sums_in_tree: bool = False
    has_module_hooks: bool = False
    compile_refusal: Refusal | None = None
