"""Usual programs on split layers: each is compared with one process in what it logs, learns, stops at and predicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from mesh_program import Rows, whole
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks import BasePredictionWriter
from loopwright.precision import MixedPrecision
from loopwright.strategies import MeshStrategy, Strategy

# Any in this file: batches, and results that travel between processes.

WIDTH = 8
MESHES: dict[str, tuple[int, dict[str, int]]] = {"tp2": (2, {"tp": 2}), "fsdp2-tp2": (4, {"fsdp": 2, "tp": 2})}


class Block(nn.Module):
    """An MLP, and parameters of its own beside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(x)))


class Net(lw.Module):
    """Logs a loss, and metric objects in training and validation; its learning rate follows the validation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.train_error, self.val_error = (torchmetrics.MeanSquaredError().set_dtype(torch.float64) for _ in range(2))
        self.register_buffer("steps", torch.zeros(()))

    def tensor_plan(self) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.last(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        found = self(batch[0])
        loss = F.mse_loss(found, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.train_error(found.detach(), batch[1])
        self.log("error", self.train_error, on_step=False, on_epoch=True)  # of a step it is this rank's
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self(batch[0])
        self.val_error.update(found, batch[1])
        self.log("val_error", self.val_error)
        self.log("val", (found - batch[1]).abs().mean())

    def on_train_start(self) -> None:
        self.compiled = [name for name, one in self.named_modules() if one._compiled_call_impl is not None]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        decayed = [one for one in self.parameters() if one.ndim > 1]
        others = [one for one in self.parameters() if one.ndim <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.02, eps=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class Writer(BasePredictionWriter):
    """Keeps what is written on this rank."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: object
    ) -> None:
        self.batches.append((batch_indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((batch_indices, [one.tolist() for one in predictions]))


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.stack([x.sum(-1), x.prod(-1)], -1))


def strategy_of(axes: dict[str, int]) -> Strategy | str:
    return MeshStrategy(**{"fsdp": 1, **axes}, auto_wrap_policy={"Block"}) if axes else "auto"


def trainer_of(size: int, axes: dict[str, int], **options: Any) -> lw.Trainer:
    return lw.Trainer(**{
        "accelerator": "cpu", "strategy": strategy_of(axes), "devices": size, "precision": "64-true", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, **options,
    })  # fmt: skip


AVERAGES: dict[str, Callable[[], lw.Callback]] = {
    "ema": lambda: lw.EMA(0.8),
    "ema weights": lambda: lw.EMAWeightAveraging(decay=0.7, update_every_n_steps=2),
    "swa": lambda: lw.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2),
}


def train(rank: int, size: int, axes: dict[str, int], name: str, folder: str) -> dict[str, Any]:
    """Train with callbacks until the validation no longer improves; evaluate and predict with the best checkpoint."""
    lw.seed_everything(1, verbose=False)
    module, rows, writer, data_size = Net(), Rows(), Writer(), axes.get("fsdp", 1)
    average = AVERAGES[name]()
    stopping = lw.EarlyStopping("val", patience=2, min_delta=0.05)
    best = lw.ModelCheckpoint(folder, monitor="val", save_top_k=1)
    trainer = trainer_of(
        size, axes, max_epochs=12, logger=rows, log_every_n_steps=1, gradient_clip_val=0.05,
        gradient_clip_algorithm="value", enable_checkpointing=True, num_sanity_val_steps=1,
        callbacks=[
            average, stopping, best, writer, lw.LearningRateMonitor(),
            lw.GradientAccumulationScheduler({0: 2, 1: 3}),
        ],
    )  # fmt: skip
    trained = DataLoader(samples(28, 1), batch_size=4 // data_size, shuffle=True)
    evaluated = DataLoader(samples(10, 2), batch_size=4 // data_size)
    trainer.fit(module, trained, evaluated)
    state = {key: value for key, value in average.state_dict().items() if isinstance(value, dict)}
    (metrics,) = trainer.validate(module, evaluated, ckpt_path="best", verbose=False)
    predicted = trainer.predict(module, evaluated, ckpt_path="best")
    assert predicted is not None
    return {
        "weights": whole(module),
        "average": {f"{key}.{n}": one for key, value in state.items() for n, one in whole_of(value).items()},
        "rows": [(step, {key: one for key, one in row.items() if key != "epoch"}) for step, row in rows.rows],
        "stopped": (stopping.stopped_epoch, trainer.current_epoch, trainer.global_step),
        "best": float(best.best_model_score or 0.0),
        "metrics": metrics,
        "predicted": torch.cat(cast(list[Tensor], predicted)),
        "written": (writer.batches, writer.epochs),
        "data_rank": trainer.strategy.topology.data_rank,
    }


def whole_of(state: dict[str, Any]) -> dict[str, Tensor]:
    holder = nn.Module()
    holder.state_dict = lambda: {n: one for n, one in state.items() if isinstance(one, Tensor)}
    return whole(holder)


def assert_near(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), torch.as_tensor(value), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mesh", "name"), [("tp2", "ema"), ("tp2", "swa"), ("fsdp2-tp2", "ema weights")])
def test_callbacks_see_the_training_of_one_process(mesh: str, name: str, tmp_path: Path) -> None:
    size, axes = MESHES[mesh]
    (alone,) = run_ranks(train, 1, {}, name, str(tmp_path / "alone"), connect=False)
    everywhere = run_ranks(train, size, axes, name, str(tmp_path / "mesh"), connect=False)
    assert alone["stopped"][1] < 12  # it did stop early
    for found in everywhere:
        assert_near(found["weights"], alone["weights"])
        assert_near(found["average"], alone["average"])
        assert_near(found["metrics"], alone["metrics"])
        assert found["stopped"] == alone["stopped"]
        assert found["best"] == pytest.approx(alone["best"], rel=1e-12)
        torch.testing.assert_close(found["predicted"], alone["predicted"], rtol=1e-12, atol=1e-12)
    ours, theirs = everywhere[0]["rows"], alone["rows"]
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    for (_, row), (_, wanted) in zip(ours, theirs, strict=True):
        assert_near(row, wanted)
    # Each sample is written once, though ranks along tp predict the same ones.
    for kind in (0, 1):
        indices = [_flat(one[0]) for found in everywhere for one in found["written"][kind]]
        assert sorted(index for each in indices for index in each) == list(range(10))
    assert all(bool(found["written"][0]) == (rank % 2 == 0) for rank, found in enumerate(everywhere))


def _flat(indices: Any) -> list[int]:
    return [one for each in indices for one in _flat(each)] if isinstance(indices, list) else [indices]


class Adversaries(lw.Module):
    """Two networks and their optimizers in manual optimization: windows of two batches, clipping, toggling."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(3, WIDTH), Block(), nn.Linear(WIDTH, 2))
        self.judge = nn.Sequential(nn.Linear(2, WIDTH), Block(), nn.Linear(WIDTH, 1))
        self.offset = nn.Parameter(torch.ones(2))

    def tensor_plan(self) -> dict[str, str]:
        return {f"{one}.1.{layer}": style for one in ("maker", "judge")
                for layer, style in (("up", "colwise"), ("down", "rowwise"))}  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makes, judges = cast(Any, self.optimizers())
        is_last = batch_idx % 2 == 1
        with self.toggled_optimizer(judges):
            made = self.judge(self.maker(batch[0]) * self.offset)
            loss = (made - 1).square().mean() + self.judge(batch[1]).square().mean()
            self.manual_backward(loss)
            self.log("judged", loss, on_step=True, sync_dist=True)
            if is_last:
                self.clip_gradients(judges, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                judges.step()
                judges.zero_grad()
        with makes.toggle_model(sync_grad=is_last):
            loss = self.judge(self.maker(batch[0]) * self.offset).square().mean()
            self.manual_backward(loss)
            self.log("made", loss, on_step=True, sync_dist=True)
            if is_last:
                self.clip_gradients(makes, gradient_clip_val=0.01, gradient_clip_algorithm="value")
                makes.step()
                makes.zero_grad()

    def configure_optimizers(self) -> Any:
        made = [*self.maker.parameters(), self.offset]
        return torch.optim.SGD(made, lr=0.5, momentum=0.9), torch.optim.AdamW(self.judge.parameters(), 0.02, eps=1e-2)


def fit_by_hand(rank: int, size: int, axes: dict[str, int]) -> dict[str, Any]:
    lw.seed_everything(1, verbose=False)
    module, rows = Adversaries(), Rows()
    trainer = trainer_of(size, axes, max_epochs=2, logger=rows, log_every_n_steps=1)
    trainer.fit(module, DataLoader(samples(24, 1), batch_size=4 // axes.get("fsdp", 1)))
    return {"weights": whole(module), "rows": rows.rows, "steps": trainer.global_step}


@pytest.mark.parametrize("mesh", MESHES)
def test_manual_optimization_of_two_networks_is_that_of_one_process(mesh: str) -> None:
    size, axes = MESHES[mesh]
    (alone,) = run_ranks(fit_by_hand, 1, {}, connect=False)
    everywhere = run_ranks(fit_by_hand, size, axes, connect=False)
    for found in everywhere:
        assert_near(found["weights"], alone["weights"])
        assert found["steps"] == alone["steps"] > 0
    assert len(everywhere[0]["rows"]) == len(alone["rows"]) > 0
    for (step, row), (at, wanted) in zip(everywhere[0]["rows"], alone["rows"], strict=True):
        assert step == at
        assert_near(row, wanted)


def fit_plainly(rank: int, size: int, axes: dict[str, int], options: dict[str, Any]) -> Any:
    lw.seed_everything(1, verbose=False)
    module, rows = Net(), Rows()
    trainer = trainer_of(size, axes, max_epochs=2, logger=rows, log_every_n_steps=1, gradient_clip_val=0.5, **options)
    data = samples(24, 1)
    if options["precision"] != "64-true":
        data = TensorDataset(*(one.float() for one in data.tensors))
    loaders = [DataLoader(data, batch_size=4 // axes.get("fsdp", 1)) for _ in range(2)]
    trainer.fit(module, *loaders)
    return whole(module), [row for _, row in rows.rows], module.compiled


# Products of rounded factors are added over ranks in another order: two to three digits of bfloat16.
PRECISIONS = {"bf16-mixed": 2e-2, "bf16-true": 5e-2, "32-true": 1e-5}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_are_those_of_one_process(mesh: str, precision: str) -> None:
    size, axes = MESHES[mesh]
    options = {"precision": precision}
    ((weights, rows, _),) = run_ranks(fit_plainly, 1, {}, options, connect=False)
    everywhere = run_ranks(fit_plainly, size, axes, options, connect=False)
    bound = PRECISIONS[precision]
    for found, _, _ in everywhere:
        for name, value in weights.items():
            assert found[name].dtype == value.dtype
            torch.testing.assert_close(found[name], value, rtol=bound, atol=bound)
    for row, wanted in zip(everywhere[0][1], rows, strict=True):
        assert row == pytest.approx(wanted, rel=bound, abs=bound)


# torch.compile asks for gradients of what stands in place of parameters, and torch says that there will be none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_compute_what_others_do() -> None:
    size, axes = MESHES["fsdp2-tp2"]
    options = {"precision": "64-true", "compile": {"backend": "eager"}}
    ((weights, rows, _),) = run_ranks(fit_plainly, 1, {}, {"precision": "64-true"}, connect=False)
    everywhere = run_ranks(fit_plainly, size, axes, options, connect=False)
    for found, _, compiled in everywhere:
        assert {"blocks.0", "blocks.1"} <= set(compiled)
        assert_near(found, weights)
    for row, wanted in zip(everywhere[0][1], rows, strict=True):
        assert_near(row, wanted)


class Overflowing(Net):
    """The gradient of one element is infinite in one step; a scalar parameter, which is not sharded, comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def on_after_backward(self) -> None:
        assert self.trainer is not None
        gradient = cast(Any, self.blocks[1]).down.weight.grad
        if int(self.steps) == 3 and self.trainer.global_rank == self.trainer.world_size - 1:
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient)[-1, -1] = float("inf")


def overflow(rank: int, size: int, axes: dict[str, int]) -> Any:
    lw.seed_everything(1, verbose=False)
    module = Overflowing()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # so that nothing else overflows
    trainer = trainer_of(
        size, axes, max_epochs=1, precision=None, gradient_clip_val=0.5, num_sanity_val_steps=0,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
    )  # fmt: skip
    data = TensorDataset(*(one.float() for one in samples(24, 1).tensors))
    trainer.fit(module, *[DataLoader(data, batch_size=4 // axes.get("fsdp", 1)) for _ in range(2)])
    return whole(module), trainer.global_step, trainer.precision_plugin.scale


@pytest.mark.parametrize("mesh", [*MESHES, "fsdp2"])
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(mesh: str) -> None:
    size, axes = MESHES.get(mesh, (2, {"fsdp": 2}))
    ((weights, steps, scale),) = run_ranks(overflow, 1, {}, connect=False)
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert (steps, scale) == (5, 128.0)
    for found, count, factor in run_ranks(overflow, size, axes, connect=False):
        assert (count, factor) == (steps, scale)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-2)  # products in float16
