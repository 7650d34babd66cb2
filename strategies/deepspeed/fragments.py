"""Where a DeepSpeed engine has a parameter's float32 elements and optimizer state.

The engine keeps masters and optimizer state in flat tensors, of which each rank has a part. A `Fragment` says where a
parameter's elements are in this rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .engine import EngineRoot

__all__ = [
    "Fragment",
    "flats_of",
    "gathered",
    "is_partitioned",
    "is_stepped",
    "lies_in_parts",
    "own_fragment",
    "settle",
    "shape_of",
    "state_of",
    "swap_in",
    "swap_out",
]

# Any in this file: deepspeed has no types.


@dataclass(frozen=True)
class Fragment:
    """Where elements of a parameter are on this rank.

    Attributes:
        flat: The flat float32 tensor that the optimizer steps; None where this rank has none of the parameter.
        at: Where they begin in `flat`.
        start: Where they begin in the flattened parameter.
        size: How many.
    """

    flat: Any
    at: int = 0
    start: int = 0
    size: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements in a tensor that is as long as `flat`."""
        return tensor.reshape(-1).narrow(0, self.at, self.size)


def shape_of(parameter: Any) -> torch.Size:
    """Return the shape of a parameter, which in stage 3 it does not have itself."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def is_partitioned(parameter: Any) -> bool:
    """Return whether each rank has a part of the parameter itself (stage 3)."""
    return hasattr(parameter, "ds_id")


def lies_in_parts(root: EngineRoot, parameter: Any) -> bool:
    """Return whether this rank does not have the whole float32 tensor itself."""
    if is_partitioned(parameter):
        return True
    # The masters: below stage 3 the parameters are whole, but of 16 bits.
    return root.engine is not None and parameter.dtype != torch.float32 and is_stepped(root, parameter)


def is_stepped(root: EngineRoot, parameter: Any) -> bool:
    """Return whether the engine's optimizer has the parameter: it is not frozen, and in one of the groups."""
    if not parameter.requires_grad or not root.has_optimizer:
        return False
    if root.stage == 0:
        return True
    zero = root.zero
    if root.stage == 3:
        return zero.get_param_id(parameter) in zero.grad_position
    return any(one is parameter for group in zero.bit16_groups for one in group)


def state_of(root: EngineRoot, flat: Any) -> Any:
    """Return the optimizer's state of a flat tensor."""
    engine = root.engine
    inner = engine.basic_optimizer if engine.basic_optimizer is not None else engine.optimizer
    return inner.state[flat]


def swap_in(root: EngineRoot, parameter: Any, *, writes: bool = False) -> None:
    """Have the optimizer's tensors of a parameter's group in memory, where they lie on a disk, until `swap_out`.

    One group at a time, as the engine's buffers have room for one; `writes` as in `swap_out`.
    """
    if not root.swaps_gradients:
        return
    own, zero = root.__dict__, root.zero
    number = zero.grad_position[zero.get_param_id(parameter)][0]
    if own.get("_swapped_in") == number:
        return
    swap_out(root, writes=writes)
    if zero._swappable_optimizer_subgroup(number):
        zero._optimizer_states_and_gradient_swap_in(number)
        own["_swapped_in"] = number


def swap_out(root: EngineRoot, *, writes: bool = False) -> None:
    """Give the engine's buffers back; with `writes`, put on the disk what is in them."""
    number = root.__dict__.pop("_swapped_in", None)
    if number is not None:
        zero = root.zero
        (zero._optimizer_states_and_gradient_swap_out if writes else zero._release_swap_buffers)(number)


def flats_of(root: EngineRoot, parameter: Any) -> list[Any]:
    """Return the flat tensors of the parameter's group, this rank's own first; there is one on every rank."""
    if root.stage == 0:
        return [own_fragment(root, parameter).flat]
    zero = root.zero
    if root.stage == 3:
        return [zero.fp32_partitioned_groups_flat[zero.grad_position[zero.get_param_id(parameter)][0]]]
    number = next(i for i, group in enumerate(zero.bit16_groups) if any(one is parameter for one in group))
    return [zero.single_partition_of_fp32_groups[number]]


def own_fragment(root: EngineRoot, parameter: Any) -> Fragment:
    """Return where this rank has the parameter's float32 elements."""
    total = shape_of(parameter).numel()
    if root.stage == 0:
        wrapper = root.engine.optimizer
        if hasattr(wrapper, "fp32_groups"):
            for half, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                for one, master in zip(half, masters, strict=True):
                    if one is parameter:
                        return Fragment(master, 0, 0, total)
        return Fragment(parameter, 0, 0, total)
    zero = root.zero
    if root.stage == 3:
        number, at, _ = zero.grad_position[zero.get_param_id(parameter)]
        share = parameter.partition_numel()
        start = share * zero._get_param_partition_rank(parameter)
        size = max(0, min(share, total - start))
        return Fragment(zero.fp32_partitioned_groups_flat[number], at, start, size)
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return Fragment(None)
    own, flat = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    return Fragment(flats_of(root, parameter)[0], flat.start, own.start, own.numel)


def settle(root: EngineRoot) -> None:
    """Let no parameter be on its way to a use, as the last evaluation step may have left some. On every rank."""
    if root.stage == 3 and root.engine is not None:
        root.engine.optimizer.empty_partition_cache()


@contextmanager
def gathered(parameters: list[Any], *, writes: bool = False) -> Iterator[None]:
    """Return a context in which partitioned parameters are whole; with `writes`, rank 0's changes are kept."""
    if not any(is_partitioned(one) for one in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if writes else None):
        yield
