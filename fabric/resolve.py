"""Resolution of the user's arguments and environment into compatible `Parts`.

Nothing is started here. An invalid configuration raises one ConfigError that lists all problems, before any process or
device is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..accelerators import Accelerator
from ..console import is_notebook
from ..errors import ConfigError, join_errors
from ..precision import Precision
from ..strategies import Launcher, SingleDeviceStrategy, Strategy
from ..strategies.optional import ChecksProcesses
from .choose import (
    NOTHING_GIVEN,
    OF_FLOAT8_LAYERS,
    Plugins,
    check_conflicts,
    check_num_nodes,
    choose_accelerator,
    choose_precision,
    choose_strategy,
    find_devices,
    has_several_processes,
    is_auto,
    precision_name,
    sort_plugins,
)
from .launch import InProcessLauncher

if TYPE_CHECKING:
    from ..protocols import CheckpointPlugin, Cluster

R = TypeVar("R")


@dataclass(frozen=True)
class Environment:
    """Inputs besides the arguments."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    interactive: bool = False
    """Whether this is an interactive prompt or a notebook."""

    @classmethod
    def current(cls) -> Environment:
        """Return this process's environment."""
        return cls(dict(os.environ), hasattr(sys, "ps1") or is_notebook())


@dataclass(frozen=True)
class Parts:
    """The parts of a Fabric."""

    accelerator: Accelerator
    strategy: Strategy
    precision: Precision
    devices: tuple[torch.device, ...]
    """One per process of this node."""
    num_nodes: int
    checkpoint_io: CheckpointPlugin | None
    """None uses Fabric's default."""
    cluster_environment: Cluster | None
    """None with one process and an environment that indicates no others."""
    layer_sync: Any  # Any: a user's layer synchronization
    """For strategies with several processes; None if none was passed."""
    launcher: Launcher
    warnings: tuple[str, ...] = ()
    """Warnings about changed arguments, to be shown once, on rank zero."""
    notes: tuple[str, ...] = ()
    """Notes on automatic choices, for the log."""
    leaves_choice: bool = False
    """Whether `strategy="auto"` left the choice among strategies with several processes to this resolution."""


@dataclass(frozen=True)
class _Row:
    """A pair of incompatible facts."""

    one: str
    other: str
    what: str
    fix: str


# Incompatible pairs of a new strategy or precision are added here.
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
        "Expected num_nodes=1 with strategy={strategy!r}, which runs one process on one machine, got "
        "num_nodes={num_nodes!r}.",
        "pass num_nodes=1, or a strategy with several processes such as 'ddp'.",
    ),
    _Row(
        "one device",
        "devices>1",
        "Expected one device with strategy={strategy!r}, got devices={devices!r}, which selects {count}.",
        "pass devices=1, or the index of one device as in devices=[0]; or strategy='ddp' to use all.",
    ),
    _Row(
        "one process",
        "torchrun",
        "Expected one process with strategy={strategy!r}, got {world_size} processes from torchrun. Each would run "
        "the same training and write the same files.",
        "pass strategy='ddp' or 'auto', or start the script with python, or with --nproc-per-node=1.",
    ),
    _Row(
        "several processes",
        "accelerator=mps",
        "strategy={strategy!r} cannot be used with accelerator='mps': torch.distributed does not support this device.",
        "pass devices=1, num_nodes=1 and strategy='auto'; or accelerator='cpu'.",
    ),
    _Row(
        "accelerator=xla",
        "strategy of other devices",
        "Expected an XLA strategy for accelerator='xla' (or 'tpu'), got strategy={strategy!r}.",
        "pass strategy='xla', 'xla_fsdp' or 'single_xla'; 'auto' chooses by the number of devices.",
    ),
    _Row(
        "strategy of XLA",
        "accelerator of other strategies",
        "strategy={strategy!r} cannot be used with accelerator={accelerator!r}: it requires torch_xla.",
        "pass accelerator='tpu' or 'auto', or another strategy.",
    ),
    _Row(
        "strategy of XLA",
        "precision=16-mixed",
        "precision='16-mixed' cannot be used with strategy={strategy!r}: the loss scale would have to be read from "
        "the device in every step.",
        "pass precision='bf16-mixed', which needs no loss scale.",
    ),
    _Row(
        "packed weights",
        "strategy that changes weights",
        "BitsandbytesPrecision cannot be used with strategy={strategy!r}, which shards or casts weights: packed ones "
        "would lose their scales.",
        "pass strategy='ddp' or 'auto'. For 4-bit models with fsdp, see loopwright recipe finetune with quantize=nf4.",
    ),
    _Row(
        "float8 layers",
        "tensor parallelism",
        "precision={precision!r} cannot be used with strategy={strategy!r}, which splits the weights of layers.",
        "pass precision='bf16-mixed', or a strategy without tp, such as 'fsdp'.",
    ),
    _Row(
        "notebook",
        "script launcher",
        "strategy={strategy!r} cannot start processes in a notebook.",
        "pass strategy='ddp_notebook' (which forks), run the code as a script, or use one device (strategy='auto', "
        "devices=1).",
    ),
)

_PACKED = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")  # modes of BitsandbytesPrecision

# Set by schedulers and launchers. Without them, and with one device, cluster detection is skipped.
_OF_PROCESSES = (
    "LOCAL_RANK",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
    "LSB_JOBID",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "KUBERNETES_SERVICE_HOST",
)
_OF_LAUNCH = ("LT_ACCELERATOR", "LT_STRATEGY", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION")


def resolve(
    *,
    accelerator: object = "auto",  # object, here and below: checked by the functions of choose.py
    strategy: object = "auto",
    devices: object = "auto",
    num_nodes: object = 1,
    precision: object = None,
    plugins: object = None,
    when_short: object = "raise",
    environment: Environment | None = None,
) -> Parts:
    """Return the parts for the arguments of Trainer or Fabric.

    Args:
        accelerator: "auto", "gpu", a registered name, or an Accelerator.
        strategy: "auto", a registered name in any case, or a Strategy. "auto" is a single-device strategy with one
            device; otherwise "ddp", or "ddp_fork" in a notebook.
        devices: "auto", a number, -1, indices as list or as string. "auto" uses all accelerator devices (one in a
            notebook), one process on the CPU, and under torchrun or a scheduler one device per process on this node.
        num_nodes: Number of machines.
        precision: A name in `choose.PRECISIONS` or an alias. None uses that of the plugin or strategy, if any, else
            "32-true".
        plugins: One or several of: a Precision, a checkpoint IO, a ClusterEnvironment, a layer synchronization.
        when_short: What is done if there are fewer devices than `devices`: "raise", or "fewer", which uses those.
        environment: None takes this process's. LT_ACCELERATOR, LT_STRATEGY, LT_DEVICES, LT_NUM_NODES and LT_PRECISION
            replace arguments that have their default value.

    Raises:
        ConfigError: The configuration is invalid; every problem is listed.
    """
    # A cluster environment of this process reads its variables on each access: launchers add to them.
    fixed = None if environment is None else environment.variables
    # Another thread may be importing it: then nothing was started either.
    leave = getattr(sys.modules.get(f"{__package__}.launch.script"), "leave_ended_job", None)
    if environment is None and leave is not None:
        leave()
    environment = environment if environment is not None else Environment.current()
    variables = environment.variables
    problems: list[ConfigError] = []
    notes: list[str] = []
    changed: list[str] = []

    def attempt(function: Callable[..., R], *args: object) -> R | None:
        try:
            return function(*args)
        except ConfigError as error:
            problems.append(error)
            return None

    given = {
        "accelerator": accelerator,
        "strategy": strategy,
        "devices": devices,
        "num_nodes": num_nodes,
        "precision": precision,
    }
    if any(variables.get(name) for name in _OF_LAUNCH):
        from .world import read_launch_variables

        attempt(read_launch_variables, given, variables)
        accelerator, strategy, devices, num_nodes, precision = given.values()
    plugged = attempt(sort_plugins, plugins) or Plugins()
    leaves_choice = isinstance(strategy, str) and strategy.lower() == "auto"
    chosen_strategy = None if leaves_choice else attempt(choose_strategy, strategy)
    given_parts = NOTHING_GIVEN if chosen_strategy is None else chosen_strategy.given
    nodes = attempt(check_num_nodes, num_nodes)
    attempt(check_conflicts, strategy, given_parts, accelerator, precision, plugged)
    chosen_accelerator = attempt(choose_accelerator, accelerator, chosen_strategy, given_parts)
    name = attempt(precision_name, precision, changed)
    cluster = plugged.cluster_environment or given_parts.cluster_environment
    if cluster is None and _speaks_of_processes(variables):
        cluster = _detect(fixed)
    found: list[torch.device] | None = None
    if chosen_accelerator is not None:
        # strategy="auto" adapts to any number of processes, except in ranks of an earlier launch, where a second run
        # may be meant for a single device.
        joins = cluster is not None and (
            has_several_processes(chosen_strategy) or (leaves_choice and not _is_launched_by_us(variables))
        )
        if joins and cluster is not None and nodes is not None and is_auto(devices):
            from .world import infer_num_nodes

            nodes = infer_num_nodes(cluster, nodes)
        if when_short != "raise":
            from .world import devices_at_hand

            devices = attempt(
                devices_at_hand, devices, chosen_accelerator, cluster if joins else None, nodes, when_short, notes
            )
        choice = (devices, chosen_accelerator, chosen_strategy, given_parts, environment.interactive, notes)
        found = attempt(_find_devices, choice, cluster if joins else None, nodes or 1)
    if leaves_choice and found:
        chosen_strategy = attempt(_auto, found, nodes or 1, cluster, environment.interactive)
    if has_several_processes(chosen_strategy) and cluster is None:
        cluster = _detect(fixed)
    chosen_precision: Precision | None = None
    if name is not None and found:
        own_precision = plugged.precision or given_parts.precision
        chosen_precision = attempt(choose_precision, name, precision, found[0].type, chosen_strategy, own_precision)
    launcher = None if chosen_strategy is None else chosen_strategy.launcher
    if cluster is not None and found and nodes is not None and has_several_processes(chosen_strategy):
        assert chosen_strategy is not None
        from .world import check_world, choose_launcher

        launcher = attempt(choose_launcher, chosen_strategy, cluster, len(found), nodes)
        attempt(check_world, cluster, variables, len(found), nodes)
    if isinstance(chosen_strategy, ChecksProcesses) and found and nodes is not None:
        attempt(chosen_strategy.check_processes, len(found) * nodes, nodes)
    launcher = launcher if launcher is not None else InProcessLauncher()
    name = chosen_precision.precision if chosen_precision else name
    facts = _facts(
        chosen_accelerator,
        chosen_strategy,
        name,
        len(found or ()),
        nodes or 1,
        environment,
        launcher,
    )
    problems += _impossible_pairs(
        facts,
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=name,
        count=len(found or ()),
        world_size=variables.get("WORLD_SIZE"),
    )
    if problems:
        raise join_errors(problems)
    assert chosen_accelerator is not None
    assert chosen_strategy is not None
    assert chosen_precision is not None
    assert found is not None
    assert nodes is not None
    return Parts(
        accelerator=chosen_accelerator,
        strategy=chosen_strategy,
        precision=chosen_precision,
        devices=tuple(found),
        num_nodes=nodes,
        checkpoint_io=plugged.checkpoint_io or given_parts.checkpoint_io,
        cluster_environment=cluster,
        layer_sync=plugged.layer_sync,
        launcher=launcher,
        warnings=tuple(changed),
        notes=tuple(notes),
        leaves_choice=leaves_choice and has_several_processes(chosen_strategy),
    )


# -- processes -------------------------------------------------------------------------------------------------------


def _speaks_of_processes(variables: Mapping[str, str]) -> bool:
    """Return whether a launcher may have started several processes, and has to be detected."""
    return any(name in variables for name in _OF_PROCESSES) or "mpi4py.MPI" in sys.modules


def _detect(variables: Mapping[str, str] | None) -> Cluster:
    from .world import detect

    return detect(variables)


def _is_launched_by_us(variables: Mapping[str, str]) -> bool:
    """Return whether a Loopwright launcher started this rank; the script then determines the number of processes."""
    return variables.get("LOOPWRIGHT_STORE") == "hosted"


def _find_devices(choice: tuple[Any, ...], cluster: Cluster | None, num_nodes: int) -> list[torch.device]:
    """Return one device per process of this node, from the existing processes or the user's choice."""
    devices, accelerator, _, given, *_ = choice
    if cluster is not None and not given.parallel_devices:
        from .world import local_devices

        found = local_devices(devices, accelerator, cluster, num_nodes)
        if found is not None:
            return found
    return find_devices(*choice)


def _auto(devices: list[torch.device], num_nodes: int, cluster: Cluster | None, interactive: bool) -> Strategy:
    """Return the strategy for "auto"."""
    num_devices = len(devices)
    if devices[0].type == "xla":
        return choose_strategy("xla" if num_devices > 1 else "single_xla")
    if num_devices * num_nodes == 1 and cluster is None:
        return SingleDeviceStrategy()
    from .world import auto_strategy

    name = auto_strategy(num_devices, num_nodes, cluster, interactive=interactive)
    return SingleDeviceStrategy() if name is None else choose_strategy(name)


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
    is_several = has_several_processes(strategy)
    is_one_process = strategy is not None and not is_several
    is_of_xla = strategy is not None and strategy.traits.accelerator_kind == "xla"
    claims = {
        f"precision={precision}": True,
        f"accelerator={accelerator.name() if accelerator else None}": True,
        "one process": is_one_process,
        # DataParallelStrategy also has one process, but several devices.
        "one device": is_one_process and strategy is not None and not strategy.traits.has_several_devices,
        "several processes": is_several,
        "strategy of XLA": is_of_xla,
        # A user-defined strategy may handle XLA graphs itself.
        "strategy of other devices": not is_of_xla and _is_of_torch(strategy),
        "accelerator of other strategies": accelerator is not None and accelerator.name() != "xla",
        "packed weights": precision in _PACKED,
        "float8 layers": precision in OF_FLOAT8_LAYERS,
        "strategy that changes weights": strategy is not None
        and (strategy.traits.shards_parameters or not strategy.traits.keeps_packed_weights),
        "tensor parallelism": strategy is not None and "tp" in strategy.traits.model_axes,
        "num_nodes>1": num_nodes > 1,
        "devices>1": num_devices > 1,
        "torchrun": "TORCHELASTIC_RUN_ID" in environment.variables and world_size.isdecimal() and int(world_size) > 1,
        "notebook": environment.interactive,
        "script launcher": not launcher.is_interactive_compatible,
    }
    return {claim for claim, holds in claims.items() if holds}


def _is_of_torch(strategy: Strategy | None) -> bool:
    if isinstance(strategy, SingleDeviceStrategy) or strategy is None:
        return strategy is not None
    from ..strategies import ParallelStrategy  # not imported for one device

    return isinstance(strategy, ParallelStrategy)


def _impossible_pairs(facts: set[str], **shown: object) -> list[ConfigError]:
    return [
        ConfigError(row.what.format(**shown), fix=row.fix)
        for row in _CANNOT_WORK
        if row.one in facts and row.other in facts
    ]
