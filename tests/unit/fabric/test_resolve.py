from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from loopwright.accelerators import ACCELERATOR_REGISTRY, Accelerator, CPUAccelerator
from loopwright.accelerators.base import parse_device_indices
from loopwright.errors import ConfigError, MissingDependency
from loopwright.fabric import Environment, LocalEnvironment, Parts, join_errors, resolve
from loopwright.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from loopwright.strategies import STRATEGY_REGISTRY, ParallelStrategy, SingleDeviceStrategy, Strategy

QUIET = Environment()


def find(**arguments: Any) -> Parts:
    return resolve(**{"accelerator": "cpu", "environment": QUIET, **arguments})


class Board(Accelerator):
    """Two devices that every machine has."""

    auto_priority = 100
    is_gpu = True

    @staticmethod
    def name() -> str:
        return "meta"

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 2

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return parse_device_indices(devices, "meta", [0, 1])

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("meta", index) for index in devices]


@pytest.fixture
def board() -> Iterator[None]:
    ACCELERATOR_REGISTRY.register("meta", Board)
    yield
    ACCELERATOR_REGISTRY.remove("meta")


@pytest.fixture
def _only_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("DISABLE_MPS", "1")


# -- what fits -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_only_a_cpu")
def test_defaults_give_one_device_in_full_precision() -> None:
    parts = resolve()
    assert parts.accelerator.name() == "cpu"
    assert type(parts.strategy) is SingleDeviceStrategy
    assert type(parts.precision) is Precision
    assert parts.devices == (torch.device("cpu"),)
    assert parts.num_nodes == 1
    assert parts.checkpoint_io is None
    assert parts.cluster_environment is None
    assert parts.launcher.is_interactive_compatible
    assert parts.warnings == ()


@pytest.mark.parametrize(
    ("precision", "kind", "name"),
    [
        (None, Precision, "32-true"),
        ("32-true", Precision, "32-true"),
        (32, Precision, "32-true"),
        ("32", Precision, "32-true"),
        (64, DoublePrecision, "64-true"),
        ("64", DoublePrecision, "64-true"),
        ("64-true", DoublePrecision, "64-true"),
        ("16-true", HalfPrecision, "16-true"),
        ("bf16-true", HalfPrecision, "bf16-true"),
        ("16-mixed", MixedPrecision, "16-mixed"),
        ("bf16-mixed", MixedPrecision, "bf16-mixed"),
    ],
)
def test_every_precision(precision: Any, kind: type, name: str) -> None:
    parts = find(precision=precision)
    assert type(parts.precision) is kind
    assert parts.precision.precision == name
    assert parts.warnings == ()


@pytest.mark.parametrize(("precision", "name"), [(16, "16-mixed"), ("16", "16-mixed"), ("bf16", "bf16-mixed")])
def test_short_names_are_taken_as_mixed_with_a_warning(precision: Any, name: str) -> None:
    parts = find(precision=precision)
    assert parts.precision.precision == name
    assert parts.warnings == (
        f"precision={precision!r} is interpreted as {name!r}. To silence this warning, pass that name.",
    )


def test_fp16_on_the_cpu_stays_fp16() -> None:
    precision = find(precision="16-mixed").precision
    assert isinstance(precision, MixedPrecision)
    assert precision.device == "cpu"
    assert precision.has_scaler


@pytest.mark.parametrize("devices", ["auto", 1, "1"])
def test_every_form_of_one_process_on_the_cpu(devices: Any) -> None:
    assert find(devices=devices).devices == (torch.device("cpu"),)


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("accelerator", ["auto", "gpu", "meta", "META", Board()])
def test_a_new_kind_of_device_is_found_by_every_name(accelerator: Any) -> None:
    parts = find(accelerator=accelerator, devices=1)
    assert isinstance(parts.accelerator, Board)
    assert parts.devices == (torch.device("meta", 0),)


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize(("devices", "index"), [([1], 1), ("1,", 1), ("0,", 0), (1, 0), ("1", 0)])
def test_every_form_of_one_of_several_devices(devices: Any, index: int) -> None:
    assert find(accelerator="meta", devices=devices).devices == (torch.device("meta", index),)


@pytest.mark.usefixtures("board")
def test_one_of_several_devices_is_used_and_noted_where_one_process_is_asked_for() -> None:
    parts = find(accelerator="meta", strategy="single_device")
    assert parts.devices == (torch.device("meta", 0),)
    assert "2 meta devices are visible, but only one is used" in parts.notes[0]


@pytest.mark.usefixtures("board")
def test_a_parallel_strategy_takes_all_devices() -> None:
    variables = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    parts = find(accelerator="meta", strategy=ParallelStrategy(), num_nodes=2, environment=Environment(variables))
    assert len(parts.devices) == 2
    assert parts.num_nodes == 2
    interactive = find(accelerator="meta", strategy=ParallelStrategy(), environment=Environment(interactive=True))
    assert len(interactive.devices) == 1


def test_devices_of_a_parallel_strategy_are_kept() -> None:
    strategy = ParallelStrategy(parallel_devices=[torch.device("cpu")] * 3)
    assert len(find(strategy=strategy).devices) == len(find(strategy=strategy, devices=3).devices) == 3


@pytest.mark.usefixtures("board")
def test_devices_that_are_not_those_of_the_strategy_are_refused() -> None:
    own = [torch.device("meta", 0), torch.device("meta", 1)]
    chosen = find(accelerator="meta", strategy=ParallelStrategy(parallel_devices=own[::-1]), devices=2)
    assert chosen.devices == (own[1], own[0])
    for devices in (1, "1", [1, 0], -1) if len(find(accelerator="meta", devices=-1).devices) != 2 else (1, "1", [1, 0]):
        with pytest.raises(ConfigError, match=r"parallel_devices, meta:0, meta:1, got devices="):
            find(accelerator="meta", strategy=ParallelStrategy(parallel_devices=own), devices=devices)


@pytest.mark.usefixtures("board")
def test_the_device_of_a_strategy_decides_the_accelerator() -> None:
    parts = find(accelerator="auto", strategy=SingleDeviceStrategy("cpu"))
    assert isinstance(parts.accelerator, CPUAccelerator)
    parts = find(accelerator="auto", strategy=SingleDeviceStrategy(torch.device("meta", 1)), devices=1)
    assert parts.devices == (torch.device("meta", 1),)


def test_parts_of_a_strategy_are_kept() -> None:
    accelerator, precision, io = CPUAccelerator(), HalfPrecision("bf16-true"), Files()
    strategy = SingleDeviceStrategy("cpu", accelerator, io, precision)
    parts = find(accelerator="auto", strategy=strategy)
    assert parts.strategy is strategy
    assert parts.accelerator is accelerator
    assert parts.precision is precision
    assert parts.checkpoint_io is io


@pytest.mark.parametrize("name", ["single_device", "SINGLE_DEVICE", "auto", "Auto"])
def test_names_of_strategies_in_any_case(name: str) -> None:
    assert type(find(strategy=name).strategy) is SingleDeviceStrategy


def test_a_registered_strategy_is_found_by_name() -> None:
    class Custom(Strategy):
        def setup_module(self, module: Any) -> Any:
            return module

    STRATEGY_REGISTRY.register("my_own", Custom)
    try:
        assert type(find(strategy="my_own").strategy) is Custom
    finally:
        STRATEGY_REGISTRY.remove("my_own")


class Files:
    def save_checkpoint(self, *args: Any) -> None: ...

    def load_checkpoint(self, *args: Any) -> None: ...


class Sync:
    def apply(self, model: Any) -> Any: ...

    def revert(self, model: Any) -> Any: ...


def test_plugins_of_every_kind() -> None:
    precision, files, cluster, sync = HalfPrecision(), Files(), LocalEnvironment(), Sync()
    parts = find(plugins=[precision, files, cluster, sync])
    assert parts.precision is precision
    assert parts.checkpoint_io is files
    assert parts.cluster_environment is cluster
    assert parts.layer_sync is sync
    assert find(plugins=precision).precision is precision
    assert find(plugins=[]).precision.precision == "32-true"


WITHOUT_XLA = pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed")
NO_TPU = r" needs the package 'torch_xla'(.|\n)*pip install torch==2.9.0"
if find_spec("torch_xla") is not None:
    NO_TPU = r", but torch_xla finds no TPU on this machine(.|\n)*PJRT_DEVICE=CPU"


# -- what does not ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_only_a_cpu")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accelerator": "cpux"}, r"accelerator='cpux' \(did you mean 'cpu'\?\)"),
        ({"accelerator": 3}, "Expected accelerator to be a name or an Accelerator, got accelerator=3"),
        ({"accelerator": None}, "got accelerator=None"),
        ({"accelerator": CPUAccelerator}, "to be a name or an Accelerator"),
        ({"accelerator": "tpu"}, rf"accelerator='tpu'{NO_TPU}"),
        ({"strategy": "single_tpu", "accelerator": "tpu"}, f"accelerator='tpu'{NO_TPU}"),
        pytest.param(
            {"strategy": "xla", "accelerator": "auto"}, "XLAStrategy needs the package 'torch_xla'", marks=WITHOUT_XLA
        ),
        ({"strategy": "xla", "accelerator": "cpu"}, "strategy='xla' cannot be used with accelerator='cpu'"),
        ({"accelerator": "gpu"}, r"accelerator='gpu', which(.|\n)*available accelerator \(cpu"),
        ({"accelerator": "cuda"}, r"accelerator='cuda', which(.|\n)*available accelerator \(cpu"),
        ({"accelerator": "mps"}, r"accelerator='mps', which(.|\n)*available accelerator \(cpu"),
        ({"strategy": "single"}, r"strategy='single' \(did you mean 'single_"),
        ({"strategy": "dpd"}, r"strategy='dpd' \(did you mean '(ddp|dp)'\?\)"),
        ({"strategy": None}, "Expected strategy to be a name or a Strategy, got strategy=None"),
        ({"strategy": SingleDeviceStrategy}, "to be a name or a Strategy"),
        ({"devices": 0}, "devices=0 cannot be used with accelerator='cpu'"),
        ({"devices": "0"}, "devices='0' cannot"),
        ({"devices": []}, r"devices=\[\] cannot"),
        ({"devices": [0]}, r"devices=\[0\] cannot"),
        ({"devices": -1}, "devices=-1 cannot"),
        ({"devices": None}, "devices=None cannot"),
        ({"devices": True}, "devices=True cannot"),
        ({"devices": "0,1"}, "devices='0,1' cannot"),
        ({"devices": "3", "strategy": "single_device"}, "devices='3', which selects 3"),
        ({"num_nodes": 0}, "integer >= 1, got num_nodes=0"),
        ({"num_nodes": "2"}, "got num_nodes='2'"),
        ({"num_nodes": True}, "got num_nodes=True"),
        ({"num_nodes": 1.0}, "got num_nodes=1.0"),
        ({"num_nodes": 2, "strategy": "single_device"}, "strategy='single_device', which runs one process"),
        ({"num_nodes": 2}, "a scheduler or environment variables for num_nodes=2"),
        ({"precision": "bf16-mix"}, r"precision='bf16-mix' \(did you mean 'bf16-mixed'\?\)"),
        ({"precision": 8}, "precision=8"),
        ({"precision": 16.0}, "precision=16.0"),
        ({"precision": True}, "precision=True"),
        ({"precision": ["16"]}, r"precision=\['16'\]"),
        ({"precision": Precision()}, "pass instances in plugins="),
        ({"precision": "transformer-engine"}, "is not supported in this version"),
        ({"precision": "transformer-engine-float16"}, "is not supported in this version"),
        ({"plugins": "16-mixed"}, "plugins= to contain only plugins, got '16-mixed'"),
        ({"plugins": [Precision]}, "to contain only plugins"),
        ({"plugins": [Precision(), HalfPrecision()]}, "at most one plugin of each kind"),
        ({"plugins": [Precision()], "precision": "32-true"}, "set the same option"),
        ({"plugins": MixedPrecision("bf16-mixed", "cuda")}, "a precision for device='cpu', got MixedPrecision"),
        (
            {"strategy": SingleDeviceStrategy("cpu", CPUAccelerator())},
            "the accelerator of strategy=.* and accelerator='cpu'",
        ),
        (
            {"strategy": SingleDeviceStrategy("cpu", precision=Precision()), "precision": "32-true"},
            "the precision of strategy=.* and precision='32-true' set",
        ),
        (
            {"strategy": SingleDeviceStrategy("cpu", precision=Precision()), "plugins": HalfPrecision()},
            "the precision of strategy=.* and plugins=HalfPrecision",
        ),
        (
            {"strategy": SingleDeviceStrategy("cpu", checkpoint_io=Files()), "plugins": [Files()]},
            "the checkpoint_io of strategy=.* and plugins=",
        ),
        (
            {"strategy": ParallelStrategy(cluster_environment=LocalEnvironment()), "plugins": [LocalEnvironment()]},
            "the cluster_environment of strategy=.* and plugins=",
        ),
        (
            {"strategy": SingleDeviceStrategy("meta")},
            "strategy's device 'meta', got accelerator='cpu'",
        ),
        ({"accelerator": "auto", "strategy": SingleDeviceStrategy("cuda:1")}, "accelerator='cuda', which"),
    ],
)
def test_every_wrong_argument_is_an_error_that_shows_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find(**arguments)
    assert caught.value.fix
    assert isinstance(caught.value, ValueError)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        find(
            accelerator="cpux",
            strategy="ddq",
            num_nodes=0,
            precision="31-true",
            plugins=[3, HalfPrecision(), Precision()],
        )
    text = str(caught.value)
    for part in (
        "'cpux'",
        "'ddq'",
        "num_nodes=0",
        "'31-true'",
        "only plugins, got 3",
        "at most one plugin of each kind",
    ):
        assert part in text
    assert "got 6 problems" in text
    assert "\n  6. " in text


@pytest.mark.usefixtures("board")
def test_pairs_that_cannot_work_are_named_at_once() -> None:
    variables = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match="got 3 problems") as caught:
        find(
            accelerator="meta",
            strategy="single_device",
            devices=-1,
            num_nodes=2,
            environment=Environment(variables),
        )
    for part in ("got devices=-1, which selects 2", "num_nodes=2", "2 processes from torchrun"):
        assert part in caught.value.what


def test_torchrun_with_one_process_is_fine() -> None:
    variables = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1"}
    assert find(environment=Environment(variables)).devices == (torch.device("cpu"),)


@pytest.mark.usefixtures("board")
def test_devices_without_the_strategys_own_device_are_an_error() -> None:
    with pytest.raises(ConfigError, match="to contain the strategy's device"):
        find(accelerator="meta", strategy=SingleDeviceStrategy(torch.device("meta", 1)), devices=[0])


def test_float64_does_not_exist_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.delenv("DISABLE_MPS", raising=False)
    with pytest.raises(ConfigError, match="the device has no float64"):
        find(accelerator="mps", precision="64-true")
    with pytest.raises(ConfigError, match="the device has no float64"):
        find(accelerator="mps", plugins=DoublePrecision())


def test_a_launcher_that_a_notebook_cannot_use_is_an_error_there() -> None:
    class Script:
        is_interactive_compatible = False

        def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any: ...

    strategy = ParallelStrategy()
    strategy.launcher = Script()
    assert find(strategy=strategy).launcher is strategy.launcher
    with pytest.raises(ConfigError, match="cannot start processes in a notebook"):
        find(strategy=strategy, environment=Environment(interactive=True))


def test_a_strategy_that_needs_arguments_says_so() -> None:
    class Needy(Strategy):
        def __init__(self, size: int) -> None:
            super().__init__()

    STRATEGY_REGISTRY.register("needy", Needy)
    try:
        with pytest.raises(ConfigError, match=r"cannot be created by name(.|\n)*strategy=Needy\(\.\.\.\)"):
            find(strategy="needy")
    finally:
        STRATEGY_REGISTRY.remove("needy")


def test_one_error_joined_is_itself() -> None:
    error = ConfigError("a.", fix="b.")
    assert join_errors([error]) is error
    twice = join_errors([join_errors([error, error]), error])
    assert twice.what.startswith("Expected a valid configuration, got 3 problems")


def test_the_environment_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "1")
    assert Environment.current().variables["SOME_VARIABLE"] == "1"


@pytest.mark.parametrize(("devices", "found"), [(4, 2), ("4", 2), ([1, 3], [1]), ("0,1,2", [0, 1]), (2, 2), (-1, 2)])
def test_fewer_devices_are_used_where_that_is_wanted(devices: Any, found: int | list[int]) -> None:
    parts = find(accelerator=Board(), strategy="ddp", devices=devices, when_short="fewer")
    assert [one.index for one in parts.devices] == (found if isinstance(found, list) else list(range(found)))
    is_short = devices in (4, "4", [1, 3], "0,1,2")
    assert [note for note in parts.notes if f"devices={found!r} are used" in note] == list(parts.notes)
    assert len(parts.notes) == is_short


def test_processes_that_exist_may_be_fewer_too() -> None:
    variables = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    variables |= {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    there = Environment(variables)
    assert len(find(devices=4, when_short="fewer", environment=there).devices) == 2
    with pytest.raises(ConfigError, match="2"):
        find(devices=4, environment=there)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": [2, 3], "when_short": "fewer"}, "names devices that do not exist|do not exist: 2, 3"),
        ({"devices": 4, "when_short": "fewer", "num_nodes": 2}, "each node would count its own"),
        ({"devices": 4, "when_short": "less"}, "'raise' or 'fewer'"),
        ({"devices": 4}, "requests 4 meta devices, but this machine has 2"),
    ],
)
def test_missing_devices_are_an_error_otherwise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(accelerator=Board(), strategy="ddp", **arguments)


@pytest.mark.parametrize("name", ["loopwright.fabric.launch.script", "torch.distributed.tensor", "torch_xla"])
def test_a_module_that_another_thread_is_importing_counts_as_absent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from loopwright.accelerators.xla import is_runtime_started
    from loopwright.strategies.distributed.shards import is_sharded

    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert isinstance(resolve(accelerator="cpu").strategy, SingleDeviceStrategy)
    assert not is_sharded(torch.ones(1))
    assert not is_runtime_started()


def test_float8_without_torchao_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingDependency, match=r"loopwright\[float8\]"):
        resolve(accelerator="cpu", precision="float8")
