"""Checks of several ranks: comparisons, all_reduce, and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from loopwright.doctor import Level
from loopwright.doctor.all_reduce import AllReduceError, Rate, measure
from loopwright.doctor.ranks import RankFacts, compare, installed_packages, judge_places


def _rank(machine: int, versions: Mapping[str, str], packages: Mapping[str, str], **variables: str) -> RankFacts:
    return RankFacts(machine, f"host{machine}", versions, packages, variables, None)


def test_what_differs_is_named_by_rank_and_host() -> None:
    same = {"torch": "2.13.0", "NCCL": "2.27.5", "loopwright": "0.1.0"}
    ranks = [
        _rank(0, same, {"numpy": "2.0", "rich": "15"}),
        _rank(0, same, {"numpy": "2.0", "rich": "15"}),
        _rank(1, {**same, "NCCL": "2.21.5"}, {"numpy": "1.26"}, NCCL_ALGO="Ring"),
    ]
    found = {one.name: one for one in compare(ranks)}
    assert found["torch"].level is Level.OK
    assert found["torch"].value == "2.13.0 on all ranks"
    assert found["NCCL"].level is Level.PROBLEM
    assert found["NCCL"].value == "2.27.5 on ranks 0, 1 (host0); 2.21.5 on rank 2 (host1)"
    assert found["package numpy"].level is Level.WARNING
    assert found["package numpy"].value == "2.0 on ranks 0, 1 (host0); 1.26 on rank 2 (host1)"
    assert found["package rich"].value == "15 on ranks 0, 1 (host0); none on rank 2 (host1)"
    assert found["variable NCCL_ALGO"].value == "none on ranks 0, 1 (host0); Ring on rank 2 (host1)"
    assert "ranks 0, 1 on machine 0 (host0); rank 2 on machine 1 (host1)" in judge_places(ranks, 0.5).value


def test_the_version_of_a_package_is_the_one_that_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (folder, name) in enumerate([("first", "Some_Package"), ("second", "some-package")]):
        place = tmp_path / folder / f"some_package-{number}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert installed_packages()["some-package"] == "1"
    assert "Some_Package" not in installed_packages()


def test_many_unequal_packages_share_a_line() -> None:
    names = [f"package{number:02}" for number in range(30)]
    ranks = [_rank(0, {}, dict.fromkeys(names, "1")), _rank(0, {}, dict.fromkeys(names, "2"))]
    found = list(compare(ranks))
    assert len(found) < 16
    assert all(any(name in one.name or name in one.value for one in found) for name in names)


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 2 (n - 1) / n of the algorithm's bandwidth: 1.75 of 100 GB/s with 8 ranks.
    assert Rate(1_000_000_000, 8, 0.01, 0).bus_bandwidth == pytest.approx(175e9)
    assert Rate(1_000_000_000, 2, 0.01, 0).bus_bandwidth == pytest.approx(100e9)


def _measure(rank: int, size: int) -> tuple[Rate, Rate]:
    everyone = dist.new_group(backend="gloo")
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]], backend="gloo")
    assert pairs is not None
    return measure(everyone, 4096, torch.device("cpu")), measure(pairs, 4096, torch.device("cpu"))


def test_all_ranks_have_the_rate_of_the_slowest() -> None:
    (everyone, pairs), *others = run_ranks(_measure, 3)
    assert all(one == (everyone, pairs) for one in others)
    assert (everyone.num_ranks, everyone.size_bytes) == (3, 4096)
    assert everyone.seconds > 0
    assert pairs.num_ranks == (2 if pairs.slowest < 2 else 1)


def _measure_wrong_sums(rank: int, size: int) -> dict[int, str]:
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, group: Any = None) -> None:
        right(tensor, group=group)
        if rank == 1:
            tensor[-1] += 1

    dist.all_reduce = wrong
    with pytest.raises(AllReduceError) as caught:
        measure(dist.new_group(backend="gloo"), 4096, torch.device("cpu"))
    return caught.value.reasons


def test_a_wrong_sum_is_reported_on_all_ranks_with_its_rank() -> None:
    expected = {1: "expected the sum 3 everywhere, got 4"}
    assert run_ranks(_measure_wrong_sums, 2) == [expected, expected]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2: expected 0 to 1"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0: expected a number of at least 1"),
        (["--nnodes", "2", "--rdzv-endpoint", "host"], "expected HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--main-address", "a"], "alternatives"),
        (["--node-rank", "0", "--main-address", "a"], "--node-rank, --main-address without --nnodes"),
        (["--nnodes", "2", "--main-port", "80"], "--main-port without --main-address"),
        (["--nnodes", "2", "--main-address", "a", "--main-port", "70000"], "a port from 1 to 65535"),
    ],
)
def test_contradictory_arguments_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from loopwright.cli import run

    with pytest.raises(SystemExit):
        run(["doctor", *arguments])
    assert words in capsys.readouterr().err
