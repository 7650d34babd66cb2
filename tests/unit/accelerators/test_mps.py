from __future__ import annotations

import pytest
import torch

from loopwright.accelerators import MPSAccelerator
from loopwright.errors import ConfigError


def test_an_environment_variable_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.delenv("DISABLE_MPS", raising=False)
    assert MPSAccelerator.is_available()
    monkeypatch.setenv("DISABLE_MPS", "1")
    assert not MPSAccelerator.is_available()


def test_there_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.delenv("DISABLE_MPS", raising=False)
    assert MPSAccelerator.get_parallel_devices(MPSAccelerator.parse_devices("auto")) == [torch.device("mps", 0)]
    assert MPSAccelerator.auto_device_count() == 1
    with pytest.raises(ConfigError, match="has 1"):
        MPSAccelerator.parse_devices(2)
