"""The check at the start of training: packed samples must not influence each other in the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError
from .loss import Parts, hidden_states, part_logits

__all__ = ["Packing", "check_packing", "compare_packing", "is_head_alone", "no_trained_token", "without_dropout"]

Forward = Callable[[Tensor, Tensor], Tensor]
"""Hidden states or logits, shape (rows, length, width), of ids and positions."""

_SAMPLES = 3
_NOISE = 0.1  # 16-bit models of many layers reach 0.03 between batches of different shapes
_LEAST = 1e-3  # float32 reaches 1e-5
_FACTOR = 4.0
_HEAD_TOLERANCE = 0.01
_HEAD_TOKENS = 16


@dataclass(frozen=True)
class Packing:
    """How much outputs differ between packed samples and the same samples apart, relative to their magnitude.

    Attributes:
        first: For the first sample of a row, which nothing precedes: it differs by rounding only.
        others: For the samples behind it.
    """

    first: float
    others: float


@torch.no_grad()
def compare_packing(forward: Forward, input_ids: Tensor) -> Packing:
    """Compare rows of several samples with the same samples in rows of their own.

    The samples apart are shorter, so that a model in which tokens see later ones differs in the first sample as well.
    The forward pass runs twice, whatever the batch holds: ranks that share a model stay together.

    Args:
        forward: The model.
        input_ids: Tokens of a batch, shape (rows, length), to make samples of equal length from.
    """
    rows, length = input_ids.shape
    if length < 2 * _SAMPLES:
        input_ids = input_ids.repeat(1, -(-2 * _SAMPLES // length))
        length = input_ids.shape[1]
    each = length // _SAMPLES
    kept = each - each // 4
    ids = input_ids[:, : each * _SAMPLES]
    positions = torch.arange(each, device=ids.device)
    packed = forward(ids, positions.repeat(_SAMPLES).expand(rows, -1))
    apart = forward(ids.reshape(rows * _SAMPLES, each)[:, :kept], positions[:kept].expand(rows * _SAMPLES, -1))
    packed = packed.view(rows, _SAMPLES, each, -1)[:, :, :kept].double()
    apart = apart.view(rows, _SAMPLES, kept, -1).double()
    # Of each sample, the mean over its tokens: those near its beginning differ most.
    differences = ((packed - apart).norm(dim=-1) / apart.norm(dim=-1).clamp(min=1e-30)).mean(dim=-1).amax(dim=0)
    return Packing(float(differences[0]), float(differences[1:].max()))


def check_packing(found: Packing) -> None:
    """Refuse a model in which samples influence each other.

    Raises:
        ConfigError: They do, or tokens see later ones.
    """
    if not found.first <= _NOISE:
        raise ConfigError(
            "Expected a model in which a token depends on earlier ones only, got outputs that differ by "
            f"{found.first:.1g} of their magnitude when later tokens are left out.",
            fix="choose a causal language model, with an attention that follows position_ids.",
        )
    if not found.others <= max(_LEAST, _FACTOR * found.first):
        raise ConfigError(
            "Expected packed samples that do not influence each other, got outputs that differ by "
            f"{found.others:.1g} of their magnitude from those of the samples apart (rounding: {found.first:.1g}).",
            fix="use packing=false: this model, with its attention, does not separate samples by position_ids.",
        )


@torch.no_grad()
def is_head_alone(model: nn.Module, parts: Parts, input_ids: Tensor) -> bool:
    """Return whether the model's logits are those of its head, with nothing computed behind it that is not known."""
    ids = input_ids[:1, :_HEAD_TOKENS]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    expected: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits.double()
    found = part_logits(parts, hidden_states(parts, ids, positions)).double()
    return found.shape == expected.shape and float((found - expected).norm()) <= _HEAD_TOLERANCE * float(
        expected.norm()
    )


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation for a block; afterwards each submodule has its mode again."""
    training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        yield
    finally:
        for one in training:
            one.training = True


def no_trained_token() -> DataError:
    """Return the error for data in which nothing is trained."""
    return DataError(
        "Expected trained tokens in the data, got labels that are all -100 in an entire epoch.",
        fix="choose train_on=all, or data with answers of the assistant.",
    )
