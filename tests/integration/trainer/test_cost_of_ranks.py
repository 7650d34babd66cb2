"""What a step on two ranks costs, counted: collectives, reads from the device, Python calls. No clocks."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.fabric.watch.rank_status import last_collective

FIRST, STEPS = 5, 20
MOST_CALLS = 45


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


class Counting(lw.Module):
    """Counts from one of its steps to another."""

    def __init__(self, form: str, what: str, accumulate: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.form, self.what = form, what
        self.first, self.last = FIRST * accumulate, (FIRST + STEPS) * accumulate
        self.collectives: list[int] = []
        self.calls = 0
        self.reads = Reads()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in (self.first, self.last):
            self.mark(batch_idx == self.first)
        losses = self.layer(batch).square()
        self.log("loss", losses.detach().mean())
        return losses.mean() if self.form == "mean" else lw.Loss(losses.sum(), len(batch))

    def mark(self, is_first: bool) -> None:
        if self.what == "collectives":
            seen = last_collective()
            assert seen is not None, "torch recorded nothing"
            self.collectives.append(seen.number)
        elif self.what == "calls":
            sys.setprofile(self.count if is_first else None)
        elif is_first:
            self.reads.__enter__()
        else:
            self.reads.__exit__(None, None, None)

    def count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def counted(
    rank: int, size: int, form: str, what: str, accumulate: int = 1, strategy: str = "ddp", every: int | None = None
) -> float:
    module = Counting(form, what, accumulate)
    trainer = lw.Trainer(
        callbacks=[] if every is None else [lw.Sentinel(every)],
        accelerator="cpu", devices=size, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, accumulate_grad_batches=accumulate,
        log_every_n_steps=1000, gradient_clip_val=1.0,
    )  # fmt: skip
    gc.disable()  # a finaliser is a call, too
    trainer.fit(module, DataLoader(torch.ones(4 * (FIRST + STEPS + 5) * accumulate, 4), batch_size=2))
    if what == "collectives":
        first, last = module.collectives
        return (last - first) / STEPS
    return (module.calls if what == "calls" else module.reads.count) / STEPS


@pytest.mark.parametrize(
    ("form", "accumulate", "expected"), [("mean", 1, 1), ("mean", 4, 1), ("sum", 1, 2), ("sum", 4, 2)]
)
def test_a_step_reduces_gradients_once_and_weights_at_most_once(form: str, accumulate: int, expected: int) -> None:
    assert run_ranks(counted, 2, form, "collectives", accumulate, connect=False) == [expected, expected]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("form", ["mean", "sum"])
def test_nothing_reads_the_device_between_log_boundaries(form: str, strategy: str) -> None:
    assert run_ranks(counted, 2, form, "reads", 2, strategy, connect=False) == [0, 0]


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_a_check_of_the_sentinel_exchanges_once_and_reads_one_number_that_was_copied_before(form: str) -> None:
    checks, plain = 1 / 5, {"mean": 1, "sum": 2}[form]
    assert run_ranks(counted, 2, form, "collectives", 1, "ddp", 5, connect=False) == [plain + checks] * 2
    assert run_ranks(counted, 2, form, "reads", 1, "ddp", 5, connect=False) == [checks] * 2


def by_hand(rank: int, size: int) -> float:
    module = Counting("mean", "calls", 1)
    model = DistributedDataParallel(module)
    module.forward = module.training_step  # type: ignore[method-assign]  # as a program by hand would be written
    module.log = lambda *_: None  # type: ignore[method-assign,assignment]
    optimizer = module.configure_optimizers()
    gc.disable()
    for index, batch in enumerate(DataLoader(torch.ones(2 * (FIRST + STEPS + 5), 4), batch_size=2)):
        loss = model(batch, index)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return module.calls / STEPS


def test_a_step_makes_few_python_calls_more_than_a_manual_ddp_loop() -> None:
    ours = run_ranks(counted, 2, "mean", "calls", connect=False)[0]
    hand = run_ranks(by_hand, 2)[0]
    print(f"{ours:.1f} calls per step, by hand {hand:.1f}: {ours - hand:+.1f}")
    assert ours <= hand + MOST_CALLS
