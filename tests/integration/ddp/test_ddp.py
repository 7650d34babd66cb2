"""DDPStrategy on gloo: gradients equal those of one process, whatever a step returns, and problems are named."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import loopwright as lw
from loopwright.errors import ConfigError, ModuleError
from loopwright.strategies import NoLoss, TorchSyncBatchNorm
from loopwright.strategies.ddp.strategy import DDPStrategy


class Net(nn.Module):
    """Two layers, of which the second can be left out; a buffer that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def features(self, x: Tensor, skips: bool = False) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        return hidden if skips else self.second(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Tensor:
        return self.training_step(batch)


class Plain(Net):
    """Without batch norm, so that the mean over ranks is exactly the whole batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


def batch(size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)


def share(whole: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    return whole[0].chunk(size)[rank], whole[1].chunk(size)[rank]


def set_up(module: nn.Module, **kwargs: Any) -> tuple[DDPStrategy, Any, Callable[..., Any]]:
    strategy = DDPStrategy(**kwargs)
    strategy.setup_environment()
    model = strategy.setup_module(module)
    return strategy, model, strategy.bind_step(model, "training_step")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


def expected(module: nn.Module, whole: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    nn.functional.mse_loss(module(whole[0]), whole[1]).backward()
    return gradients(module)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")


# -- gradients ---------------------------------------------------------------------------------------------------------


def one_step(rank: int, size: int, kwargs: dict[str, Any], kind: str) -> Any:
    module = Plain()
    strategy, _, step = set_up(module, **kwargs)
    results = []
    for number in range(3):
        module.zero_grad()
        output = step(share(batch(seed=number), rank, size), 0)
        strategy.backward(output)
        results.append(gradients(module))
    return results


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
        {"ddp_comm_hook": "allreduce"},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_full_batch(kwargs: dict[str, Any]) -> None:
    for results in run_ranks(one_step, 2, kwargs, "plain"):
        for number, found in enumerate(results):
            assert_close(found, expected(Plain(), batch(seed=number)))


class Forms(Plain):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        loss = super().training_step(batch)
        extra = self.head.weight.sum()  # with a graph that must not count
        forms: dict[str, Any] = {
            "dict": {"loss": loss, "extra": extra, "text": "x"},
            "Loss": lw.Loss(loss, 1.0),
            "dict of Loss": {"loss": lw.Loss(loss, 1.0)},
            "sum and weight": {"loss_sum": loss, "weight": 3, "extra": extra},
        }
        return forms[self.form]


def step_form(rank: int, size: int, form: str, kwargs: dict[str, Any]) -> Any:
    module = Forms(form)
    strategy, _, step = set_up(module, **kwargs)
    for number in range(3):
        module.zero_grad()
        output = step(share(batch(seed=number), rank, size))
        loss = output["loss"] if form in ("dict", "dict of Loss") else output
        loss = loss["loss_sum"] if form == "sum and weight" else loss
        strategy.backward(loss.sum if isinstance(loss, lw.Loss) else loss)
    kinds = {key: type(value).__name__ for key, value in output.items()} if isinstance(output, dict) else None
    return gradients(module), kinds, type(output).__name__


@pytest.mark.parametrize("kwargs", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("form", ["dict", "Loss", "dict of Loss", "sum and weight"])
def test_every_form_of_a_loss_goes_through_and_keeps_its_form(form: str, kwargs: dict[str, Any]) -> None:
    for found, kinds, kind in run_ranks(step_form, 2, form, kwargs):
        assert_close(found, expected(Plain(), batch(seed=2)))
        assert kind == ("Loss" if form == "Loss" else "dict")
        if form == "dict":
            assert kinds == {"loss": "Tensor", "extra": "Tensor", "text": "str"}
        if form == "dict of Loss":
            assert kinds == {"loss": "Loss"}


class Skipping(Plain):
    """Skips a batch whose first input is above a threshold; then its weights are not even looked at."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return None if batch[0][0, 0] > 0 else super().training_step(batch)


def skip(rank: int, size: int, kwargs: dict[str, Any]) -> Any:
    module = Skipping()
    strategy, _, step = set_up(module, **kwargs)
    kinds, found = [], []
    for number in range(3):
        module.zero_grad()
        x, y = share(batch(seed=number), rank, size)
        x[0, 0] = 1.0 if rank == number % 2 else -1.0
        output = step((x, y))
        kinds.append(type(output).__name__)
        strategy.backward(output.zero if isinstance(output, NoLoss) else output)
        found.append(gradients(module))
    return kinds, found


@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}], ids=str)
def test_a_rank_that_skips_a_batch_takes_part_with_nothing(kwargs: dict[str, Any]) -> None:
    results = run_ranks(skip, 2, kwargs)
    assert [kinds for kinds, _ in results] == [["NoLoss", "Tensor", "NoLoss"], ["Tensor", "NoLoss", "Tensor"]]
    for number in range(3):
        x, y = share(batch(seed=number), 1 - number % 2, 2)
        x[0, 0] = -1.0
        module = Plain()
        alone = {name: value / 2 for name, value in expected(module, (x, y)).items()}
        for _, found in results:
            assert_close(found[number], alone)


def nothing(rank: int, size: int, kwargs: dict[str, Any]) -> Any:
    module = Plain()
    strategy, model, step = set_up(module, **kwargs)
    for _ in range(3):
        module.zero_grad()
        if rank == 0:
            strategy.backward(step(batch()))
        else:
            with torch.no_grad():
                module.head.weight.fill_(float("nan"))  # 0 * NaN would poison rank 0
            empty = strategy.without_data(model)
            assert empty is not None
            assert empty.zero.item() == 0
            strategy.backward(empty.zero)
    return gradients(module)


@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_rank_without_data_takes_part(kwargs: dict[str, Any]) -> None:
    wanted = {name: value / 2 for name, value in expected(Plain(), batch()).items()}
    for found in run_ranks(nothing, 2, kwargs):
        assert_close(found, wanted)


def weightless(rank: int, size: int) -> Any:
    class Weightless(Plain):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return lw.Loss(torch.zeros(()), 0) if rank else lw.Loss(super().training_step(batch), 1)

    module = Weightless()
    strategy, _, step = set_up(module)
    output = step(batch())
    assert output.weight == 1 - rank
    strategy.backward(output.sum)
    return gradients(module)


def test_a_sum_without_a_graph_takes_part() -> None:
    wanted = {name: value / 2 for name, value in expected(Plain(), batch()).items()}
    for found in run_ranks(weightless, 2):
        assert_close(found, wanted)


def accumulate(rank: int, size: int) -> Any:
    module = Plain()
    strategy, model, step = set_up(module)
    x, y = share(batch(16), rank, size)
    communicated = []
    for part in range(2):
        with strategy.no_backward_sync(model, enabled=part == 0):
            strategy.backward(step((x.chunk(2)[part], y.chunk(2)[part])) / 2)
        communicated.append(module.head.weight.grad.clone())
    # Before the last micro-batch the ranks have gradients of their own.
    return gradients(module), communicated[0]


def test_gradients_of_a_window_are_averaged_with_its_last_micro_batch_only() -> None:
    results = run_ranks(accumulate, 2)
    assert not torch.equal(results[0][1], results[1][1])
    for found, _ in results:
        assert_close(found, expected(Plain(), batch(16)))


class Branch(Plain):
    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return nn.functional.mse_loss(self.head(self.features(batch[0], skips=batch_idx == 1)), batch[1])


def branches(rank: int, size: int) -> Any:
    module = Branch()
    strategy, _, step = set_up(module, find_unused_parameters=True)
    for _ in range(3):
        module.zero_grad()
        strategy.backward(step(share(batch(), rank, size), rank))
    return gradients(module)


def test_ranks_may_take_different_branches_where_unused_parameters_are_looked_for() -> None:
    one, other = run_ranks(branches, 2)
    assert_close(one, other, rtol=0)
    assert one["second.weight"].abs().sum() > 0


# -- evaluation, state -------------------------------------------------------------------------------------------------


def evaluate_unevenly(rank: int, size: int) -> Any:
    module = Net()
    strategy, model, step = set_up(module)
    validate = strategy.bind_step(model, "validation_step")
    forward = strategy.bind_step(model, "forward")
    module.eval()
    with torch.no_grad():
        for _ in range(1 + 3 * rank):
            validate(batch())
            forward(batch()[0])
    module.train()
    strategy.backward(step(batch()))
    strategy.backward(nn.functional.mse_loss(forward(batch()[0]), batch()[1]))
    return gradients(module)


def test_evaluation_never_communicates() -> None:
    one, other = run_ranks(evaluate_unevenly, 2)
    assert_close(one, other, rtol=0)


def state(rank: int, size: int) -> Any:
    module = Net()
    with torch.no_grad():
        module.head.weight.fill_(rank)
    strategy, model, _ = set_up(module)
    assert strategy.unwrap(model) is module
    assert model.training_step is not None if hasattr(model, "training_step") else True
    state = strategy.module_state_dict(model)
    other = copy.deepcopy(state)
    other["head.bias"].fill_(3.0)
    strategy.load_module_state_dict(model, other)
    # The wrapper called directly is the module's forward.
    out = model(batch()[0])
    return list(state), state["head.weight"], module.head.bias.item(), out.shape


def test_state_has_the_users_names_and_starts_as_rank_0s() -> None:
    for names, weight, bias, shape in run_ranks(state, 2):
        assert names == list(Net().state_dict())
        assert weight.abs().sum() == 0
        assert bias == 3.0
        assert shape == (8, 1)


def frozen_only(rank: int, size: int) -> Any:
    module = Net().requires_grad_(False)
    with torch.no_grad():
        module.head.weight.fill_(rank)
    strategy, model, _ = set_up(module)
    return model is module, strategy.without_data(model), module.head.weight.abs().sum().item()


def test_a_module_without_trained_parameters_is_not_wrapped_but_equal_on_all_ranks() -> None:
    assert run_ranks(frozen_only, 2) == [(True, None, 0.0)] * 2


def test_a_single_process_is_not_wrapped() -> None:
    module = Net()
    strategy = DDPStrategy()
    assert strategy.setup_module(module) is module
    assert strategy.bind_step(module, "training_step") == module.training_step
    assert strategy.without_data(module) is None


# -- parameters that change --------------------------------------------------------------------------------------------


def unfreeze(rank: int, size: int, kwargs: dict[str, Any]) -> Any:
    module = Plain()
    module.first.requires_grad_(False)
    strategy, _, step = set_up(module, **kwargs)
    for number in range(4):
        if number == 2:
            module.first.requires_grad_(True)
        module.zero_grad()
        strategy.backward(step(share(batch(seed=number), rank, size)))
    return gradients(module)


@pytest.mark.parametrize("kwargs", [{}, {"ddp_comm_hook": "allreduce"}], ids=str)
def test_parameters_that_are_unfrozen_later_are_averaged_from_then_on(kwargs: dict[str, Any]) -> None:
    for found in run_ranks(unfreeze, 2, kwargs):
        assert_close(found, expected(Plain(), batch(seed=3)))


def set_up_again(rank: int, size: int) -> Any:
    module = Plain()
    set_up(module)
    strategy, first, _ = set_up(module)
    second = strategy.setup_module(module)
    assert second is not first
    step = strategy.bind_step(second, "training_step")
    for _ in range(2):
        module.zero_grad()
        strategy.backward(step(share(batch(), rank, size)))
    return gradients(module)


def test_a_module_can_be_set_up_again() -> None:
    for found in run_ranks(set_up_again, 2):
        assert_close(found, expected(Plain(), batch()))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def unused(rank: int, size: int) -> str:
    module = Branch()
    strategy, _, step = set_up(module)
    with pytest.raises(ModuleError) as caught:
        strategy.backward(step(batch(), 1))
    return str(caught.value)


def test_unused_parameters_are_named_at_the_first_step() -> None:
    for text in run_ranks(unused, 2):
        assert "second.weight, second.bias" in text
        assert "ddp_find_unused_parameters_true" in text


def different(rank: int, size: int) -> str:
    module = Net()
    if rank == 1:
        module.head = nn.Linear(8, 2)
    strategy = DDPStrategy()
    strategy.setup_environment()
    with pytest.raises(ModuleError) as caught:
        strategy.setup_module(module)
    return str(caught.value)


def test_different_modules_are_named_on_every_rank() -> None:
    for text in run_ranks(different, 2):
        assert "rank 0: head.weight: (1, 8)" in text
        assert "rank 1: head.weight: (2, 8)" in text


def lazy(rank: int, size: int) -> str:
    strategy = DDPStrategy()
    strategy.setup_environment()
    with pytest.raises(ModuleError) as caught:
        strategy.setup_module(nn.Sequential(nn.LazyLinear(2)))
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_without_a_shape_are_named() -> None:
    assert "0.weight, 0.bias" in run_ranks(lazy, 2)[0]


def a_users_error(rank: int, size: int) -> str:
    class Failing(Plain):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            raise RuntimeError("mine")

    _, _, step = set_up(Failing())
    with pytest.raises(RuntimeError, match="^mine$") as caught:
        step(batch())
    return type(caught.value).__name__


def test_the_users_own_error_is_left_alone() -> None:
    assert run_ranks(a_users_error, 2) == ["RuntimeError"] * 2


# -- without hooks in backward: evaluation and manual optimization -----------------------------------------------------


def by_hand(rank: int, size: int) -> Any:
    module = Net()
    with torch.no_grad():
        module.head.weight.fill_(rank)
    strategy = DDPStrategy()
    strategy.setup_environment()
    assert strategy.place_module(module) is module
    equal = module.head.weight.abs().sum().item()
    nn.Module.load_state_dict(module, Net().state_dict())
    seen = []
    for number in range(2):
        module.zero_grad()
        x, y = share(batch(seed=number), rank, size)
        strategy.backward(nn.functional.mse_loss(module.head(module.second(module.first(x))), y))
        if rank == 0:
            module.head.bias.grad = None  # counts as 0
        strategy.average_gradients(list(module.parameters()))
        seen.append(gradients(module))
    module(batch(seed=rank)[0])
    strategy.sync_buffers(module)
    return equal, seen, module.norm.running_mean


def test_gradients_and_buffers_can_be_synchronized_manually() -> None:
    (equal, seen, mean), (other_equal, other_seen, other_mean) = run_ranks(by_hand, 2)
    assert equal == other_equal == 0
    assert torch.equal(mean, other_mean)
    for number in range(2):
        assert_close(seen[number], other_seen[number], rtol=0)
        module = Net()
        x, y = batch(seed=number)
        nn.functional.mse_loss(module.head(module.second(module.first(x))), y).backward()
        wanted = gradients(module)
        assert list(seen[number]) == list(wanted), "what has no gradient anywhere keeps none"
        del wanted["head.bias"], seen[number]["head.bias"]
        assert_close(seen[number], wanted)


def backward_inside(rank: int, size: int) -> str:
    class Inside(Plain):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            strategy.backward(super().training_step(batch))

    strategy, _, step = set_up(Inside())
    with pytest.raises(ModuleError) as caught:
        step(batch())
    return str(caught.value)


def test_backward_within_a_step_is_refused_rather_than_not_averaged() -> None:
    assert "average_gradients" in run_ranks(backward_inside, 2)[0]


def sync_batchnorm(rank: int, size: int) -> str:
    strategy = DDPStrategy()
    strategy.setup_environment()
    with pytest.raises(ConfigError) as caught:
        strategy.setup_module(TorchSyncBatchNorm().apply(Net()))
    return str(caught.value)


def test_sync_batchnorm_on_the_cpu_is_refused_by_name() -> None:
    assert "got norm on 'cpu'" in run_ranks(sync_batchnorm, 2)[0]


def tensor_forms(rank: int, size: int) -> Any:
    class Odd(nn.Module):
        """A sparse gradient, a parameter in another memory order, integer and boolean buffers."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(rank)
            self.table = nn.Embedding(5, 3, sparse=True)
            self.order = nn.Parameter(torch.randn(3, 2).t())
            self.register_buffer("flags", torch.tensor([rank == 0, False]))
            self.register_buffer("count", torch.tensor(rank))

        def training_step(self, index: Tensor | None) -> Any:
            return None if index is None else (self.table(index) @ self.order.t()).sum()

    module = Odd()
    strategy, _, step = set_up(module)
    placed = strategy.place_module(Odd())
    output = step(torch.tensor([1]) if rank == 0 else None)
    strategy.backward(output.zero if isinstance(output, NoLoss) else output)
    weights = [placed.order.detach(), module.order.detach(), placed.flags, placed.count]
    return weights, module.table.weight.grad.to_dense()


def test_odd_tensors_are_made_equal_and_reduced() -> None:
    (one, gradient), (other, other_gradient) = run_ranks(tensor_forms, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert one[2].tolist() == [True, False]
    assert torch.equal(gradient, other_gradient)
    assert gradient[1].abs().sum() > 0
    assert gradient[2].abs().sum() == 0


def buffers_of_ranks(rank: int, size: int, **options: Any) -> float:
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=lw.DDPStrategy(**options))
    module = fabric.setup(torch.nn.BatchNorm1d(2))
    module.running_mean.fill_(rank + 1.0)
    fabric.strategy.sync_buffers(module)
    return float(module.running_mean[0])


def test_buffers_that_are_not_shared_stay_those_of_each_rank() -> None:
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    name = next(one for one in ("forward_sync_buffers", "broadcast_buffers") if one in known)  # since torch 2.13
    assert run_ranks(buffers_of_ranks, 2, connect=False) == [1.0, 1.0]
    assert run_ranks(buffers_of_ranks, 2, connect=False, **{name: False}) == [1.0, 2.0]
