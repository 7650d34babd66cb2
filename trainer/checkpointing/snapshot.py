"""The state of a run for a checkpoint: taken, and restored."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ... import __version__
from ...callbacks import Callback
from ...callbacks.base import find_state
from ...checkpoint import content as contents
from ...checkpoint.content import Content
from ...data.rng import capture_rng, restore_rng
from ...errors import CheckpointError, LoopwrightError
from ...lazy import is_core
from ...messages import warn
from ...protocols import Owner, StateDict, WritesHyperparameters
from ...strategies.base import plain_name, plain_names
from ...strategies.optional import load_strategy_state, stages_of, strategy_state
from ..hooks import find_override
from ..loop import manual
from ..run import BeforeValidation, FitRun, Run
from .optimizer_record import all_names, differences, fit_groups, names_of

if TYPE_CHECKING:
    from ...fabric import Fabric
    from ..metrics.log_output import LogOutput
    from .validated_weights import ValidatedWeights

logger = logging.getLogger(__name__)


# --- out -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def collect(run: Run, *, is_weights_only: bool, has_score: bool = False, for_each_node: bool = False) -> StateDict:
    """Return the checkpoint of a run: tensors and plain values only.

    Anything else that a hook or a state holds is refused when the checkpoint is written.

    Args:
        run: The present run, or the last one.
        is_weights_only: Whether to leave out what only training needs.
        has_score: Whether the checkpoint bears the score of the latest validation, and so the weights of then.
        for_each_node: Whether all ranks have the generators of all ranks in it, not only rank 0.
    """
    options = {"is_weights_only": is_weights_only, "for_each_node": for_each_node}
    weights = run.evaluation_weights
    if weights is None:
        return _collect(run, run.validated if has_score else None, **options)
    from .validated_weights import ValidatedWeights

    with weights.evaluating():
        evaluated = ValidatedWeights(run.fabric.strategy.module_state_dict(run.model))
    with weights.training():
        validated = run.validated if run.validated is not None and has_score else evaluated
        return _collect(run, validated, **options)


def _collect(run: Run, validated: ValidatedWeights | None, *, is_weights_only: bool, for_each_node: bool) -> StateDict:
    from ..metrics.metric_objects import metric_states  # here and below: not imported before a state is taken
    from .program import program_record

    fabric, ranks_answer = run.fabric, run.ranks_answer
    states: StateDict = {
        "module": fabric.strategy.module_state_dict(run.model),
        "progress": _progress(run),
    }
    if validated is not None:
        from .validated_weights import copied

        states["module"], after = validated.split(states["module"], lambda names: _union(run, names))
        if after and not is_weights_only:
            # Copied, since the module may have other weights when this is written.
            states["after_validation"] = {name: copied(value) for name, value in after.items()}
    if getattr(run.module, "exclude_frozen_parameters", False):
        from ...checkpoint.frozen_parameters import leave_out  # not imported where nothing is left out

        stepped = [one for optimizer in run.optimizers for one in _stepped(optimizer)]
        states["module"], states["excluded"] = leave_out(states["module"], run.module, stepped)
    extra: StateDict = hyperparameters(run.module, "")
    if run.datamodule is not None:
        extra.update(hyperparameters(run.datamodule, "datamodule_"))
    if not is_weights_only:
        states["callbacks"] = callback_states(run.callbacks)
        states["optimizers"] = [fabric.strategy.optimizer_state(optimizer, run.model) for optimizer in run.optimizers]
        states["schedulers"] = [config.scheduler.state_dict() for config in run.schedulers]
        if run.configured:
            states["optimizer_record"] = {"configured": run.configured, "names": parameter_names(run)}
        if not run.is_automatic:
            states["gradients"] = manual.waiting_gradients(run)
        if run.carried is not None:
            states.update(run.carried.states())
        states["schedule_progress"] = [config.last_metric_step for config in run.schedulers]
        states["metrics"] = run.metrics.state_dict(run.module, alone=not ranks_answer)
        states["metric_objects"] = metric_states(run.module)
        states["rng"] = capture_rng()
        states["validation_generators"] = run.loaders.capture_generators()
        states["frozen"] = _frozen(run)
        states["unfinished"] = _unfinished(run)
        states["loggers"] = logger_states(run.output)
        saving = run.trainer._lw_saving
        states["program"] = {**(saving.program or program_record(fabric)), "fit": saving.fit}
        _leave_validation(run, states)
        if ranks_answer:
            states["metric_objects"] = run.metrics.of_ranks(states["metric_objects"])
            from ..loop import rank_rng

            states.update(rank_rng.collect(fabric.strategy, states["rng"], everywhere=for_each_node))
        if isinstance(run, FitRun) and run.opened is not None:
            # After fit the stream is closed; where it was in an epoch that a limit cut short is kept.
            states["data"] = run.stream_state if run.is_over else stream_state(run)
            if ranks_answer and states["data"] is not None:
                from ..loop import rank_coordination

                states["data"] = rank_coordination.gather_data(fabric.strategy, states["data"])
        # Communicates; after an error of this rank alone the others would not answer.
        if ranks_answer or not run.has_ranks:
            own_state = strategy_state(fabric.strategy)
            if own_state:
                states["strategy"] = own_state
        if run.trainer._lw_settled is not None:
            states["settled"] = run.trainer._lw_settled
        precision = fabric.precision.state_dict()
        if precision:
            states["precision"] = precision
            extra[type(fabric.precision).__qualname__] = precision
        if run.datamodule is not None:
            own = run.datamodule.state_dict()
            if own:
                extra[type(run.datamodule).__qualname__] = own
        if run.groups is not None:
            extra["torchft"] = run.groups.state_dict()
    checkpoint = contents.write(
        Content(states, extra),
        epoch=run.progress.epochs,
        global_step=run.progress.global_step,
        world_size=fabric.world_size,
        version=__version__,
    )
    run.trainer._lw_saving.complete(checkpoint)
    before = dict(checkpoint)
    if is_weights_only:
        run.lifecycle.of_callbacks("on_save_checkpoint", chosen=lambda callback: callback.replaces_weights)(checkpoint)
        own_hook = run.lifecycle.own("on_save_checkpoint")
        if own_hook is not None:
            own_hook(checkpoint)
    else:
        run.lifecycle.on_save_checkpoint(checkpoint)
    if ranks_answer and fabric.strategy.traits.has_stages:
        _take_from_last_stage(run, checkpoint, before)
    return checkpoint


def mark_callbacks(run: Run) -> None:
    """Remember the states of the user's callbacks, where ranks have different stages: see `_take_from_last_stage`."""
    if run.fabric.strategy.traits.has_stages:
        run.callback_marks = _marks_of_callbacks(run)


def _marks_of_callbacks(run: Run) -> dict[str, bytes]:
    from ...strategies.distributed.shards import has_parts

    states = callback_states([callback for callback in run.callbacks if not is_core(type(callback))])
    return {key: pickle.dumps(state) for key, state in states.items() if not has_parts(state)}


def _take_from_last_stage(run: Run, checkpoint: StateDict, before: StateDict) -> None:
    """Let the checkpoint hold what the user's code keeps on the rank with the last stage, the only one with losses.

    These are entries that hooks have added, and states of callbacks that have changed there since the run began. Others
    stay those of rank 0.
    """
    from ...strategies.distributed.shards import has_parts
    from ..metrics.metric_objects import to_cpu

    strategy = run.fabric.strategy
    ranks = strategy.topology.reporting_ranks
    assert ranks is not None, "there are stages"
    marks, callbacks = _marks_of_callbacks(run), checkpoint.get("callbacks", {})
    changed = {
        key: callbacks[key] for key, mark in marks.items() if key in callbacks and run.callback_marks.get(key) != mark
    }
    added = {key: one for key, one in checkpoint.items() if before.get(key) is not one and not has_parts(one)}
    found, states = to_cpu(strategy.broadcast(to_cpu((added, changed)), src=ranks[0]))
    checkpoint.update(found)
    callbacks.update(states)


def _stepped(optimizer: Any) -> list[Tensor]:  # Any: DeepSpeed's have flat tensors in `param_groups`, and `groups`
    """Return the module's parameters that an optimizer steps."""
    groups = optimizer.groups if "root" in vars(optimizer) else [group["params"] for group in optimizer.param_groups]
    return [one for members in groups for one in members]


def _union(run: Run, names: list[str]) -> list[str]:
    if not run.ranks_answer:
        return names
    return list(dict.fromkeys(name for theirs in run.fabric.strategy.gather_objects(names) for name in theirs))


def before_validation(run: Run) -> BeforeValidation:
    """Return what a validation is about to change, for a checkpoint that is taken during it."""
    from ..metrics.metric_objects import metric_states

    return BeforeValidation(
        rng=capture_rng(),
        generators=run.loaders.capture_generators(),
        metric_objects=metric_states(run.module, copy=True),
        evaluating=_evaluating(run.module),
        eval_batches=run.progress.eval_batches,
        window=run.metrics.window,
    )


def note_row_of_validation(run: Run) -> None:
    """Remember where the loggers were before a validation's first row: one that is repeated logs its rows again."""
    before = run.before_validation
    if before is not None and before.loggers is None:
        before.loggers = logger_states(run.output)


# Hooks that a repeated validation calls again.
_OF_A_VALIDATION = tuple(f"on_validation_{what}" for what in ("start", "epoch_start", "batch_start", "batch_end"))


def counts_batches(callback: Callback) -> bool:
    """Whether a user's callback may have in its state what a repeated validation would add again.

    Loopwright's own keep nothing of a validation that has not ended.
    """
    if is_core(type(callback)):
        return False
    hears = any(find_override(callback, name, (Callback,)) is not None for name in _OF_A_VALIDATION)
    return hears and find_override(callback, "state_dict", (Callback,)) is not None


def _leave_validation(run: Run, states: StateDict) -> None:
    """Replace the states by the states of training, if a validation is in progress."""
    before, progress = run.before_validation, run.progress
    if before is None:
        return
    states["rng"] = before.rng
    if progress.validated_at != progress.total_batches:  # it will be repeated as a whole
        states["validation_generators"] = before.generators
        states["metric_objects"] = before.metric_objects
        states["progress"]["eval_batches"] = before.eval_batches
        states["metrics"]["window"] = before.window
        if before.loggers is not None:
            states["loggers"] = before.loggers


def _unfinished(run: Run) -> StateDict:
    """Return the unfinished parts of the current event; see trainer/checkpointing/unfinished.py."""
    due: StateDict = {}
    pending = None if run.is_over else run.lifecycle.pending_checkpoints()
    if pending is not None:
        due["told_later"] = pending  # the key of files that exist
    if run.progress.validation_ending:
        own = capture_rng()
        due["validation_end"] = {"rng_of_ranks": [own]}
        if run.ranks_answer:
            from ..loop import rank_rng

            due["validation_end"] = rank_rng.collect(run.fabric.strategy, own)
    return due


def _frozen(run: Run) -> dict[str, list[str]]:
    """Return the names of frozen parameters, under all names of tied ones, and of modules that train in eval mode."""
    module, before = run.module, run.before_validation
    trained = {name: one.requires_grad for name, one in module.named_parameters(remove_duplicate=False)}
    modes = {path: child.training for path, child in module.named_modules(remove_duplicate=False)}
    if before is not None:
        modes = {path: path not in before.evaluating for path in modes}
    stages = stages_of(run.fabric.strategy)
    if run.ranks_answer and stages is not None:
        trained, modes = (stages.of_stages(run.model, facts) for facts in (trained, modes))
    return {
        "parameters": [plain_name(name) for name, is_trained in trained.items() if not is_trained],
        "modules": [plain_path(path) for path, is_training in modes.items() if not is_training],
    }


def plain_path(path: str) -> str:
    """Return the path of a module as it is without torch.compile."""
    return plain_name(f"{path}.")[:-1]


def _evaluating(module: nn.Module) -> set[str]:
    """Return the paths of modules in eval mode."""
    return {path for path, child in module.named_modules(remove_duplicate=False) if not child.training}


def stream_state(run: FitRun) -> StateDict:
    """Return where the data are: within a step that an error interrupted, where it began, for it will be repeated."""
    position = None if run.at_boundary else run.progress.batches_in_epoch
    if run.before_validation is None:
        return run.stream.state_dict(position)
    with run.loaders.before_validation(run.before_validation.generators):
        return run.stream.state_dict(position)


def _progress(run: Run) -> StateDict:
    state = run.progress.state_dict()
    if run.state.fn == "fit":
        state["validated_s"] = run.seconds_since_validation()
    if run.ranks_answer:
        state["samples"], state["tokens"], _ = count_data(run)
    return state


def count_data(run: Run, sent: T | None = None) -> tuple[int, int, list[T]]:
    """Return the samples and tokens that all ranks have trained on, and what each rank has sent beside its counts.

    Each rank counts its own since fit began or resumed.
    """
    progress, strategy = run.progress, run.fabric.strategy
    own = (progress.samples - progress.samples_before, progress.tokens - progress.tokens_before)
    counts, received = zip(*strategy.gather_objects((own, sent)), strict=True)
    everywhere = strategy.topology.reports(list(counts))
    copies = len(everywhere) // strategy.topology.data_size  # ranks that train on the same samples
    samples, tokens = (sum(column) // copies for column in zip(*everywhere, strict=True))
    return progress.samples_before + samples, progress.tokens_before + tokens, list(received)


def logger_states(output: LogOutput) -> StateDict:
    """Return the states of loggers by number and class; those without any are left out."""
    states: StateDict = {}
    for index, item in enumerate(output.loggers):
        # A logger writes here what it has pending; one that cannot must not cost the checkpoint.
        output.ask(item, lambda item=item, index=index: states.update(  # type: ignore[misc]
            {f"{index}-{type(item).__name__}": item.state_dict()}
        ))  # fmt: skip
    return {key: state for key, state in states.items() if state}


def callback_states(callbacks: list[Callback]) -> StateDict:
    """Return the states that callbacks have to save, by their keys."""
    states = {}
    for callback in callbacks:
        state = callback.state_dict()
        if state:
            states[callback.state_key] = state
    return states


def hyperparameters(owner: Owner, prefix: str) -> StateDict:
    """Return the entries of a checkpoint for the hyperparameters of a module (prefix "") or "datamodule_"."""
    if isinstance(owner, WritesHyperparameters):
        return owner.checkpoint_hyperparameters(prefix)
    if not getattr(owner, "hparams", None):
        return {}
    from ...checkpoint import hparams  # not imported without any

    return hparams.write(owner, prefix)


# --- in ------------------------------------------------------------------------------------------------------------


def read(fabric: Fabric, path: str, *, is_trusted: bool) -> Content:
    """Load a checkpoint onto the CPU; the states move to the device when they are restored."""
    from ...checkpoint import hparams
    from ...checkpoint.reading import Ranks, read_on_all_ranks

    strategy = fabric.strategy

    def on_all_ranks(function: Callable[[], T]) -> T:
        from ...fabric.on_all_ranks import run_on_all_ranks

        return run_on_all_ranks(strategy, function)

    checkpoint = read_on_all_ranks(
        fabric.checkpoint_io,
        path,
        Ranks(fabric.global_rank, fabric.world_size, strategy.gather_objects, on_all_ranks),
        is_safe=not is_trusted,
        by_parts=strategy.traits.shards_parameters,
    )
    hparams.put_back(checkpoint)
    content = contents.read(checkpoint, source=path)
    content.extra["__checkpoint__"] = checkpoint
    return content


def restore_module(run: Run, content: Content) -> None:
    """Restore module, data module and callbacks; their hooks first."""
    from ..metrics.metric_objects import load_metric_states

    checkpoint = content.extra["__checkpoint__"]
    after = content.states.get("after_validation")
    if after and run.state.fn == "fit":  # the weights with which training continues; the others are for evaluation
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **after}
    own = run.lifecycle.own("on_load_checkpoint")
    if own is not None:
        own(checkpoint)
    restore_weights(run, content)
    load_metric_states(run.module, content.states.get("metric_objects", {}), run.device, run.metrics.place)
    if run.datamodule is not None:
        state = content.extra.get(type(run.datamodule).__qualname__)
        if state is not None:
            run.datamodule.load_state_dict(state)
    run.lifecycle.of_callbacks("on_load_checkpoint")(checkpoint)
    restore_callbacks(run.callbacks, checkpoint.get("callbacks", {}))


def restore_weights(run: Run, content: Content) -> None:
    """Load parameters and buffers into the module of a run; on every rank."""
    checkpoint = content.extra["__checkpoint__"]
    strict = getattr(run.module, "strict_loading", True) is not False
    leaves_out = getattr(run.module, "exclude_frozen_parameters", False)
    excluded = content.states.get("excluded", ()) if leaves_out else ()
    keys = run.fabric.strategy.load_module_state_dict(
        run.model, plain_names(checkpoint["state_dict"]), strict=strict and not excluded
    )
    if not strict:
        for what in ("missing", "unexpected"):
            names = getattr(keys, f"{what}_keys", ())
            if names:
                logger.warning("strict_loading = False: %s keys, not loaded: %s", what, ", ".join(names))
    if strict and excluded:
        from ...checkpoint.frozen_parameters import check_loaded

        check_loaded(run.module, keys, frozenset(excluded))


def restore_callbacks(callbacks: list[Callback], states: StateDict) -> None:
    """Load the states of callbacks, which are found by the values of their arguments; warn of those without a callback.

    Raises:
        CheckpointError: A state is not one of its callback's.
    """
    known = {callback.state_key: callback for callback in callbacks if _has_state(callback)}
    found = {key: find_state(states, key) for key in known}
    unused = [key for key in states if key not in found.values()]
    if unused:
        logger.warning(
            "the checkpoint has states of callbacks that this Trainer does not have, or has with other arguments: %s",
            ", ".join(unused),
        )
    for key, callback in known.items():
        saved = found[key]
        if saved is None:
            continue
        try:
            callback.load_state_dict(states[saved])
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            if isinstance(error, LoopwrightError) or not is_core(type(callback)):
                raise  # a class of the user's has its own reasons
            raise CheckpointError(
                f"the checkpoint was altered: {key} cannot load its state: {type(error).__name__}: {error}.",
                fix="use another checkpoint, or take this entry out of checkpoint['callbacks'].",
            ) from error


def _has_state(callback: Callback) -> bool:
    return find_override(callback, "load_state_dict", (Callback,)) is not None


def put_back_loggers(output: LogOutput, states: StateDict) -> None:
    """Let loggers continue in the same files, where `logger_states` saw them. Called before anything is logged."""
    for index, item in enumerate(output.loggers):
        state = states.get(f"{index}-{type(item).__name__}")
        if state:
            item.load_state_dict(state)


def restore_training(run: FitRun, content: Content, path: str) -> Callable[[], None] | None:
    """Restore counts, optimizers, schedules, precision and metrics.

    Args:
        run: The run, whose optimizers are built.
        content: The checkpoint.
        path: Where it was read.

    Returns:
        A function that restores the random number generators, to be called last; None if the checkpoint has none.

    Raises:
        CheckpointError: The checkpoint has weights only, or another number of optimizers or schedules.
    """
    states, strategy = content.states, run.fabric.strategy
    if "optimizers" not in states:
        raise CheckpointError(
            f"{path} has weights only, and trainer.fit needs optimizers and counts to resume.",
            fix="resume from a full checkpoint, or load the weights with load_from_checkpoint and train from scratch.",
        )
    # Saved before training: there was nothing to save yet, and there is nothing to restore.
    is_untrained = not states["optimizers"] and not states["progress"].get("steps")
    if is_untrained:
        states = {**states, "optimizers": [one.state_dict() for one in run.optimizers]}
        states["schedulers"] = [config.scheduler.state_dict() for config in run.schedulers]
    if content.is_foreign and run.schedulers and not states.get("schedulers"):
        warn(f"{path} has no states of schedules: the schedules of configure_optimizers start from scratch")
        states = {**states, "schedulers": [config.scheduler.state_dict() for config in run.schedulers]}
    for what, have in (("optimizers", run.optimizers), ("schedulers", run.schedulers)):
        saved = states.get(what, [])
        if len(saved) != len(have):
            raise CheckpointError(
                f"{path} has {len(saved)} {what}, and configure_optimizers made {len(have)}.",
                fix="resume with the optimizers and schedules of the run that saved it.",
            )
    for callback in run.callbacks:
        if hasattr(callback, "restore_param_groups"):
            callback.restore_param_groups(run.trainer, run.module)
    run.progress.load_state_dict(states["progress"])
    logger.info("Resuming at epoch %d, step %d from %s.", run.progress.epochs, run.progress.steps, path)
    record = states.get("optimizer_record", {})
    names = record.get("names", [None] * len(run.optimizers))
    put_back = [
        _load_optimizer(run, optimizer, state, saved, path)
        for optimizer, state, saved in zip(run.optimizers, states["optimizers"], names, strict=True)
    ]
    if record and run.fabric.is_global_zero:
        _report_differences(path, differences(record["configured"], run.configured, put_back))
    if not run.is_automatic and "gradients" in states:
        manual.restore_gradients(run, states["gradients"])
    for config, state in zip(run.schedulers, states.get("schedulers", []), strict=True):
        config.scheduler.load_state_dict(state)
    for config, last in zip(run.schedulers, states.get("schedule_progress", []), strict=False):
        config.last_metric_step = last
    if "strategy" in states:
        load_strategy_state(strategy, states["strategy"])
    if "precision" in states:
        run.fabric.precision.load_state_dict(states["precision"])
    if "metrics" in states:
        run.metrics.load_state_dict(states["metrics"], run.module)
    if content.is_foreign:
        logger.warning(
            "%s was not written by Loopwright: random number generators and data order start from scratch", path
        )
    run.unfinished = states.get("unfinished", {})
    rng = states.get("rng")
    if rng is None:
        return None
    of_ranks = states.get("rng_of_ranks", [rng])
    if run.has_ranks or len(of_ranks) > 1:
        from ..loop import rank_rng

        return rank_rng.resumed(strategy, of_ranks, states.get("rng_places"))
    return lambda: restore_rng(rng)


def restore_frozen(run: Run, content: Content) -> None:
    """Restore which parameters are frozen and which modules are in eval mode: hooks that set it do not run again."""
    frozen = content.states.get("frozen")
    if frozen is None:
        return
    parameters, modules = {*map(plain_name, frozen["parameters"])}, {*map(plain_path, frozen["modules"])}
    changed = []
    for name, parameter in all_names(run.module).items():
        if parameter.requires_grad == (name in parameters):
            parameter.requires_grad_(not parameter.requires_grad)
            changed.append(name)
    for path, child in run.module.named_modules():
        child.training = plain_path(path) not in modules
    if changed:
        logger.info("requires_grad is set as in the checkpoint for: %s", ", ".join(changed))


def parameter_names(run: Run) -> list[list[list[str]] | None]:
    """Return the names of each optimizer's parameters by group; None where they are not all known here."""
    if run.fabric.strategy.traits.has_stages:
        return [None for _ in run.optimizers]
    return [names_of(run.module, optimizer) for optimizer in run.optimizers]


def _load_optimizer(
    run: Run, optimizer: Optimizer, state: StateDict, saved: list[list[str]] | None, path: str
) -> tuple[StateDict, list[int]]:
    """Put an optimizer's state back, and return it with which of its groups each group was.

    Args:
        run: Its module's parameters are known by name.
        optimizer: Steps the module.
        state: In torch's layout.
        saved: Names of its parameters by group; None where the checkpoint has none.
        path: Where the checkpoint was read.
    """
    groups = state.get("param_groups")
    listed = groups if isinstance(groups, list | tuple) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("params"), list | tuple) for one in listed):
        raise CheckpointError(
            f"{path} is altered: expected the state of {type(optimizer).__name__} with 'param_groups', got "
            f"{sorted(map(str, state))[:5]}.",
            fix="use another checkpoint, or start from the weights with load_from_checkpoint.",
        )
    order = list(range(len(state["param_groups"])))
    strategy = run.fabric.strategy
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if saved is not None and strategy.traits.has_stages and [len(names) for names in saved] == sizes:
        # Each stage takes its own parameters by name.
        named = [{**group, contents.PARAM_NAMES: n} for group, n in zip(state["param_groups"], saved, strict=True)]
        state, saved = {**state, "param_groups": named}, None
    own = (
        names_of(run.module, optimizer)
        if saved or any(contents.PARAM_NAMES in g for g in state.get("param_groups", ()))
        else None
    )
    if own is not None and saved is not None:
        known = set(all_names(run.module))
        state, order = fit_groups(state, saved, own, known=known, name=type(optimizer).__name__)
    elif own is not None:
        state = contents.fit_by_name(state, own)
    try:
        run.fabric.strategy.load_optimizer_state(optimizer, state, run.model)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: the state of {type(optimizer).__name__} does not fit: {error}.",
            fix="resume with the same parameter groups, or start from the weights with load_from_checkpoint.",
        ) from error
    if any("fused" in group for group in state.get("param_groups", ())):
        from ...optim.fused import match_implementation

        match_implementation(optimizer)
    return state, order


def _report_differences(path: str, found: list[str]) -> None:
    """Report what is configured differently from the run that is resumed: the checkpoint's values are used."""
    if found:
        logger.warning(
            "%s: its optimizers and schedules continue, and configure_optimizers returns different ones:\n  %s"
            "\n  To use your value, write it into checkpoint['optimizer_states'] or ['lr_schedulers'] in the "
            "module's on_load_checkpoint(checkpoint).",
            path,
            "\n  ".join(found),
        )
