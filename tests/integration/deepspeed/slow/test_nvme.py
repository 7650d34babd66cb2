"""Optimizer and parameters of stage 3 on a disk: what is trained without it, files that are written, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import DeepSpeedStrategy
from loopwright.strategies.deepspeed.builds import build, missing_for


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Build for real: for many minutes, once on a machine."""
    missing = missing_for(["async_io"])
    if missing:
        pytest.skip(f"there is no {', '.join(missing)} {', '.join(missing.values())}")
    for name, maker in (("pin_memory", "PinMemoryBuilder"), ("async_io", "AsyncIOBuilder")):
        build(name, f"deepspeed.ops.op_builder:{maker}")
    import_deepspeed()


WIDTH = 1024
# A weight changes by 0.04. The norm that gradients are clipped by is added up in another order on a disk, and where 16
# bits are communicated, ranks add up what one process has not cut into parts.
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 4e-3}


class Layer(nn.Linear):
    """Begins with numbers that 16 bits can hold: stage 3 makes parameters in the number format of the run."""

    def reset_parameters(self) -> None:
        for one in (self.weight, self.bias):
            nn.init.zeros_(one)
            one.data += ((torch.arange(one.numel()) % 7 - 3) / 64).reshape(one.shape)


class Wide(lw.Module):
    """A net whose weights are large enough for the disk also when two ranks share them: a mebibyte in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(Layer(WIDTH, WIDTH + 101), nn.Tanh(), Layer(WIDTH + 101, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.net is not None
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(*(torch.randn(16, WIDTH, generator=generator) for _ in range(2)))


def engine(folder: str, *, optimizer: str = "none", parameters: str = "none") -> DeepSpeedStrategy:
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if optimizer != "none":
        zero["offload_optimizer"] = {"device": optimizer, "nvme_path": folder, "buffer_count": 4}
    if parameters != "none":
        zero["offload_param"] = {
            "device": parameters, "nvme_path": folder, "buffer_count": 5, "buffer_size": 700_000, "max_in_cpu": 0,
        }  # fmt: skip
    return DeepSpeedStrategy(config={"zero_optimization": zero})


def fit(path: str, strategy: Any, size: int, steps: int, precision: str, ckpt_path: str | None = None) -> None:
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, max_steps=steps, logger=False, precision=precision,
        accumulate_grad_batches=2, gradient_clip_val=0.5, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Wide(), DataLoader(data(), batch_size=4 // size), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)


def on_ranks(rank: int, size: int, folder: str, precision: str) -> list[str]:
    disk = f"{folder}/disk"
    kinds: dict[str, dict[str, str]] = {
        "memory": {"optimizer": "cpu"},
        "optimizer": {"optimizer": "nvme"},
        "both": {"optimizer": "nvme", "parameters": "nvme"},
    }
    for kind, places in kinds.items():
        fit(f"{folder}/{kind}-4.ckpt", engine(disk, **places), size, 4, precision)
        fit(f"{folder}/{kind}-2.ckpt", engine(disk, **places), size, 2, precision)
        fit(f"{folder}/{kind}-again.ckpt", engine(disk, **places), size, 4, precision, f"{folder}/{kind}-2.ckpt")
    fit(f"{folder}/memory-to-disk.ckpt", engine(disk, **kinds["both"]), size, 4, precision, f"{folder}/memory-2.ckpt")
    fit(f"{folder}/disk-to-ddp.ckpt", "ddp", size, 4, precision, f"{folder}/both-2.ckpt")
    return sorted(str(file.relative_to(disk)) for file in Path(disk).rglob("*.swp") if file.stat().st_size)


def alone(rank: int, size: int, folder: str, precision: str) -> None:
    fit(f"{folder}/wanted.ckpt", "single_device", 1, 4, precision)


def content(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.ckpt", weights_only=True)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_disk_changes_nothing_in_what_is_trained(precision: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    run_ranks(alone, 1, str(tmp_path), precision, connect=False)
    files = run_ranks(on_ranks, 2, str(tmp_path), precision, connect=False, timeout_s=250)[0]
    for kind in ("optimizer", "exp_avg", "exp_avg_sq"):
        assert any(kind in file for file in files)
    assert any("params/rank1" in file for file in files)
    memory, wanted = (content(tmp_path, name)["state_dict"] for name in ("memory-4", "wanted"))
    assert distance(memory, wanted) < TOLERANCE[precision]
    for kind in ("optimizer", "both"):
        whole, again = content(tmp_path, f"{kind}-4"), content(tmp_path, f"{kind}-again")
        assert distance(whole["state_dict"], memory) < TOLERANCE[precision]
        assert distance(whole["state_dict"], again["state_dict"]) == 0
        states = [one["optimizer_states"][0]["state"] for one in (whole, again)]
        assert len(states[0]) == 4
        for number, entry in states[0].items():
            assert entry["step"] == 4
            assert all(
                torch.equal(torch.as_tensor(entry[key]), torch.as_tensor(states[1][number][key])) for key in entry
            )
    assert distance(content(tmp_path, "memory-to-disk")["state_dict"], memory) < TOLERANCE[precision]
    assert distance(content(tmp_path, "disk-to-ddp")["state_dict"], wanted) < TOLERANCE[precision]
