from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from toys import ValidatedNet, loader, net, quiet

from loopwright.errors import CheckpointError, ConfigError, NonFiniteError
from loopwright.precision import HalfPrecision, Precision
from loopwright.strategies import Strategy, Topology
from loopwright.strategies.traits import Traits


class Custom(Strategy):
    """As short as a strategy in the field can be."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor * 2


def test_a_strategy_with_two_methods_works() -> None:
    strategy = Custom()
    assert strategy.all_reduce(torch.ones(())).item() == 2
    assert strategy.device == torch.device("cpu")
    assert strategy.topology == Topology(0, 0, 0, 1, 0, 1)
    assert strategy.is_global_zero
    ranks = (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size)
    assert ranks == (0, 0, 0, 1)


def test_a_strategy_prepares_each_run_of_a_trainer_before_its_first_hook() -> None:
    seen: list[Any] = []

    class Preparing(Strategy):
        def setup(self, trainer: Any) -> None:
            seen.append((trainer.state.fn, len(trainer.optimizers)))

    class Watching(ValidatedNet):
        def on_fit_start(self) -> None:
            seen.append("on_fit_start")

        def on_validation_start(self) -> None:
            seen.append("on_validation_start")

    trainer = quiet(strategy=Preparing(), max_steps=1, num_sanity_val_steps=0, limit_val_batches=0)
    module = net(Watching)
    trainer.fit(module, loader())
    assert seen == [("fit", 1), "on_fit_start"]
    trainer = quiet(strategy=Preparing())
    trainer.validate(module, loader())
    assert seen[2:] == [("validate", 0), "on_validation_start"]


def test_the_broadcast_object_has_two_names() -> None:
    value = torch.ones(2)
    assert Strategy().broadcast(value, 0) is Strategy().broadcast(tensor=value, src=0) is value
    assert Strategy().broadcast(None) is None
    assert Strategy().broadcast(obj=3) == 3


def test_names_of_the_same_thing_follow_each_other() -> None:
    class Fixed(Strategy):
        @property
        def root_device(self) -> torch.device:
            return torch.device("meta")

        def all_reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
            return "reduced"

        def get_optimizer_state(self, *args: Any) -> dict[str, Any]:
            return {"of": "optimizer"}

    assert Fixed().device.type == "meta"
    assert Fixed().reduce(1) == "reduced"
    assert Fixed().optimizer_state(torch.optim.SGD([torch.zeros(1)])) == {"of": "optimizer"}


def test_a_subclass_that_forgets_our_init_works() -> None:
    class Forgetful(Strategy):
        def __init__(self) -> None:
            self.mine = 1

    strategy = Forgetful()
    assert strategy.precision.precision == "32-true"
    assert strategy.accelerator is None
    assert strategy.checkpoint_io is None
    strategy.setup_environment()
    strategy.teardown()


def test_what_the_user_gave_wins_over_what_fabric_chose() -> None:
    own = HalfPrecision("bf16-true")
    strategy = Strategy(precision_plugin=own)
    strategy.fill(precision=Precision(), device=torch.device("meta"), checkpoint_io="io")
    assert strategy.precision is own
    assert strategy.precision_plugin is own
    assert strategy.root_device.type == "meta"
    assert strategy.checkpoint_io == "io"
    strategy.precision = Precision()
    assert strategy.precision_plugin.precision == "32-true"
    strategy.device = torch.device("cpu")
    assert strategy.root_device == torch.device("cpu")


def test_a_checkpoint_io_is_made_when_it_is_needed_and_once() -> None:
    strategy, made = Strategy(), []
    strategy.fill(checkpoint_io=None, make_checkpoint_io=lambda: made.append(1) or "io")
    assert not made
    assert strategy.checkpoint_io == "io"
    assert strategy.checkpoint_io == "io"
    assert made == [1]


def test_teardown_reaches_every_part_that_was_used() -> None:
    class Part:
        ended = 0

        def teardown(self) -> None:
            self.ended += 1

    io, precision, accelerator = Part(), Part(), Part()
    strategy, made = Strategy(), []
    strategy.fill(precision=precision, accelerator=accelerator, make_checkpoint_io=lambda: made.append(1))
    strategy.teardown()
    assert not made
    strategy.fill(precision=precision, accelerator=accelerator, checkpoint_io=io)
    strategy.teardown()
    assert (io.ended, precision.ended, accelerator.ended) == (1, 2, 2)


def test_traits_are_attributes_of_a_class_or_set_by_an_instance() -> None:
    class Own(Strategy):
        shards_parameters = True

    class Further(Own):
        has_several_devices = True

        def __init__(self, parts: int) -> None:
            super().__init__()
            self.traits = replace(self.traits, parts_per_batch=parts)

    assert Further(3).traits == Traits(shards_parameters=True, has_several_devices=True, parts_per_batch=3)
    assert Strategy().traits == Traits()


def test_traits_that_would_have_no_effect_are_refused() -> None:
    own = Strategy()
    own.shards_parameters = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"got shards_parameters as[\s\S]*self.traits = dataclasses.replace"):
        own.fill()
    with pytest.raises(ConfigError, match="traits of Own in its attribute traits, got has_stages"):
        type("Own", (Strategy,), {"has_stages": property(lambda self: True)})


def test_two_precisions_are_an_error() -> None:
    with pytest.raises(ConfigError, match="set the same option"):
        Strategy(precision_plugin=Precision(), precision=HalfPrecision())


def test_collectives_of_one_process_return_what_they_get() -> None:
    strategy, x = Strategy(), {"a": torch.ones(2)}
    assert strategy.all_reduce(x, None, "sum") is x
    assert strategy.reduce(x, reduce_op="mean") is x
    assert strategy.reduce_scatter(x, "sum") is x
    with pytest.raises(ConfigError, match="median"):
        strategy.reduce_scatter(x, reduce_op="median")
    with pytest.raises(ConfigError, match="dimension 0"):
        strategy.reduce_scatter(torch.ones(()))
    assert strategy.all_gather(x, sync_grads=True) is x
    assert strategy.broadcast(x, src=0) is x
    assert strategy.barrier("name") is None
    assert strategy.reduce_boolean_decision(True) is True
    assert strategy.reduce_boolean_decision(False, all=False) is False


def test_a_step_is_the_very_method() -> None:
    class Net(nn.Module):
        def training_step(self, batch: int) -> int:
            return batch

    net = Net()
    assert Strategy().bind_step(net, "training_step") == net.training_step
    with Strategy().no_backward_sync(net, enabled=True):
        pass


def test_clipping_by_norm_is_torchs_and_returns_the_norm() -> None:
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    Strategy().backward(module(torch.ones(1, 3)).sum() * 5)
    expected = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    norm = Strategy().clip_gradients_norm(module, optimizer, 0.5)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in module.parameters()]).norm(), torch.tensor(0.5))


def test_clipping_by_value_and_by_the_maximum_norm() -> None:
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (module(torch.ones(1, 3)).sum() * 5).backward()
    assert Strategy().clip_gradients_norm(module, optimizer, 100.0, norm_type=float("inf")).item() == 5
    Strategy().clip_gradients_value(module, optimizer, 0.25)
    assert {p.grad.max().item() for p in module.parameters()} == {0.25}


def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked_for() -> None:
    module = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.full((1, 3), float("inf"))).sum().backward()
    with pytest.raises(NonFiniteError, match="got infinity or NaN"):
        Strategy().clip_gradients_norm(module, optimizer, 1.0, error_if_nonfinite=True)
    assert not Strategy().clip_gradients_norm(module, optimizer, 1.0).isfinite()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile's own imports
def test_a_compiled_module_has_the_names_of_the_plain_one() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    plain, partly = Net(), Net()
    state = Strategy().module_state_dict(plain)
    partly.inner = torch.compile(partly.inner)  # type: ignore[assignment]  # lazy: nothing is compiled here
    whole = torch.compile(Net())
    for other in (partly, whole):
        Strategy().load_module_state_dict(other, state)
        again = Strategy().module_state_dict(other)
        assert list(again) == list(state)
        assert all(torch.equal(again[key], state[key]) for key in state)
    Strategy().load_module_state_dict(plain, {f"_orig_mod.{key}": value for key, value in state.items()})


def test_a_state_that_does_not_fit_names_every_key() -> None:
    state = {"weight": torch.ones(3, 3), "more": torch.ones(1), "other": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"(?s)bias.*more.*other.*size mismatch for weight"):
        _raise_sorted(state)
    result = Strategy().load_module_state_dict(nn.Linear(2, 2), {"bias": torch.ones(2), "more": 1}, strict=False)
    assert result.missing_keys == ["weight"]
    assert result.unexpected_keys == ["more"]


def _raise_sorted(state: dict[str, Any]) -> None:
    try:
        Strategy().load_module_state_dict(nn.Linear(2, 2), state)
    except CheckpointError as error:
        parts = sorted(error.what.splitlines(), key=lambda line: ("Missing" not in line, "Unexpected" not in line))
        raise CheckpointError("\n".join(parts), fix=error.fix) from error


def test_an_error_of_the_users_own_loading_is_theirs() -> None:
    class Net(nn.Module):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        Strategy().load_module_state_dict(Net(), {})


def test_optimizer_state_goes_out_and_in() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    assert Strategy().optimizer_step(optimizer) is True
    state = Strategy().optimizer_state(optimizer, module)
    again = torch.optim.Adam(module.parameters(), lr=0.5)
    Strategy().load_optimizer_state(again, state, module)
    assert again.param_groups[0]["lr"] == 0.1
    with pytest.raises(CheckpointError, match="state does not match Adam"):
        Strategy().load_optimizer_state(torch.optim.Adam([module.weight]), state)
