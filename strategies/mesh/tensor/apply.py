"""Application of a tensor plan to modules: parameters become DTensors, and hooks run each module in its style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from ....errors import ModuleError
from ....protocols import AnyOutput, Args, Call, Kwargs
from ...construction.activation_checkpointing import replay_in
from .layouts import once, unviewed
from .loss import PlainLoss, losses_in_parts
from .parameters import PARTIAL, distribute, put_back, swap_in
from .sequence import OnSequence
from .style import Around, Style, map_first, map_output
from .styles import Replicated

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .plan import TensorPlan

# Any in this file: arguments and results of the user's modules, and parameters that are DTensors.

_APPLIED = "_loopwright_tensor_mesh"
_STYLED = "_loopwright_styled"
_OWNERS = "_loopwright_owners"
_STACK = "_loopwright_calls"
_LOCALIZED = "_loopwright_localized"
_OF_TORCH = "_loopwright_hooks_of_torch"


def apply(plan: TensorPlan, modules: Iterable[nn.Module], root: nn.Module, mesh: DeviceMesh) -> None:
    """Distribute the parameters of exactly these modules, in place, and install their hooks.

    Does not communicate: all ranks have the same values.

    Args:
        plan: Of the root.
        modules: Of the root, with values; none of them sharded over other axes yet. Children before parents, or in one
            call.
        root: The module that the plan was made for.
        mesh: The axis "tp".
    """
    names = {id(one): name for name, one in root.named_modules()}
    plan.mesh = mesh
    new = [one for one in modules if _APPLIED not in one.__dict__ and id(one) in names]
    for one in new:
        one.__dict__[_APPLIED] = True
        _style(plan, one, names[id(one)], mesh)
    first: dict[str, nn.Parameter] = {}
    for one in new:
        _distribute(plan, one, names[id(one)], root, mesh, first)
        for count, (_, local) in plan.counts.get(names[id(one)], {}).items():
            setattr(one, count, local)
    for one in new:
        if not isinstance(one, nn.ModuleList | nn.ModuleDict) and _owners(one):
            localized = _Localized(mesh)
            one.__dict__[_STACK] = []
            root.__dict__.pop(_LOCALIZED, None)  # others may be styled later
            one.register_forward_pre_hook(localized.before)
            one.register_forward_hook(localized.finally_, always_call=True)
            replay_in(one, localized.replay)
        one.__dict__.pop(_OWNERS, None)  # others may be styled later
        if names[id(one)] in plan.sequence:
            on_sequence = OnSequence(plan.sequence[names[id(one)]], mesh)
            one.register_forward_pre_hook(on_sequence.before, with_kwargs=True)
            one.register_forward_hook(on_sequence.after)


def _style(plan: TensorPlan, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    if name in plan.partial:
        module.__dict__[PARTIAL] = frozenset(module._parameters)
    style = plan.styles.get(name)
    if style is None:
        return
    if isinstance(style, Replicated):
        if style.is_partial:
            for one in module.modules():
                one.__dict__[PARTIAL] = frozenset(one._parameters)
        return
    if isinstance(style, Style):
        module.__dict__[_STYLED] = True
        style.install(module, mesh)
        return
    _apply_of_torch(style, module, mesh)


def _apply_of_torch(style: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    """Apply a style of torch, which computes with DTensors; keep buffers plain, and attributes of parameters."""
    buffers = [(one, dict(one._buffers)) for one in module.modules()]
    before = dict(module.named_parameters(remove_duplicate=False))
    style.src_data_rank = None
    old = {*module._forward_hooks, *module._forward_pre_hooks}
    style._apply(module, mesh)
    differentiate_once(module)
    module.__dict__[_OF_TORCH] = {*module._forward_hooks, *module._forward_pre_hooks} - old
    for one, kept in buffers:
        one._buffers.update(kept)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter is not before[name]:
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.__dict__[_STYLED] = True
            parameter.requires_grad_(before[name].requires_grad)
            parameter.__dict__.update(before[name].__dict__)


def differentiate_once(module: nn.Module) -> None:
    """Refuse second derivatives through a module that torch computes with DTensors."""
    module.register_forward_pre_hook(_enter_once, prepend=True, with_kwargs=True)
    module.register_forward_hook(_leave_once)


def _enter_once(module: nn.Module, args: Args, kwargs: Kwargs) -> Call:
    return map_first(args, kwargs, once)


def _leave_once(module: nn.Module, args: Args, output: AnyOutput) -> AnyOutput:
    return map_output(output, lambda x: unviewed(once(x), module))


def _distribute(
    plan: TensorPlan, module: nn.Module, name: str, root: nn.Module, mesh: DeviceMesh, first: dict[str, nn.Parameter]
) -> None:
    for short, parameter in module._parameters.items():
        if parameter is None:
            continue
        full = f"{name}.{short}".lstrip(".")
        key = plan.tied.first.get(full, full)
        if key not in first or isinstance(parameter, DTensor):
            first[key] = distribute(parameter, mesh, plan.placement(root, full))
        module._parameters[short] = first[key]


def finish(plan: TensorPlan, root: nn.Module) -> None:
    """Tie tied parameters again, when all modules of the root are applied.

    Raises:
        ModuleError: A parameter was not applied; names it.
    """
    parameters: dict[str, Any] = dict(root.named_parameters(remove_duplicate=False))
    plain = [name for name, one in parameters.items() if not isinstance(one, DTensor)]
    if plain:
        raise ModuleError(
            f"{type(root).__name__} has got parameters that tensor parallelism does not know: {', '.join(plain[:5])}"
            f"{' ...' if len(plain) > 5 else ''}.",
            fix="build all of the module in configure_model or __init__, before it is set up.",
        )
    for group in plan.tied.groups():
        there = [name for name in group if name in parameters]  # a pipeline stage has some
        for name in there[1:]:
            owner, _, short = name.rpartition(".")
            if parameters[name].placements != parameters[there[0]].placements:
                raise ModuleError(
                    f"the tied parameters {there[0]} and {name} are split differently: "
                    f"{parameters[there[0]].placements} and {parameters[name].placements}.",
                    fix="choose styles for both modules that split the weight along one dimension.",
                )
            root.get_submodule(owner)._parameters[short] = parameters[there[0]]


def _owners(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the parameters at and below a module that its code reads as plain tensors. Copied with the module."""
    owners: list[tuple[nn.Module, str]] | None = module.__dict__.get(_OWNERS)
    if owners is None:
        below = [one for one in module.modules() if _STYLED not in one.__dict__]
        owners = [(one, name) for one in below for name in one._parameters]
        module.__dict__[_OWNERS] = owners
    return owners


class _Localized:
    """The hooks of a module whose code, or that of modules below it, reads parameters that all ranks have."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, object]) -> _Localized:
        return self  # process groups cannot be copied

    def before(self, module: nn.Module, args: Args) -> None:
        module.__dict__[_STACK].append(swap_in(_owners(module), self.mesh))

    def finally_(self, module: nn.Module, args: Args, output: AnyOutput) -> None:
        stack = module.__dict__[_STACK]
        if stack:
            put_back(stack.pop())

    def replay(self, module: nn.Module) -> Callable[[], AbstractContextManager[None]] | None:
        """Return what lets the module's code run once more, within a call of the module."""
        return (lambda: _swapped_in(_owners(module), self.mesh)) if module.__dict__[_STACK] else None


@contextmanager
def _swapped_in(owners: list[tuple[nn.Module, str]], mesh: DeviceMesh) -> Iterator[None]:
    """Return a context in which code reads these parameters as plain tensors."""
    swapped = swap_in(owners, mesh)
    try:
        yield
    finally:
        put_back(swapped)


def is_of_plan(module: nn.Module, key: int, hook: object) -> bool:
    """Return whether a plan installed this hook of a module, which is registered under `key`."""
    return isinstance(getattr(hook, "__self__", None), Around | OnSequence | _Localized) or key in module.__dict__.get(
        _OF_TORCH, ()
    )


@contextmanager
def running(plan: TensorPlan, root: nn.Module) -> Iterator[None]:
    """Return a context in which a method of the root, but its forward, reads its parameters as plain tensors.

    Not those that modules use for parts of the activations: the gradient of each rank's use there is added, and that of
    a penalty, which each rank computes for all of it, is not to be.
    """
    assert plan.mesh is not None, "the plan is applied first"
    owners = [(one, name) for one, name in _owners(root) if name not in one.__dict__.get(PARTIAL, ())]
    with ExitStack() as around:
        around.enter_context(_swapped_in(owners, plan.mesh))
        if plan.loss_parallel:
            around.enter_context(losses_in_parts())
            around.enter_context(PlainLoss(plan.mesh))
        try:
            yield
        except BaseException as error:
            _leave_all(root)
            if isinstance(error, RuntimeError) and "functorch" in str(error):
                error.add_note(
                    "Layers that are split over tp do not run in transforms of torch.func: take "
                    "torch.autograd.grad(..., create_graph=True) in their place, or train with fsdp."
                )
            raise


def _leave_all(root: nn.Module) -> None:
    """End the calls that an exception has left: torch calls no hooks for one that is not an `Exception`.

    A stage of a pipeline leaves each of its steps so.
    """
    localized: list[nn.Module] | None = root.__dict__.get(_LOCALIZED)
    if localized is None:
        localized = root.__dict__[_LOCALIZED] = [one for one in root.modules() if _STACK in one.__dict__]
    for one in localized:
        stack = one.__dict__[_STACK]
        while stack:
            put_back(stack.pop())
