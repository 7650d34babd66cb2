"""Checkpoints without frozen parameters on two ranks: a resumed run is the uninterrupted run of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.strategies import DeepSpeedStrategy, FSDPStrategy

PARTITIONED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
STRATEGIES: dict[str, Callable[[], Any]] = {  # Any: names and instances
    "auto": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={Block}),
    "fsdp sharded": lambda: FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded"),
    "deepspeed_stage_1": lambda: DeepSpeedStrategy(stage=1),
    "deepspeed_stage_3": lambda: DeepSpeedStrategy(config=PARTITIONED),
}
TRAINED = [f"blocks.{index}.{name}.weight" for index in range(2) for name in ("down", "up")]
BUFFERS = [f"blocks.{index}.count" for index in range(2)]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_deepspeed()


class Block(nn.Module):
    """A frozen layer with a trained adapter of low rank in the same unit, as LoRA has it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + (self.base(x) + self.up(self.down(x))).tanh()


class Adapted(lw.Module):
    """Built in configure_model from the same base by every run."""

    exclude_frozen_parameters = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks: nn.ModuleList | None = None
        self.seen: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.blocks is None:
            torch.manual_seed(4)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.blocks is not None
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return (x - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.05, eps=1e-3)


class Read(lw.Callback):
    """Reads all weights at the end of training."""

    def on_train_end(self, trainer: lw.Trainer, pl_module: Any) -> None:
        strategy = trainer.strategy
        run = trainer.latest_run()
        assert run is not None
        state = strategy.gather_state(strategy.module_state_dict(run.model))
        pl_module.seen = {name: value.clone() for name, value in state.items()} if trainer.is_global_zero else {}


def fit(name: str, size: int, max_steps: int, ckpt_path: Path | None = None) -> tuple[lw.Trainer, Adapted]:
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy=STRATEGIES[name](), max_steps=max_steps, callbacks=[Read()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Adapted()
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=4 // size), ckpt_path=ckpt_path)
    return trainer, module


def train(rank: int, size: int, name: str, folder: str) -> dict[str, Tensor]:
    """Train two steps, save, resume to four steps, and return all weights."""
    half = Path(folder, f"{name}-half.ckpt")
    trainer, _ = fit(name, size, 2)
    trainer.save_checkpoint(half)
    trainer.save_checkpoint(Path(folder, f"{name}-weights.ckpt"), weights_only=True)
    trainer, module = fit(name, size, 4, half)
    return module.seen


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return fit("auto", 1, 4)[1].seen


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "auto"])
def test_a_resumed_run_is_that_of_one_process(name: str, tmp_path: Path, expected: dict[str, Tensor]) -> None:
    found = run_ranks(train, 2, name, str(tmp_path), connect=False)[0]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if "base" in key or "count" in key:
            assert torch.equal(found[key], value), key
        else:
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=key)
    for kind in ("half", "weights"):
        path = tmp_path / f"{name}-{kind}.ckpt"
        assert path.is_dir() == (name == "fsdp sharded")
        saved = storage.load(path)["state_dict"]
        assert sorted(saved) == sorted(TRAINED + BUFFERS)
        loaded = Adapted.load_from_checkpoint(path).state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in expected.items() if "base" in key)
        assert all(torch.equal(loaded[key], value) for key, value in saved.items())


def test_other_strategies_resume_it(tmp_path: Path, expected: dict[str, Tensor]) -> None:
    trainer, _ = fit("auto", 1, 2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert sorted(torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]) == sorted(TRAINED + BUFFERS)
    for name in ("ddp", "fsdp", "deepspeed_stage_3"):
        found = run_ranks(resume, 2, name, str(tmp_path), connect=False)[0]
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=f"{name}: {key}")


def resume(rank: int, size: int, name: str, folder: str) -> dict[str, Tensor]:
    return fit(name, size, 4, Path(folder, "half.ckpt"))[1].seen
