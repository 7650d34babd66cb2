"""Classify handwritten digits in a few seconds: `make digits`, or `python examples/digits.py`.

The data set comes with scikit-learn: 1,797 images of 8 x 8 pixels. Shows early stopping, saving the best checkpoint,
and a test on images that were used neither for training nor for choosing the checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import loopwright as lw

Sample = tuple[Tensor, Tensor]  # (64,) float32 in 0..1, and () int64 in 0..9


class Digits(lw.DataModule):
    """The digits of scikit-learn in three disjoint sets: 1,197 for training, 300 for validation, 300 for test."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise lw.MissingDependency("scikit-learn", needed_for="examples/digits.py", extra="examples") from error
        images, labels = load_digits(return_X_y=True)
        everything = TensorDataset(
            torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64)
        )
        parts = random_split(everything, [1197, 300, 300], generator=torch.Generator().manual_seed(0))
        self.train_set, self.val_set, self.test_set = parts

    def _loader(self, part: Dataset[tuple[Tensor, ...]], *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(part, batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.test_set)


class Classifier(lw.Module):
    """Two convolutions and two linear layers."""

    def __init__(self, lr: float = 2e-3, dropout: float = 0.25) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits: (batch, 64) -> (batch, 10)."""
        logits: Tensor = self.layers(images)
        return logits

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_epoch=True, on_step=False, prog_bar=True, batch_size=len(labels))
        return loss

    def _evaluate(self, batch: Sample, stage: str) -> None:
        images, labels = batch
        logits = self(images)
        metrics = {
            f"{stage}_loss": F.cross_entropy(logits, labels),
            f"{stage}_acc": (logits.argmax(dim=1) == labels).float().mean(),
        }
        # The batch size is the weight: the last batch is smaller, and the mean is over images, not over batches.
        self.log_dict(metrics, prog_bar=True, batch_size=len(labels))

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Sample, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return lw.optim.adamw(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--epochs", type=int, default=30, help="maximum number of epochs; early stopping may end sooner"
    )
    parser.add_argument("--devices", default="1", help="number of devices, or 'auto'")
    args = parser.parse_args()

    lw.seed_everything(0, verbose=False)
    trainer = lw.Trainer(
        max_epochs=args.epochs,
        devices=args.devices,
        callbacks=[
            lw.EarlyStopping("val_acc", mode="max", patience=5),
            lw.ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}"),
        ],
        log_every_n_steps=10,
        default_root_dir="runs/digits",
    )
    data = Digits()
    trainer.fit(Classifier(), datamodule=data)
    [result] = trainer.test(ckpt_path="best", datamodule=data)
    print(f"Test accuracy: {result['test_acc']:.1%} of 300 unseen images; best checkpoint: {_best(trainer)}")


def _best(trainer: lw.Trainer) -> str:
    callback = trainer.checkpoint_callback
    return str(getattr(callback, "best_model_path", "none"))


if __name__ == "__main__":
    main()
