"""The tuner on two ranks: they find the same, nobody waits for a rank that ran out of memory, training is untouched."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ranks import run_ranks
from searched import Searched

import loopwright as lw
from loopwright.callbacks import BatchSizeFinder, LearningRateFinder
from loopwright.strategies.ddp.strategy import DDPStrategy
from loopwright.tuner import Tuner


def make_trainer(size: int, *callbacks: Any, **options: Any) -> lw.Trainer:
    plan = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options,
    }  # fmt: skip
    return lw.Trainer(accelerator="cpu", devices=size, strategy=DDPStrategy(), callbacks=list(callbacks), **plan)


def make_module(rank: int, **options: Any) -> Searched:
    torch.manual_seed(1)
    return Searched(**options)


def searched(rank: int, size: int) -> dict[str, Any]:
    """Let both finders run within fit, and train without them with what they found."""
    module = make_module(rank)
    finder = LearningRateFinder(min_lr=1e-4, max_lr=0.5, num_training_steps=15)
    trainer = make_trainer(size, BatchSizeFinder(), finder)
    lw.seed_everything(3, verbose=False)
    trainer.fit(module)
    assert finder.optimal_lr is not None
    given = make_module(rank, lr=module.lr, batch_size=module.batch_size)
    other = make_trainer(size)
    lw.seed_everything(3, verbose=False)
    other.fit(given)
    return {
        "lr": module.lr,
        "losses": finder.optimal_lr.raw_losses,
        "size": module.batch_size,
        "steps": trainer.global_step,
        "same": all(torch.equal(a, b) for a, b in zip(module.parameters(), given.parameters(), strict=True)),
    }


@pytest.mark.slow
def test_both_finders_agree_and_leave_training_as_it_would_have_been() -> None:
    first, second = run_ranks(searched, 2, connect=False)
    assert first == second
    assert first["size"] == 16
    assert first["steps"] == 2
    assert first["same"]


def tuned(rank: int, size: int) -> tuple[Any, ...]:
    module = make_module(rank)
    trainer = make_trainer(size)
    tuner = Tuner(trainer)
    found = tuner.scale_batch_size(module)
    curve = tuner.lr_find(module, num_training=15)
    assert curve is not None
    trainer.fit(module)
    return found, module.lr, curve.raw_losses, trainer.global_step


def test_the_tuner_before_fit_finds_the_same_on_all_ranks() -> None:
    first, second = run_ranks(tuned, 2, connect=False)
    assert first == second
    assert first[0] == 16


# What launchers set beside ranks and address, which `run_ranks` has set already.
LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"},
    "slurm": {
        "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost",
    },
    "loopwright launch": {"LT_DEVICES": "2", "LT_STRATEGY": "ddp", "LT_PRECISION": "64-true", "LT_NUM_NODES": "1"},
}  # fmt: skip
OF_RANK = {"slurm": ("SLURM_PROCID", "SLURM_LOCALID")}


class Plain(lw.Module):
    """Linear regression without anything random but the order of samples; float64."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.1, batch_size
        torch.manual_seed(1)
        self.net = torch.nn.Linear(3, 1).double()
        self.data = torch.randn(128, 4, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return (self.net(batch[:, :3]) - batch[:, 3:]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.data, batch_size=self.batch_size, shuffle=True)


def searched_plainly(size: int, **options: Any) -> dict[str, Any]:
    """Search by Tuner and by callbacks; the batches of all ranks together have 8 samples."""
    plan = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "accelerator": "cpu", "max_epochs": 1, **options,
    }  # fmt: skip
    lw.seed_everything(3, verbose=False)
    module = Plain(8 // size)
    tuner = Tuner(lw.Trainer(**plan))
    before = torch.get_rng_state()
    curve = tuner.lr_find(module, num_training=30, min_lr=1e-3, update_attr=False)
    preview = tuner.preview_schedule(module)
    assert torch.equal(before, torch.get_rng_state())
    finder, sizes = LearningRateFinder(num_training_steps=30, min_lr=1e-3), BatchSizeFinder(init_val=4)
    lw.Trainer(**plan, callbacks=[finder]).fit(module)
    other = Plain(8 // size)
    lw.Trainer(**plan, callbacks=[sizes]).fit(other)
    assert curve is not None
    assert finder.optimal_lr is not None
    return {
        "curve": curve.raw_losses, "suggestion": curve.suggestion(), "finder": finder.optimal_lr.raw_losses,
        "preview": preview.lrs, "weights": [value.tolist() for value in module.parameters()],
        "size": sizes.optimal_batch_size, "lr": module.lr, "other": [value.tolist() for value in other.parameters()],
    }  # fmt: skip


def launched(rank: int, size: int, *, launcher: str) -> dict[str, Any]:
    os.environ.update(LAUNCHERS[launcher])
    os.environ.update(dict.fromkeys(OF_RANK.get(launcher, ()), str(rank)))
    # Read by the trainer of the user; a trial has what that one has.
    os.environ.update(PL_TRAINER_PRECISION="64-true", PL_TRAINER_MAX_TIME="00:01:00:00")
    asked = {} if launcher == "loopwright launch" else {"strategy": "ddp", "devices": 2}
    return searched_plainly(size, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_searches_work_under_every_launcher_and_find_what_one_process_finds(launcher: str) -> None:
    first, second = run_ranks(launched, 2, connect=False, launcher=launcher)
    assert first == second
    alone = searched_plainly(1, precision="64-true")
    assert first["size"] == alone["size"] == 32
    assert first["preview"] == alone["preview"]
    # The search takes means of losses in float32, and sums over two ranks are added in another order.
    assert first["curve"] == pytest.approx(alone["curve"], rel=1e-6)
    assert first["finder"] == pytest.approx(alone["finder"], rel=1e-6)
    assert first["suggestion"] == alone["suggestion"]
    assert first["lr"] == alone["lr"]
    for ours, theirs in zip(first["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_what_started_processes_found_comes_back() -> None:
    torch.manual_seed(1)
    module = Searched()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    plan = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_fork", "limit_val_batches": 0, "max_epochs": 1}
    silent = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    tuner = Tuner(lw.Trainer(**plan, **silent))
    assert tuner.scale_batch_size(module) == module.batch_size == 16
    curve = tuner.lr_find(module, num_training=15)
    assert curve is not None
    assert module.lr == curve.suggestion()
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    finders = [BatchSizeFinder(max_val=8), LearningRateFinder(num_training_steps=15)]
    trainer = lw.Trainer(**plan, **silent, callbacks=finders)
    trainer.fit(module)
    assert trainer.global_step == 4
    assert module.batch_size == finders[0].optimal_batch_size == 8
    assert module.lr == finders[1].optimal_lr.suggestion()


class Smaller(Searched):
    """Rank 1 has less memory than rank 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.most = 5 if rank else 100

    def _check(self, batch: Any) -> None:
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def unequal(rank: int, size: int) -> int | None:
    torch.manual_seed(1)
    return Tuner(make_trainer(size)).scale_batch_size(Smaller(rank), mode="binsearch", margin=0)


def test_the_rank_with_the_least_memory_decides() -> None:
    assert run_ranks(unequal, 2, connect=False) == [5, 5]


class FailsOnOne(Searched):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def _check(self, batch: Any) -> None:
        if self.rank == 1 and len(batch[0]) == 4:
            raise KeyError("mine")


def failing(rank: int, size: int, *, in_fit: bool) -> str:
    torch.manual_seed(1)
    module = FailsOnOne(rank)
    trainer = make_trainer(size, *([BatchSizeFinder()] if in_fit else []))
    search = trainer.fit if in_fit else Tuner(trainer).scale_batch_size
    with pytest.raises((KeyError, lw.RankFailure)) as caught:
        search(module)
    return type(caught.value).__name__


@pytest.mark.parametrize("in_fit", [False, True])
def test_another_error_on_one_rank_ends_all(in_fit: bool) -> None:
    assert run_ranks(failing, 2, connect=False, in_fit=in_fit) == ["RankFailure", "KeyError"]
