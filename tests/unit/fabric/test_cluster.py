from __future__ import annotations

from loopwright.fabric import LocalEnvironment


def test_one_process_on_this_machine() -> None:
    cluster = LocalEnvironment()
    assert LocalEnvironment.detect()
    assert (cluster.global_rank(), cluster.local_rank(), cluster.node_rank(), cluster.world_size()) == (0, 0, 0, 1)
    assert not cluster.creates_processes_externally
    assert (cluster.main_address, cluster.main_port) == ("127.0.0.1", 0)
    cluster.set_world_size(1)
    cluster.set_global_rank(0)
    cluster.validate_settings(1, 1)
    cluster.teardown()
