"""`GroupsWindow`: a window whose micro-batches are distributed over replica groups."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data.rng import restore_rng
from ...data.sources.base import NO_BATCH
from ..loop.held_window import Drawn
from ..loop.loss import Loss, WindowLoss, read_loss
from ..loop.window import outputs_of

if TYPE_CHECKING:
    from ...data.sources.base import NoBatch
    from ...protocols import Batch, StepOutput
    from ..metrics.metrics import Metrics
    from ..run import FitRun
    from .groups import ReplicaGroups

# Any in this file: what steps return, and what modules log.

_SYNCHRONIZED = nullcontext()


class GroupsWindow:
    """The micro-batches of one window: this group trains on its share, again if the step is refused; see `Held`.

    Args:
        run: The run.
        groups: This group among the others.
    """

    def __init__(self, run: FitRun, groups: ReplicaGroups) -> None:
        self._run, self._plan, self._groups = run, run.plan, groups
        self._first, self._number = run.progress.batches_in_epoch, run.progress.total_batches
        self._batches: list[Batch | NoBatch] = []
        self._sizes: list[int | None] = []
        self._outcomes: list[tuple[StepOutput, Tensor | None]] = []
        self._logged: dict[int, list[Any]] = {}

    def add(self, batch: Batch | NoBatch, index: int, *, is_last: bool) -> None:
        """Add a batch."""
        metrics, size = self._run.metrics, None
        if batch is not NO_BATCH:
            size = None if metrics.sizes is None else metrics.sizes.of(batch)
            metrics.sized, metrics.size = batch, size
        self._batches.append(batch)
        self._sizes.append(size)

    def step(self) -> bool:
        """Train on this group's share until the groups agree on a step, and make it.

        Raises:
            Rewind: The others have made the step without this group.
        """
        run, groups = self._run, self._groups
        before, num_losses = Drawn.of(run), len(run.watch.losses)
        while True:
            own = self._train_own()
            everyone = groups.exchange(own)
            has_all = everyone is not None and self._reduce(everyone)
            if groups.commits() and everyone is not None and has_all:
                break
            self._plan.zero_grad()
            run.fabric.strategy.discard_gradients(run.model)
            before.restore(run)
            del run.watch.losses[num_losses:]
            groups.join()
        restore_rng(before.rng)
        groups.settle(everyone)
        del run.watch.losses[num_losses:]
        self._hear(everyone)
        return self._finish(everyone)

    def end_batch(self, batch: Batch | NoBatch, index: int, *, is_last: bool) -> None:
        """Fire `on_train_batch_end` of all micro-batches after the last one."""
        if not is_last:
            return
        run, last = self._run, len(self._batches) - 1
        for offset, (held, (output, loss)) in enumerate(zip(self._batches, self._outcomes, strict=True)):
            run.at_boundary = offset == last
            if held is not NO_BATCH:
                outputs = outputs_of(output, loss)
                if outputs is None and loss is not None:  # of another group
                    outputs = {"loss": loss}
                run.lifecycle.on_train_batch_end(outputs, held, self._first + offset)
            elif offset == last:
                run.lifecycle.end_step_without_batch(self._first + offset)

    # --- one attempt -------------------------------------------------------------------------------------------------

    def _train_own(self) -> dict[str, Any]:
        """Run forward and backward on this group's share; return what the other groups need to know of it."""
        run, plan, groups, window = self._run, self._plan, self._groups, self._run.window_loss
        share = self._share()
        plan.begin_window(len(self._batches))
        if plan.zeroes_early or not share:
            plan.zero_grad()
        self._train_on_all(share)
        amount, reference = window.weigh(len(share)) if share else (0.0, None)
        return {
            "amount": amount,
            "reference": reference,
            "is_empty": not share or (not window.is_divided and window.is_empty),
            "is_skipped": bool(share) and run.skips_bad_steps and window.is_to_be_skipped(),
            "missing": [number for number, one in enumerate(trained(run)) if one.grad is None],
            "losses": {str(offset): _portable(self._outcomes[offset][1]) for offset in share},
            "logged": portable_calls(self._logged),
            **groups.claim(),
        }

    def _share(self) -> list[int]:
        """Return the offsets of the micro-batches that this group trains on."""
        return [offset for offset in range(len(self._batches)) if offset % self._groups.size == self._groups.rank]

    def _train_on_all(self, share: list[int]) -> None:
        plan = self._plan
        self._outcomes = [(None, None)] * len(self._batches)
        self._logged = {}
        for offset in share:
            is_last = offset == share[-1]
            with _SYNCHRONIZED if is_last or plan.no_sync is None else plan.no_sync():
                self._train_on(offset, is_first=offset == share[0], is_last=is_last)

    def _train_on(self, offset: int, *, is_first: bool, is_last: bool) -> None:
        run, plan, groups, metrics = self._run, self._plan, self._groups, self._run.metrics
        batch, index = self._batches[offset], self._first + offset
        run.batch_idx = index
        groups.seed(self._number + offset)
        self._logged[offset] = groups.recorded = []
        try:
            if batch is NO_BATCH:
                output: Any = run.fabric.strategy.without_data(run.model)
            else:
                metrics.select_batch(batch, self._sizes[offset])
                metrics.table = plan.table
                output = plan.training_step(batch, index)
                metrics.table = metrics.nowhere
            loss = None if output.__class__ is Tensor or batch is NO_BATCH else read_loss(output)
            if isinstance(loss, Loss) and not run.has_ranks:
                run.window_loss.reference = groups.scale_of(loss.weight)
                run.window_loss.has_parts = True
            value = plan.loss_and_backward(run, output, is_first=is_first, is_last=is_last)
        finally:
            groups.recorded = None
        self._outcomes[offset] = (output, value)

    def _reduce(self, everyone: list[dict[str, Any]]) -> bool:
        """Add gradients up over groups, and scale them; return whether all groups were there."""
        run, groups, optimizer = self._run, self._groups, self._plan.optimizer
        assert optimizer is not None
        parameters, strategy = trained(run), run.fabric.strategy
        missing = set.intersection(*(set(one["missing"]) for one in everyone))
        present = [one for number, one in enumerate(parameters) if number not in missing]
        for one in present:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        references = [one["reference"] for one in everyone if one["reference"] is not None]
        own = everyone[groups.rank]["reference"]
        if own is not None and own != references[0]:
            strategy.scale_gradients(optimizer, own / references[0])
        if not groups.reduce([one.grad for one in present if one.grad is not None]) or not share_buffers(run, groups):
            return False
        total = sum(one["amount"] for one in everyone)
        factor = strategy.topology.data_size * references[0] / total if total else 0.0
        if factor != 1.0:
            strategy.scale_gradients(optimizer, factor)
        return True

    # --- after the groups agree --------------------------------------------------------------------------------------

    def _hear(self, everyone: list[dict[str, Any]]) -> None:
        """Take what each micro-batch has logged, and its loss, in whichever group, in order."""
        run, metrics = self._run, self._run.metrics
        for offset in range(len(self._batches)):
            there = everyone[offset % len(everyone)]
            own = self._logged.get(offset)
            metrics.select_batch(self._batches[offset], self._sizes[offset])
            log_again(metrics, there["logged"].get(str(offset), ()), own)
            output, loss = self._outcomes[offset]
            if own is None and there["losses"].get(str(offset)) is not None:
                loss = _value(there["losses"][str(offset)]).to(run.device)
                self._outcomes[offset] = (output, loss)
            if loss is not None and run.watch.keeps:
                run.watch.losses.append(loss)

    def _finish(self, everyone: list[dict[str, Any]]) -> bool:
        """Clip and step: all groups have the same gradients."""
        run = self._run
        own, settled = run.window_loss, WindowLoss(run.device)
        settled.is_finite = not any(one["is_skipped"] for one in everyone)
        settled.is_divided = not all(one["is_empty"] for one in everyone)
        run.window_loss = settled
        try:
            return self._plan.finish_window(run, self._outcomes[-1][1])
        finally:
            run.window_loss = own


def trained(run: FitRun) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained."""
    return [one for one in run.module.parameters() if one.requires_grad]


def share_buffers(run: FitRun, groups: ReplicaGroups) -> bool:
    """Let all groups have the buffers of the first one, such as running statistics; return whether all were there."""
    buffers = [one.view(torch.uint8) if one.dtype is torch.bool else one for one in run.module.buffers() if one.numel()]
    if groups.rank:
        for one in buffers:
            one.zero_()
    return groups.reduce(buffers)


def log_again(metrics: Metrics, entries: Iterable[Any], own: list[Any] | None) -> None:
    """Log what the step of a micro-batch has logged.

    Args:
        metrics: Where to; the micro-batch is selected.
        entries: The calls of `log` as plain values; None where a value is not plain.
        own: The calls, where this group has made them.
    """
    for number, entry in enumerate(entries):
        if own is not None:
            hook, name, value, args, kwargs = own[number]
        elif entry is not None:
            hook, name, value, args, kwargs = entry
            value = _value(value)
        else:
            continue
        metrics.table = metrics.table_of(hook)
        metrics.log(name, value, *args, **kwargs)
    metrics.table = metrics.nowhere


def portable_calls(logged: dict[int, list[Any]]) -> dict[str, list[Any]]:
    """Return calls of `log` by the offsets of their micro-batches, for JSON. Values are read on the host."""
    return {str(offset): [_entry(call) for call in calls] for offset, calls in logged.items()}


def _portable(value: Any) -> Any:
    """Return a number, tensor or loss as plain values; None for anything else."""
    if isinstance(value, Loss):
        sums = [_portable(value.sum), _portable(value.weight)]
        return None if None in sums else {"loss": sums}
    if isinstance(value, Tensor):
        number = value.item() if value.numel() == 1 and type(value) is Tensor else None
        return None if number is None else {"number": number, "dtype": str(value.dtype).removeprefix("torch.")}
    return value if isinstance(value, int | float) else None


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    if "loss" in plain:
        return Loss(*map(_value, plain["loss"]))
    return torch.tensor(plain["number"], dtype=getattr(torch, plain["dtype"]))


def _entry(call: tuple[str, str, Any, tuple[Any, ...], dict[str, Any]]) -> list[Any] | None:
    """Return a call of `log` as plain values; None where it cannot be, as for metric objects."""
    hook, name, value, args, kwargs = call
    plain = [hook, name, _portable(value), list(args), kwargs]
    try:
        json.dumps(plain)
    except TypeError:
        return None
    return None if plain[2] is None else plain
