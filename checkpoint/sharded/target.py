"""The target of a sharded save: rank 0's actions before and after the ranks write.

On disk, a save is known by its token, the end of the name of a locked file beside the folder. All that it makes has
the token: its files, and the temporary folder, if there is no checkpoint folder at the path yet. What has the
token of no locked file, and is in no manifest, was left by a killed save and is removed.
"""

from __future__ import annotations

import logging
import os
import shutil
from io import FileIO
from pathlib import Path

from ...errors import CheckpointError
from ...files import open_temporary, remove_quietly, remove_stale
from ...protocols import StorageOptions
from ..file import disk
from ..file.disk import cannot_write
from ..file.remote import as_local
from . import stages
from .backends import OWN_NAME, LocalBackend, RemoteBackend
from .manifest import MANIFEST, Manifest, decode, encode

logger = logging.getLogger(__name__)

_FOLDER = ".folder"


def target_of(path: str | Path, options: StorageOptions | None) -> LocalTarget | RemoteTarget:
    """Return where a save to a path or URL goes. Nothing is written yet.

    Raises:
        CheckpointError: A file is there, or a folder that is not a checkpoint.
    """
    local = as_local(path)
    if local is None:
        remote = RemoteTarget(str(path), options)
        if remote.backend.remote.exists():
            raise _in_the_way(str(path), "a file")
        _refuse_foreign(str(path), remote.backend.names())
        return remote
    target = LocalTarget(local.absolute())
    if target.is_new and target.path.exists() and not target.path.is_symlink():
        raise _in_the_way(str(path), "a file")
    if not target.is_new:
        _refuse_foreign(str(path), target.backend.names())
    return target


def _refuse_foreign(shown: str, names: set[str]) -> None:
    foreign = sorted(name for name in names if not OWN_NAME.fullmatch(name) and not name.startswith("."))
    if foreign and MANIFEST not in names:
        raise _in_the_way(shown, f"a folder without {MANIFEST} that holds {foreign[0]!r}")


def _in_the_way(shown: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the sharded checkpoint {shown!r} could not be written: there is {what} at that path, and a folder "
        "cannot take its place in one step.",
        fix="remove it first, or save under another name.",
    )


def _is_unfinished(name: str) -> bool:
    """Whether a killed save has left it: a file of ours under the temporary name with which `Remote.send` begins."""
    own, _, end = name.removeprefix(".").rpartition(".tmp-")
    return name.startswith(".") and bool(OWN_NAME.fullmatch(own)) and bool(end)


class LocalTarget:
    """A path on disk.

    Attributes:
        path: Where the folder is to be.
        token: Of this save; "" before `prepare`.
        backend: Where the ranks write: the folder itself if it is there, else a temporary one beside it.
        is_committed: Whether the new checkpoint is at the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = ""
        self.is_committed = False
        # A link is replaced, not followed: what it leads to is another checkpoint.
        self.is_new = path.is_symlink() or not path.is_dir()
        self.backend = LocalBackend(path)
        self._lock: FileIO | None = None
        self._lock_path = path

    def prepare(self) -> None:
        """Lock, remove what killed saves have left, and make the folder to write to."""
        parent = self.path.parent
        disk.make_folder(parent)
        remove_stale(parent)
        self._lock, self._lock_path = open_temporary(self.path)
        if self.is_new:
            self.backend = LocalBackend(parent / (self._lock_path.name + _FOLDER))
        self.token = self._lock_path.name.rpartition(".tmp-")[2]
        for name in os.listdir(parent):
            is_temporary = name.startswith(".") and ".tmp-" in name and name.endswith(_FOLDER)
            if is_temporary and not (parent / name.removesuffix(_FOLDER)).exists():
                shutil.rmtree(parent / name, ignore_errors=True)  # another save may be at it as well
                logger.info("removed %s, which an interrupted save had left", parent / name)
        if self.is_new:
            self.backend.folder.mkdir()
            return
        remove_stale(self.path)
        old = _read_manifest(self.backend)
        if old is not None or MANIFEST not in self.backend.names():
            self._remove_unlocked(set(old.files) if old is not None else set())

    def commit(self, manifest: Manifest) -> None:
        """Make the folder a checkpoint: its manifest takes the place of the old one, or the folder its name."""
        old = _read_manifest(self.backend)
        folder = self.backend.folder
        disk.sync_folder(folder)
        file, temporary = open_temporary(folder / MANIFEST)
        try:
            with file:
                content = memoryview(encode(manifest))
                while content:
                    content = content[file.write(content) :]
                disk.sync_file(file.fileno())
                stages.reached("manifest-synced")
                os.replace(temporary, folder / MANIFEST)
        except BaseException:
            remove_quietly(temporary)
            raise
        self.is_committed = not self.is_new
        stages.reached("manifest-renamed")
        disk.sync_folder(folder)
        if self.is_new:
            if self.path.is_symlink():
                self.path.unlink()  # what it led to stays
            os.rename(folder, self.path)
            self.is_committed = True
            self.backend = LocalBackend(self.path)
            stages.reached("folder-renamed")
            disk.sync_folder(self.path.parent)
        if old is not None:
            self.backend.remove({name for name in old.files if OWN_NAME.fullmatch(name)} - set(manifest.files))
        if not self.is_new:
            self._remove_unlocked(set(manifest.files))
        stages.reached("cleaned")

    def abort(self) -> None:
        """Remove all that this save has written; no rank may be writing any more."""
        if self.is_committed or not self.token:
            return
        if self.is_new:
            shutil.rmtree(self.backend.folder, ignore_errors=True)
        else:
            self.backend.remove({name for name in self.backend.names() if f"-{self.token}" in name})

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            remove_quietly(self._lock_path)
            self._lock.close()
            self._lock = None

    def explained(self, error: OSError, size_bytes: int) -> CheckpointError:
        """Return a CheckpointError for an error of the system on this rank."""
        return cannot_write(f"the checkpoint {str(self.path)!r}", error, size_bytes, self.path.parent)

    def _remove_unlocked(self, keep: set[str]) -> None:
        """Remove files of saves that no process holds the lock of."""
        stale = set()
        for name in self.backend.names() - keep:
            own = OWN_NAME.fullmatch(name)
            if own and not self._lock_path.with_name(self._lock_path.name.replace(self.token, own["token"])).exists():
                stale.add(name)
        self.backend.remove(stale)


class RemoteTarget:
    """A URL: the ranks write to the folder itself, since a remote store cannot rename one. See LocalTarget."""

    def __init__(self, url: str, options: StorageOptions | None) -> None:
        self.path = url
        self.token = ""
        self.is_committed = False
        self.backend = RemoteBackend(url, options)

    def prepare(self) -> None:
        """Choose a token. What a killed save has left stays until the commit: there are no locks."""
        self.token = f"{os.getpid()}-{os.urandom(4).hex()}"

    def commit(self, manifest: Manifest) -> None:
        """Put the manifest over the old one, then remove all files of ours that it does not name."""
        content = encode(manifest)
        old = self.backend.read(MANIFEST) if MANIFEST in self.backend.names() else None
        stages.reached("manifest-synced")
        try:
            self.backend.put(MANIFEST, content)
        except BaseException:
            self._put_back(old)
            raise
        self.is_committed = True
        stages.reached("manifest-renamed")
        names = self.backend.names()
        stale = {name for name in names if OWN_NAME.fullmatch(name) or _is_unfinished(name)} - set(manifest.files)
        try:
            self.backend.remove(stale)
        except Exception as error:  # each remote store has errors of its own; the checkpoint is complete without this
            logger.warning("cannot remove the files of an older save from %s: %s", self.path, error)
        stages.reached("cleaned")

    def abort(self) -> None:
        """Remove all that this save has written; no rank may be writing any more."""
        if self.is_committed or not self.token:
            return
        try:
            self.backend.remove({name for name in self.backend.names() if f"-{self.token}" in name})
        except Exception as error:  # as in commit; another error is on its way
            logger.warning("cannot remove the files of an unfinished save from %s: %s", self.path, error)

    def close(self) -> None:
        """Do nothing: there is no lock."""

    def _put_back(self, manifest: bytes | None) -> None:
        try:
            if manifest is None:
                self.backend.remove({MANIFEST})
            else:
                self.backend.put(MANIFEST, manifest)
        except Exception as error:  # as in commit; another error is on its way
            logger.warning("cannot restore the manifest of the older checkpoint %s: %s", self.path, error)

    def explained(self, error: OSError, size_bytes: int) -> CheckpointError:
        """Return a CheckpointError for an error of the store on this rank."""
        return CheckpointError(
            f"the checkpoint {self.path!r} could not be written: {error}. It needs about {size_bytes:,} bytes. "
            "What was there before is intact.",
            fix="check the address, the credentials (storage_options) and the network, and save again.",
        )


def _read_manifest(backend: LocalBackend) -> Manifest | None:
    """Return the manifest of what is there now; None if there is none, or a damaged one."""
    try:
        return decode(backend.read(MANIFEST), str(backend.folder))
    except (OSError, CheckpointError) as error:
        logger.debug("no manifest of an older save in %s: %s", backend.folder, error)
        return None
