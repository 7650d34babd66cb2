"""The check at the start of training: packed samples must not influence each other in the user's model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError, DataError
from .loss import ModelParts, RouterLoss, hidden_states, part_logits

Forward = Callable[[Tensor, Tensor], Tensor]
"""Hidden states or logits, shape (rows, length, width), of ids and positions."""

_SAMPLES = 3
_NOISE = 0.1  # 16-bit models of many layers reach 0.03 between batches of different shapes
_LEAST = 1e-3  # float32 reaches 1e-5
_LEAST_16_BITS = 0.03  # also where the first sample has the same bits by chance; `before` and `after` see influences
_FACTOR = 4.0
# Between batches of one shape that differ in other samples only: most models compute the same bits. Experts do not, as
# the tokens of one expert are computed together.
_LEAST_INFLUENCE = 1e-6
_LEAST_LATER = 1e-4
_HEAD_TOLERANCE = 0.01
_HEAD_TOKENS = 16
_LOSS_TOLERANCE = 1e-4  # relative; both are float32 sums over the same logits


@dataclass(frozen=True)
class Packing:
    """How much outputs depend on other samples in a row, relative to their magnitude.

    Attributes:
        first: Difference to the sample in a separate row, for the first sample: by rounding only.
        others: The same for the samples after it.
        before: Difference that other tokens in the middle sample make for the sample before it.
        after: The same for the sample after it.
    """

    first: float
    others: float
    before: float = 0.0
    after: float = 0.0


@torch.no_grad()
def compare_packing(forward: Forward, input_ids: Tensor) -> Packing:
    """Compare rows of several samples with the same samples in separate rows, and with others beside them.

    The samples apart are shorter, so that a model in which tokens see later ones differs in the first sample as well.
    A small influence, such as that of recurrent layers at their initial values, is hidden by the rounding of rows of
    another length. It shows in rows of the same length with another middle sample. The forward pass runs three times,
    whatever the batch holds: ranks that share a model stay together.

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
    packed_positions = positions.repeat(_SAMPLES).expand(rows, -1)

    def by_sample(outputs: Tensor) -> Tensor:
        return outputs.view(rows, _SAMPLES, -1, outputs.shape[-1])

    packed = by_sample(forward(ids, packed_positions))
    apart = by_sample(
        forward(ids.reshape(rows * _SAMPLES, each)[:, :kept], positions[:kept].expand(rows * _SAMPLES, -1))
    )
    changed = by_sample(forward(_with_another_middle(ids, each), packed_positions))
    to_apart = _differences(packed[:, :, :kept], apart)
    to_changed = _differences(packed, changed)
    return Packing(
        first=float(to_apart[0]),
        others=float(to_apart[1:].max()),
        before=float(to_changed[0]),
        after=float(to_changed[-1]),
    )


def _with_another_middle(ids: Tensor, each: int) -> Tensor:
    """Return rows of three samples with other tokens in the second: those of the batch, in another order."""
    changed = ids.clone()
    middle = changed[:, each : 2 * each]
    others = ids.flatten().roll(1).view_as(ids)[:, each : 2 * each].flip(1)
    # Where no token changed, as in a row of one repeated token, the next id stands, or the one before.
    stays = others == middle
    changed[:, each : 2 * each] = torch.where(stays, torch.where(middle > 0, middle - 1, middle + 1), others)
    return changed


def _differences(found: Tensor, expected: Tensor) -> Tensor:
    """Return the relative differences of outputs of shape (rows, samples, length, width), the largest of each sample.

    Of each row, the mean over a sample's tokens: those near its beginning differ most.
    """
    found, expected = found.double(), expected.double()
    relative = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    largest: Tensor = relative.mean(dim=-1).amax(dim=0)
    return largest


def check_packing(found: Packing, *, has_experts: bool = False, dtype: torch.dtype = torch.float32) -> None:
    """Refuse a model in which samples influence each other.

    Args:
        found: What was measured.
        dtype: Of products.
        has_experts: Whether a token's rounding depends on the tokens that the same expert gets.

    Raises:
        ConfigError: They do, or tokens see later ones.
    """
    later = max(found.first, found.before)
    if not (found.first <= _NOISE and found.before <= (_NOISE if has_experts else _LEAST_LATER)):
        raise ConfigError(
            "Expected a model in which a token depends on earlier ones only, got outputs that differ by "
            f"{later:.1g} of their magnitude when later tokens are left out or changed.",
            fix="choose a causal language model, with an attention that follows position_ids.",
        )
    least = _LEAST if torch.finfo(dtype).bits > 16 else _LEAST_16_BITS
    is_apart = found.others <= max(least, _FACTOR * found.first)
    if not (is_apart and found.after <= max(_LEAST_INFLUENCE, _FACTOR * found.before)):
        got, rounding = (found.after, found.before) if is_apart else (found.others, found.first)
        raise ConfigError(
            "Expected packed samples that do not influence each other, got outputs that differ by "
            f"{got:.1g} of their magnitude with other samples in the row (rounding: {rounding:.1g}).",
            fix="use packing=false: this model, with its attention, does not separate samples by position_ids.",
        )


def has_experts(model: nn.Module) -> bool:
    """Return whether tokens of a batch are computed together by experts that they are routed to."""
    return any("expert" in name for name, _ in model.named_modules())


@dataclass(frozen=True)
class OwnOutput:
    """What a model computes when it is called as transformers does, with labels.

    Attributes:
        ids: Tokens, shape (1, length).
        positions: Their positions.
        output: The model's output, with `logits`, `loss`, and the router's logits where it has some.
    """

    ids: Tensor
    positions: Tensor
    output: Any


@torch.no_grad()
def own_output(model: nn.Module, input_ids: Tensor) -> OwnOutput:
    """Return what the model computes on the first tokens of a batch."""
    ids = input_ids[:1, :_HEAD_TOKENS]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return OwnOutput(ids, positions, model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False))


@torch.no_grad()
def is_head_alone(own: OwnOutput, parts: ModelParts) -> bool:
    """Return whether the model's logits are those of its head, with no unknown computation after it."""
    expected: Tensor = own.output.logits.double()
    found = part_logits(parts, hidden_states(parts, own.ids, own.positions)).double()
    return found.shape == expected.shape and float((found - expected).norm()) <= _HEAD_TOLERANCE * float(
        expected.norm()
    )


@torch.no_grad()
def check_own_loss(own: OwnOutput, router: RouterLoss | None) -> None:
    """Refuse a model that adds to its loss what the training would leave out.

    Args:
        own: What the model computes.
        router: The router's loss, which is added in training.

    Raises:
        ConfigError: The model's loss is not the cross entropy with the router's loss.
    """
    output, labels = own.output, own.ids
    logits = output.logits if output.logits.dtype == torch.float64 else output.logits.float()
    added = 0.0
    if router is not None and router.own_weight:
        added = router.own_weight * float(router.value(output.router_logits))
    # Some models expect labels that are shifted already.
    known = [
        added + float(F.cross_entropy(some.flatten(0, 1), of.flatten()))
        for some, of in ((logits[:, :-1], labels[:, 1:]), (logits, labels))
    ]
    loss = float(output.loss)
    if not math.isfinite(loss) or min(abs(loss - one) for one in known) <= _LOSS_TOLERANCE * abs(loss):
        return
    expected = "the cross entropy of its logits" + (" and its router's loss" if added else "")
    raise ConfigError(
        f"Expected a model whose loss is {expected}, {known[0]:.6g} on the first tokens, got {loss:.6g}: it adds a "
        "term, such as a z-loss or label smoothing, that the training would leave out.",
        fix="remove the term from the model's config.json, or pass router_aux_loss_coef=0 to train on the cross "
        "entropy alone.",
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
