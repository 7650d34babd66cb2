"""Manual optimization: the module steps its own optimizers."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from toys import Net, Recorder, RecordingLogger, assert_same, loader, momentum, net, quiet

import loopwright as lw
from loopwright.callbacks import Callback, GradientAccumulationScheduler
from loopwright.errors import ConfigError, DataError, ModuleError


class Gan(lw.Module):
    """Two networks that play against each other, each with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(4, 4)
        self.critic = nn.Linear(4, 1)

    def generator_loss(self, x: Tensor) -> Tensor:
        return -self.critic(self.generator(x)).mean()

    def critic_loss(self, x: Tensor) -> Tensor:
        return (self.critic(self.generator(x)) - self.critic(x)).square().mean()

    def configure_optimizers(self) -> Any:
        return [Adam(self.generator.parameters(), lr=0.01), SGD(self.critic.parameters(), lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x = batch[0]
        self.toggle_optimizer(first)
        assert not any(p.requires_grad for p in self.critic.parameters())
        first.zero_grad()
        self.manual_backward(self.generator_loss(x))
        first.step()
        self.untoggle_optimizer(first)
        with self.toggled_optimizer(second):
            assert not any(p.requires_grad for p in self.generator.parameters())
            second.zero_grad()
            self.manual_backward(self.critic_loss(x))
            second.step()
        assert all(p.requires_grad for p in self.parameters())


def gan(kind: type[Gan] = Gan) -> Gan:
    torch.manual_seed(2)
    return kind()


def gan_by_hand(batches: Any) -> Gan:
    module = gan()
    first, second = module.configure_optimizers()
    for batch in batches:
        first.zero_grad()
        module.generator_loss(batch[0]).backward()
        first.step()
        second.zero_grad()
        module.critic_loss(batch[0]).backward()
        second.step()
    return module


def test_two_optimizers_equal_the_hand_written_loop_and_count_one_step_per_batch() -> None:
    expected = gan_by_hand([*loader(16), *loader(16)])
    module = gan()
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader(16))
    assert_same(module, expected)
    assert trainer.global_step == 16


def test_max_steps_counts_batches_not_optimizers() -> None:
    recorder = Recorder(lambda trainer: trainer.global_step)
    trainer = quiet(max_steps=8, callbacks=recorder)
    trainer.fit(gan(), loader(40))
    assert recorder.notes == list(range(1, 9))
    assert trainer.global_step == 8


def test_toggle_model_is_the_same_as_a_context() -> None:
    class WithContext(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for optimizer, loss in ((first, self.generator_loss), (second, self.critic_loss)):
                with optimizer.toggle_model(sync_grad=True):
                    optimizer.zero_grad()
                    self.manual_backward(loss(batch[0]))
                    optimizer.step()

    module = gan(WithContext)
    quiet(max_epochs=1).fit(module, loader())
    assert_same(module, gan_by_hand(loader()))


def test_toggling_leaves_frozen_parameters_frozen() -> None:
    class Frozen(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.critic.bias.requires_grad = False
            self.generator.bias.requires_grad = False

    module = gan(Frozen)

    class Check(Frozen):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for optimizer in (first, second):
                with self.toggled_optimizer(optimizer):
                    pass
                assert not self.critic.bias.requires_grad
                assert not self.generator.bias.requires_grad
                assert self.critic.weight.requires_grad

    quiet(max_epochs=1).fit(gan(Check), loader())
    assert not module.critic.bias.requires_grad


class Manual(Net):
    """One optimizer by hand: accumulates over two batches, clips, and steps a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [StepLR(optimizer, 2, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if batch_idx % 2:
            self.norms.append(self.clip_gradients(optimizer, 0.1, "norm"))
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        return loss


def test_manual_accumulation_clipping_and_schedules_equal_the_hand_written_loop() -> None:
    expected = net(Manual)
    (optimizer,), (schedule,) = expected.configure_optimizers()
    norms = []
    for _ in range(2):
        for index, batch in enumerate(loader(16)):
            (expected.loss(batch) / 2).backward()
            if index % 2:
                norms.append(nn.utils.clip_grad_norm_(expected.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

    module = net(Manual)
    recorder = Recorder(lambda trainer: trainer.global_step)
    trainer = quiet(max_epochs=2, callbacks=recorder)
    trainer.fit(module, loader(16))

    assert_same(module, expected)
    assert module.norms == norms
    assert recorder.notes[:5] == [0, 1, 1, 2, 2]
    assert trainer.global_step == 8


def test_manual_clipping_by_value() -> None:
    class ByValue(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            assert self.clip_gradients(optimizer, 0.01, "value") is None
            assert all(p.grad.abs().max() <= 0.01 for p in self.parameters())
            optimizer.step()

    quiet(max_epochs=1).fit(net(ByValue), loader())


def test_step_takes_a_closure_and_returns_its_loss() -> None:
    class WithClosure(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            assert optimizer.step(closure).ndim == 0

    expected = net(Net)
    optimizer = SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for batch in loader():
        optimizer.zero_grad()
        expected.loss(batch).backward()
        optimizer.step()
    module = net(WithClosure)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    assert_same(module, expected)
    assert trainer.global_step == 4


def test_manual_lbfgs_equals_the_hand_written_loop() -> None:
    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

    expected = net(ByHand)
    optimizer = expected.configure_optimizers()
    for batch in loader():

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = expected.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    module = net(ByHand)
    quiet(max_epochs=1).fit(module, loader())
    assert_same(module, expected)


def test_hooks_fire_from_manual_backward_and_from_step_only() -> None:
    seen: list[str] = []

    class Watch(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            seen.append("before_backward")

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            seen.append("after_backward")

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(f"before_step {type(optimizer).__name__}")

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append("zero_grad")

    quiet(max_epochs=1, max_steps=1, callbacks=Watch()).fit(gan(), loader())
    assert seen == [
        "before_backward", "after_backward", "before_step Adam", "before_backward", "after_backward", "before_step SGD",
    ]  # fmt: skip


def test_the_managed_optimizer_looks_like_the_one_it_wraps() -> None:
    class Looking(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            managed, plain = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            assert isinstance(managed, SGD)
            assert type(plain) is SGD
            assert managed.param_groups is plain.param_groups
            assert managed.state is plain.state
            assert "SGD" in repr(managed)

    quiet(max_epochs=1).fit(net(Looking), loader())


def test_the_step_of_torchs_own_optimizer_is_counted() -> None:
    class Plain(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers(use_pl_optimizer=False).step()

    trainer = quiet(max_epochs=1)
    trainer.fit(net(Plain), loader())
    assert trainer.global_step == 4


def test_schedules_are_none_one_or_a_list() -> None:
    seen: list[Any] = []

    def fit(make: Any) -> None:
        class Asking(Manual):
            def configure_optimizers(self) -> Any:
                return make(self)

            def training_step(self, batch: Any, batch_idx: int) -> None:
                seen.append((self.optimizers(), self.lr_schedulers()))

        quiet(max_epochs=1, limit_train_batches=1).fit(net(Asking), loader())

    def build(module: nn.Module) -> SGD:
        return SGD(module.parameters(), lr=0.1)

    fit(build)
    fit(lambda m: ([o := build(m)], [StepLR(o, 1)]))
    fit(lambda m: ([o := build(m), p := build(m)], [StepLR(o, 1), StepLR(p, 1)]))
    assert isinstance(seen[0][0], SGD)
    assert seen[0][1] is None
    assert isinstance(seen[1][1], StepLR)
    assert [len(part) for part in seen[2]] == [2, 2]


def test_schedules_are_never_stepped_for_the_module() -> None:
    class Idle(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

    trainer = quiet(max_epochs=2)
    trainer.fit(net(Idle), loader())
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0


@pytest.mark.parametrize("returned", [None, 1.5, {"loss": 3}, {"anything": "else"}])
def test_a_manual_step_may_return_nothing_or_extras(returned: Any) -> None:
    class Returning(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returned

    if returned in (1.5, {"loss": 3}):
        with pytest.raises(ModuleError, match="training_step returned"):
            quiet(max_epochs=1).fit(net(Returning), loader())
    else:
        quiet(max_epochs=1).fit(net(Returning), loader())


def test_attributes_of_the_class_say_how_it_is_trained_and_loaded() -> None:
    class Idle(Net):
        automatic_optimization = False
        strict_loading = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)  # no backward, no step

    module = net(Idle)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    quiet(max_epochs=1).fit(module, loader())
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    assert not module.strict_loading


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"gradient_clip_val": 0.5}, "gradient_clip_val=0.5"),
        ({"callbacks": GradientAccumulationScheduler({0: 2})}, "GradientAccumulationScheduler"),
    ],
)
def test_what_the_trainer_cannot_do_in_manual_optimization_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(max_epochs=1, **arguments).fit(gan(), loader())


@pytest.mark.parametrize("call", ["manual_backward", "toggle_optimizer", "untoggle_optimizer"])
def test_manual_calls_in_automatic_optimization_are_refused(call: str) -> None:
    class Confused(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            getattr(self, call)(loss if call == "manual_backward" else self.optimizers())
            return loss

    with pytest.raises(ModuleError, match=f"{call} was called while optimization is automatic"):
        quiet(max_epochs=1).fit(net(Confused), loader())


def test_a_closure_that_cannot_be_called_is_refused() -> None:
    class Wrong(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step(self.loss(batch))

    with pytest.raises(ModuleError, match="a closure of type Tensor"):
        quiet(max_epochs=1).fit(net(Wrong), loader())


def test_a_wrong_clipping_algorithm_is_refused() -> None:
    class Wrong(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.clip_gradients(self.optimizers(), 0.1, "nrom")

    with pytest.raises(ConfigError, match="'nrom'"):
        quiet(max_epochs=1).fit(net(Wrong), loader())


# --- windows across epochs -------------------------------------------------------------------------------------------


class AcrossEpochs(Net):
    """Steps after every third batch, counted over epochs."""

    def __init__(self) -> None:
        super().__init__(momentum)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 3)
        if (self.trainer.progress.total_batches + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_of_a_window_across_epochs_are_in_the_checkpoint(tmp_path: Any) -> None:
    expected = net(Net, momentum)
    optimizer = momentum(expected.parameters())
    for index, batch in enumerate([*loader(), *loader(), *loader()]):  # four batches in an epoch
        (expected.loss(batch) / 3).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    whole, resumed = net(AcrossEpochs), net(AcrossEpochs)
    quiet(max_epochs=3).fit(whole, loader())
    assert_same(whole, expected)
    first = quiet(max_epochs=1)
    first.fit(net(AcrossEpochs), loader())
    first.save_checkpoint(tmp_path / "a.ckpt")  # one batch of the second window is there
    quiet(max_epochs=3).fit(resumed, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_same(resumed, expected)


def test_arguments_reach_the_optimizer_and_its_result_comes_back() -> None:
    class Doubled(SGD):
        def step(self, closure: Any = None, *, extra: int = 0) -> Any:
            super().step(closure)
            return ["stepped", extra]

    class Passing(Manual):
        def configure_optimizers(self) -> Any:
            optimizer = Doubled(self.parameters(), lr=0.1)
            return [optimizer], [StepLR(optimizer, 1)]  # a schedule wraps the optimizer's step

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            results.append((optimizer.step(extra=3), optimizer.step()))

    results: list[Any] = []
    trainer = quiet(max_epochs=1, limit_train_batches=1)
    trainer.fit(net(Passing), loader())
    assert results == [(["stepped", 3], ["stepped", 0])]
    assert trainer.global_step == 1


def test_a_closure_has_gradients_where_the_optimizer_turns_them_off() -> None:
    class Closed(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return closure()

    module = net(Net, Closed)
    quiet(max_epochs=1, limit_train_batches=1).fit(module, loader())
    assert all(parameter.grad is not None for parameter in module.parameters())


# --- steps that no optimizer makes ---------------------------------------------------------------------------------


class ByItself(Net):
    """Updates its weights itself; counts that as a step, or not."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.counts = counts

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("loss", loss)
        if self.counts:
            self.count_step()
        for parameter in self.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)

    def configure_optimizers(self) -> Any:
        return []


@pytest.mark.filterwarnings("ignore:configure_optimizers returned")
def test_counted_steps_end_limits_write_files_and_resume_exactly(tmp_path: Path) -> None:
    reference = net(Net)
    for batch in [*loader(), *loader()][:6]:
        reference.zero_grad()
        reference.loss(batch).backward()
        for parameter in reference.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)

    def fit(folder: Path, module: ByItself, **kwargs: Any) -> tuple[Any, Any]:
        save = lw.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2, filename="{step}")
        log = RecordingLogger()
        trainer = quiet(
            max_steps=6, enable_checkpointing=True, callbacks=[save], logger=log, log_every_n_steps=1, **kwargs
        )
        trainer.fit(module, loader(), ckpt_path=folder / "step=2.ckpt" if (folder / "step=2.ckpt").exists() else None)
        assert trainer.global_step == 6
        return log.values("loss"), module

    rows, module = fit(tmp_path, net(ByItself))
    assert_same(module.state_dict(), reference.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    again, module = fit(tmp_path, net(ByItself, seed=5))
    assert_same(module.state_dict(), reference.state_dict())
    assert [step for step, _ in rows] == [0, 1, 2, 3, 4, 5]
    assert again == rows[2:]


@pytest.mark.filterwarnings("ignore:configure_optimizers returned")
def test_an_epoch_without_a_counted_step_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="only steps limit the run") as caught:
        quiet(max_steps=6).fit(net(ByItself, counts=False), loader())
    assert "self.count_step()" in str(caught.value)
    save = lw.ModelCheckpoint(tmp_path, save_top_k=-1)
    with caplog.at_level("WARNING", logger="loopwright"):
        quiet(max_epochs=2, enable_checkpointing=True, callbacks=[save]).fit(net(ByItself, counts=False), loader())
    assert "call self.count_step() in training_step" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2


def test_count_step_is_refused_where_the_trainer_counts() -> None:
    class Twice(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.count_step()
            return self.loss(batch)

    with pytest.raises(ModuleError, match="while the trainer steps an optimizer"):
        quiet(max_epochs=1).fit(net(Twice), loader())


@pytest.mark.parametrize("hook", ["validation_step", "on_train_batch_end"])
def test_count_step_is_refused_outside_of_a_training_batch(hook: str) -> None:
    class Late(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.count_step()

    Late.validation_step = lambda self, batch, index: None
    setattr(Late, hook, lambda self, *_: self.count_step())
    with pytest.raises(ModuleError, match="where no training batch is under way"):
        quiet(max_epochs=1).fit(net(Late), loader(), loader())


@pytest.mark.parametrize("returns", ["none", "nan"])
def test_rows_of_skipped_steps_are_logged(returns: str) -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            bad = batch_idx in (1, 2)
            self.log("loss", loss * float("nan") if bad else loss)
            return None if bad and returns == "none" else loss * float("nan") if bad else loss

    log = RecordingLogger()
    trainer = quiet(
        max_epochs=1, logger=log, log_every_n_steps=1, nonfinite_loss="skip" if returns == "nan" else "warn"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(net(Skips), loader())
    assert [(step, math.isnan(value)) for step, value in log.values("loss")] == [
        (0, False), (1, True), (1, True), (1, False),
    ]  # fmt: skip
    assert trainer.global_step == 2


def test_values_of_batches_without_a_step_are_in_the_row_of_the_next_step_or_at_the_end_of_the_epoch() -> None:
    class EveryThird(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.log("index", float(batch_idx))
            if batch_idx == 3:
                self.log("lost", float("nan"))
            self.manual_backward(self.loss(batch))
            if batch_idx % 3 == 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0, on_step=True)

    log = RecordingLogger()
    trainer = quiet(max_epochs=1, logger=log, log_every_n_steps=1, val_check_interval=4)
    trainer.fit(net(EveryThird), loader(16), loader())
    assert log.values("index") == [(0, 2.0), (1, 5.0), (2, 7.0)]
    assert [(step, math.isnan(value)) for step, value in log.values("lost")] == [(1, True)]
    sparse = RecordingLogger()
    quiet(max_epochs=1, logger=sparse, log_every_n_steps=2).fit(net(EveryThird), loader(16), loader())
    assert sparse.values("index") == [(1, 5.0)]


def test_toggling_another_optimizer_replaces_the_toggle(recwarn: pytest.WarningsRecorder) -> None:
    class NeverUndone(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, loss in zip(self.optimizers(), (self.generator_loss, self.critic_loss), strict=True):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss(batch[0]))
                optimizer.step()

    module, reference = gan(NeverUndone), gan()
    quiet(max_epochs=1).fit(module, loader())
    quiet(max_epochs=1).fit(reference, loader())
    assert_same(module.state_dict(), reference.state_dict())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_step_while_another_optimizer_is_toggled_is_named() -> None:
    class Forgotten(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            first.zero_grad()
            self.manual_backward(self.generator_loss(batch[0]))
            first.step()
            second.zero_grad()
            second.step()

    with pytest.warns(UserWarning, match=r"SGD steps without gradients: another optimizer \(Adam\) is still toggled"):
        quiet(max_epochs=1).fit(gan(Forgotten), loader())
