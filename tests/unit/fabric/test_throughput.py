"""Throughput, its monitor for Fabric, measure_flops, and the table of peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toys import RecordingLogger

import loopwright as lw
from loopwright.accelerators.matmul_precision import get_matmul_precision, set_matmul_precision
from loopwright.errors import ConfigError
from loopwright.fabric.peak_flops import get_available_flops, measure_peak_flops
from loopwright.fabric.throughput import Throughput, ThroughputMonitor, measure_flops


def test_rates_are_over_the_window_and_totals_over_all() -> None:
    throughput = Throughput(available_flops=100, world_size=2, window_size=3, separator=".")
    assert throughput.compute() == {}
    for at in range(1, 5):
        throughput.update(time=2.0 * at, batches=at, samples=4 * at, lengths=40 * at, flops=60)
        expected = {"time": 2.0 * at, "batches": at, "samples": 4 * at, "lengths": 40 * at}
        if at >= 3:
            device = {"batches_per_sec": 0.5, "samples_per_sec": 2.0, "items_per_sec": 20.0, "flops_per_sec": 30.0}
            expected.update({f"device.{name}": value for name, value in device.items()})
            expected.update({name: 2 * value for name, value in device.items()})
            expected["device.mfu"] = 0.3
        assert throughput.compute() == expected
    throughput.reset()
    throughput.update(time=1.0, batches=1, samples=1)
    assert throughput.compute() == {"time": 1.0, "batches": 1, "samples": 1}


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"time": 1.0, "batches": 2, "samples": 4}, "time=1.0 is not larger than its last value, 1.0"),
        ({"time": 2.0, "batches": 1, "samples": 4}, "batches=1 is not larger"),
        ({"time": 2.0, "batches": 2, "samples": 2}, "samples=2 is not larger"),
        ({"time": 2.0, "batches": 9, "samples": 4}, "samples=4 is less than batches=9"),
        ({"time": 2.0, "batches": 2, "samples": 4, "lengths": 4}, "lengths=4 differs from earlier readings"),
    ],
)
def test_totals_that_cannot_be_are_refused(update: dict[str, Any], message: str) -> None:
    throughput = Throughput()
    throughput.update(time=1.0, batches=1, samples=2)
    with pytest.raises(ConfigError, match=message):
        throughput.update(**update)


def test_a_window_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_size=1"):
        Throughput(window_size=1)


def test_the_monitor_of_a_loop_logs_through_fabric() -> None:
    logger = RecordingLogger()
    fabric = lw.Fabric(accelerator="cpu", loggers=logger)
    fabric.launch()
    monitor = ThroughputMonitor(fabric, window_size=2)
    for at in range(1, 4):
        monitor.update(time=float(at), batches=at, samples=2 * at)
        monitor.compute_and_log(loss=0.5)
    assert monitor.step == 2
    assert logger.values("device/samples_per_sec") == [(1, 2.0), (2, 2.0)]
    assert logger.values("loss") == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_flops_are_those_of_the_products_and_gradients_stay() -> None:
    model = nn.Linear(4, 8)
    x = torch.ones(3, 4)
    forward = 2 * 3 * 4 * 8
    assert measure_flops(model, lambda: model(x)) == forward
    model.weight.grad = before = torch.ones(8, 4)
    # The input needs no gradient: only the weight's product is added.
    assert measure_flops(model, lambda: model(x), torch.sum) == 2 * forward
    assert model.weight.grad is before
    with torch.device("meta"):
        big = nn.Linear(10_000, 10_000)
        assert measure_flops(big, lambda: big(torch.ones(2, 10_000))) == 4 * 10_000**2


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.float32, 67),
        ("NVIDIA A100-SXM4-80GB", torch.float64, 19.5),
        ("NVIDIA L4", torch.float16, 121),
        ("NVIDIA L40S", torch.float16, 362),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, 80),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("NVIDIA A10G", torch.bfloat16, 70),
    ],
)
def test_the_table_knows_the_chip(name: str, dtype: torch.dtype, tflops: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert get_available_flops(torch.device("cuda"), dtype) == int(tflops * 1e12)


def test_float32_is_tf32_where_torch_may_use_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    before = get_matmul_precision()
    set_matmul_precision("high")
    try:
        assert get_available_flops(torch.device("cuda"), torch.float32) == 156e12
    finally:
        set_matmul_precision(before)


def test_an_unknown_chip_is_said_and_a_cpu_is_measured(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unheard 1")
    with pytest.warns(UserWarning, match="in the table of peak FLOPs, got Unheard 1"):
        assert get_available_flops(torch.device("cuda"), torch.float32) is None
    assert get_available_flops(torch.device("cpu"), torch.float32) is None
    assert measure_peak_flops(torch.device("cpu"), seconds=0.05) > 0
