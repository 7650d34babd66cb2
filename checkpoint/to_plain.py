"""`to_plain`: turns what people pass as hyperparameters into plain values."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from ..protocols import Tree

_EXACT = frozenset((type(None), bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device))
# torch.load(weights_only=True) takes an int of at most 255 bytes, sign included.
MAX_INT_BITS = 2039
_DROPPED = object()


def to_plain(value: Any, where: str = "") -> tuple[Any, list[str]]:  # Any: hyperparameters of any type
    """Return the value as plain values and tensors, and the key paths of what could not be converted and was left out.

    Converted: subclasses of str, int, float, bytes, dict, list, tuple (IntEnum and np.float64 are such), NumPy scalars
    and arrays (to tensors that share no memory), paths (to str), OmegaConf containers, argparse.Namespace,
    SimpleNamespace, dataclasses and mappings (to dict), deque (to list), frozenset (to set). A list with an entry
    that cannot be converted is left out entirely, since its other entries would move.

    Args:
        value: The value to convert, which is not changed.
        where: Prefix of the paths.

    Returns:
        The converted value, None if nothing of it could be kept; and the paths left out, such as `model['act']`.
    """
    dropped: list[str] = []
    plain = _convert(value, where, dropped, ())
    return (None if plain is _DROPPED else plain), dropped


def _convert(value: Tree, where: str, dropped: list[str], parents: tuple[int, ...]) -> Tree:
    if id(value) in parents:  # a container that holds itself
        dropped.append(where)
        return _DROPPED
    parents = (*parents, id(value))
    value = resolve_omegaconf(value)
    if not _is_container(value):
        plain = _convert_leaf(value)
        if plain is _DROPPED:
            dropped.append(where or type(value).__name__)
        return plain
    entries = _as_mapping(value)
    if entries is not None:
        converted = _convert_entries(entries, where, dropped, parents)
        if type(value) is OrderedDict:
            return OrderedDict(converted)
        return Counter(converted) if type(value) is Counter else converted
    assert isinstance(value, Iterable)
    items = [_convert(item, f"{where}[{index}]", dropped, parents) for index, item in enumerate(value)]
    if any(item is _DROPPED for item in items):
        return _DROPPED
    if isinstance(value, tuple):
        return tuple(items)
    if not isinstance(value, set | frozenset):
        return items
    try:
        return set(items)
    except TypeError:  # it held a frozenset, which is a set now
        dropped.append(where or type(value).__name__)
        return _DROPPED


def _convert_entries(
    entries: Mapping[object, object], where: str, dropped: list[str], parents: tuple[int, ...]
) -> dict[object, object]:
    converted = {}
    for key, entry in entries.items():
        path = f"{where}[{key!r}]" if where else str(key)
        plain_key = _convert(key, path, dropped, ())
        plain = _DROPPED if plain_key is _DROPPED else _convert(entry, path, dropped, parents)
        if plain is _DROPPED:
            continue
        try:
            converted[plain_key] = plain
        except TypeError:  # a frozenset as the key
            dropped.append(path)
    return converted


def _convert_leaf(value: Tree) -> Tree:
    kind = type(value)
    if kind in _EXACT:
        return value
    if isinstance(value, Tensor):
        is_plain = kind in (Tensor, nn.Parameter) and not value.__dict__
        return value if is_plain else _DROPPED
    numpy = sys.modules.get("numpy")  # a NumPy value cannot exist before NumPy is imported
    if numpy is not None and isinstance(value, numpy.ndarray):
        try:
            return torch.tensor(numpy.ascontiguousarray(value))
        except (TypeError, ValueError, RuntimeError):  # a dtype that torch does not have
            return _DROPPED
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
        if isinstance(value, numpy.generic):  # longdouble stays what it is
            return _DROPPED
        if isinstance(value, bool):
            return value
    if isinstance(value, PurePath):
        return os.fspath(value)
    if isinstance(value, str):
        return str.__str__(value)  # str(value) would give an Enum's name
    if isinstance(value, int):
        number = int.__int__(value)
        return number if number.bit_length() <= MAX_INT_BITS else _DROPPED
    if isinstance(value, bytes):
        return bytes(value) or _DROPPED  # torch's safe reader refuses empty bytes
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return complex(value)
    return bytearray(value) if isinstance(value, bytearray) else _DROPPED


def _is_container(value: object) -> bool:
    if type(value) is torch.Size or isinstance(value, type):
        return False
    kinds = (Mapping, list, tuple, set, frozenset, deque, argparse.Namespace, types.SimpleNamespace)
    return isinstance(value, kinds) or dataclasses.is_dataclass(value)


def _as_mapping(value: Tree) -> Mapping[Any, object] | None:  # Any: see to_plain
    if isinstance(value, Mapping):
        return value
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def resolve_omegaconf(value: Any) -> Any:  # Any: hyperparameters of any type
    """Return an OmegaConf container as plain dicts and lists, any other value as it is.

    Interpolations are resolved; of one that leads nowhere, the text is kept.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(value, omegaconf.Container):
        return value
    try:
        return omegaconf.OmegaConf.to_container(value, resolve=True)
    except omegaconf.errors.OmegaConfBaseException:
        texts = omegaconf.OmegaConf.to_container(value, resolve=False)
    if isinstance(texts, dict):
        return {key: _resolve_entry(value, key, text) for key, text in texts.items()}
    return [_resolve_entry(value, index, text) for index, text in enumerate(texts)]


def _resolve_entry(container: Any, key: object, text: Tree) -> Tree:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return resolve_omegaconf(container[key])
    except OmegaConfBaseException:
        return text
