from __future__ import annotations

import pytest
import torch

from loopwright.trainer.timeline.roofline import OperationCounter, measure_peak

CPU = torch.device("cpu")


def test_a_product_counts_its_operations_and_the_bytes_of_its_tensors() -> None:
    phase = "a"
    counter = OperationCounter(CPU, lambda: phase)
    a, b = torch.ones(10, 20), torch.ones(20, 30)
    torch.mm(a, b)  # before
    counter.start()
    product = torch.mm(a, b)
    phase = "b"
    product.add_(1)
    product.view(-1)  # moves nothing
    counter.stop()
    torch.mm(a, b)  # after
    counts = counter.counts()
    assert counts.operations == {"a": 2 * 10 * 20 * 30, "b": 0}
    assert counts.num_bytes == {"a": 4 * (200 + 600 + 300), "b": 4 * 2 * 300}
    assert counts.intensity == pytest.approx(12000 / 6800)


def test_the_trial_of_the_device_moves_no_generator() -> None:
    before = torch.get_rng_state()
    peak = measure_peak(CPU, size=64)
    assert torch.equal(before, torch.get_rng_state())
    assert peak.operations_per_s > 0
    assert peak.bytes_per_s > 0
