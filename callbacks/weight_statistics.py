"""Log how large weights, gradients and updates are, layer by layer. Built by users."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError
from .base import Callback

if TYPE_CHECKING:
    from ..loggers import Logger
    from ..trainer.trainer import Trainer

__all__ = ["WeightStatistics"]

_KINDS = ("weights", "gradients", "updates")


class WeightStatistics(Callback):
    """Log norms and largest values of weights and gradients, and how large a step is in comparison to the weights.

    For each group of parameters: `weights/<group>/norm`, `weights/<group>/max`, `gradients/<group>/norm`,
    `gradients/<group>/max` and, where they are asked for, `updates/<group>/ratio`: the norm of what the step changed by
    the norm of the weights, about 0.001 in a training that goes well. Beside them `<kind>/total/...` of all parameters.
    Gradients are those of the whole window, unscaled, before clipping; weights those before the step.

    Everything is computed on the device, at the steps that the trainer logs only, and is read with one copy. Other
    steps cost a comparison.

    Args:
        depth: Group parameters by the first parts of their name, so many of them: 1 for the module's children. None for
            each parameter by itself; 0 for the total alone.
        weights: Whether to log weights.
        gradients: Whether to log gradients.
        updates: Whether to log updates: takes a copy of the weights during the steps that are logged.
        histogram_bins: Also send histograms of weights and gradients with so many bins to loggers whose `experiment`
            has `add_histogram_raw` (TensorBoard); 0 for none.

    Raises:
        ConfigError: Arguments that cannot work; at the beginning of training, no logger.
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
        self._names: dict[int, str] = {}
        self._norms: list[tuple[str, str, Tensor]] = []  # kind, parameter's name, norm and largest value: shape (2,)
        self._histograms: list[tuple[str, str, Tensor]] = []  # edges' ends, sum, sum of squares, counts
        self._before: list[tuple[str, Tensor, Tensor]] = []
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Learn the parameters' names."""
        if not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigError(
                "WeightStatistics has no logger to write to.", fix="pass Trainer(logger=...), or remove the callback."
            )
        self._names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        self._forget()

    def _forget(self) -> None:
        self._norms, self._histograms, self._before = [], [], []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Compute on the device, if this step is logged; nothing is read."""
        if not trainer.should_log:
            return
        if self._step != trainer.global_step:
            self._forget()
            self._step = trainer.global_step
        named = [(self._names[id(parameter)], parameter) for group in optimizer.param_groups
                 for parameter in group["params"] if id(parameter) in self._names]  # fmt: skip
        with torch.no_grad():
            if "weights" in self.kinds:
                self._add("weights", [(name, parameter.detach()) for name, parameter in named])
            if "gradients" in self.kinds:
                self._add("gradients", [(name, p.grad.detach()) for name, p in named if p.grad is not None])
            if "updates" in self.kinds:
                self._before += [(name, parameter, parameter.detach().clone()) for name, parameter in named]

    def _add(self, kind: str, named: list[tuple[str, Tensor]]) -> None:
        self._norms += [(kind, name, pair) for name, pair in _norms(named)]
        if self.histogram_bins:
            self._histograms += [(kind, name, _histogram(value, self.histogram_bins)) for name, value in named]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read everything with one copy and log it, once the step has been taken."""
        if not (self._norms or self._before) or not trainer.at_step_boundary:
            return
        if trainer.global_step > self._step:
            with torch.no_grad():
                self._log(trainer)
        self._forget()
        self._step = -1

    def _log(self, trainer: Trainer) -> None:
        rows = self._norms
        if self._before:
            # Both norms belong to one ratio: what the step changed, and what it changed.
            old = [(name, before) for name, _, before in self._before]
            change = [(name, parameter.detach() - before) for name, parameter, before in self._before]
            rows = rows + [("updates", name, pair) for name, pair in _norms(change)]
            rows = rows + [("before", name, pair) for name, pair in _norms(old)]
        packed = torch.cat([pair for _, _, pair in rows] + [one for _, _, one in self._histograms])
        if not trainer.is_global_zero:
            return
        numbers = packed.tolist()  # the one host read, at a log boundary
        metrics = self._grouped([(kind, name, numbers[2 * at], numbers[2 * at + 1])
                                 for at, (kind, name, _) in enumerate(rows)])  # fmt: skip
        trainer.log_metrics(metrics, self._step)
        self._send_histograms(trainer, numbers[2 * len(rows) :])

    def _grouped(self, rows: list[tuple[str, str, float, float]]) -> dict[str, float]:
        squares: dict[tuple[str, str], float] = {}
        largest: dict[tuple[str, str], float] = {}
        for kind, name, norm, top in rows:
            groups = {"total"} if self.depth == 0 else {"total", self._group(name)}
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

    def _group(self, name: str) -> str:
        return name if self.depth is None else ".".join(name.split(".")[: self.depth])

    def _send_histograms(self, trainer: Trainer, numbers: list[float]) -> None:
        size = 4 + self.histogram_bins
        for at, (kind, name, _) in enumerate(self._histograms):
            low, high, total, square, *counts = numbers[at * size : (at + 1) * size]
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
                trainer.output.tell(logger, partial(_add_histogram, logger, f"{kind}/{name}", histogram, self._step))

    @property
    def state_key(self) -> str:
        """One name per set of arguments."""
        return self._generate_state_key(depth=self.depth, kinds=self.kinds, histogram_bins=self.histogram_bins)


def _add_histogram(logger: Logger, name: str, histogram: dict[str, Any], step: int) -> None:
    add = getattr(type(logger.experiment), "add_histogram_raw", None)
    if add is not None:
        add(logger.experiment, name, global_step=step, **histogram)


def _norms(named: list[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Return the 2-norm and the largest size of each tensor: shape (2,), float32, on its device."""
    dense = [(name, value.coalesce().values() if value.is_sparse else value) for name, value in named]
    dense = [(name, value) for name, value in dense if value.numel()]
    if not dense:
        return []
    values = [value if value.dtype in (torch.float32, torch.float64) else value.float() for _, value in dense]
    twos, tops = torch._foreach_norm(values, 2), torch._foreach_norm(values, math.inf)
    return [
        (name, torch.stack([_whole(two).float(), _whole(top).float()]))
        for (name, _), two, top in zip(dense, twos, tops, strict=True)
    ]


def _whole(value: Tensor) -> Tensor:
    """Return the number of all shards; communicates where the parameter is sharded, on every rank."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _histogram(value: Tensor, bins: int) -> Tensor:
    """Return lowest, highest, sum, sum of squares and the counts: shape (4 + bins,), float32, on the device."""
    local = value.to_local() if hasattr(value, "to_local") else value
    flat = (local.coalesce().values() if local.is_sparse else local).float().flatten()
    if not flat.numel():
        return torch.full((4 + bins,), math.nan, device=flat.device)
    low, high = torch.aminmax(flat)
    # torch.histc takes its range as host numbers: scaled to 0..1, the range is known without a read.
    scaled = ((flat - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num()
    counts = torch.histc(scaled, bins=bins, min=0.0, max=1.0)
    return torch.cat([torch.stack([low, high, flat.sum(), flat.square().sum()]), counts])
