"""MLFlowLogger: a run in an MLflow tracking store, a folder or a server. MLflow is imported when it is first needed."""

from __future__ import annotations

import os
import re
import tempfile
import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from ..errors import ConfigError
from ..files import replace_file
from ..messages import warn
from ..protocols import AnyBatch
from .base import rank_zero_experiment
from .hyperparameters import Plain, to_yaml
from .pictures import read_pictures, write_pictures
from .service import ServiceLogger, require_package

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch import nn

    from .base import EachOption, Pictures

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_/. -]")
_LONGEST_NAME = 250
_MOST_PARAMS, _MOST_METRICS = 100, 1000  # limits of the service per request


class MLFlowLogger(ServiceLogger):
    """Record metrics, hyperparameters, images and texts in an MLflow run.

    The run begins with the first record, on rank zero, and is marked as finished or failed when fit, validate, test or
    predict ends. A resumed fit continues the checkpoint's run and sends no point that the store has; to branch off an
    old checkpoint, pass another `run_id` or another store.

    Args:
        experiment_name: Name of the experiment; created if necessary.
        run_name: Display name of the run; None lets MLflow choose it.
        tracking_uri: URI of the store; None is the variable MLFLOW_TRACKING_URI, else the directory `save_dir`.
        tags: Tags of the run.
        save_dir: Directory of the store without `tracking_uri`.
        log_model: Whether the kept checkpoints are uploaded when fit ends; "all" uploads each when it is saved.
        prefix: Text before each metric's name, joined by "-".
        artifact_location: Location of artifacts of a new experiment; None lets the store choose it.
        run_id: Id of an existing run to continue.
        synchronous: Argument of MLflow's log_batch; None waits for the store, on the writing thread.
        x_axis: Unit of the x axis: "step", "samples", "time" (seconds of training) or the name of a logged metric.

    Raises:
        ConfigError: An argument is invalid.
        MissingDependency: MLflow is not installed.
    """

    def __init__(
        self,
        experiment_name: str = "loopwright_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Plain] | None = None,
        save_dir: str | os.PathLike[str] = "./mlruns",
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
        *,
        x_axis: str = "step",
    ) -> None:
        if not experiment_name:
            raise ConfigError("experiment_name is empty.", fix="pass a name, or leave it out.")
        require_package("mlflow", package="mlflow-skinny", needed_for="MLFlowLogger", extra="mlflow")
        super().__init__(save_dir=save_dir, run_id=run_id, prefix=prefix, x_axis=x_axis, log_model=log_model)
        uri = tracking_uri if tracking_uri is not None else os.environ.get("MLFLOW_TRACKING_URI")
        self._lw_uri = uri or f"file:{os.path.abspath(self._save_dir)}"
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._lw_tags = {key: str(value) for key, value in (tags or {}).items()}
        self._artifact_location = artifact_location
        self._lw_synchronous = synchronous
        self._lw_client: MlflowClient | None = None
        self._experiment_id: str | None = None
        self._lw_is_running = False

    @property
    def name(self) -> str | None:
        """Id of the experiment; None above rank zero."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        """Id of the run; None above rank zero."""
        return self.run_id

    @property
    def experiment_id(self) -> str | None:
        """Id of the experiment; None above rank zero."""
        if not self.is_silent:
            self._lw_open()
        return self._experiment_id

    @property
    def run_id(self) -> str | None:
        """Id of the run, which begins now if it has not begun; None above rank zero. An ended run is not reopened."""
        if not self.is_silent and self._lw_id is None:
            self._lw_run()
        return self._lw_id

    @property
    def save_dir(self) -> str | None:
        """Directory of the store; None if it is not on this machine."""
        return self._lw_uri.removeprefix("file:").removeprefix("//") if self._lw_uri.startswith("file:") else None

    @property
    @rank_zero_experiment
    def experiment(self) -> MlflowClient:
        """The `mlflow.MlflowClient`; its methods take `run_id`."""
        self._lw_catch_up()
        return self._lw_store()

    def log_image(self, key: str, images: Pictures, step: int | None = None, **kwargs: EachOption) -> None:
        """Record images as artifacts `media/<key>/<step>-<number>.png`, and captions as `.txt` artifacts.

        Args:
            key: Name of the images.
            images: One image or a list, in a form that `Logger.log_image` lists.
            step: The x value; None is the last recorded step.
            kwargs: `caption` is a list with one text per image.

        Raises:
            ConfigError: An item is not an image, or the number of captions differs.
            MissingDependency: Pillow is not installed.
        """
        if self.is_silent:
            return
        step = self._lw_at(step)
        with tempfile.TemporaryDirectory() as folder:
            write_pictures(folder, step, read_pictures(key, images, kwargs))
            self.experiment.log_artifacts(self._lw_run(), folder, f"media/{_clean(key)}")

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Record text as the artifact `media/<key>/<step>.txt`.

        Args:
            key: Name.
            text: The text.
            step: The x value; None: the last recorded step.
        """
        if not self.is_silent:
            step = self._lw_at(step)
            self.experiment.log_text(self._lw_run(), text, f"media/{_clean(key)}/{step}.txt")

    def log_graph(self, model: nn.Module, input_array: AnyBatch = None) -> None:
        """Record the module's layers as the artifact `model.txt`, once per run.

        Args:
            model: The module.
            input_array: Not needed.
        """
        if not (self.is_silent or self._lw_is_resumed):
            self.experiment.log_text(self._lw_run(), f"{model}\n", "model.txt")

    def __getstate__(self) -> dict[str, object]:
        """Leave the client out: the process that unpickles creates its own and continues the run."""
        return {**super().__getstate__(), "_lw_client": None, "_lw_is_running": False}

    def _lw_store(self) -> MlflowClient:
        if self._lw_client is None:
            self._lw_client = _client(self._lw_uri)
        return self._lw_client

    def _lw_open(self) -> str:
        """Return the experiment's id, after creating the experiment if necessary."""
        with self._lw_lock:
            if self._experiment_id is None and self._lw_id is not None:
                self._experiment_id = str(self._lw_store().get_run(self._lw_id).info.experiment_id)
            if self._experiment_id is None:
                store = self._lw_store()
                found = store.get_experiment_by_name(self._experiment_name)
                if found is not None and found.lifecycle_stage == "active":
                    self._experiment_id = str(found.experiment_id)
                else:
                    self._experiment_id = str(
                        store.create_experiment(self._experiment_name, artifact_location=self._artifact_location)
                    )
            return self._experiment_id

    def _lw_run(self) -> str:
        """Return the run's id, after starting or continuing the run if necessary."""
        with self._lw_lock:
            if self._lw_id is None:
                run = self._lw_store().create_run(self._lw_open(), tags=self._lw_tags, run_name=self._run_name)
                self._lw_id = str(run.info.run_id)
            elif not self._lw_is_running:
                self._lw_open()
                self._lw_store().update_run(self._lw_id, status="RUNNING")
            self._lw_is_running = True
            self._lw_begin_session()
            return self._lw_id

    @property
    def _lw_sent_file(self) -> str | None:
        return None  # the store keeps the steps

    def _lw_sent_by_others(self) -> dict[str, int]:
        store, run_id = self._lw_store(), str(self._lw_id)
        names = store.get_run(run_id).data.metrics
        histories = {name: store.get_metric_history(run_id, name) for name in names}
        return {name: max(point.step for point in points) for name, points in histories.items() if points}

    def _lw_location_of_run(self) -> dict[str, Plain]:
        return {"tracking_uri": self._lw_uri, "experiment_name": self._experiment_name}

    def _lw_accepted(self, name: str) -> str:
        clean = _clean(name)
        if len(clean) <= _LONGEST_NAME:
            return clean
        return f"{clean[: _LONGEST_NAME - 9]}_{zlib.crc32(name.encode()):08x}"

    def _lw_send(self, points: Mapping[str, int | float], step: int, extra: Mapping[str, int]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        sent = [Metric(name, float(value), now_ms, step) for name, value in points.items()]
        client, run_id = self.experiment, self._lw_run()
        for first in range(0, len(sent), _MOST_METRICS):
            client.log_batch(run_id, metrics=sent[first : first + _MOST_METRICS], synchronous=self._lw_synchronous)

    def _lw_send_hyperparameters(self, flat: Mapping[str, bool | int | float | str]) -> None:
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        client, run_id = self.experiment, self._lw_run()
        known = client.get_run(run_id).data.params  # the store accepts a name once
        texts = {self._lw_known_as(name): str(value) for name, value in flat.items()}
        long = [name for name, text in texts.items() if len(text) > MAX_PARAM_VAL_LENGTH]
        if long:
            warn(
                f"MLFlowLogger: the values of {', '.join(long)} are longer than the {MAX_PARAM_VAL_LENGTH} characters "
                "that MLflow accepts: their beginnings are recorded, and the full values in the artifact hparams.yaml."
            )
            client.log_text(run_id, to_yaml(self.hparams), "hparams.yaml")
        values = {name: text[:MAX_PARAM_VAL_LENGTH] for name, text in texts.items()}
        sent = [Param(name, value) for name, value in values.items() if name not in known]
        for first in range(0, len(sent), _MOST_PARAMS):
            client.log_batch(run_id, params=sent[first : first + _MOST_PARAMS])

    def _lw_upload(self, path: str, facts: Mapping[str, Plain]) -> None:
        client, run_id = self.experiment, self._lw_run()
        stem = os.path.splitext(os.path.basename(path))[0]
        with tempfile.TemporaryDirectory() as folder:
            replace_file(os.path.join(folder, "metadata.yaml"), to_yaml(facts))
            aliases: list[Plain] = [name for name in ("best", "last") if facts[f"is_{name}"]]
            replace_file(os.path.join(folder, "aliases.txt"), f"{aliases}\n")
            client.log_artifacts(run_id, folder, f"checkpoints/{stem}")
        if os.path.isdir(path):
            client.log_artifacts(run_id, path, f"checkpoints/{stem}/{os.path.basename(path)}")
        else:
            client.log_artifact(run_id, path, f"checkpoints/{stem}")

    def _lw_end(self, *, is_success: bool) -> None:
        if self._lw_is_running:
            self._lw_store().set_terminated(str(self._lw_id), "FINISHED" if is_success else "FAILED")
            self._lw_is_running = False


def _clean(name: str) -> str:
    """Return a name that the store accepts."""
    return _FORBIDDEN.sub("_", name)


def _client(uri: str) -> MlflowClient:
    """Return a client; MLflow from 3.6 on opens a folder only where the environment allows it."""
    from mlflow import MlflowClient

    name = "MLFLOW_ALLOW_FILE_STORE"
    before = os.environ.get(name)
    if uri.startswith("file:") and before is None:
        os.environ[name] = "true"
    try:
        return MlflowClient(tracking_uri=uri)
    finally:
        if before is None:
            os.environ.pop(name, None)
