"""What the strategy with a process for each XLA device checks before anything starts; tests/integration/xla runs it."""

from __future__ import annotations

import pickle

import pytest
import torch

import loopwright as lw
from loopwright.strategies import STRATEGY_REGISTRY, XLAReplicasStrategy


def test_its_name_makes_several_processes_of_xla() -> None:
    made = STRATEGY_REGISTRY.create("xla_replicas")
    assert type(made) is XLAReplicasStrategy
    assert made.traits.accelerator_kind == "xla"
    assert (made.start_method, made.device) == ("popen", torch.device("xla", 0))


def test_it_travels_to_processes_that_are_spawned() -> None:
    copy = pickle.loads(pickle.dumps(XLAReplicasStrategy(debug=True, start_method="spawn", one_graph=True)))
    assert (copy.debug, copy.start_method, copy.one_graph) == (True, "spawn", True)
    module = torch.nn.Linear(1, 1)
    assert copy.without_data(module) is None  # no gradients of it are averaged


def test_arguments_that_cannot_work_are_all_named() -> None:
    with pytest.raises(lw.ConfigError, match=r"start_method='xmp'.*uneven='none'"):
        XLAReplicasStrategy(start_method="xmp", uneven="none")
