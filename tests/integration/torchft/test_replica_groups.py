"""Replica groups under torchft: killed groups leave the others training, come back, and the result is that of no kill.

LOOPWRIGHT_KILLS raises the number of kills of each kind.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from replica_runs import NUM_KILLS, check_samples, differences, replica_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# One kill at each of a few places, or as many as wanted at every place.
PLACES = [["backward", "reduce", "commit", "save", "healing"]]
if NUM_KILLS > 1:
    ALL_PLACES = ["forward", "backward", "reduce", "commit", "quorum", "validation", "save", "start", "healing"]
    PLACES = [[place] * NUM_KILLS for place in ALL_PLACES]


@pytest.mark.parametrize("places", PLACES, ids=lambda places: places[0])
def test_a_killed_group_leaves_the_other_training_and_comes_back(tmp_path: Path, places: list[str]) -> None:
    with replica_groups(tmp_path, 2, sleep_s=0.005) as groups:
        for number, place in enumerate(places):
            group = number % 2
            if place in ("start", "healing"):  # of a group that is coming back
                groups.kill([group], "forward")
                (tmp_path / "turn").write_text(f"{group}-0 {place}\n")
                groups.start(group)
                groups.wait_for(f"the end in {place}", lambda group=group: groups.running[group].poll() is not None)
                (tmp_path / "turn").unlink()
            elif place == "save":  # only one group writes
                (tmp_path / "turn").write_text("0-0 save\n1-0 save\n")
                groups.wait_for("a save", lambda: any(one.poll() is not None for one in groups.running.values()))
                (tmp_path / "turn").unlink()
                group = next(name for name, one in groups.running.items() if one.poll() is not None)
            else:
                groups.kill([group], place)
            groups.wait_for_steps(1 - group, 2)
            groups.start(group)
            groups.wait_for_steps(group, 3)
        ends = groups.end()
        reference = groups.reference()
    for end in ends.values():
        assert not differences(reference, end)
    check_samples(groups)


def test_two_of_three_groups_die(tmp_path: Path) -> None:
    with replica_groups(tmp_path, 3, sleep_s=0.005, micro_batches=4, sums=True) as groups:
        for number in range(NUM_KILLS):
            survivor = number % 3
            pair = [group for group in range(3) if group != survivor]
            groups.kill(pair, ("forward", "reduce", "commit")[number // 3 % 3])
            groups.wait_for_steps(survivor, 2)
            for group in pair:
                groups.start(group)
            for group in pair:
                groups.wait_for_steps(group, 3)
        ends = groups.end()
        reference = groups.reference()
    for end in ends.values():
        assert not differences(ends[0], end)
        assert not differences(reference, end, within=1e-12)  # sums over another number of groups
    check_samples(groups)


def test_a_group_dies_while_another_heals_from_it(tmp_path: Path) -> None:
    with replica_groups(tmp_path, 3, sleep_s=0.005) as groups:
        for number in range(NUM_KILLS):
            healing = number % 3
            groups.kill([healing], "quorum")
            (tmp_path / "turn").write_text("".join(f"{group}-0 sending\n" for group in range(3)))
            groups.start(healing)
            groups.wait_for("a sender", lambda: any(one.poll() is not None for one in groups.running.values()))
            (tmp_path / "turn").unlink()
            time.sleep(0.1)
            for group in [name for name, one in groups.running.items() if one.poll() is not None]:
                groups.start(group)
            for group in range(3):
                groups.wait_for_steps(group, 3)
        ends = groups.end()
        reference = groups.reference()
    for end in ends.values():
        assert not differences(reference, end)


def test_all_groups_die_and_resume_from_the_last_checkpoint(tmp_path: Path) -> None:
    with replica_groups(tmp_path, 2, sleep_s=0.005, dropout=0.1, differs=True) as groups:
        for number in range(NUM_KILLS):
            groups.wait_for_steps(0, 8)
            groups.kill([0, 1], ("forward", "backward", "validation")[number % 3])
            for group in range(2):
                groups.start(group)
            for group in range(2):
                groups.wait_for_steps(group, 3)
        ends = groups.end()
        reference = groups.undisturbed()
    assert not differences(ends[0], ends[1])
    assert not differences(reference, ends[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"] if NUM_KILLS > 1 else ["fsdp"])
def test_a_rank_of_a_group_dies(tmp_path: Path, strategy: str) -> None:
    with replica_groups(tmp_path, 2, sleep_s=0.005, devices=2, strategy=strategy) as groups:
        for number in range(NUM_KILLS):
            group = number % 2
            groups.kill([group], ("forward", "backward", "reduce")[number // 2 % 3], rank=number // 2 % 2)
            groups.wait_for_steps(1 - group, 2)
            groups.start(group)
            groups.wait_for_steps(group, 3)
        ends = groups.end()
        reference = groups.reference()
    for end in ends.values():
        assert not differences(reference, end, within=1e-12)  # groups add up their own averages
