from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loopwright.errors import ConfigError, LaunchError, RankFailure, StopBySignal
from loopwright.fabric import LightningEnvironment
from loopwright.fabric.launch import ProcessLauncher
from loopwright.strategies.distributed import rendezvous


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOOPWRIGHT_STORE"):
        monkeypatch.delenv(name, raising=False)


def forks(size: int = 2) -> tuple[ProcessLauncher, LightningEnvironment]:
    cluster = LightningEnvironment()
    return ProcessLauncher("fork", cluster, size), cluster


def join(cluster: LightningEnvironment) -> Any:
    return rendezvous.connect(cluster, backend="gloo")


def until(condition: Callable[[], Any], limit_s: float = 240.0) -> Any:
    ends = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.01)
    return value


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


# -- new processes: what comes back ----------------------------------------------------------------------------------


def _sum(cluster: LightningEnvironment, value: float, *, scale: float) -> dict[str, Any]:
    join(cluster)
    total = torch.full((3,), value * scale)
    dist.all_reduce(total)
    ranks: list[Any] = [None] * cluster.world_size()
    dist.all_gather_object(ranks, (cluster.global_rank(), cluster.local_rank(), os.environ["RANK"]))
    return {"total": total, "ranks": ranks, "pid": os.getpid(), "threads": torch.get_num_threads()}


def test_forks_join_and_rank_zeros_result_comes_back() -> None:
    launcher, cluster = forks(3)
    result = launcher.launch(_sum, cluster, 2.0, scale=0.5)
    assert result["total"].tolist() == [3.0] * 3
    assert result["ranks"] == [(0, 0, "0"), (1, 1, "1"), (2, 2, "2")]
    assert result["pid"] != os.getpid()
    assert launcher.local_exits() == {0: 0, 1: 0, 2: 0}
    assert launcher.starts_processes
    assert launcher.is_interactive_compatible


@pytest.mark.parametrize("has_port", [False, True])
def test_a_launcher_works_again_and_leaves_the_environment_alone(
    has_port: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_port:
        monkeypatch.setenv("MASTER_PORT", str(rendezvous.host_store("127.0.0.1", 0).port))
    before = dict(os.environ)
    launcher, cluster = forks()
    assert [launcher.launch(_sum, cluster, 1.0, scale=1.0)["total"][0].item() for _ in range(2)] == [2.0, 2.0]
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_forks_see_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    launcher, _ = forks()
    assert launcher.launch(lambda: lock.locked()) is False


def test_within_a_rank_the_launcher_runs_in_place() -> None:
    def work() -> tuple[bool, int, int]:
        return launcher.starts_processes, launcher.launch(os.getpid), os.getpid()

    launcher, _ = forks()
    starts, inner, pid = launcher.launch(work)
    assert not starts
    assert inner == pid
    assert launcher.starts_processes


def test_what_shares_memory_in_the_result_shares_it_afterwards() -> None:
    def tied() -> dict[str, torch.Tensor]:
        weight = torch.arange(4.0)
        return {"a": weight, "b": weight[1:]}

    launcher, _ = forks()
    result = launcher.launch(tied)
    result["a"][1] = 7
    assert result["b"][0] == 7


def test_a_result_that_cannot_be_pickled_is_an_error_with_advice() -> None:
    launcher, _ = forks()
    with pytest.raises(RankFailure, match=r"(?s)can be pickled.*return tensors and plain values"):
        launcher.launch(lambda: threading.Lock())


_SPAWNS = """
import os, random, sys
import torch, torch.distributed as dist
from loopwright.errors import LaunchError
from loopwright.fabric import LightningEnvironment
from loopwright.fabric.launch import ProcessLauncher
from loopwright.strategies.distributed import rendezvous

def work(cluster, module, tied):
    rendezvous.connect(cluster, backend="gloo")
    with torch.no_grad():
        module.weight += cluster.global_rank() + 1  # shared memory would show the other rank's addition
    dist.barrier()
    ranks = [None] * 2
    dist.all_gather_object(ranks, module.weight.sum().item())
    return {
        "sums": ranks, "tied": tied[0].data_ptr() == tied[1].data_ptr(), "draw": torch.rand(1).item(),
        "python": random.random(), "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "threads": torch.get_num_threads(),
    }

if __name__ == "__main__":
    torch.manual_seed(3)
    random.seed(4)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    module = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    cluster = LightningEnvironment()
    launcher = ProcessLauncher(sys.argv[1], cluster, 2)
    weight = torch.ones(3)
    result = launcher.launch(work, cluster, module, (weight, weight[:]))
    assert result["sums"] == [4.0, 8.0], result
    assert module.weight.sum() == 0, "the parent's tensors were changed"
    assert result["tied"], result
    assert (result["draw"], result["python"]) == (torch.rand(1).item(), random.random()), result
    assert result["dtype"] == "torch.float64", result
    assert result["deterministic"], result
    try:
        launcher.launch(lambda: 1)
    except LaunchError as error:
        assert "can be pickled" in str(error), error
    print("well")
"""


def program(folder: Path, text: str, name: str = "program.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file


def run(*command: Any, limit_s: float = 200, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("start_method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_fresh_interpreters_start_as_a_fork_would(tmp_path: Path, start_method: str) -> None:
    done = run(program(tmp_path, _SPAWNS), start_method)
    assert done.returncode == 0, done.stderr
    # torch 2.9 prints when processes are connected.
    assert [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")] == ["well"]


def test_spawn_without_a_main_guard_is_an_error_with_advice(tmp_path: Path) -> None:
    file = program(
        tmp_path,
        """
        from loopwright.fabric import LightningEnvironment
        from loopwright.fabric.launch import ProcessLauncher
        ProcessLauncher("spawn", LightningEnvironment(), 1).launch(print)
        """,
    )
    done = run(file)
    assert done.returncode == 1
    assert "RankFailure" in done.stderr
    assert 'put the training under `if __name__ == "__main__":`' in done.stderr
    assert "rank 0 " in done.stderr


# -- new processes: what goes wrong ----------------------------------------------------------------------------------


def _one_fails(cluster: LightningEnvironment, how: Callable[[], None]) -> None:
    join(cluster)
    if cluster.global_rank() == 1:
        how()
    dist.barrier()
    dist.barrier()


def _raise() -> None:
    raise ValueError("no such sample")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (_raise, r"(?s)rank 1 .* failed: ValueError: no such sample.*traceback of rank 1.*in _raise"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 .* was killed by SIGKILL"),
        (lambda: os._exit(7), "rank 1 .* ended with exit code 7"),
        (lambda: os._exit(0), "rank 1 .* ended with exit code 0 before the function returned"),
        (lambda: sys.exit(5), "rank 1 .* failed: SystemExit: 5"),
    ],
    ids=["raise", "kill", "exit", "exit 0", "sys.exit"],
)
def test_the_culprit_is_named_and_nobody_is_left(how: Callable[[], None], says: str) -> None:
    launcher, cluster = forks(3)
    with pytest.raises(RankFailure, match=says):
        launcher.launch(_one_fails, cluster, how)
    assert len(launcher.local_exits()) == 3


def test_a_rank_that_hangs_is_ended_when_another_failed() -> None:
    def work(cluster: LightningEnvironment) -> None:
        join(cluster)
        if cluster.global_rank() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            store = rendezvous.store()
            assert store is not None
            store.set("ready", "1")
            while True:
                time.sleep(60)
        until(lambda: rendezvous.store().check(["ready"]))  # type: ignore[union-attr]
        raise KeyError("the culprit")

    launcher, cluster = forks()
    with pytest.raises(RankFailure, match="rank 1 .*KeyError: 'the culprit'"):
        launcher.launch(work, cluster)
    assert launcher.local_exits() == {0: -signal.SIGKILL, 1: 1}


def test_a_rank_that_fails_before_the_others_have_met_is_named() -> None:
    def work(cluster: LightningEnvironment) -> None:
        if cluster.global_rank() == 1:
            raise ValueError("no such file")
        join(cluster)

    launcher, cluster = forks()
    with pytest.raises(RankFailure, match="rank 1 .*no such file"):
        launcher.launch(work, cluster)


@pytest.mark.parametrize(
    ("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, StopBySignal)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_goes_on_to_all_and_their_end_is_waited_for(
    tmp_path: Path, signum: signal.Signals, error: type[BaseException]
) -> None:
    def work(cluster: LightningEnvironment) -> None:
        asked = threading.Event()
        signal.signal(signum, lambda *_: asked.set())
        join(cluster).set(f"ready{cluster.global_rank()}", "1")
        if cluster.global_rank() == 0:
            until(lambda: rendezvous.store().check(["ready0", "ready1"]))  # type: ignore[union-attr]
            os.kill(os.getppid(), signum)
        until(asked.is_set)
        (tmp_path / str(cluster.global_rank())).write_text("ended well")
        raise error

    launcher, cluster = forks()
    before = signal.getsignal(signum)
    with pytest.raises(error):
        launcher.launch(work, cluster)
    assert [(tmp_path / name).read_text() for name in "01"] == ["ended well"] * 2
    assert signal.getsignal(signum) is before


def test_ranks_that_stop_by_a_signal_of_their_own_stop_the_launching_process() -> None:
    def stop() -> None:
        raise StopBySignal

    launcher, _ = forks()
    with pytest.raises(StopBySignal) as caught:
        launcher.launch(stop)
    assert caught.value.code == 143


def test_forks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    file = program(
        tmp_path,
        """
        import ctypes, os, sys
        from loopwright.fabric import LightningEnvironment
        from loopwright.fabric.launch import ProcessLauncher

        def work():
            os.write(1, b"%d\\n" % os.getpid())  # whole: two processes write
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock: no thread of Python can run

        ProcessLauncher("fork", LightningEnvironment(), 2).launch(work)
        """,
    )
    parent = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for child in children:
        until(lambda: is_gone(child))  # noqa: B023  the loop waits for it


def test_a_fork_after_work_on_several_threads_does_not_hang(tmp_path: Path) -> None:
    file = program(
        tmp_path,
        """
        import torch
        from loopwright.fabric import LightningEnvironment
        from loopwright.fabric.launch import ProcessLauncher

        def work():
            big = torch.randn(400, 400, requires_grad=True)
            (big @ big).sum().backward()
            return torch.get_num_threads()

        torch.set_num_threads(2)
        work()
        assert ProcessLauncher("fork", LightningEnvironment(), 2).launch(work) == 1
        print("well")
        """,
    )
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=200, check=False, env=variables
    )
    assert done.stdout.strip() == "well", done.stderr


def test_fork_after_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="process that has not used CUDA"):
        forks()[0].launch(print)


def test_fork_of_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="already a rank"):
        forks()[0].launch(print)


def test_start_methods_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="got start_method='thread'"):
        ProcessLauncher("thread", LightningEnvironment(), 2)
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ConfigError, match="got start_method='fork'"):
        forks()
    assert not ProcessLauncher("spawn", LightningEnvironment(), 2).is_interactive_compatible
