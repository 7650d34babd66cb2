"""`loopwright.compat.lightning` in this process: names, metadata, adapters, and what it adds to checkpoints."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import types
import warnings
from abc import ABC, abstractmethod
from fractions import Fraction
from functools import partial, update_wrapper
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.compat import lightning as compat
from loopwright.compat.absent import NotServed
from loopwright.compat.lightning.imports.finder import VERSION
from loopwright.compat.lightning.imports.paths import PATHS
from loopwright.data.tree import is_collection

pytestmark = pytest.mark.usefixtures("installed")

NAMES = (Path(__file__).parents[2] / "fixtures" / "lightning_names.txt").read_text().split()


def find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if attribute:
        return getattr(importlib.import_module(module), attribute)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        path, _, attribute = module.rpartition(".")
        return getattr(importlib.import_module(path), attribute)


def test_every_name_that_programs_use_can_be_imported() -> None:
    missing = []
    for name in NAMES:
        try:
            find(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing
    assert len(NAMES) > 200


def test_every_name_of_the_tables_has_a_home() -> None:
    for place, names in PATHS.items():
        module = importlib.import_module(f"lightning.{place}".rstrip("."))
        for name in names.split():
            assert name.startswith("*") or hasattr(module, name), (place, name)


def test_both_namespaces_give_the_same_objects_which_can_be_pickled() -> None:
    import lightning as L
    import lightning_fabric
    import pytorch_lightning as pl
    from lightning.pytorch.callbacks.early_stopping import EarlyStopping

    assert pl.callbacks.EarlyStopping is EarlyStopping is L.pytorch.callbacks.EarlyStopping is lw.EarlyStopping
    assert pl.Trainer is L.Trainer
    assert issubclass(L.LightningModule, lw.Module)
    assert lightning_fabric.Fabric is L.Fabric
    assert pickle.loads(pickle.dumps(L.LightningModule)) is L.LightningModule
    names: dict[str, Any] = {}
    exec("from lightning.pytorch.callbacks import *", names)
    assert names["LearningRateFinder"] is lw.LearningRateFinder
    assert isinstance(lw.Timer(), names["Timer"])  # which has Lightning's names besides
    assert not isinstance(lw.Timer(), type("OfProgram", (names["Timer"],), {}))


def test_metadata_is_served_while_installed() -> None:
    assert version("lightning") == version("pytorch-lightning") == version("pytorch_lightning") == VERSION
    assert importlib.util.find_spec("lightning.pytorch") is not None
    assert importlib.util.find_spec("lightning.nothing") is None
    compat.uninstall()
    with pytest.raises(PackageNotFoundError):
        version("pytorch-lightning")
    assert importlib.util.find_spec("pytorch_lightning") is None


def test_lightning_that_was_imported_before_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.uninstall()
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    with pytest.raises(lw.ConfigError, match="run-lightning"):
        compat.install(children=False)
    assert not compat.is_installed()


def test_children_get_two_variables_and_keep_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    compat.install()
    compat.install()
    assert os.environ["PYTHONPATH"] == os.pathsep.join([compat.SITE, "/mine"])
    assert os.environ[compat.SWITCH] == "1"
    compat.uninstall()
    assert os.environ["PYTHONPATH"] == "/mine"
    assert compat.SWITCH not in os.environ


def test_a_name_without_meaning_imports_and_says_why_when_used() -> None:
    from lightning.pytorch.loggers import LitLogger
    from lightning.pytorch.strategies import HPUParallelStrategy

    assert not isinstance(3, HPUParallelStrategy)
    with pytest.raises(NotServed, match=r"LitLogger.*\n.*migrating"):
        LitLogger("x")


def test_strategies_of_modules_that_parallelize_themselves_are_served() -> None:
    import lightning as L
    from lightning.fabric.strategies import ModelParallelStrategy as OfFabric
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as SameOfFabric
    from lightning.pytorch.strategies import ModelParallelStrategy

    def parallelize(module: nn.Module, device_mesh: object) -> nn.Module:
        return module

    assert ModelParallelStrategy is lw.strategies.ModelParallelStrategy
    assert SameOfFabric is OfFabric
    strategy = OfFabric(parallelize, 2, tensor_parallel_size=3, save_distributed_checkpoint=False)
    assert isinstance(strategy, ModelParallelStrategy)
    assert strategy.parallelize_fn is parallelize
    assert (strategy.axes.fsdp, strategy.axes.tp) == (2, 3)
    with pytest.raises(lw.ConfigError, match=r"Expected 6 processes for the mesh fsdp=2, tp=3 \(2 x 3\), got 4"):
        L.Trainer(strategy=ModelParallelStrategy(2, 3), devices=4, accelerator="cpu")


def test_misconfiguration_catches_what_loopwright_raises_and_can_be_raised() -> None:
    import lightning as L
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException, match="max_epochs"):
        L.Trainer(max_epochs=-7)
    with pytest.raises(MisconfigurationException, match=r"^mine$") as caught:
        raise MisconfigurationException("mine")
    assert str(pickle.loads(pickle.dumps(caught.value))) == "mine"
    assert "To fix it: do" in str(lw.ConfigError("what", fix="do"))


def test_a_program_derives_a_callback_from_an_abstract_class_too() -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Resolves(ABC):
        @abstractmethod
        def resolve(self) -> str: ...

    class Saves(ModelCheckpoint, Resolves):  # as finetuning-scheduler does
        def resolve(self) -> str:
            return "yes"

    assert isinstance(Saves(), ModelCheckpoint)
    assert not isinstance(lw.ModelCheckpoint(), Saves)
    assert isinstance(lw.ModelCheckpoint(), ModelCheckpoint)


def test_a_search_trains_a_module_with_methods_that_look_like_hooks(tmp_path: Path) -> None:
    import lightning as L
    from lightning.pytorch.tuner import Tuner

    class Old(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lr = nn.Linear(2, 1), 0.1

        def on_epoch_end(self) -> None: ...  # of an old Lightning, which a library kept

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    options: dict[str, Any] = {"enable_progress_bar": False, "default_root_dir": str(tmp_path), "accelerator": "cpu"}
    trainer = L.Trainer(logger=False, max_epochs=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Tuner(trainer).lr_find(Old(), loader, num_training=4) is not None


def test_enumerations_equal_their_text_in_any_case() -> None:
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType

    assert TrainerFn.FITTING == "fit" == TrainerFn("fit")
    assert "FIT" == TrainerFn.FITTING != "test"
    assert {"fit": 1}[TrainerFn.FITTING] == 1
    assert RunningStage.SANITY_CHECKING.evaluating
    assert not RunningStage.TRAINING.evaluating
    assert RunningStage.VALIDATING.dataloader_prefix == "val"
    assert GradClipAlgorithmType.supported_type("norm")


def test_rank_zero_only_runs_on_rank_0_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_only, rank_zero_warn

    say = rank_zero_only(lambda: "said")
    assert say() == "said"
    monkeypatch.setenv("RANK", "1")
    assert say() is None
    rank_zero_warn("nobody hears it")
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="heard"):
        rank_zero_warn("heard")
    assert rank_prefixed_message("x", 2) == "[rank: 2] x"


def test_environment_names_are_answered_from_what_is_installed() -> None:
    from lightning.fabric.utilities import imports
    from lightning.pytorch.profilers.pytorch import _KINETO_AVAILABLE

    assert imports._TORCH_GREATER_EQUAL_2_4
    assert not imports._TORCH_GREATER_EQUAL_9_9
    assert imports._TORCHMETRICS_GREATER_EQUAL_1_0_0
    assert imports._OMEGACONF_AVAILABLE
    assert not imports._NO_SUCH_PACKAGE_AVAILABLE
    assert _KINETO_AVAILABLE
    with pytest.raises(ImportError):
        from lightning.fabric.utilities.imports import nothing  # noqa: F401


def test_parameters_helpers() -> None:
    from lightning.pytorch.utilities import find_shared_parameters, grad_norm, set_shared_parameters
    from lightning.pytorch.utilities.model_helpers import is_overridden

    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    set_shared_parameters(tied, [["0.weight", "1.weight"]])
    assert find_shared_parameters(tied) == [["0.weight", "1.weight"]]
    layer = nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    norms = grad_norm(layer, 2)
    assert norms["grad_2.0_norm_total"].item() == pytest.approx(3**0.5)
    assert set(norms) == {"grad_2.0_norm/weight", "grad_2.0_norm/bias", "grad_2.0_norm_total"}
    model = line()
    assert is_overridden("training_step", model)
    assert not is_overridden("test_step", model)


def line(**more: Any) -> Any:
    """A module of the compat namespace; `more` are methods."""
    import lightning as L

    def __init__(self: Any) -> None:
        L.LightningModule.__init__(self)
        self.layer = nn.Linear(2, 1)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    own = {"__init__": __init__, "training_step": training_step, "configure_optimizers": configure_optimizers}
    return type("Line", (L.LightningModule,), {**own, **more})()


def loader(count: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(2.0 * count).reshape(count, 2) / count), batch_size=2)


def trainer(tmp_path: Path, **more: Any) -> Any:
    import lightning as L

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}  # fmt: skip
    return L.Trainer(**{**quiet, "default_root_dir": str(tmp_path), **more})


def test_state_stage_and_the_parts_that_libraries_touch_within_a_run(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus

    seen: list[Any] = []

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        t = self.trainer
        assert t.state.fn is TrainerFn.FITTING
        assert t.state.stage is RunningStage.TRAINING
        assert t.training
        assert isinstance(t.strategy, Strategy)
        assert isinstance(t.strategy, SingleDeviceStrategy)
        assert t.strategy.optimizers == t.optimizers
        assert t.strategy.lr_scheduler_configs == []
        assert t.strategy.root_device.type == "cpu"
        assert t.strategy.broadcast(5) == 5
        assert t.strategy == t.strategy
        assert t.strategy.lightning_module is t._model is self
        assert t.fit_loop.epoch_loop.batch_idx == batch_idx
        assert t.fit_loop._data_source.is_defined()
        assert not t.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        assert not t._accelerator_connector.is_distributed
        assert self._current_fx_name == "on_train_batch_start"
        self.log("seen", float(batch_idx))
        seen.append(t.fit_loop.epoch_progress.current.completed)

    model = line(on_train_batch_start=on_train_batch_start)
    t = trainer(tmp_path, max_epochs=2)
    t.fit(model, loader())
    assert seen == [0] * 4 + [1] * 4
    assert t.state.status == TrainerStatus.FINISHED
    assert t.state.finished
    assert t.fit_loop.max_epochs == t.max_epochs == 2
    assert [metric.name for metric in t._results.result_metrics] == ["seen"]
    assert t._callback_connector._reorder_callbacks(t.callbacks) == t.callbacks


def test_results_of_an_evaluation_are_those_of_the_core(tmp_path: Path) -> None:
    def test_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss", batch[0].mean())

    assert trainer(tmp_path).test(line(test_step=test_step), loader(), verbose=False) == [
        {"loss": pytest.approx(loader().dataset.tensors[0].mean().item())}  # type: ignore[attr-defined]
    ]


def test_logs_go_to_lightning_logs(tmp_path: Path) -> None:
    from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
    from lightning.pytorch.loggers import CSVLogger

    t = trainer(tmp_path, logger=True)
    assert t.logger.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert CSVLogger(tmp_path).root_dir == str(tmp_path / "lightning_logs")
    assert FabricCSVLogger(root_dir=tmp_path, name="n").root_dir == str(tmp_path)
    assert FabricCSVLogger(root_dir=tmp_path, name="n").log_dir == str(tmp_path / "n" / "version_0")
    assert type(trainer(tmp_path, logger=True, fast_dev_run=True).logger).__name__ == "DummyLogger"


def test_the_size_of_a_batch_whose_tensors_disagree_is_that_of_the_first(tmp_path: Path) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean", float(batch_idx), on_epoch=True)

    batches = [{"a": torch.zeros(3), "b": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(2)}]
    result = trainer(tmp_path).validate(
        line(validation_step=validation_step), DataLoader(batches, batch_size=None), verbose=False  # type: ignore[arg-type]
    )  # fmt: skip
    assert result[0]["mean"] == pytest.approx(0.25)


def test_a_method_that_looks_like_a_hook_is_a_warning_and_an_error_without_install(tmp_path: Path) -> None:
    model = line(on_train_epoch_finished=lambda self: None)
    t = trainer(tmp_path, max_steps=1)
    with pytest.warns(UserWarning, match="on_train_epoch_finished"):
        t.fit(model, loader())
    compat.uninstall()
    with pytest.raises(lw.ModuleError, match="on_train_epoch_finished"):
        t.fit(model, loader())


def test_a_checkpoint_holds_objects_and_lightnings_entries(tmp_path: Path) -> None:
    import numpy as np

    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"object": Fraction(1, 3), "number": np.float64(2.5), "plain": [1, 2]}

    t = trainer(tmp_path)
    t.fit(line(on_save_checkpoint=on_save_checkpoint), loader())
    path = tmp_path / "one.ckpt"
    t.save_checkpoint(path)
    plain = torch.load(path, weights_only=False)
    assert plain["pytorch-lightning_version"] == VERSION
    assert plain["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] == 1
    assert plain["mine"] == {"object": Fraction(1, 3), "number": 2.5, "plain": [1, 2]}
    t._checkpoint_connector.resume_start(path, weights_only=False)
    assert t._checkpoint_connector._loaded_checkpoint["mine"] == {
        "object": Fraction(1, 3),
        "number": 2.5,
        "plain": [1, 2],
    }
    other = line()
    t.strategy.connect(other)
    t._checkpoint_connector.resume_end()
    assert t._checkpoint_connector._loaded_checkpoint == {}
    again = trainer(tmp_path, max_epochs=2)
    again.fit(line(), loader(), ckpt_path=path)
    assert (again.current_epoch, again.global_step) == (2, 8)


def test_a_library_restores_a_model_in_steps(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    model = line()
    first.fit(model, loader())
    first.save_checkpoint(tmp_path / "one.ckpt")
    t, other = trainer(tmp_path), line()
    t.strategy.connect(other)
    t._checkpoint_connector.resume_start(tmp_path / "one.ckpt")
    t._checkpoint_connector.restore_model()
    assert torch.equal(other.layer.weight, model.layer.weight)


def test_hparams_of_any_class() -> None:
    from lightning.pytorch.core.mixins import HyperparametersMixin
    from lightning.pytorch.utilities.parsing import get_init_args, lightning_hasattr, lightning_setattr

    class Thing(HyperparametersMixin):
        def __init__(self, width: int, name: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters(ignore="name")
            self.arguments = get_init_args(sys._getframe())

    thing = Thing(3)
    assert thing.hparams == {"width": 3}
    assert thing.arguments == {"width": 3, "name": "x"}
    model = line()
    model.lr = 0.1
    assert lightning_hasattr(model, "lr")
    lightning_setattr(model, "lr", 0.2)
    assert model.lr == 0.2


def test_fabric_has_its_private_names_and_the_boring_model_trains(tmp_path: Path) -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel

    fabric = L.Fabric(accelerator="cpu", devices=1)
    assert fabric._precision is fabric.precision
    assert fabric._strategy is fabric.strategy
    assert fabric._precision.convert_module(nn.Linear(1, 1)) is not None
    for model in (BoringModel(), ManualOptimBoringModel()):
        before = model.layer.weight.detach().clone()
        trainer(tmp_path, max_steps=2, limit_val_batches=1).fit(model, datamodule=BoringDataModule())
        assert not torch.equal(before, model.layer.weight)


def test_command_line_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.cli import LightningCLI, instantiate_class

    from loopwright.compat.lightning.utilities.demos import BoringModel, DemoModel

    class CLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.set_defaults({"trainer.max_epochs": 3})

        def before_fit(self) -> None:
            raise KeyError("not called with run=False")

    cli = CLI(
        DemoModel, args=["--model.out_dim", "4", "--trainer.accelerator", "cpu", "--trainer.logger", "false"], run=False
    )
    assert (cli.model.l1.out_features, cli.trainer.max_epochs) == (4, 3)
    assert type(cli.trainer).__module__ == "lightning.pytorch.trainer.trainer"
    linear = instantiate_class(2, {"class_path": "torch.nn.Linear", "init_args": {"out_features": 5}})
    assert linear.weight.shape == (5, 2)
    assert cli.config.trainer.max_epochs == cli.config.get("trainer.max_epochs") == 3
    assert issubclass(BoringModel, lw.Module)


def test_importing_the_namespace_imports_no_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = (
            "import sys; from loopwright.compat.lightning import install; install(children=False); "
            "import lightning, lightning.pytorch, pytorch_lightning.callbacks, lightning.fabric.utilities; "
            "assert 'torch' not in sys.modules"
        )
        import subprocess

        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_a_module_outside_of_a_run_can_be_scripted() -> None:
    import lightning as L

    class Scripted(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    module, x = Scripted(), torch.ones(1, 2)
    assert torch.equal(module.to_torchscript()(x), module(x))
    assert torch.equal(torch.jit.script(module)(x), module(x))


def test_comets_former_names_are_its_present_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.loggers import CometLogger

    taken: dict[str, Any] = {}
    monkeypatch.setattr(lw.CometLogger, "__init__", lambda self, **arguments: taken.update(arguments))
    with pytest.warns(DeprecationWarning, match="former name") as told:
        CometLogger(project_name="p", save_dir="here", experiment_name="e", offline=True)
    assert taken == {"project": "p", "offline_directory": "here", "name": "e", "online": False}
    assert len(told) == 4


def test_the_default_project_of_wandb_is_that_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert WandbLogger(offline=True).name == "lightning_logs"
    assert lw.WandbLogger(offline=True).name == "loopwright_logs"


def test_a_list_of_lists_of_numbers_is_several_loaders(tmp_path: Path) -> None:
    seen: list[Any] = []

    def predict_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch, batch_idx, dataloader_idx

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        seen.append(batch)

    found = trainer(tmp_path).predict(line(predict_step=predict_step), [[0, 1], [2, 3]])
    assert found == [[(0, 0, 0), (1, 1, 0)], [(2, 0, 1), (3, 1, 1)]]
    trainer(tmp_path).fit(line(training_step=training_step), [[0, 1], [2, 3]])
    assert seen == [[0, 2], [1, 3]]
    compat.uninstall()
    assert not is_collection([[0, 1], [2, 3]])
    assert is_collection([[[0, 1], [2, 3]], loader()])


def test_what_a_tracer_puts_around_a_hook_does_not_override_it(tmp_path: Path) -> None:
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
    from lightning.pytorch.utilities.model_helpers import is_overridden

    seen: list[str] = []

    def trace(owner: Any, *names: str) -> None:
        for name in names:
            hook = getattr(owner, name)
            traced = partial(lambda hook, *args, **kwargs: (seen.append(hook.__qualname__), hook(*args))[1], hook)
            setattr(owner, name, update_wrapper(traced, hook))

    model, data = BoringModel(), BoringDataModule()
    trace(model, "prepare_data", "configure_sharded_model", "on_before_batch_transfer", "validation_step")
    trace(data, "prepare_data", "on_before_batch_transfer")
    assert not is_overridden("prepare_data", model)
    assert is_overridden("validation_step", model)
    trainer(tmp_path, limit_val_batches=1).validate(model, datamodule=data, verbose=False)
    assert [name.partition(".")[2] for name in seen] == ["on_before_batch_transfer", "validation_step"]
    assert not seen[0].startswith("LightningDataModule")


def test_the_rank_is_known_once_a_trainer_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    for name, value in (("NODE_RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        monkeypatch.setenv(name, value)
    t = trainer(tmp_path, devices=2, num_nodes=2, strategy="ddp")
    assert t.global_rank == rank_zero_only.rank == 2
    compat.uninstall()
    assert rank_zero_only.rank == 0


def test_a_summary_is_lightnings(tmp_path: Path) -> None:
    from lightning.pytorch.utilities.model_summary import ModelSummary

    class Inner(nn.Module):
        def forward(self, *inputs: Any, **named: Any) -> None:
            return None

    class Outer(lw.Module):
        def __init__(self, example: Any) -> None:
            super().__init__()
            self.layer, self.example_input_array = Inner(), example

        def forward(self, *inputs: Any, **named: Any) -> None:
            return self.layer(*inputs, **named)  # type: ignore[no-any-return]

    two, three = torch.zeros(1, 2), torch.zeros(3, 2)
    for example, size in (
        ([], "?"), (torch.tensor(0), "?"), ({"a": two}, [1, 2]), ({"a": two, "b": three}, [[1, 2], [3, 2]]),
        ((two, three), [[1, 2], [3, 2]]), (two, [1, 2]),
    ):  # fmt: skip
        assert ModelSummary(Outer(example)).in_sizes == [size]  # type: ignore[arg-type]
    model = Outer(two)
    summary = ModelSummary(model)
    assert summary.total_training_modes == {"train": 1, "eval": 0}
    model.layer.eval()
    assert summary.total_training_modes == {"train": 0, "eval": 1}


def test_small_things_of_loggers_profilers_and_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
    from lightning.pytorch.profilers import SimpleProfiler

    class Data(BoringDataModule):
        def prepare_data(self) -> None:
            pass

    profiler = SimpleProfiler()
    t = trainer(tmp_path, profiler=profiler, limit_train_batches=1, limit_val_batches=0)
    t.fit(BoringModel(), datamodule=Data())
    assert len(profiler.recorded_durations["[LightningDataModule]Data.prepare_data"]) == 1
    before = t.optimizers
    t.strategy.setup_optimizers(t)
    assert len(t.optimizers) == 1
    assert t.optimizers[0] is not before[0]
    assert t.strategy.restore_checkpoint_after_setup is False

    with pytest.warns(UserWarning, match="Could not log computational graph"):
        TensorBoardLogger(tmp_path, log_graph=True).log_graph(BoringModel())

    run = MagicMock()
    wandb = MagicMock(run=None, init=lambda **options: run, __spec__=ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for is_synced, logged in ((True, {"loss": 1.0}), (False, {"loss": 1.0, "trainer/global_step": 3})):
        run.reset_mock()
        run.settings.sync_tensorboard = is_synced
        WandbLogger(save_dir=tmp_path, sync_tensorboard=is_synced).log_metrics({"loss": 1.0}, step=3)
        run.log.assert_called_once_with(logged)
        axis = "global_step" if is_synced else "trainer/global_step"
        assert [one.kwargs["step_metric"] for one in run.define_metric.mock_calls if one.kwargs] == [axis]
    wandb.run = run
    WandbLogger.download_artifact("name", str(tmp_path))
    run.use_artifact.assert_called_once_with("name")


def test_warnings_that_may_be_none_are_off_by_the_environment() -> None:
    program = """
import os, warnings
os.environ["POSSIBLE_USER_WARNINGS"] = "off"
from loopwright.compat.lightning import install
install(children=False)
from lightning.pytorch.utilities.warnings import PossibleUserWarning
with warnings.catch_warnings(record=True) as caught:
    warnings.warn("a", PossibleUserWarning)
    warnings.warn("b", UserWarning)
print([str(one.message) for one in caught])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['b']\n"


def test_a_schedule_without_a_state_is_resumed(tmp_path: Path) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Stateless(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> None:  # type: ignore[override]
            return None

        def load_state_dict(self, state_dict: Any) -> None:
            assert state_dict is None

    class Model(BoringModel):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [Stateless(optimizer, 1)]

    few = {"limit_train_batches": 1, "limit_val_batches": 0}
    t = trainer(tmp_path, **few)
    t.fit(Model())
    t.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt")["lr_schedulers"] == [None]
    again = trainer(tmp_path, **few, max_epochs=2)
    again.fit(Model(), ckpt_path=tmp_path / "a.ckpt")
    assert again.current_epoch == 2
