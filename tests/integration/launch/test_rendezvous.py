from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from loopwright.errors import LaunchError, RankFailure
from loopwright.fabric.failure import Failure
from loopwright.strategies.distributed import rendezvous
from loopwright.strategies.distributed.port_owner import port_owner

SHORT = timedelta(seconds=60)


class Place:
    """A cluster environment made of numbers."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size, self.main_port, self.main_address = rank, size, port, "127.0.0.1"

    def global_rank(self) -> int:
        return self.rank

    def world_size(self) -> int:
        return self.size


def here(rank: int, size: int) -> Place:
    return Place(rank, size, int(os.environ["MASTER_PORT"]))


def join(rank: int, size: int, timeout: timedelta = SHORT) -> Any:
    return rendezvous.connect(here(rank, size), backend="gloo", timeout=timeout, device=torch.device("cpu"))


# -- meeting ---------------------------------------------------------------------------------------------------------


def _sum_twice(rank: int, size: int) -> tuple[float, bool, bytes, str]:
    store = join(rank, size)
    again = join(rank, size)
    total = torch.ones(1)
    dist.all_reduce(total)
    store.set(f"word{rank}", f"from {rank}")
    word = store.get(f"word{(rank + 1) % size}")
    rendezvous.disconnect()
    assert not dist.is_initialized()
    assert rendezvous.store() is None
    return total.item(), again is store, word, os.environ["TORCH_FR_BUFFER_SIZE"]


def test_all_ranks_join_one_group_and_share_a_store() -> None:
    first, second, _ = run_ranks(_sum_twice, 3, connect=False)
    assert first == (3.0, True, b"from 1", "2000")
    assert second == (3.0, True, b"from 2", "2000")


def _two_worlds(rank: int, size: int) -> list[float]:
    totals = []
    for _ in range(2):
        join(rank, size)
        total = torch.ones(1)
        dist.all_reduce(total)
        totals.append(total.item())
        rendezvous.disconnect()
    return totals


def test_a_second_world_in_the_same_store_does_not_read_the_addresses_of_the_first() -> None:
    assert run_ranks(_two_worlds, 2, connect=False) == [[2.0, 2.0]] * 2


def _attempts(rank: int, size: int) -> list[str]:
    """Three attempts in one store; before the last, rank 0 of another one registered, and ended."""
    base = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    words = []
    for attempt in range(3):
        if attempt == 2 and rank == 0:
            base.set("part", "of a rank 0 that has ended")
            dist.PrefixStore("of a rank 0 that has ended", base).set("rank0", "earlier")
            base.set("earlier", "1")
        if attempt == 2 and rank == 1:
            base.wait(["earlier"])  # so that it joins those first
        if rank == 0:
            time.sleep(0.2)  # the others come first, and find the keys of the earlier attempt
        part = rendezvous._register(base, rank, size, 30, outlives=True)
        if rank == 0:
            part.set("word", f"of attempt {attempt}")
        words.append(part.get("word").decode())
    return words


def test_a_restart_does_not_read_what_an_earlier_attempt_left_in_the_store_of_an_agent() -> None:
    assert run_ranks(_attempts, 3, connect=False) == [[f"of attempt {attempt}" for attempt in range(3)]] * 3


def _adopt(rank: int, size: int) -> tuple[bool, str]:
    store = join(rank, size)
    store.set("who", "us")
    message = ""
    try:
        rendezvous.connect(Place(rank, size + 1, 0), backend="gloo", timeout=SHORT)
    except LaunchError as error:
        message = str(error)
    rendezvous.disconnect()
    return dist.is_initialized(), message


def test_a_group_of_the_users_own_is_taken_as_it_is_and_left_alone() -> None:
    for rank, (is_left, message) in enumerate(run_ranks(_adopt, 2, connect=True)):
        assert is_left
        assert f"rank {rank} of 2" in message
        assert "of 3" in message


def _alone(rank: int, size: int) -> float:
    os.environ.pop("LOOPWRIGHT_STORE")  # nobody hosts: rank 0 opens the store, at any port
    rendezvous.connect(Place(0, 1, 0), backend="gloo", timeout=SHORT)
    total = torch.ones(1)
    dist.all_reduce(total)
    rendezvous.disconnect()
    return total.item()


def test_one_rank_needs_no_port() -> None:
    assert run_ranks(_alone, 1, connect=False) == [1.0]


def _one_hosts(rank: int, size: int, port: int) -> float:
    os.environ.pop("LOOPWRIGHT_STORE")
    if rank == 0:
        time.sleep(0.3)  # the others come first and find nobody: no event tells that they are waiting
    rendezvous.connect(Place(rank, size, port), backend="gloo", timeout=SHORT)
    total = torch.ones(1)
    dist.all_reduce(total)
    rendezvous.disconnect()
    return total.item()


def test_rank_zero_opens_the_store_and_others_may_come_first() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert run_ranks(_one_hosts, 2, port, connect=False) == [2.0, 2.0]


# -- what goes wrong -------------------------------------------------------------------------------------------------


def _some_come(rank: int, size: int, present: list[int]) -> str:
    if rank not in present:
        return ""
    with pytest.raises(LaunchError) as caught:
        join(rank, size, timedelta(seconds=3))
    return str(caught.value)


def test_missing_ranks_are_named() -> None:
    first, _, third, _ = run_ranks(_some_come, 4, [0, 2], connect=False)
    for message in (first, third):
        assert "Expected 4 ranks within 3 s, but ranks 1, 3 did not connect" in message
        assert socket.gethostname() in message
        assert "timeout=" in message


def test_long_lists_of_ranks_are_truncated() -> None:
    assert rendezvous._listed(list(range(40))).endswith("14, 15 and others")
    assert rendezvous._listed([3]) == "rank 3"


def _same_rank(rank: int, size: int) -> str:
    try:
        join(0, size, timedelta(seconds=1))
    except LaunchError as error:
        return str(error)
    return "joined"


def test_two_processes_with_one_rank_are_named() -> None:
    messages = run_ranks(_same_rank, 2, connect=False)
    assert sum("Expected one process with rank 0, got two" in message for message in messages) == 1


def _other_size(rank: int, size: int) -> str:
    with pytest.raises(LaunchError) as caught:
        join(rank, size + rank, timedelta(seconds=1))
    return str(caught.value)


def test_different_counts_are_named() -> None:
    assert any(
        "Expected the same number of processes" in message for message in run_ranks(_other_size, 2, connect=False)
    )


def _failure_posted(rank: int, size: int, inherited: dict[str, str]) -> str:
    os.environ.update(inherited)
    if rank == 1:
        store = rendezvous.open_store(here(rank, size), SHORT)
        try:
            raise ValueError("no such file")
        except ValueError as error:
            store.set(rendezvous.FAILURE, Failure.of(error, rank=1).to_json())
        return ""
    with pytest.raises(RankFailure) as caught:
        join(rank, size, timedelta(hours=1))
    return str(caught.value)


@pytest.mark.parametrize("inherited", [{}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}], ids=["alone", "below torchrun"])
def test_a_failure_ends_the_waiting_at_once(inherited: dict[str, str]) -> None:
    message = run_ranks(_failure_posted, 2, inherited, connect=False)[0]
    assert "Rank 1 (host" in message
    assert "no such file" in message
    assert "--- traceback of rank 1 ---" in message


def test_a_taken_port_is_named() -> None:
    server = rendezvous.host_store("127.0.0.1", 0, SHORT)
    with pytest.raises(LaunchError, match=rf"got port {server.port}, which is in use by process {os.getpid()} \("):
        rendezvous.host_store("127.0.0.1", server.port, SHORT)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="127.0.0.2 is an address of its own")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_on_one_machine_the_store_listens_at_the_given_address_alone(address: str) -> None:
    server = rendezvous.host_store(address, 0, SHORT, is_one_machine=True)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port))
    client = dist.TCPStore(address, server.port, None, False, SHORT)
    client.set("word", "said")
    assert server.get("word") == b"said"
    with pytest.raises(LaunchError, match="which is in use"):
        rendezvous.host_store(address, server.port, SHORT, is_one_machine=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_several_ranks_need_a_port(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOPWRIGHT_STORE", raising=False)
    with pytest.raises(LaunchError, match=f"(?s)port of rank 0 in the environment of rank {rank}.*MASTER_PORT"):
        rendezvous.open_store(Place(rank, 2, 0), SHORT)


def test_an_absent_host_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(LaunchError, match=f"Rank 1 could not connect to rank 0 at 127.0.0.1:{port}"):
            rendezvous.open_store(Place(1, 2, port), timedelta(seconds=0.2))


def _host_goes(rank: int, size: int, read: int, write: int) -> str:
    """Rank 0 waits in a store whose host, rank 1, then dies."""
    if rank == 1:
        server = rendezvous.host_store("127.0.0.1", 0, SHORT)
        os.write(write, str(server.port).encode())
        while not server.check(["rank0"]):
            time.sleep(0.01)
        return ""  # run_ranks ends the process with os._exit, and so the server
    port = int(os.read(read, 20))
    with pytest.raises(LaunchError) as caught:
        rendezvous.connect(Place(0, 2, port), backend="gloo", timeout=SHORT)
    return str(caught.value)


def test_a_lost_store_is_reported() -> None:
    read, write = os.pipe()
    try:
        assert "Rank 0 lost its connection to the store" in run_ranks(_host_goes, 2, read, write, connect=False)[0]
    finally:
        os.close(read)
        os.close(write)


def test_a_waiting_process_says_for_whom(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_REPORT_S", 0.05)
    store = rendezvous.host_store("127.0.0.1", 0, SHORT)
    with pytest.raises(LaunchError, match="rank 1 did not connect"):
        rendezvous._register(store, 0, 2, 0.3)
    assert "Rank 0 is waiting for rank 1" in caplog.text


# -- leaving ---------------------------------------------------------------------------------------------------------

_LEAVES_WHILE_BUSY = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from loopwright.strategies.distributed import rendezvous
from loopwright.strategies.distributed.port_owner import port_owner
from loopwright.fabric import LocalEnvironment

class Place(LocalEnvironment):
    main_address, main_port = "127.0.0.1", int(os.environ["MASTER_PORT"])
    def world_size(self): return 2
    def global_rank(self): return int(os.environ["RANK"])

store = rendezvous.connect(Place(), backend="gloo", timeout=timedelta(seconds=600))
if store.add("seen", 1) == 2:
    store.set("both", "1")
while not store.check(["both"]):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    sys.stdin.read()
    os._exit(0)
work = dist.all_reduce(torch.ones(4), async_op=True)
print("busy", flush=True)
raise ValueError("main fails while a collective waits")
"""


@pytest.mark.slow
def test_the_interpreter_ends_while_a_collective_waits_for_another_rank() -> None:
    server = rendezvous.host_store("127.0.0.1", 0, SHORT)
    variables = {**os.environ, "MASTER_PORT": str(server.port), "LOOPWRIGHT_STORE": "hosted"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _LEAVES_WHILE_BUSY],
            env={**variables, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        _, told = ranks[0].communicate(timeout=200)
        assert ranks[0].returncode == 1, told
        assert "main fails while a collective waits" in told
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for stream in (rank.stdin, rank.stderr):
                if stream is not None:
                    stream.close()


def _host_lingers(rank: int, size: int) -> bool:
    if rank == 0:
        os.environ.pop("LOOPWRIGHT_STORE")
        server = rendezvous.host_store("127.0.0.1", 0, SHORT)
        rendezvous.keep_store(server)
        outer = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
        outer.set("port", str(server.port))
        rendezvous.connect(Place(0, size, server.port), backend="gloo", timeout=SHORT)
        rendezvous.disconnect()
        return True
    outer = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    store = rendezvous.connect(Place(rank, size, int(outer.get("port"))), backend="gloo", timeout=SHORT)
    time.sleep(0.3)  # rank 0 leaves now, and must wait for this rank's last words
    store.set("last", "words")
    rendezvous.disconnect()
    return True


def test_the_host_of_the_store_leaves_last() -> None:
    assert run_ranks(_host_lingers, 2, connect=False) == [True, True]


def test_waiting_can_be_interrupted() -> None:
    store = rendezvous.host_store("127.0.0.1", 0, SHORT)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        rendezvous._register(store, 0, 2, 30)


class Stranger:
    """Listens where rank 0 should: takes connections, and says nothing, speaks HTTP, or closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.server.getsockname()[1]
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:  # closed: the test is over
                return
            self.taken.append(connection)
            if self.kind == "http":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            if self.kind != "silent":
                connection.close()

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        for one in (self.server, *self.taken):
            one.close()


def _meet_other_programs(rank: int, size: int) -> list[str]:
    said = []
    for kind in ("silent", "http", "closes"):
        stranger = Stranger(kind)
        with pytest.raises(LaunchError, match=f"expected the store of rank 0 at 127.0.0.1:{stranger.port}") as caught:
            rendezvous.connect(Place(1, 2, stranger.port), backend="gloo", timeout=timedelta(seconds=1))
        # The look whether something listens, and one try: each further one would take the time-out again.
        assert kind != "silent" or len(stranger.taken) == 2
        said.append(str(caught.value))
        stranger.close()
    return said


def test_another_program_at_the_port_is_reported_within_the_timeout() -> None:
    # In a process of its own: the thread that torch tries in is left behind.
    said = run_ranks(_meet_other_programs, 1, connect=False)[0]
    assert "did not answer within 1 s" in said[0]
    assert all("set MASTER_PORT to a free port" in one for one in said)


def test_the_owner_of_a_port_is_found_and_no_owner_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        owner = port_owner(port)
    assert owner is not None
    assert owner.startswith(f"process {os.getpid()} (")
    assert port_owner(port) is None


def test_a_descriptor_that_vanishes_does_not_hide_the_owner() -> None:
    with open(os.devnull) as earlier, socket.create_server(("127.0.0.1", 0)) as server:
        assert earlier.fileno() < server.fileno()
        earlier.close()  # the next descriptor, which lists the open ones and is then gone, comes before the socket's
        owner = port_owner(server.getsockname()[1])
    assert owner is not None
    assert owner.startswith(f"process {os.getpid()} (")
