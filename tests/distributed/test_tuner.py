"""The tuner on two ranks: they find the same, nobody waits for a rank that ran out of memory, training is untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from searched import Searched

import loopwright as lw
from loopwright.callbacks import BatchSizeFinder, LearningRateFinder
from loopwright.strategies.ddp import DDPStrategy
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
