"""`Verification`: a model's first batch on full sequences against the same batch on parts.

It runs without gradients and in evaluation mode, inside of the step's first call of the model. Queries, keys and values
of each attention are compared, and the output: so an error names where the two begin to differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ....errors import ModuleError
from ....protocols import StepOutput
from ...distributed.shards import is_sharded
from ...fsdp.root import groups_of
from ...tree import leaves
from ..pipeline.attributes import unchanged
from ..random_numbers import kept_numbers
from ..verify import difference, dtypes_of, unlike_over_ranks

if TYPE_CHECKING:
    from .interception import Interception
    from .parts import SequenceParts

logger = logging.getLogger(__name__)

# Any in this file: outputs of the user's model.

_SEQUENCE = -2
_ATTENTION = "F.scaled_dot_product_attention"
_NAMES = ("queries", "keys", "values")


def check_same_inputs(tensors: dict[str, Tensor], parts: SequenceParts) -> None:
    """Compare over the ranks of a sequence what the model is called with. On every rank of the group.

    Raises:
        ModuleError: They differ; names the inputs.
    """
    unlike = unlike_over_ranks(tensors, parts.same_batch or parts.group)
    if unlike:
        raise ModuleError(
            f"Expected the {parts.size} ranks of a context to call the model with the same sequences, got different "
            f"values of {', '.join(unlike)}.",
            fix="let the data and its random changes be the same on ranks with the same trainer.strategy.topology."
            "data_rank; random numbers of torch are.",
        )


def verify(
    model: nn.Module,
    run_whole: Callable[[], Any],
    run_part: Callable[[], Any],
    interception: Interception,
    parts: SequenceParts,
    dim: int,
    device: torch.device,
) -> None:
    """Run a model on full sequences and on parts, and compare. On every rank of the group: it communicates.

    Args:
        model: In whose forward pre-hook this is called.
        run_whole: Runs its forward on full sequences.
        run_part: Runs its forward on this rank's part; its output is that of the part.
        interception: Active.
        parts: The ranks.
        dim: The dimension of the sequence in the output.
        device: Whose generator is used beside the CPU's.

    Raises:
        ModuleError: On every rank: they differ; names where, by how much, and what may be the cause.
    """
    seen: list[list[Tensor]] = []
    with unchanged(model), _evaluating(model), torch.no_grad(), kept_numbers(device) as have_moved:
        with _observing(interception, lambda tensors: seen.append([_part(one, parts) for one in tensors])):
            whole = run_whole()
        has_drawn = have_moved()
        comparison = _Comparison(seen)
        with _observing(interception, comparison.take), interception.inside():
            part = run_part()
    if has_drawn:
        logger.warning(
            "%s draws random numbers in evaluation mode, so that its first batch could not be compared with the one on "
            "full sequences (verify=True)",
            type(model).__name__,
        )
        return
    comparison.finish(_tensors(whole), _tensors(part), parts, dim)
    found = parts.objects(comparison.problem)
    problem = next((one for one in found if one is not None), None)
    if problem is not None:
        what, fix = problem
        raise ModuleError(
            f"Expected {type(model).__name__} to compute the same with cp={parts.size} as on full sequences, got "
            f"{what}.",
            fix=fix,
        )


class _Comparison:
    """Compares what the model computes on parts with what it computed on full sequences.

    Attributes:
        problem: The first difference and a remedy; None so far.
    """

    def __init__(self, wanted: list[list[Tensor]]) -> None:
        self._wanted = wanted
        self._count = 0
        self.problem: tuple[str, str] | None = None

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Compare queries, keys and values of the next attention."""
        number, self._count = self._count, self._count + 1
        if self.problem is not None or number >= len(self._wanted):
            return
        pairs = list(zip(_NAMES, tensors, self._wanted[number], strict=True))
        unlike = [(name, difference(part, whole)) for name, part, whole in pairs if not _is_close(part, whole)]
        if unlike:
            listed = ", ".join(f"{name} that differ by {size:.1e}" for name, size in unlike)
            self.problem = (f"{listed} in attention {number} of {len(self._wanted)}", _remedy(number))

    def finish(self, whole: list[Tensor], part: list[Tensor], parts: SequenceParts, dim: int) -> None:
        """Compare the number of attentions, and the outputs."""
        if self.problem is None and self._count != len(self._wanted):
            self.problem = (
                f"{self._count} calls of attention in place of {len(self._wanted)}",
                "let the model's course not depend on the length of its input.",
            )
        for number, (wanted, got) in enumerate(zip(whole, part, strict=False)):
            mine = parts.split(wanted, dim) if wanted.ndim > dim else wanted
            if self.problem is None and not _is_close(got, mine):
                same = "with equal attention" if self._wanted else f"without any call of {_ATTENTION}"
                what = f"output {number} that differs by {difference(got, mine):.1e}, {same}"
                self.problem = (what, _remedy(max(1, len(self._wanted))))


def _remedy(number: int) -> str:
    if number == 0:
        return (
            "positions that a model counts from the length of its input are wrong on parts: let its forward take "
            "position_ids, which are passed, or compute positions outside and name them in Context(inputs=...)."
        )
    return (
        "whatever mixes positions must be F.scaled_dot_product_attention: attention by matrix products or other "
        "kernels, convolutions and means over the sequence see one part only."
    )


def _part(tensor: Tensor, parts: SequenceParts) -> Tensor:
    is_divisible = tensor.ndim > 1 and tensor.shape[_SEQUENCE] % parts.size == 0
    return parts.split(tensor, _SEQUENCE).clone() if is_divisible else tensor.clone()


def _tensors(output: StepOutput) -> list[Tensor]:
    found = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor)]
    return [leaf.to_local() if is_sharded(leaf) else leaf for leaf in found]  # logits in parts of the vocabulary


def _is_close(part: Tensor, whole: Tensor) -> bool:
    if part.shape == whole.shape and not part.is_floating_point():
        return torch.equal(part, whole)
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes_of(part)) if part.is_floating_point() else 0.0
    return bool(difference(part, whole) <= coarsest**0.5)


@contextmanager
def _observing(interception: Interception, observe: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    interception.observe = observe
    try:
        yield
    finally:
        interception.observe = None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Return a context in evaluation mode, after which units are as they were: no order of them is noted."""
    modes = [(one, one.training) for one in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for one, is_training in modes:
            one.training = is_training
        for unit in model.modules():
            if not isinstance(unit, FSDPModule):
                continue
            if unit is not model:
                unit.reshard()
            for group in groups_of(unit):
                group._post_forward_indices.clear()
                getattr(group.comm_ctx, "post_forward_order", []).clear()  # as after an evaluation
