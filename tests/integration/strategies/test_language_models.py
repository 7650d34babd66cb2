"""Language models that `configure_model` builds: first values and four steps of one process, on two ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.strategies.test_initial_values import adapted, llama
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import DeepSpeedStrategy, FSDPStrategy

# Any in this file: libraries without types, and results that travel between processes.

PARTITIONED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": lambda **options: lw.strategies.DDPStrategy(**options),
    "fsdp": lambda **options: FSDPStrategy(auto_wrap_policy={"LlamaDecoderLayer"}, **options),
    "deepspeed_stage_3": lambda **options: DeepSpeedStrategy(config=PARTITIONED, **options),
}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import once, and not in every forked process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_deepspeed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        from transformers import LlamaForCausalLM  # noqa: F401

        assert peft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a saved model."""
    path = tmp_path_factory.mktemp("saved") / "llama"
    torch.manual_seed(3)
    llama().save_pretrained(path)
    return path


def resized(folder: Path) -> nn.Module:
    """Return a model of the folder with more tokens."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(20, mean_resizing=False)
    return model  # type: ignore[no-any-return]


class Language(lw.Module):
    """Trains a model for the next token; reads its weights before and after."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        self.kind = kind
        self.folder = folder
        self.net: Any = None
        self.seen: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        if self.net is None:
            made = llama() if self.kind.startswith("new") else resized(self.folder)
            is_adapted = self.kind.endswith("with adapters")
            self.net = adapted(made, "q_proj", use_dora="resized" in self.kind) if is_adapted else made

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        logits = self.net(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2, eps=1e-4)

    def read(self) -> None:
        run = self.trainer.latest_run()
        state = self.trainer.strategy.gather_state(self.trainer.strategy.module_state_dict(run.model))
        if self.trainer.is_global_zero:
            self.seen.append({name: value.clone() for name, value in state.items()})

    on_train_start = on_train_end = read


def fit(strategy: Any, size: int, kind: str, folder: Path) -> Language:
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(5)
    module = Language(kind, folder)
    tokens = torch.randint(0, 16, (16, 8), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=4 // size))
    return module


def train(rank: int, size: int, name: str, kind: str, folder: Path) -> list[dict[str, Tensor]]:
    return fit(STRATEGIES[name](), size, kind, folder).seen


@pytest.mark.parametrize("kind", ["new", "resized with adapters"])
def test_first_values_and_four_steps_are_those_of_one_process(kind: str, folder: Path) -> None:
    first, last = fit("auto", 1, kind, folder).seen
    changes = [float((last[name] - value).abs().max()) for name, value in first.items()]
    assert max(changes) > 1e-3, "nothing is trained"
    for name in STRATEGIES:
        theirs, trained = run_ranks(train, 2, name, kind, folder, connect=False)[0]
        assert theirs.keys() == first.keys()
        for key, value in first.items():
            assert torch.equal(theirs[key], value), f"{name}: {key}"
            # Two ranks add up halves of the batch in another order.
            torch.testing.assert_close(trained[key], last[key], rtol=0, atol=2e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize("name", STRATEGIES)
def test_processes_of_fork_return_the_model_that_they_built(name: str, folder: Path) -> None:
    _, last = fit("auto", 1, "new with adapters", folder).seen
    module = fit(STRATEGIES[name](start_method="fork"), 2, "new with adapters", folder)
    own = module.state_dict()
    assert own.keys() == last.keys()
    for key, value in last.items():
        torch.testing.assert_close(own[key], value, rtol=0, atol=2e-6, msg=key)


def angles(net: Any) -> list[list[float]]:
    """Return cosines and sines at position 500."""
    found = net.model.rotary_emb(torch.zeros(1, 1, 8), torch.tensor([[500]]))
    return [one.flatten().tolist() for one in found]


def rotate(rank: int, size: int, folder: Path) -> dict[str, list[list[float]]]:
    """Return the angles after a fit in bf16-true with each strategy, and of a Fabric."""
    mesh = lw.strategies.ModelParallelStrategy(tensor_parallel_size=2)
    seen = {}
    for name, strategy in {"auto": "auto", **{key: make() for key, make in STRATEGIES.items()}, "mesh": mesh}.items():
        if (name == "auto") is not (size == 1):
            continue
        module = Language("new", folder)
        trainer = lw.Trainer(
            accelerator="cpu", devices=size, strategy=strategy, precision="bf16-true", max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 8, dtype=torch.long)), batch_size=2))
        assert module.net.lm_head.weight.dtype is torch.bfloat16, name
        seen[name] = angles(module.net)
    if size == 1:
        fabric = lw.Fabric(accelerator="cpu", precision="bf16-true")
        seen["fabric"] = angles(fabric.setup_module(llama()).module)
    return seen


def test_rotary_angles_in_bfloat16_are_those_of_a_model_that_was_loaded_in_it(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = angles(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    assert expected != angles(llama().bfloat16())
    for size in (1, 2):
        for name, found in run_ranks(rotate, size, folder, connect=False)[0].items():
            assert found == expected, name
