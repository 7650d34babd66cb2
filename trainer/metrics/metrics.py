"""Logged metrics: values stay on the device as (sum, weight) until a log boundary or the end of an epoch.

One `Metrics` serves one Trainer. The lifecycle sets `table` to that of the running hook, which knows the defaults of
`log` there; the loops say which window and which batch it is. Nothing here reads a device but `read_step` and
`finish_epoch`, which make one packed copy each. With several ranks these two and `publish_epoch` join what the ranks
have: trainer/metrics/ranks_metrics.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data.move import find_batch_size
from ...errors import ConfigError, ModuleError
from ...protocols import Batch, Gather, StateDict, Tree
from ..lifecycle import HOOKS, LOG_RULES, LogRule
from ..loop.loss import Loss
from .accumulators import MetricAccumulator, ScalarAccumulator, accumulation_dtype, version_of

if TYPE_CHECKING:
    from ...data.batch_size import BatchSizes
    from .ranks_metrics import RanksMetrics

__all__ = ["HookTable", "Metrics", "is_metric", "load_metric_states", "metric_states"]

_REDUCE: dict[object, str] = {
    "mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max",
    torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", min: "min", max: "max", sum: "sum",
}  # fmt: skip


_METRIC_ACCUMULATOR_STATE = ("name", "hook", "on_step", "on_epoch", "prog_bar", "logger", "rank_zero_only")


def _stage_of(hook: str) -> str:
    return next((stage for stage in ("validation", "test") if stage in hook), "train")


def _is_of_batches(hook: str) -> bool:
    return "batch" in hook or "step" in hook


class HookTable:
    """The accumulators that one hook logs to.

    Attributes:
        hook: Name of the hook.
        rule: Defaults of `log` there; None where logging is an error.
        stage: "train", "validation" or "test".
        accumulators: Key -> accumulator, for the data loader that is being read.
        by_loader: The same for each data loader.
    """

    __slots__ = ("accumulators", "by_loader", "hook", "rule", "stage")

    def __init__(self, hook: str, rule: LogRule | None) -> None:
        self.hook = hook
        self.rule = rule
        self.stage = _stage_of(hook)
        self.by_loader: dict[int, dict[str, ScalarAccumulator]] = {0: {}}
        self.accumulators = self.by_loader[0]


class Metrics:
    """Values that were logged, by hook and key.

    Attributes:
        device: Where sums live.
        table: Table of the hook that is running now.
        batch: The micro-batch at hand, which tells the weight of a value; None outside of batches.
        sized: The batch whose size is known; whoever sets another `batch` sets it to None, or it would live on.
        sizes: How many samples the batches of the loader at hand have; None before there is one.
        window: Number of the present window (or evaluation batch); step values of older ones are not logged again.
        step: `global_step` after the present window.
        is_weighing_steps: Whether a window has several micro-batches, so that step values need weights.
        is_muted: Whether `log` does nothing now (a closure that evaluates a batch again).
        results: Latest epoch value of each key: shape (), on the device.
        result_steps: `global_step` at which each of them was computed.
        loaders_of_keys: Key -> the loaders whose batches logged it on any rank, of the last evaluation with several.
        progress_bar: Host values for the bar, as of the last log boundary.
        decisive: Keys on which schedules and callbacks decide: with several ranks their step values need weights.
        late_listeners: Stage -> whether anybody's hook runs between `publish_epoch` and `finish_epoch`, and may log.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._tables = {name: HookTable(name, rule) for name, rule in LOG_RULES.items()}
        self.nowhere = HookTable("", None)
        self.table = self.nowhere
        self.batch: Batch = None
        self.sized: Batch = None
        self.sizes: BatchSizes | None = None
        self._size: int | None = None
        self.window = 0
        self.step = 0
        self.is_weighing_steps = False
        self.is_muted = False
        self.is_disabled = False
        self.several_loaders = False
        self.loader_index = 0
        self.results: dict[str, Tensor] = {}
        self.result_steps: dict[str, int] = {}
        self.loaders_of_keys: dict[str, set[int]] = {}
        self._replaced: dict[str, tuple[Tensor | None, int]] = {}
        self.progress_bar: dict[str, float] = {}
        self._step_accumulators: list[ScalarAccumulator] = []
        self._synchronized: dict[str, tuple[Tensor, int, int]] = {}
        self.decisive: frozenset[str] = frozenset()
        self.late_listeners: dict[str, bool] = {}
        self._ranks: RanksMetrics | None = None

    def connect(
        self,
        gather: Gather | None,
        *,
        rank: int = 0,
        size: int = 1,
        module: torch.nn.Module | None = None,
    ) -> None:
        """Join what is logged with what other ranks log, from now on. Called by the Trainer at the beginning of a run.

        Args:
            gather: Returns the objects of all ranks in rank order, on every rank (`Strategy.gather_objects`); None
                where there is one process.
            rank: This process's place among them.
            size: Their number.
            module: Where metric objects are found on ranks that did not log them.
        """
        if gather is None:
            self._ranks = None
            return
        from .ranks_metrics import RanksMetrics

        self._ranks = RanksMetrics(self, gather, rank=rank, size=size, module=module)

    @property
    def gather(self) -> Gather | None:
        """What returns the objects of all ranks; None where there is one process."""
        return None if self._ranks is None else self._ranks.gather

    @property
    def place(self) -> tuple[int, int]:
        """This process's rank and the number of ranks."""
        return (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)

    def table_of(self, hook: str) -> HookTable:
        """Return the table of a hook."""
        return self._tables[hook]

    def close_table(self, hook: str) -> None:
        """Refuse `log` until the running hook ends: its values were read, because a checkpoint was taken in it."""
        self.table = HookTable(f"{hook} after trainer.save_checkpoint", None)

    def log(
        self,
        name: str,
        value: Any,  # Any: number, tensor, Loss, torchmetrics metric
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., object] = "mean",
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
                value = value.detach()
            if accumulator.reduce == "mean" and (accumulator.weighs or self.is_weighing_steps):
                weight = self._weight(accumulator) if batch_size is None else batch_size
            try:
                version = value._version
            except RuntimeError:  # an inference tensor
                value = value.clone()
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
        self, accumulator: ScalarAccumulator, value: object, batch_size: int | None
    ) -> tuple[Tensor | float, Tensor | float]:
        """Return value and weight of what is not a plain tensor."""
        if isinstance(value, Loss):
            weight = value.weight
            return value.mean().detach(), weight.detach().clone() if isinstance(weight, Tensor) else weight
        if isinstance(accumulator, MetricAccumulator):
            cached = getattr(value, "_forward_cache", None) if accumulator.on_step else 0.0
            if cached is None:
                raise ModuleError(
                    f"log({accumulator.name!r}): on_step=True needs the metric's value of this batch, and only "
                    "update() was called.",
                    fix="call the metric itself, metric(preds, target), or log it with on_step=False, on_epoch=True.",
                )
            return cached, 1.0
        if isinstance(value, Tensor):
            value = value.detach().clone()  # a parameter: the optimizer changes it in place
        elif not isinstance(value, int | float):
            raise _bad_value(accumulator.name, value)
        if accumulator.reduce != "mean" or not (accumulator.weighs or self.is_weighing_steps):
            return value, 1.0
        return value, self._weight(accumulator) if batch_size is None else batch_size

    def _weight(self, accumulator: ScalarAccumulator) -> float:
        batch = self.batch
        if batch is None:
            return 1.0
        if self.sized is not batch:
            found, sizes = find_batch_size(batch), self.sizes
            self._size = found if sizes is None or found == sizes.expected else sizes.resolve(batch, found)
            self.sized = batch
        if self._size is not None:
            return self._size
        # The batch does not tell its size. As long as all batches look the same they weigh the same.
        shapes = _shapes(batch)
        if accumulator.shapes is None:
            accumulator.shapes = shapes
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
        value: object,
        requested: tuple[Any, ...],  # Any: arguments of `log`
    ) -> ScalarAccumulator:
        prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, sync_dist, rank_zero_only = requested
        table = self.table
        rule = table.rule
        if rule is None:
            where = f"in {table.hook}" if table.hook else "outside of the trainer's hooks"
            is_after_save = table.hook.endswith("save_checkpoint")
            raise ModuleError(
                f"log({name!r}) was called {where}, where nothing can be logged.",
                fix="log first, then save: a checkpoint holds what was logged at the event."
                if is_after_save
                else "log in a step, a batch hook or an epoch hook; `python -m loopwright lifecycle` lists them.",
            )
        existing = table.accumulators.get(name)
        if existing is not None and existing.requested is not None:
            raise self._other_arguments(name, existing, requested)
        step = rule.on_step if on_step is None else on_step
        epoch = rule.on_epoch if on_epoch is None else on_epoch
        if step and not rule.may_step:
            raise ModuleError(
                f"log({name!r}, on_step=True) in {table.hook}: there is no step here.",
                fix="leave on_step out; the value is logged once for the epoch.",
            )
        if not epoch and not rule.may_step:
            raise ModuleError(f"log({name!r}, on_epoch=False) in {table.hook}.", fix="leave on_epoch out.")
        accumulator = existing or (None if add_dataloader_idx else self._shared_accumulator(name, requested))
        if accumulator is None:
            accumulator, where = (
                self._new_accumulator(name, value, reduce_fx, step, epoch, add_dataloader_idx),
                _calling_line(),
            )
            self._refuse_conflict(accumulator, where)
            accumulator.where = where
        accumulator.requested = requested
        accumulator.prog_bar = bool(prog_bar)
        accumulator.logger = logger is not False
        accumulator.sync_dist = bool(sync_dist) and not isinstance(accumulator, MetricAccumulator)
        accumulator.rank_zero_only = bool(rank_zero_only)
        is_joined = accumulator.sync_dist or not self.decisive.isdisjoint((accumulator.name, accumulator.step_key))
        accumulator.weighs = accumulator.on_epoch or (is_joined and self._ranks is not None)
        if accumulator.on_step and accumulator not in self._step_accumulators:
            self._step_accumulators.append(accumulator)
        table.accumulators[name] = accumulator
        return accumulator

    def _shared_accumulator(self, name: str, requested: tuple[object, ...]) -> ScalarAccumulator | None:
        """Return the accumulator that another loader opened for a key without the loader's number: all count into one.

        Raises:
            ModuleError: It was opened with other arguments.
        """
        for accumulators in self.table.by_loader.values():
            accumulator = accumulators.get(name)
            if accumulator is not None and accumulator.requested in (requested, None):
                return accumulator
            if accumulator is not None and accumulator.requested is not None and accumulator.name == name:
                raise self._other_arguments(name, accumulator, requested)
        return None

    def _other_arguments(self, name: str, accumulator: ScalarAccumulator, now: tuple[object, ...]) -> ModuleError:
        return ModuleError(
            f"log({name!r}) was called in {self.table.hook} ({_calling_line()}) with other arguments than before "
            f"({accumulator.where}): {_difference(accumulator.requested or (), now)}.",
            fix="log one key with the same arguments each time, or use another key.",
        )

    def _new_accumulator(
        self, name: str, value: object, reduce_fx: object, on_step: bool, on_epoch: bool, add_dataloader_idx: bool
    ) -> ScalarAccumulator:
        table = self.table
        if not isinstance(name, str):
            raise ModuleError(f"log got the name {name!r}, expected a string.", fix="pass the key as a string.")
        full = name
        if add_dataloader_idx and "/dataloader_idx_" in name:
            raise ModuleError(
                f"log({name!r}): '/dataloader_idx_' is added by the trainer.",
                fix="choose another name, or pass add_dataloader_idx=False.",
            )
        is_per_loader = table.stage != "train" and _is_of_batches(table.hook)
        if self.several_loaders and add_dataloader_idx and is_per_loader:
            full = f"{name}/dataloader_idx_{self.loader_index}"
        reduce = _REDUCE.get(reduce_fx)
        if is_metric(value):
            return MetricAccumulator(full, table.hook, value, on_step=on_step, on_epoch=on_epoch)
        if reduce is None:
            raise ConfigError(
                f"log({name!r}): reduce_fx={reduce_fx!r} is not supported.",
                fix="use 'mean', 'sum', 'min' or 'max', or log a torchmetrics metric for anything else.",
            )
        if isinstance(value, Mapping):
            raise _bad_value(name, value)
        accumulator = ScalarAccumulator(full, table.hook, reduce=reduce, on_step=on_step, on_epoch=on_epoch)
        if isinstance(value, Loss):
            value = value.sum
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ModuleError(
                    f"log({name!r}) got a tensor of shape {tuple(value.shape)}, expected one element.",
                    fix="reduce it first, for example with value.mean().",
                )
            is_single = value.dtype.is_floating_point and value.dtype != torch.float64
            accumulator.dtype = torch.float32 if is_single else accumulation_dtype(self.device)  # integers stay exact
        else:
            accumulator.dtype = accumulation_dtype(self.device)
        return accumulator

    def _refuse_conflict(self, new: ScalarAccumulator, where: str) -> None:
        """Refuse a key whose values another key in use would take or give.

        The same name in training and in validation is one key with two sources, as in the field: the latest counts.
        """
        table = self.table
        for other in self._tables.values():
            for accumulator in (
                accumulator for accumulators in other.by_loader.values() for accumulator in accumulators.values()
            ):
                if accumulator.is_empty and not (accumulator.on_step and accumulator.window == self.window):
                    continue
                is_same_name = accumulator.name == new.name
                if is_same_name and other.stage != table.stage:
                    continue
                shared = accumulator.keys & new.keys
                if not shared:
                    continue
                key = min(shared)
                if is_same_name:
                    what = (
                        f"log({new.name!r}) was called in {accumulator.hook} ({accumulator.where}) and in {new.hook} "
                        f"({where})."
                    )
                    fix = "log a key in one hook only, or use two keys."
                else:
                    what = (
                        f"log({accumulator.name!r}) in {accumulator.hook} ({accumulator.where}) and log({new.name!r}) "
                        f"in {new.hook} ({where}) both give {key!r}: on_step=True with on_epoch=True adds '_step' "
                        "and '_epoch'."
                    )
                    fix = "rename one of the two."
                raise ModuleError(what, fix=fix)

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
        """Copy the step values of the present window to the host, in one packed copy.

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
        fresh = [accumulator for accumulator in self._step_accumulators if accumulator.window == self.window]
        if self._ranks is not None and on_all_ranks:
            return self._ranks.read_step(fresh, extra)
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
        self.progress_bar.update({key: number for key in keys if key is not None})

    @property
    def has_step_values(self) -> bool:
        """Whether any step value was logged in the present window."""
        return any(accumulator.window == self.window for accumulator in self._step_accumulators)

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
        if self._ranks is not None:
            self._ranks.publish_epoch(stage, step)
            return
        for accumulator in self.filled_accumulators(stage):
            self.put(accumulator.epoch_value(self.device), step, accumulator.epoch_key, accumulator.name)
            accumulator.finished_window = accumulator.window

    def put(self, value: Tensor, step: int, *keys: str) -> None:
        """Make an epoch's value readable under these keys, remembering what was there before."""
        for key in keys:
            self._synchronized.pop(key, None)
            self._replaced.setdefault(key, (self.results.get(key), self.result_steps.get(key, 0)))
            self.results[key] = value
            self.result_steps[key] = step

    def finish_epoch(self, stage: str, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """End the epoch of a stage: publish, copy to the host in one packed copy, and start over. On every rank.

        Returns:
            Key -> value for the loggers, and key -> value of everything; the same on every rank.
        """
        accumulators = list(self.filled_accumulators(stage))
        self.loaders_of_keys = self.find_loaders(stage)
        if self._ranks is not None:
            finished, self.loaders_of_keys = self._ranks.finish_epoch(stage, step)
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
        """Return which loaders' batches have logged each key on this rank; what hooks of an epoch log is of none.

        Empty where there is one loader.
        """
        found: dict[str, set[int]] = {}
        if not self.several_loaders:
            return found
        for table in self._tables.values():
            if table.stage == stage and _is_of_batches(table.hook):
                for index, accumulators in table.by_loader.items():
                    for accumulator in accumulators.values():
                        if not accumulator.is_empty:
                            found.setdefault(accumulator.epoch_key, set()).add(index)
        return found

    def discard_epoch(self, stage: str) -> None:
        """Forget what a stage logged and put back what it published over: the sanity check leaves no trace."""
        for key, (value, step) in self._replaced.items():
            if value is None:
                del self.results[key], self.result_steps[key]
            else:
                self.results[key], self.result_steps[key] = value, step
        self._replaced = {}
        for accumulator in self.accumulators(stage):
            accumulator.reset()
        if self._ranks is not None:
            self._ranks.discard_epoch(stage)
        for table in self._tables.values():
            if table.stage == stage:
                table.by_loader = {0: {}}
                table.accumulators = table.by_loader[0]
        self._step_accumulators = [
            accumulator for accumulator in self._step_accumulators if _stage_of(accumulator.hook) != stage
        ]

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
        values = dict(self.results)
        for accumulator in self._step_accumulators:
            if accumulator.step_values:
                value = (
                    accumulator.synchronized
                    if accumulator.synchronized_window == accumulator.window
                    else accumulator.step_value(self.device)
                )
                if not isinstance(value, Tensor):
                    value = torch.tensor(value, dtype=accumulator.dtype)
                values[accumulator.step_key] = value.reshape(())
                if accumulator.is_ahead:
                    values[accumulator.name] = values[accumulator.step_key]
        for name in self._synchronized:
            if (joint := self._joint(name)) is not None:
                values[name] = joint[0]
        return values

    def metric_step(self, name: str) -> int | None:
        """Return the `global_step` at which the value of `callback_metrics[name]` was computed; None without one."""
        if (joint := self._joint(name)) is not None:
            return joint[1]
        accumulator = self.step_accumulator(name)
        return self.result_steps.get(name) if accumulator is None else accumulator.step

    def step_accumulator(self, name: str) -> ScalarAccumulator | None:
        """Return the accumulator whose step value `callback_metrics[name]` is; None where it is not a step value."""
        for accumulator in self._step_accumulators:
            if accumulator.step_values and (
                name == accumulator.step_key or (name == accumulator.name and accumulator.is_ahead)
            ):
                return accumulator
        return None

    def _joint(self, name: str) -> tuple[Tensor, int] | None:
        """Return all ranks' value of a key and its step, unless this rank has logged a newer one since."""
        found = self._synchronized.get(name)
        if found is None:
            return None
        value, step, window = found
        accumulator = self.step_accumulator(name)
        return None if accumulator is not None and accumulator.window > window else (value, step)

    def synchronize(self, names: Iterable[str]) -> None:
        """Let `callback_metrics` and `metric_step` be equal on all ranks for these keys until they are logged again.

        For what is about to be decided on them. On every rank with the same keys: with several, it communicates; the
        value of a step is reduced over the ranks that have logged the newest one, as that of an epoch is.
        """
        if self._ranks is not None:
            from .ranks_latest import latest_values

            for name, (value, step) in latest_values(self, names, self._ranks.gather).items():
                self._synchronized[name] = (value, step, self.window)

    # --- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, module: torch.nn.Module | None = None, *, alone: bool = False) -> StateDict:
        """Return published values and the sums of the epoch at hand: plain values and tensors.

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
        return state if self._ranks is None or alone else self._ranks.joined_state(state)

    def of_ranks(self, states: dict[str, StateDict]) -> Tree:
        """Return what every rank's `metric_states` gave, as a list in rank order; with one process, what was given.

        With several ranks: on every rank, it communicates. `load_metric_states` takes either.
        """
        if self._ranks is None:
            return states
        from .ranks_objects import to_cpu

        return self._ranks.gather(to_cpu(states))

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
        self.results = {name: value.to(self.device) for name, value in state_dict["results"].items()}
        self.result_steps = dict(state_dict["result_steps"])
        self._synchronized = {}
        self.window = state_dict["window"]
        self.progress_bar = dict(state_dict["progress_bar"])
        for state in state_dict["slots"]:
            if state["hook"] in HOOKS:
                table = self._tables[state["hook"]]
                accumulators = table.by_loader.setdefault(state["loader"], {})
                accumulators[state["key"]] = ScalarAccumulator.from_state(state, self.device)
        children = dict(module.named_modules()) if module is not None else {}
        for state in state_dict.get("metric_slots", []):
            metric = children.get(state["metric"])
            if state["hook"] in HOOKS and is_metric(metric):
                self._tables[state["hook"]].accumulators[state["key"]] = MetricAccumulator.from_metric(state, metric)


def is_metric(value: object) -> bool:
    """Whether this is a torchmetrics metric object."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def metric_states(module: torch.nn.Module, *, copy: bool = False) -> dict[str, StateDict]:
    """Return the state of each torchmetrics metric in the module, by its path: torchmetrics leaves it out.

    Args:
        module: The module.
        copy: Whether later updates of the metrics must not reach what is returned.
    """

    def kept(state: Tree) -> Tree:
        if isinstance(state, list):
            return [kept(item) for item in state]
        return state.clone() if copy else state

    return {
        path: {
            "update_count": child._update_count,
            "states": {name: kept(getattr(child, name)) for name in child._defaults},
        }
        for path, child in module.named_modules()
        if is_metric(child)
    }


def load_metric_states(
    module: torch.nn.Module,
    states: Mapping[str, StateDict] | list[Mapping[str, StateDict]],
    device: torch.device,
    place: tuple[int, int] = (0, 1),
) -> None:
    """Put back what `metric_states` returned, or the list that `Metrics.of_ranks` made of it.

    Args:
        module: The module.
        states: Path -> state; a list of these where several ranks saved.
        device: Where the states live.
        place: This process's rank and the number of ranks.

    Raises:
        CheckpointError: Another number of ranks saved, and a metric's state cannot be joined.
    """
    if isinstance(states, list) or place[0]:
        from .ranks_objects import own_states

        states = own_states(module, states, *place)
    for path, child in module.named_modules():
        if path in states and is_metric(child):
            child._update_count = states[path]["update_count"]
            for name, value in states[path]["states"].items():
                moved = [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
                setattr(child, name, moved)


def _shapes(batch: Batch) -> object:
    """Return the sizes of everything in a batch, to tell whether two batches look alike."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {key: _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return tuple(shape)
    if isinstance(batch, str | bytes) or not hasattr(batch, "__len__"):
        return type(batch).__name__
    return len(batch)


def _calling_line() -> str:
    """Return file and line of the code outside of this package that is logging."""
    frame = sys._getframe(1)
    package = __name__.partition(".")[0] + "."
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _bad_value(name: str, value: object) -> ModuleError:
    if isinstance(value, Mapping):
        return ModuleError(f"log({name!r}) got a dict.", fix="use self.log_dict for several values.")
    return ModuleError(
        f"log({name!r}) got {type(value).__name__}, expected a number, a tensor of one element, lw.Loss or a "
        "torchmetrics metric.",
        fix="convert the value, for example with float(value).",
    )


def _difference(before: tuple[object, ...], now: tuple[object, ...]) -> str:
    names = (
        "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx", "sync_dist", "rank_zero_only",
    )  # fmt: skip
    return ", ".join(f"{n}={b!r} and {a!r}" for n, b, a in zip(names, before, now, strict=True) if b != a)
