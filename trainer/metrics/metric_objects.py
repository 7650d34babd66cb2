"""The states of torchmetrics objects, of one process and of several ranks.

Over ranks, a metric object is joined by the reductions that it declares (`_reductions`), from states that were gathered
as objects. Its `sync` is not used, because it gathers tensor by tensor: there a rank that never updated the metric, or
has another number of tensors in a list, would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...protocols import StateDict, Tree
from .accumulators import TorchMetric, is_metric

States = Mapping[str, StateDict]  # path -> update count and states, as `metric_states` returns them


def metric_states(module: nn.Module, *, copy: bool = False) -> dict[str, StateDict]:
    """Return the state of each torchmetrics metric in the module, by its path: torchmetrics leaves it out.

    Args:
        module: The module.
        copy: Whether later updates of the metrics must not reach what is returned.
    """

    def kept(state: Tree) -> Tree:
        if isinstance(state, list):
            return [kept(item) for item in state]
        return state.clone() if copy and isinstance(state, Tensor) else state

    return {
        path: {
            "update_count": child._update_count,
            "states": {name: kept(getattr(child, name)) for name in child._defaults},
        }
        for path, child in module.named_modules()
        if is_metric(child)
    }


def load_metric_states(
    module: nn.Module,
    states: Mapping[str, StateDict] | list[Mapping[str, StateDict]],
    device: torch.device | None = None,
    place: tuple[int, int] = (0, 1),
) -> None:
    """Load what `metric_states` returned, or the list that `Metrics.of_ranks` made of it.

    Args:
        module: The module.
        states: Path -> state; a list of these where several ranks saved.
        device: Where the states live; None leaves them where they are.
        place: This process's rank and the number of ranks.

    Raises:
        CheckpointError: Another number of ranks saved, and a metric's state cannot be joined.
    """
    if isinstance(states, list) or place[0]:
        states = _own_states(module, states, *place)
    for path, child in module.named_modules():
        if path in states and is_metric(child):
            child._update_count = states[path]["update_count"]
            for name, value in states[path]["states"].items():
                moved = [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
                setattr(child, name, moved)


def to_cpu(value: Tree) -> Any:  # Any: of the kind that it is given
    """Return nested containers with their tensors on the CPU, detached, so that they can travel between processes."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(item) for item in value)
    return value


def compute_joined(metric: TorchMetric, everywhere: Sequence[States]) -> Tree:
    """Return what the metric computes from the states of all ranks; its own state is restored.

    A later `compute()` by the user returns the same value, until the metric is updated or reset.

    Args:
        metric: The metric; those inside it (a wrapper's, a composition's) are joined, too.
        everywhere: What `metric_states(metric)` returned on each rank, in rank order.
    """
    own = metric_states(metric)
    parts = {path: child for path, child in metric.named_modules() if is_metric(child)}
    syncs = {path: part._to_sync for path, part in parts.items()}
    try:
        for path, part in parts.items():
            part._computed = None
            part._to_sync = False
            _put(part, _joined(part, [states[path] for states in everywhere if path in states]))
        return metric.compute()
    finally:
        for path, part in parts.items():
            part._to_sync = syncs[path]
            _put(part, own[path])


def _own_states(module: nn.Module, states: States | list[States], rank: int, size: int) -> States:
    """Return what this rank takes over of the states in a checkpoint: each update counts once.

    On as many ranks as saved each takes its own; else rank 0 takes over all of them, and the others begin empty.

    Raises:
        CheckpointError: The states of a metric cannot be joined into one that continues.
    """
    everywhere = states if isinstance(states, list) else [states]
    if len(everywhere) == size:
        return everywhere[rank]
    if rank:
        return {}
    parts = {path: child for path, child in module.named_modules() if is_metric(child)}
    return {
        path: _joined(part, [one[path] for one in everywhere if path in one], path=path)
        for path, part in parts.items()
        if any(path in one for one in everywhere)
    }


def _joined(metric: TorchMetric, states: Sequence[StateDict], *, path: str | None = None) -> StateDict:
    """Join the states of one metric; with a path, into a form that can be updated further.

    Ranks without an update do not count: they only have initial values.
    """
    filled = [state for state in states if state["update_count"]] or list(states[:1])
    if len(filled) == 1:
        return filled[0]
    joined: StateDict = {}
    for name, reduction in metric._reductions.items():
        values = [state["states"][name] for state in filled]
        if any(isinstance(value, list) for value in values):
            items = [item for value in values for item in (value if isinstance(value, list) else [value])]
            joined[name] = reduction(items) if path is None and items and reduction is not None else items
        elif reduction is not None:
            joined[name] = reduction(torch.stack(values))
        elif path is None:
            joined[name] = torch.stack(values)
        else:
            raise CheckpointError(
                f"the checkpoint has the state of the metric {path!r} ({type(metric).__name__}) of {len(states)} "
                "ranks in the middle of an epoch, and that kind of metric cannot continue from several states.",
                fix=f"resume on {len(states)} ranks, or from a checkpoint that was taken at the end of an epoch.",
            )
    return {"update_count": sum(state["update_count"] for state in filled), "states": joined}


def _put(metric: TorchMetric, state: StateDict) -> None:
    metric._update_count = state["update_count"]
    for name, value in state["states"].items():
        if isinstance(value, list):
            device = torch.device("cpu") if metric.compute_on_cpu else metric.device
            setattr(metric, name, [item.to(device) for item in value])
        else:
            setattr(metric, name, value.to(metric.device))
