"""Files of checkpoints: finding, linking, copying, removing."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoint import sharded, storage, verified
from ...checkpoint.file.disk import sync_file, sync_folder
from ...checkpoint.sharded.copying import copy as copy_folder
from ...errors import CheckpointError, ConfigError
from ...files import open_temporary, remove_quietly, remove_stale
from ...remote import is_url, names_in, why_unwritable

if TYPE_CHECKING:
    from ...trainer import Trainer

_MANIFEST = "manifest.json"  # checkpoint/sharded/manifest.py's, which is not imported for a name
_STEP_IN_NAME = re.compile(r"step=(\d+)")
_NUMBER = re.compile(r"^version_(\d+)$")
_ASIDE = ".abandoned"


def default_dirpath(trainer: Trainer) -> str:
    """Return the folder of a callback without `dirpath`: in the first logger's, else in the trainer's root.

    Raises:
        ConfigError: The logger cannot make its folder.
    """
    if not trainer.loggers:
        return os.path.join(trainer.default_root_dir, "checkpoints")
    logger = trainer.loggers[0]
    try:
        version = logger.version
    except OSError as error:
        raise ConfigError(
            f"{type(logger).__name__}: no folder can be made in {_logger_root(trainer)}: {error.strerror or error}.",
            fix="choose another default_root_dir (or save_dir of the logger), or change its permissions.",
        ) from error
    if version is None:  # a logger without runs, as Prometheus's
        return os.path.join(_logger_root(trainer), "checkpoints")
    folder = version if isinstance(version, str) else f"version_{version}"
    return os.path.join(_logger_root(trainer), folder, "checkpoints")


def last_place(trainer: Trainer) -> str:
    """Return the folder in or below which a callback without `dirpath` finds the checkpoints of earlier runs."""
    return _logger_root(trainer) if trainer.loggers else os.path.join(trainer.default_root_dir, "checkpoints")


def _logger_root(trainer: Trainer) -> str:
    logger = trainer.loggers[0]
    return os.path.join(str(logger.save_dir or trainer.default_root_dir), str(logger.name or ""))


def default_dirpaths(trainer: Trainer) -> list[str]:
    """Return the folders where earlier runs with these loggers may have saved: a run that starts again opens a new one.

    The logger's version is not read: reading it would fix a new one before a resumed run takes its old one.
    """
    if not trainer.loggers:
        return [os.path.join(trainer.default_root_dir, "checkpoints")]
    root = _logger_root(trainer)
    try:
        names = names_in(root) if is_url(root) else [entry.name for entry in os.scandir(root) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    own = [os.path.join(root, "checkpoints")] if "checkpoints" in names else []  # of a logger without versions
    return own + [os.path.join(root, name, "checkpoints") for name in sorted(names)]


def find_checkpoints(folders: list[str], extension: str) -> list[str]:
    """Return the finished checkpoints under these folders, newest first.

    Newest by modification time, then by the step in the name. Names that begin with a dot are unfinished writes. A link
    and the file that it leads to count once, as the file.
    """
    found: dict[str, tuple[int, int]] = {}
    for folder in folders:
        for path in _walk_local(folder, extension) if is_local(folder) else _walk_remote(folder, extension):
            real = os.path.realpath(path) if is_local(path) else path
            try:
                modified = modified_ns(real)
            except OSError:  # gone meanwhile, or a link that leads nowhere or to itself
                continue
            step = _STEP_IN_NAME.search(os.path.basename(real))
            found[real] = (modified, int(step.group(1)) if step else -1)
    return sorted(found, key=found.__getitem__, reverse=True)


def newest_first(paths: list[str]) -> list[str]:
    """Return checkpoints in the order in which runs wrote them, the last one first.

    By the step in the file. Times decide between equal steps only: a copy may lose them, and clocks differ. Before
    that counts the logger's version in the path, as each start of a program opens a new one: its number, or the time
    of its newest file where there are names. What cannot be read comes first, so that its verification reports it.
    """
    times = {path: _modified_or_zero(path) for path in paths}
    steps = {path: math.inf if (step := step_in(path)) is None else step for path in paths}
    groups: dict[str, int] = {}
    for path in paths:
        groups[_version_of(path)] = max(groups.get(_version_of(path), 0), times[path])
    if all(_NUMBER.search(group) for group in groups):
        groups = {group: int(_NUMBER.findall(group)[0]) for group in groups}
    return sorted(paths, key=lambda path: (groups[_version_of(path)], steps[path], times[path]), reverse=True)


def step_in(path: str) -> int | None:
    """Return the step of a checkpoint; None if it cannot be read. That of a remote one is read from its name."""
    named = _STEP_IN_NAME.search(os.path.basename(path))
    if not is_local(path):
        return int(named.group(1)) if named else -1
    try:
        found = storage.load(path, lazy=True, verify=False).get("global_step")
    except CheckpointError:
        return int(named.group(1)) if named else None
    return found if isinstance(found, int) else -1


def _version_of(path: str) -> str:
    """Return the folder of a logger's version; empty where a path does not have one."""
    return path.rpartition("/checkpoints/")[0].rpartition("/")[2]


def _modified_or_zero(path: str) -> int:
    try:
        return modified_ns(path)
    except OSError:  # gone meanwhile
        return 0


def _walk_local(folder: str, extension: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        # A sharded checkpoint is a folder: it counts as one, and is not looked into.
        names = [name for name in [*files, *folders] if name.endswith(extension) and not name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".") and name not in names and not is_aside(name)]
        yield from (os.path.join(parent, name) for name in names)


def _walk_remote(folder: str, extension: str) -> Iterator[str]:
    from ...remote.store import explained

    with explained(folder):
        filesystem, root = _filesystem(folder)
        root = root.rstrip("/")
        try:
            paths = filesystem.find(root)
        except FileNotFoundError:  # a bucket that does not exist, in some stores; in others it has no files
            paths = []
    seen = set()
    for path in paths:
        below = path[len(root) :].lstrip("/").split("/")
        # A sharded checkpoint is a folder: the outermost name counts. Without a manifest it is an unfinished write.
        depth = next((depth for depth, name in enumerate(below) if name.endswith(extension)), None)
        if depth is None or any(name.startswith(".") or is_aside(name) for name in below[: depth + 1]):
            continue
        found = path[: len(path) - len("/".join(below[depth + 1 :]))].rstrip("/")
        if found not in seen:
            seen.add(found)
            yield filesystem.unstrip_protocol(found)


def is_local(path: str) -> bool:
    """Whether the path is on this machine's file system, not a URL."""
    return "://" not in path


def _filesystem(path: str) -> tuple[Any, str]:  # Any: fsspec has no types
    from fsspec.core import url_to_fs

    filesystem, root = url_to_fs(path)
    return filesystem, root


def normalized(path: str | os.PathLike[str]) -> str:
    """Return the path absolute, `~` and links resolved; a URL as it is."""
    path = os.fspath(path)
    return os.path.realpath(os.path.expanduser(path)) if is_local(path) else path


def exists(path: str) -> bool:
    """Whether something has this name, a link that leads nowhere included."""
    if is_local(path):
        return os.path.lexists(path)
    filesystem, root = _filesystem(path)
    return bool(filesystem.exists(root))


def same_file(first: str | os.PathLike[str] | None, second: str) -> bool:
    """Whether both paths lead to one file, through links or not."""
    return bool(first) and first is not None and normalized(first) == normalized(second)


def is_inside(path: str, folder: str) -> bool:
    """Whether the file lies in this folder, at a URL or on this machine, or below it."""
    if not is_local(path) or not is_local(folder):
        return path.startswith(f"{folder.rstrip('/')}/") and ".." not in path.split("/")
    folder = os.path.realpath(folder)
    return os.path.commonpath([os.path.realpath(os.path.dirname(path)), folder]) == folder


def modified_ns(path: str) -> int:
    """Return the modification time in nanoseconds; of what a link leads to.

    That of a sharded checkpoint is its manifest's: a folder changes, too, when a save into it is interrupted.

    Raises:
        FileNotFoundError: Nothing is there, or at a URL a folder whose save did not finish.
    """
    if is_local(path):
        manifest = os.path.join(path, _MANIFEST)
        return os.stat(manifest if os.path.isfile(manifest) else path).st_mtime_ns
    filesystem, root = _filesystem(path)
    if not filesystem.isfile(root):
        root = f"{root}/{_MANIFEST}"
    return int(filesystem.modified(root).timestamp() * 1e9)


def remove(path: str) -> None:
    """Remove a checkpoint: a file, a link, or the folder of a sharded one. A missing checkpoint is accepted.

    A sharded one stops being a checkpoint before its first file goes.

    Raises:
        OSError: The system does not allow it.
        CheckpointError: It does not, for a sharded one.
    """
    if _is_sharded(path):
        sharded.remove(path)
    elif not is_local(path):
        filesystem, root = _filesystem(path)
        if filesystem.exists(root):
            filesystem.rm(root, recursive=True)
    elif os.path.isdir(path) and not os.path.islink(path):  # of a checkpoint plugin of the user's
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def _is_sharded(path: str) -> bool:
    return not os.path.islink(path) and verified.is_folder_checkpoint(path)


def make_way(path: str, *, for_folder: bool, any_folder: bool = False) -> str | None:
    """Rename what a new checkpoint cannot replace in one step: a file where a folder comes, a folder where a file does.

    The old checkpoint keeps a name that is found, "last-v1.ckpt" say, until the new one is complete.

    Args:
        path: Where a checkpoint will be written.
        for_folder: Whether it will be a folder; else a file or a link.
        any_folder: Whether a folder that is not a sharded checkpoint is in the way of a file, too.

    Returns:
        The new name; None where nothing is in the way.
    """
    if os.path.islink(path) or not exists(path):
        return None
    if is_local(path):
        is_own = any_folder and os.path.isdir(path)
        is_in_the_way = os.path.isfile(path) if for_folder else is_own or _is_sharded(path)
    else:
        filesystem, root = _filesystem(path)
        is_in_the_way = filesystem.isfile(root) if for_folder else _is_sharded(path)
    if not is_in_the_way:
        return None
    stem, extension = os.path.splitext(path)
    free = next(name for version in count(1) if not exists(name := f"{stem}-v{version}{extension}"))
    move(path, free)
    return free


def move(path: str, to: str) -> None:
    """Give a checkpoint, a file or a folder, a name that is free."""
    if is_local(path):
        os.rename(path, to)
        sync_folder(Path(to).parent)
        return
    filesystem, root = _filesystem(path)
    filesystem.mv(root, _filesystem(to)[1], recursive=not filesystem.isfile(root))


def set_aside(abandoned: Mapping[str, int]) -> list[str]:
    """Rename checkpoints to "NAME.abandoned", each in one step: no run finds them. Others of that name are replaced.

    Args:
        abandoned: Path -> modification time in nanoseconds. A file that was written since stays.

    Returns:
        Their new names.
    """
    renamed = []
    for path, time_ns in abandoned.items():
        try:
            is_same = modified_ns(path) == time_ns
        except FileNotFoundError:
            continue
        if is_same:
            aside = path + _ASIDE
            remove(aside)
            move(path, aside)
            renamed.append(aside)
    gone = {os.path.abspath(path) for path in abandoned if is_local(path) and not os.path.exists(path)}
    for folder in {os.path.dirname(path) for path in gone}:
        for entry in list(os.scandir(folder)) if os.path.isdir(folder) else ():
            if entry.is_symlink() and os.path.normpath(os.path.join(folder, os.readlink(entry.path))) in gone:
                os.remove(entry.path)
    return renamed


def is_aside(name: str) -> bool:
    """Whether a file or folder of that name was set aside: a sharded one contains files that look like checkpoints."""
    return name.endswith(_ASIDE)


def link(target: str, path: str) -> None:
    """Make `path` a relative link to `target` in one step: it always leads to one file or the other.

    Raises:
        OSError: The file system does not support links.
    """
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.tmp-link-{os.urandom(8).hex()}")
    os.symlink(os.path.relpath(target, os.path.dirname(path)), temporary)
    try:
        os.replace(temporary, path)
    except OSError:
        os.remove(temporary)
        raise
    # What it led to before may be removed next: the new link has to be on the disk by then.
    sync_folder(Path(path).parent)


def copy(source: str, path: str) -> None:
    """Make `path` a copy of a local checkpoint in one step: it is always the old one or the complete new one.

    A checkpoint of the other form, a file or a folder, must have been moved out of the way (`make_way`).
    """
    if _is_sharded(os.path.realpath(source)):
        copy_folder(source, path)
        return

    file, temporary = open_temporary(Path(path))
    try:
        with file, open(source, "rb") as original:
            shutil.copyfileobj(original, file)
            sync_file(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        remove_quietly(temporary)
        raise
    sync_folder(Path(path).parent)


def remove_unfinished(dirpath: str) -> None:
    """Remove files that a killed process was writing; files of running processes are locked and kept.

    Folders are left to the next sharded save, which knows which of them are in use.
    """
    if is_local(dirpath) and os.path.isdir(dirpath):
        remove_stale(Path(dirpath))


def check_dirpath(dirpath: str) -> None:
    """Refuse a folder that cannot be written to, before hours of training end at the first save.

    Raises:
        ConfigError: The path is a file, or there is no permission.
    """
    why = why_unwritable(dirpath) if is_local(dirpath) else ""
    if why:
        raise ConfigError(
            f"ModelCheckpoint: no checkpoints can be written to {dirpath}: {why}.",
            fix="choose another dirpath or default_root_dir, or change its permissions.",
        )


def write_trial(dirpath: str) -> None:
    """Make the folder, and write a byte there, before hours of training end at the first save.

    Raises:
        ConfigError: It cannot be written to: a full disk, a share that is read only, missing credentials.
    """
    path = f"{dirpath.rstrip('/')}/.loopwright-trial-{os.urandom(8).hex()}"
    try:
        if is_local(dirpath):
            os.makedirs(dirpath, exist_ok=True)
            with open(path, "xb") as file:
                file.write(b"0")
            os.remove(path)
        else:
            _write_remote_trial(dirpath, path)
    except Exception as error:  # each store has errors of its own
        raise ConfigError(
            f"ModelCheckpoint: nothing can be written to {dirpath}: {type(error).__name__}: {error}",
            fix="choose another dirpath or default_root_dir, or change its permissions."
            if is_local(dirpath)
            else "check that the bucket exists, the credentials and the network, or choose another dirpath or "
            "default_root_dir.",
        ) from error


def _write_remote_trial(dirpath: str, path: str) -> None:
    from fsspec.core import url_to_fs

    from ...remote.store import make_folder

    filesystem, name = url_to_fs(path)
    make_folder(filesystem, url_to_fs(dirpath)[1])
    with filesystem.open(name, "wb") as file:
        file.write(b"0")
    with contextlib.suppress(Exception):  # a store may allow writing and forbid removing
        filesystem.rm(name)
