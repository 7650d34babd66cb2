"""Bars fit a real terminal of 80 and of 120 columns: bar, epoch, step and speed first, then metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import FakeTrainer
from terminals import on_terminal

from loopwright.callbacks import RichProgressBar, TQDMProgressBar
from loopwright.callbacks.progress.live import LiveProgressBar

FEW = {"loss": 0.25}
MANY = {f"validation_metric_{number}": 0.125 for number in range(6)}


def drawn(tmp_path: Path, bar: type[LiveProgressBar], columns: int, metrics: dict[str, float]) -> list[str]:
    def program() -> None:
        made: Any = bar()
        made._lw_draw_interval_s = 0.0
        trainer = FakeTrainer(
            tmp_path, [made], windows=40, val_batches=3, max_epochs=2, train_metrics=lambda step: metrics
        )
        trainer.fit()

    return on_terminal(program, columns=columns)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("metrics", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lines_fit_and_none_lacks_bar_step_and_speed(
    tmp_path: Path, bar: type[LiveProgressBar], columns: int, metrics: dict[str, float]
) -> None:
    lines = drawn(tmp_path, bar, columns, metrics)
    assert max(map(len, lines)) <= columns, lines
    training = [line for line in lines if line.startswith("Epoch 1/1")]
    last = training[-1]
    assert "40/40" in last
    assert "it/s" in last
    assert last.count("━") + last.count("█") >= 10
    is_beside = any(name in last for name in metrics)
    assert is_beside == (metrics is FEW)
    for name in metrics:
        assert any(name in line for line in lines), lines


@pytest.mark.parametrize("metrics", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_forty_columns_have_epoch_bar_and_speed_and_leave_out_the_time(
    tmp_path: Path, bar: type[LiveProgressBar], metrics: dict[str, float]
) -> None:
    lines = drawn(tmp_path, bar, 40, metrics)
    assert max(map(len, lines)) <= 40, lines
    last = [line for line in lines if line.startswith("Epoch 1/1")][-1]
    assert "40/40" in last
    assert "it/s" in last
    assert "00:0" not in last
    assert last.count("━") + last.count("█") >= 6
    assert any("loss" in line or "metric_0" in line for line in lines)


def test_a_narrow_terminal_leaves_the_form_of_a_subclass_as_it_is(tmp_path: Path) -> None:
    class Mine(TQDMProgressBar):
        BAR_FORMAT = "{desc}> {n_fmt} of {total_fmt}, as long as a line of forty columns is"

    lines = drawn(tmp_path, Mine, 40, FEW)
    assert any(line.startswith("Epoch 1/1> 40 of 40") for line in lines), lines
