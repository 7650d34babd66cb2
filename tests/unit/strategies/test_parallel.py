from __future__ import annotations

import pytest
import torch

from loopwright.errors import LaunchError
from loopwright.strategies import ParallelStrategy, Topology


def test_a_parallel_strategy_takes_ranks_from_its_cluster() -> None:
    class Cluster:
        def global_rank(self) -> int:
            return 3

        def local_rank(self) -> int:
            return 1

        def node_rank(self) -> int:
            return 1

        def world_size(self) -> int:
            return 4

    devices = [torch.device("cpu"), torch.device("meta")]
    strategy = ParallelStrategy(parallel_devices=devices, cluster_environment=Cluster())
    assert strategy.topology == Topology(3, 1, 1, 4, 3, 4)
    assert strategy.device.type == "meta"
    assert strategy.root_device.type == "meta"
    assert not strategy.is_global_zero
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}
    assert ParallelStrategy().world_size == 1
    assert ParallelStrategy().device == torch.device("cpu")


def test_what_fabric_chose_can_be_read_and_is_not_taken_for_the_users_argument() -> None:
    cluster, devices = object(), [torch.device("cpu")] * 2
    strategy = ParallelStrategy()
    strategy.fill(parallel_devices=devices, cluster_environment=cluster)
    assert strategy.parallel_devices == devices
    assert strategy.cluster_environment is cluster
    assert strategy.given.parallel_devices is None
    assert strategy.given.cluster_environment is None


@pytest.mark.parametrize(("backend", "hint"), [("mpi", ""), ("cpu:gloo,cuda:bogus", ""), ("glo", "gloo")])
def test_a_backend_that_torch_was_built_without_is_refused_with_those_that_it_has(backend: str, hint: str) -> None:
    strategy = ParallelStrategy(process_group_backend=backend)
    with pytest.raises(LaunchError) as failure:
        strategy.setup_distributed()
    assert f"process_group_backend={backend!r}{f' (did you mean {hint!r}?)' if hint else ''}." in str(failure.value)
    assert "pass one of gloo" in failure.value.fix
