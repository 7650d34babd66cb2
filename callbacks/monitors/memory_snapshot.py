"""`MemorySnapshot`: a report on memory when it runs out. Built by users; `memory_report` can be called anywhere."""

from __future__ import annotations

import gc
import json
import logging
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...accelerators.out_of_memory import is_out_of_memory
from ...accelerators.usage import process_peak_bytes
from ...errors import ConfigError
from ..base import AnyModule, Callback

if TYPE_CHECKING:
    from ...trainer import Trainer

_log = logging.getLogger(__name__)

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Who holds how much memory; sizes in bytes.

    Attributes:
        owners: parameters, gradients, buffers, optimizer states, other tensors that Python knows, and what is left of
            what the device's allocator has handed out: above all activations that autograd keeps.
        largest: The largest tensors: size, owner or the variable that holds it, shape and dtype.
        device: What device and system say: allocated, reserved, free, peak; of a CPU the process's memory.
    """

    owners: dict[str, int]
    largest: list[dict[str, Any]] = field(default_factory=list)
    device: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the report as a text of several lines."""
        lines = ["memory by owner:"]
        lines += [f"  {name:<18} {_mib(size)}" for name, size in self.owners.items()]
        lines += ["device:"] + [f"  {name:<18} {_mib(size)}" for name, size in self.device.items()]
        lines += ["largest tensors:"]
        lines += [f"  {_mib(one['size_bytes'])}  {one['owner']}  {one['shape']} {one['dtype']}" for one in self.largest]
        return "\n".join(lines)


def memory_report(
    module: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    *,
    device: torch.device | None = None,
    error: BaseException | None = None,
) -> MemoryReport:
    """Return the current owners of a device's memory. It visits every Python object: do not call it at each step.

    Args:
        module: Module whose parameters, gradients and buffers are listed separately.
        optimizers: Optimizers whose states are listed separately.
        device: Device to report on; None: that of the module's first parameter.
        error: Error whose traceback provides names of tensors.
    """
    parameters = dict(module.named_parameters())
    if device is None:
        device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    groups: dict[str, Iterable[tuple[str, Tensor]]] = {
        "parameters": parameters.items(),
        "gradients": ((f"{name}.grad", p.grad) for name, p in parameters.items() if p.grad is not None),
        "buffers": module.named_buffers(),
        "optimizer states": _states(optimizers, {id(p): name for name, p in parameters.items()}),
        "other tensors": _others(error),
    }
    seen: set[int] = set()
    owners: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    for owner, tensors in groups.items():
        owners[owner] = 0
        for name, tensor in tensors:
            size = _new_bytes(tensor, device, seen)
            owners[owner] += size
            if size:
                found.append({"size_bytes": size, "owner": f"{owner}: {name}" if name else owner,
                              "shape": list(tensor.shape), "dtype": str(tensor.dtype)})  # fmt: skip
    stats = _device_stats(device)
    if "allocated" in stats:
        owners["activations etc."] = max(0, stats["allocated"] - sum(owners.values()))
    found.sort(key=lambda one: -one["size_bytes"])
    return MemoryReport(owners, found[:_MOST_SHOWN], stats)


class MemorySnapshot(Callback):
    """Write a report on memory when it runs out, on the rank on which it does.

    The files are `<dirpath>/out_of_memory_rank<r>_step<n>.json` (and `.txt`, for people), with the memory by owner and
    the largest tensors with their variables' names; on CUDA also `.pickle`, the allocator's history with the stack of
    each allocation, for https://pytorch.org/memory_viz. The error gets a note that names them.

    Args:
        dirpath: Directory of the reports; None: `memory` in the trainer's `local_root_dir`.
        max_entries: Number of allocations and frees in CUDA's history, at a few microseconds each; 0: no history.

    Attributes:
        report: Report on the last error; None before.

    Raises:
        ConfigError: `max_entries` is negative.
    """

    def __init__(self, dirpath: str | Path | None = None, *, max_entries: int = 100_000) -> None:
        if max_entries < 0:
            raise ConfigError(f"MemorySnapshot: max_entries={max_entries} is negative.", fix="pass 0 or more.")
        self.dirpath = None if dirpath is None else Path(dirpath).expanduser()
        self.max_entries = max_entries
        self.report: MemoryReport | None = None
        self._lw_is_recording = False

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Let CUDA's allocator remember what it does."""
        if trainer.fabric.device.type == "cuda" and self.max_entries:
            torch.cuda.memory._record_memory_history(max_entries=self.max_entries)
            self._lw_is_recording = True

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Let it forget."""
        self._lw_stop()

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Write the report, if memory ran out."""
        try:
            if is_out_of_memory(exception):
                self._lw_write(trainer, pl_module, exception)
        finally:
            self._lw_stop()

    def _lw_write(self, trainer: Trainer, pl_module: AnyModule, error: BaseException) -> None:
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
        self.report = report = memory_report(pl_module, optimizers, device=trainer.fabric.device, error=error)
        folder = self.dirpath or Path(trainer.local_root_dir, "memory")
        stem = folder / f"out_of_memory_rank{trainer.global_rank}_step{trainer.global_step}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._lw_is_recording:
                torch.cuda.memory._dump_snapshot(f"{stem}.pickle")
            Path(f"{stem}.json").write_text(json.dumps({"error": str(error), **asdict(report)}, indent=1))
            Path(f"{stem}.txt").write_text(f"{error}\n\n{report}\n")
        except OSError as problem:  # the error that is being handled is the one to see
            _log.warning("MemorySnapshot: %s cannot be written: %s", stem, problem)
            return
        error.add_note(f"Loopwright: who held the memory stands in {stem}.txt")

    def _lw_stop(self) -> None:
        if self._lw_is_recording:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._lw_is_recording = False


def _states(optimizers: Iterable[Optimizer], names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{names.get(id(parameter), '?')}.{key}", value


def _others(error: BaseException | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that variables of the error's frames hold, by name, then all others that Python knows."""
    trace = None if error is None else error.__traceback__
    for frame, line in traceback.walk_tb(trace):
        for name, value in list(frame.f_locals.items()):
            values = (
                value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            )
            for one in values:
                if isinstance(one, Tensor):
                    yield f"{name} in {frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{line}", one
    for thing in gc.get_objects():
        # type() rather than isinstance: proxies run code when they are asked for their class.
        if issubclass(type(thing), Tensor):
            yield "", thing


def _new_bytes(tensor: Tensor, device: torch.device, seen: set[int]) -> int:
    """Return the size of the tensor's storage; 0 if it is counted already or lies elsewhere."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.device.type != device.type or (device.index is not None and local.device.index != device.index):
        return 0
    try:
        storage = local.untyped_storage()
        where, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, fake, lazy and functional tensors have none
        return 0
    if not where or where in seen:
        return 0
    seen.add(where)
    return size


def _device_stats(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "peak allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "free": free,
            "total": total,
        }
    peak = process_peak_bytes()
    return {} if peak is None else {"peak of process": peak}


def _mib(size: int) -> str:
    return f"{size / 2**20:10.1f} MiB"
