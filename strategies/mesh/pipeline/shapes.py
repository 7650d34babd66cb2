"""Shapes of batches and of what stages exchange, which schedules need before they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ....errors import ModuleError
from ....protocols import Batch
from ...tree import leaves

# Any in this file: entries of checkpoints.


@dataclass(frozen=True, slots=True)
class StageShapes:
    """The inputs and outputs of a stage, as tensors on the meta device.

    Attributes:
        received: None on the first stage.
        returned: On the last stage the share of a loss: shape ().
    """

    received: tuple[Tensor, ...] | None
    returned: tuple[Tensor, ...]


def shapes_of(batch: Batch) -> str:
    """Return what shapes within a step follow from, as far as they do not depend on values."""
    found = [(f"[{index}]", value) for index, value in enumerate(batch)] if _is_flat(batch) else leaves(batch)
    return "; ".join(
        f"{path} {tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else path for path, value in found
    )


def _is_flat(batch: Batch) -> TypeGuard[Sequence[Tensor]]:
    """Return whether a batch is a plain list or tuple of tensors: `leaves` takes longer to say the same."""
    return batch.__class__ in (list, tuple) and all(value.__class__ is Tensor for value in batch)


def versions_of(batch: Batch) -> list[int]:
    """Return how often each tensor of a batch was changed in place."""
    tensors = (value for _, value in leaves(batch) if isinstance(value, Tensor))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def changed_in_place(stages: Sequence[int]) -> ModuleError:
    """Return the error of a step that changes its batch, and runs on it for each of these stages."""
    return ModuleError(
        "training_step changes a tensor of its batch in place, and runs on the same batch for each of this rank's "
        f"stages {', '.join(map(str, stages))}.",
        fix="compute a new tensor, such as x = x + noise in place of x += noise.",
    )


def _plain(tensors: tuple[Tensor, ...] | None) -> tuple[list[int], str] | None:
    """Return shape and dtype of a hidden state; checkpoints keep nothing where more is sent."""
    return None if tensors is None else (list(tensors[0].shape), str(tensors[0].dtype).removeprefix("torch."))


def _empty(shape: Sequence[int], dtype: str) -> Tensor:
    return torch.empty(list(shape), dtype=getattr(torch, dtype), device="meta").requires_grad_()


def described(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return tensors without memory of the same shapes and dtypes."""
    return tuple(
        torch.empty(one.shape, dtype=one.dtype, device="meta").requires_grad_(one.requires_grad) for one in tensors
    )


def check_shapes(stage: int, passed: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Refuse other shapes than schedules expect a stage to pass on."""
    found, wanted = ([tuple(one.shape) for one in tensors] for tensors in (passed, expected))
    if found != wanted:
        raise ModuleError(
            f"Expected stage {stage} to pass on {', '.join(map(str, wanted))}, as for an earlier batch of the same "
            f"shapes, got {', '.join(map(str, found))}.",
            fix="let the shapes of what blocks get follow from the shapes of the batch, not from its values.",
        )


def plain_shapes(shapes: dict[str, dict[int, StageShapes]]) -> dict[str, dict[int, Any]]:
    """Return the shapes of stages, by shapes of batches, as plain values for a checkpoint."""
    return {
        key: {stage: (_plain(one.received), _plain(one.returned)) for stage, one in stages.items()}
        for key, stages in shapes.items()
    }


def read_shapes(plain: dict[str, dict[int, Any]]) -> dict[str, dict[int, StageShapes]]:
    """Return what `plain_shapes` was given."""
    return {
        key: {
            stage: StageShapes(None if received is None else (_empty(*received),), (_empty(*returned),))
            for stage, (received, returned) in stages.items()
        }
        for key, stages in plain.items()
    }
