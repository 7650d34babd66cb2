"""DeepSpeed's own Adam on the host, which a compiler builds: the weights of one process, and checkpoints of others."""

from __future__ import annotations

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
from loopwright.strategies.deepspeed.builds import build, is_built

# cpu_adam adds in another order, and with multiplications that are not rounded before.
TOLERANCE = 2e-5


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Build for real: for minutes, once on a machine."""
    build("cpu_adam", "deepspeed.ops.op_builder:CPUAdamBuilder")
    assert is_built("cpu_adam")
    import_deepspeed()


class Trained(lw.Module):
    """A net with two parameter groups; the optimizer is that of the configuration, of the host, or torch's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net: Net | None = None
        self.kind = kind

    def configure_model(self) -> None:
        self.net = self.net or Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.net is not None
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        if self.kind == "config":
            return None
        last = self.net.head.bias
        groups = [
            {"params": [one for one in self.net.parameters() if one is not last]},
            {"params": [last], "lr": 0.01, "weight_decay": 0.0},
        ]
        if self.kind == "torch":
            return torch.optim.AdamW(groups, lr=0.02, eps=1e-2, weight_decay=0.1)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=0.02, eps=1e-2, weight_decay=0.1)


def data() -> TensorDataset:
    return TensorDataset(*map(torch.cat, zip(*[global_batch(number) for number in range(4)], strict=True)))


def fit(path: str, strategy: Any, size: int, steps: int, kind: str, ckpt_path: str | None = None) -> None:
    """Train with accumulation and clipping, and leave a checkpoint."""
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, max_steps=steps, logger=False, accumulate_grad_batches=2,
        gradient_clip_val=0.3, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=True,
    )  # fmt: skip
    trainer.fit(Trained(kind), DataLoader(data(), batch_size=12 // size), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)


def engine(stage: int) -> DeepSpeedStrategy:
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return DeepSpeedStrategy(config={"zero_optimization": zero})


def on_ranks(rank: int, size: int, folder: str) -> None:
    for stage in (1, 2, 3):
        fit(f"{folder}/{stage}-6.ckpt", engine(stage), size, 6, "host")
        fit(f"{folder}/{stage}-3.ckpt", engine(stage), size, 3, "host")
        fit(f"{folder}/{stage}-again.ckpt", engine(stage), size, 6, "host", f"{folder}/{stage}-3.ckpt")
    fit(f"{folder}/ddp-3.ckpt", "ddp", size, 3, "torch")
    for stage in (1, 3):
        fit(f"{folder}/ddp-to-{stage}.ckpt", engine(stage), size, 6, "host", f"{folder}/ddp-3.ckpt")
        fit(f"{folder}/{stage}-to-ddp.ckpt", "ddp", size, 6, "torch", f"{folder}/{stage}-3.ckpt")
        fit(f"{folder}/{stage}-to-torch.ckpt", engine(stage), size, 6, "torch", f"{folder}/{stage}-3.ckpt")


def alone(rank: int, size: int, folder: str) -> None:
    fit(f"{folder}/wanted.ckpt", "single_device", 1, 6, "torch")


def content(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.ckpt", weights_only=True)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_adam_of_the_host_trains_as_one_process_does_and_its_checkpoints_are_those_of_others(tmp_path: Path) -> None:
    run_ranks(alone, 1, str(tmp_path), connect=False)
    run_ranks(on_ranks, 2, str(tmp_path), connect=False, timeout_s=200)
    wanted = content(tmp_path, "wanted")
    names = [f"{stage}-6" for stage in (1, 2, 3)]
    names += [name for stage in (1, 3) for name in (f"ddp-to-{stage}", f"{stage}-to-ddp", f"{stage}-to-torch")]
    found = {name: distance(content(tmp_path, name)["state_dict"], wanted["state_dict"]) for name in names}
    assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}
    for stage in (1, 2, 3):
        whole, again = content(tmp_path, f"{stage}-6"), content(tmp_path, f"{stage}-again")
        assert distance(whole["state_dict"], again["state_dict"]) == 0
        for number, entry in whole["optimizer_states"][0]["state"].items():
            other, torchs = (one["optimizer_states"][0]["state"][number] for one in (again, wanted))
            assert entry["step"] == other["step"] == torchs["step"] == 6
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(entry[key], other[key])
                assert (entry[key] - torchs[key]).abs().max() < TOLERANCE


# --- the configuration's own ---------------------------------------------------------------------------------------


def by_config(rank: int, size: int, folder: str, kind: str) -> None:
    config = {
        "optimizer": {"type": kind, "params": {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1}},
        "zero_force_ds_cpu_optimizer": True,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    fit(f"{folder}/{kind}.ckpt", DeepSpeedStrategy(config=config), size, 4, "config")


def by_hand(adam_w_mode: bool) -> dict[str, Tensor]:
    """Train with torch's optimizer and nothing else."""
    net = Net()
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = kind(net.parameters(), lr=0.02, eps=1e-2, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            x, y = global_batch((2 * step + part) % 4)
            (nn.functional.mse_loss(net(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
    return dict(net.state_dict())


def alone_by_hand(rank: int, size: int, folder: str) -> None:
    torch.save(by_hand(adam_w_mode=True), f"{folder}/by-hand.pt")


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])  # DeepSpeed's "Adam" is AdamW
def test_a_configuration_can_ask_for_it(kind: str, tmp_path: Path) -> None:
    run_ranks(alone_by_hand, 1, str(tmp_path), connect=False)
    run_ranks(by_config, 2, str(tmp_path), kind, connect=False)
    found = {name.removeprefix("net."): one for name, one in content(tmp_path, kind)["state_dict"].items()}
    assert distance(found, torch.load(tmp_path / "by-hand.pt", weights_only=True)) < TOLERANCE
