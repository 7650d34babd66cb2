"""Folders of sharded checkpoints, read and damaged in one process; four ranks have saved them before."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from torch import Tensor

from loopwright.callbacks.model_checkpoint.files import find_checkpoints
from loopwright.checkpoint import TorchCheckpointIO, Trusted, Untrusted, load, newest_valid, remove, save, verify
from loopwright.checkpoint import sharded as folders
from loopwright.checkpoint.sharded import manifest as manifests
from loopwright.checkpoint.sharded import shard_files
from loopwright.checkpoint.sharded.backends import LocalBackend
from loopwright.checkpoint.verified import CheckpointNotFound
from loopwright.errors import CheckpointError

ODD_KEYS = ["0", "-1", "a/b", "%", "%30", "", "\ud800", "\u00e9", "__metadata__", (1, "2"), True, 1.5, None, 3]


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(5, 3, generator=generator),
        "columns": torch.randn(3, 7, generator=generator).bfloat16(),
        "boxes": torch.randn(6, 7, 2, generator=generator, dtype=torch.float64),
        "wide": torch.randn(6, 5000, generator=generator),
        "flags": torch.rand(9, generator=generator) > 0.5,
        "small_float": torch.randn(8, 2, generator=generator).to(torch.float8_e4m3fn),
        "complex": torch.randn(4, 2, generator=generator, dtype=torch.complex128),
        "unsigned": torch.arange(5, dtype=torch.int32).to(torch.uint16),
        "empty": torch.zeros(0, 4),
        "one": torch.tensor([7]),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(8, 4, generator=generator).T,
    }


def save_all(rank: int, size: int, folder: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    line = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    placements: dict[str, tuple[Any, list[Any]]] = {
        "columns": (line, [Shard(1)]),
        "boxes": (grid, [Shard(0), Shard(1)]),
        "flags": (grid, [Replicate(), Shard(0)]),
        "scalar": (line, [Replicate()]),
    }
    tensors = {
        name: distribute_tensor(tensor, *placements.get(name, (line, [Shard(0)])), src_data_rank=None)
        for name, tensor in whole_tensors().items()
    }
    state = OrderedDict(tensors)
    state["tied"] = state["rows"].detach()
    state._metadata = {"version": 1}  # type: ignore[attr-defined]
    odd = {key: distribute_tensor(torch.full((4,), float(i)), line, [Shard(0)]) for i, key in enumerate(ODD_KEYS)}
    checkpoint = {
        "epoch": 3,
        "state_dict": state,
        "optimizer_states": [{"state": {0: {"m": tensors["rows"] * 2, "step": torch.tensor(4.0)}}}],
        "odd": odd,
        "nested": ([tensors["one"]], {1, 2}),
        "rank": rank,
        "trusted": Trusted(range(3)),
    }
    folders.save(checkpoint, f"{folder}/all.ckpt")
    folders.save({"state_dict": {name: state[name] for name in ("rows", "flags", "tied")}}, f"{folder}/small.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401  # here once, and not in every child

    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(save_all, 4, str(folder))
    return folder


@pytest.fixture
def small(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "small.ckpt", tmp_path / "small.ckpt"))


def shard_of(folder: Path, rank: int = 0) -> Path:
    return next(folder.glob(f"shard-*-{rank:05d}-of-00004.safetensors"))


def equal(first: Tensor, second: Tensor) -> bool:
    same = first.shape == second.shape and first.dtype == second.dtype
    return same and torch.equal(as_bytes(first), as_bytes(second))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def raw_manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def craft(folder: Path, raw: Any) -> None:
    """Write a manifest that says anything, with the right digest."""
    raw.pop("digest", None)
    body = json.dumps(raw).encode()[:-1] + b", "
    (folder / "manifest.json").write_bytes(body + f'"digest": "{manifests.digest_of(body)}"\n}}\n'.encode())


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_one_process_reads_the_full_state_that_four_ranks_saved(saved: Path) -> None:
    loaded = load(saved / "all.ckpt")
    state = loaded["state_dict"]
    assert type(state) is OrderedDict
    assert state._metadata == {"version": 1}
    assert list(state) == [*whole_tensors(), "tied"]
    for name, tensor in whole_tensors().items():
        assert type(state[name]) is Tensor
        assert equal(state[name], tensor), name
    assert state["tied"] is state["rows"]
    moments = loaded["optimizer_states"][0]["state"][0]
    assert equal(moments["m"], whole_tensors()["rows"] * 2)
    assert moments["step"] == 4.0
    assert list(loaded["odd"]) == ODD_KEYS
    assert [float(tensor[3]) for tensor in loaded["odd"].values()] == list(map(float, range(len(ODD_KEYS))))
    assert type(loaded["nested"]) is tuple
    assert loaded["nested"][0][0].tolist() == [7]
    assert loaded["nested"][1] == {1, 2}
    assert (loaded["epoch"], loaded["rank"]) == (3, 0)
    assert isinstance(loaded["trusted"], Untrusted)
    assert load(saved / "all.ckpt", weights_only=False)["trusted"] == range(3)
    assert TorchCheckpointIO().load_checkpoint(saved / "all.ckpt")["epoch"] == 3


def test_the_manifest_says_what_is_there(saved: Path) -> None:
    manifest = folders.read_manifest(saved / "all.ckpt")
    assert manifest.world_size == 4
    assert manifest.mesh is not None
    assert manifest.mesh.shape == (4,)
    assert set(os.listdir(saved / "all.ckpt")) == {*manifest.files, "manifest.json"}
    assert sorted(os.listdir(saved)) == ["all.ckpt", "small.ckpt"]
    assert manifest.tensors["state_dict/rows"].shape == (5, 3)
    assert "state_dict/tied" not in manifest.tensors
    assert {"odd/%30", "odd/3", "odd/a%2Fb", "odd/%25", "odd/%2530", "odd/%!(1, '2')", "odd/"} <= set(manifest.tensors)
    assert [len(manifest.tensors[f"state_dict/{name}"].chunks) for name in ("rows", "flags", "empty", "scalar")] == [
        3, 2, 0, 1,
    ]  # fmt: skip
    assert all(manifest.tensors[path].torch_dtype.itemsize for path in manifest.tensors)
    result = verify(saved / "all.ckpt")
    assert result.sealed
    assert result.size_bytes == sum(file.stat().st_size for file in (saved / "all.ckpt").iterdir())


def test_shard_files_are_safetensors(saved: Path) -> None:
    manifest = folders.read_manifest(saved / "all.ckpt")
    chunks = [(path, entry, chunk) for path, entry in manifest.tensors.items() for chunk in entry.chunks]
    whole = {path: load(saved / "all.ckpt", lazy=True)["state_dict"][path.partition("/")[2]].read()
             for path in manifest.tensors if path.startswith("state_dict/")}  # fmt: skip
    seen = 0
    for name in set(manifest.files) - {manifest.state}:
        with safe_open(saved / "all.ckpt" / name, "pt") as file:  # type: ignore[no-untyped-call]
            mine = [(path, entry, chunk) for path, entry, chunk in chunks if chunk.file == name]
            assert sorted(file.keys()) == sorted(path for path, _, _ in mine)
            for path, entry, chunk in mine:
                assert chunk.start % entry.torch_dtype.itemsize == 0
                seen += 1
                if path in whole:
                    box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                    found = file.get_tensor(path)
                    if entry.dtype in ("float8_e4m3fn", "complex128"):
                        assert found.dtype == torch.uint8
                        found = found.view(entry.torch_dtype).view(chunk.sizes)
                    assert equal(found, whole[path][box])
    assert seen == len(chunks)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_boxes_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch, is_mapped: bool) -> None:
    if not is_mapped:
        monkeypatch.setattr(shard_files, "map_file", lambda path, size_bytes: None)
    generator = random.Random(0)
    state = load(saved / "all.ckpt", lazy=True)["state_dict"]
    assert state["tied"] is state["rows"]
    for name, tensor in whole_tensors().items():
        stored = state[name]
        assert isinstance(stored, folders.StoredTensor)
        assert (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype)
        assert stored.path == f"state_dict/{name}"
        assert equal(stored.read(), tensor)
        for _ in range(30):
            offsets = [generator.randint(0, size) for size in tensor.shape]
            sizes = [generator.randint(0, size - offset) for size, offset in zip(tensor.shape, offsets, strict=True)]
            expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            found = stored.read(offsets, sizes)
            assert equal(found, expected), (name, offsets, sizes)
            assert found.is_contiguous()
    assert equal(state["rows"].read([1, 0]), whole_tensors()["rows"][1:])
    for box in ([0], [1]), ([0, 0], [6, 3]), ([-1, 0], [1, 1]), ([0, 0, 0], [1, 1, 1]):
        with pytest.raises(ValueError, match="does not lie within"):
            state["rows"].read(*box)


def test_only_the_bytes_of_a_box_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    real = LocalBackend.open

    def counting(self: LocalBackend, name: str) -> Any:
        file = real(self, name)

        class Counting:
            seek = staticmethod(file.seek)
            close = staticmethod(file.close)

            @staticmethod
            def readinto(target: memoryview) -> int:
                counts.append(len(target))
                return int(file.readinto(target))  # type: ignore[attr-defined]

        return Counting()

    monkeypatch.setattr(shard_files, "map_file", lambda path, size_bytes: None)
    wide = load(saved / "all.ckpt", lazy=True, verify=False)["state_dict"]["wide"]
    monkeypatch.setattr(LocalBackend, "open", counting)
    assert equal(wide.read([1, 1000], [3, 2000]), whole_tensors()["wide"][1:4, 1000:3000])
    assert counts == [8000] * 3
    counts.clear()
    assert equal(wide.read([2, 0], [1, 5000]), whole_tensors()["wide"][2:3])
    assert counts == [20000]


def test_every_flipped_byte_is_found_and_named(small: Path) -> None:
    manifest = folders.read_manifest(small)
    tensors = {(chunk.file, position): path
               for path, entry in manifest.tensors.items() for chunk in entry.chunks
               for position in range(chunk.start, chunk.start + entry.chunk_bytes(chunk))}  # fmt: skip
    assert len(tensors) == 5 * 3 * 4 + 9
    for file in small.iterdir():
        content = file.read_bytes()
        # All of the payload; elsewhere, in the state file above all, some are enough: test_seal.py flips all of those.
        positions = [p for p in range(len(content)) if (file.name, p) in tensors or p % 13 == 0 or p > len(content) - 9]
        for position in positions:
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError) as raised:
                verify(small)
            assert file.name in str(raised.value), position
            if (file.name, position) in tensors:
                assert tensors[file.name, position] in str(raised.value)
        file.write_bytes(content)
    assert verify(small).sealed


def test_all_damaged_tensors_are_named_at_once_and_loading_finds_them_too(small: Path) -> None:
    for path, entry in folders.read_manifest(small).tensors.items():
        chunk = entry.chunks[-1]
        content = bytearray((small / chunk.file).read_bytes())
        content[chunk.start] ^= 1
        (small / chunk.file).write_bytes(content)
        assert path in ("state_dict/rows", "state_dict/flags")
    for read in (verify, load, lambda path: load(path, lazy=True), lambda path: load(path, verify=False),
                 lambda path: load(path, map_location="meta")):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"state_dict/rows at \[4, 0\].*state_dict/flags at \[5\]"):
            read(small)
    rows = load(small, lazy=True, verify=False)["state_dict"]["rows"]
    assert equal(rows.read([0, 0], [4, 3]), whole_tensors()["rows"][:4])
    with pytest.raises(CheckpointError, match="state_dict/rows"):
        rows.read()


def test_missing_truncated_and_longer_files_are_named(small: Path) -> None:
    lazy = load(small, lazy=True)["state_dict"]["rows"]
    shard = shard_of(small)
    for file in small.iterdir():
        content = file.read_bytes()
        for changed in (None, b"", content[:-1], content[:5], content + b"\0"):
            if changed is None:
                file.unlink()
            else:
                file.write_bytes(changed)
            for read in (verify, load, lambda path: load(path, lazy=True, verify=False)):
                with pytest.raises(CheckpointError) as raised:
                    read(small)
                assert file.name in str(raised.value)
                if file == shard:
                    assert "state_dict/rows" in str(raised.value)
            if file == shard and changed not in (None, content + b"\0"):
                with pytest.raises(CheckpointError, match="shard.*state_dict/rows"):
                    lazy.read()
        file.write_bytes(content)
    (small / "manifest.json").unlink()
    for read in (verify, load, folders.load, folders.verify):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read(small)
    with pytest.raises(CheckpointNotFound):
        folders.read_manifest(small)


def _set(*steps_and_value: Any) -> Callable[[dict[str, Any]], None]:
    *steps, last, value = steps_and_value

    def edit(raw: dict[str, Any]) -> None:
        place: Any = raw
        for step in steps:
            place = place[step]
        place[last] = value

    return edit


ROWS = ("tensors", "state_dict/rows")
CHUNK = (*ROWS, "chunks", 0)


def _rename_shard(new: str) -> Callable[[dict[str, Any]], None]:
    def edit(raw: dict[str, Any]) -> None:
        old = raw["tensors"]["state_dict/rows"]["chunks"][0]["file"]
        raw["files"][new] = raw["files"].pop(old)
        for entry in raw["tensors"].values():
            for chunk in entry["chunks"]:
                chunk["file"] = new if chunk["file"] == old else chunk["file"]

    return edit


CRAFTED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a name above": (_rename_shard("../outside.safetensors"), "not the name of a file in the folder"),
    "an absolute name": (_rename_shard("/outside.safetensors"), "not the name of a file in the folder"),
    "a hidden name": (_rename_shard(".."), "not the name of a file in the folder"),
    "the manifest itself": (_rename_shard("manifest.json"), "not the name of a file in the folder"),
    "a state above": (_set("state", "../a.ckpt"), "not the name of a file in the folder"),
    "a state that is not listed": (_set("state", "b.ckpt"), "is not among its files"),
    "a chunk in the state file": (lambda raw: _set(*CHUNK, "file", raw["state"])(raw), "not a shard file"),
    "a shape without its chunks": (_set(*ROWS, "shape", [2**40, 3]), "its chunks have 15 elements"),
    "an enormous shape": (_set(*ROWS, "shape", [2**61, 2**61]), "has the shape"),
    "an enormous number": (_set(*ROWS, "shape", [10**30, 3]), "is not a count"),
    "a negative size": (_set(*CHUNK, "sizes", [-2, 3]), "is not a count"),
    "a bool for a number": (_set(*CHUNK, "start", True), "is not a count"),
    "another number of dimensions": (_set(*CHUNK, "offsets", [0]), "number of dimensions"),
    "a chunk outside": (_set(*CHUNK, "offsets", [4, 0]), "reaches beyond"),
    "an overlap": (_set(*CHUNK, "offsets", [1, 0]), "overlap"),
    "a missing chunk": (lambda raw: raw["tensors"]["state_dict/rows"]["chunks"].pop(), "its chunks have 12 elements"),
    "bytes used twice": (_set(*ROWS, "chunks", 1, "start", 64), "begins at byte|do not follow|end at byte|missing"),
    "a tensor that uses another's bytes": (
        lambda raw: raw["tensors"].update(x=raw["tensors"]["state_dict/rows"]), "do not follow"),
    "a start in the header": (_set(*CHUNK, "start", 4), "begins at byte 4"),
    "an unaligned start": (_set(*CHUNK, "start", 9), "begins at byte 9"),
    "a size that the file has not": (lambda raw: next(iter(raw["files"].values())).update(size=2**50), "bytes"),
    "an empty chunk": (_set(*CHUNK, "sizes", [0, 3]), "a chunk is empty"),
    "a quantized dtype": (_set(*ROWS, "dtype", "qint8"), "is not a dtype"),
    "a function for a dtype": (_set(*ROWS, "dtype", "load"), "is not a dtype"),
    "another dtype": (_set(*ROWS, "dtype", "float64"), "follow|end at byte|begins at byte"),
    "a tensor that no state names": (_set("tensors", "x", {"shape": [0], "dtype": "int8", "chunks": []}), "'x'"),
    "a tensor less": (lambda raw: raw["tensors"].update(
        {"y": raw["tensors"].pop("state_dict/rows")}), "'state_dict/rows', which its manifest lacks"),
    "no tensors": (lambda raw: raw.pop("tensors"), "malformed"),
    "a list for a dict": (_set("files", []), "malformed"),
    "another format": (_set("format", "x"), "the format is 'x'"),
    "a newer version": (_set("format_version", 99), "has the format version 99"),
}  # fmt: skip


def test_crafted_manifests_are_refused(small: Path) -> None:
    outside = small.parent / "outside.safetensors"
    shutil.copy(shard_of(small), outside)
    original = raw_manifest(small)
    for name, (edit, expected) in CRAFTED.items():
        raw = json.loads(json.dumps(original))
        edit(raw)
        craft(small, raw)
        with pytest.raises(CheckpointError, match=expected):
            pytest.fail(f"{name}: {load(small, verify=False)}")
    for text in (b"[" * 100_000, b'{"format": 1' + b"0" * 5000 + b", ", b"{\xff", b""):
        body = text
        (small / "manifest.json").write_bytes(body + f'"digest": "{manifests.digest_of(body)}"\n}}\n'.encode())
        with pytest.raises(CheckpointError, match="malformed"):
            verify(small)
    craft(small, original)
    assert load(small)["state_dict"]["rows"].shape == (5, 3)


def test_a_pipe_in_the_folder_does_not_block(small: Path) -> None:
    shard = shard_of(small)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="not a regular file"):
        verify(small)


def test_planted_pickles_are_not_run(small: Path) -> None:
    mark = small.parent / "executed"
    import pickle

    (small / ".metadata").write_bytes(pickle.dumps(Bomb(str(mark))))
    assert load(small)["state_dict"]["rows"].shape == (5, 3)
    raw = raw_manifest(small)
    state = small / raw["state"]
    torch.save({"state_dict": Bomb(str(mark))}, state)
    raw["files"][raw["state"]] = {"size": state.stat().st_size, "digest": "0" * 64}
    for digest in ("0" * 64, state.read_bytes()[-64:].hex()[:64]):
        raw["files"][raw["state"]]["digest"] = digest
        craft(small, raw)
        with pytest.raises(CheckpointError):
            load(small)
    # With a digest that fits, only the reader of plain values stands in the way.
    content = state.read_bytes() + b"a" * 64
    state.write_bytes(content)
    raw["files"][raw["state"]] = {"size": len(content), "digest": "a" * 64}
    craft(small, raw)
    for is_verified in (True, False):
        with pytest.raises(CheckpointError):
            load(small, verify=is_verified)
    assert not mark.exists()


def test_map_location_is_for_all_tensors(saved: Path) -> None:
    places: list[str] = []

    def keep(storage: Any, location: str) -> Any:
        places.append(location)
        return storage

    for location, device in (("meta", "meta"), ("cpu", "cpu"), ({"cpu": "meta"}, "meta"), (keep, "cpu")):
        loaded = load(saved / "all.ckpt", map_location=location)
        assert loaded["state_dict"]["rows"].device.type == device
        assert loaded["optimizer_states"][0]["state"][0]["step"].device.type == device
    assert set(places) == {"cpu"}
    assert equal(load(saved / "all.ckpt", map_location=keep)["state_dict"]["rows"], whole_tensors()["rows"])


def test_folders_and_files_are_found_and_skipped_alike(small: Path) -> None:
    root = small.parent
    single = root / "single.ckpt"
    save({"state_dict": {}}, single)
    unfinished = root / "unfinished.ckpt"
    unfinished.mkdir()
    shutil.copy(shard_of(small), unfinished)
    for age, path in enumerate((unfinished, small / "manifest.json", single)):
        os.utime(path, ns=(10**18 - age, 10**18 - age))
    found = find_checkpoints([str(root)], ".ckpt")
    assert found == [str(unfinished), str(small), str(single)]
    skipped: list[str] = []
    assert newest_valid(found, lambda path, error: skipped.append(path)) == str(small)
    assert skipped == [str(unfinished)]
    assert folders.is_folder_checkpoint(small)
    assert not folders.is_folder_checkpoint(unfinished)
    assert not folders.is_folder_checkpoint(single)
    assert load(single, lazy=True) == {"state_dict": {}}
    link = root / "last.ckpt"
    link.symlink_to("small.ckpt")
    assert equal(load(link)["state_dict"]["rows"], whole_tensors()["rows"])
    lazy = load(link, lazy=True)["state_dict"]["rows"]
    link.unlink()
    link.symlink_to("unfinished.ckpt")  # a newer one: what was opened stays what it was
    assert equal(lazy.read(), whole_tensors()["rows"])
    with pytest.raises(CheckpointError, match="Is a directory"):
        save({"state_dict": {}}, small)
    assert verify(small).sealed
    remove(link)
    assert verify(small).sealed
    remove(small)
    remove(small)
    with pytest.raises(CheckpointError):
        remove(unfinished)
    assert sorted(os.listdir(root)) == ["single.ckpt", "unfinished.ckpt"]


def test_one_process_saves_without_torch_distributed(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(2)}, "epoch": 1}
    path = tmp_path / "new" / "a.ckpt"
    folders.save(state, path)
    folders.save({**state, "epoch": 2}, path)
    assert load(path)["epoch"] == 2
    manifest = folders.read_manifest(path)
    assert (manifest.world_size, manifest.mesh, manifest.tensors) == (1, None, {})
    assert sorted(os.listdir(path)) == sorted(["manifest.json", manifest.state])
    assert os.listdir(path.parent) == ["a.ckpt"]


def test_what_cannot_be_saved_or_replaced_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(2)}}
    (tmp_path / "file.ckpt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    (tmp_path / "nowhere.ckpt").symlink_to("missing")
    before = sorted(map(str, tmp_path.rglob("*")))
    for checkpoint, name, expected in (
        (state, "file.ckpt", "there is a file at that path"),
        (state, "folder", "holds 'notes'"),
        (state, "file.ckpt/a.ckpt", "a part of the path is a file"),
        ({"a": object()}, "new/a.ckpt", r"checkpoint\['a'\]: object"),
        ({"a": {"__loopwright_tensor__": "b"}}, "new/a.ckpt", "a looks like a placeholder"),
    ):
        with pytest.raises(CheckpointError, match=expected):
            folders.save(checkpoint, tmp_path / name)
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    folders.save(state, tmp_path / "nowhere.ckpt")  # a link is replaced
    assert not (tmp_path / "nowhere.ckpt").is_symlink()
    assert verify(tmp_path / "nowhere.ckpt").sealed
