"""Logged metrics over several ranks.

Each rank keeps its own sums. When an epoch is published, one exchange carries the (sum, weight) of every key, in
float64 on the host, and every rank merges them in rank order: so all have the same bits. A key counts wherever it was
logged: a rank without batches, or one that does not log it, adds nothing. Metric objects take a second exchange, of
their states. Values that hooks log at the end of the epoch take another one, which is omitted if nothing reads them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...errors import ModuleError
from ...protocols import Gather, Options, StateDict, Tree
from .accumulators import MetricAccumulator, ScalarAccumulator, TorchMetric, is_metric
from .metric_objects import compute_joined, metric_states, to_cpu

if TYPE_CHECKING:
    from .metrics import Metrics


_HOW = ("hook", "reduce", "on_step", "rank_zero_only", "epoch_key", "logger", "prog_bar", "dtype")


_Key = tuple[str, str]
"""Hook and name: two hooks may log one name."""


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's share of one key: how it was logged, and the reduction over its values.

    Attributes:
        total: Sum (of value times weight, for a mean), minimum or maximum; 0 for a metric object.
        weight: Weight of a mean.
        shapes: Sizes of batches whose weight is unknown.
        loaders: Whose batches logged it, where there are several loaders.
        path: Where a metric object is in the module; None where it is not, or for other values.
        updates: Updates of a metric object.
    """

    hook: str
    reduce: str
    on_step: bool
    rank_zero_only: bool
    epoch_key: str
    logger: bool
    prog_bar: bool
    dtype: torch.dtype
    total: float = 0.0
    weight: float = 0.0
    shapes: Tree = None  # nested sizes
    loaders: frozenset[int] = frozenset()
    path: str | None = None
    updates: int = 0

    @property
    def is_object(self) -> bool:
        """Whether it is of a metric object."""
        return self.reduce == "metric"


@dataclass(frozen=True, slots=True)
class _StepShare:
    """One rank's values of one key in the current window."""

    name: str | None  # the bar's second key
    reduce: str
    is_synced: bool
    logger: bool
    prog_bar: bool
    rank_zero_only: bool
    value: float
    weight: float
    dtype: torch.dtype


@dataclass(slots=True)
class _Epoch:
    """An epoch that is being closed.

    Attributes:
        known: Key -> share, by rank.
        sent: This rank's.
        may_change: Whether some rank has a hook that may log before the epoch is finished.
    """

    known: list[dict[_Key, _Share]]
    sent: dict[_Key, _Share] = field(default_factory=dict)
    may_change: bool = True


class RanksMetrics:
    """Joins the values of all ranks.

    Args:
        metrics: This rank's.
        gather: Returns the objects of all ranks in rank order.
        rank: This process's place among them.
        size: Their number.
        module: Where metric objects are found on ranks that did not log them.
        has_silent_ranks: Whether some ranks log nothing, as pipeline stages before the last: they take over step values
            at log boundaries and at the end of an epoch.
    """

    def __init__(
        self,
        metrics: Metrics,
        gather: Gather,
        *,
        rank: int,
        size: int,
        module: nn.Module | None,
        has_silent_ranks: bool = False,
    ) -> None:
        self.gather = gather
        self.rank = rank
        self.size = size
        self._metrics: Metrics = weakref.proxy(metrics)  # which has this object
        self._module = module
        self._has_silent_ranks = has_silent_ranks
        self._epochs: dict[str, _Epoch] = {}

    # --- epochs ------------------------------------------------------------------------------------------------------

    def publish_epoch(self, stage: str, step: int) -> None:
        """Exchange what changed since the last exchange of this epoch, and publish the values of these keys.

        Raises:
            ModuleError: On every rank: the ranks logged a key in different ways, or the weight of a mean is unknown.
        """
        metrics = self._metrics
        epoch = self._epochs.setdefault(stage, _Epoch([{} for _ in range(self.size)]))
        accumulators = {(one.hook, one.name): one for one in metrics.filled_accumulators(stage)}
        mine = self._shares(accumulators.values(), metrics.find_loaders(stage))
        changed = {key: share for key, share in mine.items() if epoch.sent.get(key) != share}
        epoch.sent = mine
        latest = metrics.latest_steps(stage) if self._has_silent_ranks else {}
        everywhere = self.gather((changed, metrics.late_listeners.get(stage, True), latest))
        epoch.may_change = any(may_change for _, may_change, _ in everywhere)
        keys = [key for theirs, _, _ in everywhere for key in theirs]
        order = {hook: index for index, hook in enumerate(metrics.hooks)}
        keys = sorted(dict.fromkeys(keys), key=lambda key: order[key[0]])  # of one name, the later hook's value stays
        for known, (theirs, _, _) in zip(epoch.known, everywhere, strict=True):
            known.update(theirs)
        for key, (value, step_of_value) in everywhere[self.rank][2].items():
            if key not in latest:
                metrics.take_over(value, step_of_value, key)
        for name in dict.fromkeys(name for _, name in keys):
            _refuse_other_hooks(name, epoch.known)
        shares = {key: self._counting(key, epoch) for key in keys}
        objects = self._compute_objects(
            {key: next(iter(s.values())) for key, s in shares.items() if next(iter(s.values())).is_object},
            accumulators,
        )
        for (hook, name), by_rank in shares.items():
            share = next(iter(by_rank.values()))
            value = objects[hook, name] if share.is_object else _merged(name, by_rank).to(metrics.device)
            metrics.put(value, step, share.epoch_key, name)

    def finish_epoch(
        self, stage: str, step: int
    ) -> tuple[list[tuple[str, str | None, bool, bool]], dict[str, set[int]]]:
        """Publish what was logged since, and start over.

        Returns:
            For each key of any rank: the epoch's key, the bar's second key, and whether loggers and bar get it. And by
            the epoch's key the loaders whose batches logged it on any rank.
        """
        epoch = self._epochs.get(stage)
        if epoch is None or epoch.may_change:
            self.publish_epoch(stage, step)
        loaders: dict[str, set[int]] = {}
        for known in self._epochs[stage].known:
            for share in known.values():
                if share.loaders:
                    loaders.setdefault(share.epoch_key, set()).update(share.loaders)
        finished = [
            (share.epoch_key, name if share.on_step else None, share.logger, share.prog_bar)
            for (_, name), share in self.discard_epoch(stage).items()
        ]
        return finished, loaders

    def discard_epoch(self, stage: str) -> dict[_Key, _Share]:
        """Forget what was exchanged, and return one share of each key."""
        epoch = self._epochs.pop(stage, None)
        logged: dict[_Key, _Share] = {}
        if epoch is None:
            return logged
        for known in epoch.known:
            for key, share in known.items():
                logged.setdefault(key, share)
        for key, share in logged.items():
            # An object that this rank updated and did not log counted, and starts over like those that were logged.
            metric = self._find(share.path) if key not in epoch.sent else None
            if metric is not None:
                metric.reset()
        return logged

    def _shares(self, accumulators: Iterable[ScalarAccumulator], loaders: Mapping[str, set[int]]) -> dict[_Key, _Share]:
        """Return this rank's shares, read in one packed copy; `loaders` are the loaders of each epoch's key."""
        accumulators = list(accumulators)
        sums = self.read_sums(accumulators)
        paths: dict[int, str] = {}
        if self._module is not None and None in sums:
            paths = {id(child): path for path, child in self._module.named_modules()}
        shares = {}
        for accumulator, pair in zip(accumulators, sums, strict=True):
            own: Options = {}
            if isinstance(accumulator, MetricAccumulator):
                own = {"path": paths.get(id(accumulator.metric)), "updates": accumulator.metric._update_count}
            elif pair is not None:
                own = {"total": pair[0], "weight": pair[1], "shapes": accumulator.shapes}
            how = {name: getattr(accumulator, name) for name in _HOW}
            own["loaders"] = frozenset(loaders.get(accumulator.epoch_key, ()))
            shares[accumulator.hook, accumulator.name] = _Share(**how, **own)
        return shares

    def read_sums(self, accumulators: Sequence[ScalarAccumulator]) -> list[tuple[float, float] | None]:
        """Return this rank's total and weight of each, in one packed copy; None for metric objects."""
        metrics = self._metrics
        sums = [None if isinstance(one, MetricAccumulator) else one.sums(metrics.device) for one in accumulators]
        numbers = iter(metrics.read_numbers([n for pair in sums if pair is not None for n in pair if n is not None]))
        return [None if pair is None else (next(numbers), 0.0 if pair[1] is None else next(numbers)) for pair in sums]

    def _counting(self, key: _Key, epoch: _Epoch) -> dict[int, _Share]:
        """Return the shares of a key that count, by rank."""
        shares = {rank: known[key] for rank, known in enumerate(epoch.known) if key in known}
        ways: dict[str, list[int]] = {}
        for rank, share in shares.items():
            way = f"reduce_fx={share.reduce!r}, on_step={share.on_step}, rank_zero_only={share.rank_zero_only}"
            ways.setdefault(f"in {share.hook}, {way}", []).append(rank)
        _refuse_ways(key[1], ways)
        is_of_rank_zero = 0 in shares and shares[0].rank_zero_only
        return {0: shares[0]} if is_of_rank_zero else shares

    # --- metric objects ----------------------------------------------------------------------------------------------

    def _compute_objects(
        self, shares: dict[_Key, _Share], accumulators: dict[_Key, ScalarAccumulator]
    ) -> dict[_Key, Tensor]:
        """Compute metric objects on every rank from the states of all, in one exchange; none without any."""
        if not shares:
            return {}
        metrics = {key: self._object(key, share.path, accumulators) for key, share in shares.items()}
        states: dict[_Key, Any] = {key: None if m is None else to_cpu(metric_states(m)) for key, m in metrics.items()}
        everywhere = self.gather(states)
        values: dict[_Key, Tensor] = {}
        of_path: dict[str | _Key, Tree] = {}
        for key, share in shares.items():
            theirs = [states[key] for states in everywhere]
            if None in theirs:
                without = [rank for rank, state in enumerate(theirs) if state is None]
                raise ModuleError(
                    f"log({key[1]!r}): the metric object is not known on ranks {without}, which did not log it.",
                    fix="make it an attribute of the module, in __init__ on every rank, or log it on every rank.",
                )
            if share.path is None or share.path not in of_path:
                of_path[share.path or key] = compute_joined(
                    metrics[key], theirs[:1] if share.rank_zero_only else theirs
                )
            value = of_path[share.path or key]
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(cast(float, value)))
            values[key] = tensor.to(self._metrics.device)
        return values

    def _object(self, key: _Key, path: str | None, accumulators: dict[_Key, ScalarAccumulator]) -> TorchMetric:
        """Return this rank's metric object of a key: the one that it logged, else the one at the same place."""
        accumulator = accumulators.get(key)
        return accumulator.metric if isinstance(accumulator, MetricAccumulator) else self._find(path)

    def _find(self, path: str | None) -> TorchMetric:
        """Return the metric object at this place of the module; None where there is none."""
        if path is None or self._module is None:
            return None
        for parent in self._module.modules():
            if hasattr(parent, "compute_groups"):
                # Members of a collection with equal states share one state; reading them gives each a separate state.
                list(parent.items())  # type: ignore[operator]  # a MetricCollection
        metric = dict(self._module.named_modules()).get(path)
        return metric if is_metric(metric) else None

    # --- steps -------------------------------------------------------------------------------------------------------

    def read_step(
        self, accumulators: Sequence[ScalarAccumulator], extra: Tensor | None
    ) -> tuple[dict[str, float], float]:
        """Exchange the step values of the present window; see `Metrics.read_step`."""
        metrics = self._metrics
        shares, (probed,) = self.read_shares(accumulators, [0.0 if extra is None else extra])
        mine = {
            accumulator.step_key: _StepShare(
                accumulator.name if accumulator.on_epoch else None,
                accumulator.reduce,
                accumulator.sync_dist,
                accumulator.logger,
                accumulator.prog_bar,
                accumulator.rank_zero_only,
                value,
                weight,
                accumulator.dtype,
            )
            for accumulator, (value, weight) in zip(accumulators, shares, strict=True)
        }
        everywhere = self.gather((mine, probed))
        values: dict[str, float] = {}
        row: dict[str, float] = {}
        for key in dict.fromkeys(key for theirs, _ in everywhere for key in theirs):
            of_key = [theirs[key] for theirs, _ in everywhere if key in theirs]
            first = of_key[0]
            is_joined = first.is_synced and not first.rank_zero_only
            # A rank where nothing counts has no mean: 0 / 0.
            pairs_of_key = [(share.value * share.weight if share.weight else 0.0, share.weight) for share in of_key]
            if is_joined and first.reduce == "mean":
                value = joined("mean", pairs_of_key)
            elif is_joined:
                value = joined(first.reduce, [(share.value, 0.0) for share in of_key])
            else:
                value = float(first.value)
            values[key] = value
            if first.logger:
                row[key] = value
            if first.prog_bar:
                metrics.show(value, key, first.name)
        for key, share in everywhere[self.rank][0].items():
            if key not in mine:  # this rank logs nothing: another rank reports for it
                number = values[key] if share.is_synced and not share.rank_zero_only else float(share.value)
                metrics.take_over(torch.tensor(number, dtype=share.dtype), metrics.step, key, share.name)
        for accumulator in accumulators:
            if accumulator.sync_dist:
                accumulator.synchronized, accumulator.synchronized_window = (
                    values[accumulator.step_key],
                    accumulator.window,
                )
        is_finite = all(math.isfinite(theirs) for _, theirs in everywhere)
        return row, probed if is_finite else math.nan

    def read_shares(
        self, accumulators: Iterable[ScalarAccumulator], others: Sequence[Tensor | float]
    ) -> tuple[list[tuple[float, float]], list[float]]:
        """Return value and weight of each in its latest window, and other numbers, in one packed copy."""
        metrics = self._metrics
        pairs = [accumulator.step_share(metrics.device) for accumulator in accumulators]
        numbers = metrics.read_numbers([*(number for pair in pairs for number in pair), *others])
        count = 2 * len(pairs)
        return list(zip(numbers[:count:2], numbers[1:count:2], strict=True)), numbers[count:]

    # --- state -------------------------------------------------------------------------------------------------------

    def joined_state(self, state: StateDict) -> StateDict:
        """Return a state that holds the sums of every rank; `state_of_rank` takes it apart again."""
        everywhere = self.gather((to_cpu(state["slots"]), to_cpu(state["metric_slots"])))
        metric_accumulators = {
            (accumulator["hook"], accumulator["key"]): accumulator
            for _, accumulators in reversed(everywhere)
            for accumulator in accumulators
        }
        return {
            **state,
            "slots": [],
            "ranks": [accumulators for accumulators, _ in everywhere],
            "metric_slots": list(metric_accumulators.values()),
        }


def state_of_rank(state: StateDict, rank: int, size: int) -> StateDict:
    """Return what this rank takes over of a state that several ranks saved: each sum counts once.

    On as many ranks as saved, each takes its own, and the epoch's value gets the same bits as without a break. Else
    rank 0 takes over the sums of all, and the others begin empty: then sums are added in another order, in float64.
    """
    ranks: list[list[StateDict]] = state["ranks"]
    if len(ranks) == size:
        return {**state, "slots": ranks[rank]}
    return {**state, "slots": _joined_accumulators(ranks) if rank == 0 else []}


def _joined_accumulators(ranks: list[list[StateDict]]) -> list[StateDict]:
    found: dict[tuple[str, int, str], list[StateDict]] = {}
    for accumulators in ranks:
        for accumulator in accumulators:
            found.setdefault((accumulator["hook"], accumulator["loader"], accumulator["key"]), []).append(accumulator)
    cpu = torch.device("cpu")
    joined = []
    for states in found.values():
        counting = states[:1] if states[0].get("rank_zero_only") else states
        if all(state["total"] is None for state in counting):  # not added up yet
            columns = {name: torch.cat([state[name] for state in counting]) for name in ("values", "weights")}
            joined.append({**states[0], **columns})
            continue
        pairs = []
        for state in counting:
            own_total, own_weight = ScalarAccumulator.from_state(state, cpu).sums(cpu)
            pairs.append((own_total.item(), 0.0 if own_weight is None else own_weight.item()))
        reduce, dtype = states[0]["reduce"], torch.float64
        total, weight = _sums(reduce, pairs)
        joined.append(
            {
                **states[0],
                "total": torch.tensor(total, dtype=dtype),
                "total_weight": torch.tensor(weight, dtype=dtype) if reduce == "mean" else None,
                "values": None,
                "weights": None,
            }
        )
    return joined


def _refuse_other_hooks(name: str, known: Sequence[Mapping[_Key, _Share]]) -> None:
    """Refuse a name that ranks log in other hooks, none of them in common: each value would lack some ranks."""
    hooks = {rank: {hook for hook, one in theirs if one == name} for rank, theirs in enumerate(known)}
    hooks = {rank: found for rank, found in hooks.items() if found}
    if not set.intersection(*hooks.values()):
        ways: dict[str, list[int]] = {}
        for rank, found in hooks.items():
            ways.setdefault(f"in {' and '.join(sorted(found))}", []).append(rank)
        _refuse_ways(name, ways)


def _refuse_ways(name: str, ways: Mapping[str, list[int]]) -> None:
    if len(ways) > 1:
        raise ModuleError(
            f"log({name!r}) was called in different ways: "
            f"{'; '.join(f'{way} on ranks {ranks}' for way, ranks in ways.items())}.",
            fix="log a key in the same hook and with the same arguments on every rank, or use two keys.",
        )


def _merged(name: str, shares: dict[int, _Share]) -> Tensor:
    """Return the value of a key over the ranks that have it: shape (), on the CPU."""
    first = next(iter(shares.values()))
    if first.reduce == "mean":
        shapes = {rank: share.shapes for rank, share in shares.items() if share.shapes is not None}
        if any(one != next(iter(shapes.values())) for one in shapes.values()):
            raise ModuleError(
                f"log({name!r}): the mean over the epoch needs the size of each batch; those of the ranks differ "
                f"({'; '.join(f'rank {rank}: {one}' for rank, one in shapes.items())}) and their tensors do not agree "
                "on a first dimension.",
                fix=f"pass it: self.log({name!r}, value, batch_size=n), or log lw.Loss(sum, weight).",
            )
    dtype = torch.float64 if any(share.dtype == torch.float64 for share in shares.values()) else first.dtype
    value = joined(first.reduce, [(share.total, share.weight) for share in shares.values()])
    return torch.tensor(value, dtype=torch.float64).to(dtype)


def joined(reduce: str, pairs: list[tuple[float, float]]) -> float:
    """Return the mean of (total, weight) pairs, NaN where they weigh nothing; or sum, minimum or maximum of totals."""
    total, weight = _sums(reduce, pairs)
    if reduce != "mean":
        return float(total)
    return float(total / weight) if weight else math.nan


def _sums(reduce: str, pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Add (total, weight) pairs, or take the least or greatest total, in the order given."""
    totals = [total for total, _ in pairs]
    if reduce in ("min", "max"):
        if any(math.isnan(total) for total in totals):
            return math.nan, 0.0
        return (min(totals) if reduce == "min" else max(totals)), 0.0
    total, weight = pairs[0]
    for more, more_weight in pairs[1:]:
        total, weight = total + more, weight + more_weight
    return total, weight
