"""The small transformer that steps.py trains, and how each side splits it over two processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import loopwright as lw

# Any in this file: options, and schedules of torch, which have no common public type.

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """The size of a model, and of a micro-batch of it.

    Attributes:
        name: What the table calls it.
        width: Features of the hidden state.
        blocks: Number of blocks.
        length: Positions of a sequence.
        batch: Sequences of a micro-batch.
        heads: Attention heads.
    """

    name: str
    width: int
    blocks: int
    length: int
    batch: int
    heads: int = 4

    @property
    def numbers(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


class Attention(nn.Module):
    """Causal attention, of as many heads as its matrices have room for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        mixed: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attn(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Gpt(nn.Module):
    """A transformer that predicts the next of `VOCABULARY` tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, shape (batch, length), to logits."""
        x: Tensor = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Step(lw.Module):
    """The same for the Trainer."""

    def __init__(self, gpt: Gpt, mark: Callable[[], object]) -> None:
        super().__init__()
        self.gpt = gpt
        self._mark = mark

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        tokens, targets = batch
        return loss_of(self.gpt(tokens), targets)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the end of the backward passes, once per step."""
        self._mark()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the hand-written loops."""
        return optimizer_of(self)


def make(size: Size) -> Gpt:
    """Return a model that always has the same weights."""
    torch.manual_seed(0)
    return Gpt(size)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of both sides."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(size: Size, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of tokens and targets, always the same ones."""
    generator = torch.Generator().manual_seed(1)
    shape = (size.batch, size.length + 1)
    made = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(count)]
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in made]


# --- tensor parallelism -----------------------------------------------------------------------------------------------

TENSOR_PLAN = {
    "gpt.tok": "embedding",
    "gpt.blocks.*.attn.w[qkv]": "colwise",
    "gpt.blocks.*.attn.wo": "rowwise",
    "gpt.blocks.*.mlp.up": "colwise",
    "gpt.blocks.*.mlp.down": "rowwise",
    "gpt.head": "colwise_gather_output",
}


def parallelize_by_hand(gpt: Gpt, ranks: int) -> Gpt:
    """Split matrices as `TENSOR_PLAN` does, with torch's styles."""
    return parallelize_module(  # type: ignore[return-value]  # it returns the module that it takes
        gpt,
        init_device_mesh("cpu", (ranks,)),
        {
            "tok": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.attn.wq": ColwiseParallel(),
            "blocks.*.attn.wk": ColwiseParallel(),
            "blocks.*.attn.wv": ColwiseParallel(),
            "blocks.*.attn.wo": RowwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )


# --- pipeline stages --------------------------------------------------------------------------------------------------


class HalfByHand(nn.Module):
    """One of two stages: the modules of a model before or after the middle of its blocks."""

    def __init__(self, gpt: Gpt, rank: int) -> None:
        super().__init__()
        middle = len(gpt.blocks) // 2
        self.tok = gpt.tok if rank == 0 else None
        self.blocks = gpt.blocks[:middle] if rank == 0 else gpt.blocks[middle:]
        self.norm = None if rank == 0 else gpt.norm
        self.head = None if rank == 0 else gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to a hidden state, or that to logits."""
        if self.tok is not None:
            x = self.tok(x)
        for block in self.blocks:
            x = block(x)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


def schedule_by_hand(stage: HalfByHand, count: int) -> Any:
    """Return torch's 1F1B schedule over two stages, for windows of `count` micro-batches."""
    rank = dist.get_rank()
    return Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu")), n_microbatches=count, loss_fn=loss_of)
