"""From what the user typed to parts that fit together: strings, instances and environment in, `Parts` out.

Called by Fabric's constructor (and so by Trainer's). Changes nothing: a configuration that cannot work is one
ConfigError that names all problems, before any process or device is touched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..accelerators import Accelerator
from ..errors import ConfigError
from ..precision import Precision
from ..strategies import Launcher, ParallelStrategy, Strategy
from .choose import (
    ONE_DEVICE_ONLY,
    Plugins,
    check_conflicts,
    check_num_nodes,
    choose_accelerator,
    choose_precision,
    choose_strategy,
    find_devices,
    join_errors,
    precision_name,
    sort_plugins,
)
from .cluster import ClusterEnvironment, LocalEnvironment
from .launch import InProcessLauncher

__all__ = ["Environment", "Parts", "resolve"]

R = TypeVar("R")


@dataclass(frozen=True)
class Environment:
    """What the outcome depends on beside the arguments."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    interactive: bool = False
    """Whether a person sits at a prompt or notebook."""

    @classmethod
    def current(cls) -> Environment:
        """Return this process's environment."""
        return cls(dict(os.environ), hasattr(sys, "ps1") or "ipykernel" in sys.modules)


@dataclass(frozen=True)
class Parts:
    """What a Fabric is made of."""

    accelerator: Accelerator
    strategy: Strategy
    precision: Precision
    devices: tuple[torch.device, ...]
    """One per process of this node."""
    num_nodes: int
    checkpoint_io: Any  # Any: a user's checkpoint IO
    """None: Fabric's own."""
    cluster_environment: ClusterEnvironment
    layer_sync: Any  # Any: a user's layer synchronisation
    """Kept for strategies with several processes; None without one."""
    launcher: Launcher
    warnings: tuple[str, ...] = ()
    """What the user chose and we changed: to be said once, on rank zero."""
    notes: tuple[str, ...] = ()
    """What was chosen for the user and may surprise: for the log."""


@dataclass(frozen=True)
class _Row:
    """A pair of facts that cannot both be true."""

    one: str
    other: str
    what: str
    fix: str


# A later strategy or precision that cannot work with something adds a row here.
_CANNOT_WORK = (
    _Row(
        "precision=64-true",
        "accelerator=mps",
        "precision='64-true' cannot be used with accelerator='mps': the device has no float64.",
        "pass accelerator='cpu', or precision='32-true'.",
    ),
    _Row(
        "one process",
        "num_nodes>1",
        f"num_nodes={{num_nodes!r}} with strategy={{strategy!r}}: {ONE_DEVICE_ONLY}.",
        "pass num_nodes=1.",
    ),
    _Row(
        "one process",
        "devices>1",
        f"devices={{devices!r}} gives {{count}} devices with strategy={{strategy!r}}: {ONE_DEVICE_ONLY}.",
        "pass devices=1, or the index of one device as in devices=[0].",
    ),
    _Row(
        "one process",
        "torchrun",
        f"torchrun started {{world_size}} processes with strategy={{strategy!r}}: {ONE_DEVICE_ONLY}, so that each "
        f"process would train and write the same.",
        "start the script with python, or with --nproc-per-node=1.",
    ),
    _Row(
        "notebook",
        "script launcher",
        "strategy={strategy!r} starts processes in a way that does not work in a notebook.",
        "run it as a script, or pass strategy='auto' and devices=1.",
    ),
)


def resolve(
    *,
    accelerator: Any = "auto",  # Any, here and below: whatever the user typed
    strategy: Any = "auto",
    devices: Any = "auto",
    num_nodes: Any = 1,
    precision: Any = None,
    plugins: Any = None,
    environment: Environment | None = None,
) -> Parts:
    """Return the parts that the arguments of Trainer or Fabric ask for.

    Args:
        accelerator: "auto", "gpu", a registered name, or an Accelerator.
        strategy: "auto", a registered name in any case, or a Strategy.
        devices: "auto", a number, -1, indices as list or as string.
        num_nodes: Number of machines.
        precision: A name of `choose.PRECISIONS` or an alias; None leaves it to plugin and strategy, else "32-true".
        plugins: One or several of: a Precision, a checkpoint IO, a ClusterEnvironment, a layer synchronisation.
        environment: None takes this process's.

    Raises:
        ConfigError: Something cannot work; every problem is named.
    """
    environment = environment if environment is not None else Environment.current()
    problems: list[ConfigError] = []
    notes: list[str] = []
    changed: list[str] = []

    def attempt(function: Callable[..., R], *args: Any) -> R | None:
        try:
            return function(*args)
        except ConfigError as error:
            problems.append(error)
            return None

    plugged = attempt(sort_plugins, plugins) or Plugins()
    chosen_strategy = attempt(choose_strategy, strategy)
    nodes = attempt(check_num_nodes, num_nodes)
    attempt(check_conflicts, chosen_strategy, strategy, accelerator, precision, plugged)
    chosen_accelerator = attempt(choose_accelerator, accelerator, chosen_strategy)
    name = attempt(precision_name, precision, changed)
    found: list[torch.device] | None = None
    chosen_precision: Precision | None = None
    if chosen_accelerator is not None:
        found = attempt(find_devices, devices, chosen_accelerator, chosen_strategy, environment.interactive, notes)
        if name is not None and found:
            chosen_precision = attempt(choose_precision, name, precision, found[0].type, chosen_strategy, plugged)
    launcher = getattr(chosen_strategy, "launcher", None) or InProcessLauncher()
    facts = _facts(
        chosen_accelerator,
        chosen_strategy,
        chosen_precision.precision if chosen_precision else name,
        len(found or ()),
        nodes or 1,
        environment,
        launcher,
    )
    problems += _impossible_pairs(
        facts,
        strategy=strategy,
        devices=devices,
        num_nodes=num_nodes,
        count=len(found or ()),
        world_size=environment.variables.get("WORLD_SIZE"),
    )
    if problems:
        raise join_errors(problems)
    assert chosen_accelerator is not None
    assert chosen_strategy is not None
    assert chosen_precision is not None
    assert found is not None
    assert nodes is not None
    cluster = plugged.cluster_environment or getattr(chosen_strategy, "cluster_environment", None)
    return Parts(
        accelerator=chosen_accelerator,
        strategy=chosen_strategy,
        precision=chosen_precision,
        devices=tuple(found),
        num_nodes=nodes,
        checkpoint_io=plugged.checkpoint_io or chosen_strategy._checkpoint_io,
        cluster_environment=cluster or LocalEnvironment(),
        layer_sync=plugged.layer_sync,
        launcher=launcher,
        warnings=tuple(changed),
        notes=tuple(notes),
    )


# -- pairs -----------------------------------------------------------------------------------------------------------


def _facts(
    accelerator: Accelerator | None,
    strategy: Strategy | None,
    precision: str | None,
    num_devices: int,
    num_nodes: int,
    environment: Environment,
    launcher: Launcher,
) -> set[str]:
    world_size = environment.variables.get("WORLD_SIZE", "1")
    claims = {
        f"precision={precision}": True,
        f"accelerator={accelerator.name() if accelerator else None}": True,
        # A strategy of the user's own that says nothing about processes has one.
        "one process": not isinstance(strategy, ParallelStrategy),
        "num_nodes>1": num_nodes > 1,
        "devices>1": num_devices > 1,
        "torchrun": "TORCHELASTIC_RUN_ID" in environment.variables and world_size.isdecimal() and int(world_size) > 1,
        "notebook": environment.interactive,
        "script launcher": not launcher.is_interactive_compatible,
    }
    return {claim for claim, holds in claims.items() if holds}


def _impossible_pairs(facts: set[str], **shown: Any) -> list[ConfigError]:
    return [
        ConfigError(row.what.format(**shown), fix=row.fix)
        for row in _CANNOT_WORK
        if row.one in facts and row.other in facts
    ]
