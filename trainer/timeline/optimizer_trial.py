"""A short trial of an optimizer's step, unchanged and fused, on tensors like the model's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...accelerators.usage import shortest_s
from ...optim.fused import is_fusable
from ...protocols import ParamGroup

# Any in this file: parameter groups, and the constructors of torch's optimizers.

_MOST_ELEMENTS = 2**20


@dataclass(frozen=True, slots=True)
class OptimizerTrial:
    """Seconds of an optimizer step in a trial.

    Attributes:
        name: Class of the optimizer.
        present_s: Seconds of a step as it is.
        fused_s: Seconds of a fused step.
    """

    name: str
    present_s: float
    fused_s: float

    @property
    def speedup(self) -> float:
        """How many times as fast a fused step is."""
        return self.present_s / self.fused_s if self.fused_s else 1.0


def try_fused(optimizers: Iterable[Optimizer]) -> OptimizerTrial | None:
    """Return what a step of the largest of these optimizers takes, as it is and fused; None if none can be fused.

    New tensors of the parameters' shapes are stepped, with constant gradients: nothing of the training is read or
    changed. Of large models a million elements are stepped, and the times extended to all of them. Sharded parameters
    are not tried. It takes some milliseconds, and memory of at most six times those elements.
    """
    found = [one for one in optimizers if is_fusable(one) and not _is_sharded(one)]
    if not found:
        return None
    optimizer = max(found, key=_count)
    try:
        sample, factor = _sample(optimizer)
        times = [_seconds(optimizer, sample, fused=fused) * factor for fused in (False, True)]
    except torch.OutOfMemoryError:  # the training comes first
        return None
    return OptimizerTrial(type(optimizer).__name__, *times)


def _is_sharded(optimizer: Optimizer) -> bool:
    return any(hasattr(one, "device_mesh") for group in optimizer.param_groups for one in group["params"])


def _count(optimizer: Optimizer) -> int:
    return sum(one.numel() for group in optimizer.param_groups for one in group["params"])


def _sample(optimizer: Optimizer) -> tuple[list[tuple[ParamGroup, torch.Tensor]], float]:
    """Return parameters with their groups, at most a million elements, and the ratio of all elements to these."""
    pairs = [(group, one.detach()) for group in optimizer.param_groups for one in group["params"] if one.numel()]
    total = sum(one.numel() for _, one in pairs)
    chosen: list[tuple[ParamGroup, torch.Tensor]] = []
    left = _MOST_ELEMENTS
    for group, one in pairs:
        if one.numel() <= left:
            chosen.append((group, one))
            left -= one.numel()
    if not chosen:
        group, one = pairs[0]
        chosen = [(group, one.flatten()[:_MOST_ELEMENTS])]
    return chosen, total / sum(one.numel() for _, one in chosen)


def _seconds(optimizer: Optimizer, sample: list[tuple[ParamGroup, torch.Tensor]], *, fused: bool) -> float:
    """Return the shortest of some steps, after one that allocates the state."""
    groups = []
    for group, one in sample:
        parameter = nn.Parameter(torch.full_like(one, 0.5))
        parameter.grad = torch.full_like(one, 1e-3)
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [parameter], "lr": 1e-3})
        if fused:
            groups[-1].update(fused=True, foreach=False)
    kind: Any = type(optimizer)
    trial = kind(_merged(groups), lr=1e-3)
    return shortest_s(trial.step, sample[0][1].device)


def _merged(groups: list[ParamGroup]) -> list[ParamGroup]:
    """Return the groups with those joined that differ in their parameters only: a step has a launch for each."""
    merged: list[ParamGroup] = []
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        if merged and {key: value for key, value in merged[-1].items() if key != "params"} == options:
            merged[-1]["params"] = [*merged[-1]["params"], *group["params"]]
        else:
            merged.append(group)
    return merged
