"""The state of a run between two windows: taken for a group that heals, and restored within that group's fit.

It is the content of a checkpoint, without a file. Each rank of a group gets the state of the same rank of another
group: nothing is gathered, and sharded tensors are sent as local shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...callbacks import Callback, Checkpoint, ModelCheckpoint
from ...checkpoint import content as contents
from ...data.rng import restore_rng
from ...strategies.distributed.shards import is_sharded
from ...strategies.tree import map_leaves
from ..checkpointing import snapshot
from ..hooks import find_override
from ..loop.schedule import parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...checkpoint.content import Content
    from ...protocols import StateDict
    from ..run import FitRun

# Any in this file: leaves of states.

_SHARD = "loopwright.shard"


def take(run: FitRun, *, lasts: bool = False) -> StateDict:
    """Return the state of a run between two windows, which training does not change before the next step is made.

    It does not communicate, and is called in torchft's thread while the main thread waits.

    Args:
        run: The run.
        lasts: Whether later steps do not change it either: all tensors are copied to the host.
    """
    was, run.is_after_error = run.is_after_error, True  # then nothing is requested of the group's other ranks
    try:
        checkpoint = snapshot.collect(run, is_weights_only=False)
    finally:
        run.is_after_error = was
    assert run.groups is not None
    unchanged = set() if lasts else {_local(one).untyped_storage().data_ptr() for one in _stepped(run)}
    state: StateDict = map_leaves(
        {"checkpoint": checkpoint, "groups": run.groups.shared_state()},
        lambda leaf: _fixed(leaf, unchanged, lasts=lasts),
    )
    return state


def _stepped(run: FitRun) -> list[Tensor]:
    """Return the tensors that only the optimizer changes."""
    found = [parameter for optimizer in run.optimizers for parameter in parameters_of(optimizer)]
    states = [value for one in run.optimizers for state in one.state.values() for value in state.values()]
    return [*found, *(value for value in states if isinstance(value, Tensor))]


def _local(tensor: Tensor) -> Tensor:
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _fixed(leaf: Any, unchanged: set[int], *, lasts: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    own = _local(leaf).detach()
    if lasts:
        own = own.to("cpu", copy=True)
    elif own.untyped_storage().data_ptr() not in unchanged:
        own = own.clone()
    if not is_sharded(leaf):
        return own
    dims = [getattr(placement, "dim", None) for placement in leaf.placements]  # None: each rank has all of it
    return {_SHARD: own, "shape": list(leaf.shape), "stride": list(leaf.stride()), "dims": dims}


def put(run: FitRun, state: StateDict, source: str) -> StateDict:
    """Restore a state that was taken; the position of the data is restored when the epoch is reopened.

    Args:
        run: The run of this group.
        state: What `take` returned, here or in another group.
        source: What it is, for messages.

    Returns:
        What the groups share.
    """
    checkpoint = _joined(state["checkpoint"], _mesh_of(run))
    content = contents.read(checkpoint, source=source)
    content.extra["__checkpoint__"] = checkpoint
    states = content.states
    rng = states.pop("rng")
    _, num_ranks = run.metrics.place
    if num_ranks > 1:  # states are in the form that has those of all ranks: this one's is the own
        states["metrics"]["ranks"] = [states["metrics"]["slots"]] * num_ranks
        states["metric_objects"] = [states["metric_objects"]] * num_ranks
    run.trainer.ckpt_path = None
    kept = {one: one.state_dict() for one in run.callbacks if isinstance(one, ModelCheckpoint)}
    restore(run, content, source)
    for callback, own in kept.items():  # of the files that it has written here; else `take_over` brings a state
        callback.load_state_dict(own)
    run.unfinished = {}
    restore_rng(rng)
    shared: StateDict = state["groups"]
    return shared


def restore(run: FitRun, content: Content, source: str) -> Callable[[], None] | None:
    """Restore a checkpoint within a fit, between two windows; the data follow when the epoch is reopened.

    Returns:
        A function that restores the random number generators, to be called last; None if the content has none.
    """
    states = content.states
    for accumulator in run.metrics.accumulators("train"):
        accumulator.reset()
    if run.metrics.ranks is not None:
        run.metrics.ranks.discard_epoch(
            "train"
        )  # of an epoch's end that is left: the same values would not be sent again
    for accumulator in run.metrics.step_accumulators:
        accumulator.window = -1  # of an abandoned window, which has the number of one to come
    run.plan.zero_grad()
    run.module.zero_grad()  # also of parameters without an optimizer; gradients that wait are restored below
    snapshot.restore_module(run, content)
    put_back = snapshot.restore_training(run, content, source)
    run.loaders.restore_generators(states.get("validation_generators", {}))
    snapshot.restore_frozen(run, content)
    run.stream.load_state_dict(states["data"])
    run.at_boundary, run.trainer.should_stop = True, False
    _begin_again(run)
    return put_back


def _begin_again(run: FitRun) -> None:
    """Let callbacks whose states were restored hear the beginning of fit, as after a resume: some build on it."""

    def is_chosen(callback: Callback) -> bool:
        has_state = find_override(callback, "load_state_dict", (Callback,)) is not None
        return has_state and not isinstance(callback, Checkpoint)

    _begin(run, is_chosen)


def _begin(run: FitRun, is_chosen: Callable[[Callback], bool]) -> None:
    for name in ("on_fit_start", "on_train_start"):
        run.lifecycle.of_callbacks(name, chosen=is_chosen)()


def _mesh_of(run: FitRun) -> DeviceMesh | None:
    return next((one.device_mesh for one in run.module.parameters() if is_sharded(one)), None)


def _joined(tree: Any, mesh: DeviceMesh | None) -> Any:
    """Return a structure with sharded tensors in place of their local shards."""
    if isinstance(tree, dict) and _SHARD in tree:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        assert mesh is not None
        return DTensor.from_local(
            tree[_SHARD].to(mesh.device_type),
            mesh,
            [Replicate() if dim is None else Shard(dim) for dim in tree["dims"]],
            run_check=False,
            shape=torch.Size(tree["shape"]),
            stride=tuple(tree["stride"]),
        )
    if isinstance(tree, dict):
        return {key: _joined(value, mesh) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_joined(value, mesh) for value in tree)
    return tree


# --- who writes ------------------------------------------------------------------------------------------------------


def written(run: FitRun) -> StateDict:
    """Return what another group needs to know to write from here on: folders of loggers, and files that are kept."""
    kept = {one.state_key: one.state_dict() for one in run.callbacks if isinstance(one, ModelCheckpoint)}
    state: StateDict = map_leaves(
        {"versions": run.output.versions(), "callbacks": kept},
        lambda leaf: leaf.item() if isinstance(leaf, Tensor) else leaf,
    )
    return state


def take_over(run: FitRun, heard: StateDict, loggers: StateDict) -> None:
    """Begin to write: in the folders of the group that wrote before, beside its files.

    Args:
        run: The run of this group, whose loggers write from now on.
        heard: What `written` returned in that group; empty without one.
        loggers: States of loggers in the checkpoint that the run has resumed from.
    """
    if heard:
        run.output.join_versions(heard["versions"])
        run.trainer.ckpt_path = None  # its file may be gone
    elif loggers:
        snapshot.put_back_loggers(run.output, loggers)
    load_kept(run, heard)
    _begin(run, lambda callback: isinstance(callback, ModelCheckpoint))


def load_kept(run: FitRun, heard: StateDict) -> None:
    """Let checkpoint callbacks know the files that another group keeps."""
    for callback in run.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in heard.get("callbacks", ()):
            callback.load_state_dict(heard["callbacks"][callback.state_key])
