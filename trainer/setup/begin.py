"""The beginning of a verb: checks, hooks up to `configure_model`, optimizers, restoring."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...callbacks import Callback
from ...checkpoint.content import Content
from ...errors import CheckpointError, ConfigError, ModuleError
from ..checkpointing import optimizer_record, snapshot
from ..checkpointing.locate import locate
from ..hooks import check_hook_names
from ..lifecycle import hook_names
from ..loop import manual
from ..loop.eval_loop import EvalLoader
from ..loop.optimizers import ManagedOptimizer
from ..loop.schedule import read_optimizers
from ..module import Module
from ..run import Run
from . import assemble

if TYPE_CHECKING:
    from ...data.module import DataModule
    from ...strategies import TrainerConfig
    from ..trainer import Trainer

__all__ = ["STAGE_OF", "attach", "begin_evaluation", "begin_fit", "build_optimizers", "split_datamodule"]

STAGE_OF = {"validate": "validation", "test": "test", "predict": "predict"}


# --- what was passed -----------------------------------------------------------------------------------------------


def unwrapped(model: Any) -> nn.Module:
    """Return the user's module, also from what torch.compile returned.

    Raises:
        ModuleError: It is no nn.Module.
    """
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):
        original: nn.Module = model._orig_mod
        return original
    if not isinstance(model, nn.Module):
        raise ModuleError(
            f"expected lw.Module or another nn.Module, got {type(model).__name__}.",
            fix="pass an instance, not the class." if isinstance(model, type) else "pass a module.",
        )
    return model


def split_datamodule(loaders: Any, datamodule: Any, name: str) -> tuple[Any, Any]:
    """Let a DataModule stand in the place of the loaders.

    Raises:
        ConfigError: Both are given.
        ModuleError: `datamodule` is none.
    """
    from ...data.module import DataModule

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


def _check_required(trainer: Trainer, verb: str, module: nn.Module) -> None:
    """Refuse early what cannot run: a missing step, a missing loader, arguments that manual optimization forbids."""
    if verb != "fit":
        stage = STAGE_OF[verb]
        if verb != "predict":
            assemble.require_step(module, f"{stage}_step", verb)
        elif not callable(getattr(module, "predict_step", None)):
            raise ModuleError(
                f"trainer.predict needs {type(module).__name__}.predict_step(batch, batch_idx).", fix="define it."
            )
        trainer.loaders.require(stage, verb)
        return
    assemble.require_step(module, "training_step", "fit")
    if not trainer.fabric.strategy.configures_optimizers:  # an engine's configuration may say
        assemble.require_step(module, "configure_optimizers", "fit")
    trainer.loaders.require("train", "fit")
    if getattr(module, "automatic_optimization", True):
        return
    wrong = []
    if trainer.accumulate_grad_batches != 1:
        wrong.append(f"accumulate_grad_batches={trainer.accumulate_grad_batches}")
    if trainer.global_batch_size is not None:
        wrong.append(f"global_batch_size={trainer.global_batch_size}")
    if trainer.gradient_clip_val:
        wrong.append(f"gradient_clip_val={trainer.gradient_clip_val}")
    if trainer.accumulation_scheduler is not None:
        wrong.append("GradientAccumulationScheduler")
    if wrong:
        raise ConfigError(
            f"{' and '.join(wrong)}: the trainer does neither in manual optimization.",
            fix="accumulate by hand, and call self.clip_gradients(optimizer, ...) in training_step.",
        )


# --- every verb ----------------------------------------------------------------------------------------------------


def attach(trainer: Trainer, verb: str, model: Any, datamodule: DataModule | None, given: dict[str, Any]) -> Run:
    """Attach module and data, compile the lifecycle, and run the hooks up to `configure_model`."""
    module = unwrapped(model)
    trainer.note_compiler(model, module)
    check_hook_names(module, "module", hook_names("module"))
    if datamodule is not None:
        check_hook_names(datamodule, "datamodule", hook_names("datamodule"))
        datamodule.trainer = trainer
    trainer.loaders.begin(module, datamodule, given)
    _check_required(trainer, verb, module)
    if verb == "fit":
        trainer.strategy.apply_trainer_config(_trainer_config(trainer, module))
    trainer.fabric.launch()
    trainer.connect_ranks()
    if verb == "fit":
        trainer.rng_course.begin_training(trainer.global_rank, trainer.world_size)
    trainer.output.set_rank(trainer.global_rank)
    if isinstance(module, Module):
        module.trainer = trainer
        module.fabric = trainer.fabric
        trainer.open_log(module)
        extra = module.configure_callbacks()
        if extra:
            for callback in [extra] if isinstance(extra, Callback) else extra:
                check_hook_names(callback, "callbacks", hook_names("callbacks"))
            trainer.callbacks = assemble.merge_callbacks(trainer.callbacks, extra)
    run = trainer.make_run(module, datamodule)
    _prepare_data(trainer, run)
    run.lifecycle.setup(verb)
    builders = [name for name in ("configure_sharded_model", "configure_model") if assemble.has_override(module, name)]
    if builders:
        with trainer.fabric.init_module():
            for name in builders:
                getattr(module, name)()
    trainer.strategy.configure_topology(module)
    if run.has_ranks:
        from ..loop import ranks  # not imported where there is one process

        ranks.compare(trainer.strategy, ranks.facts_of(trainer, verb, module))
        ranks.share_out(trainer)
    if verb == "fit":
        trainer.apply_layer_sync(module)
    trainer.begin_compiling(run)
    strategy = trainer.strategy
    sums_after_backward = strategy.accumulate_dtype is not None and not strategy.sums_gradients_itself
    if run.has_ranks and (verb != "fit" or not run.is_automatic or sums_after_backward):
        run.model = _place(trainer, module)
    else:
        run.model = trainer.fabric.prepare_module(module)
    return run


def _trainer_config(trainer: Trainer, module: nn.Module) -> TrainerConfig:
    """Return the Trainer's arguments for a strategy whose engine has a configuration of its own."""
    loader = trainer.loaders.given.get("train")
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    accumulate: int | None = trainer.accumulate_grad_batches
    if trainer.accumulation_scheduler is not None:
        accumulate = None
    elif trainer.global_batch_size is not None:
        from .global_batch import plan_accumulation

        accumulate = plan_accumulation(trainer, size if isinstance(size, int) else None)
    return {
        "accumulate_grad_batches": accumulate,
        "global_batch_size": trainer.global_batch_size,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "micro_batch_size": size if isinstance(size, int) else None,
        "is_automatic": getattr(module, "automatic_optimization", True),
        "grad_accumulation_dtype": "fp32" if trainer.strategy.accumulate_dtype is not None else None,
    }


def _prepare_data(trainer: Trainer, run: Run) -> None:
    """Let one rank of each node (or of all, with `prepare_data_per_node=False`) download; the others wait for it."""
    hooks = run.lifecycle.all_own("prepare_data")
    if not hooks:
        return
    owner = run.datamodule if run.datamodule is not None else run.module
    per_node = bool(getattr(owner, "prepare_data_per_node", True))
    with trainer.fabric.rank_zero_first(local=per_node):
        if (trainer.local_rank if per_node else trainer.global_rank) == 0:
            for hook in hooks:
                hook()


def _place(trainer: Trainer, module: nn.Module) -> nn.Module:
    """Set a module up for evaluation or manual optimization: no backward pass reduces its gradients."""
    fabric = trainer.fabric
    with fabric.strategy.change_context(module):
        module = fabric.precision.convert_module(module)
    fabric.strategy.module_to_device(module)
    return fabric.strategy.place_module(module)


# --- fit -----------------------------------------------------------------------------------------------------------


def begin_fit(
    trainer: Trainer,
    run: Run,
    ckpt_path: str | Path | None,
    *,
    is_trusted: bool,
    before: dict[str, Any] | None = None,
) -> Callable[[], None] | None:
    """Restore, build optimizers, check the data.

    Args:
        trainer: The Trainer.
        run: The run, attached.
        ckpt_path: What to resume from; None without.
        is_trusted: Whether objects that were marked as trusted are unpickled.
        before: What the last fit left (`continuing.take`), where this one continues it.

    Returns:
        What puts back the random number generators of the checkpoint, to be called last; None without one.
    """
    from .global_batch import report_global_batch  # not imported before a fit

    path = locate(trainer, ckpt_path, "fit", has_model=True)
    trainer.adopt_callbacks()  # `locate` has asked them for files of another run
    content = None
    if path is not None:
        trainer.ckpt_path = path
        content = snapshot.read(trainer.fabric, path, is_trusted=is_trusted)
        snapshot.restore_module(run, content)
        snapshot.put_back_loggers(run.output, content.states.get("loggers", {}))
    _agree_on_folders(trainer, "fit")
    build_optimizers(run)
    monitored = [*run.schedulers, *trainer.callbacks]
    run.metrics.decisive = frozenset(str(name) for one in monitored if (name := getattr(one, "monitor", None)))
    if not (run.is_automatic and run.optimizers):
        from ..loop.own_steps import OwnSteps  # not imported where the trainer makes every step

        run.own_steps = OwnSteps(run)
    restore = snapshot.restore_training(run, content, str(path)) if content is not None else None
    if content is None and before is not None:
        from .continuing import continue_training  # not imported in a first fit

        continue_training(trainer, run, before)
    trainer.fit_loop.is_used_up = False
    if trainer.max_samples is not None or trainer.max_tokens is not None:
        from ..loop.data_limits import is_reached  # not imported where steps or epochs are limited

        progress = trainer.progress  # with several ranks, an interrupted fit has left each rank's own there
        counts = (
            (progress.samples_before, progress.tokens_before) if run.has_ranks else (progress.samples, progress.tokens)
        )
        trainer.fit_loop.is_used_up = is_reached(trainer, *counts)
    trainer.write_hyperparameters()
    trainer.state.stage = "train"
    run.lifecycle.on_fit_start()
    if not trainer.progress.epoch_open:
        trainer.sanity_check(run)
    trainer.open_training(run)
    trainer.loaders.open_validation()
    if content is not None:
        trainer.loaders.restore_generators(content.states.get("validation_generators", {}))
    _place_stream(trainer, run, content)
    _check_limits(trainer, path)
    trainer.accumulation_for_epoch(trainer.progress.epochs)
    report_global_batch(trainer, run)
    run.plan = assemble.make_plan(run, trainer)
    if trainer.max_samples is not None or trainer.max_tokens is not None:
        from ..loop.data_limits import DataLimits

        limits = DataLimits(trainer, run)
        run.plan.transfer, run.plan.count_window = limits.counting(run.plan.transfer), limits.end_window
    if trainer.strategy.accumulate_dtype is not None:
        from ..loop.float32_gradients import bind_float32_gradients  # not imported where nobody asks

        run.undo = bind_float32_gradients(trainer, run)
    _carry_window(trainer, run, trainer.carried_states if content is None else content.states)
    # A submodule that the user put into eval mode (a frozen batch norm) stays there.
    if not run.module.training:
        run.module.train()
    if content is not None:
        snapshot.restore_frozen(run, content)
    elif run.has_ranks and not trainer.progress.total_batches:
        from ..loop import ranks

        ranks.separate_generators(trainer.global_rank)
    return restore


def _carry_window(trainer: Trainer, run: Run, states: Mapping[str, Any]) -> None:
    """Go on with the window that an epoch's end had cut short, where windows go on in the next epoch."""
    trainer.carried_states = {}
    if trainer.accumulate_across_epochs:
        from ..loop.carried_window import CarriedWindow  # not imported where windows end with the epoch

        run.carried = CarriedWindow(trainer, run)
        if "window" in states:
            run.carried.load_states(states, trainer.ckpt_path or "the last fit")
    elif "window" in states:
        warnings.warn(
            f"{trainer.ckpt_path} was taken within a window that goes on in the next epoch: the gradients of its "
            f"{states['window']['count']} micro-batches are left out; pass accumulate_across_epochs=True to use them",
            stacklevel=5,
        )


def _agree_on_folders(trainer: Trainer, verb: str) -> None:
    """Let all ranks know where loggers write, and the profiler where it reports."""
    trainer.output.agree(trainer.strategy)
    if trainer.profiler is not None:
        rank = trainer.global_rank if trainer.world_size > 1 else None
        module = trainer.lightning_module
        assert module is not None
        trainer.profiler.watch(module)
        trainer.profiler.setup(stage=verb, local_rank=rank, log_dir=trainer.log_dir)


def build_optimizers(run: Run) -> None:
    """Let the module make its optimizers and schedules; once per fit, and again when the tuner has set their rate."""
    module = run.module
    returned = None
    if assemble.has_override(module, "configure_optimizers"):
        returned = cast(Any, module).configure_optimizers()
    if returned is None and run.fabric.strategy.configures_optimizers:
        returned = run.fabric.strategy.default_optimizers(module)
    if returned is None:
        warnings.warn(
            "configure_optimizers returned None: the module is run without being trained, but by an optimizer that it "
            "steps itself, whose state is in no checkpoint",
            stacklevel=5,
        )
    run.optimizers, run.schedulers = read_optimizers(
        returned,
        is_automatic=run.is_automatic,
        has_own_scheduler_step=assemble.has_override(module, "lr_scheduler_step"),
    )
    assemble.check_parameters(module, run.optimizers)
    run.configured = optimizer_record.describe(run.optimizers, run.schedulers)
    if run.optimizers:
        run.optimizers = list(run.fabric.prepare_optimizers(*run.optimizers))
    step = manual.step_given if run.is_automatic else manual.step_in_manual
    run.managed = [
        ManagedOptimizer(optimizer, run.trainer, lambda o, closure: step(run, o, closure))
        for optimizer in run.optimizers
    ]


def _place_stream(trainer: Trainer, run: Run, content: Content | None) -> None:
    """Tell the stream where the data were: in the checkpoint, or when the last fit of this Trainer ended."""
    assert run.stream is not None
    state = content.states.get("data") if content is not None else trainer.stream_state
    if state is not None:
        run.stream.load_state_dict(state)
    elif trainer.progress.epoch_open:
        raise CheckpointError(
            f"{trainer.ckpt_path} was taken in the middle of epoch {trainer.progress.epochs} and does not say "
            "where the data were.",
            fix="resume from a checkpoint that was taken at the end of an epoch, or start from its weights with "
            "load_from_checkpoint.",
        )


def _check_limits(trainer: Trainer, path: str | None) -> None:
    loop, progress = trainer.fit_loop, trainer.progress
    limit = loop.epoch_limit
    if path is not None and limit != -1 and progress.epochs > limit:
        raise ConfigError(
            f"{path} has finished {progress.epochs} epochs, and max_epochs={limit}.",
            fix=f"set max_epochs above {progress.epochs}.",
        )
    if loop.is_done and (progress.steps or progress.epochs) and not progress.epoch_open:
        warnings.warn(
            f"trainer.fit has nothing to do: {progress.epochs} epochs and {progress.steps} steps are done, and the "
            f"limits are max_epochs={limit} and max_steps={loop.max_steps}"
            + "".join(
                f", {name}={value}"
                for name in ("max_samples", "max_tokens")
                if (value := getattr(trainer, name)) is not None
            ),
            stacklevel=5,
        )


# --- validate, test, predict ---------------------------------------------------------------------------------------


def begin_evaluation(
    trainer: Trainer,
    verb: str,
    model: Any,
    dataloaders: Any,
    ckpt_path: str | Path | None,
    datamodule: DataModule | None,
    *,
    is_trusted: bool,
) -> tuple[Run, EvalLoader]:
    """Attach module and data, load the weights that are meant, and return the run and its loaders."""
    stage = STAGE_OF[verb]
    if datamodule is not None and dataloaders is not None:
        raise both_given("dataloaders")
    module = model if model is not None else trainer.lightning_module
    if module is None:
        raise ModuleError(
            f"trainer.{verb}() was called without a module, and none was used before.",
            fix=f"pass one: trainer.{verb}(module, ...).",
        )
    if model is None and datamodule is None and dataloaders is None:
        datamodule = trainer.datamodule
    path = locate(trainer, ckpt_path, verb, has_model=model is not None)
    run = attach(trainer, verb, module, datamodule, {stage: dataloaders})
    steps, epochs = trainer.progress.steps, trainer.progress.epochs
    if path is not None:
        trainer.ckpt_path = path
        content = snapshot.read(trainer.fabric, path, is_trusted=is_trusted)
        snapshot.restore_module(run, content)
        counts = content.states.get("progress", {})
        # Records belong to the step of the weights, not to that of a training which this Trainer did before.
        steps, epochs = counts.get("steps", steps), counts.get("epochs", epochs)
    trainer.records_at = (steps, epochs)
    _agree_on_folders(trainer, verb)
    trainer.write_hyperparameters()
    trainer.state.stage = verb
    return run, trainer.loaders.open_eval(stage)
