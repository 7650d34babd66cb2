"""Checks of the arguments of `MeshStrategy`, before processes start."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from .context.options import Context
from .pipeline.options import Pipeline

__all__ = ["check_arguments", "check_context", "check_pipeline"]

# Any in this file: arguments of FSDPStrategy.


def check_context(context: object) -> None:
    """Refuse options of context parallelism of another class."""
    if context is not None and not isinstance(context, Context):
        raise ConfigError(
            f"Expected context= to be a Context, got {context!r}.",
            fix='pass context=Context(inputs={"input_ids": 1}), or leave it out.',
        )


def check_pipeline(pipeline: object) -> None:
    """Refuse options of pipeline stages of another class."""
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise ConfigError(f"Expected pipeline= to be a Pipeline, got {pipeline!r}.", fix="pass Pipeline(...), or None.")


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
