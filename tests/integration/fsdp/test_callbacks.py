"""What hangs around a run whose model is sharded: averages, statistics, searches, manual steps. On gloo, in float64.

Each is compared with one process; only the order of additions differs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    ModelSummary,
    TrainingEfficiency,
    WeightStatistics,
)
from loopwright.callbacks.summary.summary import summarize
from loopwright.checkpoint import AsyncCheckpointIO
from loopwright.loggers import CSVLogger, TensorBoardLogger
from loopwright.strategies import FSDPStrategy
from loopwright.strategies.distributed.shards import is_sharded

# Any in this file: results that travel between processes, and batches.


def trainer_for(size: int, form: str = "full", **arguments: Any) -> lw.Trainer:
    sharded = FSDPStrategy(auto_wrap_policy={nn.Linear}, state_dict_type=form)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    more = {"enable_model_summary": False, "accelerator": "cpu", "devices": size, "precision": "64-true"}
    return lw.Trainer(**{"strategy": sharded if size > 1 else "auto", **quiet, **more, **arguments})


def samples(count: int = 24, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(count, 3, generator=generator, dtype=torch.float64))


def training(size: int) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=12 // size)


def validation() -> DataLoader[Any]:
    return DataLoader(samples(10, 1), batch_size=3)


def whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, Tensor):
        with torch.no_grad():
            return (tree.full_tensor() if hasattr(tree, "full_tensor") else tree).clone()
    return tree


def assert_near(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


class Net(lw.Module):
    """Units, one of which has a row for one rank only, and parameters that lie outside of all units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lr = 0.02
        self.first = nn.Linear(4, 5)
        self.narrow = nn.Linear(5, 1)
        self.head = nn.Linear(1, 3)
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(self.narrow(self.first(x).tanh())) * self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("val", loss, batch_size=len(batch[0]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=self.lr, eps=1e-2)


class SaveAt(lw.Callback):
    def __init__(self, path: str | None, *, epoch: int = 0, batch_idx: int | None = None) -> None:
        self.path, self.epoch, self.batch_idx = path, epoch, batch_idx

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path and trainer.current_epoch == self.epoch and batch_idx == self.batch_idx:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.path and self.batch_idx is None and trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)  # while the module holds the average


# -- averages ---------------------------------------------------------------------------------------------------------


def mix(average: Tensor, weight: Tensor, count: Tensor) -> Tensor:
    return average * 0.6 + weight * 0.4


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Batches differ by rank, and so do their variances: only what is a mean over batches is that of one process.
        return {"loss": super().training_step((batch[0] + 0 * self.batch_norm(batch[0]), batch[1]), batch_idx)}


AVERAGES: dict[str, Any] = {
    "ema": lambda: lw.EMA(0.8),
    "ema_weights": lambda: lw.EMAWeightAveraging(decay=0.7, update_every_n_steps=2),
    "function": lambda: lw.WeightAveraging(avg_fn=mix),
    "swa": lambda: lw.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2),
}


def average(rank: int, size: int, folder: str, form: str, source: int | None) -> dict[str, Any]:
    results = {}
    for name in AVERAGES if form == "full" else ("ema", "swa"):
        callback, module = AVERAGES[name](), Normed() if name == "swa" else Net()
        path = None if source is not None else f"{folder}/{name}-{form}-{size}.ckpt"
        trainer = trainer_for(size, form, max_epochs=3, callbacks=[callback, SaveAt(path, epoch=1)])
        resumed = None if source is None else f"{folder}/{name}-{form}-{source}.ckpt"
        trainer.fit(module, training(size), validation(), ckpt_path=resumed)
        state = whole(callback.state_dict())
        result = {"weights": whole(dict(module.state_dict())), "average": state.get("shadow", state.get("average"))}
        result["metrics"] = trainer.validate(module, validation(), verbose=False)[0]
        if isinstance(callback, lw.EMA):
            predictions = trainer.predict(module, validation())
            assert predictions is not None
            result["predictions"] = torch.cat([*predictions])
            result["public"] = callback.shadow_state_dict()
            copy = Net().double()
            callback.copy_to(copy)
            result["copy"] = dict(copy.state_dict())
        if name == "swa":
            for key in ("running_var", "num_batches_tracked"):  # see Normed
                del result["weights"][f"batch_norm.{key}"]
        results[name] = result
    return results


def test_averages_of_shards_are_those_of_one_process_and_resume_on_any_number_of_ranks(tmp_path: Path) -> None:
    (wanted,) = run_ranks(average, 1, str(tmp_path), "full", None, connect=False)
    for size, form, source in [(2, "full", None), (2, "sharded", None), (3, "sharded", 2), (1, "full", 2)]:
        for found in run_ranks(average, size, str(tmp_path), form, source, connect=False):
            assert_near(found, {name: wanted[name] for name in found})
    saved = lw.checkpoint.load(tmp_path / "ema-full-2.ckpt")
    alone = lw.checkpoint.load(tmp_path / "ema-full-1.ckpt")
    assert_near(saved["state_dict"], alone["state_dict"])  # the trained weights, not the average


def by_launcher(size: int) -> Any:
    callback, module = lw.EMA(0.8), Net()
    strategy = FSDPStrategy(auto_wrap_policy={nn.Linear}, start_method="fork") if size > 1 else "auto"
    trainer = trainer_for(size, max_epochs=2, strategy=strategy, callbacks=[callback])
    trainer.fit(module, training(size), validation())
    assert all(type(one) is nn.Parameter for one in module.parameters())
    (metrics,) = trainer.validate(module, validation(), verbose=False)
    return {"weights": dict(module.state_dict()), "average": callback.shadow_state_dict(), "metrics": metrics}


def test_a_launching_process_gets_full_weights_and_averages() -> None:
    assert_near(by_launcher(2), by_launcher(1))


def restored(rank: int, size: int, folder: str, form: str, *, averages: bool = False) -> dict[str, Any]:
    """Return the weights after fit, and what the best of the validations saw."""
    seen: list[tuple[float, Any]] = []

    class Watch(lw.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append((float(trainer.callback_metrics["val"]), whole(dict(pl_module.state_dict()))))

    best = lw.ModelCheckpoint(f"{folder}/{form}-{size}", monitor="val", mode="max", restore_best=True)  # the first
    plugins = AsyncCheckpointIO() if form == "full" else None
    quiet = {"enable_checkpointing": None, "num_sanity_val_steps": 0, "plugins": plugins}
    average = [lw.EMAWeightAveraging(decay=0.9)] if averages else []  # validations see the average
    trainer = trainer_for(size, form, max_epochs=3, callbacks=[Watch(), *average, best], **quiet)
    module = Net()
    trainer.fit(module, training(size), validation())
    wanted = max(seen, key=lambda one: one[0])[1]
    found = whole(dict(module.state_dict()))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert not torch.equal(found["first.weight"], seen[-1][1]["first.weight"])
    return found


@pytest.mark.parametrize("averages", [False, True])
def test_fit_ends_with_the_best_weights_on_request(tmp_path: Path, averages: bool) -> None:
    (wanted,) = run_ranks(restored, 1, str(tmp_path), "full", connect=False, averages=averages)
    for form in ("full", "sharded"):
        for found in run_ranks(restored, 2, str(tmp_path), form, connect=False, averages=averages):
            assert_near(found, wanted)


# -- callbacks that look ----------------------------------------------------------------------------------------------


class Shown(ModelSummary):
    shown: Any = None

    @classmethod
    def summarize(cls, **summary: Any) -> None:  # type: ignore[override]
        cls.shown = str(summary)


def look(rank: int, size: int, folder: str) -> dict[str, Any]:
    from torch.utils.tensorboard import SummaryWriter

    histograms: dict[str, Any] = {}

    def keep(self: Any, tag: str, global_step: int, **numbers: Any) -> None:
        histograms[tag] = {key: torch.tensor(value, dtype=torch.float32) for key, value in numbers.items()}

    SummaryWriter.add_histogram_raw = keep
    module = Net()
    module.example_input_array = torch.zeros(2, 4, dtype=torch.float64)
    efficiency = TrainingEfficiency(verbose=False, tokens_fn=lambda batch: 5)
    statistics = [WeightStatistics(updates=True, histogram_bins=4), WeightStatistics(depth=1)]
    loggers = [TensorBoardLogger(folder, log_graph=size > 1), CSVLogger(folder)]
    trainer = trainer_for(
        size, max_steps=2, log_every_n_steps=1, logger=loggers, limit_val_batches=0,
        callbacks=[Shown(max_depth=-1), efficiency, *statistics],
    )  # fmt: skip
    trainer.fit(module, training(size))
    logged = {name: torch.tensor(float(value)) for name, value in trainer.logged_metrics.items() if "/" in name}
    kept = {key: efficiency.summary.get(key) for key in ("samples", "flops", "chinchilla_tokens")}
    result = {
        "logged": {name: value for name, value in logged.items() if not name.startswith("efficiency")},
        "histograms": histograms,
        "efficiency": kept,
        "shown": Shown.shown,
    }
    summary = str(summarize(module, -1))  # on all ranks
    return trainer.strategy.broadcast(result) | {"summary": summary, "weights": whole(dict(module.state_dict()))}


def test_statistics_and_summaries_are_those_of_the_full_model(tmp_path: Path) -> None:
    (wanted,) = run_ranks(look, 1, str(tmp_path / "1"), connect=False)
    assert {"weights/narrow.weight/norm", "updates/total/ratio"} <= wanted["logged"].keys()
    assert "gradients/first.weight" in wanted["histograms"]
    for found in run_ranks(look, 2, str(tmp_path / "2"), connect=False):
        for name in ("shown", "summary", "efficiency"):
            assert found[name] == wanted[name]
        assert_near(found["weights"], wanted["weights"])
        for name in ("logged", "histograms"):  # numbers in float32
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


def clip_with_nan(rank: int, size: int) -> list[Any]:
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}))
    fabric.launch()
    layer = nn.Linear(4, 4)
    model = fabric.setup_module(nn.Sequential(layer))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for broken in range(size):
        fabric.backward(model(torch.ones(1, 4)).sum())
        if rank == broken:
            layer.weight.grad.to_local()[0, 0] = math.nan
        with pytest.raises(lw.LoopwrightError, match="got infinity or NaN"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=math.inf, error_if_nonfinite=True)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=math.inf, error_if_nonfinite=False)
        assert norm is not None
        norms.append(math.isnan(norm))
        optimizer.zero_grad()
    return norms


def test_a_nan_on_any_rank_is_the_largest_gradient_on_all() -> None:
    assert run_ranks(clip_with_nan, 2, connect=False) == [[True, True]] * 2


# -- callbacks that change the model ----------------------------------------------------------------------------------


class Tuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(self.first, nn.Tanh(), self.narrow)
        del self.first, self.narrow

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(self.backbone(x)) * self.scale)


def finetune(rank: int, size: int, folder: str, form: str, source: int | None) -> Any:
    path = f"{folder}/{form}-{size}.ckpt" if source is None else None
    module = Tuned()
    callbacks = [BackboneFinetuning(1, backbone_initial_ratio_lr=0.5), SaveAt(path, epoch=1, batch_idx=1)]
    trainer = trainer_for(size, form, max_epochs=3, callbacks=callbacks, limit_val_batches=0)
    resumed = None if source is None else f"{folder}/{form}-{source}.ckpt"
    trainer.fit(module, training(size), ckpt_path=resumed)
    return whole(dict(module.state_dict())), [group["lr"] for group in trainer.optimizers[0].param_groups]


def test_groups_that_are_added_during_training_are_sharded_and_resumed(tmp_path: Path) -> None:
    (wanted,) = run_ranks(finetune, 1, str(tmp_path), "full", None, connect=False)
    assert len(wanted[1]) == 2
    for form, target in (("full", 3), ("sharded", 1)):
        for found in run_ranks(finetune, 2, str(tmp_path), form, None, connect=False):
            assert_near(found, wanted)
        for found in run_ranks(finetune, target, str(tmp_path), form, 2, connect=False):
            assert_near(found, wanted)


# -- manual optimization ----------------------------------------------------------------------------------------------


class Toggling(lw.Module):
    """Two parts that share steps; runs each also where no backward pass of it follows.

    With a window of several batches, no backward pass averages the gradients of one of them.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.window = window
        self.maker = nn.Linear(4, 3)
        self.judge = nn.Linear(3, 1)
        self.offset = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        is_last = batch_idx % self.window == self.window - 1
        makes, judges = self.optimizers()
        with self.toggled_optimizer(judges):
            made = self.judge(self.maker(x) * self.offset)
            self.manual_backward((made - 1).square().mean() + self.judge(y).square().mean())
            with torch.no_grad():
                self.judge(y)
            if is_last:
                judges.step()
                judges.zero_grad()
        with makes.toggle_model(sync_grad=self.window == 1):
            self.manual_backward(self.judge(self.maker(x) * self.offset).square().mean())
            if is_last:
                makes.step()
                makes.zero_grad()

    def configure_optimizers(self) -> Any:
        made = [*self.maker.parameters(), self.offset]
        return torch.optim.SGD(made, lr=0.1), torch.optim.AdamW(self.judge.parameters(), lr=0.02, eps=1e-2)


def toggle(rank: int, size: int, folder: str, form: str, source: int | None) -> Any:
    results = []
    for window in (1, 3):
        path = f"{folder}/{window}-{form}-{size}.ckpt"
        callback = SaveAt(path if source is None else None, batch_idx=1)  # within a window of three
        module = Toggling(window)
        trainer = trainer_for(size, form, max_epochs=2, callbacks=[callback], limit_val_batches=0)
        resumed = None if source is None else f"{folder}/{window}-{form}-{source}.ckpt"
        trainer.fit(module, DataLoader(samples(36), batch_size=6 // size), ckpt_path=resumed)
        results.append(whole(dict(module.state_dict())))
    return results


def test_parts_are_gathered_anew_after_steps_and_toggling_and_windows_are_resumed(tmp_path: Path) -> None:
    (wanted,) = run_ranks(toggle, 1, str(tmp_path), "full", None, connect=False)
    for form, target in (("full", 3), ("sharded", 1)):
        for found in run_ranks(toggle, 2, str(tmp_path), form, None, connect=False):
            assert_near(found, wanted)
        for found in run_ranks(toggle, target, str(tmp_path), form, 2, connect=False):
            assert_near(found, wanted)


# -- searches ---------------------------------------------------------------------------------------------------------


class Counting(Net):
    """Has what a trial must not change: a list, and statistics in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.calls: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(batch_idx)
        self.seen += 1
        return super().training_step(batch, batch_idx)


def search(rank: int, size: int) -> list[Any]:
    results = []
    for place in ("within", "after"):
        module = Counting()
        found = [LearningRateFinder(num_training_steps=20, min_lr=1e-4, max_lr=0.5)] if place == "within" else []
        trainer = trainer_for(size, max_epochs=2, callbacks=found, limit_val_batches=0)
        if place == "after":
            trainer.fit(module, training(size))
            module.lr = 0.02
            trainer = trainer_for(size, max_epochs=2, limit_val_batches=0)
            before = whole(dict(module.state_dict()))
            lw.Tuner(trainer).lr_find(module, training(size), num_training=20, min_lr=1e-4, max_lr=0.5)
            torch.testing.assert_close(whole(dict(module.state_dict())), before, rtol=0, atol=0)
        trainer.fit(module, training(size))
        results.append((module.lr, module.calls, whole(dict(module.state_dict()))))
    return results


@pytest.mark.slow
def test_a_learning_rate_search_leaves_a_sharded_module_as_it_was() -> None:
    (wanted,) = run_ranks(search, 1, connect=False)
    assert wanted[0][0] != 0.02
    for found in run_ranks(search, 2, connect=False):
        assert_near(found, wanted)


def refuse(rank: int, size: int) -> list[str]:
    texts = []
    for callback in (BatchSizeFinder(), ModelPruning("l1_unstructured")):
        with pytest.raises(lw.ConfigError) as caught:
            trainer_for(size, max_epochs=1, callbacks=[callback], limit_val_batches=0).fit(Counting(), training(size))
        texts.append(str(caught.value))
    return texts


def test_callbacks_that_need_the_full_model_on_each_rank_are_rejected() -> None:
    for texts in run_ranks(refuse, 2, connect=False):
        for text, words in zip(texts, ["batch-size search", "ModelPruning"], strict=True):
            assert words in text


def preview(rank: int, size: int) -> Any:
    module, trainer = Counting(), trainer_for(size, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, training(size))
    before = {name: one.full_tensor().clone() for name, one in module.named_parameters() if is_sharded(one)}
    shown = lw.Tuner(trainer).preview_schedule(module, training(size), num_steps=3)
    same = all(torch.equal(dict(module.named_parameters())[name].full_tensor(), one) for name, one in before.items())
    return shown.lrs, [group["lr"] for group in trainer.optimizers[0].param_groups], len(before) > 0 and same


def test_the_schedule_of_a_sharded_module_is_shown_and_its_weights_stay() -> None:
    results = run_ranks(preview, 2, connect=False)
    assert results[0] == results[1]
    shown, rates, is_same = results[0]
    assert is_same
    assert list(shown.values()) == [[rate] * 3 for rate in rates]


# --- scores ----------------------------------------------------------------------------------------------------------


class Shrinking(Net):
    """Changes a sharded parameter when an epoch has ended, after its validation."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.first.weight.mul_(0.9)


def scored(rank: int, size: int, folder: str, form: str) -> Any:
    def trainer(name: str, epochs: int) -> lw.Trainer:
        save = lw.ModelCheckpoint(f"{folder}/{name}", "{epoch}", monitor="val", save_top_k=-1)
        return trainer_for(size, form, max_epochs=epochs, callbacks=[save], enable_checkpointing=True,
                           num_sanity_val_steps=0)  # fmt: skip

    whole_run, net = trainer("whole", 2), Shrinking()
    whole_run.fit(net, training(size), validation())
    save = whole_run.checkpoint_callback
    assert isinstance(save, lw.ModelCheckpoint)
    [(path, score), _] = save.best_k_models.items()
    [found] = trainer("none", 1).validate(Shrinking(), validation(), ckpt_path=path, verbose=False)
    resumed = Shrinking()
    trainer("resumed", 2).fit(resumed, training(size), validation(), ckpt_path=path)
    return float(score), found["val"], whole(net.state_dict()), whole(resumed.state_dict())


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_score_is_that_of_the_file_where_a_hook_changes_sharded_weights(form: str, tmp_path: Path) -> None:
    [(score, found, state, resumed), other] = run_ranks(scored, 2, str(tmp_path), form, connect=False)
    assert found == score == other[0]
    assert all(torch.equal(value, resumed[name]) for name, value in state.items())
