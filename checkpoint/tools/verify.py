"""`check`: compares a checkpoint of any format with its checksums."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...messages import counted
from ...protocols import Advance
from .. import storage
from ..deepspeed.folder import read_folder
from ..file.remote import as_local
from ..file.safetensors_file import read_weights
from ..formats import find_format
from .dcp_folder import DcpFolder
from .formats import LIGHTNING_EXTRA, is_dcp_folder, is_safetensors

_MAX_NAMED = 5


def check(path: str | Path, advance: Advance | None = None) -> str:
    """Read a checkpoint once, compare it with its checksums, and return in words what was compared.

    Args:
        path: File, folder or URL.
        advance: Called with the number of bytes after each read, in the thread that reads.

    Raises:
        CheckpointNotFound: There is nothing at the path.
        CheckpointError: It is damaged, or not a checkpoint; names files and tensors.
    """
    local = as_local(path)
    found = find_format(path)
    if found is None and local is not None and is_dcp_folder(local):
        return _check_dcp(local, advance)
    if local is not None and is_safetensors(local):
        weights, _ = read_weights(local)
        return f"{counted(len(weights), 'tensor')} (safetensors has no checksums: only sizes and places were compared)"
    if local is not None and found is not None and found.name == "deepspeed":
        read_folder(local)  # whether the files of all ranks are there, and fit together
    result = storage.verify(path, advance=advance)
    if result.sealed:
        return f"every byte matches its checksum ({counted(result.entries, 'record')}, {result.size_bytes:,} bytes)"
    if not result.entries:
        return f"it can be opened (torch's old format has no checksums; {result.size_bytes:,} bytes)"
    return f"{result.entries} records match their checksums, {result.size_bytes:,} bytes (no digest: headers have none)"


def _check_dcp(path: Path, advance: Advance | None) -> str:
    folder = DcpFolder(path)
    problems = folder.check(advance)
    if (path / LIGHTNING_EXTRA).is_file():
        storage.verify(path / LIGHTNING_EXTRA)
    if problems:
        more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise CheckpointError(
            f"the folder {str(path)!r} is damaged: {'; '.join(problems[:_MAX_NAMED])}{more}.",
            fix="use another checkpoint, or copy this one again from where it came.",
        )
    return f"{folder.num_records} records match their checksums (.metadata has none)"
