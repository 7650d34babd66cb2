"""Fine-tuning in real fits: what trains when, at which rate, and after a resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from toys import assert_same, loader, net, quiet, weights

import loopwright as lw
from loopwright.callbacks import BackboneFinetuning, BaseFinetuning, Callback
from loopwright.callbacks.finetuning import multiplicative
from loopwright.errors import CheckpointError, ConfigError, ModuleError


class Model(lw.Module):
    def __init__(self, optimizer: str = "sgd", *, leaves_out: bool = True) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)
        self.optimizer, self.leaves_out = optimizer, leaves_out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        parameters = [one for one in self.parameters() if one.requires_grad or not self.leaves_out]
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if self.optimizer == "cosine":
            return [optimizer], [lw.schedules.cosine(optimizer, 24, warmup=3)]
        if self.optimizer == "lambda":
            return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.9**epoch)]
        return [optimizer], [StepLR(optimizer, 1, 0.9)] if self.optimizer == "scheduled" else []


class Watch(Callback):
    """Keeps rates and weights at the end of each epoch; saves at a step."""

    def __init__(self, save_at: int = -1, path: Path | None = None) -> None:
        self.rates: list[list[float]] = []
        self.epochs: list[dict[str, Tensor]] = []
        self.save_at, self.path = save_at, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.is_last_batch:
            self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(weights(pl_module))


def fit(*callbacks: Callback, module: Any = None, ckpt_path: Any = None, **kwargs: Any) -> Any:
    module = net(Model) if module is None else module
    trainer = quiet(callbacks=list(callbacks), **{"max_epochs": 6, **kwargs})
    trainer.fit(module, loader(8, 2, shuffle=True), ckpt_path=ckpt_path)
    return trainer, module


def test_the_backbone_is_trained_from_its_epoch_on() -> None:
    watch, start = Watch(), net(Model)
    trainer, _ = fit(BackboneFinetuning(3, train_bn=False), watch)
    for epoch, state in enumerate(watch.epochs):
        same = torch.equal(state["backbone.0.weight"], start.backbone[0].weight)
        assert same == (epoch < 3), epoch
        assert not torch.equal(state["head.weight"], start.head.weight)
        # A frozen batch norm keeps its running statistics.
        assert torch.equal(state["backbone.1.running_mean"], torch.zeros(8)) == (epoch < 3)
    assert len(trainer.optimizers[0].param_groups) == 2


def test_the_rate_begins_as_a_part_of_the_heads_and_rises_to_it() -> None:
    watch = Watch()
    fit(BackboneFinetuning(2, lambda_func=lambda epoch: 4.0, backbone_initial_ratio_lr=0.1), watch)
    assert [rates[1:] for rates in watch.rates] == [[], [], [pytest.approx(0.01)], [pytest.approx(0.04)], [0.1], [0.1]]
    free = Watch()
    epochs: list[int] = []
    fit(BackboneFinetuning(2, lambda epoch: epochs.append(epoch) or 10.0, backbone_initial_lr=0.05, should_align=False),
        free, max_epochs=4)  # fmt: skip
    assert [rates[1:] for rates in free.rates] == [[], [], [0.05], [0.5]]
    assert epochs == [4]
    assert multiplicative(3) == 2.0


def test_an_added_group_follows_a_schedule_of_loopwright() -> None:
    class Unfreezes(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 2:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, initial_denom_lr=10)

    watch = Watch()
    fit(Unfreezes(), watch, module=Model("cosine"))
    assert [len(rates) for rates in watch.rates] == [1, 1, 2, 2, 2, 2]
    schedule = lw.schedules.cosine(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 24, warmup=3)
    for epoch, (head, *added) in enumerate(watch.rates, 1):
        assert head == 0.1 * schedule.lr_lambdas[0](4 * epoch)  # as without the group
        assert added == pytest.approx([head / 10 for _ in added], rel=1e-12)  # chained products round differently


def test_a_schedule_that_cannot_follow_added_groups_is_named() -> None:
    with pytest.raises(ModuleError, match=r"LambdaLR has rates for 1 parameter groups, and its optimizer has 2"):
        fit(BackboneFinetuning(2), module=Model("lambda"))


def test_batch_norms_may_train_from_the_beginning(recwarn: Any) -> None:
    watch, start = Watch(), net(Model)
    trainer, _ = fit(BackboneFinetuning(2), watch, max_epochs=3)
    assert not torch.equal(watch.epochs[0]["backbone.1.weight"], start.backbone[1].weight)
    assert not torch.equal(watch.epochs[0]["backbone.1.running_mean"], torch.zeros(8))
    # They stay in the first group, which had them, and nobody is warned.
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [4, 4]


def test_parameters_that_the_optimizer_has_already_are_said_and_stay_in_their_group() -> None:
    watch = Watch()
    with pytest.warns(UserWarning, match="4 parameters that are unfrozen are in SGD already"):
        trainer, _ = fit(BackboneFinetuning(1), watch, module=net(Model, leaves_out=False), max_epochs=3)
    assert len(trainer.optimizers[0].param_groups) == 1
    assert watch.rates == [[0.1]] * 3


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "scheduled", "cosine"])
@pytest.mark.parametrize("stop", [3, 8, 9, 12, 14, 20])
def test_resume_is_bit_exact(tmp_path: Path, stop: int, optimizer: str) -> None:
    def run(watch: Watch, ckpt_path: Any = None) -> Any:
        module = net(Model, optimizer)
        return fit(BackboneFinetuning(2, train_bn=False), watch, module=module, ckpt_path=ckpt_path)

    _, whole = run(first := Watch(stop, tmp_path / "c.ckpt"))
    assert torch.load(tmp_path / "c.ckpt", weights_only=True)["global_step"] == stop
    trainer, resumed = run(again := Watch(), tmp_path / "c.ckpt")
    assert_same(resumed, whole)
    assert again.rates == first.rates[len(first.rates) - len(again.rates) :]
    assert all(parameter.requires_grad for parameter in resumed.parameters())
    assert resumed.backbone[1].track_running_stats
    assert len(trainer.optimizers[0].param_groups) == 2


class Gradually(BaseFinetuning):
    """Unfreezes a layer of the backbone at each epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        layers = {1: pl_module.backbone[3], 2: [pl_module.backbone[1], pl_module.backbone[0]]}
        if epoch in layers:
            self.unfreeze_and_add_param_group(layers[epoch], optimizer, initial_denom_lr=5.0)


@pytest.mark.parametrize("stop", [2, 5, 9, 11])
def test_a_subclass_with_several_groups_resumes(tmp_path: Path, stop: int) -> None:
    _, whole = fit(Gradually(), Watch(stop, tmp_path / "c.ckpt"), max_epochs=4)
    trainer, resumed = fit(Gradually(), ckpt_path=tmp_path / "c.ckpt", max_epochs=4)
    assert_same(resumed, whole)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([0.1, 0.02, 0.02])


def test_the_state_names_the_parameters_of_each_group(tmp_path: Path) -> None:
    fit(callback := Gradually(), Watch(9, tmp_path / "c.ckpt"), max_epochs=3)
    state = torch.load(tmp_path / "c.ckpt", weights_only=True)["callbacks"][callback.state_key]
    groups = state["internal_optimizer_metadata"][0]
    assert [group["momentum"] for group in groups] == [0.9, 0.9, 0.9]
    assert [group["params"] for group in groups] == [
        ["head.weight", "head.bias"],
        ["backbone.3.weight", "backbone.3.bias"],
        ["backbone.1.weight", "backbone.1.bias", "backbone.0.weight", "backbone.0.bias"],
    ]


def test_a_saved_group_whose_parameters_are_gone_is_named(tmp_path: Path) -> None:
    fit(Gradually(), Watch(9, tmp_path / "c.ckpt"), max_epochs=3)
    saved = torch.load(tmp_path / "c.ckpt", weights_only=True)
    saved["callbacks"]["Gradually"]["internal_optimizer_metadata"][0][1]["params"] = ["encoder.weight"]
    torch.save(saved, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"that the module does not have: encoder\.weight"):
        fit(Gradually(), ckpt_path=tmp_path / "other.ckpt", max_epochs=3)


def test_weights_without_the_callbacks_state_unfreeze_at_the_next_epoch(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two groups of parameters fewer than later: the optimizer is the head's
        frozen = BackboneFinetuning(100)
        fit(frozen, Watch(12, tmp_path / "c.ckpt"), max_epochs=3)
        watch = Watch()
        fit(BackboneFinetuning(1), watch, ckpt_path=tmp_path / "c.ckpt", max_epochs=5)
    assert [len(rates) for rates in watch.rates] == [2, 2]


def test_modules_are_found_flattened_and_filtered() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    own = Own()
    assert BaseFinetuning.flatten_modules(own) == [own, own.inner[0], own.inner[1]]
    assert BaseFinetuning.flatten_modules([own.inner, [nn.ModuleDict({"a": own.inner[0]})]])[:2] == list(own.inner)
    BaseFinetuning.freeze(own)
    assert [one.requires_grad for one in own.parameters()] == [False, False, False, True, True]
    assert list(BaseFinetuning.filter_params(own)) == list(own.inner[1].parameters())
    assert list(BaseFinetuning.filter_params(own, train_bn=False)) == []
    assert len(list(BaseFinetuning.filter_params(own, requires_grad=False))) == 3
    BaseFinetuning.freeze(own, train_bn=False)
    assert not own.inner[1].track_running_stats
    BaseFinetuning.make_trainable(own)
    assert own.inner[1].track_running_stats
    assert all(one.requires_grad for one in own.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unfreeze_backbone_at_epoch": -1}, "unfreeze_backbone_at_epoch=-1"),
        ({"lambda_func": 2.0}, "lambda_func=2.0"),
        ({"backbone_initial_ratio_lr": 0.0}, "backbone_initial_ratio_lr=0.0"),
        ({"backbone_initial_lr": -1.0}, "backbone_initial_lr=-1.0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackboneFinetuning(**arguments)


def test_a_module_without_a_backbone_is_refused() -> None:
    from toys import Net

    with pytest.raises(ConfigError, match=r"Net\.backbone is NoneType, expected a module"):
        fit(BackboneFinetuning(), module=net(Net))


def test_a_subclass_without_its_methods_says_which() -> None:
    with pytest.raises(NotImplementedError, match="BaseFinetuning has to define freeze_before_training"):
        fit(BaseFinetuning())


class Scheduled(BaseFinetuning):
    """A library's callback: it has a state and hooks of its own, and uses the base class to note groups."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.freeze_before_training(pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0]
        noted = len(self._internal_optimizer_metadata.get(0, []))
        if trainer.current_epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[3], optimizer)
        self._store(pl_module, 0, noted, optimizer.param_groups)

    def state_dict(self) -> Any:
        return {"internal_optimizer_metadata": self._internal_optimizer_metadata}

    def load_state_dict(self, state_dict: Any) -> None:
        self._restarting = True
        self._internal_optimizer_metadata = state_dict["internal_optimizer_metadata"]


def test_a_subclass_with_its_own_state_resumes_with_its_groups(tmp_path: Path) -> None:
    _, whole = fit(Scheduled(), Watch(9, tmp_path / "c.ckpt"), max_epochs=4)
    trainer, resumed = fit(again := Scheduled(), ckpt_path=tmp_path / "c.ckpt", max_epochs=4)
    assert_same(resumed, whole)
    assert not again._restarting
    names = [group["params"] for group in again._internal_optimizer_metadata[0]]
    assert names == [["head.weight", "head.bias"], ["backbone.3.weight", "backbone.3.bias"]]
    known = dict(resumed.named_parameters())
    groups = again._apply_mapping_to_param_groups(again._internal_optimizer_metadata[0], known)
    assert groups[1]["params"] == trainer.optimizers[0].param_groups[1]["params"]
    assert groups[1]["lr"] == pytest.approx(0.01)


def test_groups_of_a_checkpoint_replace_others(tmp_path: Path) -> None:
    fit(Gradually(), Watch(9, tmp_path / "c.ckpt"), max_epochs=3)

    class Thawed(Gradually):
        state_key = "Gradually"  # type: ignore[assignment]

        def freeze_before_training(self, pl_module: Any) -> None:
            """Nothing is frozen, so that configure_optimizers makes one group of everything."""

    trainer, _ = fit(Thawed(), ckpt_path=tmp_path / "c.ckpt", max_epochs=3)
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [2, 2, 4]


def test_the_state_has_lightnings_key_and_form() -> None:
    callback = BackboneFinetuning(3)
    assert callback.state_key == "BackboneFinetuning"
    theirs = {
        "internal_optimizer_metadata": {0: [{"lr": 0.1, "params": ["head.weight", "head.bias"]}]},
        "previous_backbone_lr": 0.01,
    }
    callback.load_state_dict(theirs)  # without what only Loopwright notes
    assert callback.previous_backbone_lr == 0.01
    assert callback.state_dict()["internal_optimizer_metadata"] == theirs["internal_optimizer_metadata"]


def test_a_function_that_adds_parameters_to_both_of_two_optimizers_is_refused() -> None:
    class Two(Model):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.head.weight], lr=0.1), torch.optim.AdamW([self.head.bias], lr=0.1)]

    class Everywhere(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone, train_bn=False)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer)

    fit(BackboneFinetuning(1, train_bn=False), module=net(Two))  # adds them to the first
    with pytest.raises(ConfigError, match="expected each parameter in one optimizer, got 2 in two"):
        fit(Everywhere(), module=net(Two))
