"""Time and bus bandwidth of all_reduce between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_LIMIT_S = 30.0  # for the calls of one measurement: a network that does not work is reported, and not waited for
_AIM_S = 0.3
_MOST_CALLS = 50


@dataclass(frozen=True)
class Rate:
    """Duration of all_reduce in a group of ranks.

    Attributes:
        size_bytes: Bytes of the tensor.
        num_ranks: Ranks in the group.
        seconds: Duration of one call, on the slowest rank.
        slowest: That rank.
    """

    size_bytes: int
    num_ranks: int
    seconds: float
    slowest: int

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second on the slowest link of a ring: 2 (n - 1) / n * size / seconds.

        Source: "bus bandwidth" of NVIDIA's nccl-tests (doc/PERFORMANCE.md). It does not depend on the number of ranks
        n, so that it can be compared with the rate of the hardware.
        """
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.size_bytes / self.seconds


class AllReduceError(Exception):
    """Ranks on which all_reduce failed.

    Attributes:
        reasons: What happened, by rank: an error of the backend, a wrong sum, or no end.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(str(reasons))
        self.reasons = reasons


def measure(group: ProcessGroup, size_bytes: int, device: torch.device) -> Rate:
    """Measure all_reduce of float32 in groups of ranks; every rank of the world calls it.

    Ranks compare their results over the default process group, which is gloo's.

    Args:
        group: The group of this rank. If there are several groups, they run at the same time, and the result is that of
            the slowest.
        size_bytes: Bytes of the tensor, a multiple of 4.
        device: Device of the tensor.

    Raises:
        AllReduceError: all_reduce failed in a group; raised on all ranks.
    """
    tensor = torch.empty(size_bytes // 4, device=device)
    _on_all_ranks(lambda: _check_sum(tensor, group))
    tensor.zero_()
    first_s = max(_on_all_ranks(lambda: _seconds(tensor, group, 1)))
    num_calls = max(2, min(_MOST_CALLS, int(_AIM_S / max(first_s, 1e-6))))
    seconds = _on_all_ranks(lambda: _seconds(tensor, group, num_calls))
    sizes = _on_all_ranks(lambda: float(group.size()))
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return Rate(size_bytes, int(sizes[slowest]), seconds[slowest], slowest)


def _on_all_ranks(function: Callable[[], float]) -> list[float]:
    """Call a function on each rank, and return the results in the order of the ranks.

    Raises:
        AllReduceError: It failed on a rank.
    """
    mine: float | str
    try:
        mine = function()
    except RuntimeError as error:  # DistBackendError, out of memory
        mine = (str(error).strip() or type(error).__name__).splitlines()[0]
    found: list[Any] = [None] * dist.get_world_size()  # float or str
    dist.all_gather_object(found, mine)
    reasons = {rank: one for rank, one in enumerate(found) if isinstance(one, str)}
    if reasons:
        raise AllReduceError(reasons)
    return found


def _check_sum(tensor: torch.Tensor, group: ProcessGroup) -> float:
    """Compare a sum with the known one; the first call also connects the ranks."""
    tensor.fill_(dist.get_rank() + 1)
    _seconds(tensor, group, 1)
    expected = float(sum(rank + 1 for rank in dist.get_process_group_ranks(group)))
    wrong = tensor != expected
    if bool(wrong.any()):
        raise RuntimeError(f"expected the sum {expected:g} everywhere, got {float(tensor[wrong][0]):g}")
    return 0.0


def _seconds(tensor: torch.Tensor, group: ProcessGroup, num_calls: int) -> float:
    """Return the duration of one of several calls.

    Raises:
        RuntimeError: They did not end in time.
    """
    dist.barrier()  # of the default group: all ranks begin together
    began = time.perf_counter()
    if tensor.device.type == "cpu":
        for _ in range(num_calls):
            dist.all_reduce(tensor, group=group)
        return (time.perf_counter() - began) / num_calls
    start, end = (torch.Event(tensor.device, enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_calls):
        dist.all_reduce(tensor, group=group)
    end.record()
    while not end.query():  # to synchronize would wait without end where the ranks do not reach each other
        if time.perf_counter() - began > _LIMIT_S:
            raise RuntimeError(f"all_reduce did not end within {_LIMIT_S:g} s")
        time.sleep(0.0005)
    return start.elapsed_time(end) / 1e3 / num_calls
