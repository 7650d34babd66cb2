"""Which parts of a module are compiled, what a compiled forward keeps, and `compile=` of Fabric."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.fabric.compiling import (
    compile_in_place,
    compiled_parts,
    find_blocks,
    find_parts,
    read_compile,
)

pytestmark = [  # of torch's own, while it compiles
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

# Any in this file: what torch gives a backend.


class Graphs:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward  # type: ignore[no-any-return]


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Deep(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.begin = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block(width) for width in widths)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(self.embedding(x))
        for block in self.body["blocks"]:  # type: ignore[attr-defined]
            x = block(x)
        return x


def names_of(module: nn.Module, found: list[nn.Module]) -> list[str]:
    return [name for name, one in module.named_modules() if any(one is each for each in found)]


@pytest.mark.parametrize(
    ("widths", "blocks"),
    [
        ((4, 4, 4), ["body.blocks.0", "body.blocks.1", "body.blocks.2"]),
        ((4, 4, 8), ["body.blocks.0", "body.blocks.1", "body.blocks.2"]),
        ((4, 8, 16), []),  # no two could share a graph
        ((4,), []),
    ],
)
def test_blocks_are_what_is_repeated(widths: tuple[int, ...], blocks: list[str]) -> None:
    module = Deep(*widths)
    assert names_of(module, find_blocks(module)) == blocks


def test_layers_of_torch_are_no_blocks_of_their_own() -> None:
    assert find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2, enable_nested_tensor=False)
    assert names_of(encoder, find_blocks(encoder)) == ["layers.0", "layers.1"]


def test_parts_are_the_outermost_modules_beside_blocks_and_what_the_user_compiled() -> None:
    module = Deep(4, 4)
    assert names_of(module, find_parts(module, find_blocks(module))) == ["begin"]
    assert names_of(module, find_parts(module)) == ["begin", "body.blocks.0", "body.blocks.1"]
    module.begin.compile(backend="eager")
    assert find_parts(module, find_blocks(module)) == []
    whole = nn.Sequential(module)
    assert names_of(whole, find_parts(whole, find_blocks(module))) == []  # it holds blocks


def test_a_compiled_layer_of_torch_is_one_graph_and_hooks_stay_outside(graphs: Graphs) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
    x = torch.ones(2, 3, 8)
    expected = layer(x)
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(len(seen)))  # would grow a graph's guards with each call
    with ExitStack() as stack:
        compile_in_place([layer], partial(torch.compile, backend=graphs, fullgraph=True), stack)
        assert compiled_parts(layer) == [""]
        for _ in range(3):
            torch.testing.assert_close(layer(x), expected)
        twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        assert not any(compiled_parts(twin) for twin in twins)
    assert graphs.count == 1
    assert seen == [0, 1, 2]
    assert "forward" not in vars(layer)
    assert compiled_parts(layer) == []


def test_modules_of_other_structure_do_not_use_up_each_others_graphs(graphs: Graphs) -> None:
    blocks = [Block(width) for width in range(2, 14)]
    with ExitStack() as stack:
        compile_in_place(blocks, partial(torch.compile, backend=graphs, fullgraph=True), stack)
        for width, block in enumerate(blocks, 2):
            block(torch.ones(3, width))
    assert graphs.count == len(blocks)  # more than torch keeps for one function


def test_true_is_the_defaults_of_torch() -> None:
    assert read_compile(False) is None
    assert read_compile(True) == {}
    assert read_compile({"mode": "reduce-overhead", "dynamic": False}) == {"mode": "reduce-overhead", "dynamic": False}


# -- Fabric ------------------------------------------------------------------------------------------------------------


class Stepping(nn.Module):
    """Its step calls a submodule, and never itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).sum()  # type: ignore[no-any-return]


def machine(strategy: str = "auto") -> lw.Fabric:
    return lw.Fabric(accelerator="cpu", devices=1, strategy=strategy)


@pytest.mark.parametrize("is_by_user", [True, False])
def test_fabric_compiles_the_forward_and_the_steps(is_by_user: bool, graphs: Graphs) -> None:
    module = Stepping()
    x = torch.ones(2, 4)
    expected = module.training_step(x)
    names = list(module.state_dict())
    if is_by_user:
        model = machine().setup(torch.compile(module, backend=graphs))
    else:
        model = machine().setup(module, compile={"backend": graphs, "fullgraph": True})
    assert torch.equal(model(x).sum(), expected)
    assert graphs.count == 1
    assert torch.equal(model.training_step(x), expected)
    assert graphs.count == 2
    assert list(model.state_dict()) == names
    assert model.module is module


def sharded(rank: int, size: int, is_by_user: bool) -> None:
    graphs = Graphs()
    torch.manual_seed(0)
    module = Deep(4, 4, 4)
    x = torch.ones(2, 4)
    expected = module(x)
    names = list(module.state_dict())
    fabric = machine("fsdp")
    if is_by_user:
        model = fabric.setup(torch.compile(module, backend=graphs))
    else:
        model = fabric.setup(module, compile={"backend": graphs, "fullgraph": True})
    found = model(x)
    assert torch.equal(found, expected)
    fabric.backward(found.sum())
    assert graphs.count == 2  # `begin`, and one for all blocks
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("is_by_user", [True, False])
def test_fabric_compiles_blocks_below_what_fsdp_adds(is_by_user: bool) -> None:
    run_ranks(sharded, 1, is_by_user, connect=False)


def test_fabric_names_what_compile_cannot_be() -> None:
    with pytest.raises(ConfigError, match="got compile='yes'"):
        machine().setup(Stepping(), compile="yes")
