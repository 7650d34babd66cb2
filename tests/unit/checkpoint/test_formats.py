"""A registered format of checkpoint folders is found, loaded and verified by storage."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loopwright.checkpoint import formats, storage
from loopwright.checkpoint.tools.formats import Reading, find_checkpoints, open_checkpoint
from loopwright.checkpoint.verified import Verified


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Register a format whose folders hold one file, and return such a folder."""
    module: Any = ModuleType("toy_format")
    module.is_folder_checkpoint = lambda path, options=None: (Path(path) / "toy.txt").is_file()
    module.load = lambda path, **how: {"global_step": int((Path(path) / "toy.txt").read_text())}
    module.verify = lambda path, options=None, *, advance=None: Verified(sealed=False, size_bytes=1, entries=1)
    monkeypatch.setitem(sys.modules, "toy_format", module)
    monkeypatch.setattr(formats, "_formats", dict(formats._formats))
    formats.register("toy", "toy_format")
    folder = tmp_path / "run.ckpt"
    folder.mkdir()
    (folder / "toy.txt").write_text("3")
    return folder


def test_storage_reads_a_registered_format(toy: Path) -> None:
    assert storage.load(toy) == {"global_step": 3}
    assert storage.verify(toy) == Verified(sealed=False, size_bytes=1, entries=1)


def test_the_tools_read_a_registered_format(toy: Path) -> None:
    assert find_checkpoints(toy.parent) == [toy]
    opened = open_checkpoint(toy, Reading())
    assert (opened.format, opened.tree) == ("toy checkpoint", {"global_step": 3})


def test_a_file_and_a_folder_of_no_format_have_none(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = [formats.find_format(path) for path in (toy / "toy.txt", tmp_path / "empty", tmp_path / "nowhere")]
    assert found == [None, None, None]
