"""Small models and data sets that learn in seconds and download nothing, to try a strategy, a callback or a machine.

`GPT` learns `SyntheticText`, `TextClassifier` learns `SyntheticTopics`, and `ViT` learns `SyntheticImages`. The models
are plain transformers whose sizes are arguments, so that they are of use on one CPU core and on eight GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from .errors import ConfigError
from .trainer import Module

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["GPT", "SyntheticImages", "SyntheticText", "SyntheticTopics", "TextClassifier", "TransformerBlock", "ViT"]


class TransformerBlock(nn.Module):
    """Self-attention and a two-layer MLP, each after a layer norm and with a residual connection.

    Args:
        width: Size of the features of one position.
        heads: Number of attention heads; divides `width`.
        is_causal: Whether a position sees only itself and earlier ones.
    """

    def __init__(self, width: int, heads: int, *, is_causal: bool = False) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(
                f"Expected heads to divide width, got heads={heads} and width={width}.", fix="pass width=16 * heads."
            )
        self.head_size, self.is_causal = width // heads, is_causal
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            # As many heads as this rank has: tensor parallelism splits them.
            project(normed).view(batch, length, -1, self.head_size).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        result: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return result


class _Transformer(Module):
    """Blocks, and AdamW with a constant rate."""

    def __init__(self, width: int, heads: int, layers: int, lr: float, *, is_causal: bool = False) -> None:
        super().__init__()
        self.lr = lr
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, is_causal=is_causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def encode(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed

    def configure_optimizers(self) -> Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class GPT(_Transformer):
    """Predicts the next token; the defaults are small, and `GPT(50304, 1024, 768, 12, 12)` is the 124 M GPT-2.

    A batch is int64 tokens of shape (batch, time + 1), with `time` at most `length`; `forward` maps (batch, time) to
    logits of shape (batch, time, vocabulary).

    Args:
        vocabulary: Number of tokens.
        length: Largest context, in tokens.
        width: Size of the features of one position.
        layers: Number of blocks.
        heads: Number of attention heads per block; divides `width`.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self, vocabulary: int = 64, length: int = 64, width: int = 64, layers: int = 2, heads: int = 4, lr: float = 3e-3
    ) -> None:
        super().__init__(width, heads, layers, lr, is_causal=True)
        self.save_hyperparameters()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        logits: Tensor = self.head(self.encode(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross entropy of a batch's tokens but the first: shape ()."""
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch), prog_bar=True, batch_size=len(batch))


class _Classifier(_Transformer):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        inputs, labels = batch
        logits = self(inputs)
        scores = {
            "val_loss": F.cross_entropy(logits, labels),
            "val_acc": (logits.argmax(dim=1) == labels).float().mean(),
        }
        self.log_dict(scores, prog_bar=True, batch_size=len(labels))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the class of each input: shape (batch,)."""
        classes: Tensor = self(batch[0]).argmax(dim=1)
        return classes


class TextClassifier(_Classifier):
    """Classifies sequences of tokens by the mean of their features.

    A batch is a pair: int64 tokens of shape (batch, length), and int64 classes of shape (batch,).

    Args:
        vocabulary: Number of tokens.
        num_classes: Number of classes.
        length: Largest number of tokens of a sequence.
        width: Size of the features of one position.
        layers: Number of blocks.
        heads: Number of attention heads per block; divides `width`.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self, vocabulary: int = 64, num_classes: int = 4, length: int = 64, width: int = 64, layers: int = 2,
        heads: int = 4, lr: float = 3e-3,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, layers, lr)
        self.save_hyperparameters()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        features = self.encode(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])
        logits: Tensor = self.head(features.mean(dim=1))
        return logits


class ViT(_Classifier):
    """A vision transformer (Dosovitskiy et al. 2021) that classifies by the mean of its patches' features.

    A batch is a pair: float32 images of shape (batch, channels, size, size), and int64 classes of shape (batch,).

    Args:
        size: Height and width of the images, in pixels.
        patch: Height and width of a patch; divides `size`.
        channels: Number of channels of the images.
        num_classes: Number of classes.
        width: Size of the features of one patch.
        layers: Number of blocks.
        heads: Number of attention heads per block; divides `width`.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self, size: int = 16, patch: int = 4, channels: int = 1, num_classes: int = 4, width: int = 64, layers: int = 2,
        heads: int = 4, lr: float = 3e-3,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, layers, lr)
        self.save_hyperparameters()
        if size % patch:
            raise ConfigError(
                f"Expected patch to divide size, got patch={patch} and size={size}.", fix="pass size=4 * patch."
            )
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        features = self.encode(self.patches(images).flatten(2).transpose(1, 2) + self.places)
        logits: Tensor = self.head(features.mean(dim=1))
        return logits


class SyntheticText(Dataset[Tensor]):
    """Sequences of tokens for `GPT`: each is the one before plus a step of 1 to 4, modulo the vocabulary.

    A tenth of the tokens is replaced by random ones, so that a model has to look at several to find the step. Sample i
    is the same on every machine and in every epoch.

    Args:
        num_samples: Number of sequences.
        length: Tokens of each.
        vocabulary: Number of tokens.
        seed: Another seed gives other sequences.
    """

    def __init__(self, num_samples: int = 1024, length: int = 33, vocabulary: int = 64, *, seed: int = 0) -> None:
        self.num_samples, self.length, self.vocabulary, self.seed = num_samples, length, vocabulary, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        draw = _generator(index, self.num_samples, self.seed)
        first, step = torch.randint(self.vocabulary, (2,), generator=draw).tolist()
        tokens = (first + (step % 4 + 1) * torch.arange(self.length)) % self.vocabulary
        return _disturb(tokens, 0.1, self.vocabulary, draw)


class SyntheticTopics(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of tokens and their class, for `TextClassifier`: a class prefers its own part of the vocabulary.

    Half of the tokens come from that part, the others from all of it. Sample i is the same on every machine and in
    every epoch.

    Args:
        num_samples: Number of sequences.
        length: Tokens of each.
        vocabulary: Number of tokens; at least `num_classes`.
        num_classes: Number of classes.
        seed: Another seed gives other sequences.
    """

    def __init__(
        self, num_samples: int = 1024, length: int = 32, vocabulary: int = 64, num_classes: int = 4, *, seed: int = 0
    ) -> None:
        self.num_samples, self.length, self.vocabulary = num_samples, length, vocabulary
        self.num_classes, self.seed = num_classes, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = _generator(index, self.num_samples, self.seed)
        label, part = index % self.num_classes, self.vocabulary // self.num_classes
        tokens = label * part + torch.randint(part, (self.length,), generator=draw)
        return _disturb(tokens, 0.5, self.vocabulary, draw), torch.tensor(label)


class SyntheticImages(Dataset[tuple[Tensor, Tensor]]):
    """Noisy images of stripes whose direction is the class. Sample i is the same on every machine and in every epoch.

    Args:
        num_samples: Number of images.
        size: Height and width, in pixels.
        channels: Number of channels, which are equal but for noise.
        num_classes: Number of directions.
        seed: Another seed gives other images.
    """

    def __init__(
        self, num_samples: int = 1024, size: int = 16, channels: int = 1, num_classes: int = 4, *, seed: int = 0
    ) -> None:
        self.num_samples, self.size, self.channels = num_samples, size, channels
        self.num_classes, self.seed = num_classes, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = _generator(index, self.num_samples, self.seed)
        label = index % self.num_classes
        angle = torch.tensor(torch.pi * label / self.num_classes)
        place = torch.arange(self.size, dtype=torch.float32)
        along = torch.cos(angle) * place[:, None] + torch.sin(angle) * place
        stripes = torch.sin(along * (2 * torch.pi / 5) + 2 * torch.pi * torch.rand((), generator=draw))
        noise = torch.randn(self.channels, self.size, self.size, generator=draw)
        return stripes + 0.3 * noise, torch.tensor(label)


def _generator(index: int, num_samples: int, seed: int) -> torch.Generator:
    if not 0 <= index < num_samples:
        raise IndexError(index)
    return torch.Generator().manual_seed(seed * 1_000_003 + index)


def _disturb(tokens: Tensor, share: float, vocabulary: int, draw: torch.Generator) -> Tensor:
    """Replace a share of the tokens by random ones."""
    noise = torch.randint(vocabulary, tokens.shape, generator=draw)
    return torch.where(torch.rand(tokens.shape, generator=draw) < share, noise, tokens)
