"""One process's copy of a module inside torch's DistributedDataParallel.

The wrapper's forward takes the function to run, so that any step of the module (not only `forward`) runs under the
hooks that average gradients, and no method of the user's module is swapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...deferred_compiler import defer_compiler, without_compiler
from ..distributed.changes import Changes

if TYPE_CHECKING:
    from ...protocols import AnyOutput, StepFunction, StepOutput
    from ..autograd import AutogradContext
    from .comm_hooks import CommHook

# Any in this file: what the user's steps take and return.

NOTHING = object()
"""Replaces an output that is None."""


class ReplicaCall:
    """Runs in the wrapped module instead of its forward.

    Args:
        step: The function.
        is_training: Whether it returns a loss, in one of the accepted forms: only the loss goes through torch's
            wrapper, and a missing one becomes a zero that is connected to every parameter.
    """

    __slots__ = ("is_training", "step")

    def __init__(self, step: StepFunction, *, is_training: bool) -> None:
        self.step = step
        self.is_training = is_training


class Steps(nn.Module):
    """The module that torch wraps.

    Attributes:
        output: What a step returned beside its loss tensor; None where that was all.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.parameters_to_train = tuple(one for one in module.parameters() if one.requires_grad)
        self.sparse = sparse_parameters(module)
        self.output: Any = None

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the `ReplicaCall` that is the first argument, or the module's own forward."""
        call = args[0] if args else None
        if call.__class__ is not ReplicaCall:
            return self.module(*args, **kwargs)
        output = call.step(*args[1:], **kwargs)
        if not call.is_training or output.__class__ is Tensor:
            return output
        self.output = NOTHING if output is None else output
        loss = loss_tensor(output)
        if loss is None:
            return self.zero() if output is None else None
        if loss is not output and not loss.requires_grad:
            # A sum of weight 0 without a graph: this rank must still take part.
            self.output = replace_loss(output, loss + self.zero().to(loss.dtype))
            return loss_tensor(self.output)
        return loss

    def zero(self) -> Tensor:
        """Return 0 with a graph in which every parameter gets a gradient of zeros, whatever its values are."""
        zero: Tensor = _Zero.apply(self.sparse, *self.parameters_to_train)  # type: ignore[no-untyped-call]
        return zero


class _Zero(torch.autograd.Function):
    """0, connected to parameters. Unlike `0 * p.sum()` it stays 0 where a parameter is infinite or NaN."""

    @staticmethod
    def forward(ctx: AutogradContext, sparse: frozenset[int], *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        ctx.sparse = sparse
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_zeros(one, is_sparse=id(one) in ctx.sparse) for one in ctx.parameters)


def _zeros(parameter: Tensor, *, is_sparse: bool) -> Tensor:
    if not is_sparse:
        return torch.zeros_like(parameter)
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def sparse_parameters(module: nn.Module) -> frozenset[int]:
    """Return the ids of parameters that get sparse gradients: torch reduces these in another way."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return frozenset(id(one.weight) for one in module.modules() if isinstance(one, kinds) and one.sparse)


class Replica(DistributedDataParallel):
    """This process's copy of a module.

    Args:
        module: The user's module, with at least one parameter that is trained.
        options: Keyword arguments of DistributedDataParallel.

    Attributes:
        original: The user's module.
        steps: What torch wraps; its forward takes a `ReplicaCall`.
        all_parameters: Those of the module when it was wrapped.
        trained: Which of them were trained then.
        changes: Notes what is added to the module since.
        sparse_parameters: Those with sparse gradients, which the strategy averages after each backward pass.
        is_trained_by_step: Whether its training_step is run, and not the module itself.
        comm_hook: The communication hook; None where gradients are averaged as they are.
    """

    original: nn.Module
    steps: Steps
    all_parameters: tuple[nn.Parameter, ...]
    trained: list[bool]
    changes: Changes
    is_trained_by_step: bool
    sparse_parameters: list[nn.Parameter]
    comm_hook: CommHook | None

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        steps = Steps(module)
        # Not device_ids, even on CUDA: with it torch walks through the batch at every step to move what was moved.
        # Buffers that torch cannot send; the strategy sends them when the module is set up. And parameters with sparse
        # gradients: torch (2.13) divides dense gradients that are ready after them twice.
        odd = [name for name, one in module.named_buffers() if is_odd(one)]
        sparse = [name for name, one in module.named_parameters() if id(one) in steps.sparse]
        if any(one.requires_grad and id(one) not in steps.sparse for one in module.parameters()):
            odd += sparse
        else:  # torch wraps nothing else, and is right
            sparse = []
        steps._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in odd]  # type: ignore[assignment]
        defer_compiler(getattr(DistributedDataParallel, "_inside_ddp_forward", None))
        with without_compiler():
            super().__init__(steps, **options)
        # Beside nn.Module's own registration: these are not further submodules or parameters.
        self.__dict__.update(
            original=module,
            steps=steps,
            all_parameters=tuple(module.parameters()),
            trained=[one.requires_grad for one in module.parameters()],
            changes=self.__dict__.get("changes") or Changes(module),
            sparse_parameters=[module.get_parameter(name) for name in sparse],
            is_trained_by_step=self.__dict__.get("is_trained_by_step", False),
            comm_hook=None,
            _names=[name for name, one in module.named_parameters() if one.requires_grad],
        )

    def outdated(self) -> dict[str, nn.Parameter]:
        """Return the parameters that were added to the module since it was wrapped, and those that are trained or
        frozen since, by name."""
        was = dict(zip(map(id, self.all_parameters), self.trained, strict=True))
        named = self.original.named_parameters()
        return {name: one for name, one in named if was.get(id(one)) is not one.requires_grad}

    @property
    def is_recording(self) -> bool:
        """Whether the next pass is the first of a static graph: torch (2.13) fails if that one does not reduce."""
        return self.static_graph and not getattr(self, "_static_graph_delay_allreduce_enqueued", True)

    def release(self) -> None:
        """Take torch's hooks off the parameters, before another wrapper is put around the module."""
        self.reducer._remove_autograd_hooks()

    def rebuild(self, options: Mapping[str, object]) -> None:
        """Wrap again, in place, after the set of trained parameters changed. On every rank: it communicates."""
        module = self.original
        self.release()
        # The ranks' weights are equal already, and rank 0's buffers come with the next step.
        Replica.__init__(self, module, {**options, "init_sync": False})

    def check_is_reduced(self) -> None:
        """Raise torch's RuntimeError if the backward pass ended while gradients were still missing."""
        self.reducer._check_reducer_finalized()

    def names_of(self, listed: str) -> list[str]:
        """Return names of parameters from torch's message, which lists names or positions."""
        items = [item for item in listed.replace(",", " ").split() if item]
        names: Sequence[str] = self.__dict__["_names"]
        if all(item.isdecimal() for item in items):
            return [names[int(item)] for item in items if int(item) < len(names)]
        return [item.removeprefix("module.") for item in items]


def is_odd(buffer: Tensor) -> bool:
    """Return whether a buffer is one that torch's wrapper cannot send: sparse, or with 8-bit floating-point numbers."""
    return buffer.layout is not torch.strided or (buffer.is_floating_point() and buffer.element_size() == 1)


def inside_a_replica() -> bool:
    """Return whether a step is running under torch's wrapper."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


def loss_tensor(output: StepOutput) -> Tensor | None:
    """Return the tensor that `backward` will be called on, from a training step's output; None where there is none."""
    if output is None or isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        if "loss_sum" in output and "weight" in output:
            return loss_tensor(output["loss_sum"])
        return loss_tensor(output["loss"]) if "loss" in output else None
    if dataclasses.is_dataclass(output) and hasattr(output, "sum") and hasattr(output, "weight"):
        return loss_tensor(output.sum)
    return None


def replace_loss(output: AnyOutput, loss: Tensor) -> object:
    """Return the output with `loss_tensor(output)` replaced by another tensor."""
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, Mapping):
        key = "loss_sum" if "loss_sum" in output and "weight" in output else "loss"
        return {**output, key: replace_loss(output[key], loss)}
    return dataclasses.replace(output, sum=loss)
