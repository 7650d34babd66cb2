from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from loopwright.errors import ConfigError
from loopwright.loggers import DummyLogger, Logger, rank_zero_experiment
from loopwright.loggers.base import current_rank, scalars


class ListLogger(Logger):
    def __init__(self) -> None:
        self.saves = 0

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> list[int]:
        return [1]

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def save(self) -> None:
        self.saves += 1


def test_a_subclass_needs_four_members_and_has_defaults_for_the_rest() -> None:
    logger = ListLogger()
    logger.log_graph(torch.nn.Linear(1, 1))
    logger.after_save_checkpoint(object())
    logger.load_state_dict(logger.state_dict())
    assert (logger.save_dir, logger.root_dir, logger.log_dir, logger.group_separator) == (None, None, None, "/")
    assert logger.state_dict() == {}


def test_finalize_saves_by_default() -> None:
    logger = ListLogger()
    logger.finalize("success")
    assert logger.saves == 1


def test_experiment_is_a_dummy_above_rank_zero_asked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = ListLogger()
    assert logger.experiment == [1]
    monkeypatch.setenv("RANK", "1")
    assert logger.experiment.add_scalar("a", 1) is None
    assert logger.experiment[0].anything() is None


def test_what_the_trainer_says_of_the_rank_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")  # one of several independent runs that one srun has started
    logger = ListLogger()
    assert logger.is_silent
    logger.set_rank(0)
    assert not logger.is_silent
    assert logger.experiment == [1]


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3", "LOCAL_RANK": "1"}, 3),
        ({"LOCAL_RANK": "2"}, 2),
        ({"SLURM_PROCID": "4"}, 4),
        ({"RANK": ""}, 0),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, 1),  # the first process of the second machine is not rank 0
        ({"LOCAL_RANK": "0", "GROUP_RANK": "2", "SLURM_PROCID": "0"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1"}, 1),
        ({"JSM_NAMESPACE_RANK": "5"}, 5),
        ({"NODE_RANK": "1"}, 0),
    ],
)
def test_rank_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], rank: int
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert current_rank() == rank


def test_values_become_host_numbers() -> None:
    metrics = {"a": torch.tensor([2.5]), "b": np.float32(0.5), "c": True, "d": 3, "e": {"x": 1.0, "y": {"z": 2}}}
    assert scalars(metrics) == {"a": 2.5, "b": 0.5, "c": 1, "d": 3, "e/x": 1.0, "e/y/z": 2}
    assert math.isnan(scalars({"loss": torch.tensor(float("nan"))})["loss"])


def test_prefix_is_joined_once() -> None:
    assert scalars({"a": 1, "b": {"c": 2}}, prefix="run") == {"run-a": 1, "run-b/c": 2}


@pytest.mark.parametrize("value", ["text", None, torch.ones(2), np.ones((2, 2)), object(), 1j, [1.0]])
def test_what_is_no_number_is_an_error_that_names_the_key(value: object) -> None:
    with pytest.raises(ConfigError, match="'val/loss'"):
        scalars({"val/loss": value})


def test_dummy_logger_takes_every_call() -> None:
    logger = DummyLogger()
    logger.log_metrics({"a": 1.0}, 3)
    logger.log_hyperparams({"lr": 1})
    logger.experiment.add_image("x", 1)
    logger.watch("model")
    logger.finalize("success")
    assert (logger.name, logger.version, logger.log_dir, logger.state_dict()) == ("", "", None, {})
    assert isinstance(pickle.loads(pickle.dumps(logger)), DummyLogger)
    assert isinstance(copy.deepcopy(logger), DummyLogger)


def test_making_loggers_and_logging_hyperparameters_imports_no_tensorboard_and_no_yaml() -> None:
    code = """
import sys, torch
before = set(sys.modules)
from loopwright.loggers import CSVLogger, TensorBoardLogger
import loopwright.profilers
for logger in (CSVLogger("logs"), TensorBoardLogger("logs")):
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 3}})
    logger.save()
    logger.state_dict()
new = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = new & {"tensorboard", "yaml", "omegaconf", "fsspec", "rich", "tqdm", "google", "tensorflow"}
assert not heavy, heavy
assert "torch.utils.tensorboard" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_two_metrics_that_get_one_name_are_an_error() -> None:
    with pytest.raises(ConfigError, match="'a/b' has two values in one row"):
        scalars({"a/b": 1.0, "a": {"b": 2.0}})
