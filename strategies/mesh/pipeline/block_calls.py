"""What runs in place of blocks in a step of one stage: those of other stages pass on their input.

Every stage runs the user's whole step, up to the first block of the next stage. A block before the stage's first one
returns what it was given; the first one gets what the stage before has sent. A value that bypasses the split, as in a
skip connection around it, is absent (see outer_modules.py), and so becomes a loss of NaN and not a wrong number.

The calls stand outside of hooks: those of a module run where the module does, and only there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ....errors import ModuleError
from ....protocols import AnyOutput, Args, Call, Kwargs, Tree
from ...tree import leaves, map_leaves
from .shared_values import absent, absent_output, choose, described_output, fill, further_tensors, join, no_copy

if TYPE_CHECKING:
    from ..random_numbers import StepNumbers
    from .attributes import StageStates
    from .unsplit_run import UnsplitRun
    from .verify import StageComparison

# Any in this file: arguments and results of the user's modules.


class Cut(BaseException):
    """Leaves a step at the first block of the next stage. Not an Exception, so that no user code catches it.

    Attributes:
        value: What the next stage needs: the hidden state, and what its blocks share with earlier ones.
    """

    def __init__(self, value: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.value = value


@dataclass(slots=True)
class Position:
    """Where the present step is; shared by all calls of a module.

    Attributes:
        called: What the step calls, as a user writes it.
        stage: The stage that runs; None outside of a step.
        first: Its first block.
        end: The block after its last one.
        num_blocks: Of all stages.
        received: What the stage before has sent, the hidden state first; None on the first stage.
        is_called: Whether the module that is split has been called.
        is_past: Whether the stage's first block has been called.
        is_training: Whether a window of training runs.
        numbers: What the parts of a step draw at random; None: from the generators as they are.
        unsplit: Runs all modules, in place of a stage; None: a stage runs.
        comparison: Compares the arguments of blocks; None: it is not due.
        states: What steps of several stages change; None: nothing is split yet.
        is_in_parts: Whether `state_dict()` of a module returns what this rank has of it.
        carries: By the first block of a stage and the number of tensors that it gets beside the hidden state: which of
            them are sent.
        outputs: By the number of a block that returns more than its hidden state: what stands for it on other stages.
        describes: Whether outputs of this rank's blocks are noted there.
        rehearses: Whether the present pass is a rehearsal, perhaps on other shapes than what was sent has.
        reply: Gets which tensors are to be sent, where the stage before waits for it.
        taken: What the latest stage has taken of what it received, where no schedule runs.
        awaits: The key in `carries` of the latest split, where the next stage has to say what it needs.
    """

    called: str
    num_blocks: int
    stage: int | None = None
    first: int = 0
    end: int = 0
    received: tuple[Tensor, ...] | None = None
    is_called: bool = False
    is_past: bool = False
    is_training: bool = False
    numbers: StepNumbers | None = None
    unsplit: UnsplitRun | None = None
    comparison: StageComparison | None = None
    states: StageStates | None = None
    is_in_parts: bool = False
    carries: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    describes: bool = False
    rehearses: bool = False
    reply: Callable[[tuple[int, ...]], None] | None = None
    taken: tuple[Tensor, ...] = ()
    awaits: tuple[int, int] | None = None

    def refuse_gradient(self, _: Tensor) -> None:
        """Called with the gradient of the last block's output: an error within a step, where it is not the loss's."""
        if self.stage is not None:
            raise _differentiated("a gradient within the step")

    def outside(self, name: str) -> ModuleError:
        """Return the error of a call outside of a step, of a module that another stage has."""
        return ModuleError(
            f"{name} was called outside of a step, and another stage of the pipeline has it.",
            fix=f"call {self.called} in training_step, validation_step, test_step or predict_step only.",
        )


@dataclass(eq=False)
class ChildCall:
    """The place of the module that is split: `module._call_impl`.

    Attributes:
        module: The module.
        at: Where the present step is.
    """

    module: nn.Module
    at: Position

    def __call__(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Run the module.

        Raises:
            ModuleError: It is the second call in a step.
        """
        at = self.at
        if at.unsplit is not None:
            return at.unsplit.child(self.module, args, kwargs)
        if at.stage is not None:
            if at.is_called:
                raise _called_twice(at)
            at.is_called = True
            if at.is_training and torch._C._are_functorch_transforms_active():
                raise _differentiated("a transform of torch.func")
        return nn.Module._call_impl(self.module, *args, **kwargs)


@dataclass(eq=False)
class BlockCall:
    """A block's place in its module: `block._call_impl`.

    Attributes:
        module: The block.
        name: Its name in the user's module.
        index: Its number among the blocks.
        is_own: Whether this rank has its parameters.
        at: Where the present step is.
        is_checked: Whether it has been found out from where the block is called.
    """

    module: nn.Module
    name: str
    index: int
    is_own: bool
    at: Position
    is_checked: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Run the block, pass on the input, or leave the step, depending on the stage that runs.

        Raises:
            ModuleError: Blocks are called in another order, or twice, or share what cannot be sent.
        """
        at, index = self.at, self.index
        if at.unsplit is not None:
            return at.unsplit.block(self, args, kwargs)
        if at.stage is None:
            if self.is_own:
                return nn.Module._call_impl(self.module, *args, **kwargs)
            raise at.outside(self.name)
        if at.is_training and not self.is_checked:
            self.is_checked = True
            if _is_in_checkpoint():
                raise _in_checkpoint(self.name)
        numbers = at.numbers
        if numbers is not None:
            numbers.leave_step()
        if index < at.first or index == at.first:
            if at.is_past:
                raise _called_twice(at)
            if index < at.first:
                if numbers is not None:
                    numbers.seed(2 * index + 1)
                hidden = _input_of(args, kwargs, self.name)
                if index in at.outputs:
                    return absent_output(at.outputs[index], args, kwargs, hidden)
                return _absent(hidden, is_first=index == 0)
            at.is_past = True
            if at.received is not None:
                args, kwargs = self._take(args, kwargs, at.received)
        if index == at.end:
            if not at.is_past:
                raise _unordered(self.name, at)
            raise Cut(self._passed_on(args, kwargs))
        if at.comparison is not None:
            at.comparison.check_arguments(self.name, args, kwargs)
        if numbers is not None:
            numbers.seed(2 * index)
        output = nn.Module._call_impl(self.module, *args, **kwargs)
        if numbers is not None:
            numbers.seed(2 * index + 1)
        if at.describes and not isinstance(output, Tensor):
            at.outputs[index] = described_output(output, args, kwargs, self.name)
        if at.is_training and index == at.num_blocks - 1:
            first = next((one for _, one in leaves(output) if isinstance(one, Tensor)), None)
            if first is not None and first.requires_grad:
                first.register_hook(at.refuse_gradient)
        return output

    def _take(self, args: Args, kwargs: Kwargs, received: tuple[Tensor, ...]) -> Call:
        """Return the arguments with what the stage before has sent."""
        own = further_tensors(args, kwargs, _input_of(args, kwargs, self.name))
        key, others = (self.index, len(own)), received[1:]
        carried = self.at.carries.get(key)
        if carried is None and self.at.rehearses:
            carried = absent(own)
        elif carried is None:
            carried = self.at.carries[key] = choose(own, others, self.name)
            if self.at.reply is not None and others:
                self.at.reply(carried)
        if len(others) == len(own):
            others = tuple(others[number] for number in carried)
        taken = (received[0], *others)
        if self.at.describes:
            self.at.taken = taken
        if carried or self.at.outputs:
            taken = join(taken)
            for number, value in zip(carried, taken[1:], strict=True):
                fill(own[number], value, self.name)
        return _replace_input(args, kwargs, taken[0])

    def _passed_on(self, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
        """Return what this block, the first one of the next stage, needs; all of its tensors if it has not replied."""
        hidden = _input_of(args, kwargs, self.name)
        own = further_tensors(args, kwargs, hidden)
        key = (self.index, len(own))
        self.at.awaits = None if key in self.at.carries else key
        carried = self.at.carries.get(key, range(len(own)))
        return (hidden.contiguous(), *(no_copy(own[number].contiguous()) for number in carried))


def _is_in_checkpoint() -> bool:
    """Return whether what is running was called by torch.utils.checkpoint; walks up the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_filename == checkpoint.__code__.co_filename:
            return True
        frame = frame.f_back
    return False


def _in_checkpoint(name: str) -> ModuleError:
    return ModuleError(
        f"Expected activation checkpointing by the strategy or within blocks with pipeline stages, got "
        f"torch.utils.checkpoint around {name}: when it runs the block again, what the stage before has sent and the "
        "block's random numbers are not there.",
        fix="pass activation_checkpointing=True, or classes of blocks, to MeshStrategy in its place (in place of "
        "gradient_checkpointing_enable() of transformers, too), or call checkpoint in the block's forward.",
    )


def _input_of(args: Args, kwargs: Kwargs, name: str) -> Tensor:
    """Return the hidden state in a block's arguments: the first tensor."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    for _, value in leaves((args[:1] or kwargs,)):
        if isinstance(value, Tensor):
            return value
    raise ModuleError(
        f"Expected a tensor as first argument of {name}, got {[type(one).__name__ for one in args]}.",
        fix="pass the hidden state first: stages exchange it.",
    )


def _absent(hidden: Tensor, *, is_first: bool) -> Tensor:
    """Return what a block of an earlier stage returns here: NaN, so that nothing is computed from its input."""
    # Later ones pass it on.
    return torch.full_like(hidden, torch.nan) if is_first and hidden.is_floating_point() else hidden


def _replace_input(args: Args, kwargs: Kwargs, received: Tensor) -> Call:
    """Return arguments with another hidden state; they have one."""
    if args and isinstance(args[0], Tensor):
        return (received, *args[1:]), kwargs
    todo = [received]

    def replace(value: Tree) -> Tree:
        return todo.pop() if todo and isinstance(value, Tensor) else value

    return (map_leaves(args[:1], replace) + args[1:], kwargs) if args else (args, map_leaves(kwargs, replace))


def _differentiated(what: str) -> ModuleError:
    return ModuleError(
        f"Expected a step that leaves gradients through the blocks of a pipeline to the backward pass, got {what}: it "
        "would end at this stage's first block, and miss what earlier stages compute from the same tensors.",
        fix="train with fsdp or tp, where gradients in a step (torch.autograd.grad, penalties, forces) are right; or "
        "compute them from what follows the blocks.",
    )


def gradient_ends_here() -> ModuleError:
    """Return the error of a gradient within a step that does not reach what it is computed for."""
    return _differentiated("a gradient within the step of a tensor that no block of this stage computes from")


def _called_twice(at: Position) -> ModuleError:
    return ModuleError(
        f"Expected a step to call {at.called} once, got a second call.",
        fix="join both inputs to one batch and call it once, or name a part that is called once in "
        "Pipeline(module=...); blocks must be called in the order in which they are registered.",
    )


def _unordered(name: str, at: Position) -> ModuleError:
    return ModuleError(
        f"{name}, with which stage {(at.stage or 0) + 1} begins, was called before block {at.first}, with which stage "
        f"{at.stage} begins.",
        fix="register the blocks in the order in which forward calls them.",
    )
