"""Says where each rank stands when nothing moves: the main thread's Python stack and the last collective, per rank.

A `Standing` is what one rank says of itself; `Report` puts those of all ranks together, grouped by what they do, and
finds who is missing: the ranks whose last collective lies before the others'.

Collectives are read from torch's flight recorder, whose functions are private: they are used only if they are there and
give what is expected. The recorder needs TORCH_FR_BUFFER_SIZE to be set before the process group is made. With gloo it
knows what was called, but not whether it is done: "state" stays "scheduled", and the counter of completed operations
lags behind and counts those that timed out (torch 2.13). So the stack says whether a rank waits.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["Collective", "Report", "Standing", "last_collective", "progress_of_collectives"]

_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective operation that a rank called.

    Attributes:
        name: Such as "all_reduce".
        number: How many this rank has called in this group, this one included.
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
    """Return what the flight recorder holds, as plain values; None where there is none."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch

    # Private, torch 2.9 to 2.13. json only: the other form is a pickle.
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        return json.loads(dump(includeCollectives=not is_brief))
    except (TypeError, ValueError, RuntimeError):  # another signature or form in another version
        return None


def progress_of_collectives() -> tuple[tuple[str, str], ...]:
    """Return how many collectives each group has called; cheap, compared to find out whether anything moves."""
    found = _recorder(is_brief=True)
    try:
        status = found["pg_status"]
        return tuple(sorted((str(group), str(counts["last_enqueued_collective"])) for group, counts in status.items()))
    except (TypeError, KeyError, AttributeError):
        return ()


def last_collective() -> Collective | None:
    """Return the last collective that this process called; None where nothing was recorded."""
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
        return Collective(
            name=str(entry["profiling_name"]).rpartition(":")[2],
            number=int(entry["collective_seq_id"]),
            group="" if described == "default_pg" else str(described or entry["process_group"][0]),
            shapes=shapes,
        )
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one rank stands.

    Attributes:
        rank: Its global rank.
        host: Its host.
        pid: Its process.
        place: Hook, stage, epoch, step, batch: what the trainer says; empty outside of a run.
        doing: One phrase: what the main thread is in, with the line of the user's code.
        stack: Lines of the main thread's Python stack, outermost first.
        collective: The last that it called; None where that is not known.
        is_silent: It did not answer: its Python does not run, or its host is gone.
    """

    rank: int
    host: str = ""
    pid: int = 0
    place: Mapping[str, Any] = field(default_factory=dict)
    doing: str = ""
    stack: Sequence[str] = ()
    collective: Collective | None = None
    is_silent: bool = False

    @classmethod
    def of_this_process(
        cls, rank: int, *, host: str, pid: int, thread: int, place: Mapping[str, Any], late: BaseException | None = None
    ) -> Standing:
        """Return where this process stands.

        Args:
            rank, host, pid, place: See the attributes.
            thread: The ident of the thread that trains.
            late: The time-out that this thread has caught; then where that came from is what counts.
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
    def from_json(cls, text: str | bytes) -> Standing:
        """Return it from text."""
        values = json.loads(text)
        if values["collective"] is not None:
            values["collective"] = Collective(**values["collective"])
        return cls(**values)

    def describe_place(self) -> str:
        """Return hook, step and the like as words."""
        return ", ".join(f"{name} {value}" for name, value in self.place.items() if value not in (None, ""))


def phrase(frames: traceback.StackSummary, last: Collective | None) -> str:
    """Return what a stack is in: waiting for ranks, for data, or in user code, and the line that brought it there."""
    if not frames:
        return "its main thread has ended"
    names = {(Path(frame.filename).name, frame.name) for frame in frames}
    files = {frame.filename.replace("\\", "/") for frame in frames}
    innermost = frames[-1]
    where = _own_line(frames)
    if any("/torch/distributed/" in file for file in files):
        what = f"waits in {last}" if last is not None else "is in torch.distributed"
    elif ("gate.py", "_advance") in names:
        what = "waits for the other ranks, to agree on where to stop"
    elif any(file.endswith("/torch/utils/data/dataloader.py") for file in files):
        what = "is in the data loader"
    elif any(file.endswith("/torch/autograd/graph.py") for file in files):
        what = "is in backward"
    else:
        what = f"is in {innermost.name}"
        where = where or f", at {innermost.filename}:{innermost.lineno}"
    return f"{what}{where}"


def _own_line(frames: traceback.StackSummary) -> str:
    """Return the innermost line that is neither torch's, nor Python's, nor ours; "" if there is none."""
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return f", at {own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else ""


def _without_launch(frames: traceback.StackSummary) -> traceback.StackSummary:
    """Leave out how a process started, which is the same for all."""
    starts = [n for n, frame in enumerate(frames) if frame.filename.endswith("/multiprocessing/process.py")]
    return traceback.StackSummary.from_list(frames[starts[-1] + 1 :] if starts else frames)


def _is_library(filename: str) -> bool:
    path = filename.replace("\\", "/")
    is_own = path.startswith(_PACKAGE + "/") and not path.startswith((_PACKAGE + "/tests/", _PACKAGE + "/examples/"))
    return is_own or "/site-packages/" in path or path.startswith(("<", _STDLIB))


_STDLIB = str(Path(threading.__file__).resolve().parent) + "/"


@dataclass(frozen=True, slots=True)
class Report:
    """Where all ranks stand.

    Attributes:
        standings: One for each rank, in rank order; silent ones for those that did not answer.
    """

    standings: Sequence[Standing]

    @property
    def furthest(self) -> Collective | None:
        """The last collective that any rank called in the group that most ranks were last seen in."""
        last = [standing.collective for standing in self.standings if standing.collective is not None]
        groups = [collective.group for collective in last]
        if not groups:
            return None
        group = max(sorted(set(groups)), key=groups.count)
        return max((c for c in last if c.group == group), key=lambda collective: collective.number)

    @property
    def missing(self) -> list[int]:
        """The ranks that others wait for: silent ones, and those behind the collective that others are in."""
        furthest = self.furthest
        silent = [standing.rank for standing in self.standings if standing.is_silent]
        if furthest is None:
            return silent
        behind = [
            s.rank
            for s in self.standings
            if not s.is_silent
            and (
                s.collective is None or (s.collective.group == furthest.group and s.collective.number < furthest.number)
            )
        ]
        return sorted(silent + behind)

    @property
    def mismatched(self) -> dict[str, list[int]]:
        """Different operations that ranks called as the same number: operation -> ranks; empty if they agree."""
        furthest = self.furthest
        by_name: dict[str, list[int]] = {}
        for standing in self.standings:
            last = standing.collective
            if furthest is None or last is None or (last.group, last.number) != (furthest.group, furthest.number):
                continue
            # Of other operations, ranks may have inputs of different shapes.
            name = str(last) if last.name in ("all_reduce", "broadcast") else replace(last, shapes="")
            by_name.setdefault(str(name), []).append(standing.rank)
        return by_name if len(by_name) > 1 else {}

    @property
    def culprit(self) -> Standing | None:
        """The rank to look at first: one that is missing, or of the fewest that called another operation."""
        missing = self.missing
        if missing:
            return self.standings[missing[0]] if len(missing) < len(self.standings) else None
        if self.mismatched:
            rank = min(self.mismatched.values(), key=lambda ranks: (len(ranks), -ranks[0]))[0]
            return self.standings[rank]
        return None

    def groups(self) -> list[list[Standing]]:
        """Return ranks that do the same, the smallest group first: that is mostly where the reason is."""
        by_kind: dict[Any, list[Standing]] = {}
        for standing in self.standings:
            key = (standing.doing, standing.collective, standing.describe_place(), standing.is_silent)
            by_kind.setdefault(key, []).append(standing)
        return sorted(by_kind.values(), key=lambda group: (len(group), group[0].rank))

    def summary(self) -> str:
        """Return one line: who waits for whom."""
        missing, furthest = self.missing, self.furthest
        if not missing and self.mismatched:
            return "; ".join(f"{_ranks(ranks)} called {name}" for name, ranks in sorted(self.mismatched.items()))
        if not missing or len(missing) == len(self.standings):
            return "no rank is behind the others"
        others = [standing.rank for standing in self.standings if standing.rank not in missing]
        at = f"{furthest}" if furthest is not None else "the others"
        return f"{_ranks(missing)} did not come to {at}, where {_ranks(others)} wait{'s' if len(others) == 1 else ''}"

    def text(self, why: str) -> str:
        """Return the whole report.

        Args:
            why: What made somebody ask, as a sentence without a full stop.
        """
        groups = self.groups()
        lines = [f"Loopwright: {why}: {self.summary()}."]
        for group in groups:
            first = group[0]
            place = first.describe_place()
            lines.append(f"  {_ranks([s.rank for s in group])}{f' ({place})' if place else ''}: {first.doing}")
            who = ", ".join(f"host {s.host} pid {s.pid}" for s in group[:4]) + (", ..." if len(group) > 4 else "")
            last = f"; last collective {first.collective}" if first.collective is not None else ""
            lines.append(f"    {who}{last}")
        for group in groups:
            if group[0].stack:
                lines.append(f"  --- Python stack of {_ranks([s.rank for s in group])} ---")
                lines.extend("  " + line for entry in group[0].stack for line in entry.rstrip().splitlines())
        return "\n".join(lines)


def _is_behind(collective: Collective | None, furthest: Collective) -> bool:
    if collective is None:
        return True
    return collective.group == furthest.group and collective.number < furthest.number


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
