"""Rendezvous of processes: a store that all of them reach, a roll call in it, and torch's process group.

Strategies call `connect` in `setup_environment`; launchers host the store (`host_store`); fabric/watch/ uses it.
A process is part of one world at a time, as in torch.distributed; its state is kept here.
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
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import LaunchError, RankFailure

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore

__all__ = ["Cluster", "attempt_store", "connect", "disconnect", "host_store", "keep_store", "open_store", "store"]

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(seconds=1800)
HOSTED = "LOOPWRIGHT_STORE"
"""The variable that launchers set to "hosted": the store's server runs already, do not open one."""
FAILURE = "failure"
"""The key under which the first failure of a rank is posted, as JSON."""

_FIRST_REPORT_S = 30.0
_ANSWER_S = 60.0  # for a store, which has a thread of its own for it
_SLOWEST_POLL_S = 0.25
_DESTROY_S = 5.0
_LINGER_S = 5.0
_MOST_NAMED = 16


class Cluster(Protocol):
    """The attributes of a cluster environment that connecting needs."""

    @property
    def main_address(self) -> str:
        """Host name or address of the process with global rank 0."""
        ...

    @property
    def main_port(self) -> int:
        """The store's port; 0 where rank 0 is alone and may take any."""
        ...

    def world_size(self) -> int:
        """Return the number of processes."""
        ...

    def global_rank(self) -> int:
        """Return the rank among all processes."""
        ...


@dataclass(frozen=True)
class _World:
    """What this process is connected to."""

    store: Store
    rank: int
    size: int
    pid: int
    must_linger: bool
    """Whether the store ends with this process though others may need it: then it has to wait for them."""
    is_ours: bool
    """Whether the process group was made here, and is to be destroyed here."""


# One world per process, as in torch.distributed; each is asked for its pid, since a forked child inherits these names.
_world: _World | None = None
_kept: tuple[TCPStore, int] | None = None
_num_worlds = 0
_has_exit = False


# -- the store -------------------------------------------------------------------------------------------------------


def host_store(address: str, port: int, timeout: timedelta | None = None) -> TCPStore:
    """Open the server of a store in this process.

    It lives as long as the object that is returned. Opening it before the others start leaves no moment in which the
    port is free again: port 0 takes any, and see `.port` of the result.

    Args:
        address: A name or address of this host, as the others know it.
        port: 0 takes a free one.
        timeout: How long an operation on the store may take.

    Raises:
        LaunchError: The port is taken, or the address is none of this host.
    """
    try:
        return _tcp_store(address, port, timeout or DEFAULT_TIMEOUT, is_master=True)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            from .port_owner import port_owner

            owner = port_owner(port)
            raise LaunchError(
                f"port {port} of this host is in use{f' by {owner}' if owner else ''}, so that rank 0 cannot wait for "
                "the other processes there.",
                fix="set MASTER_PORT to a free port, the same for all processes; on one machine, leave it out: then a "
                "free one is taken. Or end the program that holds it, which may be an earlier run.",
            ) from error
        raise LaunchError(
            f"rank 0 could not open a store at {address}:{port}: {_first_line(error)}",
            fix="MASTER_ADDR must be a name or address of the host that rank 0 runs on.",
        ) from error


def keep_store(server: TCPStore) -> None:
    """Let `open_store` use a server that a launcher opened in the process that becomes rank 0."""
    global _kept, _num_worlds
    _kept = (server, os.getpid())
    _num_worlds = 0  # nothing was written to this one


def attempt_store(base: Store) -> Store:
    """Return the part of a store that belongs to this attempt of torchrun (or to the only one).

    torchrun's store outlives an attempt; without names of its own, a restarted process finds the addresses of the
    processes that died.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", base)


def open_store(cluster: Cluster, timeout: timedelta | None = None) -> Store:
    """Return a connection to the store of all ranks, opening its server where that is this process's part.

    Rank 0 opens it, unless the launcher did before (in the same process: the very object is returned).

    Args:
        cluster: Knows the rank of this process and the address of the store.
        timeout: How long to wait for the server, and how long an operation may take.

    Raises:
        LaunchError: The port is taken, or nothing answers in time.
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
            f"rank {cluster.global_rank()} does not know where rank 0 is: the port is unknown.",
            fix="set MASTER_ADDR and MASTER_PORT, the same in every process; or let torchrun, `loopwright launch` or "
            "devices= start the processes.",
        )
    began = time.monotonic()
    _wait_for_server(address, port, timeout.total_seconds(), cluster.global_rank())
    left_s = max(1.0, timeout.total_seconds() - (time.monotonic() - began))
    store = _join_server(address, port, min(_ANSWER_S, left_s), cluster.global_rank())
    store.set_timeout(timeout)
    return store


def _join_server(address: str, port: int, timeout_s: float, rank: int) -> TCPStore:
    """Return a connection to the store at a port where something listens.

    torch tries several times, each as long as an operation may take: a program that accepts connections and never
    answers would hold this process for a multiple of the timeout. So it tries in a thread, which is left behind then.

    Raises:
        LaunchError: What listens there is not a store.
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
        raise _stranger(address, port, rank, f"it takes connections and did not answer within {timeout_s:.0f} s")
    raise _stranger(address, port, rank, f"it answers {_answer(str(errors[0]))}") from errors[0]


def _answer(said: str) -> str:
    """Return what a stranger said, from torch's error: it shows the first four bytes as a number."""
    number = re.search(r"invalid value returned from server.*Got: (\d+)", said)
    return (
        repr(int(number[1]).to_bytes(8, "little").rstrip(b"\0")) if number else f"with an error: {said.splitlines()[0]}"
    )


def _stranger(address: str, port: int, rank: int, how: str) -> LaunchError:
    return LaunchError(
        f"rank {rank} expected the store of rank 0 at {address}:{port}, got another program: {how}.",
        fix=f"set MASTER_PORT to a free port, the same for all processes; or end the program that listens there "
        f"(`ss -ltnp 'sport = :{port}'` on {address} names it). If it is rank 0, look at what that prints.",
    )


def _tcp_store(address: str, port: int, timeout: timedelta, *, is_master: bool) -> TCPStore:
    import torch.distributed as dist

    store: TCPStore = dist.TCPStore(  # type: ignore[attr-defined]  # public, but missing in torch's types
        address, port, world_size=None, is_master=is_master, timeout=timeout, wait_for_workers=False
    )
    return store


def _wait_for_server(address: str, port: int, timeout_s: float, rank: int) -> None:
    """Return when something listens. torch's own waiting cannot be interrupted, and prints a page for each attempt."""
    began = time.monotonic()
    next_report_s = _FIRST_REPORT_S
    pause_s = 0.02
    while True:
        try:
            socket.create_connection((address, port), timeout=min(max(1.0, timeout_s), 10.0)).close()
            return
        except OSError as error:  # refused, no route, unknown name: all may be true for a moment only
            why = error
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            raise _unreachable(address, port, rank, f"{why} (tried for {timeout_s:g} s)") from why
        if waited_s >= next_report_s:
            log.warning("rank %d waits for rank 0 at %s:%d: %s (%.0f s)", rank, address, port, why, waited_s)
            next_report_s *= 2
        time.sleep(min(pause_s, max(0.0, timeout_s - waited_s)))
        pause_s = min(2 * pause_s, 1.0)


def _unreachable(address: str, port: int, rank: int, why: str) -> LaunchError:
    return LaunchError(
        f"rank {rank} did not reach rank 0 at {address}:{port}: {why}",
        fix="look at rank 0: has it started, does it run on that host (MASTER_ADDR) and with that port (MASTER_PORT), "
        "is the port open between the hosts?",
    )


# -- the world -------------------------------------------------------------------------------------------------------


def store() -> Store | None:
    """Return the store of the world that this process is connected to; None where there is none."""
    world = _current()
    return None if world is None else world.store


def connect(
    cluster: Cluster, *, backend: str, timeout: timedelta | None = None, device: torch.device | None = None
) -> Store:
    """Join all ranks to a process group of torch.distributed; do nothing the second time.

    Called by strategies in every process. Each rank first says in the store that it is there, so that those which are
    missing have names. A group that already exists is used as it is.

    Args:
        cluster: Knows the rank of this process and the address of rank 0.
        backend: As `torch.distributed.init_process_group` knows it: "gloo", "nccl", "cpu:gloo,cuda:nccl".
        timeout: How long to wait for the other ranks, and how long a collective may take; None: 1800 s.
        device: The device of this process.

    Returns:
        The store of all ranks, for what needs to talk without collectives.

    Raises:
        LaunchError: Ranks are missing after the time-out (all are named), two processes have the same rank, or numbers
            of ranks differ.
        RankFailure: A rank failed before all had met.
    """
    import torch.distributed as dist

    global _world, _num_worlds
    timeout = timeout or DEFAULT_TIMEOUT
    rank, size = cluster.global_rank(), cluster.world_size()
    world = _current()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise LaunchError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed already, but "
                f"now it is to be rank {rank} of {size}.",
                fix="use the same devices= and num_nodes= for all runs of a program; or let each have a process of its "
                "own, with strategy='ddp_spawn'.",
            )
        if world is None:
            world = _world = _World(_store_of_group(), rank, size, os.getpid(), must_linger=False, is_ours=False)
        return world.store
    base = open_store(cluster, timeout)
    shared = attempt_store(base)
    if _num_worlds:  # the store may be the same, and must not hand out the addresses of the world before
        shared = dist.distributed_c10d.PrefixStore(f"world{_num_worlds}", shared)
    _call_roll(shared, rank, size, timeout.total_seconds())
    # gloo, too, then keeps the last collectives, which the report on a stall shows.
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
            f"rank {rank} of {size} met the others in the store at {cluster.main_address}, but the connections of "
            f"{backend} could not be made: {_first_line(error)}",
            fix="if the hosts have several networks, name the one that joins them: GLOO_SOCKET_IFNAME=eth0 for gloo, "
            "NCCL_SOCKET_IFNAME=eth0 for nccl; and see whether a firewall closes ports between them.",
        ) from error
    _num_worlds += 1
    # A launcher that keeps the store waits for the processes that it started; on other nodes no process waits.
    waits_for_all = base is _kept_here() and os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    must_linger = not waits_for_all and (base is _kept_here() or _hosts(rank))
    _world = _World(shared, rank, size, os.getpid(), must_linger=must_linger, is_ours=True)
    _disconnect_at_exit()
    return shared


def disconnect() -> None:
    """Leave the world: destroy the process group, and where this process hosts the store, let the others go first.

    Called at the end of the interpreter, and by launchers at the end of a process that has none. It takes a few seconds
    at most, whatever the other ranks do. Nothing happens where `connect` made no group.
    """
    global _world
    world = _current()
    _world = None
    if world is None or not world.is_ours:
        return
    import torch.distributed as dist

    _mark_left(world)
    if dist.is_initialized():
        # A destructor of gloo waits for operations that are under way, however long those wait for another rank.
        destroying = threading.Thread(target=dist.destroy_process_group, name="loopwright-disconnect", daemon=True)
        destroying.start()
        destroying.join(_DESTROY_S)
        if destroying.is_alive():
            log.warning("rank %d: the process group has operations under way; it is left as it is", world.rank)
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
    """Return a store with a prefix of ours, on the store of an existing process group."""
    from torch.distributed import distributed_c10d

    # The only way to it; the name has been there since torch 1.8.
    default: Store = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore("loopwright", default)


def _call_roll(shared: Store, rank: int, size: int, timeout_s: float) -> None:
    """Announce this rank, and return when all are here.

    Asks again and again rather than waiting in the store: this can be interrupted, and sees a failure at once.
    """
    here = f"{socket.gethostname()} (process {os.getpid()})"
    began = time.monotonic()
    try:
        who = shared.compare_set(f"rank{rank}", "", here).decode()
        if who != here:
            raise LaunchError(
                f"two processes have rank {rank}: {who}, and {here}.",
                fix="give each process a RANK (or NODE_RANK and LOCAL_RANK) of its own, and each run a port of its own "
                "(MASTER_PORT).",
            )
        said = shared.compare_set("size", "", str(size)).decode()
        if said != str(size):
            raise LaunchError(
                f"rank {rank} counts {size} processes (devices times num_nodes), but another rank counts {said}.",
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
                log.warning("rank 0 waits for %s (%.0f of %g s)", missing, waited_s, timeout_s)
                next_report_s += _FIRST_REPORT_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
    except RuntimeError as error:
        if isinstance(error, (LaunchError, RankFailure)):
            raise
        raise LaunchError(
            f"rank {rank} lost the store while it waited for the other ranks: {_first_line(error)}",
            fix="look at the process that hosts it (rank 0, or the one that started the others): it has ended.",
        ) from error


def _missing(shared: Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not shared.check([f"rank{rank}"])]


def _incomplete(shared: Store, size: int, timeout_s: float) -> LaunchError:
    missing = _missing(shared, size)
    present = [rank for rank in range(size) if rank not in missing]
    hosts = "; ".join(f"rank {rank} on {shared.get(f'rank{rank}').decode()}" for rank in present[:_MOST_NAMED])
    return LaunchError(
        f"{_listed(missing)} of {size} did not come within {timeout_s:g} s. Here are: {hosts}"
        f"{' and others' if len(present) > _MOST_NAMED else ''}.",
        fix="look at what the missing ranks print. Perhaps they were not started (is num_nodes= right, does the script "
        "run on every node, with srun or torchrun?), or they are slow: give the strategy a longer timeout=.",
    )


def _listed(ranks: list[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {names}{more}"


def _failed_before(said: dict[str, Any]) -> RankFailure:
    """Return the error for a failure that was posted during the roll call."""
    trace = f"\n--- traceback of rank {said['rank']} ---\n{said['trace'].rstrip()}" if said.get("trace") else ""
    return RankFailure(
        f"rank {said['rank']} (host {said['host']}, pid {said['pid']}) failed before all ranks had met: "
        f"{said['how']}{trace}",
        fix=f"look at what rank {said['rank']} printed; the messages of the other ranks follow from it.",
    )


# -- leaving ---------------------------------------------------------------------------------------------------------


def _mark_left(world: _World) -> None:
    try:
        world.store.add("left", 1)
    except RuntimeError:  # the store's host ended before us: the counter is not needed any more
        log.debug("rank %d leaves a store that is gone", world.rank)


def _wait_until_left(world: _World) -> None:
    """Give the others, who may be about to read from the store, a few seconds before it goes."""
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
