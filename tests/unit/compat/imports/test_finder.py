"""Classes have Lightning's paths while the layer is installed, and stay classes of the core."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import typing
from importlib import import_module

import pytest
import torch

import loopwright as lw
from loopwright.compat import lightning as compat
from loopwright.compat.lightning.imports.homes import shown_paths
from loopwright.compat.lightning.overrides import find_own
from loopwright.lazy import is_core
from loopwright.settings.complete import public_path
from loopwright.settings.names import find_class
from loopwright.trainer.checkpointing.snapshot import counts_batches

# Where Lightning 2.6.6 defines what a program imports from the module on the left.
DEFINED = {
    "fabric.utilities.AttributeDict": "fabric.utilities.data",
    "pytorch.utilities.AttributeDict": "fabric.utilities.data",
    "pytorch.trainer.states.RunningStage": "pytorch.trainer.states",
    "pytorch.trainer.states.TrainerFn": "pytorch.trainer.states",
    "pytorch.callbacks.prediction_writer.WriteInterval": "pytorch.callbacks.prediction_writer",
    "pytorch.utilities.GradClipAlgorithmType": "pytorch.utilities.enums",
    "pytorch.callbacks.EarlyStopping": "pytorch.callbacks.early_stopping",
    "pytorch.callbacks.LearningRateMonitor": "pytorch.callbacks.lr_monitor",
    "pytorch.callbacks.SpikeDetection": "pytorch.callbacks.spike",
    "pytorch.loggers.CSVLogger": "pytorch.loggers.csv_logs",
    "fabric.loggers.CSVLogger": "fabric.loggers.csv_logs",
    "fabric.strategies.DDPStrategy": "pytorch.strategies.ddp",
    "pytorch.utilities.CombinedLoader": "pytorch.utilities.combined_loader",
    "pytorch.tuner.lr_finder._LRFinder": "pytorch.tuner.lr_finder",
    "pytorch.Trainer": "pytorch.trainer.trainer",
    "pytorch.LightningModule": "pytorch.core.module",
    "fabric.Fabric": "fabric.fabric",
}


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def root(request: pytest.FixtureRequest, installed: None) -> str:
    import_module(request.param)
    return str(request.param)


def place(path: str, root: str) -> str:
    if root == "lightning":
        return f"lightning.{path}"
    tree, _, rest = path.partition(".")
    return f"{'lightning_fabric' if tree == 'fabric' else 'pytorch_lightning'}.{rest}"


def test_classes_are_where_lightning_defines_them(root: str) -> None:
    for path, home in DEFINED.items():
        module, _, name = path.rpartition(".")
        found = getattr(import_module(place(module, root).rstrip(".")), name)
        assert (found.__module__, found.__qualname__, found.__name__) == (place(home, root), name, name)
        assert pickle.loads(pickle.dumps(found)) is found


def test_values_are_copied_saved_and_allowed_by_lightnings_names(root: str) -> None:
    stage = import_module(place("pytorch.trainer.states", root)).RunningStage.TRAINING
    values = lw.data.AttributeDict(lr=0.1, stage=stage)
    written = pickle.dumps(values)
    assert place("fabric.utilities.data", root).encode() in written
    assert b"loopwright" not in written
    again = pickle.loads(written)
    assert (type(again), again, again.stage) == (type(values), values, stage)
    assert copy.deepcopy(values) == values
    file = io.BytesIO()
    torch.save(stage, file)
    file.seek(0)
    with torch.serialization.safe_globals([type(stage)]):
        assert torch.load(file, weights_only=True) is stage
    assert stage in torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def test_hparams_of_a_module_have_lightnings_class_without_an_import_of_it(installed: None) -> None:
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert type(Net().hparams).__module__ == "lightning.fabric.utilities.data"


def test_defaults_of_a_trainer_have_lightnings_paths(installed: None) -> None:
    import lightning as L

    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, max_epochs=1)
    assert type(trainer.checkpoint_callback).__module__ == "lightning.pytorch.callbacks.model_checkpoint"


def test_a_switch_of_parity_replaces_the_class_at_the_path(installed: None) -> None:
    from lightning.pytorch.callbacks.lr_monitor import LearningRateMonitor as Shared

    assert Shared is lw.LearningRateMonitor
    assert Shared.__module__ == "lightning.pytorch.callbacks.lr_monitor"
    compat.uninstall()
    compat.install(children=False, parity=("learning_rates",))
    from lightning.pytorch.callbacks import LearningRateMonitor

    assert LearningRateMonitor is not lw.LearningRateMonitor
    assert LearningRateMonitor.__module__ == "lightning.pytorch.callbacks.lr_monitor"
    assert pickle.loads(pickle.dumps(LearningRateMonitor)) is LearningRateMonitor
    assert lw.LearningRateMonitor.__module__.startswith("loopwright.")


def test_uninstall_gives_classes_their_own_paths_back(installed: None) -> None:
    before = (lw.EarlyStopping.__module__, lw.EarlyStopping.__qualname__)
    from lightning.pytorch.callbacks import EarlyStopping

    assert EarlyStopping is lw.EarlyStopping
    compat.uninstall()
    assert (EarlyStopping.__module__, EarlyStopping.__qualname__) == before
    assert pickle.loads(pickle.dumps(EarlyStopping)) is lw.EarlyStopping


def test_shown_classes_stay_classes_of_the_core(installed: None) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
    from lightning.pytorch.strategies import DDPStrategy

    class Mine(EarlyStopping):
        def on_validation_batch_end(self, *args: object) -> None:
            pass

    assert is_core(EarlyStopping)
    assert not is_core(Mine)
    assert not counts_batches(TQDMProgressBar())
    assert counts_batches(Mine("loss"))
    assert find_own(DDPStrategy()) == {}
    assert public_path(EarlyStopping) == "loopwright.EarlyStopping"
    assert find_class("early_stopping", lw.Callback) is EarlyStopping


def test_sources_and_annotations_of_shown_classes_can_be_read(installed: None) -> None:
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    assert "class EarlyStopping" in inspect.getsource(EarlyStopping)
    assert typing.get_type_hints(LRSchedulerConfig)["interval"] is str


def test_no_two_classes_have_one_path() -> None:
    paths = [(name, where) for entries in shown_paths().values() for _, name, where in entries]
    twice = {path for path in paths if paths.count(path) > 1}
    assert not twice
