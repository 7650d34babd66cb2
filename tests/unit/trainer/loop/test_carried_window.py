"""Windows that continue in the next epoch: the steps of one long loop, saved and resumed in the middle of a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Net, Recorder, Unsized, ValidatedNet, assert_same, loader, momentum, net, quiet

import loopwright as lw
from loopwright.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from loopwright.errors import CheckpointError, ConfigError


class Weighted(Net):
    """A sum and a weight, which differ by batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = (self.net(batch[0]) - batch[1]).square()
        return lw.Loss(losses[: 1 + batch_idx % 2].sum(), 1 + batch_idx % 2)


class Scheduled(ValidatedNet):
    """Its rate falls at each epoch's end."""

    def configure_optimizers(self) -> Any:
        optimizer = momentum(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def by_hand(module: Net, batches: list[Any], epochs: int, accumulate: int) -> int:
    """Train over all epochs as one sequence of batches; return the steps."""
    optimizer = module.make_optimizer(module.parameters())
    sequence = batches * epochs
    steps = 0
    for first in range(0, len(sequence), accumulate):
        window = sequence[first : first + accumulate]
        optimizer.zero_grad()
        for batch in window:
            (module.loss(batch) / len(window)).backward()
        optimizer.step()
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("batches", "epochs", "accumulate"), [(5, 3, 4), (3, 4, 2), (3, 3, 4), (4, 2, 2), (1, 3, 2), (1, 2, 4), (5, 3, 1)]
)
@pytest.mark.parametrize("is_sized", [True, False])
def test_the_steps_are_those_of_one_long_sequence(batches: int, epochs: int, accumulate: int, is_sized: bool) -> None:
    class Planned(Net):
        def configure_optimizers(self) -> Any:
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    ours, hand = net(Planned, momentum), net(Net, momentum)
    data = loader(2 * batches, 2)
    trainer = quiet(max_epochs=epochs, accumulate_grad_batches=accumulate, accumulate_across_epochs=True)
    trainer.fit(ours, data if is_sized else Unsized(data))
    steps = by_hand(hand, list(data), epochs, accumulate)
    assert trainer.global_step == steps
    assert trainer.progress.total_batches == batches * epochs
    assert trainer.progress.skipped_steps == 0
    if is_sized or (batches, epochs, accumulate) != (5, 3, 4):
        assert_same(ours, hand)
    else:  # the last window has 3 of 4 batches, which is known at its end only: (a + b + c) / 4 * (4 / 3) is rounded
        for one, other in zip(ours.parameters(), hand.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    if is_sized:
        assert ours.total == steps


def test_sums_and_weights_are_added_up_over_the_epochs_end() -> None:
    ours, hand = net(Weighted), net(Weighted)
    batches = list(loader(6, 2))
    quiet(max_epochs=2, accumulate_grad_batches=2, accumulate_across_epochs=True).fit(ours, batches)
    optimizer = hand.make_optimizer(hand.parameters())
    sequence = [(index, batch) for _ in range(2) for index, batch in enumerate(batches)]
    for window in (sequence[:2], sequence[2:4], sequence[4:]):
        optimizer.zero_grad()
        parts = [hand.training_step(batch, index) for index, batch in window]
        (sum(part.sum for part in parts) / sum(part.weight for part in parts)).backward()
        optimizer.step()
    for one, other in zip(ours.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # the division comes after the sum here


def test_validation_and_schedules_of_epochs_come_within_a_window() -> None:
    notes = Recorder(lambda trainer: (trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]))
    module = net(Scheduled)
    quiet(
        max_epochs=2, accumulate_grad_batches=4, accumulate_across_epochs=True, num_sanity_val_steps=0,
        callbacks=[notes],
    ).fit(module, loader(10, 2), loader(4, 2))  # fmt: skip
    epoch = ["epoch_start", *(f"batch{i}" for i in range(5)), "validation", "val0.0", "val0.1", "epoch_end"]
    assert notes.seen == ["train_start", *epoch, *epoch, "train_end"]
    steps = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    # The window of batches 4 to 7 steps in the second epoch, at its rate.
    assert notes.notes == [(step, 0.05 * 0.5 ** ((i >= 4) + (i >= 9))) for i, step in enumerate(steps)]
    plain = net(Scheduled)
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "accumulate_across_epochs": True, "limit_val_batches": 0}
    quiet(max_epochs=2, **options).fit(plain, loader(10, 2))
    assert_same(module, plain)  # the validation did not zero the gradients that wait


@pytest.mark.parametrize("kind", [Scheduled, Weighted])
def test_a_checkpoint_within_a_window_resumes_bit_for_bit(kind: type[Net], tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "accumulate_across_epochs": True, "max_epochs": 3}
    whole = net(kind, dropout=0.2)
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}", every_n_epochs=1)
    trainer = quiet(**options, enable_checkpointing=True, callbacks=[saves])
    trainer.fit(whole, loader(10, 2, shuffle=True), loader(4, 2) if kind is Scheduled else None)
    assert trainer.global_step == 4
    for epoch in (0, 1):
        path = tmp_path / f"epoch={epoch}.ckpt"
        assert torch.load(path, weights_only=True)["loopwright"]["window"]["count"] == (1, 2)[epoch]
        rest = net(kind, dropout=0.2, seed=9)
        trainer = quiet(**options)
        trainer.fit(rest, loader(10, 2, shuffle=True), loader(4, 2) if kind is Scheduled else None, ckpt_path=path)
        assert trainer.global_step == 4
        assert_same(whole, rest)


def test_a_resume_that_cannot_go_on_within_the_window_says_so(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"

    class Saving(Recorder):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.current_epoch:
                trainer.save_checkpoint(path)

    trainer = quiet(max_epochs=2, accumulate_grad_batches=4, accumulate_across_epochs=True, callbacks=[Saving()])
    trainer.fit(net(), loader(10, 2))
    with pytest.raises(CheckpointError, match=r"window of 4 micro-batches \(1 done\) on 1 ranks.* 2 on 1"):
        quiet(max_epochs=2, accumulate_grad_batches=2, accumulate_across_epochs=True).fit(
            net(), loader(10, 2), ckpt_path=path
        )
    with pytest.warns(UserWarning, match="1 micro-batches are left out"):
        quiet(max_epochs=2, accumulate_grad_batches=4).fit(net(), loader(10, 2), ckpt_path=path)


def test_a_second_fit_goes_on_with_the_window_of_a_run_that_stopped() -> None:
    class Stop(Recorder):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 0 and stops

    stops = True
    module, hand = net(), net()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=4, accumulate_across_epochs=True, callbacks=[Stop()])
    trainer.fit(module, loader(10, 2))
    assert (trainer.current_epoch, trainer.global_step) == (1, 1)
    stops = False
    trainer.fit(module, loader(10, 2))
    assert trainer.global_step == 3
    by_hand(hand, list(loader(10, 2)), 2, 4)
    assert_same(module, hand)


def test_a_limit_on_samples_stops_at_a_step_and_not_at_an_epochs_end() -> None:
    class Planned(Net):
        def configure_optimizers(self) -> Any:
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = net(Planned)
    trainer = quiet(max_samples=10, accumulate_grad_batches=4, accumulate_across_epochs=True)
    trainer.fit(module, loader(10, 2))
    assert (trainer.global_step, trainer.progress.samples, trainer.current_epoch) == (2, 16, 1)
    assert module.total == 2


def test_a_window_that_is_broken_off_cannot_be_saved(tmp_path: Path) -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.current_epoch == 1 and batch_idx == 1:
                raise RuntimeError("broken")
            return self.loss(batch)

    class Saving(Recorder):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            with pytest.raises(CheckpointError, match="1 micro-batches of an earlier epoch"):
                trainer.save_checkpoint(tmp_path / "broken.ckpt")
            self.seen.append("refused")

    saving = Saving()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=4, accumulate_across_epochs=True, callbacks=[saving])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(net(Broken), loader(10, 2))
    assert saving.seen[-1] == "refused"


def test_a_dropped_window_begins_anew() -> None:
    class Skipping(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 1 and batch_idx == 1 else None

    trainer = quiet(max_epochs=3, accumulate_grad_batches=4, accumulate_across_epochs=True)
    trainer.fit(net(Skipping), loader(10, 2))
    assert trainer.global_step == 3  # 4 of the first epoch; of the third 4, and the one that is left


def test_impossible_pairs_are_refused() -> None:
    class Manual(Net):
        automatic_optimization = False

    lbfgs = net(Net, torch.optim.LBFGS)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (net(Manual), {}, "manual optimization"),
        (lbfgs, {}, "LBFGS"),
        (net(), {"callbacks": [GradientAccumulationScheduler({0: 2})]}, "GradientAccumulationScheduler"),
        (net(), {"nonfinite_loss": "skip"}, "nonfinite_loss='skip'"),
    ]
    for module, options, reason in cases:
        with pytest.raises(ConfigError, match=rf"accumulate_across_epochs=True with .*{reason}"):
            quiet(max_epochs=1, accumulate_across_epochs=True, **options).fit(module, loader())
    with pytest.raises(ConfigError, match="accumulate_across_epochs=2"):
        quiet(accumulate_across_epochs=2)
