"""Processes of a run: their number and how they start, under a launcher or scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch

from ..accelerators import Accelerator
from ..errors import ConfigError, Problems
from ..strategies import Launcher, Strategy
from .choose import is_auto, precision_name
from .cluster import detect_cluster
from .launch import ExternalLauncher, InProcessLauncher, ProcessLauncher, ScriptLauncher
from .launch.processes import check_start_method

if TYPE_CHECKING:
    from ..protocols import Cluster

# -- variables of `loopwright launch`
# -----------------------------------------------------------------------------------

_ARGUMENTS: dict[str, object] = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "precision": None,
}


def read_launch_variables(arguments: MutableMapping[str, Any], variables: Mapping[str, str]) -> None:
    """Replace arguments with default values by LT_ACCELERATOR, LT_STRATEGY, ...

    Args:
        arguments: The user's arguments by name; modified in place.
        variables: Environment variables.

    Raises:
        ConfigError: An argument and its variable differ; every difference is listed.
    """
    problems = Problems()
    for name, default in _ARGUMENTS.items():
        text = variables.get(f"LT_{name.upper()}", "").strip()
        if not text:
            continue
        given = arguments[name]
        if isinstance(given, type(default)) and _plain(name, given) == _plain(name, default):
            arguments[name] = int(text) if name == "num_nodes" and text.isdecimal() else text
        elif _plain(name, given) != _plain(name, text):
            problems.add(
                f"The script passes {name}={given!r}, but LT_{name.upper()}={text!r} is set, for example by "
                f"`loopwright launch --{name.replace('_', '-')}`.",
                fix=f"set it in one place: remove {name}= from the script, or the option from the command.",
            )
    problems.refuse()


def _plain(name: str, value: object) -> str:
    """Return an argument in normalized form, so that equal values compare equal."""
    if name == "precision" and value is not None:
        try:
            return precision_name(value, [])
        except ConfigError:  # invalid values are reported when they are read
            return str(value)
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return str(value).lower()


# -- processes that exist --------------------------------------------------------------------------------------------


def detect(variables: Mapping[str, str] | None) -> Cluster:
    """Return the cluster environment for these variables; None reads this process's variables on each access."""
    return detect_cluster(variables)


def num_local_processes(cluster: Cluster, num_nodes: int) -> int | None:
    """Return the number of processes on this node; None if they are not started yet, or unknown."""
    if not cluster.creates_processes_externally:
        return None
    local = _count_local_processes(cluster)
    size = cluster.world_size()
    if local is None and size > 1 and size % num_nodes == 0:
        local = size // num_nodes
    return local


@runtime_checkable
class _CountsLocalProcesses(Protocol):
    """A cluster environment that may know how many processes its node has; `Cluster` does not ask for it."""

    def num_local_processes(self) -> int | None:
        """Return the number of processes on this node; None if unknown."""
        ...


def _count_local_processes(cluster: Cluster) -> int | None:
    return cluster.num_local_processes() if isinstance(cluster, _CountsLocalProcesses) else None


def infer_num_nodes(cluster: Cluster, num_nodes: int) -> int:
    """Return the number of nodes: the user's value, or the environment's if the user passed none."""
    if num_nodes > 1 or not cluster.creates_processes_externally:
        return num_nodes
    local, size = _count_local_processes(cluster), cluster.world_size()
    return size // local if local and size > local and size % local == 0 else num_nodes


def local_devices(
    devices: object, accelerator: Accelerator, cluster: Cluster, num_nodes: int
) -> list[torch.device] | None:
    """Return one device for each process already running on this node; None if `devices=` alone decides.

    Args:
        devices: The user's argument.
        accelerator: Lists the available devices.
        cluster: Provides the number of processes.
        num_nodes: Number of nodes.
    """
    local = num_local_processes(cluster, num_nodes)
    if local is None:
        return None
    # Schedulers often make one GPU visible to each process; its index is then 0 in every process.
    sees_its_own = accelerator.is_gpu and local > 1 and accelerator.auto_device_count() == 1
    if sees_its_own and (is_auto(devices) or str(devices).strip() in (str(local), "-1")):
        return accelerator.get_parallel_devices(accelerator.parse_devices(1)) * local
    return accelerator.get_parallel_devices(accelerator.parse_devices(local)) if is_auto(devices) else None


def devices_at_hand(
    devices: object,
    accelerator: Accelerator,
    cluster: Cluster | None,
    num_nodes: int | None,
    when_short: object,
    notes: list[str],
) -> object:
    """Return the user's `devices=`, or those that exist if they are fewer.

    Args:
        devices: The user's argument.
        accelerator: Knows which devices exist.
        cluster: Provides the number of processes that run already; None: they are started here.
        num_nodes: Number of nodes; None if it is invalid.
        when_short: The user's argument, which is not "raise".
        notes: Receives a line about devices that are missing.

    Raises:
        ConfigError: The argument is unknown, or there are several nodes, which do not know of each other.
    """
    if when_short != "fewer":
        raise ConfigError(
            f"Expected when_short to be 'raise' or 'fewer', got {when_short!r}.", fix="pass one of these values."
        )
    if num_nodes is None or is_auto(devices):
        return devices
    if num_nodes > 1:
        raise ConfigError(
            f"Expected when_short='raise' on several nodes, got when_short='fewer' with num_nodes={num_nodes}: each "
            "node would count its own devices.",
            fix="pass the number of devices that every node has.",
        )
    local = None if cluster is None else num_local_processes(cluster, num_nodes)
    wanted = _indices(devices)
    if wanted is None:
        return devices
    found: list[int] | int
    if isinstance(wanted, int):
        if local is not None:  # each of these processes may see one device alone
            found = min(local, wanted)
        else:
            found = next((count for count in range(wanted, 0, -1) if _exists(count, accelerator)), wanted)
        is_short = found < wanted
    else:
        found = [index for index in wanted if _exists([index], accelerator)][:local] or wanted
        is_short = len(found) < len(wanted)
    if not is_short:
        return devices
    notes.append(f"devices={devices!r}: this machine has fewer, and devices={found!r} are used (when_short='fewer').")
    return found


def _indices(devices: object) -> int | list[int] | None:
    """Return a positive number of devices or their indices; None for all of them, and for what is invalid."""
    try:
        if isinstance(devices, str) and "," in devices:
            return [int(part) for part in devices.split(",") if part.strip()]
        if isinstance(devices, list | tuple):
            return [int(index) for index in devices]
        count = int(cast("int", devices))
    except (TypeError, ValueError):  # reported where devices are parsed
        return None
    return count if count > 0 else None


def _exists(devices: list[int] | int, accelerator: Accelerator) -> bool:
    try:
        accelerator.parse_devices(devices)
    except ConfigError:
        return False
    return True


def check_world(cluster: Cluster, variables: Mapping[str, str], num_devices: int, num_nodes: int) -> None:
    """Compare the existing processes with those that the arguments request.

    Raises:
        ConfigError: The numbers differ; the message contains both. Within `checks_deferred`, the check itself is kept.
    """
    deferred = _DEFERRED.get()
    if deferred is not None:
        deferred.append(partial(_check_world, cluster, variables, num_devices, num_nodes))
    else:
        _check_world(cluster, variables, num_devices, num_nodes)


_DEFERRED: ContextVar[list[Callable[[], None]] | None] = ContextVar("deferred checks", default=None)


@contextmanager
def checks_deferred() -> Iterator[list[Callable[[], None]]]:
    """Collect the checks of the existing processes, so that the caller makes them before the launch."""
    token = _DEFERRED.set([])
    try:
        yield cast("list[Callable[[], None]]", _DEFERRED.get())
    finally:
        _DEFERRED.reset(token)


def _check_world(cluster: Cluster, variables: Mapping[str, str], num_devices: int, num_nodes: int) -> None:
    size = variables.get("WORLD_SIZE", "")
    if cluster.creates_processes_externally and variables.get("LOOPWRIGHT_STORE") == "hosted" and size.isdecimal():
        if int(size) != num_devices * num_nodes:
            raise ConfigError(
                f"Expected devices * num_nodes to be {size}, the number of processes that an earlier Trainer or Fabric "
                f"of this script started, got devices={num_devices} and num_nodes={num_nodes}.",
                fix=f"use {size} processes here as well; or pass devices=1 and strategy='auto' for work that each "
                "process does independently.",
            )
        return
    cluster.validate_settings(num_devices, num_nodes)


# -- launchers -------------------------------------------------------------------------------------------------


def auto_strategy(num_devices: int, num_nodes: int, cluster: Cluster | None, *, interactive: bool) -> str | None:
    """Return the name of the strategy that "auto" selects for several processes; None if there is one process."""
    exists = cluster is not None and cluster.creates_processes_externally
    is_several = num_devices * num_nodes > 1 or (exists and cluster is not None and cluster.world_size() > 1)
    if not is_several:
        return None
    return "ddp_fork" if interactive and num_nodes == 1 and not exists else "ddp"


def choose_launcher(strategy: Strategy, cluster: Cluster | None, num_devices: int, num_nodes: int) -> Launcher:
    """Return the launcher of the strategy, or the one that `start_method` and the environment require.

    Raises:
        ConfigError: The start method is not available on this system.
    """
    if strategy.launcher is not None:
        return strategy.launcher
    start_method = strategy.start_method
    if start_method is None or cluster is None:
        return InProcessLauncher()
    if start_method != "popen":
        check_start_method(start_method)
    if cluster.creates_processes_externally:
        return ExternalLauncher(cluster, num_devices, num_nodes)
    if num_devices * num_nodes == 1:
        return InProcessLauncher()
    if start_method == "popen":
        return ScriptLauncher(cluster, num_devices, num_nodes)
    return ProcessLauncher(start_method, cluster, num_devices, num_nodes)
