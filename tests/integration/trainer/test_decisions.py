"""Whatever a decision follows from, all ranks take the same one: values that differ by rank, clocks, files and chance.

The same for replicated (ddp) and sharded (fsdp) modules. Each test starts the ranks once per strategy; a case returns
what was decided and the weights that followed, and every rank has to return the same.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import FSDPStrategy

# Any in this file: batches, arguments of the Trainer, and results that travel between processes.

SAMPLES, BATCH = 24, 3  # four steps per epoch on two ranks


class Net(lw.Module):
    """Logs "seen", which is `value(rank, step)`, with what `how` says; its schedule is `schedule(optimizer)`."""

    def __init__(self, value: Callable[[int, int], float] = lambda rank, step: 0.0, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone, self.head = nn.Linear(4, 5), nn.Linear(5, 1)
        self.value, self.how = value, how
        self.schedule: Callable[[Any], Any] = lambda optimizer: None
        self.lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", self.value(self.trainer.global_rank, self.trainer.global_step), **self.how)
        return self.head(self.backbone(batch[0]).tanh()).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.head(self.backbone(batch[0]).tanh()).square().mean())

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=0.9)
        schedule = self.schedule(optimizer)
        return optimizer if schedule is None else {"optimizer": optimizer, "lr_scheduler": schedule}


def loader(count: int = SAMPLES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(count, 4, generator=generator, dtype=torch.float64)), batch_size=BATCH)


def trainer_of(name: str, size: int, **arguments: Any) -> lw.Trainer:
    strategy: Any = FSDPStrategy(auto_wrap_policy={nn.Linear}) if name == "fsdp" else name
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "limit_val_batches": 0, "max_epochs": 2, "precision": "64-true", "num_sanity_val_steps": 0,
    }  # fmt: skip
    return lw.Trainer(accelerator="cpu", devices=size, strategy=strategy, **{**quiet, **arguments})


def outcome(trainer: lw.Trainer, module: nn.Module) -> Any:
    """Return the steps made, the learning rates, and this rank's whole weights."""
    rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    with torch.no_grad():
        parts = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in module.parameters()]
        return trainer.global_step, rates, torch.cat([one.double().reshape(-1) for one in parts]).tolist()


def plateau(**keys: Any) -> Callable[[Any], Any]:
    return lambda optimizer: {
        "scheduler": ReduceLROnPlateau(optimizer, patience=0, factor=0.5), "monitor": "seen", **keys
    }  # fmt: skip


def apart(rank: int, step: int) -> float:
    """Rank 0's value falls slowly, rank 1's rises fast: alone, one would keep its rate and one would lower it."""
    return 2.0 * step if rank else -1.0 * step


def in_turns(rank: int, step: int) -> float:
    """Alone, each rank would lower its rate at other steps; their mean falls all the time, but for the sixth value."""
    jump = 3.0 if step == 5 else 0.0
    return -step + jump + (1.0 if (step + rank) % 2 else -1.0) * 10


# --- learning-rate schedules -----------------------------------------------------------------------------------------


def schedules(name: str, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def fit(case: str, module: Net, **arguments: Any) -> None:
        trainer = trainer_of(name, size, **arguments)
        trainer.fit(module, loader())
        found[case] = outcome(trainer, module)

    for case, value, keys, how in (
        ("each step", apart, {"interval": "step"}, {}),
        ("each second step", in_turns, {"interval": "step", "frequency": 2}, {"prog_bar": True}),
        ("in turns", in_turns, {"interval": "step"}, {"on_epoch": True, "on_step": True}),
        ("synced", apart, {"interval": "step"}, {"sync_dist": True}),
        ("epoch", apart, {"interval": "epoch"}, {}),
        ("smallest", apart, {"interval": "step"}, {"reduce_fx": "min"}),
        ("of rank zero", apart, {"interval": "step"}, {"rank_zero_only": True}),
    ):
        module = Net(value, **how)
        module.schedule = plateau(**keys)
        fit(case, module)

    class Own(Net):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(metric)

    module = Own(apart)
    module.schedule = plateau(interval="step")
    fit("own step", module)

    class SomeRanks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_rank == 1 or self.trainer.global_step == 0:
                return super().training_step(batch, batch_idx)
            return self.head(self.backbone(batch[0]).tanh()).square().mean()

    module = SomeRanks(apart)
    module.schedule = plateau(interval="step")
    fit("one rank logs", module)
    module = Net(apart)
    module.schedule = plateau(interval="step")
    fit("windows", module, accumulate_grad_batches=3)
    return found


def one_process(value: Callable[[int, int], float], every: int, join: Callable[[list[float]], float]) -> list[float]:
    """Return the rates that a plateau schedule gives, after each step, for the joined values of two ranks."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    rates = []
    for step in range(8):
        if (step + 1) % every == 0:
            schedule.step(join([value(0, step), value(1, step)]))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_plateau_schedule_gives_all_ranks_the_rate_of_their_common_value(name: str) -> None:
    first, second = run_ranks(lambda rank, size: schedules(name, size), 2, connect=False)
    assert first == second
    expected = {
        "each step": one_process(apart, 1, mean),
        "each second step": one_process(in_turns, 2, mean),
        "in turns": one_process(in_turns, 1, mean),
        "synced": one_process(apart, 1, mean),
        "smallest": one_process(apart, 1, min),
        "of rank zero": one_process(apart, 1, lambda values: values[0]),
        "own step": one_process(apart, 1, mean),
        "epoch": [one_process(lambda rank, step: apart(rank, 4 * step + 3), 1, mean)[1]],
    }
    assert {case: first[case][1] for case in expected} == {case: rates[-1:] for case, rates in expected.items()}
    assert len({rates[-1] for rates in expected.values()}) > 2  # the cases can be told apart


def step_by_hand(name: str, rank: int, size: int) -> Any:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            assert isinstance(schedule, ReduceLROnPlateau)
            super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(self.head(self.backbone(batch[0]).tanh()).square().mean())
            optimizer.step()
            schedule.step(self.trainer.callback_metrics["seen"])
            assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]

    module = Manual(apart)
    module.schedule = plateau()
    trainer = trainer_of(name, size)
    with pytest.warns(UserWarning, match="'monitor' is ignored") if rank == 0 else nullcontext():
        trainer.fit(module, loader())
    state = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    assert "_gather" not in state
    return outcome(trainer, module)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_manually_stepped_plateau_schedule_gets_the_mean_over_ranks(name: str) -> None:
    first, second = run_ranks(lambda rank, size: step_by_hand(name, rank, size), 2, connect=False)
    assert first == second
    assert first[1] == one_process(apart, 1, mean)[-1:]


# --- callbacks that judge logged values ------------------------------------------------------------------------------


def judged(name: str, size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, value, how, arguments in (
        ("patience", apart, {}, {"patience": 1}),
        ("threshold", apart, {}, {"stopping_threshold": 4.0, "mode": "max"}),
        ("divergence", apart, {}, {"divergence_threshold": 1.2}),
        ("not finite", lambda rank, step: math.nan if rank and step > 4 else 1.0 - step, {}, {}),
        ("one rank alone", lambda rank, step: 0.0 if rank else math.inf, {"rank_zero_only": True}, {}),
        ("with the epoch", apart, {"on_step": True, "on_epoch": True}, {"patience": 1}),
    ):
        stopping = lw.EarlyStopping("seen", check_on_train_epoch_end=True, **arguments)
        trainer, module = trainer_of(name, size, max_epochs=6, callbacks=[stopping]), Net(value, **how)
        trainer.fit(module, loader())
        found[case] = (stopping.stopped_epoch, int(stopping.stopping_reason), str(stopping.best_score))
        found[case] += (outcome(trainer, module),)
    for case, how in (("steps", {}), ("smallest", {"reduce_fx": "min"}), ("synced", {"sync_dist": True})):
        path = folder / f"{name} {case}"
        saving = lw.ModelCheckpoint(
            path, "{step}-{seen:.2f}", "seen", every_n_train_steps=1, save_top_k=2, save_last=True
        )
        trainer = trainer_of(name, size, enable_checkpointing=True, callbacks=[saving])
        trainer.fit(Net(in_turns, **how), loader())
        state = {key: str(value) for key, value in saving.state_dict().items()}
        found[f"checkpoints of {case}"] = (sorted(os.listdir(path)), state)
    for case, how in (("steps", {}), ("with the epoch", {"on_step": True, "on_epoch": True})):
        found[f"latest of {case}"] = latest(name, size, **how)
    return found


def latest(name: str, size: int, **how: Any) -> list[float]:
    """Return "seen" at each validation and end of an epoch, where validation logs it, too, as does the epoch's end."""
    seen: list[float] = []

    class Twice(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("seen", 1000.0 + self.trainer.current_epoch)

        def on_train_epoch_end(self) -> None:
            if self.trainer.global_rank == 0:
                self.log("seen", 7.0)

    class Watch(lw.Callback):
        def note(self, trainer: lw.Trainer) -> None:
            trainer.synchronize_metrics("seen")
            seen.append(float(trainer.callback_metrics["seen"]))

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch:
                self.note(trainer)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.note(trainer)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.note(trainer)

    trainer = trainer_of(name, size, callbacks=[Watch()], limit_val_batches=1.0)
    trainer.fit(Twice(apart, **how), loader(), loader())
    return [*seen, float(trainer.callback_metrics["seen"])]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_callbacks_judge_the_common_value_of_a_key_that_is_logged_in_steps(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(lambda rank, size: judged(name, size, tmp_path), 2, connect=False)
    assert first == second
    # The mean of the two ranks' values is step / 2; at the ends of epochs 1.5, 3.5, 5.5 and so on.
    assert first["patience"][:3] == (1, 3, "tensor(1.5000, dtype=torch.float64)")
    assert first["threshold"][:2] == (2, 1)
    assert first["divergence"][:2] == (0, 2)
    assert first["not finite"][:2] == (1, 4)
    assert first["one rank alone"][:2] == (0, 4)
    assert first["latest of steps"] == [1000, 1000, 7, 1001, 1001, 7]
    assert first["latest of with the epoch"] == [1000, 0.75, 7, 1001, 2.75, 7]  # the epochs' means of steps / 2
    means = [mean([in_turns(0, step), in_turns(1, step)]) for step in range(8)]
    least = [min(in_turns(0, step), in_turns(1, step)) for step in range(8)]
    for case, values in (("steps", means), ("synced", means), ("smallest", least)):
        best = sorted(range(8), key=lambda step: (values[step], step))[:2]
        names = [f"step={step + 1}-seen={values[step]:.2f}.ckpt" for step in best]
        assert first[f"checkpoints of {case}"][0] == sorted([*names, "last.ckpt"]), case


# --- chance, clocks and files ----------------------------------------------------------------------------------------


def by_chance(name: str, size: int, folder: Path) -> dict[str, Any]:
    """Decide by functions that draw, or know the rank."""
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}

    def fit(case: str, **arguments: Any) -> None:
        trainer, module = trainer_of(name, size, **arguments), Net()
        trainer.fit(module, loader(), loader())
        found[case] = outcome(trainer, module)

    def refused(case: str, **arguments: Any) -> None:
        with pytest.raises(lw.ConfigError) as caught:
            fit(case, **arguments)
        found[case] = str(caught.value)

    random.seed(rank)
    if name == "ddp":  # pruning needs whole parameters
        for case, arguments in (
            ("masks", {"amount": 0.3}),
            ("amount", {"amount": lambda epoch: random.choice([0, 0.2, 0.4])}),
            ("whether", {"amount": 0.3, "apply_pruning": lambda epoch: rank == 0}),
            ("rewind", {"amount": 0.3, "use_lottery_ticket_hypothesis": lambda epoch: rank == 1 - epoch % 2}),
        ):
            fit(case, max_epochs=3, callbacks=[lw.ModelPruning("random_unstructured", **arguments)])
        refused("rate", callbacks=[lw.BackboneFinetuning(0, lambda epoch: 1.0 + random.random(), train_bn=False)])

        class Chance(lw.WeightAveraging):
            def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
                return rank == 0 or step_idx == 0

        refused("average", callbacks=[Chance()])
    refused("windows", callbacks=[lw.GradientAccumulationScheduler({0: 1, 1: 2 + rank})])

    class Rates(lw.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.1 + 0.1 * rank * trainer.current_epoch

    refused("a callback's rate", callbacks=[Rates()])

    class Clock(lw.Callback):
        """Counts validations, on ranks whose clocks differ by hours."""

        def __init__(self) -> None:
            self.at: list[int] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.fit_loop._validation_clock_s -= 7200.0 * rank

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.at.append(trainer.global_step)

    clock = Clock()
    fit("clock", callbacks=[clock], limit_val_batches=1, val_check_interval=timedelta(hours=1))
    found["clock"] += (clock.at,)
    (folder / str(rank)).mkdir(exist_ok=True)
    (folder / str(rank) / "STOP").touch()
    stop = lw.StopFile(folder / str(rank) / "STOP", interval_s=0)
    fit("file", callbacks=[stop, Touch(folder / "1" / "STOP")], max_epochs=1)  # it is rank 0's file that counts
    return found


class Touch(lw.Callback):
    """Makes a file after the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.path.touch()


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_chance_clocks_and_files_of_a_rank_decide_for_all_or_are_named(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(lambda rank, size: by_chance(name, size, tmp_path), 2, connect=False)
    assert first == second
    assert "micro-batches of a window: 2 on rank 0; 3 on rank 1" in first["windows"]
    assert "learning rate of group 0 of optimizer 0: 0.1 on rank 0; 0.2 on rank 1" in first["a callback's rate"]
    assert first["clock"][-1] == []  # rank 0's hour is not over
    assert first["file"][0] == 4
    if name == "ddp":
        assert "learning rate of group 1 of optimizer 0" in first["rate"]
        assert "should_update led to different numbers of updates: 10 on rank 0, 1 on rank 1" in first["average"]
        masked = {case: sum(value == 0 for value in first[case][2]) for case in ("masks", "whether")}
        assert masked["masks"] == masked["whether"] > 0


# --- the rest of an epoch --------------------------------------------------------------------------------------------


class Skips(Net):
    """Skips the rest of an epoch from the third batch on, on some ranks."""

    ranks = (0, 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and self.trainer.global_rank in self.ranks else None


def skip(name: str, size: int, *, alone: bool) -> Any:
    trainer, module = trainer_of(name, size, accumulate_grad_batches=1 if alone else 2), Skips()
    if not alone:
        trainer.fit(module, loader())
        return outcome(trainer, module), trainer.progress.epochs
    module.ranks = (1,)
    try:
        trainer.fit(module, loader())
    except lw.LoopwrightError as error:
        return type(error).__name__, str(error)
    raise AssertionError("one rank has skipped what the other has not")


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_rest_of_an_epoch_is_skipped_on_all_ranks_or_the_one_that_does_is_named(name: str) -> None:
    first, second = run_ranks(lambda rank, size: skip(name, size, alone=False), 2, connect=False)
    assert first == second
    assert (first[0][0], first[1]) == (2, 2)
    first, second = run_ranks(lambda rank, size: skip(name, size, alone=True), 2, connect=False)
    message = "on_train_batch_start returned -1 on rank 1, but rank 0 trains on"
    assert second[0] == "ModuleError"
    assert message in second[1]
    assert message in first[1], first
