from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from toys import Net, Recorder, ValidatedNet, adam, assert_same, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import Callback, LambdaCallback
from loopwright.trainer.run import FitRun
from loopwright.trainer.timeline.optimizer_trial import OptimizerTrial
from loopwright.trainer.timeline.timeline import STEP_PHASES, WHOLE_PHASES, StepRecord, Timeline, next_measured

Act = Callable[[], Any]


class Clock:
    """A clock on which only `nap` and looks at it take time."""

    now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


CLOCK = Clock()


def fitted(
    module: nn.Module | None = None, data: Any = None, val: Any = None, *, every: int | None = 1, **options: Any
) -> Any:
    trainer = quiet(**{"max_epochs": 1, **options})
    trainer.timeline.every = every
    trainer.timeline._clock = CLOCK
    trainer.fit(module if module is not None else net(), data if data is not None else loader(20), val)
    return trainer


def nap(milliseconds: float = 4) -> None:
    """Take time on the clock of `fitted`, which the load of the machine does not change."""
    CLOCK.now_ns += int(milliseconds * 1e6)


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nap()
        return super().step(closure)


class SlowData:
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        for batch in loader(20):
            nap()
            yield batch


class SlowForward(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        nap()
        return super().training_step(batch, batch_idx)


class SlowBackward(Net):
    def backward(self, loss: Any) -> None:
        nap()
        loss.backward()


class SlowTransfer(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        nap()
        return batch


class SlowClip(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        nap()


class SlowSchedule(Net):
    def configure_optimizers(self) -> Any:
        class Slow(torch.optim.lr_scheduler.ConstantLR):
            def step(self, epoch: Any = None) -> None:
                nap()
                super().step(epoch)

        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": Slow(optimizer), "interval": "step"}}


class SlowValidation(ValidatedNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        nap(10)


class SlowLogger(lw.loggers.Logger):
    name, version = "slow", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        nap()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class Logging(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0)
        return super().training_step(batch, batch_idx)


class SlowSaves(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        nap()


SLOW: dict[str, Callable[[Path], Any]] = {
    "data": lambda folder: fitted(data=SlowData()),
    "transfer": lambda folder: fitted(net(SlowTransfer)),
    "forward": lambda folder: fitted(net(SlowForward)),
    "backward": lambda folder: fitted(net(SlowBackward)),
    "clip": lambda folder: fitted(net(SlowClip), gradient_clip_val=1.0),
    "optimizer": lambda folder: fitted(net(Net, lambda parameters: SlowOptimizer(parameters, lr=0.1))),
    "schedule": lambda folder: fitted(net(SlowSchedule)),
    "hooks": lambda folder: fitted(callbacks=LambdaCallback(on_train_batch_start=lambda *_: nap())),
    "epoch": lambda folder: fitted(callbacks=LambdaCallback(on_train_epoch_end=lambda *_: nap(60))),
    "logging": lambda folder: fitted(net(Logging), logger=SlowLogger(), log_every_n_steps=1),
    "checkpoint": lambda folder: fitted(callbacks=SlowSaves(folder)),
    "validation": lambda folder: fitted(net(SlowValidation), val=loader(8)),
}


@pytest.mark.parametrize("phase", SLOW)
def test_time_is_counted_to_the_phase_that_takes_it(phase: str, tmp_path: Path) -> None:
    trainer = SLOW[phase](tmp_path)
    seconds = trainer.timeline.seconds()
    del seconds["first step"]  # it has the same phases, and what happens once per process
    assert max(seconds, key=lambda name: seconds[name]) == phase, seconds
    assert seconds[phase] > 0.025  # nine measured steps of 4 ms, or what is slow once


@pytest.mark.parametrize("every", [1, 3, None])
def test_phases_sum_to_the_time_of_the_loop(every: int | None) -> None:
    times: list[float] = []
    clock = LambdaCallback(
        on_train_start=lambda *_: times.append(CLOCK() / 1e9),
        on_train_end=lambda *_: times.append(CLOCK() / 1e9),
    )
    trainer = fitted(net(ValidatedNet), SlowData(), loader(8), every=every, max_epochs=2, callbacks=clock)
    timeline = trainer.timeline
    assert sum(timeline.seconds().values()) == pytest.approx(times[1] - times[0], rel=0.1)
    assert set(timeline.seconds()) == {*STEP_PHASES, *WHOLE_PHASES}
    assert timeline.num_steps == 20


def test_every_step_is_measured_where_asked_but_for_the_first() -> None:
    timeline = fitted(data=loader(20), every=1).timeline
    assert [record.step for record in timeline.records] == list(range(1, 10))
    assert timeline.first_step is not None
    assert timeline.first_step.step == 0
    starts = [record.start_s for record in timeline.records]
    assert starts == sorted(starts)
    for record in timeline.records:
        assert set(record.phases) <= set(STEP_PHASES)
        assert record.duration_s == sum(record.phases.values()) > 0


def test_short_steps_are_measured_now_and_then() -> None:
    timeline = fitted(data=loader(1600), every=None).timeline
    steps = [record.step for record in timeline.records]
    assert steps[:2] == [1, 2]
    assert 4 <= len(steps) <= 90  # one in a hundred of 800, or one in ten on a slow machine
    gaps = {after - before for before, after in pairwise(steps)}
    assert len(gaps) > 2, "a fixed distance would always meet, or always miss, what is periodic"


def test_long_steps_are_all_measured() -> None:
    class Long(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nap(12)
            return super().training_step(batch, batch_idx)

    assert fitted(net(Long), loader(20), every=None).timeline.num_measured == 9


class Communicator:
    def fetch(self) -> None:
        pass


@pytest.mark.parametrize(("num_methods", "every"), [(0, 1), (5, 1), (50, 10), (5000, 100)])
def test_steps_whose_measuring_costs_more_are_measured_less_often(num_methods: int, every: int) -> None:
    trainer = fitted(data=loader(6))
    timeline, run = trainer.timeline, SimpleNamespace(trainer=trainer, progress=SimpleNamespace(total_batches=6))
    owners = [Communicator() for _ in range(num_methods)]
    timeline._swap_communication(SimpleNamespace(communication_calls=lambda: [(owner, "fetch") for owner in owners]))
    timeline.every, timeline._windows_opened, timeline._shortest_ns = None, 10, 12_000_000
    due = []
    for _ in range(300):
        timeline._plan_next(run)
        due.append(timeline.due - run.progress.total_batches)
        run.progress.total_batches = timeline.due + 1
    assert 0 <= min(due) <= every / 5
    assert 1.7 * every - 2 < max(due) <= 2 * every - 2
    assert sum(due) / 300 == pytest.approx(every - 1, abs=0.5)


def test_memory_is_bounded() -> None:
    trainer = quiet(max_epochs=1)
    trainer.timeline.every = 1
    Timeline.MAX_RECORDS, before = 5, Timeline.MAX_RECORDS
    try:
        trainer.fit(net(), loader(60))
    finally:
        Timeline.MAX_RECORDS = before
    assert [record.step for record in trainer.timeline.records] == [25, 26, 27, 28, 29]
    assert trainer.timeline.num_measured == 29


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "validating": {"val_check_interval": 2, "max_epochs": 2},
    "synchronized": {"synchronize": True},
    "counting": {"counts_operations": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_measuring_changes_no_bit_and_no_random_number(name: str) -> None:
    options = dict(OPTIONS[name])
    settings = {key: options.pop(key) for key in ("synchronize", "counts_operations") if key in options}
    trained = []
    for is_enabled in (False, True):
        module = net(ValidatedNet, adam, dropout=0.3)
        random.seed(5)
        trainer = quiet(**{"max_epochs": 1, **options})
        trainer.timeline.is_enabled, trainer.timeline.every = is_enabled, 1
        for key, value in settings.items():
            setattr(trainer.timeline, key, value)
        trainer.fit(module, loader(20, shuffle=True), loader(6))
        trained.append((module, torch.get_rng_state(), random.random()))
    (bare, bare_rng, bare_random), (measured, rng, number) = trained
    assert_same(bare, measured)
    assert torch.equal(bare_rng, rng)
    assert bare_random == number


def test_the_order_of_hooks_is_the_same() -> None:
    seen = []
    for is_enabled in (False, True):
        recorder = Recorder(lambda trainer: (trainer.global_step, trainer.at_step_boundary))
        trainer = quiet(max_epochs=2, accumulate_grad_batches=2, callbacks=recorder)
        trainer.timeline.is_enabled, trainer.timeline.every = is_enabled, 1
        trainer.fit(net(ValidatedNet), loader(10), loader(4))
        seen.append((recorder.seen, recorder.notes))
    assert seen[0] == seen[1]


def test_what_was_swapped_in_is_taken_out_after_a_step_and_after_an_error() -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise KeyError("planned")
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=1)
    trainer.timeline.every = 1
    with pytest.raises(KeyError, match="planned"):
        trainer.fit(net(Failing), loader(20))
    run = trainer.latest_run()
    assert isinstance(run, FitRun)
    assert not run.is_bound  # released, with the steps that were swapped in
    assert not {"has_next", "remaining"} & set(vars(run.stream))
    assert not trainer.timeline.is_open
    assert trainer.timeline.num_measured == 2
    assert "Bottleneck" in str(trainer.timeline.report())


def test_a_skipped_epoch_and_the_end_of_data_leave_no_half_step() -> None:
    class Skipping(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 4 else None

    timeline = fitted(net(Skipping), loader(20), max_epochs=2).timeline
    assert timeline.num_steps == 8
    assert all(timeline.seconds()[phase] >= 0 for phase in STEP_PHASES)


def test_a_closure_optimizer_and_manual_optimization_have_their_phases() -> None:
    class Manual(Net):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return SlowOptimizer(self.parameters(), lr=0.1)

    manual = fitted(net(Manual)).timeline.seconds()
    assert manual["optimizer"] > manual["forward"] > 0
    assert manual["backward"] > 0
    closure = fitted(net(Net, lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))).timeline.seconds()
    assert min(closure["optimizer"], closure["forward"], closure["backward"]) > 0
    assert closure["loop"] == 0


@pytest.mark.filterwarnings("ignore:trainer.fit continues")
def test_each_fit_begins_anew_and_settings_stay() -> None:
    trainer = fitted(data=loader(20))
    trainer.max_epochs = 2
    trainer.fit(net(), loader(8))
    assert trainer.timeline.every == 1
    assert trainer.timeline.num_steps == 4
    assert [record.step for record in trainer.timeline.records] == [11, 12, 13]


def test_a_resumed_fit_is_measured_from_where_it_goes_on(tmp_path: Path) -> None:
    first = fitted(data=loader(20), max_steps=4, max_epochs=None)
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet(max_epochs=1)
    second.timeline.every = 1
    second.fit(net(), loader(20), ckpt_path=tmp_path / "a.ckpt")
    assert [record.step for record in second.timeline.records] == [5, 6, 7, 8, 9]
    assert second.timeline.num_steps == 6


def test_barebones_and_a_timeline_that_is_switched_off_measure_nothing() -> None:
    bare = lw.Trainer(accelerator="cpu", barebones=True, max_epochs=1)
    bare.fit(net(), loader())
    assert bare.timeline.num_measured == 0
    assert "nothing was measured" in str(bare.timeline.report())


def test_a_fit_of_one_step_reports_that_step() -> None:
    timeline = fitted(data=loader(2), every=None).timeline
    assert timeline.num_measured == 0
    seconds = timeline.seconds()
    assert seconds["first step"] == 0
    assert seconds["forward"] > 0


def test_saving_and_evaluating_after_the_fit_do_not_count(tmp_path: Path) -> None:
    trainer = fitted(net(ValidatedNet), val=loader(4))
    before = trainer.timeline.seconds()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.validate(trainer.lightning_module, loader(), verbose=False)
    assert trainer.timeline.seconds() == before


@pytest.mark.parametrize("fused_s", [0.5, 1.0, None])
def test_it_is_written_as_json_and_goes_to_other_processes(
    fused_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = None if fused_s is None else OptimizerTrial("SGD", 1.0, fused_s)
    monkeypatch.setattr("loopwright.trainer.timeline.timeline.try_fused", lambda optimizers: trial)
    monkeypatch.setattr("loopwright.trainer.timeline.report._WORTH_SAYING", 0)  # advice on every part
    timeline = fitted().timeline
    timeline.save(tmp_path / "run" / "timeline.json")
    content = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert content["seconds"] == timeline.seconds()
    assert sum(content["fractions"].values()) == pytest.approx(1)
    assert [one["step"] for one in content["records"]] == list(range(1, 10))
    twin = pickle.loads(pickle.dumps(timeline))
    assert twin.as_dict() == timeline.as_dict()


class DeviceClock:
    """Events of a device that needs twice as long as the host thinks, and is always behind by `lag` events."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0
        self.is_idle = False

    def event(self) -> Any:
        clock = self

        class Event:
            def record(self) -> None:
                clock.now += 2.0
                self.at = clock.now

            def query(self) -> bool:
                return clock.is_idle

            def synchronize(self) -> None:
                clock.waits += 1
                clock.is_idle = True

            def elapsed_time(self, later: Any) -> float:
                return float(later.at - self.at)

        return Event()


def test_events_of_a_device_are_read_when_it_is_done_and_nobody_waits_within_a_step() -> None:
    clock = DeviceClock()
    trainer = quiet(max_epochs=1)
    trainer.timeline.every = 1
    trainer.timeline._make_event = clock.event
    waits: list[int] = []
    trainer.callbacks.append(LambdaCallback(on_train_batch_end=lambda *_: waits.append(clock.waits)))
    trainer.fit(net(), loader(20))
    timeline = trainer.timeline
    assert waits == [0] * 10
    assert clock.waits == 1
    assert timeline.num_measured == 9
    assert timeline.clock == "device"
    assert timeline.idle_fraction == 0
    # Each event lies 2 ms after the one before: two of them bracket a phase, another two what lies between.
    assert timeline.records[0].phases["forward"] == timeline.records[0].phases["backward"] == pytest.approx(0.002)


def test_ranks_that_measure_less_often_measure_some_of_the_same_steps() -> None:
    def measured(every: int, most: int = 3000) -> list[int]:
        windows, window = [], 0
        while (window := next_measured(window, every)) < most:
            windows.append(window)
            window += 1
        return windows

    each, tenth, hundredth = (measured(every) for every in (1, 10, 100))
    assert each == list(range(3000))
    assert [window // 10 for window in tenth] == list(range(300))
    assert [window // 100 for window in hundredth] == list(range(30))
    assert set(hundredth) < set(tenth)
    assert {window % 10 for window in tenth} == set(range(10)), "nothing periodic is always met, or always missed"
    assert [window // 7 for window in measured(7, 700)] == list(range(100))


def test_a_record_is_a_value() -> None:
    assert StepRecord(1, 0.5, {"forward": 0.25, "backward": 0.5}).duration_s == 0.75
