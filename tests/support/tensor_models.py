"""Small models for tests of tensor parallelism, in float64, and training of them on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 16, 4, 32

PLAN = {
    "tok": "embedding",
    "blocks.*.attn.w[qkv]": "colwise",
    "blocks.*.attn.wo": "rowwise",
    "blocks.*.mlp.w[13]": "colwise",
    "blocks.*.mlp.w2": "rowwise",
    "head": "colwise_gather_output",
}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Counts heads by -1, so that nothing has to be divided."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(_rotate(q, rope), _rotate(k, rope), v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class CountingAttention(nn.Module):
    """Reads its number of heads, and has biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, self.num_heads, self.head_dim)
        q, k, v = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(_rotate(q, rope), _rotate(k, rope), v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FusedAttention(nn.Module):
    """Computes q, k and v by one layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(_rotate(q, rope), _rotate(k, rope), v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class Together(nn.Module):
    """Attention and MLP side by side in one class, as in GPT-J, with one layer for gate and up.

    Args:
        keys: Heads of keys and values.
        is_eager: Whether it computes the weights of attention, and returns them beside its result.
    """

    def __init__(self, width: int, heads: int, *, keys: int, is_eager: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.n_rep = heads, keys, heads // keys
        self.is_eager, size = is_eager, width // heads
        self.norm = RMSNorm(width)
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        # The gradient of a bias of keys is 0 but for rounding, which AdamW would enlarge.
        self.k, self.v = nn.Linear(width, keys * size, bias=False), nn.Linear(width, keys * size)
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        batch, length, _ = x.shape
        normed = self.norm(x)
        q = self.q(normed).view(batch, length, self.num_heads, -1).transpose(1, 2)
        k, v = (one(normed).view(batch, length, self.num_kv_heads, -1).transpose(1, 2) for one in (self.k, self.v))
        k, v = k.repeat_interleave(self.n_rep, 1), v.repeat_interleave(self.n_rep, 1)
        weights = (q @ k.transpose(-1, -2)).softmax(-1) if self.is_eager else None
        out = F.scaled_dot_product_attention(q, k, v) if weights is None else weights @ v
        gate, up = self.gate_up(normed).chunk(2, -1)
        x = x + self.o(out.transpose(1, 2).reshape(batch, length, -1))
        x += self.down(F.silu(gate) * up)
        return x, weights


class SideBySide(nn.Module):
    """Blocks with attention and MLP in one class.

    Args:
        keys: See `Together`.
        is_eager: See there.
        is_read: Whether the loss reads the weights of attention.
    """

    def __init__(self, *, keys: int = HEADS, is_eager: bool = False, is_read: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Together(WIDTH, HEADS, keys=keys, is_eager=is_eager) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.is_read = is_read

    def forward(self, indices: Tensor) -> Tensor:
        x = self.tok(indices)
        for block in self.blocks:
            x, weights = block(x)
            if self.is_read:
                x = x + weights.mean()
        return self.head(x)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: type[nn.Module]) -> None:
        super().__init__()
        self.n1, self.attn = RMSNorm(width), attention(width, heads)
        self.n2, self.mlp = RMSNorm(width), MLP(width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.n1(x), rope)
        return x + self.gain * self.mlp(self.n2(x))


class Llama(nn.Module):
    """RMSNorm, rotary positions, SwiGLU."""

    def __init__(
        self,
        *,
        tied: bool = False,
        attention: type[nn.Module] = Attention,
        width: int = WIDTH,
        heads: int = HEADS,
        blocks: int = 2,
    ) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.tok = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, heads, attention) for _ in range(blocks)])
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(()))
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.tok(indices) * self.scale
        half = self.head_dim // 2
        turns = 1.0 / 10000 ** (torch.arange(half, dtype=x.dtype) / half)
        angles = torch.arange(indices.shape[1], dtype=x.dtype)[:, None] * turns
        for block in self.blocks:
            x = block(x, (angles.cos(), angles.sin()))
        return self.head(self.norm(x))


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def llama(kind: type[Any] = Llama, **options: Any) -> Any:
    """Return a small model in float64, the same for the same options."""
    torch.manual_seed(0)
    return kind(**options).double()


def tokens(step: int, count: int = 4, length: int = 8) -> tuple[Tensor, Tensor]:
    """Return indices and the next ones, both of shape (count, length)."""
    generator = torch.Generator().manual_seed(100 + step)
    both = torch.randint(0, VOCABULARY, (count, length + 1), generator=generator)
    return both[:, :-1], both[:, 1:]


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), wanted.reshape(-1))
