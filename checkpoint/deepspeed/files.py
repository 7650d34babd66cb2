"""The files in a folder of DeepSpeed: names, content, and errors about files that do not fit."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...protocols import StateDict
from ..file.restricted import WITHOUT_ATTRIBUTES, load_replacing

# Any in this file: what DeepSpeed and its users have put into the files.

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
UNIVERSAL = "zero"
FULL_MODEL = "mp_rank_00_model_states.pt"

MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
OPTIMIZER_OF_RANK = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_UNSUPPORTED = {
    r"(\w+_)?mp_rank_(?!00)\d+_\w+\.pt": "tensor parallelism",
    r"(layer_\d+_)?expert_\d+_\w+\.pt|expp_rank_\w+\.pt": "experts that are sharded over ranks (MoE)",
    r"layer_\d+-model_[\w-]+\.pt": "pipeline stages",
}

_FIX = "copy the folder again from where it came, with the files of all ranks."
_MAX_NAMED = 5


def find_tag_folder(path: Path) -> Path | None:
    """Return the folder with the files: the path itself, or the subfolder that `latest` names; None if there is none.

    A universal checkpoint is read if the path is its folder, or has `latest_universal` only.
    """
    if _has_model(path):
        return path
    for mark in (LATEST, LATEST_UNIVERSAL):
        try:
            tag = (path / mark).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        below = path / tag
        if tag and Path(tag).parts == (tag,) and tag != ".." and _has_model(below):
            return below
    try:
        below_it = [entry for entry in path.iterdir() if entry.is_dir() and _has_model(entry)]
    except OSError:
        return None
    return below_it[0] if len(below_it) == 1 else None


def is_deepspeed_folder(path: Path) -> bool:
    """Return whether DeepSpeed has saved a checkpoint in a folder, or in a direct subfolder."""
    return path.is_dir() and find_tag_folder(path) is not None


def _has_model(folder: Path) -> bool:
    names = (FULL_MODEL, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return any((folder / name).is_file() for name in names) or is_universal(folder)


def is_universal(folder: Path) -> bool:
    """Return whether a tag's folder is a universal checkpoint, written by `ds_to_universal`."""
    return (folder / UNIVERSAL / "optimizer_state.pt").is_file()


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files that a load reads, sorted by name."""
    folder = find_tag_folder(path)
    assert folder is not None
    return sorted(folder.rglob("*.pt"))


class DeepSpeedFiles:
    """The files in one tag's folder.

    Attributes:
        folder: The tag's folder.
        named: Classes and functions, except DeepSpeed's, that are named in the files read so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named: set[str] = set()

    def load(self, path: Path) -> Any:
        """Return the content of a file; its tensors stay in the file.

        Raises:
            CheckpointError: It cannot be read.
        """
        try:
            with open(path, "rb") as file:
                is_zip = file.read(2) == b"PK"
            with warnings.catch_warnings():  # about old storages
                warnings.simplefilter("ignore")
                named: set[str] = set()
                content = load_replacing(path, mmap=is_zip, named=named, known=WITHOUT_ATTRIBUTES)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, IndexError,
                AttributeError) as error:  # fmt: skip
            reason = str(error).partition("\n")[0][:200]
            raise damaged(self.folder, f"{path.name} cannot be read: {reason}") from error
        shown = path.relative_to(self.folder)
        self.named |= {f"{name} (in {shown})" for name in named if not name.startswith("deepspeed.")}
        return content

    def load_dict(self, path: Path) -> StateDict:
        """Return what `load` does, of a file that holds a dict."""
        content = self.load(path)
        if not isinstance(content, dict):
            raise damaged(self.folder, f"expected a dict in {path.name}, got a {type(content).__name__}")
        return content

    def by_rank(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        """Return the files of one kind by the rank that saved them.

        Args:
            pattern: Its last group is the rank.
        """
        found: dict[int, Path] = {}
        for path in sorted(self.folder.iterdir()):
            match = pattern.fullmatch(path.name)
            if match is None:
                continue
            rank = int(match[pattern.groups])
            if rank in found:
                raise damaged(self.folder, f"there are both {found[rank].name} and {path.name}: files of two saves")
            found[rank] = path
        return found

    def require_all(self, found: Mapping[int, Path], size: int, what: str) -> None:
        """Raise a CheckpointError unless there is the file of each of `size` ranks, and of no other."""
        missing = [rank for rank in range(size) if rank not in found]
        extra = [found[rank].name for rank in sorted(found) if rank >= size]
        if missing:
            raise damaged(
                self.folder, f"{size} ranks have saved it, and the {what} of rank {some(missing)} are missing"
            )
        if extra:
            raise damaged(self.folder, f"{size} ranks have saved it, and there is {some(extra)}: files of two saves")


# --- errors ----------------------------------------------------------------------------------------------------------


def refuse_unsupported(folder: Path) -> None:
    """Raise a CheckpointError if the files are of a model that is sharded in an unsupported way."""
    names = [path.name for path in folder.iterdir()]
    for pattern, what in _UNSUPPORTED.items():
        if any(re.fullmatch(pattern, name) for name in names):
            raise unsupported(folder, what)


def unsupported(folder: Path, what: str) -> CheckpointError:
    """Return the error about a folder with something that is not supported."""
    return CheckpointError(
        f"the DeepSpeed folder {str(folder)!r} was saved with {what}, which is not supported.",
        fix="make a universal checkpoint of it with `python -m deepspeed.checkpoint.ds_to_universal` and read that.",
    )


def damaged(folder: Path, problem: str) -> CheckpointError:
    """Return the error about a folder whose files are missing, malformed, or of several saves."""
    return CheckpointError(f"the DeepSpeed folder {str(folder)!r} is incomplete or damaged: {problem}.", fix=_FIX)


def some(found: Sequence[object]) -> str:
    """Return the first few items, for a message."""
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(map(str, found[:_MAX_NAMED])) + more
