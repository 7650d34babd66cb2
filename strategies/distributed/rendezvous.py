"""Rendezvous of processes: a store that all of them reach, the registration of each rank, and torch's process group.

Strategies call `connect` in `setup_environment`; launchers host the store (`host_store`); fabric/watch/ uses it.
A process belongs to one world at a time, as in torch.distributed. The state is in this module.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from ...errors import LaunchError, RankFailure
from .gloo_threads import wait_for_gloo_threads
from .port_owner import port_owner

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore

    from ...protocols import Rendezvous

__all__ = ["attempt_store", "connect", "disconnect", "host_store", "keep_store", "open_store", "store"]

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(seconds=1800)
HOSTED = "LOOPWRIGHT_STORE"
"""The environment variable that launchers set to "hosted" if the server of the store is already running."""
FAILURE = "failure"
"""The key under which the first failure of a rank is posted, as JSON."""

_FIRST_REPORT_S = 30.0
_ANSWER_S = 60.0  # enough for a store, which answers in a separate thread
_SLOWEST_POLL_S = 0.25
_DESTROY_S = 5.0
_LINGER_S = 5.0
_MOST_NAMED = 16


@dataclass(frozen=True)
class _World:
    """The process group and the store of this process."""

    store: Store
    rank: int
    size: int
    pid: int
    must_linger: bool
    """Whether the store ends with this process while others may need it, so that this process waits for them."""
    is_ours: bool
    """Whether `connect` created the process group, so that `disconnect` destroys it."""


# One world per process, as in torch.distributed. The pid is compared, because a forked child inherits these values.
_world: _World | None = None
_kept: tuple[TCPStore, int] | None = None
_num_worlds = 0
_has_exit = False


# -- the store -------------------------------------------------------------------------------------------------------


def host_store(address: str, port: int, timeout: timedelta | None = None) -> TCPStore:
    """Open the server of a store in this process.

    It lives as long as the returned object. Open it before the other processes start, so that no other program can
    take the port in between.

    Args:
        address: A name or address of this host that the other processes can resolve.
        port: Port of the server; 0 for any free port, which is then `.port` of the result.
        timeout: Maximum duration of an operation on the store.

    Raises:
        LaunchError: The port is in use, or the address does not belong to this host.
    """
    try:
        return _tcp_store(address, port, timeout or DEFAULT_TIMEOUT, is_master=True)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            owner = port_owner(port)
            raise LaunchError(
                f"Expected a free port for the store of rank 0, got port {port}, which is in use"
                f"{f' by {owner}' if owner else ''}.",
                fix="set MASTER_PORT to a free port, the same for all processes (on one machine, unset it to use any "
                "free port), or end the program that uses the port, which may be an earlier run.",
            ) from error
        raise LaunchError(
            f"Rank 0 could not open a store at {address}:{port}: {_first_line(error)}",
            fix="set MASTER_ADDR to a name or address of the host that rank 0 runs on.",
        ) from error


def keep_store(server: TCPStore) -> None:
    """Make `open_store` use a server that a launcher opened in the process that becomes rank 0."""
    global _kept, _num_worlds
    _kept = (server, os.getpid())
    _num_worlds = 0  # nothing was written to this one


def attempt_store(base: Store) -> Store:
    """Return the part of a store that belongs to this attempt of torchrun (or to the only one).

    torchrun's store outlives an attempt. Without a prefix for each attempt, a restarted process would read the
    addresses of processes that have ended.
    """
    return PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", base)


def open_store(cluster: Rendezvous, timeout: timedelta | None = None) -> Store:
    """Return a connection to the store of all ranks; rank 0 also opens its server, unless the launcher did.

    If the launcher opened the server in this process, its object is returned.

    Args:
        cluster: Provides the rank of this process and the address of the store.
        timeout: Maximum time to wait for the server, and maximum duration of an operation.

    Raises:
        LaunchError: The port is in use, or the server does not answer in time.
    """
    timeout = timeout or DEFAULT_TIMEOUT
    kept = _kept_here()
    if kept is not None and cluster.global_rank() == 0:
        return kept
    address, port = cluster.main_address, cluster.main_port
    is_hosted = os.environ.get(HOSTED) == "hosted" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if cluster.global_rank() == 0 and not is_hosted and (port or cluster.world_size() == 1):
        return host_store(address, port, timeout)
    if port == 0:
        raise LaunchError(
            f"Expected the port of rank 0 in the environment of rank {cluster.global_rank()}, got none.",
            fix="set MASTER_ADDR and MASTER_PORT to the same values in every process, or start the processes with "
            "torchrun, `loopwright launch` or devices=.",
        )
    began = time.monotonic()
    _wait_for_server(address, port, timeout.total_seconds(), cluster.global_rank())
    left_s = max(1.0, timeout.total_seconds() - (time.monotonic() - began))
    store = _join_server(address, port, min(_ANSWER_S, left_s), cluster.global_rank())
    store.set_timeout(timeout)
    return store


def _join_server(address: str, port: int, timeout_s: float, rank: int) -> TCPStore:
    """Return a connection to the store at a port that accepts connections.

    torch tries several times, each time for the full timeout. A program that accepts connections but never answers
    would block this process for a multiple of the timeout, so torch connects in a daemon thread.

    Raises:
        LaunchError: The program at this port is not a store.
    """
    made: list[TCPStore] = []
    errors: list[RuntimeError] = []

    def join() -> None:
        try:
            made.append(_tcp_store(address, port, timedelta(seconds=timeout_s), is_master=False))
        except RuntimeError as error:
            errors.append(error)

    joining = threading.Thread(target=join, name="loopwright-join-store", daemon=True)
    joining.start()
    joining.join(timeout_s)
    if made:
        return made[0]
    if not errors:
        raise _not_a_store(address, port, rank, f"it accepts connections but did not answer within {timeout_s:.0f} s")
    raise _not_a_store(address, port, rank, f"it answers {_answer(str(errors[0]))}") from errors[0]


def _answer(message: str) -> str:
    """Return the other program's answer from torch's error message, which shows the first bytes as a number."""
    number = re.search(r"invalid value returned from server.*Got: (\d+)", message)
    if number is None:
        return f"with an error: {message.splitlines()[0]}"
    return repr(int(number[1]).to_bytes(8, "little").rstrip(b"\0"))


def _not_a_store(address: str, port: int, rank: int, how: str) -> LaunchError:
    return LaunchError(
        f"Rank {rank} expected the store of rank 0 at {address}:{port}, got another program: {how}.",
        fix="set MASTER_PORT to a free port, the same for all processes; or end the program that listens on this port "
        f"(`ss -ltnp 'sport = :{port}'` on {address} shows it). If it is rank 0, see its output.",
    )


def _tcp_store(address: str, port: int, timeout: timedelta, *, is_master: bool) -> TCPStore:
    store: TCPStore = dist.TCPStore(  # type: ignore[attr-defined]  # public, but missing in torch's types
        address, port, world_size=None, is_master=is_master, timeout=timeout, wait_for_workers=False
    )
    return store


def _wait_for_server(address: str, port: int, timeout_s: float, rank: int) -> None:
    """Wait until the port accepts connections. torch's wait cannot be interrupted and logs a page per attempt."""
    began = time.monotonic()
    next_report_s = _FIRST_REPORT_S
    pause_s = 0.02
    while True:
        try:
            socket.create_connection((address, port), timeout=min(max(1.0, timeout_s), 10.0)).close()
            return
        except OSError as error:  # refused, no route, unknown name: all may be temporary
            why = error
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            raise _unreachable(address, port, rank, f"{why} (tried for {timeout_s:g} s)") from why
        if waited_s >= next_report_s:
            log.warning("Rank %d is waiting for rank 0 at %s:%d: %s (%.0f s)", rank, address, port, why, waited_s)
            next_report_s *= 2
        time.sleep(min(pause_s, max(0.0, timeout_s - waited_s)))
        pause_s = min(2 * pause_s, 1.0)


def _unreachable(address: str, port: int, rank: int, why: str) -> LaunchError:
    return LaunchError(
        f"Rank {rank} could not connect to rank 0 at {address}:{port}: {why}",
        fix="check that rank 0 has started, that it runs on this host (MASTER_ADDR) and uses this port (MASTER_PORT), "
        "and that no firewall blocks the port.",
    )


# -- the world -------------------------------------------------------------------------------------------------------


def store() -> Store | None:
    """Return the store of this process's world; None if it is not connected."""
    world = _current()
    return None if world is None else world.store


def connect(
    cluster: Rendezvous, *, backend: str, timeout: timedelta | None = None, device: torch.device | None = None
) -> Store:
    """Connect all ranks in a process group of torch.distributed. Further calls have no effect.

    Call it in every process. Each rank first registers in the store, so that an error can list the missing ranks. An
    existing process group is used unchanged.

    Args:
        cluster: Provides the rank of this process and the address of rank 0.
        backend: As for `torch.distributed.init_process_group`: "gloo", "nccl", "cpu:gloo,cuda:nccl".
        timeout: Maximum time to wait for the other ranks, and maximum duration of a collective; None: 1800 s.
        device: The device of this process.

    Returns:
        The store of all ranks, for communication without collectives.

    Raises:
        LaunchError: Ranks are missing after the timeout (all are listed), two processes have the same rank, or the
            numbers of ranks differ.
        RankFailure: A rank failed before all ranks were connected.
    """
    global _world, _num_worlds
    timeout = timeout or DEFAULT_TIMEOUT
    rank, size = cluster.global_rank(), cluster.world_size()
    world = _current()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise LaunchError(
                f"Expected this process to be rank {rank} of {size}, got an existing process group in which it is rank "
                f"{dist.get_rank()} of {dist.get_world_size()}.",
                fix="use the same devices= and num_nodes= for all runs of a program, or start new processes for each "
                "run with strategy='ddp_spawn'.",
            )
        if world is None:
            world = _world = _World(_store_of_group(), rank, size, os.getpid(), must_linger=False, is_ours=False)
        return world.store
    base = open_store(cluster, timeout)
    shared = attempt_store(base)
    if _num_worlds:  # the store may be the same, and must not return the addresses of the previous world
        shared = dist.distributed_c10d.PrefixStore(f"world{_num_worlds}", shared)
    _register(shared, rank, size, timeout.total_seconds())
    # With this, gloo also records the last collectives, which the stall report lists.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    needs_device = device is not None and device.type == "cuda" and "nccl" in backend
    try:
        dist.init_process_group(
            backend,
            store=shared,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if needs_device else None,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"All {size} ranks reached the store at {cluster.main_address}, but rank {rank} could not connect through "
            f"{backend}: {_first_line(error)}",
            fix="if the hosts have several networks, set the interface that connects them: GLOO_SOCKET_IFNAME=eth0 for "
            "gloo, NCCL_SOCKET_IFNAME=eth0 for nccl. Check that no firewall blocks ports between the hosts.",
        ) from error
    _num_worlds += 1
    # A launcher that hosts the store waits for the processes that it started, but not for those of other nodes.
    waits_for_all = base is _kept_here() and os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    must_linger = not waits_for_all and (base is _kept_here() or _hosts(rank))
    _world = _World(shared, rank, size, os.getpid(), must_linger=must_linger, is_ours=True)
    _disconnect_at_exit()
    return shared


def disconnect() -> None:
    """Destroy the process group; if this process hosts the store, first wait for the other ranks.

    Called at interpreter exit, and by launchers at the end of processes that skip interpreter exit. It takes a few
    seconds at most, whatever the other ranks do. It has no effect if `connect` did not create a group.
    """
    global _world
    world = _current()
    _world = None
    if world is None or not world.is_ours:
        return
    _mark_left(world)
    if dist.is_initialized():
        # gloo's destructor waits for pending operations, and these may wait for another rank without limit.
        destroying = threading.Thread(target=dist.destroy_process_group, name="loopwright-disconnect", daemon=True)
        destroying.start()
        destroying.join(_DESTROY_S)
        if destroying.is_alive():
            log.warning("Rank %d: the process group has pending operations and is not destroyed", world.rank)
        elif not wait_for_gloo_threads(_DESTROY_S):
            log.warning("Rank %d: a thread of gloo is still at work", world.rank)
    if world.must_linger:
        _wait_until_left(world)


def _current() -> _World | None:
    return _world if _world is not None and _world.pid == os.getpid() else None


def _kept_here() -> TCPStore | None:
    return _kept[0] if _kept is not None and _kept[1] == os.getpid() else None


def _hosts(rank: int) -> bool:
    is_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return rank == 0 and not is_agent and os.environ.get(HOSTED) != "hosted"


def _store_of_group() -> Store:
    """Return the store of an existing process group, with Loopwright's prefix."""
    # torch has no public function for this; the name exists since torch 1.8.
    default: Store = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore("loopwright", default)


def _register(shared: Store, rank: int, size: int, timeout_s: float) -> None:
    """Register this rank, and return when all ranks are registered.

    Polls instead of waiting in the store, so that it can be interrupted and detects a failure immediately.
    """
    here = f"{socket.gethostname()} (process {os.getpid()})"
    began = time.monotonic()
    try:
        who = shared.compare_set(f"rank{rank}", "", here).decode()
        if who != here:
            raise LaunchError(
                f"Expected one process with rank {rank}, got two: {who}, and {here}.",
                fix="set a different RANK (or NODE_RANK and LOCAL_RANK) for each process, and a different MASTER_PORT "
                "for each run.",
            )
        theirs = shared.compare_set("size", "", str(size)).decode()
        if theirs != str(size):
            raise LaunchError(
                f"Expected the same number of processes on all ranks, got {size} on rank {rank} and {theirs} on "
                "another rank.",
                fix="start all processes with the same WORLD_SIZE, devices= and num_nodes=.",
            )
        if shared.add("here", 1) == size:
            shared.set("complete", "1")
        next_report_s = min(_FIRST_REPORT_S, timeout_s)
        pause_s = 0.002
        while not shared.check(["complete"]):
            waited_s = time.monotonic() - began
            if shared.check([FAILURE]):
                raise _failed_before(json.loads(shared.get(FAILURE)))
            if waited_s >= timeout_s:
                raise _incomplete(shared, size, timeout_s)
            if waited_s >= next_report_s and rank == 0:
                missing = _listed(_missing(shared, size))
                log.warning("Rank 0 is waiting for %s (%.0f of %g s)", missing, waited_s, timeout_s)
                next_report_s += _FIRST_REPORT_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
    except RuntimeError as error:
        if isinstance(error, (LaunchError, RankFailure)):
            raise
        raise LaunchError(
            f"Rank {rank} lost its connection to the store while it waited for the other ranks: {_first_line(error)}",
            fix="see why the process that hosts the store (rank 0, or the launcher) has ended.",
        ) from error


def _missing(shared: Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not shared.check([f"rank{rank}"])]


def _incomplete(shared: Store, size: int, timeout_s: float) -> LaunchError:
    missing = _missing(shared, size)
    present = [rank for rank in range(size) if rank not in missing]
    hosts = "; ".join(f"rank {rank} on {shared.get(f'rank{rank}').decode()}" for rank in present[:_MOST_NAMED])
    return LaunchError(
        f"Expected {size} ranks within {timeout_s:g} s, but {_listed(missing)} did not connect. Connected: {hosts}"
        f"{' and others' if len(present) > _MOST_NAMED else ''}.",
        fix="see the output of the missing ranks. If they were not started, check num_nodes= and that the script runs "
        "on every node (with srun or torchrun). If they are slow, pass a longer timeout= to the strategy.",
    )


def _listed(ranks: list[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {names}{more}"


def _failed_before(failure: dict[str, Any]) -> RankFailure:
    """Return the error for a failure that was posted before all ranks were registered."""
    rank = failure["rank"]
    trace = f"\n--- traceback of rank {rank} ---\n{failure['trace'].rstrip()}" if failure.get("trace") else ""
    return RankFailure(
        f"Rank {rank} (host {failure['host']}, pid {failure['pid']}) failed before all ranks were connected: "
        f"{failure['how']}{trace}",
        fix=f"see the output of rank {rank}; the errors of the other ranks follow from it.",
    )


# -- leaving ---------------------------------------------------------------------------------------------------------


def _mark_left(world: _World) -> None:
    try:
        world.store.add("left", 1)
    except RuntimeError:  # the store's host has ended, so that no process needs the counter
        log.debug("Rank %d: the store has ended already", world.rank)


def _wait_until_left(world: _World) -> None:
    """Wait a few seconds for the other ranks, which may still read from the store."""
    ends = time.monotonic() + _LINGER_S
    while world.store.add("left", 0) < world.size and time.monotonic() < ends:
        time.sleep(0.02)


def _disconnect_at_exit() -> None:
    global _has_exit
    if not _has_exit:
        atexit.register(disconnect)
        _has_exit = True


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
