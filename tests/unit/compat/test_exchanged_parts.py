"""Callbacks of libraries that override Lightning's inner steps, exchange optimizers, or restore them during a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.compat.lightning import install, uninstall


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    install(children=False)
    yield
    uninstall()


def make_module() -> Any:
    import lightning as L

    class Line(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("score", abs(self.current_epoch - 1.0))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Line()


def batches() -> list[Tensor]:
    return list(torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1)))


def fit(folder: Path, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    import lightning as L

    trainer = L.Trainer(
        accelerator="cpu", callbacks=list(callbacks), default_root_dir=str(folder), logger=False,
        enable_progress_bar=False, enable_model_summary=False, **{"max_epochs": 3, **arguments},
    )  # fmt: skip
    trainer.fit(make_module() if module is None else module, batches())
    return trainer


def test_steps_of_a_checkpoint_callback_can_be_overridden(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Noting(ModelCheckpoint):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.calls: list[Any] = []

        def _monitor_candidates(self, trainer: Any) -> Any:
            self.calls.append("candidates")
            return super()._monitor_candidates(trainer)  # type: ignore[misc]

        def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Tensor]) -> None:
            before = self.best_model_path
            super()._save_topk_checkpoint(trainer, monitor_candidates)  # type: ignore[misc]
            self.calls.append((int(monitor_candidates["step"]), self.best_model_path != before))

        def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Tensor]) -> None:
            self.calls.append("last")
            super()._save_last_checkpoint(trainer, monitor_candidates)  # type: ignore[misc]

    noting = Noting(dirpath=tmp_path, monitor="score", save_last=True)
    fit(tmp_path, noting)
    assert noting.calls == [
        "candidates", (3, True), "last", "candidates", (6, True), "last", "candidates", (9, False), "last",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".ckpt") == [
        "epoch=1-step=6.ckpt", "last.ckpt",
    ]  # fmt: skip
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 9


def test_paths_and_scores_of_a_checkpoint_callback_can_be_assigned() -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(monitor="score", save_top_k=2)
    callback.best_k_models = {"a.ckpt": torch.tensor(1.0), "b.ckpt": torch.tensor(2.0)}  # type: ignore[misc]
    callback.best_model_path, callback.last_model_path = "a.ckpt", "last.ckpt"  # type: ignore[misc]
    callback.best_model_score = callback.current_score = torch.tensor(1.0)  # type: ignore[misc]
    callback.kth_best_model_path, callback.kth_value = "x", torch.tensor(9.0)  # type: ignore[misc]  # computed here
    assert (callback.best_model_path, callback.last_model_path) == ("a.ckpt", "last.ckpt")
    assert (callback.kth_best_model_path, float(callback.kth_value)) == ("b.ckpt", 2.0)
    assert callback.best_model_score == callback.current_score == 1.0


def test_the_folder_of_a_checkpoint_callback_can_be_assigned(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    given, default = ModelCheckpoint(dirpath=tmp_path / "a"), ModelCheckpoint(monitor="score")
    given.dirpath, default.dirpath = str(tmp_path / "b"), tmp_path / "c"
    fit(tmp_path, given, default, max_epochs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]
    assert given.best_model_path == str(tmp_path / "b" / "epoch=0-step=3.ckpt")


def test_the_judgment_of_early_stopping_can_be_overridden(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    class AtSecond(EarlyStopping):
        seen: list[Tensor] = []

        def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
            self.seen.append(current)
            return len(self.seen) == 2, "it was the second"

    stopping = AtSecond("score", check_on_train_epoch_end=True)
    assert fit(tmp_path, stopping, enable_checkpointing=False).current_epoch == 2
    assert stopping.seen == [torch.tensor(1.0), torch.tensor(0.0)]
    assert (stopping.stopped_epoch, stopping.stopping_reason_message) == (1, "it was the second")


def test_a_callback_exchanges_the_optimizer_and_its_schedule(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    class Exchange(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                adam = torch.optim.Adam(pl_module.parameters(), lr=0.05)
                trainer.strategy.optimizers = [adam]
                schedule = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
                trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(schedule, interval="epoch")]

    module = make_module()
    by_hand = copy.deepcopy(module.layer)
    trainer = fit(tmp_path, Exchange(), module=module, enable_checkpointing=False, gradient_clip_val=0.1)
    optimizer: Any = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for epoch in range(3):
        if epoch == 1:
            optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.05)
        for batch in batches():
            optimizer.zero_grad()
            by_hand(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 if epoch else 1.0
    assert torch.equal(module.layer.weight, by_hand.weight)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0125
    assert len(trainer.strategy.lr_scheduler_configs) == 1


def test_optimizers_that_cannot_be_exchanged_are_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from loopwright.compat.lightning.imports.absent import NotServed

    class Exchange(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.optimizers = [torch.optim.LBFGS(pl_module.parameters())]

    with pytest.raises(NotServed, match="evaluates the model again"):
        fit(tmp_path, Exchange(), enable_checkpointing=False)


def test_a_callback_goes_back_to_a_checkpoint_during_a_run(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Back(Callback):
        weights: list[Tensor] = []

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.weights.append(pl_module.layer.weight.detach().clone())

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                connector = trainer._checkpoint_connector
                connector.resume_start(tmp_path / "epoch=0-step=3.ckpt")
                connector.restore_model()
                connector.restore_precision_plugin_state()
                assert connector._loaded_checkpoint["optimizer_states"]
                connector.restore_optimizers_and_schedulers()
                connector.resume_end()
                assert torch.equal(pl_module.layer.weight, self.weights[0])
                assert trainer.current_epoch == 2

    saving = ModelCheckpoint(dirpath=tmp_path, monitor="score", mode="max", save_top_k=1)
    trainer = fit(tmp_path, Back(), saving)
    assert trainer.global_step == 9
    # A file that the run went back to stays, as one that it was resumed from.
    assert (tmp_path / "epoch=0-step=3.ckpt").exists()


def test_a_checkpoint_without_optimizers_cannot_restore_them(tmp_path: Path) -> None:
    trainer = fit(tmp_path, enable_checkpointing=False)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    connector = trainer._checkpoint_connector
    connector.resume_start(tmp_path / "weights.ckpt")
    with pytest.raises(KeyError, match="'optimizer_states', because it was saved with weights only"):
        connector.restore_optimizers_and_schedulers()


def test_packages_add_callbacks_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning as L
    from lightning.pytorch.callbacks import Callback

    class Added(Callback):
        pass

    class Entry:
        name = "a package"

        def load(self) -> Any:
            return lambda: [Added()]

    groups = {"lightning.pytorch.callbacks_factory": [Entry()], "lightning.fabric.callbacks_factory": [Entry()]}
    monkeypatch.setattr(
        "loopwright.compat.lightning.external_callbacks.entry_points", lambda group: groups.get(group, ())
    )
    assert metadata.version("lightning") == "2.6.6"
    mine = Added()
    trainer = L.Trainer(callbacks=mine, logger=False, enable_checkpointing=False)
    assert next(one for one in trainer.callbacks if isinstance(one, Added)) is mine
    assert len([one for one in trainer.callbacks if isinstance(one, Added)]) == 2
    assert [type(one) for one in L.Fabric(accelerator="cpu")._callbacks] == [Added]


def test_loggers_of_a_fabric_can_be_assigned(tmp_path: Path) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger
    from lightning.fabric.utilities.cloud_io import _is_dir, get_filesystem

    fabric, logger = Fabric(accelerator="cpu"), CSVLogger(str(tmp_path))
    fabric._loggers = [logger]
    assert fabric.loggers == [logger]
    assert fabric.logger is logger
    fabric.log("loss", 1.0, step=2)
    logger.save()
    assert (Path(logger.log_dir) / "metrics.csv").exists()
    assert _is_dir(get_filesystem(tmp_path), tmp_path)
    assert not _is_dir(get_filesystem(tmp_path), tmp_path / "none")


class Files(list[str]):
    """A list of a class of its own."""


def test_a_fabric_saves_objects(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu")
    fabric.save(tmp_path / "a.ckpt", {"module": nn.Linear(2, 1), "files": Files(["a"]), "step": 3})
    found = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert type(found["files"]) is Files
    assert found["files"] == ["a"]
    assert found["module"].keys() == {"weight", "bias"}
    assert fabric.load(tmp_path / "a.ckpt", weights_only=False)["files"] == ["a"]


@pytest.mark.parametrize("parity", [False, True])
def test_a_step_that_the_program_does_not_count(parity: bool, tmp_path: Path) -> None:
    import lightning as L

    uninstall()
    install(children=False, parity=parity)

    class Two(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.layers = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))
            self.calls: list[str] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.manual_backward(sum(layer(batch).square().mean() for layer in self.layers))
            first.step()
            before, after = second._on_before_step, second._on_after_step
            second._on_before_step = lambda: self.calls.append("before")
            second._on_after_step = lambda: self.calls.append("after")
            weight = self.layers[1].weight.detach().clone()
            second.step()
            assert not torch.equal(weight, self.layers[1].weight)
            second._on_before_step, second._on_after_step = before, after

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.layers]

    module = Two()
    trainer = fit(tmp_path, module=module, enable_checkpointing=False)
    assert trainer.global_step == 9
    assert module.calls == ["before", "after"] * 9
