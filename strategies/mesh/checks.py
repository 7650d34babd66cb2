"""Checks of the arguments of `MeshStrategy`, before processes start."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from .axes import MeshAxes
from .context.options import Context
from .pipeline.options import Pipeline

__all__ = ["check_arguments", "check_context", "check_experts", "check_loss", "check_pipeline"]

# Any in this file: arguments of FSDPStrategy.


def check_context(axes: MeshAxes, context: object) -> None:
    """Refuse options of context parallelism of another class, and pipeline stages beside it."""
    if context is not None and not isinstance(context, Context):
        raise ConfigError(
            f"Expected context= to be a Context, got {context!r}.",
            fix='pass context=Context(inputs={"input_ids": 1}), or leave it out.',
        )
    others = [f"{name}={size}" for name, size in (("pp", axes.pp), ("tp", axes.tp)) if size != 1]
    if axes.cp != 1 and others:
        raise ConfigError(
            f"Expected cp={axes.cp} with the axes dp and fsdp only, got {', '.join(others)}: not available together.",
            fix="pass cp=1, or leave the other axes out.",
        )


def check_experts(axes: MeshAxes) -> None:
    """Refuse axes that cannot be combined with experts."""
    others = [f"{name}={getattr(axes, name)}" for name in ("pp", "cp", "tp") if getattr(axes, name) != 1]
    if axes.ep > 1 and others:
        raise ConfigError(
            f"Expected ep={axes.ep} with the axes dp and fsdp only, got {', '.join(others)}: not available together.",
            fix="leave out ep, or the other axes.",
        )


def check_pipeline(pipeline: object) -> None:
    """Refuse options of pipeline stages of another class."""
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise ConfigError(f"Expected pipeline= to be a Pipeline, got {pipeline!r}.", fix="pass Pipeline(...), or None.")


def check_loss(pp: int, *, loss_parallel: bool) -> None:
    """Refuse losses in parts beside pipeline stages."""
    if loss_parallel and pp != 1:
        raise ConfigError(
            f"Expected loss_parallel=False with pipeline stages, got True and pp={pp}: not available together.",
            fix="leave loss_parallel out, or train without pp; sequence_parallel=True is available with pp.",
        )


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of FSDPStrategy that say what the axes say."""
    for name in ("device_mesh", "mesh"):
        if arguments.get(name) is not None:
            raise ConfigError(
                f"Expected {name}= to be left out of MeshStrategy, got {arguments[name]!r}: it follows from the axes.",
                fix="pass the number of copies as dp= and the number of shards as fsdp=.",
            )
    chosen = arguments.get("sharding_strategy")
    name = str(getattr(chosen, "name", chosen))
    if chosen is not None and name not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise ConfigError(
            f"Expected sharding_strategy='FULL_SHARD' or 'SHARD_GRAD_OP' for MeshStrategy, got {chosen!r}.",
            fix="leave it out, and pass the number of copies as dp= and the number of shards as fsdp=.",
        )
