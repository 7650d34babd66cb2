"""Values come unit by unit; what can have none is named."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from loopwright.errors import ModuleError
from loopwright.strategies.construction.deferred import DeferredInit
from loopwright.strategies.construction.materialize import (
    check_materializable,
    empty_names,
    materialize,
    modules_of_unit,
)

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,  # Any: an operation of torch, its arguments and result
        types: Sequence[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            storage = result.untyped_storage()
            if id(storage) not in self._known:
                self._known.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        return result

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def test_the_full_model_is_never_in_memory_while_units_are_materialized_and_sharded() -> None:
    layer_bytes = 64 * 64 * 4
    with LiveBytes() as live, DeferredInit():
        first = nn.Linear(64, 64, bias=False)
        model = nn.Sequential(*(copy.deepcopy(first) for _ in range(16)))
        model.apply(lambda one: nn.init.orthogonal_(one.weight) if isinstance(one, nn.Linear) else None)
        model.append(copy.deepcopy(first))
    assert live.peak <= 5 * layer_bytes  # what qr needs for one layer
    assert live.now < layer_bytes
    with LiveBytes() as live:
        for unit in model:
            materialize(unit, device=CPU)
            assert unit.weight.shape == (64, 64)
            unit.weight = nn.Parameter(unit.weight.detach()[:4].clone())
    assert live.now <= 17 * layer_bytes / 16 + 64
    assert live.peak <= live.now + 5 * layer_bytes


def test_replacing_the_data_of_a_materialized_parameter_frees_its_memory() -> None:
    """ZeRO stage 3 partitions parameters so: a base of a view would keep the full values on every rank."""
    with DeferredInit():
        layer = nn.Linear(64, 64, bias=False)
    with LiveBytes() as live:
        materialize(layer, device=CPU)
        layer.weight.data = torch.empty(0)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.requires_grad
    assert live.now == 0


def test_what_is_needed_only_on_the_way_is_given_back_on_the_way() -> None:
    with DeferredInit():
        value = torch.zeros(64, 64)
        for _ in range(16):
            value = value + 1
        layer = nn.Linear(64, 64, bias=False)
        layer.weight = nn.Parameter(value)
        del value
    with LiveBytes() as live:
        materialize(layer, device=CPU)
    assert (layer.weight == 16).all()
    assert live.peak <= 2.5 * 64 * 64 * 4


def test_units_leave_out_inner_units_and_ties_hold_across_units() -> None:
    torch.manual_seed(0)
    with DeferredInit():
        model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "block": nn.Linear(2, 2), "head": nn.Linear(2, 4)})
        model["head"].weight = model["embedding"].weight
        model["head"].weight.tag = "shared"
    inner = [model["block"], model["embedding"]]
    assert modules_of_unit(model, inner) == [model, model["head"]]
    materialize(model["block"], device=CPU, recurse=False)
    assert not model["block"].weight.is_meta
    assert model["head"].weight.is_meta
    materialize(model["embedding"], device=CPU)
    materialize(model, device=CPU, inner=inner)
    assert model["head"].weight is model["embedding"].weight
    assert model["head"].weight.tag == "shared"
    torch.manual_seed(0)
    assert torch.equal(model["head"].weight, nn.Embedding(4, 2).weight)


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.row = self.table[1:]
        self.plain = torch.ones(2)
        self.kept: list[Any] = [{"a": torch.zeros(1)}, (torch.full((1,), 2.0), "text")]
        self.kept.append(self.kept)  # Any: it holds itself
        self.layer = nn.Linear(1, 1)
        self.hidden = [self.layer.weight]


def test_tensors_in_attributes_get_values_too() -> None:
    with DeferredInit():
        module, lstm, lazy = Attributes(), nn.LSTM(2, 2), nn.LazyLinear(2)
    materialize(module.layer, device=CPU)
    materialize(module, device=CPU, inner=[module.layer])
    module.table[2] = 9
    assert module.row.tolist() == [1, 9, 3]
    assert module.plain.tolist() == [1, 1]
    assert module.kept[0]["a"].tolist() == [0]
    assert module.kept[1][0].tolist() == [2]
    assert module.hidden[0] is module.layer.weight
    materialize(lazy, device=CPU)  # it is filled by its first batch
    assert lazy(torch.ones(1, 3)).shape == (1, 2)
    materialize(lstm, device=CPU)
    assert all(one is other for one, other in zip(lstm._flat_weights, lstm.parameters(), strict=True))
    assert lstm(torch.ones(1, 1, 2))[0].sum().backward() is None


class Scaled(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, device=device))
        self.layer = nn.Linear(2, 2, device=device)


def test_what_was_not_written_down_is_filled_by_functions_or_named() -> None:
    with pytest.raises(ModuleError) as caught:
        check_materializable(nn.Sequential(Scaled("meta"), nn.Sequential(Scaled("meta")), nn.Linear(1, 1)))
    assert "0 (Scaled): scale on the meta device" in str(caught.value)
    assert "1.0 (Scaled): scale on the meta device" in str(caught.value)
    assert "Linear" not in str(caught.value)
    assert "param_init_fn=" in caught.value.fix
    layer = nn.Linear(2, 2, device="meta")
    torch.manual_seed(0)
    materialize(layer, device=CPU)
    torch.manual_seed(0)
    assert torch.equal(layer.weight, nn.Linear(2, 2).weight)
    fills: list[Callable[[nn.Module], object]] = [
        lambda one: [nn.init.constant_(value, 3) for value in one.parameters(recurse=False)],
        lambda one: [
            value.data.fill_(3) for value in one.to_empty(device="cpu", recurse=False).parameters(recurse=False)
        ],
    ]
    for fill in fills:
        module = nn.Sequential(Scaled("meta"))
        materialize(module, device=CPU, param_init_fn=fill)
        assert all((one == 3).all() and one.requires_grad for one in module.parameters())
    layer = nn.Linear(2, 2, device="meta")
    with pytest.raises(ModuleError, match="Linear: still on the meta device"):
        materialize(layer, device=CPU, param_init_fn=lambda one: one.to("meta"))
    module = nn.Sequential(Scaled("meta"))
    materialize(module, device=CPU, empty=True)
    module.load_state_dict(nn.Sequential(Scaled("cpu")).state_dict())
    assert module[0].scale.tolist() == [1, 1]


class Filled(nn.Module):
    """Has a `reset_parameters` of its own."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.empty(2, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.value)


def test_what_was_built_empty_is_filled_by_the_users_functions_and_else_left_to_a_checkpoint() -> None:
    def build() -> nn.Sequential:
        with DeferredInit(empty=True):
            model = nn.Sequential(Filled(1.0), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
            model[3].weight = model[0].weight
        model[1].reset_parameters = lambda: nn.init.constant_(model[1].weight, 2.0)
        return model

    model = build()
    assert empty_names(model) == ["2.weight", "2.bias", "3.bias"]
    materialize(model, device=CPU)
    assert [float(model[at].weight[0, 0].detach()) for at in (0, 1, 3)] == [1.0, 2.0, 1.0]
    model = build()
    fill = lambda module: [nn.init.constant_(one, 3.0) for one in module.parameters(recurse=False)]  # noqa: E731
    assert empty_names(model, param_init_fn=fill) == []
    materialize(model, device=CPU, param_init_fn=fill)
    assert all(bool((one == 3.0).all()) for one in model.parameters())


def test_changes_after_the_context_are_refused_as_they_are_lost() -> None:
    def built() -> nn.Sequential:
        with DeferredInit():
            return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    changes: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
        "filled": (lambda model: nn.init.zeros_(model[0].weight), r"0 \(Linear\): weight changed"),
        "cast": (lambda model: model.half(), r"0 \(Linear\): bias, weight changed.*\n.*1 \(BatchNorm1d\): "),
        "loaded": (lambda model: model[0].bias.data.copy_(torch.ones(2)), ""),  # through .data: not seen
    }
    for name, (change, message) in changes.items():
        model = built()
        change(model)
        if message:
            with pytest.raises(ModuleError, match=message):
                check_materializable(model)
        else:
            check_materializable(model)
        with DeferredInit():
            nn.Linear(1, 1)  # a later context forgives nothing
        if message:
            with pytest.raises(ModuleError, match=message):
                materialize(model, device=CPU)
        assert name
    with pytest.raises(ModuleError, match=r"\(the model\) \(Linear\): bias, weight changed, moved or copied"):
        materialize(copy.deepcopy(built()[0]), device=CPU)
    model = built()
    model[0].requires_grad_(False).weight.requires_grad_(True)
    model[1].weight = nn.Parameter(torch.full((2,), 5.0))
    materialize(model, device=CPU)
    assert [one.requires_grad for one in model[0].parameters()] == [True, False]
    assert model[1].weight.tolist() == [5, 5]
    assert not any("deferred" in name or "made" in name for one in model.modules() for name in vars(one))
