"""Assembly of a run: callbacks, and the functions that a step calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import Callback, Checkpoint, GradientAccumulationScheduler
from ...data.move import move_to_device, mover_to
from ...errors import ConfigError, ModuleError, nearest
from ...messages import counted, warn
from ...precision.base import clear_gradients, evaluates_again
from ...protocols import Batch, StepFunction
from ...strategies.joint_optimizer import JointOptimizer
from ...strategies.optional import RunsWindows
from ..hooks import MODULE_BASES, find_override
from ..loop.manual import count_own_step, loss_in_manual
from ..loop.schedule import parameters_of, step_plateaus
from ..loop.window import Held, finish_window, loss_and_backward, step_schedules
from ..module import Module
from ..run import FitRun, Run, StepPlan

if TYPE_CHECKING:
    from ...strategies import Strategy
    from ...strategies.base import RunWindow
    from ..view import TrainerView
    from .arguments import Arguments


# --- callbacks -----------------------------------------------------------------------------------------------------


def merge_callbacks(callbacks: list[Callback], from_module: Any) -> list[Callback]:  # Any: checked here
    """Return the Trainer's and the module's callbacks; the module's replace callbacks of the same or a parent class."""
    if isinstance(from_module, Callback):
        from_module = [from_module]
    extra = list(from_module or [])
    for callback in extra:
        if not isinstance(callback, Callback):
            raise ModuleError(
                f"configure_callbacks returned {type(callback).__name__}, expected lw.Callback.",
                fix="return a callback or a list of callbacks.",
            )
    kinds = {type(callback) for callback in extra}
    kept = [c for c in callbacks if not any(issubclass(kind, type(c)) for kind in kinds)]
    return order_callbacks([*kept, *extra])


def require_callbacks(callbacks: list[Any]) -> None:  # Any: checked here
    """Refuse classes, and objects of other classes than Callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            is_class = isinstance(callback, type)
            raise ConfigError(
                f"Expected callbacks to be instances of lw.Callback, got "
                f"{f'the class {callback.__name__}' if is_class else repr(callback)}.",
                fix=f"pass {callback.__name__}(...)." if is_class else "pass instances of lw.Callback subclasses.",
            )


def order_callbacks(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks in the user's order, the tuner's first and checkpoints last; refuse two with one state key.

    Raises:
        ConfigError: Two callbacks with state have the same `state_key`.
    """

    # A stable sort: callbacks that determine the settings of a run come first, checkpoints last.
    def place(one: Callback) -> int:
        return 2 + one.ends_with_run if isinstance(one, Checkpoint) else 0 if one.runs_first else 1

    ordered = sorted(callbacks, key=place)
    seen: dict[str, Callback] = {}
    for callback in ordered:
        if find_override(callback, "state_dict", (Callback,)) is None:
            continue
        if callback.state_key in seen:
            raise ConfigError(
                f"two callbacks have the state key {callback.state_key!r}, so one would overwrite the other's state in "
                "a checkpoint.",
                fix="give them different arguments, or override state_key in a subclass.",
            )
        seen[callback.state_key] = callback
    return ordered


def default_callbacks(arguments: Arguments, own: list[Callback]) -> list[Callback]:
    """Return the callbacks that the arguments require and the user did not pass.

    Raises:
        ConfigError: An argument and a callback contradict each other.
    """

    def has(kind: type) -> bool:
        return any(isinstance(callback, kind) for callback in own)

    from ...callbacks import ProgressBar  # here and below: only what the arguments require is imported

    problems: list[str] = []
    has_checkpoint = any(isinstance(one, Checkpoint) and not one.ends_with_run for one in own)
    if not arguments.enable_checkpointing and has_checkpoint:
        problems.append("enable_checkpointing=False, and a checkpoint callback is passed")
    bars = [type(callback).__name__ for callback in own if isinstance(callback, ProgressBar)]
    if len(bars) > 1:
        problems.append(f"several progress bars are passed: {', '.join(bars)}")
    if bars and not arguments.enable_progress_bar:
        problems.append(f"enable_progress_bar=False, and {bars[0]} is passed")
    if has(GradientAccumulationScheduler) and arguments.accumulate_grad_batches != 1:
        problems.append("accumulate_grad_batches and GradientAccumulationScheduler are both given")
    if has(GradientAccumulationScheduler) and arguments.global_batch_size is not None:
        problems.append("global_batch_size and GradientAccumulationScheduler are both given")
    if problems:
        raise ConfigError(f"Trainer: {'; '.join(problems)}.", fix="leave out one of each pair.")
    added: list[Callback] = []
    if arguments.enable_progress_bar and not bars:
        from ...callbacks import RichProgressBar

        added.append(RichProgressBar())
    if arguments.enable_model_summary:
        from ...callbacks import ModelSummary, RichModelSummary

        if not has(ModelSummary):
            added.append(RichModelSummary())
    if arguments.max_time is not None:
        from ...callbacks import Timer

        if not has(Timer):
            added.append(Timer(duration=arguments.max_time, interval="step"))
    if arguments.enable_checkpointing and not has_checkpoint:
        from ...callbacks import ModelCheckpoint

        added.append(ModelCheckpoint())
    return added


# --- functions of a step -------------------------------------------------------------------------------------------


def bind_step(run: Run, name: str, *, several_loaders: bool = False) -> StepFunction:
    """Return the module's step under strategy and precision, bracketed for a profiler, taking what it declares.

    Raises:
        ModuleError: Several loaders and no dataloader_idx, or arguments that the trainer does not have.
    """
    step = getattr(run.module, name)
    parameters = inspect.signature(step).parameters
    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    owner = type(run.module).__name__
    if "dataloader_iter" in positional:
        raise ModuleError(
            f"Expected {owner}.{name} to take a batch, got the argument dataloader_iter, which is not supported.",
            fix=f"define it with a batch: def {name}(self, batch, batch_idx).",
        )
    most = 3 if name != "training_step" else 2
    required = [p.name for p in parameters.values() if p.default is p.empty and p.name in positional]
    if not takes_any and (not positional or len(required) > most):
        raise ModuleError(
            f"{owner}.{name}({', '.join(positional)}) takes other arguments than the trainer passes.",
            fix=f"declare it as {name}(self, batch, batch_idx{', dataloader_idx=0' if most == 3 else ''}).",
        )
    if several_loaders and not takes_any and len(positional) < 3:
        raise ModuleError(
            f"{owner}.{name} is given several loaders and does not take dataloader_idx.",
            fix=f"declare it as {name}(self, batch, batch_idx, dataloader_idx=0).",
        )
    if not several_loaders and not takes_any and len(required) == 3:
        raise ModuleError(
            f"{owner}.{name} requires {required[2]}, and there is one loader only.",
            fix=f"give it a default: {name}(self, batch, batch_idx, dataloader_idx=0).",
        )
    bound = run.fabric.bind_step(run.model, name)
    bound = run.lifecycle.bracketed(bound, f"[Strategy]{type(run.fabric.strategy).__name__}.{name}")
    if takes_any or len(positional) >= 2:
        return bound
    return lambda batch, *_: bound(batch)


def _mover(run: Run) -> Callable[..., Batch]:
    """Return the function that moves a batch to the device, during its computation if the device has streams."""
    if run.device.type != "cuda":
        move, device = run.fabric.move_batch, run.device
        return mover_to(device) if move is move_to_device else lambda batch, *_: move(batch, device)
    from ...data.copy_stream import CopyStream

    return CopyStream(run.fabric.to_device, run.device)


def transfer_of(run: Run) -> Callable[..., Batch]:
    """Return (batch, dataloader_idx=0) -> batch on the device, through the user's transfer hooks."""
    life, device = run.lifecycle, run.device
    before, move, after = (
        life.own("on_before_batch_transfer"),
        life.own("transfer_batch_to_device"),
        life.own("on_after_batch_transfer"),
    )
    to_device = life.bracketed(_mover(run), f"[Strategy]{type(run.fabric.strategy).__name__}.batch_to_device")

    def transfer(batch: Batch, dataloader_idx: int = 0) -> Batch:
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = to_device(batch) if move is None else run.fabric.precision.convert_input(
            move(batch, device, dataloader_idx)
        )  # fmt: skip
        return batch if after is None else after(batch, dataloader_idx)

    return to_device if before is None and move is None and after is None else transfer


def make_plan(run: FitRun, trainer: TrainerView) -> StepPlan:
    """Bind what one training step calls."""
    life, fabric = run.lifecycle, run.fabric
    optimizer = run.optimizers[0] if run.optimizers else None
    is_automatic = run.is_automatic
    if is_automatic and len(run.optimizers) > 1:
        optimizer = JointOptimizer(run.optimizers)
        if life.is_heard("on_before_optimizer_step"):
            life.wrap("on_before_optimizer_step", lambda fire: lambda joint: [fire(one) for one in joint.parts])
    run_window = _run_window(run) if is_automatic else None
    needs_closure = is_automatic and optimizer is not None and evaluates_again(optimizer)
    hold: Callable[[FitRun], Held] | None = None
    if run_window is not None or needs_closure:
        from ..loop.held_window import HeldWindow  # loaded for pipelines and closures only

        hold = HeldWindow
    # An engine accumulates by itself, also alone: it has to know which backward pass ends a window.
    defers = fabric.world_size > 1 or fabric.strategy.traits.owns_optimizers
    needs_outputs = life.is_heard("on_train_batch_end")
    return StepPlan(
        transfer=transfer_of(run),
        training_step=bind_step(run, "training_step"),
        table=run.metrics.table_of("training_step"),
        loss_and_backward=loss_and_backward if is_automatic else loss_in_manual,
        backward=_backward(run),
        zero_grad=_zero_grad(run, optimizer),
        clip=_clip(run, trainer, optimizer) if is_automatic else None,
        take_step=life.bracketed(fabric.optimizer_step, f"[Strategy]{type(fabric.strategy).__name__}.optimizer_step"),
        step_by_module=_step_by_module(run),
        no_sync=(lambda: fabric.no_backward_sync(run.model)) if defers else None,
        without_data=fabric.strategy.without_data,
        optimizer=optimizer,
        needs_outputs=needs_outputs,
        needs_loss=needs_outputs or run.watch.keeps or run.skips_bad_steps or life.own("optimizer_step") is not None,
        unscale=(lambda: fabric.unscale_gradients(optimizer))
        if optimizer is not None and fabric.precision.has_scaler
        else None,
        step_schedules=step_schedules,
        begin_window=run.window_loss.begin if is_automatic else lambda size: run.stepped.clear(),
        finish_window=finish_window if is_automatic else count_own_step,
        looks_ahead=defers and hold is None,
        hold=hold,
        zeroes_early=is_automatic and _zeroes_early(run),
        run_window=run_window,
        step_plateaus=step_plateaus,
        needs_closure=needs_closure,
    )


def _backward(run: FitRun) -> Callable[[Tensor], None]:
    own = run.lifecycle.own("backward")
    fabric = run.fabric
    name = f"[Strategy]{type(fabric.strategy).__name__}.backward"
    if own is None:
        return run.lifecycle.bracketed(fabric.bind_backward(), name)
    return lambda loss: own(fabric.precision.scale_loss(loss))


def _zero_grad(run: FitRun, optimizer: Optimizer | None) -> Callable[[], object]:
    if optimizer is None:
        return lambda: None
    own = run.lifecycle.own("optimizer_zero_grad")
    life = run.lifecycle
    plain = life.bracketed(clear_gradients(optimizer), f"[Strategy]{type(run.fabric.strategy).__name__}.zero_grad")
    if own is None and not life.is_heard("on_before_zero_grad"):
        return plain

    def zero_grad() -> None:
        for one in run.optimizers:
            life.on_before_zero_grad(one)
            if own is not None:
                own(run.progress.epochs, run.batch_idx, one)
        if own is None:
            plain()

    return zero_grad


def _zeroes_early(run: FitRun) -> bool:
    """Return whether gradients can be zeroed before the forward pass, unnoticed by hooks and engines."""
    strategy, life = run.fabric.strategy, run.lifecycle
    is_heard = life.own("optimizer_zero_grad") is not None or life.is_heard("on_before_zero_grad")
    has_engine = strategy.traits.owns_optimizers or strategy.traits.traces_lazily
    return not is_heard and not has_engine


def _clip(run: FitRun, trainer: TrainerView, optimizer: Optimizer | None) -> Callable[[], None] | None:
    if optimizer is None:
        return None
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    own = run.lifecycle.own("configure_gradient_clipping")
    if own is None and has_override(run.module, "clip_gradients"):
        own = getattr(run.module, "configure_gradient_clipping", None)  # the default calls it
    if own is not None:
        return lambda: own(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    if not value:
        return None

    def clip() -> None:
        trainer.clip_gradients(optimizer, value, algorithm)

    return run.lifecycle.bracketed(clip, f"[Strategy]{type(run.fabric.strategy).__name__}.clip_gradients")


def _step_by_module(run: FitRun) -> Callable[[Callable[[], Tensor | None]], bool] | None:
    """Return a function that steps through the module's own `optimizer_step`; None if it has none."""
    own = run.lifecycle.own("optimizer_step")
    if own is None or not run.managed:
        return None

    def step_by_module(closure: Callable[[], Tensor | None]) -> bool:
        has_stepped = False
        for managed in run.managed:
            before = managed.num_steps
            own(run.progress.epochs, run.batch_idx, managed, closure)
            has_stepped = has_stepped or managed.num_steps > before
        return has_stepped

    return step_by_module


def _run_window(run: FitRun) -> RunWindow | None:
    """Return the strategy's own `run_window`; None where it leaves the inside of windows to the Trainer."""
    strategy = run.fabric.strategy
    if not (strategy.traits.runs_windows and isinstance(strategy, RunsWindows)):
        return None
    return run.lifecycle.bracketed(strategy.run_window, f"[Strategy]{type(strategy).__name__}.run_window")


# --- what the user forgot ------------------------------------------------------------------------------------------


def require_step(module: nn.Module, name: str, verb: str) -> None:
    """Refuse a module without the step that the verb needs.

    Raises:
        ModuleError: With the nearest method that the module has.
    """
    if find_override(module, name, MODULE_BASES) is None:
        arguments = "self" if name == "configure_optimizers" else "self, batch, batch_idx"
        methods = [n for n in dir(type(module)) if not n.startswith("_") and n not in dir(nn.Module)]
        where = "your module" if isinstance(module, Module) else "its class, or in an lw.Module that holds it"
        raise ModuleError(
            f"trainer.{verb} needs {type(module).__name__}.{name}({arguments}), which is not defined"
            f"{nearest(name, [m for m in methods if find_override(module, m, MODULE_BASES) is not None])}.",
            fix=f"define {name} in {where}.",
        )


def has_override(module: nn.Module, name: str) -> bool:
    """Whether the module defines the hook itself."""
    return find_override(module, name, MODULE_BASES) is not None


def check_parameters(module: nn.Module, optimizers: list[Optimizer]) -> None:
    """Refuse an optimizer that holds parameters which do not, or no longer, belong to the module.

    Raises:
        ModuleError: Names how many, which parameters are not trained in their place, and what usually causes it.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if held and not any(p.requires_grad for p in held) and any(p.requires_grad for p in module.parameters()):
            warn(
                f"{type(optimizer).__name__} trains nothing: none of its {len(held)} parameters requires a gradient. "
                "Call requires_grad_(True) on them, or pass configure_optimizers those that are trained"
            )
    known = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if optimizers:
        _warn_of_unregistered(module, own | known)
    if known <= own:
        return
    left_out = {name: one for name, one in module.named_parameters() if one.requires_grad and id(one) not in known}
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strange = [p for p in parameters if id(p) not in own]
        if not strange:
            continue
        shapes = {one.shape for one in strange}
        replaced = [name for name, one in left_out.items() if one.shape in shapes]
        if len(strange) == len(parameters):
            raise ModuleError(
                f"none of the {len(parameters)} parameters of {type(optimizer).__name__} belongs to the module: they "
                "are another module's, or they were replaced after the optimizer was built.",
                fix="build the optimizer in configure_optimizers, from self.parameters().",
            )
        if replaced:
            raise ModuleError(
                f"{len(strange)} of the {len(parameters)} parameters of {type(optimizer).__name__} do not belong to "
                f"the module, and no optimizer has {', '.join(replaced)}: it was built before they were replaced.",
                fix="build the optimizer in configure_optimizers, when all layers are there.",
            )
        warn(
            f"{len(strange)} of the {len(parameters)} parameters of {type(optimizer).__name__} do not belong to the "
            "module: they are in no checkpoint, and several processes do not average their gradients",
        )


def _warn_of_unregistered(module: nn.Module, known: set[int]) -> None:
    """Warn of layers in a plain list, tuple or dict, whose parameters torch does not find: they are not trained.

    Args:
        module: The module that is trained.
        known: Ids of the parameters that the module or an optimizer has.
    """
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            layers = [
                one for one in (value.values() if isinstance(value, dict) else value) if isinstance(one, nn.Module)
            ]
            lost = [p for layer in layers for p in layer.parameters() if p.requires_grad and id(p) not in known]
            if lost:
                kind = "ModuleDict" if isinstance(value, dict) else "ModuleList"
                warn(
                    f"self.{f'{path}.{name}' if path else name} is a {type(value).__name__} that holds layers: torch "
                    f"does not find their {counted(len(lost), 'parameter')}, so they are not trained, not saved and "
                    f"not moved to the device. Use nn.{kind}; or, for layers that are not to be trained, call "
                    "requires_grad_(False) on them"
                )


def check_joint(module: nn.Module, optimizers: list[Optimizer], strategy: Strategy) -> None:
    """Refuse optimizers that cannot step after one loss; warn of trained parameters that none of them has.

    Raises:
        ConfigError: An engine steps.
        ModuleError: Two optimizers have the same parameters; they are named.
    """
    kinds = [type(one).__name__ for one in optimizers]
    if strategy.traits.owns_optimizers:
        raise ConfigError(
            f"Expected one optimizer with {type(strategy).__name__}, whose engine steps, got {', '.join(kinds)}.",
            fix="return one optimizer with several parameter groups; or use strategy='ddp' or 'fsdp'.",
        )
    names = {id(one): name for name, one in module.named_parameters()}
    owners: dict[int, list[str]] = {}
    for kind, optimizer in zip(kinds, optimizers, strict=True):
        for parameter in parameters_of(optimizer):
            owners.setdefault(id(parameter), []).append(kind)
    shared = [f"{names.get(key, 'another')} ({' and '.join(of)})" for key, of in owners.items() if len(of) > 1]
    if shared:
        raise ModuleError(
            f"Expected each parameter in one optimizer, got in two: {_first(shared)}. They would be stepped twice.",
            fix="give each optimizer its own parameters; or set self.automatic_optimization = False to step them one "
            "after another.",
        )
    left_out = [name for name, one in module.named_parameters() if one.requires_grad and id(one) not in owners]
    if left_out:
        warn(
            f"no optimizer of {', '.join(kinds)} has {_first(left_out)}: they require gradients and are not trained. "
            "Add them to an optimizer, or freeze them with requires_grad_(False)"
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
