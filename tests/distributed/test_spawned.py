"""What a verb that ran in other processes brings back to the one that called it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_trainer import Net, data, trained
from ranks import run_ranks
from torch.utils.data import DataLoader

import loopwright as lw


def make_trainer(folder: Path, strategy: str = "ddp_fork", **options: Any) -> lw.Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return lw.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, default_root_dir=folder, logger=lw.CSVLogger(str(folder)),
        callbacks=[lw.ModelCheckpoint(monitor="error", save_top_k=1), lw.EarlyStopping("error", patience=5)],
        **{**quiet, "max_epochs": 2, **options},
    )  # fmt: skip


def loaders() -> tuple[Any, Any]:
    return DataLoader(data(), batch_size=4), DataLoader(data(13), batch_size=2)


@pytest.fixture(params=["ddp_fork", "ddp_spawn"])
def fitted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[lw.Trainer, Net, Path]:
    trainer, module = make_trainer(tmp_path, request.param), Net()
    trainer.fit(module, *loaders())
    return trainer, module, tmp_path


def test_fit_brings_back_weights_counts_metrics_and_the_best_path(fitted: tuple[lw.Trainer, Net, Path]) -> None:
    trainer, module, folder = fitted
    assert (trainer.current_epoch, trainer.global_step, trainer.progress.samples) == (2, 8, 64)
    assert trainer.state.status == "finished"
    best = trainer.checkpoint_callback
    assert isinstance(best, lw.ModelCheckpoint)
    assert Path(best.best_model_path).is_relative_to(folder)
    assert torch.load(best.best_model_path, weights_only=True)["global_step"] == 4  # the first epoch was the better one
    assert float(trainer.callback_metrics["error"]) > float(best.best_model_score)
    assert trainer.logged_metrics["error"] == float(trainer.callback_metrics["error"])
    by_ranks = run_ranks(trained, 2, connect=False, shuffle=False)[0]["weights"]
    assert all(torch.equal(value, by_ranks[name]) for name, value in module.state_dict().items())
    assert trainer.log_dir is not None
    assert Path(trainer.log_dir, "metrics.csv").exists()
    # The logger was made before the processes were: they write one run all the same.
    assert [path.name for path in Path(trainer.log_dir).parent.iterdir()] == ["version_0"]
    # What is saved here and now can be resumed.
    trainer.save_checkpoint(folder / "now.ckpt")
    assert torch.load(folder / "now.ckpt", weights_only=True)["global_step"] == 8


def test_a_resumed_fit_and_evaluation_go_on_from_there(tmp_path: Path) -> None:
    whole = Net()
    make_trainer(tmp_path / "whole", max_epochs=3).fit(whole, *loaders())
    trainer, module = make_trainer(tmp_path), Net()
    trainer.fit(module, *loaders())
    trainer.save_checkpoint(tmp_path / "now.ckpt")
    again = make_trainer(tmp_path, max_epochs=3)
    again.fit(module, *loaders(), ckpt_path=tmp_path / "now.ckpt")
    assert again.global_step == 12
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in module.state_dict().items())
    [metrics] = again.validate(module, loaders()[1], verbose=False)
    assert metrics["count"] == 13
    predictions = again.predict(module, loaders()[1])
    assert predictions is not None
    torch.testing.assert_close(torch.cat(predictions), module.layers(data(13).tensors[0]).detach())


def test_an_error_in_a_process_reaches_the_caller_with_its_rank(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_rank == 1:
                raise ValueError("a bad sample")
            return super().training_step(batch, batch_idx)

    with pytest.raises(lw.RankFailure, match="rank 1 .*ValueError: a bad sample"):
        make_trainer(tmp_path).fit(Fails(), *loaders())
