"""Choice of the modules that are sharded as units: by a class, a function, one of torch's policies, or by default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...errors import ConfigError, nearest

# Any in this file: a policy is a class, a collection, a function, or an object of torch that has no common type.

# A unit costs two or three collectives a step. Eight units against one, on two gloo ranks: 25 ms instead of 4
# with 2**14 elements each, 59 instead of 33 with 2**18, and no more with 2**20. A model of small blocks gathered at
# once needs a few more megabytes.
LEAST_UNIT = 2**18
"""Elements below which a block is not a unit by default."""
LEAST_BLOCKS = 2**22
"""Total elements of all blocks below which the model is one unit by default."""
LARGE = 10**8
"""Elements outside of blocks from which a module is a unit by default, as in torch's size_based_auto_wrap_policy."""

# They read the weights of their parts and do not call them, so that sharded parameters in there would not be gathered
# (TransformerEncoderLayer does so in evaluation, where it runs as one fused operation).
_CLOSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_PROTOCOL = ("module", "recurse", "nonwrapped_numel", "unwrapped_params")
_BLOCK = "pass auto_wrap_policy={Block} with the class of the model's repeated block"


@dataclass(frozen=True)
class Units:
    """The result of `choose_units`.

    Attributes:
        units: Name and module of each unit, children before their parents.
        notes: Messages for the user about the choice, as sentences.
    """

    units: list[tuple[str, nn.Module]]
    notes: list[str]


def check_policy(argument: str, policy: object) -> list[tuple[str, str]]:
    """Return the problems of a policy that can be found without a module, as pairs (problem, fix).

    Args:
        argument: Name of the argument.
        policy: The user's argument; None is always valid.
    """
    if policy is None or isinstance(policy, type) or hasattr(policy, "_run_policy"):
        return []
    if isinstance(policy, str | set | frozenset | list | tuple):
        wrong = [one for one in _members(policy) if not isinstance(one, type | str)]
        listed = ", ".join(sorted(_short(one) for one in wrong))
        what = f"Expected {argument}= to contain only classes, got {listed}"
        return [(what, "pass classes, or their names")] if wrong else []
    if not callable(policy) or isinstance(policy, nn.Module):
        what = f"Expected {argument}= to be a policy, got {_short(policy)}"
        return [(what, "pass a set of classes, or a function module -> bool")]
    missing = _missing(policy)
    if missing and not _is_bare_transformer(policy):
        name = _name_of(policy)
        if _is_recursive(policy):
            what = f"Expected {argument}={name} with {', '.join(missing)}, got the function without it"
            return [(what, f"pass functools.partial({name}, {missing[0]}=)")]
        what = f"Expected {argument}= to be a function of the module, got {name}, which requires more arguments"
        return [(what, "pass a function module -> bool")]
    return []


def choose_units(module: nn.Module, policy: object, *, ignored: Collection[nn.Parameter] = frozenset()) -> Units:
    """Return the submodules to shard as separate units, in the order that torch requires.

    Args:
        module: The user's module, which is not a unit itself. Submodules that are already sharded are not changed.
        policy: A class, a collection of classes or of their names, a function module -> bool, one of torch's policies.
            None: repeated blocks if they are large enough, and other very large modules.
        ignored: Parameters that are not sharded.

    Raises:
        ConfigError: No submodule has one of the classes; lists the classes of the submodules.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):  # torch shards children before their parents only
        return Units([], [])
    closed = (*_CLOSED, FSDPModule)
    skipped = {id(one) for one in ignored}
    inside = _always_inside(module, skipped)

    def shared_by(unit: nn.Module) -> str | None:
        """Return the name of a parameter that a module outside of the unit also has."""
        named = unit.named_parameters()
        return next((name for name, one in named if id(one) not in skipped and id(unit) not in inside[id(one)]), None)

    if policy is None or _is_bare_transformer(policy):
        chosen = _by_default(module, skipped, closed, lambda unit: shared_by(unit) is None)
        notes = [] if policy is None else [_bare_note(chosen)]
        return Units(chosen, notes)
    matched, notes = select_modules(module, policy, ignored=ignored, closed=closed)
    units = []
    for name, unit in matched:
        if isinstance(unit, FSDPModule) or _numel(unit, skipped) == 0:
            continue
        shared = shared_by(unit)
        if shared is None:
            units.append((name, unit))
        else:
            notes.append(f"{name} is not a unit: a module outside of it shares its parameter {shared}.")
    return Units(units, notes)


def select_modules(
    module: nn.Module,
    policy: Any,
    *,
    ignored: Collection[nn.Parameter] = frozenset(),
    closed: tuple[type, ...] = _CLOSED,
    argument: str = "auto_wrap_policy",
) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """Return the submodules that a policy chooses, children before their parents, and notes about the choice.

    Containers that are never called (ModuleList) and the module itself are never chosen.

    Args:
        module: The user's module.
        policy: As in `choose_units`, but not None.
        ignored: Parameters that count as size 0 for policies by size.
        closed: Classes whose submodules are not considered.
        argument: Name of the argument for messages.

    Raises:
        ConfigError: The policy is invalid, or matches no submodule; lists the classes of the submodules.
    """
    problems = check_policy(argument, policy)
    if problems:
        raise ConfigError(f"{problems[0][0]}.", fix=f"{problems[0][1]}.")
    found = list(_walk(module, closed))
    classes = _classes_of(policy)
    if classes is not None:
        return _of_classes(module, classes, found, argument)
    if not hasattr(policy, "_run_policy") and _is_recursive(policy):
        chosen = _ask_recursively(module, policy, {id(one) for one in ignored}, closed)
    else:
        if hasattr(policy, "_run_policy"):  # torch's CustomPolicy
            answers = {id(one): own or True for one, own in policy._run_policy(module, set(), {}).items()}
        else:
            answers = {id(one): policy(one) for _, one in found}
        own = sorted({name for answer in answers.values() if isinstance(answer, dict) for name in answer})
        if own:
            raise ConfigError(
                f"Expected True or False from {argument}= for each module, got arguments for {', '.join(own)}, which "
                "are not supported.",
                fix="return True or False, or call fully_shard on these modules in configure_model.",
            )
        chosen = {one for one, answer in answers.items() if answer}
    matched = [(name, one) for name, one in found if id(one) in chosen]
    return matched, [] if matched else [f"{argument}= chooses no module of {type(module).__name__}."]


def repeated_blocks(
    module: nn.Module,
    *,
    ignored: Collection[nn.Parameter] = frozenset(),
    least: int = 1,
    opens_sequential: bool = True,
) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules that are repeated in a list: several of one class, with parameters.

    Args:
        module: The user's module.
        ignored: Parameters that count as size 0.
        least: Minimum number of elements of a block.
        opens_sequential: Whether the modules of an `nn.Sequential` in a list are considered, and not the Sequential.
    """
    skipped = {id(one) for one in ignored}
    opened = (nn.Sequential,) if opens_sequential else ()
    return _blocks(module, skipped, _CLOSED, lambda one: _numel(one, skipped) >= least, opened)


# -- by default --------------------------------------------------------------------------------------------------------


def _by_default(
    root: nn.Module, skipped: set[int], closed: tuple[type, ...], fits: Callable[[nn.Module], bool]
) -> list[tuple[str, nn.Module]]:
    blocks = _blocks(root, skipped, closed, lambda one: _numel(one, skipped) >= LEAST_UNIT)
    if sum(_numel(one, skipped) for _, one in blocks) < LEAST_BLOCKS:
        blocks = []
    chosen = {id(one) for _, one in blocks if fits(one)}
    inner = {id(part) for _, one in blocks for part in one.modules()} - {id(one) for _, one in blocks}
    held = {id(parameter) for _, one in blocks if id(one) in chosen for parameter in one.parameters()}
    units = []
    for name, one in _walk(root, closed):
        if id(one) not in chosen:
            is_free = id(one) not in inner and not _is_sharded(one, closed)
            if not is_free or _numel(one, skipped) < LARGE or _numel(one, skipped | held) < LARGE or not fits(one):
                continue
            held.update(id(parameter) for parameter in one.parameters())
        units.append((name, one))
    return units


def _blocks(
    root: nn.Module,
    skipped: set[int],
    closed: tuple[type, ...],
    counts: Callable[[nn.Module], bool],
    opened: tuple[type, ...] = (nn.Sequential,),
) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def look(name: str, module: nn.Module) -> None:
        members = list(_members_of(name, module, opened)) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        distinct = {id(one): type(one) for _, one in members if counts(one) and not _is_sharded(one, closed)}
        classes = list(distinct.values())
        for path, one in members or [(_join(name, key), child) for key, child in module.named_children()]:
            if id(one) in seen:
                continue
            seen.add(id(one))
            if id(one) in distinct and classes.count(type(one)) > 1 and _is_called(one):
                found.append((path, one))
            elif not isinstance(one, closed):
                look(path, one)

    look("", root)
    return found


def _members_of(name: str, container: nn.Module, opened: tuple[type, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a container; in place of containers in it, and of the classes `opened`, their modules."""
    for key, one in container.named_children():
        path = _join(name, key)
        if type(one) in opened or (isinstance(one, nn.ModuleList | nn.ModuleDict) and not _is_called(one)):
            yield from _members_of(path, one, opened)
        else:
            yield path, one


# -- by the user's policy ----------------------------------------------------------------------------------------------


def _of_classes(
    root: nn.Module, wanted: list[Any], found: list[tuple[str, nn.Module]], argument: str
) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    everyone = [one for one in root.modules() if one is not root]
    names = sorted({type(one).__name__ for one in everyone})
    # The class of the module itself, which is gathered anyway, is not a mistake.
    unmatched = [one for one in wanted if not any(_is_a(module, one) for module in (root, *everyone))]
    if wanted and len(unmatched) == len(wanted):
        listed = ", ".join(sorted(_short(one) for one in unmatched))
        asked = {one if isinstance(one, str) else one.__name__ for one in unmatched}
        hints = "".join(sorted({nearest(one, names) for one in asked}))
        raise ConfigError(
            f"Expected {argument}= to contain a class of {type(root).__name__}'s submodules, got {{{listed}}}{hints}.",
            fix=f"use one of {', '.join(names) or 'none (it has no submodules)'}, or remove {argument}=.",
        )
    notes = [
        f"{argument}= names {one!r}, which is not a class of a submodule." for one in unmatched if isinstance(one, str)
    ]
    matched = [(name, one) for name, one in found if any(_is_a(one, each) for each in wanted)]
    # Reported only if the policy contains their class itself, not a base class.
    reachable = {id(one) for _, one in found}
    inside = [one for one in everyone if id(one) not in reachable and any(_is_a(one, each) for each in wanted)]
    containers = sorted({type(one).__name__ for one in inside if not _is_called(one)})
    parts = sorted({type(one).__name__ for one in inside if _is_called(one)})
    if containers:
        notes.append(f"{', '.join(containers)} is only a container, which is never called: no unit.")
    if parts:
        notes.append(f"some {', '.join(parts)} lie in modules that read them without calling them, or that are sharded")
        notes[-1] += " already: no separate units."
    return matched, notes


def _ask_recursively(
    root: nn.Module, policy: Callable[..., object], skipped: set[int], closed: tuple[type, ...]
) -> set[int]:
    """Return the ids of the chosen modules, calling the policy as FullyShardedDataParallel does: with `recurse=True`
    first."""
    chosen: set[int] = set()
    held = set(skipped)
    seen: set[int] = set()
    parameters = _parameters_of(policy)
    size_name = "unwrapped_params" if "unwrapped_params" in parameters else "nonwrapped_numel"

    def ask(module: nn.Module, recurse: bool, size: int) -> bool:
        return bool(policy(module=module, recurse=recurse, **{size_name: size}))

    def visit(module: nn.Module) -> None:
        seen.add(id(module))
        if not ask(module, True, _numel(module, skipped)):
            return
        for child in module.children() if module is root or not isinstance(module, closed) else ():
            if id(child) not in seen:
                visit(child)
        if module is root or not _is_called(module) or not ask(module, False, _numel(module, held)):
            return
        chosen.add(id(module))
        held.update(id(parameter) for parameter in module.parameters())

    visit(root)
    return chosen


# -- what a policy is --------------------------------------------------------------------------------------------------


def _members(policy: Any) -> list[object]:
    return [policy] if isinstance(policy, type | str) else list(policy)


def _classes_of(policy: Any) -> list[object] | None:
    """Return the classes, or names of classes, of a policy; None if it is a function."""
    if isinstance(policy, type | str | set | frozenset | list | tuple):
        return _members(policy)
    if isinstance(policy, functools.partial) and _name_of(policy) == "transformer_auto_wrap_policy":
        return _members(policy.keywords["transformer_layer_cls"])
    if any(base.__name__ == "ModuleWrapPolicy" for base in type(policy).__mro__):
        return _members(policy._module_classes)
    return None


def _is_a(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, str):
        return any(wanted in (base.__name__, base.__qualname__) for base in type(module).__mro__)
    return isinstance(module, wanted)


def _parameters_of(policy: Callable[..., object]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(policy).parameters)
    except ValueError:  # a built-in function without a signature
        return {}


def _is_recursive(policy: Callable[..., object]) -> bool:
    """Return whether a function has FullyShardedDataParallel's arguments: module=, recurse=, nonwrapped_numel=."""
    parameters = _parameters_of(policy)
    kinds = {one.kind for one in parameters.values()}
    # always_wrap_policy(*args, **kwargs) is.
    return "recurse" in parameters or kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _missing(policy: Callable[..., object]) -> list[str]:
    """Return the names of required arguments that the function is called without."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    free = [
        name
        for name, one in _parameters_of(policy).items()
        if one.default is inspect.Parameter.empty and one.kind not in variable
    ]
    return [name for name in free if name not in _PROTOCOL] if _is_recursive(policy) else free[1:]


def _is_bare_transformer(policy: Any) -> bool:
    """Return whether the policy is torch's transformer_auto_wrap_policy without its required classes."""
    return _name_of(policy) == "transformer_auto_wrap_policy" and bool(_missing(policy))


def _bare_note(chosen: list[tuple[str, nn.Module]]) -> str:
    classes = ", ".join(sorted({type(one).__name__ for _, one in chosen})) or "the full model"
    return (
        "auto_wrap_policy=transformer_auto_wrap_policy was passed without transformer_layer_cls; "
        f"the default units are used: {classes}. To choose the units, {_BLOCK}."
    )


def _name_of(policy: object) -> str:
    function = policy.func if isinstance(policy, functools.partial) else policy
    return getattr(function, "__name__", type(function).__name__)


def _short(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


# -- modules -----------------------------------------------------------------------------------------------------------


def _walk(root: nn.Module, closed: tuple[type, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each submodule that can be called, once each, children before parents."""
    seen = {id(root)}

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for key, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            path = _join(name, key)
            if not isinstance(child, closed):
                yield from visit(path, child)
            if _is_called(child):
                yield path, child

    yield from visit("", root)


def _always_inside(root: nn.Module, skipped: set[int]) -> dict[int, set[int]]:
    """Return, by the id of each parameter, the ids of modules that lie on all paths from the root to it."""
    inside: dict[int, set[int]] = {}

    def visit(module: nn.Module, above: tuple[int, ...]) -> None:
        way = (*above, id(module))
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in skipped:
                inside[id(parameter)] = inside.get(id(parameter), set(way)) & set(way)
        for child in module._modules.values():
            if child is not None and id(child) not in way:
                visit(child, way)

    visit(root, ())
    return inside


def _is_called(module: nn.Module) -> bool:
    """Return whether the module has a forward, so that it can be called."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_sharded(module: nn.Module, closed: tuple[type, ...]) -> bool:
    return isinstance(module, tuple(one for one in closed if one not in _CLOSED))


def _numel(module: nn.Module, skipped: set[int]) -> int:
    parameters: Iterator[Tensor] = (one for one in module.parameters() if id(one) not in skipped)
    return sum(one.numel() for one in parameters)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
