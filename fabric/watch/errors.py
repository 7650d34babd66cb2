"""Communication errors: those that another rank's failure may have caused."""

from __future__ import annotations

import sys

# Messages of gloo, NCCL and torch's process groups when a peer is gone or late (torch 2.9 to 2.13).
_SIGNS = (
    "gloo", "nccl", "processgroup", "process group", "connection closed by peer", "connection reset by peer",
    "broken pipe", "socket timeout", "application timeout caused pair closure", "collective operation timeout",
    "timed out waiting", "connectfullmesh", "wait timeout", "monitoredbarrier",
)  # fmt: skip
_LATE = ("timed out", "timeout", "time out")


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, the outermost first."""
    found: list[BaseException] = []
    next_one: BaseException | None = error
    while next_one is not None and next_one not in found:
        found.append(next_one)
        next_one = next_one.__cause__ or (None if next_one.__suppress_context__ else next_one.__context__)
    return found


def is_communication_error(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is a communication error."""
    return any(_is_one(link) for link in _chain(error))


def _is_one(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    # DistError is torch's own kind; it can exist only if torch.distributed was imported.
    kind = getattr(sys.modules.get("torch.distributed"), "DistError", None)
    if kind is not None and isinstance(error, kind):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)


def is_timeout(error: BaseException) -> bool:
    """Return whether a communication error reports late peers rather than a broken connection."""
    return any(_is_one(link) and any(sign in str(link).lower() for sign in _LATE) for link in _chain(error))
