"""Ends of processes: what is logged outside a Trainer arrives, a killed run that is started again repeats no step, and
two processes do not log into one folder."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from loopwright.loggers.folder import FolderLogger

KINDS: list[type[FolderLogger]] = [CSVLogger, JSONLinesLogger, TensorBoardLogger]

# A program of its own for how it ends: nothing in it refers to the loggers when it does.
PROGRAM = """
import multiprocessing, os, signal, sys

def log(folder, kinds, steps, way):
    from loopwright import loggers
    made = []
    for kind in kinds.split(","):
        options = {"save_dir": folder, "version": 0, "name": kind}
        if kind == "MLFlowLogger":
            options = {"save_dir": folder + "/ml"}
        if kind == "WandbLogger":
            options = {"save_dir": folder, "offline": True}
        if kind == "CometLogger":
            options = {"offline_directory": folder, "online": False, "log_code": False, "display_summary_level": 0}
        made.append(getattr(loggers, kind)(**options))
        for step in range(int(steps)):
            made[-1].log_metrics({"loss": 1.0 + step}, step)
    if way == "wait":
        print("logged", flush=True)
        sys.stdin.read()
    if way == "kill":
        for logger in made:
            logger.save()
        os.kill(os.getpid(), signal.SIGKILL)

def run(folder, kinds, steps, way):
    log(folder, kinds, steps, way)
    if way == "raise":
        raise ValueError("this ends the program")
    if way == "exit":
        sys.exit(3)

if __name__ == "__main__":
    *arguments, start = sys.argv[1:]
    if start == "spawn":
        child = multiprocessing.get_context("spawn").Process(target=run, args=arguments)
        child.start()
        child.join()
    else:
        run(*arguments)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ, "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_X_DISABLE_STATS": "true",
        "COMET_ERROR_TRACKING_ENABLE": "false",
    }  # fmt: skip

    def begin(*arguments: str, wait: bool = True) -> Any:
        command = [sys.executable, "-W", "ignore", str(program), str(tmp_path), *arguments]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
        if wait:
            child.communicate(timeout=120)
        return child

    return begin


def steps_of(kind: type[FolderLogger], folder: Path) -> list[int]:
    if kind is CSVLogger:
        with open(folder / "metrics.csv", newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file)]
    if kind is JSONLinesLogger:
        return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    from .test_tensorboard import raw_points

    return [step for tag, step, _ in raw_points(str(folder)) if tag == "loss"]


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("raise", "here"),
        ("exit", "spawn"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("return", "here"), ("exit", "here"), ("raise", "spawn"))
        ),
    ],
)
def test_every_row_arrives_when_the_process_ends(
    start: Callable[..., Any], tmp_path: Path, way: str, kind: str
) -> None:
    start(",".join(one.__name__ for one in KINDS), "50", way, kind)
    for one in KINDS:
        assert steps_of(one, tmp_path / one.__name__ / "version_0") == list(range(50))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["here", "spawn"])
def test_services_learn_of_the_end_and_get_every_row(start: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    pytest.importorskip("comet_ml")
    from loopwright.loggers.mlflow_logger import _client

    from . import test_comet_logger, test_wandb_logger

    start("MLFlowLogger,WandbLogger,CometLogger", "50", "raise", kind)
    store = _client(f"file:{tmp_path}/ml")
    experiment = store.get_experiment_by_name("loopwright_logs")
    assert experiment is not None
    (run,) = store.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert len(store.get_metric_history(run.info.run_id, "loss")) == 50
    assert len(test_wandb_logger.points(tmp_path)) == 50
    exits = [one.exit for one in test_wandb_logger.records(tmp_path) if one.WhichOneof("record_type") == "exit"]
    assert [one.exit_code for one in exits] == [1]
    assert [step for step, _ in test_comet_logger.points(tmp_path, "loss")] == list(range(50))


def test_a_killed_run_that_is_started_again_repeats_no_step(start: Callable[..., Any], tmp_path: Path) -> None:
    killed = start(",".join(kind.__name__ for kind in KINDS), "6", "kill", "here")
    assert killed.returncode == -signal.SIGKILL
    for kind in KINDS:
        folder = tmp_path / kind.__name__ / "version_0"
        before = steps_of(kind, folder)
        again = kind(tmp_path, name=kind.__name__, version=0)
        with pytest.warns(UserWarning, match="from another run; it is kept as"):
            again.log_metrics({"loss": 0.5}, 0)
        for step in range(1, 10):
            again.log_metrics({"loss": 0.5}, step)
        again.finalize("success")
        again.log_metrics({"loss": 0.5}, 10)  # its own files stay
        again.finalize("success")
        assert steps_of(kind, folder) == list(range(11))
        if kind is TensorBoardLogger:  # TensorBoard shows it as another run
            assert steps_of(kind, folder / "earlier.1") == before == list(range(6))


def test_two_processes_do_not_log_into_one_folder(start: Callable[..., Any], tmp_path: Path) -> None:
    other = start(",".join(kind.__name__ for kind in KINDS), "1", "wait", "here", wait=False)
    try:
        assert other.stdout.readline() == b"logged\n"
        for kind in KINDS:
            logger = kind(tmp_path, name=kind.__name__, version=0)
            with pytest.raises(ConfigError, match="another process is logging to"):
                logger.check_target()
            with pytest.raises(ConfigError, match="another process is logging to"):
                logger.log_metrics({"loss": 1.0}, 0)
            free = kind(tmp_path, name=kind.__name__)
            free.log_metrics({"loss": 1.0}, 0)
            assert free.version == 1
            free.finalize("success")
    finally:
        other.kill()
        other.communicate()
    for kind in KINDS:
        kind(tmp_path, name=kind.__name__, version=0).check_target()


def test_a_run_is_not_resumed_under_the_process_that_writes_it(start: Callable[..., Any], tmp_path: Path) -> None:
    before = JSONLinesLogger(tmp_path, name="JSONLinesLogger", version=0)
    before.log_metrics({"loss": 1.0}, 0)
    state = pickle.loads(pickle.dumps(before.state_dict()))
    before.finalize("success")
    (tmp_path / "JSONLinesLogger/version_0/metrics.jsonl").rename(tmp_path / "kept")
    other = start("JSONLinesLogger", "3", "wait", "here", wait=False)
    try:
        assert other.stdout.readline() == b"logged\n"
        resumed = JSONLinesLogger(tmp_path, name="JSONLinesLogger")
        with pytest.warns(UserWarning, match="to which another process is logging"):
            resumed.load_state_dict(state)
        resumed.log_metrics({"loss": 1.0}, 1)
        assert resumed.version == 1
    finally:
        other.kill()
        other.communicate()
    assert steps_of(JSONLinesLogger, tmp_path / "JSONLinesLogger/version_0") == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_was_started_with_a_logger_continues_its_folder(
    kind: type[FolderLogger], tmp_path: Path
) -> None:
    logger = kind(tmp_path, version=0)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    data = pickle.dumps(logger)
    program = (
        "import pickle, sys; logger = pickle.loads(sys.stdin.buffer.read()); logger.check_target(); "
        "logger.log_metrics({'loss': 2.0}, 1); logger.finalize('success')"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], input=data, check=True, timeout=60)
    assert steps_of(kind, tmp_path / "loopwright_logs/version_0") == [0, 1]
