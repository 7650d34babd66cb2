from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.checkpoint import CheckpointNotFound, load, newest_valid, save, verify
from loopwright.checkpoint.file.record_names import read_storages
from loopwright.errors import CheckpointError


def alter_tensor(path: Path, tensor: torch.Tensor) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(content)


def test_a_complete_file_is_described(saved: Path) -> None:
    verified = verify(saved)
    assert verified.sealed
    assert verified.size_bytes == saved.stat().st_size
    assert verified.entries == 8


def test_an_altered_tensor_is_named(tmp_path: Path) -> None:
    weight = torch.arange(100.0)
    state = {"state_dict": {"layer.weight": weight, "layer.bias": torch.ones(3)}, "optimizer_states": [{"a": weight}]}
    save(state, tmp_path / "a.ckpt")
    alter_tensor(tmp_path / "a.ckpt", weight)
    with pytest.raises(CheckpointError, match=r"checkpoint\['state_dict'\]\['layer.weight'\]"):
        verify(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        load(tmp_path / "a.ckpt")


def test_altered_tensors_in_nested_states_and_parameters_are_named(tmp_path: Path) -> None:
    moments = torch.arange(50.0)
    parameter = torch.nn.Parameter(torch.arange(60.0))
    save({"optimizer_states": [{"state": {0: {"exp_avg": moments}}}], "p": parameter}, tmp_path / "a.ckpt")
    alter_tensor(tmp_path / "a.ckpt", moments)
    alter_tensor(tmp_path / "a.ckpt", parameter.detach())
    with pytest.raises(CheckpointError) as raised:
        verify(tmp_path / "a.ckpt")
    assert "checkpoint['optimizer_states'][0]['state'][0]['exp_avg']" in str(raised.value)
    assert "checkpoint['p']" in str(raised.value)


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    save({"state_dict": {"a": torch.zeros(1000)}}, tmp_path / "a.ckpt")
    os.truncate(tmp_path / "a.ckpt", 1500)
    with pytest.raises(CheckpointError, match="truncated: it has 1500 bytes, and its tensors alone are 4000 bytes"):
        verify(tmp_path / "a.ckpt")


def test_an_altered_structure_is_named(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[content.index(b"hyper_parameters")] ^= 1
    saved.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"data\.pkl"):
        verify(saved)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes"),
        (b"PK", "truncated"),
        (b"hello, this is text", "not a checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ((9).to_bytes(8, "little") + b'{"a":{}}' + b"x" * 20, "safetensors"),
        (b"PK\x03\x04" + b"\0" * 100, "truncated"),
    ],
)
def test_what_is_no_checkpoint_says_so(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        verify(tmp_path / "a.ckpt")


def test_other_zip_files_are_no_checkpoints(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("folder/readme", "text")
    with pytest.raises(CheckpointError, match="zip archive"):
        verify(tmp_path / "a.ckpt")


def test_a_file_of_torch_save_is_verified_by_its_records(tmp_path: Path) -> None:
    weight = torch.arange(20.0)
    torch.save({"state_dict": {"w": weight}}, tmp_path / "a.pt")
    assert not verify(tmp_path / "a.pt").sealed
    alter_tensor(tmp_path / "a.pt", weight)
    with pytest.raises(CheckpointError, match=r"\['w'\]"):
        verify(tmp_path / "a.pt")


def test_a_file_of_torch_save_without_checksums_is_accepted(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert not verify(tmp_path / "a.pt").sealed
    assert load(tmp_path / "a.pt")["w"].tolist() == [1, 1, 1]


def test_a_missing_file_is_a_file_not_found_error_and_names_what_is_near(saved: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"did you mean 'saved\.ckpt'") as raised:
        verify(saved.with_name("savd.ckpt"))
    assert isinstance(raised.value, CheckpointNotFound | CheckpointError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert "To fix it" in str(again)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a folder"):
        verify(tmp_path)


def test_the_newest_complete_file_is_found_and_damaged_ones_are_reported(
    tmp_path: Path, checkpoint: dict[str, Any]
) -> None:
    paths = [tmp_path / f"{index}.ckpt" for index in range(4)]
    for path in paths[1:]:
        save(checkpoint, path)
    os.truncate(paths[1], 100)
    skipped: list[tuple[Path, CheckpointError]] = []
    assert newest_valid(paths, lambda path, error: skipped.append((path, error))) == paths[2]
    assert [path for path, _ in skipped] == paths[:2]
    assert "truncated" in str(skipped[1][1])
    assert newest_valid(paths[:2], lambda path, error: None) is None


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_names_are_read_without_executing_anything(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    weight = torch.arange(30.0)
    torch.save({"bomb": Bomb(str(mark)), "w": weight}, tmp_path / "a.pt")
    alter_tensor(tmp_path / "a.pt", weight)
    with pytest.raises(CheckpointError, match=r"\['w'\]"):
        verify(tmp_path / "a.pt")
    assert not mark.exists()


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x80\x02" + b"j\xff\xff\xff\x7f" * 3, b"\x82\x01."])
def test_names_of_an_unreadable_pickle_are_none(data: bytes) -> None:
    assert read_storages(data) == {}


def test_names_survive_every_opcode_of_a_foreign_class() -> None:
    file = io.BytesIO()
    torch.save({"m": torch.nn.Linear(2, 2), "s": {1, 2}, "w": torch.ones(1).to_sparse()}, file)
    import zipfile

    storages = read_storages(zipfile.ZipFile(file).read("archive/data.pkl"))
    assert storages["0"].path == "checkpoint['m']['_parameters']['weight']"
    assert storages["0"].size_bytes == 16
