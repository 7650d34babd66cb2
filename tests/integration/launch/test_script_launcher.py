"""Real scripts that start their further ranks themselves. Each takes a few seconds: every process imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BEGIN = """
import os, sys, threading, time
import torch, torch.distributed as dist
from loopwright.errors import LaunchError
from loopwright.fabric import LightningEnvironment
from loopwright.fabric.launch import ExternalLauncher, ScriptLauncher
from loopwright.strategies.distributed import rendezvous

def make(size=2):
    cluster = LightningEnvironment()
    launcher = (ExternalLauncher if cluster.creates_processes_externally else ScriptLauncher)(cluster, size)
    cluster.set_world_size(size)
    cluster.set_global_rank(cluster.local_rank())
    return launcher, cluster

def join(cluster):
    return rendezvous.connect(cluster, backend="gloo")

rank = int(os.environ.get("LOCAL_RANK", 0))
launcher, cluster = make()
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOOPWRIGHT_STORE"):
        monkeypatch.delenv(name, raising=False)


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    file = folder / name
    file.write_text(BEGIN + textwrap.dedent(text))
    return file


def run(*command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=200, check=False, **options
    )


def until(condition: Callable[[], Any], limit_s: float = 240.0) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


# -- what works ------------------------------------------------------------------------------------------------------

_WORKS = """
from pathlib import Path
mode = sys.argv.pop(1)  # the other ranks get the arguments as they were typed
assert mode == "fit" and sys.argv[1:] == ["--lr", "0.1 0.2"], sys.argv
assert sys.flags.optimize == 1

def work(value):
    join(cluster)
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return total.item()

first = launcher.launch(work, 1.0)
again = launcher.launch(work, 2.0)
other, cluster = make()
third = other.launch(work, 3.0)
late, cluster = make(3) if rank == 0 else (None, None)
if rank == 0:
    late = ScriptLauncher(cluster, 3)
    try:
        late.launch(work, 1.0)
    except LaunchError as error:
        assert "3 processes on 1 node(s)" in str(error) and "2 on 1" in str(error), error
assert launcher.starts_processes is False
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS")
said = [os.environ[name] for name in names]
Path(sys.argv[0]).with_name(f"rank{rank}").write_text(f"{first} {again} {third} {said}")
"""


@pytest.mark.parametrize("as_module", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_runs_once_per_rank(tmp_path: Path, as_module: bool) -> None:
    file = script(tmp_path, _WORKS)
    command = ["-m", "train"] if as_module else [file]
    done = run("-O", *command, "fit", "--lr", "0.1 0.2", cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    for rank in "01":
        expected = f"3.0 5.0 7.0 ['{rank}', '{rank}', '2', '2', '0', '1']"
        assert (tmp_path / f"rank{rank}").read_text() == expected


def test_what_is_no_script_is_refused_with_advice(tmp_path: Path) -> None:
    text = script(tmp_path, "launcher.launch(print)").read_text()
    for command in (["-c", text], ["-"]):
        done = run(*command, input=text)
        assert done.returncode == 1
        assert "LaunchError" in done.stderr
        assert "strategy='ddp_fork'" in done.stderr


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_while_it_starts_is_named_at_once(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        if rank == 1:
            raise OSError("no such data")
        launcher.launch(join, cluster)
        """,
    )
    began = time.monotonic()
    done = run(file)
    assert time.monotonic() - began < 150
    assert done.returncode == 1
    assert "OSError: no such data" in done.stderr
    assert "RankFailure: Rank 1 (host" in done.stderr
    assert "failed before all ranks were connected: the process ended with exit code 1" in done.stderr


def test_a_rank_that_ends_without_an_error_before_it_connects_is_not_waited_for(tmp_path: Path) -> None:
    text = """
    if rank == 1:
        sys.exit(0)
    launcher.launch(join, cluster)
    """
    ended = run(script(tmp_path, text))
    assert ended.returncode == 1
    assert "RankFailure: Rank 1 (host" in ended.stderr
    assert "the process ended with exit code 0" in ended.stderr


@pytest.mark.slow
def test_a_rank_that_dies_ends_one_that_does_not_notice(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        def work():
            join(cluster)
            if rank == 1:
                os.kill(os.getpid(), 9)
            launcher.grace_s = 0.5
            threading.Event().wait()

        launcher.launch(work)
        """,
    )
    done = run(file)
    assert done.returncode == 1
    assert "loopwright: rank 1 (host" in done.stderr
    assert "was killed by SIGKILL" in done.stderr


@pytest.mark.slow
def test_an_exception_here_ends_ranks_that_hang(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        def work():
            store = join(cluster)
            store.set(f"pid{rank}", str(os.getpid()))
            if rank == 1:
                import signal
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                store.set("ready", "1")
                threading.Event().wait()
            while not store.check(["ready"]):
                time.sleep(0.01)
            print(store.get("pid1").decode(), flush=True)
            raise ValueError("here")

        launcher.launch(work)
        """,
    )
    done = run(file)
    assert done.returncode == 1
    assert "ValueError: here" in done.stderr
    assert is_gone(int(done.stdout))


@pytest.mark.slow
def test_a_rank_that_fails_at_its_end_makes_the_launch_fail(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        launcher.launch(join, cluster)
        rendezvous.disconnect()
        if rank == 1:
            time.sleep(0.5)  # after the end of rank 0's script
            sys.exit(3)
        print("rank 0 is done")
        """,
    )
    done = run(file)
    assert done.returncode == 3
    assert "rank 0 is done" in done.stdout
    assert "not every process ended with exit code 0: local rank 1: the process ended with exit code 3" in done.stderr


_WAITS = """
import ctypes

def work():
    join(cluster)
    os.write(1, b"%d\\n" % os.getpid())  # whole: two processes write
    if rank == 1:
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock: no thread of Python can run
    threading.Event().wait()

launcher.launch(work)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_no_rank_outlives_the_first(tmp_path: Path, signum: signal.Signals) -> None:
    first = subprocess.Popen(
        [sys.executable, str(script(tmp_path, _WAITS))], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert first.stdout is not None
    pids = [int(first.stdout.readline()) for _ in range(2)]
    first.send_signal(signum)
    assert first.wait(60) == -signum
    first.stdout.close()
    for pid in pids:
        until(lambda: is_gone(pid))  # noqa: B023  the loop waits for it


@pytest.mark.slow
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test was started with

        def work():
            join(cluster)
            os.write(1, b"%d\\n" % os.getpid())  # whole: two processes write
            while True:
                time.sleep(0.1)

        launcher.launch(work)
        """,
    )
    first = subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert first.stdout is not None
    pids = [int(first.stdout.readline()) for _ in range(2)]
    os.killpg(first.pid, signal.SIGINT)  # what the terminal does
    _, told = first.communicate(timeout=100)
    assert first.returncode != 0
    assert "KeyboardInterrupt" in told
    for pid in pids:
        until(lambda: is_gone(pid))  # noqa: B023  the loop waits for it


_FREES_LATE = """
import threading, time, weakref
import torch
import torch.distributed as dist
import loopwright as lw

began = threading.Event()


def free(reference):  # in the thread of gloo, which is the last to let go of the tensor
    began.set()
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        pass


fabric = lw.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
held = dist.group.WORLD  # as a wrapped module holds it: the group's threads outlive destroy_process_group
value = torch.ones(3)
if fabric.global_rank == 1:
    reference = weakref.ref(value, free)
    dist.all_reduce(value, async_op=True)
    del value
    assert began.wait(30)
else:
    time.sleep(0.3)  # the other rank has let go by then
    dist.all_reduce(value)
"""


@pytest.mark.slow
def test_a_rank_ends_after_the_threads_of_gloo_have_freed_their_tensors(tmp_path: Path) -> None:
    done = run(script(tmp_path, _FREES_LATE))
    assert done.returncode == 0, done.stderr
