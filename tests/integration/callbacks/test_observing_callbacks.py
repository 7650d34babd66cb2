"""The callbacks that watch, stop and save, on two ranks: the same decisions everywhere, files and records once."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from toys import RecordingLogger

import loopwright as lw
from loopwright.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    OnExceptionCheckpoint,
    Preemption,
    SampleLogger,
    SpikeDetection,
    StopFile,
    ThroughputMonitor,
    TrainingEfficiency,
    TrainingSpikeException,
    WeightStatistics,
)


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 1).double()
        self.flops_per_batch = 100

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class ValidatedNet(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def data(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(count, 1, generator=generator, dtype=torch.float64))


def trainer_of(size: int, root: Path, *callbacks: lw.Callback, **options: Any) -> lw.Trainer:
    return lw.Trainer(
        accelerator="cpu", devices=size, default_root_dir=root,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        **{"strategy": "ddp" if size > 1 else "auto", "max_epochs": 2, "logger": False, "enable_checkpointing": False,
           **options},
    )  # fmt: skip


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# --- predictions -----------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.written: Any = None

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written = batch_indices, [one.flatten().tolist() for one in predictions]


def predict(rank: int, size: int, root: Path) -> Any:
    writer, module = Writer(), Net()
    loader = DataLoader(data(11), batch_size=2, shuffle=True)
    lw.seed_everything(4, verbose=False)
    predictions = trainer_of(size, root, writer).predict(module, loader)
    with torch.no_grad():
        expected = module.layer(data(11).tensors[0]).flatten().tolist()
    return writer.written, expected, len(predictions or [])


def test_each_rank_writes_its_own_predictions_with_their_indices(tmp_path: Path) -> None:
    results = run_ranks(predict, 2, tmp_path, connect=False)
    indices = [index for (batches, _), *_ in results for batch in batches[0] for index in batch]
    assert sorted(indices) == list(range(11))
    for (batches, predictions), expected, count in results:
        assert count == 6  # every rank returns all of them
        for batch, prediction in zip(batches[0], predictions, strict=True):
            assert prediction == pytest.approx([expected[index] for index in batch])


# --- stopping --------------------------------------------------------------------------------------------------------


class Acts(lw.Callback):
    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.act()


def preempt(rank: int, size: int, root: Path, notice: str, ckpt_path: str | None) -> Any:
    file = root / "notice"
    acts = {"signal": lambda: os.kill(os.getpid(), signal.SIGUSR1), "file": file.touch, "": lambda: None}
    # The file is seen by the first rank of the machine, the signal comes to the other one.
    callbacks: list[lw.Callback] = [Preemption(notice_file=file, poll_s=0.001)]
    if rank == size - 1:
        callbacks.append(Acts(3, acts[notice]))
    trainer = trainer_of(size, root, *callbacks, max_epochs=500 if notice == "file" else 2)
    module = Net()
    lw.seed_everything(4, verbose=False)
    code = 0
    try:
        trainer.fit(module, DataLoader(data(), batch_size=8 // size, shuffle=True), ckpt_path=ckpt_path)
    except lw.StopBySignal as stop:
        code = int(stop.code)  # type: ignore[arg-type]
    return code, trainer.global_step, weights(module)


def test_a_notice_at_one_rank_stops_all_at_one_step_and_they_go_on_exactly(tmp_path: Path) -> None:
    whole = run_ranks(preempt, 2, tmp_path / "whole", "", None, connect=False)
    first = run_ranks(preempt, 2, tmp_path / "cut", "signal", None, connect=False)
    assert [code for code, *_ in first] == [143, 143]
    assert first[0][1] == first[1][1] < 12
    saved = tmp_path / "cut" / "checkpoints" / "preempted.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == first[0][1]
    second = run_ranks(preempt, 2, tmp_path / "cut", "", str(saved), connect=False)
    assert [(code, step) for code, step, _ in second] == [(0, 12)] * 2
    assert all(torch.equal(value, second[1][2][name]) for name, value in whole[0][2].items())


def test_a_notice_file_stops_all_ranks(tmp_path: Path) -> None:
    results = run_ranks(preempt, 2, tmp_path, "file", None, connect=False)
    assert [code for code, *_ in results] == [143, 143]
    assert results[0][1] == results[1][1]
    assert (tmp_path / "checkpoints" / "preempted.ckpt").exists()


def stop(rank: int, size: int, root: Path) -> Any:
    callbacks: list[lw.Callback] = [StopFile(interval_s=0)]
    if rank == 1:
        callbacks.append(Acts(2, (root / "STOP").touch))
    trainer = trainer_of(size, root, *callbacks)
    trainer.fit(Net(), DataLoader(data(), batch_size=4))
    return trainer.global_step, trainer.state.status


def test_a_stop_file_stops_all_ranks_at_one_step(tmp_path: Path) -> None:
    results = run_ranks(stop, 2, tmp_path, connect=False)
    assert results[0] == results[1]
    assert results[0][0] < 12
    assert results[0][1] == "finished"
    assert not (tmp_path / "STOP").exists()


def spike(rank: int, size: int, root: Path) -> Any:
    class Jumps(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            factor = 1e6 if rank == 1 and batch_idx == 3 else 1.0
            return super().training_step(batch, batch_idx) * factor

    detection = SpikeDetection(rtol=50.0)
    checkpoint = OnExceptionCheckpoint(root)
    trainer = trainer_of(size, root, detection, checkpoint, log_every_n_steps=2, enable_checkpointing=True)
    with pytest.raises(TrainingSpikeException) as caught:
        trainer.fit(Jumps(), DataLoader(data(), batch_size=4))
    return trainer.global_step, caught.value.batch_idx, detection.state_dict()


def test_a_spike_of_one_rank_is_everybodys(tmp_path: Path) -> None:
    results = run_ranks(spike, 2, tmp_path, connect=False)
    assert results[0] == results[1]
    assert results[0][:2] == (4, 3)
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [2, 3]
    assert (tmp_path / "on_exception.ckpt").exists()  # rank 0's, by itself


def roll_back(rank: int, size: int, root: Path, strategy: str, value: float, *, is_reference: bool) -> Any:
    samples = data()
    samples.tensors[1][21] = value  # of rank 1, in batch 2
    left = samples
    callbacks: list[lw.Callback] = [lw.ModelCheckpoint(root / "saved", every_n_train_steps=2, save_top_k=-1)]
    if is_reference:
        left = Subset(samples, [number for number in range(48) if not 16 <= number < 24])  # type: ignore[assignment]
    else:
        callbacks.insert(0, SpikeDetection(rtol=50.0, on_spike="rollback"))
    trainer = trainer_of(
        size, root, *callbacks, log_every_n_steps=2, enable_checkpointing=True, strategy=strategy, max_epochs=1
    )
    module = Net()
    trainer.fit(module, DataLoader(left, batch_size=4))
    return trainer.global_step, {name: one.tolist() for name, one in trainer.full_state_dict(module).items()}


@pytest.mark.parametrize(("strategy", "value"), [("ddp", math.nan), ("fsdp", 1e6)])
def test_ranks_roll_back_together(strategy: str, value: float, tmp_path: Path) -> None:
    found = run_ranks(roll_back, 2, tmp_path / "a", strategy, value, is_reference=False, connect=False)
    expected = run_ranks(roll_back, 2, tmp_path / "b", strategy, value, is_reference=True, connect=False)
    assert found == expected
    assert [one["batches"] for one in json.loads((tmp_path / "a" / "rollbacks.json").read_text())] == [[2, 2]]
    assert found[0][0] == 5


# --- records ---------------------------------------------------------------------------------------------------------


def observe(rank: int, size: int, root: Path, observes: bool) -> Any:
    logger = RecordingLogger()
    efficiency = TrainingEfficiency(lambda batch: 10 * len(batch[0]), verbose=False, price_per_hour=3600.0)
    callbacks: list[lw.Callback] = [
        ThroughputMonitor(lambda batch: len(batch[0]), window_size=2), efficiency, WeightStatistics(updates=True),
        DeviceStatsMonitor(), SampleLogger(text=lambda module, outputs, batch: "text"),
    ]  # fmt: skip
    module = ValidatedNet()
    loader = DataLoader(data(), batch_size=8 // size)
    trainer = trainer_of(size, root, *(callbacks if observes else []), logger=logger, log_every_n_steps=2)
    trainer.fit(module, loader, DataLoader(data(8), batch_size=2))
    return logger.rows, efficiency.summary, weights(module)


def test_rank_zero_records_what_one_process_records(tmp_path: Path) -> None:
    alone, _, _ = observe(0, 1, tmp_path / "alone", True)
    plain = run_ranks(observe, 2, tmp_path / "plain", False, connect=False)
    results = run_ranks(observe, 2, tmp_path / "both", True, connect=False)
    rows, summary, state = results[0]
    assert all(torch.equal(value, plain[0][2][name]) for name, value in state.items())
    assert results[1][:2] == ([], {})
    more = {f"{stage}/{name}_per_sec" for stage in ("train", "validate") for name in ("batches", "samples", "flops")}
    assert {key for _, row in rows for key in row} - more == {key for _, row in alone for key in row}
    for name in ("weights/total/norm", "gradients/layer.weight/norm", "updates/total/ratio"):
        values = [(step, row[name]) for step, row in rows if name in row]
        assert values == [(step, pytest.approx(row[name], rel=1e-6)) for step, row in alone if name in row]
        assert [step for step, _ in values] == [1, 3, 5, 7, 9, 11]
    assert summary["samples"] == 96  # of both ranks
    assert summary["tokens"] == 960
    assert summary["cost"] == pytest.approx(2 * summary["seconds"])
