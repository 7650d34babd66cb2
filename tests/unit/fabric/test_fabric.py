from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from loopwright.errors import CheckpointError, ConfigError, NonFiniteError
from loopwright.fabric import Fabric
from loopwright.precision import HalfPrecision, MixedPrecision, Precision
from loopwright.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy, Strategy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen = {
            "input": batch["x"].dtype,
            "label": batch["y"].dtype,
            "new": torch.zeros(1).dtype,
            "idx": batch_idx,
        }
        output = self.layer(batch["x"])
        self.seen["output"] = output.dtype
        return output.float().pow(2).mean()


class Files:
    """Keeps checkpoints in memory."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.content[str(path)] = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool = True) -> Any:
        return self.content[str(path)]


def machine(**arguments: Any) -> Fabric:
    return Fabric(**{"accelerator": "cpu", **arguments})


# -- construction ----------------------------------------------------------------------------------------------------


def test_one_device_has_rank_0_of_1() -> None:
    fabric = machine()
    assert (fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size) == (0, 0, 0, 1)
    assert fabric.is_global_zero
    assert fabric.device == torch.device("cpu")
    assert fabric.strategy.accelerator is fabric.accelerator
    assert fabric.strategy.precision is fabric.precision
    assert fabric.loggers == []
    with pytest.raises(ConfigError, match="Expected a logger"):
        _ = fabric.logger


def test_all_problems_are_one_error() -> None:
    with pytest.raises(ConfigError, match="got 2 problems"):
        machine(precision="x", num_nodes=0)


def test_a_short_name_of_a_precision_warns() -> None:
    with pytest.warns(UserWarning, match="interpreted as 'bf16-mixed'"):
        assert machine(precision="bf16").precision.precision == "bf16-mixed"


def test_a_registered_strategy_runs() -> None:
    class Custom(Strategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            return module

        def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return tensor

    STRATEGY_REGISTRY.register("custom", Custom)
    try:
        fabric = machine(strategy="custom")
    finally:
        STRATEGY_REGISTRY.remove("custom")
    module = fabric.setup_module(nn.Linear(2, 1))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(module(torch.ones(1, 2)).sum())
    assert fabric.optimizer_step(optimizer) is True
    assert fabric.all_reduce(3) == 3


def test_one_strategy_can_serve_one_fabric_after_another() -> None:
    strategy = SingleDeviceStrategy()
    machine(strategy=strategy, precision="bf16-mixed")
    fabric = machine(strategy=strategy, precision="64-true")
    assert strategy.precision is fabric.precision


# -- launch ----------------------------------------------------------------------------------------------------------


def test_launch_calls_the_function_with_the_fabric() -> None:
    fabric = machine()
    assert fabric.launch(lambda fabric, a, b: (fabric.world_size, a, b), 1, b=2) == (1, 1, 2)
    assert fabric.launch() is None


@pytest.mark.parametrize(("function", "message"), [(3, "got 3"), (lambda: None, "takes no arguments")])
def test_what_cannot_be_launched_is_an_error(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine().launch(function)


def test_the_environment_is_set_up_once() -> None:
    class Counting(SingleDeviceStrategy):
        count = 0

        def setup_environment(self) -> None:
            self.count += 1

    strategy = Counting()
    fabric = machine(strategy=strategy)
    assert strategy.count == 0
    fabric.setup_module(nn.Linear(1, 1))
    fabric.launch()
    fabric.launch(lambda fabric: None)
    assert strategy.count == 1
    fabric.teardown()
    fabric.launch()
    assert strategy.count == 2


# -- precision of a step ---------------------------------------------------------------------------------------------

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("precision", "weight", "inputs", "output", "new"),
    [
        ("32-true", F32, F32, F32, F32),
        ("bf16-mixed", F32, F32, BF16, F32),
        ("16-mixed", F32, F32, F16, F32),
        ("bf16-true", BF16, BF16, BF16, BF16),
        ("16-true", F16, F16, F16, F16),
        ("64-true", F64, F64, F64, F64),
    ],
)
def test_dtypes_of_a_step(
    precision: str, weight: torch.dtype, inputs: torch.dtype, output: torch.dtype, new: torch.dtype
) -> None:
    fabric = machine(precision=precision)
    net = Net()
    assert fabric.prepare_module(net) is net
    assert net.layer.weight.dtype is weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert fabric.prepare_optimizers(optimizer) == (optimizer,)
    step = fabric.bind_step(net, "training_step")
    batch = {"x": torch.ones(4, 3), "y": torch.ones(4, dtype=torch.int64)}
    loss = step(batch, batch_idx=7)
    assert net.seen == {"input": inputs, "label": torch.int64, "new": new, "idx": 7, "output": output}
    assert batch["x"].dtype is F32
    fabric.backward(loss)
    assert net.layer.weight.grad is not None
    assert net.layer.weight.grad.dtype is weight
    assert torch.get_default_dtype() is F32
    assert not torch.is_autocast_enabled("cpu")


def test_in_full_precision_a_step_is_the_very_method() -> None:
    net = Net()
    assert machine().bind_step(net, "training_step") == net.training_step


def test_a_wrapped_step_keeps_its_signature() -> None:
    step = machine(precision="bf16-mixed").bind_step(Net(), "training_step")
    assert step.__name__ == "training_step"


def test_a_precision_of_the_users_own_is_used_where_it_says_so() -> None:
    class Doubling(Precision):
        converts_output = True

        def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * 2

        def convert_output(self, data: Any) -> Any:
            return data + 1

        def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= 2

    fabric, module = machine(plugins=Doubling()), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.ones(1, 2)
    torch.testing.assert_close(fabric.bind_step(module, "forward")(x), module(x) + 1)
    fabric.backward(module(x).sum())
    assert module.weight.grad.tolist() == [[2, 2]]
    fabric.unscale_gradients(optimizer)
    assert module.weight.grad.tolist() == [[1, 1]]


def test_autocast_is_the_precisions_context() -> None:
    with machine(precision="bf16-mixed").autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is BF16


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_equals_a_hand_written_loop(precision: str) -> None:
    def run(by_hand: bool) -> torch.Tensor:
        torch.manual_seed(0)
        net, fabric = Net(), machine(precision=precision)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1)
        if not by_hand:
            net, (optimizer,) = fabric.prepare_module(net), fabric.prepare_optimizers(optimizer)  # type: ignore[assignment]
        step = fabric.bind_step(net, "training_step")
        for index in range(5):
            batch = {"x": torch.randn(4, 3), "y": torch.ones(4)}
            optimizer.zero_grad()
            if by_hand:
                with torch.autocast("cpu", dtype=BF16, enabled=precision == "bf16-mixed"):
                    loss = net.training_step(batch, index)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
            else:
                fabric.backward(step(batch, index))
                fabric.clip_gradients(net, optimizer, max_norm=0.1)
                assert fabric.optimizer_step(optimizer) is True
        return net.layer.weight.detach()

    assert torch.equal(run(True), run(False))


def test_an_overflow_in_fp16_skips_the_step_and_clipping_lets_it_pass() -> None:
    fabric = machine(plugins=MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0)))
    module = fabric.setup_module(nn.Linear(2, 1))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1))
    before = module.weight.detach().clone()
    fabric.backward(module(torch.full((1, 2), float("inf"))).sum())
    norm = fabric.clip_gradients(module, optimizer, max_norm=1.0)
    assert norm is not None
    assert not norm.isfinite()
    assert fabric.optimizer_step(optimizer) is False
    assert torch.equal(module.weight, before)
    assert fabric.precision.scale == 512.0  # type: ignore[attr-defined]
    optimizer.zero_grad()
    fabric.backward(module(torch.ones(1, 2)).sum())
    fabric.unscale_gradients(optimizer)
    assert module.weight.grad.tolist() == [[1, 1]]
    assert fabric.optimizer_step(optimizer) is True


def test_clipping_by_value_unscales_first() -> None:
    fabric = machine(precision="16-mixed")
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fabric.backward(module(torch.ones(1, 2)).sum() * 0.5)
    assert fabric.clip_gradients(module, optimizer, clip_val=10.0) is None
    assert module.weight.grad.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("has_scale", [False, True])
def test_the_norm_of_several_optimizers_is_that_of_all_their_parameters(has_scale: bool) -> None:
    scaled = {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=64.0))}
    fabric, module = machine(**scaled if has_scale else {}), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD([module.weight], lr=0.1), torch.optim.Adam([module.bias], lr=0.1)]
    set_up: Any = fabric.setup(module, *optimizers)
    fabric.backward(set_up[0](torch.tensor([[2.0, 4.0]])).sum() * 2)
    norm = fabric.clip_gradients(set_up[0], list(set_up[1:]), max_norm=1.0)

    assert norm is not None
    assert float(norm) == pytest.approx(84**0.5)  # of 4, 8 and 2
    assert module.weight.grad is not None
    assert module.bias.grad is not None
    expected = torch.tensor([4.0, 8.0, 2.0]) / (84**0.5 + 1e-6)
    torch.testing.assert_close(torch.cat([module.weight.grad[0], module.bias.grad]), expected)
    for one in set_up[1:]:
        one.step()  # which does not unscale them again
    torch.testing.assert_close(torch.cat([module.weight.grad[0], module.bias.grad]), expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_in_one_of_several_optimizers_skips_all_that_are_clipped_together(bad: float) -> None:
    fabric, module = (
        machine(plugins=MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=64.0))),
        nn.Linear(2, 1),
    )
    optimizers = [torch.optim.SGD([module.weight], lr=0.1), torch.optim.Adam([module.bias], lr=0.1)]
    set_up: Any = fabric.setup(module, *optimizers)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    fabric.backward(set_up[0](torch.tensor([[2.0, 4.0]])).sum())
    assert module.weight.grad is not None
    module.weight.grad[0, 0] = bad  # the norm is not finite either, and scales the bias's gradient
    fabric.clip_gradients(set_up[0], list(set_up[1:]), max_norm=1.0)
    for one in set_up[1:]:
        one.step()

    assert [one.has_stepped for one in set_up[1:]] == [False, False]
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert optimizers[1].state == {}
    assert fabric.precision.scale == 32.0


def test_clipping_for_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Expected one optimizer or several for Fabric\.clip_gradients, .* got none"):
        machine().clip_gradients(nn.Linear(2, 1), [], max_norm=1.0)


@pytest.mark.parametrize(
    "limits",
    [{}, {"clip_val": 1.0, "max_norm": 1.0}, {"max_norm": 0.0}, {"clip_val": -1.0}, {"max_norm": float("nan")}],
)
def test_clipping_needs_exactly_one_positive_limit(limits: dict[str, float]) -> None:
    module = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="exactly one"):
        machine().clip_gradients(module, torch.optim.SGD(module.parameters(), lr=0.1), **limits)


def test_a_norm_that_is_not_finite_is_an_error_in_full_precision() -> None:
    fabric, module = machine(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fabric.backward(module(torch.full((1, 2), float("nan"))).sum())
    with pytest.raises(NonFiniteError):
        fabric.clip_gradients(module, optimizer, max_norm=1.0)
    fabric.clip_gradients(module, optimizer, max_norm=1.0, error_if_nonfinite=False)


def test_a_closure_optimizer_steps() -> None:
    fabric = machine()
    module = fabric.setup_module(nn.Linear(2, 1))
    optimizer = fabric.setup_optimizers(torch.optim.LBFGS(module.parameters(), lr=0.1))
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(4, 2)).pow(2).mean()
        fabric.backward(loss)
        losses.append(loss.item())
        return loss

    assert fabric.optimizer_step(optimizer, closure) is True
    assert losses[-1] < losses[0]


def test_a_closure_optimizer_with_a_loss_scale_is_an_error_at_setup() -> None:
    fabric, module = machine(precision="16-mixed"), nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="LBFGS"):
        fabric.setup_optimizers(torch.optim.LBFGS(module.parameters()))


def test_several_optimizers_come_back_as_a_tuple() -> None:
    fabric, module = machine(), nn.Linear(2, 1)
    one, two = torch.optim.SGD(module.parameters(), lr=0.1), torch.optim.Adam(module.parameters())
    assert fabric.prepare_optimizers(one, two) == (one, two)
    wrapped = fabric.setup_optimizers(one, two)
    assert [type(each).__name__ for each in wrapped] == ["FabricSGD", "FabricAdam"]
    for setup in (fabric.setup_optimizers, fabric.prepare_optimizers):
        with pytest.raises(ConfigError, match="Expected an optimizer"):
            setup()


def test_backward_takes_torchs_arguments() -> None:
    fabric, x = machine(), torch.ones(2, requires_grad=True)
    loss = (x * x).sum()
    fabric.backward(loss, retain_graph=True)
    fabric.backward(loss, model=nn.Linear(1, 1))
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4]
    fabric.backward(x * 2, torch.ones(2))
    assert x.grad.tolist() == [6, 6]


def test_backward_and_step_call_few_functions_and_leave_out_those_of_torch() -> None:
    fabric, module = machine(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    calls: list[str] = []
    left_out = {"wrapper", "_optimizer_step_code"}  # of torch's profiling, in torch.optim.optimizer

    def count(frame: Any, event: str, arg: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and ("loopwright" in module or frame.f_code.co_name in left_out):
            calls.append(frame.f_code.co_name)

    fabric.optimizer_step(optimizer)  # what is looked up once per class
    loss = module(torch.ones(1, 2)).sum()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        fabric.backward(loss)
        fabric.optimizer_step(optimizer)
    finally:
        sys.setprofile(before)
    of_step = ["optimizer_step", "optimizer_step", "take_step", "step_uncompiled"]
    assert calls == ["backward", "backward", "compute_gradients", *of_step]


# -- modules, tensors, devices ---------------------------------------------------------------------------------------


def test_a_module_can_stay_where_it_is() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-true")
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    assert fabric.setup_module(module, move_to_device=False).module is module
    assert module.weight.device.type == "meta"
    assert module.weight.dtype is BF16


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", F32), ("bf16-true", BF16), ("64-true", F64), ("16-mixed", F32)]
)
def test_modules_and_tensors_are_made_on_the_device_in_the_precision(precision: str, dtype: torch.dtype) -> None:
    fabric = machine(precision=precision)
    with fabric.init_module():
        module = nn.Linear(2, 2)
    with fabric.init_tensor():
        tensor = torch.zeros(2)
    assert module.weight.dtype is dtype
    assert tensor.dtype is dtype
    assert module.weight.device == tensor.device == fabric.device
    assert torch.get_default_dtype() is F32


def test_init_module_gives_the_values_that_plain_construction_gives() -> None:
    torch.manual_seed(0)
    with machine().init_module():
        made = nn.Linear(4, 4)
    torch.manual_seed(0)
    assert torch.equal(made.weight, nn.Linear(4, 4).weight)


def test_an_empty_module_draws_no_random_numbers() -> None:
    fabric, before = machine(), torch.get_rng_state()
    with fabric.init_module(empty_init=True):
        nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_to_device_moves_modules_in_place_and_leaves_data_that_is_there() -> None:
    fabric, module = machine(), nn.Linear(2, 2)
    batch = {"x": torch.ones(2), "name": "n"}
    assert fabric.to_device(module) is module
    assert fabric.to_device(batch)["x"] is batch["x"]


# -- collectives -----------------------------------------------------------------------------------------------------


def test_collectives_of_one_device_return_what_they_get() -> None:
    fabric, data = machine(), {"a": torch.ones(2), "b": [torch.zeros(())]}
    assert fabric.all_gather(data, sync_grads=True) is data
    assert fabric.all_reduce(data, reduce_op="sum") is data
    assert fabric.broadcast("text", src=0) == "text"
    assert fabric.barrier("name") is None
    module = nn.Linear(1, 1)
    with fabric.no_backward_sync(module), fabric.rank_zero_first(), fabric.rank_zero_first(local=True):
        fabric.backward(module(torch.ones(1, 1)).sum())
    assert module.weight.grad is not None


def test_print_prints(capsys: pytest.CaptureFixture[str]) -> None:
    machine().print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"


# -- files -----------------------------------------------------------------------------------------------------------


def training_state() -> dict[str, Any]:
    module = nn.Linear(2, 2)
    return {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), "epoch": 3}


def test_a_state_goes_out_and_in() -> None:
    fabric, state, other = machine(plugins=Files()), training_state(), training_state()
    fabric.save("a.ckpt", {**state, "extra": 1})
    other["optimizer"].param_groups[0]["lr"] = 9.0
    other["epoch"] = 0
    rest = fabric.load("a.ckpt", other)
    assert rest == {"extra": 1}
    assert torch.equal(other["model"].weight, state["model"].weight)
    assert other["optimizer"].param_groups[0]["lr"] == 0.1
    assert other["epoch"] == 3
    assert set(fabric.load("a.ckpt")) == {"model", "optimizer", "epoch", "extra"}


def test_a_filter_keeps_a_part() -> None:
    files = Files()
    machine(plugins=files).save("a.ckpt", training_state(), filter={"model": lambda name, value: name == "bias"})
    assert set(files.content["a.ckpt"]["model"]) == {"bias"}


@pytest.mark.parametrize("filter", [3, {"modle": lambda name, value: True}, {"model": 3}])
def test_a_wrong_filter_is_an_error(filter: Any) -> None:
    with pytest.raises(ConfigError, match=r"filter of Fabric.save"):
        machine(plugins=Files()).save("a.ckpt", training_state(), filter=filter)


def test_every_missing_entry_is_named() -> None:
    fabric = machine(plugins=Files())
    fabric.save("a.ckpt", {"epoch": 1})
    with pytest.raises(CheckpointError, match=r"the entries \['model', 'optimizer'\]"):
        fabric.load("a.ckpt", training_state())
    state = training_state()
    assert fabric.load("a.ckpt", state, strict=False) == {}
    assert state["epoch"] == 1


def test_a_bare_state_loads() -> None:
    files, module = Files(), nn.Linear(2, 2)
    fabric = machine(plugins=files)
    files.content["w"] = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    fabric.load_raw("w", module)
    assert module.weight.sum().item() == 4
    with pytest.raises(ConfigError, match="object with load_state_dict"):
        fabric.load_raw("w", 3)


def test_checkpoints_are_files_that_torch_reads(tmp_path: Path) -> None:
    pytest.importorskip("loopwright.checkpoint.checkpoint_io")
    fabric, state = machine(), training_state()
    fabric.save(tmp_path / "a.ckpt", state)
    assert torch.equal(torch.load(tmp_path / "a.ckpt", weights_only=True)["model"]["weight"], state["model"].weight)
    other = training_state()
    assert fabric.load(tmp_path / "a.ckpt", other) == {}
    assert torch.equal(other["model"].weight, state["model"].weight)


# -- callbacks and loggers -------------------------------------------------------------------------------------------


def test_call_reaches_every_callback_that_has_the_method() -> None:
    calls: list[Any] = []

    class One:
        def on_something(self, a: int, b: int = 0) -> None:
            calls.append(("one", a, b))

    class Two:
        def on_something(self, *args: Any, **kwargs: Any) -> None:
            calls.append(("two", args, kwargs))

    fabric = machine(callbacks=[One(), Two(), object()])
    fabric.call("on_something", 1, b=2, c=3)
    assert calls == [("one", 1, 2), ("two", (1,), {"b": 2, "c": 3})]
    fabric.call("on_nothing")


def test_an_attribute_that_is_no_method_is_not_called() -> None:
    class Wrong:
        on_something = 3

    with pytest.warns(UserWarning, match="Wrong.on_something is not a method"):
        machine(callbacks=Wrong()).call("on_something")


class Records:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step))


def test_metrics_reach_every_logger_as_numbers() -> None:
    one, two = Records(), Records()
    fabric = machine(loggers=[one, two])
    assert fabric.logger is one
    fabric.log("loss", torch.tensor([0.5]), step=3)
    fabric.log_dict({"a": 1, "b": torch.tensor(2)})
    assert one.rows == two.rows == [({"loss": 0.5}, 3), ({"a": 1, "b": 2}, None)]


def test_tensors_of_several_elements_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"\['a', 'c'\]"):
        machine(loggers=Records()).log_dict({"a": torch.ones(2), "b": 1, "c": torch.ones(0)})


def test_seeding_also_seeds_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("PL_GLOBAL_SEED", "")
    monkeypatch.setenv("PL_SEED_WORKERS", "")
    assert Fabric.seed_everything(5) == 5
    assert os.environ["PL_SEED_WORKERS"] == "1"


def test_a_precision_plugin_is_used() -> None:
    assert machine(plugins=[HalfPrecision("bf16-true")]).precision.precision == "bf16-true"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"])
@pytest.mark.parametrize("fused", [False, True])
def test_training_on_a_card(precision: str, fused: bool) -> None:
    fabric = Fabric(accelerator="cuda", devices=[0], precision=precision)
    with fabric.init_module():
        net = Net()
    assert fabric.prepare_module(net) is net
    assert net.layer.weight.device == fabric.device == torch.device("cuda", 0)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(net.parameters(), lr=0.01, fused=fused))
    step = fabric.bind_step(net, "training_step")
    losses, steps = [], 0
    batch = fabric.to_device({"x": torch.ones(4, 3), "y": torch.ones(4)})
    for index in range(30):
        optimizer.zero_grad()
        loss = step(batch, index)
        fabric.backward(loss)
        fabric.clip_gradients(net, optimizer, max_norm=1.0)
        steps += fabric.optimizer_step(optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert steps >= 20
    net.layer.weight.grad.fill_(float("inf"))
    before = net.layer.weight.detach().clone()
    if fabric.precision.has_scaler:
        fabric.backward(step(batch, 0))
        assert fabric.optimizer_step(optimizer) is False
        assert torch.equal(net.layer.weight, before)
    fabric.teardown()
