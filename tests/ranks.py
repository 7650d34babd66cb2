"""Runs a function in several forked processes that form a gloo group: 0.2 s for two ranks, torch is imported already.

The parent must not have used more than one OpenMP thread before (OMP_NUM_THREADS=1, as `make test` sets it).
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["import_deepspeed", "run_ranks"]


def import_deepspeed() -> None:
    """Import what the first DeepSpeed engine imports, for seconds: once here, and not in every forked process."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed.runtime.zero.muon.muon_optimizer
        import deepspeed.runtime.zero.stage3  # noqa: F401


def run_ranks(
    function: Callable[..., Any], size: int = 2, *args: Any, timeout_s: float = 60, connect: bool = True, **kwargs: Any
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


def _run(
    function: Callable[..., Any], size: int, timeout_s: float, connect: bool, args: Any, kwargs: Any
) -> tuple[list[Any], list[str]]:
    """Return results and problems. The store ends with this frame: in the traceback of a failed test it would live on,
    and the next test's children would be forked while its thread is busy."""
    import torch._dynamo  # the first optimizer imports it, for a second: once here, and not in every child
    import torch.distributed as dist

    assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS=1: forking after OpenMP used several threads hangs"
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    # Children wait until all have been forked: the store's thread must not be busy (with the first child's connection)
    # while the next one is forked, or a lock that it holds stays locked in there for ever.
    gate = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_child, args=(rank, size, store.port, folder, connect, gate, function, args, kwargs))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for end in gate:
            os.close(end)
        ends = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, ends - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        results, problems = [], []
        for rank, process in enumerate(processes):
            file = Path(folder, str(rank))
            kind, value = pickle.loads(file.read_bytes()) if file.exists() else ("died", process.exitcode)
            if rank in hung:
                problems.append(f"rank {rank} hung for {timeout_s} s")
            elif kind != "ok":
                problems.append(f"rank {rank} {kind}: {value}")
            else:
                results.append(value)
    return results, problems


def _child(
    rank: int, size: int, port: int, folder: str, connect: bool, gate: Any, function: Any, args: Any, kwargs: Any
) -> None:
    import torch.distributed as dist

    os.close(gate[1])
    os.read(gate[0], 1)  # the end of the file comes when parent and children have closed the other end
    os.close(gate[0])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOOPWRIGHT_STORE="hosted",
    )  # fmt: skip
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
    if "loopwright.fabric.watching" in sys.modules:  # os._exit runs nothing of what a regular end does
        sys.modules["loopwright.fabric.watching"].stop_watching()
    os._exit(code)
