"""CometLogger: an experiment at Comet, online or offline. The library is imported when something is first recorded."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, nearest
from ..protocols import AnyBatch, Options
from .hyperparameters import Plain
from .pictures import read_pictures, to_png
from .service import ServiceLogger, require_package

if TYPE_CHECKING:
    from comet_ml import CometExperiment
    from torch import nn

    from .base import EachOption, Pictures

_OPTIONS = (
    "disabled", "log_code", "log_graph", "parse_args", "display_summary_level", "log_git_metadata", "log_git_patch",
    "log_env_details", "log_env_gpu", "log_env_host", "log_env_cpu", "log_env_network", "log_env_disk",
    "auto_output_logging", "auto_param_logging", "auto_metric_logging", "auto_log_co2", "auto_metric_step_rate",
    "auto_histogram_epoch_rate", "auto_histogram_gradient_logging", "auto_histogram_activation_logging",
    "auto_histogram_tensorboard_logging", "auto_histogram_weight_logging", "offline_directory",
    "distributed_node_identifier", "name", "tags",
)  # fmt: skip


class CometLogger(ServiceLogger):
    """Record metrics, hyperparameters, images and texts in a Comet experiment.

    The experiment begins with the first record, on rank zero, and ends with fit, validate, test or predict; a later
    record reopens it. A resumed fit continues the checkpoint's experiment and sends no point twice; to branch off an
    old checkpoint, pass another `experiment_key`.

    Args:
        api_key: API key; None is the key in comet_ml's configuration.
        workspace: Name of the workspace; None is the default one.
        project: Name of the project; None is the project in comet_ml's configuration.
        experiment_key: Key of the experiment, 32 to 50 letters and digits; None creates a new experiment.
        mode: How the experiment is opened: "get_or_create" (the default), "get" or "create".
        online: Whether points are sent; otherwise local files are written, for `comet upload`. An experiment that was
            reopened has several archives with one key. None is True.
        prefix: Text before each metric's name, joined by "-".
        log_model: Whether the kept checkpoints are uploaded when fit ends; "all" uploads each when it is saved.
        x_axis: Unit of the x axis: "step", "samples", "time" (seconds of training) or the name of a logged metric.
        kwargs: Arguments of `comet_ml.ExperimentConfig`: offline_directory, name, tags, log_code, ...

    Raises:
        ConfigError: An argument is invalid.
        MissingDependency: comet_ml is not installed.
    """

    id_bytes = 16

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: str | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        log_model: bool | Literal["all"] = False,
        x_axis: str = "step",
        **kwargs: Any,
    ) -> None:
        wrong = [f"an unknown argument {name!r}{nearest(name, _OPTIONS)}" for name in kwargs if name not in _OPTIONS]
        if mode not in (None, "get_or_create", "get", "create"):
            wrong.append(f"mode={mode!r}; expected 'get_or_create', 'get' or 'create'")
        if experiment_key is not None and not (32 <= len(experiment_key) <= 50 and experiment_key.isalnum()):
            wrong.append(f"experiment_key={experiment_key!r}; expected 32 to 50 letters and digits")
        if wrong:
            raise ConfigError(
                f"CometLogger got {'; '.join(wrong)}.",
                fix="pass arguments of CometLogger or of comet_ml.ExperimentConfig.",
            )
        require_package("comet_ml", package="comet-ml", needed_for="CometLogger", extra="comet")
        super().__init__(
            save_dir=kwargs.get("offline_directory") or os.environ.get("COMET_OFFLINE_DIRECTORY") or "comet_logs",
            run_id=experiment_key,
            prefix=prefix,
            x_axis=x_axis,
            log_model=log_model,
        )
        self._lw_project = project
        self._lw_start: Options = {
            "api_key": api_key, "workspace": workspace, "project_name": project, "online": online, "mode": mode,
        }  # fmt: skip
        self._lw_options = {**kwargs, "offline_directory": self._save_dir}
        self._lw_was_begun = False

    @property
    def name(self) -> str | None:
        """Name of the project; None if comet_ml's configuration defines it."""
        return self._lw_project

    @property
    def experiment(self) -> CometExperiment:
        """The `comet_ml` experiment; the first call begins it."""
        return self._lw_opened(self._lw_begin)

    def log_image(self, key: str, images: Pictures, step: int | None = None, **kwargs: EachOption) -> None:
        """Record images: one as `key`, several as `key/0`, `key/1`, ...

        Args:
            key: Name of the images.
            images: One image or a list, in a form that `Logger.log_image` lists.
            step: The x value; None is the last recorded step.
            kwargs: Arguments of comet_ml's log_image, each a list with one entry per image; `caption` becomes metadata.

        Raises:
            ConfigError: An item is not an image, or a list has another length.
        """
        if self.is_silent:
            return
        pictures = read_pictures(key, images, kwargs)
        for number, (pixels, options) in enumerate(pictures):
            caption = options.pop("caption", None)
            if caption is not None:
                options["metadata"] = {**(options.get("metadata") or {}), "caption": caption}
            name = f"{key}/{number}" if len(pictures) > 1 else key
            # As a file: comet_ml first interprets an array as a path, and warns.
            self.experiment.log_image(io.BytesIO(to_png(pixels)), name=name, step=self._lw_at(step), **options)

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Record text, with its name as metadata.

        Args:
            key: Name.
            text: The text.
            step: The x value; None: the last recorded step.
        """
        if not self.is_silent:
            self.experiment.log_text(text, step=self._lw_at(step), metadata={"name": key})

    def log_graph(self, model: nn.Module, input_array: AnyBatch = None) -> None:
        """Record the module's layers.

        Args:
            model: The module.
            input_array: Not needed.
        """
        if not (self.is_silent or self._lw_is_resumed):
            self.experiment.set_model_graph(f"{model}")

    def __getstate__(self) -> dict[str, object]:
        """Leave the experiment out: the process that unpickles reopens it by its key."""
        run_id = self.version
        return {**super().__getstate__(), "_lw_id": run_id, "_experiment": None}

    def _lw_begin(self) -> CometExperiment:
        import comet_ml

        os.makedirs(self._save_dir, exist_ok=True)
        start = {key: value for key, value in self._lw_start.items() if value is not None}
        if self._lw_was_begun or self._lw_is_resumed:
            start["mode"] = "get"
        experiment = comet_ml.start(
            experiment_key=self.version, experiment_config=comet_ml.ExperimentConfig(**self._lw_options), **start
        )
        self._lw_was_begun = True
        return experiment

    def _lw_location_of_run(self) -> dict[str, Plain]:
        return {"workspace": self._lw_start["workspace"], "project": self._lw_project}

    def _lw_send(self, points: Mapping[str, int | float], step: int, extra: Mapping[str, int]) -> None:
        epoch = points.get("epoch")
        others = {name: value for name, value in points.items() if name != "epoch"}
        if others:
            self.experiment.log_metrics(others, step=step, epoch=None if epoch is None else int(epoch))

    def _lw_send_hyperparameters(self, flat: Mapping[str, bool | int | float | str]) -> None:
        self.experiment.log_parameters(dict(flat), nested_support=False)

    def _lw_upload(self, path: str, facts: Mapping[str, Plain]) -> None:
        name = os.path.splitext(os.path.basename(path))[0]
        self.experiment.log_model(
            name, path, overwrite=True, metadata={k: v for k, v in facts.items() if v is not None}
        )

    def _lw_end(self, *, is_success: bool) -> None:
        if self._experiment is not None:
            if not is_success:
                self._experiment.log_other("loopwright_status", "failed")
            self._experiment.end()
            self._experiment = None
