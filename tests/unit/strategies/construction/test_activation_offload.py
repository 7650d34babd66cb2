"""HostActivations: the same bits, less on the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loopwright.strategies.construction.activation_offload import HostActivations
from loopwright.strategies.memory_report import READS_GRAPHS

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.5)) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.norm(x).exp().sum()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_are_the_same_bits(checkpoints: bool) -> None:
    plain = Model(checkpoints=checkpoints)
    moved = copy.deepcopy(plain)
    offload = HostActivations(moved, CPU, least_bytes=1)
    batch = torch.randn(8, 16)
    for step in (plain, offload.around(moved)):
        torch.manual_seed(1)
        for _ in range(2):
            loss = step(batch)
            loss.backward(retain_graph=True)
            loss.backward()  # what was fetched is fetched again
    for one, other in zip(plain.parameters(), moved.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.skipif(not READS_GRAPHS, reason="this torch does not show what graphs keep")
def test_what_is_moved_leaves_the_device_and_small_tensors_and_parameters_stay() -> None:
    model, batch = Model(), torch.randn(8, 16)
    loss = HostActivations(model, CPU, least_bytes=1).around(model.layers[0])(batch).sum()
    kept: list[Tensor] = []
    node = loss.grad_fn
    while node is not None:
        for name in dir(node):
            if name.startswith("_raw_saved"):
                held = getattr(node, name).data
                kept += [held.tensor] if hasattr(held, "tensor") else []
        node = node.next_functions[0][0] if node.next_functions else None
    assert all(one.untyped_storage().data_ptr() == model.layers[0][0].weight.data_ptr() for one in kept)


def test_a_kept_tensor_that_is_changed_in_place_is_an_error() -> None:
    model = nn.Linear(4, 4)
    loss = HostActivations(model, CPU).around(model)(torch.randn(2, 4, requires_grad=True)).sum()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
def test_on_a_card_memory_is_freed_and_results_are_the_same() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).to(device)
    batch = torch.randn(8192, 1024, device=device)
    peaks, gradients = [], []
    for step in (model, HostActivations(model, device).around(model)):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = step(batch).square().mean()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert peaks[1] < peaks[0] / 3
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
