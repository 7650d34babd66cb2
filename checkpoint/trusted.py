"""`Trusted`: how a user puts an object that is no plain value into a checkpoint. Used by plain.py and storage.py.

The object is pickled into bytes at once, so that the file still holds plain values only and opens with
torch.load(weights_only=True) in any script. Nothing unpickles these bytes unless the caller of load allows it.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError

__all__ = ["TRUSTED_KEY", "Trusted", "Untrusted", "untrust"]

TRUSTED_KEY = "__loopwright_trusted__"


class Trusted:
    """Mark an object of any picklable type as trusted, so that a checkpoint may hold it.

    It is pickled here: what is done to the object later does not reach the file. Loading gives the object back with
    weights_only=False, and an `Untrusted` marker otherwise.

    Args:
        value: The object; pickle must be able to write it.

    Raises:
        CheckpointError: It cannot be pickled.
    """

    def __init__(self, value: Any) -> None:  # Any: that is the purpose
        self.value = value
        try:
            self._pickled = pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"Trusted({_type_name(value)}) cannot be put into a checkpoint: it cannot be pickled ({error}).",
                fix="pass an object that pickle can write: its class and functions at the top level of a module.",
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:  # Any: pickle's own form
        # torch.load(weights_only=True) accepts an OrderedDict; so the checkpoint need not be copied to replace this.
        return _stored(self._pickled)

    def __repr__(self) -> str:
        return f"Trusted({self.value!r})"


class Untrusted:
    """Stand for a `Trusted` object of a file that was opened without trust; any use of it is an error.

    It can be saved again: the bytes are kept.
    """

    def __init__(self, pickled: bytes, where: str) -> None:
        self._pickled = pickled
        self._where = where

    def __reduce__(self) -> tuple[Any, ...]:  # Any: pickle's own form
        return _stored(self._pickled)

    def __repr__(self) -> str:
        return f"<Untrusted {self._where}: {len(self._pickled)} bytes, not opened>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy, pickle and inspect ask for these and expect this error
            raise AttributeError(name)
        self._refuse()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:  # Any: nothing is done with them
        """Raise a CheckpointError that says how to open the object."""
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __bool__(self) -> bool:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self._where} is an object that was saved as Trusted(...), and the checkpoint was opened with "
            "weights_only=True, so it was not unpickled.",
            fix="pass weights_only=False, only if you trust whoever wrote the file: unpickling can run any code.",
        )


def untrust(value: Any, allow: bool, where: str = "checkpoint") -> Any:  # Any: a nested checkpoint
    """Return a loaded checkpoint with `Trusted` objects put back; its dicts and lists are changed in place.

    Args:
        value: What torch.load gave.
        allow: True unpickles the objects, which can run any code; False puts an `Untrusted` marker in their place.
        where: What the paths in messages begin with.

    Raises:
        CheckpointError: An object cannot be unpickled, because its class is gone, for instance.
    """
    return _replace(value, allow, where, set())


def _replace(value: Any, allow: bool, where: str, seen: set[int]) -> Any:  # Any: a nested checkpoint
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(pickled := value.get(TRUSTED_KEY), bytes):
            return _unpickle(pickled, where) if allow else Untrusted(pickled, where)
        entries: Any = value.items()  # Any: keys of a dict or positions of a list
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        entries = enumerate(value)
    else:
        return value
    if id(value) in seen:
        return value
    seen.add(id(value))
    changed = {}
    for key, item in entries:
        if isinstance(item, dict | list | tuple):
            new = _replace(item, allow, f"{where}[{key!r}]", seen)
            if new is not item:
                changed[key] = new
    if not changed:
        return value
    if isinstance(value, tuple):
        return tuple(changed.get(index, item) for index, item in enumerate(value))
    for key, item in changed.items():
        value[key] = item
    return value


def _unpickle(pickled: bytes, where: str) -> Any:  # Any: whatever the user had trusted
    try:
        return pickle.loads(pickled)
    except Exception as error:  # unpickling runs the constructors of the user's classes: any error is possible
        raise CheckpointError(
            f"{where} was saved as Trusted(...) and cannot be unpickled: {type(error).__name__}: {error}",
            fix="make its class importable under its old name, or open the file with weights_only=True.",
        ) from error


def _stored(pickled: bytes) -> tuple[Any, ...]:  # Any: pickle's own form
    return OrderedDict, (), None, None, iter([(TRUSTED_KEY, pickled)])


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
