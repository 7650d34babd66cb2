"""`PipelineRunner`: runs windows and evaluation steps of a split module over the ranks of a pipeline."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ....errors import ModuleError, NonFiniteError
from ...distributed.collectives import gather_objects
from ...distributed.gradients import LostGradients
from ...tree import map_leaves
from ..random_numbers import StepNumbers
from .block_calls import gradient_ends_here
from .copies import StageCopies
from .exchange import Exchange
from .options import Pipeline
from .schedule import can_run, make_schedule, run_schedule
from .shapes import (
    StageShapes,
    changed_in_place,
    check_shapes,
    described,
    plain_shapes,
    read_shapes,
    shapes_of,
    versions_of,
)
from .unreached import UnreachedStages
from .verify import verify_first

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ....protocols import AnyBatch, StateDict, StepFunction
    from .split import StageSplit
    from .verify import StageComparison

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Any in this file: batches, and what the user's steps take and return.

# Schedules keep buffers for what they receive: those of the latest shapes are kept.
_MOST_SCHEDULES = 8


class PipelineRunner:
    """Runs steps of a module that is split into stages.

    The first window whose micro-batches have new shapes runs them one after the other, which shows what stages
    exchange; later ones run in the order of the schedule. So do windows that the schedule does not take: those whose
    micro-batches have different shapes, or are too few.

    Args:
        split: This rank's stages.
        options: The arguments that the user chose.
        group: The ranks of the pipeline.
        device: Where this process computes.
        seeds_blocks: See `split_module`.

    Attributes:
        schedules: Torch's schedules, by shapes of a micro-batch and their number.
        unreached: Knows which stages no gradient reaches.
        copies: Compares what all stages have.
    """

    def __init__(
        self,
        split: StageSplit,
        options: Pipeline,
        group: ProcessGroup,
        device: torch.device,
        *,
        seeds_blocks: bool = True,
    ) -> None:
        self.split = split
        self.group = group
        self.device = device
        self._name = options.schedule
        self._rank_of = {
            stage: rank for rank in range(split.num_ranks) for stage in options.stages_of(rank, split.num_ranks)
        }
        self.unreached = UnreachedStages(split, options.schedule, device)
        self._exchange = Exchange(group, device)
        self._numbers = StepNumbers(device, is_on=seeds_blocks)
        split.at.numbers = self._numbers if seeds_blocks else None
        self._shapes: dict[str, dict[int, StageShapes]] = {}
        self.schedules: OrderedDict[object, Any] = OrderedDict()
        self.copies = StageCopies(split, group)
        self._outputs: dict[str, dict[int, Any]] = {}  # what blocks return beside hidden states, by shapes of batches
        self._now: tuple[int, tuple[Tensor, ...] | None] = (0, None)
        self._failure: Exception | None = None
        self._is_checked = self._has_told = False
        # Of the present window.
        self._batches: Sequence[Any] = ()
        self._step: Callable[..., Any] = _no_step
        self._share: Callable[[Any], Tensor] = _no_step
        self._losses: list[Any] = []
        self._versions: list[int] = []
        self._expected: dict[int, StageShapes] | None = None  # what stages exchange, where buffers rely on it

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineRunner:
        return self  # a copy of the module has the same ranks

    # -- steps ---------------------------------------------------------------------------------------------------

    def staged(self, step: StepFunction) -> StepFunction:
        """Return what runs the present stage of a training step; see `run_window`."""

        def run(*args: object, **kwargs: object) -> object:
            stage, received = self._now
            if self.split.at.unsplit is not None:
                return step(*args, **kwargs)
            output = self.split.run(stage, received, step, *args, **kwargs)
            if stage == self.split.plan.num_stages - 1:
                return output
            # As a loss, the hidden state goes through torch's hooks of sharded modules.
            hidden, *others = output
            return {"loss": hidden if hidden.requires_grad else _leaf(hidden), "others": others} if others else hidden

        return run

    def evaluated(self, step: StepFunction) -> StepFunction:
        """Return what runs an evaluation step through all stages: its result on the last stage, None elsewhere."""

        def run(*args: object, **kwargs: object) -> object:
            if torch.is_grad_enabled():
                raise ModuleError(
                    "a module that is split into pipeline stages was called with gradients, outside of windows.",
                    fix="train it with trainer.fit; or call it under torch.no_grad().",
                )
            self._exchange.settle()  # of the step before: the stages work on different batches
            outputs: dict[int, Any] = {}
            with (
                self._numbers.window("evaluation"),
                self.split.states.window(self.split.stages),
                self._describing(),
            ):
                for stage in self.split.stages:
                    received = None if stage == 0 else self._passed_on(stage, outputs)
                    self._numbers.start(0)
                    outputs[stage] = self.split.run(stage, received, step, *args, **kwargs)
                    if stage + 1 < self.split.plan.num_stages and stage + 1 not in self.split.stages:
                        self._pass_on(stage, outputs[stage])
            return outputs[self.split.stages[-1]] if self.split.has_last else None

        return run

    # Without a schedule, stages send with their hidden state what stands for the outputs of their blocks. At first they
    # send all tensors that the next block gets, and that stage replies which of them it needs.

    @contextmanager
    def _describing(self) -> Iterator[None]:
        self.split.at.outputs, self.split.at.describes = {}, True
        try:
            yield
        finally:
            self.split.at.describes, self.split.at.reply, self.split.at.taken = False, None, ()

    def _passed_on(self, stage: int, outputs: dict[int, Any]) -> tuple[Tensor, ...]:
        """Return what the stage before sends, or has returned on this rank."""
        at, rank = self.split.at, self._rank_of[stage - 1]
        at.reply = None
        if stage - 1 in outputs:
            passed: tuple[Tensor, ...] = outputs[stage - 1]
            return passed
        hidden, note = self._exchange.receive_with_note(rank)
        others = [self._exchange.receive(rank) for _ in range(note >> 1)]
        if note & 1:
            at.outputs.update(self._exchange.receive_object(rank))
        at.reply = lambda chosen: self._exchange.send(torch.tensor(chosen, dtype=torch.int64, device=self.device), rank)
        return (hidden, *others)

    def _pass_on(self, stage: int, passed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Send what a stage has returned, and return the part of it that the next one needs."""
        at, rank, block = self.split.at, self._rank_of[stage + 1], self.split.plan.bounds[stage + 1]
        before = {index: one for index, one in at.outputs.items() if index < block}
        hidden, *others = passed
        self._exchange.send(hidden, rank, (len(others) << 1) + bool(before))
        for one in others:
            self._exchange.send(one, rank)
        if before:
            self._exchange.send_object(before, rank)
        if at.awaits is None:
            return passed
        at.carries[at.awaits] = tuple(self._exchange.receive(rank).tolist()) if others else ()
        return self._needed(at.awaits, passed)

    def _needed(self, key: tuple[int, int], passed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the part of all tensors after a hidden state that the next stage has chosen."""
        return (passed[0], *(passed[1 + number] for number in self.split.at.carries[key]))

    # -- state ---------------------------------------------------------------------------------------------------

    def joined(self, facts: dict[str, T]) -> dict[str, T]:
        """Return facts about modules and parameters by name, each from the rank that has these. Communicates."""
        split = self.split
        return {
            name: fact
            for rank, theirs in enumerate(gather_objects(facts, self.group))
            for name, fact in theirs.items()
            if split.owner_of(name) == rank
        }

    def state_dict(self) -> StateDict:
        """Return the shapes that stages exchange, by shapes of batches. On every rank: it communicates.

        With them, a resumed run begins in the order of the schedule; with the counts of windows it draws the masks of a
        run that was not interrupted.
        """
        carries = self.split.at.carries
        is_plain = not any(carries.values()) and not any(self._outputs.values())
        everyone = gather_objects((plain_shapes(self._shapes), list(map(list, carries)), is_plain), self.group)
        # Where more than hidden states is sent, a resumed run begins with a window that shows it once more.
        are_kept = all(one[2] for one in everyone)
        return {
            "schedule": self._name,
            "bounds": list(self.split.plan.bounds),
            "shapes": [one[0] if are_kept else {} for one in everyone],
            "splits": [one[1] if are_kept else [] for one in everyone],
            "counts": dict(self._numbers.counts),
        }

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned, if it is of the same stages; None: nothing."""
        if state is not None and "counts" in state:
            self._numbers.counts.update(state["counts"])
        if state is None or state["schedule"] != self._name or state["bounds"] != list(self.split.plan.bounds):
            return
        if len(state["shapes"]) != self.split.num_ranks:
            return
        if "splits" in state:
            self._shapes.update(read_shapes(state["shapes"][self.split.rank]))
            self.split.at.carries.update(dict.fromkeys(map(tuple, state["splits"][self.split.rank]), ()))

    # -- windows -------------------------------------------------------------------------------------------------

    def run_window(
        self, batches: Sequence[AnyBatch], step: StepFunction, share: Callable[[Any], Tensor], *, verifies: bool
    ) -> Sequence[Any]:
        """Run forward and backward passes of all micro-batches; see `RunsWindows.run_window`.

        Args:
            batches: See there.
            step: See there.
            share: See there.
            verifies: Whether the first micro-batch is compared with the unsplit model.

        Returns:
            The loss of each micro-batch on the rank with the last stage; None for each elsewhere.

        Raises:
            ModuleError: The step cannot be pipelined.
            NonFiniteError: The first loss is NaN, though what the last stage received is finite.
        """
        self.copies.begin_window()
        self._batches, self._step, self._share = batches, step, share
        self._losses = [None] * len(batches)
        keys = [shapes_of(batch) for batch in batches]
        is_uniform = all(key == keys[0] for key in keys)
        self.split.at.is_training = True
        self.unreached.begin()
        try:
            with self._numbers.window("window"), self.split.states.window(self.split.stages):
                if verifies and keys[0] not in self._shapes:
                    self.split.at.comparison = self._compared()
                self._run_all(keys, is_uniform=is_uniform)
            return self._losses
        finally:
            self.split.at.comparison = None
            self.split.at.is_training = False
            self._batches, self._step, self._share = (), _no_step, _no_step

    def _compared(self) -> StageComparison:
        """Run the first micro-batch through the unsplit model, and return what its stages are compared with."""
        return verify_first(
            self.split,
            self._rank_of,
            self._exchange,
            self._numbers,
            lambda batch: self._step(batch, 0, counts=False),
            self._batches[0],
        )

    def _run_all(self, keys: Sequence[str], *, is_uniform: bool) -> None:
        """Run the micro-batches in the order of the schedule if it takes them, else one after the other."""
        count, plan = len(keys), self.split.plan
        is_known = keys[0] in self._shapes
        if is_uniform and is_known and can_run(self._name, plan.num_stages, self.split.num_ranks, count):
            self._run_schedule(keys[0], count)
            return
        if not is_uniform or is_known:
            self._tell_once(count, is_uniform=is_uniform)
        with self._describing():
            for number in range(count):
                self._shapes[keys[number]] = self._run_one(number)
                self._outputs[keys[number]] = dict(self.split.at.outputs)

    def _run_schedule(self, key: str, count: int) -> None:
        schedule = self.schedules.get((key, count))
        if schedule is None:
            schedule = self.schedules[key, count] = make_schedule(
                self.split, self._name, self._shapes[key], count, self._forward, group=self.group, device=self.device
            )
            if len(self.schedules) > _MOST_SCHEDULES:
                self.schedules.popitem(last=False)
        self.schedules.move_to_end((key, count))
        self._failure, self._expected, self.split.at.outputs = None, self._shapes[key], self._outputs.get(key, {})
        try:
            run_schedule(schedule, self.split, count)
        except RuntimeError:
            if self._failure is not None:  # torch raises another error from the user's
                raise self._failure from None
            raise
        finally:
            self._expected = None

    def _run_one(self, number: int) -> dict[int, StageShapes]:
        """Run forward and backward pass of one micro-batch through all stages, and return what they exchange."""
        split, exchange = self.split, self._exchange
        last = split.plan.num_stages - 1
        received: dict[int, tuple[Tensor, ...] | None] = {}
        returned: dict[int, tuple[Tensor, ...]] = {}
        awaits = None
        for stage in split.stages:
            came = None if stage == 0 else tuple(map(_leaf, self._passed_on(stage, returned)))
            returned[stage] = self._forward(stage, number, came)
            received[stage] = None if came is None else split.at.taken
            if awaits is not None and stage - 1 in returned:
                returned[stage - 1] = self._needed(awaits, returned[stage - 1])
            awaits = split.at.awaits if stage < last else None
            if stage < last and stage + 1 not in split.stages:
                returned[stage], awaits = self._pass_on(stage, returned[stage]), None
        self._check_first_loss(received.get(last), returned.get(last))
        comparison = split.at.comparison
        if comparison is not None and number == 0:
            if split.has_last:
                comparison.check_loss(self._losses[0])
            split.at.comparison = None
        shapes = {
            stage: StageShapes(None if came is None else described(came), described(returned[stage]))
            for stage, came in received.items()
        }
        for stage in reversed(split.stages):
            self._backward(stage, received, returned.pop(stage))
        exchange.settle()
        return shapes

    def _backward(
        self, stage: int, received: dict[int, tuple[Tensor, ...] | None], returned: tuple[Tensor, ...]
    ) -> None:
        split, last = self.split, self.split.plan.num_stages - 1
        if stage == last:
            returned[0].backward()
        elif (after := received.get(stage + 1)) is not None:
            torch.autograd.backward(returned, [_gradient_of(one) for one in after])
        else:
            rank = self._rank_of[stage + 1]
            torch.autograd.backward(returned, [self._exchange.receive(rank) for _ in returned])
        if stage - 1 not in split.stages:
            for one in received[stage] or ():
                self._exchange.send(_gradient_of(one), self._rank_of[stage - 1])

    def _forward(self, stage: int, number: int, received: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Run one stage on a micro-batch; return what the next stage needs, or the share of the loss."""
        self._now = (stage, received)
        self.unreached.watch(stage, received or ())
        self._numbers.start(number)
        batch = self._batch_of(number)
        try:
            if stage < self.split.plan.num_stages - 1:
                output = self._step(batch, number, counts=False)
                passed = (output["loss"], *output["others"]) if output.__class__ is dict else (output,)
                if len(self.split.stages) > 1 and versions_of(self._batches[number]) != self._versions:
                    raise changed_in_place(self.split.stages)
                if self._expected is not None:
                    check_shapes(stage, passed, self._expected[stage].returned)
                return tuple(one if one.requires_grad else _leaf(one) for one in passed)
            with LostGradients(gradient_ends_here, of=lambda _: True) if self.split.at.describes else nullcontext():
                loss = self._losses[number] = self._step(batch, number)
            share = self._share(loss)
            if not share.requires_grad:
                raise ModuleError(
                    "training_step returned a loss without a graph, and the stages before the last wait for its "
                    "gradient.",
                    fix="return the loss times 0, or lw.Loss(loss_sum * 0, weight=0), for a batch that does not count.",
                )
            return (share,)
        except Exception as error:
            self._failure = error
            if "not have been used in the graph" not in str(error):
                raise
            self._failure = gradient_ends_here().with_traceback(error.__traceback__)
            raise self._failure from None

    def _batch_of(self, number: int) -> AnyBatch:
        """Return a micro-batch for a step; with copied containers where several stages of this rank run on it."""
        batch = self._batches[number]
        if len(self.split.stages) == 1:
            return batch
        self._versions = versions_of(batch)
        return map_leaves(batch, lambda value: value)

    def _check_first_loss(self, received: tuple[Tensor, ...] | None, returned: tuple[Tensor, ...] | None) -> None:
        """Look at the first loss of the run: NaN is what absent values of other stages become."""
        if self._is_checked or returned is None:
            return
        self._is_checked = True
        if bool(returned[0].isnan()) and all(bool(one.isfinite().all()) for one in received or ()):
            plan = self.split.plan
            start = plan.bounds[plan.num_stages - 1]
            name = f"{plan.list}.{start}" if plan.list else str(start)
            raise NonFiniteError(
                f"the loss of the first micro-batch is NaN, though what the last stage received is finite: {name} or "
                "what follows it reads a value from before the split, which this stage does not have (a skip "
                "connection, such as x = x + block(x) around a block); or the loss itself is NaN.",
                fix="move the addition into the block, pass the value to the blocks as an argument, split elsewhere: "
                "Pipeline(split=[...]), or name a smaller part of the model in Pipeline(module=...): what is outside "
                "of it runs on every stage.",
            )

    def _tell_once(self, count: int, *, is_uniform: bool) -> None:
        if self._has_told or not self.split.has_first:
            return
        self._has_told = True
        why = "of one shape" if not is_uniform else f"that schedule={self._name!r} takes, got {count}"
        logger.warning(
            "Expected windows with micro-batches %s: these run one micro-batch after the other, without overlap. The "
            "number is accumulate_grad_batches times Pipeline(micro_batches=...); with '1f1b' at least the number of "
            "stages, which is %d",
            why,
            self.split.plan.num_stages,
        )


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, which gets a gradient if it can have one."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _no_step(*args: object, **kwargs: object) -> Any:
    raise AssertionError("outside of a window")
