"""Floating-point operations and bytes of each operator of one step, against what the device can do.

The roofline model: an operator takes at least `operations / peak` and at least `bytes / bandwidth`; the larger of the
two says what binds it.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...accelerators.usage import shortest_s

if TYPE_CHECKING:
    from ...protocols import Tree


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The speed that a device reached in a short trial.

    Attributes:
        operations_per_s: Floating-point operations per second of a matrix product.
        bytes_per_s: Bytes read and written per second of a copy.
    """

    operations_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OperationCounts:
    """The operations of one step.

    Attributes:
        operations: Floating-point operations of each phase: matrix products, convolutions and attention.
        num_bytes: Bytes that each phase's operators read and wrote, at least: their tensors, each once.
        compute_s: Least seconds of the operators that are bound by operations.
        memory_s: Least seconds of the operators that are bound by bytes.
        peak: What they were compared with.
    """

    operations: dict[str, int]
    num_bytes: dict[str, int]
    compute_s: float
    memory_s: float
    peak: DevicePeak

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte of the whole step."""
        return sum(self.operations.values()) / max(sum(self.num_bytes.values()), 1)

    @property
    def is_memory_bound(self) -> bool:
        """Whether more of the least time goes to operators bound by bytes."""
        return self.memory_s > self.compute_s


class OperationCounter(TorchDispatchMode):
    """Counts between `start` and `stop`. What a compiled region does inside of it is not seen.

    Args:
        device: Whose peak to compare with; it is tried out here, which takes some milliseconds.
        phase_now: Returns the phase to which an operator is counted.
    """

    def __init__(self, device: torch.device, phase_now: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase_now = phase_now
        self._peak = measure_peak(device)
        self._operations: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._compute_s = self._memory_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        """Run the operator and count it. Any: whatever operators take and return."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        count = flop_registry.get(func._overloadpacket)
        operations = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        num_bytes = _count_bytes((args, kwargs)) + _count_bytes(result)
        phase = self._phase_now()
        self._operations[phase] = self._operations.get(phase, 0) + operations
        self._bytes[phase] = self._bytes.get(phase, 0) + num_bytes
        for_operations, for_bytes = operations / self._peak.operations_per_s, num_bytes / self._peak.bytes_per_s
        if for_operations > for_bytes:
            self._compute_s += for_operations
        else:
            self._memory_s += for_bytes
        return result

    def start(self) -> None:
        """Begin to count."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Count no more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def counts(self) -> OperationCounts:
        """Return what was counted so far."""
        return OperationCounts(
            dict(self._operations), dict(self._bytes), self._compute_s, self._memory_s, self._peak
        )  # fmt: skip


def measure_peak(device: torch.device, *, size: int | None = None) -> DevicePeak:
    """Return what the device reaches in a matrix product and in a copy: the best of three.

    The product is in float32 (as the process has set its matrix product precision) on a CPU, else in bfloat16.

    Args:
        device: The device.
        size: Rows of the square matrices; None: 512 on a CPU, 8192 elsewhere, where small ones keep nothing busy.
    """
    is_cpu = device.type == "cpu"
    size = size or (512 if is_cpu else 8192)
    # The trial must not move the generators of a training: no random numbers.
    matrix = torch.full((size, size), 0.5, device=device, dtype=torch.float32 if is_cpu else torch.bfloat16)
    out = torch.empty_like(matrix)
    # Larger than the caches, so that memory is what is measured.
    long = torch.zeros((16 if is_cpu else 256) * 2**20 // 4, device=device)
    other = torch.empty_like(long)
    product_s = shortest_s(lambda: torch.mm(matrix, matrix, out=out), device)
    copy_s = shortest_s(lambda: other.copy_(long), device)
    return DevicePeak(2 * size**3 / product_s, 2 * long.nbytes / copy_s)


def _count_bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
