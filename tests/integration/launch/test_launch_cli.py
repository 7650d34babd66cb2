"""`loopwright launch` for real: processes of this machine, and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kept import keep

from loopwright.fabric import TorchElasticEnvironment, detect_cluster

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

from loopwright.fabric import detect_cluster

cluster = detect_cluster()
rank = cluster.global_rank()
facts = {
    "kind": type(cluster).__name__, "arguments": sys.argv[1:], "rank": rank, "local": cluster.local_rank(),
    "size": cluster.world_size(), "here": cluster.num_local_processes(), "node": cluster.node_rank(),
    "address": cluster.main_address, "port": cluster.main_port, "pid": os.getpid(),
    "variables": {name: value for name, value in os.environ.items() if name.startswith("LT_")},
}
Path(f"rank{rank}.json.part").write_text(json.dumps(facts))
Path(f"rank{rank}.json.part").rename(f"rank{rank}.json")
while rank == 1 and not Path("rank0.json").exists():  # or the other one is ended before it has said who it is
    time.sleep(0.01)
if rank == 1 and "exit" in sys.argv:
    os._exit(7)
if rank == 1 and "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if {"exit", "kill", "wait"} & set(sys.argv):
    os.write(1, b"ready\\n")  # in one piece: print may write the line's end separately
    signal.pause()
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, "-m", "loopwright", "launch", *arguments],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip


def facts(folder: Path, size: int = 2) -> list[dict[str, object]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def is_running(pid: object) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_each_process_knows_its_place_and_gets_its_arguments(tmp_path: Path) -> None:
    process = start(tmp_path, "--nproc-per-node", "2", "--precision", "bf16-mixed", "program.py", "--nnodes", "3")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    first, second = facts(tmp_path)
    assert (first["rank"], second["rank"]) == (first["local"], second["local"]) == (0, 1)
    for found in (first, second):
        assert found["kind"] == TorchElasticEnvironment.__name__
        assert (found["size"], found["here"], found["node"]) == (2, 2, 0)
        assert found["arguments"] == ["--nnodes", "3"]
        assert found["variables"] == {"LT_PRECISION": "bf16-mixed"}
        assert found["address"] == "127.0.0.1"
    assert first["port"] == second["port"]


@pytest.mark.parametrize(("how", "code"), keep([("exit", 7), ("kill", 128 + signal.SIGKILL)], ("exit", 7)))
def test_the_exit_code_is_that_of_the_first_process_that_failed(how: str, code: int, tmp_path: Path) -> None:
    process = start(tmp_path, "--nproc-per-node", "2", "-m", "program", how)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert "rank      : 1" in errors
    assert "Traceback" not in errors
    assert not any(is_running(found["pid"]) for found in facts(tmp_path))


@pytest.mark.parametrize("signum", keep([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_signal_reaches_all_processes(signum: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, "--nproc-per-node", "2", "program.py", "wait")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, errors
    assert f"ended by {signum.name}" in errors
    assert not any(is_running(found["pid"]) for found in facts(tmp_path))


RESTARTED = """
import json, os, signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from loopwright.fabric import detect_cluster
from loopwright.strategies.distributed.rendezvous import connect

cluster = detect_cluster()
connect(cluster, backend="gloo", timeout=timedelta(seconds=60))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and cluster.global_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(1)
dist.all_reduce(total)
Path(f"rank{cluster.global_rank()}.json").write_text(json.dumps([attempt, total.item()]))
"""


@pytest.mark.slow
def test_after_a_restart_all_processes_meet_again(tmp_path: Path) -> None:
    # torchrun's store remembers the addresses of the processes that died.
    (tmp_path / "restarted.py").write_text(RESTARTED)
    process = start(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", "restarted.py")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)] == [[1, 2.0], [1, 2.0]]


def test_missing_machines_are_reported(tmp_path: Path) -> None:
    options = ["--nnodes", "2", "--node-rank", "1", "--main-address", "127.0.0.1", "--main-port", "9"]
    process = start(tmp_path, *options, "--rdzv-conf", "timeout=2", "program.py")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    assert "loopwright launch: Expected a rendezvous of all machines" in errors
    assert "--main-address" in errors


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        process = start(tmp_path, "--nnodes", "1", "--main-address", "127.0.0.1", "--main-port", port, "program.py")
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    assert "EADDRINUSE" in errors
    assert "no other program uses its port" in errors


def test_this_process_was_not_launched() -> None:
    # The tests above are about children: this one must not look like one of them.
    assert not isinstance(detect_cluster(), TorchElasticEnvironment)
