"""Fits of a replica group without a lighthouse."""

from __future__ import annotations

import pytest
from fakes import LoneManager

from loopwright.trainer.replica_groups.groups import ReplicaGroups


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[LoneManager]:
    """The Managers of the next fits, in reverse order."""
    pytest.importorskip("torchft")
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://nowhere:1")
    waiting: list[LoneManager] = []
    monkeypatch.setattr(ReplicaGroups, "_connect", lambda self: setattr(self, "manager", waiting.pop()))
    return waiting
