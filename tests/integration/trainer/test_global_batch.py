"""`Trainer(global_batch_size=)` on several ranks: the same global batch on any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from toys import Net, Unsized, ValidatedNet, loader, net, quiet

from loopwright.callbacks import Callback
from loopwright.errors import ConfigError

# Means over the same samples, added up in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def trained(rank: int, size: int, *, resume: str | None = None, save: str | None = None, epochs: int = 2) -> Any:
    strategy = "ddp" if size > 1 else "auto"
    trainer = quiet(max_epochs=epochs, devices=size, strategy=strategy, global_batch_size=8)
    module = net()
    trainer.fit(module, loader(16, 2), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.accumulate_grad_batches, trainer.global_step, [p.detach().clone() for p in module.parameters()]


def refused(rank: int, size: int) -> list[str]:
    messages = []
    for data, wanted in ((loader(16, 2 + rank), 12), (loader(16, 2), 6)):
        trainer = quiet(max_epochs=1, devices=size, strategy="ddp", global_batch_size=wanted)
        with pytest.raises(ConfigError) as caught:
            trainer.fit(Net(), data)
        messages.append(str(caught.value))
    return messages


def test_the_global_batch_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    alone = trained(0, 1)
    both = run_ranks(trained, 2, connect=False)
    assert [one[:2] for one in (alone, *both)] == [(4, 4), (2, 4), (2, 4)]
    path = str(tmp_path / "two.ckpt")
    run_ranks(trained, 2, connect=False, save=path, epochs=1)
    resumed = trained(0, 1, resume=path)
    assert resumed[:2] == (4, 4)
    for one, *others in zip(alone[2], *(each[2] for each in both), resumed[2], strict=True):
        for other in others:
            torch.testing.assert_close(one, other, **TOLERANCE)


class Validates(Callback):
    """Notes the steps of validations, and ends the fit after a step, whose checkpoint it saves."""

    def __init__(self, stop: int, path: str) -> None:
        self.steps: list[int] = []
        self.stop, self.path = stop, path

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps.append(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.at_step_boundary and trainer.global_step == self.stop:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def validated(rank: int, size: int, path: str, interval: float, stop: int, resume: str | None = None) -> list[int]:
    notes = Validates(stop, path)
    trainer = quiet(
        max_epochs=2, devices=size, strategy="ddp" if size > 1 else "auto", global_batch_size=8, callbacks=[notes],
        val_check_interval=interval, num_sanity_val_steps=0, limit_val_batches=1,
    )  # fmt: skip
    trainer.fit(net(ValidatedNet), loader(64, 2), loader(64, 2), ckpt_path=resume)
    return notes.steps


@pytest.mark.slow
@pytest.mark.parametrize(("interval", "expected"), [(1.0, [8, 16]), (0.25, [2, 4, 6, 8, 10, 12, 14, 16])])
def test_validations_come_at_the_same_steps_when_the_number_of_ranks_changes(
    tmp_path: Path, interval: float, expected: list[int]
) -> None:
    path = str(tmp_path / "stopped.ckpt")
    begun = validated(0, 1, path, interval, 5)
    both = run_ranks(validated, 2, path, interval, 7, path, connect=False)[0]
    ended = validated(0, 1, path, interval, -1, path)
    assert begun + both + ended == expected


def test_ranks_that_differ_and_numbers_that_do_not_divide_are_refused_on_all() -> None:
    for messages in run_ranks(refused, 2, connect=False):
        assert "2 on rank 0, 3 on rank 1" in messages[0]
        assert "multiple of 4 (2 samples per micro-batch x 2 ranks)" in messages[1]
        assert "global_batch_size=4 or 8" in messages[1]


class Tokens(Net):
    """Counts as many tokens per sample as its first number says; `seen` has what this rank read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def count_tokens(self, batch: Any) -> int:
        self.seen.append(int(batch[0].abs().sum() * 100))
        return self.seen[-1]


def limited(rank: int, size: int, *, iterable: bool, resume: str | None = None, **limit: int) -> Any:
    trainer = quiet(
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        accumulate_grad_batches=2,
        callbacks=[Exchanges()],
        **limit,
    )
    module = net(Tokens)
    data = loader(96, 2)
    if iterable:  # each rank reads its own, of other sizes
        data = Unsized([(x[: 2 - rank], y[: 2 - rank]) for x, y in data])
    trainer.fit(module, data, ckpt_path=resume)
    exchanges = trainer.callbacks[0].count
    return trainer.global_step, trainer.progress.samples, trainer.progress.tokens, module.seen, exchanges


class Exchanges(Callback):
    """Counts the exchanges of objects between ranks during training."""

    count = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        exchange = trainer.strategy.gather_objects

        def gather(one: Any) -> Any:
            self.count += 1
            return exchange(one)

        trainer.strategy.gather_objects = gather

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del trainer.strategy.__dict__["gather_objects"]


def test_all_ranks_stop_at_the_step_that_reaches_the_limit() -> None:
    for one in run_ranks(limited, 2, connect=False, iterable=False, max_samples=150):
        assert one[:2] == (19, 152)  # 8 samples a step
        assert one[4] <= 10  # checks of the first batch and of each epoch, and the limit: not one for each of 19 steps
    for one in run_ranks(limited, 2, connect=False, iterable=True, max_samples=63):
        assert one[:2] == (11, 66)  # rank 0 takes 4 samples a step, rank 1 takes 2

    results = run_ranks(limited, 2, connect=False, iterable=False, max_tokens=20_000)
    windows = [sum(column) for column in zip(*(one[3] for one in results), strict=True)]
    steps = [sum(pair) for pair in zip(windows[::2], windows[1::2], strict=True)]
    assert sum(steps[:-1]) < 20_000 <= sum(steps)
    for one in results:
        assert one[:3] == (len(steps), 8 * len(steps), sum(steps))


class Validated(Net):
    def validation_step(self, batch: Any, index: int) -> None:
        pass


class CountsValidations(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.steps.append(trainer.global_step)


def validated_at(rank: int, size: int, resume: str) -> list[int]:
    counts = CountsValidations()
    trainer = quiet(max_epochs=1, devices=size, strategy="ddp", callbacks=[counts])
    trainer.fit(net(Validated), loader(24, 2), loader(4, 2), ckpt_path=resume)
    return counts.steps


def test_an_epoch_that_is_resumed_on_more_ranks_is_validated_at_its_end_only(tmp_path: Path) -> None:
    path = str(tmp_path / "within.ckpt")
    trainer = quiet(max_steps=4, limit_val_batches=0)
    trainer.fit(net(Validated), loader(24, 2))
    trainer.save_checkpoint(path)
    assert run_ranks(validated_at, 2, path, connect=False) == [[8], [8]]  # four batches alone, then eight by twos
