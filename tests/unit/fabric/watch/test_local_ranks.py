"""Which processes of this machine have ended, and how."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from loopwright.fabric.watch.local_ranks import LocalRanks
from loopwright.fabric.watch.peers import Peer


class Launcher:
    def __init__(self, exits: dict[int, int]) -> None:
        self.exits = exits

    def local_exits(self) -> dict[int, int]:
        return self.exits

    def kill(self, signum: int) -> None:
        raise AssertionError("nothing here is to be killed")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def peer_of(process: subprocess.Popen[bytes]) -> Peer:
    mine = Peer.of_this_process(0, 0)
    return Peer(1, 1, mine.host, mine.machine, process.pid, 0)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_running_process_is_not_lost(child: subprocess.Popen[bytes]) -> None:
    ranks = LocalRanks(None)
    ranks.add([peer_of(child)])
    assert not ranks.note_ended(0.0)
    assert not list(ranks.lost(100.0, lambda peer: False))
    assert ranks.num_gone == 0


def test_an_end_without_an_exit_code_is_reported_after_a_moment_and_once(child: subprocess.Popen[bytes]) -> None:
    ranks = LocalRanks(None)
    ranks.add([peer_of(child)])
    end(child)
    assert ranks.note_ended(10.0)
    assert not ranks.note_ended(10.1)  # no news
    assert not list(ranks.lost(10.1, lambda peer: False))
    ((peer, how, trace),) = ranks.lost(11.0, lambda peer: False)
    assert (peer.rank, trace) == (1, "")
    assert "without a report" in how
    assert not list(ranks.lost(12.0, lambda peer: False))
    assert ranks.num_gone == 1


def test_the_launcher_knows_the_exit_code_at_once(child: subprocess.Popen[bytes]) -> None:
    ranks = LocalRanks(Launcher({1: -signal.SIGKILL}))
    ranks.add([peer_of(child)])
    end(child)
    ranks.note_ended(10.0)
    ((_, how, _),) = ranks.lost(10.0, lambda peer: False)
    assert "SIGKILL" in how


def test_an_end_that_is_settled_is_not_reported(child: subprocess.Popen[bytes]) -> None:
    ranks = LocalRanks(None)
    ranks.add([peer_of(child)])
    end(child)
    ranks.note_ended(10.0)
    assert not list(ranks.lost(20.0, lambda peer: True))
    assert ranks.peer(1) is None
