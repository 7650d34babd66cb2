"""What one rank meets, all ranks act on alike: losses and gradients that are not finite, short data, a lone save.

The same for every strategy whose ranks have one process each: replicated (ddp) and sharded (fsdp).
"""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import loopwright as lw
from loopwright.strategies import DDPStrategy, FSDPStrategy

# Any in this file: batches, and results that travel between processes.


class Net(lw.Module):
    """What happens in a step is up to `spoil(rank, batch_idx)`, by which its loss is multiplied."""

    def __init__(self, spoil: Callable[[int, int], float] = lambda rank, index: 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)
        self.spoil = spoil

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.first(batch[0]).tanh()).square().mean() * self.spoil(self.trainer.global_rank, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.last(self.first(batch[0]).tanh()).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(count: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 4, generator=generator, dtype=torch.float64))


def trainer_of(name: str, size: int, uneven: str = "stop_all", **arguments: Any) -> lw.Trainer:
    fsdp = {"auto_wrap_policy": {nn.Linear}, "uneven": uneven}
    strategy: Any = FSDPStrategy(**fsdp) if name == "fsdp" else DDPStrategy(uneven=uneven)
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "limit_val_batches": 0, "max_epochs": 1, "precision": "64-true",
    }  # fmt: skip
    return lw.Trainer(accelerator="cpu", devices=size, strategy=strategy, **{**quiet, **arguments})


def whole(module: nn.Module) -> list[float]:
    with torch.no_grad():
        parts = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in module.parameters()]
        return torch.cat([one.double().reshape(-1) for one in parts]).tolist()


def fit(name: str, size: int, module: Net, count: int = 16, **arguments: Any) -> lw.Trainer:
    trainer = trainer_of(name, size, **arguments)
    dtype = torch.float32 if arguments.get("precision") == "16-mixed" else torch.float64
    samples = TensorDataset(data(count).tensors[0].to(dtype))
    trainer.fit(module, DataLoader(samples, batch_size=2))
    return trainer


def bad(value: float, at: int) -> Callable[[int, int], float]:
    return lambda rank, index: value if (rank, index) == (1, at) else 1.0


# --- losses and gradients that are not finite ------------------------------------------------------------------------


def skip_nan(name: str, size: int) -> Any:
    module = Net(bad(math.nan, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step of batch")
        trainer = fit(name, size, module, nonfinite_loss="skip")
    return trainer.global_step, trainer.progress.skipped_steps, whole(module)


def skip_overflow(name: str, size: int) -> Any:
    """Let one micro-batch of four overflow on one rank, twice: its window makes no step, and the scale halves once."""
    module = Net(bad(math.inf, 1))
    schedules: list[int] = []

    def configure() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module.configure_optimizers = configure  # type: ignore[method-assign]
    trainer = fit(name, size, module, 40, nonfinite_loss="ignore", precision="16-mixed", accumulate_grad_batches=4)
    scale = trainer.precision_plugin.scale
    schedules.append(trainer.lr_scheduler_configs[0].scheduler.last_epoch)
    return trainer.global_step, trainer.progress.skipped_steps, scale, schedules, whole(module)


def raise_nan(name: str, size: int) -> str:
    with pytest.raises(lw.NonFiniteError) as caught:
        fit(name, size, Net(bad(math.nan, 2)), nonfinite_loss="raise")
    return str(caught.value)


# --- windows ---------------------------------------------------------------------------------------------------------


def add_by_hand(name: str, size: int) -> list[float]:
    """Add to a gradient in the second of three micro-batches; return it as it is before the step."""
    seen: list[float] = []

    class Adds(Net):
        at = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.at = batch_idx

        def on_after_backward(self) -> None:
            if self.at % 3 == 1:
                bias = self.last.bias
                if bias.grad is None:  # what waits for the end of the window is with the strategy
                    bias.grad = torch.zeros_like(bias)
                bias.grad += 100.0

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grad = self.last.bias.grad
            seen.append(float(grad.full_tensor() if hasattr(grad, "full_tensor") else grad))

    fit(name, size, Adds(), 24, accumulate_grad_batches=3)
    return seen


def cycle_once(name: str, size: int) -> list[tuple[int, int, int]]:
    """Return for several limits how many steps were foreseen, made, and seen by a schedule over all of them."""

    class Cycle(Net):
        total = 0

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.total = int(self.trainer.estimated_stepping_batches)
            schedule = OneCycleLR(optimizer, max_lr=0.5, total_steps=self.total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    found = []
    for limits in ({"max_epochs": 2}, {"max_steps": 5, "max_epochs": -1}, {"accumulate_grad_batches": 3}):
        module = Cycle()
        trainer = fit(name, size, module, 20, **limits)
        found.append((module.total, trainer.global_step, trainer.lr_scheduler_configs[0].scheduler.last_epoch))
    return found


class Sum(Net):
    """One weight, whose gradient is the mean of what the micro-batches hold; and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = nn.Linear(1, 1, bias=False)
        self.draws: list[float] = []
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.draws.append(float(torch.rand(())))
        return self.last(batch[0]).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad = self.last.weight.grad
        assert grad is not None
        assert grad.dtype is torch.float32
        self.seen.append(float(grad.full_tensor() if hasattr(grad, "full_tensor") else grad))


def add_up_in_float32(name: str, size: int) -> Any:
    """Add a large and four small gradients in a short window: with 16 bits, the small ones would be lost."""
    module = Sum()
    values = torch.full((5 * size, 1), 2.0**-9)
    values[:size] = 1
    trainer = trainer_of(name, size, precision="bf16-mixed", accumulate_grad_batches=9)
    lw.seed_everything(1, verbose=False)
    trainer.fit(module, DataLoader(TensorDataset(values), batch_size=1))
    return module.seen, module.draws


# --- names -----------------------------------------------------------------------------------------------------------


class Adapter(Net):
    """Trains a few parameters beside frozen ones, and saves those only."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Linear(4, 1, bias=False)
        self.strict_loading = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.last(self.first(batch[0]).tanh()) + self.adapter(batch[0]) - 1).square().mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {key: value for key, value in state.items() if "adapter" in key}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.adapter.parameters(), lr=0.1, momentum=0.9)


def resume_an_adapter(name: str, size: int, folder: str) -> Any:
    def run(steps: int, ckpt_path: str | None = None) -> tuple[lw.Trainer, Adapter]:
        trainer, module = trainer_of(name, size, max_epochs=-1, max_steps=steps), Adapter()
        trainer.fit(module, DataLoader(data(), batch_size=2), ckpt_path=ckpt_path)
        return trainer, module

    path = f"{folder}/adapter.ckpt"
    run(2)[0].save_checkpoint(path)
    resumed = run(4, path)[1]
    trained = [one.requires_grad for one in resumed.parameters()]
    return whole(resumed) == whole(run(4)[1]), trained


def save_a_compiled_module(name: str, size: int, folder: str) -> None:
    module = Net()
    module.first = torch.compile(module.first, backend="eager")
    trainer = trainer_of(name, size, max_steps=1)
    trainer.fit(torch.compile(module, backend="eager"), DataLoader(data(), batch_size=2))
    trainer.save_checkpoint(f"{folder}/compiled.ckpt")


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(data(5)[: self.count][0].unsqueeze(1).unbind())


def read_unevenly(name: str, size: int) -> list[int]:
    """Train and validate on ranks with 3 and 5 batches, which nobody knows; save at the end of the epoch."""
    steps = []
    for uneven in ("stop_all", "cycle"):
        trainer = trainer_of(name, size, uneven, max_epochs=2, accumulate_grad_batches=2, limit_val_batches=1.0)
        count = (3, 5)[trainer.global_rank]
        loaders = [DataLoader(Stream(n), batch_size=1) for n in (count, 5 - count)]
        trainer.fit(Net(), *loaders)
        steps.append(trainer.global_step)
    return steps


# --- saving ----------------------------------------------------------------------------------------------------------


class SaveAlone(lw.Callback):
    """Calls save_checkpoint on rank 0 only."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 1:
            trainer.save_checkpoint(self.path)


def save_alone(name: str, size: int, folder: str) -> str:
    with pytest.raises(lw.LoopwrightError) as caught:
        fit(name, size, Net(), callbacks=[SaveAlone(f"{folder}/x.ckpt")])
    return str(caught.value)


def on_ranks(rank: int, size: int, name: str, folder: str) -> dict[str, Any]:
    return {
        "skip nan": skip_nan(name, size),
        "skip overflow": skip_overflow(name, size),
        "raise nan": raise_nan(name, size),
        "added": add_by_hand(name, size),
        "cycles": cycle_once(name, size),
        "uneven": read_unevenly(name, size),
        "float32": add_up_in_float32(name, size),
        "adapter": resume_an_adapter(name, size, folder),
        "compiled": save_a_compiled_module(name, size, folder),
        "alone": save_alone(name, size, folder),  # the last: what failed on one rank is over
    }


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_what_one_rank_meets_all_ranks_act_on_alike(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, name, str(tmp_path), connect=False)
    alone = {key: [one.pop(key) for one in (first, second)] for key in ("alone", "raise nan", "float32")}
    assert first == second
    steps, skipped, weights = first["skip nan"]
    assert (steps, skipped) == (3, 1)
    assert all(map(math.isfinite, weights))
    steps, skipped, scale, schedules, weights = first["skip overflow"]
    assert (steps, skipped, scale, schedules) == (2, 1, 2.0**15, [2])  # of ten batches: four, four and two
    assert all(map(math.isfinite, weights))
    assert first["cycles"] == [(10, 10, 10), (5, 5, 5), (2, 2, 2)]
    assert first["uneven"] == [4, 6]
    assert all(50 < grad < 150 for grad in first["added"])
    fifth = float(torch.tensor(0.2, dtype=torch.bfloat16))  # of each loss
    (sums, draws), (others, other_draws) = alone["float32"]
    assert sums == others == [fifth * (1 + 4 * 2.0**-9)]
    assert not set(draws) & set(other_draws)
    assert first["adapter"] == (True, [False, False, False, False, True])
    saved = torch.load(tmp_path / "compiled.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(Net().state_dict())
    for text in alone["raise nan"]:
        assert "nan at batch 2 of rank 1" in text
    culprit, other = alone["alone"]
    assert culprit.startswith("trainer.save_checkpoint was called on rank 0, but rank 1 has continued")
    assert other.startswith("rank 0")


# --- signals ---------------------------------------------------------------------------------------------------------


class Kills(lw.Callback):
    """Sends signals to its own process at a moment of training."""

    def __init__(self, moment: str, rank: int, times: int) -> None:
        self.moment, self.rank, self.times = moment, rank, times

    def act(self, trainer: Any, moment: str) -> None:
        if moment == self.moment and trainer.global_rank == self.rank and trainer.global_step in (3, 4):
            self.moment = ""
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGTERM)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.act(trainer, "backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.act(trainer, "step")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.act(trainer, "save")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.act(trainer, "validation")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.act(trainer, "batch end")


MOMENTS = {  # when, on which rank, how often
    "ddp": [("backward", 1, 2), ("save", 0, 1), ("save", 1, 1), ("validation", 1, 1), ("batch end", 0, 1)],
    "fsdp": [("step", 1, 1), ("save", 0, 1), ("validation", 0, 2)],
}


def terminated(rank: int, size: int, name: str, folder: str) -> list[Any]:
    results = []
    loaders = DataLoader(data(24), batch_size=2, shuffle=True), DataLoader(data(5), batch_size=2)

    def run(path: str, *callbacks: Any, ckpt_path: str | None = None) -> tuple[lw.Trainer, Net]:
        lw.seed_everything(7, verbose=False)
        save = lw.ModelCheckpoint(path, "{step}", every_n_train_steps=4, save_on_exception=True, save_top_k=-1)
        trainer = trainer_of(
            name, size, max_epochs=2, limit_val_batches=1.0, val_check_interval=3, num_sanity_val_steps=0,
            callbacks=[*callbacks, save], enable_checkpointing=True,
        )  # fmt: skip
        module = Net()
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
        return trainer, module

    wanted = whole(run(f"{folder}/whole")[1])
    for number, moment in enumerate(MOMENTS[name]):
        path = f"{folder}/{number}"
        with pytest.raises(lw.StopBySignal) as caught:
            run(path, Kills(*moment))
        torch.distributed.barrier()
        files = sorted(one.name for one in Path(path).glob("*.ckpt"))
        found = whole(run(path, ckpt_path="last")[1])
        results.append((moment, caught.value.code, files, found == wanted))
    return results


@pytest.mark.parametrize("name", MOMENTS)
def test_sigterm_at_any_moment_commits_one_step_from_which_training_goes_on_exactly(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(terminated, 2, name, str(tmp_path), connect=False)
    assert first == second
    for moment, code, files, is_exact in first:
        assert code == 143, moment
        assert is_exact, (moment, files)
        assert files in (["step=4.ckpt"], ["step=4.ckpt", "step=5.ckpt"], ["step=3.ckpt"]), (moment, files)
