"""The environment variables of a rank."""

from __future__ import annotations

from loopwright.fabric.cluster import LightningEnvironment
from loopwright.fabric.launch.variables import rank_variables


def test_second_process_of_second_node() -> None:
    variables = rank_variables("10.0.0.1", 1234, local_rank=1, num_processes=4, node_rank=1, num_nodes=2)
    assert variables == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "NODE_RANK": "1",
        "LOCAL_RANK": "1",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "LOOPWRIGHT_STORE": "hosted",
    }


def test_cluster_environment_reads_them_back() -> None:
    cluster = LightningEnvironment(
        variables=rank_variables("10.0.0.1", 1234, local_rank=1, num_processes=4, node_rank=1, num_nodes=2)
    )
    assert cluster.creates_processes_externally
    assert (cluster.main_address, cluster.main_port) == ("10.0.0.1", 1234)
    assert (cluster.local_rank(), cluster.node_rank(), cluster.num_local_processes()) == (1, 1, 4)
