"""Processes without a scheduler, and what every environment shares."""

from __future__ import annotations

import os
import pickle

import pytest

from loopwright.errors import ConfigError, LaunchError
from loopwright.fabric import ClusterEnvironment, LightningEnvironment, LocalEnvironment, TorchElasticEnvironment


def test_one_process_on_this_machine() -> None:
    cluster = LightningEnvironment(variables={})
    assert LightningEnvironment.detect()
    assert (cluster.global_rank(), cluster.local_rank(), cluster.node_rank(), cluster.world_size()) == (0, 0, 0, 1)
    assert not cluster.creates_processes_externally
    assert cluster.num_local_processes() is None
    assert (cluster.main_address, cluster.main_port) == ("127.0.0.1", 0)
    cluster.validate_settings(1, 1)
    cluster.validate_settings(4, 1)
    cluster.teardown()


def test_the_old_name_is_the_same_class() -> None:
    assert LocalEnvironment is LightningEnvironment


def test_variables_say_where_the_process_stands() -> None:
    variables = {"LOCAL_RANK": "1", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
    cluster = LightningEnvironment(variables={**variables, "LOCAL_WORLD_SIZE": "4"})
    assert cluster.creates_processes_externally
    assert (cluster.local_rank(), cluster.node_rank(), cluster.num_local_processes()) == (1, 2, 4)
    assert (cluster.main_address, cluster.main_port) == ("10.0.0.1", 5000)


def test_group_rank_is_another_name_of_node_rank() -> None:
    assert LightningEnvironment(variables={"GROUP_RANK": "3"}).node_rank() == 3
    assert LightningEnvironment(variables={"GROUP_RANK": "3", "NODE_RANK": "1"}).node_rank() == 1


def test_deepspeeds_launcher_has_names_of_its_own_for_nodes_and_their_processes() -> None:
    said = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"}
    cluster = LightningEnvironment(variables={**said, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"})
    cluster.validate_settings(2, 2)
    assert (cluster.local_rank(), cluster.node_rank(), cluster.num_local_processes()) == (1, 1, 2)
    assert LightningEnvironment(variables={**said, "NODE_RANK": "0"}).node_rank() == 0
    for devices, nodes in ((4, 1), (2, 1), (4, 2)):
        with pytest.raises(ConfigError, match="Expected devices=2 and num_nodes=2"):
            cluster.validate_settings(devices, nodes)


def test_world_size_and_global_rank_are_set_by_who_starts_the_processes() -> None:
    cluster = LightningEnvironment(variables={"RANK": "7", "WORLD_SIZE": "9"})
    cluster.set_world_size(4)
    cluster.set_global_rank(3)
    assert (cluster.world_size(), cluster.global_rank()) == (4, 3)


def test_the_port_is_the_one_that_the_launcher_opened() -> None:
    cluster = LightningEnvironment(variables={"STANDALONE_PORT": "5001"})
    assert cluster.main_port == 5001
    cluster.set_main_port(5002)
    assert cluster.main_port == 5002


def test_the_variables_of_the_process_are_read_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    # A forked or spawned process gets its LOCAL_RANK after the object was made.
    for cluster in (LightningEnvironment(), LightningEnvironment(variables=os.environ)):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        assert cluster.local_rank() == 0
        monkeypatch.setenv("LOCAL_RANK", "2")
        assert cluster.local_rank() == 2
        assert pickle.loads(pickle.dumps(cluster)).local_rank() == 2


def test_several_nodes_need_to_know_where_they_meet_and_who_they_are() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT, NODE_RANK are not set") as caught:
        LightningEnvironment(variables={}).validate_settings(2, 3)
    assert "num_nodes=3" in str(caught.value)
    assert "--nnodes 3" in caught.value.fix
    complete = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "2"}
    LightningEnvironment(variables=complete).validate_settings(2, 3)
    opened = LightningEnvironment(variables={"MASTER_ADDR": "a", "NODE_RANK": "0"})
    opened.set_main_port(5000)
    opened.validate_settings(2, 3)


@pytest.mark.parametrize(
    ("name", "argument"), [("NODE_RANK", "num_nodes=2"), ("LOCAL_RANK", "devices=2")], ids=["node", "local"]
)
def test_a_rank_beyond_the_size_is_named(name: str, argument: str) -> None:
    variables = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "0", name: "2"}
    with pytest.raises(ConfigError, match=f"Expected {name} to be in the range 0 to 1 with {argument}, got 2"):
        LightningEnvironment(variables=variables).validate_settings(2, 2)


@pytest.mark.parametrize("text", ["", "one", "-1", "1.5"])
def test_a_variable_that_is_no_number_is_named_with_its_value(text: str) -> None:
    with pytest.raises(LaunchError, match="LOCAL_RANK") as caught:
        LightningEnvironment(variables={"LOCAL_RANK": text}).local_rank()
    assert repr(text) in str(caught.value)


def test_a_port_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT to be a port from 1 to 65535, got 70000"):
        _ = LightningEnvironment(variables={"MASTER_PORT": "70000"}).main_port


def test_teardown_forgets_the_world_where_it_was_started_and_not_in_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    LightningEnvironment().teardown()
    assert os.environ["WORLD_SIZE"] == "3"
    monkeypatch.delenv("LOCAL_RANK")
    LightningEnvironment(variables={}).teardown()
    assert os.environ["WORLD_SIZE"] == "3"
    LightningEnvironment().teardown()
    assert "WORLD_SIZE" not in os.environ


class Mine(ClusterEnvironment):
    """An environment of a user's own, with the methods that must be there and no constructor of ours."""

    def __init__(self) -> None:
        pass

    creates_processes_externally = True
    main_address = "somewhere"
    main_port = 1

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return 2

    def global_rank(self) -> int:
        return 1

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 1


def test_an_environment_of_ones_own_needs_the_abstract_methods_only() -> None:
    cluster = Mine()
    assert cluster.name == "Mine"
    assert cluster.num_local_processes() is None
    cluster.set_world_size(3)
    cluster.set_global_rank(0)
    cluster.validate_settings(5, 5)
    cluster.teardown()
    assert (cluster.world_size(), cluster.global_rank()) == (2, 1)


def test_a_variable_that_is_not_set_is_a_key_error_that_says_so() -> None:
    with pytest.raises(KeyError) as found:
        TorchElasticEnvironment(variables={}).global_rank()
    assert isinstance(found.value, LaunchError)
    assert "RANK" in str(found.value)
    assert "\\n" not in str(found.value)
