"""Faults in the middle of a save: whatever happens, the file that was there is whole, or the new one is."""

from __future__ import annotations

import errno
import gc
import io
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import files
from loopwright.checkpoint import load, save, storage, verify
from loopwright.errors import CheckpointError

# Python 3.12 warns of a fork beside threads; the children here only save and die.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

BEFORE = {"state_dict": {"w": torch.full((50_000,), 1.0)}}
AFTER = {"state_dict": {"w": torch.full((50_000,), 2.0)}}


def in_child(act: Callable[[], None]) -> int:
    """Run `act` in a forked process and return how it ended, as subprocess would."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def value_of(path: Path) -> float:
    assert verify(path).sealed
    return float(load(path)["state_dict"]["w"][0])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    save(BEFORE, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize("stage", storage.STAGES)
def test_a_kill_at_every_stage_leaves_a_complete_file_and_the_next_save_cleans_up(target: Path, stage: str) -> None:
    def save_and_die() -> None:
        storage.reached = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == stage else None
        save(AFTER, target)

    assert in_child(save_and_die) == -signal.SIGKILL
    is_replaced = stage in ("renamed", "folder-synced")
    assert value_of(target) == (2.0 if is_replaced else 1.0)
    assert len(os.listdir(target.parent)) == (1 if is_replaced else 2)
    save(AFTER, target.with_name("b.ckpt"))
    assert sorted(os.listdir(target.parent)) == ["a.ckpt", "b.ckpt"]


def test_a_kill_at_any_moment_leaves_a_complete_file(target: Path) -> None:
    generator = random.Random(0)
    for _ in range(15):
        child = os.fork()
        if child == 0:
            while True:
                save(AFTER, target)
                save(BEFORE, target)
        time.sleep(generator.uniform(0.001, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert value_of(target) in (1.0, 2.0)
    save(BEFORE, target)
    assert os.listdir(target.parent) == ["a.ckpt"]


@pytest.mark.parametrize("stage", storage.STAGES[:4])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_at_any_stage_removes_the_unfinished_file(
    target: Path, stage: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        if name == stage:
            raise error

    monkeypatch.setattr(storage, "reached", fail)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        save(AFTER, target)
    assert os.listdir(target.parent) == ["a.ckpt"]
    assert value_of(target) == 1.0


class FailingFile(io.FileIO):
    """A file whose disk is full, or whose writer is interrupted, after some bytes."""

    failure: BaseException = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    room = 100_000

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise self.failure
        return super().write(data) or 0


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FailingFile]]:
    class File(FailingFile):
        pass

    monkeypatch.setattr(files, "FileIO", File)
    yield File
    gc.collect()  # a writer that tried to write again would warn here


def test_a_full_disk_says_what_is_needed_and_what_is_free(target: Path, failing: type[FailingFile]) -> None:
    with pytest.raises(CheckpointError) as raised:
        save(AFTER, target)
    message = str(raised.value)
    assert str(target) in message
    assert "No space left on device" in message
    assert "It needs about 200,000 bytes" in message
    assert "bytes are free in" in message
    assert "free space on that disk" in message
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert os.listdir(target.parent) == ["a.ckpt"]
    assert value_of(target) == 1.0


@pytest.mark.parametrize("room", [0, 10, 500, 2_000, 150_000, 200_500, -200, -130, -100, -1])
def test_a_disk_may_be_full_at_any_byte(target: Path, failing: type[FailingFile], room: int) -> None:
    failing.room = room if room >= 0 else target.stat().st_size + room
    with pytest.raises(CheckpointError, match="No space left"):
        save(AFTER, target)
    assert os.listdir(target.parent) == ["a.ckpt"]


def test_ctrl_c_while_writing_is_ctrl_c(target: Path, failing: type[FailingFile]) -> None:
    failing.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        save(AFTER, target)
    assert os.listdir(target.parent) == ["a.ckpt"]


def test_a_save_while_an_error_is_handled_reports_its_own(target: Path) -> None:
    tensor = torch.ones(4)
    try:
        raise OSError(errno.EPIPE, "the user's own")
    except OSError:
        with pytest.raises(CheckpointError, match="share memory") as raised:
            save({"a": tensor, "b": tensor.view(torch.int32)}, target)
    assert "the user's own" not in str(raised.value)


def test_a_limit_on_file_sizes_is_explained(target: Path) -> None:
    def save_with_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save(AFTER, target)
        except CheckpointError as error:
            os._exit(3 if "ulimit -f" in str(error) else 4)

    assert in_child(save_with_limit) == 3
    assert os.listdir(target.parent) == ["a.ckpt"]
    assert value_of(target) == 1.0


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_is_explained(target: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: Any) -> int:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(CheckpointError, match=os.strerror(code)) as raised:
        save(AFTER, target)
    assert "dirpath" in raised.value.fix


def test_a_failing_rename_removes_the_unfinished_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(storage.os, "replace", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(AFTER, target)
    assert os.listdir(target.parent) == ["a.ckpt"]


def test_a_folder_at_the_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        save(AFTER, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_file_among_the_parents_is_an_error(target: Path) -> None:
    for path in (target / "b.ckpt", target / "c" / "b.ckpt"):
        with pytest.raises(CheckpointError, match="a part of the path is a file"):
            save(AFTER, path)


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="shorter file name"):
        save(AFTER, tmp_path / ("n" * 300))
    assert os.listdir(tmp_path) == []


def test_the_file_of_a_running_save_is_not_removed(target: Path) -> None:
    file, temporary = files.open_temporary(target)
    try:
        save(AFTER, target)
        assert temporary.exists()
        assert in_child(lambda: files.remove_stale(target.parent)) == 0
        assert temporary.exists()
    finally:
        file.close()
    files.remove_stale(target.parent)
    assert os.listdir(target.parent) == ["a.ckpt"]


def test_other_hidden_files_stay(target: Path) -> None:
    (target.parent / ".hidden").write_text("mine")
    save(AFTER, target)
    assert sorted(os.listdir(target.parent)) == [".hidden", "a.ckpt"]


def test_an_unreadable_file_is_explained(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        verify(target)
