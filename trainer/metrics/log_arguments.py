"""The arguments of `self.log`: what a call may pass in which hook, and the accumulator of a new key.

All of this runs when a key is logged for the first time, or with other arguments than before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ConfigError, ModuleError
from ..loop.loss import Loss
from .accumulators import (
    LogArgument,
    Logged,
    MetricAccumulator,
    Reduction,
    ScalarAccumulator,
    accumulation_dtype,
    is_metric,
)

if TYPE_CHECKING:
    from .metrics import HookTable

_REDUCE: dict[Reduction, str] = {
    "mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max",
    torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", min: "min", max: "max", sum: "sum",
}  # fmt: skip


def check_call(
    table: HookTable,
    name: str,
    existing: ScalarAccumulator | None,
    requested: tuple[LogArgument, ...],
) -> tuple[bool, bool]:
    """Return whether a key is logged for each step, and for the epoch.

    Args:
        table: Table of the running hook.
        name: The key as the user passed it.
        existing: The key's accumulator; None if the key is new.
        requested: Arguments of the call.

    Raises:
        ModuleError: Nothing can be logged in this hook, or not with these arguments, or earlier calls had other
            arguments.
    """
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
    if existing is not None and existing.requested is not None:
        raise _other_arguments(table, name, existing, requested)
    _, _, on_step, on_epoch, *_ = requested
    step = rule.on_step if on_step is None else on_step
    epoch = rule.on_epoch if on_epoch is None else on_epoch
    if step and not rule.may_step:
        raise ModuleError(
            f"log({name!r}, on_step=True) in {table.hook}: there is no step here.",
            fix="leave on_step out; the value is logged once for the epoch.",
        )
    if not epoch and not rule.may_step:
        raise ModuleError(f"log({name!r}, on_epoch=False) in {table.hook}.", fix="leave on_epoch out.")
    return step, epoch


def shared_accumulator(table: HookTable, name: str, requested: tuple[LogArgument, ...]) -> ScalarAccumulator | None:
    """Return the accumulator that another loader opened for a key without the loader's number: all count into one.

    Raises:
        ModuleError: It was opened with other arguments.
    """
    for accumulators in table.by_loader.values():
        accumulator = accumulators.get(name)
        if accumulator is not None and accumulator.requested in (requested, None):
            return accumulator
        if accumulator is not None and accumulator.requested is not None and accumulator.name == name:
            raise _other_arguments(table, name, accumulator, requested)
    return None


def _other_arguments(
    table: HookTable, name: str, accumulator: ScalarAccumulator, now: tuple[LogArgument, ...]
) -> ModuleError:
    return ModuleError(
        f"log({name!r}) was called in {table.hook} ({calling_line()}) with other arguments than before "
        f"({accumulator.where}): {_difference(accumulator.requested or (), now)}.",
        fix="log one key with the same arguments each time, or use another key.",
    )


def check_name(name: str, *, add_dataloader_idx: bool) -> None:
    """Refuse what is not a string, and a name that already contains a loader's number.

    Raises:
        ModuleError: It is one of these.
    """
    if not isinstance(name, str):
        raise ModuleError(f"log got the name {name!r}, expected a string.", fix="pass the key as a string.")
    if add_dataloader_idx and "/dataloader_idx_" in name:
        raise ModuleError(
            f"log({name!r}): '/dataloader_idx_' is added by the trainer.",
            fix="choose another name, or pass add_dataloader_idx=False.",
        )


def make_accumulator(
    key: str,
    hook: str,
    value: Logged,
    reduce_fx: Reduction,
    *,
    on_step: bool,
    on_epoch: bool,
    device: torch.device,
    kind: type[ScalarAccumulator] = ScalarAccumulator,
) -> ScalarAccumulator:
    """Return an empty accumulator for a key, of the kind and dtype of its first value.

    Args:
        key: The key, with the loader's number.
        hook: The hook that logs.
        value: The first value.
        reduce_fx: The argument of `log`.
        on_step: Whether each step's value is logged.
        on_epoch: Whether the epoch's value is logged.
        device: Where sums live.
        kind: The class of accumulators of numbers.

    Raises:
        ModuleError: The value cannot be logged.
        ConfigError: `reduce_fx` is not supported.
    """
    if is_metric(value):
        return MetricAccumulator(key, hook, value, on_step=on_step, on_epoch=on_epoch)
    reduce = _REDUCE.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    if reduce is None:
        raise ConfigError(
            f"log({key!r}): reduce_fx={reduce_fx!r} is not supported.",
            fix="use 'mean', 'sum', 'min' or 'max', or log a torchmetrics metric for anything else.",
        )
    if isinstance(value, Mapping):
        raise bad_value(key, value)
    accumulator = kind(key, hook, reduce=reduce, on_step=on_step, on_epoch=on_epoch)
    if isinstance(value, Loss):
        value = value.sum
    accumulator.dtype = accumulation_dtype(device)  # integers stay exact
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ModuleError(
                f"log({key!r}) got a tensor of shape {tuple(value.shape)}, expected one element.",
                fix="reduce it first, for example with value.mean().",
            )
        if value.dtype.is_floating_point and value.dtype != torch.float64:
            accumulator.dtype = torch.float32
    return accumulator


def refuse_conflict(new: ScalarAccumulator, tables: Iterable[HookTable], *, window: int) -> None:
    """Refuse a key that conflicts with the keys of another one in use.

    The same name in two hooks is one key with two sources, as in the field: the latest value counts.

    Args:
        new: The accumulator of the key, with the line that logs it.
        tables: The tables of all hooks.
        window: Number of the present window.

    Raises:
        ModuleError: Another key has the same name, or passes one of the same keys to loggers.
    """
    names = _names_that_meet(new.name)
    for table in tables:
        found = (by_key[name] for by_key in table.by_loader.values() for name in names if name in by_key)
        for accumulator in found:
            if accumulator.is_empty and not (accumulator.on_step and accumulator.window == window):
                continue
            is_same_name = accumulator.name == new.name
            shared = accumulator.keys & new.keys
            if shared and not (is_same_name and accumulator.hook != new.hook):
                raise _conflict(accumulator, new, min(shared), is_same_name=is_same_name)


def _names_that_meet(key: str) -> set[str]:
    """Return the names of accumulators that may share a key with this one."""
    name, mark, index = key.partition("/dataloader_idx_")
    names = {name, f"{name}_step", f"{name}_epoch", name.removesuffix("_step"), name.removesuffix("_epoch")}
    return names | {f"{one}{mark}{index}" for one in names}


def _conflict(old: ScalarAccumulator, new: ScalarAccumulator, key: str, *, is_same_name: bool) -> ModuleError:
    if is_same_name:
        return ModuleError(
            f"log({new.name!r}) was called in {old.hook} for one data loader ({old.where}) and for all of them "
            f"({new.where}).",
            fix="log a key with one value of add_dataloader_idx, or use two keys.",
        )
    return ModuleError(
        f"log({old.name!r}) in {old.hook} ({old.where}) and log({new.name!r}) in {new.hook} ({new.where}) both give "
        f"{key!r}: on_step=True with on_epoch=True adds '_step' and '_epoch'.",
        fix="rename one of the two.",
    )


def pooled_object(first: ScalarAccumulator, second: ScalarAccumulator | str) -> ModuleError:
    """Return the error for a metric object that two places update between two computes.

    Args:
        first: What the first place logs.
        second: What the second one logs, or the evaluation that updates the object.
    """
    kind = type(first.metric).__name__ if isinstance(first, MetricAccumulator) else "metric"
    other = (
        f"updated in {second}" if isinstance(second, str) else f"as {second.name!r} in {second.hook} ({second.where})"
    )
    return ModuleError(
        f"one {kind} object is logged as {first.name!r} in {first.hook} ({first.where}) and {other}: its value "
        "would mix both.",
        fix="make an object for each, such as self.train_acc and self.val_acc, or one per loader in an nn.ModuleList.",
    )


def calling_line() -> str:
    """Return file and line of the code outside of this package that is logging."""
    frame = sys._getframe(1)
    package = __name__.partition(".")[0] + "."
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def bad_value(name: str, value: Logged) -> ModuleError:
    """Return the error for a value that cannot be logged."""
    if isinstance(value, Mapping):
        return ModuleError(f"log({name!r}) got a dict.", fix="use self.log_dict for several values.")
    return ModuleError(
        f"log({name!r}) got {type(value).__name__}, expected a number, a tensor of one element, lw.Loss or a "
        "torchmetrics metric.",
        fix="convert the value, for example with float(value).",
    )


def _difference(before: tuple[LogArgument, ...], now: tuple[LogArgument, ...]) -> str:
    names = (
        "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx", "sync_dist", "rank_zero_only",
    )  # fmt: skip
    return ", ".join(f"{n}={b!r} and {a!r}" for n, b, a in zip(names, before, now, strict=True) if b != a)
