"""DeepSpeed as users run it: other numbers of processes, activation checkpointing, a whole configuration, a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import Net, global_batch
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import DeepSpeedStrategy
from loopwright.strategies.distributed.clipping import largest_over_ranks

# No parameter is so small that it stays whole.
PARTITIONED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_deepspeed()


class Trained(lw.Module):
    """A net with dropout, some of whose layers are checkpointed in one of several ways."""

    def __init__(self, way: str | None = None, rate: float = 0.0, has_optimizer: bool = True) -> None:
        super().__init__()
        self.net = Net()
        self.extra = nn.Linear(8, 8)
        self.drop = nn.Dropout(rate)
        self.way = way
        self.has_optimizer = has_optimizer
        self.losses: list[Tensor] = []
        self.config: dict[str, Any] = {}

    def on_train_start(self) -> None:
        self.config = getattr(self.trainer.strategy, "config", {})

    def run_part(self, part: Any, x: Tensor) -> Tensor:
        if self.way is None or (self.way != "deepspeed" and not torch.is_grad_enabled()):
            result: Tensor = part(x)
        elif self.way == "deepspeed":
            import deepspeed

            result = deepspeed.checkpointing.checkpoint(part, x)
        else:
            result = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=self.way == "reentrant")
        return result

    def loss_of(self, batch: Any) -> Tensor:
        net = self.net
        x = self.run_part(lambda x: self.drop(net.norm(x).tanh()), net.first(batch[0]))
        x = self.run_part(lambda x: self.extra(x).tanh(), x)
        return nn.functional.mse_loss(net.head(net.tied(net.again(x)).tanh()), batch[1].to(x.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.losses.append(loss.detach())
        norm = getattr(self.trainer.strategy, "global_grad_norm", None)
        if norm is not None:
            assert isinstance(norm, Tensor)
            self.log("norm", norm)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-2) if self.has_optimizer else None


def data() -> TensorDataset:
    return TensorDataset(*map(torch.cat, zip(*[global_batch(number) for number in range(4)], strict=True)))


def fit(
    strategy: Any, size: int, steps: int, *, module: Trained | None = None, ckpt_path: str | None = None, **changes: Any
) -> tuple[lw.Trainer, Trained]:
    arguments = {
        "accelerator": "cpu", "strategy": strategy, "devices": size, "max_steps": steps, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "log_every_n_steps": 1, **changes,
    }  # fmt: skip
    trainer = lw.Trainer(**arguments)
    if module is None:
        torch.manual_seed(3)
        module = Trained()
    trainer.fit(module, *[DataLoader(data(), batch_size=12 // size) for _ in range(2)], ckpt_path=ckpt_path)
    return trainer, module


def engine(stage: int) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(config=PARTITIONED) if stage == 3 else DeepSpeedStrategy(stage=stage)


# --- activation checkpointing --------------------------------------------------------------------------------------

CONTIGUOUS = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 2}
ACTIVATIONS: list[tuple[str, dict[str, Any]]] = [
    ("deepspeed", {"stage": 2, "partition_activations": True}),
    ("deepspeed", {"stage": 1, "cpu_checkpointing": True, "synchronize_checkpoint_boundary": True}),
    ("deepspeed", {"config": {**PARTITIONED, "activation_checkpointing": CONTIGUOUS}}),
    ("deepspeed", {"config": PARTITIONED}),
    ("reentrant", {"config": PARTITIONED}),
    ("not reentrant", {"config": PARTITIONED}),
]


def checkpoint_activations(rank: int, size: int) -> list[Any]:
    import deepspeed

    found = []
    for way, options in ACTIVATIONS:
        losses = []
        for one in (None, way):
            torch.manual_seed(3)
            trainer, module = fit(DeepSpeedStrategy(**options), size, 5, module=Trained(one, rate=0.3))
            losses.append([*torch.stack(module.losses).tolist(), float(trainer.callback_metrics["val"])])
        found.append((losses, deepspeed.checkpointing.is_configured()))
    return found


def test_checkpointed_activations_change_no_loss() -> None:
    for found in run_ranks(checkpoint_activations, 2, connect=False, timeout_s=200):
        for (plain, checkpointed), is_configured in found:
            assert len(plain) == 6
            assert checkpointed == plain
            assert is_configured


def configure_twice(rank: int, size: int) -> list[tuple[bool, bool]]:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    found = []
    for options in ({"partition_activations": True, "synchronize_checkpoint_boundary": True}, {}):
        fabric = lw.Fabric(accelerator="cpu", strategy=DeepSpeedStrategy(**options), devices=1)
        fabric.launch()
        found.append((checkpointing.PARTITION_ACTIVATIONS, checkpointing.SYNCHRONIZE))
        fabric.teardown()
    return found


def test_what_one_run_says_of_activations_ends_with_it() -> None:
    assert run_ranks(configure_twice, 1, connect=False)[0] == [(True, True), (False, False)]


# --- checkpoints and numbers of processes --------------------------------------------------------------------------


def hand_on(rank: int, size: int, folder: str, source: str | None, strategies: list[Any], steps: int) -> list[Any]:
    """Resume in each of the strategies (train, without a source), save, and return the losses."""
    found = []
    for name in strategies:
        strategy = engine(name) if isinstance(name, int) else name
        path = None if source is None else f"{folder}/{source}.ckpt".format(name)
        trainer, module = fit(strategy, size, steps, ckpt_path=path)
        trainer.save_checkpoint(f"{folder}/{name}-on-{size}.ckpt")
        found.append([*torch.stack(module.losses).tolist(), float(trainer.callback_metrics.get("norm", 0))])
    return found


def test_training_goes_on_with_other_numbers_of_processes_and_strategies(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(hand_on, 1, folder, None, ["single_device"], 9, connect=False)
    wanted = torch.load(tmp_path / "single_device-on-1.ckpt", weights_only=True)

    def check(name: str) -> None:
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        for key, value in state["state_dict"].items():
            torch.testing.assert_close(value, wanted["state_dict"][key], rtol=0, atol=1e-6)  # order of additions

    run_ranks(hand_on, 3, folder, None, [1, 2, 3], 3, connect=False, timeout_s=100)
    run_ranks(hand_on, 2, folder, "{}-on-3", [1, 2, 3], 6, connect=False, timeout_s=100)
    for stage, strategies in ((1, ["fsdp"]), (2, ["ddp"]), (3, [2])):
        run_ranks(hand_on, 2, folder, f"{stage}-on-2", strategies, 9, connect=False, timeout_s=100)
    for name in ("fsdp", "ddp", "2"):
        check(f"{name}-on-2")
    run_ranks(hand_on, 1, folder, "3-on-2", ["single_device"], 9, connect=False)
    check("single_device-on-1")


# --- norms ---------------------------------------------------------------------------------------------------------


def find_largest(rank: int, size: int) -> list[float]:
    nan, inf = float("nan"), float("inf")
    rows = ([nan, 1.0], [1.0, nan], [-inf, 2.0], [inf, nan])
    return [largest_over_ranks(torch.tensor(row[rank])).item() for row in rows]


def test_no_nan_is_lost_in_the_largest_gradient() -> None:
    for found in run_ranks(find_largest):
        assert [str(one) for one in found] == ["nan", "nan", "2.0", "nan"]


# --- a whole configuration -----------------------------------------------------------------------------------------

WHOLE = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.999], "eps": 1e-2, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 2, "total_num_steps": "auto"},
    },
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": 100_000,
        "allgather_bucket_size": 100_000,
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def train_by_file(rank: int, size: int, file: str) -> Any:
    trainer, module = fit(
        DeepSpeedStrategy(config=file), size, 8, module=Trained(has_optimizer=False), precision="bf16-mixed",
        gradient_clip_val=0.5, accumulate_grad_batches=2,
    )  # fmt: skip
    keys = [key for key in WHOLE if key.startswith(("train", "gradient"))]
    rates = trainer.lr_scheduler_configs[0].scheduler.inner
    return (
        [module.config[key] for key in keys],
        torch.stack(module.losses).tolist(),
        (rates.total_num_steps, rates.max_lrs),
    )


def test_a_file_with_every_section_runs(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(WHOLE))
    numbers, losses, rates = run_ranks(train_by_file, 2, str(tmp_path / "ds.json"), connect=False, timeout_s=100)[0]
    assert numbers == [24, 6, 2, 0.5]
    assert losses[-1] < losses[0]
    assert rates == (8, [0.02])


# --- a script ------------------------------------------------------------------------------------------------------


def run_script(folder: Path, start: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("deepspeed_script.py")
    paths = os.pathsep.join(str(one) for one in (script.parent, script.parents[3] / "support"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(script), str(folder), start]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.parametrize("start", ["popen", "spawn"])
def test_a_script_trains_resumes_and_names_the_rank_that_failed(start: str, tmp_path: Path) -> None:
    for steps in ("2", "4"):
        done = run_script(tmp_path, start, STEPS=steps)
        assert done.returncode == 0, done.stderr
        assert f"steps {steps}, from {int(steps) - 2}" in done.stdout
    failed = run_script(tmp_path, start, STEPS="6", FAILS="1")
    assert failed.returncode != 0
    assert "rank 1" in failed.stderr
    assert "the weather is bad" in failed.stderr


# --- gradients dealt out in turn -----------------------------------------------------------------------------------


def deal_out(rank: int, size: int, folder: str, precision: str) -> list[Any]:
    """Train layers without padding between them, in both orders, and return what is saved."""
    found = []
    for in_turn in (False, True):
        config = {"zero_optimization": {"stage": 1, "round_robin_gradients": in_turn}}
        strategy = DeepSpeedStrategy(config=config)
        fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision=precision)
        fabric.launch()
        torch.manual_seed(3)
        layers = [nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False)]
        net = nn.Sequential(*layers)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.02))
        for number in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(size * number + rank))
            fabric.backward(nn.functional.mse_loss(model(x), x))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(f"{folder}/{in_turn}.ckpt", {"model": model, "optimizer": optimizer})
        fabric.load(f"{folder}/{in_turn}.ckpt", {"model": model, "optimizer": optimizer})
        saved = torch.load(f"{folder}/{in_turn}.ckpt", weights_only=True)
        moments = [entry["exp_avg"] for _, entry in sorted(saved["optimizer"]["state"].items())]
        found.append([one.tolist() for one in [*saved["model"].values(), *moments]])
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_that_are_sharded_round_robin_keep_their_names(precision: str, tmp_path: Path) -> None:
    straight, in_turn = run_ranks(deal_out, 2, str(tmp_path), precision, connect=False)[0]
    assert len(straight) == 6
    for one, other in zip(straight, in_turn, strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one))
