"""Hooks as Lightning calls them: without the loader's number where they do not take it, and with a stage by name."""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import TYPE_CHECKING, Any, cast

from ...callbacks import Callback
from ...data import DataModule
from ...errors import ModuleError
from ...trainer import hooks
from .enums import TrainerFn
from .imports.finder import LightningFinder
from .utilities.parameters import is_overridden

if TYPE_CHECKING:
    from ...trainer.hooks import Hook
    from .trainer import Trainer

__all__ = ["check_hook_names", "find_override"]

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
# Hooks that Lightning calls only if they are overridden: of a module; of a data module.
_ONLY_OVERRIDDEN = (
    ("prepare_data", "configure_model", "configure_sharded_model"),
    ("prepare_data", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
# Hook of an evaluation batch -> number of its arguments, besides a callback's trainer and module.
_OF_A_LOADER = {
    f"on_{stage}_batch_{when}": count
    for stage in ("validation", "test", "predict")
    for when, count in (("start", 3), ("end", 4))
}


def check_hook_names(owner: object, listener: str, known: set[str]) -> None:
    """Warn of methods that look like hooks and are not, where Lightning's names are Loopwright's; else refuse them.

    Lightning ignores them, and libraries have such methods.
    """
    try:
        hooks.check_hook_names(owner, listener, known)
    except ModuleError as error:
        if not any(isinstance(finder, LightningFinder) for finder in sys.meta_path):
            raise
        warnings.warn(f"{error.what} They are not called.", stacklevel=4)


def find_override(owner: object, name: str, bases: tuple[type, ...]) -> Hook | None:
    """Return a hook as trainer/hooks.py does; one that does not take the loader's number is called without it.

    Lightning passes that number only where there are several loaders, and a member of an enumeration as a stage.
    """
    hook = hooks.find_override(owner, name, bases)
    if hook is None:
        return None
    is_wrapped = name in vars(owner) and hasattr(hook, "__wrapped__")
    if is_wrapped and name in _ONLY_OVERRIDDEN[isinstance(owner, DataModule)] and not is_overridden(name, owner):
        return None  # a tracer's wrapper around what a base class declares
    if name in ("setup", "teardown"):
        if not _takes_stage(hook, 2 if isinstance(owner, Callback) else 0):
            return lambda *arguments: hook(*arguments[:-1], TrainerFn(arguments[-1]))
        return lambda *arguments: hook(*arguments[:-1], stage=TrainerFn(arguments[-1]))
    if name not in _OF_A_LOADER:
        return hook
    count = _OF_A_LOADER[name] + (2 if isinstance(owner, Callback) else 0)
    signature = inspect.signature(hook, follow_wrapped=False)  # what can be called
    try:
        signature.bind(*range(count))
    except TypeError:
        return lambda *arguments: hook(*arguments[:-1])
    positional = [one for one in signature.parameters.values() if one.kind in (one.POSITIONAL_ONLY, _POSITIONAL)]
    if len(positional) >= count and positional[count - 1].default in (0, inspect.Parameter.empty):
        return hook  # its default is the number of a single loader, or it has to get one
    stage = name.split("_")[1]

    def with_loader(*arguments: Any) -> object:
        trainer: Trainer = arguments[0] if isinstance(owner, Callback) else cast("Any", owner).trainer
        return hook(*arguments) if trainer.num_loaders(stage) > 1 else hook(*arguments[:-1])

    return with_loader


def _takes_stage(hook: Hook, count: int) -> bool:
    """Whether a hook takes its stage by keyword, after this many arguments."""
    try:
        inspect.signature(hook).bind(*range(count), stage="fit")
    except TypeError:
        return False
    return True
