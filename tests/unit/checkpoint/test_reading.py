"""Reading through any checkpoint IO: which rank verifies what, and what an IO is asked that knows less."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from loopwright.checkpoint import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO, save, storage
from loopwright.checkpoint.reading import Ranks, read_on_all_ranks
from loopwright.checkpoint.sharded.copying import copy
from loopwright.errors import CheckpointError

# Any in this file: contents of checkpoints.


def beside_another() -> Ranks:
    """Return rank 1 of two, where the other one does the same."""
    return Ranks(1, 2, gather=lambda value: [value, value], together=lambda function: function())


class Simple(CheckpointIO):
    """A user's own: knows neither `lazy` nor `verify`."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> Any:
        return torch.load(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None: ...


class Old(Simple):
    """As Lightning's documentation has long had it."""

    def load_checkpoint(self, path: Any, storage_options: Any = None) -> Any:  # type: ignore[override]
        assert storage_options is None
        return torch.load(path, weights_only=True)


class Open(Simple):
    """Passes on what it is given."""

    def load_checkpoint(self, path: Any, **options: Any) -> Any:
        return torch.load(path, **options)


class Derived(TorchCheckpointIO):
    """A user's own, derived from ours, with the arguments that the base class documents."""

    def load_checkpoint(  # type: ignore[override]  # as users write it
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> Any:
        return super().load_checkpoint(path, map_location, weights_only)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", [Simple, Old, Open, Derived, TorchCheckpointIO])
def test_only_an_io_that_can_load_without_it_shares_out_verification(
    tmp_path: Path, kind: type[CheckpointIO], wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    kind().save_checkpoint({"value": torch.ones(2)}, path)
    verified: list[Path] = []
    whole: list[Path] = []
    real = storage.verified.verify_as

    def verify_as(path: Path, shown: str) -> Any:
        whole.append(path)
        return real(path, shown)

    monkeypatch.setattr(storage, "verify_share", lambda path, rank, size: verified.append(path))
    monkeypatch.setattr(storage.verified, "verify_as", verify_as)
    io = AsyncCheckpointIO(kind()) if wrapped else kind()
    both = beside_another()
    for by_parts, ranks, num_shared in ((True, both, 1), (False, both, 0), (True, replace(both, size=1), 0)):
        verified.clear()
        whole.clear()
        loaded = read_on_all_ranks(io, path, ranks, is_safe=True, by_parts=by_parts)
        assert torch.equal(loaded["value"], torch.ones(2))
        is_shared = bool(num_shared) and kind is TorchCheckpointIO
        assert len(verified) == is_shared
        assert bool(whole) == (issubclass(kind, TorchCheckpointIO) and not is_shared)


def test_one_rank_reads_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save({"value": torch.arange(1000.0)}, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    storage.verify_share(path, 1, 2)
    with pytest.raises(CheckpointError, match="damaged"):
        storage.verify_share(path, 0, 2)


def save_folder(rank: int, size: int, path: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    tensor = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(tensor, init_device_mesh("cpu", (size,)), [Shard(0)], src_data_rank=None)
    TorchCheckpointIO().save_checkpoint({"w": sharded, "step": 3}, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_ranks(save_folder, 1, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_a_copy_of_a_folder_replaces_files_links_and_folders_and_leaves_nothing_else(folder: Path) -> None:
    root = folder.parent
    other = root / "b.ckpt"
    copy(folder, other)
    assert storage.verify(other).sealed
    assert {file.name for file in folder.iterdir()} & {file.name for file in other.iterdir()} == {"manifest.json"}
    copy(folder, other)  # over a folder
    shutil.rmtree(other)
    other.symlink_to(folder.name)
    copy(other, other)  # of what a link leads to, over the link
    assert not other.is_symlink()
    shutil.rmtree(folder)
    loaded = storage.load(other)
    assert torch.equal(loaded["w"], torch.arange(12.0).view(4, 3))
    assert [file.name for file in root.iterdir()] == ["b.ckpt"]
    assert len(list(other.iterdir())) == 3
    (root / "c.ckpt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="a file at that path"):
        copy(other, root / "c.ckpt")
    assert sorted(file.name for file in root.iterdir()) == ["b.ckpt", "c.ckpt"]
