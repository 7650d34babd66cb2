"""The Trainer on several ranks against one process: same data, same seed, same steps, the same weights.

All of it in float64, where the order of additions shows at 1e-16: a tolerance of 1e-12 leaves room for that and for
nothing else.
"""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies.ddp.strategy import DDPStrategy

TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}
State = dict[str, Tensor]


def data(count: int = 32) -> TensorDataset:
    """Inputs, targets and a length of 0 to 4 for each of `count` samples."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets, torch.randint(0, 5, (count,), generator=generator))


class Net(lw.Module):
    def __init__(self, form: str = "mean", *, optimizer: str = "sgd", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 5)).double()
        self.form = form
        self.optimizer = optimizer
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets, lengths = batch
        self.seen.append(inputs[:, 0].tolist())
        losses = (self.layers(inputs) - targets).square()
        if self.form == "mean":
            self.log("loss", losses.mean().detach(), on_epoch=True)
            return losses.mean()
        mask = torch.arange(5) < lengths[:, None]
        if self.form == "none" and not mask.any():
            return None
        return lw.Loss((losses * mask).sum(), mask.sum())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, _ = batch
        self.log("one", 1.0)
        self.log("error", (self.layers(inputs) - targets).square().mean())
        self.log("count", float(len(inputs)), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_trainer(
    size: int = 1, *, strategy: dict[str, Any] | None = None, evaluates: bool = False, **options: Any
) -> lw.Trainer:
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 1.0 if evaluates else 0,
    }  # fmt: skip
    chosen = DDPStrategy(**(strategy or {})) if size > 1 else "auto"
    return lw.Trainer(accelerator="cpu", devices=size, strategy=chosen, **{**quiet, **options})


def trained(
    rank: int,
    size: int,
    *,
    net: dict[str, Any] | None = None,
    count: int = 32,
    batch: int = 8,
    shuffle: bool = True,
    ckpt_path: str | None = None,
    save_to: str | None = None,
    validate: bool = False,
    seed: int = 11,
    **options: Any,
) -> dict[str, Any]:
    """Train on this rank with a global batch of `batch` samples, and return what came out."""
    module = Net(**(net or {}))
    lw.seed_everything(seed, verbose=False)
    trainer = make_trainer(size, evaluates=validate, **options)
    loader = DataLoader(data(count), batch_size=batch // size, shuffle=shuffle)
    val = DataLoader(data(13), batch_size=2) if validate else None
    trainer.fit(module, loader, val, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "steps": trainer.global_step,
        "samples": trainer.progress.samples,
        "seen": module.seen,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def assert_near(first: State, second: State) -> None:
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def assert_equal(first: State, second: State) -> None:
    assert all(torch.equal(value, second[name]) for name, value in first.items())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "a short last window": {"accumulate_grad_batches": 3},
    "clip by norm": {"gradient_clip_val": 0.05},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "Adam": {"net": {"optimizer": "adam"}},
    "LBFGS": {"net": {"optimizer": "lbfgs"}},
    "sums": {"net": {"form": "sum"}},
    "sums and accumulation": {"net": {"form": "sum"}, "accumulate_grad_batches": 2},
    "None where nothing counts": {"net": {"form": "none"}, "batch": 2},
    "static graph": {"strategy": {"static_graph": True}},
    "find unused": {"strategy": {"find_unused_parameters": True}},
    "bucket views": {"strategy": {"gradient_as_bucket_view": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_the_weights_of_one_process(case: str) -> None:
    options = CASES[case]
    alone = trained(0, 1, **{k: v for k, v in options.items() if k != "strategy"})
    both = run_ranks(trained, 2, connect=False, **options)
    assert_equal(both[0]["weights"], both[1]["weights"])
    assert_near(alone["weights"], both[0]["weights"])
    assert both[0]["steps"] == alone["steps"]


def test_the_samples_of_a_global_batch_do_not_depend_on_the_number_of_ranks() -> None:
    alone = trained(0, 1)
    for size in (2, 4):
        ranks = run_ranks(trained, size, connect=False)
        for step, batch in enumerate(alone["seen"]):
            assert [x for one in ranks for x in one["seen"][step]] == batch


@pytest.mark.parametrize("policy", ["stop_all", "cycle", "zero_weight"])
@pytest.mark.parametrize("form", ["mean", "sum"])
def test_a_last_round_that_is_not_full_hangs_no_rank(policy: str, form: str) -> None:
    ranks = run_ranks(
        trained, 2, connect=False, count=36, batch=8, net={"form": form}, strategy={"uneven": policy}, shuffle=False
    )
    assert_equal(ranks[0]["weights"], ranks[1]["weights"])
    # 9 batches of 4: the fifth round has one for rank 0 only.
    assert [one["steps"] for one in ranks] == ([8, 8] if policy == "stop_all" else [10, 10])
    if policy == "zero_weight":
        alone = trained(0, 1, count=36, net={"form": form}, shuffle=False)
        assert_near(alone["weights"], ranks[0]["weights"])


def skipping(rank: int, size: int) -> State:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if rank == 1 and batch_idx == 1:
                return None
            return super().training_step(batch, batch_idx)

    module = Skips()
    trainer = make_trainer(size)
    trainer.fit(module, DataLoader(data(), batch_size=4))
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_none_on_one_rank_hangs_nobody_and_all_do_the_same() -> None:
    first, second = run_ranks(skipping, 2, connect=False)
    assert_equal(first, second)


def not_finite(rank: int, size: int) -> tuple[State, int]:
    class Bad(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if rank == 1 and batch_idx == 2 else loss

    module = Bad()
    trainer = make_trainer(size, nonfinite_loss="skip", max_epochs=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data(), batch_size=4))
    assert sum("is skipped: its loss is not finite" in str(one.message) for one in said) == (rank == 0)
    assert trainer.progress.nonfinite_steps == 1
    return {name: value.clone() for name, value in module.state_dict().items()}, trainer.global_step


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    (first, steps), (second, others) = run_ranks(not_finite, 2, connect=False)
    assert steps == others == 3
    assert_equal(first, second)
    assert all(torch.isfinite(value).all() for value in first.values())


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (2, 4), (4, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(sizes: tuple[int, int], tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    before, after = sizes
    whole = trained(0, 1, net={"form": "sum"})
    run_ranks(trained, before, connect=False, net={"form": "sum"}, max_steps=6, save_to=path)
    rest = run_ranks(trained, after, connect=False, net={"form": "sum"}, ckpt_path=path)
    assert_near(whole["weights"], rest[0]["weights"])
    assert rest[0]["steps"] == whole["steps"]
    # Two steps of the second epoch are left: each of its samples was read once, before the stop or after it.
    for step in (6, 7):
        assert [x for one in rest for x in one["seen"][step - 6]] == whole["seen"][step]


def test_a_resume_on_as_many_ranks_is_exact_with_dropout(tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    net = {"dropout": 0.5, "optimizer": "adam"}
    whole = run_ranks(trained, 2, connect=False, net=net, validate=True, val_check_interval=2)
    run_ranks(trained, 2, connect=False, net=net, max_steps=3, save_to=path, validate=True, val_check_interval=2)
    rest = run_ranks(trained, 2, connect=False, net=net, ckpt_path=path, seed=99, validate=True, val_check_interval=2)
    assert_equal(whole[0]["weights"], rest[0]["weights"])
    assert whole[0]["metrics"] == rest[0]["metrics"]
    assert whole[0]["samples"] == rest[1]["samples"] == 64


def dropout_masks(rank: int, size: int) -> list[float]:
    class Draws(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(torch.rand(2).tolist())
            return super().training_step(batch, batch_idx)

    module = Draws()
    lw.seed_everything(1, verbose=False)
    make_trainer(size, max_steps=1).fit(module, DataLoader(data(), batch_size=4))
    return module.seen[0]


def test_ranks_draw_different_random_numbers() -> None:
    first, second = run_ranks(dropout_masks, 2, connect=False)
    assert first != second


def failing_to_save(rank: int, size: int, folder: str) -> str:
    class Full(lw.checkpoint.TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no space left on device")

    trainer = make_trainer(size, strategy={"checkpoint_io": Full()}, max_steps=1)
    trainer.fit(Net(), DataLoader(data(), batch_size=4))
    try:
        trainer.save_checkpoint(f"{folder}/x.ckpt")
    except (OSError, lw.CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_save_that_fails_on_rank_zero_fails_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(failing_to_save, 2, connect=False, folder=str(tmp_path))
    assert first == "OSError: no space left on device"
    assert second.startswith("CheckpointError: rank 0 could not write")
    assert "no space left" in second


def saving_alone(rank: int, size: int, folder: str) -> str:
    class Saves(lw.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.is_global_zero and batch_idx == 1:
                trainer.save_checkpoint(f"{folder}/x.ckpt")

    try:
        make_trainer(size, callbacks=[Saves()]).fit(Net(), DataLoader(data(), batch_size=4))
    except lw.LoopwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_save_on_one_rank_only_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(saving_alone, 2, str(tmp_path), connect=False)
    assert first.startswith("CheckpointError: trainer.save_checkpoint was called on rank 0, but rank 1 has continued")
    assert second.startswith("RankFailure: rank 0")
    assert "call it on every rank" in second


# --- evaluation -----------------------------------------------------------------------------------------------------


def evaluated(rank: int, size: int, counts: list[int], batch_size: int) -> list[tuple[Any, Any]]:
    module = Net()
    trainer = make_trainer(size, evaluates=True)
    results = []
    for count in counts:
        loader = DataLoader(data(count), batch_size=batch_size)
        metrics = trainer.validate(module, loader, verbose=False)[0] if count else {}
        results.append((dict(metrics), trainer.predict(module, loader) if count else []))
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_evaluation_on_any_number_of_ranks_is_that_of_one_process(size: int, batch_size: int) -> None:
    counts = [1, 2, 3, 5, 8, 13]
    alone = evaluated(0, 1, counts, batch_size)
    for results in run_ranks(evaluated, size, counts, batch_size, connect=False):
        for count, (metrics, predictions), (expected, batches) in zip(counts, results, alone, strict=True):
            assert metrics["one"] == 1.0
            assert metrics["count"] == count
            assert metrics["error"] == pytest.approx(expected["error"], rel=1e-12)
            assert len(predictions) == len(batches)
            # Bit for bit: a prediction does not depend on who makes it.
            assert all(torch.equal(one, other) for one, other in zip(predictions, batches, strict=True))


# --- stopping -------------------------------------------------------------------------------------------------------


def stopped(rank: int, size: int, which: int, where: str) -> int:
    class Stops(lw.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if where == "step" and trainer.global_step == 3 and rank in (which, -which):
                trainer.should_stop = True

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if where == "epoch":
                trainer.should_stop = True

    trainer = make_trainer(size, max_epochs=50, callbacks=[Stops()])
    trainer.fit(Net(), DataLoader(data(), batch_size=4))
    return trainer.global_step


def test_should_stop_on_one_rank_stops_all_at_one_step() -> None:
    steps = run_ranks(stopped, 2, 1, "step", connect=False)
    assert steps[0] == steps[1]
    assert steps[0] in (3, 4)


def test_should_stop_on_all_ranks_adds_no_step() -> None:
    assert run_ranks(stopped, 2, 0, "epoch", connect=False) == [4, 4]


def signalled(rank: int, size: int, number: int, folder: str) -> tuple[str, int]:
    class Kills(lw.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if rank == 1 and trainer.global_step == 5:
                os.kill(os.getpid(), number)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(f"{folder}/stopped.ckpt")

    trainer = make_trainer(size, max_epochs=5000, callbacks=[Kills()])
    try:
        trainer.fit(Net(), DataLoader(data(), batch_size=4))
    except (KeyboardInterrupt, lw.StopBySignal) as error:
        return type(error).__name__, trainer.global_step
    return "finished", trainer.global_step


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, "StopBySignal"), (signal.SIGINT, "KeyboardInterrupt")]
)
def test_a_signal_to_one_rank_stops_all_at_one_step_with_a_checkpoint(
    number: int, expected: str, tmp_path: Path
) -> None:
    (first, step), (second, other) = run_ranks(signalled, 2, number, str(tmp_path), connect=False)
    assert first == second == expected
    assert step == other
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=True)
    assert saved["global_step"] == step


# --- failures -------------------------------------------------------------------------------------------------------


def disagreeing(rank: int, size: int, what: str) -> str:
    def run() -> None:
        module = Net()
        if what == "module" and rank == 1:
            module.more = nn.Linear(2, 2).double()
        options: dict[str, Any] = {"max_epochs": 3 if what == "argument" and rank else 2}
        trainer = make_trainer(size, evaluates=what == "verb", **options)
        loader = DataLoader(data(), batch_size=4)
        if what == "verb" and rank == 1:
            trainer.validate(module, loader, verbose=False)
        else:
            trainer.fit(module, loader)

    try:
        run()
    except lw.ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("module", ["module", "on rank 0", "on rank 1"]),
        ("argument", ["max_epochs", "2 on rank 0", "3 on rank 1"]),
        ("verb", ["trainer.fit on rank 0", "trainer.validate on rank 1"]),
    ],
)
def test_ranks_that_are_about_to_run_different_things_say_so(what: str, words: list[str]) -> None:
    for message in run_ranks(disagreeing, 2, what, connect=False):
        for word in words:
            assert word in message


def failing(rank: int, size: int) -> str:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if rank == 1 and batch_idx == 2:
                raise ValueError("a bad sample")
            return super().training_step(batch, batch_idx)

    try:
        make_trainer(size).fit(Fails(), DataLoader(data(), batch_size=4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_the_other_ranks_name_the_one_that_failed() -> None:
    first, second = run_ranks(failing, 2, connect=False)
    assert second == "ValueError: a bad sample"
    assert first.startswith("RankFailure: rank 1")
    for word in ("ValueError: a bad sample", "training_step", "step 2"):
        assert word in first


# --- manual optimization --------------------------------------------------------------------------------------------


class Gan(lw.Module):
    """Two networks with an optimizer each, of which every backward pass reaches one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.first = nn.Linear(6, 6).double()
        self.second = nn.Linear(6, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        inputs = batch[0]
        self.toggle_optimizer(one)
        loss = -self.second(self.first(inputs)).sigmoid().log().mean()
        self.manual_backward(loss)
        self.clip_gradients(one, gradient_clip_val=0.5)
        one.step()
        one.zero_grad()
        self.untoggle_optimizer(one)
        fake = self.first(inputs).detach()
        self.manual_backward(-self.second(inputs).sigmoid().log().mean())
        self.manual_backward(-(1 - self.second(fake).sigmoid()).log().mean())
        if (batch_idx + 1) % 2 == 0:
            two.step()
            two.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.Adam(self.second.parameters(), lr=0.01)]


def adversarial(rank: int, size: int) -> tuple[State, int]:
    module = Gan()
    trainer = make_trainer(size)
    trainer.fit(module, DataLoader(data(), batch_size=8 // size))
    return {name: value.clone() for name, value in module.state_dict().items()}, trainer.global_step


def test_manual_optimization_averages_gradients_before_each_step() -> None:
    alone, steps = adversarial(0, 1)
    (first, others), (second, _) = run_ranks(adversarial, 2, connect=False)
    assert_equal(first, second)
    assert_near(alone, first)
    assert steps == others


def statistics(rank: int, size: int) -> tuple[Tensor, float]:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers.insert(1, nn.BatchNorm1d(8).double())

    module = Normed()
    trainer = make_trainer(size, max_epochs=1, evaluates=True)
    trainer.fit(module, DataLoader(data(), batch_size=4), DataLoader(data(13), batch_size=2))
    return module.layers[1].running_mean.clone(), float(trainer.callback_metrics["error"])


def test_all_ranks_evaluate_with_the_running_statistics_of_rank_zero() -> None:
    (first, error), (second, other) = run_ranks(statistics, 2, connect=False)
    assert torch.equal(first, second)
    assert error == other
