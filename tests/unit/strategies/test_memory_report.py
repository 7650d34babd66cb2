"""memory_report: who holds the memory when it runs out, in the note of the error that ends a fit."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import quiet

import loopwright as lw
from loopwright.planning.simulation import Training, simulate
from loopwright.strategies.memory_report import READS_GRAPHS, memory_report

WIDTH, ROWS = 256, 512
reads_graphs = pytest.mark.skipif(not READS_GRAPHS, reason="this torch does not show what graphs keep")


class Blocks(lw.Module):
    def __init__(self, fails_in: str) -> None:
        super().__init__()
        self.fails_in = fails_in
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.embed(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        if batch_idx == 1 and self.fails_in == "forward":
            torch.empty(2**58)
        loss = self.head(hidden).mean()
        if batch_idx == 1 and self.fails_in == "backward":
            self.embed.weight.register_hook(lambda _: torch.empty(2**58))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def fail(where: str) -> str:
    gc.collect()  # errors of other tests hold their graphs, in cycles
    data = DataLoader(TensorDataset(torch.randn(2 * ROWS, WIDTH)), batch_size=ROWS)
    with pytest.raises(RuntimeError, match="allocate memory|enough memory") as caught:
        quiet(max_epochs=1).fit(Blocks(where), data)
    (note,) = [one for one in caught.value.__notes__ if "memory by owner" in one]
    return note


def sizes(note: str) -> dict[str, float]:
    lines = [line.split("MiB")[0].rsplit(None, 1) for line in note.splitlines() if line.startswith("  ")]
    return {name.strip(): float(size) for name, size in lines}


@reads_graphs
def test_the_error_of_a_forward_pass_says_who_held_what() -> None:
    note = fail("forward")
    parameters = 4 * (WIDTH * WIDTH + 3 * (WIDTH * WIDTH + WIDTH) + WIDTH + 1) / 2**20
    found = sizes(note)
    assert found["parameters"] == round(parameters, 1)
    assert found["optimizer states"] == round(2 * parameters, 1)
    assert found["gradients"] == 0
    # Each block keeps its input and what goes into GELU. Other modules may be alive in this process.
    for name, size in (("blocks.0", 1.0), ("blocks.1", 1.0), ("blocks.2", 1.0), ("embed", 0.5)):
        assert f"{name} {size} MiB" in note
    assert "What takes less: Trainer(on_oom='shrink')" in note


@reads_graphs
def test_activations_belong_to_the_blocks_that_keep_them() -> None:
    module = Blocks("nowhere")
    loss = module.training_step([torch.randn(ROWS, WIDTH)], 0)
    size = 4 * ROWS * WIDTH
    found = memory_report(module).activations
    found.pop("outside of modules with parameters", None)  # graphs of other modules that are alive in this process
    # The output of a GELU is kept by the layer after it, as its input.
    assert found == {"blocks.0": 2 * size, "blocks.1": 2 * size, "blocks.2": 2 * size, "head": size, "embed": size}
    del loss


@reads_graphs
def test_activations_of_frozen_layers_belong_to_them() -> None:
    module = Blocks("nowhere")
    module.blocks.requires_grad_(False)  # as LoRA does with a base: a graph has no nodes for these parameters
    loss = module.training_step([torch.randn(ROWS, WIDTH)], 0)
    size = 4 * ROWS * WIDTH
    found = memory_report(module).activations
    found.pop("outside of modules with parameters", None)
    assert found == dict.fromkeys(["blocks.0", "blocks.1", "blocks.2", "head", "embed"], size)
    del loss


@reads_graphs
def test_what_a_backward_pass_has_freed_is_not_reported() -> None:
    note = fail("backward")
    found = sizes(note)
    assert found["gradients"] == pytest.approx(3 * 4 * WIDTH * WIDTH / 2**20, abs=0.06)  # not that of `embed`
    assert "blocks." not in next(line for line in note.splitlines() if "activations" in line)


@pytest.mark.slow
def test_on_a_device_of_known_size_the_plan_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 8e6
    monkeypatch.setattr("loopwright.strategies.memory_report._device_stats", lambda _: {"total": int(memory)})
    note = fail("forward")
    (found,) = re.findall(r"on_oom='shrink'\), or a batch size of (\d+) in place of 512, on this device", note)
    assert "What fits into 8.00 MB with a tenth to spare, by the plan:" in note

    def peak(size: int) -> float:
        training = Training(lambda: Blocks("nowhere"), [torch.randn(size, WIDTH)])
        return simulate(training, "single_device").peak_bytes

    assert peak(int(found)) <= 0.9 * memory < peak(512)
    assert int(found) > 256


def test_parameters_that_have_no_shape_yet_are_left_out() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(2))
    report = memory_report(module)
    assert report.owners["parameters"] == 4 * (4 * 8 + 8)


@pytest.mark.skipif(READS_GRAPHS, reason="this torch shows what graphs keep")
def test_a_torch_that_hides_activations_is_named() -> None:
    assert "activations        unknown: torch 2.9" in fail("forward")
