"""The processes of a program, and what its loop does now; all objects of a class have the same values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast
from weakref import ref

import torch

from ...errors import ConfigError
from ...fabric import Fabric
from ...strategies import Strategy
from .configuration import DistributedType, GradientAccumulationPlugin

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized", "machine", "wait_for_everyone"]

# Any in this file: arguments and functions of the program.

_KINDS = {"cuda": DistributedType.MULTI_GPU, "xla": DistributedType.XLA, "xpu": DistributedType.MULTI_XPU}


def machine() -> Fabric:
    """Return the Fabric of the program; the first call connects the processes."""
    return cast("Fabric", PartialState().fabric)


def connect(
    *, cpu: bool, precision: str | None = None, strategy: Strategy | str = "auto", plugins: Any = None
) -> Fabric:
    """Return a connected Fabric for the processes that a launcher has started, or for this one alone."""
    is_on_cpu = cpu or _is_set("USE_CPU")
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    options: dict[str, Any] = {"num_nodes": world_size // local_size} if world_size > local_size else {}
    if world_size == 1 and "LT_DEVICES" not in os.environ:
        options["devices"] = 1
    if strategy == "auto" and world_size > 1 and "LT_STRATEGY" not in os.environ:
        strategy = "ddp"
    fabric = Fabric(
        accelerator="cpu" if is_on_cpu else "auto", strategy=strategy, precision=precision, plugins=plugins, **options
    )
    if getattr(fabric.launcher, "starts_processes", False) or fabric.world_size != world_size:
        raise ConfigError(
            f"Expected the processes of a launcher, got {world_size} of the {fabric.world_size} that strategy and "
            "devices require.",
            fix="start the program with `loopwright run-accelerate --num-processes N`, or with torchrun.",
        )
    fabric.launch()
    return fabric


class PartialState:
    """Ranks, device and collectives of the processes; every object has the same values.

    Args:
        cpu: Whether to use the CPU where the machine has an accelerator.
        kwargs: Accepted for compatibility; the processes are connected by Fabric.
    """

    _shared_state: dict[str, Any] = {}

    def __init__(self, cpu: bool = False, **kwargs: object) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.adopt(connect(cpu=cpu))

    def adopt(self, fabric: Fabric) -> None:
        """Take ranks and device from a Fabric."""
        size, rank, local_rank = fabric.world_size, fabric.global_rank, fabric.local_rank
        kind = _KINDS.get(fabric.device.type, DistributedType.MULTI_CPU) if size > 1 else DistributedType.NO
        self._shared_state.update(
            fabric=fabric, device=fabric.device, num_processes=size, process_index=rank, debug=_is_set("DEBUG_MODE"),
            local_process_index=local_rank, distributed_type=kind, use_distributed=size > 1, is_main_process=rank == 0,
            is_local_main_process=local_rank == 0, is_last_process=rank == size - 1, print=fabric.print,
            backend=torch.distributed.get_backend() if size > 1 else None, wait_for_everyone=fabric.barrier,
            on_main_process=partial(_only, is_here=rank == 0), on_last_process=partial(_only, is_here=rank == size - 1),
            on_local_main_process=partial(_only, is_here=local_rank == 0),
        )  # fmt: skip

    def __repr__(self) -> str:
        names = ("num_processes", "process_index", "local_process_index", "device")
        backend = f"  Backend: {self.backend}" if self.backend else ""
        rest = "".join(f"{name.replace('_', ' ').capitalize()}: {getattr(self, name)}\n" for name in names)
        return f"Distributed environment: {self.distributed_type}{backend}\n{rest}"

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        cls._shared_state.clear()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"PartialState has no attribute {name!r}")

    @property
    def initialized(self) -> bool:
        """Whether the processes are connected."""
        return "fabric" in self._shared_state

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context whose block runs on global rank 0 first."""
        return cast("Fabric", self.fabric).rank_zero_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context whose block runs on local rank 0 of each machine first."""
        return cast("Fabric", self.fabric).rank_zero_first(local=True)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of a list, tuple, tensor, Dataset or dict of them; the first ranks have one more.

        Args:
            inputs: The same on all ranks. Text, arrays and others are yielded unchanged.
            apply_padding: Whether shorter parts repeat the last element, so that all have one length.
        """
        yield self._part_of(inputs, apply_padding) if self.num_processes > 1 else inputs

    def _part_of(self, inputs: Any, is_padded: bool) -> Any:
        if isinstance(inputs, dict):
            if len({len(value) for value in inputs.values()}) > 1:
                raise ValueError("Expected values of one length for split_between_processes.")
            return {name: self._part_of(value, is_padded) for name, value in inputs.items()}
        each, more = divmod(len(inputs), self.num_processes)
        start = self.process_index * each + min(self.process_index, more)
        count = each + (self.process_index < more)
        missing = (each + (more > 0) - count) if is_padded else 0
        is_sequence = isinstance(inputs, list | tuple | torch.Tensor)
        if not is_sequence:
            if not hasattr(inputs, "select"):  # text and arrays: unchanged, as in Accelerate
                return inputs
            # datasets.Dataset, whose slices are dicts of columns.
            return inputs.select([*range(start, start + count), *[len(inputs) - 1] * missing])
        part = inputs[start : start + count]
        if missing == 0:
            return part
        if isinstance(inputs, torch.Tensor):
            return torch.cat([part, inputs[-1:].expand(missing, *inputs.shape[1:])]).to(self.device)
        return part + type(part)([inputs[-1]] * missing)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Return the function on one global rank, on others one that does nothing."""
        return _only(function, is_here=self.process_index == process_index or self.num_processes == 1)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Return the function on one local rank, on others one that does nothing."""
        return _only(function, is_here=self.local_process_index == local_process_index or self.num_processes == 1)

    def destroy_process_group(self, group: object = None) -> None:
        """Disconnect the processes."""
        self.fabric.teardown()


class AcceleratorState(PartialState):
    """The same with the precision; it exists once there is an `Accelerator`."""

    # What programs ask before they use other engines, which this layer refuses.
    deepspeed_plugin = fsdp_plugin = torch_tp_plugin = parallelism_config = None
    is_fsdp2 = is_composable_parallelism_enabled = has_lomo_optimizer = fork_launched = False

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: object) -> None:
        if "mixed_precision" not in self._shared_state:
            raise ValueError("AcceleratorState has no values before Accelerator() was called: create one first.")
        super().__init__(cpu)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


class GradientState:
    """Where the loop is: whether gradients are synchronized, and which loader it reads; the same for all objects."""

    _shared_state: dict[str, Any] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        if not self.__dict__:
            self.sync_gradients = True
            # Loaders that the program reads, the innermost last. Those that are gone keep their place.
            self.loaders: list[ref[Any]] = []
            self.plugin = GradientAccumulationPlugin(num_steps=1)
        if gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    # Number of micro-batches in a window.
    num_steps = property(lambda self: int(self.plugin.num_steps or 1))
    plugin_kwargs = property(lambda self: self.plugin.to_kwargs())
    adjust_scheduler = property(lambda self: self.plugin.adjust_scheduler)
    sync_with_dataloader = property(lambda self: self.plugin.sync_with_dataloader)
    # The loader that the loop reads, whether it has its last batch, and how many samples of the last global batch are
    # not repeated: 0 for all, -1 if it is unknown.
    active_dataloader = property(lambda self: self.loaders[-1]() if self.loaders else None)
    in_dataloader = property(lambda self: self.active_dataloader is not None)
    end_of_dataloader = property(lambda self: self.in_dataloader and self.active_dataloader.end_of_dataloader)
    remainder = property(lambda self: self.active_dataloader.remainder if self.in_dataloader else -1)

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state.clear()

    def enter(self, loader: Any) -> None:
        """Let a loader be the active one."""
        self.loaders.append(ref(loader))

    def leave(self, loader: Any) -> None:
        """Forget all passes over a loader."""
        self.loaders[:] = [one for one in self.loaders if one() is not loader]

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def is_initialized() -> bool:
    """Return whether there is an `Accelerator`."""
    return "mixed_precision" in PartialState._shared_state


def wait_for_everyone() -> None:
    """Wait until all processes have called this."""
    machine().barrier()


def _is_set(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_{name}", "").lower() in ("1", "true", "yes")


def _only(function: Any = None, *, is_here: bool) -> Any:
    if function is None:
        return partial(_only, is_here=is_here)
    return function if is_here else _do_nothing


def _do_nothing(*args: object, **kwargs: object) -> None:
    """Do nothing, on the other processes."""
