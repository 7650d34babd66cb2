from __future__ import annotations

import sys

import pytest
import torch

from loopwright.accelerators import CPUAccelerator
from loopwright.errors import ConfigError, MissingDependency


def test_the_cpu_is_always_there_and_auto_is_one_process() -> None:
    assert CPUAccelerator.is_available()
    assert CPUAccelerator.auto_device_count() == 1
    assert CPUAccelerator.parse_devices("auto") == 1


def test_devices_is_a_number_of_processes() -> None:
    assert CPUAccelerator.get_parallel_devices(CPUAccelerator.parse_devices("2")) == [torch.device("cpu")] * 2


def test_indices_are_an_error() -> None:
    with pytest.raises(ConfigError, match="number of processes"):
        CPUAccelerator.parse_devices([0])


def test_statistics_are_percentages() -> None:
    pytest.importorskip("psutil")
    stats = CPUAccelerator().get_device_stats(torch.device("cpu"))
    assert set(stats) == {"cpu_vm_percent", "cpu_percent", "cpu_swap_percent"}
    assert all(0 <= value <= 100 for value in stats.values())


def test_statistics_without_psutil_name_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingDependency, match=r"pip install 'loopwright\[stats\]'"):
        CPUAccelerator().get_device_stats(torch.device("cpu"))
