"""First values of a model that is built in `init_module` or `configure_model`: those of one process, bit for bit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.errors import ModuleError
from loopwright.strategies import DeepSpeedStrategy, FSDPStrategy

# Any in this file: libraries without types, and results that travel between processes.

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
    "deepspeed_stage_1": lambda: DeepSpeedStrategy(stage=1),
    "deepspeed_stage_3": lambda: DeepSpeedStrategy(stage=3),
}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import once, and not in every forked process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_deepspeed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

        assert peft


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Applied(nn.Module):
    """Initialised by `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Parent(Applied):
    """Changes its children's parameters after they were made, in all the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.blocks
        nn.init.trunc_normal_(first.up.weight, std=0.5)
        nn.init.orthogonal_(first.down.weight)
        with torch.no_grad():
            second.up.weight.mul_(0.5)
            second.down.weight.copy_(torch.arange(128.0).view(8, 16))
            second.up.bias.zero_()
            second.norm.weight.add_(torch.rand(8))
        second.norm.bias.data = torch.full((8,), 0.25)
        first.norm.bias.data.uniform_(-1, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.add_(0.125)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", self.embedding.weight.detach().mean(0))
        skewed, _ = torch.linalg.qr(torch.randn(8, 8))
        self.skewed = nn.Parameter(skewed)  # not contiguous
        other = Block()
        second.load_state_dict(other.state_dict())
        first.known = [self.skewed, second.up.weight]  # of modules that get their values before and after it


class Language(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def gpt2() -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return AutoModelForCausalLM.from_config(config)


def llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))


def adapted(net: Any, target: str, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about GPT-2's layers, and of transformers about what peft asks
        return get_peft_model(net, LoraConfig(r=2, target_modules=[target], **options))


def loaded(folder: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder)


def models(folder: str) -> dict[str, Callable[[], nn.Module]]:
    return {
        "applied": Applied,
        "parent": Parent,
        "gpt2": lambda: Language(gpt2()),
        "llama with adapters": lambda: Language(adapted(llama(), "q_proj")),
        "gpt2 of a folder, with adapters": lambda: Language(adapted(loaded(folder), "c_attn")),
    }


def build(rank: int, size: int, name: str, folder: str, precision: str = "32-true") -> dict[str, Any]:
    """Return the state of each model and the random number that comes after it; on rank 0."""
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=STRATEGIES[name](), precision=precision)
    fabric.launch()
    built = {}
    for kind, make in models(folder).items():
        torch.manual_seed(5)
        with fabric.init_module():
            net = make()
        drawn = float(torch.rand(()))
        # Made before there are any values: it is to step what takes the place of these parameters.
        optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1)
        running = fabric.prepare_module(net)
        (stepped,) = fabric.prepare_optimizers(optimizer)
        if kind == "parent":
            first, second = net.blocks
            is_ours = first.known[1] is second.up.weight or name == "fsdp"  # there a tensor is replaced a second time
            assert is_ours, "an attribute holds a parameter that was replaced"
        groups = [one for group in stepped.param_groups for one in group["params"]]
        own = {id(one) for one in net.parameters()} if not name.startswith("deepspeed") else set()
        assert name.startswith("deepspeed") or all(id(one) in own for one in groups)
        state = fabric.strategy.gather_state(fabric.strategy.module_state_dict(running))
        built[kind] = (state, drawn) if rank == 0 else None
        del running, optimizer, stepped, net
    return built


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What one process builds without any strategy, and the folder of a saved model."""
    folder = str(tmp_path_factory.mktemp("saved") / "gpt2")
    torch.manual_seed(3)
    gpt2().save_pretrained(folder)
    assert not Parent().skewed.is_contiguous()
    built = {}
    for kind, make in models(folder).items():
        torch.manual_seed(5)
        built[kind] = (make().state_dict(), float(torch.rand(())))
    assert float(built["applied"][0]["embedding.weight"].std()) < 0.03
    return folder, built


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "32-true") for name in STRATEGIES), ("deepspeed_stage_3", "bf16-mixed")]
)
def test_values_are_those_of_one_process(name: str, precision: str, alone: tuple[str, dict[str, Any]]) -> None:
    folder, wanted = alone
    found = run_ranks(build, 2, name, folder, precision, connect=False)[0]
    for kind, (state, drawn) in wanted.items():
        theirs, later = found[kind]
        assert later == drawn, f"{kind} drew other random numbers"
        assert theirs.keys() == state.keys(), kind
        for key, value in state.items():
            # Frozen parameters have 16 bits: the engine keeps float32 of those that are trained.
            is_frozen = precision == "bf16-mixed" and "adapters" in kind and "lora_" not in key
            exact = value.bfloat16().float() if is_frozen and value.is_floating_point() else value
            assert theirs[key].dtype == exact.dtype, f"{kind}: {key}"
            assert torch.equal(theirs[key], exact), f"{kind}: {key}"


# --- configure_model, several times -----------------------------------------------------------------------------------


class Built(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.net: nn.Module | None = None
        self.head: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            nn.init.normal_(self.net[0].weight, std=0.02)
        elif self.head is None:
            self.head = nn.Linear(8, 8)
            nn.init.zeros_(self.head.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.net is not None
        outputs = self.net(self.before(batch[0]))
        outputs = outputs if self.head is None else self.head(outputs)
        return outputs.square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_in_turn(rank: int, size: int, name: str | None, folder: str) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    strategy = STRATEGIES[name]() if name else "auto"
    torch.manual_seed(5)
    module = Built()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x), batch_size=4 // size)
    states = []
    for number in range(2):  # fit trains a layer that validate did not have
        arguments = {**quiet, "enable_model_summary": False, "accelerator": "cpu", "devices": size}
        trainer = lw.Trainer(strategy=STRATEGIES[name]() if name else strategy, **arguments)
        if number == 0:
            trainer.validate(module, loader, verbose=False)
        trainer.fit(module, loader, loader)
        file = Path(folder, f"{name}-{number}.ckpt")
        trainer.save_checkpoint(file)
        if rank == 0:
            states.append(torch.load(file)["state_dict"])
    return states


def test_a_model_is_built_in_several_runs_of_one_module(tmp_path: Path) -> None:
    wanted = run_ranks(run_in_turn, 1, None, str(tmp_path), connect=False)[0]
    found = run_ranks(run_in_turn, 2, "deepspeed_stage_3", str(tmp_path), connect=False)[0]
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            # Two ranks add up halves of the batch in another order.
            torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-7, msg=f"{key} after fit {number}")


def add_after_sharding(rank: int, size: int, folder: str) -> str:
    with pytest.raises(ModuleError) as raised:
        run_in_turn(rank, size, "fsdp", folder)
    return str(raised.value)


def test_what_a_sharded_module_has_got_since_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(add_after_sharding, 2, str(tmp_path), connect=False):
        assert (
            "Expected the parameters of Built as sharded in an earlier run, got new parameters: head.weight, head.bias."
            in message
        )


# --- what cannot have values ------------------------------------------------------------------------------------------


def refuse(rank: int, size: int) -> list[str]:
    import deepspeed

    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=STRATEGIES["deepspeed_stage_3"]())
    fabric.launch()
    messages = []

    def partitioned() -> nn.Module:
        with deepspeed.zero.Init():
            return nn.Sequential(nn.Linear(4, 4))

    def scalar() -> nn.Module:
        module = nn.Linear(4, 4)
        module.scale = nn.Parameter(torch.tensor(1.0))
        return module

    def changed() -> nn.Module:
        return nn.Linear(4, 4)

    for make in (partitioned, scalar, changed):
        with fabric.init_module():
            module = make()
        if make is changed:
            nn.init.zeros_(module.weight)
        with pytest.raises(ModuleError) as raised:
            fabric.prepare_module(module)
        messages.append(str(raised.value))
    return messages


def test_what_would_lose_values_is_refused_on_every_rank() -> None:
    for messages in run_ranks(refuse, 2, connect=False):
        assert "got partitioned parameters without values: 0.weight, 0.bias" in messages[0]
        assert "remove deepspeed.zero.Init" in messages[0]
        assert "in Linear for DeepSpeed, got parameters of shape (): scale" in messages[1]
        assert "weight changed, moved or copied after init_module() ended" in messages[2]
