"""Gradients of gradients: units that stay gathered until the pass that differentiates a recorded one has ended.

torch frees the parameters of a unit, and reduces their gradients, when a backward pass has left the unit. The graph
that `create_graph=True` records reads these parameters once more, without the unit's hooks (torch 2.13 then reads freed
memory), and adds to their gradients in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from ...errors import ModuleError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

# Any in this file: torch's own states and groups of parameters, without public names.


class HeldUnits:
    """Keeps units gathered, and their gradients unreduced, once a backward pass has recorded a graph.

    Args:
        states: torch's state of each unit.
        groups: torch's groups of parameters of these units.

    Attributes:
        passed: The outermost states of the passes since, whose units are to be reduced.
    """

    def __init__(self, states: Iterable[Any], groups: Iterable[Any]) -> None:
        self._groups = list(groups)
        self._before: list[tuple[Any, ...]] = []
        self.passed: dict[int, Any] = {}
        for state in states:
            state.__class__ = _NotedState
            state.held = self

    @property
    def are_held(self) -> bool:
        """Whether a graph was recorded that no pass has ended since."""
        return bool(self._before)

    def hold(self) -> None:
        """Keep everything gathered from now on."""
        for group in () if self._before else self._groups:
            if group._use_post_forward_mesh:
                raise ModuleError(
                    "Expected reshard_after_forward as True or False for a gradient with create_graph=True, got a "
                    "number of processes.",
                    fix="pass reshard_after_forward=True.",
                )
        for group in () if self._before else self._groups:
            self._before.append((group, group.reshard_after_backward, group.post_forward_mesh_info, group.reduce_grads))
            group.reshard_after_backward = group.reduce_grads = False
            group.post_forward_mesh_info = None

    def release(self) -> None:
        """Let units be freed and reduced as before."""
        for group, reshards, mesh_info, reduces in self._before:
            group.reshard_after_backward, group.post_forward_mesh_info = reshards, mesh_info
            group.reduce_grads = reduces
        self._before.clear()
        self.passed.clear()


class _NotedState(FSDPState):
    """torch's state of a unit, which notes backward passes that record a graph."""

    held: HeldUnits

    def _pre_backward(self, grad: Tensor) -> Tensor:
        """Called where a backward pass enters the unit, with gradients enabled if it records a graph."""
        if torch.is_grad_enabled():
            self.held.hold()
        if self.held.are_held:
            root: Any = self._state_ctx.all_states[0]
            self.held.passed[id(root)] = root
        result: Tensor = super()._pre_backward(grad)
        return result


def end_backward(root: Any) -> None:
    """Reduce the gradients of all units, as the end of each backward pass does, and free their parameters.

    Args:
        root: torch's state of the outermost unit.
    """
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root._root_post_backward_final_callback()
