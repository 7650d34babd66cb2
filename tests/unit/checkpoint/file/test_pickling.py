"""The pickle module of saves: the bytes that torch.save writes with its own."""

from __future__ import annotations

import io
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from loopwright.checkpoint.file.pickling import PICKLE
from loopwright.checkpoint.plain import Trusted


def written(content: object, **arguments: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **arguments)
    return file.getvalue()


def test_the_bytes_are_those_of_torch() -> None:
    weight = torch.randn(3, 4)
    content = {
        "state_dict": OrderedDict(a=weight, b=weight.T, c=nn.Parameter(weight[1:]), d=torch.zeros(0)),
        "untyped": [torch.zeros(3, dtype=torch.uint8).untyped_storage()],
        "plain": (
            1,
            2.5,
            True,
            None,
            "x",
            b"y",
            bytearray(b"z"),
            {3},
            torch.float16,
            torch.device("cpu"),
            weight.shape,
        ),
        "object": Trusted(complex(1, 2)),
    }
    assert written(content, pickle_module=PICKLE) == written(content)
    file = io.BytesIO(written(content, pickle_module=PICKLE))
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["state_dict"]["b"], weight.T)
    assert loaded["state_dict"]["a"].data_ptr() == loaded["state_dict"]["b"].data_ptr()


def test_objects_that_cannot_be_storages_are_not_asked_about() -> None:
    asked: list[object] = []

    class Pickler(PICKLE.Pickler):  # type: ignore[misc]  # as torch.save derives from it
        def persistent_id(self, obj: object) -> Any:
            asked.append(obj)
            return None

    Pickler(io.BytesIO(), protocol=2).dump({"a": [1, (2.0, "x")], "b": (storage := torch.zeros(1).untyped_storage())})
    assert asked[0] is storage
    assert not [one for one in asked if isinstance(one, (dict, list, tuple, int, float))]


def test_a_save_leaves_nothing_for_the_garbage_collector() -> None:
    class File(io.BytesIO):
        """Can be referred to weakly."""

    file = File()
    PICKLE.Pickler(file, 2).dump({"a": 1})
    gone = weakref.ref(file)
    del file
    assert gone() is None
