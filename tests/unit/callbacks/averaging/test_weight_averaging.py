"""Averages against torch's own AveragedModel, in real fits that are interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from toys import Net, ValidatedNet, assert_near, assert_same, loader, momentum, net, quiet, weights

from loopwright.callbacks import (
    EMA,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from loopwright.errors import CheckpointError, ConfigError


class Watch(Callback):
    """Keeps the module's state after each step and in each validation; saves at a step."""

    def __init__(self, save_at: int = -1, path: Path | None = None) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []
        self.save_at, self.path = save_at, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.at_step_boundary:
            self.steps.append(weights(pl_module))
            if trainer.global_step == self.save_at:
                trainer.save_checkpoint(self.path)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.validated.append(weights(pl_module))


def averaged(states: list[dict[str, Tensor]], **kwargs: Any) -> AveragedModel:
    """Return torch's average of these states, in this order."""
    module = net(Net, momentum, norm=True)
    average = AveragedModel(module.net, use_buffers=False, **kwargs)
    for state in states:
        module.load_state_dict(state)
        average.update_parameters(module.net)
    return average


def assert_close(first: nn.Module, second: nn.Module) -> None:
    # torch computes the weight 1 / (n + 1) of its mean in float32.
    assert_near(first, second, rtol=1e-6)


def fit(*callbacks: Callback, module: Any = None, ckpt_path: Any = None, **kwargs: Any) -> Any:
    module = module if module is not None else net(Net, momentum, norm=True)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = quiet(callbacks=list(callbacks), enable_checkpointing=saves, **{"max_epochs": 2, **kwargs})
    trainer.fit(module, loader(8, 2, shuffle=True), ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (WeightAveraging, {}),
        (WeightAveraging, {"avg_fn": get_ema_avg_fn(0.7)}),
        (WeightAveraging, {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}),
    ],
)
def test_the_module_ends_as_torchs_average_of_all_steps(make: Any, options: Any) -> None:
    watch = Watch()
    _, module = fit(watch, make(**options))
    expected = averaged(watch.steps, **options)
    assert_close(module.net, expected.module)


def test_an_exponential_average_is_the_recursion_over_the_chosen_steps() -> None:
    watch = Watch()
    _, module = fit(watch, EMAWeightAveraging(decay=0.7, update_every_n_steps=2, update_starting_at_step=3))
    expected = averaged([watch.steps[4], watch.steps[6]], multi_avg_fn=get_ema_multi_avg_fn(0.7))
    assert_same(dict(module.net.named_parameters()), dict(expected.module.named_parameters()))


def test_updates_at_the_ends_of_epochs() -> None:
    class AtEpochEnds(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None

    watch = Watch()
    _, module = fit(watch, AtEpochEnds())
    expected = averaged([watch.steps[3], watch.steps[7]])
    assert_close(module.net, expected.module)
    late = EMAWeightAveraging(decay=0.5, update_starting_at_step=1000, update_starting_at_epoch=1)
    fit(late)
    assert late.n_averaged == 1


def test_buffers_are_averaged_or_copied() -> None:
    watch = Watch()
    _, module = fit(watch, WeightAveraging())
    means = torch.stack([state["net.2.running_mean"] for state in watch.steps])
    torch.testing.assert_close(module.net[2].running_mean, means.mean(0), rtol=1e-6, atol=1e-7)
    assert module.net[2].num_batches_tracked == 8
    _, module = fit(watch := Watch(), WeightAveraging(use_buffers=False))
    assert torch.equal(module.net[2].running_mean, watch.steps[-1]["net.2.running_mean"])


def test_validation_is_on_the_average_and_training_does_not_notice() -> None:
    def train(*callbacks: Callback) -> Watch:
        watch = Watch()
        module = net(ValidatedNet, momentum)
        quiet(max_epochs=2, callbacks=[*callbacks, watch]).fit(module, loader(), loader(2))
        return watch

    plain, watch = train(), train(WeightAveraging())
    for one, other in zip(plain.steps, watch.steps, strict=True):
        assert_same(one, other)
    # The sanity check came before any update; the epochs' validations saw the mean of what was trained until then.
    assert_same(watch.validated[0], plain.validated[0])
    mean = torch.stack([state["net.0.weight"] for state in watch.steps[:4]]).mean(0)
    torch.testing.assert_close(watch.validated[1]["net.0.weight"], mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stop", range(1, 8))
@pytest.mark.parametrize("first", [True, False])
def test_resume_is_bit_exact(tmp_path: Path, stop: int, first: bool) -> None:
    def run(watch: Watch, ckpt_path: Any = None) -> Any:
        callbacks = [watch, EMAWeightAveraging(decay=0.7, update_starting_at_epoch=0)]
        return fit(*(callbacks if first else callbacks[::-1]), ckpt_path=ckpt_path)[1]

    whole = run(Watch(stop, tmp_path / "c.ckpt"))
    saved = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert saved["global_step"] == stop
    assert_same(run(Watch(), tmp_path / "c.ckpt"), whole)


def test_checkpoints_hold_the_trained_weights_until_fit_has_returned(tmp_path: Path) -> None:
    watch = Watch()
    saver = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=3)
    trainer, module = fit(watch, WeightAveraging(), saver)
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert last["global_step"] == 8
    assert_same(last["state_dict"], watch.steps[-1])
    trainer.save_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    assert_same(torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"], module)


def test_a_longer_run_goes_on_from_the_trained_weights(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit(WeightAveraging(), saver, max_epochs=1)
    _, resumed = fit(WeightAveraging(), ckpt_path=tmp_path / "last.ckpt")
    _, whole = fit(WeightAveraging())
    assert_same(resumed, whole)


def test_evaluation_of_a_checkpoint_is_on_the_average_and_puts_the_weights_back(tmp_path: Path) -> None:
    class Look(Callback):
        def on_test_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append(weights(pl_module))

    seen: list[dict[str, Tensor]] = []
    saver = ModelCheckpoint(tmp_path, save_last=True)
    module = net(ValidatedNet)
    quiet(max_epochs=1, callbacks=[WeightAveraging(), saver], enable_checkpointing=True).fit(
        module, loader(), loader(2)
    )
    other = net(ValidatedNet, seed=5)
    quiet(callbacks=[WeightAveraging(), Look()]).test(other, loader(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert_same(seen[0], module)
    assert_same(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"], other)


def test_a_checkpoint_of_lightning_is_understood(tmp_path: Path) -> None:
    average = WeightAveraging()
    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit(average, saver, max_epochs=1)
    theirs = torch.load(tmp_path / "last.ckpt", weights_only=True)
    state = theirs["callbacks"].pop(average.state_key)
    theirs["current_model_state"] = theirs["state_dict"]
    theirs["state_dict"] = {**theirs["state_dict"], **state["average"]}
    theirs["averaging_state"] = {"n_averaged": torch.tensor(state["n_averaged"])}
    torch.save(theirs, tmp_path / "theirs.ckpt")
    _, resumed = fit(WeightAveraging(), ckpt_path=tmp_path / "theirs.ckpt")
    _, whole = fit(WeightAveraging())
    assert_same(resumed, whole)


def test_an_error_puts_the_trained_weights_back() -> None:
    class Fail(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            raise RuntimeError("bug")

    watch, module = Watch(), net(Net, momentum, norm=True)
    with pytest.raises(RuntimeError, match="bug"):
        fit(watch, WeightAveraging(), Fail(), module=module)
    assert_same(module, watch.steps[-1])


def test_half_precision_is_averaged_in_float32() -> None:
    average = EMAWeightAveraging(decay=0.999)
    fit(average, precision="bf16-true")
    assert average.state_dict()["average"]["net.0.weight"].dtype == torch.float32


def test_skipped_steps_do_not_count() -> None:
    class Gaps(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else self.loss(batch)

    fit(average := WeightAveraging(), module=net(Gaps))
    assert average.n_averaged == 4


def test_tied_weights_have_one_average(tmp_path: Path) -> None:
    class Tied(Net):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.again = self.net[2]

    saver = ModelCheckpoint(tmp_path, save_last=True)
    watch = Watch()
    _, module = fit(watch, WeightAveraging(), saver, module=net(Tied))
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert_same(last, watch.steps[-1])
    assert torch.equal(last["again.weight"], last["net.2.weight"])
    assert module.again.weight is module.net[2].weight


@pytest.mark.filterwarnings("ignore:trainer.fit continues")
def test_another_module_begins_anew_and_one_that_does_not_fit_is_named(tmp_path: Path) -> None:
    average = WeightAveraging()
    trainer, _ = fit(average, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net(Net, seed=3), loader())
    assert average.n_averaged == 4
    average.load_state_dict({**average.state_dict(), "average": {"other": torch.zeros(2)}})
    trainer.fit_loop.max_epochs = 3
    with pytest.raises(CheckpointError, match=r"missing net\.0\.weight.*unexpected other"):
        trainer.fit(net(Net), loader())


def test_nothing_is_read_from_the_device() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.reads += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    module = nn.Linear(2, 2)
    for average in (WeightAveraging(), EMAWeightAveraging()):
        average._lw_update(module)
        with Count():
            average._lw_update(module)
    assert Count.reads == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightAveraging(avg_fun=print), r"avg_fun= is not an argument \(did you mean 'avg_fn'"),
        (lambda: WeightAveraging(avg_fn=print, multi_avg_fn=print), "both given"),
        (lambda: WeightAveraging(avg_fn=3), "is not callable"),
        (lambda: EMAWeightAveraging(decay=1.5, update_every_n_steps=0), "decay=1.5.*update_every_n_steps=0"),
        (lambda: EMAWeightAveraging(update_starting_at_epoch=-1), "update_starting_at_epoch=-1"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_two_averages_keep_separate_state(tmp_path: Path) -> None:
    slow, fast = EMAWeightAveraging(decay=0.99), EMAWeightAveraging(decay=0.5)
    assert slow.state_key != fast.state_key
    watch = Watch(5, tmp_path / "c.ckpt")
    fit(slow, fast, watch)
    states = torch.load(tmp_path / "c.ckpt", weights_only=True)["callbacks"]
    assert not torch.equal(
        states[slow.state_key]["average"]["net.0.weight"], states[fast.state_key]["average"]["net.0.weight"]
    )


# --- the best weights at the end of fit ---------------------------------------------------------------------------


class Scored(Net):
    """A net whose best score is that of the second epoch; it leaves its norm out of checkpoints, and puts it back."""

    def __init__(self, optimizer: Any = momentum, **kwargs: Any) -> None:
        super().__init__(optimizer, **kwargs)
        self.validated: list[dict[str, Tensor]] = []
        self.trained: list[dict[str, Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", [3.0, 1.0, 2.0][self.trainer.current_epoch])
        if batch_idx == 0:
            self.validated.append(weights(self))

    def on_train_epoch_end(self) -> None:
        self.trained.append(weights(self))

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.kept = checkpoint["state_dict"].pop("net.0.bias")

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"]["net.0.bias"] = self.kept


def fit_scored(*callbacks: Callback, path: Path, **kwargs: Any) -> Any:
    module = net(Scored, momentum)
    best = ModelCheckpoint(path, "{epoch}", "score", restore_best=True, **kwargs)
    trainer = quiet(callbacks=[*callbacks, best], max_epochs=3, enable_checkpointing=True, num_sanity_val_steps=0)
    trainer.fit(module, loader(8, 2), loader(4, 2))
    assert best.best_model_path.endswith("epoch=1.ckpt")
    return module


@pytest.mark.parametrize("make", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.5)])
def test_the_best_weights_are_the_average_that_had_the_score(make: Any, tmp_path: Path) -> None:
    average = make()
    module = fit_scored(average, path=tmp_path)
    bias = "net.0.bias"  # `on_load_checkpoint` of the test puts back the last one, as trained
    assert all(torch.equal(value, module.validated[1][name]) for name, value in weights(module).items() if name != bias)
    assert not torch.equal(module.validated[1]["net.0.weight"], module.trained[1]["net.0.weight"])
    assert_same(average.averaged_module(), module)


def test_before_the_first_update_the_best_weights_are_those_that_were_trained(tmp_path: Path) -> None:
    module = fit_scored(EMAWeightAveraging(update_starting_at_step=9), path=tmp_path)
    assert torch.equal(module.net[0].weight, module.trained[1]["net.0.weight"])


def test_ema_keeps_the_average_of_the_best_checkpoint_beside_its_weights(tmp_path: Path) -> None:
    average = EMA(decay=0.5)
    module = fit_scored(average, path=tmp_path)
    assert torch.equal(module.net[0].weight, module.trained[1]["net.0.weight"])
    assert torch.equal(average.shadow_state_dict()["net.0.weight"], module.validated[1]["net.0.weight"])


@pytest.mark.parametrize(
    ("other", "kwargs", "text"),
    [
        (EMAWeightAveraging, {"save_weights_only": True}, "files would not hold the average"),
        (lambda: StochasticWeightAveraging(0.1), {}, "an average that no score was computed for"),
        (lambda: ModelCheckpoint(monitor="loss", restore_best=True), {}, "in 2 callbacks"),
    ],
)
def test_best_weights_that_something_else_replaces_are_refused(
    other: Any, kwargs: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        fit_scored(other(), path=tmp_path, **kwargs)
