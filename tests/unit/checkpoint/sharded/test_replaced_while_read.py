"""Folders of sharded checkpoints that a save replaces while they are read, and how their bytes are compared once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.checkpoint import load, save, verify
from loopwright.checkpoint.sharded import StoredTensor, copying, mapping, read_manifest, reader, shard_files
from loopwright.checkpoint.storage import verify_share
from loopwright.checkpoint.tools.convert import write_as
from loopwright.checkpoint.tools.formats import Reading, open_checkpoint
from loopwright.errors import CheckpointError

needs_mapping = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files are mapped on Linux only")


def make(path: Path, number: float) -> Path:
    """Write a folder of two shards whose tensors hold a number."""
    file = path.with_suffix(".one")
    state = {"weight": torch.full((6, 5), number), "bias": torch.full((4,), number)}
    save({"state_dict": state, "number": number}, file)
    write_as(open_checkpoint(file, Reading()), path, "sharded", num_shards=2)
    file.unlink()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "a.ckpt", 1.0)


@pytest.fixture
def replace(folder: Path, tmp_path: Path) -> Callable[[], None]:
    """Save another checkpoint over the folder, as a training does."""
    newer = make(tmp_path / "newer.ckpt", 2.0)
    return lambda: copying.copy(newer, folder)


def replace_after_manifest(monkeypatch: pytest.MonkeyPatch, replace: Callable[[], None], *, times: int) -> list[str]:
    """Replace the folder right after its manifest was read, the first few times; return who read it."""
    real, reads = reader._manifest_bytes, list[str]()

    def read(place: Any, shown: str) -> Any:
        manifest = real(place, shown)
        reads.append(shown)
        if sum(1 for _ in reads) % 2 and len(reads) < 2 * times:
            replace()
        return manifest

    monkeypatch.setattr(reader, "_manifest_bytes", read)
    return reads


@pytest.mark.parametrize("is_lazy", [False, True])
def test_what_was_replaced_after_its_manifest_was_read_is_read_anew(
    folder: Path, replace: Callable[[], None], monkeypatch: pytest.MonkeyPatch, is_lazy: bool
) -> None:
    replace_after_manifest(monkeypatch, replace, times=1)
    found = load(folder, lazy=is_lazy)
    weight = found["state_dict"]["weight"]
    assert found["number"] == 2.0
    assert torch.equal(weight.read() if is_lazy else weight, torch.full((6, 5), 2.0))


@pytest.mark.parametrize("check", [verify, lambda path: [verify_share(path, rank, 2) for rank in range(2)]])
def test_what_was_replaced_meanwhile_is_verified_anew(
    folder: Path, replace: Callable[[], None], monkeypatch: pytest.MonkeyPatch, check: Callable[[Path], Any]
) -> None:
    reads = replace_after_manifest(monkeypatch, replace, times=1)
    check(folder)
    assert len(reads) >= 3


def test_a_folder_that_is_replaced_again_and_again_is_an_error_that_says_so(
    folder: Path, replace: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_after_manifest(monkeypatch, replace, times=100)
    with pytest.raises(CheckpointError, match="was replaced 5 times while it was read"):
        load(folder)


def test_damage_is_no_reason_to_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = replace_after_manifest(monkeypatch, lambda: None, times=0)
    next(folder.glob("shard-*")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load(folder)
    assert len(reads) == 2  # and once to see that nobody has replaced it


@needs_mapping
def test_what_was_opened_can_be_read_after_it_was_replaced(folder: Path, replace: Callable[[], None]) -> None:
    verify(folder)  # so that opening it has nothing to compare
    weight = load(folder, lazy=True)["state_dict"]["weight"]
    replace()
    assert torch.equal(weight.read(), torch.full((6, 5), 1.0))
    shutil.rmtree(folder)
    assert torch.equal(weight.read([1, 1], [3, 2]), torch.full((3, 2), 1.0))


def test_a_replaced_tensor_that_cannot_be_read_any_more_says_why(
    folder: Path, replace: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "map_file", lambda path, size_bytes: None)
    weight = load(folder, lazy=True)["state_dict"]["weight"]
    replace()
    with pytest.raises(CheckpointError, match="another checkpoint was saved to .*since it was opened"):
        weight.read()


@needs_mapping
def test_a_slice_in_the_memory_of_its_file_equals_the_slice_that_is_read(folder: Path) -> None:
    weight = load(folder, lazy=True, verify=False)["state_dict"]["weight"]
    assert isinstance(weight, StoredTensor)
    for offsets, sizes in (((0, 0), (3, 5)), ((3, 1), (2, 3)), ((1, 0), (0, 5))):
        box = weight.view_slice(offsets, sizes)
        assert box is not None
        assert torch.equal(box, weight.read(offsets, sizes))
    assert weight.view_slice((2, 0), (2, 5)) is None  # a part of it lies in the other file
    own = weight.view_slice((0, 0), (3, 5))
    assert own is not None
    own.fill_(7.0)
    assert verify(folder).sealed  # the file is not touched


@needs_mapping
def test_bytes_are_compared_once_while_the_file_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    real = shard_files.MappedFile.crc32

    def counting(self: Any, start: int, size: int) -> int:
        counts.append(size)
        return real(self, start, size)

    monkeypatch.setattr(shard_files.MappedFile, "crc32", counting)
    for rank in range(2):
        verify_share(folder, rank, 2)
    load(folder, verify=False)
    load(folder, lazy=True)
    assert sum(counts) == 4 * (6 * 5 + 4)
    verify(folder)  # whoever asks for it gets it
    assert sum(counts) == 2 * 4 * (6 * 5 + 4)
    entry = read_manifest(folder).tensors["state_dict/weight"]
    file = folder / entry.chunks[0].file
    content = bytearray(file.read_bytes())
    content[entry.chunks[0].start] ^= 1
    file.write_bytes(content)
    for read in (load, lambda path: load(path, lazy=True)):
        with pytest.raises(CheckpointError, match=r"state_dict/weight at \[0, 0\]"):
            read(folder)


@needs_mapping
def test_what_a_rank_has_verified_is_what_it_reads(
    folder: Path, replace: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[str] = []
    real = shard_files.map_file

    def mapping_file(path: Path, size_bytes: int) -> Any:
        mapped.append(path.name)
        return real(path, size_bytes)

    monkeypatch.setattr(shard_files, "map_file", mapping_file)
    verify_share(folder, 1, 2)
    assert len(mapped) == 1
    weight = load(folder, lazy=True, verify=False)["state_dict"]["weight"]
    assert sorted(mapped) == sorted(path.name for path in folder.glob("shard-*"))  # each once
    assert torch.equal(weight.read(), torch.full((6, 5), 1.0))
    load(folder, lazy=True, verify=False)
    assert len(mapped) == 4  # only the load that follows takes them over
    verify_share(folder, 1, 2)
    replace()
    assert load(folder, lazy=True)["number"] == 2.0


@needs_mapping
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12, of a fork beside threads
def test_a_file_truncated_while_it_is_mapped_is_an_error_not_a_signal(tmp_path: Path) -> None:
    file, path = tmp_path / "one", tmp_path / "wide.ckpt"
    save({"state_dict": {"wide": torch.rand(4, 1 << 15), "narrow": torch.rand(1 << 12, 8)}}, file)
    write_as(open_checkpoint(file, Reading()), path, "sharded", num_shards=1)
    shard = next(path.glob("shard-*"))
    whole = shard.read_bytes()
    boxes = [("wide", (0, 5), (4, 7)), ("wide", (1, 0), (3, 1 << 15)), ("narrow", (0, 1), (1 << 12, 3))]
    for name, offsets, sizes in [*boxes, ("narrow", (0, 0), (1 << 12, 8))]:
        for is_compared in (True, False):
            shard.write_bytes(whole)
            if is_compared:
                verify(path)
            stored = load(path, lazy=True, verify=False)["state_dict"][name]
            child = os.fork()
            if child == 0:
                code = 8
                try:
                    real = shard_files.MappedFile.tensor

                    def view_and_truncate(*arguments: Any, real: Any = real) -> Any:
                        os.truncate(shard, 4096)
                        return real(*arguments)

                    shard_files.MappedFile.tensor = view_and_truncate  # type: ignore[method-assign]
                    stored.read(offsets, sizes)
                except CheckpointError as error:
                    code = 0 if "the file was truncated" in str(error) else 7
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (name, offsets, is_compared)


@needs_mapping
def test_only_wide_gaps_are_left_out_of_what_is_brought_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.with_name("memory")
    file.write_bytes(bytes(4 * 4 * 50_000))
    mapped = mapping.map_file(file, file.stat().st_size)
    assert mapped is not None
    spans: list[int] = []
    monkeypatch.setattr(mapped, "_populate", lambda address, size: spans.append(size))
    tensor = mapped.tensor(0, torch.float32, (4, 50_000))
    for part in (tensor, tensor[:, 1:-1], tensor[:, :9], tensor[1:3, 5:5], tensor[2, 3]):
        mapped.bring_in(part)
    assert spans == [4 * 200_000, 4 * 200_000 - 8, *[36] * 4, 4]
