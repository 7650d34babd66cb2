"""One call of a module, run by itself with given parameters: what it returns, and gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....protocols import AnyOutput, Tree
from ...tree import leaves, map_leaves
from .apply import is_of_plan
from .layouts import gather, local_of, split
from .parameters import replace_parameter
from .style import map_first, map_output

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Any in this file: arguments and results of the user's modules.

Values = dict[tuple[nn.Module, str], Tensor]
"""Parameters by their owners and names."""


@dataclass(frozen=True)
class FirstCall:
    """The arguments with which a module was called first, with gradients where it had a call with them.

    Attributes:
        unread: Numbers of outputs that nothing has read, such as weights of attention.
    """

    args: Any
    kwargs: Any
    has_gradients: bool = True
    unread: set[int] = field(default_factory=set)


def run_alone(
    module: nn.Module,
    call: FirstCall,
    values: Values,
    *,
    is_hooked: bool,
    mesh: DeviceMesh | None = None,
    takes: bool = False,
    gives: bool = False,
) -> dict[str, Tensor | None]:
    """Return outputs and gradients of one call, by what they are. With a mesh on every rank of it.

    Args:
        module: Any; it is left as it was.
        call: The arguments; those that require gradients get some.
        values: The parameters.
        is_hooked: Whether the hooks of a plan run; no others do.
        mesh: The ranks of the plan; None: this process alone.
        takes: Whether the module takes this rank's part of the sequence.
        gives: Whether it returns one.
    """
    names = {id(one): name for name, one in module.named_modules()}
    inputs: dict[str, Tensor] = {}

    def leaf(value: Tree) -> Tree:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        inputs[f"the gradient of input {len(inputs)}"] = own = value.detach().requires_grad_()
        return own

    with ExitStack() as stack:
        stack.enter_context(_alone(module, values, is_hooked=is_hooked))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(torch.enable_grad())
        args, kwargs = map_leaves(call.args, leaf), map_leaves(call.kwargs, leaf)
        if takes and mesh is not None:
            args, kwargs = map_first(args, kwargs, lambda x: split(x, mesh, 1))
        output = module(*args, **kwargs)
        if mesh is not None:
            output = map_leaves(output, lambda one: local_of(one, mesh))
            if gives:
                output = map_output(output, lambda x: gather(x, mesh, 1))
        found = {f"output {at}": one for at, one in enumerate(floats(output)) if at not in call.unread}
        wanted: dict[str, Tensor] = dict(inputs)
        for (owner, short), value in values.items():
            if value.requires_grad:
                wanted[f"the gradient of {f'{names[id(owner)]}.{short}'.lstrip('.')}"] = value
        total = sum(((one * _weights(one)).sum() for one in found.values() if one.requires_grad), start=torch.zeros(()))
        gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True) if total.requires_grad else ()
    result: dict[str, Tensor | None] = {key: one.detach() for key, one in found.items()}
    for key, gradient in zip(wanted, gradients, strict=False):
        result[key] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return result


def _weights(output: Tensor) -> Tensor:
    """Return numbers that make each element of an output count differently, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


@contextmanager
def _alone(module: nn.Module, values: Values, *, is_hooked: bool) -> Iterator[None]:
    """Let a module run with these parameters, in evaluation mode, with no hooks but those of the plan, if at all."""
    kept = [(one, one.training, one._forward_hooks, one._forward_pre_hooks) for one in module.modules()]
    parameters = {(one, name): one._parameters[name] for one, name in values}
    try:
        for one, _, after, before in kept:
            one.training = False
            one._forward_hooks = _of_plan(one, after) if is_hooked else OrderedDict()
            one._forward_pre_hooks = _of_plan(one, before) if is_hooked else OrderedDict()
        for (owner, name), value in values.items():
            parameter = parameters[owner, name]
            replace_parameter(owner, name, value.requires_grad_(parameter is not None and parameter.requires_grad))
        yield
    finally:
        for one, was_training, after, before in kept:
            one.training, one._forward_hooks, one._forward_pre_hooks = was_training, after, before
        for (owner, name), old in parameters.items():
            replace_parameter(owner, name, old)


def _of_plan(module: nn.Module, hooks: Any) -> Any:
    return OrderedDict((key, hook) for key, hook in hooks.items() if is_of_plan(module, key, hook))


def floats(output: AnyOutput) -> list[Tensor]:
    """Return the floating-point tensors in an output; a tensor of any dtype where it is the output."""
    if isinstance(output, Tensor):
        return [output]
    return [one for _, one in leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
