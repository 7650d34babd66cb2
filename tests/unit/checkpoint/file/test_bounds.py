"""Files that ask for more memory than they have bytes are refused before anything is allocated."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loopwright.checkpoint import storage
from loopwright.errors import CheckpointError

HUGE = b"\x8a\x05\x00\x00\x00\x00\x10"  # 2**36
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
REST = b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
VALUES = {
    "bytearray": b"cbuiltins\nbytearray\n" + HUGE + b"\x85R",
    "bytearray of Python 2": b"c__builtin__\nbytearray\n" + HUGE + b"\x85R",
    "tensor": b"ctorch\nByteTensor\n" + HUGE + b"\x85R",
    "storage": b"ctorch\nFloatStorage\n" + HUGE + b"\x85R",
    "storage in the file": b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + HUGE + b"tQK\x00K\x01" + REST,
    "view of a storage": b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x01tQK\x00" + HUGE + REST,
    "nested lists": b"]" * 5000 + b"a" * 4999,
}


def written(path: Path, value: bytes) -> Path:
    writer = torch._C.PyTorchFileWriter(str(path))
    content = b"\x80\x02}X\x01\x00\x00\x00a" + value + b"s."
    for name, data in (("data.pkl", content), ("byteorder", b"little"), ("data/0", b"\x00" * 4)):
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("mmap", [False, True])
def test_memory_that_a_file_asks_for_is_not_allocated(value: bytes, mmap: bool, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="asks for|allocate|would take|in a storage of|nest up to"):
        storage.load(written(tmp_path / "x.ckpt", value), mmap=mmap)


def test_long_plain_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"at most 67,108,864 are read"):
        storage.load(written(tmp_path / "x.ckpt", b"X\x00\x00\x00\x05" + b"x" * (5 << 24)))


def test_the_format_before_archives_is_refused_too(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "x.ckpt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "x.ckpt").read_bytes()
    assert storage.load(tmp_path / "x.ckpt")["a"].tolist() == [1.0, 1.0, 1.0]
    begin = data.index(b"cpuq")
    (tmp_path / "x.ckpt").write_bytes(data[:begin] + data[begin:].replace(b"K\x03Ntq", HUGE + b"Ntq", 1))
    with pytest.raises(CheckpointError, match="would take 274,877,906,944 bytes"):
        storage.load(tmp_path / "x.ckpt")


@pytest.mark.parametrize("make", [
    lambda: bytearray(b"abc"), lambda: torch.ones(2, 3).t(), lambda: torch.ones(4)[1:].expand(2, 3),
    lambda: torch.empty(0, 5), lambda: torch.eye(3).to_sparse(), lambda: torch.nn.Parameter(torch.ones(2)),
    lambda: torch.ones(2, dtype=torch.uint16),
])  # fmt: skip
def test_what_torch_writes_is_read(make: Callable[[], object], tmp_path: Path) -> None:
    torch.save({"a": make()}, tmp_path / "x.ckpt")
    assert pickle.dumps(str(storage.load(tmp_path / "x.ckpt")["a"])) == pickle.dumps(str(make()))
