"""Gauges are read as Prometheus reads them: by HTTP, from the logger's address."""

from __future__ import annotations

import math
import os
import pickle
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from toys import Net, loader, net, quiet

import loopwright as lw
from loopwright.errors import ConfigError, MissingDependency
from loopwright.loggers import PrometheusLogger

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")


class Logged(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def read(logger: PrometheusLogger) -> dict[str, float]:
    assert logger.url is not None
    with urllib.request.urlopen(logger.url, timeout=10) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.fixture
def logger() -> Iterator[PrometheusLogger]:
    logger = PrometheusLogger(port=0)
    yield logger
    logger.finalize("success")


def test_the_latest_value_of_each_metric_is_served(logger: PrometheusLogger) -> None:
    assert logger.url is None
    logger.log_metrics({"loss": torch.tensor(0.5), "val": {"loss": 2}}, 3)
    logger.log_row({"loss": 0.25, "epoch": 1}, 4, {"samples": 64})
    logger.log_metrics({"bad": math.nan, "worse": -math.inf})
    found = read(logger)
    assert math.isnan(found.pop("loopwright_bad"))
    assert found == {
        "loopwright_loss": 0.25, 'loopwright_val_loss{name="val/loss"}': 2.0, "loopwright_epoch": 1.0,
        "loopwright_samples": 64.0, "loopwright_step": 5.0, "loopwright_worse": -math.inf,
    }  # fmt: skip


def test_names_that_become_equal_are_told_apart_by_their_label(logger: PrometheusLogger) -> None:
    logger.log_metrics({"a/b": 1, "a b": 2, "a_b": 3, "ü": 4}, 1)
    found = read(logger)
    assert found['loopwright_a_b{name="a/b"}'] == 1.0
    assert found['loopwright_a_b{name="a b"}'] == 2.0
    assert found["loopwright_a_b"] == 3.0
    assert found['loopwright__{name="ü"}'] == 4.0


def test_names_without_a_prefix_begin_with_no_digit() -> None:
    logger = PrometheusLogger(port=0, prefix="")
    logger.log_metrics({"2nd": 1.0}, 1)
    assert read(logger) == {"_2nd": 1.0, "step": 1.0}
    logger.finalize("success")


def test_names_that_prometheus_cannot_have_at_all_do_not_end_the_endpoint() -> None:
    logger = PrometheusLogger(port=0, prefix="")
    logger.log_metrics({"": 1.0, "\ud800": 2.0}, 3)
    assert read(logger) == {"_": 1.0, '_{name="?"}': 2.0, "step": 3.0}
    logger.finalize("success")


def test_own_metrics_are_served_too(logger: PrometheusLogger) -> None:
    from prometheus_client import Gauge

    Gauge("queue", "Length of the queue.", registry=logger.experiment).set(3)
    assert read(logger) == {"queue": 3.0}


def test_what_is_not_a_number_changes_nothing(logger: PrometheusLogger) -> None:
    logger.log_metrics({"loss": 1.0}, 1)
    with pytest.raises(ConfigError, match="'text' is 'x'"):
        logger.log_metrics({"loss": 2.0, "text": "x"}, 2)
    assert read(logger) == {"loopwright_loss": 1.0, "loopwright_step": 1.0}


def test_only_this_machine_is_answered_by_default(logger: PrometheusLogger) -> None:
    logger.log_metrics({"loss": 1.0}, 1)
    assert logger.url is not None
    assert logger.url.startswith("http://127.0.0.1:")
    port = int(logger.url.removesuffix("/metrics").rpartition(":")[2])
    # Every address 127.x.y.z is this machine, so that this one stands for another interface.
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_the_end_closes_the_port_and_a_later_record_opens_it(logger: PrometheusLogger) -> None:
    logger.log_metrics({"loss": 1.0}, 1)
    url = logger.url
    assert url is not None
    logger.finalize("success")
    assert logger.url is None
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)
    logger.log_metrics({"test_loss": 2.0}, 1)
    assert read(logger) == {"loopwright_loss": 1.0, "loopwright_step": 1.0, "loopwright_test_loss": 2.0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_worker_that_was_forked_does_not_hold_the_port(logger: PrometheusLogger) -> None:
    logger.log_metrics({"loss": 1.0}, 1)
    assert logger.url is not None
    port = int(logger.url.removesuffix("/metrics").rpartition(":")[2])
    here, there = os.pipe()
    child = os.fork()
    if not child:
        os.close(there)
        os.read(here, 1)
        os._exit(0)
    logger.finalize("success")
    again = PrometheusLogger(port=port)
    again.log_metrics({"loss": 2.0}, 1)
    assert read(again)["loopwright_loss"] == 2.0
    again.finalize("success")
    os.close(there)
    os.close(here)
    os.waitpid(child, 0)


def test_a_logger_goes_to_another_process_without_its_endpoint(logger: PrometheusLogger) -> None:
    logger.log_metrics({"loss": 1.0}, 1)
    other = pickle.loads(pickle.dumps(logger))
    assert other.url is None
    other.log_metrics({"loss": 2.0}, 2)
    assert (read(logger)["loopwright_loss"], read(other)["loopwright_loss"]) == (1.0, 2.0)
    other.finalize("success")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"port": -1}, "port=-1"), ({"port": "80"}, "port='80'"), ({"address": ""}, "address=''"),
     ({"prefix": "a-b"}, "prefix='a-b'"), ({"prefix": "1a"}, "prefix='1a'")],
)  # fmt: skip
def test_invalid_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PrometheusLogger(**arguments)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.loggers.service.find_spec", lambda module: None)
    with pytest.raises(MissingDependency, match=r"loopwright\[prometheus\]"):
        PrometheusLogger()


class Reading(lw.Callback):
    def __init__(self, logger: PrometheusLogger) -> None:
        self.logger = logger
        self.found: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: lw.Trainer, module: lw.Module) -> None:
        self.found.append(read(self.logger))


def fit(logger: PrometheusLogger, root: Path, **arguments: Any) -> lw.Trainer:
    trainer = quiet(max_epochs=2, log_every_n_steps=1, logger=logger, default_root_dir=root, **arguments)
    trainer.fit(net(Logged), loader(8, 2))
    return trainer


def test_a_run_serves_step_epoch_samples_and_metrics(logger: PrometheusLogger, tmp_path: Path) -> None:
    reading = Reading(logger)
    trainer = fit(logger, tmp_path, callbacks=[reading])
    first, second = reading.found
    assert (first["loopwright_step"], first["loopwright_epoch"], first["loopwright_samples"]) == (3.0, 0.0, 8.0)
    assert (second["loopwright_step"], second["loopwright_epoch"], second["loopwright_samples"]) == (7.0, 1.0, 16.0)
    assert second["loopwright_train_loss"] == pytest.approx(float(trainer.logged_metrics["train_loss"]))
    assert logger.url is None


def test_checkpoints_of_a_run_without_a_version_are_saved_and_found(logger: PrometheusLogger, tmp_path: Path) -> None:
    options = {"logger": logger, "default_root_dir": tmp_path, "enable_checkpointing": True}
    first = quiet(max_epochs=1, **options)
    first.fit(net(Logged), loader(8))
    assert Path(first.checkpoint_callback.best_model_path).parent == tmp_path / "checkpoints"
    second = quiet(max_epochs=2, **options)
    second.fit(net(Logged), loader(8), ckpt_path="last")
    assert second.global_step == 2 * first.global_step
    assert second.checkpoint_callback.dirpath == str(tmp_path / "checkpoints")


def test_a_port_in_use_is_an_error_before_training(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on port {port} of '127.0.0.1'(.|\n)*port=0"):
            fit(PrometheusLogger(port=port), tmp_path)


def _serve(rank: int, size: int, folder: Path) -> None:
    logger = PrometheusLogger(port=0)
    reading = Reading(logger) if rank == 0 else None
    fit(logger, folder, devices=2, strategy="ddp", callbacks=[reading] if reading else [])
    assert (logger._lw_server, logger.url) == (None, None)
    if reading is not None:
        assert reading.found[1]["loopwright_samples"] == 16.0


def test_rank_zero_alone_listens(tmp_path: Path) -> None:
    run_ranks(_serve, 2, tmp_path)
