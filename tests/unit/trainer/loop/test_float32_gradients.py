"""Sums of 16-bit gradients in float32: against float64, and what cannot be combined with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Net, Recorder, assert_same, loader, net, quiet

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.strategies.ddp.strategy import DDPStrategy
from loopwright.strategies.deepspeed.strategy import DeepSpeedStrategy
from loopwright.strategies.fsdp.strategy import FSDPStrategy

WINDOW = 64
# A cast to bfloat16 rounds to 8 bits: half a unit of the last one.
ONE_CAST = 2.0**-8


class Recording(Net):
    """Keeps the gradients of each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps: list[list[Tensor]] = getattr(self, "steps", [])
        self.steps.append([p.grad.detach().clone() for p in self.parameters() if p.grad is not None])


def reference(batches: list[Any], *, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return the sums, in float64, of the gradients that a loop computes in bfloat16 for each micro-batch."""
    module = net().to(dtype)
    totals = [torch.zeros_like(p, dtype=torch.float64) for p in module.parameters()]
    for batch in batches:
        module.zero_grad()
        (module.loss([part.to(dtype) for part in batch]) / len(batches)).backward()
        for total, parameter in zip(totals, module.parameters(), strict=True):
            total += parameter.grad
    return totals


def error(gradients: list[Tensor], expected: list[Tensor]) -> float:
    """Return the relative error of all gradients as one vector."""
    off = sum(float((g.double() - e).square().sum()) for g, e in zip(gradients, expected, strict=True))
    return float((off / sum(float(e.square().sum()) for e in expected)) ** 0.5)


def trained(module: Net, data: Any, **options: Any) -> list[Tensor]:
    quiet(max_epochs=1, accumulate_grad_batches=WINDOW, **options).fit(module, data)
    return module.steps[0]


@pytest.mark.parametrize("is_module_cast", [False, True])
def test_a_long_window_is_summed_as_in_float64(is_module_cast: bool) -> None:
    batches = list(loader(2 * WINDOW, 2))
    expected = reference(batches)
    options: dict[str, Any] = {"precision": "bf16-true"}
    if is_module_cast:
        options, batches = {}, [[part.bfloat16() for part in batch] for batch in batches]

    def made() -> Recording:
        module: Recording = net(Recording)
        return module.bfloat16() if is_module_cast else module

    plain = error(trained(made(), batches, **options), expected)
    module = made()
    summed = error(trained(module, batches, grad_accumulation_dtype="float32", **options), expected)
    assert summed < ONE_CAST / 2 < plain
    assert all(parameter.dtype == torch.bfloat16 for parameter in module.parameters())
    loss = module.loss([part.bfloat16() for part in batches[0]])
    module.zero_grad()
    loss.backward()  # the hooks are gone after the run
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_the_factor_of_a_short_window_and_of_weights_is_applied_before_the_cast() -> None:
    class Weighted(Recording):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else lw.Loss(self.loss(batch) * 3, 3.0)

    batches = list(loader(2 * 4, 2))
    module = net(Weighted)
    quiet(
        max_epochs=1, accumulate_grad_batches=4, precision="bf16-true", grad_accumulation_dtype=torch.float32
    ).fit(module, batches)  # fmt: skip
    expected = reference([batches[0], *batches[2:]])
    assert error(module.steps[0], expected) < ONE_CAST


def test_parameters_of_float32_are_summed_as_before() -> None:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * self.scale

    plain, summed = net(Mixed), net(Mixed)
    quiet(max_epochs=2, accumulate_grad_batches=3).fit(plain, loader())
    quiet(max_epochs=2, accumulate_grad_batches=3, grad_accumulation_dtype="float32").fit(summed, loader())
    assert_same(plain, summed)


def test_a_parameter_that_is_trained_later_is_summed_too() -> None:
    class Frozen(Recording):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch == 1)

    module = net(Frozen)
    quiet(max_epochs=2, accumulate_grad_batches=4, precision="bf16-true", grad_accumulation_dtype="fp32").fit(
        module, loader()
    )
    assert [len(step) for step in module.steps] == [2, 4]


def test_a_window_without_a_loss_is_skipped_as_an_empty_one() -> None:
    class Silent(Recording):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx < 2 else self.loss(batch)

    module = net(Silent)
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2, precision="bf16-true", grad_accumulation_dtype="float32")
    trainer.fit(module, loader())
    progress = trainer.progress
    assert (progress.steps, progress.skipped_steps, progress.nonfinite_steps) == (1, 1, 0)
    assert error(module.steps[0], reference(list(loader())[2:])) < ONE_CAST


def test_a_dropped_window_leaves_nothing_behind() -> None:
    class Dropping(Recording):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 2 else None

    batches = list(loader())
    module = net(Dropping)
    quiet(max_epochs=2, accumulate_grad_batches=4, precision="bf16-true", grad_accumulation_dtype="float32").fit(
        module, batches
    )
    assert len(module.steps) == 1
    assert error(module.steps[0], reference(batches)) < ONE_CAST


def test_impossible_pairs_are_refused() -> None:
    class Manual(Net):
        automatic_optimization = False

    for options, reason in (
        ({"grad_accumulation_dtype": "bf16"}, "grad_accumulation_dtype='bf16'"),
        ({"strategy": "dp", "devices": 2}, "DataParallelStrategy: torch adds up"),
        ({"strategy": DDPStrategy(ddp_comm_hook="bf16"), "devices": 2}, "ddp_comm_hook"),
        ({"strategy": FSDPStrategy(mixed_precision=_policy()), "devices": 2}, "mixed_precision= sets"),
    ):
        with pytest.raises(ConfigError, match=reason):
            quiet(**{"grad_accumulation_dtype": "float32", **options})
    for module, options, reason in (
        (net(Manual), {}, "manual optimization"),
        (net(Net, torch.optim.LBFGS), {}, "LBFGS"),
        (net(), {"accumulate_across_epochs": True}, "accumulate_across_epochs=True"),
    ):
        with pytest.raises(ConfigError, match=f"grad_accumulation_dtype='float32' with {reason}"):
            quiet(max_epochs=1, grad_accumulation_dtype="float32", **options).fit(module, loader())


def _policy() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def test_deepspeed_gets_its_configuration_key() -> None:
    strategy = DeepSpeedStrategy(stage=2)
    plan = {"accumulate_grad_batches": 2, "grad_accumulation_dtype": "fp32"}
    strategy._lw_plan = plan
    config = strategy.configure_deepspeed_config(strategy.given_config)
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    with pytest.raises(ConfigError, match=r"grad_accumulation_dtype='float32'\).* stage 1"):
        DeepSpeedStrategy(stage=1).apply_trainer_config(plan)
    other = DeepSpeedStrategy(config={"data_types": {"grad_accum_dtype": "bf16"}})
    with pytest.raises(ConfigError, match="data_types.grad_accum_dtype"):
        other.apply_trainer_config(plan)


def test_a_strategy_that_another_trainer_used_is_as_it_was() -> None:
    strategy = lw.strategies.SingleDeviceStrategy("cpu")
    quiet(strategy=strategy, grad_accumulation_dtype="float32")
    assert strategy.accumulate_dtype is torch.float32
    quiet(strategy=strategy, callbacks=[Recorder()])
    assert strategy.accumulate_dtype is None
