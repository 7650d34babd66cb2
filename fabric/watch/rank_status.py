"""`RankStatus`: where one rank is when nothing moves: its main thread's Python stack and its last collective.

Collectives are read from torch's flight recorder, whose functions are private: they are used only if they exist and
return what is expected. The recorder needs TORCH_FR_BUFFER_SIZE to be set before the process group is created. With
gloo it records what was called, but not whether it completed: "state" stays "scheduled", and the counter of completed
operations lags behind and includes those that timed out (torch 2.13). So the stack shows whether a rank waits.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class LastCollective:
    """The last collective operation that a rank called.

    Attributes:
        name: Such as "all_reduce".
        number: Number of collectives that this rank has called in this group, including this one.
        group: The process group's description; "" for that of all ranks.
        shapes: Shapes and dtypes of its inputs.
    """

    name: str
    number: int
    group: str = ""
    shapes: str = ""

    def __str__(self) -> str:
        group = f" of group {self.group}" if self.group else ""
        return f"{self.name} #{self.number}{group}" + (f" ({self.shapes})" if self.shapes else "")


def _recorder(is_brief: bool) -> Any:
    """Return the content of the flight recorder as plain values; None without one."""
    if "torch.distributed" not in sys.modules:
        return None
    # Private, torch 2.9 to 2.13. json only: the other form is a pickle.
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        return json.loads(dump(includeCollectives=not is_brief))
    except (TypeError, ValueError, RuntimeError):  # another signature or form in another version
        return None


def progress_of_collectives() -> tuple[tuple[str, str], ...]:
    """Return how many collectives each group has called; a cheap test of progress."""
    found = _recorder(is_brief=True)
    try:
        status = found["pg_status"]
        return tuple(sorted((str(group), str(counts["last_enqueued_collective"])) for group, counts in status.items()))
    except (TypeError, KeyError, AttributeError):
        return ()


def count_collectives() -> int:
    """Return how many collectives over all ranks this process has called; 0 where it is unknown."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    world = dist.group.WORLD
    return int(dict(progress_of_collectives()).get("" if world is None else world.group_name, 0))


def last_collective() -> LastCollective | None:
    """Return the last collective that this process called; None without a record."""
    found = _recorder(is_brief=False)
    try:
        entries = found["entries"]
        if not entries:
            return None
        entry = entries[-1]
        described = entry["process_group"][1]
        shapes = ", ".join(
            f"{list(shape)} {dtype}" for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        )
        return LastCollective(
            name=str(entry["profiling_name"]).rpartition(":")[2],
            number=int(entry["collective_seq_id"]),
            group="" if described == "default_pg" else str(described or entry["process_group"][0]),
            shapes=shapes,
        )
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The current activity of one rank.

    Attributes:
        rank: Global rank of the process.
        host: Host of the process.
        pid: Id of the process.
        place: Hook, stage, epoch, step, batch: from the trainer; empty outside of a run.
        doing: One phrase: what the main thread is doing, with the line of the user's code.
        stack: Lines of the main thread's Python stack, outermost first.
        collective: The last collective of the rank; None if unknown.
        is_silent: Whether it did not answer: its Python does not run, or its host is unreachable.
        has_ended: Whether it ended normally, so that it is not expected to answer.
    """

    rank: int
    host: str = ""
    pid: int = 0
    place: Mapping[str, object] = field(default_factory=dict)
    doing: str = ""
    stack: Sequence[str] = ()
    collective: LastCollective | None = None
    is_silent: bool = False
    has_ended: bool = False

    @classmethod
    def of_this_process(
        cls,
        rank: int,
        *,
        host: str,
        pid: int,
        thread: int,
        place: Mapping[str, object],
        late: BaseException | None = None,
    ) -> RankStatus:
        """Return the status of this process.

        Args:
            rank, host, pid, place: See the attributes.
            thread: Identifier of the training thread.
            late: A time-out that this thread has caught; its traceback then replaces the current stack.
        """
        last = last_collective()
        if late is not None:
            frames = traceback.extract_tb(late.__traceback__)
            doing = f"timed out in {last or 'a collective'}{_own_line(frames)}"
        else:
            frame = sys._current_frames().get(thread)
            frames = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
            doing = phrase(frames, last)
        return cls(rank, host, pid, dict(place), doing, tuple(_without_launch(frames).format()), last)

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """Return it from text."""
        values = json.loads(text)
        if values["collective"] is not None:
            values["collective"] = LastCollective(**values["collective"])
        return cls(**values)

    def describe_place(self) -> str:
        """Return hook, step and batch as text."""
        return ", ".join(f"{name} {value}" for name, value in self.place.items() if value not in (None, ""))


def phrase(frames: traceback.StackSummary, last: LastCollective | None) -> str:
    """Describe a stack: waiting for ranks, for data, or in user code, and the user's line that led there."""
    if not frames:
        return "its main thread has ended"
    names = {(Path(frame.filename).name, frame.name) for frame in frames}
    files = {frame.filename.replace("\\", "/") for frame in frames}
    innermost = frames[-1]
    where = _own_line(frames)
    if any("/torch/distributed/" in file for file in files):
        what = f"waits in {last}" if last is not None else "is in torch.distributed"
    elif ("coordinator.py", "_advance") in names:
        what = "waits for the other ranks to agree on where to stop"
    elif any(file.endswith("/torch/utils/data/dataloader.py") for file in files):
        what = "is in the data loader"
    elif any(file.endswith("/torch/autograd/graph.py") for file in files):
        what = "is in backward"
    else:
        what = f"is in {innermost.name}"
        where = where or f", at {innermost.filename}:{innermost.lineno}"
    return f"{what}{where}"


def _own_line(frames: traceback.StackSummary) -> str:
    """Return the innermost line outside torch, Python and Loopwright; "" if there is none."""
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return f", at {own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else ""


def _without_launch(frames: traceback.StackSummary) -> traceback.StackSummary:
    """Remove the frames of process start, which are equal on all ranks."""
    starts = [n for n, frame in enumerate(frames) if frame.filename.endswith("/multiprocessing/process.py")]
    return traceback.StackSummary.from_list(frames[starts[-1] + 1 :] if starts else frames)


def _is_library(filename: str) -> bool:
    path = filename.replace("\\", "/")
    is_own = path.startswith(_PACKAGE + "/") and not path.startswith((_PACKAGE + "/tests/", _PACKAGE + "/examples/"))
    return is_own or "/site-packages/" in path or path.startswith(("<", _STDLIB))


_STDLIB = str(Path(threading.__file__).resolve().parent) + "/"
