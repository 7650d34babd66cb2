"""Automatic optimization against a hand-written PyTorch loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from toys import (
    MakeOptimizer,
    Net,
    Recorder,
    Unsized,
    ValidatedNet,
    adam,
    assert_near,
    assert_same,
    loader,
    momentum,
    net,
    quiet,
    train_by_hand,
    weights,
)

from loopwright.callbacks import GradientAccumulationScheduler
from loopwright.errors import ConfigError, ModuleError


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_training_equals_the_hand_written_loop_bit_for_bit(
    make_optimizer: MakeOptimizer, dropout: float, shuffle: bool
) -> None:
    expected = net(Net, make_optimizer, dropout=dropout)
    train_by_hand(expected, loader(9, 2, shuffle=shuffle), epochs=3)

    module = net(Net, make_optimizer, dropout=dropout)
    quiet(max_epochs=3).fit(module, loader(9, 2, shuffle=shuffle))

    assert_same(module, expected)


@pytest.mark.parametrize("accumulate", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_accumulation_equals_the_hand_written_loop_also_with_a_short_last_window(
    accumulate: int, make_optimizer: MakeOptimizer
) -> None:
    expected = net(Net, make_optimizer, dropout=0.3)
    train_by_hand(expected, loader(10, 2, shuffle=True), epochs=2, accumulate=accumulate)

    module = net(Net, make_optimizer, dropout=0.3)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(10, 2, shuffle=True))

    assert_same(module, expected)
    assert trainer.global_step == 2 * -(-5 // accumulate)


def test_a_short_last_window_has_the_gradient_of_its_own_mean() -> None:
    gradients: list[Tensor] = []

    class Watched(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients.append(self.net[0].weight.grad.clone())

    module = net(Watched, lambda parameters: SGD(parameters, lr=0.0))
    data = loader(10, 2)
    quiet(max_epochs=1, accumulate_grad_batches=4).fit(module, data)

    last = list(data)[4]
    module.zero_grad()
    module.loss(last).backward()
    assert len(gradients) == 2
    assert torch.equal(gradients[1], module.net[0].weight.grad)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_over_an_iterable_of_unknown_length_scales_its_short_window(accumulate: int) -> None:
    batches = list(loader(10, 2))
    expected = net(Net, momentum)
    train_by_hand(expected, batches, epochs=2, accumulate=accumulate)

    module = net(Net, momentum)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, Unsized(batches))

    # The window is found to be short after its first backward: gradients are scaled once more, which rounds.
    assert_near(module, expected, rtol=1e-6)
    assert trainer.global_step == 2 * -(-5 // accumulate)


def test_accumulation_follows_a_schedule_by_epoch() -> None:
    expected = net(Net, momentum)
    optimizer = momentum(expected.parameters())
    for accumulate in (1, 1, 4, 4):
        batches = list(loader(12, 2))
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            optimizer.zero_grad()
            for batch in window:
                loss = expected.loss(batch)
                (loss if len(window) == 1 else loss / len(window)).backward()
            optimizer.step()

    module = net(Net, momentum)
    trainer = quiet(max_epochs=4, callbacks=GradientAccumulationScheduler({2: 4}))
    trainer.fit(module, loader(12, 2))

    assert_same(module, expected)
    assert trainer.global_step == 6 + 6 + 2 + 2


def test_gradients_are_zeroed_once_per_window_and_what_a_hook_adds_in_between_survives() -> None:
    zeroed: list[int] = []
    seen: list[Tensor] = []

    class Adding(Net):
        index = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.index = batch_idx

        def on_after_backward(self) -> None:
            if self.index % 3 == 1:
                self.net[0].bias.grad += 100.0

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            zeroed.append(batch_idx)
            optimizer.zero_grad()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(self.net[0].bias.grad.clone())

    quiet(max_epochs=1, accumulate_grad_batches=3).fit(net(Adding), loader(12, 2))

    assert zeroed == [0, 3]
    assert all((bias > 90).all() for bias in seen)


def test_a_validation_due_within_a_window_comes_after_it_and_does_not_touch_training() -> None:
    def trained(**kwargs: Any) -> tuple[Net, Recorder]:
        module = net(ValidatedNet, momentum, dropout=0.3, norm=True)
        recorder = Recorder()
        quiet(max_epochs=2, accumulate_grad_batches=2, callbacks=recorder, **kwargs).fit(
            module, loader(12, 2, shuffle=True), loader(6, 3, seed=5, shuffle=True)
        )
        return module, recorder

    module, recorder = trained(val_check_interval=3)
    untouched, _ = trained(limit_val_batches=0)

    assert_same(module, untouched)
    assert recorder.seen[recorder.seen.index("epoch_start") :][:7] == [
        "epoch_start", "batch0", "batch1", "batch2", "batch3", "validation", "val0.0",
    ]  # fmt: skip


def test_gradients_of_a_finished_window_are_gone_before_validation() -> None:
    class Watching(ValidatedNet):
        def on_validation_start(self) -> None:
            assert all(parameter.grad is None for parameter in self.parameters())

    quiet(max_epochs=1, num_sanity_val_steps=0).fit(net(Watching), loader(), loader())


def test_parameter_groups_and_frozen_parameters_train_as_in_a_manual_loop() -> None:
    class Partly(Net):
        def configure_optimizers(self) -> Any:
            self.net[0].weight.requires_grad = False
            return SGD([{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.3}], lr=0.1)

    module = net(Partly)
    before = weights(module)
    expected = net(Partly)
    optimizer = expected.configure_optimizers()
    for batch in loader():
        optimizer.zero_grad()
        expected.loss(batch).backward()
        optimizer.step()

    quiet(max_epochs=1).fit(module, loader())

    assert_same(module, expected)
    assert torch.equal(module.net[0].weight, before["net.0.weight"])


def test_tied_weights_are_one_parameter_with_one_state() -> None:
    class Tied(Net):
        def __init__(self, optimizer: MakeOptimizer = momentum) -> None:
            super().__init__(optimizer)
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
            self.net[2].weight = self.net[0].weight

    expected, module = net(Tied), net(Tied)
    train_by_hand(expected, loader(), epochs=2)
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader())

    assert_same(module, expected)
    assert module.net[2].weight is module.net[0].weight
    assert len(trainer.optimizers[0].state) == 5


def test_an_optimizer_of_parameters_that_are_no_longer_the_modules_is_an_error() -> None:
    class Stale(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.net = nn.Sequential(nn.Linear(4, 1))
            return optimizer

    with pytest.raises(ModuleError, match="none of the 4 parameters of SGD"):
        quiet(max_epochs=1).fit(net(Stale), loader())


def test_an_optimizer_of_a_layer_that_was_replaced_or_tied_is_found() -> None:
    class Replaced(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.net[2] = nn.Linear(8, 1)
            return optimizer

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.net[1].weight = self.net[0].weight
            return optimizer

    with pytest.raises(ModuleError, match=r"2 of the 4 parameters .* no optimizer has net\.2\.weight, net\.2\.bias"):
        quiet(max_epochs=1).fit(net(Replaced), loader())
    with pytest.warns(UserWarning, match="1 of the 6 parameters of SGD do not belong to the module"):
        quiet(max_epochs=1).fit(net(Tied), loader())


# --- the user's own overrides ----------------------------------------------------------------------------------------


def test_an_optimizer_step_override_gets_the_loss_that_was_computed_and_its_steps_count() -> None:
    losses: list[float] = []

    class Own(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            losses.append(float(optimizer_closure()))
            if batch_idx != 1:
                optimizer.step(closure=optimizer_closure)

    expected, module = net(Net), net(Own)
    by_hand = train_by_hand(expected, [batch for index, batch in enumerate(loader()) if index != 1])
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())

    assert trainer.global_step == 3
    assert trainer.progress.skipped_steps == 1
    assert_same(module, expected)
    assert [losses[0], *losses[2:]] == by_hand


def test_backward_and_clipping_overrides_replace_what_the_trainer_does() -> None:
    class Own(Net):
        def backward(self, loss: Tensor) -> None:
            (loss * 2).backward()

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            assert (gradient_clip_val, gradient_clip_algorithm) == (0.5, "value")
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)

    expected, module = net(Net), net(Own)
    train_by_hand(expected, loader())
    quiet(max_epochs=1, gradient_clip_val=0.5, gradient_clip_algorithm="value").fit(module, loader())

    assert_same(module, expected)


def test_outputs_of_a_batch_are_the_undivided_detached_loss_and_the_steps_extras() -> None:
    seen: list[Any] = []

    class Extras(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return loss if batch_idx == 0 else {"loss": loss, "guess": self(batch[0]), "note": "x"}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    module = net(Extras, lambda parameters: SGD(parameters, lr=0.0))
    quiet(max_epochs=1, accumulate_grad_batches=4).fit(module, loader())

    batches = list(loader())
    assert [set(outputs) for outputs in seen] == [{"loss"}, *[{"loss", "guess", "note"}] * 3]
    for outputs, batch in zip(seen, batches, strict=True):
        assert torch.equal(outputs["loss"], module.loss(batch).detach())
        assert not outputs["loss"].requires_grad
    assert not seen[1]["guess"].requires_grad


# --- clipping --------------------------------------------------------------------------------------------------------


def test_clipping_by_norm_equals_torchs_own() -> None:
    expected, module = net(Net, momentum), net(Net, momentum)
    train_by_hand(
        expected,
        loader(10),
        epochs=2,
        accumulate=2,
        before_step=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    )
    quiet(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1).fit(module, loader(10))
    assert_same(module, expected)


def test_clipping_by_value_equals_torchs_own() -> None:
    expected, module = net(Net, momentum), net(Net, momentum)
    train_by_hand(expected, loader(), before_step=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.02))
    quiet(max_epochs=1, gradient_clip_val=0.02, gradient_clip_algorithm="VALUE").fit(module, loader())
    assert_same(module, expected)


def test_clipping_happens_once_per_window_after_the_hook_that_sees_the_full_gradient() -> None:
    norms: list[tuple[str, float]] = []

    def norm_of(module: nn.Module) -> float:
        return float(torch.stack([p.grad.norm() for p in module.parameters()]).norm())

    class Watching(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(("before", norm_of(self)))

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            norms.append(("step", norm_of(self)))
            optimizer.step()

    quiet(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1e-3).fit(net(Watching), loader())
    assert [where for where, _ in norms] == ["before", "step"] * 2
    assert norms[0][1] > 0.1
    assert norms[1][1] == pytest.approx(1e-3, rel=1e-3)


def test_a_clip_value_of_zero_is_no_clipping() -> None:
    expected, module = net(Net), net(Net)
    train_by_hand(expected, loader())
    quiet(max_epochs=1, gradient_clip_val=0).fit(module, loader())
    assert_same(module, expected)


# --- skipped batches -------------------------------------------------------------------------------------------------


def test_a_batch_without_loss_is_left_out_of_its_window() -> None:
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (1, 4, 5) else self.loss(batch)

    batches = list(loader(16))
    expected = net(Net, momentum)
    optimizer = momentum(expected.parameters())
    for window in ([0], [2, 3], [6, 7]):
        optimizer.zero_grad()
        for index in window:
            (expected.loss(batches[index]) / len(window)).backward()
        optimizer.step()

    module = net(Skipping, momentum)
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, loader(16))

    assert_near(module, expected, rtol=1e-6)
    assert (trainer.global_step, trainer.progress.skipped_steps) == (3, 1)


def test_a_window_without_any_loss_is_no_step_and_leaves_momentum_alone() -> None:
    class Nothing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else self.loss(batch)

    expected = net(Net, momentum)
    train_by_hand(expected, [batch for index, batch in enumerate(loader()) if index != 1])
    module = net(Nothing, momentum)
    recorder = Recorder(lambda trainer: trainer.global_step)
    quiet(max_epochs=1, callbacks=recorder).fit(module, loader())

    assert_same(module, expected)
    assert recorder.notes == [1, 1, 2, 3]


def test_minus_one_from_on_train_batch_start_skips_the_rest_of_the_epoch() -> None:
    class Early(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    expected = net(Net)
    train_by_hand(expected, list(loader())[:2], epochs=2)
    module, recorder = net(Early), Recorder()
    trainer = quiet(max_epochs=2, callbacks=recorder)
    trainer.fit(module, loader())

    assert_same(module, expected)
    assert recorder.seen == ["train_start", *["epoch_start", "batch0", "batch1", "epoch_end"] * 2, "train_end"]
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)


def test_minus_one_in_the_middle_of_a_window_drops_the_window() -> None:
    class Early(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    expected = net(Net)
    train_by_hand(expected, list(loader())[:2], accumulate=2)
    module = net(Early)
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader())
    assert_same(module, expected)


def test_an_epoch_schedule_is_stepped_also_when_minus_one_ends_the_epoch() -> None:
    class Early(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    trainer = quiet(max_epochs=3)
    trainer.fit(net(Early), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.125


# --- other modules and optimizers ------------------------------------------------------------------------------------


def test_any_nn_module_with_a_step_and_an_optimizer_trains() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.training_step(batch)

        def configure_optimizers(self) -> Any:
            return momentum(self.parameters())

    torch.manual_seed(1)
    module = Plain()
    expected = net(Net, momentum)
    train_by_hand(expected, loader(), epochs=2)
    quiet(max_epochs=2).fit(module, loader(), loader())
    assert_same(module, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lbfgs_equals_the_hand_written_loop(accumulate: int) -> None:
    def lbfgs(parameters: Any) -> Any:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)

    expected = net(Net, lbfgs)
    optimizer = lbfgs(expected.parameters())
    batches = list(loader())
    for _ in range(2):
        for start in range(0, 4, accumulate):
            window = batches[start : start + accumulate]

            def closure(window: list[Any] = window) -> Tensor:
                optimizer.zero_grad()
                losses = [expected.loss(batch) / len(window) for batch in window]
                for loss in losses:
                    loss.backward()
                return torch.stack([loss.detach() for loss in losses]).sum()

            optimizer.step(closure)

    module = net(Net, lbfgs)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader())

    assert_same(module, expected)
    assert trainer.global_step == 8 // accumulate


def test_log_counts_the_first_evaluation_of_a_closure_optimizer() -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("count", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

    module = net(Logging, lambda parameters: torch.optim.LBFGS(parameters, max_iter=4))
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    assert trainer.callback_metrics["count"] == 4


@pytest.mark.parametrize("policy", ["skip"])
def test_skipping_bad_losses_is_refused_where_the_trainer_cannot_skip(policy: str) -> None:
    module = net(Net, lambda parameters: torch.optim.LBFGS(parameters, max_iter=4))
    with pytest.raises(ConfigError, match="nonfinite_loss='skip'"):
        quiet(max_epochs=1, nonfinite_loss=policy).fit(module, loader())
    manual = net(Net)
    manual.automatic_optimization = False
    with pytest.raises(ConfigError, match="nonfinite_loss='skip'"):
        quiet(max_epochs=1, nonfinite_loss=policy).fit(manual, loader())


def test_a_module_without_optimizers_runs_without_being_trained() -> None:
    class Untrained(Net):
        def configure_optimizers(self) -> None:
            return None

    module = net(Untrained)
    before = weights(module)
    trainer = quiet(max_epochs=1)
    with pytest.warns(UserWarning, match="nothing is trained"):
        trainer.fit(module, loader())
    assert_same(module, before)
    assert trainer.global_step == 4


def test_a_compiled_module_is_accepted_and_trains_the_original() -> None:
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = net(Net, momentum)
    compiled = torch.compile(module, backend=counting)
    expected = net(Net, momentum)
    train_by_hand(expected, loader())
    trainer = quiet(max_epochs=1)
    trainer.fit(compiled, loader())

    assert trainer.lightning_module is module
    assert len(graphs) == 1
    assert_same(module, expected)
    assert not any("_orig_mod" in name for name in trainer.lightning_module.state_dict())


def test_a_loss_that_needs_no_gradient_says_so() -> None:
    class Detached(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch).detach()

    with pytest.raises(RuntimeError, match="does not require grad"):
        quiet(max_epochs=1).fit(net(Detached), loader())


def test_a_step_may_fill_the_queue_from_which_the_next_batch_is_read() -> None:
    queue = [torch.ones(2, 4)]

    class Queue(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            for _ in range(4):
                yield queue.pop(), torch.zeros(2, 1)  # raises where it is read before it is filled

    class Fills(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            queue.append(torch.ones(2, 4))
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(net(Fills), torch.utils.data.DataLoader(Queue(), batch_size=None))
    assert trainer.global_step == 2
