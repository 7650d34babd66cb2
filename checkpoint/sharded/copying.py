"""A copy of a checkpoint folder on the same machine."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

from ...errors import CheckpointError
from .backends import OWN_NAME, LocalBackend
from .manifest import MANIFEST, Chunk, Manifest, decode
from .target import LocalTarget, target_of

_PIECE = 16 << 20


def copy(source: str | Path, path: str | Path) -> None:
    """Make `path` a copy of a local checkpoint folder; at any moment it holds the old or the complete new one.

    Raises:
        CheckpointError: Something is at the path that a folder cannot replace.
        OSError: The system does not let us read or write.
    """
    backend = LocalBackend(Path(source).resolve())
    manifest = decode(backend.read(MANIFEST), str(source))
    target = target_of(path, None)
    assert isinstance(target, LocalTarget), "only local folders are copied"
    try:
        target.prepare()
        names = {name: _renamed(name, target.token) for name in manifest.files}
        for old, new in names.items():
            with closing(backend.open(old)) as original, target.backend.create(new) as file:
                while piece := original.read(_PIECE):
                    file.write(memoryview(piece))
        target.commit(_with_names(manifest, names))
    except BaseException:
        target.abort()
        raise
    finally:
        target.close()


def _renamed(name: str, token: str) -> str:
    """Return a file's name with the token of this save: files with a token that no process holds would be removed."""
    own = OWN_NAME.fullmatch(name)
    if own is None:
        raise CheckpointError(
            f"{name} in a checkpoint folder has a name that Loopwright does not use.",
            fix="copy the folder by other means.",
        )
    return name.replace(own["token"], token)


def _with_names(manifest: Manifest, names: dict[str, str]) -> Manifest:
    def renamed(chunk: Chunk) -> Chunk:
        return dataclasses.replace(chunk, file=names[chunk.file])

    return dataclasses.replace(
        manifest,
        state=names[manifest.state],
        files={names[name]: entry for name, entry in manifest.files.items()},
        tensors={
            path: dataclasses.replace(entry, chunks=tuple(map(renamed, entry.chunks)))
            for path, entry in manifest.tensors.items()
        },
    )
