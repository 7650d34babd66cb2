"""The accelerator of XLA where torch_xla is not; where it is, tests/integration/xla runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from loopwright.accelerators import ACCELERATOR_REGISTRY, XLAAccelerator
from loopwright.accelerators import xla as module
from loopwright.errors import ConfigError


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch_xla be installed, for another torch."""
    monkeypatch.setattr(module, "find_spec", lambda name: object())

    def fail(name: str) -> ModuleType:
        raise ImportError("undefined symbol: _ZN5torch")

    monkeypatch.setattr(module, "import_module", fail)
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    module._import_problem.cache_clear()
    yield
    module._import_problem.cache_clear()


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_both_names_are_registered_and_neither_is_chosen_by_itself() -> None:
    assert ACCELERATOR_REGISTRY.get("tpu") is ACCELERATOR_REGISTRY.get("xla") is XLAAccelerator
    assert XLAAccelerator.name() == "xla"
    assert not XLAAccelerator.is_available()
    assert not XLAAccelerator.is_auto_choice()
    assert "torch_xla" not in sys.modules


@pytest.mark.usefixtures("broken")
def test_a_torch_xla_for_another_torch_is_named_with_what_is_missing() -> None:
    assert not XLAAccelerator.is_available()
    with pytest.raises(ConfigError, match=rf"with torch {torch.__version__.split('+')[0]}.*undefined symbol") as caught:
        module.import_xla(needed_for="strategy='xla'")
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in caught.value.fix


def test_only_a_tpu_is_an_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    for device, chosen in (("TPU", True), ("CPU", False), ("CUDA", False)):
        monkeypatch.setenv("PJRT_DEVICE", device)
        assert XLAAccelerator.is_available()
        assert XLAAccelerator.is_auto_choice() is chosen


@pytest.mark.parametrize(
    ("devices", "variable", "indices"),
    [(1, None, [0]), (4, None, [0, 1, 2, 3]), ("2", None, [0, 1]), ("auto", "3", [0, 1, 2]), ([1], "2", [1])],
)
def test_a_cpu_has_as_many_devices_as_are_asked_for(
    devices: Any, variable: str | None, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    if variable is None:
        monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CPU_NUM_DEVICES", variable)
    assert XLAAccelerator.parse_devices(devices) == indices
    assert XLAAccelerator.get_parallel_devices(indices) == [torch.device("xla", index) for index in indices]


@pytest.mark.parametrize("devices", [0, [5], [0, 0], True, "x"])
def test_other_forms_are_refused(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    with pytest.raises(ConfigError, match="devices="):
        XLAAccelerator.parse_devices(devices)
