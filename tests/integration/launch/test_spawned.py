"""What a verb that ran in other processes brings back to the one that called it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integration.trainer.test_trainer import Net, data, trained
from ranks import import_deepspeed, run_ranks
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.errors import ModuleError


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


def test_a_second_fit_counts_the_samples_of_the_first_once(tmp_path: Path) -> None:
    trainer, module = make_trainer(tmp_path, "ddp_fork", max_epochs=1), Net()
    trainer.fit(module, *loaders())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, *loaders())
    assert (trainer.global_step, trainer.progress.samples) == (8, 64)


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


class Late(lw.Module):
    """Builds its layers in configure_model, and has what a checkpoint does not hold."""

    def __init__(self, is_declared: bool = False, builds_in_setup: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.builds_in_setup = builds_in_setup
        if is_declared:
            self.register_module("net", None)
        else:
            self.net: Any = None
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def setup(self, stage: str) -> None:
        if self.builds_in_setup:
            self._build()

    def configure_model(self) -> None:
        if not self.builds_in_setup:
            self._build()

    def _build(self) -> None:
        if self.net is None:
            self.net = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 3), "frozen": torch.nn.Linear(3, 3)})
            self.net["frozen"].requires_grad_(False)

    def configure_callbacks(self) -> Any:
        return lw.EarlyStopping("error", patience=5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return self.net["frozen"](self.net["first"](batch[0].float()[:, :4])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", self.net["first"](batch[0].float()[:, :4]).square().mean(), sync_dist=True)

    def on_fit_end(self) -> None:
        self.hparams.found = 0.5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("net.frozen.weight", None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net["first"].parameters(), lr=0.1)


STARTED = {
    "ddp fork": lambda: "ddp_fork",
    "ddp spawn": lambda: "ddp_spawn",
    "fsdp fork": lambda: lw.strategies.FSDPStrategy(start_method="fork"),
    "deepspeed fork": lambda: lw.strategies.DeepSpeedStrategy(stage=3, start_method="fork"),
    "deepspeed fork, frozen left out": lambda: lw.strategies.DeepSpeedStrategy(
        stage=2, start_method="fork", exclude_frozen_parameters=True
    ),
}


def fit_late(module: lw.Module, strategy: Any, size: int) -> lw.Trainer:
    torch.manual_seed(5)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "logger": False}
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_steps=2, enable_checkpointing=False, **quiet
    )
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(torch.utils.data.TensorDataset(x), batch_size=8 // size)
    trainer.fit(module, loader, loader)
    return trainer


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_deepspeed()


@pytest.mark.parametrize(
    ("name", "is_declared"), [*((name, False) for name in STARTED), ("ddp fork", True), ("fsdp fork", True)]
)
def test_layers_that_only_the_processes_built_come_back(name: str, is_declared: bool) -> None:
    alone, module = Late(is_declared), Late(is_declared)
    one = fit_late(alone, "auto", 1)
    trainer = fit_late(module, STARTED[name](), 2)
    assert module.state_dict().keys() == alone.state_dict().keys()
    for key, value in alone.state_dict().items():
        # Two ranks add up halves of a batch in another order.
        torch.testing.assert_close(module.state_dict()[key], value, rtol=1e-5, atol=1e-7)
    assert torch.equal(module.state_dict()["net.frozen.weight"], alone.state_dict()["net.frozen.weight"])
    assert [one.requires_grad for one in module.parameters()] == [True, True, False, False]
    assert float(module.seen) == float(alone.seen) == 2
    assert module.hparams["found"] == 0.5
    mine, theirs = trainer.early_stopping_callback, one.early_stopping_callback
    assert mine is not None
    assert theirs is not None
    torch.testing.assert_close(mine.best_score, theirs.best_score, rtol=1e-5, atol=0)


def test_layers_that_cannot_be_built_here_are_named_and_can_be_saved(tmp_path: Path) -> None:
    module = Late(builds_in_setup=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lw.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=2, enable_checkpointing=False, **quiet
    )
    loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
    with pytest.raises(ModuleError, match=r"(?s)only there \['net.first.weight', 'net.first.bias', .*save_checkpoint"):
        trainer.fit(module, loader, loader)
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    assert "net.first.weight" in torch.load(tmp_path / "trained.ckpt")["state_dict"]


class Noting(Net):
    """Notes the first value of each sample that a rank trains on, in a file of the rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with open(self.folder / str(self.trainer.global_rank), "a", encoding="utf-8") as file:
            file.write(f"{batch[0][:, 0].tolist()}\n")
        return super().training_step(batch, batch_idx)


def test_a_second_fit_shuffles_as_the_second_epoch_of_one_fit(tmp_path: Path) -> None:
    def train(name: str, *until: int) -> list[str]:
        (tmp_path / name).mkdir()
        torch.manual_seed(7)
        trainer, module = make_trainer(tmp_path / name, max_epochs=until[0]), Noting(tmp_path / name)
        for max_epochs in until:
            trainer.max_epochs = max_epochs
            trainer.fit(module, DataLoader(data(), batch_size=4, shuffle=True), loaders()[1])
        return [(tmp_path / name / rank).read_text(encoding="utf-8") for rank in ("0", "1")]

    assert train("two", 1, 2) == train("one", 2)
