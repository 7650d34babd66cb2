"""Attaching a module and a data module to a session, and detaching them; they belong to one session at a time."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from ...data.module import DataModule
from ..module import Module

if TYPE_CHECKING:
    from ...protocols import Loaders
    from ..trainer import Trainer
    from .forward_loss import ForwardStep
    from .session import Session

# Sessions under way in this process, one within another.
_active: list[tuple[Session, nn.Module]] = []


def attach(session: Session, module: nn.Module, datamodule: DataModule | None) -> Callable[[], None]:
    """Attach module and data module to the Trainer; return what detaches them.

    A module belongs to one run at a time. A run that begins within a hook of another one, on the same module or on
    parts of it, takes over `self.log`, `self.trainer`, gradients and metric objects. When it ends, by an exception
    too, the outer run has them again.
    """
    parts = set(module.modules())
    put_back: list[Callable[[], object]] = [_members(session, module)]
    for outer, its_module in _active:
        run = outer.trainer.present_run()
        if run is not None and run.own_steps is not None and run.own_steps.remove():
            put_back.append(run.own_steps.watch)
        if not parts.isdisjoint(its_module.modules()):
            put_back += [partial(module.to, outer.fabric.device), _states(module, trains=session.verb == "fit")]
    if datamodule is not None:
        before = datamodule.trainer
        datamodule.trainer = session.trainer
        if before is not None and before.present_run() is not None:
            put_back.append(partial(setattr, datamodule, "trainer", before))
    entry = (session, module)
    _active.append(entry)

    def detach() -> None:
        _active.remove(entry)
        for step in put_back:
            step()

    return detach


def _members(session: Session, module: nn.Module) -> Callable[[], None]:
    """Attach each `lw.Module` in the module, and let the steps of Hugging Face models log."""
    names = ("_lw_trainer", "_lw_fabric", "_lw_log")
    children = [child for child in module.modules() if isinstance(child, Module)]
    before = {child: {name: vars(child).get(name) for name in names} for child in children}
    given = [step for step in vars(module).values() if getattr(type(step), "is_forward_step", False)]
    steps: dict[ForwardStep, Callable[..., object] | None] = {step: step.log for step in given}
    for child in before:
        child.__dict__.update(_lw_trainer=session.trainer, _lw_fabric=session.fabric, _lw_log=session.log)
    for step in steps:
        step.log = session.log
    of_root = next(iter(before.values()), {})

    def put_back() -> None:
        for step, log in steps.items():
            step.log = log
        for child in module.modules():
            if isinstance(child, Module):  # layers that the inner run has built are the outer run's now
                own = before.get(child, of_root)
                child.__dict__.update(own if own.get("_lw_log") is not None else {"_lw_log": None})

    return put_back


def know_weakly(trainer: Trainer, owner: nn.Module | DataModule) -> None:
    """Attach the Trainer by a weak reference, so that it and the module or data module form no cycle."""
    reference, is_finalizing = weakref.ref(owner), sys.is_finalizing  # the interpreter clears globals when it ends

    def forget(weak: object) -> None:
        owner = None if is_finalizing() else reference()
        for part in () if owner is None else _parts(owner):
            if vars(part).get("_lw_trainer") is weak:
                vars(part).update(_lw_trainer=None, _lw_fabric=None)

    weak = weakref.proxy(trainer, forget)
    for part in _parts(owner):
        if vars(part).get("_lw_trainer") is trainer:
            vars(part)["_lw_trainer"] = weak


def _parts(owner: nn.Module | DataModule) -> list[nn.Module] | list[DataModule]:
    return [*owner.modules()] if isinstance(owner, nn.Module) else [owner]


def _states(module: nn.Module, *, trains: bool) -> Callable[[], None]:
    """Return a function that restores what a run on this module changes, except the weights that it trains."""
    from ..metrics.metric_objects import load_metric_states, metric_states  # only where runs are nested

    modes = [(child, child.training) for child in module.modules()]
    gradients = [(one, one.grad) for one in module.parameters()] if trains else []
    metrics = metric_states(module, copy=True)
    for one, _ in gradients:
        one.grad = None

    def put_back() -> None:
        for child, mode in modes:
            child.training = mode
        for one, gradient in gradients:
            one.grad = gradient
        load_metric_states(module, metrics)

    return put_back


def adopt(trainer: Trainer, module: nn.Module, datamodule: DataModule | None, train_dataloaders: Loaders) -> None:
    """Set the module, data module and training loaders of a search on its Trainer, as after a run.

    Args:
        trainer: The Trainer of the search.
        module: The module, which gets this Trainer and its loggers.
        datamodule: The data module, None for none.
        train_dataloaders: The loaders of the search, None if it did not train.
    """
    if isinstance(module, Module):
        module.trainer, module.fabric = trainer, trainer.fabric
        know_weakly(trainer, module)
    if trainer._lw_last_run is None:
        trainer._lw_spawned_module = module
    trainer._lw_assigned_datamodule = datamodule
    if train_dataloaders is not None:
        trainer._lw_loaders.train = train_dataloaders
