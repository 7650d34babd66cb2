"""A small causal language model whose sequences can be shared by ranks, in the Trainer, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tensor_models import VOCABULARY, Llama
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import loopwright as lw

LENGTH = 8


class Positioned(Llama):
    """Takes positions beside tokens, and rotates by them; without them it counts them itself."""

    def forward(self, indices: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = F.dropout(self.tok(indices), self.dropout, self.training)
        if position_ids is None:
            position_ids = torch.arange(indices.shape[1])[None]
        half = self.head_dim // 2
        turns = 1.0 / 10000 ** (torch.arange(half, dtype=x.dtype) / half)
        angles = position_ids[0, :, None] * turns
        for block in self.blocks:
            x = block(x, (angles.cos(), angles.sin()))
        return self.head(self.norm(x))

    dropout = 0.0


class Counting(Positioned):
    """Counts positions from the length of its input."""

    def forward(self, indices: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(indices)


class Language(lw.Module):
    """Trains a model on the mean cross entropy of the next tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, following = batch["tokens"], batch["following"]
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten())
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["tokens"])
        self.log("val", F.cross_entropy(logits.flatten(0, 1), batch["following"].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Summed(Language):
    """Returns the sum over tokens that count, and their number; the step sees parts or full sequences."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, following = batch["tokens"], batch["following"]
        following = following.masked_fill(tokens == 3, -100)
        total = F.cross_entropy(
            self.model(tokens).flatten(0, 1), following.flatten(), ignore_index=-100, reduction="sum"
        )
        self.losses.append(total.item())
        return lw.Loss(total, (following != -100).sum())


class Sentences(Dataset[dict[str, Tensor]]):
    """Random tokens, and the next ones."""

    def __init__(self, count: int, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(5)
        self.both = torch.randint(0, VOCABULARY, (count, length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.both)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.both[index, :-1], "following": self.both[index, 1:]}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def fit(module: Language, size: int, strategy: Any, *, batch_size: int, steps: int = 5, **options: Any) -> lw.Trainer:
    """Train for a number of steps, two micro-batches each, with clipping; then validate."""
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, precision="64-true", max_epochs=1, logger=False,
        accumulate_grad_batches=2, gradient_clip_val=0.5, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_steps=steps, **options,
    )  # fmt: skip
    data = Sentences(steps * 2 * 4)
    trainer.fit(module, DataLoader(data, batch_size=batch_size), DataLoader(Sentences(8), batch_size=batch_size))
    return trainer
