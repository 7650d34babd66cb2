from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeTrainer, interrupted_at
from torch import Tensor, nn

from loopwright.callbacks import EMA, Callback
from loopwright.errors import CheckpointError, ConfigError, ModuleError


class Net(nn.Module):
    """Parameters, a tied one, a frozen one, and buffers of both kinds."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.tied = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.add_(0.25)
            self.count += 1
        out: Tensor = self.tied(self.first(x.to(self.frozen.dtype))) * self.frozen
        return out


class Watch(Callback):
    """Notes the weights after each step and in each validation. Runs before the EMA."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.means: list[Tensor] = []
        self.validated: list[Tensor] = []
        self.saved: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(pl_module.first.weight.detach().clone())
        self.means.append(pl_module.mean.clone())

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated.append(pl_module.first.weight.detach().clone())


def reference(values: list[Tensor], decay: float) -> Tensor:
    average = values[0].clone()
    for value in values[1:]:
        average.lerp_(value, 1 - decay)
    return average


def fit(tmp_path: Path, ema: EMA, *more: Callback, **kwargs: Any) -> tuple[FakeTrainer, Watch]:
    watch = Watch()
    trainer = FakeTrainer(tmp_path, [watch, ema, *more], **kwargs)
    trainer.fit(Net())
    return trainer, watch


def test_average_equals_the_recursion_bit_for_bit(tmp_path: Path) -> None:
    ema = EMA(decay=0.9)
    _, watch = fit(tmp_path, ema, windows=6)
    state = ema.shadow_state_dict()
    assert torch.equal(state["first.weight"], reference(watch.weights, 0.9))
    assert torch.equal(state["tied.weight"], state["first.weight"])
    assert torch.equal(state["mean"], reference(watch.means, 0.9))
    assert torch.equal(state["frozen"], torch.ones(2))
    assert state["count"] == 6
    assert ema.num_updates == 6
    Net().load_state_dict(state)  # strict: all names are there, no more


def test_buffers_are_copied_without_use_buffers(tmp_path: Path) -> None:
    ema = EMA(decay=0.9, use_buffers=False)
    _, watch = fit(tmp_path, ema)
    assert torch.equal(ema.shadow_state_dict()["mean"], watch.means[-1])


def test_updates_follow_steps_not_micro_batches(tmp_path: Path) -> None:
    ema = EMA(decay=0.9)
    _, watch = fit(tmp_path, ema, windows=4, accumulate=3)
    assert ema.num_updates == 4
    assert torch.equal(ema.shadow_state_dict()["first.weight"], reference(watch.weights[2::3], 0.9))


def test_a_skipped_step_leaves_the_average_alone(tmp_path: Path) -> None:
    ema = EMA(decay=0.9)
    fit(tmp_path, ema, windows=4, skipped=[2, 4])
    assert ema.num_updates == 2


def test_every_n_steps_and_the_start(tmp_path: Path) -> None:
    ema = EMA(decay=0.9, update_every_n_steps=2, update_starting_at_step=3)
    _, watch = fit(tmp_path, ema, windows=8)
    # Steps counted from 0: 4 and 6.
    assert torch.equal(ema.shadow_state_dict()["first.weight"], reference([watch.weights[4], watch.weights[6]], 0.9))
    late = EMA(decay=0.9, update_starting_at_epoch=1)
    fit(tmp_path, late, windows=3, max_epochs=2)
    assert late.num_updates == 3


def test_validation_uses_the_average_and_training_the_weights(tmp_path: Path) -> None:
    ema = EMA(decay=0.9)
    trainer, watch = fit(tmp_path, ema, windows=4, val_every=2)
    assert torch.equal(watch.validated[0], reference(watch.weights[:2], 0.9))
    assert torch.equal(watch.validated[1], reference(watch.weights, 0.9))
    assert torch.equal(trainer.module.first.weight, watch.weights[-1])


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    _, with_ema = fit(tmp_path, EMA(), windows=6, val_every=2)
    watch = Watch()
    FakeTrainer(tmp_path, [watch], windows=6, val_every=2).fit(Net())
    assert all(torch.equal(a, b) for a, b in zip(with_ema.weights, watch.weights, strict=True))


def test_before_the_first_update_the_raw_weights_are_evaluated(tmp_path: Path) -> None:
    ema = EMA(update_starting_at_step=100)
    _, watch = fit(tmp_path, ema, val_every=2, sanity=True)
    assert torch.equal(watch.validated[1], watch.weights[1])
    with pytest.raises(ModuleError, match="not updated yet"):
        ema.shadow_state_dict()


def test_evaluate_with_can_be_off(tmp_path: Path) -> None:
    _, watch = fit(tmp_path, EMA(evaluate_with=False), val_every=2)
    assert torch.equal(watch.validated[0], watch.weights[1])


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_by_itself_uses_the_average_and_puts_the_weights_back(tmp_path: Path, verb: str) -> None:
    ema = EMA(decay=0.5)
    trainer, watch = fit(tmp_path, ema)
    trainer.save_checkpoint(str(tmp_path / "c.ckpt"))
    fresh, look = EMA(decay=0.5), []

    class Look(Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            look.append(pl_module.first.weight.detach().clone())

        on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    module = Net()
    FakeTrainer(tmp_path, [fresh, Look()]).validate(module, str(tmp_path / "c.ckpt"), verb)
    assert torch.equal(look[0], reference(watch.weights, 0.5))
    assert torch.equal(module.first.weight, watch.weights[-1])


def test_a_checkpoint_has_raw_weights_also_when_taken_during_validation(tmp_path: Path) -> None:
    class Save(Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            trainer.save_checkpoint(str(tmp_path / "c.ckpt"))

    _, watch = fit(tmp_path, EMA(decay=0.5), Save())
    weights = torch.load(tmp_path / "c.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(weights["first.weight"], watch.weights[-1])
    assert torch.equal(weights["tied.weight"], watch.weights[-1])


def test_an_exception_during_validation_puts_the_weights_back(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            raise RuntimeError("bug")

    watch = Watch()
    trainer = FakeTrainer(tmp_path, [watch, EMA(decay=0.5), Fail()])
    with pytest.raises(RuntimeError, match="bug"):
        trainer.fit(Net())
    assert torch.equal(trainer.module.first.weight, watch.weights[-1])


@pytest.mark.parametrize("stop", range(1, 8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_exact(tmp_path: Path, stop: int, dtype: torch.dtype) -> None:
    def make() -> FakeTrainer:
        return FakeTrainer(tmp_path, [EMA(decay=0.9, update_every_n_steps=2)], windows=4, max_epochs=2)

    whole = make()
    whole.fit(Net(dtype))
    first = make()

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == stop:
                trainer.save_checkpoint(str(tmp_path / "c.ckpt"))

    # Saved by a callback that runs before the EMA: the update of this step is still to come.
    first.callbacks.insert(0, Save())
    with interrupted_at(first, stop, RuntimeError("killed")):
        first.fit(Net(dtype))
    resumed = make()
    resumed.fit(Net(dtype), ckpt_path=str(tmp_path / "c.ckpt"))
    expected, got = whole.callbacks[0].state_dict(), resumed.callbacks[0].state_dict()
    assert got["num_updates"] == expected["num_updates"]
    assert all(torch.equal(got["shadow"][name], value) for name, value in expected["shadow"].items())


def test_low_precision_weights_are_averaged_in_float32(tmp_path: Path) -> None:
    ema = EMA(decay=0.999)
    trainer = FakeTrainer(tmp_path, [ema], windows=4)
    trainer.fit(Net(torch.bfloat16))
    assert ema.shadow_state_dict()["first.weight"].dtype == torch.float32
    target = Net(torch.bfloat16)
    ema.copy_to(target)
    assert torch.equal(target.first.weight, ema.shadow_state_dict()["first.weight"].bfloat16())


def test_copy_to_and_applied(tmp_path: Path) -> None:
    ema = EMA(decay=0.5)
    trainer, watch = fit(tmp_path, ema)
    average = reference(watch.weights, 0.5)
    with ema.applied(trainer.module) as module:
        assert torch.equal(module.first.weight, average)
    assert torch.equal(trainer.module.first.weight, watch.weights[-1])
    other = Net()
    ema.copy_to(other)
    assert torch.equal(other.first.weight, average)


def test_a_module_that_does_not_fit_is_named(tmp_path: Path) -> None:
    ema = EMA()
    fit(tmp_path, ema)
    with pytest.raises(CheckpointError, match=r"missing weight.*unexpected first\.weight"):
        ema.copy_to(nn.Linear(2, 2, bias=False))


def test_nothing_is_read_from_the_device(tmp_path: Path) -> None:
    ema = EMA()
    fit(tmp_path, ema)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.reads += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    with Count():
        ema._lw_update(Net())
    assert Count.reads == 0


@pytest.mark.parametrize("kwargs", [{"decay": 1.5}, {"update_every_n_steps": 0}, {"update_starting_at_step": -1}])
def test_wrong_arguments_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="EMA"):
        EMA(**kwargs)
