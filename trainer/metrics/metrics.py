"""Logged metrics: values stay on the device as (sum, weight) until a log boundary or the end of an epoch.

One `Metrics` serves one Trainer. The lifecycle sets `table` to that of the running hook, which knows the defaults of
`log` there; the loops say which window and which batch it is. Only `read_step` and `finish_epoch` read from a device,
with one packed copy each. With several ranks, these two and `publish_epoch` join the values of the ranks:
trainer/metrics/ranks_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor

from ...data.move import find_batch_size
from ...errors import ModuleError
from ...protocols import Batch, Gather, StateDict, Tree
from ..lifecycle import HOOKS, LOG_RULES, LogRule
from ..loop.loss import Loss
from .accumulators import (
    LogArgument,
    Logged,
    MetricAccumulator,
    Reduction,
    ScalarAccumulator,
    accumulation_dtype,
    is_metric,
    shapes_of,
    version_of,
)

if TYPE_CHECKING:
    from ...data.batch_size import BatchSizes
    from .ranks_metrics import RanksMetrics

_METRIC_ACCUMULATOR_STATE = ("name", "hook", "on_step", "on_epoch", "prog_bar", "logger", "rank_zero_only")


def _whole(value: Tensor) -> Tensor:
    """Return a plain tensor; of a sharded one (the norm of a gradient, say) that of all ranks: it communicates."""
    if type(value) is Tensor:
        return value
    from ...strategies.distributed.shards import full_tensor, is_sharded  # not imported for plain tensors

    return full_tensor(value) if is_sharded(value) else value


def _stage_of(hook: str) -> str:
    return next((stage for stage in ("validation", "test") if stage in hook), "train")


class HookTable:
    """The accumulators that one hook logs to.

    Attributes:
        hook: Name of the hook.
        rule: Defaults of `log` there; None where logging is an error.
        stage: "train", "validation" or "test".
        is_of_batches: Whether the hook runs at every batch.
        accumulators: Key -> accumulator, for the data loader that is being read.
        by_loader: The same for each data loader.
    """

    __slots__ = ("accumulators", "by_loader", "hook", "is_of_batches", "rule", "stage")

    def __init__(self, hook: str, rule: LogRule | None) -> None:
        self.hook = hook
        self.rule = rule
        self.stage = _stage_of(hook)
        self.is_of_batches = "batch" in hook or "step" in hook
        self.by_loader: dict[int, dict[str, ScalarAccumulator]] = {0: {}}
        self.accumulators = self.by_loader[0]


class Metrics:
    """Values that were logged, by hook and key.

    Attributes:
        device: Where sums live.
        table: Table of the hook that is running now.
        batch: The current micro-batch, which determines the weight of a value; None outside batches.
        sized: The batch whose size is known; set to None with each new `batch`, because it would keep the batch alive.
        sizes: Numbers of samples in batches of the current loader; None before the first loader.
        source: Returns the tensor that was detached last, while it lives: a weak reference keeps no graph.
        detached: The result of detaching it; the step uses it if the loss itself was logged.
        window: Number of the present window (or evaluation batch); step values of older ones are not logged again.
        step: `global_step` after the present window.
        is_weighing_steps: Whether a window has several micro-batches, so that step values need weights.
        is_muted: Whether `log` does nothing now (a closure that evaluates a batch again).
        results: Latest epoch value of each key: shape (), on the device.
        result_steps: `global_step` at which each of them was computed.
        result_windows: Window after which each was published; step values of later windows are newer.
        loaders_of_keys: Key -> the loaders whose batches logged it on any rank, of the last evaluation with several.
        progress_bar: Host values for the bar, as of the last log boundary.
        newest_bar: Values for the bar of the latest epoch's end, newer than `progress_bar`; on the device until read.
        step_accumulators: The accumulators of values of steps, in the order in which they came.
        ranks: Joins what the ranks have; None with one process.
        decisive: Keys on which schedules and callbacks decide: with several ranks their step values need weights.
        accumulator_type: The class of accumulators of numbers that are logged for the first time.
        shows_evaluated_batches: Whether step values of evaluations count as a key's latest value.
        pools_objects: Whether a metric object may count what two places have updated, as in Lightning.
        late_listeners: Stage -> whether a hook runs between `publish_epoch` and `finish_epoch`, and may log.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        # In the order in which hooks write: of two that log one key, the later one's value stays.
        hooks = sorted(LOG_RULES, key=lambda hook: hook.endswith("epoch_end"))
        self._tables = {hook: HookTable(hook, LOG_RULES[hook]) for hook in hooks}
        self.nowhere = HookTable("", None)
        self.table = self.nowhere
        self.batch: Batch = None
        self.sized: Batch = None
        self.sizes: BatchSizes | None = None
        self.size: int | None = None
        self.source: Callable[[], Tensor | None] = NoneType  # which returns None
        self.detached: Tensor | None = None
        self.window = 0
        # In manual optimization: the first window since the last step, whose values wait for the row of the next.
        self.waiting_since: int | None = None
        self.step = 0
        self.is_weighing_steps = False
        self.is_muted = False
        self.is_disabled = False
        self.several_loaders = False
        self.loader_index = 0
        self.results: dict[str, Tensor] = {}
        self.result_steps: dict[str, int] = {}
        self.result_windows: dict[str, int] = {}
        self.loaders_of_keys: dict[str, set[int]] = {}
        self._replaced: dict[str, tuple[Tensor | None, int, int]] = {}
        self.progress_bar: dict[str, float] = {}
        self.newest_bar: dict[str, Tensor | float] = {}
        self.step_accumulators: dict[ScalarAccumulator, None] = {}
        self._synchronized: dict[str, tuple[Tensor, int, int]] = {}
        self.decisive: frozenset[str] = frozenset()
        self.accumulator_type = ScalarAccumulator
        self.pools_objects = False
        self._updated_before: dict[int, tuple[int, MetricAccumulator]] = {}
        self.shows_evaluated_batches = True
        self.late_listeners: dict[str, bool] = {}
        self.ranks: RanksMetrics | None = None

    def __getstate__(self) -> dict[str, object]:
        state = {**self.__dict__, "batch": None, "sized": None, "sizes": None, "ranks": None}
        return {**state, "source": NoneType, "detached": None}

    def connect(
        self,
        gather: Gather | None,
        *,
        rank: int = 0,
        size: int = 1,
        module: torch.nn.Module | None = None,
        has_silent_ranks: bool = False,
    ) -> None:
        """Join what is logged with what other ranks log, from now on. Called by the Trainer at the beginning of a run.

        Args:
            gather: Returns the objects of all ranks in rank order, on every rank (`Strategy.gather_objects`); None
                where there is one process.
            rank: This process's place among them.
            size: Their number.
            module: Where metric objects are found on ranks that did not log them.
            has_silent_ranks: Whether some ranks log nothing, and take over the step values of others.
        """
        if gather is None:
            self.ranks = None
            return
        from .ranks_metrics import RanksMetrics

        self.ranks = RanksMetrics(self, gather, rank=rank, size=size, module=module, has_silent_ranks=has_silent_ranks)

    @property
    def gather(self) -> Gather | None:
        """Function that returns the objects of all ranks; None with one process."""
        return None if self.ranks is None else self.ranks.gather

    @property
    def place(self) -> tuple[int, int]:
        """This process's rank and the number of ranks."""
        return (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size)

    @property
    def hooks(self) -> Iterable[str]:
        """The hooks that may log, in the order in which they write."""
        return self._tables

    def table_of(self, hook: str) -> HookTable:
        """Return the table of a hook."""
        return self._tables[hook]

    def close_table(self, hook: str) -> None:
        """Refuse `log` until the running hook ends: its values were read, because a checkpoint was taken in it."""
        self.table = HookTable(f"{hook} after trainer.save_checkpoint", None)

    def log(
        self,
        name: str,
        value: Any,  # Any: as Logged, which its first lines tell apart
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        enable_graph: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        sync_dist: bool = False,
        rank_zero_only: bool = False,
    ) -> None:
        """Keep a value; see `Module.log`. Called for every value of every batch: the first lines are the hot path."""
        accumulator = self.table.accumulators.get(name)
        requested = (prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, sync_dist, rank_zero_only)
        if accumulator is None or accumulator.requested != requested:
            if self.is_disabled:
                return
            accumulator = self._open_accumulator(name, value, requested)
        if self.is_muted:
            return
        weight: Tensor | float = 1.0
        version = 0
        if value.__class__ is Tensor:
            if value.requires_grad and not enable_graph:
                if self.source() is value:  # the loss is often logged under several names
                    value = self.detached
                else:
                    self.source = ref(value)
                    value = self.detached = value.detach()
            if value.is_inference():  # it has no version by which a change shows
                if value.is_cpu and not value.ndim:
                    value = value.item()  # on the host already: a seventh of what a copy takes
                else:
                    value = value.clone()
                    version = version_of(value)  # 1, except inside inference mode
            else:
                version = value._version
            if accumulator.reduce == "mean" and (accumulator.weighs or self.is_weighing_steps):
                weight = self.weight_of(accumulator) if batch_size is None else batch_size
        elif value.__class__ is float and accumulator.reduce == "mean":  # most numbers
            if accumulator.weighs or self.is_weighing_steps:
                weight = self.weight_of(accumulator) if batch_size is None else batch_size
        else:
            value, weight = self._number(accumulator, value, batch_size)
            version = version_of(value)
        if accumulator.on_step:
            if accumulator.window != self.window:
                accumulator.window = self.window
                accumulator.step = self.step
                accumulator.step_values = [value]
                accumulator.step_weights = [weight]
                accumulator.step_version = version
            else:
                accumulator.step_values.append(value)
                accumulator.step_weights.append(weight)
                accumulator.step_version += version
        if accumulator.on_epoch:
            accumulator.is_empty = False
            accumulator.values.append(value)
            accumulator.weights.append(weight)
            accumulator.version += version
            if len(accumulator.values) >= accumulator.look_at:
                accumulator.inspect(self.device)

    def _number(
        self, accumulator: ScalarAccumulator, value: Logged, batch_size: int | None
    ) -> tuple[Tensor | float, Tensor | float]:
        """Return value and weight of what is not a plain tensor."""
        if isinstance(value, Loss):
            weight = value.weight
            return _whole(value.mean().detach()), weight.detach().clone() if isinstance(weight, Tensor) else weight
        if isinstance(accumulator, MetricAccumulator):
            if accumulator.on_epoch and accumulator.is_empty and not self.pools_objects:
                self._refuse_pooled(accumulator)
            cached = getattr(value, "_forward_cache", None) if accumulator.on_step else 0.0
            if cached is None:
                raise ModuleError(
                    f"log({accumulator.name!r}): on_step=True needs the metric's value of this batch, and only "
                    "update() was called.",
                    fix="call the metric itself, metric(preds, target), or log it with on_step=False, on_epoch=True.",
                )
            if not accumulator.on_step or not self.is_weighing_steps:
                return cached, 1.0
            return cached, self.weight_of(accumulator) if batch_size is None else batch_size
        if isinstance(value, Tensor):
            value = _whole(value.detach()).clone()  # a parameter: the optimizer changes it in place
        elif not isinstance(value, int | float):
            from .log_arguments import bad_value

            raise bad_value(accumulator.name, value)
        if accumulator.reduce != "mean" or not (accumulator.weighs or self.is_weighing_steps):
            return value, 1.0
        return value, self.weight_of(accumulator) if batch_size is None else batch_size

    def _refuse_pooled(self, new: MetricAccumulator) -> None:
        """Refuse an object whose value would be that of two places; at its first value of an epoch."""
        from .log_arguments import pooled_object

        stage = _stage_of(new.hook)
        count, other = self._updated_before.get(id(new.metric), (0, None))
        if other is not None and stage != "train" and new.metric._update_count > count:
            raise pooled_object(other, new)
        if self.several_loaders and stage != "train":
            for one in self.accumulators(stage):
                if isinstance(one, MetricAccumulator) and one.metric is new.metric and not one.is_empty:
                    loaders = {name.partition("/dataloader_idx_")[2] for name in (one.name, new.name)}
                    if "" not in loaders and len(loaders) == 2:
                        raise pooled_object(one, new)

    def begin_evaluation(self) -> None:
        """Note the updates that training has made of metric objects, which an evaluation must not add to."""
        self._updated_before = {
            id(one.metric): (one.metric._update_count, one)
            for one in self.accumulators("train")
            if isinstance(one, MetricAccumulator) and one.metric._update_count and not self.pools_objects
        }

    def end_evaluation(self, stage: str) -> None:
        """Compare the updates of metric objects with those before the evaluation.

        Raises:
            ModuleError: The evaluation has updated an object whose value training will log.
        """
        from .log_arguments import pooled_object

        before, self._updated_before = self._updated_before, {}
        for count, one in before.values():
            if not one.is_empty and one.metric._update_count > count:
                raise pooled_object(one, stage)

    def select_batch(self, batch: Batch, size: int | None = None) -> None:
        """Let values that are logged from now on belong to this batch.

        Args:
            batch: A batch of the loader, or a part of one.
            size: Samples in a part; None: it is an entire batch.
        """
        self.batch, self.sized = batch, None
        if size is not None:
            self.sized, self.size = batch, size

    def weight_of(self, accumulator: ScalarAccumulator) -> float:
        """Return the samples of the present batch, which weigh a value."""
        batch = self.batch
        if batch is None:
            return 1.0
        if self.sized is not batch:
            found, sizes = find_batch_size(batch), self.sizes
            self.size = found if sizes is None or found == sizes.expected else sizes.resolve(batch, found)
            self.sized = batch
        if self.size is not None:
            return self.size
        # The size of the batch is unknown. As long as all batches have the same shapes, they weigh the same.
        shapes = shapes_of(batch)
        if accumulator.shapes is None:
            accumulator.shapes = shapes
            if self.sizes is not None:
                self.sizes.warn_unknown(batch)
        elif accumulator.shapes != shapes:
            raise ModuleError(
                f"log({accumulator.name!r}): the mean over the epoch needs the size of each batch; the batches differ "
                f"({accumulator.shapes} and {shapes}) and their tensors do not agree on a first dimension.",
                fix=f"pass it: self.log({accumulator.name!r}, value, batch_size=n), or log lw.Loss(sum, weight).",
            )
        return 1.0

    def _open_accumulator(
        self,
        name: str,
        value: Logged,
        requested: tuple[LogArgument, ...],
    ) -> ScalarAccumulator:
        from . import log_arguments as arguments  # not imported before something is logged

        table = self.table
        existing = table.accumulators.get(name)
        on_step, on_epoch = arguments.check_call(table, name, existing, requested)
        prog_bar, logger, _, _, reduce_fx, add_dataloader_idx, sync_dist, rank_zero_only = requested
        accumulator = existing or (None if add_dataloader_idx else arguments.shared_accumulator(table, name, requested))
        if accumulator is None:
            arguments.check_name(name, add_dataloader_idx=add_dataloader_idx)
            key = self._key(name) if add_dataloader_idx else name
            accumulator = arguments.make_accumulator(
                key, table.hook, value, reduce_fx, on_step=on_step, on_epoch=on_epoch, device=self.device,
                kind=self.accumulator_type,
            )  # fmt: skip
            accumulator.where = arguments.calling_line()
            arguments.refuse_conflict(accumulator, self._tables.values(), window=self.window)
        accumulator.requested = requested
        accumulator.prog_bar = bool(prog_bar)
        accumulator.logger = logger is not False
        accumulator.sync_dist = bool(sync_dist) and not isinstance(accumulator, MetricAccumulator)
        accumulator.rank_zero_only = bool(rank_zero_only)
        is_joined = accumulator.sync_dist or not self.decisive.isdisjoint((accumulator.name, accumulator.step_key))
        accumulator.weighs = accumulator.on_epoch or (is_joined and self.ranks is not None)
        if accumulator.on_step:
            self.step_accumulators.setdefault(accumulator)
        table.accumulators[name] = accumulator
        return accumulator

    def _key(self, name: str) -> str:
        """Return the key of a name in the running hook, with the loader's number where there are several."""
        if self.several_loaders and self.table.stage != "train" and self.table.is_of_batches:
            return f"{name}/dataloader_idx_{self.loader_index}"
        return name

    # --- windows and loaders -------------------------------------------------------------------------------------

    def select_loader(self, stage: str, index: int, *, several: bool) -> None:
        """Log to the accumulators of this data loader from now on, in the hooks of the stage."""
        self.several_loaders = several
        self.loader_index = index
        for table in self._tables.values():
            if table.stage == stage:
                table.accumulators = table.by_loader.setdefault(index, {})

    # --- reading -------------------------------------------------------------------------------------------------

    def read_step(self, extra: Tensor | None = None, *, on_all_ranks: bool = True) -> tuple[dict[str, float], float]:
        """Copy the step values of the present window to the host, in one packed copy; with those that wait for it.

        With several ranks, a key with sync_dist=True gets the value of all of them (a mean weighted by what each
        value weighs), another one that of the lowest rank that has it; the result is the same on every rank.

        Args:
            extra: One more value to read with them: shape (), on the device.
            on_all_ranks: Whether every rank calls this for the same window, and the values are to be joined. In an
                evaluation ranks have different numbers of batches: there each reads its own.

        Returns:
            Key -> value for the loggers, and the value of `extra` (0.0 without one; NaN if it is not finite on some
            rank).
        """
        since = self.waiting_since if self.waiting_since is not None and on_all_ranks else self.window
        fresh = [accumulator for accumulator in self.step_accumulators if accumulator.window >= since]
        if self.ranks is not None and on_all_ranks:
            return self.ranks.read_step(fresh, extra)
        *numbers, probed = self.read_numbers(
            [*(accumulator.step_value(self.device) for accumulator in fresh), 0.0 if extra is None else extra]
        )
        row: dict[str, float] = {}
        for accumulator, number in zip(fresh, numbers, strict=True):
            if accumulator.logger:
                row[accumulator.step_key] = number
            if accumulator.prog_bar:
                self.show(number, accumulator.step_key, accumulator.name if accumulator.on_epoch else None)
        return row, probed

    def read_numbers(self, values: list[Tensor | float]) -> list[float]:
        """Return numbers and one-element tensors as numbers of the host, in one packed copy."""
        numbers = iter(self._pack([value for value in values if isinstance(value, Tensor)]))
        return [next(numbers) if isinstance(value, Tensor) else float(value) for value in values]

    def show(self, number: float, *keys: str | None) -> None:
        """Let the progress bar show a number under these keys."""
        for key in keys:
            if key is not None:
                self.progress_bar[key] = number
                self.newest_bar.pop(key, None)

    @property
    def bar_at_end(self) -> dict[str, float]:
        """Newer values for the bar, as of the latest epoch's end; in no checkpoint. Read from the device when asked."""
        values = self.newest_bar
        if any(isinstance(value, Tensor) for value in values.values()):
            self.newest_bar = dict(zip(values, self.read_numbers(list(values.values())), strict=True))
        return cast(dict[str, float], self.newest_bar)

    @property
    def has_step_values(self) -> bool:
        """Whether any step value was logged in the present window."""
        return any(accumulator.window == self.window for accumulator in self.step_accumulators)

    def _pack(self, values: list[Tensor]) -> list[float]:
        if not values:
            return []
        dtype = accumulation_dtype(self.device)
        packed = torch.stack([v.detach().reshape(()).to(self.device, dtype, non_blocking=True) for v in values])
        numbers: list[float] = packed.tolist()
        return numbers

    def publish_epoch(self, stage: str, step: int) -> None:
        """Make the epoch's values so far readable in `results`, on the device. With several ranks: on every rank."""
        self._replaced = {}
        if self.ranks is not None:
            self.ranks.publish_epoch(stage, step)
            return
        for accumulator in self.filled_accumulators(stage):
            self.put(accumulator.epoch_value(self.device), step, accumulator.epoch_key, accumulator.name)

    def show_epoch(self, stage: str) -> None:
        """Let the progress bar show the epoch's values and each key's latest step value. Reads nothing from the device.

        With several ranks, the step value of the last log boundary stays: it covers all ranks, the latest does not.
        """
        shown, newest = self.newest_bar, self.newest_steps()
        for accumulator in self.accumulators(stage):
            if not accumulator.prog_bar:
                continue
            is_kept = self.ranks is not None and accumulator.step_key in self.progress_bar
            is_newest = newest.get(accumulator.step_key) is accumulator
            if is_newest and not accumulator.is_step_changed and not is_kept:
                value = accumulator.step_value(self.device)
                # The user's own tensor, perhaps, which may be changed before it is read.
                shown[accumulator.step_key] = value.clone() if isinstance(value, Tensor) else value
            if accumulator.on_epoch and accumulator.epoch_key in self.results:
                value = self.results[accumulator.epoch_key]
                shown[accumulator.epoch_key] = value
                if accumulator.on_step:
                    shown[accumulator.name] = value

    def put(self, value: Tensor | None, step: int, *keys: str) -> None:
        """Make an epoch's value readable under these keys, remembering what was there before; None: there is no value.

        It is newer than every step value up to now.
        """
        for key in dict.fromkeys(keys):
            self._synchronized.pop(key, None)
            before = (self.results.pop(key, None), self.result_steps.pop(key, 0), self.result_windows.get(key, -1))
            self._replaced.setdefault(key, before)
            self.result_windows[key] = self.window
            if value is not None:
                self.results[key], self.result_steps[key] = value, step

    def take_results(self, values: Mapping[str, Tensor], steps: Mapping[str, int]) -> None:
        """Take over the values of a checkpoint or of other processes: newer than every step value up to now."""
        self.results, self.result_steps = dict(values), dict(steps)
        self.result_windows = dict.fromkeys(values, self.window)
        self._synchronized = {}

    def finish_epoch(self, stage: str, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """End the epoch of a stage: publish, copy to the host in one packed copy, and start over. On every rank.

        Returns:
            Key -> value for the loggers, and key -> value of everything; the same on every rank.
        """
        accumulators = list(self.filled_accumulators(stage))
        self.loaders_of_keys = self.find_loaders(stage)
        if self.ranks is not None:
            finished, self.loaders_of_keys = self.ranks.finish_epoch(stage, step)
        else:
            self.publish_epoch(stage, step)
            finished = [
                (
                    accumulator.epoch_key,
                    accumulator.name if accumulator.on_step else None,
                    accumulator.logger,
                    accumulator.prog_bar,
                )
                for accumulator in accumulators
                if accumulator.epoch_key in self.results
            ]
        numbers = self._pack([self.results[key] for key, *_ in finished])
        row, everything = {}, {}
        for (key, name, is_sent, is_shown), number in zip(finished, numbers, strict=True):
            everything[key] = number
            if is_sent:
                row[key] = number
            if is_shown:
                self.show(number, key, name)
        for accumulator in accumulators:
            accumulator.reset()
        self._replaced = {}
        return row, everything

    def find_loaders(self, stage: str) -> dict[str, set[int]]:
        """Return which loaders' batches have logged each key on this rank; values of epoch hooks belong to none.

        Empty where there is one loader.
        """
        found: dict[str, set[int]] = {}
        if not self.several_loaders:
            return found
        for table in self._tables.values():
            if table.stage == stage and table.is_of_batches:
                for index, accumulators in table.by_loader.items():
                    for accumulator in accumulators.values():
                        if not accumulator.is_empty:
                            found.setdefault(accumulator.epoch_key, set()).add(index)
        return found

    def discard_epoch(self, stage: str) -> None:
        """Discard what a stage logged and restore what it overwrote, so that the sanity check has no effect."""
        for key, (value, step, window) in self._replaced.items():
            self.result_windows[key] = window
            if value is not None:
                self.results[key], self.result_steps[key] = value, step
            elif key in self.results:
                del self.results[key], self.result_steps[key]
        self._replaced = {}
        for accumulator in self.accumulators(stage):
            accumulator.reset()
        if self.ranks is not None:
            self.ranks.discard_epoch(stage)
        for table in self._tables.values():
            if table.stage == stage:
                table.by_loader = {0: {}}
                table.accumulators = table.by_loader[0]
        self.step_accumulators = {
            accumulator: None for accumulator in self.step_accumulators if _stage_of(accumulator.hook) != stage
        }

    def filled_accumulators(self, stage: str) -> Iterator[ScalarAccumulator]:
        """Yield the accumulators of a stage that have something for the epoch."""
        return (
            accumulator for accumulator in self.accumulators(stage) if accumulator.on_epoch and not accumulator.is_empty
        )

    def accumulators(self, stage: str) -> list[ScalarAccumulator]:
        """Return the accumulators of a stage, each once also where several loaders share it."""
        accumulators = {
            id(accumulator): accumulator
            for table in self._tables.values()
            if table.stage == stage
            for by_key in table.by_loader.values()
            for accumulator in by_key.values()
        }
        return list(accumulators.values())

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the latest value of each key: shape (), on the device; nothing is read.

        With several ranks, epoch values are the same on all of them; those of a step are this rank's own, and all
        ranks' once they were joined: by `synchronize`, or with sync_dist=True at a log boundary.
        """
        values, newest = dict(self.results), self.newest_steps()
        for key, accumulator in newest.items():
            value = (
                accumulator.synchronized
                if accumulator.synchronized_window == accumulator.window
                else accumulator.step_value(self.device)
            )
            if not isinstance(value, Tensor):
                value = torch.tensor(value, dtype=accumulator.dtype)
            values[key] = value.reshape(())
        for name, (joint, _, window) in self._synchronized.items():
            if name not in newest or newest[name].window <= window:
                values[name] = joint
        return values

    def metric_step(self, name: str) -> int | None:
        """Return the `global_step` at which the value of `callback_metrics[name]` was computed; None without one."""
        accumulator, joint = self.step_accumulator(name), self._synchronized.get(name)
        if joint is not None and (accumulator is None or accumulator.window <= joint[2]):
            return joint[1]
        return self.result_steps.get(name) if accumulator is None else accumulator.step

    def step_accumulator(self, name: str) -> ScalarAccumulator | None:
        """Return the accumulator whose step value `callback_metrics[name]` is; None where it is not a step value."""
        return self.newest_steps().get(name)

    def newest_steps(self) -> dict[str, ScalarAccumulator]:
        """Return each key whose latest value is that of a step, and the accumulator that has it."""
        newest: dict[str, ScalarAccumulator] = {}
        for accumulator in self.step_accumulators:
            if accumulator.step_values and (self.shows_evaluated_batches or _stage_of(accumulator.hook) == "train"):
                for key in (accumulator.step_key, accumulator.name):
                    other = newest.get(key)
                    if accumulator.window > self.result_windows.get(key, -1) and (
                        other is None or accumulator.window >= other.window
                    ):
                        newest[key] = accumulator
        return newest

    def latest_steps(self, stage: str) -> dict[str, tuple[Tensor, int]]:
        """Return the latest step value of each key of a stage, on the CPU, and its step."""
        values = self.callback_metrics()
        return {
            key: (values[key].detach().to("cpu", copy=True), one.step)
            for key, one in self.newest_steps().items()
            if key == one.step_key and _stage_of(one.hook) == stage
        }

    def take_over(self, value: Tensor, step: int, *keys: str | None) -> None:
        """Let `callback_metrics` have another rank's step value: shape (), on the CPU."""
        for key in keys:
            if key is not None:
                self._synchronized[key] = (value.to(self.device, non_blocking=True), step, self.window)

    def synchronize(self, names: Iterable[str]) -> None:
        """Let `callback_metrics` and `metric_step` be equal on all ranks for these keys until they are logged again.

        For what is about to be decided on them. On every rank with the same keys: with several, it communicates; the
        value of a step is reduced over the ranks that have logged the newest one, as that of an epoch is.
        """
        if self.ranks is not None:
            from .ranks_latest import latest_values

            for name, (value, step) in latest_values(self, names, self.ranks.gather).items():
                self._synchronized[name] = (value, step, self.window)

    # --- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, module: torch.nn.Module | None = None, *, alone: bool = False) -> StateDict:
        """Return published values and the sums of the current epoch: plain values and tensors.

        Args:
            module: Where metric objects that were logged are named by their path in it.
            alone: Whether other ranks may be gone: then nothing is requested of them, and the state is this rank's own.

        With several ranks the state holds the sums of each of them: on every rank, it communicates.
        """
        state = {
            "results": (results := self.callback_metrics()),
            "result_steps": {name: self.metric_step(name) or 0 for name in results},
            "window": self.window,
            "progress_bar": dict(self.progress_bar),
            "slots": [
                {**accumulator.state_dict(self.device), "loader": loader, "key": key}
                for table in self._tables.values()
                if table.stage == "train"  # a validation that has not ended is repeated
                for loader, accumulators in table.by_loader.items()
                for key, accumulator in accumulators.items()
                if not isinstance(accumulator, MetricAccumulator) and accumulator.on_epoch and not accumulator.is_empty
            ],
            "metric_slots": self._metric_accumulators(module) if module is not None else [],
        }
        return state if self.ranks is None or alone else self.ranks.joined_state(state)

    def of_ranks(self, states: dict[str, StateDict]) -> Tree:
        """Return what every rank's `metric_states` returned, as a list in rank order; with one process, what was given.

        With several ranks: on every rank, it communicates. `load_metric_states` takes either.
        """
        if self.ranks is None:
            return states
        from .metric_objects import to_cpu

        return self.ranks.gather(to_cpu(states))

    def _metric_accumulators(self, module: torch.nn.Module) -> list[StateDict]:
        paths = {id(child): path for path, child in module.named_modules()}
        return [
            {
                "metric": paths[id(accumulator.metric)],
                "key": key,
                **{name: getattr(accumulator, name) for name in _METRIC_ACCUMULATOR_STATE},
            }
            for table in self._tables.values()
            if table.stage == "train"
            for key, accumulator in table.accumulators.items()
            if isinstance(accumulator, MetricAccumulator)
            and not accumulator.is_empty
            and id(accumulator.metric) in paths
        ]

    def load_state_dict(self, state_dict: StateDict, module: torch.nn.Module | None = None) -> None:
        """Continue where `state_dict` was taken, on as many ranks or on others: each sum counts once."""
        if "ranks" in state_dict:
            from .ranks_metrics import state_of_rank

            state_dict = state_of_rank(state_dict, *self.place)
        elif self.place[0]:  # one process saved it, and its sums are taken over by rank 0
            state_dict = {**state_dict, "slots": []}
        self.window = state_dict["window"]
        values = {name: value.to(self.device) for name, value in state_dict["results"].items()}
        self.take_results(values, state_dict["result_steps"])
        self.progress_bar = dict(state_dict["progress_bar"])
        for state in state_dict["slots"]:
            if state["hook"] in HOOKS:
                table = self._tables[state["hook"]]
                accumulators = table.by_loader.setdefault(state["loader"], {})
                accumulators[state["key"]] = self.accumulator_type.from_state(state, self.device)
        children = dict(module.named_modules()) if module is not None else {}
        for state in state_dict.get("metric_slots", []):
            metric = children.get(state["metric"])
            if state["hook"] in HOOKS and is_metric(metric):
                self._tables[state["hook"]].accumulators[state["key"]] = MetricAccumulator.from_metric(state, metric)
