"""`FolderLogger`, the base of loggers that write files."""

from __future__ import annotations

import itertools
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError
from ..messages import warn
from ..remote import leads_out, real_place, why_unwritable
from .base import Logger, RunLogger

if TYPE_CHECKING:
    from ..protocols import StateDict
    from .base import EachOption, Params, Pictures
    from .run_folder import RunFolder

DEFAULT_NAME = "loopwright_logs"

_log = logging.getLogger(__name__)

E = TypeVar("E")


class FolderLogger(RunLogger):
    """Base of loggers that write files: on this machine, or through a copy on this machine to a URL.

    New data are sent to a URL every 15 seconds, or less often if that takes more than 5 % of the time; and at once with
    hyperparameters, before each checkpoint, and when the run ends.

    Args:
        save_dir: Directory of all runs, or a URL that fsspec supports; this or its alias `root_dir` is required.
        name: Name of the experiment; None or "" for no directory of the experiment.
        version: Number N for `version_N`, or a text that is used unchanged; None is the next free number.
        prefix: Text before each metric's name, joined by "-".
        root_dir: Alias of `save_dir`.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None,
        name: str | None,
        version: int | str | None,
        *,
        prefix: str,
        root_dir: str | os.PathLike[str] | None,
    ) -> None:
        directory = save_dir if save_dir is not None else root_dir
        if directory is None or (save_dir is not None and root_dir is not None):
            raise ConfigError(
                f"{type(self).__name__} got save_dir={save_dir!r} and root_dir={root_dir!r}; "
                "expected exactly one of them, because they mean the same.",
                fix=f"pass one directory, for example {type(self).__name__}('logs').",
            )
        from .run_folder import RunFolder  # not imported where nothing is logged to files

        super().__init__(prefix)
        self._lw_folder = RunFolder(directory, name, version)
        self._lw_owns_hparams_file = False

    def _lw_opened(self, open_experiment: Callable[[], E]) -> E:
        if not self.is_silent:
            self._lw_hold()
        return super()._lw_opened(open_experiment)

    def _lw_hold(self) -> None:
        """Keep other processes from logging into the folder while this one does.

        Raises:
            ConfigError: Another one does.
        """
        if not self._lw_folder.is_held and not self._lw_placed().hold():
            raise self._lw_in_use()

    def _lw_in_use(self) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__}: another process is logging to {self._lw_folder.path}; rows of two runs in one "
            "folder look the same.",
            fix="leave version out for a new folder, pass another version or name, or wait until that process ends.",
        )

    def _lw_end_session(self) -> None:
        super()._lw_end_session()
        self._lw_folder.release()

    @property
    def name(self) -> str:
        """Name of the experiment, the folder that contains the versions; "" without one."""
        return self._lw_folder.name

    @property
    def version(self) -> int | str:
        """The run's version; the first call takes the next free number unless one was given."""
        return self._lw_folder.version

    @property
    def taken_version(self) -> int | str | None:
        """The run's version; None before one is taken."""
        return self._lw_folder.version if self._lw_folder.is_resolved else None

    def join_version(self, version: int | str) -> None:
        """Use the folder of this version, which another process (rank zero, or an earlier one) has taken."""
        self._lw_folder.continue_in(version)

    def move_to(self, version: int | str | None) -> None:
        """Finish the current files, and start a new run in the folder of this version, or of the next free number."""
        self._lw_close()
        self.send_files()
        self._lw_folder.release()
        self._lw_folder = self._lw_folder.with_version(version)
        self._lw_is_resumed = self._lw_owns_hparams_file = False
        self._lw_step = -1

    def check_target(self) -> None:
        """Raise an error for a folder that cannot be created or written to, before training starts.

        Raises:
            ConfigError: The path is a file, the bucket does not exist, permission is denied, or another process is
                logging there.
        """
        if self._lw_folder.is_resolved and self._lw_folder.is_in_use(self._lw_folder.version):
            raise self._lw_in_use()
        folder = self._lw_folder.path if self._lw_folder.is_resolved else self._lw_folder.root_dir
        remote = self._lw_folder.remote
        why = why_unwritable(folder) if remote is None else remote.why_unwritable()
        if why:
            raise ConfigError(
                f"{type(self).__name__}: logs cannot be written to {folder}: {why}.",
                fix="choose another save_dir of the logger (or default_root_dir), change its permissions, or pass "
                "logger=False.",
            )

    def set_rank(self, rank: int) -> None:
        """Set the rank of this process, for this logger and its folder."""
        self.known_rank = self._lw_folder.known_rank = rank

    @property
    def save_dir(self) -> str:
        """Directory that was passed."""
        return self._lw_folder.save_dir

    @property
    def root_dir(self) -> str:
        """Directory that holds all versions: `save_dir/name`."""
        return self._lw_placed().root_dir

    @property
    def log_dir(self) -> str:
        """Directory or URL of this run: `save_dir/name/version_N`."""
        return self._lw_in_folder(self._lw_placed().path)

    @property
    def files_dir(self) -> str:
        """Directory on this machine that holds the run's files: `log_dir`, or the copy that is sent to a URL."""
        folder = self.log_dir
        return self._lw_folder.new_local(folder) if self.is_silent else self._lw_folder.local(folder)

    def send_files(self, *, is_end: bool = False) -> None:
        """Send new data in `files_dir` if `log_dir` is a URL; otherwise do nothing.

        Args:
            is_end: Whether the run ends: files that were sent in parts are joined.

        Raises:
            OSError: The store did not accept the data; a later call sends them.
        """
        if self._lw_folder.remote is not None:
            self._lw_folder.remote.send(is_end=is_end)

    def _lw_send_if_due(self) -> None:
        if self._lw_folder.remote is not None:
            self._lw_folder.remote.send_if_due()

    def _lw_placed(self) -> RunFolder:
        """Return the run's folder, where a subclass that defines `name` or `version` puts it."""
        kind = type(self)
        if kind.name is not FolderLogger.name and (self.name or "") != self._lw_folder.name:
            self._lw_folder = self._lw_folder.with_name(self.name, self._lw_folder.requested_version)
        if kind.version is not FolderLogger.version:
            self._lw_folder.continue_in(self.version)
        return self._lw_folder

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue in the folder of `state_dict`, and remove rows that were logged after it.

        The folder is searched under this logger's `save_dir/name`, so that a moved run is found, too. It is used only
        if its files match the checkpoint; otherwise a new run starts, with a message. Nothing on disk changes before
        the resumed run writes.
        """
        if not state_dict or self.is_silent:
            return
        self._lw_close()
        recorded, version = state_dict["log_dir"], state_dict["version"]
        log_dir = self._lw_in_folder(self._lw_folder.path_of(version))
        requested = self._lw_folder.requested_version
        is_same_place = real_place(log_dir) == real_place(recorded)
        is_outside = requested is None and leads_out(version)  # a checkpoint may come from others
        is_other_version = is_outside or (
            requested is not None and self._lw_folder.path_of(requested) != self._lw_folder.path_of(version)
        )
        is_in_use = not is_outside and self._lw_folder.is_in_use(version)
        is_usable = not (is_other_version or is_in_use)
        if is_usable and self._lw_recognizes(self._lw_folder.local(log_dir), state_dict, is_same_place):
            self._lw_folder.continue_in(version)
            self._lw_restore(state_dict)
            self._lw_is_resumed = True
            if self._lw_folder.remote is not None:
                self._lw_folder.remote.forget(self.log_dir)  # the end of the files may be dropped
            return
        if self._lw_folder.is_resolved:
            self._lw_folder.release()
            self._lw_folder = self._lw_folder.fresh()
        self._lw_is_resumed = self._lw_owns_hparams_file = False
        self._lw_step = -1
        message = (
            f"{type(self).__name__} starts a new run under {self.root_dir!r}: the checkpoint's run logged to "
            f"{recorded!r}, "
        )
        if is_in_use:
            warn(f"{message}to which another process is logging.")
        elif is_other_version or not is_same_place:
            _log.info("%s which is not the directory of this logger.", message)
        else:
            warn(f"{message}which is missing, or does not contain what was logged then.")

    def log_hyperparams(self, params: Params = None, *args: Any, **kwargs: Any) -> None:  # Any: as in `Logger`
        """Write hyperparameters to `hparams.yaml` at once, merged with those of earlier calls.

        Args:
            params: A mapping, an `argparse.Namespace`, a dataclass, or None.
            args: Ignored; accepted for compatibility with other loggers.
            kwargs: Ignored.
        """
        if not self.is_silent:
            from .hyperparameters import plain_hyperparameters

            self.hparams.update(plain_hyperparameters(params))
            self._lw_write_hparams()

    def log_image(self, key: str, images: Pictures, step: int | None = None, **kwargs: EachOption) -> None:
        """Write images as `media/<key>/<step>-<number>.png` in the run's folder, and captions as `.txt` files.

        Args:
            key: Name of the images; "/" creates folders.
            images: One image or a list, in a form that `Logger.log_image` lists.
            step: The x value; None is the last recorded step.
            kwargs: `caption` is a list with one text per image.

        Raises:
            ConfigError: An item is not an image, the number of captions differs, or `key` leaves the folder.
            MissingDependency: Pillow is not installed.
        """
        if self.is_silent:
            return
        from .pictures import read_pictures, write_pictures  # not imported where there are no pictures

        pictures = read_pictures(key, images, kwargs)
        write_pictures(self._lw_media_folder(key), self._lw_at(step), pictures)
        self._lw_send_if_due()

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Write text as `media/<key>/<step>.txt` in the run's folder; a second text of a step replaces the first.

        Args:
            key: Name of the text; "/" creates folders.
            text: The text.
            step: The x value; None is the last recorded step.

        Raises:
            ConfigError: `key` leaves the folder.
        """
        if not self.is_silent:
            from ..files import replace_file

            replace_file(os.path.join(self._lw_media_folder(key), f"{self._lw_at(step)}.txt"), text)
            self._lw_send_if_due()

    def _lw_media_folder(self, key: str) -> str:
        self._lw_hold()
        root = os.path.join(self.files_dir, "media")
        folder = os.path.normpath(os.path.join(root, key))
        if not folder.startswith(f"{root}{os.sep}"):
            raise ConfigError(
                f"media cannot be logged as {key!r}: its folder would not be inside {root!r}.",
                fix="use a name such as 'samples' or 'val/samples'.",
            )
        os.makedirs(folder, exist_ok=True)
        return folder

    def _lw_in_folder(self, path: str) -> str:
        return path

    @abstractmethod
    def _lw_close(self) -> None:
        """Write what is pending and forget everything about the files written so far."""

    @abstractmethod
    def _lw_recognizes(self, log_dir: str, state: StateDict, is_same_place: bool) -> bool:
        """Whether the files in this directory are those that the state was taken with."""

    @abstractmethod
    def _lw_restore(self, state: StateDict) -> None:
        """Take over the state; the files follow at the first write."""

    def _lw_next_step(self, step: int | None) -> int:
        chosen = self._lw_step + 1 if step is None else int(step)
        self._lw_step = max(self._lw_step, chosen)
        return chosen

    def _lw_write_hparams(self) -> None:
        from ..files import replace_file
        from .hyperparameters import to_yaml

        self._lw_hold()
        text = to_yaml(self.hparams)
        path = os.path.join(self.files_dir, self.NAME_HPARAMS_FILE)
        os.makedirs(self.files_dir, exist_ok=True)
        if not (self._lw_owns_hparams_file or self._lw_is_resumed) and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                is_different = file.read() != text
            if is_different:
                keep_old_file(path)
        replace_file(path, text)
        self._lw_owns_hparams_file = True
        self.send_files()


def share_version(loggers: Iterable[Logger]) -> None:
    """Make file loggers of different kinds with the same root directory write into one version folder.

    A logger keeps a separate folder if a version was passed or already taken, or if the shared folder has a logger of
    its class. A second call changes nothing.
    """
    shared: dict[str, tuple[RunFolder, set[type]]] = {}
    for logger in loggers:
        if not isinstance(logger, FolderLogger) or logger._lw_folder.requested_version is not None:
            continue
        root = real_place(logger._lw_folder.root_dir)
        folder, kinds = shared.setdefault(root, (logger._lw_folder, set()))
        if type(logger) in kinds or (logger._lw_folder.is_resolved and logger._lw_folder is not folder):
            continue
        kinds.add(type(logger))
        logger._lw_folder = folder


def keep_old_file(path: str) -> str:
    """Rename a file of an earlier run to the first free `name.N.extension` beside it, warn, and return the new path."""
    stem, extension = os.path.splitext(path)
    kept = _free_name(stem, extension)
    os.rename(path, kept)
    _tell_kept(path, kept)
    return kept


def keep_old_files(folder: str, names: Collection[str]) -> None:
    """Move files of an earlier run into the first free subfolder `earlier.N`, and warn."""
    if not names:
        return
    kept = _free_name(os.path.join(folder, "earlier"), "")
    os.mkdir(kept)
    for name in names:
        os.rename(os.path.join(folder, name), os.path.join(kept, name))
    _tell_kept(os.path.join(folder, min(names)), kept)


def _free_name(stem: str, extension: str) -> str:
    return next(path for number in itertools.count(1) if not os.path.exists(path := f"{stem}.{number}{extension}"))


def _tell_kept(path: str, kept: str) -> None:
    warn(
        f"{path!r} exists already, from another run; it is kept as {os.path.basename(kept)!r}. "
        "Leave version out to get a new folder for each run."
    )
