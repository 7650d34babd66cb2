"""TensorBoardLogger: metrics as TensorBoard event files. TensorBoard is imported at the first metric."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, MissingDependency, nearest
from ..fabric.undisturbed import undisturbed
from ..protocols import AnyBatch, Tree
from ..remote import absolute_place
from ..strategies.distributed.shards import is_sharded
from .base import Metrics, scalars
from .folder import DEFAULT_NAME, FolderLogger, keep_old_files
from .hyperparameters import flatten, plain_hyperparameters
from .pictures import read_pictures

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

    from ..protocols import StateDict
    from .base import EachOption, Params, Pictures

_log = logging.getLogger(__name__)

_MOST_SENT_AGAIN = 1 << 22  # bytes
_WRITER_OPTIONS = ("comment", "purge_step", "max_queue", "flush_secs", "filename_suffix")


class TensorBoardLogger(FolderLogger):
    """Write event files to `save_dir/name/version_N[/sub_dir]`, and hyperparameters to `hparams.yaml` in the version.

    Neither the constructor nor `log_hyperparams` imports TensorBoard: hyperparameters wait for the first metric.

    Args:
        save_dir: Directory of all runs, or URL that fsspec understands.
        name: Name of the experiment; None or "": no directory for it.
        version: Number N for `version_N`, or a text that is used as it is; None: the next free number.
        log_graph: Whether the method `log_graph` writes the model's graph.
        default_hp_metric: Whether hyperparameters without a metric get `hp_metric = -1`, so that TensorBoard's HPARAMS
            page shows the run; log another value for `hp_metric` to replace it.
        prefix: Text before each metric's name, joined by "-".
        sub_dir: Directory inside the version's directory.
        root_dir: Alias of `save_dir`.
        x_axis: Unit of the x axis: "step", "samples", "time" (seconds of training) or the name of a logged metric.
        kwargs: Arguments of `torch.utils.tensorboard.SummaryWriter`: comment, purge_step, max_queue, flush_secs,
            filename_suffix.

    Raises:
        ConfigError: An argument is invalid, or is not an argument of SummaryWriter.
        MissingDependency: TensorBoard is not installed.
    """

    writes_behind = True

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        *,
        root_dir: str | os.PathLike[str] | None = None,
        x_axis: str = "step",
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix=prefix, root_dir=root_dir)
        self.x_axis = x_axis
        for option in kwargs:
            if option not in _WRITER_OPTIONS:
                raise ConfigError(
                    f"TensorBoardLogger got an unknown argument {option!r}{nearest(option, _WRITER_OPTIONS)}.",
                    fix=f"pass arguments of TensorBoardLogger, or of SummaryWriter: {', '.join(_WRITER_OPTIONS)}.",
                )
        if find_spec("tensorboard") is None:  # looks the package up without importing it
            raise MissingDependency("tensorboard", needed_for="TensorBoardLogger")
        self._sub_dir = None if sub_dir is None else os.path.expandvars(os.path.expanduser(os.fspath(sub_dir)))
        self._lw_options = kwargs
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._lw_known_files: dict[str, int] | None = None  # of the checkpoint: None if nothing is to be dropped
        self._lw_pending: list[tuple[dict[str, bool | int | float | str], dict[str, int | float], int | None]] = []
        self._lw_has_hparams = False
        self._lw_has_graph = False
        self._lw_synced: dict[str, int] = {}
        self._lw_made_s = time.time()
        self._lw_is_begun = False

    @property
    def sub_dir(self) -> str | None:
        """Folder inside the version's folder; None if the events are in the version's folder itself."""
        return self._sub_dir

    @property
    def experiment(self) -> SummaryWriter:
        """The `torch.utils.tensorboard.SummaryWriter`; the first call imports TensorBoard and opens the event file."""
        return self._lw_opened(self._lw_open)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Write one point per metric.

        Args:
            metrics: Name -> number (or a tensor of one element, which is copied to the host). A mapping as a value
                becomes one metric per entry, `name/entry`.
            step: The x value of the points. None is the last one plus one.

        Raises:
            ConfigError: A value is not a number; the message names its key. Nothing is written.
        """
        if self.is_silent:
            return
        self._lw_send_if_due()  # before the points: where this fails, they are written again later
        points = scalars(metrics, prefix=self._prefix, group_separator=self.group_separator)
        chosen = self._lw_next_step(step)
        if not points:
            return
        writer = self.experiment
        self._lw_write_pending()
        for tag, value in points.items():
            writer.add_scalar(tag, value, chosen)

    def log_hyperparams(
        self, params: Params = None, metrics: Metrics | float | None = None, step: int | None = None, **kwargs: Any
    ) -> None:
        """Write `hparams.yaml` at once, and keep the record for TensorBoard until the first metric or `finalize`.

        Args:
            params: A mapping, an `argparse.Namespace`, a dataclass, or None. Nested names are joined by "/".
            metrics: Numbers to show with the hyperparameters; a single number is `hp_metric`; None is
                `hp_metric = -1` if `default_hp_metric` is set.
            step: The step of these numbers; None is 0.
            kwargs: Ignored; accepted for compatibility with other loggers.

        Raises:
            ConfigError: `params` is not of these types, or a metric is not a number.
        """
        if self.is_silent:
            return
        before = flatten(self.hparams)
        self.hparams.update(plain_hyperparameters(params))
        self._lw_write_hparams()
        flat = flatten(self.hparams)
        if metrics is None:
            # A resumed or second fit repeats its hyperparameters; a second point of hp_metric would go back to step 0.
            if not flat or (self._lw_has_hparams and (flat == before or not before)):
                return
            metrics = {"hp_metric": -1} if self._default_hp_metric and not self._lw_has_hparams else {}
        elif not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        self._lw_pending.append((flat, scalars(metrics), step))
        self._lw_has_hparams = True
        if self._experiment is not None:
            self._lw_write_pending()

    def log_graph(self, model: nn.Module, input_array: AnyBatch = None) -> None:
        """Write the model's graph, if the logger was created with `log_graph=True`; once per run.

        The model runs once on the input, in eval mode and without gradients; its modes and the random generators are
        restored.

        Args:
            model: The module.
            input_array: A tensor or a tuple of tensors; None is the module's `example_input_array`.

        Raises:
            ConfigError: There is no input, or it is neither a tensor nor a tuple.
        """
        if not self._log_graph or self._lw_has_graph or self.is_silent:
            return
        inputs = getattr(model, "example_input_array", None) if input_array is None else input_array
        if not isinstance(inputs, (torch.Tensor, tuple)):
            raise ConfigError(
                f"log_graph=True needs an input for the model, a tensor or a tuple; got {type(inputs).__name__}.",
                fix="set self.example_input_array in the module, or make the logger with log_graph=False.",
            )
        self._lw_has_graph = True
        if any(is_sharded(parameter) for parameter in model.parameters()):
            # Tracing takes one process, and running a sharded module takes all of them.
            _log.warning("log_graph=True: the graph of a sharded module is not written")
            return
        self._lw_trace(model, inputs)

    def log_image(self, key: str, images: Pictures, step: int | None = None, **kwargs: EachOption) -> None:
        """Write images: one as `key`, several as `key/0`, `key/1`, ...

        Args:
            key: Tag of the images.
            images: One image or a list, in a form that `Logger.log_image` lists.
            step: The x value; None is the last recorded step.
            kwargs: `caption` is a list with one text per image, written as text.

        Raises:
            ConfigError: An item is not an image, or the number of captions differs.
        """
        if self.is_silent:
            return
        pictures = read_pictures(key, images, kwargs)
        for number, (pixels, options) in enumerate(pictures):
            tag = f"{key}/{number}" if len(pictures) > 1 else key
            self.experiment.add_image(tag, pixels, self._lw_at(step), dataformats="HWC")
            if options.get("caption"):
                self.experiment.add_text(f"{tag}/caption", str(options["caption"]), self._lw_at(step))

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Write text, which TensorBoard shows as Markdown.

        Args:
            key: Tag.
            text: The text.
            step: The x value; None: the last recorded step.
        """
        if not self.is_silent:
            self.experiment.add_text(key, text, self._lw_at(step))

    def save(self) -> None:
        """Flush to disk; does nothing, and imports nothing, before the first metric."""
        if self._experiment is not None:
            self._experiment.flush()
            self._lw_send_if_due()
            self._lw_begin_next_file()

    def finalize(self, status: str) -> None:
        """Write pending hyperparameters and the status, and close the event file; a later metric opens another one.

        Args:
            status: "success", "finished" or "failed"; TensorBoard's HPARAMS page shows it.
        """
        if self.is_silent or (self._experiment is None and not self._lw_pending):
            self._lw_end_session()
            return
        writer = self.experiment
        self._lw_write_pending()
        if self._lw_has_hparams:
            _add_session_end(writer, is_success=status != "failed")
        writer.close()
        self._experiment = None
        self.send_files(is_end=True)
        self._lw_end_session()

    def state_dict(self) -> StateDict:
        """Write pending values durably, and return the positions in the event files for a resumed run."""
        if self.is_silent:
            return {}
        if self._lw_known_files is None:
            self.save()
            files = _event_files(self.files_dir)
            self._lw_sync(files)
            self.send_files()
        else:
            files = self._lw_known_files  # resumed, and nothing was written yet
        return {
            "log_dir": absolute_place(self.log_dir),
            "version": self.version,
            "step": self._lw_step,
            "files": dict(files),
            "has_hparams": self._lw_has_hparams and not self._lw_pending,
            "has_graph": self._lw_has_graph,
            **({"wall_s": self.wall_s} if self.x_axis == "time" else {}),
        }

    def __getstate__(self) -> dict[str, object]:
        """Leave the writer out: it has a thread, and the process that unpickles opens its own."""
        if self._experiment is not None:
            self._experiment.flush()
        return {**super().__getstate__(), "_experiment": None}

    def _lw_in_folder(self, path: str) -> str:
        return os.path.join(path, self._sub_dir) if self._sub_dir else path

    def _lw_close(self) -> None:
        if self._experiment is not None:
            self._experiment.close()
        self._experiment = None
        self._lw_known_files = None
        self._lw_has_hparams = self._lw_has_graph = self._lw_is_begun = False

    def _lw_recognizes(self, log_dir: str, state: StateDict, is_same_place: bool) -> bool:
        files: dict[str, int] = state["files"]
        found = _event_files(log_dir)
        return all(found.get(name, -1) >= size for name, size in files.items()) and (is_same_place or bool(files))

    def _lw_restore(self, state: StateDict) -> None:
        self._lw_step = state["step"]
        self._lw_known_files = dict(state["files"])
        self._lw_has_hparams = state["has_hparams"]
        self._lw_has_graph = state["has_graph"]
        self.wall_s = state.get("wall_s", 0.0)
        self._lw_pending.clear()

    def _lw_open(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        options = dict(self._lw_options)
        self._lw_options.pop("purge_step", None)  # only once: the file that a later fit opens has nothing to purge
        if self._lw_known_files is not None:
            _drop_later_events(self.files_dir, self._lw_known_files)
            self._lw_known_files = None
            if self._lw_step >= 0:
                # The files have no later points any more; this tells a TensorBoard that shows them to forget them.
                options["purge_step"] = self._lw_step + 1
        elif not self._lw_is_begun:
            keep_old_files(self.files_dir, _event_files(self.files_dir, changed_before_s=self._lw_made_s))
        self._lw_is_begun = True
        os.makedirs(self.files_dir, exist_ok=True)
        before = _event_files(self.files_dir)
        while True:
            try:
                writer = SummaryWriter(log_dir=self.files_dir, **options)
            except OSError:  # the disk is full: the next record opens another file
                _remove_all_but(before, self.files_dir)
                raise
            if not before or _is_read_last(self.files_dir, before, writer):
                return writer
            # TensorBoard reads the files in the order of their names, which tell the second, then host and process.
            writer.close()
            _remove_all_but(before, self.files_dir)
            time.sleep(1.0 - time.time() % 1.0)

    def _lw_begin_next_file(self) -> None:
        """End an event file that has become large where each sending repeats the full file: at a URL."""
        if self._lw_folder.remote is None:
            return
        files = _event_files(self.files_dir)
        if files and files[max(files)] > _MOST_SENT_AGAIN:
            self._experiment.close()
            self._experiment = None

    def _lw_sync(self, files: dict[str, int]) -> None:
        for name, size in files.items():
            if self._lw_synced.get(name) != size:
                with open(os.path.join(self.files_dir, name), "r+b") as file:
                    os.fsync(file.fileno())  # the checkpoint that holds this position must not outlive the points
        self._lw_synced = dict(files)

    def _lw_write_pending(self) -> None:
        if self._lw_pending:
            from torch.utils.tensorboard.summary import hparams

            writer: Any = self.experiment  # Any: torch leaves SummaryWriter's attributes untyped
            for params, metrics, step in self._lw_pending:
                experiment, session_start, _ = hparams(params, metrics)
                for summary in (experiment, session_start):
                    writer.file_writer.add_summary(summary, 0)
                for tag, value in metrics.items():
                    writer.add_scalar(tag, value, step or 0)
            self._lw_pending.clear()

    def _lw_trace(self, model: torch.nn.Module, inputs: torch.Tensor | tuple[Tree, ...]) -> None:
        parameter = next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        moved = _to(inputs, device)
        with undisturbed(model):
            self.experiment.add_graph(model, moved)


def _to(inputs: Tree, device: torch.device) -> Tree:
    if isinstance(inputs, tuple):
        return tuple(_to(item, device) for item in inputs)
    return inputs.to(device) if isinstance(inputs, torch.Tensor) else inputs


def _event_files(log_dir: str, *, changed_before_s: float = math.inf) -> dict[str, int]:
    """Return the event files of a directory: name to size in bytes.

    Args:
        log_dir: The directory; need not exist.
        changed_before_s: Later changed ones are left out.
    """
    if not os.path.isdir(log_dir):
        return {}
    with os.scandir(log_dir) as entries:
        files = [entry for entry in entries if ".tfevents." in entry.name and entry.is_file()]
        return {file.name: file.stat().st_size for file in files if file.stat().st_mtime < changed_before_s}


def _remove_all_but(before: Mapping[str, int], log_dir: str) -> None:
    """Remove the event files that a directory did not have before."""
    for name in _event_files(log_dir).keys() - before.keys():
        os.remove(os.path.join(log_dir, name))


def _is_read_last(log_dir: str, before: Mapping[str, int], writer: SummaryWriter) -> bool:
    """Whether a new writer's file is read after the others; also True if these are from the future."""
    writer.flush()
    if any(int(name.partition(".tfevents.")[2].partition(".")[0] or 0) > time.time() for name in before):
        return True
    return max(_event_files(log_dir)) not in before


def _drop_later_events(log_dir: str, known: Mapping[str, int]) -> None:
    """Remove what was written after the checkpoint: event files are append-only, so their sizes give the position."""
    for name, size in _event_files(log_dir).items():
        path = os.path.join(log_dir, name)
        if name not in known:
            os.remove(path)
        elif size > known[name]:
            os.truncate(path, known[name])


def _add_session_end(writer: Any, *, is_success: bool) -> None:  # Any: torch leaves its attributes untyped
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if is_success else api_pb2.STATUS_FAILURE
    data = plugin_data_pb2.HParamsPluginData(
        session_end_info=plugin_data_pb2.SessionEndInfo(status=status), version=metadata.PLUGIN_DATA_VERSION
    )
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=SummaryMetadata(plugin_data=plugin))
    writer.file_writer.add_summary(Summary(value=[value]))
