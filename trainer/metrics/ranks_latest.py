"""The latest values of logged keys over several ranks, for decisions that all ranks must take alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...protocols import Gather
from .ranks_metrics import joined

if TYPE_CHECKING:
    from .metrics import Metrics


@dataclass(frozen=True, slots=True)
class _Latest:
    """What one rank has as the latest value of one key: of a step, or of an epoch, which all ranks have alike.

    Attributes:
        step: `global_step` at which it was computed.
    """

    step: int
    is_of_step: bool
    dtype: torch.dtype
    value: float
    weight: float = 1.0
    reduce: str = "mean"
    rank_zero_only: bool = False


def latest_values(metrics: Metrics, names: Iterable[str], gather: Gather) -> dict[str, tuple[Tensor, int]]:
    """Return the newest value that any rank has of each key, and its step; the same on every rank. One exchange.

    A step's value is reduced over the ranks that logged the key at the newest step, as `sync_dist=True` does.

    Args:
        metrics: This rank's.
        names: Keys of `callback_metrics`, the same on every rank; those that no rank has logged are left out.
        gather: Returns the objects of all ranks in rank order, on every rank.

    Returns:
        Key -> value (shape (), on the device) and the `global_step` at which it was computed.
    """
    accumulators = {name: metrics.step_accumulator(name) for name in dict.fromkeys(names)}
    of_step = {name: accumulator for name, accumulator in accumulators.items() if accumulator is not None}
    of_epoch = {name: metrics.results[name] for name in accumulators if name not in of_step and name in metrics.results}
    assert metrics.ranks is not None
    own, numbers = metrics.ranks.read_shares(of_step.values(), list(of_epoch.values()))
    mine: dict[str, _Latest] = {}
    for (name, accumulator), (value, weight) in zip(of_step.items(), own, strict=True):
        mine[name] = _Latest(
            accumulator.step, True, accumulator.dtype, value, weight, accumulator.reduce, accumulator.rank_zero_only
        )
    for (name, result), number in zip(of_epoch.items(), numbers, strict=True):
        mine[name] = _Latest(metrics.result_steps[name], False, result.dtype, number)
    everywhere = gather(mine)
    found = {}
    for name in accumulators:
        shares = {rank: theirs[name] for rank, theirs in enumerate(everywhere) if name in theirs}
        if shares:
            found[name] = _newest(shares, metrics.device)
    return found


def _newest(shares: dict[int, _Latest], device: torch.device) -> tuple[Tensor, int]:
    """Return the newest value and its step; at one step, an epoch's value is newer than that of a batch."""
    step = max(share.step for share in shares.values())
    shares = {rank: share for rank, share in shares.items() if share.step == step}
    of_epoch = [share for share in shares.values() if not share.is_of_step]
    counting = of_epoch[:1] or ([shares[0]] if 0 in shares and shares[0].rank_zero_only else list(shares.values()))
    values = {share.value for share in counting}
    first = counting[0]
    if len(values) == 1:  # it keeps its bits
        value = first.value
    elif first.reduce in ("mean", "metric"):
        # A rank where nothing counts has no mean: 0 / 0.
        value = joined("mean", [(one.value * one.weight if one.weight else 0.0, one.weight) for one in counting])
    else:
        value = joined(first.reduce, [(one.value, 0.0) for one in counting])
    dtype = torch.float64 if any(share.dtype == torch.float64 for share in counting) else first.dtype
    return torch.tensor(float(value), dtype=torch.float64).to(device, dtype), step
