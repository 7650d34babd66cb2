"""Builds of operators that fail, hang, are killed, or are wanted by several processes at a time."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from loopwright.errors import ConfigError, LaunchError
from loopwright.strategies.deepspeed import builds
from loopwright.strategies.deepspeed.builds import build, holders, is_built

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    return tmp_path


def tries(cache: Path, name: str) -> int:
    return len((cache / name / "tries").read_text().splitlines())


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def until(wanted: Any, *, within_s: float = 20.0) -> None:
    """Wait for other processes."""
    ends = time.monotonic() + within_s
    while not wanted():
        assert time.monotonic() < ends
        os.sched_yield()


def build_quick(rank: int, size: int) -> bool:
    build("quick", "slow_operators:Quick")
    return is_built("quick")


def test_several_processes_build_once(cache: Path) -> None:
    assert run_ranks(build_quick, 3, connect=False) == [True] * 3
    assert tries(cache, "quick") == 1
    assert is_built("quick")
    began = time.monotonic()
    build("quick", "slow_operators:Quick")
    assert time.monotonic() - began < 0.05  # nothing but a look at two files
    assert tries(cache, "quick") == 1


def test_what_was_built_for_another_environment_is_built_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("quick", "slow_operators:Quick")
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert not is_built("quick")
    build("quick", "slow_operators:Quick")
    assert tries(cache, "quick") == 2


def test_a_build_that_takes_too_long_is_ended_with_its_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builds, "_SAYS_EVERY_S", 1.0)
    monkeypatch.setenv(builds.TIMEOUT_VARIABLE, "6")
    with pytest.raises(LaunchError, match=r"took longer than 6 s and was ended(.|\n)*LOOPWRIGHT_BUILD_TIMEOUT_S"):
        build("endless", "slow_operators:Endless")
    assert "building endless: for 1 s of at most 6 s" in caplog.text
    compiler = int((cache / "compiler").read_text())
    until(lambda: not is_running(compiler))
    assert not (cache / "endless" / "lock").exists()
    monkeypatch.setenv(builds.TIMEOUT_VARIABLE, "soon")
    with pytest.raises(ConfigError, match="to be a positive number, got 'soon'"):
        build("endless", "slow_operators:Endless")


def test_a_build_by_torch_is_ended_with_its_compiler_and_can_be_made_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
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
    compiler = int((cache / "compiler").read_text())
    until(lambda: not is_running(compiler))
    assert not (cache / "compiled" / "lock").exists()
    build("compiled", "slow_operators:Compiled")
    assert is_built("compiled")


def test_a_build_that_fails_shows_what_the_compiler_said(cache: Path) -> None:
    with pytest.raises(LaunchError, match=r"no_such_header.h: No such file(.|\n)*apt install g\+\+(.|\n)*libaio-dev"):
        build("wrong", "slow_operators:Wrong")
    assert not (cache / "wrong" / "lock").exists()


def test_a_machine_without_tools_is_told_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setattr(sys, "executable", str(cache / "python"))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler \(c\+\+\) and no ninja here.*\n.*apt install g\+\+"):
        build("quick", "slow_operators:Quick")


def test_a_killed_process_leaves_no_compiler_and_its_lock_is_named_and_removed(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = subprocess.Popen([sys.executable, HERE / "build_one.py", "endless", "Endless"], stderr=subprocess.DEVNULL)
    until(lambda: (cache / "compiler").is_file() and (cache / "compiler").read_text().strip())
    compiler, lock = int((cache / "compiler").read_text()), cache / "endless" / "lock"
    owners = holders(lock)
    assert owners
    assert is_running(compiler)
    assert started.pid not in owners  # its child has it
    started.send_signal(signal.SIGKILL)
    started.wait()
    until(lambda: not is_running(compiler) and holders(lock) == [])
    assert lock.exists()
    (lock.parent / "endless.so").touch()
    (lock.parent / builds._STAMP).write_text(builds._stamp(lock.parent, "endless"))
    with caplog.at_level(logging.WARNING):
        builds._free(lock.parent, "endless", 5.0)
    assert f"removing {lock}: the build that made it was killed" in caplog.text
    assert not lock.exists()
    assert not is_built("endless")  # what it was building again is half done


def test_a_lock_of_an_unknown_build_is_left_alone_and_named(cache: Path) -> None:
    place = cache / "quick"
    place.mkdir()
    (place / "lock").touch()
    with pytest.raises(LaunchError, match=r"quick/lock has been there for .* held by no process that can be seen here"):
        build("quick", "slow_operators:Quick", timeout_s=0.5)
    assert (place / "lock").exists()
    long_ago = time.time() - 1000
    for one in (*place.iterdir(), place):
        os.utime(one, (long_ago, long_ago))
    build("quick", "slow_operators:Quick", timeout_s=20)
    assert is_built("quick")


def test_a_lock_that_a_process_holds_is_waited_for_and_names_it(cache: Path) -> None:
    place = cache / "quick"
    place.mkdir()
    with (place / "lock").open("w"):
        long_ago = time.time() - 1000
        os.utime(place / "lock", (long_ago, long_ago))
        with pytest.raises(LaunchError, match=f"held by process {os.getpid()}"):
            build("quick", "slow_operators:Quick", timeout_s=0.5)
    assert (place / "lock").exists()
