"""The smallest modules and data: what examples and libraries' tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from ....protocols import AnyOutput
from ..module import LightningDataModule, LightningModule

__all__ = [
    "BoringDataModule",
    "BoringDataModuleNoLen",
    "BoringModel",
    "DemoModel",
    "IterableBoringDataModule",
    "ManualOptimBoringModel",
    "Net",
    "RandomDataset",
    "RandomDictDataset",
    "RandomIterableDataset",
    "RandomIterableDatasetWithLen",
]


class RandomDataset(Dataset[Tensor]):
    """`length` random vectors of `size` numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """Random vectors under the keys `a` and `b`."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"a": self.data[index], "b": self.data[index] + 2}

    def __len__(self) -> int:
        return self.len


class RandomIterableDataset(IterableDataset[Tensor]):
    """`count` random vectors, one after the other."""

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """One linear layer, 32 numbers to 2, whose loss is the distance from ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        out: Tensor = self.layer(x)
        return out

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared distance from the labels; ones by default."""
        return F.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Tensor, batch_idx: int) -> AnyOutput:
        """Return the loss."""
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Tensor, batch_idx: int) -> object:
        """Return the loss."""
        return {"x": self.step(batch)}

    def test_step(self, batch: Tensor, batch_idx: int) -> object:
        """Return the loss."""
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        """Return SGD and a schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return 64 batches of one vector."""
        return DataLoader(RandomDataset(32, 64))

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return 64 batches of one vector."""
        return DataLoader(RandomDataset(32, 64))

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return 64 batches of one vector."""
        return DataLoader(RandomDataset(32, 64))

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return 64 batches of one vector."""
        return DataLoader(RandomDataset(32, 64))


class ManualOptimBoringModel(BoringModel):
    """The same, which calls backward and steps its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Take a step and return the loss."""
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class DemoModel(LightningModule):
    """One layer with a rate to choose."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Tensor, batch_nb: int) -> dict[str, Tensor]:
        """Return a loss that falls."""
        return {"loss": self(batch).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class BoringDataModule(LightningDataModule):
    """64 random vectors to train on, and as many for each other verb."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def setup(self, stage: str) -> None:
        """Split off the data of a verb."""
        if stage == "fit":
            self.random_train = Subset(self.random_full, range(64))
        if stage in ("fit", "validate"):
            self.random_val = Subset(self.random_full, range(64, 128))
        if stage == "test":
            self.random_test = Subset(self.random_full, range(128, 192))
        if stage == "predict":
            self.random_predict = Subset(self.random_full, range(192, 256))

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the vectors to train on."""
        return DataLoader(self.random_train)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return those to validate on."""
        return DataLoader(self.random_val)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return those to test on."""
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return those to predict."""
        return DataLoader(self.random_predict)


class IterableBoringDataModule(LightningDataModule):
    """Streams of random vectors with lengths."""

    data_class: type[RandomIterableDataset] = RandomIterableDatasetWithLen

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the stream to train on."""
        return DataLoader(self.data_class(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class BoringDataModuleNoLen(IterableBoringDataModule):
    """Streams without lengths."""

    data_class = RandomIterableDataset


class Net(nn.Module):
    """A small network for pictures of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities of 10 classes."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)
