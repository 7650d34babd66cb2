"""Steps over replica groups, with a Manager that refuses them as it is told to."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from fakes import LoneManager, answers
from toys import Net, assert_same, loader, net, quiet, weights

import loopwright as lw
from loopwright.data.rng import is_same
from loopwright.errors import ConfigError, MissingDependency, RankFailure


class Drawing(Net):
    """Draws, normalizes and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(torch.nn.functional.dropout(self.norm(batch[0]))) - batch[1]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def test_a_refused_step_leaves_no_trace(managers: list[LoneManager]) -> None:
    ends = []
    for refused in ((), (0, 3, 4, 5)):
        manager = LoneManager(answers(*refused))
        managers.append(manager)
        torch.manual_seed(5)
        module, average = Drawing(), lw.EMA(decay=0.5)
        trainer = quiet(
            max_epochs=3, accumulate_grad_batches=2, callbacks=[average], fault_tolerance=lw.TorchFT(min_replicas=1)
        )
        trainer.fit(module, loader())
        assert manager.refused == len(refused)
        assert manager.steps == trainer.global_step
        ends.append((trainer, module, average))
    (undisturbed, module, average), (refused_run, other, other_average) = ends
    assert_same(weights(module), weights(other))
    assert_same(dict(module.named_buffers()), dict(other.named_buffers()))
    assert is_same(average.state_dict(), other_average.state_dict())
    assert_same(undisturbed.callback_metrics, refused_run.callback_metrics)
    assert undisturbed.progress == refused_run.progress
    assert undisturbed.lr_scheduler_configs[0].scheduler.state_dict() == (
        refused_run.lr_scheduler_configs[0].scheduler.state_dict()
    )


def test_one_group_makes_the_steps_of_a_trainer_without_groups(managers: list[LoneManager]) -> None:
    managers.append(LoneManager(answers()))
    plain, grouped = net(), net()
    quiet(max_epochs=2, accumulate_grad_batches=3).fit(plain, loader())
    trainer = quiet(max_epochs=2, accumulate_grad_batches=3, fault_tolerance=lw.TorchFT())
    trainer.fit(grouped, loader())
    assert_same(weights(plain), weights(grouped))


def test_the_managers_counts_are_in_checkpoints(managers: list[LoneManager], tmp_path: Any) -> None:
    first, second = LoneManager(answers()), LoneManager(answers())
    managers += [second, first]
    trainer = quiet(max_steps=3, fault_tolerance=lw.TorchFT())
    trainer.fit(net(), loader())
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    quiet(max_steps=5, fault_tolerance=lw.TorchFT()).fit(net(), loader(), ckpt_path=tmp_path / "three.ckpt")
    assert second.steps == 5


def test_too_few_groups_wait_without_training_and_then_fail(managers: list[LoneManager]) -> None:
    managers.append(LoneManager(iter(lambda: False, None)))  # as torchft votes then
    module = net()
    module.training_step = lambda *_: pytest.fail("trained")
    trainer = quiet(max_steps=1, fault_tolerance=lw.TorchFT(min_replicas=2, quorum_timeout=0.15))
    with pytest.raises(RankFailure, match="at least 2 groups within 0.15 s .* the last one had 1"):
        trainer.fit(module, loader())


class Manual(Net):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (Net, {"accumulate_across_epochs": True}, "accumulate_across_epochs"),
        (Net, {"on_oom": "shrink"}, "on_oom"),
        (Manual, {}, "manual optimization"),
    ],
)
def test_what_a_step_over_groups_cannot_do_is_refused(
    managers: list[LoneManager], module: type[Net], arguments: dict[str, Any], message: str
) -> None:
    trainer = quiet(max_steps=1, fault_tolerance=lw.TorchFT(), **arguments)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(net(module), loader())


@pytest.mark.parametrize("variable", ["REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE"])
def test_a_missing_variable_is_named(
    managers: list[LoneManager], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable)
    with pytest.raises(ConfigError, match=variable):
        quiet(max_steps=1, fault_tolerance=lw.TorchFT()).fit(net(), loader())


def test_an_invalid_fault_tolerance_is_refused() -> None:
    with pytest.raises(ConfigError, match="fault_tolerance=True"):
        quiet(fault_tolerance=True)


def test_torchft_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="loopwright\\[torchft\\]"):
        lw.TorchFT()
