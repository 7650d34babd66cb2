"""Builds of operators that fail, hang, are killed, or are wanted by several processes at a time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from loopwright.errors import ConfigError, LaunchError
from loopwright.strategies.deepspeed import builds
from loopwright.strategies.deepspeed.builds import build, is_built

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    return tmp_path


@pytest.fixture
def folder(cache: Path) -> Path:
    """Return the folder of Loopwright's builds."""
    return cache / builds._ROOT


def tries(folder: Path, name: str) -> int:
    return len((folder / name / "tries").read_text().splitlines())


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def holders(file: Path) -> set[int]:
    """Return the processes that have a file open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if any(one.resolve() == file for one in (process / "fd").iterdir()):
                found.add(int(process.name))
    return found


def until(wanted: Any, *, within_s: float = 240.0) -> None:
    """Wait for other processes."""
    ends = time.monotonic() + within_s
    while not wanted():
        assert time.monotonic() < ends
        os.sched_yield()


def build_quick(rank: int, size: int) -> bool:
    build("quick", "slow_operators:Quick")
    return is_built("quick")


def test_several_processes_build_once(folder: Path) -> None:
    assert run_ranks(build_quick, 3, connect=False) == [True] * 3
    assert tries(folder, "quick") == 1
    assert is_built("quick")
    build("quick", "slow_operators:Quick")
    assert tries(folder, "quick") == 1


def test_what_was_built_for_another_environment_is_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("quick", "slow_operators:Quick")
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert not is_built("quick")
    build("quick", "slow_operators:Quick")
    assert tries(folder, "quick") == 2


def test_a_build_that_takes_too_long_is_ended_with_its_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builds, "_SAYS_EVERY_S", 1.0)
    monkeypatch.setenv(builds.TIMEOUT_VARIABLE, "6")
    with pytest.raises(LaunchError, match=r"took longer than 6 s and was ended(.|\n)*LOOPWRIGHT_BUILD_TIMEOUT_S"):
        build("endless", "slow_operators:Endless")
    assert "building endless: for 1 s of at most 6 s" in caplog.text
    compiler = int((folder / "compiler").read_text())
    until(lambda: not is_running(compiler))
    assert not (folder / "endless" / "lock").exists()
    monkeypatch.setenv(builds.TIMEOUT_VARIABLE, "soon")
    with pytest.raises(ConfigError, match="to be a positive number, got 'soon'"):
        build("endless", "slow_operators:Endless")


def test_a_build_by_torch_is_ended_with_its_compiler_and_can_be_made_again(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = cache / "slow-c++"
    slow.write_text(
        '#!/bin/sh\ncase "$*" in *compiled.cpp*) echo $$ > $TORCH_EXTENSIONS_DIR/compiler; sleep 999;; esac'
    )
    slow.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(slow))
        patch.setenv("TORCH_DONT_CHECK_COMPILER_ABI", "1")
        with pytest.raises(LaunchError, match="took longer than 20 s and was ended"):
            build("compiled", "slow_operators:Compiled", timeout_s=20)
    compiler = int((folder / "compiler").read_text())
    until(lambda: not is_running(compiler))
    assert not (folder / "compiled" / "lock").exists()
    build("compiled", "slow_operators:Compiled")
    assert is_built("compiled")


def test_a_build_that_fails_shows_what_the_compiler_said(folder: Path) -> None:
    with pytest.raises(LaunchError, match=r"no_such_header.h: No such file(.|\n)*apt install g\+\+(.|\n)*libaio-dev"):
        build("wrong", "slow_operators:Wrong")
    assert not (folder / "wrong" / "lock").exists()


def test_a_machine_without_tools_gets_an_error_with_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setattr(sys, "executable", str(cache / "python"))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler \(c\+\+\) and no ninja here.*\n.*apt install g\+\+"):
        build("quick", "slow_operators:Quick")


def test_a_killed_process_leaves_no_compiler_and_the_next_build_removes_its_lock(
    cache: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = subprocess.Popen([sys.executable, HERE / "build_one.py", "endless", "Endless"], stderr=subprocess.DEVNULL)
    compiler_of = folder / "compiler"
    until(lambda: compiler_of.is_file() and compiler_of.read_text().strip())
    compiler, lock = int(compiler_of.read_text()), folder / "endless" / "lock"
    assert is_running(compiler)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert lock.exists()
    (lock.parent / "endless.so").touch()
    (lock.parent / builds._STAMP).write_text(builds._stamp(lock.parent, "endless"))
    compiler_of.unlink()
    with caplog.at_level(logging.WARNING), pytest.raises(LaunchError, match="took longer than 6 s"):
        build("endless", "slow_operators:Endless", timeout_s=6)  # what was being built again is half done
    assert not is_running(compiler)
    assert f"removing {lock}: the build that made it was killed" in caplog.text
    assert tries(folder, "endless") == 2
    assert not lock.exists()
    assert not is_built("endless")


def test_a_build_keeps_its_turn_until_it_has_ended_also_if_its_parent_is_killed(folder: Path) -> None:
    started = subprocess.Popen([sys.executable, HERE / "build_one.py", "endless", "Endless"], stderr=subprocess.DEVNULL)
    until(lambda: (folder / "compiler").is_file())
    turn = folder / "endless.turn"
    (child,) = holders(turn) - {started.pid}
    os.kill(child, signal.SIGSTOP)  # else it ends soon after its parent
    started.kill()
    started.wait()
    with turn.open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(child, signal.SIGCONT)
        fcntl.flock(other, fcntl.LOCK_EX)
    assert not is_running(child)


def test_a_build_of_another_program_is_left_alone(cache: Path) -> None:
    place = cache / "quick"
    place.mkdir()
    (place / "lock").touch()
    build("quick", "slow_operators:Quick", timeout_s=20)
    assert is_built("quick")
    assert [one.name for one in place.iterdir()] == ["lock"]


def test_a_folder_without_locks_of_the_system_keeps_the_lock_of_another_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (folder / "waiting").mkdir(parents=True)
    lock = folder / "waiting" / "lock"
    lock.touch()
    with pytest.raises(LaunchError, match=rf"took longer than 3 s(.|\n)*or delete {lock}"):
        build("waiting", "slow_operators:Waiting", timeout_s=3)
    assert lock.exists()
    assert "cannot be locked" in caplog.text
