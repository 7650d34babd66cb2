"""`Failure`: the failure of a rank, as a value that can be sent between processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass, field

from ..errors import RankFailure, add_nearest
from ..tracebacks import trimmed


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one rank.

    Attributes:
        rank: Global rank.
        host: Host name.
        pid: Process ID.
        how: One line: the exception with its message, or how the process ended.
        place: The position in the run as plain values: hook, stage, epoch, step, batch; empty if unknown.
        trace: The traceback as text; empty without one.
        when: Seconds since the epoch, by that host's clock.
        exit_code: Exit code for the other processes: 1, or 143 after SIGTERM.
    """

    rank: int
    host: str
    pid: int
    how: str
    place: dict[str, object] = field(default_factory=dict)
    trace: str = ""
    when: float = 0.0
    exit_code: int = 1

    @classmethod
    def of(cls, error: BaseException, *, rank: int, place: dict[str, object] | None = None) -> Failure:
        """Return the failure of this process's exception."""
        add_nearest(error)
        text = "".join(traceback.format_exception(type(error), error, trimmed(error)))
        how = "".join(traceback.format_exception_only(error)).strip()
        return cls(rank, socket.gethostname(), os.getpid(), how, dict(place or {}), text, time.time())

    def to_json(self) -> str:
        """Return the failure as JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Return the failure from JSON."""
        return cls(**json.loads(text))

    def describe(self) -> str:
        """Return one sentence with the rank, the position and the cause."""
        known = ", ".join(f"{name} {value}" for name, value in self.place.items() if value not in (None, ""))
        where = f" in {known}" if known else ""
        return f"rank {self.rank} (host {self.host}, pid {self.pid}) failed{where}: {self.how}"

    def to_error(self) -> RankFailure:
        """Return the error that the other ranks and the launching process raise."""
        trace = f"\n--- traceback of rank {self.rank} ---\n{self.trace.rstrip()}" if self.trace else ""
        return RankFailure(
            self.describe() + trace,
            fix=f"fix the error of rank {self.rank}; errors of other ranks are consequences of it.",
        )


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code, which is negative for a signal as in `subprocess`."""
    if code >= 0:
        return f"the process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}"
