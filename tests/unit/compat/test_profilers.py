"""What profilers of programs for Lightning are notified of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("installed")

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
STOPPER = "measure.<locals>.Stopper{'monitor': 'x', 'mode': 'min'}"


def measure(verb: str, **arguments: Any) -> Counter[str]:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.profilers import Profiler

    found: Counter[str] = Counter()

    class Count(Profiler):
        def start(self, action_name: str) -> None:
            found[action_name] += 1

        def stop(self, action_name: str) -> None:
            pass

    class Stopper(L.pytorch.callbacks.EarlyStopping):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pass

    given = {
        "callbacks": [Stopper("x", strict=False)],
        "max_epochs": 2,
        "limit_train_batches": 4,
        "limit_val_batches": 2,
    }
    trainer = L.Trainer(profiler=Count(), enable_checkpointing=False, **{**given, **arguments}, **QUIET)
    getattr(trainer, verb)(BoringModel())
    return found


def test_activities_have_lightnings_names() -> None:
    found = measure("fit", gradient_clip_val=1.0)
    expected = {
        "run_training_epoch": 2,
        "run_training_batch": 8,
        "[_TrainingEpochLoop].train_dataloader_next": 8,
        "[LightningModule]BoringModel.configure_optimizers": 1,
        "[LightningModule]BoringModel.optimizer_step": 8,
        "[LightningModule]BoringModel.optimizer_zero_grad": 8,
        "[LightningModule]BoringModel.configure_gradient_clipping": 8,
        "[LightningModule]BoringModel.on_train_batch_end": 8,
        f"[Callback]{STOPPER}.on_train_start": 1,
        f"[Callback]{STOPPER}.on_train_epoch_start": 2,
        "[Strategy]SingleDeviceStrategy.training_step": 8,
        "[Strategy]SingleDeviceStrategy.validation_step": 6,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["[_EvaluationLoop].val_next"] >= 6
    assert "run_training_step" not in found


def test_activities_of_a_prediction_have_lightnings_names() -> None:
    found = measure("predict", limit_predict_batches=2)
    assert found["[LightningModule]BoringModel.on_predict_batch_start"] == 2
    assert found["[_PredictionLoop].predict_next"] >= 2


def test_steps_to_be_profiled_are_counted_under_lightnings_name() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.profilers import SimpleProfiler

    profiler = SimpleProfiler(steps=(1, 2))
    L.Trainer(profiler=profiler, max_steps=4, limit_val_batches=0, enable_checkpointing=False, **QUIET).fit(
        BoringModel()
    )
    assert len(profiler.recorded_durations["run_training_batch"]) == 2


def test_profilers_of_programs_make_reports_and_names_of_files() -> None:
    from lightning.pytorch.profilers import SimpleProfiler

    profiler = SimpleProfiler(filename="mine")
    profiler.setup("fit", local_rank=1)
    assert profiler._stats_to_str({"a": "b"}) == "FIT Profiler Report\nProfile stats for: a rank: 1\nb"
    assert profiler._prepare_filename("x/y", ".json") == "fit-mine-1-x_y.json"
