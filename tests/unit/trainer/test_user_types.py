"""A user's program type-checks under mypy --strict, whatever its hooks and steps say that a batch is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import loopwright as lw
import torch
from loopwright.loggers import Logger
from loopwright.protocols import BackgroundPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


class Pairs(Dataset[Pair]):
    def __getitem__(self, index: int) -> Pair:
        return Pair(torch.ones(4), torch.tensor(0))


class Net(lw.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 2)
        self.width: int = self.hparams.width

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch.image), batch.label)
        self.log("loss", loss)
        self.all_gather(loss).mean()
        return loss

    def validation_step(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        return {"loss": self(batch[0]).sum()}

    def predict_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
        return self(batch)

    def on_train_batch_start(self, batch: Pair, batch_idx: int) -> int | None:
        return -1 if batch.image.isnan().any() else None

    def transfer_batch_to_device(self, batch: Pair, device: torch.device, dataloader_idx: int) -> Pair:
        moved: Pair = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return moved

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Pair]:
        return DataLoader(Pairs())

    def state_of(self) -> dict[str, int]:
        return {"width": self.width}


class Watch(lw.Callback):
    def on_train_batch_end(
        self, trainer: lw.Trainer, pl_module: Net, outputs: dict[str, Tensor], batch: Pair, batch_idx: int
    ) -> None:
        print(pl_module.width, outputs["loss"], batch.label)

    def state_dict(self) -> dict[str, int]:
        return {"seen": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        print(state_dict["seen"])


class Bar(lw.TQDMProgressBar):
    def on_train_batch_end(
        self, trainer: lw.Trainer, pl_module: Net, outputs: dict[str, Tensor], batch: Pair, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class Best(lw.ModelCheckpoint):
    def on_validation_end(self, trainer: lw.Trainer, pl_module: Net) -> None:
        print(pl_module.width, trainer.current_epoch)


class Early(lw.EarlyStopping):
    def on_validation_end(self, trainer: lw.Trainer, pl_module: lw.Module) -> None:
        super().on_validation_end(trainer, pl_module)


class Rates(lw.LearningRateMonitor):
    def on_train_start(self, trainer: lw.Trainer, pl_module: Net) -> None:
        super().on_train_start(trainer, pl_module)


class Writer(lw.BasePredictionWriter):
    def write_on_batch_end(
        self, trainer: lw.Trainer, pl_module: nn.Module, prediction: Tensor, batch_indices: list[int] | None,
        batch: Pair, batch_idx: int, dataloader_idx: int,
    ) -> None:
        torch.save(prediction, f"{batch_idx}.pt")


class Rows(Logger):
    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        print(metrics, step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        print(params)

    def after_save_checkpoint(self, checkpoint_callback: lw.ModelCheckpoint) -> None:
        print(checkpoint_callback.best_model_path)


class Files(lw.CheckpointIO):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        torch.save(checkpoint, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(path, map_location=map_location)
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink()


class Duck:
    # Derives from nothing; its arguments have names of their own.


    def save_checkpoint(self, state: Mapping[str, Any], file: str | Path, storage_options: object = None) -> bool:
        torch.save(state, file)
        return True

    def load_checkpoint(self, file: str | Path, *, retries: int = 3) -> dict[str, Tensor]:
        loaded: dict[str, Tensor] = torch.load(file)
        return loaded

    def remove_checkpoint(self, file: str | Path) -> None:
        Path(file).unlink()


class LightningsCheckpointIO(ABC):
    # The signatures of lightning.fabric.plugins.CheckpointIO.


    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None: ...

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]: ...

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None: ...

    def teardown(self) -> None: ...


class LightningsEnvironment(ABC):
    # The signatures of lightning.fabric.plugins.ClusterEnvironment.


    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool: ...

    @property
    @abstractmethod
    def main_address(self) -> str: ...

    @property
    @abstractmethod
    def main_port(self) -> int: ...

    @staticmethod
    @abstractmethod
    def detect() -> bool: ...

    @abstractmethod
    def world_size(self) -> int: ...

    @abstractmethod
    def set_world_size(self, size: int) -> None: ...

    @abstractmethod
    def global_rank(self) -> int: ...

    @abstractmethod
    def set_global_rank(self, rank: int) -> None: ...

    @abstractmethod
    def local_rank(self) -> int: ...

    @abstractmethod
    def node_rank(self) -> int: ...

    def validate_settings(self, num_devices: int, num_nodes: int) -> None: ...

    def teardown(self) -> None: ...


def plugins_of_all_kinds(theirs: LightningsCheckpointIO, environment: LightningsEnvironment) -> None:
    lw.DDPStrategy(checkpoint_io=Duck(), cluster_environment=lw.fabric.SLURMEnvironment())
    lw.FSDPStrategy(checkpoint_io=theirs, cluster_environment=environment)
    lw.DeepSpeedStrategy(checkpoint_io=lw.AsyncCheckpointIO(Duck()))
    lw.DDPStrategy(checkpoint_io=Path())  # type: ignore[arg-type]
    lw.DDPStrategy(cluster_environment="slurm")  # type: ignore[arg-type]
    background: BackgroundPlugin = lw.AsyncCheckpointIO()
    background.wait()


class Data(lw.DataModule):
    def train_dataloader(self) -> list[DataLoader[Pair]]:
        return [DataLoader(Pairs())]


strategy = lw.DDPStrategy(checkpoint_io=Files())
trainer = lw.Trainer(callbacks=[Watch(), Bar(), Writer("batch")], plugins=[Files()], strategy=strategy)
trainer.fit(Net(), Data())
for batch in lw.DataModule().train_dataloader():
    print(batch.image)
predictions = trainer.predict(Net(), [torch.ones(4)])
assert predictions is not None
for prediction in predictions:
    print(prediction[0])
net = Net.load_from_checkpoint("a.ckpt", map_location=lambda storage, place: storage)
net = Net.load_from_checkpoint("a.ckpt", map_location={"cuda:0": "cpu"})
net = Net.load_from_checkpoint("a.ckpt", map_location=torch.device("cpu"))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_users_annotations_type_check(tmp_path: Path) -> None:
    """The package is read under its own name, through a link; its own errors do not count here."""
    pytest.importorskip("mypy")
    (tmp_path / "types").mkdir()
    (tmp_path / "types" / "loopwright").symlink_to(ROOT, target_is_directory=True)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}/cache"]
    options = ["--config-file=", "--python-version=3.11", "--untyped-calls-exclude=torch", "--ignore-missing-imports"]
    environment = {**os.environ, "MYPYPATH": str(tmp_path / "types")}
    found = subprocess.run([*command, *options, program], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
