"""Runs ranks that are meant to fail, in forked processes, and returns what each said and how it ended."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import fork_ranks

from loopwright.fabric.watch import Watch

Fault = Callable[[int, int], Any]  # (rank, step) -> anything


@dataclass
class Ended:
    """How a rank ended: exit code (negative for a signal, None for one that had to be killed), stderr, seconds."""

    code: int | None
    said: str


class Ranks:
    """Processes that were started; `wait` returns how they ended."""

    def __init__(self, function: Callable[..., Any], size: int, *args: Any, **kwargs: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.store = fork_ranks(size, _child, self.folder.name, function, args, kwargs)

    def local_exits(self) -> dict[int, int]:
        """Be a launcher, for a watch in this process."""
        return {rank: p.exitcode for rank, p in enumerate(self.processes) if p.exitcode is not None}

    def wait(self, timeout_s: float = 240, ranks: set[int] | None = None) -> list[Ended]:
        """Wait for all, or for these ranks, and kill those that are left. It guards against a hang."""
        awaited = set(range(len(self.processes))) if ranks is None else ranks
        ends = time.monotonic() + timeout_s
        while any(self.processes[rank].exitcode is None for rank in awaited) and time.monotonic() < ends:
            time.sleep(0.02)
        result = []
        for rank, process in enumerate(self.processes):
            code = process.exitcode
            if code is None:
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
            said = Path(self.folder.name, f"{rank}.err").read_text()
            result.append(Ended(code, said))
        self.folder.cleanup()
        self.store = None  # in the traceback of a failed test it would live on
        return result

    def line(self, rank: int, text: str, timeout_s: float = 240) -> None:
        """Wait until a rank has written something."""
        file, ends = Path(self.folder.name, f"{rank}.err"), time.monotonic() + timeout_s
        while text not in (file.read_text() if file.exists() else ""):
            assert time.monotonic() < ends, f"rank {rank} did not say {text!r}"
            time.sleep(0.02)


def _child(rank: int, size: int, port: int, folder: str, function: Any, args: Any, kwargs: Any) -> None:
    file = os.open(f"{folder}/{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size), LOOPWRIGHT_STORE="hosted")
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 0
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False)
        function(rank, size, store, *args, **kwargs)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def train(
    rank: int,
    size: int,
    store: Any,
    fault: Fault,
    *,
    steps: int = 30,
    timeout_s: float = 3600,
    stall_s: float | None = None,
    after: Fault | None = None,
) -> None:
    """Do what a trainer does around a loop with a collective per step; `fault` is called in each step."""
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=dist.PrefixStore("pg", store), rank=rank, world_size=size, timeout=timeout)
    watch = Watch(store, rank=rank, size=size, local_rank=rank, timeout=timeout, stall_timeout=stall_s)
    place = {"hook": "training_step", "epoch": 0, "step": 0}
    watch.describe = lambda: place
    watch.start()
    try:
        watch.begin_run()
        try:
            for step in range(steps):
                place["step"] = step
                fault(rank, step)
                dist.all_reduce(torch.ones(3))
        except BaseException as error:
            cause = watch.explain(error)
            if cause is None:
                watch.report(error)
                raise
            raise cause from None
        finally:
            watch.end_run()
        if after is not None:
            after(rank, size)
    finally:
        watch.stop()
