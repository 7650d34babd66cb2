"""A second `fit` on several ranks equals one of the total length, bit for bit; also after one in other processes."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from integration.trainer.test_trainer import Net, data
from ranks import import_deepspeed, run_ranks
from torch import Tensor
from torch.utils.data import DataLoader
from toys import ValidatedNet
from unit.trainer.test_run import Manual, alive_after, call

import loopwright as lw
from loopwright.checkpoint.plain import tensors


class Decayed(Net):
    """Keeps moments, draws masks, and has a schedule."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer_for(strategy: Any, epochs: int, **others: Any) -> lw.Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "precision": "64-true", "limit_val_batches": 0, "callbacks": [lw.EMA(0.8)],
    }  # fmt: skip
    return lw.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, **{**quiet, **others})


def fit(strategy: Any, *epochs: int, dropout: float = 0.2) -> dict[str, Tensor]:
    """Return the weights and averages after fits that end after these numbers of epochs, with one Trainer."""
    lw.seed_everything(7, verbose=False)
    trainer, module = trainer_for(strategy(), epochs[0]), Decayed(dropout)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for limit in epochs:
            trainer.fit_loop.max_epochs = limit
            trainer.fit(module, DataLoader(data(), batch_size=4, shuffle=bool(dropout)))
    [ema] = trainer.callbacks
    found = {"weights": module.state_dict(), "average": ema.state_dict()}
    assert trainer.global_step == 4 * epochs[-1]
    return dict(tensors(trainer.strategy.gather_state(found) if strategy() != "ddp_fork" else found))


def of_one_and_two(rank: int, size: int, strategy: str) -> tuple[Any, Any]:
    return fit(lambda: strategy, 3), fit(lambda: strategy, 1, 3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_fits_on_two_ranks_equal_one(strategy: str) -> None:
    for once, twice in run_ranks(of_one_and_two, 2, strategy, connect=False):
        assert list(once) == list(twice)
        assert [name for name in once if not torch.equal(once[name], twice[name])] == []


def test_a_second_fit_in_processes_of_its_own_continues_the_first() -> None:
    once, twice = (fit(lambda: "ddp_fork", *epochs, dropout=0.0) for epochs in ((3,), (1, 3)))
    assert [name for name in once if not torch.equal(once[name], twice[name])] == []


class InSinglePrecision(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.layers(batch[0].float()) - batch[1].float()).square().mean()


def fit_twice_with_an_engine(rank: int, size: int) -> list[str]:
    trainer, module = (
        trainer_for("deepspeed_stage_1", 1, precision="32-true", callbacks=[]),
        InSinglePrecision().float(),
    )
    trainer.fit(module, DataLoader(data(), batch_size=4))
    trainer.fit_loop.max_epochs = 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data(), batch_size=4))
    assert trainer.global_step == 8
    return [str(one.message) for one in caught if "trainer.fit continues" in str(one.message)]


def test_an_engine_that_is_built_anew_is_named() -> None:
    import_deepspeed()
    first, others = run_ranks(fit_twice_with_an_engine, 2, connect=False, timeout_s=110)
    assert len(first) == 1
    assert "DeepSpeedStrategy builds a new engine: optimizers, schedules and loss scale start from scratch" in first[0]
    assert others == []


def alive_after_fits(rank: int, size: int) -> list[list[str]]:
    gc.collect()
    gc.disable()
    return [alive_after(call("fit"), kind, strategy="ddp", devices=size) for kind in (ValidatedNet, Manual)]


def test_a_fit_on_two_ranks_leaves_no_cycle() -> None:  # not with fsdp: torch's fully_shard leaves cycles by itself
    assert run_ranks(alive_after_fits, 2, connect=False) == [[[], []]] * 2
