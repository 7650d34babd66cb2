"""Weights of optimizers that train on other weights than they evaluate: schedule-free ones, with `train` and `eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer


class EvaluationWeights:
    """Exchanges the training weights for the weights to evaluate, and restores them bit for bit.

    `train()` of an optimizer only recomputes them, with rounding: training would depend on when validations run.

    Args:
        optimizers: Optimizers with `train()` and `eval()`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._kept: list[tuple[Tensor, Tensor]] | None = None  # parameters and their values in training

    def train(self) -> None:
        """Let the optimizers compute the training weights, at the beginning of a run."""
        self._call("train")

    def evaluate(self) -> None:
        """Put the weights to evaluate in place."""
        if self._kept is None:
            parameters = [one for optimizer in self._optimizers for group in optimizer.param_groups
                          for one in group["params"]]  # fmt: skip
            self._kept = [(one, one.detach().clone()) for one in parameters]
            self._call("eval")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context in which the weights to evaluate are in place."""
        if self._kept is not None:
            yield
            return
        self.evaluate()
        try:
            yield
        finally:
            self._put_back()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Return a context in which the training weights are in place, also within `evaluating`."""
        if self._kept is None:
            yield
            return
        self._put_back()
        try:
            yield
        finally:
            self.evaluate()

    @torch.no_grad()
    def _put_back(self) -> None:
        self._call("train")
        for parameter, value in self._kept or ():
            parameter.copy_(value)
        self._kept = None

    def _call(self, name: str) -> None:
        for one in self._optimizers:
            cast("Callable[[], None]", getattr(one, name))()
