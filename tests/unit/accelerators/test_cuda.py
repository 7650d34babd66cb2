from __future__ import annotations

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_card_is_set_up_and_has_statistics() -> None:
    device = torch.device("cuda", 0)
    accelerator = CUDAAccelerator()
    accelerator.setup_device(device)
    assert torch.cuda.current_device() == 0
    torch.zeros(10, device=device)
    assert accelerator.get_device_stats(device)["allocation.all.current"] >= 1
    assert 0 in find_usable_cuda_devices()
    accelerator.teardown()
