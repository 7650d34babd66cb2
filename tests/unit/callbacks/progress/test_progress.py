from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeLogger, FakeTrainer, interrupted_at
from toys import ValidatedNet, loader, net, quiet

from loopwright.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from loopwright.callbacks.progress import live
from loopwright.callbacks.progress.live import LiveProgressBar
from loopwright.console import LINES
from loopwright.errors import ConfigError, ModuleError

BARS = [TQDMProgressBar, RichProgressBar]


class Clock:
    """Stands still, but for `tick`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds


class Terminal(io.StringIO):
    """Stands for standard output, inside a `with` block."""

    def isatty(self) -> bool:
        return True

    def __enter__(self) -> Any:
        self.redirection = contextlib.redirect_stdout(self)
        return self.redirection.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.redirection.__exit__(*error)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    return Terminal()


# --- lines, where the output is no terminal ------------------------------------------------------------------------


@pytest.mark.parametrize("bar", BARS)
def test_lines_at_the_first_step_and_at_the_end_of_epochs(
    tmp_path: Path, bar: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    trainer = FakeTrainer(
        tmp_path, [bar()], windows=4, accumulate=2, max_epochs=2, train_metrics=lambda step: {"loss": 1 / step}
    )
    trainer.batch_hook = lambda step: clock.tick(0.25)
    trainer.fit()
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 0/1 | step 1/8 | 4 it/s | loss=1 | ETA 0:00:04",
        "Epoch 0/1 | step 4/8 | 4 it/s | loss=0.25 | ETA 0:00:02",
        "Epoch 1/1 | step 8/8 | 4 it/s | loss=0.125 | ETA 0:00:00",
    ]


def test_a_line_each_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    trainer = FakeTrainer(tmp_path, [TQDMProgressBar(plain_interval_s=10)], windows=30, val_batches=0)
    trainer.batch_hook = lambda step: clock.tick(1.0)
    trainer.fit()
    assert [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "step 1/30", "step 11/30", "step 21/30", "step 30/30",
    ]  # fmt: skip


def test_a_validation_inside_an_epoch_has_its_line_and_is_not_counted_in_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)

    def val_metrics(step: int) -> dict[str, float]:
        clock.tick(100.0)
        return {"val_loss": step / 2}

    trainer = FakeTrainer(tmp_path, [RichProgressBar()], windows=6, val_every=3, val_metrics=val_metrics)
    trainer.batch_hook = lambda step: clock.tick(1.0)
    trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1:4] for line in lines] == [
        ["step 1/6", "1 it/s", "ETA 0:00:05"],
        ["step 3/6", "1 it/s", "val_loss=1.5"],
        ["step 6/6", "1 it/s", "val_loss=3"],
    ]


def test_a_long_evaluation_has_lines_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    bar = TQDMProgressBar(plain_interval_s=10)
    trainer = FakeTrainer(tmp_path, [bar], val_batches=25)
    real = trainer.call
    monkeypatch.setattr(trainer, "call", lambda hook, *args: (clock.tick("batch_end" in hook), real(hook, *args)))
    trainer.validate(torch.nn.Linear(2, 1), fn="test")
    assert capsys.readouterr().out.splitlines() == ["Testing | batch 10/25", "Testing | batch 20/25"]


def test_unknown_lengths_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Endless(FakeTrainer):
        estimated_stepping_batches = math.inf  # type: ignore[assignment]

    trainer = Endless(tmp_path, [TQDMProgressBar()], val_batches=0)
    trainer.num_training_batches = math.inf
    trainer.fit()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("Epoch 0/0 | step 4 | ")
    assert "ETA" not in line


def test_other_ranks_and_disabled_bars_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = FakeTrainer(tmp_path, [TQDMProgressBar()])
    trainer.is_global_zero = False
    trainer.fit()
    FakeTrainer(tmp_path, [TQDMProgressBar(refresh_rate=0)]).fit()
    FakeTrainer(tmp_path, [RichProgressBar(refresh_rate=0)]).fit()
    bar = TQDMProgressBar()
    bar.disable()
    FakeTrainer(tmp_path, [bar]).fit()
    assert bar.is_disabled
    assert capsys.readouterr().out == ""


# --- bars that are not drawn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", BARS)
def test_a_subclass_finds_its_bars_where_nothing_is_drawn(
    tmp_path: Path, bar: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    class Mine(bar):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_start(trainer, pl_module)
            seen["train"] = self.train_progress_bar.total

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            seen.setdefault("done", []).append(_done(self.train_progress_bar))

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_validation_start(trainer, pl_module)
            seen["validation"] = self.val_progress_bar.total

        def on_test_batch_end(self, *args: Any) -> None:
            super().on_test_batch_end(*args)
            seen["test"] = _done(self.test_progress_bar)

        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            seen["metrics"] = super().get_metrics(trainer, pl_module)
            return seen["metrics"]

    made = Mine()
    trainer = FakeTrainer(tmp_path, [made], val_batches=3, val_metrics=lambda step: {"val": 1.0})
    trainer.fit()
    trainer.validate(torch.nn.Linear(2, 1), fn="test")
    assert seen == {"train": 4, "done": [1, 2, 3, 4], "validation": 3, "test": 3, "metrics": {"val": 1.0}}
    assert _done(made.train_progress_bar) == 4  # it stays readable
    assert all(line.startswith("Epoch 0/0 | step ") for line in capsys.readouterr().out.splitlines())


def _done(bar: Any) -> int:
    return int(bar.completed if hasattr(bar, "completed") else bar.n)


def test_bars_are_made_at_the_beginning_of_their_stage(tmp_path: Path) -> None:
    made: list[str] = []

    class Mine(TQDMProgressBar):
        def init_sanity_tqdm(self) -> Any:
            made.append("sanity")
            return super().init_sanity_tqdm()

        def init_train_tqdm(self) -> Any:
            made.append("train")
            return super().init_train_tqdm()

        def init_validation_tqdm(self) -> Any:
            made.append("validation")
            return super().init_validation_tqdm()

        def on_sanity_check_start(self, *args: Any) -> None:
            super().on_sanity_check_start(*args)
            self.train_progress_bar.set_description("hidden")

    FakeTrainer(tmp_path, [Mine()], sanity=True, max_epochs=2).fit()
    assert made == ["sanity", "train", "validation", "validation"]


def test_a_disabled_bar_can_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(TQDMProgressBar):
        def on_train_start(self, *args: Any) -> None:
            super().on_train_start(*args)
            self.train_progress_bar.set_description("mine")

    trainer = FakeTrainer(tmp_path, [bar := Mine()])
    trainer.is_global_zero = False
    trainer.fit()
    assert bar.train_progress_bar.disable
    assert capsys.readouterr() == ("", "")


def test_undrawn_bars_of_a_plain_class_are_rarely_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    updates: list[int] = []
    original = TQDMProgressBar._lw_show

    def show(self: Any, stage: str, description: str, done: int, *args: Any) -> None:
        updates.append(done)
        original(self, stage, description, done, *args)

    monkeypatch.setattr(TQDMProgressBar, "_lw_show", show)
    trainer = FakeTrainer(tmp_path, [bar := TQDMProgressBar()], windows=200, val_batches=0)

    def look(step: int) -> None:
        clock.tick(0.01)
        assert bar.train_progress_bar is not None  # read, so that it is kept up to date

    trainer.batch_hook = look
    trainer.fit()
    assert updates[0] <= 1
    assert updates[-1] == 200
    assert len(updates) <= 2.0 / 0.1 + 3


@pytest.mark.parametrize("bar", BARS)
def test_an_undrawn_bar_of_a_plain_class_that_nobody_reads_is_not_made(
    tmp_path: Path, bar: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(bar, "_lw_show", lambda self, stage, *args: shown.append(stage))
    FakeTrainer(tmp_path, [bar()], windows=3).fit()
    assert not shown


@pytest.mark.parametrize("bar", BARS)
def test_print_beside_an_undrawn_bar(tmp_path: Path, bar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = bar(plain_interval_s=1000)
    trainer = FakeTrainer(tmp_path, [made], val_batches=0)
    trainer.batch_hook = lambda step: made.print("hello", step, sep="-", end="!\n") if step == 2 else None
    trainer.fit()
    assert "hello-2!\n" in capsys.readouterr().out


# --- bars, on a terminal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", BARS)
def test_a_bar_shows_epoch_batches_and_metrics(tmp_path: Path, bar: Any, terminal: Terminal) -> None:
    trainer = FakeTrainer(
        tmp_path, [bar()], loggers=[FakeLogger(str(tmp_path), version=7)], max_epochs=2,
        train_metrics=lambda step: {"loss": step / 8},
    )  # fmt: skip
    with terminal:
        trainer.fit()
    text = terminal.getvalue()
    assert "Epoch 1/1" in text
    assert "4/4" in text
    assert "v_num" not in text
    assert "1.0" in text or "=1" in text


@pytest.mark.parametrize("bar", BARS)
def test_validation_test_and_prediction_are_shown(tmp_path: Path, bar: Any, terminal: Terminal) -> None:
    trainer = FakeTrainer(tmp_path, [bar()], val_batches=3)
    with terminal:
        trainer.fit()
        for verb in ("validate", "test", "predict"):
            trainer.validate(torch.nn.Linear(2, 1), fn=verb)
    for description in ("Validation", "Testing", "Predicting"):
        assert description in terminal.getvalue()


@pytest.mark.parametrize("bar", BARS)
def test_the_bar_of_training_is_current_during_a_validation(
    tmp_path: Path, bar: Any, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)  # without this drawing, the bar would stay at the epoch's first batch
    seen = []
    trainer = FakeTrainer(tmp_path, [made := bar()], windows=4, val_batches=3)
    drawn = type(made)._lw_show

    def show(self: Any, stage: str, description: str, done: int, *args: Any) -> None:
        seen.append((stage, done))
        drawn(self, stage, description, done, *args)

    monkeypatch.setattr(type(made), "_lw_show", show)
    with terminal:
        trainer.fit()
    stages = [stage for stage, _ in seen]
    assert seen[stages.index("validation") - 1] == ("train", 4)


def test_a_bar_that_comes_back_shows_nothing_of_what_it_was(tmp_path: Path, terminal: Terminal) -> None:
    with terminal:
        bar = RichProgressBar()
        bar.setup(FakeTrainer(tmp_path, [bar]), torch.nn.Linear(2, 1), "fit")  # type: ignore[arg-type]
        bar._lw_open.add("train")
        bar._lw_show("train", "Epoch 0/1", 1, 9, {})
        bar._lw_show("validation", "Validation", 7, 8, {})
        bar._lw_close("validation", keep=False)
        before = len(terminal.getvalue())
        bar._lw_show("validation", "Validation", 1, 8, {})
        bar._lw_show("train", "Epoch 1/1", 2, 9, {})
        assert bar.progress is not None
        train = bar.train_progress_bar
        assert train is not None
        assert train.fields["first"] == 2  # the pace is that of the batches since
        bar.teardown(bar.trainer, torch.nn.Linear(2, 1), "fit")
    assert "7/8" not in terminal.getvalue()[before:]


@pytest.mark.parametrize("bar", BARS)
def test_at_most_ten_drawings_a_second(tmp_path: Path, bar: Any, terminal: Terminal) -> None:
    drawn: list[int] = []

    class Counted(bar):  # type: ignore[misc]
        def _lw_show(self, stage: str, description: str, done: int, total: Any, metrics: Any) -> None:
            drawn.append(done)

    start_s = time.monotonic()
    with terminal:
        FakeTrainer(tmp_path, [Counted()], windows=2000, val_batches=0).fit()
    seconds = time.monotonic() - start_s
    assert drawn[0] == 1
    assert drawn[-1] == 2000
    assert len(drawn) <= seconds * 10 + 2


@pytest.mark.parametrize("bar", BARS)
def test_print_goes_above_the_bar(tmp_path: Path, bar: Any, terminal: Terminal) -> None:
    made = bar()
    trainer = FakeTrainer(tmp_path, [made], windows=3)
    trainer.batch_hook = lambda step: made.print("hello", step) if step == 2 else None
    with terminal:
        trainer.fit()
    assert "hello 2\n" in terminal.getvalue()


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bug")])
def test_an_interruption_leaves_the_terminal_clean(
    tmp_path: Path, bar: Any, error: BaseException, terminal: Terminal
) -> None:
    made = bar()
    trainer = FakeTrainer(tmp_path, [made])
    with terminal, interrupted_at(trainer, 2, error):
        trainer.fit()
    text = terminal.getvalue()
    assert not made._lw_open
    hidden, shown = text.rfind("\x1b[?25l"), text.rfind("\x1b[?25h")
    assert shown >= hidden
    assert text.rstrip("\x1b[?25h").endswith("\n")


@pytest.mark.parametrize("bar", BARS)
def test_nothing_is_drawn_before_the_first_step(tmp_path: Path, bar: Any, terminal: Terminal) -> None:
    trainer = FakeTrainer(tmp_path, [bar()], sanity=True)
    seen: list[str] = []
    trainer.batch_hook = lambda step: seen.append(terminal.getvalue())
    with terminal:
        trainer.fit()
    assert seen[0] == ""


def test_a_sanity_check_that_takes_time_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    clock = Clock(monkeypatch)
    trainer = FakeTrainer(tmp_path, [TQDMProgressBar()], sanity=True, val_batches=2)
    real = trainer.call
    monkeypatch.setattr(trainer, "call", lambda hook, *args: (clock.tick(0.4), real(hook, *args)))
    with terminal:
        trainer.fit()
    assert "Sanity Checking" in terminal.getvalue()


@pytest.mark.parametrize("bar", BARS)
def test_a_bar_that_fails_changes_nothing_and_says_so_once(
    tmp_path: Path, bar: Any, terminal: Terminal, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(bar):  # type: ignore[misc]
        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            raise ZeroDivisionError("user's mistake")

    def weights(callbacks: list[Any]) -> torch.Tensor:
        torch.manual_seed(0)
        trainer = FakeTrainer(tmp_path, callbacks, windows=8, val_every=2)
        with terminal:
            trainer.fit()
        weight: torch.Tensor = trainer.module.weight
        return weight.detach()

    broken = Broken()
    assert torch.equal(weights([broken]), weights([]))
    assert torch.equal(weights([bar()]), weights([]))
    assert broken.is_disabled
    assert caplog.text.count("is disabled") == 1


@pytest.mark.parametrize(
    ("name", "others"), [("TQDMProgressBar", "rich"), ("RichProgressBar", "tqdm"), ("Timer", "rich tqdm")]
)
def test_a_bar_imports_only_the_library_that_draws_it(name: str, others: str) -> None:
    code = f"""
import sys, torch
before = set(sys.modules)
import loopwright.callbacks
loopwright.callbacks.{name}
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
assert not {{*"{others} fsspec numpy".split()}} & new, new
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_resume_inside_an_epoch_begins_where_it_is(tmp_path: Path, terminal: Terminal) -> None:
    trainer = FakeTrainer(tmp_path, [TQDMProgressBar()], windows=8)
    trainer.window = 5
    with terminal:
        trainer.fit()
    assert "6/8" in terminal.getvalue()
    assert "1/8" not in terminal.getvalue()


# --- the base ------------------------------------------------------------------------------------------------------


def test_totals(tmp_path: Path) -> None:
    class Mine(ProgressBar):
        def disable(self) -> None:
            """Nothing to disable."""

    bar = Mine()
    with pytest.raises(ModuleError, match="before a run began"):
        bar.trainer  # noqa: B018
    trainer = FakeTrainer(tmp_path, [bar], val_batches=3)
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    assert bar.total_train_batches == 4
    assert (bar.total_val_batches, bar.total_val_batches_current_dataloader) == (3, 3)
    assert bar.has_dataloader_changed(0)
    assert not bar.has_dataloader_changed(0)
    assert bar.has_dataloader_changed(1)
    assert bar.total_test_batches_current_dataloader == math.inf
    bar.reset_dataloader_idx_tracker()
    assert bar.total_predict_batches_current_dataloader == 3
    with pytest.raises(NotImplementedError):
        bar.enable()


def test_a_limit_on_steps_reduces_the_total(tmp_path: Path) -> None:
    class Mine(ProgressBar):
        def disable(self) -> None:
            """Nothing to disable."""

    bar = Mine()
    trainer = FakeTrainer(tmp_path, [bar], windows=10, accumulate=2)
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    trainer.max_steps = 7
    trainer.global_step, trainer.progress.batches_in_epoch = 3, 6
    assert bar.total_train_batches == 14
    trainer.max_steps = 100
    assert bar.total_train_batches == 20


def test_metrics_are_those_of_the_bar(tmp_path: Path) -> None:
    bar = TQDMProgressBar()
    trainer = FakeTrainer(tmp_path, loggers=[FakeLogger(str(tmp_path), version="2024-run-abcd")])
    trainer.progress_bar_metrics = {"loss": 0.5}
    assert bar.get_metrics(trainer, None) == {"loss": 0.5}  # type: ignore[arg-type]


def test_lines_of_the_log_go_above_the_bar_while_it_is_drawn(tmp_path: Path, terminal: Terminal) -> None:
    seen: list[bool] = []
    bar = RichProgressBar()
    trainer = FakeTrainer(tmp_path, [bar], windows=3)

    def write(step: int) -> None:
        seen.append(LINES.above is not None)
        if LINES.above is not None:
            LINES.above("a line\n")

    trainer.batch_hook = write
    with terminal:
        trainer.fit()
    assert seen == [False, True, True]
    assert "a line\n" in terminal.getvalue()
    assert LINES.above is None


@pytest.mark.parametrize("bar", BARS)
def test_a_notebook_keeps_a_line_of_the_end(
    tmp_path: Path, bar: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "can_draw", lambda stream: True)
    monkeypatch.setattr(live, "is_notebook", lambda: True)
    FakeTrainer(tmp_path, [bar()], windows=3, train_metrics=lambda step: {"loss": step / 4}).fit()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Epoch 0/0 | step 3 | 0:00:00 | loss=0.75"


@pytest.mark.parametrize("bar", BARS)
def test_bars_can_be_copied_and_pickled(tmp_path: Path, bar: Any, terminal: Terminal) -> None:
    made = bar()
    with terminal:
        FakeTrainer(tmp_path, [made]).fit()
    pickle.loads(pickle.dumps(made))
    assert copy.deepcopy(made).is_enabled


@pytest.mark.parametrize(
    "make",
    [
        lambda: TQDMProgressBar(refresh_rate=-1),
        lambda: TQDMProgressBar(process_position=-1),
        lambda: RichProgressBar(refresh_rate=-1),
        lambda: RichProgressBar(plain_interval_s=0),
    ],
)
def test_wrong_arguments_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="ProgressBar"):
        make()


def test_a_batch_without_drawing_calls_the_clock_only(tmp_path: Path) -> None:
    bar = TQDMProgressBar()
    bar._lw_next_draw_s = math.inf
    calls: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(getattr(argument, "__name__", frame.f_code.co_name))

    hook = LiveProgressBar.on_train_batch_end
    sys.setprofile(trace)
    hook(bar, None, None, None, None, 3)  # type: ignore[arg-type]
    sys.setprofile(None)
    assert calls[:2] == ["on_train_batch_end", "monotonic"]
    assert len(calls) <= 3


def test_an_epoch_that_ends_before_the_next_drawing_has_a_speed(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_DRAW_INTERVAL_S", 3600.0)
    with terminal:
        bar = RichProgressBar()
        trainer = FakeTrainer(tmp_path, [bar], windows=4, max_epochs=2)
        trainer.batch_hook = lambda step: time.sleep(0.001)
        trainer.fit()
    last = [line for line in terminal.getvalue().splitlines() if "Epoch 1/1" in line][-1]
    assert "4/4" in last
    assert "it/s" in last


def test_rich_tasks_can_be_read_without_a_terminal() -> None:
    bar = RichProgressBar()
    trainer = quiet(callbacks=[bar], enable_progress_bar=True, max_epochs=1)
    trainer.fit(net(ValidatedNet), loader(6, 3), loader(6, 3))
    assert bar.progress is not None
    assert ("Epoch 0/0", 2) in [(task.description, task.completed) for task in bar.progress.tasks]


def test_a_method_set_on_a_bar_is_called_without_a_terminal(tmp_path: Path) -> None:
    bar, made = TQDMProgressBar(), []
    bar.init_train_tqdm = lambda: made.append(TQDMProgressBar.init_train_tqdm(bar)) or made[-1]  # type: ignore[method-assign]
    FakeTrainer(tmp_path, [bar], windows=2).fit()
    assert [one.n for one in made] == [2]


def test_tqdm_writes_what_is_printed_while_a_bar_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    monkeypatch.setattr("tqdm.tqdm.write", classmethod(lambda cls, text, **_: written.append(text)))
    bar = TQDMProgressBar()
    trainer = FakeTrainer(tmp_path, [bar], windows=1)
    trainer.batch_hook = lambda step: bar.print("a", "b")
    trainer.fit()
    bar.print("after")
    assert written == ["a b"]
    assert "after" in capsys.readouterr().out


def test_the_environment_enables_a_bar_that_refreshes_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_MINITERS", "3")
    assert [TQDMProgressBar(refresh_rate=rate).refresh_rate for rate in (0, 1, 5)] == [3, 3, 5]
