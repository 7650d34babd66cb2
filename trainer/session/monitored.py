"""Names of monitored metrics, checked after the validation before training, and at the first logged step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ...callbacks import Callback
from ...errors import MissingMetric
from ...lazy import is_core
from ...messages import warn
from ..hooks import MODULE_BASES, find_override

if TYPE_CHECKING:
    from ..run import Run

_VALIDATION = ("val", "valid")
# What a name is likely to be logged by when nothing has logged it yet.
_LATE_HOOKS = ("on_train_epoch_end", "on_train_epoch_start", "on_validation_end", "on_validation_epoch_end")
_VALIDATION_HOOKS = (
    "validation_step", "on_validation_epoch_end", "on_validation_batch_end", "on_validation_start",
    "on_validation_epoch_start", "on_validation_end",
)  # fmt: skip
_WITHOUT_VALIDATION = "training, and there is no validation (no loader, no validation_step, or limit_val_batches=0)"
_CONDITIONS = {"sanity_checking", "current_epoch", "global_step"}


class MonitoredNames:
    """The metrics that callbacks and schedules monitor in a fit.

    A name that a later hook may log is not checked here: it is an error where it is needed.

    Args:
        run: The run; its optimizers are built.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._of_validation: set[str] = set()
        self._checked: set[str] = set()

    def check_validation(self) -> None:
        """Check names that begin with "val" against what the validation before training has logged.

        Raises:
            MissingMetric: A name is one that was logged, misspelled.
        """
        run = self._run
        logged = (key for accumulator in run.metrics.accumulators("validation") for key in accumulator.keys)
        self._of_validation = {*logged, *run.metrics.results}
        if not self._of_validation:
            return  # it may log nothing in a trial
        is_sure = not _logs_by_condition(run) and not _has_late_callbacks(run)
        for owner, name in _monitored(run):
            if name.startswith(_VALIDATION):
                self._checked.add(name)
                self._judge(owner, name, self._of_validation, "the validation before training", is_error=is_sure)

    def check_step(self) -> None:
        """Check the names that are left against what training steps log.

        Raises:
            MissingMetric: A name is of a validation that does not run.
        """
        run = self._run
        known = {key for accumulator in run.metrics.accumulators("train") for key in accumulator.keys}
        known |= self._of_validation | set(run.metrics.callback_metrics())
        has_validation = run.loaders.may_validate()
        if not known or (has_validation and not self._of_validation):
            return  # the first validation may log it
        is_late = _has_late_callbacks(run) or _overrides(run.module, _LATE_HOOKS[:2], MODULE_BASES)
        for owner, name in _monitored(run):
            if name in self._checked:
                continue
            if name.startswith(_VALIDATION) and not has_validation:
                self._judge(owner, name, known, _WITHOUT_VALIDATION, is_error=not is_late)
            elif not is_late or _near(name, known):
                self._judge(owner, name, known, "the first steps", is_error=False)

    def check_epoch(self) -> None:
        """Check, at the end of an epoch, the names of a validation that does not run.

        Raises:
            MissingMetric: A name is of a validation that does not run.
        """
        run = self._run
        is_late = _has_late_callbacks(run) or _overrides(run.module, _LATE_HOOKS[:2], MODULE_BASES)
        if is_late or run.loaders.may_validate():
            return
        known = set(run.metrics.callback_metrics())
        for owner, name in _monitored(run):
            if name.startswith(_VALIDATION):
                self._judge(owner, name, known, _WITHOUT_VALIDATION, is_error=True)

    def _judge(self, owner: str, name: str, known: set[str], where: str, *, is_error: bool) -> None:
        if name in known or not self._run.fabric.is_global_zero:
            return
        near = _near(name, known)
        guess = f" (did you mean {near!r}?)" if near else ""
        what = f"{owner} monitors {name!r}{guess}, which was not logged in {where}; logged were {sorted(known)}."
        fix = f"log it with self.log({name!r}, ...), or monitor one of those."
        is_certain = near is not None or where == _WITHOUT_VALIDATION
        if is_error and is_certain and not self._run.has_ranks:  # a rank may log what others do not
            raise MissingMetric(what, fix=fix)
        warn(f"{what} To fix it: {fix}")


def _near(name: str, known: set[str]) -> str | None:
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.8)), None)


def _monitored(run: Run) -> Iterator[tuple[str, str]]:
    """Yield who requires a metric, and its name."""
    for callback in run.callbacks:
        name = getattr(callback, "monitor", None)
        if isinstance(name, str) and getattr(callback, "strict", True):
            yield type(callback).__name__, name
    for config in run.schedulers:
        if config.reduce_on_plateau and config.strict and config.monitor is not None:
            yield f"the schedule {type(config.scheduler).__name__}", config.monitor


def may_log_at_epoch_end(run: Run, name: str) -> bool:
    """Return whether training steps log the name for the epoch, or a hook at its end may log it."""
    if any(one.on_epoch and name in one.keys for one in run.metrics.accumulators("train")):
        return True
    return _has_late_callbacks(run) or _overrides(run.module, _LATE_HOOKS[:1], MODULE_BASES)


def _has_late_callbacks(run: Run) -> bool:
    """Return whether callbacks of the user's run at the end of epochs, which may log more."""
    own = (one for one in run.callbacks if not is_core(type(one)))
    return any(_overrides(callback, _LATE_HOOKS, (Callback,)) for callback in own)


def _overrides(owner: object, names: Iterable[str], bases: tuple[type, ...]) -> bool:
    return any(find_override(owner, name, bases) is not None for name in names)


def _logs_by_condition(run: Run) -> bool:
    """Return whether a hook of the module's validation reads the position of the run, and so may log only later."""
    for name in _VALIDATION_HOOKS:
        hook = find_override(run.module, name, MODULE_BASES)
        code = getattr(getattr(hook, "__func__", hook), "__code__", None)
        if code is not None and _CONDITIONS & set(code.co_names):
            return True
    return False
