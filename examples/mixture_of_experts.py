"""Train a small transformer with mixtures of experts on the source of Python's standard library.

    python examples/mixture_of_experts.py

On two processes, each holds half of the experts, and tokens travel to them and back:

    python examples/mixture_of_experts.py --strategy mesh:fsdp=2,ep=2 --devices 2
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw

BLOCK_SIZE = 64  # bytes that the model sees
HELD_OUT_FILE_EVERY = 20
VALIDATION_WINDOWS = 256


def windows(files: list[Path]) -> TensorDataset:
    """Return the files' bytes in windows of BLOCK_SIZE inputs and the byte after them, uint8."""
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    return TensorDataset(text.unfold(0, BLOCK_SIZE + 1, BLOCK_SIZE))


class Block(nn.Module):
    """Attention to earlier bytes, then experts, each with a norm and a residual connection."""

    def __init__(self, dim: int, heads: int, num_experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm_2 = nn.LayerNorm(dim)
        self.moe = lw.Experts(dim, 2 * dim, num_experts, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        experts: Tensor = self.moe(self.norm_2(x))
        return x + experts


class MixtureOfExperts(lw.Module):
    """A byte-level language model whose feed-forward layers are mixtures of experts."""

    def __init__(self, dim: int = 64, heads: int = 4, num_blocks: int = 2, num_experts: int = 8) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, dim)
        self.position = nn.Embedding(BLOCK_SIZE, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, num_experts) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256)

    def loss(self, batch: list[Tensor]) -> Tensor:
        text = batch[0].long()
        x = self.byte(text[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # 1 where all experts get equally many tokens; without it the router soon prefers a few of them.
        losses = [one.balance_loss for one in self.modules() if isinstance(one, lw.Experts)]
        balance = torch.stack([one for one in losses if one is not None]).mean()
        self.log_dict({"loss": loss, "balance": balance}, prog_bar=True)
        return loss + 0.01 * balance

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return lw.optim.adamw(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="number of optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of text per batch and device")
    parser.add_argument("--devices", default="1", help="number of devices")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, mesh:fsdp=2,ep=2, ...")
    parser.add_argument("--accelerator", default="cpu", help="cpu, cuda or auto")
    args = parser.parse_args()

    lw.seed_everything(1, verbose=False)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = windows(files[::HELD_OUT_FILE_EVERY])
    some = torch.utils.data.Subset(held_out, range(0, len(held_out), max(1, len(held_out) // VALIDATION_WINDOWS)))
    train = windows([path for index, path in enumerate(files) if index % HELD_OUT_FILE_EVERY])

    trainer = lw.Trainer(
        max_steps=args.steps,
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        gradient_clip_val=1.0,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        MixtureOfExperts(),
        DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True),
        DataLoader(some, batch_size=args.batch_size),
    )
    metrics = trainer.callback_metrics
    bits = float(metrics["val_loss"]) / math.log(2)
    trainer.print(f"{bits:.2f} bits per byte on files never seen; balance of the experts {metrics['balance']:.2f}")


if __name__ == "__main__":
    main()
