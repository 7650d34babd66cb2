"""WandbLogger: a run at Weights & Biases, online or offline. The library is imported with the first record."""

from __future__ import annotations

import glob
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..errors import ConfigError
from ..protocols import AnyBatch, Options
from .hyperparameters import Plain
from .pictures import options_of_each, read_pictures
from .service import ServiceLogger, require_package

if TYPE_CHECKING:
    import wandb
    from torch import nn

    from .base import EachOption, Pictures

R = TypeVar("R")
_log = logging.getLogger(__name__)


class WandbLogger(ServiceLogger):
    """Record metrics in a Weights & Biases run, with `trainer/global_step` or `x_axis` as x axis.

    The run begins with the first record, on rank zero, and ends with fit, validate, test or predict; a later record
    reopens it. A run that the program started (`wandb.init`, as in sweeps) is used and not ended. A resumed fit
    continues the checkpoint's run and sends no point twice; to branch off an old checkpoint, pass another `id`.

    Args:
        name: Display name of the run; None lets the service choose it.
        save_dir: Directory of local files.
        version: Alias of `id`.
        offline: Whether only local files are written, for `wandb sync`. A run that was reopened has several folders
            with one id, for `wandb sync --append`.
        dir: Alias of `save_dir`.
        id: Id of the run; None creates a new run.
        anonymous: Argument of `wandb.init`, in versions of wandb that have it.
        project: Name of the project; None is the environment variable WANDB_PROJECT, else "loopwright_logs".
        log_model: Whether the kept checkpoints are uploaded when fit ends; "all" uploads each when it is saved.
        experiment: An active run, which is not ended.
        prefix: Text before each metric's name, joined by "-".
        checkpoint_name: Name of the checkpoints' artifact; None is "model-<id>".
        add_file_policy: Whether wandb copies a checkpoint before the upload: "mutable" or "immutable".
        x_axis: Unit of the x axis: "step", "samples", "time" (seconds of training) or the name of a logged metric.
        kwargs: Further arguments of `wandb.init`: entity, group, tags, notes, settings, ...

    Raises:
        ConfigError: An argument is invalid.
        MissingDependency: wandb is not installed.
    """

    id_bytes = 4
    default_project = "loopwright_logs"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | str | None = None,
        project: str | None = None,
        log_model: bool | Literal["all"] = False,
        experiment: wandb.Run | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        *,
        x_axis: str = "step",
        **kwargs: Any,
    ) -> None:
        if version is not None and id is not None and version != id:
            raise ConfigError(f"version={version!r} and id={id!r} mean the same.", fix="pass one of the two.")
        if add_file_policy not in ("mutable", "immutable"):
            raise ConfigError(
                f"add_file_policy={add_file_policy!r}; expected 'mutable' or 'immutable'.", fix="pass one of the two."
            )
        require_package("wandb", package="wandb", needed_for="WandbLogger", extra="wandb")
        given = id if id is not None else version
        if given is None and experiment is not None:
            given = experiment.id
        super().__init__(
            save_dir=save_dir if dir is None else dir, run_id=given, prefix=prefix, x_axis=x_axis, log_model=log_model
        )
        self._project = project or os.environ.get("WANDB_PROJECT", self.default_project)
        self._checkpoint_name = checkpoint_name
        self._lw_add_file_policy = add_file_policy
        self._lw_options: Options = {"name": name, "project": self._project, "reinit": "create_new", **kwargs}
        if offline:
            self._lw_options["mode"] = "offline"
        if anonymous is not None:
            self._lw_options["anonymous"] = "allow" if anonymous is True else anonymous or None
        self._experiment = experiment
        self._lw_is_own = experiment is None

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._project

    @property
    def experiment(self) -> wandb.Run:
        """The `wandb.Run`; the first call begins it."""
        return self._lw_opened(self._lw_begin)

    def log_image(self, key: str, images: Pictures, step: int | None = None, **kwargs: EachOption) -> None:
        """Record images under one name.

        Args:
            key: Name of the images.
            images: One image or a list, in a form that `Logger.log_image` lists.
            step: The x value; None is the last recorded step.
            kwargs: Arguments of `wandb.Image`, each a list with one entry per image: caption, masks, boxes, ...

        Raises:
            ConfigError: An item is not an image, or a list has another length.
        """
        if self.is_silent:
            return
        import wandb

        pictures = [wandb.Image(pixels, **options) for pixels, options in read_pictures(key, images, kwargs)]
        self._lw_log_media({key: pictures}, step)

    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: EachOption) -> None:
        """Record audio clips under one name.

        Args:
            key: Name of the clips.
            audios: Paths, or arrays of samples.
            step: The x value; None is the last recorded step.
            kwargs: Arguments of `wandb.Audio`, each a list with one entry per clip: sample_rate, caption, ...

        Raises:
            ConfigError: The argument is not a list, or a list has another length.
        """
        if not self.is_silent:
            import wandb

            self._lw_log_media({key: _made(wandb.Audio, "log_audio", key, audios, kwargs)}, step)

    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: EachOption) -> None:
        """Record videos under one name.

        Args:
            key: Name of the videos.
            videos: Paths or arrays.
            step: The x value; None is the last recorded step.
            kwargs: Arguments of `wandb.Video`, each a list with one entry per video: caption, fps, format, ...

        Raises:
            ConfigError: The argument is not a list, or a list has another length.
        """
        if not self.is_silent:
            import wandb

            self._lw_log_media({key: _made(wandb.Video, "log_video", key, videos, kwargs)}, step)

    def log_table(
        self,
        key: str,
        columns: list[Any] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Record a table: `columns` with rows of `data`, or a pandas DataFrame.

        Args:
            key: Name of the table.
            columns: Names of the columns.
            data: Rows of the table.
            dataframe: A `pandas.DataFrame`, instead of `columns` and `data`.
            step: The x value; None is the last recorded step.
        """
        if not self.is_silent:
            import wandb

            self._lw_log_media({key: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step)

    def log_text(
        self,
        key: str,
        text: str | list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        *,
        columns: list[str] | None = None,
    ) -> None:
        """Record text as a table: one cell, or the columns and rows of `log_table`.

        Args:
            key: Name of the table.
            text: The text; with `data`, the names of its columns.
            data: Rows of the table.
            dataframe: A `pandas.DataFrame`, instead of `columns` and `data`.
            step: The x value; None is the last recorded step.
            columns: Names of the columns.
        """
        if isinstance(text, str):
            self.log_table(key, ["text"], [[text]], step=step)
        else:
            self.log_table(key, columns if text is None else text, data, dataframe, step)

    def log_graph(self, model: nn.Module, input_array: AnyBatch = None) -> None:
        """Do nothing: wandb reads a model's layers from `watch(model, log_graph=True)`."""
        return

    def watch(
        self,
        model: nn.Module,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Let wandb record histograms of gradients or parameters, which it reads from the device.

        Args:
            model: The module.
            log: "gradients", "parameters", "all" or None.
            log_freq: Number of batches between histograms.
            log_graph: Whether the layers are recorded.
        """
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def unwatch(self, model: nn.Module) -> None:
        """Undo `watch`."""
        self.experiment.unwatch(model)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> wandb.Artifact:
        """Record that the run uses an artifact, and return the artifact.

        Args:
            artifact: Name of the artifact, "project/name:alias".
            artifact_type: Expected type; None does not check it.
        """
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool = True,
    ) -> str:
        """Download an artifact and return its directory.

        Args:
            artifact: Name of the artifact, "entity/project/name:alias".
            save_dir: Target directory; None lets wandb choose it.
            artifact_type: Expected type; None does not check it.
            use_artifact: Whether an active run records that it uses the artifact.
        """
        import wandb

        if wandb.run is not None and use_artifact:
            use = wandb.run.use_artifact
            found = use(artifact) if artifact_type is None else use(artifact, type=artifact_type)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return str(found.download(root=None if save_dir is None else os.fspath(save_dir)))

    def __getstate__(self) -> dict[str, object]:
        """Leave the run out: the process that unpickles reopens it by its id."""
        run_id = self.version
        return {**super().__getstate__(), "_lw_id": run_id, "_experiment": None, "_lw_is_own": True}

    def _lw_begin(self) -> wandb.Run:
        import wandb

        if wandb.run is not None and self._lw_requested_id in (None, wandb.run.id):
            _log.info("WandbLogger uses the run %s, which the program has begun, and does not end it", wandb.run.id)
            self._lw_is_own = False
            if self._lw_id not in (None, wandb.run.id):
                self._lw_sent, self._lw_sent_before = {}, {}
            run, self._lw_id = wandb.run, wandb.run.id
        else:
            os.makedirs(self._save_dir, exist_ok=True)
            self._lw_is_own = True
            _wait_for_a_new_folder(os.path.join(self._save_dir, "wandb"), str(self.version))
            run = wandb.init(dir=self._save_dir, id=self.version, resume="allow", **self._lw_options)
        # With sync_tensorboard another writer owns wandb's own step, and rules for axes do not hold.
        if not getattr(run.settings, "sync_tensorboard", False):
            run.define_metric(self._lw_x_name)
            run.define_metric("*", step_metric=self._lw_x_name, step_sync=True)
        return run

    @property
    def _lw_x_name(self) -> str:
        if self.x_axis in ("step", "samples", "time"):
            return {"step": "trainer/global_step", "samples": "trainer/samples", "time": "trainer/seconds"}[self.x_axis]
        return f"{self._prefix}{self.LOGGER_JOIN_CHAR}{self.x_axis}" if self._prefix else self.x_axis

    @property
    def _lw_sent_file(self) -> str | None:
        return None if self._lw_id is None else os.path.join(self._save_dir, "wandb", f"{self._lw_id}.sent.json")

    def _lw_location_of_run(self) -> dict[str, Plain]:
        return {"project": self._project}

    def _lw_send(self, points: Mapping[str, int | float], step: int, extra: Mapping[str, int]) -> None:
        self.experiment.log({**points, **extra, self._lw_x_name: step})

    def _lw_log_media(self, media: Options, step: int | None) -> None:
        self.experiment.log({**media, self._lw_x_name: self._lw_at(step)})

    def _lw_send_hyperparameters(self, flat: Mapping[str, bool | int | float | str]) -> None:
        config: Any = self.experiment.config  # Any: wandb does not annotate it
        config.update(self.hparams, allow_val_change=True)

    def _lw_upload(self, path: str, facts: Mapping[str, Plain]) -> None:
        import wandb

        name = self._checkpoint_name or f"model-{self.version}"
        artifact = wandb.Artifact(name=name, type="model", metadata=dict(facts))
        if os.path.isdir(path):
            artifact.add_dir(path, name="model.ckpt")
        else:
            artifact.add_file(path, name="model.ckpt", policy=self._lw_add_file_policy)  # type: ignore[arg-type]
        aliases = ["latest"] if facts["is_last"] else []
        self.experiment.log_artifact(artifact, aliases=[*aliases, *(["best"] if facts["is_best"] else [])])

    def _lw_end(self, *, is_success: bool) -> None:
        if self._experiment is not None and self._lw_is_own:
            self._experiment.finish(exit_code=0 if is_success else 1)
            self._experiment = None


def _wait_for_a_new_folder(folder: str, run_id: str) -> None:
    """Wait until wandb's next folder, named after the second and the id, is a new one."""
    while glob.glob(os.path.join(glob.escape(folder), f"*run-{time.strftime('%Y%m%d_%H%M%S')}-{run_id}")):
        time.sleep(1.0 - time.time() % 1.0)


def _made(
    kind: Callable[..., R], method: str, key: str, items: list[Any], options: Mapping[str, EachOption]
) -> list[R]:
    """Return one media object per item, each with its own entry of every option."""
    if not isinstance(items, list):
        raise ConfigError(f"{method}({key!r}, ...) got {type(items).__name__}; expected a list.", fix="pass a list.")
    own = options_of_each(f"{method}({key!r}, ...)", len(items), "item", options)
    return [kind(item, **of_one) for item, of_one in zip(items, own, strict=True)]
