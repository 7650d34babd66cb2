"""Reports to Ray with stand-ins for its functions; tests/integration/ray has Ray itself."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw

NAME = "loopwright.integrations.ray"


class LocalFileSystem:
    """Stand-in for pyarrow's."""


class Mode(Enum):
    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


class Folder:
    """Stand-in for `ray.train.Checkpoint`: a folder, which a resume downloads to another one."""

    def __init__(self, path: str) -> None:
        self.path = path

    from_directory = classmethod(lambda cls, path: cls(path))

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        copy = Path(self.path).rename(self.path + "-downloaded")
        yield str(copy)
        copy.rename(self.path)


class Ray:
    """What the process is to Ray, and what it has reported."""

    def __init__(self, storage: Path) -> None:
        self.kind = "worker"
        self.latest: Folder | None = None
        self.preemption: str | None = None
        self.reports: list[dict[str, Any]] = []
        self.storage = SimpleNamespace(storage_filesystem=LocalFileSystem(), experiment_fs_path=str(storage))
        self.integration: Any = None

    def path(self) -> str:
        """Return the folder of the latest report."""
        assert self.latest is not None
        return self.latest.path

    def get_context(self) -> Any:
        if self.kind == "trial":
            raise DeprecationWarning("not in a trial")
        if self.kind == "nothing":
            raise RuntimeError("not a worker")
        return SimpleNamespace(get_storage=lambda: self.storage)

    def report(self, metrics: dict[str, Any], checkpoint: Folder | None = None, **others: Any) -> None:
        content = None
        if checkpoint is not None:
            file = Path(checkpoint.path, "checkpoint.ckpt")
            content = torch.load(file, weights_only=False)["global_step"] if file.is_file() else None
            self.latest = checkpoint
        self.reports.append({**metrics, "saved": content, **others})

    def modules(self) -> dict[str, ModuleType]:
        train, tune = ModuleType("ray.train"), ModuleType("ray.tune")
        vars(train).update(
            get_context=self.get_context,
            report=self.report,
            get_checkpoint=lambda: self.latest,
            get_preemption_info=lambda: self.preemption,
            Checkpoint=Folder,
            CheckpointUploadMode=Mode,
        )
        vars(tune).update(report=self.report, get_checkpoint=lambda: self.latest, Checkpoint=Folder)
        ray, fs = ModuleType("ray"), ModuleType("pyarrow.fs")
        vars(ray).update(train=train, tune=tune)
        vars(fs).update(LocalFileSystem=LocalFileSystem)
        return {"ray": ray, "ray.train": train, "ray.tune": tune, "pyarrow": ModuleType("pyarrow"), "pyarrow.fs": fs}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    fake = Ray(tmp_path)
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    fake.integration = importlib.import_module(NAME)
    yield fake
    sys.modules.pop(NAME)


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated_at", float(self.trainer.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(tmp_path: Path, *callbacks: lw.Callback, ckpt_path: str | None = None, **arguments: Any) -> lw.Trainer:
    data = DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)  # 6 steps
    arguments = {"max_epochs": 2, "num_sanity_val_steps": 1, **arguments}
    trainer = lw.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, callbacks=list(callbacks), **arguments,
    )  # fmt: skip
    trainer.fit(Net(), data, data, ckpt_path=ckpt_path)
    return trainer


def column(fake: Ray, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(report.get(name) for name in names) for report in fake.reports]


def test_each_epoch_is_reported_after_its_validation_with_a_checkpoint_of_that_moment(
    fake: Ray, tmp_path: Path
) -> None:
    fit(tmp_path, fake.integration.RayReport())
    assert column(fake, "epoch", "step", "validated_at", "saved") == [(0, 6, 6, 6), (1, 12, 12, 12)]
    assert all(isinstance(report["loss"], float) for report in fake.reports)


@pytest.mark.parametrize(
    ("every", "interval", "expected"),
    [
        (4, 2, [(4, 4), (8, 8), (12, 12)]),  # a validation at each of the steps: the report follows it
        (4, 3, [(4, 3), (8, 6), (12, 12)]),
        (5, 6, [(5, None), (10, 6), (12, 12)]),  # the last report is that of the end
    ],
)
def test_reports_every_n_steps_follow_a_validation_of_the_same_step(
    fake: Ray, tmp_path: Path, every: int, interval: int, expected: list[tuple[int, int | None]]
) -> None:
    fit(tmp_path, fake.integration.RayReport(every=every), val_check_interval=interval)
    assert column(fake, "step", "validated_at") == expected
    assert column(fake, "saved") == [(step,) for step, _ in expected]


def test_accumulated_batches_are_not_steps(fake: Ray, tmp_path: Path) -> None:
    fit(tmp_path, fake.integration.RayReport(every=2), accumulate_grad_batches=2, max_epochs=1)
    assert column(fake, "step", "saved") == [(2, 2), (3, 3)]


def test_chosen_metrics_without_checkpoints(fake: Ray, tmp_path: Path) -> None:
    fit(tmp_path, fake.integration.RayReport(metrics=["validated_at", "unknown"], checkpoint=False), max_epochs=1)
    assert column(fake, "saved", "validation") == [(None, False)]
    assert set(fake.reports[0]) - {"checkpoint_upload_mode", "saved", "validation"} == {"validated_at", "epoch", "step"}


def test_the_checkpoint_is_written_where_ray_stores_it_or_uploaded(fake: Ray, tmp_path: Path) -> None:
    report = fake.integration.RayReport(validation=True)
    fit(tmp_path, report, max_epochs=1)
    assert Path(fake.path()).parent == tmp_path
    assert Path(fake.path()).exists()
    fake.storage.storage_filesystem = "s3"
    fit(tmp_path, report, max_epochs=1)
    assert not Path(fake.path()).exists(), "a temporary folder is left"
    assert column(fake, "checkpoint_upload_mode", "validation", "saved") == [
        (Mode.NO_UPLOAD, True, 6),
        (Mode.SYNC, True, 6),
    ]


def test_ray_removes_the_folder_of_an_asynchronous_upload(fake: Ray, tmp_path: Path) -> None:
    fit(tmp_path, fake.integration.RayReport(checkpoint_upload_mode=Mode.ASYNC), max_epochs=1)
    assert column(fake, "checkpoint_upload_mode") == [(Mode.ASYNC,)]
    shutil.rmtree(fake.path())


def test_a_run_resumes_from_the_reported_checkpoint_and_removes_what_was_downloaded(fake: Ray, tmp_path: Path) -> None:
    assert fake.integration.resume_path() is None
    fit(tmp_path, fake.integration.RayReport(), max_epochs=1)
    path = fake.integration.resume_path()
    assert "-downloaded" in str(path)
    fit(tmp_path, fake.integration.RayReport(), max_epochs=2, ckpt_path=path)
    assert column(fake, "epoch", "step") == [(0, 6), (1, 12)]
    assert not Path(str(path)).exists()


def test_a_resume_without_steps_left_reports_nothing(fake: Ray, tmp_path: Path) -> None:
    fit(tmp_path, fake.integration.RayReport(every=6), max_epochs=1)
    fit(tmp_path, fake.integration.RayReport(every=6), max_epochs=1, ckpt_path=fake.integration.resume_path())
    assert column(fake, "step") == [(6,)]


def test_a_trial_reports_to_tune(fake: Ray, tmp_path: Path) -> None:
    fake.kind = "trial"
    fit(tmp_path, fake.integration.RayReport())
    assert column(fake, "epoch", "saved") == [(0, 6), (1, 12)]
    assert "checkpoint_upload_mode" not in fake.reports[0]
    assert not Path(fake.path()).exists()


def test_an_announced_preemption_is_answered_with_one_checkpoint(
    fake: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake.integration, "_POLL", fake.integration._POLL * 0)
    noticed = lw.LambdaCallback(
        on_train_batch_start=lambda trainer, *_: setattr(fake, "preemption", "soon" if trainer.global_step else None)
    )
    fit(tmp_path, noticed, fake.integration.RayReport(every=4), max_epochs=1)
    assert column(fake, "step", "saved") == [(2, 2), (4, 4), (6, 6)]


def test_a_shard_of_ray_data_begins_anew_in_each_epoch(fake: Ray, tmp_path: Path) -> None:
    class Shard:
        def iter_torch_batches(self, *, batch_size: int, local_shuffle_seed: int) -> list[list[torch.Tensor]]:
            return [[torch.full((batch_size, 2), float(local_shuffle_seed))]] * 3

    fake.integration.ray.train.get_dataset_shard = {"train": Shard()}.__getitem__
    shard = fake.integration.data_shard(batch_size=5, local_shuffle_seed=7)
    assert [[batch[0].tolist() for batch in shard] for _ in range(2)] == [[[[7.0, 7.0]] * 5] * 3] * 2
    with pytest.raises(KeyError):
        fake.integration.data_shard("unknown", batch_size=5)


def test_elsewhere_the_error_says_what_to_do(fake: Ray, tmp_path: Path) -> None:
    fake.kind = "nothing"
    with pytest.raises(lw.ConfigError, match="Expected a worker of Ray Train or a trial of Ray Tune"):
        fit(tmp_path, fake.integration.RayReport())
    with pytest.raises(lw.ConfigError, match="ModelCheckpoint"):
        fake.integration.resume_path()
    with pytest.raises(lw.ConfigError, match="every of at least 1, got 0"):
        fake.integration.RayReport(every=0)


def test_without_ray_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(lw.MissingDependency, match=r"pip install 'loopwright\[ray\]'"):
        importlib.import_module(NAME)
