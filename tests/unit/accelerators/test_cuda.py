from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from loopwright.accelerators import CUDAAccelerator, find_usable_cuda_devices
from loopwright.errors import ConfigError


def test_indices_become_devices_in_the_order_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    indices = CUDAAccelerator.parse_devices("3,1")
    assert CUDAAccelerator.get_parallel_devices(indices) == [torch.device("cuda:3"), torch.device("cuda:1")]
    assert CUDAAccelerator.auto_device_count() == 4
    assert CUDAAccelerator.is_available()


def test_the_memory_of_a_card_is_known_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30))
    assert CUDAAccelerator().device_memory(torch.device("cuda", 1)) == 8 << 30


def test_a_machine_without_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not CUDAAccelerator.is_available()
    with pytest.raises(ConfigError, match="has none"):
        CUDAAccelerator.parse_devices(1)
    with pytest.raises(ConfigError, match="with 0 CUDA devices"):
        find_usable_cuda_devices()
    assert find_usable_cuda_devices(0) == []


def test_another_kind_of_device_cannot_be_set_up() -> None:
    with pytest.raises(ConfigError, match="Expected a CUDA device, got cpu"):
        CUDAAccelerator().setup_device(torch.device("cpu"))


def test_more_usable_devices_than_visible_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="with 2 CUDA devices"):
        find_usable_cuda_devices(3)


def test_statistics_have_what_the_driver_measures_and_the_card_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def power(handle: object) -> int:
        if handle == "part":
            raise NVMLError("Not Supported")
        return 71_500

    pynvml: Any = ModuleType("pynvml")
    pynvml.__spec__ = ModuleSpec("pynvml", None)
    pynvml.NVMLError, pynvml.nvmlDeviceGetPowerUsage = NVMLError, power
    pynvml.NVML_TEMPERATURE_GPU = 0
    pynvml.nvmlDeviceGetTemperature = lambda handle, sensor: 54
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: "card"
    pynvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=97, memory=40)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.current": 8})
    read = CUDAAccelerator().get_device_stats
    monkeypatch.setattr("loopwright.accelerators.cuda.find_spec", lambda name: None)
    assert read(torch.device("cuda:0")) == {"allocated_bytes.all.current": 8.0}

    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.current": 8})
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setattr(torch.cuda, "pynvml", pynvml, raising=False)  # what torch has imported where it is installed
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda device: "part" if device.index else "card")
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: device.index)
    whole = {"power_draw_w": 71.5, "temperature_c": 54.0, "utilization_percent": 97.0}
    assert read(torch.device("cuda:0")) == {"allocated_bytes.all.current": 8.0, **whole}
    del whole["power_draw_w"]
    assert read(torch.device("cuda:1")) == {"allocated_bytes.all.current": 8.0, **whole}


@pytest.mark.gpu
def test_a_real_card_is_set_up_and_has_statistics() -> None:
    device = torch.device("cuda", 0)
    accelerator = CUDAAccelerator()
    accelerator.setup_device(device)
    assert torch.cuda.current_device() == 0
    torch.zeros(10, device=device)
    assert accelerator.get_device_stats(device)["allocation.all.current"] >= 1
    assert 0 in find_usable_cuda_devices()
    accelerator.teardown()
