"""Several optimizers of one loss in automatic optimization, compared with handwritten loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from toys import Net, RecordingLogger, ValidatedNet, assert_same, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import Callback, LearningRateMonitor, StochasticWeightAveraging
from loopwright.errors import ConfigError, ModuleError
from loopwright.precision import MixedPrecision
from loopwright.strategies.joint_optimizer import JointOptimizer


def muon_and_adamw(module: nn.Module) -> tuple[Muon, AdamW]:
    parameters = list(module.parameters())
    muon = Muon([one for one in parameters if one.ndim == 2], lr=0.02)
    return muon, AdamW([one for one in parameters if one.ndim != 2], lr=0.01)


class Both(Net):
    """A Net with Muon for its matrices and AdamW for its vectors."""

    def __init__(self, form: Callable[[Muon, AdamW], Any] = lambda muon, adamw: [muon, adamw], **options: Any) -> None:
        super().__init__(**options)
        self.form = form

    def configure_optimizers(self) -> Any:
        return self.form(*muon_and_adamw(self))


def by_hand(
    module: Net,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    clip: float | None = None,
    count: int = 8,
    after_step: Sequence[Any] = (),
    after_epoch: Sequence[Any] = (),
    optimizers: Sequence[Optimizer] | None = None,
) -> Net:
    """Train without a trainer; the norm is that of all gradients."""
    own = muon_and_adamw(module) if optimizers is None else optimizers
    parameters = [one for optimizer in own for group in optimizer.param_groups for one in group["params"]]
    for _ in range(epochs):
        batches = list(loader(count))
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            for one in own:
                one.zero_grad()
            for batch in window:
                loss = module.loss(batch)
                (loss if len(window) == 1 else loss / len(window)).backward()
            if clip:
                nn.utils.clip_grad_norm_(parameters, clip)
            for one in (*own, *after_step):
                one.step()
        for one in after_epoch:
            one.step()
    return module


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 0.2), (3, 0.2)])
def test_two_optimizers_equal_the_handwritten_loop(accumulate: int, clip: float | None) -> None:
    module = net(Both)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    trainer.fit(module, loader())
    assert_same(module, by_hand(net(Both), epochs=2, accumulate=accumulate, clip=clip))
    assert trainer.global_step == 2 * -(-4 // accumulate)  # a step of both is one step


def test_values_are_clipped_in_both() -> None:
    module = net(Both)
    quiet(max_epochs=1, gradient_clip_val=0.01, gradient_clip_algorithm="value").fit(module, loader())
    expected = net(Both)
    own = muon_and_adamw(expected)
    for batch in loader():
        expected.zero_grad()
        expected.loss(batch).backward()
        nn.utils.clip_grad_value_(expected.parameters(), 0.01)
        for one in own:
            one.step()
    assert_same(module, expected)


def test_a_sum_with_a_weight_is_divided_once() -> None:
    class Sums(Both):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = (self.net(batch[0]) - batch[1]).square()
            return lw.Loss(losses.sum(), torch.tensor(losses.numel()))

    module, expected = net(Sums).double(), net(Both).double()
    quiet(max_epochs=1, accumulate_grad_batches=2, precision="64-true").fit(module, loader())
    quiet(max_epochs=1, accumulate_grad_batches=2, precision="64-true").fit(expected, loader())
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        # Muon computes in bfloat16, with 8 bits: rounding of the sums (1e-16) may change its last one.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def half(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, 0.5)


def falling(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (step + 1))


@pytest.mark.parametrize(
    "form",
    [
        lambda a, b: ([a, b], [half(a), {"scheduler": falling(b), "interval": "step"}]),
        lambda a, b: [
            {"optimizer": a, "lr_scheduler": half(a)},
            {"optimizer": b, "lr_scheduler": {"scheduler": falling(b), "interval": "step"}},
        ],
    ],
)
def test_each_schedule_is_stepped_at_its_interval(form: Any) -> None:
    module = net(Both, form)
    quiet(max_epochs=3).fit(module, loader())
    expected = net(Both)
    muon, adamw = muon_and_adamw(expected)
    by_hand(expected, epochs=3, optimizers=(muon, adamw), after_step=[falling(adamw)], after_epoch=[half(muon)])
    assert_same(module, expected)


def test_one_may_have_a_schedule_and_the_other_none() -> None:
    trainer = quiet(max_epochs=2)
    trainer.fit(net(Both, lambda a, b: [{"optimizer": a, "lr_scheduler": half(a)}, {"optimizer": b}]), loader())
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers] == [0.005, 0.01]


def test_each_plateau_has_its_own_metric() -> None:
    class Measured(Both, ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"better": -float(self.current_epoch), "worse": float(self.current_epoch)})

    def watched(optimizer: Optimizer, name: str) -> dict[str, Any]:
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": name}

    trainer = quiet(max_epochs=3)
    trainer.fit(net(Measured, lambda a, b: [watched(a, "better"), watched(b, "worse")]), loader(), loader())
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers] == [0.02, 0.01 / 4]


# --- hooks -----------------------------------------------------------------------------------------------------------


class Hooks(Both):
    """Records its hooks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append(f"before zero {type(optimizer).__name__}")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append(f"zero {type(optimizer).__name__}")
        optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(f"before step {type(optimizer).__name__}")

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.calls.append(f"clip {sum(len(group['params']) for group in optimizer.param_groups)}")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class Stepping(Hooks):
    """Steps each optimizer itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        self.calls.append(f"step {type(optimizer.optimizer).__name__}")
        optimizer.step(closure=optimizer_closure)
        self.losses = [*getattr(self, "losses", []), optimizer_closure()]


def test_hooks_are_called_for_each_optimizer_and_clipping_once_for_all() -> None:
    module = net(Stepping)
    quiet(max_epochs=1, gradient_clip_val=0.2).fit(module, loader(2))
    each = ["before zero", "zero"]
    assert module.calls == [
        *[f"{what} {name}" for name in ("Muon", "AdamW") for what in each],
        "before step Muon", "before step AdamW", "clip 4", "step Muon", "step AdamW",
    ]  # fmt: skip
    assert_same(module, by_hand(net(Both), clip=0.2, count=2))
    assert torch.equal(*module.losses)  # which was computed before


def test_callbacks_hear_of_each_optimizer() -> None:
    class Heard(Callback):
        names: list[str] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.names.append(type(optimizer).__name__)

    heard = Heard()
    quiet(max_epochs=1, callbacks=heard).fit(net(Both), loader(4))
    assert heard.names == ["Muon", "AdamW"] * 2


def test_a_module_may_step_one_optimizer_less_often() -> None:
    class Alternating(Both):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if isinstance(optimizer, Muon) or batch_idx % 2:
                optimizer.step(closure=optimizer_closure)

    module, expected = net(Alternating), net(Both)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    muon, adamw = muon_and_adamw(expected)
    for index, batch in enumerate(loader()):
        expected.zero_grad()
        expected.loss(batch).backward()
        muon.step()
        if index % 2:
            adamw.step()
    assert_same(module, expected)
    assert trainer.global_step == 4


def test_schedules_go_through_the_modules_own_step() -> None:
    class Own(Both):
        stepped: list[str] = []

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.stepped.append(type(scheduler.optimizer).__name__)
            scheduler.step()

    quiet(max_epochs=1).fit(net(Own, lambda a, b: ([a, b], [half(a), half(b)])), loader())
    assert Own.stepped == ["Muon", "AdamW"]


def test_a_module_gets_both() -> None:
    class Asking(Both):
        def on_train_start(self) -> None:
            self.found = [type(one.optimizer) for one in self.optimizers()]
            self.plain = self.optimizers(use_pl_optimizer=False)

    module = net(Asking)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    assert module.found == [Muon, AdamW]
    assert module.plain == trainer.optimizers


def test_hooks_of_torch_are_called_around_the_steps_of_both() -> None:
    seen: list[str] = []
    handle = register_optimizer_step_post_hook(lambda one, *_: seen.append(type(one).__name__))
    try:
        quiet(max_epochs=1).fit(net(Both), loader(2))
    finally:
        handle.remove()
    assert seen == ["Muon", "AdamW"]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_parameter_in_two_optimizers_is_named() -> None:
    def overlapping(muon: Muon, adamw: AdamW) -> Any:
        adamw.add_param_group({"params": [muon.param_groups[0]["params"][1]]})
        return [muon, adamw]

    with pytest.raises(ModuleError, match=r"in two: net.2.weight \(Muon and AdamW\)\."):
        quiet(max_epochs=1).fit(net(Both, overlapping), loader())


def test_a_parameter_in_no_optimizer_is_named() -> None:
    class Partial(Both):
        def configure_optimizers(self) -> Any:
            muon, _ = muon_and_adamw(self)
            return [muon, AdamW([self.net[0].bias])]

    with pytest.warns(UserWarning, match=r"no optimizer of Muon, AdamW has net.2.bias: they require gradients"):
        quiet(max_epochs=1).fit(net(Partial), loader())


def test_frozen_parameters_need_no_optimizer() -> None:
    class Frozen(Both):
        def configure_optimizers(self) -> Any:
            self.net[2].bias.requires_grad_(False)
            muon, _ = muon_and_adamw(self)
            return [muon, AdamW([self.net[0].bias])]

    quiet(max_epochs=1).fit(net(Frozen), loader())  # warnings are errors


def test_an_optimizer_that_evaluates_the_model_is_refused() -> None:
    class WithLBFGS(Both):
        def configure_optimizers(self) -> Any:
            muon, _ = muon_and_adamw(self)
            return [muon, LBFGS([self.net[0].bias])]

    with pytest.raises(ConfigError, match=r"got Muon, LBFGS: LBFGS evaluates the model within its step"):
        quiet(max_epochs=1).fit(net(WithLBFGS), loader())


def test_groups_and_states_belong_to_the_parts() -> None:
    module = net(Both)
    joint = JointOptimizer(muon_and_adamw(module))
    with pytest.raises(ModuleError, match="add_param_group was called on Muon, AdamW together"):
        joint.add_param_group({"params": []})
    with pytest.raises(ModuleError, match="load_state_dict was called on Muon, AdamW together"):
        joint.load_state_dict({})
    module.loss(next(iter(loader()))).backward()
    joint.step()
    assert {id(one) for one in joint.state} == {id(one) for one in module.parameters()}


# --- precision -------------------------------------------------------------------------------------------------------


class Overflowing(Both):
    """The gradient of one bias is infinite in the second step."""

    def on_after_backward(self) -> None:
        if self.number == 1:
            self.net[2].bias.grad.fill_(float("inf"))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx
        self.before = [one.detach().clone() for one in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        changed = [not torch.equal(*both) for both in zip(self.before, self.parameters(), strict=True)]
        self.changes = [*getattr(self, "changes", []), changed]


class OverflowingStepping(Overflowing, Stepping):
    pass


@pytest.mark.parametrize("kind", [Overflowing, OverflowingStepping])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_overflow_in_one_skips_both_and_halves_the_scale_once(kind: type[Both], clip: float | None) -> None:
    module = net(kind)
    precision = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    trainer = quiet(max_epochs=1, plugins=precision, gradient_clip_val=clip)
    trainer.fit(module, loader())
    assert module.changes == [[True] * 4, [False] * 4, [True] * 4, [True] * 4]
    assert trainer.global_step == 3
    assert precision.scale == 128.0
    assert [int(one.state[one.param_groups[0]["params"][0]].get("step", 3)) for one in trainer.optimizers] == [3, 3]


def test_half_precision_equals_one_scaler_by_hand() -> None:
    module, expected = net(Both), net(Both)
    quiet(max_epochs=1, precision="16-mixed", gradient_clip_val=0.2).fit(module, loader())
    own, scaler = muon_and_adamw(expected), torch.amp.GradScaler("cpu")
    for batch in loader():
        expected.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = expected.loss(batch)
        scaler.scale(loss).backward()
        for one in own:
            scaler.unscale_(one)
        nn.utils.clip_grad_norm_([p for one in own for p in one.param_groups[0]["params"]], 0.2)
        for one in own:
            scaler.step(one)
        scaler.update()
    assert_same(module, expected)


# --- with other parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3, "accumulate_across_epochs": True},
        {"precision": "bf16-true", "grad_accumulation_dtype": "float32", "accumulate_grad_batches": 2},
        {"precision": "16-mixed"},
        {"reproducible": "world", "micro_shards": 1},
        {"on_oom": "shrink"},
        {"nonfinite_loss": "skip"},
    ],
    ids=str,
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(options: dict[str, Any], tmp_path: Path) -> None:
    def form(a: Muon, b: AdamW) -> Any:
        return [a, b], [half(a), {"scheduler": falling(b), "interval": "step"}]

    module, whole = net(Both, form, dropout=0.2), {"gradient_clip_val": 0.5, **options}
    torch.manual_seed(3)
    quiet(max_steps=10, **whole).fit(module, loader(10, shuffle=True))
    first = quiet(max_steps=4, **whole)
    one, again = net(Both, form, dropout=0.2), net(Both, form, dropout=0.2, seed=2)
    torch.manual_seed(3)
    first.fit(one, loader(10, shuffle=True))
    first.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["optimizer_states"]
    assert ["momentum_buffer" in state["state"][0] for state in saved] == [True, False]
    quiet(max_steps=10, **whole).fit(again, loader(10, shuffle=True), ckpt_path=tmp_path / "half.ckpt")
    assert_same(again, module)


def test_learning_rates_are_logged_by_the_names_of_the_optimizers() -> None:
    logger = RecordingLogger()
    quiet(max_epochs=1, logger=logger, log_every_n_steps=1, callbacks=LearningRateMonitor()).fit(net(Both), loader(2))
    assert {name for _, row in logger.rows for name in row if name.startswith("lr")} == {"lr-Muon", "lr-AdamW"}


def test_stochastic_weight_averaging_sets_the_rates_of_all_groups() -> None:
    def form(a: Muon, b: AdamW) -> Any:
        return [a, b], [half(a), half(b)]

    averaging = StochasticWeightAveraging([0.004, 0.002], 2, annealing_epochs=0)
    trainer = quiet(max_epochs=3, callbacks=averaging)
    trainer.fit(net(Both, form), loader())
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers] == [0.004, 0.002]
    assert averaging.n_averaged == 3


def test_the_learning_rate_search_keeps_the_ratio_of_the_rates() -> None:
    class Rated(Both):
        lr = 0.02

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            muon, adamw = (one.param_groups[0]["lr"] for one in self.optimizers())
            assert muon == pytest.approx(2 * adamw)

    trainer = quiet(max_epochs=1)
    found = lw.Tuner(trainer).lr_find(net(Rated), loader(40), num_training=10, update_attr=False)
    assert len(found.results["lr"]) == 10


def test_schedule_free_weights_of_one_are_exchanged_for_validation() -> None:
    schedulefree = pytest.importorskip("schedulefree")

    class Mixed(Both, ValidatedNet):
        def configure_optimizers(self) -> Any:
            muon, adamw = muon_and_adamw(self)
            return [muon, schedulefree.AdamWScheduleFree(adamw.param_groups[0]["params"], lr=0.01)]

    module, alone = net(Mixed), net(Mixed)
    quiet(max_epochs=2).fit(module, loader(), loader())
    quiet(max_epochs=2, limit_val_batches=0).fit(alone, loader())
    assert_same(module, alone)


def test_a_step_that_is_made_again_after_a_lack_of_memory_is_the_same() -> None:
    class Short(AdamW):
        lacks = True

        def step(self, closure: Any = None) -> Any:
            if self.lacks:
                type(self).lacks = False
                raise torch.OutOfMemoryError("out of memory")
            return super().step(closure)

    def form(muon: Muon, adamw: AdamW) -> Any:
        return [Short(adamw.param_groups[0]["params"], lr=0.01), muon]

    module, expected = net(Both, form), net(Both, lambda muon, adamw: [adamw, muon])
    quiet(max_epochs=1, on_oom="shrink").fit(module, loader())
    quiet(max_epochs=1, on_oom="shrink").fit(expected, loader())
    assert not Short.lacks
    assert_same(module, expected)


def test_the_plan_has_the_states_of_both() -> None:
    def form(a: Muon, b: AdamW) -> Any:  # fused ones, which need no memory within their step
        matrices, vectors = (one.param_groups[0]["params"] for one in (a, b))
        return [SGD(matrices, lr=0.1, momentum=0.9, fused=True), AdamW(vectors, fused=True)]

    held = quiet().plan(net(Both, form), loader()).rows[0].held
    matrices, vectors = 4 * 8 + 8, 8 + 1
    counts = 2  # of steps, which AdamW keeps for each parameter
    assert held["optimizer"] == 4 * (matrices + 2 * vectors + counts)


def test_programs_written_for_lightning_are_refused_as_lightning_does() -> None:
    from loopwright.compat.lightning.trainer import Trainer

    with pytest.raises(ConfigError, match="2 optimizers, and automatic optimization steps one"):
        Trainer(max_epochs=1, logger=False, accelerator="cpu").fit(net(Both), loader())
