"""Running a verb in processes that this one starts (spawn, fork), and bringing its result back. Called by the Trainer.

The processes work on copies of Trainer, module and callbacks. What fit changed comes back from rank 0: weights, counts,
metrics, the states of callbacks (the best path among them), and what `save_checkpoint` needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.move import move_to_device
from . import snapshot

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["launch"]

_CPU = torch.device("cpu")


def launch(trainer: Trainer, verb: str, model: nn.Module | None, **arguments: Any) -> Any:
    """Run a verb in new processes and return what it returned on rank 0.

    Args:
        trainer: Changed as if it had run the verb itself.
        verb: "fit", "validate", "test" or "predict".
        model: The user's module; its weights are changed in place.
        arguments: The verb's other arguments.

    Raises:
        RankFailure: A process failed; names it.
    """
    from .begin import unwrapped

    module = model if model is not None else trainer.lightning_module
    result: dict[str, Any] = trainer.fabric.launcher.launch(_run_in_child, trainer, verb, module, arguments)
    if module is not None:
        trainer.take_back(unwrapped(module), result)
        for callback in trainer.callbacks:
            if callback.runs_first and hasattr(callback, "write_found"):  # the tuner's: a later verb uses it, too
                callback.write_found(trainer, (unwrapped(module), arguments.get("datamodule")))
    return result["returned"]


def _run_in_child(trainer: Trainer, verb: str, module: nn.Module | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run in every new process; the result of rank 0 goes back to the launching one."""
    trainer.is_in_child = True
    returned = getattr(trainer, verb)(module, **arguments)
    is_fit = verb == "fit"
    content: dict[str, Any] = {
        "returned": returned,
        "state": (trainer.state.fn, trainer.state.status),
        "metrics": {name: value.to(_CPU) for name, value in trainer.callback_metrics.items()},
        "metric_steps": {name: trainer.metric_step(name) for name in trainer.callback_metrics},
        "logged": trainer.logged_metrics,
        "progress_bar": dict(trainer.progress_bar_metrics),
        "should_stop": trainer.should_stop,
        "versions": trainer.output.versions(),
        "loggers": snapshot.logger_states(trainer),
    }
    if is_fit:
        run = trainer.latest_run()
        assert run is not None
        # On every rank: taking states may communicate.
        whole = trainer.strategy.gather_state(snapshot.collect(trainer, run, is_weights_only=False))
        content["checkpoint"] = move_to_device(whole, _CPU)
        content["progress"] = trainer.progress.state_dict()
        content["stream"] = trainer.stream_state
        content["timeline"] = trainer.timeline
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    content["callbacks"] = trainer.strategy.gather_state(states)  # averages of shards, say
    return content if trainer.is_global_zero else {}
