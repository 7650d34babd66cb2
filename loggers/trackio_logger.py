"""TrackioLogger: a run in a local database, or on a Space or server. trackio is imported with the first record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..messages import warn
from ..protocols import Options
from .hyperparameters import Plain
from .pictures import read_pictures
from .service import ServiceLogger, require_package

if TYPE_CHECKING:
    import trackio

    from .base import EachOption, Pictures


class TrackioLogger(ServiceLogger):
    """Record metrics in a Trackio run: by default in a database on this machine, which `trackio show` draws.

    The run begins with the first metric, on rank zero, and ends with fit, validate, test or predict; a later record
    reopens it. A resumed fit continues the checkpoint's run and sends no point twice; to branch off an old checkpoint,
    pass another `name`. Hyperparameters are recorded when the run begins; later ones are not, with a warning.

    Trackio's own measurements of the machine are off, unless you pass `auto_log_gpu=True` or `auto_log_cpu=True`.

    Args:
        project: Name of the project; None is "loopwright_logs".
        name: Name of the run, which identifies it in the project; None chooses one.
        save_dir: Directory of checkpoints and of the record of sent steps. TRACKIO_DIR is Trackio's database.
        prefix: Text before each metric's name, joined by "-".
        x_axis: Unit of the x axis: "step", "samples", "time" (seconds of training) or the name of a logged metric.
        kwargs: Further arguments of `trackio.init`: group, space_id, server_url, ...

    Raises:
        ConfigError: An argument is invalid.
        MissingDependency: trackio is not installed.
    """

    id_bytes = 4

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        *,
        prefix: str = "",
        x_axis: str = "step",
        **kwargs: Any,
    ) -> None:
        require_package("trackio", package="trackio", needed_for="TrackioLogger", extra="trackio")
        super().__init__(save_dir=save_dir, run_id=name, prefix=prefix, x_axis=x_axis)
        self._project = project or "loopwright_logs"
        self._lw_options: Options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False, **kwargs}

    def __getstate__(self) -> dict[str, object]:
        """Leave the run out: the process that unpickles reopens it by its name."""
        name = self.version
        return {**super().__getstate__(), "_lw_id": name, "_experiment": None}

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._project

    @property
    def experiment(self) -> trackio.Run:
        """The `trackio.Run`; the first call begins it."""
        return self._lw_opened(self._lw_begin)

    def log_image(self, key: str, images: Pictures, step: int | None = None, **kwargs: EachOption) -> None:
        """Record images; several are `key/0`, `key/1`, ...

        Args:
            key: Name of the images.
            images: One image or a list, in a form that `Logger.log_image` lists.
            step: The x value; None is the last recorded step.
            kwargs: `caption`, a list with one text per image.

        Raises:
            ConfigError: An item is not an image, or a list has another length.
        """
        if self.is_silent:
            return
        import trackio

        pictures = [trackio.Image(pixels, **options) for pixels, options in read_pictures(key, images, kwargs)]
        several = len(pictures) > 1  # Trackio takes one per name
        named = {f"{key}/{place}" if several else key: picture for place, picture in enumerate(pictures)}
        self.experiment.log(named, step=self._lw_at(step))

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Record text, in Markdown.

        Args:
            key: Name of the text.
            text: The text.
            step: The x value; None is the last recorded step.
        """
        if self.is_silent:
            return
        import trackio

        self.experiment.log({key: trackio.Markdown(text)}, step=self._lw_at(step))

    def _lw_begin(self) -> trackio.Run:
        import trackio

        config = {key: value for key, value in self.hparams.items() if not key.startswith("_")}  # those are Trackio's
        return trackio.init(self._project, name=self.version, resume="allow", config=config, **self._lw_options)

    @property
    def _lw_sent_file(self) -> str | None:
        return None if self._lw_id is None else os.path.join(self._save_dir, "trackio", f"{self._lw_id}.sent.json")

    def _lw_location_of_run(self) -> dict[str, Plain]:
        return {"project": self._project}

    def _lw_send(self, points: Mapping[str, int | float], step: int, extra: Mapping[str, int]) -> None:
        self.experiment.log({**points, **extra}, step=step)

    def _lw_send_hyperparameters(self, flat: Mapping[str, bool | int | float | str]) -> None:
        if self._experiment is not None:
            warn(f"TrackioLogger: the run has begun, and its hyperparameters stay as they are: {', '.join(flat)}")

    def _lw_upload(self, path: str, facts: Mapping[str, Plain]) -> None:
        """Never called: there is no `log_model`."""

    def _lw_end(self, *, is_success: bool) -> None:
        if self._experiment is not None:
            self._experiment.finish()
            self._experiment = None
