"""What is built under DeferredInit, computed later, is what building it directly gives: bit for bit."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from loopwright.errors import ModuleError
from loopwright.strategies.construction.deferred import DeferredInit
from loopwright.strategies.construction.materialize import materialize
from loopwright.strategies.construction.operator_replay import is_deferred

CPU = torch.device("cpu")


def saved() -> bytes:
    file = io.BytesIO()
    torch.save({"weight": torch.arange(9.0).view(3, 3), "bias": torch.ones(3)}, file)
    return file.getvalue()


SAVED = saved()


class Buffers(nn.Module):
    """Tables as models with positions compute them."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = torch.outer(torch.arange(16), 1 / 1e4 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("cos", frequencies.cos(), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones_like(frequencies), frequencies))
        self.register_buffer("back", self.turns.conj())
        table = torch.zeros(16, 8)
        steps = torch.exp(torch.arange(0, 8, 2) * (-math.log(1e4) / 8))
        table[:, 0::2] = torch.sin(torch.arange(16).unsqueeze(1) * steps)
        table[[0, 3], 1] = 7
        table[range(2)] += table[torch.tensor([4, 5]).numpy(), :][[True, False]]
        self.register_buffer("table", table[None])
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())


class Default(nn.Module):
    """Its dtypes are those of the time when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.thirds = nn.Buffer(torch.arange(3) / 3)


class Inits(nn.Module):
    """Each way to fill a parameter, and each kind of random operation."""

    def __init__(self) -> None:
        super().__init__()
        fills: list[Callable[[Tensor], object]] = [
            lambda one: nn.init.trunc_normal_(one, std=0.02),
            nn.init.orthogonal_,
            nn.init.xavier_normal_,
            nn.init.kaiming_uniform_,
            nn.init.eye_,
            lambda one: nn.init.sparse_(one, 0.5),
            lambda one: one.data.bernoulli_(0.3),
            lambda one: one.data.exponential_(),
            lambda one: one.data.normal_().clamp_(-1, 1),
            lambda one: one.data.t()[2:5].normal_(),  # a part, and not in the order of memory
        ]
        for at, fill in enumerate(fills):
            parameter = nn.Parameter(torch.zeros(9, 7))
            fill(parameter)
            self.register_parameter(f"filled{at}", parameter)
        self.few = nn.Parameter(torch.randn(5) * 0.02)
        self.order = nn.Buffer(torch.randperm(9))
        self.chosen = nn.Buffer(torch.multinomial(torch.ones(9), 4))
        self.counts = nn.Buffer(torch.poisson(torch.rand(9) * 9))  # how much is drawn depends on the rates
        self.coins = nn.Buffer(torch.bernoulli(torch.rand(5)))
        own = torch.Generator().manual_seed(3)
        self.own = nn.Buffer(torch.randn(20, generator=own))
        self.own_again = nn.Buffer(torch.randn(20, generator=own))
        self.dropped = nn.Buffer(torch.dropout(torch.ones(20), 0.5, True))
        self.like = nn.Buffer(torch.randn_like(self.few))
        self.last = nn.Parameter(torch.rand(3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=1)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.is_shared = True
        self.apply(self.fill)

    @staticmethod
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0, 0.02)
            module.weight.data[1].zero_()


class Reads(nn.Module):
    """A constructor that looks at values, and mixes tensors with and without them."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.layers = nn.ModuleList(nn.Linear(2, 2 + int(rate * 10)) for rate in self.rates)
        self.choice = nn.Linear(2, 2) if torch.rand(1) > 0.5 else nn.Linear(3, 3)
        assert torch.equal(self.choice.weight, self.choice.weight)
        self.weight = nn.Parameter(torch.tensor(torch.rand(2, 2).tolist()))
        self.drawn = nn.Parameter(torch.rand(2, 2))
        self.numpy = nn.Buffer(torch.from_numpy(torch.rand(3).numpy() * 2))
        self.found = nn.Buffer(torch.nonzero(torch.rand(9) > 0.5))
        self.distinct = nn.Buffer(torch.unique(torch.randint(0, 4, (9,))))
        marked = torch.zeros(9)
        marked[torch.rand(9) > 0.5] = 1
        self.marked, self.picked = nn.Buffer(marked), nn.Buffer(marked[marked > 0])
        self.beside = nn.Buffer(torch.ones(3, device=self.drawn.device))
        self.given = nn.Buffer(self.drawn.new_tensor([1.0, 2.0]))
        self.of_parts = nn.Buffer(torch.tensor([self.drawn.data[0, 0], self.drawn.data[1, 1]]))
        real = torch.tensor([1.0, 2.0, 3.0])
        self.before = nn.Parameter(torch.empty(3))
        self.before.data.copy_(real)
        real += 1
        self.after = nn.Buffer(torch.zeros(3) + real)
        real[:2].copy_(self.drawn.data[0])
        self.real = nn.Buffer(real)
        self.replaced = nn.Parameter(torch.zeros(3))
        self.replaced.data = torch.tensor([4.0, 5.0])
        grown = torch.zeros(2)
        for at in range(40):
            grown[at % 2] += float(grown[at % 2 - 1]) + 0.5
        self.grown = nn.Buffer(grown)


class Loads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.assigned = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.one.load_state_dict(torch.load(io.BytesIO(SAVED)))
        self.other.load_state_dict(self.one.state_dict())
        self.assigned.load_state_dict(torch.load(io.BytesIO(SAVED)), assign=True)
        self.copied = copy.deepcopy(self.one)
        self.norm = copy.deepcopy(nn.BatchNorm1d(3))
        nn.init.ones_(self.one.weight)
        self.low = nn.Linear(3, 3).to(torch.bfloat16)
        self.rounded = nn.Linear(2, 2).half().float()
        self.skipped = nn.utils.skip_init(nn.Linear, 2, 2)
        nn.init.zeros_(self.skipped.weight)
        nn.init.zeros_(self.skipped.bias)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(
        nn.Linear(5, 7), nn.Conv2d(3, 5, 3), nn.ConvTranspose1d(3, 5, 3), nn.Embedding(9, 5, padding_idx=2),
        nn.EmbeddingBag(9, 5), nn.LayerNorm(5), nn.BatchNorm2d(5), nn.GroupNorm(2, 4), nn.PReLU(), nn.Bilinear(3, 4, 2),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10]),
    ),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=3, vdim=5, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "gru": lambda: nn.GRU(4, 5),
    "buffers": Buffers,
    "inits": Inits,
    "tied": Tied,
    "reads": Reads,
    "loads": Loads,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 5)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.3),
    "channels_last": lambda: nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),
    "dtypes": lambda: nn.ParameterList(
        [torch.randn(3, 3, dtype=torch.complex64), torch.view_as_complex(torch.randn(3, 2)), torch.rand(4).double()]
    ),
    "bfloat16": Default,
    "float64": Default,
}  # fmt: skip


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    names = [name for name, _ in expected.named_modules()]
    assert [name for name, _ in module.named_modules()] == names
    for kind in ("named_parameters", "named_buffers"):
        own = list(getattr(module, kind)(remove_duplicate=True))
        theirs = list(getattr(expected, kind)(remove_duplicate=True))
        assert [name for name, _ in own] == [name for name, _ in theirs]
        for (name, one), (_, other) in zip(own, theirs, strict=True):
            assert not one.is_meta, name
            facts = [(x.shape, x.stride(), x.dtype, x.requires_grad, x.is_leaf, type(x)) for x in (one, other)]
            assert facts[0] == facts[1], name
            assert torch.equal(one, other), name


@pytest.mark.parametrize("name", ZOO)
def test_values_and_random_numbers_are_those_of_building_directly(name: str) -> None:
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(name, torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(1)
        expected = ZOO[name]()
        state = torch.get_rng_state()
        torch.manual_seed(1)
        with DeferredInit():
            module = ZOO[name]()
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.get_rng_state(), state), "code after it would draw other numbers"
    assert sum(is_deferred(one) for one in module.parameters()) >= 0.8 * len(list(module.parameters()))
    materialize(module, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(module, expected)


class Resized(nn.Module):
    """Takes over loaded parameters, and resizes them as transformers resizes embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer.load_state_dict(torch.load(io.BytesIO(SAVED)), assign=True)
        self.layer.weight.data = torch.cat([self.layer.weight.data, torch.rand(1, 3)])
        self.layer.bias.data = torch.zeros(4)


def test_parameters_with_values_take_data_without() -> None:
    torch.manual_seed(1)
    expected = Resized()
    torch.manual_seed(1)
    with DeferredInit():
        module = Resized()
    materialize(module, device=CPU)
    assert_same(module, expected)


class Dependent(nn.Module):
    """Computes a parameter from loaded and drawn ones, as DoRA computes its magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer.load_state_dict(torch.load(io.BytesIO(SAVED)), assign=True)
        self.of_bias = nn.Parameter(self.layer.bias + torch.rand(3))
        self.magnitude = nn.Parameter((self.layer.weight + torch.rand(3, 3)).norm(dim=1))


def test_values_that_a_parameter_had_outlive_its_partitioning() -> None:
    torch.manual_seed(1)
    expected = Dependent()
    torch.manual_seed(1)
    with DeferredInit():
        module = Dependent()
    for one in module.layer.parameters():
        one.data = torch.empty(0)  # as DeepSpeed does
    materialize(module, device=CPU)
    assert torch.equal(module.of_bias, expected.of_bias)
    assert torch.equal(module.magnitude, expected.magnitude)


def test_nothing_is_held_that_has_values() -> None:
    with DeferredInit():
        module = ZOO["transformer"]()
        module.register_buffer("counts", torch.arange(5))
    assert all(one.is_meta and is_deferred(one) for one in [*module.parameters(), *module.buffers()])


def test_without_values_nothing_is_drawn_but_tables_are_computed() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with DeferredInit(empty=True):
        module = nn.ModuleDict({"inits": Inits(), "tables": Buffers(), "layer": nn.Linear(2, 2)})
    assert torch.equal(torch.get_rng_state(), state)
    module["layer"].weight.requires_grad_(False)
    materialize(module, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(one.is_meta for one in [*module.parameters(), *module.buffers()])
    assert not module["layer"].weight.requires_grad
    for (name, one), (_, other) in zip(module["tables"].named_buffers(), Buffers().named_buffers(), strict=True):
        assert torch.equal(one, other), name
    with DeferredInit(empty=True), pytest.raises(ModuleError, match=r"got a read at .*test_deferred.py:\d+"):
        torch.rand(1).item()


def test_a_context_within_another_sets_empty_only() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(2, 2)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with DeferredInit():
        module = nn.Linear(2, 2)
        with DeferredInit(empty=True):
            nn.Linear(3, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.empty(1).is_meta
    materialize(module, device=CPU)
    assert_same(module, expected)


def test_a_later_context_goes_on_where_an_earlier_one_ended() -> None:
    torch.manual_seed(0)
    expected = nn.BatchNorm1d(2).to(torch.bfloat16)
    nn.init.normal_(expected.weight)
    torch.manual_seed(0)
    with DeferredInit():
        module = nn.BatchNorm1d(2)
    with DeferredInit():
        module.to(torch.bfloat16)
        nn.init.normal_(module.weight)
    module.to(torch.bfloat16)  # nothing to do: no harm
    materialize(module, device=CPU)
    assert_same(module, expected)


def test_the_users_own_mistakes_raise_as_ever_and_meta_tensors_have_no_values() -> None:
    with DeferredInit():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        plain = nn.Linear(2, 2, device="meta")
        assert plain.weight.is_meta
        assert not is_deferred(plain.weight)
        with pytest.raises(ModuleError, match=r"copy_ at .*test_deferred.py:\d+ .*on the meta device"):
            nn.Linear(2, 2).weight.data.copy_(plain.weight.data)
        with pytest.raises(ModuleError, match=r"set_ at .* sets a storage with values"):
            torch.empty(2).set_(torch.tensor([1.0]).untyped_storage())


def test_an_input_that_is_changed_before_values_are_computed_is_named() -> None:
    table = torch.ones(3)
    with DeferredInit():
        module = nn.Linear(3, 1, bias=False)
        module.weight.data.copy_(table)
    table += 1
    with pytest.raises(ModuleError, match=r"shape \(3,\) that .*test_deferred.py:\d+ .* was changed"):
        materialize(module, device=CPU)
