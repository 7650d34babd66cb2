"""Which devices, strategy and launcher several processes get: made-up environments, nothing is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loopwright.accelerators import ACCELERATOR_REGISTRY, Accelerator
from loopwright.accelerators.base import parse_device_indices
from loopwright.errors import ConfigError
from loopwright.fabric import Environment, InProcessLauncher, LightningEnvironment, Parts, detect_cluster, resolve
from loopwright.fabric.launch import ExternalLauncher, ProcessLauncher, ScriptLauncher
from loopwright.fabric.resolve import _OF_PROCESSES, _speaks_of_processes
from loopwright.precision import MixedPrecision
from loopwright.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy

CPU = torch.device("cpu")
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "WORLD_SIZE": "4",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
TWO_NODES = {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}
OURS = {
    "LOCAL_RANK": "1",
    "RANK": "1",
    "NODE_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "LOOPWRIGHT_STORE": "hosted",
}


def find(variables: dict[str, str] | None = None, *, interactive: bool = False, **arguments: Any) -> Parts:
    environment = Environment(variables or {}, interactive)
    return resolve(**{"accelerator": "cpu", "environment": environment, **arguments})


def name_of(parts: Parts) -> str:
    return parts.strategy.strategy_name


class Cards(Accelerator):
    """As many devices as a test says."""

    auto_priority = 100
    is_gpu = True
    count = 2

    @staticmethod
    def name() -> str:
        return "meta"

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return Cards.count

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return parse_device_indices(devices, "meta", list(range(Cards.count)))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("meta", index) for index in devices]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Cards]]:
    ACCELERATOR_REGISTRY.register("meta", Cards)
    monkeypatch.setattr(Cards, "count", 2)
    yield Cards
    ACCELERATOR_REGISTRY.remove("meta")


# -- nothing is there yet --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "start_method", "kind"),
    [
        ({"devices": 2}, "popen", ScriptLauncher),
        ({"devices": 2, "strategy": "ddp"}, "popen", ScriptLauncher),
        ({"devices": 1, "strategy": "ddp"}, "popen", InProcessLauncher),
        ({"devices": 2, "strategy": "ddp_spawn"}, "spawn", ProcessLauncher),
        ({"devices": 2, "strategy": "ddp_fork"}, "fork", ProcessLauncher),
        ({"devices": 2, "strategy": "ddp_notebook"}, "fork", ProcessLauncher),
        ({"devices": 2, "interactive": True}, "fork", ProcessLauncher),
        ({"devices": 2, "strategy": "ddp_find_unused_parameters_true"}, "popen", ScriptLauncher),
    ],
)
def test_several_processes_are_started_by(arguments: dict[str, Any], start_method: str, kind: type) -> None:
    parts = find(**arguments)
    assert name_of(parts).startswith("ddp")
    assert parts.strategy.start_method == start_method  # type: ignore[attr-defined]
    assert type(parts.launcher) is kind
    assert isinstance(parts.cluster_environment, LightningEnvironment)


def test_one_device_asks_nobody() -> None:
    parts = find()
    assert type(parts.strategy) is SingleDeviceStrategy
    assert type(parts.launcher) is InProcessLauncher
    assert parts.cluster_environment is None


def test_several_nodes_need_an_address() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT, NODE_RANK are not set"):
        find(num_nodes=2)
    parts = find({"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "NODE_RANK": "1"}, num_nodes=2)
    assert name_of(parts) == "ddp"
    assert type(parts.launcher) is ScriptLauncher


@pytest.mark.usefixtures("cards")
def test_all_cards_are_used_except_in_a_notebook() -> None:
    parts = find(accelerator="auto")
    assert len(parts.devices) == 2
    assert name_of(parts) == "ddp"
    parts = find(accelerator="auto", interactive=True)
    assert type(parts.strategy) is SingleDeviceStrategy
    assert "2 meta devices are visible, but only one is used" in parts.notes[0]


@pytest.mark.usefixtures("cards")
def test_too_few_cards_are_an_error_with_advice() -> None:
    with pytest.raises(ConfigError, match=r"(?s)requests 3 meta devices, but this machine has 2.*devices=2 or fewer"):
        find(accelerator="meta", devices=3)


def test_data_parallel_is_one_process_on_several_devices() -> None:
    parts = find(strategy="dp", devices=2)
    assert len(parts.devices) == 2
    assert type(parts.launcher) is InProcessLauncher
    with pytest.raises(ConfigError, match="strategy='dp', which runs one process"):
        find(strategy="dp", num_nodes=2)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_notebook_needs_a_fork(strategy: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)cannot start processes in a notebook.*ddp_notebook"):
        find(strategy=strategy, devices=2, interactive=True)


def test_a_system_without_fork_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ConfigError, match="got start_method='fork'"):
        find(strategy="ddp_fork", devices=2)


def test_ddp_does_not_exist_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.delenv("DISABLE_MPS", raising=False)
    with pytest.raises(ConfigError, match="cannot be used with accelerator='mps'"):
        find(accelerator="mps", strategy="ddp")


def test_a_launcher_of_the_strategys_own_is_kept() -> None:
    strategy = ParallelStrategy()
    strategy.launcher = own = InProcessLauncher()
    assert find(strategy=strategy, devices=2).launcher is own


# -- processes that exist --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{}, {"strategy": "ddp"}, {"devices": 4}, {"devices": "4", "strategy": "DDP"}, {"strategy": "ddp_spawn"}],
)
def test_torchrun_brings_its_processes(arguments: dict[str, Any]) -> None:
    parts = find(TORCHRUN, **arguments)
    assert parts.devices == (CPU,) * 4
    assert name_of(parts).startswith("ddp")
    assert type(parts.launcher) is ExternalLauncher
    assert parts.cluster_environment is not None
    assert parts.cluster_environment.world_size() == 4


def test_the_number_of_nodes_is_known_where_nobody_says_it() -> None:
    parts = find(TWO_NODES)
    assert (len(parts.devices), parts.num_nodes) == (2, 2)
    assert find(TWO_NODES, devices=2, num_nodes=2).num_nodes == 2


@pytest.mark.parametrize("arguments", [{"devices": 2}, {"devices": 1}, {"devices": 4, "num_nodes": 2}])
def test_numbers_that_differ_from_torchruns_are_both_named(arguments: dict[str, Any]) -> None:
    asked = arguments["devices"] * arguments.get("num_nodes", 1)
    with pytest.raises(ConfigError, match=rf"{asked}.*WORLD_SIZE.*4"):
        find(TORCHRUN, **arguments)


def test_one_process_under_torchrun_is_one_device() -> None:
    parts = find({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert type(parts.strategy) is SingleDeviceStrategy
    assert parts.devices == (CPU,)


def test_single_device_under_torchrun_would_do_the_same_four_times() -> None:
    with pytest.raises(ConfigError, match="strategy='single_device', got 4 processes from torchrun"):
        find(TORCHRUN, strategy="single_device")


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("devices", ["auto", 2, "2", -1])
def test_each_process_that_sees_one_card_uses_it(cards: type[Cards], devices: Any) -> None:
    cards.count = 1
    variables = {**TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert find(variables, accelerator="meta", devices=devices).devices == (torch.device("meta", 0),) * 2


def test_fewer_cards_than_processes_are_an_error(cards: type[Cards]) -> None:
    with pytest.raises(ConfigError, match="requests 4 meta devices, but this machine has 2"):
        find(TORCHRUN, accelerator="meta")


def test_a_script_that_we_launched_says_itself_what_it_wants() -> None:
    parts = find(OURS, devices=2)
    assert type(parts.launcher) is ExternalLauncher
    assert find(OURS, strategy="ddp").devices == (CPU,) * 2
    # A second, small run in each process, or on rank 0 only.
    assert type(find(OURS).strategy) is SingleDeviceStrategy
    assert type(find(OURS, devices=1).strategy) is SingleDeviceStrategy
    with pytest.raises(ConfigError, match="to be 2, .* got devices=3 and num_nodes=1"):
        find(OURS, devices=3)


@pytest.mark.parametrize(
    "variables",
    [
        TORCHRUN,
        OURS,
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"},
        {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": "2"},
        {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "x", "JSM_NAMESPACE_LOCAL_RANK": "0", "JSM_NAMESPACE_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "2"},
        {"MV2_COMM_WORLD_SIZE": "2"},
        {"KUBERNETES_SERVICE_HOST": "x", "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_nobody_who_starts_processes_is_overlooked(variables: dict[str, str]) -> None:
    assert _speaks_of_processes(variables)


def test_every_variable_that_detection_reads_is_known_here() -> None:
    # detect_cluster is asked only if one of ours is there: it must not look at others.
    class Seen(dict[str, str]):
        asked: set[str] = set()

        def __contains__(self, name: object) -> bool:
            self.asked.add(str(name))
            return super().__contains__(name)

        def get(self, name: str, default: Any = None) -> Any:
            self.asked.add(name)
            return super().get(name, default)

    detect_cluster(Seen())
    assert Seen.asked <= set(_OF_PROCESSES)


# -- what `loopwright launch` says -----------------------------------------------------------------------------------

SAID = {
    "LT_ACCELERATOR": "cpu",
    "LT_STRATEGY": "ddp_spawn",
    "LT_DEVICES": "2",
    "LT_NUM_NODES": "1",
    "LT_PRECISION": "bf16-mixed",
}


def test_variables_stand_for_arguments_that_are_left_out() -> None:
    parts = resolve(environment=Environment(SAID))
    assert parts.accelerator.name() == "cpu"
    assert parts.strategy.start_method == "spawn"  # type: ignore[attr-defined]
    assert len(parts.devices) == 2
    assert isinstance(parts.precision, MixedPrecision)


@pytest.mark.parametrize(
    "arguments",
    [{"devices": 2}, {"devices": "2"}, {"precision": "bf16-mixed"}, {"strategy": "DDP_spawn"}, {"accelerator": "CPU"}],
)
def test_the_same_said_twice_is_no_conflict(arguments: dict[str, Any]) -> None:
    assert len(find(SAID, **arguments).devices) == 2


def test_every_conflict_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        find(SAID, strategy=ParallelStrategy(), devices=3, precision="64-true")
    for part in ("LT_STRATEGY='ddp_spawn'", "devices=3", "LT_DEVICES='2'", "LT_PRECISION='bf16-mixed'", "--precision"):
        assert part in str(caught.value)
    assert "LT_ACCELERATOR" not in str(caught.value)


def test_a_wrong_variable_is_named_as_the_argument_would_be() -> None:
    with pytest.raises(ConfigError, match="got num_nodes='many'"):
        find({"LT_NUM_NODES": "many"})
    with pytest.raises(ConfigError, match="precision='8-bit'"):
        find({"LT_PRECISION": "8-bit"})


def test_a_strategy_of_one_process_stays_one() -> None:
    class Own(Strategy):
        pass

    assert type(find(strategy=Own()).launcher) is InProcessLauncher
    with pytest.raises(ConfigError, match="got devices=2, which selects 2"):
        find(strategy=Own(), devices=2)


class Foreign:
    """The methods of Lightning's ClusterEnvironment, which does not count the processes of a node."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 29500

    def world_size(self) -> int:
        return 2

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return 1

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return 1

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None: ...

    def teardown(self) -> None: ...


def test_an_environment_that_does_not_count_local_processes_gives_its_world_size() -> None:
    strategy = DDPStrategy(cluster_environment=Foreign())
    parts = find(strategy=strategy)
    assert parts.cluster_environment is strategy.cluster_environment
    assert (len(parts.devices), parts.num_nodes) == (2, 1)
