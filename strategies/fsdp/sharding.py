"""Sharding of a module, unit by unit, so that no process ever holds all of it."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm

from ...errors import ModuleError
from ...messages import counted
from ...protocols import Kwargs, StateDict
from ..construction.activation_checkpointing import apply_activation_checkpointing
from ..construction.materialize import (
    check_materializable,
    empty_names,
    materialize,
    materialize_from_rank_zero,
    modules_of_unit,
)
from ..construction.wrap_policy import choose_units
from ..distributed.shards import all_parameters, as_shards, is_sharded, refuse_in_files, watch_numbers
from .root import ROOT, ShardedRoot, groups_of, units_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ...precision import PrecisionPolicy
    from .plan import ShardingPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardingTarget:
    """The processes over which a module is sharded, and where this one computes.

    Attributes:
        mesh: One axis: parameters are sharded over it. Two: copies over the first, shards over the second.
        device: Where this process computes.
        reduce_group: The processes of the mesh, over which gradients are averaged; None is all processes.
        source_group: The processes that take over the values of the first of them. None: all.
        is_sharded: Whether `fully_shard` is applied; where it is not, the mesh is that of one process.
        seeds_by_name: Whether modules that fill themselves draw numbers that depend on their name, and not on those
            of other modules: ranks may have other ones.
    """

    mesh: DeviceMesh
    device: torch.device
    reduce_group: ProcessGroup | None = None
    source_group: ProcessGroup | None = None
    is_sharded: bool = True
    seeds_by_name: bool = False


def shard(
    module: nn.Module,
    plan: ShardingPlan,
    target: ShardingTarget,
    *,
    precision: PrecisionPolicy,
    is_by_parts: bool,
    is_rank_zero: bool,
    prepare: Callable[[list[nn.Module]], None] | None = None,
    meshes: Mapping[nn.Module, DeviceMesh] | None = None,
) -> ShardedRoot:
    """Shard a module's parameters in place and return what runs it. On every rank: it communicates.

    Each unit is given values if it has none, takes over rank 0's, and is sharded before the next one.

    Args:
        module: The user's module, the same on all ranks; on the CPU, on the device, or on the meta device.
        plan: The plan from the user's arguments.
        target: The processes, and this one's device.
        precision: Dtypes of parameters, products and reductions.
        is_by_parts: Whether the module's children are run one by one, and not the module itself.
        is_rank_zero: Whether to log what was chosen.
        prepare: Called with the modules of each unit after it got its values and before it is sharded; may replace
            their parameters.
        meshes: Modules that are separate units, sharded over other meshes than that of `target`.

    Raises:
        ModuleError: The module cannot be sharded, or values of it are missing; names them.
    """
    _check(module)
    watch_numbers()
    ignored = plan.find_ignored(module)
    # By name: a parameter without values is replaced when it gets them.
    # Those without a dimension, or without elements, cannot be sharded.
    names = {
        name for name, one in module.named_parameters() if (not one.ndim or not one.numel()) and one not in ignored
    }
    kept = names | {name for name, one in module.named_parameters() if one in ignored}
    units = choose_units(module, plan.auto_wrap_policy, ignored=_named(module, kept))
    if is_rank_zero:
        for note in units.notes:
            logger.info("%s", note)
    chosen = [unit for _, unit in units.units]
    settings = _settings(plan, target.mesh, precision, target.device)
    refuse_in_files()
    if plan.activation_checkpointing is not None:
        apply_activation_checkpointing(module, plan.activation_checkpointing, units=chosen)
    # A norm over a batch computes in its own dtype, whatever the rest does.
    exempt = _full_precision(module, plan, settings["mp_policy"])
    chosen = [*(one for one in exempt if one not in chosen), *chosen]
    meshes = {} if meshes is None else meshes
    chosen = [*meshes, *(one for one in chosen if one not in meshes)]
    parts = [part for part in _parts(module) if part not in chosen] if is_by_parts else []
    odd = _other_dtypes(module, [*chosen, *parts], kept)
    names, kept = names | odd, kept | odd
    _check_parts(parts, module)
    _check_values(module)
    check_materializable(module, param_init_fn=plan.param_init_fn)
    has_values = is_rank_zero or not plan.sync_module_states
    unfilled = empty_names(module, param_init_fn=plan.param_init_fn) if has_values else []
    if is_by_parts and settings["reshard_after_forward"] is None:
        settings["reshard_after_forward"] = True  # each part is outermost, and the next one that runs may be another
    done = units_of(module)  # sharded by the user
    for unit in [*chosen, *parts]:
        _give_values(unit, done, module, plan, target, prepare)
        if target.is_sharded:
            own = {**settings, "mp_policy": MixedPrecisionPolicy()} if unit in exempt else settings
            if unit in meshes:
                own = _over(meshes[unit], own)
            fully_shard(unit, **own, ignored_params=_named(module, kept))
        done.append(unit)
    _give_values(module, done, module, plan, target, prepare)
    root = ShardedRoot(module, target.mesh, is_by_parts=is_by_parts, group=target.reduce_group)
    if target.is_sharded and not is_by_parts:
        cast_root = plan.mixed_precision is not None and plan.mixed_precision.cast_root_forward_inputs
        policy = _of_root(settings["mp_policy"], cast_inputs=cast_root)
        fully_shard(root, **{**settings, "mp_policy": policy}, ignored_params=_named(module, kept))
    if target.is_sharded:
        _replicate(root, names, kept)
    _cast_buffers(module, plan)
    _set_up_units(root, plan)
    root.expect_values(unfilled)
    for one in module.modules():
        if any(is_sharded(parameter) for parameter in one.parameters(recurse=False)):
            one.register_load_state_dict_pre_hook(_take_full)
    if target.is_sharded and not is_by_parts:
        root.gather_outside_of_steps()
    root.settle()
    module.__dict__[ROOT] = root
    if is_rank_zero:
        here, total = (sum(one.numel() for one in ones) for ones in (module.parameters(), all_parameters(module)))
        logger.info(
            "%s: %s parameters in %s, sharded over %s",
            type(module).__name__,
            f"{here:,} of {total:,}" if here < total else f"{total:,}",  # the others are on other pipeline stages
            counted(len([unit for unit in units_of(root) if unit is not root or groups_of(root)]), "unit"),
            " x ".join([*map(str, target.mesh.shape[:-1]), counted(target.mesh.shape[-1], "process")]),
        )
    return root


def _replicate(root: ShardedRoot, names: set[str], kept: set[str]) -> None:
    """Let the root know of the parameters that every rank has in full: `names`, and those beside the parts."""
    taken = {id(one) for one in root.sharded_parameters()}
    own = root.module.named_parameters()
    root.replicate(one for name, one in own if name in names or (name not in kept and id(one) not in taken))


def _take_full(owner: nn.Module, state: StateDict, prefix: str, *_: object) -> None:
    """Let `load_state_dict` take full tensors, which are the same on all ranks. Does not communicate."""
    for name, parameter in owner._parameters.items():
        value = state.get(prefix + name)
        if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape:
            state[prefix + name] = as_shards(value, parameter, is_kept=False)


def _check_values(module: nn.Module) -> None:
    """Refuse parameters that the user sharded before they had values: nothing can fill them."""
    empty = [name for name, one in module.named_parameters() if is_sharded(one) and one.to_local().is_meta]
    if empty:
        raise ModuleError(
            f"{type(module).__name__} was sharded by fully_shard before its parameters were materialized: "
            f"{', '.join(empty[:5])}{' ...' if len(empty) > 5 else ''}.",
            fix="remove fully_shard from configure_model, where construction is deferred, and pass the units in "
            "auto_wrap_policy=; or build the module in __init__ and call fully_shard in setup.",
        )


def _check_parts(parts: list[nn.Module], module: nn.Module) -> None:
    """Refuse parts that share a parameter: each would hold its own copy from then on."""
    owner: dict[nn.Parameter, nn.Module] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if owner.setdefault(parameter, part) is not part:
                raise ModuleError(
                    f"{type(owner[parameter]).__name__} and {type(part).__name__} of {type(module).__name__} share the "
                    f"parameter {name!r}, but manual optimization shards each of them separately.",
                    fix="put both into one submodule whose forward calls them, or train with strategy='ddp'.",
                )


def _other_dtypes(module: nn.Module, units: list[nn.Module], kept: set[str]) -> set[str]:
    """Return the names of trained parameters with another dtype than most of their unit: torch shards uniform ones."""
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad and name not in kept]
    unit_of = {one: unit for unit in (module, *reversed(units)) for one in unit.parameters()}  # the innermost is last
    sizes: dict[nn.Module, Counter[torch.dtype]] = defaultdict(Counter)
    for _, one in trained:
        sizes[unit_of[one]][one.dtype] += one.numel()
    return {name for name, one in trained if one.dtype != sizes[unit_of[one]].most_common(1)[0][0]}


def _named(module: nn.Module, names: set[str]) -> set[nn.Parameter]:
    return {one for name, one in module.named_parameters() if name in names} if names else set()


def _check(module: nn.Module) -> None:
    old = [name for name, one in module.named_modules() if isinstance(one, FullyShardedDataParallel)]
    if old:
        raise ModuleError(
            f"{type(module).__name__} contains modules wrapped in torch's FullyShardedDataParallel: "
            f"{', '.join(old[:5])}.",
            fix="remove these wrappers and use auto_wrap_policy=, or call fully_shard in configure_model.",
        )
    sparse = [
        name
        for name, one in module.named_modules()
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse and one.weight.requires_grad
    ]
    if sparse:
        raise ModuleError(
            f"The embeddings {', '.join(sparse)} have sparse gradients, which cannot be sharded.",
            fix="create them with sparse=False, freeze them, or train with strategy='ddp'.",
        )


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the children that are run separately; in place of containers, their elements."""
    parts: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            parts += _parts(child)
        elif any(True for _ in child.parameters()) and not isinstance(child, FSDPModule):
            parts.append(child)
    return parts


def _give_values(
    unit: nn.Module,
    done: list[nn.Module],
    module: nn.Module,
    plan: ShardingPlan,
    target: ShardingTarget,
    prepare: Callable[[list[nn.Module]], None] | None,
) -> None:
    """Initialize what is in the unit and in no unit that is done, and prepare it."""
    where = torch.device("cpu") if plan.offload else target.device
    inner = [one for one in done if one is not unit]
    is_synced = plan.sync_module_states and dist.get_world_size(target.source_group) > 1
    give = partial(materialize_from_rank_zero, group=target.source_group) if is_synced else materialize
    give(
        unit,
        device=where,
        inner=inner,
        root=module,
        param_init_fn=plan.param_init_fn,
        seeds_by_name=target.seeds_by_name,
    )
    modules = modules_of_unit(unit, inner)
    for owner in modules:
        for one in owner.parameters(recurse=False):
            if not (is_sharded(one) or one.is_contiguous()):
                one.data = one.data.contiguous()  # fully_shard (torch 2.13) takes no other
    if prepare is not None:
        prepare(modules)


def _settings(
    plan: ShardingPlan, mesh: DeviceMesh, precision: PrecisionPolicy, device: torch.device
) -> Kwargs:  # Any: arguments of fully_shard
    settings: Kwargs = {
        "mesh": mesh,
        # None: kept gathered for the outermost module only, which the backward pass needs first.
        "reshard_after_forward": None if plan.reshard_after_forward is True else plan.reshard_after_forward,
        "mp_policy": _mixed_precision(plan, precision, device),
    }
    if plan.offload:
        pins = plan.pin_memory if plan.pin_memory is not None else device.type != "cpu"
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
    else:
        settings["offload_policy"] = OffloadPolicy()
    if plan.shard_placement_fn is not None:
        settings["shard_placement_fn"] = plan.shard_placement_fn
    return settings


def _over(mesh: DeviceMesh, settings: Kwargs) -> Kwargs:  # Any: arguments of fully_shard
    """Return the settings for a unit that is sharded over another mesh."""
    return {"shard_placement_fn": partial(_placement, num_shards=mesh.shape[-1]), **settings, "mesh": mesh}


def _placement(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    """Return the second dimension where the first has too few rows for an even sharding; None: the first."""
    own = parameter.to_local() if is_sharded(parameter) else parameter
    if own.ndim < 2 or own.shape[0] % num_shards == 0 or own.shape[1] % num_shards:
        return None
    return Shard(1)


def _mixed_precision(plan: ShardingPlan, precision: PrecisionPolicy, device: torch.device) -> MixedPrecisionPolicy:
    """Return the user's own mixed precision, or what follows from `precision=`."""
    own = plan.mixed_precision
    if own is not None:
        return MixedPrecisionPolicy(
            param_dtype=own.param_dtype,
            reduce_dtype=own.reduce_dtype,
            output_dtype=own.output_dtype,
            cast_forward_inputs=own.cast_forward_inputs,
        )
    # Autocast casts inputs where an operation wants it: a regression's targets keep their digits.
    casts = device.type != "cpu" if plan.casts_when_gathered is None else plan.casts_when_gathered
    is_mixed = precision.compute_dtype != precision.param_dtype and casts
    return MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype if is_mixed else None,
        reduce_dtype=plan.accumulate_dtype or (precision.reduce_dtype if is_mixed else None),
        cast_forward_inputs=False,
    )


def _full_precision(module: nn.Module, plan: ShardingPlan, policy: MixedPrecisionPolicy) -> list[nn.Module]:
    """Return the modules to which mixed precision does not apply, so that they are separate units."""
    if policy.param_dtype is None:
        return []
    own = plan.mixed_precision
    classes = (AnyBatchNorm,) if own is None else own.full_precision_classes
    return [
        one
        for one in module.modules()
        if isinstance(one, classes) and one is not module and any(True for _ in one.parameters(recurse=False))
    ]


def _of_root(policy: MixedPrecisionPolicy, *, cast_inputs: bool) -> MixedPrecisionPolicy:
    return replace(policy, cast_forward_inputs=cast_inputs)  # the root's inputs are the batch


def _cast_buffers(module: nn.Module, plan: ShardingPlan) -> None:
    dtype = plan.mixed_precision.buffer_dtype if plan.mixed_precision is not None else None
    if dtype is None:
        return
    for one in module.modules():
        for name, buffer in one.named_buffers(recurse=False):
            if buffer.is_floating_point():
                one._buffers[name] = buffer.to(dtype)


def _set_up_units(root: ShardedRoot, plan: ShardingPlan) -> None:
    units = [unit for unit in units_of(root) if unit is not root]
    for unit in units_of(root):
        # Parameters that this rank's step does not use have gradients of zero: other ranks' steps may use them.
        allow = getattr(unit, "set_reduce_scatter_unused_params", None)  # since torch 2.13
        if allow is not None:
            allow(True)
    root.watch_backward()
    for index, unit in enumerate(units):
        if plan.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + plan.forward_prefetch])
        if plan.backward_prefetch:
            before = units[max(0, index - plan.backward_prefetch) : index]
            unit.set_modules_to_backward_prefetch(before[::-1])
