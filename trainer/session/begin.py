"""The beginning of a verb: checks, hooks up to `configure_model`, optimizers, restoring."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...callbacks import Callback
from ...checkpoint.content import Content
from ...data.module import DataModule
from ...errors import CheckpointError, ConfigError, ModuleError
from ...messages import counted, warn
from ...protocols import Loaders, StateDict
from ...strategies.optional import ChecksLayers, ConfiguresOptimizers, TakesTrainerConfig, changing, stages_of
from ..checkpointing import optimizer_record, snapshot
from ..hooks import check_hook_names
from ..lifecycle import Lifecycle, hook_names
from ..loop import manual
from ..loop.loss import RanksWindowLoss, WindowLoss
from ..loop.optimizers import ManagedOptimizer
from ..loop.schedule import read_optimizers
from ..module import Module
from ..run import Run
from . import assemble

if TYPE_CHECKING:
    from ...fabric import Fabric
    from ...profilers import Profiler
    from ...strategies import Strategy, TrainerConfig
    from ..loop.fit_loop import FitLoop
    from ..loop.non_finite import LossWatch
    from ..loop.run_signals import RunSignals
    from ..loop.training_rng import TrainingRng
    from ..metrics.log_output import LogOutput
    from ..metrics.metrics import Metrics
    from ..state import Progress, TrainerState
    from ..trainer import Trainer
    from .forward_loss import ForwardStep
    from .loaders import StageLoaders

__all__ = [
    "STAGE_OF",
    "Plan",
    "attach",
    "build_optimizers",
    "build_training",
    "carry_window",
    "check",
    "check_layers",
    "load_weights",
    "make_run",
    "manage_optimizers",
    "module_of_evaluation",
    "open_loop",
    "place",
    "restore_training",
    "set_modes",
    "set_up",
    "split_datamodule",
    "take_callbacks",
]

STAGE_OF = {"validate": "validation", "test": "test", "predict": "predict"}
# Runs under way in this process, one within another.
_active: list[tuple[Plan, nn.Module]] = []


@dataclass(frozen=True, slots=True)
class Plan:
    """What a verb is about to do, and the parts of the Trainer with which it does it.

    Attributes:
        trainer: Handed to hooks, and to objects that belong to it; nothing is read from it here.
        verb: "fit", "validate", "test" or "predict".
        given: The loaders that were passed to the verb, by stage.
        callbacks: Those of the Trainer, in order; `configure_callbacks` changes the list.
        system: What the Trainer does at events, after everybody's hooks.
        log: Where `self.log` of modules goes.
        watch: Keeps losses for the policy on those that are not finite.
        accumulate_grad_batches: Micro-batches per optimizer step; None where a callback schedules them.
        is_scheduled: Whether a GradientAccumulationScheduler is among the callbacks.
        same_everywhere: The Trainer's arguments that must be equal on all ranks.
        seconds_since_validation: Returns the seconds of training since the last validation.
        lifecycle: Class of the run's lifecycle.
    """

    trainer: Trainer
    verb: str
    given: dict[str, Loaders]
    fabric: Fabric
    callbacks: list[Callback]
    loaders: StageLoaders
    output: LogOutput
    metrics: Metrics
    progress: Progress
    state: TrainerState
    run_signals: RunSignals
    watch: LossWatch
    profiler: Profiler | None
    system: Mapping[str, Callable[..., object]]
    log: Callable[..., object]
    accumulate_grad_batches: int
    is_scheduled: bool
    global_batch_size: int | None
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    use_distributed_sampler: bool
    skips_bad_steps: bool
    same_everywhere: Mapping[str, object]
    seconds_since_validation: Callable[[], float]
    lifecycle: type[Lifecycle] = Lifecycle


# --- what was passed -----------------------------------------------------------------------------------------------


def unwrapped(model: object) -> nn.Module:
    """Return the user's module, also from what torch.compile returned.

    Raises:
        ModuleError: It is not an nn.Module.
    """
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):
        original: nn.Module = model._orig_mod
        return original
    if not isinstance(model, nn.Module):
        raise ModuleError(
            "Expected lw.Module or another nn.Module, got "
            f"{f'the class {model.__name__}' if isinstance(model, type) else type(model).__name__}.",
            fix=f"pass an instance: {model.__name__}(...)."
            if isinstance(model, type)
            else "pass the module first, then its data: trainer.fit(module, loader).",
        )
    if "_modules" not in vars(model):
        raise ModuleError(
            f"{type(model).__name__}.__init__ did not call the one of nn.Module.",
            fix="call super().__init__() first in __init__.",
        )
    return model


def split_datamodule(loaders: Loaders, datamodule: object, name: str) -> tuple[Loaders, DataModule | None]:
    """Accept a DataModule passed instead of the loaders.

    Raises:
        ConfigError: Both are given.
        ModuleError: `datamodule` is not a data module.
    """
    for given in (loaders, datamodule):
        if isinstance(given, type):
            raise ModuleError(
                f"Expected loaders or a data module, got the class {given.__name__}.",
                fix=f"pass an instance: {given.__name__}(...).",
            )
    if isinstance(loaders, DataModule):
        if datamodule is not None:
            raise both_given(name)
        return None, loaders
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise ModuleError(
            f"datamodule is {type(datamodule).__name__}, expected lw.DataModule.", fix="pass loaders by position."
        )
    return loaders, datamodule


def both_given(name: str) -> ConfigError:
    """Return the error about loaders and a data module at once."""
    return ConfigError(f"both {name} and datamodule are given.", fix="pass one of them.")


def _check_required(plan: Plan, module: nn.Module) -> None:
    """Refuse early what cannot run: a missing step, a missing loader, arguments that manual optimization forbids."""
    verb = plan.verb
    if verb != "fit":
        stage = STAGE_OF[verb]
        if verb != "predict":
            assemble.require_step(module, f"{stage}_step", verb)
        elif not callable(getattr(module, "predict_step", None)):
            raise ModuleError(
                f"trainer.predict needs {type(module).__name__}.predict_step(self, batch, batch_idx).", fix="define it."
            )
        plan.loaders.require(stage, verb)
        return
    assemble.require_step(module, "training_step", "fit")
    if not isinstance(plan.fabric.strategy, ConfiguresOptimizers):  # an engine's configuration may say
        assemble.require_step(module, "configure_optimizers", "fit")
    plan.loaders.require("train", "fit")
    if getattr(module, "automatic_optimization", True):
        return
    wrong = []
    if plan.accumulate_grad_batches != 1:
        wrong.append(f"accumulate_grad_batches={plan.accumulate_grad_batches}")
    if plan.global_batch_size is not None:
        wrong.append(f"global_batch_size={plan.global_batch_size}")
    if plan.gradient_clip_val:
        wrong.append(f"gradient_clip_val={plan.gradient_clip_val}")
    if plan.is_scheduled:
        wrong.append("GradientAccumulationScheduler")
    if wrong:
        raise ConfigError(
            f"{' and '.join(wrong)}: the trainer does neither in manual optimization.",
            fix="accumulate manually, and call self.clip_gradients(optimizer, ...) in training_step.",
        )


# --- every verb ----------------------------------------------------------------------------------------------------


def check(plan: Plan, module: nn.Module, datamodule: DataModule | None) -> None:
    """Take module and data, and refuse what cannot run: before processes start."""
    if not isinstance(module, Module):
        from .forward_loss import equip

        equip(module, plan.verb)
    check_hook_names(module, "module", hook_names("module"))
    if datamodule is not None:
        check_hook_names(datamodule, "datamodule", hook_names("datamodule"))
    plan.loaders.begin(module, datamodule, plan.given)
    _check_required(plan, module)
    check_layers(plan.fabric.strategy, module)
    if plan.verb == "fit":
        plan.trainer._lw_saving.check_weights(module)
        strategy = plan.fabric.strategy
        if isinstance(strategy, TakesTrainerConfig):
            strategy.apply_trainer_config(_trainer_config(plan, module))


def check_layers(strategy: Strategy, module: nn.Module) -> None:
    """Refuse layers that the strategy cannot split, unless the module builds them later."""
    if isinstance(strategy, ChecksLayers) and not _builders(module):
        strategy.check_layers(module)


def attach(plan: Plan, module: nn.Module, datamodule: DataModule | None) -> Callable[[], None]:
    """Attach module and data module to the Trainer; return what detaches them.

    A module belongs to one run at a time. A run that begins within a hook of another one, on the same module or on
    parts of it, takes over `self.log`, `self.trainer`, gradients and metric objects. When it ends, by an exception
    too, the outer run has them again.
    """
    parts = set(module.modules())
    put_back: list[Callable[[], object]] = [_members(plan, module)]
    for outer, its_module in _active:
        run = outer.trainer.present_run()
        if run is not None and run.own_steps is not None and run.own_steps.remove():
            put_back.append(run.own_steps.watch)
        if not parts.isdisjoint(its_module.modules()):
            put_back += [partial(module.to, outer.fabric.device), _states(module, trains=plan.verb == "fit")]
    if datamodule is not None:
        before = datamodule.trainer
        datamodule.trainer = plan.trainer
        if before is not None and before.present_run() is not None:
            put_back.append(partial(setattr, datamodule, "trainer", before))
    entry = (plan, module)
    _active.append(entry)

    def detach() -> None:
        _active.remove(entry)
        for step in put_back:
            step()

    return detach


def _members(plan: Plan, module: nn.Module) -> Callable[[], None]:
    """Attach each `lw.Module` in the module, and let the steps of Hugging Face models log."""
    names = ("_lw_trainer", "_lw_fabric", "_lw_log")
    children = [child for child in module.modules() if isinstance(child, Module)]
    before = {child: {name: vars(child).get(name) for name in names} for child in children}
    given = [step for step in vars(module).values() if getattr(type(step), "is_forward_step", False)]
    steps: dict[ForwardStep, Callable[..., object] | None] = {step: step.log for step in given}
    for child in before:
        child.__dict__.update(_lw_trainer=plan.trainer, _lw_fabric=plan.fabric, _lw_log=plan.log)
    for step in steps:
        step.log = plan.log
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
    """Let a module or data module find its Trainer as long as somebody else has it: they form no cycle."""
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
    """Return what restores what a run on this module changes, besides the weights that it trains."""
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


def take_callbacks(plan: Plan, module: nn.Module) -> None:
    """Take the callbacks that the module configures. On every rank."""
    if not isinstance(module, Module):
        return
    extra = module.configure_callbacks()
    if extra:
        for callback in [extra] if isinstance(extra, Callback) else extra:
            check_hook_names(callback, "callbacks", hook_names("callbacks"))
        plan.callbacks[:] = assemble.merge_callbacks(plan.callbacks, extra)


def make_run(plan: Plan, module: nn.Module, datamodule: DataModule | None) -> Run:
    """Compile the lifecycle and return the run; once per verb, when the callbacks are known."""
    fabric, metrics, strategy = plan.fabric, plan.metrics, plan.fabric.strategy
    metrics.device = fabric.device
    plan.output.set_rank(fabric.global_rank)
    for callback in plan.callbacks:
        if isinstance(module, Module):
            callback.__dict__.update(log=module.log, log_dict=module.log_dict)
    lifecycle = plan.lifecycle(
        trainer=plan.trainer,
        module=module,
        callbacks=plan.callbacks,
        datamodule=datamodule,
        metrics=metrics,
        profiler=plan.profiler,
        system=dict(plan.system),
    )
    has_ranks = fabric.world_size > 1
    rank, size = strategy.logged_place
    metrics.connect(
        strategy.gather_logged if has_ranks else None,
        rank=rank,
        size=size,
        module=module,
        has_silent_ranks=strategy.traits.has_stages,
    )
    plan.watch.gather = strategy.gather_objects if has_ranks else None
    window_loss, stop_coordination = WindowLoss(fabric.device), None
    if has_ranks:
        counts = strategy.uneven == "zero_weight" or plan.skips_bad_steps
        kind: type[RanksWindowLoss] = RanksWindowLoss
        if stages_of(strategy) is not None:
            from ..loop.stages_loss import StagesWindowLoss

            kind = StagesWindowLoss
        window_loss = kind(fabric.device, strategy, counts=counts)
        if plan.run_signals.stop_coordinator is not None:
            from ..loop.stop_coordination import StopCoordination

            stop_coordination = StopCoordination(
                weakref.proxy(plan.trainer), plan.run_signals, plan.run_signals.stop_coordinator
            )
    return Run(
        trainer=plan.trainer,
        fabric=fabric,
        module=module,
        model=module,
        datamodule=datamodule,
        lifecycle=lifecycle,
        metrics=metrics,
        progress=plan.progress,
        run_signals=plan.run_signals,
        callbacks=plan.callbacks,
        loaders=plan.loaders,
        output=plan.output,
        state=plan.state,
        seconds_since_validation=plan.seconds_since_validation,
        window_loss=window_loss,
        watch=plan.watch,
        is_automatic=bool(getattr(module, "automatic_optimization", True)),
        skips_bad_steps=plan.skips_bad_steps,
        has_ranks=has_ranks,
        stop_coordination=stop_coordination,
    )


def set_up(plan: Plan, run: Run) -> None:
    """Run the hooks up to `configure_model`, and let the ranks compare what they have. On every rank."""
    module, strategy = run.module, run.fabric.strategy
    plan.loaders.pins = run.device.type == "cuda"
    _prepare_data(run)
    run.lifecycle.setup(plan.verb)
    builders = _builders(module)
    if builders:
        with run.fabric.init_module():
            for name in builders:
                getattr(module, name)()
    if strategy.traits.has_stages and getattr(module, "exclude_frozen_parameters", False):
        raise ConfigError(
            f"{type(module).__name__} sets exclude_frozen_parameters, which pipeline stages do not support.",
            fix="set exclude_frozen_parameters = False, or train without pipeline stages.",
        )
    if run.has_ranks:
        from ..loop import rank_coordination, rank_rng

        rank_coordination.compare(
            strategy, rank_coordination.facts_of(run.fabric, plan.verb, module, plan.same_everywhere)
        )
        rank_rng.align_copies(strategy)
        rank_coordination.distribute_loaders(plan.loaders, strategy, splits=plan.use_distributed_sampler)


def _builders(module: nn.Module) -> list[str]:
    """Return the names of the hooks in which the module builds layers."""
    return [name for name in ("configure_sharded_model", "configure_model") if assemble.has_override(module, name)]


def place(run: Run, verb: str) -> None:
    """Set the module up on its device, as the strategy runs it."""
    strategy = run.fabric.strategy
    sums_after_backward = strategy.accumulate_dtype is not None and not strategy.traits.sums_gradients_itself
    if run.has_ranks and (verb != "fit" or not run.is_automatic or sums_after_backward):
        run.model = _place(run.fabric, run.module)
    else:
        run.model = run.fabric.prepare_module(run.module)


def _trainer_config(plan: Plan, module: nn.Module) -> TrainerConfig:
    """Return the Trainer's arguments for a strategy whose engine has a configuration of its own."""
    loader = plan.loaders.given.get("train")
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    micro = size if isinstance(size, int) else None
    accumulate: int | None = plan.accumulate_grad_batches
    if plan.is_scheduled:
        accumulate = None
    elif plan.global_batch_size is not None:
        from .global_batch import plan_accumulation

        accumulate = plan_accumulation(plan.global_batch_size, micro, plan.fabric.strategy.topology.data_size)
    return {
        "accumulate_grad_batches": accumulate,
        "global_batch_size": plan.global_batch_size,
        "gradient_clip_val": plan.gradient_clip_val,
        "gradient_clip_algorithm": plan.gradient_clip_algorithm,
        "micro_batch_size": micro,
        "is_automatic": getattr(module, "automatic_optimization", True),
        "grad_accumulation_dtype": "fp32" if plan.fabric.strategy.accumulate_dtype is not None else None,
    }


def _prepare_data(run: Run) -> None:
    """Let one rank of each node (or of all, with `prepare_data_per_node=False`) download; the others wait for it."""
    hooks = run.lifecycle.all_own("prepare_data")
    if not hooks:
        return
    owner = run.datamodule if run.datamodule is not None else run.module
    per_node = bool(getattr(owner, "prepare_data_per_node", True))
    fabric = run.fabric
    with fabric.rank_zero_first(local=per_node):
        if (fabric.local_rank if per_node else fabric.global_rank) == 0:
            for hook in hooks:
                hook()


def _place(fabric: Fabric, module: nn.Module) -> nn.Module:
    """Set a module up for evaluation or manual optimization: no backward pass reduces its gradients."""
    with changing(fabric.strategy, module):
        module = fabric.precision.convert_module(module)
    fabric.strategy.module_to_device(module)
    return fabric.strategy.place_module(module)


# --- fit -----------------------------------------------------------------------------------------------------------


def load_weights(run: Run, path: str, *, is_trusted: bool) -> Content:
    """Put back the module of a checkpoint, with data module and callbacks; return the checkpoint. On every rank."""
    content = snapshot.read(run.fabric, path, is_trusted=is_trusted)
    snapshot.restore_module(run, content)
    return content


def build_training(run: Run) -> None:
    """Build optimizers and schedules of a run, and what watches them."""
    build_optimizers(run)
    monitored = [*run.schedulers, *run.callbacks]
    run.metrics.decisive = frozenset(str(name) for one in monitored if (name := getattr(one, "monitor", None)))
    if run.metrics.decisive:
        from .monitored import MonitoredNames

        run.monitored = MonitoredNames(run)
    if not (run.is_automatic and run.optimizers):
        from ..loop.own_steps import OwnSteps

        run.own_steps = OwnSteps(run)


def restore_training(
    run: Run, content: Content | None, path: str | None, before: StateDict | None
) -> Callable[[], None] | None:
    """Put groups and states of optimizers back, schedules, and the counts.

    Args:
        run: The run; its optimizers are built.
        content: The checkpoint to resume from; None without.
        path: Where it was read.
        before: What the last fit left (`continuing.take`), where this one continues it.

    Returns:
        What puts back the random number generators of the checkpoint, to be called last; None without one.
    """
    if content is not None:
        for callback in run.callbacks:
            if hasattr(callback, "restore_param_groups"):
                callback.restore_param_groups(run.trainer, run.module)
        return snapshot.restore_training(run, content, str(path))
    if before is not None:
        from .continuing import continue_training

        continue_training(run.trainer, run, before)
    return None


def open_loop(
    run: Run, loop: FitLoop, content: Content | None, path: str | None, stream_state: StateDict | None
) -> None:
    """Open the data where they were, and bind the functions of a step: the last thing before the loop.

    Args:
        run: The run; its stream is open, and its optimizers are built.
        loop: Has the limits.
        content: The checkpoint to resume from; None without.
        path: Where it was read.
        stream_state: Where the data were when the last fit of this Trainer ended.
    """
    from .global_batch import report_global_batch

    trainer = run.trainer
    if not run.loaders.waits_for_validation:
        run.loaders.open_validation()
    if content is not None:
        run.loaders.restore_generators(content.states.get("validation_generators", {}))
    _place_stream(run, content, path, stream_state)
    _check_limits(loop, run.progress, path)
    report_global_batch(trainer, run)
    run.plan = assemble.make_plan(run, trainer)
    if loop.data_limits:
        from ..loop.data_limits import DataLimits

        limits = DataLimits(weakref.proxy(trainer), weakref.proxy(run))
        run.plan.transfer, run.plan.count_window = limits.counting(run.plan.transfer), limits.end_window
    if run.fabric.strategy.accumulate_dtype is not None:
        from ..loop.float32_gradients import bind_float32_gradients

        run.undo = bind_float32_gradients(trainer, run)


def carry_window(run: Run, states: StateDict, path: str | None, *, is_carrying: bool) -> None:
    """Continue the window that an epoch's end had cut short, where windows continue in the next epoch."""
    if is_carrying:
        from ..loop.carried_window import CarriedWindow

        run.carried = CarriedWindow(weakref.proxy(run.trainer), weakref.proxy(run))
        if "window" in states:
            run.carried.load_states(states, path or "the last fit")
    elif "window" in states:
        warn(
            f"{path} was taken within a window that continues in the next epoch: the gradients of its "
            f"{states['window']['count']} micro-batches are left out; pass accumulate_across_epochs=True to use them",
        )


def set_modes(run: Run, content: Content | None, training_rng: TrainingRng) -> None:
    """Put the module into training mode; what is frozen and what ranks draw is as in the checkpoint."""
    # A submodule that the user put into eval mode (a frozen batch norm) stays there.
    if not run.module.training:
        run.module.train()
    snapshot.mark_callbacks(run)
    if content is not None:
        snapshot.restore_frozen(run, content)
    elif run.has_ranks and not run.progress.total_batches:
        training_rng.separate_ranks(run.fabric.strategy)


def build_optimizers(run: Run) -> None:
    """Let the module make its optimizers and schedules; once per fit, and again when the tuner has set their rate."""
    module = run.module
    returned = None
    if assemble.has_override(module, "configure_optimizers"):
        try:
            configure = cast(Any, module).configure_optimizers  # Any: nn.Module lacks it
            returned = run.lifecycle.bracketed(
                configure, run.lifecycle.name_of("Module", module, "configure_optimizers")
            )()
        except ValueError as error:
            if "empty parameter list" not in str(error):
                raise
            raise _no_parameters(module) from error
    if returned is None and isinstance(run.fabric.strategy, ConfiguresOptimizers):
        returned = run.fabric.strategy.default_optimizers(module)
    if returned is None or (isinstance(returned, list | tuple) and not returned):
        warn(
            f"configure_optimizers returned {returned!r}: nothing is trained, unless training_step steps optimizers of "
            "its own, which are in no checkpoint. To train, return an optimizer"
        )
    run.optimizers, run.schedulers = read_optimizers(
        returned,
        is_automatic=run.is_automatic,
        has_own_scheduler_step=assemble.has_override(module, "lr_scheduler_step"),
    )
    assemble.check_parameters(module, run.optimizers)
    run.fabric.strategy.saves_optimizers = any(
        getattr(one, "save_weights_only", None) is False for one in run.trainer.callbacks
    )
    run.configured = optimizer_record.describe(run.optimizers, run.schedulers)
    if run.optimizers:
        run.optimizers = list(run.fabric.prepare_optimizers(*run.optimizers))
    manage_optimizers(run)


def manage_optimizers(run: Run) -> None:
    """Make the optimizers that the module gets."""
    step, weak = manual.step_given if run.is_automatic else manual.step_in_manual, weakref.proxy(run)
    run.managed = [
        ManagedOptimizer(optimizer, weakref.proxy(run.trainer.itself), lambda o, closure: step(weak, o, closure))
        for optimizer in run.optimizers
    ]


def _no_parameters(module: nn.Module) -> ModuleError:
    """Return the error of an optimizer without parameters, which says what the module has."""
    parameters = list(module.parameters())
    trained = sum(one.requires_grad for one in parameters)
    if not parameters:
        has, fix = (
            "none",
            "make layers in __init__ or configure_model, as attributes; a list of layers is nn.ModuleList.",
        )
    else:
        has = f"{len(parameters)}, {trained} of them require gradients"
        fix = "pass self.parameters(), or look at what selects them in configure_optimizers."
    if parameters and not trained:
        fix = "unfreeze what is to be trained with requires_grad_(True), before the optimizer is made."
    return ModuleError(
        f"configure_optimizers makes an optimizer of no parameters; the module's parameters: {has}.", fix=fix
    )


def _place_stream(run: Run, content: Content | None, path: str | None, stream_state: StateDict | None) -> None:
    """Tell the stream where the data were: in the checkpoint, or when the last fit of this Trainer ended."""
    assert run.stream is not None
    state = content.states.get("data") if content is not None else stream_state
    if state is not None:
        run.stream.load_state_dict(state)
    elif run.progress.epoch_open and not (content is not None and content.is_foreign):
        raise CheckpointError(
            f"{path} was taken in the middle of epoch {run.progress.epochs} and does not say where the data were.",
            fix="resume from a checkpoint that was taken at the end of an epoch, or start from its weights with "
            "load_from_checkpoint.",
        )


def _check_limits(loop: FitLoop, progress: Progress, path: str | None) -> None:
    limit = loop.epoch_limit
    if path is not None and limit != -1 and progress.epochs > limit:
        raise ConfigError(
            f"{path} has finished {counted(progress.epochs, 'epoch')}, and max_epochs={limit}.",
            fix=f"set max_epochs above {progress.epochs}.",
        )
    if loop.is_done and (progress.steps or progress.epochs) and not progress.epoch_open:
        others = "".join(f", {name}={value}" for name, value in loop.data_limits.items())
        warn(
            f"trainer.fit has nothing to do: {counted(progress.epochs, 'epoch')} and "
            f"{counted(progress.steps, 'step')} are done, and the "
            f"limits are max_epochs={limit} and max_steps={loop.max_steps}{others}",
        )


# --- validate, test, predict ---------------------------------------------------------------------------------------


def module_of_evaluation(verb: str, model: nn.Module | None, last: nn.Module | None) -> nn.Module:
    """Return the module to evaluate: the one that was passed, or that of the last run.

    Raises:
        ModuleError: There is none.
    """
    module = model if model is not None else last
    if module is None:
        raise ModuleError(
            f"trainer.{verb}() was called without a module, and none was used before.",
            fix=f"pass one: trainer.{verb}(module, ...).",
        )
    return module
