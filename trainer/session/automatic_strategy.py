"""`settle_strategy`: the strategy for `strategy="auto"` and "mesh:auto", by a plan of the fit; imported to make it.

Plan and trial steps are made in separate processes. Nothing of them remains in this one: no random numbers, no position
in the data, and nothing that hooks of module and data change.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...accelerators import Accelerator
from ...data.module import DataModule
from ...data.move import find_batch_size
from ...errors import LoopwrightError
from ...fabric import Fabric
from ...planning.child_process import Child, Send, can_copy_process, run_in_child
from ...planning.fake_world import fake_group, leave_inherited_world, without_real_world
from ...planning.table import Plan, Row, show_size
from ..module import Module
from .forward_loss import equip

if TYPE_CHECKING:
    from ...planning.planner import Choice
    from ...planning.simulation import Training
    from ...protocols import StateDict
    from ...strategies import Strategy
    from ..trainer import Trainer

logger = logging.getLogger(__name__)

# Any in this file: loaders, and arguments of strategies.

PLAN_S = 20.0
"""Seconds that the plan may take, with `setup` and the first batch, but without `prepare_data`."""
TRIAL_S = 15.0
"""Seconds that all trial steps may take."""

_MOST_TRIALS = 6


@dataclass(frozen=True, slots=True)
class Trial:
    """Trial steps of a mesh.

    Attributes:
        name: Name of the strategy.
        step_s: Seconds per optimizer step; None: it failed.
        batches_per_s: Micro-batches of all data ranks per second, by which meshes are compared.
        problem: Why it failed.
    """

    name: str
    step_s: float | None = None
    batches_per_s: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        if self.step_s is None:
            return f"  {self.name}: {self.problem}"
        return f"  {self.name}: {1000 * self.step_s:.1f} ms per step, {self.batches_per_s:.2f} micro-batches per second"


@dataclass(frozen=True, slots=True)
class Settled:
    """The strategy that a Trainer has chosen by itself.

    Attributes:
        asked: The argument: "auto" or "mesh:auto".
        name: Name of the chosen strategy, as in the plan.
        reason: Why it was chosen.
        plan: What was compared; None without a plan.
        trials: The meshes whose steps were timed.
    """

    asked: str
    name: str
    reason: str
    plan: Plan | None = None
    trials: tuple[Trial, ...] = ()

    def __str__(self) -> str:
        lines = [f"strategy={self.asked!r} takes {self.name}: {self.reason}."]
        if self.asked != "auto" and self.plan is not None:
            lines += [*self.plan.lines(), *self.plan.remarks()]
        if self.trials:
            lines += ["Trial steps:", *map(str, self.trials)]
        return "\n".join(lines)

    def to_dict(self) -> StateDict:
        """Return plain values, for checkpoints and JSON."""
        return {
            "asked": self.asked,
            "name": self.name,
            "reason": self.reason,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "trials": [asdict(trial) for trial in self.trials],
        }


def settle_strategy(trainer: Trainer, module: nn.Module, data: Any) -> None:
    """Let the Trainer have the strategy that a plan of its fit recommends, and remember why.

    Called once, on every rank, before it is connected with the others; or in the process that starts them.

    Args:
        trainer: The Trainer, whose fit has begun.
        module: The user's module, which is not changed.
        data: Its training data: loaders, or a data module; None: the module has them.
    """
    fabric, arguments = trainer.fabric, trainer._lw_arguments
    asked = str(arguments.strategy).lower()
    default = "ddp" if asked == "auto" else "mesh"
    if asked == "auto" and not _may_know_memory(fabric.accelerator):
        settled: Settled | None = Settled(asked, default, f"the memory of {fabric.device.type} devices is not known")
    elif arguments.fault_tolerance is not None:
        settled = Settled(asked, default, "replica groups need the same strategy, and each would plan alone")
    else:
        settled = _settle(trainer, asked, module, data) if fabric.is_global_zero else None
        if not trainer._lw_starts_processes:
            fabric.launch()
            settled = fabric.strategy.broadcast(settled)
    assert settled is not None
    if settled.name != default:
        strategy = _made(settled.name, start_method=fabric.strategy.start_method)
        fabric.adopt_strategy(strategy)
        arguments.prepare(strategy)
    fabric.leaves_choice = False
    trainer._lw_settled = settled.to_dict()
    if trainer._lw_reports_runs:
        logger.info("%s", settled)


def _settle(trainer: Trainer, asked: str, module: nn.Module, data: Any) -> Settled:
    """Return the strategy, on rank 0."""
    fabric = trainer.fabric
    default = "ddp" if asked == "auto" else "mesh"
    if not can_copy_process():
        return Settled(asked, default, "nothing can be planned where processes cannot be copied")
    tries = asked != "auto" and _can_try(fabric, module)
    check, plan, trials = trainer._lw_run_signals.check, None, list[Trial]()
    try:
        memory = _memory(fabric)
        if asked == "auto" and memory is None:
            return Settled(asked, default, f"the memory of {fabric.device} is not known")
        with Child(lambda send: _work(send, trainer, asked, module, data, memory, tries)) as child:
            child.receive(time.monotonic() + PLAN_S, check)
            child.receive(check=check)  # prepare_data may take any time: a download is not ended in the middle
            plan = cast("Plan", child.receive(time.monotonic() + PLAN_S, check))
            until = time.monotonic() + TRIAL_S
            while tries and (trial := child.receive(until, check)) is not None:
                trials.append(cast("Trial", trial))
    except TimeoutError:
        if plan is None:
            return Settled(asked, default, f"planning took more than {PLAN_S:g} s")
    # Whatever the user's module and data raise without a fit around them: what is wrong, fit will raise again.
    except Exception as error:
        if plan is None:
            reason = (str(error) or "no message").splitlines()[0].rstrip(".")
            return Settled(asked, default, f"the fit cannot be planned ({type(error).__name__}: {reason})")
    return _chosen(asked, default, plan, tuple(trials))


def _chosen(asked: str, default: str, plan: Plan, trials: tuple[Trial, ...]) -> Settled:
    """Return the strategy by the plan, or by trial steps."""
    done = [trial for trial in trials if trial.step_s is not None]
    if done:
        fastest = max(done, key=lambda trial: trial.batches_per_s)
        return Settled(asked, fastest.name, f"of {len(done)} meshes it was the fastest in trial steps", plan, trials)
    rows = [row for row in plan.rows if row.is_complete]
    best = plan.best
    if best is not None:
        untried = "" if asked == "auto" else ", and no trial steps were completed"
        return Settled(asked, best.name, f"{_comparison(plan, best)}{untried}", plan, trials)
    if not rows:
        why = plan.rows[0].note if plan.rows else next(iter(plan.left_out.values()))
        return Settled(asked, default, why.rstrip("."), plan, trials)
    least = min(rows, key=lambda row: row.peak)
    reason = f"nothing fits with a tenth to spare, and it needs least: {_comparison(plan, least)}"
    return Settled(asked, least.name, reason, plan, trials)


def _comparison(plan: Plan, row: Row) -> str:
    """Return what a row needs, and what the first one would."""
    if plan.memory is None:
        return f"by the plan it sends {show_size(row.sent)} per step, and the memory of devices is not known"
    text = f"by the plan it needs {show_size(row.peak)} of {show_size(plan.memory)}"
    first = plan.rows[0]
    return text if first is row else f"{text}, and {first.name} {show_size(first.peak)}"


# --- memory -----------------------------------------------------------------------------------------------------------


def _may_know_memory(accelerator: Accelerator) -> bool:
    return type(accelerator).device_memory is not Accelerator.device_memory


def _memory(fabric: Fabric) -> float | None:
    """Return the bytes of the smallest device of this node; None if one is not known."""

    def read() -> list[float | None]:
        return [fabric.accelerator.device_memory(device) for device in fabric.devices]

    # A process that has initialized CUDA cannot be copied any more for ranks.
    found = run_in_child(read) if fabric.device.type == "cuda" and not torch.cuda.is_initialized() else read()
    known = [one for one in found if one is not None]
    return min(known) if len(known) == len(found) else None


def _can_try(fabric: Fabric, module: nn.Module) -> bool:
    """Return whether trial steps can be taken: all devices are here and free, and so is memory for the modules."""
    if fabric.num_nodes > 1 or (fabric.device.type == "cuda" and torch.cuda.is_initialized()):
        return False
    wanted = sum(one.nbytes for one in module.parameters()) * fabric.world_size
    return wanted < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


# --- in the process that plans ----------------------------------------------------------------------------------------


def _work(
    send: Send, trainer: Trainer, asked: str, module: nn.Module, data: Any, memory: float | None, tries: bool
) -> None:
    """Send None at the beginning and once `prepare_data` is done, then the plan, then trials, then None."""
    from ...planning.planner import choices, meshes, plan_choices

    fabric = trainer.fabric
    size, num_nodes = fabric.world_size, fabric.num_nodes
    leave_inherited_world()
    with fake_group(size):  # samplers of the user's ask for ranks
        send(None)
        _attach(trainer, module, data)
        getattr(module if data is None else data, "prepare_data", lambda: None)()
        send(None)
        training = _training(trainer, module, data)
    per_node = size // num_nodes
    every = meshes(per_node, num_nodes) if asked != "auto" else choices(per_node, num_nodes)
    chosen, left_out = _usable(trainer, training, [one for one in every if one.devices == size and not one.checkpoints])
    plan = plan_choices(training, chosen, devices=size, memory=memory, limit_s=PLAN_S, until_fits=asked == "auto")
    plan = replace(plan, left_out={**plan.left_out, **left_out})
    send(plan)
    if tries:
        for row in plan.fitting[:_MOST_TRIALS]:
            send(_trial(fabric, training, row))
        send(None)


def _attach(trainer: Trainer, module: nn.Module, data: Any) -> None:
    """Let hooks of module and data find their Trainer, as in a fit."""
    if isinstance(module, Module):
        module.trainer, module.fabric = trainer, trainer.fabric
    else:
        equip(module, "fit")
    if isinstance(data, DataModule):
        data.trainer = trainer


def _training(trainer: Trainer, module: nn.Module, data: Any) -> Training:
    """Return what the fit trains."""
    from ..plan_fit import training_of

    training, _ = training_of(trainer, module, data)
    wanted = trainer._lw_arguments.global_batch_size
    if wanted is not None:
        micro = find_batch_size(training.batch) or 1
        training = replace(training, accumulate=max(1, wanted // (micro * trainer.world_size)))
    return training


def _usable(trainer: Trainer, training: Training, every: Sequence[Choice]) -> tuple[list[Choice], dict[str, str]]:
    """Return what can be taken with the user's arguments, and why the others cannot.

    A choice changes no argument: a pipeline needs as many micro-batches per step as it has stages.
    """
    derives = trainer._lw_arguments.global_batch_size is not None
    short = {} if derives else {one.name: one.pp for one in every if one.pp > training.accumulate}
    left_out = {
        name: f"its {stages} stages need accumulate_grad_batches={stages} or more" for name, stages in short.items()
    }
    return [one for one in every if one.name not in short], left_out


def _trial(fabric: Fabric, training: Training, row: Row) -> Trial:
    """Return the time of steps with a strategy, in new processes on the devices of the fit."""
    from ...planning.simulation import quiet, time_step

    devices: list[int] | int = len(fabric.devices)
    if fabric.device.type != "cpu":
        devices = [device.index for device in fabric.devices]
    strategy = _made(row.name, start_method="fork", verify=False)
    try:
        with without_real_world(), quiet():
            there = Fabric(
                accelerator=copy.deepcopy(fabric.accelerator),
                strategy=strategy,
                devices=devices,
                plugins=[copy.deepcopy(fabric.precision)],
            )
            if there.strategy.traits.has_stages:
                training = replace(training, accumulate=max(training.accumulate, _stages(row)))
            seconds: float = there.launch(time_step, training)
            batches = training.accumulate * there.strategy.topology.data_size
    except (LoopwrightError, RuntimeError) as error:
        return Trial(row.name, problem=str(error).splitlines()[0])
    return Trial(row.name, seconds, batches / seconds)


def _stages(row: Row) -> int:
    return int(row.name.partition("pp=")[2].partition(",")[0])


def _made(name: str, **arguments: Any) -> Strategy:
    """Return the strategy of a row."""
    kind, _, axes = name.partition(":")
    if kind == "mesh":
        from ...strategies.mesh import MeshStrategy

        return MeshStrategy(**MeshStrategy.read_options(axes), **arguments)
    from ...strategies.fsdp import FSDPStrategy

    return FSDPStrategy(activation_checkpointing="checkpointing" in name or None, **arguments)
