"""A module's tensors by name, for callbacks that keep copies or averages of them beside the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer

__all__ = ["check_fit", "clean_name", "clones_of", "kept_dtype", "refuse_shards", "tensors_of", "tied_names", "write"]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def clean_name(name: str) -> str:
    """Return a tensor's name without the prefix of torch.compile's wrapper."""
    return name.replace("_orig_mod.", "")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, each tensor once."""
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


def write(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, owner: str) -> None:
    """Copy values into the module's own tensors: what holds a reference to them (optimizers, graphs) sees it.

    Raises:
        CheckpointError: Names or shapes differ.
    """
    check_fit(values, tensors, owner=owner)
    with torch.inference_mode(False), torch.no_grad():  # in this order: the first one turns gradients on
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


def check_fit(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, owner: str) -> None:
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
            fix="resume with the module that the average was made of, or start without its state.",
        )


def refuse_shards(trainer: Trainer, module: nn.Module, *, owner: str) -> None:
    """Refuse modules of which each rank holds a part only.

    Raises:
        ConfigError: The strategy shards the module.
    """
    name = str(getattr(trainer.strategy, "strategy_name", ""))
    # By name: asking for the class would import torch.distributed.
    has_shards = any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())
    if has_shards or name.startswith(("fsdp", "deepspeed", "xla_fsdp")):
        raise ConfigError(
            f"{owner} needs the whole module on each rank, and {type(trainer.strategy).__name__} gives each a part.",
            fix="use strategy='ddp' or one device, or leave the callback out.",
        )
