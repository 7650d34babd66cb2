"""Types of the parts of DeepSpeed (0.19) in use; the library itself is not annotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from ...protocols import AnyOutput

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

State = dict[str, Any]  # Any: entries of the user's modules and optimizers


class ZeroParameter(nn.Parameter):
    """A parameter with DeepSpeed's attributes; attributes of stage 3 begin with `ds_`."""

    ds_id: int
    ds_shape: torch.Size
    ds_tensor: Tensor
    ds_zero_partition_rank: int
    ds_active_sub_modules: set[int]
    partition_numel: Callable[[], int]
    _hp_mapping: Any  # Any: addresses of stages 1 and 2


class Zero(Protocol):
    """A ZeRO optimizer: what stages 1 to 3 have, then what some of them have."""

    averaged_gradients: dict[int, list[Tensor | None] | None]
    clip_grad: float
    custom_loss_scaler: bool
    external_loss_scale: float | None
    gradient_accumulation_steps: int

    zero_grad: Callable[..., None]
    clear_backward_seen_flag: Callable[[], None]
    finalize_gradient_accumulation_boundary: Callable[[], None]
    reset_cpu_buffers: Callable[[], None]
    _get_norm_groups: Callable[[], list[Tensor]]
    # Stages 1 and 2.
    cpu_offload: bool
    micro_step_id: int
    all_grad_tensors: dict[int, Any]
    bit16_groups: list[list[ZeroParameter]]
    params_in_partition: Mapping[int, list[ZeroParameter]]
    round_robin_bit16_padding: list[list[int]]
    single_partition_of_fp32_groups: list[Tensor]
    _hp_optimizer_states_linked: bool

    _link_all_hp_params: Callable[[], None]
    _release_preflattened_grad_buffers: Callable[[], None]
    _wait_for_offload_copies: Callable[[], None]

    # Stage 3.
    fp32_partitioned_groups_flat: list[Tensor]
    grad_position: Mapping[int, tuple[int, int, int]]
    offload_optimizer: bool
    swap_optimizer: bool

    empty_partition_cache: Callable[[], None]
    get_param_id: Callable[[Tensor], int]
    _get_param_partition_rank: Callable[[Tensor], int]
    _swappable_optimizer_subgroup: Callable[[int], bool]
    _optimizer_states_and_gradient_swap_in: Callable[[int], None]
    _optimizer_states_and_gradient_swap_out: Callable[[int], None]
    _release_swap_buffers: Callable[[int], None]


class HalfOptimizer(Protocol):
    """The 16-bit optimizer of stage 0, with its float32 masters."""

    fp16_groups: list[list[nn.Parameter]]
    fp32_groups: list[list[nn.Parameter]]


class Engine(Protocol):
    """A DeepSpeedEngine."""

    optimizer: Zero
    basic_optimizer: Optimizer | None
    device: torch.device

    def __call__(self) -> AnyOutput:  # Any: what the user's step returns
        """Run the forward pass."""

    backward: Callable[..., object]
    step: Callable[[], None]
    destroy: Callable[[], None]
    allreduce_gradients: Callable[[], None]
    set_gradient_accumulation_boundary: Callable[[bool], None]
    get_global_grad_norm: Callable[[], Tensor | float | None]
    was_step_applied: Callable[[], bool]
    _backward_prologue: Callable[[], None]
    _flush_coalesced_reduction_zero12: Callable[[Zero], None]
