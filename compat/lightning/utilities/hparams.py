"""Lightning's helpers for hyperparameters, and for the attributes that may hold a batch size or learning rate."""

from __future__ import annotations

import inspect
import os
import pickle
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ....data.hparams import HyperParameters, save_hyperparameters
from ....tuner.setting import write_setting

__all__ = [
    "CoreName",
    "HyperparametersMixin",
    "accepted",
    "clean_namespace",
    "collect_init_args",
    "existing",
    "get_init_args",
    "is_picklable",
    "lightning_getattr",
    "lightning_hasattr",
    "lightning_setattr",
    "parse_class_init_keys",
    "save_hyperparameters",
    "set_hparams",
    "update_hparams",
]


class CoreName:
    """Lightning's name of a private attribute of a module or data module, which begins with `_lw` in the core."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_lw{name}"

    def __get__(self, instance: object, owner: type | None = None) -> Any:  # Any: the attribute
        return self if instance is None else getattr(instance, self._name)

    def __set__(self, instance: object, value: object) -> None:
        setattr(instance, self._name, value)


def set_hparams(owner: Any, hp: Mapping[str, Any] | Namespace) -> None:  # Any: a module or data module
    """Add to the hyperparameters of an object.

    Args:
        owner: The object.
        hp: Names and values.

    Raises:
        TypeError: `hp` is neither a mapping nor a namespace.
    """
    if not isinstance(hp, Mapping | Namespace):
        raise TypeError(f"Expected hyperparameters as a mapping or namespace, got {type(hp).__name__}.")
    owner.__dict__.setdefault("_lw_hparams", HyperParameters()).update(vars(hp) if isinstance(hp, Namespace) else hp)


class HyperparametersMixin:
    """`save_hyperparameters` and `hparams` for classes that are not modules."""

    _hparams, _hparams_initial, _hparams_name, _log_hyperparams = CoreName(), CoreName(), CoreName(), CoreName()

    def __init__(self) -> None:
        super().__init__()
        self._lw_log_hyperparams = False

    def save_hyperparameters(
        self,
        *args: Any,  # Any: see the function of this name
        ignore: Any = None,
        frame: FrameType | None = None,
        logger: bool = True,
        given_hparams: dict[str, Any] | None = None,
    ) -> None:
        """Keep the arguments of `__init__` in `self.hparams`; see `LightningModule.save_hyperparameters`."""
        current = inspect.currentframe()
        caller = frame if frame is not None else current.f_back if current is not None else None
        save_hyperparameters(self, *args, ignore=ignore, frame=caller, given_hparams=given_hparams, logger=logger)

    @property
    def hparams(self) -> Any:  # Any: entries are attributes
        """The hyperparameters: a mapping with attribute access."""
        return self.__dict__.setdefault("_lw_hparams", HyperParameters())

    @property
    def hparams_initial(self) -> object:  # entries are attributes
        """Copy of the hyperparameters from when they were saved."""
        return self.__dict__.get("_lw_hparams_initial", HyperParameters())

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Take entries out of the hyperparameters."""
        remove_ignored(self, ignore_list)


def remove_ignored(owner: Any, ignore_list: list[str] | str) -> None:  # Any: module or data module
    """Take entries out of an object's hyperparameters."""
    for name in [ignore_list] if isinstance(ignore_list, str) else ignore_list:
        owner.hparams.pop(name, None)


def update_hparams(hparams: dict[str, Any], updates: Mapping[str, object]) -> None:
    """Put values into nested hyperparameters, in place."""
    for key, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(key), dict):
            update_hparams(hparams[key], value)
        else:
            hparams[key] = value


def is_picklable(obj: object) -> bool:
    """Return whether pickle can write an object."""
    try:
        pickle.dumps(obj)
    except Exception:  # whatever an object's own reduction raises
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, object] | Namespace) -> None:
    """Remove what pickle cannot write, in place."""
    entries: MutableMapping[str, object] = vars(hparams) if isinstance(hparams, Namespace) else hparams
    for key in [key for key, value in entries.items() if not is_picklable(value)]:
        del entries[key]


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return the names of `self`, of `*args` and of `**kwargs` in a class's `__init__`; None where there is none."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]

    def of_kind(kind: object) -> str | None:
        return next((parameter.name for parameter in parameters if parameter.kind == kind), None)

    return parameters[0].name, of_kind(inspect.Parameter.VAR_POSITIONAL), of_kind(inspect.Parameter.VAR_KEYWORD)


def get_init_args(frame: FrameType) -> dict[str, object]:
    """Return the arguments of the `__init__` that runs in a frame."""
    _, _, _, local = inspect.getargvalues(frame)
    if "__class__" not in local:
        return {}
    owner, positional, keywords = parse_class_init_keys(local["__class__"])
    names = [name for name in inspect.signature(local["__class__"].__init__).parameters if name != owner]
    found = {name: local[name] for name in names if name in local and name not in (positional, keywords)}
    return {**found, **local.get(keywords or "", {})}


def collect_init_args(
    frame: FrameType, path_args: list[dict[str, Any]], inside: bool = False, classes: tuple[type, ...] = ()
) -> list[dict[str, object]]:
    """Return the arguments of every `__init__` on the stack from this frame up, the innermost first."""
    current: FrameType | None = frame
    while current is not None:
        owner = current.f_locals.get("__class__")
        if owner is not None and (not classes or issubclass(owner, classes)):
            found = get_init_args(current)
            if found:
                path_args.append(found)
            inside = True
        elif inside:
            break
        current = current.f_back
    return path_args


def _holders(model: object, attribute: str) -> list[object]:  # module, mapping or namespace
    trainer = getattr(model, "_lw_trainer", None)
    datamodule = getattr(trainer, "datamodule", None)
    places = [model, getattr(model, "hparams", None), datamodule, getattr(datamodule, "hparams", None)]
    return [
        place
        for place in places
        if place is not None and (attribute in place if isinstance(place, Mapping) else hasattr(place, attribute))
    ]


def lightning_hasattr(model: object, attribute: str) -> bool:
    """Return whether the module, the data module or their hyperparameters have a value of this name."""
    return bool(_holders(model, attribute))


def lightning_getattr(model: object, attribute: str) -> object:  # a module, and its value
    """Return the value of this name; the data module takes precedence over the module."""
    holders = _holders(model, attribute)
    if not holders:
        raise AttributeError(f"{attribute!r} is neither an attribute of the model, nor in its hparams or datamodule.")
    return holders[-1][attribute] if isinstance(holders[-1], Mapping) else getattr(holders[-1], attribute)


def lightning_setattr(model: object, attribute: str, value: object) -> None:
    """Set the value of this name wherever it stands."""
    if not _holders(model, attribute):
        raise AttributeError(f"{attribute!r} is neither an attribute of the model, nor in its hparams or datamodule.")
    datamodule = getattr(getattr(model, "_lw_trainer", None), "datamodule", None)
    write_setting(tuple(owner for owner in (model, datamodule) if owner is not None), attribute, value)


def accepted(cls: type, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that the constructor of a class takes.

    Args:
        cls: The class.
        arguments: By name.
    """
    parameters = inspect.signature(cls).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


@contextmanager
def existing(hparams_file: str | Path | None) -> Iterator[str | Path | None]:
    """Give a file of hyperparameters; an empty one, with a warning, in place of one that is missing.

    Args:
        hparams_file: The path, None for none.
    """
    if hparams_file is None or os.path.exists(hparams_file):
        yield hparams_file
        return
    warnings.warn(
        f"hparams_file={str(hparams_file)!r} does not exist: no hyperparameters are read", RuntimeWarning, stacklevel=4
    )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "hparams.csv")
        with open(path, "w", encoding="utf-8") as file:
            file.write("key,value\n")
        yield path
