"""A batch split along the sequence before the step, and the losses of its parts added up."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....errors import ModuleError
from ....protocols import AnyBatch, AnyOutput, Batch, StepOutput
from .inputs import local_length
from .parts import SequenceParts

# Any in this file: batches and outputs of the user's step.


def split_batch(batch: AnyBatch, dimensions: Mapping[str | int, int], parts: SequenceParts) -> tuple[Any, Tensor, int]:
    """Return a batch of this rank's parts of sequences, the first tensor that was split, and a part's length.

    Raises:
        ModuleError: The batch has no such entries, lengths differ or do not divide.
    """
    found = {key: _entry(batch, key) for key in dimensions}
    wrong = [repr(key) for key, dim in dimensions.items() if not _has_dimension(found[key], dim)]
    if wrong:
        raise ModuleError(
            f"Expected the batch to have tensors at {', '.join(wrong)}, with the dimensions of Context(batch=...), got "
            f"{_describe(batch)}.",
            fix='pass keys of the batch, such as Context(batch={"input_ids": 1}), or positions, such as {0: 1, 1: 1}.',
        )
    lengths = {key: found[key].shape[dim] for key, dim in dimensions.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key!r} {length}" for key, length in lengths.items())
        raise ModuleError(
            f"Expected entries of the batch with one length of sequences, got {listed}.",
            fix="shift inputs and labels in the data set, so that both have one length.",
        )
    first = next(iter(dimensions))
    length = local_length(lengths[first], parts.size, f"{first!r} of the batch")
    whole = [
        repr(key) for key, value in _entries(batch) if key not in dimensions and _has_length(value, lengths[first])
    ]
    if whole:
        raise ModuleError(
            f"Expected all entries of the batch with the length of the sequence in Context(batch=...), got "
            f"{', '.join(whole)} unsplit in {_describe(batch)}.",
            fix="add them with the dimension of the sequence, or leave them out of the batch.",
        )
    cut = {key: parts.split(found[key], dim) for key, dim in dimensions.items()}
    return _replace(batch, cut), found[first], length


def whole_loss(output: AnyOutput, parts: SequenceParts) -> AnyOutput:
    """Return a training step's output with the loss of full sequences: sums and weights of the parts added.

    Raises:
        ModuleError: The loss is a plain tensor, which does not say how many tokens it is a mean of.
    """
    if _is_loss(output):
        total, weight = _add(output.sum, output.weight, parts)
        return dataclasses.replace(output, sum=total, weight=weight)
    if isinstance(output, Mapping):
        changed = copy.copy(dict(output))
        if "loss_sum" in output and "weight" in output:
            changed["loss_sum"], changed["weight"] = _add(output["loss_sum"], output["weight"], parts)
            return changed
        if _is_loss(output.get("loss")):
            changed["loss"] = whole_loss(output["loss"], parts)
            return changed
    shown = "a dict with a plain tensor" if isinstance(output, Mapping) else f"{type(output).__name__}"
    raise ModuleError(
        f"Expected lw.Loss(sum, weight) from training_step with Context(batch=...), got {shown}: means over parts of "
        "sequences cannot be added.",
        fix="return lw.Loss(losses.sum(), num_tokens), or pass Context(inputs=...), with which any loss is right.",
    )


def _add(total: Tensor, weight: Tensor | float, parts: SequenceParts) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if total.device.type == "mps" else torch.float64
    weighed = torch.as_tensor(weight, dtype=dtype).reshape(()).to(total.device)
    both = parts.sum(torch.stack([total.reshape(()).to(dtype), weighed.detach()]))
    return both[0].to(total.dtype), both[1].detach()


def _is_loss(output: StepOutput) -> bool:
    if not dataclasses.is_dataclass(output) or isinstance(output, type):
        return False
    return {"sum", "weight"} <= {field.name for field in dataclasses.fields(output)}


def _entry(batch: AnyBatch, key: str | int) -> Any:
    if isinstance(batch, Mapping):
        return batch.get(key)
    if isinstance(batch, list | tuple) and isinstance(key, int):
        return batch[key] if key < len(batch) else None
    return None


def _entries(batch: AnyBatch) -> list[tuple[Any, Any]]:
    return list(batch.items()) if isinstance(batch, Mapping) else list(enumerate(batch))


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, Tensor) and (length in value.shape[1:] or value.shape == (length,))


def _has_dimension(value: object, dim: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > dim


def _replace(batch: AnyBatch, cut: Mapping[Any, Tensor]) -> Any:
    if isinstance(batch, Mapping):
        changed = copy.copy(batch)
        changed.update(cut)  # type: ignore[attr-defined]  # a batch that can be copied can be changed
        return changed
    values = [cut.get(index, value) for index, value in enumerate(batch)]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _describe(batch: Batch) -> str:
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} with {', '.join(f'{key!r} {_shape(value)}' for key, value in batch.items())}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {', '.join(_shape(value) for value in batch)}"
    return _shape(batch)


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
