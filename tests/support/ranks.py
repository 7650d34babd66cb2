"""Runs a function in several forked processes that form a gloo group: 0.2 s for two ranks, torch is imported already.

The parent must not have used more than one OpenMP thread before (OMP_NUM_THREADS=1, as `make test` sets it).
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["fork_ranks", "import_deepspeed", "run_ranks"]


def import_deepspeed() -> None:
    """Import what the first DeepSpeed engine imports, for seconds: once here, and not in every forked process."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed.runtime.zero.muon.muon_optimizer
        import deepspeed.runtime.zero.stage3  # noqa: F401


def run_ranks(
    function: Callable[..., Any], size: int = 2, *args: Any, timeout_s: float = 240, connect: bool = True, **kwargs: Any
) -> list[Any]:
    """Call `function(rank, size, *args, **kwargs)` in `size` forked processes and return the results in rank order.

    Args:
        function: Its result must be picklable.
        size: Number of processes.
        args: Further arguments.
        timeout_s: Then the processes are killed and the test fails.
        connect: Whether to initialise torch.distributed with gloo first. Without it, RANK, WORLD_SIZE, LOCAL_RANK,
            MASTER_ADDR and MASTER_PORT are set only, to a store that this process hosts.
        kwargs: Further keyword arguments.

    Raises:
        AssertionError: A rank failed; with its traceback.
    """
    results, problems = _run(function, size, timeout_s, connect, args, kwargs)
    assert not problems, "\n".join(problems)
    return results


def fork_ranks(size: int, target: Callable[..., Any], *args: Any) -> tuple[list[Any], Any]:
    """Fork processes that call `target(rank, size, port, *args)`; return them and the store that they find at the port.

    The store's thread starts when all are forked, for a lock that it held at that moment would stay locked in the child
    for ever. They can connect before, since the socket listens. A caller that keeps the store longer than its children
    (in the traceback of a failed test, say) lets the next ones be forked while that thread runs.
    """
    import torch
    import torch.distributed as dist

    assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS=1: forking after OpenMP used several threads hangs"
    context = multiprocessing.get_context("fork")
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listening.getsockname()[1]
    starts = [(listening, target, rank, size, port, *args) for rank in range(size)]
    processes = [context.Process(target=_without_socket, args=start) for start in starts]
    for process in processes:
        process.start()
    number = listening.detach()  # the store closes it
    return processes, dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=number)


def _without_socket(listening: socket.socket, target: Callable[..., Any], *args: Any) -> None:
    """Close the parent's socket, which would listen on after the store has ended, and begin."""
    listening.close()
    # What the parent left may own threads that are not here (the store of a failed test): to collect it would wait.
    gc.freeze()
    target(*args)


def _run(
    function: Callable[..., Any], size: int, timeout_s: float, connect: bool, args: Any, kwargs: Any
) -> tuple[list[Any], list[str]]:
    """Return results and problems. The store ends with this frame."""
    import torch._dynamo  # noqa: F401  # the first optimizer imports it, for a second: once here, and not in every child

    with tempfile.TemporaryDirectory() as folder:
        processes, _store = fork_ranks(size, _child, folder, connect, function, args, kwargs)
        ends = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, ends - time.monotonic()))
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        hung = {rank: _stacks_of(processes[rank].pid, folder, rank) for rank in alive}
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        results, problems = [], []
        for rank, process in enumerate(processes):
            file = Path(folder, str(rank))
            kind, value = pickle.loads(file.read_bytes()) if file.exists() else ("died", process.exitcode)
            if rank in hung:
                problems.append(f"rank {rank} hung for {timeout_s} s:\n{hung[rank]}")
            elif kind == "died":
                problems.append(f"rank {rank} died with exit code {value}:\n{_stacks_so_far(folder, rank)}")
            elif kind != "ok":
                problems.append(f"rank {rank} {kind}: {value}")
            else:
                results.append(value)
    return results, problems


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank}.stacks")


def _stacks_so_far(folder: str, rank: int) -> str:
    file = _stack_file(folder, rank)
    return file.read_text() if file.exists() else "(it had not begun)"


def _stacks_of(pid: int | None, folder: str, rank: int) -> str:
    """Return the stacks of a rank that hangs: Python's, and with LOOPWRIGHT_TEST_GDB set those of native threads."""
    assert pid is not None
    if _stack_file(folder, rank).exists():
        os.kill(pid, signal.SIGUSR2)
    ends = time.monotonic() + 5
    while time.monotonic() < ends and "most recent call first" not in _stacks_so_far(folder, rank):
        time.sleep(0.05)
    text = _stacks_so_far(folder, rank)
    if os.environ.get("LOOPWRIGHT_TEST_GDB"):
        command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 25"]
        text += subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return text


def _child(rank: int, size: int, port: int, folder: str, connect: bool, function: Any, args: Any, kwargs: Any) -> None:
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOOPWRIGHT_STORE="hosted",
    )  # fmt: skip
    stacks = _stack_file(folder, rank).open("w")
    faulthandler.enable(stacks)  # a rank that dies of a signal says where
    faulthandler.register(signal.SIGUSR2, stacks)
    code = 0
    try:
        if connect:
            store = dist.TCPStore("127.0.0.1", port, None, False)
            timeout = datetime.timedelta(seconds=30)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        outcome = ("ok", function(rank, size, *args, **kwargs))
        if connect:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        outcome = ("failed", traceback.format_exc())
        code = 1
    Path(folder, str(rank)).write_bytes(pickle.dumps(outcome))
    if "loopwright.fabric.watch.shared" in sys.modules:  # os._exit runs nothing of what a regular end does
        sys.modules["loopwright.fabric.watch.shared"].stop_watching()
    if code == 0 and "loopwright.strategies.distributed.rendezvous" in sys.modules:
        sys.modules["loopwright.strategies.distributed.rendezvous"].disconnect()
    os._exit(code)
