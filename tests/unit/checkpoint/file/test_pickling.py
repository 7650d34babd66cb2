"""The pickle module of saves: the bytes that torch.save writes with its own."""

from __future__ import annotations

import io
import weakref
from collections import OrderedDict
from typing import Any

import pytest
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


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_tensors_of_every_kind_are_written_as_torch_writes_them() -> None:
    noted, hooked = torch.ones(2), torch.ones(2, requires_grad=True)
    noted.note = "own"  # type: ignore[attr-defined]
    base = torch.arange(24.0)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
    kinds = {
        "floats": [torch.zeros(2).to(one) for one in floats],
        "integers": [torch.zeros(2, dtype=one) for one in (torch.bool, torch.int8, torch.int16, torch.int64)],
        "unsigned": [torch.zeros(2, dtype=one) for one in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)],
        "complex": [torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag],
        "views": [base, base[3:7], base[::2], base.view(4, 6).t(), base.expand(2, 24), base[0], base[:0]],
        "sparse": [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()],
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, device="meta"),
        "noted": noted,
        "with a graph": hooked * 2,
        "gradient": hooked,
        "parameters": [nn.Parameter(base[:4]), nn.Parameter(torch.ones(1), requires_grad=False)],
        "buffer": nn.Buffer(torch.ones(2)),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    for name, content in kinds.items():
        assert written(content, pickle_module=PICKLE) == written(content), name


def test_a_hook_that_would_be_lost_is_warned_of() -> None:
    hooked = torch.ones(2, requires_grad=True)
    hooked.register_hook(lambda gradient: gradient)
    with pytest.warns(UserWarning, match="backward hook .* will not be serialized"):
        written({"a": hooked}, pickle_module=PICKLE)


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
