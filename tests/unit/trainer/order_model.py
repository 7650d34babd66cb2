"""A model of what fit promises: which hooks fire in which order, and what the counters are. Used by the order tests.

Written from the documented lifecycle and nothing else: no line of it knows how the trainer works. It runs no network;
it only counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

BEFORE_MODULE = ("first", "second")
AFTER_MODULE = ("late",)
CALLBACKS = (*BEFORE_MODULE, *AFTER_MODULE)
EVERYBODY = (*BEFORE_MODULE, "module", *AFTER_MODULE)


def samples_of(batch: int) -> int:
    """Return the number of samples of a training batch, from its index in the loader."""
    return 1 + batch % 3


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: stepped every `frequency` "step"s or "epoch"s."""

    interval: str
    frequency: int


@dataclass(frozen=True)
class Plan:
    """The arguments of a fit, and what its user's hooks do.

    Attributes:
        batches: Batches that the training loader gives in an epoch.
        is_sized: Whether the training loader has a length.
        validation: Batches of each validation loader; no validation at all where it is empty.
        without_loss: Which calls of training_step (from 0) return None; in manual optimization they do not step.
        leaves_epoch: Which calls of on_train_batch_start (from 0) return -1.
        stops: Hooks of the first callback that set should_stop, with the number of the call (from 0).
        is_manual: Manual optimization: one backward and one step for each batch.
    """

    batches: int
    is_sized: bool = True
    validation: tuple[int, ...] = ()
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    accumulate_grad_batches: int = 1
    max_epochs: int | None = None
    max_steps: int = -1
    min_epochs: int | None = None
    min_steps: int | None = None
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 0
    without_loss: frozenset[int] = frozenset()
    leaves_epoch: frozenset[int] = frozenset()
    stops: frozenset[tuple[str, int]] = frozenset()
    schedules: tuple[Schedule, ...] = ()
    is_manual: bool = False

    def is_refused(self) -> bool:
        """Whether the arguments contradict each other or the data, which is a ConfigError."""
        limits = [(self.limit_train_batches, self.batches if self.is_sized else None)]
        if self.limit_val_batches != 0:
            limits += [(self.limit_val_batches, length) for length in self.validation]
        for limit, length in limits:
            if isinstance(limit, float) and 0.0 < limit < 1.0 and (length is None or int(length * limit) == 0):
                return True
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float | None):
            return True
        if self.known_batches == 0:
            return False
        if isinstance(self.val_check_interval, float) and self.val_check_interval != 1.0:
            return math.isinf(self.known_batches)
        if isinstance(self.val_check_interval, int) and self.check_val_every_n_epoch is not None:
            return self.validates and self.val_check_interval > self.known_batches
        return False

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.validation) and self.limit_val_batches != 0

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch."""
        return _limited(self.batches, self.limit_train_batches)

    @property
    def known_batches(self) -> float:
        """Batches of an epoch as far as they are known before it is over."""
        if self.is_sized or self.limit_train_batches == 0:
            return self.batches_per_epoch
        if isinstance(self.limit_train_batches, int):
            return self.limit_train_batches
        return math.inf


def _limited(length: int, limit: int | float | None) -> int:
    if limit is None:
        return length
    return int(length * limit) if isinstance(limit, float) else min(length, limit)


@dataclass(frozen=True)
class Call:
    """A hook that fires: on whom, with which indices, and what the counters say meanwhile."""

    who: str
    hook: str
    detail: tuple[object, ...] = ()
    global_step: int = 0
    current_epoch: int = 0


@dataclass
class Counters:
    """What the trainer counts."""

    global_step: int = 0
    current_epoch: int = 0
    total_batches: int = 0
    samples: int = 0
    skipped_steps: int = 0


class StuckError(Exception):
    """Training would never end: an epoch without a step, and nothing but steps to end it (a DataError)."""


@dataclass
class Model:
    """Walks through a fit.

    Attributes:
        counters: As they are now; final when `fit` is exhausted.
    """

    plan: Plan
    counters: Counters = field(default_factory=Counters)
    should_stop: bool = False

    def __post_init__(self) -> None:
        self._calls_of_first: dict[str, int] = {}
        self._training_steps = 0
        self._batch_starts = 0
        self._validated_at = -1

    # --- who hears what ---------------------------------------------------------------------------------------------

    def _to(self, who: str, hook: str, *detail: object) -> Call:
        if who == "first":
            number = self._calls_of_first[hook] = self._calls_of_first.get(hook, -1) + 1
            self.should_stop |= (hook, number) in self.plan.stops
        return Call(who, hook, detail, self.counters.global_step, self.counters.current_epoch)

    def _module(self, *hooks: str) -> Iterator[Call]:
        for hook in hooks:
            yield self._to("module", hook)

    def _all(self, hook: str, *detail: object) -> Iterator[Call]:
        for who in EVERYBODY:
            yield self._to(who, hook, *detail)

    def _callbacks(self, hook: str, *detail: object) -> Iterator[Call]:
        for who in CALLBACKS:
            yield self._to(who, hook, *detail)

    def _transfer(self, loader: int = 0) -> Iterator[Call]:
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            yield self._to("module", hook, loader)

    # --- fit --------------------------------------------------------------------------------------------------------

    def fit(self) -> Iterator[Call]:
        """Give every hook that fires from the beginning of fit to its end."""
        plan = self.plan
        yield from self._module("configure_callbacks", "prepare_data")
        yield from self._all("setup", "fit")
        yield from self._module("configure_model", "configure_optimizers")
        yield from self._all("on_fit_start")
        has_validation = plan.validates
        has_sanity_check = has_validation and plan.num_sanity_val_steps != 0 and not self._is_done()
        if has_sanity_check:
            yield from self._callbacks("on_sanity_check_start")
            yield from self._module("val_dataloader")
            yield from self._validation(plan.num_sanity_val_steps)
            yield from self._callbacks("on_sanity_check_end")
        yield from self._module("train_dataloader")
        if has_validation and not has_sanity_check:
            yield from self._module("val_dataloader")
        yield from self._all("on_train_start")
        while not self._is_done():
            try:
                yield from self._epoch()
            except StuckError:
                yield from self._callbacks("on_exception")
                raise
        yield from self._all("on_train_end")
        yield from self._all("on_fit_end")
        yield from self._all("teardown", "fit")

    def _may_stop(self) -> bool:
        plan, now = self.plan, self.counters
        # min_steps alone also means that the first epoch is finished.
        min_epochs = plan.min_epochs if plan.min_epochs is not None else int(bool(plan.min_steps))
        return now.current_epoch >= min_epochs and now.global_step >= (plan.min_steps or 0)

    def _is_cut_short(self) -> bool:
        return 0 <= self.plan.max_steps <= self.counters.global_step or (self.should_stop and self._may_stop())

    def _is_done(self) -> bool:
        max_epochs = self.plan.max_epochs
        has_all_epochs = max_epochs is not None and 0 <= max_epochs <= self.counters.current_epoch
        return self.plan.limit_train_batches == 0 or has_all_epochs or self._is_cut_short()

    # --- an epoch ---------------------------------------------------------------------------------------------------

    def _epoch(self) -> Iterator[Call]:
        plan, now = self.plan, self.counters
        epoch, steps_before, batches_before = now.current_epoch, now.global_step, now.total_batches
        yield from self._all("on_train_epoch_start")
        batch = 0
        is_over = False
        while not is_over and not self._is_cut_short():
            size = min(plan.accumulate_grad_batches, plan.batches_per_epoch - batch)
            counted = now.total_batches if plan.check_val_every_n_epoch is None else now.total_batches - batches_before
            is_left = yield from self._window(epoch, batch, size)
            batch += size
            is_over = is_left or batch == plan.batches_per_epoch
            new = now.total_batches - (0 if plan.check_val_every_n_epoch is None else batches_before)
            if self._validation_is_due(epoch, counted, new, is_over=is_over, is_new=now.total_batches > batches_before):
                self._validated_at = now.total_batches
                yield from self._module("on_validation_model_zero_grad")
                yield from self._validation(-1)
        yield from self._all("on_train_epoch_end")
        if not is_over:
            return
        now.current_epoch += 1
        is_unbounded = plan.max_epochs in (None, -1)
        if now.global_step == steps_before and is_unbounded and not self._is_done() and not plan.is_manual:
            raise StuckError

    def _window(self, epoch: int, first: int, size: int) -> Iterator[Call]:
        """One optimizer step: returns whether on_train_batch_start asked to leave the epoch."""
        plan, now = self.plan, self.counters
        has_loss = False
        is_at_end = first + size == plan.batches_per_epoch
        for batch in range(first, first + size):
            yield from self._transfer()
            yield from self._all("on_train_batch_start", batch)
            is_left = self._batch_starts in plan.leaves_epoch
            self._batch_starts += 1
            if is_left:
                yield from self._schedules("epoch", epoch + 1)
                return True
            yield self._to("module", "training_step", batch)
            gives_loss = self._training_steps not in plan.without_loss
            self._training_steps += 1
            if plan.is_manual:
                if gives_loss:
                    yield from self._backward()
                    yield from self._all("on_before_optimizer_step")
                    now.global_step += 1
                self._count(batch, 1)
            else:
                has_loss |= gives_loss
                if batch == first:
                    yield from self._all("on_before_zero_grad")
                    yield self._to("module", "optimizer_zero_grad", epoch, batch)
                if gives_loss:
                    yield from self._backward()
                if batch == first + size - 1:
                    yield from self._step(epoch, batch, has_loss=has_loss)
                    self._count(first, size)
                    if has_loss:
                        yield from self._schedules("step", now.global_step)
                    if is_at_end:
                        yield from self._schedules("epoch", epoch + 1)
            yield from self._all("on_train_batch_end", batch)
        return False

    def _backward(self) -> Iterator[Call]:
        yield from self._all("on_before_backward")
        yield from self._module("backward")
        yield from self._all("on_after_backward")

    def _step(self, epoch: int, batch: int, *, has_loss: bool) -> Iterator[Call]:
        if not has_loss:
            self.counters.skipped_steps += 1
            return
        yield from self._all("on_before_optimizer_step")
        yield from self._module("configure_gradient_clipping")
        yield self._to("module", "optimizer_step", epoch, batch)
        self.counters.global_step += 1

    def _count(self, first: int, size: int) -> None:
        self.counters.total_batches += size
        self.counters.samples += sum(samples_of(batch) for batch in range(first, first + size))

    def _schedules(self, interval: str, count: int) -> Iterator[Call]:
        if self.plan.is_manual:
            return
        for number, schedule in enumerate(self.plan.schedules):
            if schedule.interval == interval and count % schedule.frequency == 0:
                yield self._to("module", "lr_scheduler_step", number)

    # --- validation -------------------------------------------------------------------------------------------------

    def _validation_is_due(self, epoch: int, before: int, now: int, *, is_over: bool, is_new: bool) -> bool:
        """Whether validation follows a window that took the count of batches from `before` to `now`."""
        plan = self.plan
        every, interval = plan.check_val_every_n_epoch, plan.val_check_interval
        if not plan.validates or self._validated_at == self.counters.total_batches:
            return False
        if every is not None and (epoch + 1) % every:
            return False
        if every is not None and interval in (None, 1.0) and not isinstance(interval, int):
            return is_over and is_new
        if isinstance(interval, float):
            interval = max(1, int(plan.known_batches * interval))
        assert isinstance(interval, int)
        return now // interval > before // interval

    def _validation(self, most: int) -> Iterator[Call]:
        """Validate on at most `most` batches of each loader, on all for -1."""
        plan = self.plan
        yield from self._module("on_validation_model_eval")
        yield from self._all("on_validation_start")
        yield from self._all("on_validation_epoch_start")
        for loader, length in enumerate(plan.validation):
            length = _limited(length, plan.limit_val_batches)
            for batch in range(length if most == -1 else min(length, most)):
                yield from self._transfer(loader)
                yield from self._all("on_validation_batch_start", batch, loader)
                yield self._to("module", "validation_step", batch, loader)
                yield from self._all("on_validation_batch_end", batch, loader)
        yield from self._all("on_validation_epoch_end")
        yield from self._all("on_validation_end")
        yield from self._module("on_validation_model_train")


def hooks(calls: Iterator[Call] | list[Call], of: Callable[[Call], bool] = lambda call: True) -> list[str]:
    """Return `who.hook` of the calls."""
    return [f"{call.who}.{call.hook}" for call in calls if of(call)]
