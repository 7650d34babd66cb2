"""A second `fit` of one Trainer: it continues what the first one built, as in one run of the total length.

Counts, data, random numbers and callbacks are the Trainer's and continue by themselves. `configure_optimizers` makes
new optimizers and schedules at each fit; here they get the state of the previous ones. Values that are configured
differently now are used, and what cannot continue starts from scratch: both are logged, once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from ...checkpoint import content as contents
from ...errors import CheckpointError
from ...messages import warn
from ...protocols import StateDict
from ...strategies.optional import load_strategy_state, strategy_state
from ..checkpointing import snapshot
from ..checkpointing.optimizer_record import all_names, fit_groups, names_of
from .checks import unwrapped

if TYPE_CHECKING:
    from ..run import FitRun
    from ..trainer import Trainer
    from ..view import TrainerView

log = logging.getLogger(__name__)

Before = StateDict  # states of optimizers and schedules, in torch's layout


def take_before(trainer: Trainer, model: nn.Module) -> Before | None:
    """Return the state that the last fit of this Trainer left, before a new one sets the module up; None without one.

    On every rank: where parameters are sharded, each rank takes its own.

    Args:
        trainer: The Trainer.
        model: The module that is about to be trained.
    """
    if not trainer.progress.total_batches:
        return None
    module = unwrapped(model)
    if trainer._lw_spawned_checkpoint is not None:  # it ran in other processes
        if trainer._lw_spawned_module is not module:
            return {}
        return contents.read(trainer._lw_spawned_checkpoint, source="the last fit").states
    last, strategy = trainer._lw_last_fit, trainer.strategy
    if last is None or last.module is not module:
        return {}
    if strategy.traits.owns_optimizers:
        return {"engine": type(strategy).__name__}
    own = strategy_state(strategy)
    return {
        "optimizers": [strategy.optimizer_state(one, last.model) for one in last.optimizers],
        "optimizer_record": {
            "configured": last.configured,
            "names": snapshot.parameter_names(last),
        },
        "schedulers": [config.scheduler.state_dict() for config in last.schedulers],
        "schedule_progress": [config.last_metric_step for config in last.schedulers],
        **({"strategy": own} if own else {}),
    }


def begin_epoch_again(trainer: Trainer, run: FitRun) -> None:
    """Restart the epoch that the last fit left open, with the loaders of this one."""
    progress = run.progress
    if trainer.is_global_zero:
        log.info(
            "trainer.fit has other training loaders than the last fit, which ended after %d batches of epoch %d: the "
            "epoch begins again.",
            progress.batches_in_epoch,
            progress.epochs,
        )
    progress.begin_epoch_again()
    for accumulator in run.metrics.accumulators("train"):
        accumulator.reset()


def continue_training(trainer: TrainerView, run: FitRun, before: Before) -> None:
    """Give a run's optimizers and schedules the state of those before; log once what starts from scratch."""
    if not before:
        _say(
            trainer,
            f"{type(run.module).__name__} is not the module of the last fit: its optimizers and schedules start from "
            "scratch",
        )
        return
    if "engine" in before:
        _say(
            trainer,
            f"{before['engine']} builds a new engine: optimizers, schedules and loss scale start from scratch. To "
            "continue them, save a checkpoint and pass it as ckpt_path",
        )
        return
    record = before.get("optimizer_record", {"configured": {"optimizers": [], "schedules": []}, "names": []})
    told: list[str] = []
    is_equal_number = len(before["optimizers"]) == len(run.optimizers)
    if not is_equal_number:
        told.append(
            f"configure_optimizers returns {len(run.optimizers)} optimizers, and returned {len(before['optimizers'])}: "
            "all start from scratch"
        )
    new_schedules = _new_schedules(record["configured"], run, before)
    if is_equal_number:
        for index in range(len(run.optimizers)):
            told += _continue_optimizer(trainer, run, index, before, record, restarts_lr=bool(new_schedules))
    for index, config in enumerate(run.schedulers):
        what = type(config.scheduler).__name__
        if index in new_schedules or not is_equal_number:
            if before["schedulers"]:
                told.append(f"schedule {index} ({what}) starts from scratch: it is configured differently from before")
            continue
        config.scheduler.load_state_dict(before["schedulers"][index])
        config.last_metric_step = before["schedule_progress"][index]
    if "strategy" in before:
        load_strategy_state(trainer.strategy, before["strategy"])
    if "precision" in before:
        trainer.fabric.precision.load_state_dict(before["precision"])
    if told:
        _say(trainer, "; ".join(told))


def _new_schedules(configured: StateDict, run: FitRun, before: Before) -> set[int]:
    """Return the schedules that were configured differently, or did not exist."""
    old, new = configured["schedules"], run.configured["schedules"]
    have = len(before["schedulers"])
    if have != len(run.schedulers) or have != len(old):
        return set(range(len(run.schedulers)))
    return {index for index, (was, now) in enumerate(zip(old, new, strict=True)) if _differ(was, now)}


def _differ(was: StateDict, now: StateDict) -> bool:
    """Whether two schedules differ in class or arguments, except in rates, which are compared with the optimizer."""
    rates = ("base_lrs", "_last_lr")
    values = [{key: value for key, value in one["values"].items() if key not in rates} for one in (was, now)]
    return was["class"] != now["class"] or values[0] != values[1]


def _continue_optimizer(
    trainer: TrainerView, run: FitRun, index: int, before: Before, record: StateDict, *, restarts_lr: bool
) -> list[str]:
    """Give one optimizer the state of the previous one; return lines to log."""
    optimizer, state = run.optimizers[index], before["optimizers"][index]
    name = type(optimizer).__name__
    where = f"optimizer {index} ({name})" if len(run.optimizers) > 1 else name
    old, new = record["configured"]["optimizers"][index], run.configured["optimizers"][index]
    if old["class"] != new["class"]:
        return [f"{where} starts from scratch: it was {old['class']}"]
    saved, own = record["names"][index], names_of(run.module, optimizer)
    order = list(range(len(state["param_groups"])))
    given = [dict(group) for group in optimizer.param_groups]
    try:
        if saved is not None and own is not None:
            known = set(all_names(run.module))
            state, order = fit_groups(state, saved, own, known=known, name=name)
        trainer.strategy.load_optimizer_state(optimizer, state, run.model)
    except (CheckpointError, ValueError) as error:
        return [f"{where} starts from scratch: {error}"]
    return _keep_what_is_new(optimizer, given, order, old, new, where, restarts_lr=restarts_lr)


def _keep_what_is_new(
    optimizer: Optimizer,
    given: list[StateDict],
    order: list[int],
    old: StateDict,
    new: StateDict,
    where: str,
    *,
    restarts_lr: bool,
) -> list[str]:
    """Keep values that are configured differently from the previous fit; return a line for each."""
    told = []
    for number, (group, fresh, now) in enumerate(zip(optimizer.param_groups, given, new["groups"], strict=False)):
        was = old["groups"][order[number]] if order[number] < len(old["groups"]) else {}
        at = f"{where}, group {number}" if len(new["groups"]) > 1 else where
        for key, value in now.items():
            if key not in was or was[key] == value:
                continue
            told.append(f"{at}: {key}={value!r} is configured now, and was {was[key]!r}")
            group[key] = fresh[key]
            if key == "lr" and "initial_lr" in fresh:
                group["initial_lr"] = fresh["initial_lr"]
        if restarts_lr:  # a schedule that starts from scratch has set its first rate
            group["lr"] = fresh["lr"]
            if "initial_lr" in fresh:
                group["initial_lr"] = fresh["initial_lr"]
    return told


def _say(trainer: TrainerView, text: str) -> None:
    if trainer.is_global_zero and not trainer.fit_loop.is_at_limit:  # without further training, nothing is lost
        progress = trainer.progress
        warn(
            f"trainer.fit continues at epoch {progress.epochs}, step {progress.steps}, and {text}. For a run from the "
            "beginning make a new Trainer.",
        )
