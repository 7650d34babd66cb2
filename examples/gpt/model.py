"""A GPT over bytes, written plainly as one `lw.Module`; examples/gpt/train.py trains it.

The vocabulary is the 256 byte values, without a tokenizer. A loss in bits per byte is comparable with any other model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import loopwright as lw

VOCABULARY = 256


class Block(nn.Module):
    """One transformer layer: attention, then a two-layer MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.network_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape; a position attends only to itself and earlier positions."""
        batch, time, width = x.shape
        # (batch, time, 3 * width) -> three times (batch, heads, time, width / heads)
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.network(self.network_norm(x))
        return out


class GPT(lw.Module):
    """Predict the next byte.

    Args:
        block_size: Maximum context length, in bytes.
        layers: Number of transformer layers.
        heads: Number of attention heads per layer; must divide `width`.
        width: Size of the hidden state of one position.
        lr: Learning rate after the warm-up.
        warmup_steps: Optimizer steps over which the learning rate grows from zero.
    """

    def __init__(
        self,
        block_size: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        lr: float = 3e-3,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.block_size = block_size
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.byte_embedding.weight  # tied weights
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Projections into the residual stream start with a smaller scale, the more layers there are.
                is_residual = name.endswith(("attention_out.weight", "network.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_residual else 0.02)

    def forward(self, bytes_in: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the logits of each next byte: (batch, time) int64 -> (batch, time, 256).

        With strategy="mesh:cp=2" each rank computes a part of the positions, and is given their numbers: (1, time).
        """
        if position_ids is None:
            position_ids = torch.arange(bytes_in.shape[1], device=bytes_in.device)
        x = self.byte_embedding(bytes_in) + self.position_embedding(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte of (batch, time + 1) bytes."""
        windows = windows.long()
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, batch_size=len(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        # Weight decay only for matrices, not for gains and biases.
        rules = [(lambda name, parameter: parameter.ndim == 2, {"weight_decay": 0.1})]
        groups = lw.optim.group_parameters(self, rules, others={"weight_decay": 0.0})
        optimizer = lw.optim.adamw(groups, lr=self.lr, betas=(0.9, 0.95))
        total_steps = self.trainer.estimated_stepping_batches
        schedule = lw.schedules.cosine(optimizer, total_steps, warmup=self.warmup_steps, min_lr_ratio=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "name": "lr"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 0.7, seed: int = 0) -> bytes:
        """Return `prompt` followed by `length` bytes sampled from the model; the same seed gives the same text."""
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt)], device=self.device)
        for _ in range(length):
            logits = self(text[:, -self.block_size :])[0, -1].float().cpu()
            chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
            text = torch.cat([text, chosen.to(text.device)[None]], dim=1)
        self.train(was_training)
        return bytes(text[0].tolist())
