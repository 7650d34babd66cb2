"""Kills and full disks in the middle of a sharded save: the path has the old checkpoint or the new one, whole."""

from __future__ import annotations

import datetime
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from loopwright.checkpoint import load, verify
from loopwright.checkpoint import sharded as folders
from loopwright.checkpoint.sharded import stages
from loopwright.errors import CheckpointError

# Python 3.12 warns of a fork beside threads; the children here only save and die.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

ROWS = 3000


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401  # here once, and not in every child


def sharded_state(value: float) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    tensor = torch.full((ROWS, 2), value)
    return {"state_dict": {"w": distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)}, "value": value}


def value_at(path: Path) -> float:
    """Return which checkpoint is there, after comparing every byte and every element."""
    assert verify(path).sealed
    loaded = load(path)
    value = float(loaded["value"])
    assert torch.equal(loaded["state_dict"]["w"], torch.full((ROWS, 2), value))
    return value


def start_pair(folder: Path, act: Callable[[int], None]) -> list[int]:
    """Fork two ranks of a gloo group that call `act`; return their process ids. Whatever fails in them ends them."""
    import torch.distributed as dist

    store = folder / f"store-{os.urandom(4).hex()}"
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                timeout = datetime.timedelta(seconds=20)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=timeout
                )
                act(rank)
            except BaseException:
                os._exit(9)
            os._exit(0)
        children.append(child)
    return children


def ends_of(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.slow
def test_a_kill_at_every_stage_of_each_rank_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    stores.mkdir()
    root = tmp_path / "root"

    def save_first(rank: int) -> None:
        folders.save(sharded_state(1.0), root / "old.ckpt")

    assert ends_of(start_pair(stores, save_first)) == [0, 0]
    saved_before = {file: file.read_bytes() for file in (root / "old.ckpt").iterdir()}
    cases = [(0, stage) for stage in stages.STAGES] + [(1, stage) for stage in stages.STAGES_OF_ALL_RANKS]
    for victim, stage in cases:
        for is_new in (True, False):
            if not is_new and stage == "folder-renamed":
                continue
            path = root / ("new.ckpt" if is_new else "old.ckpt")

            def save_and_die(rank: int, victim: int = victim, stage: str = stage, path: Path = path) -> None:
                if rank == victim:
                    stages.reached = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == stage else None
                folders.save(sharded_state(2.0), path)

            ends = ends_of(start_pair(stores, save_and_die))
            case = (victim, stage, is_new)
            assert ends[victim] == -signal.SIGKILL, case
            assert ends[1 - victim] == 9, case
            is_committed = stage in ("folder-renamed", "cleaned") or (not is_new and stage == "manifest-renamed")
            if is_new and not is_committed:
                assert not path.exists(), case
            else:
                assert value_at(path) == (2.0 if is_committed else 1.0), case
            # The next save, by one process here, into the same folder and over the same path, removes what is left.
            if not is_new and not is_committed:
                assert all(file.read_bytes() == content for file, content in saved_before.items()), case
            folders.save({"value": 3.0}, path)
            assert sorted(os.listdir(root)) == sorted({"old.ckpt", path.name}), case
            assert set(os.listdir(path)) == {"manifest.json", *folders.read_manifest(path).files}, case
            folders.remove(path)
            if not is_new:
                path.mkdir()
                for file, content in saved_before.items():
                    file.write_bytes(content)


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    generator = random.Random(0)
    path = tmp_path / "root" / "a.ckpt"
    (tmp_path / "stores").mkdir()

    def save_forever(rank: int) -> None:
        first, second = sharded_state(1.0), sharded_state(2.0)
        while True:
            folders.save(first, path)
            folders.save(second, path)

    for number in range(6):
        children = start_pair(tmp_path / "stores", save_forever)
        before = path.stat().st_mtime_ns if path.exists() else 0
        while not path.exists() or path.stat().st_mtime_ns == before:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.02))
        os.kill(children[number % 2], signal.SIGKILL)
        assert -signal.SIGKILL in ends_of(children)
        assert value_at(path) in (1.0, 2.0)
    folders.save({"value": 3.0}, path)
    assert os.listdir(path.parent) == ["a.ckpt"]
    assert set(os.listdir(path)) == {"manifest.json", *folders.read_manifest(path).files}


def _save_with_a_limit(rank: int, size: int, folder: str) -> str:
    path = f"{folder}/a.ckpt"
    folders.save(sharded_state(1.0), path)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    try:
        folders.save(sharded_state(2.0), path)
    except CheckpointError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return message


def test_a_limit_on_one_rank_is_explained_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_save_with_a_limit, 2, str(tmp_path))
    assert first == second
    assert "rank 1: the checkpoint" in first
    assert "File too large" in first
    assert "ulimit -f" in first
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert value_at(tmp_path / "a.ckpt") == 1.0
    assert set(os.listdir(tmp_path / "a.ckpt")) == {"manifest.json", *folders.read_manifest(tmp_path / "a.ckpt").files}


def test_the_files_of_a_running_save_are_not_removed(tmp_path: Path) -> None:
    """A second save over the same path, and one beside it, while the first has its lock and a shard."""
    stores = tmp_path / "stores"
    stores.mkdir()
    path = tmp_path / "root" / "a.ckpt"
    folders.save({"value": 0.0}, path)
    waiting, going = os.pipe(), os.pipe()

    def save_slowly(rank: int) -> None:
        def reached(stage: str) -> None:
            if stage == "all-written":
                os.write(waiting[1], b"x")
                os.read(going[0], 1)

        stages.reached = reached
        folders.save(sharded_state(1.0), path)

    children = start_pair(stores, save_slowly)
    os.read(waiting[0], 1)
    folders.save({"value": 2.0}, path)
    folders.save({"value": 2.0}, path.with_name("b.ckpt"))
    assert load(path)["value"] == 2.0
    os.write(going[1], b"x")
    assert ends_of(children) == [0, 0]
    for end in (*waiting, *going):
        os.close(end)
    assert value_at(path) == 1.0  # the last one that commits is there
    assert set(os.listdir(path)) == {"manifest.json", *folders.read_manifest(path).files}
    assert sorted(os.listdir(path.parent)) == ["a.ckpt", "b.ckpt"]
