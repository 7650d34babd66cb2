"""`WeightStatistics`: norms of weights, gradients and updates, by layer."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import ConfigError
from ...protocols import StateDict
from ...strategies.distributed.clipping import over_shards
from ...strategies.distributed.shards import is_sharded
from ..averaging.weights import part_of
from ..base import AnyModule, Callback
from .measuring import require_logger

if TYPE_CHECKING:
    from ...loggers import Logger
    from ...protocols import AnyBatch, AnyOutput
    from ...trainer import Trainer

_KINDS = ("weights", "gradients", "updates")


class WeightStatistics(Callback):
    """Log norms and maxima of weights and gradients, and the size of updates relative to the weights.

    For each group of parameters: `weights/<group>/norm`, `weights/<group>/max`, `gradients/<group>/norm`,
    `gradients/<group>/max` and, if requested, `updates/<group>/ratio`: the norm of the update divided by the norm of
    the weights, typically about 0.001. `<kind>/total/...` covers all parameters. Gradients are summed over the full
    window, unscaled, and not yet clipped; weights are taken before the step.

    Everything is computed on the device, only at the steps that the Trainer logs, and read with one copy. Values of
    sharded tensors cover the full tensors.

    Args:
        depth: Number of leading parts of a parameter's name that form its group: 1 for the module's children. None
            makes each parameter a group; 0 logs the total only.
        weights: Whether weights are logged.
        gradients: Whether gradients are logged.
        updates: Whether updates are logged, which requires a copy of the weights during logged steps.
        histogram_bins: Number of bins of histograms for loggers whose `experiment` has `add_histogram_raw`
            (TensorBoard); 0 for no histograms.

    Raises:
        ConfigError: An argument is invalid. At the beginning of training: the Trainer has no logger.
    """

    hears_every_step = True

    def __init__(
        self,
        depth: int | None = None,
        *,
        weights: bool = True,
        gradients: bool = True,
        updates: bool = False,
        histogram_bins: int = 0,
    ) -> None:
        problems = [f"depth={depth} is negative"] if depth is not None and depth < 0 else []
        problems += [f"histogram_bins={histogram_bins} is negative"] if histogram_bins < 0 else []
        problems += [] if weights or gradients or updates else ["there is nothing to log"]
        if problems:
            raise ConfigError(f"WeightStatistics: {'; '.join(problems)}.", fix="change these arguments.")
        self.depth = depth
        self.kinds = tuple(kind for kind, on in zip(_KINDS, (weights, gradients, updates), strict=True) if on)
        self.histogram_bins = histogram_bins
        self._lw_names: dict[int, str] = {}
        self._lw_norms: list[tuple[str, str, Tensor]] = []  # kind, parameter's name, norm and largest value: shape (2,)
        self._lw_histograms: list[tuple[str, str, Tensor]] = []  # edges' ends, sum, sum of squares, counts
        self._lw_before: list[tuple[str, Tensor, Tensor]] = []
        self._lw_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Find the parameters' names."""
        require_logger(trainer, self)
        self._lw_names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        self._lw_forget()

    def _lw_forget(self) -> None:
        self._lw_norms, self._lw_histograms, self._lw_before = [], [], []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Compute the statistics on the device if this step is logged, without reading them."""
        if not trainer.should_log:
            return
        if self._lw_step != trainer.global_step:
            self._lw_forget()
            self._lw_step = trainer.global_step
        named = [(self._lw_names[id(parameter)], parameter) for group in optimizer.param_groups
                 for parameter in group["params"] if id(parameter) in self._lw_names]  # fmt: skip
        with torch.no_grad():
            if "weights" in self.kinds:
                self._lw_add("weights", [(name, parameter.detach()) for name, parameter in named])
            if "gradients" in self.kinds:
                self._lw_add("gradients", [(name, p.grad.detach()) for name, p in named if p.grad is not None])
            if "updates" in self.kinds:
                self._lw_before += [(name, parameter, parameter.detach().clone()) for name, parameter in named]

    def _lw_add(self, kind: str, named: list[tuple[str, Tensor]]) -> None:
        self._lw_norms += [(kind, name, pair) for name, pair in _norms(named)]
        if self.histogram_bins:
            self._lw_histograms += [(kind, name, row) for name, row in _histograms(named, self.histogram_bins)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Read the statistics with one copy and log them, after the step."""
        if self._lw_step < 0 or not trainer.at_step_boundary:
            return
        if trainer.global_step > self._lw_step:
            with torch.no_grad():
                self._lw_log(trainer)
        self._lw_forget()
        self._lw_step = -1

    def _lw_log(self, trainer: Trainer) -> None:
        rows = self._lw_norms
        if self._lw_before:
            # Both norms belong to one ratio: what the step changed, and what it changed.
            old = [(name, before) for name, _, before in self._lw_before]
            change = [(name, parameter.detach() - before) for name, parameter, before in self._lw_before]
            rows = rows + [("updates", name, pair) for name, pair in _norms(change)]
            rows = rows + [("before", name, pair) for name, pair in _norms(old)]
        measured = [*rows, *self._lw_histograms]
        has_stages = trainer.strategy.traits.has_stages
        if not (trainer.is_global_zero or has_stages):
            return
        numbers: dict[tuple[str, str, int], list[float]] = {}
        if measured:
            sizes = [one.numel() for _, _, one in measured]
            packed = torch.cat([one for _, _, one in measured]).tolist()  # the one host read, at a log boundary
            for (kind, name, _), size in zip(measured, sizes, strict=True):
                numbers[kind, name, size], packed = packed[:size], packed[size:]
        if has_stages:  # each has the parameters of some layers
            everywhere = trainer.strategy.gather_objects(numbers)
            numbers = {key: value for theirs in reversed(everywhere) for key, value in theirs.items()}
        if not (trainer.is_global_zero and numbers):
            return
        rows_of_all = [(kind, name, row[0], row[1]) for (kind, name, size), row in numbers.items() if size == 2]
        metrics = self._lw_grouped(rows_of_all)
        trainer.log_metrics(metrics, self._lw_step)
        histograms = [(kind, name, row) for (kind, name, size), row in numbers.items() if size > 2]
        self._lw_send_histograms(trainer, histograms)

    def _lw_grouped(self, rows: list[tuple[str, str, float, float]]) -> dict[str, float]:
        squares: dict[tuple[str, str], float] = {}
        largest: dict[tuple[str, str], float] = {}
        for kind, name, norm, top in rows:
            groups = {"total"} if self.depth == 0 else {"total", self._lw_group(name)}
            for group in groups:
                key = (kind, group)
                squares[key] = squares.get(key, 0.0) + norm * norm
                # max() would drop a NaN that comes second.
                largest[key] = math.nan if math.isnan(top) else max(top, largest.get(key, 0.0))
        metrics: dict[str, float] = {}
        for (kind, group), square in squares.items():
            if kind == "updates":
                before = math.sqrt(squares["before", group])
                metrics[f"updates/{group}/ratio"] = math.sqrt(square) / before if before else math.nan
            elif kind != "before":
                metrics[f"{kind}/{group}/norm"] = math.sqrt(square)
                metrics[f"{kind}/{group}/max"] = largest[kind, group]
        return metrics

    def _lw_group(self, name: str) -> str:
        return name if self.depth is None else ".".join(name.split(".")[: self.depth])

    def _lw_send_histograms(self, trainer: Trainer, rows: list[tuple[str, str, list[float]]]) -> None:
        for kind, name, (low, high, total, square, *counts) in rows:
            if not (math.isfinite(low) and math.isfinite(high)):
                continue
            width = (high - low) / self.histogram_bins
            histogram = {
                "min": low,
                "max": high,
                "num": int(sum(counts)),
                "sum": total,
                "sum_squares": square,
                "bucket_limits": [low + width * (number + 1) for number in range(self.histogram_bins)],
                "bucket_counts": counts,
            }
            for logger in trainer.loggers:
                trainer._lw_output.tell(
                    logger, partial(_add_histogram, logger, f"{kind}/{name}", histogram, self._lw_step)
                )

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: the arguments distinguish instances."""
        return self._generate_state_key(depth=self.depth, kinds=self.kinds, histogram_bins=self.histogram_bins)


def _add_histogram(logger: Logger, name: str, histogram: StateDict, step: int) -> None:
    add = getattr(type(logger.experiment), "add_histogram_raw", None)
    if add is not None:
        add(logger.experiment, name, global_step=step, **histogram)


def _norms(named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the 2-norm and the largest size of each tensor: shape (2,), float32, on its device.

    Communicates where tensors are sharded, on every rank.
    """
    named = [(name, value) for name, value in named if value.numel()]
    parts = [_dense(value) for _, value in named]
    filled = [part for part in parts if part.numel()]
    twos = iter(torch._foreach_norm(filled, 2) if filled else ())
    tops = iter(torch._foreach_norm(filled, math.inf) if filled else ())
    rows = [
        torch.stack([next(twos), next(tops)]) if part.numel() else torch.zeros(2, dtype=part.dtype, device=part.device)
        for part in parts
    ]
    if any(is_sharded(value) for _, value in named):
        rows = _of_all_ranks(rows, [value for _, value in named])
    return [(name, row.float()) for (name, _), row in zip(named, rows, strict=True)]


def _of_all_ranks(rows: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Combine the norms of parts: squares add up, and of the largest the largest counts."""
    table = torch.stack([row.double() for row in rows])
    squares = over_shards(table[:, :1].square(), tensors, is_max=False)
    tops = over_shards(table[:, 1:], tensors, is_max=True)
    return list(torch.cat([squares.sqrt(), tops], dim=1))


def _dense(value: Tensor) -> Tensor:
    """Return this rank's numbers of a tensor, in a dtype that norms are computed in."""
    part = part_of(value)
    part = part.coalesce().values() if part.is_sparse else part
    return part if part.dtype in (torch.float32, torch.float64) else part.float()


def _histograms(named: list[tuple[str, Tensor]], bins: int) -> list[tuple[str, Tensor]]:
    """Return lowest, highest, sum, sum of squares and the counts: shape (4 + bins,), float32, on the device.

    Communicates where tensors are sharded, on every rank.
    """
    flats = [_dense(value).float().flatten() for _, value in named]
    limits = [_limits(flat, is_part=is_sharded(value)) for flat, (_, value) in zip(flats, named, strict=True)]
    shares = any(is_sharded(value) for _, value in named)
    if shares:
        limits = list(over_shards(torch.stack(limits), [value for _, value in named], is_max=True))
    rows = [_counts(flat, -limit[0], limit[1], bins) for flat, limit in zip(flats, limits, strict=True)]
    if shares:
        rows = list(over_shards(torch.stack(rows), [value for _, value in named], is_max=False))
    packed = [torch.cat([-limit[:1], limit[1:], row]) for limit, row in zip(limits, rows, strict=True)]
    return [(name, row) for (name, _), row in zip(named, packed, strict=True)]


def _limits(flat: Tensor, *, is_part: bool) -> Tensor:
    """Return minus the lowest number, and the highest: shape (2,), so that of parts the largest count."""
    if not flat.numel():
        return torch.full((2,), -math.inf if is_part else math.nan, device=flat.device)
    low, high = torch.aminmax(flat)
    return torch.stack([-low, high])


def _counts(flat: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    """Return sum, sum of squares, and the counts between two numbers: shape (2 + bins,)."""
    if not flat.numel():
        return torch.zeros(2 + bins, device=flat.device)
    # torch.histc takes its range as host numbers: scaled to 0..1, the range is known without a read.
    scaled = ((flat - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num()
    counts = torch.histc(scaled, bins=bins, min=0.0, max=1.0)
    return torch.cat([torch.stack([flat.sum(), flat.square().sum()]), counts])
