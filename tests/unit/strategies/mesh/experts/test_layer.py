"""The layer of experts against a loop over tokens; strategies/mesh/experts/layer.py."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright as lw

# Any in this file: arguments of the layer.


def layer(**options: Any) -> lw.Experts:
    torch.manual_seed(0)
    return lw.Experts(**{"dim": 4, "hidden": 8, "num_experts": 5, "dtype": torch.float64, **options})


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, 4, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def by_token(module: lw.Experts, x: Tensor) -> Tensor:
    """Compute each token by itself."""
    weights, results = module.experts, []
    for token in x.reshape(-1, module.dim):
        probabilities, chosen = (module.router.weight @ token).softmax(0).topk(module.top_k)
        if module.normalize:
            probabilities = probabilities / probabilities.sum()
        total = torch.zeros_like(token)
        for probability, expert in zip(probabilities, chosen, strict=True):
            hidden = token @ weights.up[expert]
            if weights.gate is None:
                hidden = weights.activation(hidden)
            else:
                hidden = weights.activation(token @ weights.gate[expert]) * hidden
            total = total + probability * (hidden @ weights.down[expert])
        results.append(total)
    return torch.stack(results).view_as(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1, "normalize": False},
        {"top_k": 5},
        {"gated": True, "activation": nn.functional.silu},
        {"num_experts": 1, "top_k": 1},
    ],
    ids=["top 2", "top 1", "all", "gated", "one expert"],
)
def test_outputs_and_gradients_are_those_of_single_tokens(options: dict[str, Any]) -> None:
    module, x = layer(**options), inputs(3, 7)
    inputs_of = [x, *module.parameters()]
    ours, theirs = module(x), by_token(module, x)
    assert (ours - theirs).abs().max() <= 1e-15
    weight = torch.randn(ours.shape, dtype=torch.float64)
    pairs = zip(
        torch.autograd.grad(ours, inputs_of, weight, materialize_grads=True),
        torch.autograd.grad(theirs, inputs_of, weight, materialize_grads=True),
        strict=True,
    )
    assert all((a - b).abs().max() <= 1e-14 for a, b in pairs)


def test_gradients_are_those_of_differences() -> None:
    module = layer(gated=True, activation=torch.tanh)
    assert torch.autograd.gradcheck(lambda x, *_: module(x), (inputs(6), *module.parameters()))


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    module = layer(num_experts=8, top_k=1)
    module(inputs(2)).sum().backward()
    assert module.tokens_per_expert is not None
    idle = module.tokens_per_expert == 0
    assert idle.sum() >= 6
    assert module.experts.up.grad is not None
    assert not module.experts.up.grad[idle].any()
    assert module.experts.up.grad[~idle].any()


def test_no_tokens() -> None:
    module = layer()
    y = module(inputs(0))
    assert y.shape == (0, 4)
    assert module.balance_loss is not None
    assert module.balance_loss.item() == 0.0
    y.sum().backward()
    assert module.experts.up.grad is not None


def test_a_token_does_not_depend_on_the_others() -> None:
    module, x = layer(), inputs(6)
    together = module(x)
    alone = torch.cat([module(x[i : i + 1]) for i in range(len(x))])
    assert (together - alone).abs().max() <= 1e-15


def test_a_run_repeats_its_own_bits() -> None:
    def run() -> list[Tensor]:
        module = layer(dtype=torch.float32)
        y = module(inputs(64, dtype=torch.float32))
        y.square().sum().backward()
        return [y, *(one.grad for one in module.parameters() if one.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_the_balance_loss_is_1_for_an_even_spread_and_grows_with_unevenness() -> None:
    module = layer(num_experts=4, top_k=1, dim=4)
    with torch.no_grad():
        module.router.weight.copy_(torch.eye(4) * 50)
    tokens = torch.eye(4, dtype=torch.float64)
    module(tokens)
    assert module.balance_loss is not None
    assert module.balance_loss.item() == pytest.approx(1.0, abs=1e-12)
    module(tokens[[0, 0, 0, 0]])
    assert module.balance_loss.item() == pytest.approx(4.0, abs=1e-12)
    assert module.tokens_per_expert is not None
    assert module.tokens_per_expert.tolist() == [4, 0, 0, 0]


def test_the_balance_loss_trains_the_router() -> None:
    module = layer(num_experts=4, top_k=1)
    x = inputs(64).detach() + 3  # most tokens go to the same expert
    optimizer = torch.optim.Adam(module.router.parameters(), lr=0.01)
    values = []
    for _ in range(30):
        module(x)
        assert module.balance_loss is not None
        values.append(module.balance_loss.item())
        module.balance_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert values[-1] < values[0] - 0.2


def test_after_a_pass_it_can_be_copied_and_pickled() -> None:
    module = layer()
    y = module(inputs(3))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.balance_loss is None
        assert torch.equal(other(inputs(3)), y)


def test_wrong_sizes_are_all_named() -> None:
    with pytest.raises(lw.ConfigError, match=r"positive sizes of Experts, got dim=0, top_k=1.5"):
        lw.Experts(0, 4, 2, 1.5)  # type: ignore[arg-type]
    with pytest.raises(lw.ConfigError, match="at most num_experts=2, got 3"):
        lw.Experts(4, 4, 2, 3)
