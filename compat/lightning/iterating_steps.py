"""Steps that take `dataloader_iter`, from which they fetch their batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ...errors import ModuleError

__all__ = ["taking_batches"]

# Any in this file: batches, and what steps return.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class _OneBatch:
    """What a step of `dataloader_iter` iterates over: its batch, which is on the device."""

    def __init__(self, batch: Any, batch_idx: int, dataloader_idx: int, name: str) -> None:
        self._item: tuple[Any, int, int] | None = (batch, batch_idx, dataloader_idx)
        self._name = name

    def __iter__(self) -> _OneBatch:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        item, self._item = self._item, None
        if item is None:
            raise ModuleError(
                f"Expected one next(dataloader_iter) in {self._name}, got a second one.",
                fix="return after each batch, and accumulate with accumulate_grad_batches.",
            )
        return item


@contextmanager
def taking_batches(module: nn.Module) -> Iterator[None]:
    """Let steps of a module that take `dataloader_iter` take a batch, for a run."""
    own = vars(module)
    adapted = [name for name in _STEPS if name not in own and _iterates(getattr(module, name, None))]
    for name in adapted:
        own[name] = _adapter(getattr(module, name), name)
    try:
        yield
    finally:
        for name in adapted:
            del own[name]


def _iterates(step: object) -> bool:
    return callable(step) and "dataloader_iter" in inspect.signature(step).parameters


def _adapter(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    # A partial can be sent to the processes that a Trainer starts, where a closure cannot.
    return partial(_train if name == "training_step" else _evaluate, step, name)


def _train(step: Callable[..., Any], name: str, batch: Any, batch_idx: int) -> Any:
    return step(_OneBatch(batch, batch_idx, 0, name))


def _evaluate(step: Callable[..., Any], name: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
    return step(_OneBatch(batch, batch_idx, dataloader_idx, name))
