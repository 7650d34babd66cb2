"""`max_samples` and `max_tokens`: the step at which training stops, what is counted, and what follows from a limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import Net, Unsized, assert_same, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import GradientAccumulationScheduler, TQDMProgressBar
from loopwright.errors import ConfigError, DataError, ModuleError


class Words(lw.Module):
    """Embeds tokens of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["input_ids"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting(Words):
    """Counts what is not padding."""

    def count_tokens(self, batch: Any) -> int:
        assert batch["input_ids"].device.type == "cpu"
        return int((batch["input_ids"] != 0).sum())


def texts(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Return a batch of two texts for each length; the second has one token of padding."""
    batches = []
    for length in lengths:
        tokens = torch.ones(2, length, dtype=torch.long)
        tokens[1, -1] = 0
        batches.append({"input_ids": tokens})
    return batches


@pytest.mark.parametrize(
    ("limit", "accumulate", "steps", "samples"),
    [(1, 1, 1, 2), (6, 1, 3, 6), (7, 1, 4, 8), (7, 2, 2, 8), (9, 3, 2, 10), (12, 3, 3, 16), (30, 1, 15, 30)],
)
def test_training_stops_at_the_first_step_that_reaches_the_samples(
    limit: int, accumulate: int, steps: int, samples: int
) -> None:
    class Planned(Net):
        def configure_optimizers(self) -> Any:
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = net(Planned)
    trainer = quiet(max_samples=limit, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(10, 2))  # five batches: with accumulation of 3, an epoch is a window of 3 and one of 2
    assert (trainer.global_step, trainer.progress.samples) == (steps, samples)
    assert module.total == steps


def test_the_estimate_follows_a_schedule_of_accumulation_and_the_other_limits() -> None:
    class Planned(Net):
        def configure_optimizers(self) -> Any:
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    schedule = [GradientAccumulationScheduler({0: 1, 1: 2})]
    for options in ({"callbacks": schedule}, {"max_steps": 4}, {"max_epochs": 1}):
        module = net(Planned)
        trainer = quiet(max_samples=14, **options)
        trainer.fit(module, loader(8, 2))
        assert module.total == trainer.global_step, options
    module = net(Planned)
    quiet(max_samples=4).fit(module, Unsized(loader(8, 2)))
    assert math.isinf(module.total)  # nobody knows how large batches are


@pytest.mark.parametrize(
    ("kind", "limit", "steps", "tokens"), [(Words, 10, 2, 14), (Words, 14, 2, 14), (Counting, 10, 2, 12)]
)
def test_training_stops_at_the_first_step_that_reaches_the_tokens(
    kind: type[Words], limit: int, steps: int, tokens: int
) -> None:
    trainer = quiet(max_tokens=limit)
    trainer.fit(kind(), texts([3, 4, 5]))
    assert (trainer.global_step, trainer.progress.tokens) == (steps, tokens)


@pytest.mark.parametrize("form", ["tensor", "pair"])
def test_tensors_of_integers_are_tokens(form: str) -> None:
    class Plain(Words):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch if form == "tensor" else batch[0]).square().mean()

    tokens = torch.ones(2, 5, dtype=torch.long)
    trainer = quiet(max_tokens=25)
    trainer.fit(Plain(), Unsized([tokens] * 4 if form == "tensor" else [(tokens, tokens)] * 4))
    assert (trainer.global_step, trainer.progress.tokens) == (3, 30)


def test_a_dropped_window_does_not_count() -> None:
    class Skipping(Words):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 and self.current_epoch == 0 else None

    trainer = quiet(max_tokens=100, max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(Skipping(), texts([3, 4]))
    assert trainer.progress.tokens == 14


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ModuleError, match=r"(?s)shape \(2, 4\) and torch.float32.*count_tokens\(self, batch\)"):
        quiet(max_tokens=10).fit(net(), [torch.ones(2, 4)])

    class Wrong(Net):
        def count_tokens(self, batch: Any) -> Any:
            return torch.ones(())

    with pytest.raises(ModuleError, match="expected a whole number"):
        quiet(max_tokens=10).fit(net(Wrong), loader())

    class First(Net):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0], batch[0][:, :1]))

    with pytest.raises(DataError, match="max_samples=10"):
        quiet(max_samples=10).fit(net(First), [(torch.ones(2, 4), torch.ones(3))])
    with pytest.raises(ConfigError, match="max_samples=-2"):
        quiet(max_samples=-2)


@pytest.mark.parametrize("limit", [{"max_samples": 14}, {"max_tokens": 1}])
def test_a_run_that_is_resumed_stops_at_the_same_step(limit: dict[str, int], tmp_path: Path) -> None:
    class Tokens(Net):
        def count_tokens(self, batch: Any) -> int:
            return len(batch[0]) * 3

    options = {"max_tokens": 40} if "max_tokens" in limit else limit
    whole = net(Tokens)
    trainer = quiet(**options)
    trainer.fit(whole, loader(8, 2, shuffle=True))
    counts = trainer.global_step, trainer.progress.samples, trainer.progress.tokens
    assert counts == (7, 14, 42 if "max_tokens" in limit else 0)
    half = net(Tokens)
    trainer = quiet(max_steps=3, **options)
    trainer.fit(half, loader(8, 2, shuffle=True))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = net(Tokens, seed=7)
    trainer = quiet(**options)
    trainer.fit(rest, loader(8, 2, shuffle=True), ckpt_path=tmp_path / "half.ckpt")
    assert (trainer.global_step, trainer.progress.samples, trainer.progress.tokens) == counts
    assert_same(whole, rest)


def test_a_used_up_limit_is_said_and_a_raised_one_goes_on() -> None:
    trainer = quiet(max_samples=8)
    module, data = net(), loader()
    trainer.fit(module, data)
    with pytest.warns(UserWarning, match=r"nothing to do.*max_samples=8"):
        trainer.fit(module, data)
    assert trainer.global_step == 4
    trainer.max_samples = 9
    trainer.fit(module, data)
    assert trainer.global_step == 5
    trainer.fit(module, data)  # the limit fell within an epoch
    assert trainer.global_step == 5


def test_a_limit_counts_batches_for_the_bar() -> None:
    totals: list[float] = []

    class Bar(TQDMProgressBar):
        def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
            totals.append(self.total_train_batches)
            super().on_train_epoch_start(trainer, *args)

    trainer = quiet(max_samples=11, accumulate_grad_batches=2, enable_progress_bar=True, callbacks=[Bar()])
    trainer.fit(net(), loader(8, 2))
    assert totals == [4, 2]  # 8 samples, then one window of 4


def test_minus_one_is_no_limit() -> None:
    trainer = quiet(max_samples=-1, max_tokens=-1, max_epochs=1)
    trainer.fit(net(), loader())
    assert trainer.max_samples is None
    assert trainer.global_step == 4


def test_a_manual_module_and_a_closure_optimizer_are_limited_alike() -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    for module in (net(Manual), net(Net, lambda parameters: torch.optim.LBFGS(parameters, max_iter=2))):
        trainer = quiet(max_samples=5)
        trainer.fit(module, loader())
        assert (trainer.global_step, trainer.progress.samples) == (3, 6)


def test_batches_of_unknown_number_and_of_iterables_are_limited() -> None:
    trainer = quiet(max_samples=5)
    trainer.fit(net(), Unsized(loader()))
    assert (trainer.global_step, trainer.progress.samples) == (3, 6)
    trainer = quiet(max_samples=5)
    trainer.fit(net(), {"a": DataLoader(loader().dataset, 2)}["a"])
    assert trainer.global_step == 3


def test_batches_that_are_lists_of_samples_count_their_length() -> None:
    class Lists(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(torch.stack(batch).flatten(1)[:, :4]).square().mean()

    images = [torch.ones(3, 2, 2) for _ in range(10)]
    trainer = quiet(max_samples=4)
    trainer.fit(Lists(), DataLoader(images, batch_size=2, collate_fn=list))
    assert (trainer.global_step, trainer.progress.samples) == (2, 4)
