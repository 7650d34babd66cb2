"""Callbacks and loggers on several ranks: everyone decides alike, rank 0 alone touches files, nobody waits in vain.

Each test is a function that runs in forked processes, with a small trainer whose ranks see different metrics, clocks
and folders: whatever a callback would decide by itself would part the ranks.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import FakeTrainer
from ranks import run_ranks
from torch import nn

from loopwright.callbacks import EMA, EarlyStopping, ModelCheckpoint, ModelSummary, Timer
from loopwright.callbacks.model_checkpoint import files as checkpoint_files
from loopwright.callbacks.rank_zero import SharedDeadline, decided_on_rank_zero
from loopwright.errors import ConfigError, ModuleError, RankFailure
from loopwright.loggers import CSVLogger
from loopwright.strategies.traits import Traits
from loopwright.trainer.metrics.log_output import LogOutput


class GlooStrategy:
    """The collectives that callbacks use, over the group that `run_ranks` has made; counts them."""

    traits = Traits()
    checkpoint_io = None

    def __init__(self, rank: int, size: int) -> None:
        self.global_rank, self.world_size = rank, size
        self.is_global_zero = rank == 0
        self.broadcasts = 0

    def broadcast(self, value: Any, src: int = 0) -> Any:
        self.broadcasts += 1
        box = [value]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes: list[Any] = [None] * self.world_size
        dist.all_gather_object(votes, decision)
        return min(votes) if all else max(votes)


class RankTrainer(FakeTrainer):
    """The fake trainer on one of several ranks; rank 0 writes, and all know how that went."""

    def __init__(self, rank: int, size: int, root: Path, callbacks: Any, **kwargs: Any) -> None:
        super().__init__(root, callbacks, **kwargs)
        self.strategy = GlooStrategy(rank, size)  # type: ignore[assignment]
        self.is_global_zero = rank == 0
        self.rank = rank
        self.ranks_answer = True
        self.saves: list[str] = []

    def synchronize_metrics(self, *names: str) -> None:
        """Let each of these metrics be the mean over the ranks that have it."""
        if not self.ranks_answer:
            return
        known: list[Any] = [None] * self.strategy.world_size
        mine = {name: float(self.callback_metrics[name]) for name in names if name in self.callback_metrics}
        dist.all_gather_object(known, (mine, self.global_step))
        for name in names:
            values = [theirs[name] for theirs, _ in known if name in theirs]
            if values:
                self.put({name: sum(values) / len(values)})

    def save_checkpoint(self, filepath: str, weights_only: bool = False, storage_options: Any = None) -> None:
        self.saves.append(os.path.basename(filepath))
        if self.ranks_answer:
            write = super().save_checkpoint
            decided_on_rank_zero(self.strategy, lambda: write(filepath, weights_only))  # type: ignore[arg-type]
        elif self.is_global_zero:
            super().save_checkpoint(filepath, weights_only)


def metric_of(rank: int) -> Callable[[int], dict[str, float]]:
    """Return what a rank logs: rank 0 gets better, the others get worse. The mean over three ranks is -step."""
    return lambda step: {"x": float(-5 * step if rank == 0 else step)}


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def keep_best(rank: int, size: int, root: Path) -> Any:
    checkpoint = ModelCheckpoint(
        monitor="x", save_top_k=2, save_last=True, filename="{step}-{x}", every_n_train_steps=2
    )
    trainer = RankTrainer(rank, size, root / str(rank), [checkpoint], windows=8, train_metrics=metric_of(rank))
    trainer.fit()
    return checkpoint.state_dict(), trainer.saves


def test_all_ranks_keep_the_same_checkpoints_in_rank_zeros_folder(tmp_path: Path) -> None:
    results = run_ranks(keep_best, 3, tmp_path)
    assert str(results[0]) == str(results[1]) == str(results[2])
    state, saves = results[0]
    assert saves[:2] == ["step=2-x=-2.ckpt", "last.ckpt"]
    assert os.path.basename(state["best_model_path"]) == "step=8-x=-8.ckpt"
    folder = tmp_path / "0" / "checkpoints"
    assert files_in(folder) == ["last.ckpt", "step=6-x=-6.ckpt", "step=8-x=-8.ckpt"]
    assert not (tmp_path / "1").exists()


def bad_folder(rank: int, size: int, root: Path) -> str:
    (root / "file").touch()
    checkpoint = ModelCheckpoint(root / "file" / "inside" if rank == 0 else root / "fine")
    with pytest.raises(ConfigError) as caught:
        RankTrainer(rank, size, root, [checkpoint]).fit()
    return str(caught.value)


def test_a_folder_that_rank_zero_cannot_write_to_is_an_error_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(bad_folder, 2, tmp_path)
    assert results[0] == results[1]
    assert "is a file, not a folder" in results[0]


def missing_on_one(rank: int, size: int, root: Path, lacking: int | None) -> Any:
    log = (lambda step: {}) if lacking in (rank, None) else metric_of(rank)
    checkpoint = ModelCheckpoint(monitor="x", every_n_epochs=1)
    trainer = RankTrainer(rank, size, root, [checkpoint], val_metrics=log)
    try:
        trainer.fit()
    except ModuleError as error:
        return str(error)
    return trainer.saves


def test_a_metric_that_one_rank_logged_is_enough_and_one_that_all_lack_is_an_error_on_all(tmp_path: Path) -> None:
    for lacking in (0, 1):
        results = run_ranks(missing_on_one, 2, tmp_path / str(lacking), lacking)
        assert results == [["epoch=0-step=4.ckpt"]] * 2
    results = run_ranks(missing_on_one, 2, tmp_path / "both", None)
    assert all("no metric named 'x'" in result for result in results)


def without_links(rank: int, size: int, root: Path) -> list[str]:
    def refuse(target: str, path: str) -> None:
        raise OSError("no links here")

    if rank == 0:
        checkpoint_files.link = refuse
    trainer = RankTrainer(rank, size, root, [ModelCheckpoint(save_last="link")], max_epochs=2)
    trainer.fit()
    return trainer.saves


def test_where_rank_zero_cannot_link_all_ranks_write_a_file(tmp_path: Path) -> None:
    saves = ["epoch=0-step=4.ckpt", "last.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    assert run_ranks(without_links, 2, tmp_path) == [saves, saves]


def failing_disk(rank: int, size: int, root: Path) -> str:
    trainer = RankTrainer(rank, size, root, [ModelCheckpoint(every_n_train_steps=1)])
    if rank == 0:
        trainer.save_failure = OSError(28, "No space left on device")
    try:
        trainer.fit()
    except (OSError, RankFailure) as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return "no error"


def test_a_full_disk_of_rank_zero_is_known_to_all(tmp_path: Path) -> None:
    results = run_ranks(failing_disk, 2, tmp_path)
    assert results[0].startswith("OSError: [Errno 28] No space left")
    assert results[1].startswith("RankFailure: rank 0")
    assert "No space left on device" in results[1]


def fails_alone(rank: int, size: int, root: Path) -> Any:
    checkpoint = ModelCheckpoint(root, save_on_exception=True)
    trainer = RankTrainer(rank, size, root, [checkpoint])

    def fail(step: int) -> None:
        if step == 2:
            trainer.ranks_answer = False  # what the Trainer says after an error of one rank
            trainer.strategy.broadcasts = 0  # type: ignore[attr-defined]
            raise ValueError("one rank has a problem")

    trainer.batch_hook = fail
    with contextlib.suppress(ValueError):
        trainer.fit()
    return trainer.saves, trainer.strategy.broadcasts  # type: ignore[attr-defined]


def test_after_an_error_rank_zero_saves_without_asking_the_others(tmp_path: Path) -> None:
    assert run_ranks(fails_alone, 2, tmp_path) == [(["epoch=0-step=2.ckpt"], 0), ([], 0)]
    assert files_in(tmp_path) == ["epoch=0-step=2.ckpt"]


def find_last(rank: int, size: int, root: Path) -> list[str]:
    if rank == 0:
        RankTrainer(0, 1, root / "0", []).ranks_answer = False
        (root / "0" / "checkpoints").mkdir(parents=True)
        (root / "0" / "checkpoints" / "epoch=0-step=1.ckpt").touch()
    return ModelCheckpoint().find_last(RankTrainer(rank, size, root / str(rank), []))


def test_the_last_checkpoint_is_the_one_that_rank_zero_finds(tmp_path: Path) -> None:
    expected = [str(tmp_path / "0" / "checkpoints" / "epoch=0-step=1.ckpt")]
    assert run_ranks(find_last, 2, tmp_path) == [expected, expected]


# --- clocks ----------------------------------------------------------------------------------------------------------


def step_in(trainer: FakeTrainer, seconds: float) -> None:
    """Let time be counted in steps: each takes so many seconds by this rank's clock."""
    time.monotonic = lambda: 1000.0 + seconds * trainer.global_step  # in a forked process: nobody else sees it


def stop_in_time(rank: int, size: int, root: Path, interval: str) -> Any:
    timer = Timer(timedelta(seconds=10), interval=interval, verbose=False)
    trainer = RankTrainer(rank, size, root, [timer], max_epochs=10, windows=20, val_batches=0)
    step_in(trainer, [1.0, 100.0][rank])
    trainer.fit()
    return trainer.global_step, trainer.strategy.broadcasts  # type: ignore[attr-defined]


def test_a_timer_stops_all_ranks_at_the_step_of_rank_zeros_clock(tmp_path: Path) -> None:
    (step, asked), other = run_ranks(stop_in_time, 2, tmp_path, "step")
    assert (step, asked) == other
    assert step == 10
    assert asked <= 9
    results = run_ranks(stop_in_time, 2, tmp_path, "epoch")
    assert results[0] == results[1]
    assert results[0][0] == 20


def save_in_time(rank: int, size: int, root: Path) -> list[str]:
    checkpoint = ModelCheckpoint(root, train_time_interval=timedelta(seconds=16), save_top_k=-1)
    trainer = RankTrainer(rank, size, root, [checkpoint], windows=40, val_batches=0)
    step_in(trainer, [1.0, 0.01][rank])
    trainer.fit()
    return trainer.saves


def test_a_time_interval_saves_at_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    saves = ["epoch=0-step=16.ckpt", "epoch=0-step=32.ckpt"]
    assert run_ranks(save_in_time, 2, tmp_path) == [saves, saves]


def test_a_deadline_asks_seldom_and_is_noticed_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    alone = GlooStrategy(0, 1)
    monkeypatch.setattr(GlooStrategy, "broadcast", _count)
    deadline = SharedDeadline(lambda: 3600 - now)
    for step in range(1, 1_000_000):
        now += 0.02
        if deadline.has_come(alone, step):  # type: ignore[arg-type]
            break
    assert now == pytest.approx(3600, abs=0.03)
    assert alone.broadcasts < 30


def _count(self: GlooStrategy, value: Any, src: int = 0) -> Any:
    self.broadcasts += 1
    return value


# --- early stopping, average, summary --------------------------------------------------------------------------------


def stop_early(rank: int, size: int, root: Path) -> Any:
    stopping = EarlyStopping("x", patience=2)
    # Alone, rank 1 would stop after three epochs, and rank 0 not at all; their mean is the same in each.
    metrics = {0: lambda step: {"x": -float(step)}, 1: lambda step: {"x": float(step)}}[rank]
    trainer = RankTrainer(rank, size, root, [stopping], max_epochs=10, val_metrics=metrics)
    trainer.fit()
    return stopping.state_dict(), trainer.current_epoch


def test_early_stopping_judges_the_ranks_common_value_everywhere(tmp_path: Path) -> None:
    results = run_ranks(stop_early, 2, tmp_path)
    assert str(results[0]) == str(results[1])
    assert results[0][1] == 3


def average_buffers(rank: int, size: int, root: Path) -> Any:
    torch.manual_seed(0)
    module = nn.BatchNorm1d(2)
    ema = EMA(decay=0.5)
    trainer = RankTrainer(rank, size, root, [ema])
    trainer.module = module
    ema.on_fit_start(trainer, module)
    ema._lw_update(module)
    module.running_mean.fill_(float(rank + 1))  # type: ignore[union-attr]
    ema._lw_update(module)
    ema.on_validation_start(trainer, module)
    seen = module.running_mean.tolist()  # type: ignore[union-attr]
    ema.on_validation_end(trainer, module)
    return seen, ema.state_dict()["shadow"]["running_mean"].tolist(), module.running_mean.tolist()  # type: ignore[union-attr]


def test_an_average_of_buffers_is_rank_zeros_in_evaluation_and_checkpoints(tmp_path: Path) -> None:
    first, second = run_ranks(average_buffers, 2, tmp_path)
    assert first[:2] == second[:2] == ([0.5, 0.5], [0.5, 0.5])
    assert second[2] == [2.0, 2.0]  # its own statistics are put back


def summarise(rank: int, size: int, root: Path, is_broken: bool) -> str:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.example_input_array = torch.zeros(1, 3 if is_broken else 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)

    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            ModelSummary().on_fit_start(RankTrainer(rank, size, root, []), Shown())  # type: ignore[arg-type]
        except (RuntimeError, RankFailure) as error:
            return type(error).__name__
    return out.getvalue()


def test_a_summary_is_shown_on_rank_zero_and_its_error_is_known_to_all(tmp_path: Path) -> None:
    first, second = run_ranks(summarise, 2, tmp_path, False)
    assert "layer" in first
    assert second == ""
    assert run_ranks(summarise, 2, tmp_path, True) == ["RuntimeError", "RankFailure"]


# --- loggers ---------------------------------------------------------------------------------------------------------


def begin_without_a_folder(rank: int, size: int, root: Path) -> str:
    output = LogOutput(CSVLogger(root / "file" / "logs"), root=str(root), is_trial=False)
    output.set_rank(rank)
    with pytest.raises(ConfigError, match="logs cannot be written") as caught:
        output.agree(GlooStrategy(rank, size), checks=True)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    first, second = run_ranks(begin_without_a_folder, 2, tmp_path)
    assert first == second


def log_rows(rank: int, size: int, root: Path, claims_first: int) -> Any:
    logger = CSVLogger(root, name="runs")
    output = LogOutput(logger, root=str(root), is_trial=False)
    if rank == claims_first:
        logger.version  # noqa: B018  # on another rank than 0 this is a guess
    strategy: Any = GlooStrategy(rank, size)
    dist.barrier()
    output.set_rank(rank)
    output.agree(strategy)
    output.write({"x": float(rank)}, step=3)
    logger.experiment.log_metrics({"own": 1.0 + rank, "step": 4})
    output.finalize("success")
    return logger.version, logger.log_dir, output.latest, output.versions()


@pytest.mark.parametrize("claims_first", [0, 1, -1])
def test_all_ranks_have_rank_zeros_folder_and_it_alone_writes(tmp_path: Path, claims_first: int) -> None:
    (tmp_path / "runs" / "version_4").mkdir(parents=True)
    results = run_ranks(log_rows, 3, tmp_path, claims_first)
    assert [result[0] for result in results] == [5, 5, 5]
    assert {result[1] for result in results} == {str(tmp_path / "runs" / "version_5")}
    assert results[1][3] == [5]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["version_4", "version_5"]
    with open(tmp_path / "runs" / "version_5" / "metrics.csv") as file:
        assert [(row["step"], row["x"], row["own"]) for row in csv.DictReader(file)] == [
            ("3", "0.0", ""),
            ("4", "", "1.0"),
        ]


def resume_rows(rank: int, size: int, root: Path, state: dict[str, Any]) -> Any:
    logger = CSVLogger(root, name="runs")
    output = LogOutput(logger, root=str(root), is_trial=False)
    output.set_rank(rank)
    logger.load_state_dict(state)
    output.agree(GlooStrategy(rank, size))  # type: ignore[arg-type]
    output.write({"x": 9.0}, step=9)
    output.finalize("success")  # rows are written behind the training
    return logger.version


def test_a_resumed_run_goes_on_in_its_folder_on_all_ranks(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, name="runs")
    first.log_metrics({"x": 1.0}, step=1)
    state = first.state_dict()
    first.finalize("success")  # its process has ended
    assert run_ranks(resume_rows, 2, tmp_path, state) == [0, 0]
    assert (tmp_path / "runs" / "version_0" / "metrics.csv").read_text() == "step,x\n1,1.0\n9,9.0\n"


def broken_folder(rank: int, size: int, root: Path) -> Any:
    (root / "file").touch()
    output = LogOutput(CSVLogger(root / "file", name="runs"), root=str(root), is_trial=False)
    output.set_rank(rank)
    warned = contextlib.nullcontext() if rank else pytest.warns(UserWarning, match="CSVLogger (failed|did not accept)")
    with warned:
        output.agree(GlooStrategy(rank, size))  # type: ignore[arg-type]
        output.write({"x": 1.0}, step=1)
        versions = output.versions()
        output.finalize("success")
    return versions


def test_a_logger_without_a_folder_is_said_and_nobody_waits(tmp_path: Path) -> None:
    assert run_ranks(broken_folder, 2, tmp_path) == [[None], [None]]
