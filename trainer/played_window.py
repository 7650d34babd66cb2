"""Accumulation windows whose forward and backward passes are run again, to compare the bits of their gradients.

A window that is due is recorded: copies of its micro-batches, and before each of them random numbers, buffers and
states of metric objects. After its last backward pass the same is run again from there. Gradients, random numbers,
buffers, metrics and what was logged are then as if it had run once.

Parameters that change within a window, such as a target network that training_step moves, are recorded as well. Which
ones do is found by their digests: the first window in which one changes is not run again, but the next one is.

Each rank compares what its own backward passes added to each parameter, before it is reduced, so that the rank is
known. Where parameters are sharded, only reduced gradients are there to be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..data.sources.base import NO_BATCH
from ..errors import ConfigError
from ..strategies import NoLoss
from ..strategies.base import plain_name
from ..strategies.distributed.digest import digests, parts_of
from ..strategies.tree import map_leaves
from .loop.held_window import Drawn
from .loop.loss import Loss, read_loss
from .loop.window import loss_and_backward

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ..protocols import AnyBatch, StepOutput
    from .run import FitRun

# Any in this file: batches, and what steps return.


class Played(NamedTuple):
    """What this rank has found in a window that was run again.

    Attributes:
        plays: For each run of the window, the number of the first run with the same gradients. There is a third run if
            the first two differ on any rank. Empty if the next window is to be run again instead of this one.
        parameter: Name of the first parameter whose gradient differs; "" without one.
    """

    plays: tuple[int, ...] = (0, 0)
    parameter: str = ""


class _MicroBatch(NamedTuple):
    batch: Any
    batch_idx: int
    before: Drawn
    moved: dict[str, Tensor]


class PlayedWindows:
    """Records windows of a run and runs them again.

    Args:
        run: Its plan is set up, and is changed here.

    Attributes:
        is_armed: Whether the next window is recorded.

    Raises:
        ConfigError: The windows of this run cannot be repeated; the message says why.
    """

    def __init__(self, run: FitRun) -> None:
        _refuse(run)
        plan = run.plan
        self._run, self.is_armed, self._window = run, False, -1
        self._step, self._without_data, self._backward = plan.training_step, plan.without_data, plan.backward
        plan.training_step, plan.without_data, plan.backward = self._record_step, self._record_none, self._run_backward
        self._parameters: dict[str, Tensor] = {}  # whose gradients are compared
        self._all: dict[str, Tensor] = {}  # since the window began
        self._values: Tensor | None = None  # digests of their values at that time
        self._moved = set[str]()  # parameters that change within windows
        self._handles: list[RemovableHandle] = []
        self._micro_batches: list[_MicroBatch] = []
        self._digests: dict[str, Tensor] = {}

    def arm(self) -> None:
        """Record the next window."""
        self.is_armed = True

    def disarm(self) -> None:
        """Forget what is recorded."""
        self.is_armed, self._window = False, -1
        for handle in self._handles:
            handle.remove()
        self._handles, self._micro_batches, self._digests = [], [], {}
        self._all, self._values = {}, None

    def play(self) -> Played:
        """Run the recorded window again, and a third time where any rank has other gradients. On every rank.

        It communicates as a window does, and reads the device.
        """
        run = self._run
        moved = self._find_moved() - self._moved
        if run.fabric.strategy.reduce_boolean_decision(bool(moved), all=False):
            self._moved |= moved
            self.disarm()
            self.arm()
            return Played(())
        after, values = Drawn.of(run), self._copy_moved()
        # Also of parameters that require gradients only since training_step has begun.
        own = [(one, one.grad) for one in run.module.parameters() if one.requires_grad or one.grad is not None]
        copies = [None if gradient is None else gradient.detach().clone() for _, gradient in own]  # of torch's buckets
        runs = [self._digests]
        try:
            with run.fabric.precision.holding_scale():
                runs.append(self._play([one for one, _ in own]))
                differs = self._first_that_differs(runs[0], runs[1])
                if run.fabric.strategy.reduce_boolean_decision(differs is not None, all=False):
                    runs.append(self._play([one for one, _ in own]))
        finally:
            for (one, gradient), kept in zip(own, copies, strict=True):
                if gradient is not None and kept is not None:
                    gradient.detach().copy_(kept)
                one.grad = gradient
            after.restore(run)
            self._restore_moved(values)
            self.disarm()
        if len(runs) == 2:
            return Played()
        first_alike = [
            next(number for number, other in enumerate(runs) if self._first_that_differs(other, one) is None)
            for one in runs
        ]
        name = differs or self._first_that_differs(runs[0], runs[2]) or ""
        return Played(tuple(first_alike), name)

    # --- recording ---------------------------------------------------------------------------------------------------

    def _record_step(self, batch: AnyBatch, index: int) -> StepOutput:
        if self.is_armed:
            self._record(map_leaves(batch, _copied), index)
        output: StepOutput = self._step(batch, index)
        return output

    def _record_none(self, model: torch.nn.Module) -> NoLoss | None:
        if self.is_armed:
            self._record(NO_BATCH, self._run.batch_idx)
        return self._without_data(model)

    def _record(self, batch: AnyBatch, index: int) -> None:
        if self._window != self._run.metrics.window:  # the one before was dropped, or made no step
            self._window, self._micro_batches, self._digests = self._run.metrics.window, [], {}
            self._begin()
        self._micro_batches.append(_MicroBatch(batch, index, Drawn.of(self._run), self._copy_moved()))

    def _begin(self) -> None:
        """List the parameters as they are now: hooks of this step may have unfrozen some, or changed their values."""
        named = {plain_name(name): one for name, one in self._run.module.named_parameters()}
        self._all = {name: one for name, one in named.items() if not is_lazy(one)}
        self._values = self._digests_of_values()
        self._parameters = {name: one for name, one in self._all.items() if one.requires_grad}
        for handle in self._handles:
            handle.remove()
        is_sharded = self._run.fabric.strategy.traits.shards_parameters
        watched = {} if is_sharded else self._parameters
        self._handles = [one.register_hook(partial(self._add, name)) for name, one in watched.items()]

    def _digests_of_values(self) -> Tensor:
        return digests([parts_of(one) for one in self._all.values()], self._run.device)

    def _find_moved(self) -> set[str]:
        """Return the parameters whose values are not those at the beginning of the window. It reads the device."""
        if self._values is None:
            return set()
        differs = (self._digests_of_values() != self._values).tolist()
        return {name for name, is_other in zip(self._all, differs, strict=True) if is_other}

    def _copy_moved(self) -> dict[str, Tensor]:
        return {name: self._all[name].detach().clone() for name in self._moved if name in self._all}

    def _restore_moved(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._all[name].detach().copy_(value)

    def _run_backward(self, loss: Tensor) -> None:
        self._backward(loss)
        if self.is_armed and self._run.fabric.strategy.traits.shards_parameters:
            gradients = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}
            sums = digests([parts_of(one) for one in gradients.values()], self._run.device)
            self._digests = dict(zip(gradients, sums, strict=True))

    def _add(self, name: str, gradient: Tensor) -> None:
        own = digests([parts_of(gradient)], gradient.device)[0]
        before = self._digests.get(name)
        self._digests[name] = own if before is None else before * 3 + own

    # --- playing -----------------------------------------------------------------------------------------------------

    def _play(self, parameters: list[Tensor]) -> dict[str, Tensor]:
        """Run the window, and return the digests of its gradients."""
        run, metrics = self._run, self._run.metrics
        self._digests = {}
        for parameter in parameters:
            parameter.grad = None
        window = copy(run.window_loss)  # counts on
        kept = metrics.is_muted, metrics.table, metrics.batch, run.batch_idx
        metrics.is_muted = True
        try:
            for number, one in enumerate(self._micro_batches):
                is_last = number == len(self._micro_batches) - 1
                with nullcontext() if is_last or run.plan.no_sync is None else run.plan.no_sync():
                    one.before.restore(run)
                    self._restore_moved(one.moved)
                    metrics.table, metrics.batch, run.batch_idx = run.plan.table, one.batch, one.batch_idx
                    self._play_one(one, window.share, is_last=is_last)
        finally:
            metrics.is_muted, metrics.table, metrics.batch, run.batch_idx = kept
        return self._digests

    def _play_one(self, one: _MicroBatch, share: Callable[[Tensor | Loss], Tensor], *, is_last: bool) -> None:
        """Run one micro-batch; `loss_and_backward` does the same, with hooks and counts."""
        if one.batch is NO_BATCH:
            output: Any = self._without_data(self._run.model)
        else:
            output = self._step(map_leaves(one.batch, _copied), one.batch_idx)
        if output.__class__ is NoLoss:
            if is_last and output.zero.requires_grad:
                self._run_backward(output.zero)
            return
        loss = read_loss(output)
        if loss is not None:
            part = share(loss)
            if part.requires_grad or loss.__class__ is not Loss:
                self._run_backward(part)

    def _first_that_differs(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> str | None:
        """Return the first parameter with other digests; None without one. It reads the device."""
        if one is other:
            return None
        names = [name for name in self._parameters if name in one or name in other]
        unlike = [name for name in names if (name in one) != (name in other)]
        if unlike or not names:
            return next(iter(unlike), None)
        differs = torch.stack([one[name] for name in names]) != torch.stack([other[name] for name in names])
        return next((name for name, is_other in zip(names, differs.tolist(), strict=True) if is_other), None)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _refuse(run: FitRun) -> None:
    traits, plan = run.fabric.strategy.traits, run.plan
    reason = None
    if not run.is_automatic:
        reason = "manual optimization, where the module decides what a window is"
    elif run.carried is not None:
        reason = "accumulate_across_epochs=True, whose windows may begin in another epoch"
    elif plan.hold is not None:
        reason = "windows that something else repeats or runs: on_oom='shrink', LBFGS, pipeline stages, fault_tolerance"
    elif plan.loss_and_backward is not loss_and_backward:
        reason = "reproducible='world', which runs the passes in another order"
    elif run.fabric.strategy.accumulate_dtype is not None:
        reason = "grad_accumulation_dtype='float32', which takes the gradients of each pass"
    elif traits.accumulation_refusal is not None and not traits.shards_parameters:
        reason = f"{type(run.fabric.strategy).__name__}, because {traits.accumulation_refusal[0]}"
    elif not traits.shards_parameters and any(
        getattr(one, "_post_accumulate_grad_hooks", None) for one in run.module.parameters()
    ):
        reason = "hooks that run when the gradient of a parameter is complete"
    if reason is not None:
        raise ConfigError(f"Sentinel(replay_every=...) with {reason}.", fix="leave out one of the two.")
