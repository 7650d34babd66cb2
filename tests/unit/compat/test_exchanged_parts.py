"""Callbacks of libraries that override Lightning's inner steps, exchange optimizers, or restore them during a run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from unit.checkpoint.file.test_bounds import VALUES, written

from loopwright.compat.lightning import install, uninstall
from loopwright.errors import CheckpointError


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

    from loopwright.compat.absent import NotServed

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


def test_a_library_restores_callbacks_by_the_values_of_their_arguments(tmp_path: Path) -> None:
    import lightning as L

    class Counting(L.Callback):
        def __init__(self, share: float) -> None:
            self.share, self.count = share, 0

        @property
        def state_key(self) -> str:
            return self._generate_state_key(share=self.share)

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            seen.append((checkpoint["global_step"], self.count))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    seen: list[tuple[int, int]] = []  # the step of the file, and the count before its state is loaded
    fit(tmp_path, Counting(1.0), enable_checkpointing=False).save_checkpoint(tmp_path / "one.ckpt")
    trainer = L.Trainer(accelerator="cpu", callbacks=[Counting(1)], default_root_dir=str(tmp_path), logger=False)
    trainer._checkpoint_connector.resume_start(tmp_path / "one.ckpt")
    trainer._checkpoint_connector.restore_callbacks()
    assert next(one for one in trainer.callbacks if isinstance(one, Counting)).count == 9
    assert seen == [(9, 0)]


class Opens:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_readers_for_libraries_execute_and_allocate_nothing_for_a_file(tmp_path: Path) -> None:
    from lightning.fabric.utilities.cloud_io import _load

    trainer = fit(tmp_path, enable_checkpointing=False)
    readers = [trainer._checkpoint_connector.resume_start, trainer.strategy.load_checkpoint, _load]
    torch.save({"state_dict": Opens(tmp_path / "opened")}, tmp_path / "runs.ckpt")
    large = written(tmp_path / "large.ckpt", VALUES["tensor"])
    for read in readers:
        with pytest.raises((CheckpointError, pickle.UnpicklingError), match="builtins|io.open"):
            read(tmp_path / "runs.ckpt")
        with pytest.raises(CheckpointError, match="asks for|allocate"):
            read(large)
    assert not (tmp_path / "opened").exists()

    torch.save({"state_dict": {}, "callbacks": [1]}, tmp_path / "altered.ckpt")
    with pytest.raises(CheckpointError, match="altered or was not written by a Trainer: expected a dict at callbacks"):
        trainer._checkpoint_connector.resume_start(tmp_path / "altered.ckpt")
    assert trainer._checkpoint_connector._loaded_checkpoint == {}


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
        "loopwright.compat.lightning.callbacks.external.entry_points", lambda group: groups.get(group, ())
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


def test_a_strategy_of_lightnings_interface_is_called_with_its_arguments(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Noting(SingleDeviceStrategy):
        calls: list[Any] = []

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)  # type: ignore[misc]
            self.calls.append(("setup", len(trainer.optimizers)))

        def on_train_start(self) -> None:
            self.calls.append("on_train_start")

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.calls.append(("training_step", batch_idx))
            return super().training_step(batch, batch_idx)  # type: ignore[misc]

        def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            self.calls.append(("backward", type(optimizer).__name__))
            super().backward(2 * closure_loss, optimizer, *args, **kwargs)

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            self.calls.append(("optimizer_step", type(model).__name__, closure()))
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[call-arg]

    module = make_module()
    by_hand = copy.deepcopy(module.layer)
    fit(tmp_path, module=module, strategy=Noting("cpu"), max_steps=1, enable_checkpointing=False)
    assert Noting.calls == [
        ("setup", 1), "on_train_start", ("training_step", 0), ("backward", "SGD"), ("optimizer_step", "Line", None),
    ]  # fmt: skip
    (2 * by_hand(batches()[0]).square().mean()).backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.1).step()
    assert torch.equal(module.layer.weight, by_hand.weight)


def test_a_precision_of_lightnings_interface_is_called_with_its_arguments(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import Precision

    class Noting(Precision):
        calls: list[str] = []

        def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
            self.calls.append(f"pre_backward {type(module).__name__}")
            return 2 * tensor

        def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.calls.append("backward")
            super().backward(tensor, model, optimizer, *args, **kwargs)  # type: ignore[misc]

        def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
            self.calls.append("post_backward")
            return tensor

        def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
            self.calls.append(f"clip_gradients {clip_val} {gradient_clip_algorithm.value}")
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)  # type: ignore[misc]

        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            self.calls.append("optimizer_step")
            return super().optimizer_step(optimizer, model, closure, **kwargs)  # type: ignore[call-arg]

    module = make_module()
    by_hand = copy.deepcopy(module.layer)
    options: Any = {"max_steps": 1, "enable_checkpointing": False, "gradient_clip_val": 0.01}
    fit(tmp_path, module=module, plugins=[Noting()], **options)
    assert Noting.calls == [
        "pre_backward Line", "backward", "post_backward", "clip_gradients 0.01 norm", "optimizer_step",
    ]  # fmt: skip
    (2 * by_hand(batches()[0]).square().mean()).backward()
    nn.utils.clip_grad_norm_(by_hand.parameters(), 0.01)
    torch.optim.SGD(by_hand.parameters(), lr=0.1).step()
    assert torch.equal(module.layer.weight, by_hand.weight)


@pytest.mark.parametrize("name", ["bf16-true", "16-true"])
def test_deepspeeds_precision_casts_as_lightnings_does(name: str) -> None:
    from lightning.pytorch.plugins import DeepSpeedPrecision

    precision = DeepSpeedPrecision(name)
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}[name]
    with precision.module_init_context():
        assert nn.Linear(1, 1).weight.dtype is dtype
    assert precision.convert_module(nn.Linear(1, 1)).weight.dtype is dtype
    assert precision.convert_input({"x": torch.ones(1), "y": torch.ones(1, dtype=torch.long)})["x"].dtype is dtype


def test_a_precision_of_the_program_is_the_context_of_steps(tmp_path: Path) -> None:
    from contextlib import contextmanager

    from lightning.pytorch.plugins import Precision

    class Noting(Precision):
        entered = 0

        @contextmanager
        def forward_context(self) -> Iterator[None]:  # type: ignore[override]
            self.entered += 1
            yield

    precision = Noting()
    fit(tmp_path, plugins=[precision], max_steps=2, enable_checkpointing=False)
    assert precision.entered == 2


def test_a_module_on_fabric_finds_it_in_place_of_its_trainer() -> None:
    import lightning as L

    module = make_module()
    with pytest.raises(RuntimeError, match="attached"):
        _ = module.trainer
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.setup(module)
    assert (module.trainer.world_size, module.trainer.is_global_zero) == (1, True)
    with pytest.raises(AttributeError, match="max_epochs"):
        _ = module.trainer.max_epochs


def test_a_module_steps_and_logs_by_its_fabric(tmp_path: Path) -> None:
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    module = make_module()
    module.inner = make_module()
    fabric = L.Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(str(tmp_path)))
    fabric.setup(module)
    assert module.fabric is module.inner.fabric is fabric
    assert (module.logger, module.loggers) == (fabric.loggers[0], fabric.loggers)
    module.manual_backward(module.layer(batches()[0]).sum())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.layer.parameters(), lr=0.1))
    module.clip_gradients(optimizer, 0.25)
    norm = nn.utils.get_total_norm([one.grad for one in module.layer.parameters() if one.grad is not None])
    assert norm.item() == pytest.approx(0.25, abs=1e-6)
    module.clip_gradients(optimizer, 0.1, "value")
    assert max(one.grad.abs().max().item() for one in module.layer.parameters()) <= 0.1001


def test_deepspeeds_precision_of_fabric_calls_the_engine() -> None:
    from lightning.fabric.plugins import DeepSpeedPrecision as OfFabric
    from lightning.pytorch.plugins import DeepSpeedPrecision

    class Engine:
        def backward(self, *args: Any, **kwargs: Any) -> None:
            self.got = args, kwargs

    engine, loss = Engine(), torch.ones(())
    precision = OfFabric("32-true")
    precision.backward(loss, engine, 1, scale=2)
    assert engine.got == ((loss, 1), {"scale": 2})
    assert isinstance(precision, DeepSpeedPrecision)


def test_a_precision_of_the_program_converts_the_batch_or_all_arguments_at_once(tmp_path: Path) -> None:
    import lightning as L
    from lightning.pytorch.plugins import Precision

    class Halving(Precision):
        def convert_input(self, data: Any) -> Any:
            got.append(data)
            return data / 2 if isinstance(data, Tensor) else data

    got: list[Any] = []
    seen: list[Tensor] = []
    module = make_module()
    step = module.training_step
    module.training_step = lambda batch, batch_idx: seen.append(batch) or step(batch, batch_idx)
    fit(tmp_path, module=module, plugins=[Halving()], max_steps=1, enable_checkpointing=False)
    assert len(got) == 1
    assert torch.equal(got[0], batches()[0])
    assert torch.equal(seen[0], batches()[0] / 2)

    got.clear()
    linear = L.Fabric(accelerator="cpu", devices=1, plugins=[Halving()]).setup(nn.Linear(2, 1))
    one = torch.ones(1, 2)
    linear(one)
    linear(input=one)
    assert got == [((one,), {}), ((), {"input": one})]


def test_a_checkpoint_callback_of_the_program_says_what_it_has_saved(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Own(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            Path(filepath).mkdir()
            self._last_global_step_saved = trainer.global_step
            self._last_checkpoint_saved = filepath

    callback: Any = Own(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    fit(tmp_path, callback, max_epochs=2)
    assert (callback._last_global_step_saved, Path(callback._last_checkpoint_saved).name) == (6, "epoch=1.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]


def test_libraries_look_into_a_fabric_and_its_modules() -> None:
    import lightning as L

    fabric, own = L.Fabric(accelerator="cpu", devices=1), nn.Linear(2, 1)
    assert not fabric._launched
    fabric.launch()
    module: Any = fabric.setup(own)
    assert (fabric._launched, module._forward_module, module._original_module) == (True, own, own)


def test_a_fabric_and_precisions_pass_arguments_as_lightning_does() -> None:
    import lightning as L
    from lightning.fabric.plugins.precision import FSDPPrecision, Precision

    class ByKeyword:
        def log_metrics(self, *, metrics: dict[str, float], step: int | None) -> None:
            rows.append((metrics, step))

    class Steps(torch.optim.SGD):
        def step(self, closure: Any = None, **kwargs: Any) -> Any:
            return closure, kwargs

    rows: list[Any] = []
    fabric = L.Fabric(accelerator="cpu", devices=1, loggers=ByKeyword())
    fabric.log("a", torch.tensor(1.5), step=3)
    fabric.log_dict({"b": 2.0})
    assert rows == [({"a": 1.5}, 3), ({"b": 2.0}, None)]

    module = L.Fabric(accelerator="cpu", devices=1).setup(make_module())
    with pytest.raises(IndexError):
        _ = module.logger

    optimizer = Steps([nn.Parameter(torch.ones(1))], lr=0.1)
    assert Precision().optimizer_step(optimizer, keyword=1) == (None, {"keyword": 1})
    assert Precision().optimizer_step(optimizer, model=module, closure=len, keyword=1) == (len, {"keyword": 1})

    half = FSDPPrecision("bf16-true")
    assert isinstance(half, FSDPPrecision)
    with pytest.warns(UserWarning, match="FSDP with `bf16-true` enables computation in lower precision"):
        assert half.mixed_precision_config.param_dtype is torch.bfloat16
    assert FSDPPrecision("16-mixed").mixed_precision_config.reduce_dtype is torch.float16
