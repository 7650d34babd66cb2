"""`Trainer(reproducible="world", micro_shards=S)`: the same bits on every number of ranks that divides S.

The global batch of a step is S micro-shards: S batches of the loader. On N ranks, rank r trains on the micro-shards
r, r + N, r + 2 N, ... of it, each with a forward and backward pass of its own, as S ranks or one rank do. What else
depends on the number of ranks is replaced:

    gradients   are summed by one binary tree over the micro-shards (strategies/distributed/tree_sum.py)
    weights     of losses are gathered, and added in the order of the micro-shards; gradients are scaled once, by these
    norms       of sharded gradients are summed in an order that does not depend on the sharding
    draws       of a micro-shard, of its batch and in its step, depend on the seed, the step and its number
    metrics     are exact sums (metrics.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...data.rng import RngStream, capture_rng, seed_global_generators
from ...data.sources.base import NO_BATCH
from ...errors import ModuleError
from ...strategies import NoLoss
from ...strategies.distributed.shards import is_sharded
from ...strategies.distributed.tree_sum import Addend, TreeSum, gather_single, sum_scattered
from ..loop.loss import Loss, RanksWindowLoss, WindowLoss, read_loss
from ..loop.schedule import parameters_of
from ..metrics.accumulators import accumulation_dtype
from .checks import check_data, check_norms, check_optimizers

if TYPE_CHECKING:
    from ...data.stream import BatchStream
    from ...protocols import Batch, StateDict
    from ...strategies import Strategy
    from ..loop.eval_loop import EvalLoop
    from ..run import FitRun
    from ..view import TrainerView

# Any in this file: what steps return.

_BUCKET_BYTES = 25 * 2**20


class WorldWindowLoss(RanksWindowLoss):
    """The losses of one window: sums, whose gradients are divided once by the weight of all micro-shards.

    Args:
        device: Where losses live.
        strategy: Communicates.
        num_shards: Micro-shards of a window, over all ranks.

    Attributes:
        number: Number of this rank's micro-batches in the window comes now.
    """

    __slots__ = ("_num_shards", "_place", "_weights", "number")

    def __init__(self, device: torch.device, strategy: Strategy, num_shards: int) -> None:
        self._num_shards = num_shards
        self._place = strategy.topology.data_rank, strategy.topology.data_size
        super().__init__(device, strategy, counts=True)
        if self._place[1] == 1:
            self.form = "any"

    def begin(self, planned: int) -> None:
        """Start a window."""
        super().begin(max(planned, 2))  # one micro-batch of one rank has no special case here
        self.number = 0
        self._weights: dict[int, Tensor | float] = {}

    def share(self, loss: Tensor | Loss, part: Any = 1) -> Tensor:
        """Return the undivided loss of this micro-shard: its sum, or a mean, which weighs 1."""
        (WindowLoss if self.form == "any" else RanksWindowLoss).share(self, loss, part)  # which checks it
        rank, size = self._place
        weight: Tensor | float = 1.0
        if isinstance(loss, Loss):
            weight, loss = loss.weight, loss.sum
        self._weights[self.number * size + rank] = weight.detach() if isinstance(weight, Tensor) else weight
        return loss

    def reduce(self) -> None:
        """Gather the weights of all micro-shards, by a sum over ranks in which each has its place."""
        place = torch.zeros(self._num_shards + 2, dtype=accumulation_dtype(self.device), device=self.device)
        for number, weight in self._weights.items():
            place[number] = weight.reshape(()) if isinstance(weight, Tensor) else weight
        place[-2], place[-1] = float(not self.is_finite), float(bool(self._weights))
        finish = self._strategy.start_sum(place)

        def total() -> Tensor:
            known = finish()
            return torch.cat([known[:-2].sum().reshape(1), known[-2:]])

        self._finish = total

    def gradient_factor(self) -> Tensor | float | None:
        """Return what the summed gradients are to be multiplied with."""
        assert self._finish is not None
        total = self._finish()[0]
        return torch.where(total > 0, 1 / total, torch.zeros_like(total))


class ReproducibleWorld:
    """What a fit does instead, from its beginning to its end.

    With several ranks it sends and receives, for each micro-shard, what a reduce-scatter of the gradients does, and
    with ddp gathers them once per step. It holds log2(S / N) + 1 gradients: with ddp, N-th parts of them beside the one
    of the backward pass; with fsdp, shards.

    Args:
        strategy: Its processes are connected.
        device: Of this process.
        num_shards: Micro-shards of a step.
        ending: Of the fit.
    """

    def __init__(self, strategy: Strategy, device: torch.device, num_shards: int, ending: ExitStack) -> None:
        topology = strategy.topology
        self._strategy, self._num_shards = strategy, num_shards
        self._rank, self._size = topology.data_rank, topology.data_size
        self._tree = TreeSum()
        self._number = self._fetched = 0
        self._seed: int | None = None
        self._rng: Any = nullcontext()
        self._latest: Batch = NO_BATCH
        self._absence = _Absence()
        if device.type == "cpu":
            # Sums that threads share depend on their number, and a rank has fewer where there are more ranks.
            ending.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)

    def bind(self, run: FitRun, ending: ExitStack) -> None:
        """Let the steps of a run be those of a reproducible world, until it ends. The run's plan is set up."""
        self._run = run
        plan = self._plan = run.plan
        check_optimizers(run)
        check_norms(run.module)
        window = run.window_loss = WorldWindowLoss(run.device, self._strategy, self._num_shards)
        self._window = window
        self._step, self._backward, self._finish = plan.training_step, plan.loss_and_backward, plan.finish_window
        self._default_without_data = plan.without_data
        plan.begin_window, plan.training_step, plan.loss_and_backward = self.begin, self.step, self.loss_and_backward
        plan.finish_window, plan.without_data, plan.no_sync = self.finish, self.without_data, None
        if self._strategy.traits.shards_parameters:
            from ...strategies.fsdp.tree_reduction import reducing_in_tree

            ending.enter_context(reducing_in_tree(self._strategy, run.model, self._absence))

    # --- the data --------------------------------------------------------------------------------------------------

    def take_stream(self, stream: BatchStream, trainer: TrainerView) -> None:
        """Let a window have this rank's micro-shards, and let batches be fetched with random numbers of their own."""
        check_data(stream.loader)
        trainer.accumulate_grad_batches = self._num_shards // self._size
        next_batch = stream.next_batch

        def fetch() -> Batch:
            with RngStream(self._key("batch", self._fetched)):
                self._fetched += 1
                return next_batch()

        stream.next_batch = fetch
        open_epoch = stream.open

        def open_stream(epoch: int, shared_rng: StateDict | None = None, *, may_be_empty: bool = False) -> None:
            # Hooks that draw for each batch move the global generators, by as much as the rank has batches.
            with RngStream(f"{self._of_rank_zero()} epoch {epoch}".encode()):
                open_epoch(epoch, None if shared_rng is None else capture_rng(), may_be_empty=may_be_empty)

        stream.open = open_stream  # type: ignore[method-assign]  # of this one stream

    def take_validation(self, loop: EvalLoop) -> None:
        """Let the steps of a validation have random numbers of their batch; the caller restores the generators."""
        transfer, numbers = loop.transfer, Counter[int]()
        self._of_rank_zero()  # on every rank, also on those without a batch

        def seeded(batch: Batch, dataloader_idx: int) -> Batch:
            key = self._key(f"validation {dataloader_idx}", numbers[dataloader_idx])
            numbers[dataloader_idx] += 1
            seed_global_generators(key)
            _seed_cuda(self._run.device, key)
            return transfer(batch, dataloader_idx)

        loop.transfer = seeded

    def _of_rank_zero(self) -> int:
        """Return the seed: of rank 0, also where a checkpoint has put its generators back."""
        if self._seed is None:
            self._seed = int(self._strategy.broadcast(torch.initial_seed()))
        return self._seed

    def _key(self, what: str, number: int) -> bytes:
        shard = number * self._size + self._rank
        progress = self._run.progress
        return f"{self._of_rank_zero()} {what} {progress.epochs} {progress.steps} {shard}".encode()

    # --- a window --------------------------------------------------------------------------------------------------

    def begin(self, size: int) -> None:
        """Begin a window."""
        self._window.begin(size)
        self._tree.clear()
        self._number = self._fetched = 0
        optimizer = self._plan.optimizer
        assert optimizer is not None
        self._parameters = [one for one in parameters_of(optimizer) if one.requires_grad]
        self._like: dict[int, Any] = {}  # a sharded gradient of each parameter, by its number
        self._plain = [number for number, one in enumerate(self._parameters) if not is_sharded(one)]
        self._is_present = [False] * len(self._parameters)

    def step(self, batch: Batch, index: int) -> Any:
        """Run the training step with the random numbers of this micro-shard."""
        key = self._key("step", self._number)
        self._rng = RngStream(key)
        _seed_cuda(self._run.device, key)
        if self._size > 1 and self._strategy.traits.shards_parameters:
            self._latest = batch
        with self._rng:
            return self._step(batch, index)

    def without_data(self, model: nn.Module) -> NoLoss | None:
        """Take part in a micro-shard that the data do not have: with shards, by a pass whose gradients are dropped."""
        if not self._strategy.traits.shards_parameters:
            return self._default_without_data(model)
        run = self._run
        batch = self._latest
        if batch is NO_BATCH:  # a resumed run has had none
            with RngStream(b""):
                batch = self._plan.transfer(next(iter(cast("Iterable[Batch]", run.stream.loader))))
        was_disabled, run.metrics.is_disabled = run.metrics.is_disabled, True
        try:
            loss = read_loss(self.step(batch, run.batch_idx))
        finally:
            run.metrics.is_disabled = was_disabled
        self._absence.is_set = True
        assert loss is not None
        return NoLoss((loss.sum if isinstance(loss, Loss) else loss).reshape(()) * 0)

    def loss_and_backward(self, run: FitRun, output: Any, *, is_first: bool, is_last: bool) -> Tensor | None:
        """Run backward, and add the gradients of the micro-shard to the tree."""
        self._window.number = self._number
        with self._rng:
            value = self._backward(run, output, is_first=is_first, is_last=is_last)
        self._rng = nullcontext()
        self._take()
        self._number += 1
        return value

    def _take(self) -> None:
        gradients: Addend = []
        for number, one in enumerate(self._parameters):
            gradient, one.grad = one.grad, None
            if self._absence.is_set and not is_sharded(one):
                gradient = None
            if gradient is not None and gradient.is_sparse:
                raise ModuleError(
                    "Expected dense gradients with reproducible='world', got a sparse one of a parameter of shape "
                    f"{tuple(one.shape)}.",
                    fix="create the embedding with sparse=False.",
                )
            if is_sharded(gradient):
                self._like[number] = gradient
                gradient = gradient.to_local()
            self._is_present[number] |= gradient is not None
            gradients.append(gradient)
        self._absence.is_set = False
        self._tree.add(gradients if self._size == 1 else self._scattered(gradients))

    def _scattered(self, gradients: Addend) -> Addend:
        """Return the sum of this micro-shard's gradients and its neighbors': shards, and this rank's part of others."""
        parts = [one for one, parameter in zip(gradients, self._parameters, strict=True) if is_sharded(parameter)]
        for bucket in self._buckets():
            pieces = []
            for number in bucket:
                one, gradients[number] = gradients[number], None
                pieces.append(torch.zeros_like(self._parameters[number]) if one is None else one)
            flat = torch.cat([one.reshape(-1) for one in pieces])
            flat = nn.functional.pad(flat, (0, -flat.numel() % self._size))
            parts.append(sum_scattered(flat.view(self._size, -1)))
        return parts

    def _buckets(self) -> list[list[int]]:
        """Return the numbers of parameters that are not sharded, in buckets of one dtype."""
        buckets: list[list[int]] = []
        size, kind = 0, None
        for number in self._plain:
            one = self._parameters[number]
            if kind != one.dtype or size >= _BUCKET_BYTES:
                buckets.append([])
                size, kind = 0, one.dtype
            buckets[-1].append(number)
            size += one.numel() * one.element_size()
        return buckets

    def finish(self, run: FitRun, loss: Tensor | None) -> bool:
        """Give the parameters their gradients; then what any window's end does."""
        if not run.has_ranks:
            self._window.reduce()
        total = self._tree.total()
        gradients = total if self._size == 1 else self._gathered(total)
        known = [one for one in gradients if one is not None]
        if known:
            # Without signs of zeros: whether a gradient of a micro-shard is 0 or missing may depend on the ranks.
            torch._foreach_add_(known, 0.0)
        for number, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            like = self._like.get(number)
            if like is not None and gradient is not None:
                gradient = like.from_local(
                    gradient, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
                )
            parameter.grad = gradient
        return self._finish(run, loss)

    def _gathered(self, parts: Addend) -> Addend:
        """Return the gradients in full, or sharded as they are, from what `_scattered` returned."""
        rest = iter(parts)
        gradients = [next(rest) if is_sharded(one) else None for one in self._parameters]
        if not self._plain:
            return gradients
        there = torch.tensor([float(self._is_present[number]) for number in self._plain], device=self._run.device)
        dist.all_reduce(there, dist.ReduceOp.MAX)
        for bucket in self._buckets():
            part = next(rest)
            assert part is not None
            flat = part.new_empty(self._size * part.numel())
            gather_single(flat, part)
            sizes = [self._parameters[number].numel() for number in bucket]
            for number, piece in zip(bucket, flat[: sum(sizes)].split(sizes), strict=True):
                # In memory and a layout as of a backward pass: the order of sums in a norm depends on both.
                like = self._parameters[number]
                gradients[number] = torch.empty_like(like).copy_(piece.view_as(like))
        if not all(self._is_present[number] for number in self._plain):  # else nothing is read from the device
            for number, count in zip(self._plain, there.tolist(), strict=True):
                if not count:
                    gradients[number] = None
        return gradients


def _seed_cuda(device: torch.device, key: bytes) -> None:
    if device.type == "cuda":
        torch.cuda.manual_seed(int.from_bytes(key[:4] + key[-4:], "little"))


class _Absence:
    """Whether the gradients of the present pass are dropped, because other ranks only have data for it."""

    is_set = False
