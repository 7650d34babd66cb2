"""The threads that run gloo's collectives: waiting for them before the interpreter ends.

Such a thread frees the tensors of a collective after the waiting program continues, and needs the interpreter's lock
for tensors that Python knows. If the interpreter is ending by then, the process is aborted ("terminate called without
an active exception"). Destroying the process group ends the threads only if nothing else holds the group, and a wrapped
module does.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_NAME = "pt_gloo_runloop"
_THREADS = Path("/proc/self/task")
# A thread that waits for the interpreter's lock wakes every 5 ms (sys.getswitchinterval), an idle one does not.
_LOOK_S = 0.012


def wait_for_gloo_threads(timeout_s: float) -> bool:
    """Wait until the threads of this process that run gloo's collectives are idle; 12 ms if they are.

    Args:
        timeout_s: Longest time to wait, in seconds.

    Returns:
        Whether they are idle. True without such threads, and on systems without /proc.
    """
    ends = time.monotonic() + timeout_s
    seen = _activity()
    while seen:
        time.sleep(_LOOK_S)
        now = _activity()
        if now == seen and all(state == "S" for state, _ in now.values()):
            return True
        if time.monotonic() >= ends:
            return False
        seen = now
    return True


def _activity() -> dict[str, tuple[str, str]]:
    """Return the state and the context switches of each of the threads, by number."""
    found = {}
    with suppress(OSError):
        for thread in _THREADS.iterdir():
            with suppress(OSError):  # the thread has ended
                if (thread / "comm").read_text().strip() == _NAME:
                    lines = (thread / "status").read_text().splitlines()
                    fields = dict(line.split(":", 1) for line in lines if ":" in line)
                    switches = fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
                    found[thread.name] = (fields["State"].split()[0], switches)
    return found
