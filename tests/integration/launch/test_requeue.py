"""A job that SLURM warns saves itself on all ranks, goes back into the queue, and goes on where it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.trainer.test_trainer import Net, data
from ranks import run_ranks
from torch.utils.data import DataLoader

import loopwright as lw


def job(
    rank: int, size: int, folder: str, *, restarts: int = 0, warn_at: int | None = None, fail_at: int | None = None
) -> tuple[Any, ...]:
    """Run as a task of a made-up job, and warn rank 1 (or the only one) at a step, or fail there."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(
        SLURM_JOB_ID="4711", SLURM_JOB_NAME="train", SLURM_NTASKS=str(size), SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank), SLURM_NODEID="0", SLURM_NNODES="1", SLURM_NTASKS_PER_NODE=str(size),
        SLURM_STEP_ID="0", SLURM_RESTART_COUNT=str(restarts), PATH=f"{folder}:{os.environ['PATH']}",
    )  # fmt: skip

    class Warns(lw.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            begun.append(trainer.global_step)
            if trainer.global_step == warn_at and rank == size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if trainer.global_step == fail_at:
                raise ZeroDivisionError

    begun: list[int] = []
    callbacks: list[Any] = [Warns()]
    if fail_at is not None:
        callbacks.append(lw.ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=1))
    module = Net()
    lw.seed_everything(4, verbose=False)
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, max_epochs=2, callbacks=callbacks, default_root_dir=folder, logger=False,
        enable_checkpointing=fail_at is not None, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )  # fmt: skip
    end = "finished"
    try:
        trainer.fit(
            module, DataLoader(data(), batch_size=8 // size, shuffle=True),
            ckpt_path=None if fail_at is None else "last",
        )  # fmt: skip
    except lw.StopBySignal:
        end = "stopped"
    except ZeroDivisionError:
        end = "failed"
    return end, begun[0], trainer.global_step, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a scontrol that notes what it is called with."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    scontrol.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("size", [1, 2])
def test_a_requeued_job_goes_on_where_the_signal_stopped_it(size: int, folder: Path, tmp_path_factory: Any) -> None:
    whole = run_ranks(job, size, str(tmp_path_factory.mktemp("whole")), connect=False)
    first = run_ranks(job, size, str(folder), warn_at=3, connect=False)
    assert {end for end, *_ in first} == {"stopped"}
    assert (folder / "called").read_text().split() == ["requeue", "4711"]
    second = run_ranks(job, size, str(folder), restarts=1, connect=False)
    assert {one[:3] for one in second} == {("finished", first[0][2] + 1, 8)}
    for name, value in whole[0][3].items():
        assert torch.equal(value, second[0][3][name])


@pytest.mark.slow
def test_a_job_that_is_requeued_with_fewer_tasks_makes_the_same_steps(folder: Path, tmp_path_factory: Any) -> None:
    [whole] = run_ranks(job, 1, str(tmp_path_factory.mktemp("whole")), connect=False)
    first = run_ranks(job, 2, str(folder), warn_at=3, connect=False)
    [second] = run_ranks(job, 1, str(folder), restarts=1, connect=False)
    assert second[:3] == ("finished", first[0][2] + 1, 8)
    for name, value in whole[3].items():  # two ranks add the same numbers in another order
        torch.testing.assert_close(second[3][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_last_takes_a_checkpoint_that_is_newer_than_the_one_of_the_requeue(folder: Path) -> None:
    run_ranks(job, 1, str(folder), warn_at=2, connect=False)
    [(end, begun, *_)] = run_ranks(job, 1, str(folder), restarts=1, fail_at=5, connect=False)
    assert (end, begun) == ("failed", 3)
    [(_, begun, *_)] = run_ranks(job, 1, str(folder), restarts=2, fail_at=7, connect=False)
    assert begun == 5  # the node failed in step 5, whose checkpoint had not been saved


def test_a_job_that_was_not_requeued_starts_fresh(folder: Path) -> None:
    run_ranks(job, 1, str(folder), warn_at=3, connect=False)
    [(_, _, step, _)] = run_ranks(job, 1, str(folder), warn_at=2, connect=False)
    assert step == 2
    assert sorted(path.name for path in folder.glob("hpc_ckpt_*")) == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]
