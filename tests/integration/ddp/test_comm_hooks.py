"""Communication hooks on gloo: what they may change of a gradient, and what of them survives a resume."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from loopwright.errors import ConfigError
from loopwright.precision import MixedPrecision
from loopwright.strategies.ddp.strategy import DDPStrategy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])


def batch(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 16, generator=generator), torch.randn(size, 1, generator=generator)


def share(number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    x, y = batch(number)
    return x.chunk(size)[rank], y.chunk(size)[rank]


class Loop:
    """A loop by hand on one rank."""

    def __init__(self, rank: int, size: int, **kwargs: Any) -> None:
        self.rank, self.size = rank, size
        self.strategy = DDPStrategy(**kwargs)
        self.strategy.setup_environment()
        self.module = Net()
        self.model = self.strategy.setup_module(self.module)
        self.step = self.strategy.bind_step(self.model, "training_step")
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)
        self.optimizer = self.strategy.setup_optimizer(self.optimizer)  # type: ignore[assignment]

    def run(self, numbers: range) -> Loop:
        for number in numbers:
            self.strategy.backward(self.step(share(number, self.rank, self.size)))
            self.strategy.optimizer_step(self.optimizer)
            self.gradient = torch.cat([p.grad.reshape(-1) for p in self.module.parameters() if p.grad is not None])
            self.optimizer.zero_grad()
        return self

    @property
    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.module.parameters()).detach()


def alone(numbers: range) -> Tensor:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for number in numbers:
        optimizer.zero_grad()
        module.training_step(batch(number)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def train(rank: int, size: int, kwargs: dict[str, Any], steps: int) -> Any:
    loop = Loop(rank, size, **kwargs).run(range(steps))
    return loop.weights, loop.gradient


def name_of(value: Any) -> str:
    """Return a test's name without addresses, equal in all processes that collect it."""
    return re.sub(r"<[^<>]*?(\w+) at 0x[0-9a-f]+>", r"\1", str(value))


@pytest.mark.parametrize(
    ("kwargs", "most"),
    [
        ({"ddp_comm_hook": "allreduce"}, 1e-6),
        # 8 and 11 bits of a gradient of about 1 at a learning rate of 0.05.
        ({"ddp_comm_hook": "bf16"}, 2e-3),
        ({"ddp_comm_hook": default_hooks.bf16_compress_hook}, 2e-3),
        ({"ddp_comm_hook": "fp16"}, 2e-4),
        ({"ddp_comm_hook": DDPCommHookType.FP16_COMPRESS, "gradient_as_bucket_view": True}, 2e-4),
        ({"ddp_comm_hook": "allreduce", "ddp_comm_wrapper": "bf16"}, 2e-3),
        ({"ddp_comm_hook": "allreduce", "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}, 2e-4),
        # Full rank: nothing is left out.
        ({"ddp_comm_hook": "powersgd", "ddp_comm_state": {"matrix_approximation_rank": 16, "start_powerSGD_iter": 2,
          "min_compression_rate": 0.1}}, 1e-4),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_hook_trains_as_one_process_does(kwargs: dict[str, Any], most: float) -> None:
    results = run_ranks(train, 2, kwargs, 4)
    assert torch.equal(results[0][0], results[1][0])
    difference = (results[0][0] - alone(range(4))).abs().max().item()
    assert difference < most
    if most > 1e-5:
        assert difference > 0, "it compresses"


def users_hook(rank: int, size: int) -> Any:
    seen = []

    def hook(state: dict[str, int], bucket: "torch.distributed.GradBucket") -> "Any":  # noqa: UP037  annotated as text
        seen.append((state["x"], bucket.is_last()))
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer().fill_(7.0))
        return future

    loop = Loop(rank, size, ddp_comm_hook=hook, ddp_comm_state=lambda: {"x": 3}).run(range(1))
    return seen, loop.gradient.unique().tolist()


def test_a_users_hook_gets_its_state_which_may_be_made_late() -> None:
    assert run_ranks(users_hook, 2) == [([(3, True)], [7.0])] * 2


def no_hook(rank: int, size: int) -> Any:
    return train(rank, size, {"ddp_comm_hook": "noop"}, 1)[1]


def test_noop_leaves_each_rank_its_own_gradient() -> None:
    one, other = run_ranks(no_hook, 2)
    assert not torch.equal(one, other)


# -- PowerSGD ----------------------------------------------------------------------------------------------------------

POWER = {
    "ddp_comm_hook": "powersgd",
    "ddp_comm_state": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.5},
}


def power(rank: int, size: int, is_early: bool) -> Any:
    first = Loop(rank, size, **POWER).run(range(6))
    saved = copy.deepcopy((first.module.state_dict(), first.strategy.state_dict()))
    owed = saved[1]["comm_hooks"][0]["owed"]
    loop = Loop(rank, size, **POWER)
    loop.strategy.load_state_dict(saved[1])
    if is_early:  # the state comes before the module is set up
        loop.strategy = DDPStrategy(**POWER)
        loop.strategy.load_state_dict(saved[1])
        loop.strategy.setup_environment()
        loop.model = loop.strategy.setup_module(loop.module)
        loop.step = loop.strategy.bind_step(loop.model, "training_step")
    loop.module.load_state_dict(saved[0])
    expected = Net()
    expected.load_state_dict(saved[0])
    expected.training_step(batch(6)).backward()
    wanted = torch.cat([(p.grad + owed[name]).reshape(-1) for name, p in expected.named_parameters()])
    loop.run(range(6, 7))
    found = loop.gradient
    loop.run(range(7, 12))
    return owed, found, wanted, loop.weights, saved[1]["comm_hooks"][0]["iter"]


@pytest.mark.parametrize("is_early", [False, True])
def test_the_first_step_after_a_resume_delivers_what_powersgd_owes(is_early: bool) -> None:
    (owed, found, wanted, weights, steps), other = run_ranks(power, 2, is_early)
    assert set(owed) == {name for name, _ in Net().named_parameters()}
    assert owed["layers.0.weight"].abs().sum() > 0
    assert all(value.dtype == torch.float32 for value in owed.values())
    assert steps == 6
    # The order of additions differs.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert torch.equal(weights, other[3])
    assert weights.isfinite().all()


def power_unfreezes(rank: int, size: int) -> Any:
    loop = Loop(rank, size, **POWER, ddp_comm_wrapper="fp16")
    loop.run(range(5))
    for parameter in loop.module.layers[0].parameters():
        parameter.requires_grad_(False)
    replica: Any = loop.strategy.setup_module(loop.module)
    loop.step = loop.strategy.bind_step(replica, "training_step")
    loop.run(range(5, 8))
    loop.module.requires_grad_(True)
    loop.run(range(8, 12))
    return loop.weights


def test_powersgd_goes_on_when_parameters_are_frozen_and_unfrozen() -> None:
    one, other = run_ranks(power_unfreezes, 2)
    assert torch.equal(one, other)
    assert one.isfinite().all()


# -- post-local SGD ----------------------------------------------------------------------------------------------------


def local(rank: int, size: int, kind: str) -> Any:
    kwargs: dict[str, Any] = {"ddp_comm_hook": "post_local_sgd", "model_averaging_period": 3}
    if kind == "dict":
        kwargs["ddp_comm_state"] = {"start_localSGD_iter": 2, "subgroup_size": 1}
    else:
        kwargs["ddp_comm_hook"] = post_localSGD_hook
        kwargs["ddp_comm_state"] = lambda: PostLocalSGDState(
            None, [torch.distributed.new_group([one]) for one in range(size)][rank], 2
        )
    loop = Loop(rank, size, **kwargs)
    apart = []
    for number in range(9):
        loop.run(range(number, number + 1))
        both = loop.strategy.all_gather(loop.weights)
        apart.append(not torch.allclose(both[0], both[1], rtol=0, atol=1e-7))
    state = loop.strategy.state_dict()
    twin = Loop(rank, size, **kwargs)
    twin.strategy.load_state_dict(state)
    return apart, state, twin.strategy.state_dict() == state


@pytest.mark.parametrize("kind", ["dict", "torch's"])
def test_weights_drift_apart_and_are_averaged_every_few_steps(kind: str) -> None:
    for apart, state, same in run_ranks(local, 2, kind):
        # Steps 0 and 1 average gradients; weights are averaged after steps 2, 5 and 8.
        assert apart == [False, False, False, True, True, False, True, True, False]
        assert state == {"comm_hooks": [{"iter": 2}], "averaging": {"steps": [9]}}
        assert same


def node_group(rank: int, size: int) -> Any:
    class Cluster:
        def global_rank(self) -> int:
            return rank

        def local_rank(self) -> int:
            return rank % 2

        def node_rank(self) -> int:
            return rank // 2

        def world_size(self) -> int:
            return size

    kwargs = {"ddp_comm_hook": "post_local_sgd", "ddp_comm_state": 1, "model_averaging_period": 100}
    loop = Loop(rank, size, cluster_environment=Cluster(), **kwargs).run(range(4))
    return loop.weights


def test_without_a_size_the_subgroup_is_the_node() -> None:
    weights = run_ranks(node_group, 4)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])


def wrong(rank: int, size: int) -> list[str]:
    texts = []
    for kwargs in (
        {"ddp_comm_hook": "powersgd", "ddp_comm_state": {"rank": 1}},
        {"ddp_comm_hook": "powersgd", "ddp_comm_state": {"start_powerSGD_iter": 1}},
        {"ddp_comm_hook": "powersgd", "ddp_comm_state": "full"},
        {"ddp_comm_hook": "post_local_sgd", "ddp_comm_state": {"subgroup_size": 3}, "model_averaging_period": 1},
    ):
        with pytest.raises(ConfigError) as caught:
            Loop(rank, size, **kwargs)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    strategy = DDPStrategy(ddp_comm_hook="post_local_sgd", model_averaging_period=2)
    strategy.precision = MixedPrecision("16-mixed")
    with pytest.raises(ConfigError) as caught:
        strategy.setup_optimizer(torch.optim.SGD(Net().parameters(), lr=0.1))
    return [*texts, str(caught.value)]


def test_states_that_cannot_work_are_refused() -> None:
    texts = run_ranks(wrong, 2)[0]
    for text, word in zip(
        texts, ["'rank'", "start_powerSGD_iter", "'full'", "divides 2 processes", "16-mixed"], strict=True
    ):
        assert word in text
