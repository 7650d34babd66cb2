"""Optimizer states that name their parameters, fitted to an optimizer's own groups. Called by trainer/snapshot.py.

A state in torch's layout counts parameters, in the order of the groups. Where it says their names, too (`param_names`,
as torch's optimizers do that were built of named parameters, and as DeepSpeed's folders are read), it fits an
optimizer that has them in another order, or has frozen ones besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["NAMES", "fit_by_name"]

NAMES = "param_names"


def fit_by_name(
    state: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> dict[str, Any]:  # Any: an optimizer's state in torch's layout
    """Return a state with the parameters that an optimizer has, in its order.

    What does not fit, or has no names, comes as it is: the optimizer says what is wrong with it.

    Args:
        state: In torch's layout.
        groups: Names of the optimizer's parameters, by group.
    """
    saved = state.get("param_groups")
    if not isinstance(saved, list) or len(saved) != len(groups) or not all(NAMES in group for group in saved):
        return dict(state)
    known = [dict(zip(group[NAMES], group["params"], strict=True)) for group in saved]
    if any(set(one) - set(members) for one, members in zip(known, groups, strict=True)):
        return dict(state)
    numbers: dict[str, int] = {}
    entries = {}
    fitted = []
    for group, one, members in zip(saved, known, groups, strict=True):
        own = {key: value for key, value in group.items() if key not in ("params", NAMES)}
        own["params"] = [numbers.setdefault(name, len(numbers)) for name in members]
        fitted.append(own)
        for name in members:
            if name in one and one[name] in state["state"]:
                entries[numbers[name]] = state["state"][one[name]]
    return {**state, "state": entries, "param_groups": fitted}
