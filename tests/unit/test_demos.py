"""The models and data sets of `loopwright.demos` learn, and run on every kind of mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright import demos
from loopwright.errors import ConfigError

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
PAIRS: dict[str, tuple[Any, Any, float]] = {  # model, data set, and what a guess would lose
    "GPT": (demos.GPT, demos.SyntheticText, 4.16),
    "TextClassifier": (demos.TextClassifier, demos.SyntheticTopics, 1.39),
    "ViT": (demos.ViT, demos.SyntheticImages, 1.39),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_model_learns_its_data_and_is_loaded_again(name: str, tmp_path: Path) -> None:
    model, data, guess = PAIRS[name]
    lw.seed_everything(0, verbose=False)
    train, val = DataLoader(data(512), batch_size=32, shuffle=True), DataLoader(data(128, seed=1), batch_size=64)
    trainer = lw.Trainer(max_epochs=4, default_root_dir=tmp_path, **QUIET)
    module = model(width=32, layers=1)
    trainer.fit(module, train, val)
    assert trainer.callback_metrics["val_loss"] < 0.6 * guess
    loaded = model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert all(torch.equal(one, two) for one, two in zip(module.parameters(), loaded.parameters(), strict=True))


def test_a_sample_depends_on_its_index_and_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = demos.SyntheticText(8)[3]
    torch.manual_seed(2)
    assert torch.equal(first, demos.SyntheticText(8)[3])
    assert not torch.equal(first, demos.SyntheticText(8, seed=1)[3])
    with pytest.raises(IndexError):
        demos.SyntheticImages(8)[8]


@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_with_halves_of_the_matrices_train_as_one_process(name: str) -> None:
    model, data, _ = PAIRS[name]

    def losses(strategy: Any, devices: int) -> tuple[list[float], int]:
        """Return the losses, and the features of the queries that this rank computes."""
        seen, features = list[float](), list[int]()
        torch.manual_seed(0)
        module = model(width=16, layers=1).double()
        module.blocks[0].query.register_forward_hook(lambda layer, args, found: features.append(found.shape[-1]))
        read = lw.callbacks.LambdaCallback(
            on_train_batch_end=lambda trainer, *_: seen.append(float(trainer.callback_metrics["train_loss"]))
        )
        options = {
            **QUIET,
            "accelerator": "cpu",
            "limit_val_batches": 0,
            "enable_checkpointing": False,
            "precision": "64-true",
            "callbacks": [read],
        }
        lw.Trainer(max_epochs=1, strategy=strategy, devices=devices, **options).fit(module, DataLoader(data(32), 8))
        return seen, features[-1]

    one, whole = losses("auto", 1)
    two, part = run_ranks(lambda rank, size: losses("mesh:tp=2", 2), 2, connect=False)[0]
    assert (len(one), whole, part) == (4, 16, 8)
    assert two == pytest.approx(one, rel=1e-12)  # float64, sums over ranks in another order


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="Expected heads to divide width, got heads=30 and width=64"):
        demos.GPT(width=64, heads=30)
    with pytest.raises(ConfigError, match="Expected patch to divide size, got patch=5 and size=16"):
        demos.ViT(patch=5)
