"""Reading and hooks of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from loopwright import CSVLogger, Module, Trainer


class _OwnIterator:
    """Begins again at each `iter`, as loaders do that are their own iterators."""

    def __init__(self) -> None:
        self.begun = self._given = 0

    def __iter__(self) -> _OwnIterator:
        self.begun, self._given = self.begun + 1, 0
        return self

    def __next__(self) -> Tensor:
        if self._given == 3:
            raise StopIteration
        self._given += 1
        return torch.ones(2, 4)

    def __len__(self) -> int:
        return 3


class _Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.enabled: list[bool] = []

    def on_validation_model_eval(self) -> None:
        self.eval()
        torch.set_grad_enabled(True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.enabled.append(torch.is_grad_enabled())
        return self.net(batch).sum()  # type: ignore[no-any-return]


def _trainer(**options: object) -> Trainer:
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, **options)  # type: ignore[arg-type]


def test_a_loader_that_is_its_own_iterator_is_begun_once() -> None:
    loader = _OwnIterator()
    _trainer().validate(_Net(), loader, verbose=False)
    assert loader.begun == 1


def test_a_module_can_enable_gradients_when_its_evaluation_begins() -> None:
    module = _Net()
    with torch.no_grad():
        _trainer(inference_mode=False).validate(module, _OwnIterator(), verbose=False)
        assert not torch.is_grad_enabled()
    assert module.enabled == [True, True, True]


class _Noting(CSVLogger):
    def __init__(self, root_dir: str) -> None:
        super().__init__(root_dir)
        self.calls: list[str] = []

    def log_hyperparams(self, params: object = None, *args: object, **kwargs: object) -> None:
        self.calls.append("log_hyperparams")

    def save(self) -> None:
        self.calls.append("save")
        super().save()


class _Training(_Net):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _batches() -> Iterator[Tensor]:
    yield torch.ones(2, 4)


def test_loggers_are_saved_when_they_have_the_hyperparameters(tmp_path: Path) -> None:
    logger = _Noting(str(tmp_path))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(_Training(), list(_batches()))
    assert logger.calls.index("save") == logger.calls.index("log_hyperparams") + 1
