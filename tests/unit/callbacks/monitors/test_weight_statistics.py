"""WeightStatistics: the numbers are right, come with one read per log boundary, and change nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import Net, RecordingLogger, assert_same, loader, net, quiet, train_by_hand

from loopwright.callbacks import WeightStatistics
from loopwright.errors import ConfigError
from loopwright.loggers import TensorBoardLogger


def fit(statistics: WeightStatistics, logger: Any = None, **kwargs: Any) -> tuple[Any, RecordingLogger]:
    logger = logger or RecordingLogger()
    module = net()
    trainer = quiet(logger=logger, callbacks=[statistics], **{"max_epochs": 1, "log_every_n_steps": 2, **kwargs})
    trainer.fit(module, loader(12, 2))
    return module, logger


def by_hand(**kwargs: Any) -> list[dict[str, Any]]:
    """Return each step's weights before, gradients, and weights after."""
    steps: list[dict[str, Any]] = []

    def note(module: Net) -> None:
        named = dict(module.named_parameters())
        if steps:
            steps[-1]["after"] = {name: p.detach().clone() for name, p in named.items()}
        before = {name: p.detach().clone() for name, p in named.items()}
        steps.append({"before": before, "gradients": {name: p.grad.clone() for name, p in named.items()}})  # type: ignore[union-attr]

    module = net()
    train_by_hand(module, loader(12, 2), before_step=note, **kwargs)
    steps[-1]["after"] = {name: p.detach().clone() for name, p in module.named_parameters()}
    return steps


def norm(tensors: Any) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).double().norm())


def test_each_parameter_and_the_total_equal_a_manual_loop() -> None:
    steps = by_hand()
    _, logger = fit(WeightStatistics(updates=True))
    for index in (1, 3, 5):
        for kind, source in (("weights", "before"), ("gradients", "gradients")):
            values = steps[index][source]
            for name, tensor in values.items():
                assert dict(logger.values(f"{kind}/{name}/norm"))[index] == pytest.approx(norm([tensor]), rel=1e-5)
                assert dict(logger.values(f"{kind}/{name}/max"))[index] == pytest.approx(float(tensor.abs().max()))
            assert dict(logger.values(f"{kind}/total/norm"))[index] == pytest.approx(norm(values.values()), rel=1e-5)
        before, after = steps[index]["before"], steps[index]["after"]
        change = norm([after[name] - before[name] for name in before])
        ratio = dict(logger.values("updates/total/ratio"))[index]
        assert ratio == pytest.approx(change / norm(before.values()), rel=1e-4)
    assert [step for step, _ in logger.values("weights/total/norm")] == [1, 3, 5]


def test_nothing_changes_and_one_copy_is_made_per_log_boundary(monkeypatch: Any) -> None:
    reads: list[int] = []
    copy = torch.Tensor.tolist

    def tolist(tensor: Any) -> Any:
        reads.append(tensor.numel())
        return copy(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    plain = net()
    train_by_hand(plain, loader(12, 2))
    module, _ = fit(WeightStatistics(updates=True, histogram_bins=4))
    assert_same(module, plain)
    # 4 parameters: norm and largest value of weights, gradients, changes and what was changed; 2 histograms of 4 + 4.
    assert reads.count(4 * 2 * 4 + 4 * 2 * 8) == 3
    assert max(reads[1:]) == 96  # the trainer reads the loss, and once its random number generators


def test_groups_and_accumulation() -> None:
    _, logger = fit(WeightStatistics(depth=2, gradients=False), accumulate_grad_batches=3, log_every_n_steps=1)
    steps = by_hand(accumulate=3)
    assert {key for _, row in logger.rows for key in row if key.endswith("norm")} == {
        "weights/net.0/norm", "weights/net.2/norm", "weights/total/norm",
    }  # fmt: skip
    expected = norm([steps[1]["before"]["net.0.weight"], steps[1]["before"]["net.0.bias"]])
    assert logger.values("weights/net.0/norm")[1] == (1, pytest.approx(expected, rel=1e-5))
    _, logger = fit(WeightStatistics(depth=0))
    assert {key for _, row in logger.rows for key in row} - {"epoch"} == {
        f"{kind}/total/{what}" for kind in ("weights", "gradients") for what in ("norm", "max")
    }


def test_a_gradient_that_is_not_finite_shows() -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (math.nan if batch_idx == 1 else 1.0)

    logger = RecordingLogger()
    trainer = quiet(
        logger=logger, callbacks=[WeightStatistics()], max_steps=2, log_every_n_steps=2, nonfinite_loss="ignore"
    )
    trainer.fit(net(Breaks), loader(12, 2))
    assert math.isnan(logger.values("gradients/total/norm")[0][1])
    assert math.isnan(logger.values("gradients/total/max")[0][1])


def test_histograms_are_in_the_event_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="runs")
    statistics = WeightStatistics(histogram_bins=8)
    fit(statistics, logger)
    events = EventAccumulator(logger.log_dir, {"histograms": 0})
    events.Reload()
    assert set(events.Tags()["histograms"]) >= {"weights/net.0.weight", "gradients/net.2.bias"}
    found = events.Histograms("weights/net.0.weight")
    assert [one.step for one in found] == [1, 3, 5]
    before = by_hand()[1]["before"]["net.0.weight"]
    value = found[0].histogram_value
    assert value.num == before.numel() == sum(value.bucket)
    assert (value.min, value.max) == (pytest.approx(float(before.min())), pytest.approx(float(before.max())))
    low, high = float(before.min()), float(before.max())
    assert list(value.bucket) == torch.histc(before, 8, low, high).tolist()


def test_arguments_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match="depth=-1 is negative; histogram_bins=-2 is negative; there is nothing"):
        WeightStatistics(-1, weights=False, gradients=False, histogram_bins=-2)
    with pytest.raises(ConfigError, match="has no logger"):
        quiet(callbacks=[WeightStatistics()], max_epochs=1).fit(net(), loader())
