"""Rendezvous of processes: a store that all of them reach, the registration of each rank, and torch's process group.

Strategies call `connect` in `setup_environment`; launchers host the store (`host_store`); fabric/watch/ uses it.
A process belongs to one world at a time, as in torch.distributed. The state is in this module.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from ...errors import LaunchError, RankFailure
from .gloo_threads import wait_for_gloo_threads
from .port_owner import port_owner
from .store_tree import StoreTree

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

    from ...protocols import Rendezvous

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
    group: weakref.ref[dist.ProcessGroup]
    """The group of all ranks: the program may destroy it, and make another one."""


FindEnded = Callable[[Callable[[int], bool]], str | None]
"""Returns the failure, as JSON, of a rank whose process has ended and for which the given function is true, or None."""

# One world per process, as in torch.distributed. The pid is compared, because a forked child inherits these values.
_world: _World | None = None
_kept: tuple[TCPStore, int] | None = None
_find_ended: tuple[FindEnded, int] | None = None
_num_worlds = 0
_has_exit = False


# -- the store -------------------------------------------------------------------------------------------------------


def host_store(address: str, port: int, timeout: timedelta | None = None, *, is_one_machine: bool = False) -> TCPStore:
    """Open the server of a store in this process.

    It lives as long as the returned object. Open it before the other processes start, so that no other program can
    take the port in between.

    Args:
        address: A name or address of this host that the other processes can resolve.
        port: Port of the server; 0 for any free port, which is then `.port` of the result.
        timeout: Maximum duration of an operation on the store.
        is_one_machine: Whether all processes run on this machine. Then the server listens at `address` alone, which is
            loopback by default, and otherwise on all interfaces: an address may be another one from outside.

    Raises:
        LaunchError: The port is in use, or the address does not belong to this host.
    """
    try:
        listening = _listen(address, port) if is_one_machine or _is_loopback(address) else None
        return _tcp_store(address, port, timeout or DEFAULT_TIMEOUT, is_master=True, listening=listening)
    except (OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
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


def _listen(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at an address of this machine; None where it belongs to something in front of it."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(place[:2], family=family, backlog=4096)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None


def keep_store(server: TCPStore) -> None:
    """Make `open_store` use a server that a launcher opened in the process that becomes rank 0."""
    global _kept, _num_worlds
    _kept = (server, os.getpid())
    _num_worlds = 0  # nothing was written to this one


def keep_exits(find_ended: FindEnded) -> None:
    """Let `connect` ask the launcher that started ranks from this process, and so not wait for one that has ended."""
    global _find_ended
    _find_ended = (find_ended, os.getpid())


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
    is_hosted = os.environ.get(HOSTED) == "hosted" or _is_agents()
    if cluster.global_rank() == 0 and not is_hosted and (port or cluster.world_size() == 1):
        return host_store(address, port, timeout, is_one_machine=_is_one_machine(cluster))
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


def _tcp_store(
    address: str, port: int, timeout: timedelta, *, is_master: bool, listening: socket.socket | None = None
) -> TCPStore:
    store: TCPStore = dist.TCPStore(  # type: ignore[attr-defined]  # public, but missing in torch's types
        address,
        port if listening is None else listening.getsockname()[1],
        world_size=None,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),  # the store closes it
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
    cluster: Rendezvous | None, *, backend: str, timeout: timedelta | None = None, device: torch.device | None = None
) -> Store | None:
    """Connect all ranks in a process group of torch.distributed. Further calls have no effect.

    Call it in every process. Each rank first registers in the store, so that an error can list the missing ranks. An
    existing process group is used unchanged.

    Args:
        cluster: Provides the rank of this process and the address of rank 0; None: there is a process group.
        backend: As for `torch.distributed.init_process_group`: "gloo", "nccl", "cpu:gloo,cuda:nccl".
        timeout: Maximum time to wait for the other ranks, and maximum duration of a collective; None: 1800 s.
        device: The device of this process.

    Returns:
        The store of all ranks, for communication without collectives; None for a group that does not communicate, or
            whose ranks are threads.

    Raises:
        LaunchError: Ranks are missing after the timeout (all are listed), two processes have the same rank, or the
            numbers of ranks differ.
        RankFailure: A rank failed before all ranks were connected.
    """
    global _world, _num_worlds
    if _are_threads():
        return None
    timeout = timeout or DEFAULT_TIMEOUT
    world = _current()
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if cluster is not None and (rank, size) != (cluster.global_rank(), cluster.world_size()):
            raise LaunchError(
                f"Expected this process to be rank {cluster.global_rank()} of {cluster.world_size()}, got an existing "
                f"process group in which it is rank {rank} of {size}.",
                fix="use the same devices= and num_nodes= for all runs of a program, or start new processes for each "
                "run with strategy='ddp_spawn'.",
            )
        if world is None or world.group() is not dist.group.WORLD:
            if "fake" in dist.get_backend():  # its ranks do not communicate
                return None
            beside = _store_beside_group(cluster, rank, size, timeout)
            world = _world = _World(beside, rank, size, os.getpid(), must_linger=False, is_ours=False, group=_group())
        return world.store
    if cluster is None:
        raise LaunchError(
            "Expected a cluster environment to connect the processes, got None.",
            fix="use the strategy with Trainer or Fabric, pass cluster_environment=, or call init_process_group first.",
        )
    rank, size = cluster.global_rank(), cluster.world_size()
    base = open_store(cluster, timeout)
    # The store may be the same, and must not return the addresses of the previous world.
    shared = PrefixStore(f"world{_num_worlds}", base) if _num_worlds else base
    shared = _register(shared, rank, size, timeout.total_seconds(), outlives=_is_agents())
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
    _world = _World(shared, rank, size, os.getpid(), must_linger=must_linger, is_ours=True, group=_group())
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


def _group() -> weakref.ref[dist.ProcessGroup]:
    group = dist.group.WORLD
    assert group is not None
    return weakref.ref(group)


def _hosts(rank: int) -> bool:
    return rank == 0 and not _is_agents() and os.environ.get(HOSTED) != "hosted"


def _is_agents() -> bool:
    """Return whether the store belongs to torchrun's agent, so that it outlives an attempt."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get(HOSTED) != "hosted"


def _are_threads() -> bool:
    """Return whether the ranks are threads of a process, as torch_xla's can be: what a process keeps is not theirs."""
    return type(distributed_c10d._world).__name__ == "ThreadLocalWorld"


def _is_one_machine(cluster: Rendezvous) -> bool:
    """Return whether all processes run on this machine; False if the cluster environment does not know."""
    count = getattr(cluster, "num_local_processes", lambda: None)  # an environment of the user's may not have it
    return cluster.world_size() in (1, count())


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")


def _store_beside_group(cluster: Rendezvous | None, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a store of the ranks of a process group that the program has made.

    It is part of the group's own, which the ranks can reach, if that is a server that threads can share. Others (a file
    grows with each operation, MPI has none) get one beside them, whose address goes through the group.
    """
    # torch has no public function for this; the names exist since torch 1.8 and 1.13.
    of_group: Any = distributed_c10d._get_default_store()
    if of_group is not None and isinstance(of_group._underlying_non_prefix_store, torch._C._distributed_c10d.TCPStore):
        seconds = timeout.total_seconds()
        return _register(PrefixStore("loopwright", of_group), rank, size, seconds, outlives=True)
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname())
    is_one_machine = len(set(hosts)) == 1
    found: list[tuple[str, int]] = [("", 0)]
    server: TCPStore | None = None
    if rank == 0:
        named = os.environ.get("MASTER_ADDR") or (cluster.main_address if cluster is not None else "127.0.0.1")
        address = "127.0.0.1" if is_one_machine else socket.getfqdn() if _is_loopback(named) else named
        server = host_store(address, 0, timeout, is_one_machine=is_one_machine)
        found = [(address, server.port)]
    dist.broadcast_object_list(found)
    if server is not None:
        return server
    return _join_server(*found[0], _ANSWER_S, rank)


def _register(shared: Store, rank: int, size: int, timeout_s: float, *, outlives: bool = False) -> Store:
    """Register this rank, and return when all ranks are registered.

    Polls instead of waiting in the store, so that it can be interrupted and detects a failure immediately.

    Args:
        shared: A store that all ranks reach.
        rank: This rank.
        size: Number of ranks.
        timeout_s: Maximum time to wait.
        outlives: Whether the store may have keys of processes that have ended: torchrun's agent keeps its store when it
            starts processes again, and a program may make its group more than once. The count of restarts does not
            distinguish them, since it differs between agents.

    Returns:
        The part of the store that belongs to these processes.
    """
    here = f"{socket.gethostname()} (process {os.getpid()})"
    part, tried, is_in = shared, "", False
    if outlives:
        part = PrefixStore(name := uuid.uuid4().hex, shared)
        if rank == 0:
            shared.set("part", name)
    began = time.monotonic()
    next_report_s = min(_FIRST_REPORT_S, timeout_s)
    pause_s = 0.002
    try:
        if rank == 0 or not outlives:
            _enter(part, rank, size, here)
            is_in = True
            _arrive(part, rank, size, last="all" if outlives else "complete")
        while not is_in or not part.check(["complete"]):
            if outlives and rank == 0 and part.check(["all"]):
                part.set("complete", "1")
                break
            if outlives and rank and shared.check(["part"]) and (name := shared.get("part").decode()) != tried:
                # Of this rank 0, or of an earlier one: then it is complete, has another process in this rank's place,
                # or is replaced in a moment.
                tried, part = name, PrefixStore(name, shared)
                is_in = not part.check(["complete"]) and part.compare_set(f"rank{rank}", "", here).decode() == here
                if is_in:
                    _arrive(part, rank, size, last="all")
            waited_s = time.monotonic() - began
            _look_for_failure(part)
            if waited_s >= timeout_s:
                raise _incomplete(part, size, timeout_s)
            if waited_s >= next_report_s and rank == 0:
                missing = _listed(_missing(part, size))
                log.warning(
                    "Rank 0 is waiting for %s (%.0f of %g s). torchrun and mpirun do not say when a process ends with "
                    "exit code 0 before it connects: see whether it still runs",
                    missing, waited_s, timeout_s,
                )  # fmt: skip
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
    return part


def _enter(part: Store, rank: int, size: int, here: str) -> None:
    """Register this rank.

    Raises:
        LaunchError: Another process has the same rank, or another number of ranks.
    """
    who = part.compare_set(f"rank{rank}", "", here).decode()
    if who != here:
        raise LaunchError(
            f"Expected one process with rank {rank}, got two: {who}, and {here}.",
            fix="set a different RANK (or NODE_RANK and LOCAL_RANK) for each process, and a different MASTER_PORT "
            "for each run.",
        )
    theirs = part.compare_set("size", "", str(size)).decode()
    if theirs != str(size):
        raise LaunchError(
            f"Expected the same number of processes on all ranks, got {size} on rank {rank} and {theirs} on "
            "another rank.",
            fix="start all processes with the same WORLD_SIZE, devices= and num_nodes=.",
        )


def _look_for_failure(part: Store) -> None:
    """Raise a RankFailure if a rank has failed, or has ended before it was registered, also without an error."""
    if _find_ended is not None and _find_ended[1] == os.getpid():
        found = _find_ended[0](lambda rank: not part.check([f"rank{rank}"]))
        if found is not None:
            part.compare_set(FAILURE, "", found)
    if part.check([FAILURE]):
        raise _failed_before(json.loads(part.get(FAILURE)))


def _arrive(part: Store, rank: int, size: int, *, last: str) -> None:
    """Count this rank; the last one writes a key."""
    if _arrivals(part, size).post(rank, "") is not None:
        part.set(last, "1")


def _arrivals(part: Store, size: int) -> StoreTree:
    return StoreTree(part, "arrivals", size)


def _missing(part: Store, size: int) -> list[int]:
    """Return the first ranks that are missing, one more than are named."""
    return _arrivals(part, size).missing(_MOST_NAMED + 1)


def _incomplete(part: Store, size: int, timeout_s: float) -> LaunchError:
    missing = _missing(part, size)
    others = (rank for rank in range(size) if rank not in missing and part.check([f"rank{rank}"]))
    present = list(islice(others, _MOST_NAMED + 1))
    hosts = "; ".join(f"rank {rank} on {part.get(f'rank{rank}').decode()}" for rank in present[:_MOST_NAMED])
    return LaunchError(
        f"Expected {size} ranks within {timeout_s:g} s, but {_listed(missing)} did not connect. Connected: {hosts}"
        f"{' and others' if len(present) > _MOST_NAMED else ''}.",
        fix="see the output of the missing ranks. If they were not started, check num_nodes= and that the script runs "
        "on every node (with srun or torchrun). If they are slow, pass a longer timeout= to the strategy.",
    )


def _listed(ranks: list[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    more = " and others" if len(ranks) > _MOST_NAMED else ""
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
