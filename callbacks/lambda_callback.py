"""`LambdaCallback`: a callback made of functions."""

from __future__ import annotations

from ..errors import ArgumentTypeError, nearest
from ..protocols import StepFunction
from .base import Callback

_HOOKS = tuple(name for name in vars(Callback) if name in ("setup", "teardown") or name.startswith("on_"))


class LambdaCallback(Callback):
    """Call the given functions at the hooks of these names.

    Args:
        **hooks: Functions by name of the hook; each receives the hook's arguments, `trainer, pl_module` first. None
            leaves the hook out.

    Raises:
        ArgumentTypeError: A name is not a hook, or a value is not callable; names all of them.

    Example:
        ``LambdaCallback(on_train_end=lambda trainer, module: print(trainer.global_step))``
    """

    def __init__(self, **hooks: StepFunction | None) -> None:
        wrong = [f"{name}: no hook of a callback{nearest(name, _HOOKS)}" for name in hooks if name not in _HOOKS]
        wrong += [
            f"{name}: expected a function, got {type(function).__name__}"
            for name, function in hooks.items()
            if name in _HOOKS and function is not None and not callable(function)
        ]
        if wrong:
            raise ArgumentTypeError(
                f"LambdaCallback cannot take {'; '.join(wrong)}.",
                fix="pass functions under the names of Callback's hooks, such as on_train_end.",
            )
        for name, function in hooks.items():
            if function is not None:
                setattr(self, name, function)
