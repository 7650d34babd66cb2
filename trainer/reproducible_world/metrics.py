"""Logged metrics as exact sums: the same bits for any order of the values, and so for any number of ranks.

The values of an epoch stay on the device, 16 bytes for each, until they are read. The host adds them as fractions, and
rounds once. Values of steps are those of all ranks, weighted, whatever `sync_dist` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from ..metrics.accumulators import MetricAccumulator, ScalarAccumulator, column_of
from ..metrics.ranks_metrics import RanksMetrics

if TYPE_CHECKING:
    from torch import nn

    from ...protocols import StateDict
    from ..metrics.metrics import Metrics


def _always(self: object) -> bool:
    return True


def _ignore(self: object, value: bool) -> None:
    return None


class ExactAccumulator(ScalarAccumulator):
    """The values of one key, which are added up when they are read, and not before.

    Attributes:
        chunks: Columns of values and weights, float64, shape (n,), that are older than `values` and `weights`.
    """

    __slots__ = ("chunks",)
    chunks: list[tuple[Tensor, Tensor]]

    sync_dist = property(_always, _ignore)
    weighs = property(_always, _ignore)

    @override
    def _clear(self) -> None:
        super()._clear()
        self.chunks = []

    @override
    def _fold(self, device: torch.device) -> None:
        self._refuse_changed(self.values, self.version)
        self.chunks.append((column_of(self.values, device), column_of(self.weights, device)))
        self.values, self.weights, self.version = [], [], 0

    def columns(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all values of the epoch and their weights: float64, shape (n,), on the device."""
        if self.values:
            self._fold(device)
        if self.total is not None:  # of a checkpoint without exact sums
            weight = torch.ones_like(self.total) if self.total_weight is None else self.total_weight
            value = self.total / weight
            self.chunks.append((value.reshape(1), weight.reshape(1)))
            self.total = self.total_weight = None
        self.chunks = [(torch.cat([v for v, _ in self.chunks]), torch.cat([w for _, w in self.chunks]))]
        return self.chunks[0]

    @override
    def sums(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        values, weights = self.columns(device)
        if self.reduce == "mean":
            return torch.where(weights == 0, torch.zeros_like(values), values * weights).sum(), weights.sum()
        return cast(Tensor, getattr(values, self.reduce)()), None

    @override
    def state_dict(self, device: torch.device) -> StateDict:
        values, weights = self.columns(device)
        return {**super().state_dict(device), "values": values, "weights": weights}


class ExactMetrics(RanksMetrics):
    """Joins the values of all ranks, also of a single one."""

    @override
    def read_sums(self, accumulators: Sequence[ScalarAccumulator]) -> list[tuple[float, float] | None]:
        device = self._metrics.device
        columns = [
            None if isinstance(one, MetricAccumulator) else cast(ExactAccumulator, one).columns(device)
            for one in accumulators
        ]
        known = [column for pair in columns if pair is not None for column in pair]
        numbers: list[float] = torch.cat(known).tolist() if known else []
        sums: list[tuple[float, float] | None] = []
        for one, pair in zip(accumulators, columns, strict=True):
            if pair is None:
                sums.append(None)
                continue
            count = pair[0].numel()
            sums.append(exact_sums(one.reduce, numbers[:count], numbers[count : 2 * count]))
            del numbers[: 2 * count]
        return sums

    @override
    def read_shares(
        self, accumulators: Iterable[ScalarAccumulator], others: Sequence[Tensor | float]
    ) -> tuple[list[tuple[float, float]], list[float]]:
        accumulators = list(accumulators)
        for one in accumulators:
            one._refuse_changed(one.step_values, one.step_version)
        values = [value for one in accumulators for value in [*one.step_values, *one.step_weights]]
        numbers = iter(self._metrics.read_numbers([*values, *others]))
        shares = []
        for one in accumulators:
            pairs = [[next(numbers) for _ in column] for column in (one.step_values, one.step_weights)]
            total, weight = exact_sums("mean" if one.reduce == "metric" else one.reduce, *pairs)
            is_mean = one.reduce in ("mean", "metric")
            shares.append((total / weight if is_mean and weight else math.nan if is_mean else total, weight))
        return shares, list(numbers)


def use_exact_metrics(metrics: Metrics, *, rank: int, size: int, module: nn.Module) -> None:
    """Let metrics be exact sums from now on: of the ranks that they are connected to, or of this one."""
    gather = metrics.gather or _alone
    metrics.ranks = ExactMetrics(metrics, gather, rank=rank, size=size, module=module)
    metrics.accumulator_type = ExactAccumulator


def _alone(obj: Any) -> list[Any]:
    return [obj]


def exact_sums(reduce: str, values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return sum (of value times weight, for a mean) and weight, as fractions that count as floats; or an extreme."""
    if reduce in ("min", "max"):
        is_nan = any(math.isnan(value) for value in values)
        return math.nan if is_nan else (min if reduce == "min" else max)(values), 0.0
    if reduce == "sum":
        return _total((value, 1.0) for value in values), 0.0
    return _total((v, w) for v, w in zip(values, weights, strict=True) if w), _total((w, 1.0) for w in weights)


def _total(products: Iterable[tuple[float, float]]) -> Any:  # Any: a Fraction counts as a float below
    """Return the exact sum of products; a float where one is not finite."""
    pairs = list(products)
    odd = {value * weight for value, weight in pairs if not (math.isfinite(value) and math.isfinite(weight))}
    if odd:  # an infinity of one sign, or NaN
        return odd.pop() if len(odd) == 1 else math.nan
    ratios = [(a * c, b * d) for (a, b), (c, d) in ((v.as_integer_ratio(), w.as_integer_ratio()) for v, w in pairs)]
    common = max((below for _, below in ratios), default=1)  # all are powers of two
    return Fraction(sum(above * (common // below) for above, below in ratios), common)
