"""The configuration of optimizers and schedules: kept in checkpoints, compared when a run is resumed.

An optimizer's state counts parameters; here are their names, so that a state never lands on the wrong ones. And here is
what `configure_optimizers` returned, so that a learning rate that differs from before is reported and not lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint.content import PARAM_NAMES
from ...errors import CheckpointError
from ...protocols import ParamGroup, StateDict, Tree
from ...strategies.base import plain_names

if TYPE_CHECKING:
    from ..loop.schedule import LRSchedulerConfig

_NOT_GIVEN = ("params", PARAM_NAMES, "lr", "initial_lr")
_PLAIN = (bool, int, float, str, type(None))


def describe(optimizers: Sequence[Optimizer], schedules: Sequence[LRSchedulerConfig]) -> StateDict:
    """Return the configuration as plain values. To be called before anything is stepped or restored."""
    return {
        "optimizers": [
            {"class": type(one).__name__, "groups": [_plain(_hyperparameters(group)) for group in one.param_groups]}
            for one in optimizers
        ],
        "schedules": [
            {"class": type(config.scheduler).__name__, "values": _plain(config.scheduler.state_dict() or {})}
            for config in schedules
        ],
    }


def differences(before: StateDict, now: StateDict, put_back: Sequence[tuple[StateDict, Sequence[int]]]) -> list[str]:
    """Return a line for each value that is configured differently from the run that is resumed.

    Args:
        before: What `describe` returned for the run that was saved.
        now: The same for this run.
        put_back: For each optimizer what `fit_groups` returned; a value in it that equals the configured one was
            overridden.
    """
    lines = []
    for index, (old, new) in enumerate(zip(before["optimizers"], now["optimizers"], strict=False)):
        where = f"optimizer {index}" if len(now["optimizers"]) > 1 else "the optimizer"
        lines += _class_changed(where, old, new)
        state, order = put_back[index]
        for number, (group, own, source) in enumerate(zip(state["param_groups"], new["groups"], order, strict=False)):
            if source >= len(old["groups"]):
                continue  # added during training
            at = f"{where}, group {number}" if len(new["groups"]) > 1 else where
            saved, loaded = old["groups"][source], _plain(_hyperparameters(group, of_start=False))
            lines += [
                f"{at}: {key}={own[key]!r} is configured, and the checkpoint has {saved[key]!r}"
                for key in own
                if key in saved and saved[key] != own[key] and loaded.get(key) != own[key]
            ]
    for index, (old, new) in enumerate(zip(before["schedules"], now["schedules"], strict=False)):
        where = f"schedule {index} ({new['class']})" if len(now["schedules"]) > 1 else new["class"]
        lines += _class_changed(where, old, new)
        lines += [
            f"{where}: {key}={value!r} is configured, and the checkpoint has {old['values'][key]!r}"
            for key, value in new["values"].items()
            if old["class"] == new["class"] and key in old["values"] and old["values"][key] != value
            and key not in ("base_lrs", "_last_lr")  # the optimizer's, which were said
        ]  # fmt: skip
    return lines


def names_of(module: nn.Module, optimizer: Any) -> list[list[str]] | None:  # Any: DeepSpeed's have more attributes
    """Return the names of an optimizer's parameters by group; None if it has some that are not the module's."""
    names = {id(one): name for name, one in all_names(module).items()}
    # DeepSpeed's engine has put flat tensors into `param_groups`.
    groups = optimizer.groups if "root" in vars(optimizer) else [group["params"] for group in optimizer.param_groups]
    if all(id(one) in names for members in groups for one in members):
        return [[names[id(one)] for one in members] for members in groups]
    return None


def all_names(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by the names that they have in checkpoints."""
    return plain_names(dict(module.named_parameters()))


def fit_groups(
    state: StateDict,
    saved: Sequence[Sequence[str]],
    own: Sequence[Sequence[str]],
    *,
    known: Collection[str],
    name: str,
) -> tuple[StateDict, list[int]]:
    """Return a state in the order of an optimizer's groups and parameters, and which saved group each group was.

    Args:
        state: In torch's layout.
        saved: Names of its parameters by group.
        own: Names of the optimizer's parameters by group.
        known: Names of all parameters of the module.
        name: Of the optimizer's class.

    Raises:
        CheckpointError: Groups hold different parameters; all that moved, are new or are missing are named.
    """
    groups = state["param_groups"]
    as_it_is = dict(state), list(range(len(own)))
    if [len(one) for one in saved] != [len(group["params"]) for group in groups]:
        return as_it_is  # an engine counts differently
    if list(map(list, saved)) == list(map(list, own)):
        return as_it_is
    sets = [set(members) for members in saved]
    found = [sets.index(set(members)) if set(members) in sets else -1 for members in own]
    if sorted(found) != list(range(len(saved))):
        if _are_renamed(saved, own, known):
            return as_it_is  # names were changed, and positions were not
        raise CheckpointError(
            f"the checkpoint's state of {name} has other parameter groups: {_tell(saved, own)}.",
            fix="let configure_optimizers make the groups of the run that was saved, or start from its weights with "
            "load_from_checkpoint.",
        )
    fitted, entries, count = [], {}, 0
    for index, members in zip(found, own, strict=True):
        numbers = dict(zip(saved[index], groups[index]["params"], strict=True))
        fitted.append({**groups[index], "params": list(range(count, count + len(members)))})
        if PARAM_NAMES in groups[index]:
            fitted[-1][PARAM_NAMES] = list(members)
        for position, member in enumerate(members):
            if numbers[member] in state["state"]:
                entries[count + position] = state["state"][numbers[member]]
        count += len(members)
    return {**state, "state": entries, "param_groups": fitted}, found


def _hyperparameters(group: ParamGroup, *, of_start: bool = True) -> StateDict:
    """Return the configured values of a group. If a schedule has changed `lr` already, the group has `initial_lr`."""
    lr = group.get("initial_lr", group.get("lr")) if of_start else group.get("lr")
    return {"lr": lr, **{key: value for key, value in group.items() if key not in _NOT_GIVEN}}


def _plain(values: StateDict) -> StateDict:
    """Return the values that a checkpoint can hold and that can be compared. Reads rates that are tensors."""
    plain = {}
    for key, value in values.items():
        read = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if type(read) in _PLAIN or (isinstance(read, list | tuple) and _is_plain(read)):
            plain[key] = read
    return plain


def _is_plain(value: Tree) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return type(value) in _PLAIN


def _class_changed(where: str, old: StateDict, new: StateDict) -> list[str]:
    if old["class"] == new["class"]:
        return []
    return [f"{where} is {new['class']}, and the checkpoint's is {old['class']}"]


def _are_renamed(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]], known: Collection[str]) -> bool:
    """Whether positions agree: each name is the same, or the module no longer has it."""
    return [len(one) for one in saved] == [len(one) for one in own] and all(
        old == new or old not in known
        for before, now in zip(saved, own, strict=True)
        for old, new in zip(before, now, strict=True)
    )


def _tell(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> str:
    before = {name: index for index, members in enumerate(saved) for name in members}
    now = {name: index for index, members in enumerate(own) for name in members}
    told = [f"{len(saved)} groups there and {len(own)} here"] if len(saved) != len(own) else []
    told += [f"{name} was in group {before[name]} and is in group {now[name]}"
             for name in now if name in before and before[name] != now[name]]  # fmt: skip
    told += [f"{name} is new" for name in now if name not in before]
    told += [f"{name} is in none any more" for name in before if name not in now]
    return ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")
