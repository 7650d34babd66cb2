"""SLURM's tasks, and putting a job back into the queue."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

from loopwright.errors import ConfigError, LaunchError
from loopwright.fabric import SLURMEnvironment

TASK = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[03-04]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
}


def slurm(**changes: str | None) -> SLURMEnvironment:
    changed = {**TASK, **changes}
    return SLURMEnvironment(variables={name: value for name, value in changed.items() if value is not None})


def test_a_task_knows_its_place() -> None:
    cluster = slurm()
    assert cluster.creates_processes_externally
    assert (cluster.world_size(), cluster.global_rank(), cluster.local_rank(), cluster.node_rank()) == (4, 3, 1, 1)
    assert cluster.num_local_processes() == 2
    cluster.set_world_size(9)
    cluster.set_global_rank(9)
    assert (cluster.world_size(), cluster.global_rank()) == (4, 3)
    cluster.validate_settings(2, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alpha", "alpha"),
        ("alpha,beta,gamma", "alpha"),
        ("alpha beta gamma", "alpha"),
        ("1.2.3.4, 5.6.7.8", "1.2.3.4"),
        ("node[22-27]", "node22"),
        ("node[03-05,7]", "node03"),
        ("node[10]", "node10"),
        ("a[2,4-6].local,b7", "a2.local"),
        ("rack[1-2]node[08-09]", "rack1node08"),
        ("a-1-node[01-02]-ib", "a-1-node01-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert SLURMEnvironment.resolve_root_node_address(nodes) == first
    assert slurm(SLURM_NODELIST=nodes).main_address == first


def test_the_nodes_of_the_step_come_before_those_of_the_job() -> None:
    assert slurm(SLURM_STEP_NODELIST="node04").main_address == "node04"
    assert slurm(SLURM_NODELIST=None, SLURM_JOB_NODELIST="x[1-2]").main_address == "x1"
    assert slurm(SLURM_NODELIST=None).main_address == "127.0.0.1"
    assert slurm(MASTER_ADDR="other").main_address == "other"


def test_the_port_follows_from_the_job_so_that_all_tasks_find_it() -> None:
    assert slurm().main_port == 15000 + 4567
    assert slurm(SLURM_STEP_ID="2").main_port == 15000 + 4567 + 2
    assert slurm(SLURM_STEP_ID="4294967291").main_port == 15000 + 4567
    assert slurm(SLURM_JOB_ID=None).main_port == 12910
    assert slurm(MASTER_PORT="6000").main_port == 6000


def test_address_and_port_are_exported_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "6000")
    cluster = SLURMEnvironment()
    assert (cluster.main_address, cluster.main_port) == ("node03", 6000)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node03", "6000")
    cluster.teardown()
    assert "MASTER_ADDR" not in os.environ
    assert os.environ["MASTER_PORT"] == "6000"


# -- does it fit -----------------------------------------------------------------------------------------------------


def test_other_numbers_than_those_of_the_job_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        slurm().validate_settings(4, 1)
    assert "devices=4 (the number of tasks per node (SLURM_NTASKS_PER_NODE) is 2)" in caught.value.what
    assert "num_nodes=1 (the number of nodes (SLURM_NNODES) is 2)" in caught.value.what
    assert "devices=2 and num_nodes=2" in caught.value.fix
    assert "--nodes=1 --ntasks-per-node=4" in caught.value.fix


def test_a_single_task_without_a_number_per_node_is_compared_by_the_product() -> None:
    single = slurm(SLURM_NTASKS="1", SLURM_NTASKS_PER_NODE=None, SLURM_NNODES="1", SLURM_PROCID="0")
    single.validate_settings(1, 1)
    with pytest.raises(ConfigError, match=r"devices \* num_nodes=4 \(the number of tasks \(SLURM_NTASKS\) is 1"):
        single.validate_settings(4, 1)


def test_several_tasks_with_nothing_on_nodes_are_an_error() -> None:
    with pytest.raises(LaunchError, match="started 4 tasks") as caught:
        slurm(SLURM_NTASKS_PER_NODE=None)
    assert "--ntasks-per-node" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "node", "count"), [("2(x2)", "1", 2), ("3,1", "0", 3), ("3,1", "1", 1), ("4", "0", 4)]
)
def test_tasks_per_node_are_read_in_slurms_form(text: str, node: str, count: int) -> None:
    cluster = slurm(SLURM_NTASKS_PER_NODE=None, SLURM_TASKS_PER_NODE=text, SLURM_NODEID=node)
    assert cluster.num_local_processes() == count


def test_nodes_with_different_numbers_of_tasks_are_an_error() -> None:
    cluster = slurm(SLURM_NTASKS_PER_NODE=None, SLURM_TASKS_PER_NODE="3,1", SLURM_NODEID="0")
    with pytest.raises(ConfigError, match="4 tasks on 2 nodes, 3 of them on this node"):
        cluster.validate_settings(3, 2)


def test_a_batch_script_without_srun_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        slurm().validate_settings(2, 2)
        assert not caplog.records
        slurm(SLURM_STEP_ID=None).validate_settings(2, 2)
    assert "not started by srun" in caplog.text


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_a_missing_variable_is_named(name: str) -> None:
    cluster = slurm(**{name: None})
    with pytest.raises(LaunchError, match=name):
        _ = cluster.global_rank(), cluster.local_rank(), cluster.node_rank()


# -- detection -------------------------------------------------------------------------------------------------------


def test_a_person_at_a_prompt_is_no_task() -> None:
    assert SLURMEnvironment.detect(TASK)
    assert not SLURMEnvironment.detect({**TASK, "SLURM_JOB_NAME": "bash"})
    assert not SLURMEnvironment.detect({**TASK, "SLURM_JOB_NAME": "interactive"})
    assert not SLURMEnvironment.detect({})


def test_a_job_without_srun_gets_a_warning_if_srun_exists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program(tmp_path / "srun", "")
    job = {"SLURM_JOB_ID": "1", "PATH": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        assert not SLURMEnvironment.detect({**job, "PATH": "/nowhere"})
        assert not caplog.records
        assert not SLURMEnvironment.detect(job)
    assert "srun is not used" in caplog.text


# -- the job ---------------------------------------------------------------------------------------------------------


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_signal_and_whether_to_requeue() -> None:
    assert slurm().auto_requeue
    assert slurm().requeue_signal == signal.SIGUSR1
    cluster = SLURMEnvironment(auto_requeue=False, requeue_signal=signal.SIGUSR2, variables=TASK)
    assert not cluster.auto_requeue
    assert cluster.requeue_signal == signal.SIGUSR2


def test_the_job_has_a_name_and_a_number() -> None:
    assert (slurm().job_name(), slurm().job_id(), slurm().restart_count()) == ("train", 1234567, 0)
    assert slurm(SLURM_RESTART_COUNT="2").restart_count() == 2
    assert slurm(SLURM_JOB_ID="abc").job_id() is None
    assert SLURMEnvironment.job_id() is SLURMEnvironment.job_name() is None  # of this process, which is no job
    assert slurm(SLURM_JOB_ID=None).job_id() is None
    assert slurm(SLURM_JOB_NAME="bash").job_id() is None


@pytest.mark.parametrize(
    ("array", "name"), [({}, "1234567"), ({"SLURM_ARRAY_JOB_ID": "1234560", "SLURM_ARRAY_TASK_ID": "7"}, "1234560_7")]
)
def test_requeue_calls_scontrol_with_the_name_of_job_or_array_task(
    array: dict[str, str], name: str, tmp_path: Path
) -> None:
    program(tmp_path / "scontrol", f'echo "$@" > {tmp_path}/called')
    cluster = slurm(PATH=str(tmp_path), **array)
    assert cluster.requeue()
    assert (tmp_path / "called").read_text() == f"requeue {name}\n"


def test_a_requeue_that_slurm_refuses_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program(tmp_path / "scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    assert not slurm(PATH=str(tmp_path)).requeue()
    assert "presently disabled" in caplog.text


def test_no_requeue_without_a_job_or_scontrol(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not slurm(PATH=str(tmp_path)).requeue()
    assert "command scontrol not found" in caplog.text
    assert not slurm(SLURM_JOB_ID=None).requeue()
    assert "SLURM job not found" in caplog.text
