"""The lifecycle: the table of every hook, the order of calls, and their dispatch. Hooks are called from here only.

The table is the only source: docs/lifecycle.md and `python -m loopwright lifecycle` are generated from it, and tests
compare the methods of Callback, Module and DataModule with it. A `Lifecycle` is created at the start of
fit, validate, test and predict. For each event it finds the listeners that override the hook and makes one function of
the bound methods. A hook that no listener defines is a function that does nothing. With a profiler,
each call is measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import TYPE_CHECKING, Protocol

from ..callbacks import Checkpoint
from ..messages import warn
from ..protocols import Owner, Tree
from .hooks import CALLBACK_BASES, DATA_BASES, MODULE_BASES, Hook, find_override

if TYPE_CHECKING:
    from torch import nn

    from ..callbacks import Callback
    from ..data.module import DataModule
    from ..profilers import Profiler
    from ..protocols import Batch
    from .metrics.metrics import Metrics


@dataclass(frozen=True, slots=True)
class LogRule:
    """Defaults of `self.log` in a hook, and what it allows.

    Attributes:
        on_step: Default of on_step.
        on_epoch: Default of on_epoch.
        may_step: Whether on_step=True is allowed.
    """

    on_step: bool
    on_epoch: bool
    may_step: bool = True


_STEP = LogRule(on_step=True, on_epoch=False)
_EVAL_BATCH = LogRule(on_step=False, on_epoch=True)
_EPOCH = LogRule(on_step=False, on_epoch=True, may_step=False)


@dataclass(frozen=True, slots=True)
class Event:
    """A row of the table.

    Attributes:
        name: Name of the method.
        arguments: Its arguments after self (a callback's come after `trainer, pl_module`).
        listeners: Kinds of objects that may define it, in the order of the calls: "callbacks", "module", "datamodule".
        when: When it is called.
        ranks: Ranks that call it.
        kind: "event" (all listeners are called), "step" (the user's computation), "behavior" (replaces what the trainer
            does), "data" and "configure" (called once).
        log: Rule for `self.log`, None where logging is an error.
    """

    name: str
    arguments: str
    listeners: tuple[str, ...]
    when: str
    ranks: str = "all"
    kind: str = "event"
    log: LogRule | None = None


_BOTH = ("callbacks", "module")
_ALL = ("datamodule", "callbacks", "module")
_MODULE = ("module",)
_CALLBACKS = ("callbacks",)
_DATA = ("datamodule", "module")


def _pair(stage: str, log: LogRule | None, what: str) -> tuple[Event, ...]:
    return (
        Event(f"on_{stage}_start", "", _BOTH, f"before {what}", log=log),
        Event(f"on_{stage}_end", "", _BOTH, f"after {what}"),
    )


def _evaluation(stage: str, what: str, *, log: bool) -> tuple[Event, ...]:
    epoch, batch = (_EPOCH, _EVAL_BATCH) if log else (None, None)
    args = "batch, batch_idx, dataloader_idx=0"
    return (
        *_pair(stage, epoch, what),
        Event(f"on_{stage}_epoch_start", "", _BOTH, f"before the loaders of {what}", log=epoch),
        Event(f"on_{stage}_epoch_end", "", _BOTH, f"after the last batch of {what}", log=epoch),
        Event(f"on_{stage}_batch_start", args, _BOTH, f"before each step of {what}", log=batch),
        Event(f"{stage if stage != 'validation' else 'validation'}_step", "batch, batch_idx[, dataloader_idx]", _MODULE,
              f"for each batch of {what}", kind="step", log=batch),
        Event(f"on_{stage}_batch_end", f"outputs, {args}", _BOTH, f"after each step of {what}", log=batch),
        Event(f"on_{stage}_model_eval", "", _MODULE, f"before {what}; default: eval()", kind="behavior"),
        *(
            (Event(f"on_{stage}_model_train", "", _MODULE,
                   f"after {what}; default: restores the mode of each submodule", kind="behavior"),)
            if stage != "predict"
            else ()
        ),
    )  # fmt: skip


EVENTS: tuple[Event, ...] = (
    Event("configure_callbacks", "", _MODULE, "first; returns the callbacks of the module", kind="configure"),
    Event("prepare_data", "", _DATA, "once per node, before setup; downloads, tokenizes", "local rank 0", "data"),
    Event("setup", "stage", _ALL, "at the beginning of fit, validate, test, predict"),
    Event("configure_model", "", _MODULE, "after setup; builds layers; must be idempotent", kind="configure"),
    Event("configure_optimizers", "", _MODULE, "at the beginning of fit", kind="configure"),
    *_pair("fit", None, "training"),
    *_pair("train", _EPOCH, "the first epoch")[:1],
    Event("on_train_end", "", _BOTH, "after the last epoch"),
    Event("on_sanity_check_start", "", _CALLBACKS, "before the sanity check"),
    Event("on_sanity_check_end", "", _CALLBACKS, "after the sanity check"),
    Event("train_dataloader", "", _DATA, "before on_train_start", kind="data"),
    Event("val_dataloader", "", _DATA, "before the first validation", kind="data"),
    Event("test_dataloader", "", _DATA, "at the beginning of test", kind="data"),
    Event("predict_dataloader", "", _DATA, "at the beginning of predict", kind="data"),
    Event("on_train_epoch_start", "", _BOTH,
          "at the beginning of an epoch; not repeated when a run resumes within it", log=_EPOCH),
    Event("on_before_batch_transfer", "batch, dataloader_idx", _DATA, "for each batch, on the host", kind="behavior"),
    Event("transfer_batch_to_device", "batch, device, dataloader_idx", _DATA, "for each batch", kind="behavior"),
    Event("on_after_batch_transfer", "batch, dataloader_idx", _DATA, "for each batch, on the device", kind="behavior"),
    Event("on_train_batch_start", "batch, batch_idx", _BOTH,
          "before each micro-batch; if the module returns -1, the rest of the epoch is skipped", log=_STEP),
    Event("training_step", "batch, batch_idx", _MODULE, "for each micro-batch", kind="step", log=_STEP),
    Event("on_before_zero_grad", "optimizer", _BOTH,
          "at the first micro-batch of a window, after its forward pass; for each optimizer", log=_STEP),
    Event("optimizer_zero_grad", "epoch, batch_idx, optimizer", _MODULE,
          "after on_before_zero_grad; default: optimizer.zero_grad()", kind="behavior", log=_STEP),
    Event("on_before_backward", "loss", _BOTH, "before each backward pass", log=_STEP),
    Event("backward", "loss", _MODULE, "for each micro-batch; default: loss.backward()", kind="behavior", log=_STEP),
    Event("on_after_backward", "", _BOTH, "after each backward pass", log=_STEP),
    Event("on_before_optimizer_step", "optimizer", _BOTH,
          "at the last micro-batch of a window, for each optimizer; gradients are complete and unscaled", log=_STEP),
    Event("configure_gradient_clipping", "optimizer, gradient_clip_val, gradient_clip_algorithm", _MODULE,
          "after on_before_optimizer_step; default: clip_gradients", kind="behavior", log=_STEP),
    Event("optimizer_step", "epoch, batch_idx, optimizer, optimizer_closure", _MODULE,
          "after gradient clipping, for each optimizer; the closure returns the loss, which is already computed",
          kind="behavior", log=_STEP),
    Event("lr_scheduler_step", "scheduler, metric", _MODULE, "when a learning rate schedule is due", kind="behavior"),
    Event("on_train_batch_end", "outputs, batch, batch_idx", _BOTH, "after each micro-batch", log=_STEP),
    Event("on_validation_model_zero_grad", "", _MODULE, "before a validation inside fit; default: zero_grad()",
          kind="behavior"),
    *_evaluation("validation", "validation", log=True),
    Event("on_train_epoch_end", "", _BOTH, "after the epoch's last batch and its validation", log=_EPOCH),
    *_evaluation("test", "test", log=True),
    *_evaluation("predict", "prediction", log=False),
    Event("on_save_checkpoint", "checkpoint", _BOTH, "while a checkpoint is created"),
    Event("on_load_checkpoint", "checkpoint", ("module", "callbacks"),
          "before the states of a checkpoint are restored"),
    Event("state_dict", "", ("datamodule", "callbacks"), "while a checkpoint is created", kind="data"),
    Event("load_state_dict", "state_dict", ("datamodule", "callbacks"), "while a checkpoint is restored", kind="data"),
    Event("on_exception", "exception", ("callbacks", "datamodule"),
          "when a run fails; teardown is not called in this case"),
    Event("teardown", "stage", _ALL, "at the end of fit, validate, test, predict"),
)  # fmt: skip

HOOKS = {event.name: event for event in EVENTS}
LOG_RULES = {event.name: event.log for event in EVENTS}

ORDER = """\
fit
  configure_callbacks, prepare_data, setup, configure_model
  [resume: on_load_checkpoint, load_state_dict]
  configure_optimizers, on_fit_start
  [sanity check: on_sanity_check_start, val_dataloader, VALIDATION, on_sanity_check_end]
  train_dataloader, [without sanity check: val_dataloader], on_train_start
  for each epoch
    on_train_epoch_start
    for each window of accumulate_grad_batches micro-batches
      for each micro-batch
        on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
        on_train_batch_start
        training_step
        [first: on_before_zero_grad, optimizer_zero_grad]
        on_before_backward, backward, on_after_backward
        [last:  on_before_optimizer_step, configure_gradient_clipping, optimizer_step, lr_scheduler_step]
        on_train_batch_end            then metrics and loggers, then checkpoints
      [due: on_validation_model_zero_grad, VALIDATION]
    on_train_epoch_end                then checkpoints
  on_train_end, on_fit_end, teardown

VALIDATION
  on_validation_model_eval, on_validation_start, on_validation_epoch_start
  for each batch: transfer hooks, on_validation_batch_start, validation_step, on_validation_batch_end
  on_validation_epoch_end             then metrics and loggers
  on_validation_end                   then checkpoints
  on_validation_model_train

test, predict: as VALIDATION, with their own names (predict has no metrics and no *_model_train)
"""


# Events in which a checkpoint may be saved, after all listeners were called: see `Lifecycle.finish_event`.
_FINISHED_EARLY = frozenset((
    "on_train_epoch_start", "on_train_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end",
))  # fmt: skip


def hook_names(listener: str) -> set[str]:
    """Return the hooks that this kind of listener ("callbacks", "module", "datamodule") may define."""
    return {event.name for event in EVENTS if listener in event.listeners}


def _unheard(*_: Tree) -> None:
    """Do nothing: the function of an event without listeners."""


class _Running:
    """The running event: its name, the listeners that were not called yet, and its arguments; None between events."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event: tuple[str, Iterator[Hook], tuple[object, ...]] | None = None


class _Listened(Protocol):
    """The Trainer, as callbacks get it."""

    @property
    def _lw_itself(self) -> object: ...


class Lifecycle:
    """One function per event; each has the event's name and its arguments.

    Args:
        trainer: Passed to callbacks as their first argument.
        module: The user's module.
        callbacks: In the user's order; those with `runs_last` come after the module, checkpoints last of all.
        datamodule: The user's data module, or None.
        metrics: Notified which hook is running, so that `self.log` has its defaults.
        profiler: Measures every call; None without a profiler.
        system: What the trainer itself does at an event, between the module and the callbacks that run last.

    Attributes:
        override_of: Returns a listener's own hook, None where it only has that of a base class; a layer for another
            library may adapt the hook.
    """

    override_of = staticmethod(find_override)

    def __init__(
        self,
        *,
        trainer: _Listened,
        module: nn.Module,
        callbacks: Sequence[Callback],
        datamodule: DataModule | None,
        metrics: Metrics,
        profiler: Profiler | None,
        system: Mapping[str, Hook],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._datamodule = datamodule
        self._metrics = metrics
        self._profiler = profiler
        self._system = system
        self._early = [callback for callback in callbacks if not callback.runs_last]
        self._late = [callback for callback in callbacks if callback.runs_last]
        self._heard: set[str] = set()
        self._running = _Running()  # an object: the timeline times steps with a copy of this one
        for event in EVENTS:
            if event.kind == "event":
                setattr(self, event.name, self._compile(event))
        self._warn_of_unused()

    def __getattr__(self, name: str) -> Hook:
        """Events are attributes that `__init__` sets from the table; after `release` they are compiled when read."""
        event = HOOKS.get(name)
        if event is None or event.kind != "event":
            raise AttributeError(name)
        return self._compile(event)

    def release(self) -> None:
        """Keep no function that holds the trainer, when the run has ended."""
        self._trainer = weakref.proxy(self._trainer)
        self._system = {}
        for event in EVENTS:
            vars(self).pop(event.name, None)

    def _warn_of_unused(self) -> None:
        """Warn of the module's hooks that are not called because the data module defines them, too."""
        if self._datamodule is None:
            return
        unused = [
            event.name
            for event in EVENTS
            if event.kind == "behavior"
            and "datamodule" in event.listeners
            and self.override_of(self._datamodule, event.name, DATA_BASES) is not None
            and self.override_of(self._module, event.name, MODULE_BASES) is not None
        ]
        if unused:
            data, module = type(self._datamodule).__name__, type(self._module).__name__
            warn(f"{data} and {module} both define {', '.join(unused)}: {data}'s are used")

    def is_heard(self, name: str) -> bool:
        """Whether the event has listeners."""
        return name in self._heard

    def does_anything(self, name: str) -> bool:
        """Whether the event calls anything: a listener, or the trainer itself."""
        return getattr(self, name) is not _unheard

    def wrap(self, name: str, around: Callable[[Hook], Hook]) -> None:
        """Let an event be fired through another function, from now on.

        Args:
            name: Name of the event.
            around: Gets what fires the event, and returns what is called in its place.
        """
        setattr(self, name, around(getattr(self, name)))

    def own(self, name: str) -> Hook | None:
        """Return the user's override of a hook that is not an event: data module's first, then module's; None without.

        The returned function tells the metrics which hook runs, where logging is allowed there.
        """
        event = HOOKS[name]
        hook: Hook | None = None
        label = ""
        if "datamodule" in event.listeners and self._datamodule is not None:
            hook = self.override_of(self._datamodule, name, DATA_BASES)
            label = self.name_of("DataModule", self._datamodule, name)
        if hook is None and "module" in event.listeners:
            hook = self.override_of(self._module, name, MODULE_BASES)
            label = self.name_of("Module", self._module, name)
        if hook is None:
            return None
        hook = self.bracketed(hook, label)
        if event.kind == "behavior" and event.log is not None:
            return self._announced(event.name, hook)
        return hook

    def of_callbacks(self, name: str, *, chosen: Callable[[Callback], bool] = lambda callback: True) -> Hook:
        """Return a function that calls an event's hook of callbacks only, not of the module.

        Args:
            name: Name of the event.
            chosen: Which callbacks; all of them by default.
        """
        callbacks = [callback for callback in (*self._early, *self._late) if chosen(callback)]
        return self._fire(name, self._callback_hooks(callbacks, name), [], [])

    def end_step_without_batch(self, index: int) -> None:
        """Announce the end of a window on a rank that had no batch for its last micro-batch, where others had one.

        Only listeners that have to act at every step on all ranks are called: metrics, and callbacks with
        `hears_every_step`. Outputs and batch are None.
        """
        name = "on_train_batch_end"
        early, late = (
            self._callback_hooks([callback for callback in callbacks if callback.hears_every_step], name)
            for callbacks in (self._early, self._late)
        )
        system = [self._system[name]] if name in self._system else []
        self._fire(name, early, system, late)(None, None, index)

    def all_own(self, name: str) -> list[Hook]:
        """Return every override of a data hook, in the order of the table (data module, then module)."""
        hooks: list[Hook] = []
        for listener in HOOKS[name].listeners:
            if listener == "datamodule" and self._datamodule is not None:
                hooks += self._single(self._datamodule, name, DATA_BASES, "DataModule")
            elif listener == "module":
                hooks += self._single(self._module, name, MODULE_BASES, "Module")
        return hooks

    def name_of(self, kind: str, owner: Owner, hook: str) -> str:
        """Return the name under which a profiler is notified of a listener's hook.

        Args:
            kind: "Module", "DataModule" or "Callback".
            owner: The listener.
            hook: Name of the hook.
        """
        return f"[{kind}]{type(owner).__name__}.{hook}"

    def bracketed(self, function: Hook, activity: str) -> Hook:
        """Return the function inside the profiler's bracket for the activity; itself without a profiler."""
        profiler = self._profiler
        if profiler is None:
            return function

        def measured(*args: object, **kwargs: object) -> object:
            with profiler.profile(activity):
                return function(*args, **kwargs)

        return measured

    def bracketed_items(self, items: Iterator[Batch], activity: str) -> Iterator[Batch]:
        """Return an iterator in which getting each item is an activity; itself without a profiler."""
        return items if self._profiler is None else self._measured_items(items, activity)

    def _measured_items(self, items: Iterator[Batch], activity: str) -> Iterator[Batch]:
        end = object()
        get = self.bracketed(partial(next, items, end), activity)
        while (item := get()) is not end:
            yield item

    def _announced(self, name: str, hook: Hook) -> Hook:
        metrics = self._metrics
        table = metrics.table_of(name)

        def announced(*args: object, **kwargs: object) -> object:
            outer, metrics.table = metrics.table, table
            result = hook(*args, **kwargs)
            metrics.table = outer
            return result

        return announced

    def _compile(self, event: Event) -> Hook:
        name = event.name
        before: list[Hook] = []
        own: list[Hook] = []
        after: list[Hook] = []
        for listener in event.listeners:
            if listener == "callbacks":
                into = own if own else before
                if self._early:
                    into += self._callback_hooks(self._early, name)
                if self._late:
                    after += self._callback_hooks(self._late, name)
            elif listener == "module":
                own += self._single(self._module, name, MODULE_BASES, "Module")
            elif self._datamodule is not None:
                before += self._single(self._datamodule, name, DATA_BASES, "DataModule")
        system = [self._system[name]] if name in self._system else []
        if own or before or after:
            self._heard.add(name)
        if event.log is not None and name.endswith("_epoch_end"):
            # Between the two the metrics are published and not yet finished: hooks that run there may log.
            self._metrics.late_listeners[name.removeprefix("on_").removesuffix("_epoch_end")] = bool(before or own)
        if not (own or before or after or system):
            return _unheard
        if name == "on_train_batch_start":
            return self._fire_with_result(name, before, own, after)
        return self._fire(name, [*before, *own], system, after)

    def _fire(self, name: str, hooks: list[Hook], system: list[Hook], after: list[Hook]) -> Hook:
        every = (*hooks, *system, *after)  # the trainer's own actions take the event's arguments, and read the run
        if not every:
            return _unheard
        metrics = self._metrics
        table = metrics.table_of(name)
        if name in _FINISHED_EARLY:
            if every == tuple(system):
                return system[0]  # it neither logs nor saves, and no listener follows
            return self._fire_to_finish(name, every)

        def fire(*args: object) -> None:
            outer, metrics.table = metrics.table, table
            for hook in every:
                hook(*args)
            metrics.table = outer

        return fire

    def _fire_to_finish(self, name: str, every: tuple[Hook, ...]) -> Hook:
        metrics, running = self._metrics, self._running
        table = metrics.table_of(name)

        def fire(*args: object) -> None:
            outer, metrics.table = metrics.table, table
            outer_event = running.event
            told = iter(every)
            running.event = (name, told, args)
            for hook in told:  # `finish_event` takes from the same iterator
                hook(*args)
            running.event = outer_event
            metrics.table = outer

        return fire

    def finish_event(self) -> None:
        """Call the remaining listeners of the running event now: one of its hooks is about to save a checkpoint.

        The checkpoint then holds the state of every listener after the event, and a resumed run does not repeat the
        rest of it. The hook that saves continues when the others have been called, and it
        cannot log afterwards. If a checkpoint callback saves, the checkpoint callbacks after it are called later; see
        `pending_checkpoints`.
        """
        if self._running.event is None:
            return
        name, told, args = self._running.event
        if length_hint(told) == 0 or length_hint(told) < len(self._checkpoints(name)):
            return
        for hook in told:
            hook(*args)
        self._metrics.close_table(name)

    def leave_events(self) -> None:
        """Forget events that an exception has left: their remaining listeners are not called at a later save."""
        self._running.event = None
        self._metrics.table = self._metrics.nowhere

    def pending_checkpoints(self) -> dict[str, object] | None:
        """Return the running event and the state keys of the checkpoint callbacks that were not called yet."""
        if self._running.event is None:
            return None
        name, told, _ = self._running.event
        count = length_hint(told)
        return {"event": name, "callbacks": [c.state_key for c in self._checkpoints(name)[-count:]]} if count else None

    def _checkpoints(self, name: str) -> list[Callback]:
        """Return the checkpoint callbacks that listen to an event; they come last."""
        bases = CALLBACK_BASES
        return [
            callback
            for callback in self._late
            if isinstance(callback, Checkpoint) and self.override_of(callback, name, bases) is not None
        ]

    def _fire_with_result(self, name: str, before: list[Hook], own: list[Hook], after: list[Hook]) -> Hook:
        """Return a function that returns the result of the module's own hook (-1 skips the rest of the epoch)."""
        if not own:
            return self._fire(name, before, [], after)
        metrics = self._metrics
        table = metrics.table_of(name)
        mine = own[0]
        first, rest = tuple(before), tuple(after)

        def fire(*args: object) -> object:
            outer, metrics.table = metrics.table, table
            for hook in first:
                hook(*args)
            result = mine(*args)
            for hook in rest:
                hook(*args)
            metrics.table = outer
            return result

        return fire

    def _callback_hooks(self, callbacks: Iterable[Callback], name: str) -> list[Hook]:
        hooks = []
        for callback in callbacks:
            hook = self.override_of(callback, name, CALLBACK_BASES)
            if hook is not None:
                bound = partial(hook, self._trainer._lw_itself, self._module)
                hooks.append(self.bracketed(bound, self.name_of("Callback", callback, name)))
        return hooks

    def _single(self, owner: Owner, name: str, bases: tuple[type, ...], kind: str) -> list[Hook]:
        hook = self.override_of(owner, name, bases)
        return [] if hook is None else [self.bracketed(hook, self.name_of(kind, owner, name))]


def markdown() -> str:
    """Return the page docs/lifecycle.md."""
    lines = [
        "# The lifecycle",
        "",
        "Generated by `python -m loopwright lifecycle`; do not edit.",
        "",
        "At each event the callbacks are called first, in the user's order, then the module, then metrics and loggers,",
        "then the callbacks that run last (`EarlyStopping`, checkpoints). A checkpoint therefore holds the state of",
        "all of them after the event. A hook that is not overridden costs nothing.",
        "",
        "## Order",
        "",
        "```text",
        ORDER.rstrip(),
        "```",
        "",
        "## Hooks",
        "",
        "A callback's hook takes `trainer, pl_module` before the arguments. The last column is the default of",
        "`self.log` in the hook; `epoch only` means that `on_step=True` is an error, and `-` that logging is an error.",
        "",
        "| hook | arguments | defined by, in the order of calls | when | ranks | kind | self.log |",
        "|---|---|---|---|---|---|---|",
    ]
    for event in EVENTS:
        arguments = f"`{event.arguments}`" if event.arguments else ""
        lines.append(
            f"| `{event.name}` | {arguments} | {', '.join(event.listeners)} | {event.when} | {event.ranks} "
            f"| {event.kind} | {_log_cell(event.log)} |"
        )
    return "\n".join(lines) + "\n"


def _log_cell(rule: LogRule | None) -> str:
    if rule is None:
        return "-"
    if not rule.may_step:
        return "epoch only"
    return "on_step" if rule.on_step else "on_epoch"
