"""MemorySnapshot: who held the memory when it ran out, read back from the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Net, adam, loader, net, quiet

from loopwright.callbacks import MemorySnapshot
from loopwright.errors import ConfigError
from loopwright.strategies.memory_report import memory_report


class Greedy(Net):
    """Keeps a large activation and then asks for more than there is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            attention_scores = torch.ones(500, 1000)
            attention_scores.add_(1)
            torch.empty(2**58)
        return self.loss(batch)


def test_the_files_say_who_held_the_memory(tmp_path: Path) -> None:
    snapshot = MemorySnapshot()
    module = net(Greedy, adam)
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[snapshot])
    with pytest.raises(RuntimeError, match="can't allocate memory|not enough memory") as caught:
        trainer.fit(module, loader(12, 2))
    stem = tmp_path / "memory" / "out_of_memory_rank0_step2"
    assert f"{stem}.txt lists what held the memory" in "".join(caught.value.__notes__)
    report = json.loads(stem.with_suffix(".json").read_text())
    parameters = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert report["owners"]["parameters"] == parameters
    assert report["owners"]["gradients"] == 0  # those of the step before are gone in a forward pass
    assert report["owners"]["optimizer states"] >= 2 * parameters
    largest = report["largest"][0]
    assert largest["size_bytes"] == 2_000_000
    assert largest["owner"].startswith("other tensors: attention_scores in training_step, test_memory_snapshot.py:")
    assert largest["shape"] == [500, 1000]
    text = stem.with_suffix(".txt").read_text()
    assert "attention_scores" in text
    assert "1.9 MiB" in text


def test_another_error_writes_nothing(tmp_path: Path) -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        quiet(max_epochs=1, callbacks=[MemorySnapshot(tmp_path)]).fit(net(Breaks), loader())
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_does_not_hide_the_error(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="memory"):
        quiet(max_epochs=1, callbacks=[MemorySnapshot(tmp_path / "file")]).fit(net(Greedy), loader(12, 2))
    assert "cannot be written" in caplog.text


def test_a_report_counts_each_storage_once() -> None:
    module = torch.nn.Linear(100, 100)
    module.register_buffer("view", module.weight.detach()[:10])
    report = memory_report(module)
    assert report.owners["parameters"] == 4 * (100 * 100 + 100)
    assert report.owners["buffers"] == 0
    assert "parameters: weight" in str(report)


def test_a_negative_history_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_entries=-1"):
        MemorySnapshot(max_entries=-1)


@pytest.mark.gpu
def test_on_a_card_the_allocators_history_is_dumped(tmp_path: Path) -> None:
    class TooLarge(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.empty(2**50, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        quiet(accelerator="cuda", devices=1, max_epochs=1, callbacks=[MemorySnapshot(tmp_path)]).fit(
            net(TooLarge), loader()
        )
    assert (tmp_path / "out_of_memory_rank0_step0.pickle").stat().st_size > 0
    report = json.loads((tmp_path / "out_of_memory_rank0_step0.json").read_text())
    assert report["owners"]["parameters"] > 0
