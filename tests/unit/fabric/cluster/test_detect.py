"""Which environment is found, and what is imported to find it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loopwright import fabric
from loopwright.fabric import (
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    detect_cluster,
)

from .test_schedulers import POD, TORCHRUN, lsf  # noqa: F401
from .test_slurm import TASK


def test_nothing_is_found_on_an_ordinary_machine() -> None:
    assert type(detect_cluster({"PATH": "/bin", "HOME": "/"})) is LightningEnvironment


def test_each_is_found_by_its_variables(lsf: dict[str, str]) -> None:  # noqa: F811
    assert type(detect_cluster(TORCHRUN)) is TorchElasticEnvironment
    assert type(detect_cluster(TASK)) is SLURMEnvironment
    assert type(detect_cluster(lsf)) is LSFEnvironment
    assert type(detect_cluster(POD)) is KubeflowEnvironment


def test_torchrun_inside_of_a_slurm_job_comes_first(lsf: dict[str, str]) -> None:  # noqa: F811
    assert type(detect_cluster({**lsf, **TASK, **TORCHRUN})) is TorchElasticEnvironment
    assert type(detect_cluster({**lsf, **TASK})) is SLURMEnvironment


def test_a_person_at_a_prompt_of_slurm_has_one_process() -> None:
    assert type(detect_cluster({**TASK, "SLURM_JOB_NAME": "interactive"})) is LightningEnvironment


def test_processes_that_the_user_starts_manually() -> None:
    cluster = detect_cluster({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"})
    assert type(cluster) is LightningEnvironment
    assert cluster.creates_processes_externally


def test_what_is_found_reads_the_variables_that_were_given() -> None:
    assert detect_cluster(TORCHRUN).global_rank() == 5
    assert detect_cluster(TASK).global_rank() == 3


def test_the_environment_of_the_process_is_read_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in (None, os.environ):
        cluster = detect_cluster(variables)
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert cluster.local_rank() == 3
        monkeypatch.delenv("LOCAL_RANK")


def test_mpirun_without_mpi4py_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert type(detect_cluster({"OMPI_COMM_WORLD_SIZE": "1"})) is LightningEnvironment
    assert not caplog.records
    assert type(detect_cluster({"OMPI_COMM_WORLD_SIZE": "2"})) is LightningEnvironment
    assert "pip install 'loopwright[mpi]'" in caplog.text


def test_finding_nothing_imports_no_mpi() -> None:
    program = """
import sys
from loopwright.fabric import LightningEnvironment, detect_cluster
assert type(detect_cluster({})) is LightningEnvironment
assert "mpi4py" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Slurm"):
        _ = fabric.SlurmEnvironment  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="Slurm"):
        _ = fabric.cluster.SlurmEnvironment  # type: ignore[attr-defined]
