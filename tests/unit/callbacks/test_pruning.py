"""Pruning against torch.nn.utils.prune in a loop by hand, and in real fits that are interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from toys import Net, ValidatedNet, adam, assert_same, loader, momentum, net, quiet, weights

from loopwright.callbacks import Callback, ModelCheckpoint, ModelPruning
from loopwright.errors import CheckpointError, ConfigError, ModuleError


class Watch(Callback):
    """Keeps the module's state at the ends of epochs and after steps; saves at a step."""

    def __init__(self, save_at: int = -1, path: Path | None = None) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.epochs: list[dict[str, Tensor]] = []
        self.save_at, self.path = save_at, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.steps.append(weights(pl_module))
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(weights(pl_module))


def fit(*callbacks: Callback, module: Any = None, ckpt_path: Any = None, **kwargs: Any) -> Any:
    module = net(Net, momentum) if module is None else module
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = quiet(callbacks=list(callbacks), enable_checkpointing=saves, **{"max_epochs": 3, **kwargs})
    trainer.fit(module, loader(8, 2), ckpt_path=ckpt_path)
    return trainer, module


def zeros(state: Any) -> float:
    parameters = [value for name, value in state.items() if name.endswith(("weight", "bias"))]
    return sum(int((one == 0).sum()) for one in parameters) / sum(one.numel() for one in parameters)


def by_hand(prune_now: Any, *, optimizer: Any = momentum, clip: float | None = None) -> Any:
    """Train three epochs and prune after each with torch's own functions; return the weights with zeros."""
    module = net(Net, optimizer)
    steps = module.configure_optimizers()
    for _ in range(3):
        for batch in loader(8, 2):
            steps.zero_grad()
            module.loss(batch).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            steps.step()
        module.net(torch.zeros(1, 4))  # torch computes weights from `weight_orig` in a forward pass only
        prune_now(module)
    for child in (module.net[0], module.net[2]):
        for name in ("weight", "bias"):
            if hasattr(child, f"{name}_mask"):
                prune.remove(child, name)
    return module


def pairs_of(module: Any) -> list[Any]:
    return [(child, name) for child in (module.net[0], module.net[2]) for name in ("weight", "bias")]


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("amount", [0.3, 5])
def test_global_pruning_is_torchs(amount: Any, optimizer: Any) -> None:
    _, module = fit(
        ModelPruning("l1_unstructured", amount=amount, use_lottery_ticket_hypothesis=False),
        module=net(Net, optimizer),
        gradient_clip_val=0.05,
    )
    expected = by_hand(
        lambda module: prune.global_unstructured(pairs_of(module), prune.L1Unstructured, amount=amount),
        optimizer=optimizer,
        clip=0.05,
    )
    for (child, name), (other, _) in zip(pairs_of(module), pairs_of(expected), strict=True):
        assert torch.equal(getattr(child, name), getattr(other, name))
    assert 0 < zeros(module.state_dict()) < 0.7


def test_pruning_of_each_parameter_and_of_slices_is_torchs() -> None:
    _, module = fit(ModelPruning("l1_unstructured", use_global_unstructured=False, amount=0.4,
                                 use_lottery_ticket_hypothesis=False))  # fmt: skip
    expected = by_hand(lambda module: [prune.l1_unstructured(*pair, amount=0.4) for pair in pairs_of(module)])
    assert torch.equal(module.net[0].weight, expected.net[0].weight)
    assert torch.equal(module.net[0].bias, expected.net[0].bias)
    _, module = fit(
        ModelPruning("ln_structured", parameter_names=["weight"], use_global_unstructured=False, amount=0.3,
                     pruning_dim=1, pruning_norm=2, use_lottery_ticket_hypothesis=False)
    )  # fmt: skip
    expected = by_hand(
        lambda module: [prune.ln_structured(one, "weight", 0.3, n=2, dim=1) for one in (module.net[0], module.net[2])]
    )
    assert torch.equal(module.net[0].weight, expected.net[0].weight)
    assert torch.equal(module.net[2].weight, expected.net[2].weight)
    assert (module.net[2].weight == 0).all(dim=0).sum() > 2


@pytest.mark.parametrize("method", ["random_unstructured", "random_structured"])
def test_random_pruning_takes_the_part_that_was_asked_for(method: str) -> None:
    is_global = method == "random_unstructured"
    callback = ModelPruning(method, parameter_names=["weight"], amount=0.25, use_global_unstructured=is_global,
                            pruning_dim=1, use_lottery_ticket_hypothesis=False)  # fmt: skip
    fit(callback, max_epochs=1)
    assert callback.sparsity == pytest.approx(0.25)


def test_a_method_of_ones_own() -> None:
    class Negative(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def __init__(self, amount: float) -> None:
            self.amount = amount

        def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
            return default_mask * (t > 0)

    _, module = fit(ModelPruning(Negative, use_lottery_ticket_hypothesis=False), max_epochs=1)
    assert all((parameter >= 0).all() for parameter in module.parameters())


def test_pruned_weights_stay_zero_after_each_step() -> None:
    watch = Watch()
    fit(
        watch,
        ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False),
        accumulate_grad_batches=2,
    )
    assert [zeros(state) for state in watch.steps] == [0, 0, 0, 0, *[pytest.approx(0.5, abs=0.02)] * 4,
                                                       *[pytest.approx(0.75, abs=0.02)] * 4]  # fmt: skip
    # Those that are left are trained.
    assert not torch.equal(watch.steps[4]["net.0.weight"], watch.steps[7]["net.0.weight"])


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "64-true"])
def test_other_precisions_keep_the_zeros(precision: str) -> None:
    callback = ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
    _, module = fit(callback, Watch(), precision=precision)
    assert zeros(module.state_dict()) == pytest.approx(0.875, abs=0.02)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_closure_optimizers_and_manual_optimization_keep_the_zeros() -> None:
    class Manual(Net):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(2):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                seen.append(zeros(self.state_dict()))

    seen: list[float] = []
    options = {"amount": 0.5, "use_lottery_ticket_hypothesis": False}
    fit(ModelPruning("l1_unstructured", **options), module=net(Manual), max_epochs=2)
    assert seen == [0.0] * 8 + [pytest.approx(0.5, abs=0.02)] * 8
    watch = Watch()
    module = net(Net, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4))
    fit(ModelPruning("l1_unstructured", **options), watch, module=module, max_epochs=2)
    assert [zeros(state) for state in watch.steps] == [0.0] * 4 + [pytest.approx(0.5, abs=0.02)] * 4


def test_amount_and_switches_by_epoch() -> None:
    asked: list[Any] = []

    def amount(epoch: int) -> float:
        asked.append(epoch)
        return [0.0, 0.2, 0.3][epoch]

    callback = ModelPruning("l1_unstructured", amount=amount, apply_pruning=lambda epoch: epoch != 2,
                            use_lottery_ticket_hypothesis=lambda epoch: False)  # fmt: skip
    fit(callback)
    assert asked == [0, 1, 2]
    assert callback.sparsity == pytest.approx(0.2, abs=0.01)


def test_the_winning_ticket_begins_with_its_first_weights() -> None:
    class Starts(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                starts.append(weights(pl_module))

    starts: list[dict[str, Tensor]] = []
    watch = Watch()
    callback = ModelPruning("l1_unstructured", amount=0.5)
    _, module = fit(callback, Starts(), watch)
    first = starts[0]["net.0.weight"]
    for start in starts[1:]:
        kept = start["net.0.weight"] != 0
        assert 0 < kept.sum() < kept.numel()
        assert torch.equal(start["net.0.weight"], first * kept)
    # After the last epoch the trained weights stay.
    kept = module.net[0].weight != 0
    assert torch.equal(module.net[0].weight, watch.steps[-1]["net.0.weight"] * kept)
    assert not torch.equal(module.net[0].weight, first * kept)


def test_new_random_weights_for_the_ticket() -> None:
    class Starts(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                starts.append(weights(pl_module))

    starts: list[dict[str, Tensor]] = []
    callback = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.5, resample_parameters=True)
    watch = Watch()
    fit(callback, Starts(), watch, max_epochs=2)
    kept = starts[1]["net.0.weight"] != 0
    assert not torch.equal(starts[1]["net.0.weight"], starts[0]["net.0.weight"] * kept)
    assert not torch.equal(starts[1]["net.0.weight"], watch.steps[3]["net.0.weight"] * kept)
    assert torch.equal(starts[1]["net.0.bias"], watch.steps[3]["net.0.bias"])  # it is not pruned
    assert callback.state_dict()["initial"] == {}


@pytest.mark.parametrize("options", [{}, {"use_lottery_ticket_hypothesis": False}, {"resample_parameters": True}])
@pytest.mark.parametrize("stop", [2, 4, 6, 8, 9, 12])
def test_resume_is_bit_exact(tmp_path: Path, stop: int, options: Any) -> None:
    def run(watch: Callback, ckpt_path: Any = None) -> Any:
        torch.manual_seed(7)
        callback = ModelPruning("random_unstructured", amount=0.3, **options)
        return fit(callback, watch, ckpt_path=ckpt_path, max_epochs=4)[1]

    whole = run(Watch(stop, tmp_path / "c.ckpt"))
    assert torch.load(tmp_path / "c.ckpt", weights_only=True)["global_step"] == stop
    assert_same(run(Watch(), tmp_path / "c.ckpt"), whole)


@pytest.mark.parametrize("saves_first", [True, False])
def test_a_checkpoint_within_the_end_of_an_epoch_prunes_once(tmp_path: Path, saves_first: bool) -> None:
    class SaveAtEpochEnd(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "c.ckpt")

    def run(ckpt_path: Any = None, *more: Callback) -> Any:
        callback = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
        return fit(*([*more, callback] if saves_first else [callback, *more]), ckpt_path=ckpt_path)[1]

    whole = run(None, SaveAtEpochEnd())
    assert_same(run(tmp_path / "c.ckpt"), whole)


def test_checkpoints_and_the_module_have_plain_names(tmp_path: Path) -> None:
    names = list(net(Net).state_dict())
    saver = ModelCheckpoint(tmp_path, save_last=True)
    _, module = fit(ModelPruning("l1_unstructured"), saver)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert list(saved) == list(module.state_dict()) == names
    assert zeros(saved) == pytest.approx(0.875, abs=0.02)


def test_masks_can_be_left_to_torch(tmp_path: Path) -> None:
    callback = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False)
    trainer, module = fit(callback, max_epochs=1)
    assert prune.is_pruned(module)
    assert torch.equal(module.net[0].weight, module.net[0].weight_orig * module.net[0].weight_mask)
    trainer.save_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    plain = torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"]
    assert sorted(plain) == sorted(net(Net).state_dict())
    net(Net).load_state_dict(plain)
    # A further fit takes them over, and prunes what is left.
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(8, 2))
    assert callback.sparsity == pytest.approx(0.75, abs=0.02)
    callback.make_pruning_permanent(module)
    assert list(module.state_dict()) == list(net(Net).state_dict())
    assert zeros(module.state_dict()) == pytest.approx(0.75, abs=0.02)


def test_pruning_after_validation_leaves_sanity_checks_and_validate_alone() -> None:
    callback = ModelPruning("l1_unstructured", amount=0.5, prune_on_train_epoch_end=False)
    module = net(ValidatedNet)
    trainer = quiet(max_epochs=2, callbacks=[callback])
    trainer.fit(module, loader(8, 2), loader(4, 2))
    assert callback.sparsity == pytest.approx(0.75, abs=0.02)
    trainer.validate(module, loader(4, 2), verbose=False)
    assert callback.sparsity == pytest.approx(0.75, abs=0.02)


def test_the_log_says_how_much_is_pruned(caplog: Any) -> None:
    caplog.set_level("INFO")
    fit(ModelPruning("l1_unstructured", amount=0.5, verbose=2, parameter_names=["weight"]), max_epochs=1)
    assert "epoch 0: pruned 20 of 40 weights (50.00%)" in caplog.text
    assert "net.0.weight: pruned" in caplog.text


def test_parameters_are_chosen_by_pairs_names_and_a_subclass() -> None:
    class First(ModelPruning):
        def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
            return parameters_to_prune[:1]

    module = net(Net)
    callback = ModelPruning("l1_unstructured", [(module.net[2], "weight")], amount=0.5)
    fit(callback, module=module, max_epochs=1)
    assert zeros({"weight": module.net[0].weight}) == 0
    assert zeros({"weight": module.net[2].weight}) == 0.5
    fit(first := First("l1_unstructured"), max_epochs=1)
    assert list(first.state_dict()["masks"]) == ["net.0.weight"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruning_fn": "l1_unstructurd"}, r"did you mean 'l1_unstructured'"),
        ({"pruning_fn": 3}, "pruning_fn=3"),
        ({"pruning_fn": prune.L1Unstructured, "use_global_unstructured": False}, "needs use_global_unstructured=True"),
        ({"pruning_fn": prune.LnStructured}, "PRUNING_TYPE='structured'"),
        ({"pruning_fn": "ln_structured"}, "use_global_unstructured=True.*pruning_dim.*pruning_norm"),
        ({"pruning_fn": "random_structured", "use_global_unstructured": False}, "needs pruning_dim"),
        ({"pruning_fn": "l1_unstructured", "amount": 1.5, "verbose": 3}, "amount=1.5.*verbose=3"),
        ({"pruning_fn": "l1_unstructured", "apply_pruning": "yes"}, "apply_pruning='yes'"),
        ({"pruning_fn": "l1_unstructured", "parameter_names": "weight"}, "expected a list"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelPruning(**arguments)


def test_wrong_modules_are_refused() -> None:
    other = nn.Linear(2, 2)
    module = net(Net)
    with pytest.raises(ModuleError, match=r"Linear is not a submodule of Net.*has no parameter 'weigth'.*'weight'"):
        fit(ModelPruning("l1_unstructured", [(other, "weight"), (module.net[0], "weigth")]), module=module)
    with pytest.raises(ModuleError, match="no parameter named 'kernel'; its parameters are named bias, weight"):
        fit(ModelPruning("l1_unstructured", parameter_names=["kernel"]))
    structured = ModelPruning("ln_structured", use_global_unstructured=False, pruning_dim=0, pruning_norm=1)
    with pytest.raises(ModuleError, match=r"net\.0\.bias"):
        fit(structured)
    with pytest.raises(ConfigError, match="amount=1000"):
        fit(ModelPruning("l1_unstructured", amount=1000))
    with pytest.raises(ConfigError, match="in epoch 0, amount=2.0"):
        fit(ModelPruning("l1_unstructured", amount=lambda epoch: 2.0))


def test_masks_of_another_module_are_named(tmp_path: Path) -> None:
    fit(ModelPruning("l1_unstructured"), Watch(5, tmp_path / "c.ckpt"))
    module = net(Net)
    with pytest.raises(CheckpointError, match=r"masks do not fit.*net\.0\.weight"):
        fit(ModelPruning("l1_unstructured", [(module.net[2], "weight")]), module=module, ckpt_path=tmp_path / "c.ckpt")
