"""ThroughputMonitor: rates of each stage where the trainer logs, totals that go on, validation left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toys import Net, RecordingLogger, ValidatedNet, loader, net, quiet

from loopwright.callbacks import ThroughputMonitor
from loopwright.errors import ConfigError, ModuleError
from loopwright.fabric import throughput


def size_of(batch: Any) -> int:
    return len(batch[0])


class Counted(Net):
    flops_per_batch = 1000


class CountedEverywhere(ValidatedNet):
    flops_per_batch = 1000


def test_rates_are_logged_at_the_log_steps_once_the_window_is_full() -> None:
    logger = RecordingLogger()
    monitor = ThroughputMonitor(size_of, lambda batch: 3 * size_of(batch), window_size=3)
    quiet(logger=logger, callbacks=[monitor], max_epochs=1, log_every_n_steps=2).fit(net(Counted), loader(12, 2))
    assert logger.values("train/samples") == [(1, 4), (3, 8), (5, 12)]
    assert logger.values("train/lengths") == [(1, 12), (3, 24), (5, 36)]
    batches, samples, items, flops = (
        dict(logger.values(f"train/device/{name}_per_sec")) for name in ("batches", "samples", "items", "flops")
    )
    assert list(batches) == [3, 5]
    for step in batches:
        assert samples[step] == pytest.approx(2 * batches[step])
        assert items[step] == pytest.approx(6 * batches[step])
        assert flops[step] == pytest.approx(1000 * batches[step])
    assert not logger.values("train/samples_per_sec")  # one device needs no second number


def test_only_complete_steps_are_logged_when_batches_are_accumulated() -> None:
    logger = RecordingLogger()
    trainer = quiet(logger=logger, callbacks=[ThroughputMonitor(size_of)], max_epochs=1, log_every_n_steps=1,
                    accumulate_grad_batches=3)  # fmt: skip
    trainer.fit(net(Counted), loader(12, 2))
    assert logger.values("train/batches") == [(0, 3), (1, 6)]


def test_validation_is_not_time_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(CountedEverywhere):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 0.01
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            now[0] += 0.1

    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    logger = RecordingLogger()
    monitor = ThroughputMonitor(size_of, window_size=2)
    trainer = quiet(logger=logger, callbacks=[monitor], max_epochs=2, log_every_n_steps=1, num_sanity_val_steps=0)
    trainer.fit(net(Slow), loader(4, 2), loader(4, 2))
    times = [value for _, value in logger.values("train/time")]
    assert times[-1] == pytest.approx(0.04)  # and 0.4 s with the validations
    assert [value for _, value in logger.values("validate/batches")] == [1, 2, 1, 2]
    assert logger.values("validate/time")[1][1] == pytest.approx(0.2)


def test_test_and_predict_have_rates_of_their_own() -> None:
    logger = RecordingLogger()
    trainer = quiet(logger=logger, callbacks=[ThroughputMonitor(size_of)], log_every_n_steps=2)
    trainer.test(net(CountedEverywhere), loader(8, 2), verbose=False)
    trainer.predict(net(CountedEverywhere), loader(8, 2))
    assert logger.values("test/samples") == [(1, 4), (3, 8)]
    assert logger.values("predict/samples") == [(1, 4), (3, 8)]


def test_totals_go_on_after_a_resume(tmp_path: Path) -> None:
    logger = RecordingLogger()

    def fit(steps: int, path: Path | None) -> Any:
        trainer = quiet(logger=logger, callbacks=[ThroughputMonitor(size_of)], max_steps=steps, log_every_n_steps=1)
        trainer.fit(net(Counted), loader(8, 2), ckpt_path=path)
        return trainer

    fit(3, None).save_checkpoint(tmp_path / "c.ckpt")
    fit(5, tmp_path / "c.ckpt")
    assert logger.values("train/samples") == [(0, 2), (1, 4), (2, 6), (3, 8), (4, 10)]
    times = [value for _, value in logger.values("train/time")]
    assert times == sorted(times)


def test_without_a_logger_nothing_is_measured() -> None:
    calls: list[int] = []
    monitor = ThroughputMonitor(lambda batch: calls.append(1) or 1)  # type: ignore[func-returns-value]
    with pytest.warns(UserWarning, match="has no logger to write to"):
        quiet(callbacks=[monitor], max_epochs=1).fit(net(), loader())
    assert not calls


def test_what_cannot_work_is_an_error() -> None:
    with pytest.raises(ConfigError, match="window_size=1"):
        ThroughputMonitor(size_of, window_size=1)
    with pytest.raises(ModuleError, match="batch_size_fn returned 'two'"):
        quiet(logger=RecordingLogger(), callbacks=[ThroughputMonitor(lambda batch: "two")], max_epochs=1).fit(  # type: ignore[arg-type, return-value]
            net(Counted), loader()
        )


def test_missing_flops_are_said_once() -> None:
    trainer = quiet(logger=RecordingLogger(), callbacks=[ThroughputMonitor(size_of)], max_epochs=2)
    with pytest.warns(UserWarning, match="has no flops_per_batch") as caught:
        trainer.fit(net(), loader())
    assert len(caught) == 1
