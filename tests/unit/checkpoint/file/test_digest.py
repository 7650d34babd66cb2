from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.checkpoint import load, save, verify
from loopwright.checkpoint.file.archive import Damaged, payloads, read_directory
from loopwright.checkpoint.file.digest import append_digest, compare_checksums
from loopwright.errors import CheckpointError


def is_detected(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return True
    return False


def test_a_flip_of_any_byte_is_detected(saved: Path) -> None:
    undetected = []
    with open(saved, "r+b", buffering=0) as file:
        content = file.read()
        for position, byte in enumerate(content):
            for mask in (1 << position % 8, 0xFF):
                file.seek(position)
                file.write(bytes([byte ^ mask]))
                if not is_detected(saved):
                    undetected.append((position, mask))
            file.seek(position)
            file.write(bytes([byte]))
    assert undetected == []
    assert verify(saved).sealed


def test_a_file_truncated_at_any_length_is_detected(saved: Path) -> None:
    undetected = []
    for length in reversed(range(saved.stat().st_size)):
        os.truncate(saved, length)
        if not is_detected(saved):
            undetected.append(length)
    assert undetected == []


@pytest.mark.parametrize("tail", [b"\0", b"PK\x05\x06", b"x" * 5000])
def test_bytes_after_the_end_are_detected(saved: Path, tail: bytes) -> None:
    saved.write_bytes(saved.read_bytes() + tail)
    assert is_detected(saved)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_other_bytes_in_a_stretch_are_detected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "stretch.ckpt"
    save({"a": torch.arange(8), "b": "text"}, path)
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content) - 1))
    new = data.draw(st.binary(min_size=1, max_size=min(64, len(content) - start)))
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(new)
    assert is_detected(path) == (path.read_bytes() != content)


def test_a_seal_taken_off_leaves_a_damaged_file(saved: Path) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: content.rindex(b"loopwright-checkpoint/")])
    assert is_detected(saved)


def test_a_seal_of_another_file_is_detected(saved: Path, checkpoint: dict[str, Any]) -> None:
    checkpoint["epoch"] = 4
    save(checkpoint, saved.with_name("other.ckpt"))
    seal_size = len(zipfile.ZipFile(saved).comment)
    saved.write_bytes(saved.read_bytes()[:-seal_size] + saved.with_name("other.ckpt").read_bytes()[-seal_size:])
    with pytest.raises(CheckpointError, match="headers, its directory or its digest"):
        verify(saved)


def test_the_seal_names_the_format_its_version_and_the_size(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
        comment = archive.comment.decode()
    match = re.fullmatch(r"loopwright-checkpoint/1 size=(\d{20}) blake2b=[0-9a-f]{64}", comment)
    assert match is not None
    assert int(match[1]) == saved.stat().st_size


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_torch_opens_a_sealed_file(saved: Path, mmap: bool) -> None:
    loaded = torch.load(saved, weights_only=True, mmap=mmap)
    assert torch.equal(loaded["state_dict"]["layer.weight"], torch.ones(2, 3))


def test_a_script_without_loopwright_opens_a_sealed_file(saved: Path) -> None:
    script = (
        "import sys, torch; sys.modules['loopwright'] = None; "
        f"c = torch.load({str(saved)!r}, weights_only=True); print(c['epoch'], c['state_dict']['layer.bias'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=saved.parent)
    assert done.stdout.strip() == "3 [1.0, 1.0, 1.0]"


def test_many_records_and_shared_memory_survive(tmp_path: Path) -> None:
    shared = torch.arange(10)
    state = {f"t{index}": torch.full((index % 5,), index) for index in range(3000)} | {"a": shared, "b": shared[2:5]}
    save(state, tmp_path / "many.ckpt")
    assert verify(tmp_path / "many.ckpt").entries > 3000
    loaded = load(tmp_path / "many.ckpt")
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    loaded["a"][2] = 99
    assert loaded["b"][0] == 99


def test_a_file_is_sealed_once(saved: Path) -> None:
    with open(saved, "r+b", buffering=0) as file, pytest.raises(Damaged, match="comment already"):
        append_digest(file)


def test_a_newer_format_is_named(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes().replace(b"loopwright-checkpoint/1", b"loopwright-checkpoint/2"))
    with pytest.raises(CheckpointError, match="format has version 2"):
        verify(saved)


def test_records_beyond_4_gib_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "large.ckpt"
    size = (1 << 32) + 8
    with torch.serialization.skip_data():  # leaves a hole: neither memory nor disk is used
        torch.save({"a": torch.empty(size, dtype=torch.uint8), "b": torch.ones(3)}, path)
    with open(path, "rb") as file:
        directory = read_directory(file, path.stat().st_size)
        records = {record.name: record for record, _ in payloads(file, directory) if record is not None}
    assert records["data/0"].size == size
    assert records["data/1"].size == 12
    assert records["data/1"].header > size


def test_audit_reads_a_file_without_a_seal(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with open(tmp_path / "a.pt", "rb") as file:
        result = compare_checksums(file, (tmp_path / "a.pt").stat().st_size)
    assert not result.has_digest
    assert result.altered == []
