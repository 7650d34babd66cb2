"""The report on where all ranks stand: grouping, who is missing, who called something else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback

import pytest
import torch.distributed as dist

from loopwright.fabric.watch.failure_store import FailureStore
from loopwright.fabric.watch.peers import Peer, StackOnSignal, stack_of
from loopwright.fabric.watch.rank_status import LastCollective, RankStatus, phrase
from loopwright.fabric.watch.stall_report import StallReport, StallReporter


def stands(rank: int, number: int, name: str = "all_reduce", doing: str = "waits", group: str = "") -> RankStatus:
    place = {"hook": "training_step", "step": 3}
    return RankStatus(rank, "h", 100 + rank, place, doing, (f"line of {doing}",), LastCollective(name, number, group))


def test_ranks_behind_the_others_are_missing() -> None:
    report = StallReport([stands(0, 17), stands(1, 16, doing="is in the data loader"), stands(2, 17)])
    assert report.missing == [1]
    assert report.summary() == "rank 1 did not come to all_reduce #17, where ranks 0, 2 wait"
    assert report.culprit is report.statuses[1]


def test_silent_ranks_are_missing() -> None:
    report = StallReport([stands(0, 17), RankStatus(1, is_silent=True, doing="does not answer")])
    assert report.missing == [1]


def test_a_rank_that_ended_is_missing_only_where_others_wait_for_it() -> None:
    ended = RankStatus(0, doing="has ended normally", collective=LastCollective("barrier", 5), has_ended=True)
    assert StallReport([ended, stands(1, 3, group="pair"), stands(2, 2, group="pair")]).missing == [2]
    assert StallReport([ended, stands(1, 6), stands(2, 6)]).culprit is ended
    never = RankStatus(0, doing="has ended normally", has_ended=True)
    assert StallReport([never, stands(1, 3, group="pair"), stands(2, 2, group="pair")]).missing == [2]
    assert StallReport([never, stands(1, 3), stands(2, 2)]).missing == [0, 2]


def test_another_operation_of_the_same_number_is_named() -> None:
    report = StallReport([stands(0, 5), stands(1, 5, "barrier"), stands(2, 5)])
    assert report.missing == []
    assert report.mismatched == {"all_reduce #5": [0, 2], "barrier #5": [1]}
    assert report.culprit is report.statuses[1]
    assert "rank 1 called barrier #5" in report.summary()


def test_gathered_inputs_may_differ_in_shape_and_reduced_ones_may_not() -> None:
    def of(name: str) -> StallReport:
        shapes = ("[3] Float", "[4] Float")
        return StallReport(
            [RankStatus(r, collective=LastCollective(name, 5, "", shape)) for r, shape in enumerate(shapes)]
        )

    assert not of("all_gather").mismatched
    assert len(of("all_reduce").mismatched) == 2


def test_another_group_is_no_reason() -> None:
    report = StallReport([stands(0, 5), stands(1, 5), stands(2, 900, group="checkpoints")])
    assert report.furthest == LastCollective("all_reduce", 5)
    assert report.missing == []


def test_where_nobody_is_behind_nobody_is_blamed() -> None:
    report = StallReport([stands(0, 5), stands(1, 5)])
    assert report.culprit is None
    assert report.summary() == "no rank is behind the others"


def test_the_smallest_group_comes_first_and_each_stack_once() -> None:
    text = StallReport([stands(0, 7), stands(1, 6, doing="hangs"), stands(2, 7), stands(3, 7)]).text(
        "no progress for 9 s"
    )
    assert text.index("rank 1 (hook training_step, step 3): hangs") < text.index("ranks 0, 2, 3 (")
    assert text.count("line of waits") == 1


def test_a_finding_is_delivered_while_a_later_request_is_open() -> None:
    store = dist.HashStore()
    stores = [FailureStore(store, rank=rank, size=3) for rank in range(2)]  # rank 2 does not answer
    reporters = [StallReporter(one, rank=rank, size=3) for rank, one in enumerate(stores)]

    def answer(now: float) -> None:
        for rank, (one, reporter) in enumerate(zip(stores, reporters, strict=True)):
            request = one.new_status_request()
            assert request is not None
            reporter.answer(*request, stands(rank, 5), now)

    first = reporters[0].request_finding("timed out")
    answer(0.0)
    assert reporters[1].request_finding("timed out, too") == first + 1
    for reporter in reporters:
        reporter.advance([], 2.0)
    answer(2.1)
    for reporter in reporters:
        reporter.advance([], 2.1)
    found = reporters[0].wait_for_finding(first, wait_s=0.0)
    assert found is not None
    assert found.culprit is not None
    assert found.culprit.rank == 2


def test_a_standing_survives_the_way_through_the_store() -> None:
    status = RankStatus.of_this_process(
        3, host="h", pid=1, thread=threading.get_ident(), place={"step": 4}
    )  # fmt: skip
    again = RankStatus.from_json(status.to_json())
    assert again.place == {"step": 4}
    assert "test_a_standing_survives" in again.doing
    assert RankStatus.from_json(stands(1, 2).to_json()).collective == LastCollective("all_reduce", 2)


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        ("/lib/site-packages/torch/distributed/distributed_c10d.py", "all_reduce", "waits in all_reduce #4"),
        ("/lib/site-packages/torch/utils/data/dataloader.py", "__next__", "is in the data loader"),
        ("/lib/site-packages/torch/autograd/graph.py", "_engine_run_backward", "is in backward"),
        ("/home/me/model.py", "forward", "is in forward"),
    ],
)
def test_a_stack_becomes_a_phrase(file: str, name: str, expected: str) -> None:
    frames = traceback.StackSummary.from_list([("/home/me/train.py", 12, "main", "fit()"), (file, 3, name, "x")])
    said = phrase(frames, LastCollective("all_reduce", 4))
    assert said.startswith(expected)
    assert "/home/me/" in said


def test_one_thread_is_found_in_what_faulthandler_writes() -> None:
    text = (
        'Thread 0x00000000000000aa (most recent call first):\n  File "a.py", line 1 in wait\n\n'
        "Current thread 0x00000000000000bb (most recent call first):\n"
        '  File "b.py", line 2 in inner\n  File "b.py", line 9 in outer\n'
    )
    assert stack_of(text, 0xBB) == ['  File "b.py", line 9 in outer', '  File "b.py", line 2 in inner']


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_that_has_ended_is_gone_also_as_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    mine = Peer.of_this_process(0, 0)
    peer = Peer(1, 1, mine.host, mine.machine, child.pid, 0)
    assert peer.state() != "gone"
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from here on
    assert peer.state() == "gone"
    child.communicate()
    assert peer.state() == "gone"


def test_another_process_with_the_same_number_is_not_taken_for_it() -> None:
    mine = Peer.of_this_process(0, 0)
    assert mine.state() != "gone"
    if mine.started:
        assert Peer(0, 0, mine.host, mine.machine, mine.pid, mine.started - 1).state() == "gone"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd")
def test_a_stack_is_written_on_a_signal() -> None:
    stack = StackOnSignal()
    peer = Peer.of_this_process(
        0, 0, trace_signal=stack.number, trace_file=stack.file, thread=threading.get_ident()
    )  # fmt: skip
    lines = peer.read_stack(peer.ask_for_stack())
    assert "test_a_stack_is_written" in "".join(lines)
