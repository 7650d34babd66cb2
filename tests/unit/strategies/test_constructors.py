from __future__ import annotations

import inspect
import re
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch

from loopwright.settings.parameters import parameters_of
from loopwright.strategies import ParallelStrategy
from loopwright.strategies.data_parallel import DataParallelStrategy
from loopwright.strategies.ddp.strategy import DDPStrategy
from loopwright.strategies.deepspeed.strategy import DeepSpeedStrategy
from loopwright.strategies.fsdp.strategy import FSDPStrategy
from loopwright.strategies.mesh.strategy import MeshStrategy
from loopwright.strategies.xla.fsdp import XLAFSDPStrategy
from loopwright.strategies.xla.replicas import XLAReplicasStrategy
from loopwright.strategies.xla.single_device import SingleDeviceXLAStrategy
from loopwright.strategies.xla.strategy import XLAStrategy

WITH_ALL = [DDPStrategy, FSDPStrategy, DeepSpeedStrategy]
EVERY = [
    *WITH_ALL,
    DataParallelStrategy,
    MeshStrategy,
    ParallelStrategy,
    SingleDeviceXLAStrategy,
    XLAFSDPStrategy,
    XLAReplicasStrategy,
    XLAStrategy,
]


@pytest.mark.parametrize("kind", WITH_ALL)
def test_a_strategy_of_processes_has_every_common_argument_with_its_default(kind: type[ParallelStrategy]) -> None:
    common = dict(inspect.signature(ParallelStrategy).parameters)
    del common["problems"]  # of subclasses
    own = inspect.signature(kind).parameters
    assert {name: own[name].default for name in common} == {name: one.default for name, one in common.items()}
    # Evaluated: the command line replaces the text of annotations where it reads a class.
    typed, base = parameters_of(kind).named, parameters_of(ParallelStrategy).named
    assert {name: typed[name].annotation for name in common} == {name: base[name].annotation for name in common}


@pytest.mark.parametrize("kind", WITH_ALL)
def test_common_arguments_reach_the_base_class(kind: type[ParallelStrategy]) -> None:
    devices, cluster, checkpoint_io = [torch.device("cpu")], object(), object()
    parts: dict[str, Any] = {
        "parallel_devices": devices,
        "cluster_environment": cluster,
        "checkpoint_io": checkpoint_io,
    }
    strategy = kind(
        **parts, process_group_backend="mpi", timeout=7, start_method="fork", uneven="cycle", stall_timeout=3
    )
    assert (strategy.parallel_devices, strategy.cluster_environment) == (devices, cluster)
    assert strategy.checkpoint_io is checkpoint_io
    assert (strategy.process_group_backend, strategy.start_method, strategy.uneven) == ("mpi", "fork", "cycle")
    assert (strategy.timeout, strategy.stall_timeout) == (timedelta(seconds=7), timedelta(seconds=3))


@pytest.mark.parametrize("kind", EVERY)
def test_the_docstring_describes_every_argument_once_and_in_order(kind: type) -> None:
    section = re.search(r"Args:\n(.*?)\n\n", inspect.getdoc(kind) + "\n\n", re.DOTALL)
    assert section is not None
    described = re.findall(r"^ {4}(\w+): ", section[1], re.MULTILINE)
    code = kind.__init__.__code__  # type: ignore[misc]  # as written: the signature of "ddp" has torch's arguments, too
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    assert described == list(code.co_varnames[1:count])


def test_a_subclass_without_descriptions_keeps_its_docstring() -> None:
    class Plain(DDPStrategy):
        """As it is."""

        def __init__(self, own: int = 1) -> None:
            super().__init__()

    class Undocumented(DDPStrategy):
        pass

    assert Plain.__doc__ == "As it is."
    assert Undocumented.__doc__ is None


def test_the_nearest_description_of_an_argument_wins() -> None:
    class Own(DDPStrategy):
        """An engine.

        Args:
            uneven: In another way.
            own: New,
                and long.
        """

        def __init__(self, timeout: float = 1.0, uneven: str = "cycle", own: int = 1) -> None:
            super().__init__(timeout=timeout, uneven=uneven)

    lines = (Own.__doc__ or "").splitlines()[3:]
    assert lines[0].startswith("    timeout: Time after which")
    assert lines[1:] == ["    uneven: In another way.", "    own: New,", "        and long."]


def test_the_command_line_accepts_arguments_of_torchs_wrapper() -> None:
    found = parameters_of(DDPStrategy)
    assert not found.is_open
    assert found.named["find_unused_parameters"].default is False
    assert not {"module", "device_ids", "output_device", "dim", "kwargs"} & set(found.named)
    assert "stall_timeout" in found.named
    assert found.named["stall_timeout"].text.startswith("Time without progress")


def test_arguments_of_sharding_reach_the_plan() -> None:
    default, plan = FSDPStrategy().plan, FSDPStrategy(
        cpu_offload=True,
        auto_wrap_policy={torch.nn.Linear},
        activation_checkpointing=True,
        sharding_strategy="SHARD_GRAD_OP",
        state_dict_type="sharded",
        backward_prefetch=2,
        forward_prefetch=True,
        param_init_fn=torch.nn.Module.cpu,
        sync_module_states=False,
        mixed_precision=torch.distributed.fsdp.MixedPrecisionPolicy(),
        ignored_modules=[torch.nn.Linear(1, 1)],
    ).plan  # fmt: skip
    same = [one.name for one in fields(plan) if getattr(plan, one.name) == getattr(default, one.name)]
    assert same == [
        "is_hybrid",
        "is_replicated",
        "mesh",
        "pin_memory",
        "casts_when_gathered",
        "accumulate_dtype",
        "shard_placement_fn",
        "notes",
    ]
    hybrid = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)).plan
    assert (hybrid.is_hybrid, hybrid.mesh) == (True, (2, 2))
