"""`loopwright doctor --nnodes`, in processes that are its machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import torch


def _doctor(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "loopwright", "doctor", "--json", "--accelerator", "cpu", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables},
    )  # fmt: skip


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_two_machines_compare_themselves_and_measure() -> None:
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    first = _doctor(*arguments, "--node-rank", "0", NCCL_ALGO="Tree")
    second = _doctor(*arguments, "--node-rank", "1", NCCL_ALGO="Ring")
    (output, errors), (others, _) = first.communicate(timeout=240), second.communicate(timeout=240)
    assert first.returncode == second.returncode == 0, errors
    found = {one["name"]: one for one in json.loads(output)}
    assert json.loads(others) == []
    assert "rank 0 on machine 0" in found["connection"]["value"]
    assert "rank 1 on machine 1" in found["connection"]["value"]
    assert found["torch"]["value"] == f"{torch.__version__} on all ranks"
    assert found["variable NCCL_ALGO"]["level"] == "warning"
    assert "bus bandwidth" in found["gloo, 64.0 MiB"]["value"]


def test_a_machine_that_does_not_come_is_named_in_time() -> None:
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    output, _ = (process := _doctor(*arguments, "--node-rank", "0", "--timeout", "2")).communicate(timeout=240)
    assert process.returncode == 1
    (found,) = json.loads(output)
    assert found["level"] == "problem"
    assert "Expected 2 ranks within 2 s, but rank 1 did not connect. Connected: rank 0" in found["value"]
    assert "--timeout 2" in found["advice"]
