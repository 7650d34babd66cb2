"""`ShardedRoot`: the wrapper of a module whose parameters are sharded.

It is torch's root of sharding: its forward takes the function to run, so that any step of the user's module runs while
the parameters outside of all units are gathered. No method of the user's module is swapped, and `self(x)` within a step
is a plain call.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule

from ...errors import ModuleError
from ...protocols import StepOutput
from ..ddp.replica import NOTHING, ReplicaCall, loss_tensor, replace_loss
from ..distributed.changes import Changes
from ..distributed.shards import is_sharded
from ..tree import leaves
from .deferred_reduction import average, forget, holds_gradient
from .second_derivatives import HeldUnits, end_backward
from .unused import UnusedParameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.utils.hooks import RemovableHandle

    from ..mesh.tensor import TensorPlan

logger = logging.getLogger(__name__)

# Any in this file: what the user's steps take and return.

STORAGE_OF = Tensor.untyped_storage
_LOCAL_OF: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")

ROOT = "_loopwright_root"
"""Attribute of the user's module that holds its root, beside its submodules: a later run continues with it."""

# Of torch's FSDPParamGroup.
_COMMUNICATES = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")


@runtime_checkable
class TakesPart(Protocol):
    """A module whose forward pass communicates, so that a rank without data must take part in other ranks' passes."""

    def compute_without_rows(self) -> None:
        """Communicate as a forward pass does. The parameters are gathered."""


class Mark:
    """A flag for hooks on tensors: one that held the module would keep it alive, in a cycle that Python cannot see."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False

    def set(self, _: Tensor) -> None:
        """Set it."""
        self.is_set = True


class ShardedRoot(nn.Module):
    """The module that torch shards last.

    Args:
        module: The user's module, whose units are sharded already.
        mesh: The processes.
        is_by_parts: See below.
        group: The processes over which gradients are averaged; None: all.

    Attributes:
        changes: Notes what is added to the module since it was sharded.
        shards: The sharded parameters.
        storages: Their storages when the module was sharded. Another one comes in by `parameter.data = ...`, which
            leaves the local shards as they are, or by `module.to(...)`, which does not.
        replicated: Parameters that every rank has in full, because they cannot be sharded.
        unused: Knows which sharded parameters no loss has reached; None where nothing is sharded.
        held: Keeps units gathered for gradients of gradients; None where nothing is sharded.
        output: What a training step returned beside its loss tensor; None where that was all.
        tensor_plan: How layers are split along the axis tp of a mesh; None: they are not.
        layout: Sizes of the axes of a mesh along which ranks have other layers, or parts of them.
        is_synchronized: Whether the next backward pass averages gradients.
        unfilled: Parameters for which values are expected from a checkpoint; empty after the first step.
        has_deferred: Whether there may be gradients that no backward pass has averaged yet.
        reached: Set when a backward pass went through this module, until the gradients of `replicated` are averaged;
            never where there are none, or `is_by_parts`.
        running: Set within the forward of this object.
        is_by_parts: Whether the children of the user's module are run separately (manual optimization): each of them is
            sharded by itself, and this object does nothing.
        is_trained_by_step: Whether the user's training_step is run in the forward of this object.
    """

    replicated: tuple[nn.Parameter, ...] = ()
    unused: UnusedParameters | None = None
    held: HeldUnits | None = None
    tensor_plan: TensorPlan | None = None
    layout: Mapping[str, int] = {}

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, *, is_by_parts: bool, group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.group = group
        self.module = module
        self.changes = Changes(module)
        self.shards: list[Tensor] = []
        self.storages: list[torch.UntypedStorage] = []
        self._addresses: list[int] = []
        self._handles: list[RemovableHandle] = []
        self.is_by_parts = is_by_parts
        self.is_trained_by_step = False
        self.is_synchronized = True
        self.has_deferred = False
        self.reached, self.running = Mark(), Mark()
        self.output: Any = None
        # By name: parameters that were built with empty_init=True, and what their versions were then.
        self.unfilled: dict[str, tuple[nn.Parameter, int]] = {}
        # Order in which the units were gathered in the last evaluation step; None before the first.
        self.evaluated: list[FSDPModule] | None = None

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the `ReplicaCall` that is the first argument, or the module's own forward."""
        call: Any = args[0] if args else None
        is_step = call.__class__ is ReplicaCall
        if is_step and isinstance(self.module, FSDPModule):  # sharded by the user, and a step is not its forward
            self.module.unshard()
        running, self.running.is_set = self.running.is_set, True
        if not (is_step or running or torch.is_grad_enabled()):  # no backward pass will free what is gathered
            self._handles.append(self.register_forward_hook(_reshard_after))
        try:
            output = call.step(*args[1:], **kwargs) if is_step else self.module(*args, **kwargs)
        finally:
            self.running.is_set = running
        if self.replicated and torch.is_grad_enabled():
            self._note_backward_from(output)
        if not is_step or not call.is_training or output.__class__ is Tensor:
            return output
        # torch looks for tensors in the result, to find the start of the backward pass; it ignores our dataclasses,
        # and must not cast what the step returned beside its loss.
        self.output = NOTHING if output is None else output
        return loss_tensor(output)

    def gather_outside_of_steps(self) -> None:
        """Let the user's module, and its layers outside of all units, be called in hooks and callbacks, too.

        What this object's forward does around a step is done around the outermost such call.
        """
        state: Any = self._get_fsdp_state()  # type: ignore[operator]  # torch's own, without a public name
        state._lazy_init()  # else a unit that is called first takes itself for the root
        owners = {one._module_info.module: None for group in groups_of(self) for one in group.fsdp_params}
        reference, running = weakref.ref(self), self.running

        def begin(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            root = None if running.is_set else reference()
            if root is None:
                return None
            running.is_set = True
            handle = module.register_forward_hook(end, always_call=True)
            root._handles.append(handle)
            return state._pre_forward(root, args, kwargs)

        def end(module: nn.Module, args: tuple[object, ...], output: StepOutput) -> object:
            root = reference()
            assert root is not None
            root._handles.pop().remove()
            running.is_set = False
            output = state._post_forward(root, args, output)
            if not torch.is_grad_enabled():
                reshard(root)
            return output

        number: int | None = None
        for owner in {self.module: None, **owners}:
            if isinstance(owner, FSDPModule):
                continue
            handle = owner.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            if number is None:
                number = handle.id
                continue
            # The same number in all layers: torch 2.9 compiles each block again where the numbers differ.
            handle.remove()
            owner._forward_pre_hooks[number] = begin
            owner._forward_pre_hooks.move_to_end(number, last=False)
            owner._forward_pre_hooks_with_kwargs[number] = True

    def replicate(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember parameters that every rank has in full, and note each backward pass that comes to them."""
        added = tuple(parameters)
        self.replicated += added
        for one in added:
            if one.requires_grad and not self.is_by_parts:
                one.register_post_accumulate_grad_hook(self.reached.set)

    def settle(self) -> None:
        """Take the module as it is now: its parameters are sharded, or replicated, or ignored."""
        self.changes.settle(self.module)
        self.shards = self.sharded_parameters()
        self.storages = [*map(STORAGE_OF, self.shards)]
        self._addresses = [shard.data_ptr() for shard in map(_LOCAL_OF, self.shards)]

    def check_shards(self, rank: int) -> None:
        """Refuse changes of sharded parameters that torch would overwrite or not read. Does not communicate.

        Raises:
            ModuleError: Names the parameters.
        """
        owners = set(self.module.modules())
        changed, lost = [], []
        known = zip(self.storages, self._addresses, strict=True)
        was = dict(zip(map(id, self.shards), known, strict=True))
        for one in self._members(None):
            storage, address = was.get(id(one.sharded_param), (None, None))
            place, name = one._module_info, str(one._param_fqn).removeprefix("module.")
            if place.module not in owners:
                continue  # its layer was taken out
            if place.module._parameters.get(place.param_name) is not one.sharded_param:
                changed.append(name)
            elif storage is not None and STORAGE_OF(one.sharded_param) is not storage:
                part = _LOCAL_OF(one.sharded_param)
                if part.data_ptr() == address and part.numel():
                    lost.append(name)
                else:
                    one.reset_sharded_param()
        if changed or lost:
            raise ModuleError(
                f"Expected the sharded parameters as they were set up on rank {rank}, got "
                + " and ".join(
                    f"{what} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
                    for what, names in (("other parameters in place of", changed), ("other data in", lost))
                    if names
                )
                + ": what is assigned would be lost.",
                fix="to change values, load full tensors with module.load_state_dict({name: value}, strict=False), or "
                "change the parameter in place with torch.no_grad(); to replace a parameter, replace its layer.",
            )

    def watch_backward(self) -> None:
        """Note, from now on, which sharded parameters a backward pass does not reach, and whether it is recorded."""
        units = units_of(self)
        groups = [group for unit in units for group in groups_of(unit) if group.fsdp_params]
        if groups:
            self.unused = UnusedParameters([group.fsdp_params for group in groups], self.group)
            self.held = HeldUnits([unit._get_fsdp_state() for unit in units], groups)

    def check_held(self) -> None:
        """Free units that a recorded pass has kept gathered, before a step changes their parameters.

        Raises:
            ModuleError: Gradients wait in them, which no backward pass of a strategy has reduced.
        """
        if any(holds_gradient(one) for one in self._members(None)):
            raise ModuleError(
                "Expected Loopwright's backward pass through gradients that were computed with create_graph=True, got "
                "loss.backward(): they are not reduced.",
                fix="call fabric.backward(loss), or self.manual_backward(loss) in a module.",
            )
        reshard(self)

    def end_held(self) -> None:
        """Reduce the gradients of a pass that went through recorded ones. On every rank: it communicates."""
        if self.held is None or not self.held.are_held:
            return
        passed = list(self.held.passed.values())
        self.held.release()
        for unit in units_of(self):
            unit.set_requires_gradient_sync(self.is_synchronized, recurse=False)
        for state in passed:
            end_backward(state)

    def _note_backward_from(self, output: StepOutput) -> None:
        """Note a backward pass that begins at this output, also on a rank where it reaches no replicated parameter."""
        results = [one for _, one in leaves(output) if isinstance(one, Tensor) and one.requires_grad]
        if results and not self.is_by_parts:
            register_multi_grad_hook(results, self.reached.set, mode="any")

    def expect_values(self, names: Iterable[str]) -> None:
        """Remember parameters without values, for which a checkpoint is expected before the first step."""
        parameters = dict(self.module.named_parameters())
        self.unfilled = {name: (parameters[name], _version(parameters[name])) for name in names}

    def check_values(self) -> None:
        """Warn of parameters that have got no values since; what is done through `.data` leaves no trace."""
        left = [name for name, (one, version) in self.unfilled.items() if _version(one) == version]
        self.unfilled = {}
        if left:
            logger.warning(
                "%s runs with parameters that have no values: %s%s. It was built with empty_init=True, which leaves "
                "them to a checkpoint, and none was loaded. To initialize them, leave empty_init out",
                type(self.module).__name__,
                ", ".join(left[:5]),
                " ..." if len(left) > 5 else "",
            )

    def take_output(self, loss: Tensor | None) -> object:
        """Return the step's output with the loss that came through torch's hooks."""
        output, self.output = self.output, None
        if output is None:  # a plain tensor came
            return loss
        if output is NOTHING:
            return None
        return output if loss is None or loss_tensor(output) is loss else replace_loss(output, loss)

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Return a context in which backward passes defer the reduction and add to full gradients on this rank."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, enabled: bool) -> None:
        self.is_synchronized = enabled
        self.has_deferred = self.has_deferred or not enabled
        for unit in units_of(self):
            unit.set_requires_gradient_sync(enabled, recurse=False)

    def waits_for_average(self, parameters: Iterable[Tensor] | None = None) -> bool:
        """Return whether some of these parameters, None: of all, have gradients on this rank that were not averaged."""
        return self.has_deferred and any(holds_gradient(one) for one in self._members(parameters))

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of these parameters whose reduction was deferred. On every rank: it communicates."""
        if self.has_deferred:
            average(self._members(parameters), self.group)
            self.has_deferred = self.waits_for_average()

    def discard_gradients(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Discard gradients of these parameters, None: of all, that were not averaged yet; end a broken-off pass."""
        forget(self._members(parameters))
        self.has_deferred = parameters is not None and self.waits_for_average()
        reshard(self)

    def sharded_parameters(self) -> list[Tensor]:
        """Return the parameters that units gather, in the order of the units."""
        return [one.sharded_param for one in self._members(None)]

    def named_shards(self) -> list[tuple[str, Tensor]]:
        """Return the sharded parameters with their names; those that units gather are not the module's in a step."""
        shards = {str(one._param_fqn).removeprefix("module."): one.sharded_param for one in self._members(None)}
        others = ((name, one) for name, one in self.module.named_parameters() if name not in shards)
        return [*shards.items(), *others]

    def _members(self, parameters: Iterable[Tensor] | None) -> list[FSDPParam]:
        """Return torch's objects for these sharded parameters, None: for all, in the order of the units."""
        members = [one for unit in units_of(self) for group in groups_of(unit) for one in group.fsdp_params]
        if parameters is None:
            return members
        wanted = {id(parameter) for parameter in parameters}
        return [one for one in members if id(one.sharded_param) in wanted]

    def communication_calls(self) -> list[tuple[object, str]]:
        """Return the methods in which a step gathers parameters, averages gradients, or waits for either.

        The timeline measures them in some steps: each as the object that looks it up, and its name. On a GPU, where
        these run beside the computation, what their place in its stream takes is the time that it waits for them.
        """
        groups = [group for unit in units_of(self) for group in groups_of(unit)]
        return [(group, name) for group in groups for name in _COMMUNICATES if hasattr(group, name)]

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


def _version(parameter: Tensor) -> int:
    # A sharded parameter is changed through the DTensor, or through its local shard.
    return parameter._version + (parameter._local_tensor._version if is_sharded(parameter) else 0)


def _reshard_after(root: ShardedRoot, args: object, output: StepOutput) -> None:
    root._handles.pop().remove()
    reshard(root)


def root_of(module: nn.Module) -> ShardedRoot | None:
    """Return the root around a sharded module, from the module or from itself; None without one."""
    return module if isinstance(module, ShardedRoot) else module.__dict__.get(ROOT)


def units_of(module: nn.Module) -> list[Any]:
    """Return the modules below this one, and itself, that are gathered as separate units; in order."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def run_empty(root: ShardedRoot) -> None:
    """Take part in the gathering of another rank's evaluation step."""
    with torch.no_grad():
        for unit in root.evaluated if root.evaluated is not None else units_of(root):
            unit.unshard()
            if isinstance(unit, TakesPart):
                unit.compute_without_rows()
            unit.reshard()


def reshard(root: ShardedRoot) -> None:
    """Free full parameters that a pass without a backward pass has left, and forget its order.

    torch (2.9 to 2.13) notes in which order units are left and gathers them ahead in the reverse one, until a backward
    pass has ended. What an evaluation has noted would be gathered ahead in the next step too: only on those ranks that
    had batches to evaluate, so that the others would wait forever.
    """
    if root.held is not None:
        root.held.release()
    for unit in units_of(root):
        unit.reshard()
        for group in groups_of(unit):
            group._post_forward_indices.clear()
            getattr(group.comm_ctx, "post_forward_order", []).clear()  # there is none before the first pass


def groups_of(unit: Any) -> list[Any]:  # Any: torch's own, without a public name
    """Return a unit's groups of parameters that are gathered at once; the root may have none."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and older have one group
    return list(groups) if groups is not None else [one for one in [state._fsdp_param_group] if one is not None]
