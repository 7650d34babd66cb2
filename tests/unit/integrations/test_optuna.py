"""`OptunaPruning` with the real Optuna; tests/integration/trainer/test_optuna.py has several ranks and a kill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Net, loader, net, quiet

import loopwright as lw
from loopwright.errors import ConfigError, MissingMetric

optuna = pytest.importorskip("optuna", reason="optuna is not installed")
OptunaPruning = pytest.importorskip("loopwright.integrations.optuna").OptunaPruning


class Scored(Net):
    """Logs a given value in each validation."""

    scores: Sequence[float] = ()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.scores[self.trainer.current_epoch]), batch_size=len(batch[0]))


def make_study(**arguments: Any) -> Any:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=5.0), **arguments)


def train(trial: Any, scores: Sequence[float], *callbacks: lw.Callback, **arguments: Any) -> tuple[lw.Trainer, Any]:
    ckpt_path = arguments.pop("ckpt_path", None)
    pruning = OptunaPruning(trial, "score")
    module = net(Scored)
    module.scores = scores
    trainer = quiet(
        max_epochs=len(scores), callbacks=[pruning, *callbacks], enable_checkpointing=bool(callbacks), **arguments
    )
    try:
        trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    finally:
        trial.set_user_attr("step", trainer.global_step)
    return trainer, pruning


def test_a_pruned_trial_is_pruned_in_the_study_and_others_are_complete() -> None:
    scores = [[3.0, 2.0, 1.0], [3.0, 9.0, 1.0]]
    study = make_study()
    study.optimize(lambda trial: train(trial, scores[trial.number])[1].values[-1], n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert [trial.intermediate_values for trial in study.trials] == [{0: 3.0, 1: 2.0, 2: 1.0}, {0: 3.0, 1: 9.0}]
    assert [trial.user_attrs["step"] for trial in study.trials] == [12, 8]
    assert study.best_value == 1.0


def test_a_pruned_fit_has_ended_as_after_any_stop_with_its_last_checkpoint_and_closed_loggers(tmp_path: Path) -> None:
    checkpoint = lw.ModelCheckpoint(dirpath=tmp_path, save_last=True)
    logger = lw.CSVLogger(tmp_path, name="logs", version="")
    trial = make_study().ask()
    pruning = OptunaPruning(trial, "score")
    module = net(Scored)
    module.scores = [3.0, 9.0, 1.0]
    trainer = lw.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[pruning, checkpoint], logger=logger, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(optuna.TrialPruned, match=r"pruned at score = 9 \(value 1\)"):
        trainer.fit(module, loader(), loader())
    assert trainer.state.status == "finished"
    assert torch.load(checkpoint.last_model_path, weights_only=True)["global_step"] == 8
    assert "9.0" in (tmp_path / "logs" / "metrics.csv").read_text()


@pytest.mark.parametrize("interval", [1.0, 2])
def test_each_validation_is_reported_once_by_its_number(interval: float) -> None:
    trial = make_study().ask()
    train(trial, [3.0, 2.0], val_check_interval=interval)
    study_values = trial.study.trials[0].intermediate_values
    assert study_values == ({0: 3.0, 1: 2.0} if interval == 1.0 else {0: 3.0, 1: 3.0, 2: 2.0, 3: 2.0})


def test_a_metric_of_training_is_reported_at_the_end_of_epochs_without_validation() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("score", float(batch_idx), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trial = make_study().ask()
    quiet(max_epochs=2, callbacks=[OptunaPruning(trial, "score")]).fit(net(Logs), loader())
    assert trial.study.trials[0].intermediate_values == {0: 1.5, 1: 1.5}


def test_a_metric_that_is_not_logged_ends_the_first_epoch_with_its_nearest_names() -> None:
    trainer = quiet(max_epochs=2, callbacks=[OptunaPruning(make_study().ask(), "scores")])
    module = net(Scored)
    module.scores = [1.0, 1.0]
    with pytest.raises(MissingMetric, match="'scores'.*'score'"):
        trainer.fit(module, loader(), loader())


def test_a_resumed_training_continues_the_numbers_in_another_trial(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    checkpoint = lw.ModelCheckpoint(dirpath=tmp_path, save_last=True)
    first = make_study(study_name="one", storage=storage).ask()
    train(first, [3.0, 2.0], checkpoint)
    study = optuna.load_study(study_name="one", storage=storage, pruner=optuna.pruners.ThresholdPruner(upper=5.0))
    second = study.ask()
    _, pruning = train(second, [3.0, 2.0, 1.0, 0.5], ckpt_path=checkpoint.last_model_path)
    assert pruning.values == [3.0, 2.0, 1.0, 0.5]
    assert study.trials[1].intermediate_values == {0: 3.0, 1: 2.0, 2: 1.0, 3: 0.5}


def test_a_trial_without_study_and_a_trainer_without_trial() -> None:
    _, pruning = train(optuna.trial.FixedTrial({}), [9.0, 9.0])
    assert pruning.values == [9.0, 9.0]
    with pytest.raises(ConfigError, match="expected one trial for all ranks"):
        quiet(callbacks=[OptunaPruning(None, "score")]).fit(net(), loader())
