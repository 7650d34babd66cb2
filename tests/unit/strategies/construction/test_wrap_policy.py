from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import wrap
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from loopwright.errors import ConfigError
from loopwright.strategies.construction.wrap_policy import check_policy, choose_units, repeated_blocks

WIDE = 1024  # a block of 1024 x 1024 counts as one by default


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.attention(x))


class Wide(Block):
    def __init__(self) -> None:
        super().__init__(WIDE)


class Model(nn.Module):
    """Embedding, blocks, norm and head; with the head's weight tied to the embedding's, if wanted."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([block() for _ in range(count)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def names(module: nn.Module, policy: Any, **kwargs: Any) -> list[str]:
    return [name for name, _ in choose_units(module, policy, **kwargs).units]


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a module of any size, without memory."""
    with torch.device("meta"):
        return make()


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
IN_BLOCK = ["attention", "feed.0", "feed.2"]
LINEARS = [f"{block}.{name}" for block in BLOCKS for name in IN_BLOCK]
# Children before their parents, as torch must be told.
NESTED = [f"{block}{name}" for block in BLOCKS for name in (*(f".{one}" for one in IN_BLOCK), "")]

TRANSFORMER = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
NORMS_OR_HEAD = functools.partial(
    wrap._or_policy,
    policies=[
        functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)),
        functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Embedding}),
    ],
)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Block, BLOCKS),
        ({Block}, BLOCKS),
        ([Block, nn.LayerNorm], [*BLOCKS, "norm"]),
        ("Block", BLOCKS),
        (frozenset({"Block", nn.Linear}), [*NESTED, "head"]),
        (ModuleWrapPolicy({Block}), BLOCKS),
        (TRANSFORMER, BLOCKS),
        (NORMS_OR_HEAD, ["embed", "norm"]),
        (lambda module: isinstance(module, nn.Linear) and module.bias is not None, LINEARS),
        (CustomPolicy(lambda module: isinstance(module, nn.LayerNorm)), ["norm"]),
        (lambda module: {}, []),
        (set(), []),
        (wrap.size_based_auto_wrap_policy, []),
        # 5 * 4 each; a block has 3 * (4 * 4 + 4) = 60
        (functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=60), BLOCKS),
        (functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=21), ["blocks.0.feed", "blocks.1.feed"]),
        (
            functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=60, force_leaf_modules={nn.ModuleList}),
            [],
        ),
        (functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=60, exclude_wrap_modules={Block}), []),
    ],
)
def test_every_kind_of_policy(policy: Any, expected: list[str]) -> None:
    model = Model(count=2 if expected[:1] == ["blocks.0.feed"] else 3)
    assert check_policy("auto_wrap_policy", policy) == []
    assert names(model, policy) == expected


def test_always_wrap_leaves_containers_out() -> None:
    chosen = names(Model(count=1), wrap.always_wrap_policy)
    assert chosen == ["embed", *(f"blocks.0.{one}" for one in (*IN_BLOCK, "feed")), "blocks.0", "norm", "head"]
    module = nn.ModuleDict({"a": nn.ParameterList([torch.ones(2)]), "b": nn.Linear(1, 1)})
    assert names(module, wrap.always_wrap_policy) == ["b"]


def test_it_chooses_what_torchs_own_wrapping_does() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    def by_torch(model: nn.Module, policy: Any) -> set[str]:
        held = {id(one): name for name, one in model.named_modules()}
        wrap._recursive_wrap(model, policy, Wrapper, set(), set(), only_wrap_children=True)
        return {held[id(one.module)] for one in model.modules() if isinstance(one, Wrapper)}

    def deep() -> nn.Module:
        layer = functools.partial(nn.TransformerDecoderLayer, 4, 2, 8)
        return nn.Sequential(*(nn.Sequential(layer(), nn.Linear(4, 4)) for _ in range(2)), Model(count=2))

    for least in (1, 10, 20, 21, 45, 60, 100, 300, 1000):
        policy = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=least)
        assert set(names(deep(), policy)) == by_torch(deep(), policy), least


# -- by default --------------------------------------------------------------------------------------------------------


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(50000, WIDE), "wpe": nn.Embedding(1024, WIDE), "h": nn.ModuleList([Wide(), Wide()])}
        )
        self.lm_head = nn.Linear(WIDE, 50000, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Model(Wide), BLOCKS),
        (lambda: Model(Wide, 1), []),  # not repeated
        (Model, []),  # small
        (lambda: nn.Linear(WIDE, WIDE), []),
        (NanoGPT, ["transformer.h.0", "transformer.h.1"]),
        (
            lambda: nn.Transformer(512, 8, 2, 3, batch_first=True),
            [f"encoder.layers.{i}" for i in range(2)] + [f"decoder.layers.{i}" for i in range(3)],
        ),
        (lambda: nn.Sequential(nn.Embedding(9, WIDE), Wide(), Wide(), nn.LayerNorm(WIDE)), ["1", "2"]),
        # Layers in plain Sequentials; nothing below 2**18 elements is one.
        (
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.BatchNorm1d(2048)) for _ in range(2))),
            ["0.0", "1.0"],
        ),
        # Pairs in lists, as of attention and feed-forward
        (
            lambda: nn.ModuleList([nn.ModuleList([Wide(), nn.LSTM(WIDE, WIDE)]) for _ in range(2)]),
            ["0.0", "0.1", "1.0", "1.1"],
        ),
        # The outermost ones only
        (lambda: nn.ModuleList([Model(Wide), Model(Wide)]), ["0", "1"]),
        # Very large modules beside the blocks
        (lambda: nn.Sequential(nn.Embedding(10**5, WIDE), Wide(), Wide(), nn.Linear(WIDE, 10**4)), ["0", "1", "2"]),
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(9000, 9000), nn.ReLU(), nn.Linear(9000, 4000))), ["0.0", "0.2"]),
    ],
)
def test_the_default_takes_repeated_blocks_and_very_large_modules(
    make: Callable[[], nn.Module], expected: list[str]
) -> None:
    module = meta(make)
    assert names(module, None) == expected
    assert choose_units(module, None).notes == []


def test_repeated_blocks_may_be_of_any_size() -> None:
    assert [name for name, _ in repeated_blocks(Model())] == BLOCKS
    assert repeated_blocks(Model(), least=61) == []
    assert [name for name, _ in repeated_blocks(Model(count=1))] == ["blocks.0.feed.0", "blocks.0.feed.2"]


# -- what cannot be a unit ---------------------------------------------------------------------------------------------


def test_a_shared_parameter_keeps_its_owners_together() -> None:
    chosen = choose_units(Model(tied=True), {nn.Embedding, nn.Linear, Block})
    assert [name for name, _ in chosen.units] == NESTED
    assert [note.split(":")[0] for note in chosen.notes] == [
        "embed is not a unit",
        "head is not a unit",
    ]
    # A unit that has all of its owners is one.
    assert names(nn.Sequential(Model(tied=True), Model()), {Model, nn.Embedding}) == ["0", "1.embed", "1"]
    # Ignored parameters do not matter.
    model = Model(tied=True)
    assert names(model, {nn.Embedding, nn.LayerNorm}, ignored={model.embed.weight}) == ["norm"]


def test_a_shared_module_counts_once() -> None:
    block = Block()
    assert names(nn.Sequential(block, block, Block()), {Block}) == ["0", "2"]
    # In two units it is neither's; it is one for itself.
    first, second = Block(), Block()
    second.feed = first.feed
    both = nn.Sequential(first, second)
    assert names(both, {Block}) == []
    assert names(both, {Block, nn.Sequential}) == ["0.feed"]
    assert len(choose_units(both, {Block}).notes) == 2


def test_parts_that_are_read_and_not_called_are_no_units() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    chosen = choose_units(nn.Sequential(layer, nn.MultiheadAttention(4, 2), nn.Linear(4, 4)), {nn.Linear})
    assert [name for name, _ in chosen.units] == ["2"]
    assert "some Linear, NonDynamicallyQuantizableLinear lie in modules that read them" in chosen.notes[0]
    assert "ModuleList is only a container" in choose_units(Model(), {nn.ModuleList}).notes[0]


def test_wrong_policies_are_named_with_advice() -> None:
    def two(module: nn.Module, extra: int) -> bool:
        return bool(extra)

    for policy, words in [
        (3, ["Expected auto_wrap_policy= to be a policy, got 3.", "set of classes"]),
        (nn.Linear(1, 1), ["to be a policy, got Linear"]),
        ({Block, 3, None}, ["to contain only classes, got 3, None"]),
        (two, ["to be a function of the module, got two"]),
        (
            wrap.lambda_auto_wrap_policy,
            ["with lambda_fn, got", "functools.partial(lambda_auto_wrap_policy, lambda_fn=)"],
        ),
        ({nn.Conv2d}, ["a class of Model's submodules, got {Conv2d}", "Block, Embedding, GELU, LayerNorm"]),
        ({"Blok", "Conv"}, ["{'Blok', 'Conv'}", "did you mean 'Block'?"]),
        (ModuleWrapPolicy([nn.Conv2d]), ["{Conv2d}"]),
        (functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Conv2d}), ["{Conv2d}"]),
        (CustomPolicy(lambda module: {"mixed_precision": None}), ["arguments for mixed_precision", "fully_shard"]),
        (lambda module: {"cpu_offload": True}, ["arguments for cpu_offload"]),
    ]:
        with pytest.raises(ConfigError) as caught:
            choose_units(Model(), policy)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_notes_say_what_a_policy_did_not_do() -> None:
    assert choose_units(Model(), {"Block", "Blok"}).notes == [
        "auto_wrap_policy= names 'Blok', which is not a class of a submodule."
    ]
    assert choose_units(Model(), lambda module: False).notes == ["auto_wrap_policy= chooses no module of Model."]
    bare = choose_units(meta(lambda: Model(Wide)), wrap.transformer_auto_wrap_policy)
    assert [name for name, _ in bare.units] == BLOCKS
    assert "without transformer_layer_cls; the default units are used: Wide." in bare.notes[0]
    assert choose_units(meta(lambda: Model(Wide)), {Model, Block}).notes == []
    assert choose_units(Model(), Model) == choose_units(Model(), set())  # it is gathered as a whole anyway


def _sharded(rank: int, size: int) -> dict[str, Any]:
    """Shard by many policies, in the order in which units are given, and train one step."""
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    found: dict[str, Any] = {}

    def step(model: nn.Module) -> Tensor:
        model.zero_grad()
        model(torch.arange(4)).square().sum().backward()
        return torch.cat([one.grad.full_tensor().flatten() for one in model.parameters()])

    def make() -> Model:
        torch.manual_seed(0)
        return Model(tied=True)

    torch.manual_seed(0)
    plain = make()
    plain(torch.arange(4)).square().sum().backward()
    expected = torch.cat([one.grad.flatten() for one in plain.parameters()])
    for name, policy in {
        "blocks": {Block},
        "always": wrap.always_wrap_policy,
        "nested": {Block, nn.Linear, nn.Embedding, nn.Sequential},
        "size": functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=20),
    }.items():
        model = make()
        units = choose_units(model, policy).units
        for _, unit in units:
            fully_shard(unit, mesh=mesh)
        # What the user sharded in configure_model is left alone, and what is in there as well.
        again = names(model, lambda module: True)
        inside = [one for one in again if any(f"{one}.".startswith(f"{unit}.") for unit, _ in units)]
        fully_shard(model, mesh=mesh)
        inside += names(model, lambda module: True)
        equal = torch.allclose(step(model), expected, rtol=1e-5, atol=1e-6)  # other order of sums
        found[name] = (len(units), inside, equal, sum(isinstance(one, FSDPModule) for one in model.modules()))
    return found


def test_units_can_be_sharded_in_their_order() -> None:
    expected = {"blocks": (3, [], True, 4), "always": (16, [], True, 17)}
    expected |= {"nested": (15, [], True, 16), "size": (9, [], True, 10)}
    for found in run_ranks(_sharded, 2):
        assert found == expected
