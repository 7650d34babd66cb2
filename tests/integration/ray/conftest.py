"""One cluster of Ray for the tests of a module, of which nothing is left afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).resolve().parents[2] / "support"
_MARK = "LOOPWRIGHT_TEST_CLUSTER"


def processes_with(mark: str) -> dict[int, str]:
    """Return the command lines, by process id, of the processes that have the mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended, or is another user's
    return found


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """Give a folder for Ray, whose sockets need a short path; no process that began meanwhile may be left."""
    mark, folder = uuid.uuid4().hex, tempfile.mkdtemp(prefix="r", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            _MARK: mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")])),
            "RAY_AUTH_MODE": "disabled",  # else a token is written into the home folder
            "RAY_TMPDIR": folder,
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # a report to Ray waits for the next one
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",  # of a group that still counts a lost node
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_failure_threshold": "3",
            "RAY_health_check_period_ms": "1000",
        }.items():
            patch.setenv(name, value)
        yield Path(folder)
        ends = time.monotonic() + 60
        while (left := processes_with(mark)) and time.monotonic() < ends:
            time.sleep(0.2)
        for process in left:
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left


@pytest.fixture(scope="module")
def cluster(ray_folder: Path) -> Iterator[Any]:
    """Start a node with four CPUs, and "slots" for two workers of an elastic run."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "resources": {"slot": 2}, "include_dashboard": False, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
