"""torchrun, LSF, MPI and Kubeflow, in made-up environments."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loopwright.errors import ConfigError, LaunchError, MissingDependency
from loopwright.fabric import KubeflowEnvironment, LSFEnvironment, MPIEnvironment, TorchElasticEnvironment

# -- torchrun --------------------------------------------------------------------------------------------------------

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "5000",
    "WORLD_SIZE": "6",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "2",
    "LOCAL_WORLD_SIZE": "2",
}


def test_torchrun_says_everything() -> None:
    cluster = TorchElasticEnvironment(variables=TORCHRUN)
    assert TorchElasticEnvironment.detect(TORCHRUN)
    assert not TorchElasticEnvironment.detect({})
    assert cluster.creates_processes_externally
    assert (cluster.main_address, cluster.main_port) == ("10.0.0.1", 5000)
    assert (cluster.world_size(), cluster.global_rank(), cluster.local_rank(), cluster.node_rank()) == (6, 5, 1, 2)
    assert cluster.num_local_processes() == 2
    cluster.set_world_size(1)
    cluster.set_global_rank(0)
    assert (cluster.world_size(), cluster.global_rank()) == (6, 5)
    cluster.validate_settings(2, 3)


def test_torchrun_with_another_number_of_processes() -> None:
    cluster = TorchElasticEnvironment(variables=TORCHRUN)
    with pytest.raises(ConfigError, match=r"devices \* num_nodes=2 \(WORLD_SIZE.* is 6") as caught:
        cluster.validate_settings(2, 1)
    assert "num_nodes=3" in caught.value.fix
    assert "--nnodes=1 --nproc-per-node=2" in caught.value.fix


def test_torchrun_without_an_address_is_this_machine_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cluster = TorchElasticEnvironment(variables={})
    assert (cluster.main_address, cluster.main_port, cluster.node_rank()) == ("127.0.0.1", 12910, 0)
    assert cluster.num_local_processes() is None
    assert "MASTER_ADDR" in caplog.text
    assert "MASTER_PORT" in caplog.text


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_a_variable_that_torchrun_did_not_set_is_named(name: str) -> None:
    cluster = TorchElasticEnvironment(variables={key: value for key, value in TORCHRUN.items() if key != name})
    with pytest.raises(LaunchError, match=f"the environment variable {name} from torchrun"):
        _ = cluster.world_size(), cluster.global_rank(), cluster.local_rank()


# -- Kubeflow --------------------------------------------------------------------------------------------------------

POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "3",
}


def test_a_pod_has_one_process() -> None:
    cluster = KubeflowEnvironment(variables=POD)
    assert KubeflowEnvironment.detect(POD)
    assert cluster.creates_processes_externally
    assert (cluster.main_address, cluster.main_port) == ("job-master-0", 23456)
    assert (cluster.world_size(), cluster.global_rank(), cluster.local_rank(), cluster.node_rank()) == (4, 3, 0, 3)
    assert cluster.num_local_processes() == 1
    cluster.validate_settings(1, 4)


@pytest.mark.parametrize("name", list(POD))
def test_a_pod_that_is_not_numbered_is_no_kubeflow(name: str) -> None:
    assert not KubeflowEnvironment.detect({key: value for key, value in POD.items() if key != name})


@pytest.mark.parametrize("name", ["LOCAL_RANK", "NODE_RANK", "GROUP_RANK"])
def test_a_pod_that_starts_further_processes_is_no_kubeflow(name: str) -> None:
    assert not KubeflowEnvironment.detect({**POD, name: "0"})


def test_several_devices_in_a_pod_are_an_error_that_says_how() -> None:
    with pytest.raises(ConfigError, match=r"devices=2 \(the number of processes in a pod is 1") as caught:
        KubeflowEnvironment(variables=POD).validate_settings(2, 4)
    assert "loopwright launch" in caught.value.fix


def test_a_pod_without_an_address_is_an_error() -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        _ = KubeflowEnvironment(variables={}).main_address


# -- LSF -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lsf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(socket, "gethostname", lambda: "c2")
    hosts = tmp_path / "hosts"
    hosts.write_text("batch\nc1\nc1\nc2\nc2\n")
    return {
        "LSB_JOBID": "1234567",
        "LSB_DJOB_RANKFILE": str(hosts),
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_RANK": "3",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
    }


def test_a_process_of_jsrun_knows_its_place(lsf: dict[str, str]) -> None:
    cluster = LSFEnvironment(variables=lsf)
    assert LSFEnvironment.detect(lsf)
    assert cluster.creates_processes_externally
    assert (cluster.main_address, cluster.main_port) == ("c1", 10567)
    assert (cluster.world_size(), cluster.global_rank(), cluster.local_rank(), cluster.node_rank()) == (4, 3, 1, 1)
    assert cluster.num_local_processes() == 2
    cluster.validate_settings(2, 2)


def test_lsf_with_other_numbers(lsf: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"devices=4 \(the number of processes on this host is 2"):
        LSFEnvironment(variables=lsf).validate_settings(4, 1)
    del lsf["JSM_NAMESPACE_LOCAL_SIZE"]
    LSFEnvironment(variables=lsf).validate_settings(4, 1)
    with pytest.raises(ConfigError, match=r"devices \* num_nodes=2 \(JSM_NAMESPACE_SIZE is 4"):
        LSFEnvironment(variables=lsf).validate_settings(2, 1)


def test_lsf_exports_address_and_port_and_takes_them_back(lsf: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in lsf.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    cluster = LSFEnvironment()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("c1", "10567")
    cluster.teardown()
    assert not {"MASTER_ADDR", "MASTER_PORT"} & set(os.environ)
    assert (cluster.main_address, cluster.main_port) == ("c1", 10567)


def test_what_the_user_sets_wins(lsf: dict[str, str]) -> None:
    cluster = LSFEnvironment(variables={**lsf, "MASTER_ADDR": "c2", "MASTER_PORT": "6000"})
    assert (cluster.main_address, cluster.main_port) == ("c2", 6000)


@pytest.mark.parametrize("name", ["LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"])
def test_lsf_is_found_by_four_variables(lsf: dict[str, str], name: str) -> None:
    del lsf[name]
    assert not LSFEnvironment.detect(lsf)


def test_a_host_may_be_written_with_its_domain(lsf: dict[str, str]) -> None:
    Path(lsf["LSB_DJOB_RANKFILE"]).write_text("batch.x.org\nc1.x.org\nc2.x.org\n")
    assert LSFEnvironment(variables=lsf).node_rank() == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("batch\n", "at least one host after the launch host"), ("batch\nc7\n", "got 'c2'")],
)
def test_a_file_of_hosts_that_does_not_help(lsf: dict[str, str], content: str | None, message: str) -> None:
    file = Path(lsf["LSB_DJOB_RANKFILE"])
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(LaunchError, match=message):
        LSFEnvironment(variables=lsf)


# -- MPI -------------------------------------------------------------------------------------------------------------


class Communicator:
    """The part of an mpi4py communicator that is used, for one rank of several; rank 0 must be made first."""

    def __init__(self, rank: int, hosts: list[str], sent: dict[str, Any]) -> None:
        self.rank, self.hosts, self.sent = rank, hosts, sent

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return len(self.hosts)

    def allgather(self, host: str) -> list[str]:
        assert host == self.hosts[self.rank]
        return list(self.hosts)

    def bcast(self, value: Any, root: int) -> Any:
        if self.rank == root:
            self.sent["bcast"] = value
        return self.sent["bcast"]

    def Split(self, color: int, key: int) -> Communicator:
        names = sorted(set(self.hosts))
        members = [rank for rank, host in enumerate(self.hosts) if names.index(host) == color]
        assert key == self.rank
        return Communicator(members.index(self.rank), [self.hosts[rank] for rank in members], {})


def mpi(hosts: list[str], monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[MPIEnvironment]:
    sent: dict[str, Any] = {}
    made = []
    for rank, host in enumerate(hosts):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        made.append(MPIEnvironment(variables=variables, communicator=Communicator(rank, hosts, sent)))
    return made


def test_ranks_come_from_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = mpi(["b", "a", "b", "a"], monkeypatch)
    assert [cluster.global_rank() for cluster in clusters] == [0, 1, 2, 3]
    assert [cluster.node_rank() for cluster in clusters] == [1, 0, 1, 0]
    assert [cluster.local_rank() for cluster in clusters] == [0, 0, 1, 1]
    assert {cluster.world_size() for cluster in clusters} == {4}
    assert {cluster.num_local_processes() for cluster in clusters} == {2}
    assert {cluster.main_address for cluster in clusters} == {"b"}
    assert len({cluster.main_port for cluster in clusters}) == 1
    assert clusters[0].main_port > 0
    assert clusters[0].creates_processes_externally
    clusters[3].validate_settings(2, 2)


def test_on_one_host_its_name_need_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {cluster.main_address for cluster in mpi(["x", "x"], monkeypatch)} == {"127.0.0.1"}


def test_the_address_that_the_user_sets_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = mpi(["b", "a"], monkeypatch, MASTER_ADDR="10.0.0.1", MASTER_PORT="6000")[1]
    assert (cluster.main_address, cluster.main_port) == ("10.0.0.1", 6000)


def test_mpi_with_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        mpi(["a", "a", "b"], monkeypatch)[0].validate_settings(4, 1)
    assert "devices=4 (the number of processes on this host is 2)" in caught.value.what
    assert "num_nodes=1 (the number of hosts is 2)" in caught.value.what


@pytest.mark.parametrize("size", [1, 2])
def test_mpi_is_found_where_there_are_several_processes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    module.COMM_WORLD = Communicator(0, ["a"] * size, {})  # type: ignore[attr-defined]
    package.MPI = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    assert MPIEnvironment.detect() is (size > 1)


def test_without_mpi4py_there_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert not MPIEnvironment.detect()
    with pytest.raises(MissingDependency, match="mpi4py"):
        MPIEnvironment()


def test_mpi4py_without_an_mpi_library_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "MPI":
                raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open")
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "mpi4py", Package("mpi4py"))
    assert not MPIEnvironment.detect()
    with pytest.raises(LaunchError, match="does not find an MPI library: cannot load MPI library"):
        MPIEnvironment()
