"""`finetune` on two ranks: the weights of one process; killed runs go on, also on other ranks and strategies."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from kept import keep
from ranks import run_ranks
from recipe_models import import_libraries
from recipe_runs import largest_difference, make_inputs, poison, same_bits, settings, weights

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.errors import NonFiniteError
from loopwright.loggers import CSVLogger
from loopwright.recipes.train import finetune

# Any in this file: settings.

# float32 sums in another order, over 6 steps.
TOLERANCE = 1e-6


class Kill(lw.Callback):
    """Kills the process at a step, as the system does when memory runs out."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: lw.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_libraries()
    return make_inputs(tmp_path_factory.mktemp("inputs"), chats=22)


def given(inputs: Path, out: Path, size: int, **changes: Any) -> Any:
    """Two epochs of 22 rows in steps of 8: the last window of an epoch has 6 rows."""
    return settings(
        inputs, out, packing=False, epochs=2, global_batch=8, micro_batch=2, devices=size, save_every=2, **changes
    )


def train(rank: int, size: int, inputs: Path, out: Path, changes: dict[str, Any]) -> tuple[int, int] | None:
    report = finetune(given(inputs, out, size, **changes))
    assert (report is None) == (rank > 0)
    return None if report is None else (report.trained_tokens, report.steps)


def killed(inputs: Path, out: Path, size: int, **changes: Any) -> None:
    """Start a training that is killed in its first epoch, after step 3; the last checkpoint is of step 2."""
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(train, size, inputs, out, {**changes, "trainer": {"callbacks": [Kill(3)]}}, connect=False)
    assert not (out / "report.json").exists()


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert finetune(given(inputs, out, 1)) is not None
    return out


@pytest.fixture(scope="module")
def interrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that was killed."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    killed(inputs, out, 1)
    return out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_what_one_process_trains(inputs: Path, alone: Path, tmp_path: Path, strategy: str) -> None:
    # fsdp leaves out micro-batches that do not suffice for all ranks: 10 of 11, where ddp reads all.
    changes: dict[str, Any] = {"strategy": strategy}
    if strategy == "fsdp":
        changes.update(steps=2, epochs=None, save_every=None)
        assert finetune(settings(inputs, tmp_path / "alone", packing=False, steps=2, global_batch=8, micro_batch=2))
    done = run_ranks(fsdp_steps if strategy == "fsdp" else train, 2, inputs, tmp_path / "run", changes, connect=False)[
        0
    ]

    reference = tmp_path / "alone" if strategy == "fsdp" else alone
    assert done is not None
    assert largest_difference(weights(reference), weights(tmp_path / "run")) < TOLERANCE


def fsdp_steps(rank: int, size: int, inputs: Path, out: Path, changes: dict[str, Any]) -> Any:
    report = finetune(
        settings(inputs, out, packing=False, steps=2, global_batch=8, micro_batch=2, devices=size, strategy="fsdp")
    )
    return None if report is None else report.steps


def losses(rank: int, size: int, inputs: Path, out: Path) -> list[float | None]:
    """Return the losses of the report, and those that were logged, of steps 2 and 4 of 5."""
    given = {
        "packing": False,
        "steps": 5,
        "global_batch": 8,
        "micro_batch": 2,
        "strategy": "ddp" if size > 1 else "auto",
    }
    trainer = {"logger": CSVLogger(out, name="logs", version=""), "log_every_n_steps": 2}
    report = finetune(settings(inputs, out, devices=size, trainer=trainer, learning_rate=1e-2, **given))
    if report is None:
        return []
    with (out / "logs" / "metrics.csv").open() as rows:
        logged = [float(row["train_loss"]) for row in csv.DictReader(rows) if row["train_loss"]]
    assert len(logged) == 2
    return [report.first_train_loss, report.train_loss, *logged]


def test_losses_are_those_of_all_ranks(inputs: Path, tmp_path: Path) -> None:
    alone = losses(0, 1, inputs, tmp_path / "alone")
    found = run_ranks(losses, 2, inputs, tmp_path / "run", connect=False)[0]
    assert found == pytest.approx(alone, rel=1e-6)


def end(rank: int, size: int, inputs: Path, out: Path) -> list[str]:
    """Return the errors of a training whose loss is NaN on one rank, under two strategies."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, "Question 5 ")
        for strategy in ("ddp", "fsdp"):
            given = {"packing": False, "micro_batch": 1, "global_batch": 4, "save_every": 1, "strategy": strategy}
            with pytest.raises(NonFiniteError) as caught:
                finetune(settings(inputs, out / strategy, devices=size, trainer={"log_every_n_steps": 3}, **given))
            found.append(str(caught.value))
    return found


def test_a_loss_that_is_not_finite_on_one_rank_ends_all(inputs: Path, tmp_path: Path) -> None:
    one, other = run_ranks(end, 2, inputs, tmp_path, connect=False)
    assert one == other
    for strategy, text in zip(("ddp", "fsdp"), one, strict=True):
        found = re.search(r"at batch (\d+) of rank \d .*chats.jsonl, record 6; now is step (\d+)", text)
        assert found is not None, text
        assert int(found[2]) == int(found[1]) // 2 + 1  # at the first checkpoint after it
        last = storage.load(tmp_path / strategy / "checkpoints" / "last.ckpt")
        assert last["global_step"] == int(found[1]) // 2


def test_a_killed_run_goes_on_with_the_same_bits(inputs: Path, alone: Path, interrupted: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(interrupted, tmp_path / "run"))
    report = finetune(given(inputs, run, 1))

    assert report is not None
    assert report.trained_tokens == 2 * report.data["trained_tokens"]  # each row once per epoch
    assert same_bits(weights(alone), weights(run))


@pytest.mark.parametrize("strategy", keep(["ddp", "fsdp", "deepspeed_stage_2"], "fsdp"))
def test_a_killed_run_goes_on_on_other_ranks(
    inputs: Path, alone: Path, interrupted: Path, tmp_path: Path, strategy: str
) -> None:
    run = Path(shutil.copytree(interrupted, tmp_path / "run"))
    trained, steps = run_ranks(train, 2, inputs, run, {"strategy": strategy}, connect=False, timeout_s=120)[0]

    if strategy == "ddp":  # the others leave out the rows of a micro-batch in each epoch
        assert (trained, steps) == (2 * trained_tokens(inputs, tmp_path), 6)
        assert largest_difference(weights(alone), weights(run)) < TOLERANCE
    assert steps == 6


def test_a_run_that_left_out_rows_on_some_ranks_is_complete_at_its_end(inputs: Path, tmp_path: Path) -> None:
    """An epoch of 22 rows has 5 steps of 4 rows on two ranks with fsdp, and 6 on one process."""
    run = tmp_path / "run"
    changes = {"strategy": "fsdp", "trainer": {"callbacks": [Kill(7)]}}
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(train_small_steps, 2, inputs, run, changes, connect=False)
    report = train_small_steps(0, 1, inputs, run, {})

    assert report.steps == 5 + 6
    assert report.is_complete
    assert "not complete" not in report.describe()
    assert train_small_steps(0, 1, inputs, run, {}).seconds == report.seconds  # not trained again


def train_small_steps(rank: int, size: int, inputs: Path, out: Path, changes: dict[str, Any]) -> Any:
    shared = {"packing": False, "epochs": 2, "global_batch": 4, "micro_batch": 2, "save_every": 2}
    return finetune(settings(inputs, out, devices=size, **shared, **changes))


def trained_tokens(inputs: Path, folder: Path) -> int:
    from loopwright.recipes.train import prepare

    prepared = prepare("finetune", given(inputs, folder / "other", 1))
    prepared.data.setup("fit")
    return prepared.data.report.trained_tokens


def test_two_ranks_that_were_killed_go_on_with_the_same_bits(inputs: Path, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, inputs, tmp_path / "whole", {"strategy": "ddp"}, connect=False)[0]
    killed(inputs, tmp_path / "run", 2, strategy="ddp")
    resumed = run_ranks(train, 2, inputs, tmp_path / "run", {"strategy": "ddp"}, connect=False)[0]

    assert whole == resumed == (2 * trained_tokens(inputs, tmp_path), 6)  # the ranks' rows differ in their tokens
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "run"))


def test_global_batch_auto_stays_on_other_ranks(inputs: Path, tmp_path: Path) -> None:
    first = finetune(settings(inputs, tmp_path / "run", steps=1, micro_batch=4))
    assert first is not None
    assert first.global_batch == 4
    assert run_ranks(go_on, 2, inputs, tmp_path / "run", connect=False) == [4, None]


def go_on(rank: int, size: int, inputs: Path, out: Path) -> int | None:
    given = settings(inputs, out, steps=2, micro_batch=2, devices=size, strategy="ddp", resume="force")
    report = finetune(given)
    return None if report is None else report.global_batch
