"""TrainingEfficiency: FLOPs are exact, rates and costs follow from them, totals go on, training stays the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import Net, RecordingLogger, ValidatedNet, assert_same, loader, momentum, net, quiet

import loopwright as lw
from loopwright.accelerators import CPUAccelerator
from loopwright.callbacks import TrainingEfficiency
from loopwright.callbacks.monitors import training_efficiency
from loopwright.errors import ConfigError
from loopwright.fabric import throughput
from loopwright.planning.formulas import chinchilla_tokens, dense_flops_per_token
from loopwright.trainer.timeline.timeline import Timeline

PARAMETERS = 4 * 8 + 8 + 8 + 1
# Forward: 2 per weight and sample. Backward: the same for each weight's gradient and for the second layer's input.
FLOPS_PER_SAMPLE = 2 * (4 * 8 + 8) * 2 + 2 * 8


def fit(efficiency: TrainingEfficiency, kind: type[Net] = Net, val: Any = None, **kwargs: Any) -> tuple[Any, Any, Any]:
    logger, module = RecordingLogger(), net(kind, momentum)
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = quiet(logger=logger, callbacks=[efficiency], **{"max_epochs": 1, "log_every_n_steps": 2, **kwargs})
    trainer.fit(module, loader(16, 2), val, ckpt_path=ckpt_path)
    return module, logger, trainer


def test_flops_are_counted_exactly_without_changing_training() -> None:
    plain = net(Net, momentum)
    quiet(max_epochs=1).fit(plain, loader(16, 2))
    efficiency = TrainingEfficiency(peak_flops=1e6, verbose=False)
    module, logger, _ = fit(efficiency)
    assert_same(module, plain)
    assert efficiency.flops_per_sample == FLOPS_PER_SAMPLE
    samples, flops, mfu = (
        dict(logger.values(f"efficiency/{name}")) for name in ("samples_per_sec", "flops_per_sec", "mfu")
    )
    assert list(samples) == [1, 3, 5, 7]
    for step, rate in samples.items():
        assert flops[step] == pytest.approx(rate * FLOPS_PER_SAMPLE)
        assert mfu[step] == pytest.approx(flops[step] / 1e6)
    assert efficiency.summary["samples"] == 16
    assert efficiency.summary["flops"] == 16 * FLOPS_PER_SAMPLE
    assert efficiency.summary["memory_peak_bytes"] > 1e7


def test_accumulated_micro_batches_are_counted_once() -> None:
    efficiency = TrainingEfficiency(verbose=False)
    _, logger, _ = fit(efficiency, accumulate_grad_batches=4, log_every_n_steps=1)
    assert efficiency.flops_per_sample == FLOPS_PER_SAMPLE
    assert [step for step, _ in logger.values("efficiency/samples_per_sec")] == [0, 1]


class Manual(Net):
    """Goes through the batch twice in one step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(self.loss(batch))
        optimizer.step()


def test_manual_optimization_counts_all_passes() -> None:
    efficiency = TrainingEfficiency(verbose=False)
    fit(efficiency, Manual)
    assert efficiency.flops_per_sample == 2 * FLOPS_PER_SAMPLE


def test_tokens_cost_and_the_chinchilla_share(capsys: Any) -> None:
    efficiency = TrainingEfficiency(
        lambda batch: torch.tensor(batch[0].numel()), flops="6n", price_per_hour=3600.0, peak_flops="measure"
    )
    _, logger, _ = fit(efficiency)
    summary = efficiency.summary
    assert summary["tokens"] == 64
    assert summary["chinchilla_tokens"] == chinchilla_tokens(PARAMETERS) == 20 * PARAMETERS
    assert summary["chinchilla_fraction"] == pytest.approx(64 / (20 * PARAMETERS))
    assert summary["flops"] == 64 * dense_flops_per_token(PARAMETERS) == 64 * 6 * PARAMETERS
    assert summary["cost"] == pytest.approx(summary["seconds"])  # one per second
    assert summary["cost_per_million_samples"] == pytest.approx(summary["cost"] / 16 * 1e6)
    assert summary["cost_per_million_tokens"] == pytest.approx(summary["cost"] / 64 * 1e6)
    assert 0 < summary["mfu"] < 1
    costs = [cost for _, cost in logger.values("efficiency/cost")]
    assert costs == sorted(costs)
    shown = capsys.readouterr().out
    assert "Efficiency" in shown
    assert "cost_per_million_tokens" in shown


def test_the_summary_has_utilization_cost_and_the_timelines_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"data": 1.0, "transfer": 0.5, "forward": 2.0, "backward": 4.0, "communication": 1.5, "optimizer": 1.0}
    monkeypatch.setattr(Timeline, "seconds", lambda self: seconds)
    monkeypatch.setattr(CPUAccelerator, "device_memory", lambda self, device: 2.0**40)
    busy = iter([0.5, 0.75, 1.0, 0.75])
    monkeypatch.setattr(training_efficiency, "_utilization", lambda *_: next(busy))
    efficiency = TrainingEfficiency(price_per_hour=3600.0)
    _, logger, _ = fit(efficiency)
    summary = efficiency.summary
    assert summary["time_in_data_loading"] == 0.15
    assert (summary["time_in_forward"], summary["time_in_backward"]) == (0.2, 0.4)
    assert summary["time_in_communication"] == 0.15
    assert summary["gpu_utilization"] == 0.75
    assert [value for _, value in logger.values("efficiency/gpu_utilization")] == [0.5, 0.75, 1.0, 0.75]
    assert summary["memory_utilization"] == summary["memory_peak_bytes"] / 2**40
    assert summary["cost_per_sample"] == pytest.approx(summary["seconds"] / 16)  # one per second
    assert efficiency.state_dict()["busy"] == {"sum": 3.0, "readings": 4.0}


def test_a_real_fit_divides_its_time(capsys: Any) -> None:
    efficiency = TrainingEfficiency()
    fit(efficiency)
    times = {name: value for name, value in efficiency.summary.items() if name.startswith("time_in_")}
    assert set(times) == {"time_in_data_loading", "time_in_forward", "time_in_backward", "time_in_communication"}
    assert all(0 <= value < 1 for value in times.values())
    assert 0 < sum(times.values()) < 1
    assert "gpu_utilization" not in efficiency.summary


def test_the_utilization_of_a_card_is_a_fraction() -> None:
    class Card(CPUAccelerator):
        def get_device_stats(self, device: torch.device) -> dict[str, float]:
            return {"utilization_percent": 97.0} if device.index == 0 else {}

    assert training_efficiency._utilization(Card(), torch.device("cuda", 0)) == 0.97
    assert training_efficiency._utilization(Card(), torch.device("cuda", 1)) is None
    assert training_efficiency._utilization(Card(), torch.device("cpu")) is None


def test_validation_costs_money_but_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(ValidatedNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 0.01
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            now[0] += 0.15

    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    efficiency = TrainingEfficiency(verbose=False)
    fit(efficiency, Slow, loader(4, 2), num_sanity_val_steps=0)
    steps = efficiency.summary["samples"] / 2
    assert efficiency.summary["seconds"] == pytest.approx(0.01 * steps + 0.3)
    assert efficiency.summary["samples_per_sec"] == pytest.approx(2 / 0.01)


def test_totals_go_on_and_flops_are_not_counted_again(tmp_path: Path) -> None:
    first = TrainingEfficiency(verbose=False)
    _, _, trainer = fit(first, max_steps=3)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    again = TrainingEfficiency(verbose=False)
    _, logger, _ = fit(again, max_steps=8, ckpt_path=tmp_path / "c.ckpt")
    assert again.summary["samples"] == 16
    assert again.summary["seconds"] > first.summary["seconds"]
    assert again.flops_per_sample == FLOPS_PER_SAMPLE
    assert [step for step, _ in logger.values("efficiency/seconds")] == [3, 5, 7]


def test_a_checkpoint_between_two_log_boundaries_loses_nothing(tmp_path: Path) -> None:
    efficiency = TrainingEfficiency(verbose=False)
    checkpoint = lw.ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="three")
    trainer = quiet(logger=RecordingLogger(), callbacks=[efficiency, checkpoint], max_steps=3, log_every_n_steps=2,
                    enable_checkpointing=True)  # fmt: skip
    trainer.fit(net(), loader(16, 2))
    saved = torch.load(tmp_path / "three.ckpt", weights_only=True)["callbacks"][efficiency.state_key]
    assert saved["totals"]["samples"] == 6


def test_an_error_in_the_first_step_ends_the_count() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        fit(TrainingEfficiency(), Breaks)
    assert _get_current_dispatch_mode() is None


def test_arguments_that_cannot_work_are_all_named() -> None:
    with pytest.raises(
        ConfigError, match=r"flops='7n' is not.*peak_flops='fast' is not.*price_per_hour=-1 is not above"
    ):
        TrainingEfficiency(flops="7n", peak_flops="fast", price_per_hour=-1)  # type: ignore[arg-type]


def test_two_with_other_prices_keep_separate_state() -> None:
    keys = {TrainingEfficiency(price_per_hour=price).state_key for price in (None, 1.0, 2.0)}
    assert len(keys) == 3
