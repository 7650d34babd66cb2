"""The stages of a sharded save, in their order; tests put a fault at each."""

from __future__ import annotations

STAGES_OF_ALL_RANKS = ("planned", "shard-opened", "shard-written", "shard-synced")

# The others are rank 0's. It writes the state file after its shard, and commits when all ranks have written.
STAGES = (
    "locked",
    *STAGES_OF_ALL_RANKS,
    "state-saved",
    "all-written",
    "manifest-synced",
    "manifest-renamed",
    "folder-renamed",
    "cleaned",
)


def reached(stage: str) -> None:
    """Do nothing; tests put a fault here."""
