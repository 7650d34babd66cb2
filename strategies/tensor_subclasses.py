"""`pack_subclasses`: tensor subclasses in the states of optimizers, held by their inner tensors and plain context.

torchao's 8-bit optimizers keep such states. A checkpoint names their class, which is looked up among those registered
with `torch.serialization.add_safe_globals` (torchao registers its own when it is imported), and never imported.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..messages import warn
from .distributed.shards import is_sharded, read_full
from .tree import leaves, map_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.optim import Optimizer

    from ..protocols import StateDict

_PLAIN = (Tensor, nn.Parameter)
_KEY = "__loopwright_tensor_subclass__"

# Any in this file: what a state holds.


def pack_subclasses(state: StateDict, optimizer: Optimizer) -> StateDict:
    """Return a state in which inner tensors and context stand for each tensor of a registered subclass.

    It is the same object if there is none; else `state` is not changed. A sharded tensor whose shards are of a subclass
    is gathered, on every rank, and is None on all ranks of its mesh except the first.

    Raises:
        CheckpointError: Such shards cannot be gathered.
    """
    if all(type(value) in _PLAIN for _, value in leaves(state) if isinstance(value, Tensor)):
        return state
    if (sharded := _kind_of_shards(state)) is not None:
        raise _unsavable(optimizer, sharded)
    known = _registered()

    def pack(value: Any) -> Any:
        if is_sharded(value) and type(value._local_tensor) not in _PLAIN:
            value = _gathered(value, optimizer)
        kind = type(value)
        if known.get(_name(kind)) is not kind:
            return value
        names, context = value.__tensor_flatten__()
        return {
            _KEY: {
                "class": _name(kind),
                "tensors": {name: pack(getattr(value, name)) for name in names},
                "context": context,
                "size": value.size(),
                "stride": value.stride(),
            }
        }

    packed: StateDict = map_leaves(state, pack)
    return packed


def unpack_subclasses(state: StateDict, optimizer: Optimizer) -> StateDict:
    """Return a state of `pack_subclasses` as it was; another one is returned unchanged.

    Raises:
        CheckpointError: A class is not registered, or does not accept what the file holds.
    """
    if not any(_KEY in path for path, _ in leaves(state)):
        return state
    known = _registered()

    def unpack(value: Any) -> Any:
        if isinstance(value, dict):
            return build(value[_KEY]) if value.keys() == {_KEY} else {key: unpack(one) for key, one in value.items()}
        return type(value)(map(unpack, value)) if type(value) in (list, tuple) else value

    def build(packed: Any) -> Tensor:
        name = packed.get("class") if isinstance(packed, dict) else None
        kind = known.get(str(name))
        if kind is None:
            raise CheckpointError(
                f"Expected {name}, a class of tensors in the saved state of {type(optimizer).__name__}, among "
                "torch.serialization.get_safe_globals(), got a program that has not registered it.",
                fix="import its package before you resume, or register the class with "
                "torch.serialization.add_safe_globals([...]).",
            )
        try:
            inner = {attribute: unpack(one) for attribute, one in read_full(packed["tensors"]).items()}
            made: Tensor = kind.__tensor_unflatten__(inner, packed["context"], packed["size"], packed["stride"])
        except Exception as error:  # the class checks what it is built from in its own way
            raise CheckpointError(
                f"Expected a saved state of {type(optimizer).__name__} from which {name} can be built, got "
                f"{type(error).__name__}: {error}.",
                fix="use another checkpoint, or install the version of its package that wrote this one.",
            ) from error
        return made

    unpacked: StateDict = unpack(state)
    return unpacked


def _gathered(value: DTensor, optimizer: Optimizer) -> Tensor | None:
    """Return the full tensor on the CPU of the first rank of its mesh."""
    try:  # torch uses what the class implements
        with torch.no_grad():
            full: Any = value.full_tensor()
            names, context = full.__tensor_flatten__()
            inner = {name: getattr(full, name) for name in names}
            # Torch wraps each in an AsyncCollectiveTensor.
            ready = {name: one.wait() if hasattr(one, "wait") else one for name, one in inner.items()}
            full = type(full).__tensor_unflatten__(ready, context, full.size(), full.stride())
            return None if any(value.device_mesh.get_coordinate() or ()) else full.cpu()
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise _unsavable(optimizer, _name(type(value._local_tensor))) from error


def refuse_shards(optimizer: Optimizer, *, warns: bool) -> None:
    """Refuse sharded states that `pack_subclasses` cannot gather, long before they are saved; or only warn."""
    kind = _kind_of_shards(list(optimizer.state.values()))
    if kind is None:
        return
    if not warns:
        raise _unsavable(optimizer, kind)
    warn(f"Checkpoints with optimizer states will fail. {_unsavable(optimizer, kind)}")


def _kind_of_shards(state: object) -> str | None:
    """Return the class of the first local shard that is not a plain tensor and cannot be gathered.

    The class gathers inner tensors of equal sizes, and splits them along the first dimension only.
    """
    for _, value in leaves(state):
        if is_sharded(value) and (kind := type(value._local_tensor)) not in _PLAIN:
            axes = [(axis, one) for axis, one in enumerate(value.placements) if not one.is_replicate()]
            size = math.prod(value.device_mesh.size(axis) for axis, _ in axes)
            if len(axes) > 1 or value.shape[0] % size or not all(one.is_shard(0) for _, one in axes):
                return _name(kind)
    return None


def _unsavable(optimizer: Optimizer, kind: str) -> CheckpointError:
    return CheckpointError(
        f"Expected states of {type(optimizer).__name__} that are plain tensors or are split evenly along their first "
        f"dimension, got shards of {kind} that are not, and cannot be saved.",
        fix='use strategy="ddp", an optimizer with plain states, such as torch.optim.AdamW, or '
        "ModelCheckpoint(save_weights_only=True).",
    )


def _registered() -> dict[str, Any]:
    """Return the tensor subclasses with inner tensors, by name, that torch.load(weights_only=True) may build here."""
    kinds = [one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals()]
    return {
        _name(kind): kind
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")
        if not kind.__module__.startswith("torch.")  # DTensor and nested tensors, which are described elsewhere
    }


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
