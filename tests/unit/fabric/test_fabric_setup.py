from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR, StepLR

import loopwright as lw
from loopwright.errors import ConfigError, LaunchError, ModuleError
from loopwright.fabric import Fabric
from loopwright.fabric.wrappers import FabricModule, FabricOptimizer, is_wrapped
from loopwright.precision import MixedPrecision
from loopwright.strategies import SingleDeviceStrategy


class Net(nn.Module):
    """A module with everything that a wrapper could hide."""

    scale = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        self.dtypes.append(x.dtype)
        output: Tensor = self.norm(self.layer(x))
        return output * 2 if double else output

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.norm.eval()  # stays frozen, as many detectors have it
        return self

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def generate(self, x: Tensor) -> Tensor:
        return self(x).sum()

    def helper(self) -> int:
        return self.scale


def machine(**arguments: Any) -> Fabric:
    return Fabric(**{"accelerator": "cpu", **arguments})


def ready(**arguments: Any) -> tuple[Fabric, Any, Any, Net]:
    fabric, net = machine(**arguments), Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return fabric, model, optimizer, net


# -- modules ---------------------------------------------------------------------------------------------------------


def test_a_module_keeps_its_names_attributes_and_state() -> None:
    _, model, _, net = ready()
    assert isinstance(model, FabricModule)
    assert model.module is net
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert list(model.state_dict()) == list(net.state_dict())
    assert list(model.children()) == list(net.children())
    assert model.get_submodule("layer") is net.layer
    assert model.layer is net.layer
    assert model.scale == 3
    assert model.helper() == 3
    assert "helper" in dir(model)
    model.extra = 7
    model.layer = nn.Linear(3, 2, bias=False)
    assert net.extra == 7
    assert isinstance(net.layer, nn.Linear)
    assert "layer.bias" not in dict(model.named_parameters())
    del model.extra
    assert not hasattr(net, "extra")
    with pytest.raises(AttributeError):
        _ = model.nothing


def test_training_mode_reaches_the_module_through_its_own_method() -> None:
    _, model, _, net = ready()
    assert model.eval() is model
    assert not net.training
    assert not model.training
    model.train()
    assert net.training
    assert model.training
    assert not net.norm.training


def test_a_step_can_be_replaced() -> None:
    _, model, _, net = ready()
    assert model.training_step(torch.ones(4, 3), 0).shape == ()
    assert model.training_step is model.training_step
    model.training_step = lambda batch, batch_idx: batch_idx
    assert model.training_step(torch.ones(4, 3), 7) == net.training_step(None, 7) == 7  # type: ignore[arg-type]


def test_a_state_goes_from_the_wrapper_into_a_plain_module() -> None:
    _, model, _, net = ready()
    other = Net()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.layer.weight, net.layer.weight)
    with torch.no_grad():
        other.layer.weight.fill_(2)
    model.load_state_dict(other.state_dict())
    assert net.layer.weight.unique().tolist() == [2]


@pytest.mark.parametrize(
    ("precision", "inputs"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.float32),
        ("16-mixed", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("64-true", torch.float64),
    ],
)
def test_forward_runs_in_the_precision_and_gives_full_floats_back(precision: str, inputs: torch.dtype) -> None:
    _, model, _, net = ready(precision=precision)
    output = model(torch.ones(4, 3), double=True)
    assert net.dtypes == [inputs]
    assert output.dtype is (torch.float64 if precision == "64-true" else torch.float32)
    assert model.training_step(torch.ones(4, 3), 0).dtype is output.dtype


def test_hooks_of_the_module_and_of_the_wrapper_fire_once_each() -> None:
    _, model, _, net = ready()
    calls: list[str] = []
    net.register_forward_hook(lambda *args: calls.append("module"))
    model.register_forward_hook(lambda *args: calls.append("wrapper"))
    model(torch.ones(4, 3))
    assert calls == ["module", "wrapper"]


def test_a_copy_is_independent() -> None:
    _, model, _, net = ready()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        net.layer.weight.fill_(9)
    assert copied.module is not net
    assert 9 not in copied.layer.weight
    torch.testing.assert_close(copied(torch.ones(4, 3)), copied.module(torch.ones(4, 3)))


def test_a_method_can_be_marked_to_run_in_the_precision() -> None:
    _, model, _, net = ready(precision="bf16-true")
    with pytest.raises(RuntimeError):
        model.generate(torch.ones(4, 3))  # float32 inputs for bfloat16 weights
    model.mark_forward_method("generate")
    model.mark_forward_method(net.generate)
    assert model.generate(torch.ones(4, 3)).dtype is torch.float32


@pytest.mark.parametrize(
    ("method", "error"),
    [("forward", ConfigError), ("generat", AttributeError), ("scale", ModuleError), (3, ModuleError)],
)
def test_what_cannot_be_marked_is_an_error(method: Any, error: type[Exception]) -> None:
    _, model, _, _ = ready()
    with pytest.raises(error):
        model.mark_forward_method(method)


class Wraps(SingleDeviceStrategy):
    """Runs modules inside another one, as strategies do that reduce gradients."""

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    def setup_module(self, module: nn.Module) -> nn.Module:
        return self.Around(module)

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module.inner if isinstance(module, self.Around) else module  # type: ignore[return-value]

    def bind_step(self, module: nn.Module, name: str) -> Any:
        return module if name == "forward" else getattr(self.unwrap(module), name)


def test_a_forward_that_the_strategy_would_not_see_is_an_error() -> None:
    _, model, _, net = ready(strategy=Wraps())
    assert model.module is net
    assert model.helper() == 3
    model(torch.ones(4, 3))
    model.training_step(torch.ones(4, 3), 0)
    with torch.no_grad():
        model.generate(torch.ones(4, 3))
    with pytest.raises(ModuleError, match=r"Net\.generate ran a forward pass outside Wraps"):
        model.generate(torch.ones(4, 3))
    net(torch.ones(4, 3))  # the check is gone
    model.mark_forward_method("generate")
    model.generate(torch.ones(4, 3))
    assert not model.eval().module.training


def test_a_compiled_module_stays_compiled_and_its_names_are_plain() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    model = machine().setup_module(compiled)
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert model.module is net
    torch.testing.assert_close(model(torch.ones(4, 3)), net(torch.ones(4, 3)))


def test_compiling_in_place_compiles_the_module() -> None:
    _, model, _, net = ready()
    model.compile(backend="eager")
    torch.testing.assert_close(model(torch.ones(4, 3)), net(torch.ones(4, 3)))


def test_backward_past_the_loss_scale_is_an_error() -> None:
    fabric, model, _, net = ready(precision="16-mixed")
    loss = model(torch.ones(4, 3)).sum()
    with pytest.raises(ModuleError, match=r"with the loss scale of precision='16-mixed'(.|\n)*fabric\.backward"):
        loss.backward()
    fabric.backward(model(torch.ones(4, 3)).sum())
    assert net.layer.weight.grad is not None


def test_setup_knows_what_was_set_up() -> None:
    fabric, model, optimizer, net = ready()
    loader = fabric.setup_dataloaders([1, 2])
    assert all(map(is_wrapped, (model, optimizer, loader)))
    assert not any(map(is_wrapped, (net, optimizer.optimizer, [1, 2], 3)))
    with pytest.raises(ConfigError, match="not set up yet for .*, got FabricModule"):
        fabric.setup(model)
    with pytest.raises(ConfigError, match="not set up yet"):
        fabric.setup_module(model)
    with pytest.raises(ConfigError, match="not set up yet for .*, got FabricSGD"):
        fabric.setup(Net(), optimizer)
    with pytest.raises(ConfigError, match="not set up yet"):
        fabric.setup_optimizers(optimizer)
    with pytest.raises(ConfigError, match="not set up yet for .*, got FabricDataLoader"):
        fabric.setup_dataloaders(loader)


def test_wrong_objects_are_named() -> None:
    fabric, net = machine(), Net()
    with pytest.raises(ModuleError, match="Fabric.setup, got list"):
        fabric.setup([])  # type: ignore[arg-type]
    with pytest.raises(ModuleError, match="got StepLR"):
        fabric.setup(net, StepLR(torch.optim.SGD(net.parameters(), lr=0.1), 1))  # type: ignore[arg-type]
    with torch.device("meta"):
        meta = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="parameters on the meta device"):
        fabric.setup_optimizers(torch.optim.SGD(meta.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="parameters of the Net in the SGD"):
        fabric.setup(net, torch.optim.SGD(Net().parameters(), lr=0.1))


def test_parameters_on_several_devices_warn() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.warns(UserWarning, match="are on several devices: cpu, meta"):
        machine().setup_module(net, move_to_device=False)


# -- optimizers and schedules ----------------------------------------------------------------------------------------


def test_an_optimizer_is_its_own_kind_and_steps_by_fabric() -> None:
    fabric, model, optimizer, net = ready()
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(optimizer, FabricOptimizer)
    assert type(optimizer).__name__ == "FabricSGD"
    assert optimizer.optimizer.param_groups is optimizer.param_groups
    before = net.layer.weight.detach().clone()
    fabric.backward(model(torch.randn(4, 3)).pow(2).sum())
    assert optimizer.has_stepped is None
    assert optimizer.step() is None
    assert optimizer.has_stepped is True
    assert optimizer.num_steps == 1
    assert not torch.equal(net.layer.weight, before)
    optimizer.zero_grad()
    assert net.layer.weight.grad is None
    other = torch.optim.SGD(net.parameters(), lr=0.5)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict() == other.state_dict()


def test_a_schedule_can_be_made_before_or_after_setup() -> None:
    for is_before in (True, False):
        fabric, net = machine(), Net()
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
        if is_before:
            schedule = StepLR(optimizer, 1, gamma=0.5)
        model, optimizer = fabric.setup(net, optimizer)
        if not is_before:
            schedule = StepLR(optimizer, 1, gamma=0.5)
        fabric.backward(model(torch.ones(4, 3)).sum())
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_closure_optimizer_steps_and_gives_its_loss() -> None:
    fabric, net = machine(), nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.LBFGS(net.parameters(), lr=0.1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 2)).pow(2).mean()
        fabric.backward(loss)
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_an_overflow_skips_the_step_and_the_schedule() -> None:
    fabric = machine(plugins=MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0)))
    net = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule: Any = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    model, optimizer, schedule = fabric.setup(net, optimizer, scheduler=schedule)
    assert isinstance(schedule, LambdaLR)
    for value, has_stepped, rate in ((float("inf"), False, 1.0), (1.0, True, 0.5), (1.0, True, 0.25)):
        fabric.backward(model(torch.full((1, 2), value)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert optimizer.has_stepped is has_stepped
        assert optimizer.param_groups[0]["lr"] == rate
    assert schedule.get_last_lr() == [0.25]
    assert schedule.state_dict()["last_epoch"] == 2
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 7})
    assert schedule.scheduler.last_epoch == 7
    assert optimizer.num_steps == 2


def test_setup_gives_back_as_many_objects_as_it_got() -> None:
    fabric, net = machine(), nn.Linear(2, 1)
    one, two = torch.optim.SGD([net.weight], lr=0.1), torch.optim.Adam([net.bias], lr=0.1)
    assert isinstance(fabric.setup(nn.Linear(2, 1)), FabricModule)
    result = fabric.setup(net, one, two)
    assert [type(each).__name__ for each in result] == ["FabricModule", "FabricSGD", "FabricAdam"]


def test_a_loop_over_what_is_set_up_equals_a_hand_written_one() -> None:
    def run(by_hand: bool) -> Tensor:
        torch.manual_seed(0)
        fabric, net = machine(), nn.Linear(3, 1)
        model: Any = net
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1)
        if not by_hand:
            model, optimizer = fabric.setup(net, optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3)).pow(2).mean()
            if by_hand:
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            else:
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
        return net.weight.detach()

    assert torch.equal(run(True), run(False))


# -- callbacks, run, launch ------------------------------------------------------------------------------------------


def test_callbacks_hear_of_setup_and_of_steps_and_a_module_after_them() -> None:
    calls: list[Any] = []

    class Listens:
        def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
            calls.append((fabric, module))

        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            calls.append((strategy, optimizer))

        def on_epoch(self) -> None:
            calls.append("callback")

    class Own(lw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def on_epoch(self) -> None:
            calls.append("module")

    fabric, own = machine(callbacks=Listens()), Own()
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    model, optimizer = fabric.setup(own, sgd)
    assert calls == [(fabric, model)]
    assert own.fabric is fabric
    optimizer.step()
    assert calls[1:] == [(fabric.strategy, sgd)]
    fabric.call("on_epoch")
    assert calls[2:] == ["callback", "module"]


def test_a_module_of_ours_logs_and_prints_by_its_fabric(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = []

    class Logger:
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            rows.append(metrics)

    class Own(lw.Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("loss", batch.mean())
            self.log_dict({"a": 1.0, "b": 2.0})
            self.print("here")
            return self.all_gather(batch).sum()

    model = machine(loggers=Logger()).setup(Own())
    assert model.training_step(torch.ones(2), 0) == 2
    assert rows == [{"loss": 1.0}, {"a": 1.0, "b": 2.0}]
    assert capsys.readouterr().out == "here\n"


def test_installed_packages_bring_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> Any:
            return lambda: ["one", "two"]

    asked: list[str] = []

    def entry_points(*, group: str) -> list[Point]:
        asked.append(group)
        return [Point()] if group.startswith("loopwright") else []

    monkeypatch.setattr("loopwright.fabric.checks.entry_points", entry_points)
    fabric = machine(callbacks=["mine"])
    assert asked == []  # finding them takes a while, so not before somebody asks
    assert fabric.callbacks == ["mine", "one", "two"]
    assert fabric.callbacks is fabric.callbacks


class Program(Fabric):
    """A Fabric with a program of its own."""

    def run(self, number: int, *, factor: int = 1) -> tuple[bool, int]:
        """Return whether the environment is set up, and a number."""
        return self._is_set_up, number * factor


class LaterProgram(Program):
    """One that extends it."""

    def run(self, number: int, *, factor: int = 1) -> tuple[bool, int]:
        """Return the same with another number."""
        return super().run(number + 1, factor=factor)


def test_run_launches_first() -> None:
    assert Program(accelerator="cpu").run(2, factor=3) == (True, 6)
    assert LaterProgram(accelerator="cpu").run(2, factor=3) == (True, 9)
    assert machine().run(1) is None


def test_what_is_launched_is_launched_once() -> None:
    fabric = machine()
    assert fabric.launch(lambda fabric: fabric.launch(lambda fabric, n: n, 3)) == 3


@pytest.mark.parametrize("method", ["barrier", "setup_dataloaders", "init_module", "broadcast", "save"])
def test_what_needs_processes_says_so_before_they_are_started(method: str) -> None:
    fabric = machine(strategy="ddp", devices=2)
    assert fabric.world_size == 2
    arguments: dict[str, tuple[Any, ...]] = {"setup_dataloaders": ([1],), "broadcast": (1,), "save": ("a", {})}
    with pytest.raises(LaunchError, match=rf"Fabric\.{method} with the strategy DDP"):
        getattr(fabric, method)(*arguments.get(method, ()))


@pytest.mark.parametrize("start", ["ddp_spawn", "ddp_fork"])
def test_strategies_that_start_processes_need_a_function(start: str) -> None:
    with pytest.raises(ConfigError, match="Expected a function"):
        machine(strategy=start, devices=2).launch()


def test_a_wrapped_module_has_device_and_dtype() -> None:
    model: Any = machine(precision="bf16-true").setup(Net())
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.bfloat16)
    model = machine().setup(nn.Flatten())
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)

    class Own(Net):
        device = "mine"

    model = machine().setup(Own())
    assert model.device == "mine"
