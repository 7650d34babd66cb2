"""Ranks that wait become what a process started at the launch would be, or end; here without importing torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loopwright.fabric.launch import ExternalLauncher, InProcessLauncher, prestart
from loopwright.fabric.launch.prestart import SWITCH, end_waiting, take

FACTS = """
import json, os, signal, sys, threading
main = sys.modules["__main__"]
open_files = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
facts = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "main": {name: repr(value).partition(" at 0x")[0] for name, value in vars(main).items() if name.startswith("__")},
    "name": __name__,
    "is_main": vars(main) is globals(),
    "directory": os.getcwd(),
    "interrupt": str(signal.getsignal(signal.SIGINT)),
    "threads": threading.active_count(),
    "environment": {name: value for name, value in os.environ.items() if name not in ("_", "LOOPWRIGHT_PARENT")},
    "warnings": sys.warnoptions,
    "hook": str(sys.excepthook),
    "files": sum(map(os.get_inheritable, open_files)),
}
print(json.dumps(facts, sort_keys=True))
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks start early on Linux only")


class Early:
    """A program in a folder, whose ranks start early without the conditions for it.

    Attributes:
        folder: It holds the program, train.py.
        command: The command of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [sys.executable, "-W", "ignore", str(folder / "train.py"), "a", "b c"]
        self.modules: dict[str, str] = {}

    def write(self, text: str, name: str = "train.py") -> Path:
        file = self.folder / name
        file.write_text(textwrap.dedent(text))
        return file

    def imports(self, text: str) -> None:
        """Let ranks import a module while they wait, which writes a file `ready` at its end."""
        text = textwrap.dedent(text) + f"\nopen({str(self.folder / 'ready')!r}, 'w').close()\n"
        self.modules["marker"] = str(self.write(text, "marker.py"))

    def start(self) -> int:
        prestart.prestart(2, {})
        if self.modules:
            until((self.folder / "ready").exists)
        return prestart._waiting[1].process.pid

    def take(self, **changed: str) -> prestart.WaitingRank | None:
        return take(1, self.command, None, {**os.environ, **changed})

    def run_as_usual(self, **changed: str) -> tuple[int, str, str]:
        done = subprocess.run(self.command, env={**os.environ, **changed}, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Early]:
    made = Early(tmp_path)
    made.write(FACTS)
    monkeypatch.setattr(prestart, "_is_possible", lambda num_processes: True)
    monkeypatch.setattr(prestart, "_modules", lambda: made.modules)
    monkeypatch.setattr(prestart, "own_command", lambda local: (made.command, None))
    monkeypatch.setattr(prestart, "run_by", lambda file, command: [*command[:3], file, *command[3:]])
    yield made
    end_waiting()


def until(condition: Callable[[], Any], limit_s: float = 240.0) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


# -- a rank that is needed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [["train.py", "a", "b c"], ["link.py"], ["-m", "train", "--lr=1"]])
def test_it_runs_the_program_as_a_new_process_would(
    early: Early, program: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(early.folder)
    (early.folder / "other").mkdir()
    (early.folder / "link.py").symlink_to(early.write(FACTS, "other/linked.py"))
    file = [str(early.folder / program[0])] if program[0] != "-m" else ["-m"]
    early.command = [sys.executable, "-W", "ignore", *file, *program[1:]]
    monkeypatch.setattr(prestart, "_MAY_CHANGE", (*prestart._MAY_CHANGE, "RANK"))
    early.start()
    rank = early.take(RANK="1", WANDB_MODE="offline")
    assert rank is not None
    assert rank.process.wait(60) == 0
    found = json.loads(capfd.readouterr().out)
    expected = json.loads(early.run_as_usual(RANK="1", WANDB_MODE="offline")[1])
    assert found == expected
    assert (found["environment"]["RANK"], found["files"]) == ("1", 3)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise ValueError('of the program')\nf()\n",
        "import sys\nsys.exit('a message')\n",
        "import sys\nsys.exit(3)\n",
        "raise KeyboardInterrupt\n",
        "x = = 1\n",
        "import sys\nsys.excepthook = lambda kind, error, trace: print('own', trace.tb_lineno, trace.tb_next)\n1 / 0\n",
    ],
)
def test_it_ends_as_a_new_process_would(early: Early, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    early.write(text)
    early.start()
    rank = early.take()
    assert rank is not None
    code = rank.process.wait(60)
    shown = capfd.readouterr()
    assert (code, shown.out, shown.err) == early.run_as_usual()


def test_what_importing_warns_of_is_shown_by_a_rank_that_is_needed(
    early: Early, capfd: pytest.CaptureFixture[str]
) -> None:
    early.command = [sys.executable, "-W", "default", str(early.folder / "train.py")]
    early.imports("import warnings\nwarnings.warn('of the module')\n")
    early.start()
    assert capfd.readouterr() == ("", "")
    rank = early.take()
    assert rank is not None
    rank.process.wait(60)
    assert "marker.py:2: UserWarning: of the module" in capfd.readouterr().err


def test_a_second_call_keeps_what_waits(early: Early) -> None:
    first = early.start()
    prestart.prestart(3, {})
    assert prestart._waiting[1].process.pid == first
    assert sorted(prestart._waiting) == [1, 2]


# -- a rank that is not ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "PYTHONPATH", "UNKNOWN"])
def test_an_environment_that_imports_may_read_needs_a_new_process(early: Early, name: str) -> None:
    pid = early.start()
    assert early.take(**{name: "changed"}) is None
    assert is_gone(pid)
    assert not prestart._waiting


def change_directory(folder: Path) -> Callable[[], Any]:
    before = os.getcwd()
    os.chdir(folder)
    return lambda: os.chdir(before)


def change_umask(folder: Path) -> Callable[[], Any]:
    before = os.umask(0o077)
    return lambda: os.umask(before)


def change_hangups(folder: Path) -> Callable[[], Any]:
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL if is_ignored else signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGHUP, before)


def replace_input(folder: Path) -> Callable[[], Any]:
    before = os.dup(0)
    with open(folder / "train.py") as file:
        os.dup2(file.fileno(), 0)
    return lambda: (os.dup2(before, 0), os.close(before))


@pytest.mark.parametrize("change", [change_directory, change_umask, change_hangups, replace_input])
def test_what_a_process_inherits_may_not_change(early: Early, change: Callable[[Path], Callable[[], Any]]) -> None:
    pid = early.start()
    undo = change(early.folder)
    try:
        assert early.take() is None
    finally:
        undo()
    assert is_gone(pid)


def test_another_command_needs_a_new_process(early: Early) -> None:
    early.start()
    early.command = [*early.command, "more"]
    assert early.take() is None


def test_other_files_than_this_process_imported_need_a_new_process(early: Early) -> None:
    early.modules["json"] = "/elsewhere/json.py"
    prestart.prestart(2, {})
    until(lambda: prestart._waiting[1].process.poll() == 1)
    assert early.take() is None


def test_ctrl_c_ends_it_without_a_word(early: Early, capfd: pytest.CaptureFixture[str]) -> None:
    early.imports("")
    os.kill(early.start(), signal.SIGINT)
    assert prestart._waiting[1].process.wait(60) == -signal.SIGINT
    assert early.take() is None
    assert capfd.readouterr() == ("", "")


def test_it_ends_at_once_with_the_process_that_started_it(early: Early) -> None:
    early.imports("")
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        os.write(write, str(early.start()).encode())
        signal.pause()
    pid = int(os.read(read, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(lambda: is_gone(pid), 10)
    os.close(read)
    os.close(write)


def test_a_fork_leaves_it_alone(early: Early) -> None:
    pid = early.start()
    fork = os.fork()
    if not fork:
        os._exit(1 if prestart._waiting else 0)
    assert os.waitpid(fork, 0)[1] == 0
    assert not is_gone(pid)
    end_waiting()
    assert is_gone(pid)


def test_no_descriptor_stays_open(early: Early) -> None:
    before = os.listdir("/proc/self/fd")
    early.start()
    end_waiting()
    assert os.listdir("/proc/self/fd") == before


# -- where no rank starts early --------------------------------------------------------------------------------------


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(prestart, "_loads_libraries_before_torch", lambda: False)
    monkeypatch.setattr(prestart, "_is_script_or_module", lambda: True)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setenv(SWITCH, "1")


def test_the_switch(possible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prestart._is_possible(2)
    monkeypatch.setenv(SWITCH, "0")
    assert not prestart._is_possible(2)
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "a test")
    assert not prestart._is_possible(2)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert prestart._is_possible(2)


def test_each_process_needs_a_core(possible: None) -> None:
    assert not prestart._is_possible(3)


def test_only_the_main_thread_starts_ranks_early(possible: None) -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(prestart._is_possible(2)))
    thread.start()
    thread.join()
    assert found == [False]


def test_debuggers_and_import_times_see_ranks_at_the_launch(possible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys._xoptions, "importtime", True)
    assert not prestart._is_possible(2)
    monkeypatch.delitem(sys._xoptions, "importtime")
    assert prestart._is_possible(2)
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert not prestart._is_possible(2)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["json", "numpy.core", "torch._C", "torch", "cv2"], False),
        (["cv2", "torch._C", "torch"], True),
        (["json"], True),
    ],
)
def test_libraries_that_load_before_torch(names: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = type("Module", (), {"__file__": "/lib/part.so"})
    suffixes = type("Suffixes", (), {"__iter__": lambda self: iter([".so"])})()
    monkeypatch.setattr(prestart, "EXTENSION_SUFFIXES", suffixes)
    stand_in = type("Sys", (), {"modules": dict.fromkeys(names, compiled), "stdlib_module_names": {"json"}})
    monkeypatch.setattr(prestart, "sys", stand_in)
    assert prestart._loads_libraries_before_torch() is expected


def test_ranks_start_none_themselves() -> None:
    assert ExternalLauncher.prepare is InProcessLauncher.prepare
