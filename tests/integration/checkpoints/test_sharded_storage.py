"""Several ranks save one folder: what each writes, which errors all of them see, and remote stores."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from loopwright.checkpoint import TorchCheckpointIO, load, storage, verify
from loopwright.checkpoint import sharded as folders
from loopwright.checkpoint.sharded import stages
from loopwright.checkpoint.sharded.target import target_of
from loopwright.errors import CheckpointError


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401  # here once, and not in every child


def sharded_state(value: float, rows: int = 5) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    tensor = torch.arange(rows * 2.0).view(rows, 2) + value
    return {"state_dict": {"w": distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)}, "value": value}


def value_at(path: str | Path, rows: int = 5) -> float:
    assert verify(path).sealed
    loaded = load(path)
    assert torch.equal(loaded["state_dict"]["w"], torch.arange(rows * 2.0).view(rows, 2) + loaded["value"])
    return float(loaded["value"])


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _save_on_grids(rank: int, size: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(24.0).view(6, 4)

    def on_grid(*placements: Any) -> Any:
        return distribute_tensor(whole, grid, placements, src_data_rank=None)

    state = {"replicated": on_grid(Replicate(), Shard(0)), "both": on_grid(Shard(1), Shard(0)),
             "everywhere": on_grid(Replicate(), Replicate())}  # fmt: skip
    TorchCheckpointIO().save_checkpoint({"state_dict": state}, f"{folder}/grid.ckpt")
    pair = grid["shard"]  # ranks 0, 1 and ranks 2, 3: each pair saves its own
    on_pair = {"w": distribute_tensor(whole + rank // 2, pair, [Shard(0)], src_data_rank=None)}
    folders.save(on_pair, f"{folder}/pair-{rank // 2}.ckpt", group=pair.get_group())
    dist.barrier()


def test_replicated_shards_are_written_once_and_groups_save_alone(tmp_path: Path) -> None:
    run_ranks(_save_on_grids, 4, str(tmp_path))
    whole = torch.arange(24.0).view(6, 4)
    manifest = folders.read_manifest(tmp_path / "grid.ckpt")
    assert manifest.mesh is not None
    assert (manifest.mesh.shape, manifest.mesh.dim_names) == ((2, 2), ("replicate", "shard"))
    chunks = {path.partition("/")[2]: len(entry.chunks) for path, entry in manifest.tensors.items()}
    assert chunks == {"replicated": 2, "both": 4, "everywhere": 1}
    files = [chunk.file for entry in manifest.tensors.values() for chunk in entry.chunks]
    assert len(set(files)) > 2  # the work is shared
    assert all(torch.equal(tensor, whole) for tensor in load(tmp_path / "grid.ckpt")["state_dict"].values())
    for number in (0, 1):
        path = tmp_path / f"pair-{number}.ckpt"
        assert folders.read_manifest(path).world_size == 2
        assert torch.equal(load(path)["w"], whole + number)


def _fail_in_turn(rank: int, size: int, folder: str) -> dict[str, tuple[str, list[str]]]:
    """Save over a checkpoint, with one fault after the other; return what was raised, and what is in the folder."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial

    path = f"{folder}/a.ckpt"
    folders.save(sharded_state(1.0), path)
    before = sorted(os.listdir(path))
    outcomes: dict[str, tuple[str, list[str]]] = {}

    def attempt(name: str, state: dict[str, Any], target: str = path, fault: Any = None) -> None:
        stages.reached = fault or (lambda stage: None)
        raised = error_of(lambda: folders.save(state, target))
        stages.reached = lambda stage: None
        dist.barrier()
        left = [] if sorted(os.listdir(path)) == before else os.listdir(path)
        left += sorted(set(os.listdir(folder)) - {"a.ckpt"})
        outcomes[name] = (raised, left)
        dist.barrier()

    def fail(at_rank: int, at_stage: str, error: BaseException) -> Callable[[str], None]:
        def reached(stage: str) -> None:
            if (rank, stage) == (at_rank, at_stage):
                raise error

        return reached

    class Unpicklable(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("no way to send this")

    state = sharded_state(2.0)
    new = f"{folder}/new.ckpt"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for stage in stages.STAGES_OF_ALL_RANKS[1:3]:
        for target in (path, new):
            attempt(f"full at {stage} {target == new}", state, target, fail(1, stage, full))
    for stage in stages.STAGES:
        if stage not in ("manifest-renamed", "folder-renamed", "cleaned"):
            attempt(f"rank 0 at {stage}", state, path, fail(0, stage, OSError(errno.EIO, "Input/output error")))
            attempt(f"rank 0 at {stage}, new", state, new, fail(0, stage, OSError(errno.EIO, "Input/output error")))
    attempt("rank 0 at manifest-renamed, new", state, new, fail(0, "manifest-renamed", OSError("Input/output error")))
    real = os.rename

    def refuse(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    os.rename = refuse
    attempt("rank 0 at os.rename", state, new)
    os.rename = real
    attempt("unpicklable", state, path, fail(1, "shard-written", Unpicklable(1, 2)))
    attempt("ctrl-c", state, path, fail(1, "shard-written", KeyboardInterrupt()))
    attempt("not plain", {**state, "object": object()} if rank == 0 else state)
    partial = DTensor.from_local(torch.ones(2), state["state_dict"]["w"].device_mesh, [Partial()])
    attempt("partial", {**state, "p": partial} if rank == 1 else state)
    attempt("one more", {**state, "more": state["state_dict"]["w"] + 1} if rank == 1 else state)
    attempt("one less", {**state, "more": state["state_dict"]["w"] + 1} if rank == 0 else state)
    attempt("a file", state, f"{folder}/a.ckpt/manifest.json")
    assert value_at(path) == 1.0
    dist.barrier()
    for value, stage in ((2.0, "manifest-renamed"), (3.0, "cleaned")):  # too late: the new one is there
        stages.reached = fail(0, stage, OSError(errno.EIO, "Input/output error"))
        assert "Input/output error" in error_of(lambda value=value: folders.save(sharded_state(value), path))
        dist.barrier()
        assert value_at(path) == value
        dist.barrier()
    return outcomes


def test_an_error_on_one_rank_is_raised_on_all_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(_fail_in_turn, 2, str(tmp_path))
    expected = {"unpicklable": "Unpicklable: no way to send this",
                "not plain": r"rank 0: [^$]*\[.object.\]: object", "ctrl-c": "rank 1",
                "partial": r"rank 1: .*p: its placements are \(Partial", "one more": r"rank 0 lacks more \(rank 1\)",
                "one less": "do not make up full tensors: .*more invalid fill",
                "a file": "there is a file at that path"}  # fmt: skip
    for name, (raised, left) in first.items():
        assert raised.startswith("CheckpointError: the sharded checkpoint"), name
        assert left == [], name
        if name.startswith("full"):
            assert "rank 1: the checkpoint" in raised
            assert "No space left on device" in raised
            assert "bytes are free in" in raised
            assert "free space on that disk" in raised
        elif name.startswith("rank 0 at"):
            assert "rank 0: " in raised
            assert "Input/output error" in raised
        else:
            assert re.search(expected[name], raised), (name, raised)
    assert second["ctrl-c"][0].startswith("KeyboardInterrupt")
    assert {name: raised for name, (raised, _) in second.items() if name != "ctrl-c"} == {
        name: raised for name, (raised, _) in first.items() if name != "ctrl-c"
    }
    assert value_at(tmp_path / "a.ckpt") == 3.0
    assert os.listdir(tmp_path) == ["a.ckpt"]


def _save_again(rank: int, size: int, folder: str) -> list[list[str]]:
    import torch.distributed as dist

    seen: list[str] = []
    synced: list[str] = []
    stages.reached = seen.append
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    os.fsync = fsync
    path = f"{folder}/a.ckpt"
    for value in (1.0, 2.0):
        folders.save(sharded_state(value, rows=1), path)
        dist.barrier()
    # A damaged manifest, a link, and an empty folder are no obstacles.
    if rank == 0:
        Path(path, "manifest.json").write_text("damaged")
        Path(folder, "b.ckpt").symlink_to("a.ckpt")
        Path(folder, "c.ckpt").mkdir()
    dist.barrier()
    for name in "abc":
        folders.save(sharded_state(3.0, rows=1), f"{folder}/{name}.ckpt")
    return [seen, synced]


def test_saves_replace_each_other_and_leave_nothing(tmp_path: Path) -> None:
    (seen, synced), (idle, _) = run_ranks(_save_again, 2, str(tmp_path))
    assert tuple(seen[: len(stages.STAGES)]) == stages.STAGES
    assert set(idle) == {"planned"}  # it has nothing to write
    shard = next(place for place, name in enumerate(synced) if name.startswith("shard-"))
    manifest = next(place for place, name in enumerate(synced) if name.startswith(".manifest.json.tmp-"))
    assert shard < manifest < synced.index(tmp_path.name, manifest)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt", "c.ckpt"]
    for name in "abc":
        path = tmp_path / f"{name}.ckpt"
        assert not path.is_symlink()
        assert value_at(path, rows=1) == 3.0
        assert set(os.listdir(path)) == {"manifest.json", *folders.read_manifest(path).files}


def _save_remotely(rank: int, size: int, url: str, options: dict[str, Any]) -> str:
    import fsspec
    import torch.distributed as dist
    from fsspec.implementations.local import LocalFileSystem

    class Shared(LocalFileSystem):
        protocol = "shared"

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return super()._strip_protocol(str(path).removeprefix("shared://"))

    fsspec.register_implementation("shared", Shared, clobber=True)
    folders.save(sharded_state(1.0), url, options)
    dist.barrier()

    def names() -> set[str]:
        store, key = fsspec.url_to_fs(url, **options)
        return {os.path.basename(name) for name in store.ls(key, detail=False)}

    before = names()
    assert before == {"manifest.json", *folders.read_manifest(url, options).files}
    assert value_at(url) == 1.0
    lazy = load(url, lazy=True)["state_dict"]["w"]
    assert lazy.read([1, 1], [2, 1]).tolist() == [[4.0], [6.0]]

    def fail(stage: str) -> None:
        if rank == size - 1 and stage == "shard-written":
            raise OSError(errno.ENETDOWN, "Network is down")

    stages.reached = fail
    raised = error_of(lambda: folders.save(sharded_state(2.0), url, options))
    stages.reached = lambda stage: None
    dist.barrier()
    assert names() == before
    store, key = fsspec.url_to_fs(url, **options)
    real = type(store).pipe_file
    calls: list[str] = []

    def pipe_half(self: Any, name: str, content: bytes) -> None:
        calls.append(name)
        real(self, name, content[: len(content) // 2] if len(calls) == 1 else content)

    type(store).pipe_file = pipe_half
    garbled = error_of(lambda: folders.save(sharded_state(2.0), url, options))
    type(store).pipe_file = real
    assert "what arrived differs" in garbled
    dist.barrier()
    assert names() == before
    assert value_at(url) == 1.0
    dist.barrier()
    if rank == 0:  # what a killed save would have left
        store.pipe_file(f"{key}/shard-1-abcdef01-00000-of-00002.safetensors", b"stale")
    dist.barrier()
    folders.save(sharded_state(3.0), url, options)
    dist.barrier()
    assert value_at(url) == 3.0
    assert names() == {"manifest.json", *folders.read_manifest(url).files}
    assert not names() & (before - {"manifest.json"})
    dist.barrier()
    if rank == 0:
        with pytest.raises(CheckpointError, match="there is a file"):
            target_of(f"{url}/manifest.json", options)
        storage.remove(url)
        assert not folders.is_folder_checkpoint(url)
        with pytest.raises(storage.CheckpointNotFound):
            load(url)
    return raised


def test_remote_folders(tmp_path: Path) -> None:
    for raised in run_ranks(_save_remotely, 2, f"shared://{tmp_path}/runs/a.ckpt", {}):
        assert "rank 1: the checkpoint" in raised
        assert "Network is down" in raised
    assert list(tmp_path.rglob("*.safetensors")) == []
    (raised,) = run_ranks(_save_remotely, 1, "memory://runs/a.ckpt", {})
    assert "Network is down" in raised
