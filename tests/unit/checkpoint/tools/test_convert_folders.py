"""Folders that two ranks have written, read on files alone: our sharded form, Lightning's, and torch's."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from loopwright.checkpoint import sharded, storage
from loopwright.checkpoint.tensors import StoredTensor
from loopwright.checkpoint.tools.convert import write_as
from loopwright.checkpoint.tools.dcp_folder import DcpFolder
from loopwright.checkpoint.tools.diff import Tolerance, compare
from loopwright.checkpoint.tools.formats import Opened, Reading, find_checkpoints, open_checkpoint
from loopwright.checkpoint.tools.verify import check
from loopwright.errors import CheckpointError

WEIGHT = torch.arange(20.0).view(5, 4)
BIAS = torch.tensor([1, 2, 3], dtype=torch.bfloat16)
STATE = {"weight": {"exp_avg": WEIGHT * 2, "step": torch.tensor(7.0)}}
GROUPS = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["bias", "weight"]}]
NUMBERED = {
    "state": {1: {"exp_avg": WEIGHT * 2, "step": torch.tensor(7.0)}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
}


def write_folders(rank: int, size: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))

    def cut(tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    weight, moment = cut(WEIGHT), cut(WEIGHT * 2)
    model = {"weight": weight, "bias": BIAS, "tied": weight}
    optimizer = {"state": {"weight": {"exp_avg": moment, "step": torch.tensor(7.0)}}, "param_groups": GROUPS}
    ours = {"epoch": 2, "state_dict": model, "optimizer_states": [optimizer], "note": (1, "two", None)}
    sharded.save(ours, f"{folder}/ours.ckpt")
    for name, key in (("fsdp", "model"), ("parallel", "state_dict")):
        dcp.save({key: model, "optimizer_0": optimizer}, checkpoint_id=f"{folder}/{name}")
        if rank == 0:
            rest = {"epoch": 2, "global_step": 9, "pytorch-lightning_version": "2.6.6", "loops": {}, "callbacks": {}}
            torch.save(rest, f"{folder}/{name}/meta.pt")
    dcp.save({"weight": weight, "bias": BIAS}, checkpoint_id=f"{folder}/bare")
    dcp.save({"weight": weight, "object": Bomb(Path(folder, "ran"))}, checkpoint_id=f"{folder}/objects")
    dcp.save({"app": {"net": {"weight": weight}, "step": 3}}, checkpoint_id=f"{folder}/nested")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    run_ranks(write_folders, 2, str(folder))
    return folder


def differences(first: Any, second: Any) -> list[str]:
    return [f"{found.kind} {found.path} {found.detail}" for found in compare(first, second, Tolerance())]


def opened(path: Path, **how: Any) -> Opened:
    return open_checkpoint(path, Reading(**how))


@pytest.mark.parametrize("name", ["fsdp", "parallel"])
def test_a_sharded_checkpoint_of_lightning_is_one_with_the_fields_keys(folders: Path, name: str) -> None:
    found = opened(folders / name)
    assert found.format == "Lightning sharded checkpoint"
    expected = {
        "state_dict": {"weight": WEIGHT, "bias": BIAS, "tied": WEIGHT},
        "optimizer_states": [NUMBERED],
        "epoch": 2, "global_step": 9, "pytorch-lightning_version": "2.6.6", "loops": {}, "callbacks": {},
    }  # fmt: skip
    assert not differences(found.tree, expected)
    assert "records match" in check(folders / name)


def test_folders_of_torch_are_read_whatever_their_keys(folders: Path) -> None:
    bare = opened(folders / "bare")
    assert bare.is_bare
    assert bare.format == "DCP folder"
    assert not differences(bare.tree, {"state_dict": {"weight": WEIGHT, "bias": BIAS}})
    nested = opened(folders / "nested")
    assert not differences(nested.tree, {"app": {"net": {"weight": WEIGHT}, "step": 3}})
    assert not differences(opened(folders / "nested", weights_key="app/net").tree, {"state_dict": {"weight": WEIGHT}})
    with pytest.raises(CheckpointError, match=r"no weights under 'app'; it has tensors under \['app/net'\]"):
        opened(folders / "nested", weights_key="app")


@pytest.mark.parametrize("name", ["ours.ckpt", "fsdp"])
def test_a_folder_becomes_one_file_with_the_same_content(folders: Path, name: str, tmp_path: Path) -> None:
    source = opened(folders / name)
    write_as(source, tmp_path / "one.ckpt", "checkpoint")
    assert storage.verify(tmp_path / "one.ckpt").sealed
    whole = storage.load(tmp_path / "one.ckpt")
    assert not differences(source.tree, whole)
    if name == "ours.ckpt":
        weights = whole["state_dict"]
        assert weights["tied"].data_ptr() == weights["weight"].data_ptr()
    write_as(source, tmp_path / "one.safetensors", "safetensors")
    assert not differences(opened(tmp_path / "one.safetensors").tree["state_dict"], whole["state_dict"])


def test_a_sharded_checkpoint_can_be_resharded(folders: Path, tmp_path: Path) -> None:
    source = opened(folders / "ours.ckpt")
    path = tmp_path / "three.ckpt"
    write_as(source, path, "sharded", num_shards=3)
    manifest = sharded.read_manifest(path)
    assert [chunk.sizes for chunk in manifest.tensors["state_dict/weight"].chunks] == [(2, 4), (2, 4), (1, 4)]
    assert sharded.verify(path).sealed
    again = opened(path)
    assert not differences(source.tree, again.tree)
    assert again.tree["state_dict"]["tied"] is again.tree["state_dict"]["weight"]
    before = set(os.listdir(path))
    write_as(opened(folders / "bare"), path, "sharded", num_shards=1)
    assert not before & set(os.listdir(path)) - {"manifest.json"}


def test_a_split_that_fails_leaves_the_old_checkpoint(folders: Path, tmp_path: Path) -> None:
    class Unreadable(StoredTensor):
        def __init__(self, reads: int) -> None:
            super().__init__("unreadable", (4,), torch.float32)
            self.reads = reads

        def _read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
            self.reads -= 1
            if self.reads < 0:
                raise CheckpointError("gone.", fix="none.")
            return torch.ones(sizes)

    path = tmp_path / "cut.ckpt"
    write_as(opened(folders / "bare"), path, "sharded", num_shards=2)
    names = set(os.listdir(path))
    for to, reads in (("sharded", 1), ("checkpoint", 0), ("safetensors", 0)):
        target = path if to == "sharded" else tmp_path / "file"
        tensor = Unreadable(reads)
        with pytest.raises(CheckpointError, match="gone"):
            write_as(Opened("x", "x", {"state_dict": {"a": torch.ones(2), "b": tensor}}), target, to, num_shards=2)
    assert set(os.listdir(path)) == names
    assert os.listdir(tmp_path) == ["cut.ckpt"]
    sharded.verify(path)


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def planted(kind: str, metadata: Any, bomb: Bomb) -> bytes:
    """Return a pickle that would make a folder, if anything ran it."""
    if kind == "instead":
        return pickle.dumps(bomb)
    if kind == "within":
        metadata.planner_data = {"x": bomb}
        return pickle.dumps(metadata)
    if kind == "known function with attributes":  # sets an attribute of what it has named
        return b"\x80\x02ctorch.serialization\n_get_layout\n}X\x01\x00\x00\x00aK\x01sb."
    if kind == "extension":
        return b"\x80\x02\x82\x01."
    return b"\x80\x02cbuiltins\neval\nX\x08\x00\x00\x00exit(99)\x85R."


@pytest.mark.parametrize("kind", ["instead", "within", "known function with attributes", "extension", "eval"])
def test_a_pickle_planted_in_dcp_metadata_never_runs(folders: Path, tmp_path: Path, kind: str) -> None:
    folder = copy_folder(folders / "bare", tmp_path / "planted")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    ran = tmp_path / "ran"
    (folder / ".metadata").write_bytes(planted(kind, metadata, Bomb(ran)))
    with pytest.raises(CheckpointError, match=r"cannot be read safely: .*Nothing in it was executed"):
        DcpFolder(folder)
    assert not ran.exists()
    if kind in ("instead", "within"):  # the plant is a good one
        pickle.loads((folder / ".metadata").read_bytes())
        assert ran.exists()


def test_an_object_in_a_dcp_folder_is_listed_or_left_out_and_never_runs(folders: Path) -> None:
    with pytest.raises(CheckpointError, match="1 entries that are not tensors or plain values: object"):
        opened(folders / "objects")
    found = opened(folders / "objects", drop_objects=True)
    assert found.dropped == ["object"]
    assert torch.equal(found.tree["state_dict"]["weight"].read(), WEIGHT)
    assert not (folders / "ran").exists()


def test_damage_and_lies_in_a_dcp_folder_are_errors_that_name_the_place(folders: Path, tmp_path: Path) -> None:
    def change(number: int, **values: Any) -> Path:
        folder = copy_folder(folders / "bare", tmp_path / str(number))
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        entry = metadata.state_dict_metadata["weight"]
        place = next(place for index, place in metadata.storage_data.items() if index.fqn == "weight")
        for name, value in values.items():
            if name in ("relative_path", "offset", "length"):
                setattr(place, name, value)
            elif name == "size":
                entry.size = value
            else:
                entry.chunks[0].offsets = value
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return folder

    def read(folder: Path) -> Any:
        return [tensor.read() for tensor in open_checkpoint(folder, Reading()).tree["state_dict"].values()]

    for number, (values, message) in enumerate(
        [
            ({"relative_path": "../bare/__0_0.distcp"}, "outside of the folder"),
            ({"relative_path": str(folders / "bare/__0_0.distcp")}, "outside of the folder"),
            ({"relative_path": "missing.distcp"}, "No such file"),
            ({"offset": 10**12}, "should be at byte"),
            ({"length": -1}, "should be at byte"),
            ({"size": torch.Size((5, 10**15))}, "do not cover its shape"),
            ({"offsets": torch.Size((4, 0))}, "do not cover its shape"),
        ]
    ):
        with pytest.raises(CheckpointError, match=message):
            read(change(number, **values))
    folder = copy_folder(folders / "bare", tmp_path / "flipped")
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.find(WEIGHT[:3].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weight at \(0, 0\) in __0_0.distcp does not match its checksum"):
        check(folder)
    (folder / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="metadata"):
        check(folder)


def test_the_checkpoints_in_a_folder_are_found(folders: Path, tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.pt", ".hidden.ckpt", "c.txt"):
        (tmp_path / name).touch()
    copy_folder(folders / "bare", tmp_path / "dcp")
    (tmp_path / "empty").mkdir()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["a.pt", "b.safetensors", "dcp"]
