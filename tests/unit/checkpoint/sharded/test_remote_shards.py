"""Sharded tensors that other ranks write: what stands for them in the checkpoint of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from loopwright.checkpoint import load
from loopwright.checkpoint import sharded as folders
from loopwright.checkpoint.sharded.tree import take_out
from loopwright.errors import CheckpointError
from loopwright.strategies.distributed.shards import RemoteShards

# Any in this file: the content of checkpoints.


def values() -> dict[str, Tensor]:
    return {"first": torch.arange(6.0).view(3, 2), "second": torch.arange(4, dtype=torch.bfloat16)}


def checkpoint(rank: int) -> dict[str, Any]:
    """Return a checkpoint of which each of two ranks has a tensor alone, the second one under two names."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    pairs = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
    found: dict[str, Any] = {}
    for owner, (name, value) in enumerate(values().items()):
        own = DTensor.from_local(value, pairs, [Replicate()], run_check=False)
        found[name] = own if rank == owner else RemoteShards(value.shape, value.dtype)
    return {**found, "again": found["second"], "count": 7 if rank == 0 else None}


def save_both(rank: int, size: int, path: str) -> None:
    folders.save(checkpoint(rank), path)


def test_each_rank_writes_what_it_has_alone(tmp_path: Path) -> None:
    path = tmp_path / "both.ckpt"
    run_ranks(save_both, 2, str(path))
    manifest = folders.read_manifest(path)
    assert manifest.tensors.keys() == {"first", "second"}
    files = {name: entry.chunks[0].file for name, entry in manifest.tensors.items()}
    assert "-00000-of-00002" in files["first"]
    assert "-00001-of-00002" in files["second"]
    loaded = load(path)
    for name, value in values().items():
        assert torch.equal(loaded[name], value)
    assert loaded["again"].data_ptr() == loaded["second"].data_ptr()
    assert loaded["count"] == 7


def test_what_stands_for_a_tensor_is_one_with_its_path() -> None:
    remote = RemoteShards(torch.Size([2]), torch.float32)
    split = take_out({"model": {"weight": remote}})
    assert split.remote == {"model/weight": remote}
    assert not split.tensors


def test_a_tensor_that_no_rank_has_is_refused(tmp_path: Path) -> None:
    lost = {"a": {"lost": RemoteShards(torch.Size([2]), torch.float32)}}
    with pytest.raises(CheckpointError, match="no rank has a/lost"):
        folders.save(lost, tmp_path / "lost.ckpt")
    assert not (tmp_path / "lost.ckpt").exists()
