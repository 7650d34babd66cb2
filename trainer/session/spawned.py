"""Verbs in processes that this one starts (spawn, fork), and the return of their results.

The processes work on copies of Trainer, module and callbacks. What fit changed comes back from rank 0: weights,
buffers, what is trained, plain hyperparameters, counts, metrics, the states of callbacks (the best path among them) and
of the data module, and what `save_checkpoint` needs. Other attributes that a step sets on the module stay there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...data.move import move_to_device
from ...errors import ModuleError, ReplayEnd
from ...protocols import StateDict
from ...strategies import Strategy
from ...strategies.optional import every_weight, stages_of
from ...tracebacks import show_trimmed
from ..checkpointing import snapshot
from ..checkpointing.program import program_record
from ..module import Module
from . import assemble
from .checks import builders, check_layers, check_packages, unwrapped

if TYPE_CHECKING:
    from ...data.module import DataModule
    from ..run import Run
    from ..trainer import Trainer

_CPU = torch.device("cpu")
_PLAIN = (bool, int, float, str, type(None))


def launch(trainer: Trainer, verb: str, model: nn.Module | None, **arguments: Any) -> object:  # Any: the verb's
    """Run a verb in new processes and return what it returned on rank 0.

    Args:
        trainer: Changed as if it had run the verb itself.
        verb: "fit", "validate", "test" or "predict".
        model: The user's module; its weights are changed in place.
        arguments: The verb's other arguments.

    Raises:
        ModuleError, ConfigError: The strategy cannot split the module's layers: before processes start.
        RankFailure: A process failed; names it.
    """
    show_trimmed()
    if model is not None:
        if verb == "fit":
            datamodule = arguments.get("datamodule")
            data = arguments.get("train_dataloaders") if datamodule is None else datamodule
            trainer._lw_settle_strategy(unwrapped(model), data)
        check_layers(trainer.strategy, unwrapped(model))
    check_packages(trainer, verb, arguments.get("ckpt_path"))
    module = model if model is not None else trainer.lightning_module
    trainer._lw_saving.program = program_record(trainer.fabric)
    if verb == "fit":
        trainer._lw_saving.begin_fit()
    result: StateDict = trainer.fabric.launcher.launch(_run_in_child, trainer, verb, module, arguments)
    if "is_replayed" in result:
        raise ReplayEnd
    if module is not None:
        _put_back_callbacks(trainer, unwrapped(module), result)
        _put_back_trainer(trainer, unwrapped(module), result)
        if verb == "fit":
            _put_back_module(trainer, unwrapped(module), result, arguments.get("datamodule"))
        for callback in trainer.callbacks:
            if callback.runs_first and hasattr(callback, "write_found"):  # the tuner's: a later verb uses it, too
                callback.write_found(trainer, (unwrapped(module), arguments.get("datamodule")))
    return result["returned"]


def _run_in_child(trainer: Trainer, verb: str, module: nn.Module | None, arguments: dict[str, object]) -> StateDict:
    """Run in every new process; the result of rank 0 goes back to the launching one."""
    trainer._lw_is_in_child = True
    try:
        returned = getattr(trainer, verb)(module, **arguments)
    except ReplayEnd:
        return {"is_replayed": True}
    is_fit = verb == "fit"
    content: StateDict = {
        "returned": returned,
        "state": (trainer.state.fn, trainer.state.status),
        "metrics": {name: value.to(_CPU) for name, value in trainer.callback_metrics.items()},
        "metric_steps": {name: trainer.metric_step(name) for name in trainer.callback_metrics},
        "logged": dict(trainer._lw_output.latest),
        "progress_bar": dict(trainer.progress_bar_metrics),
        "should_stop": trainer.should_stop,
        "versions": trainer._lw_output.versions(),
        "loggers": snapshot.logger_states(trainer._lw_output),
    }
    if is_fit:
        run = trainer.latest_run()
        assert run is not None
        # On every rank: taking states may communicate.
        whole = trainer.strategy.gather_state(snapshot.collect(run, is_weights_only=False))
        checkpoint = content["checkpoint"] = move_to_device(whole, _CPU)
        content["module"] = move_to_device(_module_content(trainer, run, checkpoint), _CPU)
        content["progress"] = trainer.progress.state_dict()
        content["stream"] = trainer._lw_stream_state
        content["timeline"] = trainer.timeline
        content["rng_of_ranks"] = trainer.strategy.gather_objects(trainer.training_rng.left)
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    states.update(content["checkpoint"].get("callbacks", {}) if is_fit else {})  # of the stage that knows them
    content["callbacks"] = trainer.strategy.gather_state(states)  # averages of shards, say
    return content if trainer.is_global_zero else {}


def _module_content(trainer: Trainer, run: Run, checkpoint: StateDict) -> StateDict:
    """Return state of the module that no checkpoint has and hooks may have changed. On every rank: communicates."""
    strategy = trainer.strategy
    weights = move_to_device(strategy.gather_state(every_weight(strategy, run.model)), _CPU)
    names = set(weights)
    for name, saved in checkpoint.get("state_dict", {}).items():
        value = weights.get(name)
        if isinstance(value, Tensor) and isinstance(saved, Tensor) and _are_equal(value, saved):
            weights[name] = saved  # sent once
    buffers = {name: one.detach().cpu() for name, one in run.module.named_buffers()}
    trained = {name: one.requires_grad for name, one in run.module.named_parameters(remove_duplicate=False)}
    stages = stages_of(strategy)
    if stages is not None:
        buffers, trained = stages.of_stages(run.model, buffers), stages.of_stages(run.model, trained)
    return {
        "weights": weights,
        "buffers": {name: one for name, one in buffers.items() if name not in names},
        "trained": trained,
        "hparams": {
            name: value for name, value in getattr(run.module, "hparams", {}).items() if isinstance(value, _PLAIN)
        },
    }


def _are_equal(value: Tensor, saved: Tensor) -> bool:
    return value.dtype == saved.dtype and value.device == saved.device and torch.equal(value, saved)


# --- in the launching process -----------------------------------------------------------------------------------------


def _put_back_callbacks(trainer: Trainer, module: nn.Module, result: StateDict) -> None:
    """Give the Trainer the callbacks that the module configured in the other processes, for their states."""
    known = {callback.state_key for callback in trainer.callbacks}
    if set(result["callbacks"]) <= known or not assemble.has_override(module, "configure_callbacks"):
        return
    _attach(trainer, module)
    trainer.callbacks = assemble.merge_callbacks(trainer.callbacks, module.configure_callbacks())  # type: ignore[operator]


def _put_back_trainer(trainer: Trainer, module: nn.Module, result: StateDict) -> None:
    """Set the state of the Trainer as if it had run the verb itself."""
    checkpoint = result.get("checkpoint")
    if checkpoint is not None:
        trainer.progress.load_state_dict(result["progress"])
        trainer._lw_stream_state = result["stream"]
        trainer.training_rng.note_left(result["rng_of_ranks"])
        trainer._lw_timeline = result["timeline"]
        trainer._lw_spawned_checkpoint = checkpoint
    trainer._lw_spawned_module = module
    trainer.state.fn, trainer.state.status = result["state"]
    metrics, output = trainer._lw_metrics, trainer._lw_output
    metrics.take_results(result["metrics"], result["metric_steps"])
    metrics.progress_bar.update(result["progress_bar"])
    output.latest.update(result["logged"])
    trainer.should_stop = result["should_stop"]
    output.join_versions(result["versions"])
    snapshot.put_back_loggers(output, result["loggers"])
    for callback in trainer.callbacks:
        if trainer.state.fn == "fit":
            vars(callback)["_adopted_by"] = trainer._lw_identity
        state = result["callbacks"].get(callback.state_key)
        if state:
            callback.load_state_dict(state)


def _put_back_module(trainer: Trainer, module: nn.Module, result: StateDict, datamodule: DataModule | None) -> None:
    """Set the module to its state on rank 0: weights, buffers, frozen parameters, and plain hyperparameters.

    Layers that `configure_model` has built only there are built here.

    Raises:
        ModuleError: The module has other layers here; names them.
    """
    content = result["module"]
    weights = content["weights"]
    hparams = getattr(module, "hparams", None)
    if hparams is not None:
        hparams.update({name: value for name, value in content["hparams"].items() if hparams.get(name) != value})
    strategy = trainer.strategy
    if not weights.keys() <= Strategy.module_state_dict(strategy, module).keys():
        _build(trainer, module)
    module = trainer.fabric.precision.convert_module(module)  # which may add entries: the scales of packed weights
    # Read from the module itself: the strategy's methods need its wrapper, which exists only in the other processes.
    own = Strategy.module_state_dict(strategy, module)
    only_there = [name for name in weights if name not in own]
    only_here = [name for name in own if name not in weights]
    if only_there or only_here:
        raise ModuleError(
            "fit has ended, and the module of this process differs from the one that was trained: only there "
            f"{only_there}, only here {only_here}.",
            fix="build all layers in __init__ or configure_model, which runs here as well (setup() and other hooks do "
            "not); trainer.save_checkpoint(path) writes what was trained.",
        )
    Strategy.load_module_state_dict(strategy, module, weights)
    for name, value in content["buffers"].items():
        path, _, short = name.rpartition(".")
        owner = module.get_submodule(path)
        if short in owner._buffers:
            owner._buffers[short] = value
    for name, one in module.named_parameters():
        one.requires_grad_(content["trained"].get(name, one.requires_grad))
    state = result["checkpoint"].get(type(datamodule).__qualname__)
    if datamodule is not None and state is not None:
        datamodule.load_state_dict(state)


def _build(trainer: Trainer, module: nn.Module) -> None:
    _attach(trainer, module)
    # The generators are restored afterwards, so that later draws of this process do not change.
    with torch.random.fork_rng(devices=[]), trainer.fabric.precision.module_init_context():
        for name in builders(module, trainer.behavior.find_override):
            getattr(module, name)()


def _attach(trainer: Trainer, module: nn.Module) -> None:
    """Attach the Trainer to the module, whose hooks may use it."""
    if isinstance(module, Module):
        module.trainer = trainer
        module.fabric = trainer.fabric
