"""Comparison of a split module with the full one: outputs and gradients of each group of a plan, on a real batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from ....errors import ModuleError
from ....protocols import AnyFunction, AnyOutput, Args, Kwargs, Tree
from ...distributed.collectives import gather_objects
from ...distributed.shards import full_tensor
from ...tree import leaves, map_leaves
from ..pipeline.attributes import unchanged
from ..pipeline.remote_tensors import READABLE
from ..verify import difference, dtypes_of, unlike_over_ranks
from .alone import FirstCall, Values, floats, run_alone
from .layouts import gather
from .parameters import distribute
from .plan import shown
from .style import map_first

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from .plan import TensorPlan

# Any in this file: arguments and results of the user's modules.

logger = logging.getLogger(__name__)

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, as a share of the largest value: sums over ranks are rounded in another order, and norms of
transformers in float32, whatever the parameters' dtype."""


@contextmanager
def recording(plan: TensorPlan, root: nn.Module) -> Iterator[dict[str, FirstCall]]:
    """Return a context that keeps the arguments of the first call of each group of a plan, by name, for `verify_plan`.

    An error in it gets the plan as a note: a shape that does not fit may come from there.
    """
    calls: dict[str, FirstCall] = {}
    modules = dict(root.named_modules())
    handles = []
    reads = _Reads()
    for name in plan.groups:
        if name in modules:

            def keep(module: nn.Module, args: Args, kwargs: Kwargs, name: str = name) -> None:
                has_gradients = torch.is_grad_enabled()
                if name not in calls or (has_gradients and not calls[name].has_gradients):
                    calls[name] = FirstCall(map_leaves(args, _copied), map_leaves(kwargs, _copied), has_gradients)

            def watch(module: nn.Module, args: Args, output: AnyOutput, name: str = name) -> None:
                reads.watch(name, floats(output)[1:])

            handles.append(modules[name].register_forward_pre_hook(keep, prepend=True, with_kwargs=True))
            handles.append(modules[name].register_forward_hook(watch))
    try:
        with reads:
            yield calls
        for name, unread in reads.unread().items():
            calls[name].unread.update(unread)
    except RuntimeError as error:
        error.add_note(f"The module runs with the {plan}")
        raise
    finally:
        for handle in handles:
            handle.remove()


class _Reads(TorchFunctionMode):
    """Notes which outputs of modules, but the first of each, functions of torch take.

    The weights that attention returns with its result belong to this rank's heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[str, list[list[Tensor]]] = {}  # by module: the further outputs of each call
        self._numbers: dict[int, tuple[str, int]] = {}  # by the id of a tensor that is kept above
        self._read: set[tuple[str, int]] = set()

    def watch(self, name: str, outputs: list[Tensor]) -> None:
        self._watched.setdefault(name, []).append(outputs)
        self._numbers.update({id(one): (name, at) for at, one in enumerate(outputs, 1)})

    def unread(self) -> dict[str, set[int]]:
        """Return the numbers of outputs that nothing has read in any call of a module, by its name."""
        return {
            name: {at for at in range(1, 1 + max(map(len, calls))) if (name, at) not in self._read}
            for name, calls in self._watched.items()
        }

    def __torch_function__(
        self, func: AnyFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if self._numbers and func not in READABLE and func is not Tensor.register_hook:  # fully_shard adds one
            for _, value in leaves((args, kwargs)):
                if id(value) in self._numbers:
                    self._read.add(self._numbers[id(value)])
        return func(*args, **(kwargs or {}))


def verify_plan(plan: TensorPlan, root: nn.Module, calls: dict[str, FirstCall]) -> None:
    """Compare each group of a plan with the full modules. On every rank: it communicates.

    In evaluation mode (masks of dropout depend on the number of ranks), in the dtypes of the parameters and under the
    autocast that is active. It leaves gradients, attributes, buffers and random numbers as they are.

    Args:
        plan: Applied to `root`.
        root: The user's module.
        calls: What `recording` kept. Groups that did not run are named in a warning.

    Raises:
        ModuleError: A group computes something else on several ranks; names it, the difference and its styles. Or the
            ranks have got different inputs.
    """
    mesh = plan.mesh
    assert mesh is not None, "the plan is applied first"
    modules = dict(root.named_modules())
    missing = []
    for name in plan.groups:
        if name not in modules:
            continue  # another pipeline stage has it
        full, placements = _full_values(modules[name], mesh)
        if not all(gather_objects(name in calls, mesh.get_group())):
            missing.append(name or type(root).__name__)
            continue
        _check_inputs(name, calls[name], mesh, is_shard=name in plan.takes_shards)
        with unchanged(modules[name]):
            _compare(plan, name, modules[name], calls[name], full, placements)
    if missing and dist.get_rank() == 0:
        logger.warning(
            "%s did not run in the first batch, and could not be compared with one process: %s",
            type(root).__name__,
            ", ".join(missing),
        )


def _compare(
    plan: TensorPlan, name: str, module: nn.Module, call: FirstCall, full: Values, placements: dict[Any, Placement]
) -> None:
    mesh = plan.mesh
    assert mesh is not None
    takes, gives = name in plan.takes_shards, name in plan.gives_shards
    if takes:
        args, kwargs = map_first(call.args, call.kwargs, lambda x: gather(x, mesh, 1))
        call = replace(call, args=args, kwargs=kwargs)
    prefix = f"{name}." if name else ""
    inner = {one: counts for one, counts in plan.counts.items() if not prefix or f"{one}.".startswith(prefix)}
    owners = {one: module.get_submodule(one[len(prefix) :]) for one in inner}
    for one, counts in inner.items():
        for attribute, (number, _) in counts.items():
            setattr(owners[one], attribute, number)
    try:
        whole = run_alone(module, call, {key: value.clone() for key, value in full.items()}, is_hooked=False)
    finally:
        for one, counts in inner.items():
            for attribute, (_, number) in counts.items():
                setattr(owners[one], attribute, number)
    shards: Values = {
        key: distribute(nn.Parameter(value, value.is_floating_point()), mesh, placements[key]).detach()
        for key, value in full.items()
    }
    own = run_alone(module, call, shards, is_hooked=True, mesh=mesh, takes=takes, gives=gives)
    _refuse_differences(plan, name, whole, own)


def _refuse_differences(
    plan: TensorPlan, name: str, whole: dict[str, Tensor | None], own: dict[str, Tensor | None]
) -> None:
    mesh = plan.mesh
    assert mesh is not None
    worst, where = 0.0, ""
    # A gradient that is 0 but for rounding (of a bias of keys, say) is compared with the largest.
    scales = {is_output: _largest(whole, is_output=is_output) for is_output in (True, False)}
    for key, wanted in whole.items():
        found = _difference(wanted, own.get(key), scales[key.startswith("output")])
        if found > worst:
            worst, where = found, key
    worst, where = max(gather_objects((worst, where), mesh.get_group()))
    if worst <= 1:
        return
    styles = {one: style for one, style in plan.styles.items() if not name or f"{one}.".startswith(f"{name}.")}
    raise ModuleError(
        f"Expected {name or 'the module'} to compute on {mesh.size()} ranks what it computes on one, got a difference "
        f"in {where}: {worst:.1e} times the tolerance. Its layers are split as "
        f"{', '.join(f'{one}: {shown(style)}' for one, style in styles.items())} ({plan.source}).",
        fix="leave these layers out of the plan. A layer that computes several things at once, such as q, k and v, "
        "needs PackedColwise(parts=...); a forward that counts heads needs this rank's number.",
    )


def _largest(values: dict[str, Tensor | None], *, is_output: bool) -> float:
    chosen = [one for key, one in values.items() if key.startswith("output") == is_output]
    return max((float(one.abs().max()) for one in chosen if one is not None and one.numel()), default=0.0)


def _difference(wanted: Tensor | None, own: Tensor | None, scale: float) -> float:
    """Return the largest difference, as a multiple of what rounding may make."""
    if wanted is None or own is None:
        one = wanted if own is None else own
        return 0.0 if one is None or not bool(one.any()) else float("inf")
    tolerance = max(_TOLERANCES.get(dtype, 5e-2) for dtype in dtypes_of(wanted))
    return difference(own, wanted, max(scale, 1e-12)) / tolerance


def _full_values(module: nn.Module, mesh: DeviceMesh) -> tuple[Values, dict[Any, Placement]]:
    """Return the full parameters at and below a module, and how each is placed over the ranks of the plan."""
    axis = (mesh.mesh_dim_names or ("",))[-1]
    values: Values = {}
    placements: dict[Any, Placement] = {}
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if isinstance(parameter, DTensor):
                with torch.no_grad():
                    values[one, name] = full_tensor(parameter)
                # The axis tp is the last one; experts are sharded over others, and equal along it.
                is_of_plan = axis in (parameter.device_mesh.mesh_dim_names or (axis,))
                placements[one, name] = parameter.placements[-1] if is_of_plan else Replicate()
    return values, placements


def _check_inputs(name: str, call: FirstCall, mesh: DeviceMesh, *, is_shard: bool) -> None:
    """Refuse inputs that differ between the ranks."""
    inputs = {path: one for path, one in leaves((call.args, call.kwargs)) if isinstance(one, Tensor) and not is_shard}
    if unlike_over_ranks(inputs, mesh.get_group()):
        raise ModuleError(
            f"Expected equal inputs of {name or 'the module'} on the {mesh.size()} ranks that split it, got others.",
            fix="give ranks that differ on the axis tp the same batches and random numbers: distribute data by "
            "trainer.strategy.topology.data_rank.",
        )


def _copied(value: Tree) -> Tree:
    if type(value).__name__.endswith("Cache"):  # of transformers: each call would add to it
        return None
    # Of a table of rotary positions, say, each rank's gradient is that of its heads; it matters where one is used.
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
