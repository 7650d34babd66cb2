"""What stands around a module whose parameters are sharded. Made by FSDPStrategy.

It is torch's root of sharding: its forward takes the function to run, so that any step of the user's module runs while
the parameters outside of all units are whole. No method of the user's module is swapped, and `self(x)` within a step
is a plain call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .replica import NOTHING, Call, loss_tensor, replace_loss

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ROOT", "ShardedRoot", "groups_of", "reshard", "root_of", "run_empty", "units_of"]

# Any in this file: what the user's steps take and return.

ROOT = "_loopwright_root"
"""Under this name the user's module knows its root, beside its submodules: a later run goes on with it."""


class ShardedRoot(nn.Module):
    """The module that torch shards last.

    Args:
        module: The user's module, whose units are sharded already.
        mesh: The processes.

    Attributes:
        replicated: Parameters that are whole on every rank, because they cannot be sharded.
        output: What a training step returned beside its loss tensor; None where that was all.
        synchronises: Whether the next backward pass averages gradients.
        has_unreduced: Whether there may be gradients that no backward pass has averaged yet.
        is_by_parts: Whether the user's module is not run as a whole (manual optimization): each of its children is
            sharded for itself, and this object does nothing.
    """

    replicated: tuple[nn.Parameter, ...] = ()

    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, is_by_parts: bool) -> None:
        super().__init__()
        self.mesh = mesh
        self.module = module
        self.is_by_parts = is_by_parts
        self.synchronises = True
        self.has_unreduced = False
        self.output: Any = None
        # Order in which the units were gathered in the last evaluation step; None before the first.
        self.evaluated: list[FSDPModule] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the `Call` that is the first argument, or the module's own forward."""
        call = args[0] if args else None
        if call.__class__ is not Call:
            return self.module(*args, **kwargs)
        if isinstance(self.module, FSDPModule):  # sharded by the user, and a step is not its forward
            self.module.unshard()
        output = call.step(*args[1:], **kwargs)
        if not call.is_training or output.__class__ is Tensor:
            return output
        # torch looks for tensors in what is returned, to know when the backward pass begins; it knows no dataclass of
        # ours, and must not cast what the step returned beside its loss.
        self.output = NOTHING if output is None else output
        return loss_tensor(output)

    def take_output(self, loss: Tensor | None) -> Any:
        """Return the step's output with the loss that came through torch's hooks."""
        output, self.output = self.output, None
        if output is None:  # a plain tensor came
            return loss
        if output is NOTHING:
            return None
        return output if loss is None or loss_tensor(output) is loss else replace_loss(output, loss)

    def set_sync(self, enabled: bool) -> None:
        """Let backward passes average gradients, or add to whole ones on this rank only."""
        self.synchronises = enabled
        self.has_unreduced = self.has_unreduced or not enabled
        for unit in units_of(self):
            unit.set_requires_gradient_sync(enabled, recurse=False)

    def forget_gradients(self) -> None:
        """Drop gradients that were not averaged yet, and what a broken-off pass has left."""
        self.has_unreduced = False
        for unit in units_of(self):
            for group in groups_of(unit):
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    whole = getattr(parameter, "_unsharded_param", None)
                    if whole is not None:
                        whole.grad = None
            unit.reshard()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note in which order the units are gathered."""
        order: list[FSDPModule] = []
        handles = [
            unit.register_forward_pre_hook(lambda unit, _: order.append(unit), prepend=True) for unit in units_of(self)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.evaluated = order


def root_of(module: nn.Module) -> ShardedRoot | None:
    """Return what stands around a module that is sharded, from the module or from itself; None where nothing does."""
    return module if isinstance(module, ShardedRoot) else module.__dict__.get(ROOT)


def units_of(module: nn.Module) -> list[Any]:
    """Return the modules below this one, and itself, that are gathered as units of their own; in order."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def run_empty(root: ShardedRoot) -> None:
    """Take part in the gathering of another rank's evaluation step."""
    with torch.no_grad():
        for unit in root.evaluated if root.evaluated is not None else units_of(root):
            unit.unshard()
            unit.reshard()


def reshard(root: ShardedRoot) -> None:
    """Give back whole parameters that a pass without a backward pass has left."""
    for unit in units_of(root):
        unit.reshard()


def groups_of(unit: Any) -> list[Any]:  # Any: torch's own, without a public name
    """Return a unit's groups of parameters that are gathered together; the root may have none."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and older have one group
    return list(groups) if groups is not None else [one for one in [state._fsdp_param_group] if one is not None]
