"""`verify_first`: the first micro-batch of a run through the unsplit model, and what its stages are compared with.

It runs in training mode and without gradients, with the random numbers of the pipelined step. Compared are the inputs
and other arguments of every block, and the loss; by sums over chunks, so that little is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....errors import ModuleError
from ....protocols import AnyBatch, AnyOutput, Args, Kwargs, StateDict, Tree
from ...tree import leaves, map_leaves
from .attributes import unchanged
from .unsplit_run import CannotRunError, UnsplitRun

if TYPE_CHECKING:
    from ..random_numbers import StepNumbers
    from .exchange import Exchange
    from .split import StageSplit

logger = logging.getLogger(__name__)

# Any in this file: batches, arguments of the user's modules, and what steps return.

_CHUNKS = 64
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex128: 1e-9, torch.complex64: 1e-4}
_COARSE = 2e-2


def verify_first(
    split: StageSplit,
    rank_of: dict[int, int],
    exchange: Exchange,
    numbers: StepNumbers,
    step: Callable[[Any], Any],
    batch: AnyBatch,
) -> StageComparison:
    """Run a micro-batch through the unsplit model. On every rank of the pipeline: it communicates.

    Args:
        split: This rank's stages.
        rank_of: The rank of each stage.
        exchange: Of the pipeline.
        numbers: Of the runner, in a window.
        step: Runs the user's step on a batch, without stages; nothing that it logs counts.
        batch: The first micro-batch.

    Returns:
        What the stages are compared with.
    """
    comparison = StageComparison(split)
    run = UnsplitRun(split, rank_of, exchange, numbers, comparison.expect_arguments)
    own = map_leaves(batch, lambda value: value.clone() if isinstance(value, Tensor) else value)
    with unchanged(split.module), torch.no_grad(), numbers.rehearsing():
        try:
            comparison.expect_loss(run.run(lambda: step(own)), run.attributes)
        except CannotRunError as error:
            logger.warning(
                "the first batch of %s could not be compared with the unsplit model (verify=True): %s",
                type(split.module).__name__,
                error,
            )
            return StageComparison(split)
    return comparison


class StageComparison:
    """Values of the unsplit model that this rank compares with the values of its stages.

    Args:
        split: This rank's stages.
    """

    def __init__(self, split: StageSplit) -> None:
        self._split = split
        self._arguments: dict[str, Kwargs] = {}
        self._loss: StateDict = {}
        self._attributes: list[str] = []
        self._tolerance = 0.0

    def expect_arguments(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """Take the arguments that a block has in the unsplit model."""
        if name in self._arguments:  # a second call is another error
            return
        found = self._arguments[name] = {label: _summary(value) for label, value in _named(args, kwargs)}
        self._tolerance = max([self._tolerance, *(_tolerance_of(one) for one in found.values())])

    def expect_loss(self, output: AnyOutput, attributes: list[str]) -> None:
        """Take what the step returned in the unsplit model."""
        self._loss = {path: _summary(value) for path, value in leaves(_loss_in(output))}
        self._attributes = attributes

    def check_arguments(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """Compare the arguments of a block in a stage.

        Raises:
            ModuleError: They differ; names the block and the argument.
        """
        expected = self._arguments.pop(name, None)
        if expected is None:
            return
        found = {label: _summary(value) for label, value in _named(args, kwargs)}
        for label, value in expected.items():
            difference = _difference(found.get(label), value, _tolerance_of(value))
            if difference is not None:
                raise self._differs(f"{label} of {name}", difference)

    def check_loss(self, loss: Any) -> None:
        """Compare the loss of the last stage.

        Raises:
            ModuleError: It differs.
        """
        found = {path: _summary(value) for path, value in leaves(_loss_in(loss))}
        expected, self._loss = self._loss, {}
        for path, value in expected.items():
            difference = _difference(found.get(path), value, max(self._tolerance, _tolerance_of(value)))
            if difference is not None:
                raise self._differs("the loss", difference)

    def _differs(self, what: str, difference: str) -> ModuleError:
        set_there = ""
        if self._attributes:
            set_there = f" Blocks of other stages set {', '.join(dict.fromkeys(self._attributes))}."
        plan = self._split.plan
        return ModuleError(
            f"Expected {plan.num_stages} pipeline stages to compute what the unsplit model does, got another value of "
            f"{what} in the first micro-batch: {difference}.{set_there}",
            fix="compute from the batch what later stages need, or within the blocks: attributes that blocks set, and "
            "values from before a split, are not there. If the step computes something else each time that it runs, "
            "pass verify=False to MeshStrategy.",
        )


def _named(args: Args, kwargs: Kwargs) -> Iterator[tuple[str, Any]]:
    for number, value in enumerate(args):
        for path, leaf in leaves(value):
            yield f"argument {number}{path}", leaf
    for key, value in kwargs.items():
        for path, leaf in leaves(value):
            yield f"argument {key}{path}", leaf


def _loss_in(output: AnyOutput) -> AnyOutput:
    """Return the loss in what a step returned, without graphs."""
    if isinstance(output, Mapping):
        if "loss_sum" in output and "weight" in output:
            return [output["loss_sum"], output["weight"]]
        return _loss_in(output.get("loss"))
    return [value for _, value in leaves(output)]


class _Sums:
    """Sums over chunks of a tensor, and over the magnitudes in them."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
        count = flat.numel()
        numbers = torch.arange(count, device=flat.device)
        values = flat.to(torch.float32 if flat.device.type == "mps" else torch.float64)
        chunk = numbers * min(_CHUNKS, count) // max(count, 1)
        zeros = values.new_zeros(min(_CHUNKS, count))
        # Neighbors count differently, so that an exchange of values is seen, too.
        self.sums = zeros.index_add(0, chunk, values * (1 + numbers % 7)).cpu()
        self.sizes = zeros.index_add(0, chunk, values.abs() * (1 + numbers % 7)).cpu()


def _summary(value: Tree) -> Tree:
    if isinstance(value, Tensor):
        return _Sums(value.to_local() if hasattr(value, "to_local") else value)
    return value


def _tolerance_of(summary: Any) -> float:
    if not isinstance(summary, _Sums) or not (summary.dtype.is_floating_point or summary.dtype.is_complex):
        return 0.0
    return _TOLERANCES.get(summary.dtype, _COARSE)


def _difference(found: Any, expected: Any, tolerance: float) -> str | None:
    """Return how a value differs from the expected one; None where it does not."""
    if not isinstance(expected, _Sums):
        is_same = not isinstance(expected, int | float | str) or found == expected or expected != expected
        return None if is_same else f"{found!r} instead of {expected!r}"
    if not isinstance(found, _Sums):
        return f"{found!r} instead of a tensor of shape {expected.shape}"
    if found.shape != expected.shape:
        return f"shape {found.shape} instead of {expected.shape}"
    same = torch.isclose(found.sums, expected.sums, rtol=0.0, atol=0.0, equal_nan=True)
    near = (found.sums - expected.sums).abs() <= tolerance * expected.sizes + 1e-30
    if bool((same | near).all()):
        return None
    if expected.shape == ():
        return f"{float(found.sums)} instead of {float(expected.sums)}"
    largest = ((found.sums - expected.sums).abs() / expected.sizes).nan_to_num(torch.inf, torch.inf).max()
    return f"shape {expected.shape}, relative difference {float(largest):.1e}"
