from __future__ import annotations

import collections
import enum
import io
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loopwright.checkpoint.plain import require_plain, tensors
from loopwright.errors import CheckpointError


class Colour(enum.IntEnum):
    RED = 1


class Mapping(dict):  # type: ignore[type-arg]
    pass


class Marked(torch.Tensor):
    pass


Pair = collections.namedtuple("Pair", "a b")

PLAIN: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 5,
    "largest int": 2**2039 - 1,
    "negative int": -(2**2039 - 1),
    "float": float("nan"),
    "complex": 1 + 2j,
    "str": "\u00e9\ud800",
    "bytes": bytes(range(256)) * 3,
    "bytearray": bytearray(b""),
    "tensor": torch.ones(2),
    "parameter": nn.Parameter(torch.ones(2)),
    "buffer": nn.Buffer(torch.ones(2)),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "size": torch.Size([1, 2]),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "dict": {True: 1, None: 2, 1.5: 3, (1, "a"): 4},
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "list": [1, [2]],
    "tuple": (1, (2,)),
    "set": {1, (2, 3)},
}

FOREIGN: dict[str, Any] = {
    "huge int": 2**2039,
    "empty bytes": b"",
    "frozenset": frozenset([1]),
    "defaultdict": collections.defaultdict(list),
    "dict subclass": Mapping(),
    "enum": Colour.RED,
    "numpy float": np.float64(1),
    "numpy int": np.int64(1),
    "numpy array": np.ones(2),
    "path": pathlib.Path("a"),
    "slice": slice(1),
    "range": range(3),
    "namedtuple": Pair(1, 2),
    "function": len,
    "class": int,
    "tensor subclass": torch.ones(2).as_subclass(Marked),
    "uninitialized": nn.UninitializedParameter(),
    "module": nn.Linear(1, 1),
    "generator": torch.Generator(),
}


def torch_opens(value: object) -> bool:
    file = io.BytesIO()
    torch.save({"value": value}, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_accepted_and_torch_opens_them(name: str) -> None:
    require_plain({"value": PLAIN[name]})
    assert torch_opens(PLAIN[name])


@pytest.mark.parametrize("name", FOREIGN)
def test_what_torch_refuses_is_refused_by_name(name: str) -> None:
    assert not torch_opens(FOREIGN[name])
    with pytest.raises(CheckpointError, match=r"checkpoint\['value'\]: "):
        require_plain({"value": FOREIGN[name]})


def test_every_entry_is_named_with_its_path_and_type() -> None:
    value = {"a": [1, {"b": np.float64(2)}], "c": {Colour.RED: 1}, "d": (Pair(1, 2),)}
    with pytest.raises(CheckpointError) as raised:
        require_plain(value)
    message = str(raised.value)
    assert "checkpoint['a'][1]['b']: numpy.float64 (a subclass of float)" in message
    assert "Colour (a subclass of int)" in message
    assert "checkpoint['d'][0]: " in message
    assert "3 entries" in message


def test_the_message_stays_readable_with_many_entries() -> None:
    with pytest.raises(CheckpointError, match="and 70 more"):
        require_plain({str(index): object() for index in range(100)})


def test_attributes_of_tensors_and_ordered_dicts_are_looked_at() -> None:
    weights = nn.Linear(1, 1).state_dict()
    require_plain(weights)
    weights._metadata[""]["hook"] = len  # type: ignore[attr-defined]
    parameter = nn.Parameter(torch.ones(1))
    parameter.origin = pathlib.Path("a")  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError) as raised:
        require_plain({"w": weights, "p": parameter})
    assert "checkpoint['w']._metadata['']['hook']: builtin_function_or_method" in str(raised.value)
    assert "checkpoint['p'].origin: " in str(raised.value)


def test_states_of_torch_objects_are_plain() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    ]
    require_plain([model.state_dict(), optimizer.state_dict(), [scheduler.state_dict() for scheduler in schedulers]])


def test_containers_that_hold_themselves_end() -> None:
    value: dict[str, Any] = {}
    value["self"] = [value]
    require_plain(value)


def test_deep_nesting_does_not_recurse() -> None:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    require_plain(value)


def test_tensors_are_yielded_with_their_paths() -> None:
    found = dict(tensors({"a": [torch.ones(1)], "b": {"c": torch.ones(2)}}))
    assert set(found) == {"checkpoint['a'][0]", "checkpoint['b']['c']"}
