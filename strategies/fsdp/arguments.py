"""Arguments of FSDPStrategy, checked and translated to arguments of torch's fully_shard.

It accepts the arguments of torch's older FullyShardedDataParallel and of fully_shard. They are read without
starting processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from ...errors import Clauses, nearest
from ...protocols import Options
from ..construction.activation_checkpointing import check_checkpointing
from ..construction.wrap_policy import check_policy
from .plan import MixedPrecisionPlan, ShardingPlan, sizes_of

# Any in this file: unchecked arguments, and torch's policies, which have no common type.

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STATE_DICT_TYPES = ("full", "sharded")
BACKWARD_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST")


_NAMES = (
    "activation_checkpointing", "activation_checkpointing_policy", "auto_wrap_policy", "backward_prefetch",
    "cpu_offload", "device_mesh", "forward_prefetch", "ignored_modules", "ignored_parameters", "ignored_params",
    "ignored_states", "limit_all_gathers", "mesh", "mixed_precision", "mp_policy", "offload_policy", "param_init_fn",
    "reshard_after_forward", "shard_placement_fn", "sharding_strategy", "state_dict_type", "sync_module_states",
    "use_orig_params",
)  # fmt: skip
_REFUSED: dict[str, tuple[str, str]] = {
    "module": ("module= is passed to the Trainer or `setup_module` instead", "remove module="),
    "device_id": ("device_id= is derived from devices=", "remove device_id="),
    "process_group": (
        "process_group= cannot be used: parameters are sharded over a mesh of devices",
        "pass device_mesh=DeviceMesh.from_group(group, 'cuda'), or device_mesh=(copies, shards) for two groups",
    ),
    "dp_mesh_dims": (
        "dp_mesh_dims= cannot be used: the mesh has axes for copies and shards only",
        "pass device_mesh=mesh['replicate', 'shard'] with the names of those axes",
    ),
}
OF_PROCESSES = (
    "accelerator", "checkpoint_io", "cluster_environment", "parallel_devices", "precision", "precision_plugin",
    "process_group_backend", "stall_timeout", "start_method", "timeout", "uneven",
)  # fmt: skip
"""Names of the arguments that strategies with processes have in common."""


def read_arguments(given: Mapping[str, object], problems: Clauses, own: Sequence[str] = ()) -> ShardingPlan:
    """Return the sharding plan for the arguments of FSDPStrategy.

    Args:
        given: Arguments of FSDPStrategy, FullyShardedDataParallel and fully_shard by name. None selects the default of
            each.
        problems: Gets what is unknown or unsupported; the plan is only valid without any.
        own: Names of the strategy's further arguments, for messages.
    """
    _check_names(given, problems, own)
    notes: list[str] = []
    wanted: Options = {name: given.get(name) for name in _NAMES}
    mesh = _read_mesh(_either(wanted, ("device_mesh", "mesh"), problems), problems)
    reshard, is_hybrid, is_replicated = _read_sharding(wanted, mesh, problems, notes)
    offload, pin_memory = _read_offload(_either(wanted, ("cpu_offload", "offload_policy"), problems), problems)
    checkpointing = _either(wanted, ("activation_checkpointing", "activation_checkpointing_policy"), problems)
    if checkpointing is False:
        checkpointing = None
    problems += check_checkpointing("activation_checkpointing", checkpointing)
    problems += check_policy("auto_wrap_policy", wanted["auto_wrap_policy"])
    for name in ("param_init_fn", "shard_placement_fn"):
        if wanted[name] is not None and not callable(wanted[name]):
            what = f"expected {name} to be a function, got {name}={wanted[name]!r}"
            problems.add(what, f"pass {name} as a function, or remove it")
    if wanted["use_orig_params"] is False:
        notes.append("use_orig_params=False has no effect: the original parameters are always used.")
    if wanted["limit_all_gathers"] is False:
        notes.append("limit_all_gathers=False has no effect: fully_shard limits memory without blocking the CPU.")
    for name in ("use_orig_params", "limit_all_gathers", "sync_module_states"):
        if not isinstance(wanted[name], bool | None):
            problems.add(f"expected {name} to be a bool, got {name}={wanted[name]!r}", f"pass {name}=True or False")
    return ShardingPlan(
        reshard_after_forward=reshard,
        is_hybrid=is_hybrid,
        is_replicated=is_replicated,
        mesh=mesh,
        offload=offload,
        pin_memory=pin_memory,
        mixed_precision=_read_precision(_either(wanted, ("mixed_precision", "mp_policy"), problems), problems, notes),
        auto_wrap_policy=wanted["auto_wrap_policy"],
        activation_checkpointing=checkpointing,
        backward_prefetch=_read_backward_prefetch(wanted["backward_prefetch"], problems, notes),
        forward_prefetch=_read_count("forward_prefetch", wanted["forward_prefetch"], problems),
        sync_module_states=wanted["sync_module_states"] is not False,
        param_init_fn=wanted["param_init_fn"],
        ignored=_read_ignored(wanted, problems),
        shard_placement_fn=wanted["shard_placement_fn"],
        state_dict_type=_read_state_dict_type(wanted["state_dict_type"], problems),
        notes=tuple(notes),
    )


# -- one argument each -------------------------------------------------------------------------------------------------


def _check_names(given: Mapping[str, object], problems: Clauses, own: Sequence[str]) -> None:
    for name, value in given.items():
        if name in _REFUSED:
            if value is not None:
                problems.append(_REFUSED[name])
        elif name not in _NAMES:
            known = list(dict.fromkeys([*own, *_NAMES]))
            hint = nearest(name, [*known, *OF_PROCESSES])
            problems.add(f"{name}= is not an argument of this strategy{hint}", f"use some of {', '.join(known)}")
    if given.get("process_group") is not None and given.get("device_mesh") is not None:
        problems.add("process_group= and device_mesh= set the same option", "pass only device_mesh=")


def _either(wanted: Mapping[str, object], names: tuple[str, str], problems: Clauses) -> Any:
    """Return the value of an argument that has two names."""
    first, second = (wanted[name] for name in names)
    if first is not None and second is not None:
        problems.add(f"{names[0]}= and {names[1]}= set the same option", f"pass only one of {' and '.join(names)}")
    return second if first is None else first


def _read_sharding(
    wanted: Mapping[str, object], mesh: Any, problems: Clauses, notes: list[str]
) -> tuple[bool | int, bool, bool]:
    """Return reshard_after_forward, is_hybrid, is_replicated."""
    given = wanted["sharding_strategy"]
    name = _choice("sharding_strategy", "FULL_SHARD" if given is None else given, SHARDING_STRATEGIES, problems)
    copies, shards = sizes_of(mesh) if mesh is not None else (1, 0)
    if name == "NO_SHARD" and shards > 1:
        what = f"expected a device_mesh= without shards for sharding_strategy='NO_SHARD', got one with {shards} shards"
        problems.add(what, "pass another sharding_strategy, or remove device_mesh=")
    if "HYBRID" in name and mesh is not None and not isinstance(mesh, tuple) and mesh.ndim == 1:
        what = f"expected device_mesh= with two axes for sharding_strategy={name!r}, got one axis"
        problems.add(what, "pass device_mesh=(copies, shards), or sharding_strategy='FULL_SHARD'")
    if name in ("FULL_SHARD", "SHARD_GRAD_OP") and copies > 1:
        notes.append(
            f"sharding_strategy={name!r} with {copies} copies in device_mesh= shards each copy separately, as "
            f"{'HYBRID_SHARD' if name == 'FULL_SHARD' else '_HYBRID_SHARD_ZERO2'} does."
        )
    reshard: bool | int = name in ("FULL_SHARD", "HYBRID_SHARD")
    own = wanted["reshard_after_forward"]
    if own is not None:
        if not isinstance(own, int) or own < 0 or (own == 0 and own is not False):
            what = f"expected reshard_after_forward to be a bool or a positive integer, got {own!r}"
            problems.add(what, "pass True, False, or a divisor of the number of processes")
        elif own and name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
            what = f"sharding_strategy={name!r} keeps parameters after forward, and reshard_after_forward={own!r} does"
            problems.add(f"{what} not", "remove one of the two")
        else:
            reshard = own
    return reshard, "HYBRID" in name or copies > 1, name == "NO_SHARD"


def _read_mesh(given: Any, problems: Clauses) -> Any:
    if given is None:
        return None
    if _is_torch(given, "DeviceMesh"):
        if given.ndim in (1, 2):
            if given.ndim == 2 and given.mesh_dim_names is None:
                advice = "pass mesh_dim_names=('replicate', 'shard') to init_device_mesh"
                problems.add("expected names for the two axes of device_mesh=, got none", advice)
            return given
        what = f"expected device_mesh= with one or two axes, got {given.ndim}"
        problems.add(what, "pass a mesh with two axes (copies, shards)")
        return None
    if isinstance(given, tuple | list) and len(given) == 2 and all(_is_count(one) for one in given):
        return (given[0], given[1])
    advice = "pass device_mesh=(copies, shards) as two positive integers, or a DeviceMesh"
    problems.add(f"expected device_mesh to be a mesh, got device_mesh={given!r}", advice)
    return None


def _read_offload(given: Any, problems: Clauses) -> tuple[bool, bool | None]:
    if given is None or isinstance(given, bool):
        return bool(given), None
    if _is_torch(given, "CPUOffload"):
        return bool(given.offload_params), None
    if _is_torch(given, "CPUOffloadPolicy"):
        return True, bool(given.pin_memory)
    if _is_torch(given, "OffloadPolicy"):
        return False, None
    advice = "pass True, False, or torch's CPUOffload or CPUOffloadPolicy"
    problems.add(f"expected cpu_offload to be a bool or an offload policy, got cpu_offload={given!r}", advice)
    return False, None


def _read_precision(given: Any, problems: Clauses, notes: list[str]) -> MixedPrecisionPlan | None:
    if given is None:
        return None
    is_old = _is_torch(given, "MixedPrecision")
    if not is_old and not _is_torch(given, "MixedPrecisionPolicy"):
        advice = "pass torch's MixedPrecision or MixedPrecisionPolicy, or pass precision='bf16-mixed' instead"
        problems.add(f"expected mixed_precision to be a policy, got mixed_precision={given!r}", advice)
        return None
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
    dtypes: Options = {name: getattr(given, name, None) for name in names}
    for name, value in dtypes.items():
        if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
            advice = f"pass {name} as a floating-point torch.dtype, or None"
            problems.add(
                f"expected {name} of mixed_precision= to be a floating-point dtype, got {name}={value!r}", advice
            )
    plan = MixedPrecisionPlan(**dtypes, cast_forward_inputs=given.cast_forward_inputs)
    if not is_old:
        return replace(plan, cast_root_forward_inputs=given.cast_forward_inputs)
    if given.keep_low_precision_grads:
        notes.append("keep_low_precision_grads=True has no effect: gradients have the dtype of their parameters.")
    return replace(
        plan,
        cast_root_forward_inputs=given.cast_root_forward_inputs,
        keep_low_precision_grads=given.keep_low_precision_grads,
        full_precision_classes=tuple(given._module_classes_to_ignore),
    )


def _read_backward_prefetch(given: Any, problems: Clauses, notes: list[str]) -> int:
    if given is None or given == 0:
        return 0
    if _is_count(given):
        return int(given)
    if _choice("backward_prefetch", given, BACKWARD_PREFETCHES, problems) == "BACKWARD_POST":
        notes.append(
            "backward_prefetch='BACKWARD_POST' is treated as 'BACKWARD_PRE': the next unit is gathered before the "
            "gradients of the current one are computed. This is faster and requires memory for one more unit."
        )
    return 0


def _read_count(name: str, given: Any, problems: Clauses) -> int:
    if given is None or isinstance(given, bool) or _is_count(given) or given == 0:
        return int(given or 0)
    what = f"expected {name} to be a bool or an integer >= 0, got {name}={given!r}"
    problems.add(what, f"pass {name} as True, False, or a number of units")
    return 0


def _read_state_dict_type(given: object, problems: Clauses) -> str | None:
    if given is None:
        return None
    name = given.name.removesuffix("_STATE_DICT") if isinstance(given, Enum) else given
    if name == "LOCAL" or (isinstance(given, str) and given.lower() == "local"):
        problems.add(
            "state_dict_type='local' is not supported: such checkpoints can be read only by the same "
            "number of processes",
            "pass state_dict_type='sharded'",
        )
        return None
    return _choice("state_dict_type", name.lower() if isinstance(name, str) else name, STATE_DICT_TYPES, problems)


def _read_ignored(wanted: Mapping[str, Any], problems: Clauses) -> tuple[nn.Module | nn.Parameter, ...]:
    found: list[nn.Module | nn.Parameter] = []
    for name in ("ignored_modules", "ignored_states", "ignored_parameters", "ignored_params"):
        given = wanted[name]
        if given is None:
            continue
        kinds = {"ignored_modules": (nn.Module,), "ignored_states": (nn.Module, nn.Parameter)}.get(
            name, (nn.Parameter,)
        )
        is_many = isinstance(given, Iterable) and not isinstance(given, str | torch.Tensor | nn.Module)
        members = list(given) if is_many else [given]  # a generator such as parameters() can be read only once
        wrong = sorted({type(one).__name__ for one in members if not isinstance(one, kinds)})
        if wrong or not is_many:
            listed = " or ".join(kind.__name__ for kind in kinds)
            got = f"a list with {', '.join(wrong)}" if is_many else type(given).__name__
            what = f"expected {name} to be a list of {listed}, got {got}"
            problems.add(what, f"pass {name} as a list of {listed}")
        else:
            found += members
    return tuple(found)


# -- values ------------------------------------------------------------------------------------------------------------


def _choice(argument: str, given: object, choices: tuple[str, ...], problems: Clauses) -> str:
    """Return the choice that matches a string (case-insensitive) or a member of torch's enumeration."""
    name = given.name if isinstance(given, Enum) else given
    by_name = {choice.strip("_").lower(): choice for choice in choices}
    known = by_name.get(name.strip("_").lower()) if isinstance(name, str) else None
    if known is not None:
        return known
    hint = nearest(name.upper(), choices) or nearest(name.lower(), choices) if isinstance(name, str) else ""
    problems.add(f"expected a valid {argument}, got {argument}={given!r}{hint}", f"use one of {', '.join(choices)}")
    return choices[0]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_torch(value: object, name: str) -> bool:
    """Return whether a value is an object of a class of torch.distributed, which is not imported for that."""
    return any(
        base.__name__ == name and base.__module__.startswith("torch.distributed") for base in type(value).__mro__
    )
