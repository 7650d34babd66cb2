"""Warnings about overridden methods of Lightning's strategies, precisions and accelerators that are never called.

The methods of these classes differ in Loopwright, so an override can have no effect. It must not be ignored silently.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

from .imports.absent import refuse

__all__ = ["check_overrides"]

# Methods of Lightning's parts that Loopwright does not call.
_STRATEGY = """
batch_to_device block_backward_sync configure_ddp connect determine_ddp_device_ids lightning_module_state_dict
load_checkpoint load_model_state_dict load_optimizer_state_dict model_sharded_context model_to_device on_exception
on_predict_end on_predict_start on_test_end on_test_start on_train_batch_start on_train_end on_train_start
on_validation_end on_validation_start post_backward post_training_step pre_backward predict_step process_dataloader
remove_checkpoint save_checkpoint set_world_ranks setup setup_distributed setup_optimizers setup_precision_plugin
tensor_init_context test_step training_step validation_step _setup_model
"""
_PRECISION = """
backward clip_grad_by_norm clip_grad_by_value clip_gradients connect main_params on_load_checkpoint on_save_checkpoint
post_backward pre_backward predict_step_context test_step_context train_step_context val_step_context
"""
# Methods of both, whose arguments differ -> what Loopwright passes.
_CALLED = {
    "strategy": {"backward": ("tensor",), "optimizer_step": ("optimizer",)},
    "precision": {"optimizer_step": ("optimizer",)},
    "accelerator": {},
}  # type: dict[str, dict[str, tuple[str, ...]]]
_NOT_CALLED = {"strategy": set(_STRATEGY.split()), "precision": set(_PRECISION.split()), "accelerator": set[str]()}


def check_overrides(part: object, kind: str) -> None:
    """Warn of methods that are not called; refuse those that cannot be called with Loopwright's arguments.

    Args:
        part: The object.
        kind: "strategy", "precision" or "accelerator".

    Raises:
        NotServed: A method takes Lightning's arguments.
    """
    own = {
        name: value
        for cls in reversed(type(part).__mro__)
        if cls.__module__.partition(".")[0] not in ("loopwright", "builtins", "abc", "typing")
        for name, value in vars(cls).items()
    }
    if not own:
        return
    shown = type(part).__name__
    for name, arguments in _CALLED[kind].items():
        if name in own and callable(own[name]) and not _binds(own[name], len(arguments) + 1):
            refuse(
                f"{shown}.{name}({', '.join(list(inspect.signature(own[name]).parameters)[1:])}) of Lightning's {kind}",
                f"here it is called with ({', '.join(arguments)})",
            )
    vain = sorted(_NOT_CALLED[kind] & own.keys())
    if vain:
        warnings.warn(
            f"{shown} overrides {', '.join(vain)} of Lightning's {kind}: Loopwright's has other methods, and does not "
            "call these. See docs/migrating.md.",
            stacklevel=4,
        )


def _binds(method: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    return True
