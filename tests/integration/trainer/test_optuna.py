"""Optuna's trials on several ranks, and after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from torch import nn
from toys import Net, loader, net, quiet

import loopwright as lw
from loopwright.errors import ConfigError

optuna = pytest.importorskip("optuna", reason="optuna is not installed")
OptunaPruning = pytest.importorskip("loopwright.integrations.optuna").OptunaPruning


class Scored(Net):
    """Logs a value that differs by rank: the mean over two ranks is `bad` + epoch + 1."""

    bad = 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.bad + self.trainer.current_epoch + 2.0 * self.trainer.global_rank, batch_size=1)


def make_study(storage: str | None = None) -> Any:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        study_name="ranks", storage=storage, load_if_exists=True, pruner=optuna.pruners.ThresholdPruner(upper=5.5)
    )


def train(trial: Any, bad: float, **arguments: Any) -> tuple[lw.Trainer, Any]:
    pruning = OptunaPruning(trial, "score")
    module = net(Scored)
    module.bad = bad
    trainer = quiet(max_epochs=3, devices=2, callbacks=[pruning], **arguments)
    try:
        trainer.fit(module, loader(), loader())
    except optuna.TrialPruned:
        pruning.was_raised = True
    return trainer, pruning


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
@pytest.mark.parametrize("is_stored", [True, False])
def test_the_study_stays_in_the_process_that_starts_the_ranks(tmp_path: Path, strategy: str, is_stored: bool) -> None:
    study = make_study(f"sqlite:///{tmp_path}/study.db" if is_stored else None)
    steps = []

    def objective(trial: Any) -> float:
        pruning = OptunaPruning(trial, "score")
        module = net(Scored)
        module.bad = [0.0, 4.0][trial.number]
        trainer = quiet(max_epochs=3, devices=2, strategy=strategy, callbacks=[pruning])
        try:
            trainer.fit(module, loader(), loader())
        finally:
            steps.append(trainer.global_step)
        return float(pruning.values[-1])

    study.optimize(objective, n_trials=2)
    assert [(trial.state.name, trial.value) for trial in study.trials] == [("COMPLETE", 3.0), ("PRUNED", 6.0)]
    assert [trial.intermediate_values for trial in study.trials] == [{0: 1.0, 1: 2.0, 2: 3.0}, {0: 5.0, 1: 6.0}]
    assert steps == [6, 4]


def _rank_zero_has_the_trial(rank: int, size: int) -> tuple[int, list[float], bool]:
    study = make_study() if rank == 0 else None
    trainer, pruning = train(None if study is None else study.ask(), 4.0, strategy="ddp")
    return trainer.global_step, pruning.values, getattr(pruning, "was_raised", False)


def test_all_ranks_stop_after_the_same_step_where_rank_zero_alone_has_the_trial() -> None:
    assert run_ranks(_rank_zero_has_the_trial, 2, connect=False) == [(4, [5.0, 6.0], True)] * 2


def _distributed_trial(rank: int, size: int) -> tuple[int, list[float], bool]:
    from optuna_integration import TorchDistributedTrial

    trial = TorchDistributedTrial(make_study().ask() if rank == 0 else None)
    trainer, pruning = train(trial, 4.0, strategy="ddp")
    return trainer.global_step, pruning.values, getattr(pruning, "was_raised", False)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optunas_own_trial_for_ranks_is_asked_on_all_of_them() -> None:
    pytest.importorskip("optuna_integration", reason="optuna-integration is not installed")
    assert run_ranks(_distributed_trial, 2) == [(4, [5.0, 6.0], True)] * 2


def _own_trials(rank: int, size: int) -> str:
    study = make_study()
    for _ in range(rank):
        study.ask()
    with pytest.raises(ConfigError) as caught:
        train(study.ask(), 0.0, strategy="ddp")
    return str(caught.value)


def test_ranks_with_a_trial_each_are_refused() -> None:
    for message in run_ranks(_own_trials, 2, connect=False):
        assert "[('ranks', 0), ('ranks', 1)] by rank" in message
        assert "ddp_spawn" in message


PROGRAM = Path(__file__)


def _killed_study(folder: Path, kill_at: int) -> None:
    """Run three trials of two epochs in a stored study; the process is killed at a step of trial 1."""
    storage = f"sqlite:///{folder}/study.db"
    study = optuna.create_study(study_name="killed", storage=storage, load_if_exists=True)

    class Kill(lw.Callback):
        runs_last = True

        def on_train_batch_end(self, trainer: lw.Trainer, pl_module: nn.Module, *others: Any) -> None:
            if trainer.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    class Logs(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", self.loss(batch), batch_size=len(batch[0]))

    def objective(trial: Any) -> float:
        number = trial.user_attrs.get("continues", trial.number)
        trial.suggest_float("lr", 0.1, 0.2)
        pruning = OptunaPruning(trial, "score")
        checkpoint = lw.ModelCheckpoint(dirpath=folder / f"trial-{number}", save_last=True)
        kill = [Kill()] if number == 1 and kill_at else []
        trainer = quiet(max_epochs=3, callbacks=[pruning, checkpoint, *kill], enable_checkpointing=True)
        trainer.fit(net(Logs), loader(), loader(), ckpt_path="last")
        return float(pruning.values[-1])

    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):  # of a killed process
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params, {"continues": trial.user_attrs.get("continues", trial.number)})
    study.optimize(objective, n_trials=3 - sum(trial.state.name == "COMPLETE" for trial in study.trials))


@pytest.mark.slow
def test_a_stored_study_continues_the_trial_in_which_it_was_killed(tmp_path: Path) -> None:
    results = []
    for name, kills in (("whole", [0]), ("killed", [10, 0])):
        folder = tmp_path / name
        folder.mkdir()
        for kill_at in kills:
            code = f"import test_optuna, pathlib; test_optuna._killed_study(pathlib.Path({str(folder)!r}), {kill_at})"
            paths = [str(PROGRAM.parent), *sys.path]
            ended = subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False
            )
            assert ended.returncode == (-signal.SIGKILL if kill_at else 0)
        study = optuna.load_study(study_name="killed", storage=f"sqlite:///{folder}/study.db")
        results.append([trial for trial in study.trials if trial.state.name == "COMPLETE"])
    whole, killed = results
    assert [trial.intermediate_values for trial in killed] == [trial.intermediate_values for trial in whole]
    assert [len(trial.intermediate_values) for trial in whole] == [3, 3, 3]
