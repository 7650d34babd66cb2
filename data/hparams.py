"""Hyperparameters: a constructor's arguments, kept for checkpoints and loggers; for `Module` and `DataModule`.

Also `class_only`, for their methods that build an object of these arguments.
"""

from __future__ import annotations

import argparse
import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from ..errors import ConfigError, ModuleError, nearest
from ..messages import warn
from ..protocols import Owner, StateDict, Tree

Hyperparameters: TypeAlias = Mapping[str, Any]  # of any type: arguments of a constructor


class AttributeDict(dict[str, Any]):
    """A dict whose entries are also attributes.

    >>> hparams = AttributeDict(lr=0.1)
    >>> hparams.lr, hparams["lr"]
    (0.1, 0.1)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            hint = nearest(name, map(str, self))
            raise AttributeError(f"There is no entry {name!r}{hint}; there are {list(self)}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"There is no entry {name!r}.")
        del self[name]

    def __repr__(self) -> str:
        width = max((len(str(key)) for key in self), default=0)
        rows = sorted(self.items(), key=lambda item: str(item[0]))
        return "\n".join(f'"{key}":{" " * (width - len(str(key)) + 1)}{value}' for key, value in rows)


HyperParameters = AttributeDict


def save_hyperparameters(
    obj: Any,
    *args: Tree,
    ignore: str | Iterable[str] | None = None,
    frame: FrameType | None = None,
    given_hparams: Hyperparameters | None = None,
    logger: bool = True,
) -> None:
    """Save the arguments of an object's `__init__` in `obj._lw_hparams`.

    Also sets `_lw_hparams_initial` (a copy made by this call), `_lw_hparams_name` (the name of the argument if one
    object holds all hyperparameters, otherwise "kwargs") and `_lw_log_hyperparams`. Plain containers (dicts, lists,
    tuples, sets, namespaces, OmegaConf's) are copied at every depth, so that a constructor may change its arguments
    afterwards. Everything else is kept by reference: a copy of tensors and modules would take memory, and objects of
    other classes may not be copied at all. A second call adds to the hyperparameters of the first, and removes from
    them what it ignores.

    Args:
        obj: The module or data module.
        args: Empty: every argument of the constructor and of subclass constructors that called it (the subclass's
            values take precedence; the entries of `**kwargs` are separate, `*args` are omitted). Strings: only these
            arguments. One dict, namespace, dataclass or OmegaConf object: its entries.
        ignore: Names to omit.
        frame: A frame of `__init__`; None for the frame of the calling function.
        given_hparams: Arguments to use instead of those in the frame.
        logger: Whether to pass the hyperparameters to loggers.

    Raises:
        ConfigError: A name is not an argument, or an object has another type.
    """
    if given_hparams is None:
        given_hparams = _given_to(obj)
    if frame is None and given_hparams is None:
        current = inspect.currentframe()
        frame = current.f_back if current is not None else None
    arguments = dict(given_hparams) if given_hparams is not None else _init_arguments(obj, frame)
    ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
    arguments = {name: value for name, value in arguments.items() if name not in ignored}
    hparams, name = _choose(obj, args, arguments, ignored)
    if isinstance(hparams, dict):
        _warn_of_modules(hparams)
    _store(obj, hparams, name, ignored, logger=logger)


@contextmanager
def given_to(target: type, hparams: Hyperparameters) -> Iterator[None]:
    """Let `save_hyperparameters` of an object of a class keep these instead of the arguments of its constructor.

    A command line keeps the settings that it makes an object of: they can be written, and the object made again.

    Args:
        target: The class.
        hparams: The hyperparameters to keep.
    """
    token = _GIVEN.set((target, hparams))
    try:
        yield
    finally:
        _GIVEN.reset(token)


_GIVEN: ContextVar[tuple[type, Hyperparameters] | None] = ContextVar("_GIVEN", default=None)


def _given_to(obj: Owner) -> Hyperparameters | None:
    given = _GIVEN.get()
    return given[1] if given is not None and isinstance(obj, given[0]) else None


def _choose(obj: Owner, args: tuple[Tree, ...], arguments: StateDict, ignored: set[str]) -> tuple[Tree, str]:
    """Return the hyperparameters and the name of the argument that holds them."""
    if not args:
        return arguments, "kwargs"
    objects = [arg for arg in args if not isinstance(arg, str)]
    if len(args) == 1 and objects:
        name = next((name for name, value in arguments.items() if value is objects[0]), "kwargs")
        return _entries(objects[0], ignored), name
    if objects:
        raise ConfigError(
            "Expected names of arguments for save_hyperparameters, got "
            f"{', '.join(type(arg).__name__ for arg in objects)}.",
            fix="pass names as strings, or one dict, namespace, dataclass or OmegaConf object.",
        )
    wanted = [name for name in args if isinstance(name, str) and name not in ignored]
    unknown = [name for name in wanted if name not in arguments]
    if unknown:
        hint = nearest(unknown[0], arguments)
        raise ConfigError(
            f"{type(obj).__name__}.__init__ has no argument {', '.join(map(repr, unknown))}{hint}; it has "
            f"{', '.join(arguments) or 'none'}.",
            fix="pass names of arguments of __init__ to save_hyperparameters, or none to keep all.",
        )
    return {name: arguments[name] for name in wanted}, "kwargs"


def _entries(container: Any, ignored: set[str]) -> Any:
    """Return the entries of an object that holds hyperparameters; an OmegaConf object is returned unchanged."""
    if isinstance(container, argparse.Namespace):
        container = vars(container)
    elif is_dataclass(container) and not isinstance(container, type):
        container = {field.name: getattr(container, field.name) for field in fields(container)}
    if _is_omegaconf(container):
        if not ignored:
            return container
        container = copy.deepcopy(container)
        from omegaconf import open_dict

        with open_dict(container):
            for name in ignored:
                container.pop(name, None)
        return container
    if isinstance(container, Mapping):
        return {name: value for name, value in container.items() if name not in ignored}
    raise ConfigError(
        f"Expected an object with named hyperparameters for save_hyperparameters, got a {type(container).__name__}.",
        fix="pass names of arguments as strings, or one dict, namespace, dataclass or OmegaConf object.",
    )


def _is_omegaconf(container: Tree) -> bool:
    return type(container).__module__.startswith("omegaconf.")


def without_omegaconf(values: StateDict) -> StateDict:
    """Return the values with OmegaConf containers, as Hydra passes them, resolved and converted to plain containers."""
    if not any(map(_is_omegaconf, values.values())):
        return values
    from omegaconf import OmegaConf

    return {
        name: OmegaConf.to_container(value, resolve=True) if _is_omegaconf(value) else value
        for name, value in values.items()
    }


def _init_arguments(obj: Owner, frame: FrameType | None) -> StateDict:
    """Return the arguments of the constructors of `obj` on the call stack, from the given frame outward."""
    arguments: StateDict = {}
    while frame is not None and _is_method_of(obj, frame):
        if frame.f_code.co_name == "__init__":
            names, _, keywords, values = inspect.getargvalues(frame)
            arguments.update({name: values[name] for name in names[1:] if name in values})
            arguments.update(values.get(keywords, {}) if keywords else {})
        frame = frame.f_back
    return arguments


def _is_method_of(obj: Owner, frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_argcount == 0:
        return False
    name = code.co_varnames[0]
    return frame.f_locals.get(name) is obj


def _warn_of_modules(hparams: StateDict) -> None:
    for name, value in hparams.items():
        if isinstance(value, nn.Module):
            warn(
                f"The argument {name!r} is an nn.Module, whose weights are already in the checkpoint. Exclude it: "
                f"save_hyperparameters(ignore=[{name!r}])."
            )


def _store(obj: Any, hparams: Tree, name: str, ignored: set[str], *, logger: bool) -> None:
    kept = getattr(obj, "_lw_hparams", None)
    hparams = _copy(hparams, partial(_copy_containers, copies={}))
    if isinstance(kept, AttributeDict) and isinstance(hparams, AttributeDict):
        for left_out in ignored:
            kept.pop(left_out, None)
        kept.update(hparams)
        hparams = kept
    obj._lw_hparams = hparams
    obj._lw_hparams_name = name
    obj._lw_hparams_initial = _copy(hparams)
    obj._lw_log_hyperparams = logger


def _copy_containers(value: Any, copies: dict[int, Tree]) -> Any:
    """Return the value with its plain containers copied, also where one holds itself; `copies` are by id."""
    if id(value) in copies:
        return copies[id(value)]
    if _is_omegaconf(value):
        return copy.deepcopy(value)
    if isinstance(value, tuple):
        items = [_copy_containers(item, copies) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items) if type(value) is tuple else value
    if not isinstance(value, dict | list | set | deque | argparse.Namespace | SimpleNamespace):
        return value
    copied: Any = copy.copy(value)
    copies[id(value)] = copied
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        vars(copied).update(_copy_containers(vars(value), copies))
    elif isinstance(value, dict):
        for key, item in value.items():
            copied[key] = _copy_containers(item, copies)
    elif not isinstance(value, set):  # what a set holds cannot be changed
        for index, item in enumerate(value):
            copied[index] = _copy_containers(item, copies)
    return copied


def _copy(hparams: Tree, copy_value: Callable[[Any], Tree] = copy.deepcopy) -> Tree:
    if not isinstance(hparams, dict):
        return copy_value(hparams)
    copied = AttributeDict()
    for name, value in hparams.items():
        try:
            copied[name] = copy_value(value)
        except Exception:  # any error in a value's own way of copying: the value is then shared instead
            copied[name] = value
    return copied


if TYPE_CHECKING:
    class_only = classmethod  # type checkers know this one
else:

    class class_only(classmethod):  # lower case, as classmethod and property are
        """A `classmethod` whose call on an instance raises a ModuleError; torch.jit may read it there.

        `model.load_from_checkpoint(path)` would return another module and leave `model` as it is.
        """

        def __get__(self, instance: Owner, owner: type | None = None) -> Any:  # Any: the method
            """Return the method of the class, on an instance one that raises."""
            method = super().__get__(instance, owner)
            if instance is None:
                return method
            cls, name = type(instance).__name__, method.__name__

            @wraps(method)
            def refuse(*args: object, **kwargs: object) -> None:
                raise ModuleError(
                    f"{name} makes a new {cls}; it was called on an instance, which it would leave as it is.",
                    fix=f"call it on the class: new = {cls}.{name}(...).",
                )

            return refuse
