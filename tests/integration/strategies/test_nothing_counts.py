"""When a window makes no step: where no micro-batch of any rank returned a loss. One rule for every strategy.

Weights after each training are those of a loop written here. Momentum and weight decay make a step with gradients of 0
visible; the schedule, the average, and the counts of steps have to follow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import DDPStrategy, FSDPStrategy

# Any in this file: batches, and results that travel between processes.

LOSS, NONE, ZERO = "loss", "none", "zero"
KINDS = (LOSS, NONE, ZERO)
Window = list[tuple[str, ...]]  # of each micro-batch, what the step of each rank returns
BATCH = 2


class Net(lw.Module):
    """What a step returns is written in the batch.

    Args:
        form: "mean"; or for a sum how its weight is given: "float", "tensor", "either" (by rank), or "graphless": as
            "float", and what weighs nothing has no graph.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(4, 1)
        self.form = form

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, kinds = batch
        kind = KINDS[int(kinds[0])]
        if kind == NONE:
            return None
        total = self.net(x.to(self.net.weight.dtype)).square().sum()
        if self.form == "mean":
            return total / len(x)
        weight = float(len(x)) if kind == LOSS else 0.0
        total = total if kind == LOSS else total * 0
        if self.form == "graphless" and kind == ZERO:
            total = total.detach()
        is_tensor = self.form == "tensor" or (self.form == "either" and self.trainer.global_rank == 1)
        return lw.Loss(total, torch.tensor(weight) if is_tensor else weight)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def samples(windows: list[Window]) -> TensorDataset:
    kinds = [KINDS.index(kind) for window in windows for micro in window for kind in micro for _ in range(BATCH)]
    generator = torch.Generator().manual_seed(len(kinds))
    return TensorDataset(torch.randn(len(kinds), 4, generator=generator, dtype=torch.float64), torch.tensor(kinds))


def by_hand(windows: list[Window], form: str, *, is_parallel: bool) -> Any:
    """Return steps, skipped windows, learning rate, and weights."""
    module = Net(form).double()
    [optimizer], [config] = module.configure_optimizers()
    batches = iter(samples(windows)[:][0].split(BATCH))
    steps = skipped = 0
    for window in windows:
        sums, weights = [], []
        for micro in window:
            for kind in micro:
                x = next(batches)
                if kind != NONE:
                    total = module.net(x).square().sum()
                    sums.append(total if kind == LOSS else total * 0)
                    weights.append(len(x) if kind == LOSS else 0)
        if not sums:
            skipped += 1
            continue
        optimizer.zero_grad()
        total = torch.stack(sums).sum()
        # On several ranks a mean that is left out counts with a loss of 0: see docs/loss-contract.md.
        is_by_plan = form == "mean" and is_parallel
        weight = BATCH * len(window) * len(window[0]) if is_by_plan else sum(weights)
        (total / weight if weight else total * 0).backward()
        optimizer.step()
        config["scheduler"].step()
        steps += 1
    return steps, skipped, optimizer.param_groups[0]["lr"], flat(module)


def flat(module: nn.Module) -> list[float]:
    with torch.no_grad():
        parts = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in module.parameters()]
        return torch.cat([one.double().reshape(-1) for one in parts]).tolist()


def train(rank: int, size: int, name: str, cases: list[tuple[str, list[Window]]], **arguments: Any) -> list[Any]:
    found = []
    for form, windows in cases:
        strategies = {
            "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
            "zero_weight": lambda: DDPStrategy(uneven="zero_weight"),
            "local": lambda: DDPStrategy(ddp_comm_hook="noop"),
        }
        precision = "32-true" if name.startswith("deepspeed") else "64-true"
        average = [] if name.startswith("deepspeed") else [lw.EMAWeightAveraging(decay=1.0)]
        callback: Any = average[0] if average else None
        trainer = lw.Trainer(
            accelerator="cpu", devices=2 if name == "dp" else size, strategy=strategies.get(name, lambda: name)(),
            max_epochs=1, precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, callbacks=average,
            accumulate_grad_batches=len(windows[0]), **arguments,
        )  # fmt: skip
        module, weights = Net(form), []

        def keep(*_: Any, module: nn.Module = module, weights: list[Any] = weights) -> None:
            weights[:] = flat(module)  # after training they are the average

        trainer.callbacks.append(lw.LambdaCallback(on_train_epoch_end=keep))
        trainer.fit(module, DataLoader(samples(windows), batch_size=BATCH * (2 if name == "dp" else 1)))
        config = trainer.lr_scheduler_configs[0].scheduler
        assert config.last_epoch == trainer.global_step
        assert callback is None or callback.n_averaged == trainer.global_step
        counts = trainer.global_step, trainer.progress.skipped_steps
        found.append((*counts, trainer.optimizers[0].param_groups[0]["lr"], weights))
    return found


def check(found: list[Any], cases: list[tuple[str, list[Window]]], *, is_parallel: bool, rel: float = 1e-12) -> None:
    for got, (form, windows) in zip(found, cases, strict=True):
        expected = by_hand(windows, form, is_parallel=is_parallel)
        assert got[:2] == expected[:2], (form, windows)
        assert got[2] == pytest.approx(expected[2])
        # Gradients are added in another order, and divided at another place.
        assert got[3] == pytest.approx(expected[3], rel=rel, abs=rel), (form, windows)


ONE = [
    [[(kind,)] for kind in (NONE, LOSS, NONE, NONE, LOSS, LOSS)],
    [[(LOSS,), (NONE,)], [(NONE,), (NONE,)], [(NONE,), (LOSS,)], [(LOSS,), (LOSS,)], [(NONE,)]],
]
ONE_OF_SUMS = [
    [[(kind,)] for kind in (LOSS, ZERO, NONE, LOSS, ZERO)],
    [[(LOSS,), (ZERO,)], [(ZERO,), (ZERO,)], [(NONE,), (NONE,)], [(ZERO,), (LOSS,)], [(ZERO,), (NONE,)], [(ZERO,)]],
]
TWO = [
    [[(NONE, NONE)], [(LOSS, NONE)], [(NONE, NONE)], [(NONE, LOSS)], [(LOSS, LOSS)], [(NONE, NONE)]],
    [[(LOSS, NONE), (NONE, LOSS)], [(NONE, NONE), (NONE, NONE)], [(NONE, NONE), (LOSS, NONE)], [(LOSS, LOSS)] * 2],
]
TWO_OF_SUMS = [
    [[(LOSS, LOSS)], [(ZERO, ZERO)], [(NONE, ZERO)], [(NONE, NONE)], [(LOSS, ZERO)], [(ZERO, NONE)]],
    [[(LOSS, ZERO), (ZERO, NONE)], [(ZERO, NONE), (NONE, ZERO)], [(NONE, NONE), (NONE, NONE)], [(ZERO, LOSS)] * 2],
]


def test_one_process_steps_where_a_micro_batch_had_a_loss() -> None:
    cases = [(form, one) for form in ("mean", "float") for one in ONE]
    cases += [(form, one) for form in ("float", "tensor", "graphless") for one in ONE_OF_SUMS]
    check(train(0, 1, "auto", cases), cases, is_parallel=False)


def test_parts_of_a_batch_are_one_micro_batch_under_dp() -> None:
    cases = [(form, one) for form in ("float", "tensor") for one in [*TWO_OF_SUMS, *TWO]]
    check(train(0, 1, "dp", cases), cases, is_parallel=False)


def test_ddp_steps_where_a_micro_batch_of_any_rank_had_a_loss() -> None:
    cases = [(form, one) for form in ("mean", "float") for one in TWO]
    cases += [(form, one) for form in ("float", "tensor", "either", "graphless") for one in TWO_OF_SUMS]
    first, second = run_ranks(train, 2, "ddp", cases, connect=False)
    assert first == second
    check(first, cases, is_parallel=True)


def test_it_does_not_matter_how_ranks_count_and_whether_bad_steps_are_skipped() -> None:
    cases = [(form, one) for form in ("mean", "tensor") for one in TWO]
    for name, arguments in (("zero_weight", {}), ("ddp", {"nonfinite_loss": "skip"})):
        first, second = run_ranks(train, 2, name, cases, connect=False, **arguments)
        assert first == second
        check(first, cases, is_parallel=False)  # they count, and a mean that is left out does not
    first, second = run_ranks(train, 2, "local", cases, connect=False)
    assert [one[:3] for one in first] == [one[:3] for one in second]  # each has its own gradients
    assert [one[:2] for one in first] == [by_hand(one, form, is_parallel=True)[:2] for form, one in cases]


@pytest.mark.parametrize(("name", "size"), [("fsdp", 2), ("deepspeed_stage_2", 2), ("deepspeed_stage_1", 1)])
def test_sharded_modules_and_engines_step_also_where_nothing_weighs(name: str, size: int) -> None:
    is_engine = name.startswith("deepspeed")
    if is_engine:
        import_deepspeed()
    whole = TWO_OF_SUMS if size == 2 else ONE_OF_SUMS
    windows = [[[tuple(ZERO if k == NONE else k for k in m) for m in w] for w in one] for one in whole]
    cases = [(form, one) for form in ("tensor", "either") for one in windows]
    if size == 1:
        cases += [("mean", one) for one in ONE]
    everywhere = run_ranks(train, size, name, cases, connect=False)
    assert everywhere[0] == everywhere[-1]
    check(everywhere[0], cases, is_parallel=size > 1, rel=2e-5 if is_engine else 1e-12)  # an engine is in float32


class Closure(Net):
    """An optimizer that evaluates the model itself, and moves the weights also with a gradient of 0."""

    def configure_optimizers(self) -> Any:
        class Decay(torch.optim.LBFGS):
            def step(self, closure: Any) -> Any:
                loss = super().step(closure)
                with torch.no_grad():
                    for parameter in self.param_groups[0]["params"]:
                        parameter.mul_(0.5)
                return loss

        return Decay(self.parameters(), lr=0.1, max_iter=2)


def evaluate(rank: int, size: int, windows: list[Window], form: str) -> Any:
    weights: list[list[float]] = []

    class Watched(Closure):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.at_step_boundary:
                weights.append(flat(self))

    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto", max_epochs=1, precision="64-true",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=len(windows[0]),
    )  # fmt: skip
    trainer.fit(Watched(form), DataLoader(samples(windows), batch_size=BATCH))
    moved = [before != after for before, after in zip([flat(Closure(form).double()), *weights], weights, strict=False)]
    return trainer.global_step, trainer.progress.skipped_steps, moved, weights[-1]


@pytest.mark.parametrize("form", ["mean", "tensor"])
def test_an_optimizer_with_a_closure_makes_no_step_without_a_loss(form: str) -> None:
    assert evaluate(0, 1, [[(kind,)] for kind in (LOSS, NONE, LOSS)], form)[:3] == (2, 1, [True, False, True])
    alone = evaluate(0, 1, [[(LOSS,), (LOSS,)], [(NONE,), (NONE,)], [(LOSS,), (LOSS,)]], form)
    for last in (LOSS, NONE):
        windows: list[Window] = [[(LOSS, LOSS)], [(NONE, NONE)], [(last, LOSS)]]
        first, second = run_ranks(evaluate, 2, windows, form, connect=False)
        assert first == second
        assert first[:3] == (2, 1, [True, False, True])
        if last == LOSS:
            assert first[3] == pytest.approx(alone[3], rel=1e-12)
