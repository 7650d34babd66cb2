"""Functions of Accelerate for the whole process: seeds, logs, and batch sizes that fit."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...accelerators.out_of_memory import free_memory, is_out_of_memory
from ...fabric import seed_everything
from .state import PartialState

# Any in this file: functions and values of the program.


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators.

    Args:
        seed: The seed.
        device_specific: Whether each rank adds its number.
        deterministic: Whether torch uses deterministic algorithms only.
    """
    seed_everything(seed + (PartialState().process_index if device_specific else 0), verbose=False)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Let generators continue with rank 0's state; called on all processes.

    Args:
        rng_types: "torch" (of the CPU), "cuda", "generator".
        generator: The one that "generator" means.
    """
    for kind in map(str, rng_types):
        if kind == "cuda":
            torch.cuda.set_rng_state(PartialState().fabric.broadcast(torch.cuda.get_rng_state()))
        else:
            one: Any = generator if kind == "generator" else torch.default_generator
            one.set_state(PartialState().fabric.broadcast(one.get_state()))


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that logs on rank 0, on all ranks with `main_process_only=False`, in their order with `in_order`."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log on the ranks that should."""
        if not PartialState._shared_state:
            raise RuntimeError("Create PartialState() or Accelerator() before the first use of accelerate's logger.")
        state = PartialState()
        is_here = not kwargs.pop("main_process_only", True) or state.is_main_process
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)
        for rank in range(state.num_processes) if in_order else [state.process_index]:
            if rank == state.process_index and (is_here or in_order):
                self.logger.log(level, f"[RANK {rank}] {msg}", *args, **kwargs)
            if in_order:
                state.wait_for_everyone()

    @functools.cache  # noqa: B019  # as many entries as texts of warnings
    def warning_once(self, *args: object, **kwargs: Any) -> None:
        """Log a warning that has not been logged before."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that logs on rank 0.

    Args:
        name: Name of the logger.
        log_level: Level for it and the root logger; None is ACCELERATE_LOG_LEVEL of the environment, if set.
    """
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    for one in (logger, logging.getLogger()) if level else ():
        one.setLevel(str(level).upper())
    return MultiProcessAdapter(logger, {})


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release what torch keeps of the device's memory."""
    free_memory(PartialState().device)


def release_memory(*objects: object) -> list[None]:
    """Return None for each object, for the program to assign, and release what torch keeps."""
    clear_device_cache()
    return [None] * len(objects)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None, starting_batch_size: int = 128, reduce_batch_size_fn: Any = None
) -> Any:
    """Return a function that calls this one with a batch size, and with smaller ones while memory is exhausted.

    Args:
        function: Its first parameter is the batch size.
        starting_batch_size: The first one.
        reduce_batch_size_fn: Returns the next one; None is nine tenths.
    """
    if function is None:
        return lambda one: find_executable_batch_size(one, starting_batch_size, reduce_batch_size_fn)
    batch_size = starting_batch_size

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        while batch_size > 0:
            release_memory()
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            batch_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("No executable batch size found, reached zero.")

    return search
