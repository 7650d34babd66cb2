"""SWA against torch's SWALR, its mean and its update_bn, in real fits that are interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, update_bn
from toys import Net, assert_same, loader, momentum, net, quiet, weights

from loopwright.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from loopwright.errors import ConfigError


class Watch(Callback):
    """Keeps the rates and the module's state at the ends of epochs; saves at a step."""

    def __init__(self, save_at: int = -1, path: Path | None = None) -> None:
        self.rates: list[float] = []
        self.epochs: list[dict[str, Tensor]] = []
        self.save_at, self.path = save_at, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.is_last_batch:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(weights(pl_module))


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = momentum(self.parameters())
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


def fit(*callbacks: Callback, kind: Any = Net, ckpt_path: Any = None, module: Any = None, **kwargs: Any) -> Any:
    module = net(kind, momentum) if module is None else module
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = quiet(callbacks=list(callbacks), enable_checkpointing=saves, **{"max_epochs": 6, **kwargs})
    trainer.fit(module, loader(8, 2, shuffle=True), ckpt_path=ckpt_path)
    return trainer, module


def test_the_module_ends_as_the_mean_of_the_last_epochs() -> None:
    watch, swa = Watch(), StochasticWeightAveraging(0.02, swa_epoch_start=3)
    _, module = fit(watch, swa)
    assert (swa.swa_start, swa.swa_end, swa.n_averaged) == (2, 5, 5)
    for name, parameter in module.named_parameters():
        # The weights that averaging begins with, and those after each of its four epochs.
        mean = torch.stack([state[name] for state in watch.epochs[1:]]).mean(0)
        torch.testing.assert_close(parameter.detach(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("epochs", [0, 2, 10])
def test_rates_are_those_of_torchs_schedule(strategy: Any, epochs: int) -> None:
    watch = Watch()
    fit(watch, StochasticWeightAveraging(0.2, 3, annealing_epochs=epochs, annealing_strategy=strategy))
    optimizer = momentum([nn.Parameter(torch.zeros(1))])
    schedule = SWALR(optimizer, 0.2, anneal_epochs=epochs, anneal_strategy=strategy)
    expected = [0.05, 0.05]
    for _ in range(4):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert watch.rates == pytest.approx(expected, rel=1e-12)


def test_the_modules_own_schedule_rests_while_averaging() -> None:
    watch = Watch()
    fit(watch, StochasticWeightAveraging(0.2, 0.5, annealing_epochs=0), kind=Scheduled, max_epochs=4)
    # int(4 * 0.5) = the second epoch; the schedule halves the rate at each of the first four steps.
    assert watch.rates == [0.05 / 2**4, 0.2, 0.2, 0.2]


@pytest.mark.parametrize("kind", [Net, Scheduled])
@pytest.mark.parametrize("stop", [4, 8, 9, 12, 15, 20, 23])
def test_resume_is_bit_exact(tmp_path: Path, stop: int, kind: Any) -> None:
    def run(watch: Watch, ckpt_path: Any = None) -> Any:
        return fit(StochasticWeightAveraging(0.2, 3, 2), watch, kind=kind, ckpt_path=ckpt_path)[1]

    whole = run(Watch(stop, tmp_path / "c.ckpt"))
    saved = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert saved["global_step"] == stop
    resumed = Watch()
    assert_same(run(resumed, tmp_path / "c.ckpt"), whole)


def test_batch_norms_get_the_statistics_of_the_average() -> None:
    _, module = fit(StochasticWeightAveraging(0.2, 3), module=net(Net, momentum, norm=True))
    reference = net(Net, momentum, norm=True)
    reference.load_state_dict(module.state_dict())
    update_bn(((batch[0],) for batch in loader(8, 2)), reference)
    norm = module.net[2]
    assert norm.momentum == 0.1
    assert norm.num_batches_tracked == 4
    # The same batches cut in another order: the mean of their means is the same, that of their variances is not.
    torch.testing.assert_close(norm.running_mean, reference.net[2].running_mean, rtol=1e-5, atol=1e-6)


def test_the_pass_for_batch_norms_leaves_no_other_trace(tmp_path: Path) -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", loss := self.loss(batch), on_step=True, on_epoch=True)
            return loss

    def run(*callbacks: Callback) -> Any:
        torch.manual_seed(3)
        module = net(Logs, momentum, norm=True, dropout=0.3)
        trainer = quiet(callbacks=list(callbacks), max_epochs=2)
        trainer.fit(module, loader(8, 2, shuffle=True))
        return trainer, torch.get_rng_state(), dict(trainer.callback_metrics), trainer.global_step

    # Rates are as without it, so that training is the same.
    with_swa, plain = run(StochasticWeightAveraging(0.05, 1)), run()
    assert torch.equal(with_swa[1], plain[1])
    assert with_swa[2] == plain[2]
    assert with_swa[3] == plain[3] == 8


def test_data_that_cannot_be_read_again_keep_the_statistics(caplog: Any) -> None:
    class Once:
        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return iter(list(loader()) if self.passes <= 2 else [])

    module, watch = net(Net, momentum, norm=True), Watch()
    trainer = quiet(callbacks=[StochasticWeightAveraging(0.2, 1), watch], max_epochs=2)
    trainer.fit(module, Once())
    assert torch.equal(module.net[2].running_mean, watch.epochs[-1]["net.2.running_mean"])
    assert "those of the weights before averaging" in caplog.text


def test_checkpoints_hold_the_trained_weights_until_fit_has_returned(tmp_path: Path) -> None:
    watch = Watch()
    module = net(Net, momentum, norm=True)
    saver = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=5)
    trainer, _ = fit(StochasticWeightAveraging(0.2, 2), watch, saver, module=module, max_steps=15)
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert last["global_step"] == 15
    assert_same(last["state_dict"], watch.epochs[-1])
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert_same(torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"], module)
    # A limit of steps interrupted the fourth epoch: the run goes on as if it had not.
    _, resumed = fit(
        StochasticWeightAveraging(0.2, 2), module=net(Net, momentum, norm=True), ckpt_path=tmp_path / "last.ckpt"
    )
    _, whole = fit(StochasticWeightAveraging(0.2, 2), module=net(Net, momentum, norm=True))
    assert_same(resumed, whole)


def test_a_custom_average_and_one_rate_per_group() -> None:
    class Groups(Net):
        def configure_optimizers(self) -> Any:
            first, *rest = self.parameters()
            return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.03}], lr=0.1)

    watch = Watch()
    swa = StochasticWeightAveraging([0.2, 0.3], 2, 0, avg_fn=lambda average, weight, count: weight, device=None)
    trainer, module = fit(watch, swa, kind=Groups, max_epochs=3)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.2, 0.3]
    assert_same(module, watch.epochs[-1])


def test_a_late_beginning_is_said(tmp_path: Path, caplog: Any) -> None:
    fit(saver := ModelCheckpoint(tmp_path, save_last=True), max_epochs=3)
    assert saver.last_model_path
    swa = StochasticWeightAveraging(0.2, 2)
    fit(swa, ckpt_path=tmp_path / "last.ckpt")
    assert "starts in epoch 3 instead of epoch 1" in caplog.text
    assert swa.n_averaged == 4


def test_the_rate_that_is_logged_is_the_one_of_averaging(tmp_path: Path) -> None:
    from toys import RecordingLogger

    logger = RecordingLogger()
    fit(LearningRateMonitor(logging_interval="step"), StochasticWeightAveraging(0.2, 2, 0), logger=logger,
        log_every_n_steps=1, max_epochs=2)  # fmt: skip
    assert [value for _, value in logger.values("lr-SGD")] == [0.05] * 4 + [0.2] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "swa_lrs=0.0"),
        (([0.1, -1.0],), "swa_lrs"),
        ((0.1, 0), "swa_epoch_start=0 "),
        ((0.1, 1.5), "swa_epoch_start=1.5"),
        ((0.1, 0.5, -1), "annealing_epochs=-1"),
        ((0.1, 0.5, 1, "exp"), "annealing_strategy='exp'"),
        ((0.1, 0.5, 1, "cos", 3), "avg_fn=3"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StochasticWeightAveraging(*arguments)


def test_a_trial_run_that_ends_before_averaging_is_no_mistake() -> None:
    fit(swa := StochasticWeightAveraging(0.1, 5), fast_dev_run=True, max_epochs=10)
    assert swa.n_averaged == 0


def test_wrong_runs_are_refused() -> None:
    class Two(Net):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [momentum(self.parameters()), momentum(self.parameters())]

    with pytest.raises(ConfigError, match="needs one optimizer, and configure_optimizers returned 2"):
        fit(StochasticWeightAveraging(0.1), kind=Two)
    with pytest.raises(ConfigError, match="batch norms need a pass without optimization"):
        fit(StochasticWeightAveraging(0.1), module=net(Two, momentum, norm=True))
    with pytest.raises(ConfigError, match="have no limit"):
        fit(StochasticWeightAveraging(0.1), max_epochs=-1)
    with pytest.raises(ConfigError, match="after the last of 6 epochs"):
        fit(StochasticWeightAveraging(0.1, 7))
    with pytest.raises(ConfigError, match="2 rates, and the number of parameter groups is 1"):
        fit(StochasticWeightAveraging([0.1, 0.1]))
