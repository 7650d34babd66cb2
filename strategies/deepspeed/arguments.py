"""What DeepSpeedStrategy was given, arguments and a configuration, as one; and what the Trainer's plan says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from . import checks as checks
from . import config as configs

__all__ = ["Given", "facts_of", "read_given"]

# Any in this file: values of a JSON document, and what users give.


@dataclass(frozen=True)
class Given:
    """What the constructor was given.

    Attributes:
        config: DeepSpeed's configuration of all of it.
        arguments: The constructor's, with the stage that the configuration says.
        where: Where the configuration stands, for messages.
        problems: (what, fix) of what cannot work.
    """

    config: dict[str, Any]
    arguments: configs.Arguments
    where: str
    problems: list[tuple[str, str]]


def read_given(config: Any, values: Mapping[str, Any]) -> Given:
    """Return what a constructor was given, with every problem of it.

    Args:
        config: A dict, a path, or None; see `configs.read`.
        values: The constructor's arguments by name; others are passed over.
    """
    arguments = configs.Arguments(**{name: values[name] for name in configs.ARGUMENTS})
    problems: list[tuple[str, str]] = []
    where = "the strategy's arguments"
    content = configs.build(arguments)
    try:
        read, place = configs.read(config)
        if read is not None:
            where = place
            problems += checks.check_sections(read, where)
            if not problems:
                content, arguments = configs.combined(read, arguments, where)
    except ConfigError as error:
        problems.append((error.what.rstrip("."), error.fix.rstrip(".")))
    problems += checks.check_arguments(arguments)
    problems += checks.check_activations(content, where)
    return Given(content, arguments, where, problems)


def facts_of(plan: Mapping[str, Any], *, world_size: int, batch_size: int | None, dtype: str) -> configs.Facts:
    """Return what is known of a run.

    Args:
        plan: The Trainer's; empty where the loop is the user's own.
        world_size: Number of processes.
        batch_size: Samples of one micro-batch of one process, where the plan does not say; None: nobody knows.
        dtype: Of the parameters that the engine computes with.
    """
    clip = plan.get("gradient_clip_val", None) or 0.0
    is_norm = plan.get("gradient_clip_algorithm") in (None, "norm")
    return configs.Facts(
        world_size=world_size,
        accumulate=plan.get("accumulate_grad_batches"),
        clip=None if not plan else float(clip) if is_norm else 0.0,
        micro_batch=plan.get("micro_batch_size") or batch_size,
        dtype=dtype,
        global_batch=plan.get("global_batch_size"),
        grad_dtype=plan.get("grad_accumulation_dtype"),
    )
