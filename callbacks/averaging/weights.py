"""A module's tensors by name, for callbacks that keep copies or averages of them beside the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, ConfigError
from ...strategies.base import plain_name as clean_name
from ...strategies.distributed.shards import as_shards, full_tensor, is_sharded, read_full

if TYPE_CHECKING:
    from ...protocols import StateDict, TensorInFile
    from ...trainer import Trainer

__all__ = [
    "as_whole",
    "check_fit",
    "clean_name",
    "clones_of",
    "in_memory",
    "keep_trained",
    "kept_dtype",
    "part_of",
    "placed",
    "refuse_engines",
    "refuse_shards",
    "tensors_of",
    "tied_names",
    "write",
]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, each tensor once; sharded ones as such.

    Reading the state lets a sharding strategy reshard what a pass has left gathered.
    """
    saved = {clean_name(name) for name in module.state_dict(keep_vars=True)}
    named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return {clean_name(name): tensor for name, tensor in named if clean_name(name) in saved}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tensors that have several: alias -> the name that `tensors_of` uses."""
    first = {id(tensor): name for name, tensor in tensors_of(module).items()}
    state = {clean_name(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    return {name: first[id(t)] for name, t in state.items() if id(t) in first and first[id(t)] != name}


def kept_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of an average: float32 for half precision, in which small changes would get lost."""
    return _WIDE.get(tensor.dtype, tensor.dtype)


def clones_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that may be written to outside of inference mode, too."""
    with torch.inference_mode(False), torch.no_grad():
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def placed(
    value: Tensor | TensorInFile, like: Tensor, device: torch.device | None = None, *, copy: bool = False
) -> Tensor:
    """Return an average of a module's tensor, sharded as it is, in the dtype of averages. Does not communicate.

    Args:
        value: In memory, full or sharded, or in a file and not read yet.
        like: The module's tensor.
        device: Device of the average; None: that of the tensor.
        copy: Whether the result must have memory of its own.
    """
    with torch.inference_mode(False), torch.no_grad():
        near: Tensor
        if is_sharded(like):
            is_new = not is_sharded(value)
            near = as_shards(value, like)
        else:
            near = read_full(value)
            is_new = near is not value
        dtype = kept_dtype(like)
        return near.detach().to(device=device or like.device, dtype=dtype, copy=copy and not is_new)


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory and may be empty; a full tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # else it is a new tensor with a graph
        return tensor.to_local()


def in_memory(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return averages for a checkpoint: those that were loaded and not needed may still be in a file."""
    return {name: read_full(value) for name, value in values.items()}


def as_whole(value: Tensor | TensorInFile) -> Tensor:
    """Return a copy of an average as a full tensor. For a sharded one it communicates: call it on every rank."""
    with torch.no_grad():
        near: Tensor = read_full(value)
        return full_tensor(near) if is_sharded(near) else near.detach().clone()


def write(values: Mapping[str, Tensor | TensorInFile], tensors: Mapping[str, Tensor], *, owner: str) -> None:
    """Copy values into the module's own tensors: what holds a reference to them (optimizers, graphs) sees it.

    Args:
        values: By name; sharded values of full tensors are gathered, on every rank.
        tensors: Those of the module.
        owner: The callback, for messages.

    Raises:
        CheckpointError: Names or shapes differ.
    """
    check_fit(values, tensors, owner=owner)
    with torch.inference_mode(False), torch.no_grad():  # in this order: the first one turns gradients on
        for name, tensor in tensors.items():
            value: Tensor = read_full(values[name]) if not is_sharded(tensor) else as_shards(values[name], tensor)
            tensor.copy_(full_tensor(value) if is_sharded(value) and not is_sharded(tensor) else value)


def check_fit(values: Mapping[str, Tensor | TensorInFile], tensors: Mapping[str, Tensor], *, owner: str) -> None:
    """Compare names and shapes.

    Args:
        values: What a callback has.
        tensors: What the module has.
        owner: The callback, for the message.

    Raises:
        CheckpointError: Names everything that differs.
    """
    problems = [f"missing {name}" for name in tensors if name not in values]
    problems += [f"unexpected {name}" for name in values if name not in tensors]
    problems += [
        f"{name} has shape {tuple(values[name].shape)}, the module {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in values and values[name].shape != tensor.shape
    ]
    if problems:
        raise CheckpointError(
            f"{owner}: the average does not fit the module: {'; '.join(problems)}.",
            fix="resume with the module that was averaged, or start without its state.",
        )


def keep_trained(checkpoint: StateDict, raw: Mapping[str, Tensor] | None, aliases: Mapping[str, str]) -> None:
    """Put the trained values into a checkpoint's "state_dict" while the module holds an average.

    Args:
        checkpoint: Its "state_dict" is changed.
        raw: The trained values by name; None while they are in the module.
        aliases: Further names of tied tensors.
    """
    if raw is not None:
        own = {**raw, **{alias: raw[name] for alias, name in aliases.items() if name in raw}}
        weights = checkpoint["state_dict"]
        weights.update({key: own[key] for key in weights if key in own})


def refuse_engines(trainer: Trainer, *, owner: str) -> None:
    """Refuse strategies whose engine holds the parameters.

    Raises:
        ConfigError: DeepSpeed, or FSDP of XLA.
    """
    if trainer.strategy.traits.holds_parameters:
        if trainer.strategy.traits.has_stages:
            raise ConfigError(
                f"{owner} reads and writes the weights, and each pipeline stage has only some of them.",
                fix="train without pp, or leave the callback out.",
            )
        is_of_xla = trainer.strategy.traits.accelerator_kind == "xla"
        others = "strategy='xla'" if is_of_xla else "strategy='fsdp', strategy='ddp'"
        raise ConfigError(
            f"{owner} reads and writes the weights, and under {type(trainer.strategy).__name__} the engine holds "
            "them, in shards.",
            fix=f"use {others} or one device, or leave the callback out.",
        )


def refuse_shards(trainer: Trainer, module: nn.Module, *, owner: str) -> None:
    """Refuse modules whose parameters are sharded over ranks.

    Raises:
        ConfigError: The strategy shards the module.
    """
    refuse_engines(trainer, owner=owner)
    is_spread = any(is_sharded(parameter) for parameter in module.parameters())
    if is_spread or trainer.strategy.traits.shards_parameters:
        raise ConfigError(
            f"{owner} needs the full module on each rank, and {type(trainer.strategy).__name__} shards it.",
            fix="use strategy='ddp' or one device, or leave the callback out.",
        )
