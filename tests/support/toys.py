"""Small real modules, data, loggers and trainers for tests of the training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks import Callback
from loopwright.loggers import Logger

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def pairs(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Return `count` samples of (x: (4,), y: (1,))."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=dtype)
    y = torch.randn(count, 1, generator=generator, dtype=dtype)
    return TensorDataset(x, y)


def loader(count: int = 8, batch_size: int = 2, *, seed: int = 0, **kwargs: Any) -> DataLoader[Any]:
    """Return a loader over `pairs(count)`, in order unless shuffle=True is given."""
    return DataLoader(pairs(count, seed=seed), batch_size=batch_size, **kwargs)


class Net(lw.Module):
    """A perceptron with a mean squared error; its validation and test log the loss."""

    def __init__(self, optimizer: MakeOptimizer = sgd, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(4, 8), nn.Tanh()]
        if norm:
            layers.append(nn.BatchNorm1d(8))
        if dropout:
            layers.append(nn.Dropout(dropout))
        self.net = nn.Sequential(*layers, nn.Linear(8, 1))
        self.make_optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class ValidatedNet(Net):
    """A Net that logs `val_loss` and `test_loss`, and predicts."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def net(kind: type[Net] = Net, *args: Any, seed: int = 1, **kwargs: Any) -> Any:
    """Return a module whose weights depend on the seed only, and leave the global generator at that seed's end."""
    torch.manual_seed(seed)
    return kind(*args, **kwargs)


def quiet(**kwargs: Any) -> lw.Trainer:
    """Return a Trainer on the CPU that writes and shows nothing unless asked to."""
    silent: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lw.Trainer(**{**silent, **kwargs})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the module's state."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(first: nn.Module | Mapping[str, Tensor], second: nn.Module | Mapping[str, Tensor]) -> None:
    """Assert that two states are equal bit for bit."""
    a = first.state_dict() if isinstance(first, nn.Module) else first
    b = second.state_dict() if isinstance(second, nn.Module) else second
    assert list(a) == list(b)
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


def assert_near(first: nn.Module, second: nn.Module, *, rtol: float) -> None:
    """Assert that two modules' weights are equal to a relative tolerance."""
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}")


def train_by_hand(
    module: Net,
    data: Iterable[Any],
    *,
    epochs: int = 1,
    accumulate: int = 1,
    before_step: Callable[[Net], Any] = lambda module: None,
) -> list[float]:
    """Train as a user would without a trainer; return the loss of each batch. A short last window is a mean too."""
    optimizer = module.make_optimizer(module.parameters())
    module.train()
    losses = []
    for _ in range(epochs):
        window: list[Any] = []
        total = len(data)  # type: ignore[arg-type]
        for index, batch in enumerate(data):
            if index % accumulate == 0:
                size = min(accumulate, total - index)
                optimizer.zero_grad()
            loss = module.loss(batch)
            losses.append(loss.item())
            (loss if size == 1 else loss / size).backward()
            window.append(batch)
            if len(window) == size:
                window.clear()
                before_step(module)
                optimizer.step()
    return losses


class Unsized:
    """An iterable of batches that does not know its length."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class RecordingLogger(Logger):
    """Keeps the rows that it is given.

    Args:
        fails: Raise at every call.
    """

    def __init__(self, *, fails: bool = False) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.statuses: list[str] = []
        self.hparams: list[Any] = []
        self.fails = fails

    name = "recording"
    version = 0

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self.fails:
            raise OSError("the logger is broken")
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hparams.append(params)

    def finalize(self, status: str) -> None:
        self.statuses.append(status)

    def values(self, name: str) -> list[tuple[int | None, float]]:
        """Return (step, value) of each row with this key."""
        return [(step, row[name]) for step, row in self.rows if name in row]


class Recorder(Callback):
    """Writes down which of its hooks were called, by way of `note(trainer)` for what else is of interest."""

    def __init__(self, note: Callable[[lw.Trainer], Any] | None = None) -> None:
        self.seen: list[str] = []
        self.notes: list[Any] = []
        self.note = note or (lambda trainer: None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("train_start")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("epoch_start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(f"batch{batch_idx}")
        self.notes.append(copy.deepcopy(self.note(trainer)))

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("sanity_start")

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("sanity_end")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("validation")

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append(f"val{dataloader_idx}.{batch_idx}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("epoch_end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("train_end")
