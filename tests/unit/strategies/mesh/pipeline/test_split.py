"""All stages in one process, one after the other: each on a copy of the model, with what the stage before has sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.errors import ConfigError, ModuleError
from loopwright.strategies.mesh.pipeline.options import Pipeline
from loopwright.strategies.mesh.pipeline.split import StageSplit, split_stages

WIDTH, WORDS = 8, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return cast(Tensor, x + self.mix(self.norm(x)) * scale)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head, with values that every block gets."""

    def __init__(self, count: int = 4, *, tied: bool = False, has_branch: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.has_branch = has_branch
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = torch.arange(ids.shape[1], dtype=self.norm.weight.dtype)[:, None]
        for block in self.blocks:
            x = block(x, scale)
            if self.has_branch and x.abs().max() > 1:
                x = x / 2
        return cast(Tensor, self.head(self.norm(x)))


class Skip(nn.Module):
    """The output needs a value of the first stage beside that of the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        start = h = self.inner(x)
        for block in self.blocks:
            h = block(h).relu()
        return cast(Tensor, self.out(h + start))


def ids() -> Tensor:
    return torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(1))


def image() -> Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cnn() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(*blocks), nn.Flatten(), nn.Linear(144, 3))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def sequence() -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


Case = tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]
CASES: dict[str, Case] = {
    "decoder": (Decoder, lambda: {"ids": ids()}),
    "tied": (lambda: Decoder(tied=True), lambda: {"ids": ids()}),
    "branch on values": (lambda: Decoder(has_branch=True), lambda: {"ids": ids()}),
    "cnn": (cnn, lambda: {"input": image()}),
    "encoder": (encoder, lambda: {"src": sequence()}),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def output_of(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else cast(Tensor, value.logits)


def split_over(make: Callable[[], nn.Module], options: Pipeline, num_ranks: int) -> list[StageSplit]:
    return [split_stages(built(make), options, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def run_forward(splits: list[StageSplit], inputs: dict[str, Any]) -> list[tuple[Tensor | None, Tensor, StageSplit]]:
    """Return what each stage got, what it returned, and the split that ran it."""
    passed: list[tuple[Tensor | None, Tensor, StageSplit]] = []
    received: tuple[Tensor, ...] | None = None
    for stage in range(splits[0].plan.num_stages):
        split = next(one for one in splits if stage in one.stages)
        output = split.run(stage, received, split.module, **inputs)
        outputs = output if isinstance(output, tuple) else (output_of(output),)
        passed.append((None if received is None else received[0], outputs[0], split))
        received = tuple(one.detach().requires_grad_(one.is_floating_point()) for one in outputs)
    return passed


def run_backward(passed: list[tuple[Tensor | None, Tensor, StageSplit]]) -> None:
    gradient: Tensor | None = None
    for received, output, _ in reversed(passed):
        if gradient is None:
            output.square().mean().backward()
        else:
            output.backward(gradient)
        gradient = None if received is None else received.grad


def compare(make: Callable[[], nn.Module], inputs: dict[str, Any], options: Pipeline, num_ranks: int = 2) -> None:
    whole = built(make)
    expected = output_of(whole(**inputs))
    expected.square().mean().backward()
    splits = split_over(make, options, num_ranks)
    passed = run_forward(splits, inputs)
    assert torch.equal(passed[-1][1], expected)
    run_backward(passed)
    # A tied parameter has another name on a rank that has only its second module.
    alias = {name: first for first, names in tied_names(whole).items() for name in names}
    found: dict[str, Tensor] = {}
    for split in splits:
        for name, parameter in split.module.named_parameters():
            if parameter.grad is not None:
                key = alias[name]
                found[key] = found[key] + parameter.grad if key in found else parameter.grad
    wanted = {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # Two stages' gradients of one parameter are added in another order than autograd adds them.
        bound = 1e-15 if len(tied_names(whole)[name]) > 1 else 0.0
        assert (found[name] - gradient).abs().max() <= bound, name


def tied_names(module: nn.Module) -> dict[str, list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in groups.values()}


# --- equality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_the_model(case: str, num_ranks: int) -> None:
    make, inputs = CASES[case]
    compare(make, inputs(), Pipeline(), num_ranks)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
@pytest.mark.parametrize("case", CASES)
def test_several_stages_on_a_rank(case: str, schedule: str) -> None:
    make, inputs = CASES[case]
    compare(make, inputs(), Pipeline(schedule=schedule))


def hugging_face(model: str, config: str, **arguments: Any) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    return lambda: cast(nn.Module, getattr(transformers, model)(getattr(transformers, config)(**arguments)).eval())


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
PLAIN = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                        "num_attention_heads")}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "use_cache": False}
VIT = {**PLAIN, "image_size": 32, "patch_size": 8}
del VIT["vocab_size"]


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(
    ("model", "config", "arguments"),
    [
        ("LlamaForCausalLM", "LlamaConfig", SMALL),
        ("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, "head_dim": 8}),
        ("GPT2LMHeadModel", "GPT2Config", GPT2),
        ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SMALL, "head_dim": 8, "sliding_window": 8}),
        ("ViTForImageClassification", "ViTConfig", VIT),
        ("BertForSequenceClassification", "BertConfig", PLAIN),
    ],
)
def test_models_of_hugging_face(model: str, config: str, arguments: dict[str, Any]) -> None:
    make = hugging_face(model, config, **arguments)
    if model.startswith("ViT"):
        generator = torch.Generator().manual_seed(1)
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)}
    else:
        words = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
        mask = torch.ones(2, 16, dtype=torch.long)
        mask[0, 12:] = 0
        inputs = {"input_ids": words, "attention_mask": mask}
    compare(make, inputs, Pipeline())


# --- what each rank has --------------------------------------------------------------------------------------------


def test_each_rank_has_its_stages_parameters_under_their_names() -> None:
    names = {name for name, _ in Decoder().named_parameters()}
    parts = [{name for name, _ in one.module.named_parameters()} for one in split_over(Decoder, Pipeline(), 2)]
    assert parts[0] | parts[1] == names
    assert not parts[0] & parts[1]
    assert {name.split(".")[0] for name in parts[0]} == {"embed", "blocks"}
    assert {name.split(".")[0] for name in parts[1]} == {"norm", "head", "blocks"}


def test_tied_parameters_over_stages_are_found() -> None:
    splits = split_over(lambda: Decoder(tied=True), Pipeline(), 2)
    assert [[(one.names, one.ranks) for one in split.shared] for split in splits] == [
        [(("embed.weight", "head.weight"), (0, 1))]
    ] * 2
    assert not split_over(lambda: Decoder(tied=True), Pipeline(schedule="zbv"), 2)[0].shared  # both are on rank 0


def test_what_is_outside_of_the_split_module_is_on_every_rank() -> None:
    make = lambda: nn.ModuleDict({"teacher": Decoder(2), "model": Decoder()})  # noqa: E731
    splits = split_over(make, Pipeline(module="model"), 2)
    for split in splits:
        assert any(name.startswith("teacher.head") for name, _ in split.module.named_parameters())
    assert {one.names[0].split(".")[0] for one in splits[0].shared} == {"teacher"}


def test_parameters_of_other_stages_tell_shape_and_dtype_only() -> None:
    first = split_over(Decoder, Pipeline(), 2)[0].module
    weight = cast(Any, first).head.weight
    assert (tuple(weight.shape), weight.dtype, weight.requires_grad) == ((WORDS, WIDTH), torch.float64, True)
    with pytest.raises(ModuleError, match=r"read head.weight \(linear\), which stage 1"):
        F.linear(torch.ones(1, WIDTH, dtype=torch.float64), weight)


def test_a_model_without_memory_is_split_without_memory() -> None:
    with torch.device("meta"):
        model = Decoder()
    split = split_stages(model, Pipeline(), rank=1, num_ranks=2, device=torch.device("cpu"))
    assert all(one.is_meta for one in split.module.parameters())


def test_a_copy_of_a_split_module_runs_its_own_blocks() -> None:
    split = split_over(Decoder, Pipeline(), 2)[0]
    other = copy.deepcopy(split)
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.zero_()
    assert not other.run(0, None, other.module, ids())[0].any()
    assert split.run(0, None, split.module, ids())[0].any()


# --- where to split ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "num_ranks", "bounds"), [(4, 2, (0, 2, 4)), (5, 2, (0, 3, 5)), (7, 4, (0, 2, 4, 6, 7))]
)
def test_even_stages(count: int, num_ranks: int, bounds: tuple[int, ...]) -> None:
    assert split_over(lambda: Decoder(count), Pipeline(), num_ranks)[0].plan.bounds == bounds


def test_large_blocks_are_stages_of_their_own() -> None:
    sizes = [64, 1, 1, 1]
    make = lambda: nn.Sequential(*(nn.Linear(1, size, bias=False) for size in sizes))  # noqa: E731
    assert split_over(make, Pipeline(), 2)[0].plan.bounds == (0, 1, 4)


def test_split_points_by_name() -> None:
    assert split_over(Decoder, Pipeline(split=["blocks.1"]), 2)[0].plan.bounds == (0, 1, 4)
    compare(Decoder, {"ids": ids()}, Pipeline(split=["blocks.3"]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Pipeline(split=["blocks.9"]), r"got 'blocks.9': there are blocks.0 to blocks.3"),
        (Pipeline(split=["blocks.0"]), "ascending order after 'blocks.0'"),
        (Pipeline(split=["blocks.2", "blocks.1", "blocks.3"], schedule="zbv"), "ascending order"),
        (Pipeline(module="blks"), "did you mean 'blocks'"),
    ],
)
def test_wrong_names_are_explained(options: Pipeline, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        split_stages(Decoder(), options, rank=0, num_ranks=2)


def test_fewer_blocks_than_stages() -> None:
    with pytest.raises(ModuleError, match=r"at least 8 blocks.*got 4 in blocks: blocks.0 to blocks.3"):
        split_stages(Decoder(), Pipeline(schedule="zbv"), rank=0, num_ranks=4)


def test_a_module_without_blocks() -> None:
    with pytest.raises(ModuleError, match="repeated blocks in Linear, got none"):
        split_stages(nn.Linear(2, 2), Pipeline(), rank=0, num_ranks=2)


# --- steps that cannot be pipelined --------------------------------------------------------------------------------


def run_last(make: Callable[[], nn.Module], step: Callable[..., Any], options: Pipeline | None = None) -> Any:
    last = split_over(make, options or Pipeline(), 2)[1]
    received = torch.zeros(2, 5, WIDTH, dtype=torch.float64)
    return last.run(1, received, lambda: step(last.module))


def test_a_value_that_bypasses_the_split_becomes_nan() -> None:
    last = split_over(Skip, Pipeline(), 2)[1]
    received = torch.zeros(2, WIDTH, dtype=torch.float64)
    assert last.run(1, (received,), last.module, received).isnan().all()


def test_a_second_call_of_the_model() -> None:
    with pytest.raises(ModuleError, match="Expected a step to call the module once, got a second call"):
        run_last(Decoder, lambda model: model(ids()) + model(ids()))


def test_no_call_of_the_model() -> None:
    with pytest.raises(ModuleError, match="no call of block 2"):
        run_last(Decoder, lambda model: torch.zeros(()))


def test_a_parameter_of_another_stage() -> None:
    with pytest.raises(ModuleError, match=r"read blocks.0.mix.weight \(sum\), which stage 0"):
        run_last(Decoder, lambda model: model(ids()).sum() + model.blocks[0].mix.weight.sum())


def test_a_module_that_is_called_on_the_other_side_of_the_blocks() -> None:
    with pytest.raises(ModuleError, match="embed was placed before the blocks of the pipeline, .* is called after"):
        run_last(Decoder, lambda model: model(ids()).sum() + model.embed(ids()).sum())
    with pytest.raises(ModuleError, match="norm was placed after the blocks of the pipeline, .* is called before"):
        run_last(Decoder, lambda model: model.norm(torch.zeros(1, WIDTH)))


def test_integers_of_another_stage() -> None:
    class Rounded(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).long()

    class Routed(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Rounded(WORDS, WIDTH)

    with pytest.raises(ModuleError, match=r"embed returns a tensor of torch.int64"):
        run_last(Routed, lambda model: model(ids()))


def test_a_module_of_another_stage_outside_of_a_step() -> None:
    last = split_over(Decoder, Pipeline(), 2)[1]
    with pytest.raises(ModuleError, match="blocks.0 was called outside of a step"):
        cast(Any, last.module).blocks[0](torch.zeros(1), torch.zeros(1))
