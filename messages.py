"""Messages to the user: warnings that point at the user's line, and which frames of a stack are the user's."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_OWN_FILES = {str(Path(__file__).with_name("__main__.py"))}
_LIBRARY = os.path.dirname(os.__file__)
_RANKS = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK", "PMI_RANK",
)  # fmt: skip


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn on rank 0, at the line of the user's that led here; at none where no code of the user's did.

    Args:
        message: What the user did, and what happens instead.
        category: Class of the warning.
    """
    if current_rank():
        return
    frame = _user_frame(sys._getframe(1))
    if frame is None:
        warnings.warn_explicit(message, category, _PACKAGE, 0)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=registry,
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 unit", "2 units", "3 batches", "4 entries"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number} {noun[:-1]}ies"
    is_hissed = noun.endswith(("s", "x", "ch", "sh")) and not noun.endswith("epoch")
    return f"{number} {noun}{'es' if is_hissed else 's'}"


def fitted(text: str) -> str:
    """Return a text of --help whose lines end where the terminal does, by column 120; at 80 without a terminal.

    A paragraph without indentation is filled. Other lines, and those that begin with "usage:", are kept; what does not
    fit is continued below the beginning of the line, or of the description that two spaces separate from it.
    """
    width = min(max(40, shutil.get_terminal_size().columns), 120)
    lines: list[str] = []
    is_filled = False  # whether the last line can take more of the paragraph
    for line in text.split("\n"):
        is_prose = bool(line) and not line.startswith((" ", "usage:"))
        if is_prose and is_filled:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        is_filled = is_prose and not line.endswith(":")
    found: list[str] = []
    for line in lines:
        indent, name, described = re.match(r"( *)([\w.]+: )?(\S+(?: \S+)*  +(?=\S))?", line).groups("")  # type: ignore[union-attr]  # it matches every line
        below = len(indent) + (4 if indent and name else len(described) if len(described) < width // 2 else 0)
        found += textwrap.wrap(
            line, width, subsequent_indent=" " * below, break_on_hyphens=False, break_long_words=False
        ) or [""]
    return "\n".join(found)


def show_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0, 1", "ranks 0 to 5, 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    shown = [f"{row[0]} to {row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    return "ranks " + ", ".join(shown)


def is_of_loopwright(frame: FrameType) -> bool:
    """Whether a frame runs code of this package, or the program `loopwright` itself."""
    name = str(frame.f_globals.get("__name__", ""))
    file = frame.f_code.co_filename
    return name.partition(".")[0] == _PACKAGE or file in _OWN_FILES or os.path.basename(file) == _PACKAGE


def is_of_library(frame: FrameType) -> bool:
    """Whether a frame runs code of an installed package, of Python's library, or of the import system."""
    file = frame.f_code.co_filename
    is_installed = "site-packages" in file or "dist-packages" in file
    # "<string>" starts processes.
    return is_installed or file == "<string>" or file.startswith(("<frozen ", _LIBRARY))


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's; that of another library which calls this one, where there is none."""
    library = None
    while frame is not None:
        if not is_of_loopwright(frame):
            if not is_of_library(frame):
                return frame
            if library is None and "site-packages" in frame.f_code.co_filename:
                library = frame
        frame = frame.f_back
    return library


def current_rank() -> int:
    """Return this process's rank: torch.distributed's, else the one in the launcher's environment variables; else 0.

    Read at each call: it is often asked for before the launcher has set the environment.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank: int = distributed.get_rank()
        return rank
    found = {name: int(value) for name in _RANKS if (value := os.environ.get(name, "")).isdecimal()}
    if "RANK" not in found and "LOCAL_RANK" in found:
        # They number the processes of a machine and the machines: rank 0 has 0 in both.
        return max(found["LOCAL_RANK"], found.get("NODE_RANK", 0), found.get("GROUP_RANK", 0))
    return next((found[name] for name in _RANKS if name in found and not name.endswith(("NODE_RANK", "GROUP_RANK"))), 0)
