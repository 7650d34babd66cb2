from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import quiet

import loopwright as lw
from loopwright.errors import ConfigError, ModuleError
from loopwright.strategies import FSDPStrategy, MeshStrategy
from loopwright.strategies.construction.activation_checkpointing import (
    apply_activation_checkpointing,
    is_checkpointed,
    remove_activation_checkpointing,
)


class Block(nn.Module):
    """A block with everything that is different the second time: random numbers, statistics, counters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.norm = nn.BatchNorm1d(4 * width)
        self.norm.num_batches_tracked = None  # nothing but the statistics tells that it ran
        self.spread = nn.InstanceNorm1d(4, track_running_stats=True)
        self.dropout = nn.Dropout(0.5)
        self.outer = nn.Linear(4 * width, width)
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, debug: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        hidden = self.spread(self.norm(self.inner(x)).unflatten(1, (4, -1))).flatten(1)
        hidden = self.dropout(torch.tanh(hidden))
        return x + self.outer(hidden if debug is None else hidden * debug)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, debug=torch.tensor(2.0))
        return self.head(x)


def make(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def train(model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    """Return gradients and buffers after some backward passes, and the next random number."""
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(6, 8)).square().sum().backward()
    found = {f"gradient of {name}": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {**found, **{name: one.clone() for name, one in model.named_buffers()}, "random": torch.rand(())}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_gradients_statistics_and_random_numbers_are_those_without() -> None:
    plain, model = make(), make()
    assert apply_activation_checkpointing(model, Block) == ["blocks.0", "blocks.1", "blocks.2"]
    assert_equal(train(plain), train(model))
    assert [block.calls for block in model.blocks] == [4, 4, 4]  # twice a step: they were checkpointed
    assert len(train(plain)) == 3 * 6 + 2 + 3 * 6 + 1


def test_the_second_pass_is_in_the_mode_of_the_first() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return self.drop(2 * x if self.training else x).tanh()

    gradients = []
    for policy in ([], [Noisy]):
        torch.manual_seed(0)
        model = nn.Sequential(Noisy(), nn.Linear(4, 1))
        if policy:
            apply_activation_checkpointing(model, policy)
        x = torch.randn(8, 4)
        loss = model.eval()(x).sum() + model.train()(x).sum()
        model[0].drop.eval()
        loss.backward()
        gradients.append([one.grad for one in model.parameters()])
        assert [one.training for one in model.modules()] == [True, True, True, False, True]
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_hooks_of_the_user_run_once() -> None:
    plain, model = make(), make()
    seen: list[Any] = []
    for each in (plain, model):
        each.blocks[1].register_forward_pre_hook(lambda block, args: (3 * args[0],))
        each.blocks[1].inner.register_forward_hook(lambda layer, args, output: output + 1)
        each.blocks[2].register_forward_hook(lambda block, args, output: seen.append(block) or output.sin())
    apply_activation_checkpointing(model, {Block})
    model.blocks[0].register_forward_pre_hook(lambda block, args: (args[0] + 1,))  # after it was checkpointed
    plain.blocks[0].register_forward_pre_hook(lambda block, args: (args[0] + 1,))
    assert_equal(train(plain), train(model))
    assert len(seen) == 4


def test_names_classes_and_copies_stay() -> None:
    plain, model = make(), make()
    apply_activation_checkpointing(model, "Block")
    assert list(plain.state_dict()) == list(model.state_dict())
    assert str(plain) == str(model)
    assert isinstance(model.blocks[0], Block)
    assert "forward" not in vars(model.blocks[0])
    assert list(model.blocks[:2].state_dict()) == list(plain.blocks[:2].state_dict())
    model.load_state_dict(plain.state_dict())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        assert all(is_checkpointed(block) for block in same.blocks)
        assert_equal(train(same), train(copy.deepcopy(plain)))


def test_a_part_of_a_sequential_is_a_plain_one() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    apply_activation_checkpointing(model, nn.Sequential)
    part = model[0][:2]
    assert type(part) is nn.Sequential
    assert [type(layer) for layer in part] == [nn.Linear, nn.Tanh]


def test_it_keeps_less_and_costs_nothing_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(model: nn.Module, steps: int = 1) -> int:
        """Return the bytes that autograd holds between forward and backward pass, inside the blocks."""
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(64, 8, requires_grad=True))
        return sum(sizes)

    model = make()
    before = kept(model)
    apply_activation_checkpointing(model, Block)
    assert kept(model) < before / 4
    # Without gradients nothing of torch's is asked: it would store the state of random numbers for each block.
    monkeypatch.setattr("torch.utils.checkpoint.checkpoint", None)
    with torch.no_grad():
        calls = [block.calls for block in model.blocks]
        assert kept(model) == 0
        model.eval()(torch.randn(2, 8))
    assert [block.calls for block in model.blocks] == [one + 2 for one in calls]
    with torch.inference_mode():
        model(torch.randn(2, 8))


def test_nobody_is_checkpointed_twice() -> None:
    model = make()
    assert apply_activation_checkpointing(model, lambda module: module is model.blocks[0]) == ["blocks.0"]
    assert apply_activation_checkpointing(model, [Block]) == ["blocks.1", "blocks.2"]
    assert apply_activation_checkpointing(model, [Block]) == []
    train(model, steps=1)
    assert [block.calls for block in model.blocks] == [2, 2, 2]
    # One inside of another is what a policy may ask for.
    plain, nested = make(), make()
    assert len(apply_activation_checkpointing(nested, {Block, nn.Linear})) == 3 * 3 + 1
    assert_equal(train(plain), train(nested))


def test_true_means_the_units_or_the_repeated_blocks() -> None:
    model = make()
    assert apply_activation_checkpointing(model, True, units=[model.head, model.blocks[1], model]) == ["blocks.1"]
    assert apply_activation_checkpointing(make(), True) == ["blocks.0", "blocks.1", "blocks.2"]
    # A layer that keeps no more than its input gains nothing; one that keeps every time step does.
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LSTM(2, 2), nn.LSTM(2, 2))
    assert apply_activation_checkpointing(layers, True) == ["2", "3"]
    with pytest.raises(ConfigError, match=r"Expected repeated blocks in Block[\s\S]*BatchNorm1d, Dropout, Inst"):
        apply_activation_checkpointing(Block(), True)
    with pytest.raises(ConfigError, match=r"activation_checkpointing=\{Blok\}|did you mean 'Block'"):
        apply_activation_checkpointing(model, {"Blok"})


class Scale(nn.Module):
    """A norm of the user's own: its class is not torch's, and it has few of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_true_finds_blocks_that_are_sequential() -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU())

    blocks = nn.ModuleList(layers() for _ in range(3))
    assert apply_activation_checkpointing(nn.ModuleDict({"blocks": blocks}), True) == [f"blocks.{i}" for i in range(3)]
    assert apply_activation_checkpointing(nn.Sequential(layers(), layers()), True) == ["0", "1"]
    scaled = nn.Sequential(*(nn.Sequential(Scale(), nn.Linear(8, 8), Scale(), nn.GELU()) for _ in range(2)))
    assert apply_activation_checkpointing(scaled, True) == ["0", "1"]
    # Stages of blocks are no blocks: these are in them.
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert apply_activation_checkpointing(stages, True) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation_checkpointing": True}, "Expected repeated blocks in OneLayer"),
        ({"activation_checkpointing": {"Blok"}}, "activation_checkpointing= to contain a class of OneLayer"),
        ({"auto_wrap_policy": {"Blok"}}, "auto_wrap_policy= to contain a class of OneLayer"),
    ],
)
@pytest.mark.parametrize("strategy", ["fsdp", "mesh"])
def test_what_chooses_no_module_is_an_error_before_processes_start(
    strategy: str, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneLayer(lw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def start(*_: object, **__: object) -> None:
        raise AssertionError("processes were started")

    made = FSDPStrategy(**arguments) if strategy == "fsdp" else MeshStrategy(fsdp=2, **arguments)
    trainer = lw.Trainer(strategy=made, devices=2, accelerator="cpu", logger=False)
    monkeypatch.setattr(type(trainer.fabric.launcher), "launch", start)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(OneLayer(), [torch.ones(2, 2)])


def test_a_forward_that_is_not_the_classs_is_refused() -> None:
    model = make()
    model.blocks[1].forward = lambda x, debug: x  # type: ignore[method-assign]
    with pytest.raises(ModuleError, match=r"got blocks\.1: TorchScript"):
        apply_activation_checkpointing(model, Block)
    assert not any(is_checkpointed(block) for block in model.blocks)


def test_retained_graphs_several_backward_passes_and_higher_derivatives() -> None:
    plain, model = make(), make()
    apply_activation_checkpointing(model, Block)

    def derivatives(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        x = torch.randn(6, 8, requires_grad=True)
        loss = model(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        loss.backward()
        other = model(x).sum() + model(2 * x).sum()  # two passes before one backward
        other.backward()
        return [first, second, x.grad, *(one.grad for one in model.parameters())]

    for one, other in zip(derivatives(plain), derivatives(model), strict=True):
        assert torch.equal(one, other)
    assert_equal(dict(plain.named_buffers()), dict(model.named_buffers()))


def _equal_over_ranks(rank: int, size: int) -> list[str]:
    """Train in many ways with and without checkpoints; return the names of what differs."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (size,))

    def shard(model: Model, policy: Any, chosen: Callable[[Model], list[nn.Module]], early: bool, mixed: bool) -> Model:
        settings: dict[str, Any] = {"mesh": mesh}
        if mixed:
            settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if policy is not None and early:
            apply_activation_checkpointing(model, policy)
        for unit in chosen(model):
            fully_shard(unit, **settings)
        fully_shard(model, **settings)
        if policy is not None and not early:
            apply_activation_checkpointing(model, policy)
        return model

    def blocks(model: Model) -> list[nn.Module]:
        return list(model.blocks)

    def layers(model: Model) -> list[nn.Module]:
        return [layer for block in model.blocks for layer in (block.inner, block.outer)]

    def result(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(1 + rank)
        for _ in range(2):
            model(torch.randn(6, 8)).square().sum().backward()
        found = {name: one.grad for name, one in model.named_parameters()}
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}
        return {**whole, **dict(model.named_buffers())}

    def no_norms(model: Model) -> Model:
        for block in model.blocks:  # torch has no batch norm of bfloat16 with statistics of float32 on the CPU
            block.norm = block.spread = nn.Identity()
        return model

    wrong = []
    for name, chosen, policy, mixed in [
        ("blocks", blocks, Block, False),
        ("blocks, mixed", blocks, Block, True),
        ("layers in blocks", layers, Block, False),
        ("layers in layers", layers, nn.Linear, False),
        ("root only", lambda model: [], Block, False),
    ]:
        prepare = no_norms if mixed else lambda model: model
        plain = result(shard(prepare(make()), None, chosen, True, mixed))
        for early in (True, False):
            model = shard(prepare(make()), policy, chosen, early, mixed)
            mine = result(model)
            if mine.keys() != plain.keys():
                wrong.append(f"{name}: keys")
            wrong += [f"{name}, {early}: {key}" for key in plain if not torch.equal(plain[key], mine[key])]
            if policy is Block and any(block.calls != 4 for block in model.blocks):
                wrong.append(f"{name}, {early}: not checkpointed")
    model = make()
    apply_activation_checkpointing(model, Block)
    plain, mine = (result(DistributedDataParallel(one, bucket_cap_mb=0.001)) for one in (make(), model))
    wrong += [f"ddp: {key}" for key in plain if not torch.equal(plain[key], mine[key])]
    dist.barrier()
    return wrong


def test_it_changes_no_gradient_of_sharded_and_replicated_modules() -> None:
    assert run_ranks(_equal_over_ranks, 2) == [[], []]


@pytest.mark.parametrize(("fraction", "recomputed"), [(0.0, [0, 1, 2]), (0.5, [0, 1]), (0.7, [0]), (1.0, [])])
def test_a_fraction_of_the_blocks_keeps_its_activations(fraction: float, recomputed: list[int]) -> None:
    model = make()
    assert apply_activation_checkpointing(model, fraction) == [f"blocks.{number}" for number in recomputed]
    remove_activation_checkpointing(model)
    assert not any(is_checkpointed(block) for block in model.blocks)


@pytest.mark.parametrize("wanted", [2.0, -0.5, 1, 3])
def test_a_fraction_beyond_all_blocks_is_refused(wanted: float) -> None:
    with pytest.raises(ConfigError, match=f"a fraction from 0.0 to 1.0, or a policy, got {wanted}"):
        FSDPStrategy(activation_checkpointing=wanted)
    with pytest.raises(ConfigError, match=f"a fraction from 0.0 to 1.0, or a policy, got {wanted}"):
        quiet(activation_checkpointing=wanted)


class Trained(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make()
        self.calls: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).square().mean()

    def on_train_end(self) -> None:
        self.calls = [block.calls for block in self.model.blocks]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_a_trainer_checkpoints_until_its_fit_ends() -> None:
    data = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=6)
    runs = {}
    for wanted in (None, 0.5):
        module = runs[wanted] = Trained()
        torch.manual_seed(1)
        quiet(max_epochs=2, activation_checkpointing=wanted).fit(module, data)
        assert not any(is_checkpointed(block) for block in module.model.blocks)
    assert runs[None].calls == [4, 4, 4]
    assert runs[0.5].calls == [8, 8, 4]
    assert_equal(runs[None].state_dict(), runs[0.5].state_dict())


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 64)
        self.outer = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)).exp().sin())


class Compiled(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Smooth(), Smooth())
        self.kept_bytes = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.blocks(batch[0]).square().mean()
        nodes, seen = [output.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [one for one, _ in node.next_functions]
                if "Compiled" in type(node).__name__:
                    self.kept_bytes += sum(one.nbytes for one in node.saved_tensors if isinstance(one, Tensor))
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_a_fraction_is_the_memory_budget_of_compiled_blocks() -> None:
    runs = {}
    for wanted in (None, 0.0):
        torch._dynamo.reset()
        module = runs[wanted] = Compiled()
        torch.manual_seed(1)
        data = DataLoader(TensorDataset(torch.randn(512, 8)), batch_size=512)
        compiler = {"backend": "aot_eager_decomp_partition"}
        quiet(max_steps=1, activation_checkpointing=wanted, compile=compiler).fit(module, data)
    assert 0 < runs[0.0].kept_bytes < runs[None].kept_bytes / 2
    assert_equal(runs[None].state_dict(), runs[0.0].state_dict())
    assert torch._functorch.config.activation_memory_budget == 1.0


def tiny_t5() -> tuple[Any, dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).train()
    ids = torch.randint(1, 60, (2, 6))
    return model, {"input_ids": ids, "labels": ids, "attention_mask": (ids > 20).long()}


def test_a_cache_of_transformers_is_left_out() -> None:
    pytest.importorskip("transformers")
    gradients = []
    for checkpoints in (False, True):
        model, batch = tiny_t5()
        if checkpoints:
            apply_activation_checkpointing(model, True)
        torch.manual_seed(1)
        model(**batch, use_cache=checkpoints).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_cache_that_has_tokens_is_refused() -> None:
    pytest.importorskip("transformers")
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 8), 0)
    model = make()
    apply_activation_checkpointing(model, True)
    with pytest.raises(ModuleError, match="keys and values of earlier tokens.*DynamicCache that has 6"):
        model.blocks[0](torch.zeros(1, 8), debug=cache)
