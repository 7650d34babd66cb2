"""`read_file`: a checkpoint file, read safely by torch; and the errors for files that cannot be read."""

from __future__ import annotations

import os
import pickle
import struct
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from ...errors import CheckpointError
from ...protocols import MapLocation, StateDict
from .. import verified
from ..content import LIGHTNING_VERSION_KEY
from ..plain import Unopened, untrust
from .record_names import TooMuch, require_bounded
from .restricted import Unknown, UnknownClass, load_replacing

_CPU = torch.device("cpu")
# Entries without which nothing can continue, or that a reader interprets: an object there is refused.
_OF_TRAINING = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "epoch", "global_step", "loopwright")

# What torch.load raises for bytes that are not a checkpoint; it documents no list.
_READ_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    struct.error,
)


def read_file(
    path: Path, shown: str, map_location: MapLocation, *, is_safe: bool, mmap: bool, verify: bool
) -> StateDict:
    """Return the content of a local file that messages call `shown`; see `storage.load`."""
    if verify or not os.access(path, os.R_OK) or not path.is_file():  # the latter are explained there
        verified.verify_as(path, shown)
    try:
        if is_safe:
            with open(path, "rb") as file:
                require_bounded(file)
        loaded = _read(path, map_location, mmap=mmap, is_safe=is_safe)
    except TooMuch as error:
        raise too_much(shown, error) from None
    except (OSError, MemoryError, *_READ_ERRORS) as error:
        if isinstance(error, pickle.UnpicklingError) and is_safe and map_location in (None, "cpu", _CPU):
            found = _read_beside_objects(path, mmap=mmap)
            if found is not None:
                return found
        if not verify:
            verified.verify_as(path, shown)  # if it is damaged, this says where
        _raise_unreadable(error, shown)
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"Expected a checkpoint, which is a dict, in {shown!r}, got a {type(loaded).__name__}.",
            fix="pass a file that a Trainer has saved, or read this one with torch.load.",
        )
    result: StateDict = untrust(loaded, allow=not is_safe)
    return result


def require_small(file: IO[bytes], shown: str) -> None:
    """Check an open file before `torch.load` reads it with weights_only=True; the position in it stays.

    Raises:
        CheckpointError: Reading it would allocate more than what is in it.
    """
    try:
        require_bounded(file)
    except TooMuch as error:
        raise too_much(shown, error) from None


def too_much(shown: str, error: TooMuch) -> CheckpointError:
    """Return the error for a file that requests too much memory."""
    return CheckpointError(
        f"{shown!r} is altered or was not written by torch.save: {error}.",
        fix="use another checkpoint; or pass weights_only=False, only if you trust the author of the file.",
    )


def _read_beside_objects(path: Path, *, mmap: bool) -> StateDict | None:
    """Return a checkpoint of Lightning whose objects are `Unopened`; None if some are where training continues from.

    Its programs keep objects among hyperparameters and in further entries.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = load_replacing(path, mmap=mmap)
    except (OSError, *_READ_ERRORS):  # the objects were inert, and what used them may fail in any way
        return None
    if not isinstance(loaded, dict) or "state_dict" not in loaded or LIGHTNING_VERSION_KEY not in loaded:
        return None
    inert: list[str] = []

    def replaced(value: Any, where: str, parents: tuple[int, ...]) -> Any:  # Any: any entry
        if isinstance(value, Unknown | UnknownClass):
            inert.append(where)
            return Unopened(value.name, where)
        if id(value) in parents:
            return value
        inside = (*parents, id(value))
        if isinstance(value, dict):
            kind = type(value) if type(value) in (OrderedDict, Counter) else dict
            made = kind((key, replaced(item, f"{where}[{key!r}]", inside)) for key, item in value.items())
            if kind is OrderedDict:  # state_dict()._metadata
                vars(made).update(vars(value))
            return made
        if type(value) in (list, tuple):
            return type(value)(replaced(item, f"{where}[{index}]", inside) for index, item in enumerate(value))
        return value

    result = {key: replaced(value, f"checkpoint[{key!r}]", ()) for key, value in loaded.items()}
    if any(place.startswith(f"checkpoint[{key!r}]") for place in inert for key in _OF_TRAINING):
        return None
    opened: StateDict = untrust(result, allow=False)
    return opened


def _raise_unreadable(error: Exception, shown: str) -> NoReturn:
    """Raise the error for an intact file that torch does not read."""
    if isinstance(error, OSError):
        raise verified.cannot_read(shown, error) from error
    if isinstance(error, pickle.UnpicklingError):
        raise CheckpointError(
            f"Expected only tensors and plain values in the checkpoint {shown!r}, which cannot be read safely: "
            f"{_reason(error)}",
            fix="pass weights_only=False, only if you trust the author of the file: this can run any code.",
        ) from error
    raise CheckpointError(
        f"the checkpoint {shown!r} cannot be read: {type(error).__name__}: {error}",
        fix="if it was saved on another device, pass map_location='cpu'; else the file is damaged.",
    ) from error


def _read(path: Path, map_location: MapLocation, *, mmap: bool, is_safe: bool) -> Any:  # Any: whatever the file holds
    if is_safe:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    try:
        with warnings.catch_warnings():  # about pickle protocols, which do not matter for the reading below
            warnings.simplefilter("ignore")
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError):
        return torch.load(path, map_location=map_location, weights_only=False, mmap=mmap)


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the sentence of torch's long message that says what it refused."""
    text = str(error).partition("Check the documentation")[0].rpartition("WeightsUnpickler error:")[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(" Please use")[0] if lines else type(error).__name__
