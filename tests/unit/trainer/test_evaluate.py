"""validate, test and predict: results, order, weights, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Net, RecordingLogger, Unsized, ValidatedNet, assert_same, loader, net, quiet, train_by_hand, weights

import loopwright as lw
from loopwright.callbacks import Callback
from loopwright.errors import ConfigError, DataError, LoopwrightError, ModuleError


def mean_loss(module: Net, data: Any) -> float:
    x, y = data.dataset.tensors
    with torch.no_grad():
        return torch.nn.functional.mse_loss(module(x), y).item()


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "key"), [("validate", "val_loss"), ("test", "test_loss")])
def test_results_are_plain_numbers_one_dict_per_loader(verb: str, key: str) -> None:
    module, data = net(ValidatedNet), loader(7, 3)
    results = getattr(quiet(), verb)(module, data, verbose=False)
    assert results == [{key: pytest.approx(mean_loss(module, data), rel=1e-6)}]
    assert type(results[0][key]) is float


def test_verbose_prints_a_table_and_silence_none(capsys: Any) -> None:
    quiet().test(net(ValidatedNet), loader())
    assert "test_loss" in capsys.readouterr().out
    quiet().test(net(ValidatedNet), loader(), verbose=False)
    assert capsys.readouterr().out == ""


def test_predictions_come_in_the_order_of_the_data() -> None:
    module, data = net(ValidatedNet), loader(7, 3)
    predictions = quiet().predict(module, data)
    assert isinstance(predictions, list)
    assert [len(part) for part in predictions] == [3, 3, 1]
    with torch.no_grad():
        assert torch.equal(torch.cat(predictions), torch.cat([module(batch[0]) for batch in data]))


def test_several_loaders_give_a_list_of_lists() -> None:
    class Several(ValidatedNet):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[int, int]:  # type: ignore[override]
            return dataloader_idx, batch_idx

    predictions = quiet().predict(net(Several), [loader(4), loader(2)])
    assert predictions == [[(0, 0), (0, 1)], [(1, 0)]]


def test_a_dict_of_loaders_is_read_in_turn() -> None:
    class Several(ValidatedNet):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
            self.log("n", 1.0, reduce_fx="sum")

    results = quiet().test(net(Several), {"a": loader(4), "b": loader(2)}, verbose=False)
    assert results == [{"n/dataloader_idx_0": 2.0}, {"n/dataloader_idx_1": 1.0}]


def test_predict_without_a_step_calls_the_module() -> None:
    module = net(Net)
    batches = [batch[0] for batch in loader()]
    predictions = quiet().predict(module, batches)
    with torch.no_grad():
        assert torch.equal(torch.cat(predictions), torch.cat([module(x) for x in batches]))  # type: ignore[arg-type]


def test_return_predictions_false_keeps_nothing() -> None:
    assert quiet().predict(net(ValidatedNet), loader(), return_predictions=False) is None


@pytest.mark.parametrize(("verb", "name"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.5, 2), (None, 4), (0, 0)])
def test_each_verb_has_its_limit(verb: str, name: str, limit: Any, batches: int) -> None:
    seen: list[int] = []

    class Counting(Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append(1)

        on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    trainer = quiet(**{f"limit_{name}_batches": limit}, callbacks=Counting())
    getattr(trainer, verb)(net(ValidatedNet), loader(8))
    assert len(seen) == batches
    assert getattr(trainer, f"num_{name}_batches") == [batches]


def test_limits_of_a_combined_loader_are_kept() -> None:
    class Several(ValidatedNet):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> int:  # type: ignore[override]
            return batch_idx

    combined = lw.CombinedLoader([loader(8), loader(8)], "sequential")
    combined.limits = [1, 2]
    assert quiet().predict(net(Several), combined) == [[0], [0, 1]]
    assert quiet(limit_predict_batches=1).predict(net(Several), combined) == [[0], [0]]


def test_data_of_unknown_length_is_read_to_its_end() -> None:
    predictions = quiet().predict(net(ValidatedNet), Unsized(list(loader(6))))
    assert len(predictions) == 3  # type: ignore[arg-type]


def test_loaders_come_from_the_module_or_a_data_module() -> None:
    class Own(ValidatedNet):
        def val_dataloader(self) -> Any:
            return loader(4)

        def test_dataloader(self) -> Any:
            return loader(4)

        def predict_dataloader(self) -> Any:
            return loader(4)

    class Data(lw.DataModule):
        def predict_dataloader(self) -> Any:
            return loader(6)

    trainer, module = quiet(), net(Own)
    assert set(trainer.validate(module, verbose=False)[0]) == {"val_loss"}
    assert set(trainer.test(module, verbose=False)[0]) == {"test_loss"}
    assert len(trainer.predict(module)) == 2  # type: ignore[arg-type]
    assert len(trainer.predict(module, Data())) == 3  # type: ignore[arg-type]
    assert len(trainer.predict(module, datamodule=Data())) == 3  # type: ignore[arg-type]


# --- what evaluation leaves alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_weights_and_statistics_stay_as_they_are(verb: str) -> None:
    module = net(ValidatedNet, norm=True, dropout=0.5)
    before = weights(module)
    getattr(quiet(), verb)(module, loader())
    assert_same(module, before)


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_modes_are_given_back(verb: str) -> None:
    module = net(ValidatedNet, norm=True)
    module.net[2].eval()
    getattr(quiet(), verb)(module, loader(), verbose=False)
    assert [child.training for child in module.net] == [True, True, False, True]


def test_a_fit_after_a_prediction_trains_in_training_mode() -> None:
    module = net(ValidatedNet, dropout=0.5)
    quiet().predict(module, loader())
    expected = net(Net, dropout=0.5)
    train_by_hand(expected, loader())
    torch.manual_seed(1)
    net(Net, dropout=0.5)  # the generator is where it was when `expected` began to train
    with pytest.warns(UserWarning, match="no loader to validate"):
        quiet(max_epochs=1).fit(module, loader())
    assert_same(module, expected)


def test_evaluation_between_two_fits_keeps_the_counts() -> None:
    trainer, module = quiet(max_epochs=1), net(ValidatedNet)
    trainer.fit(module, loader(), loader())
    trainer.validate(module, loader(), verbose=False)
    trainer.test(module, loader(), verbose=False)
    assert (trainer.current_epoch, trainer.global_step) == (1, 4)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader())
    assert (trainer.current_epoch, trainer.global_step) == (2, 8)


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_gradients_are_off(verb: str, inference_mode: bool) -> None:
    class Watched(ValidatedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch.is_inference_mode_enabled() == inference_mode
            assert not torch.is_grad_enabled()

        test_step = predict_step = validation_step

    getattr(quiet(inference_mode=inference_mode), verb)(net(Watched), loader())
    assert torch.is_grad_enabled()


class Forces(Net):
    """A network whose gradient with respect to its input is evaluated."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch[0].detach().requires_grad_()
            (force,) = torch.autograd.grad(self(x).sum(), x)
        assert force.shape == x.shape

    test_step = predict_step = validation_step


class OutsideOfInferenceMode(Forces):
    """The same, with the batch, which is an inference tensor."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False):
            super().validation_step(batch, batch_idx)

    test_step = predict_step = validation_step


@pytest.mark.parametrize("kind", [Forces, OutsideOfInferenceMode])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_gradients_need_inference_mode_to_be_off_and_the_error_says_so(verb: str, kind: type[Net]) -> None:
    with pytest.raises(RuntimeError, match=r"require grad|requires_grad|[Ii]nference tensor") as raised:
        getattr(quiet(), verb)(net(kind), loader())
    assert f"trainer.{verb} runs in inference mode" in raised.value.__notes__[-1]
    advice = "pass Trainer(inference_mode=False), and compute gradients within `with torch.enable_grad():`"
    assert raised.value.__notes__[-1].endswith(advice)
    getattr(quiet(inference_mode=False), verb)(net(kind), loader())


def test_gradients_without_enable_grad_are_an_error_that_names_it() -> None:
    class Backward(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0]).sum().backward()

    with pytest.raises(RuntimeError) as raised:
        quiet(inference_mode=False).test(net(Backward), loader())
    assert raised.value.__notes__[-1].endswith("To fix it: compute gradients within `with torch.enable_grad():`")


def test_predictions_can_be_trained_on_without_inference_mode() -> None:
    (prediction, *_) = quiet(inference_mode=False).predict(net(ValidatedNet), loader())  # type: ignore[misc]
    assert not prediction.is_inference()


# --- checkpoints and records -----------------------------------------------------------------------------------------


def test_without_a_module_the_best_checkpoint_is_evaluated(tmp_path: Any) -> None:
    module = net(ValidatedNet)
    trainer = quiet(max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(module, loader(), loader())
    data = loader(6, seed=3)
    expected = mean_loss(module, data)
    with torch.no_grad():
        module.net[0].weight.zero_()
    with pytest.warns(UserWarning, match="loads the best checkpoint"):
        (result,) = trainer.test(dataloaders=data, verbose=False)
    assert result["test_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_validation_of_a_checkpoint_is_recorded_at_its_step(tmp_path: Any) -> None:
    module = net(ValidatedNet)
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    logger = RecordingLogger()
    quiet(logger=logger).validate(net(ValidatedNet), loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    ((step, row),) = logger.rows
    assert (step, row["epoch"]) == (7, 2)


def test_weights_of_a_checkpoint_are_loaded_and_missing_ones_are_listed(tmp_path: Any) -> None:
    class Wider(ValidatedNet):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(2, 2)

    trainer, module = quiet(max_epochs=1), net(ValidatedNet, seed=9)
    trainer.fit(module, loader(), loader())
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    other = net(ValidatedNet)
    quiet().validate(other, loader(), ckpt_path=path, verbose=False)
    assert_same(other, module)
    with pytest.raises(LoopwrightError, match=r"more\.(weight|bias)"):
        quiet().validate(net(Wider), loader(), ckpt_path=path, verbose=False)
    lenient = net(Wider)
    lenient.strict_loading = False
    quiet().validate(lenient, loader(), ckpt_path=path, verbose=False)
    assert torch.equal(lenient.net[0].weight, module.net[0].weight)


def test_loading_weights_keeps_requires_grad(tmp_path: Any) -> None:
    trainer, module = quiet(max_epochs=1), net(ValidatedNet)
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    frozen = net(ValidatedNet)
    frozen.net[0].weight.requires_grad = False
    quiet().validate(frozen, loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert [p.requires_grad for p in frozen.parameters()] == [False, True, True, True]


def test_the_loggers_are_finalized(tmp_path: Any) -> None:
    logger = RecordingLogger()
    trainer = quiet(max_epochs=1, logger=logger)
    trainer.fit(net(ValidatedNet), loader(), loader())
    assert logger.statuses == ["success"]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_without_a_module_and_without_an_earlier_run_there_is_nothing_to_do() -> None:
    with pytest.raises(ModuleError, match="without a module"):
        quiet().test(dataloaders=loader())


def test_without_a_checkpoint_callback_there_is_no_best() -> None:
    trainer, module = quiet(max_epochs=1), net(ValidatedNet)
    trainer.fit(module, loader(), loader())
    with pytest.warns(UserWarning, match="best"), pytest.raises(ConfigError, match="ModelCheckpoint"):
        trainer.test(dataloaders=loader())
    with pytest.raises(ConfigError, match="ModelCheckpoint"):
        trainer.test(module, loader(), ckpt_path="best")


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_missing_step_is_an_error(verb: str) -> None:
    name = {"validate": "validation"}.get(verb, verb)
    with pytest.raises(ModuleError, match=rf"trainer.{verb} needs Net.{name}_step"):
        getattr(quiet(), verb)(net(Net), loader())


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_missing_loader_is_an_error(verb: str) -> None:
    with pytest.raises(ModuleError, match=f"trainer.{verb} has no data"):
        getattr(quiet(), verb)(net(ValidatedNet))


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_loaders_and_a_data_module_together_are_an_error(verb: str) -> None:
    with pytest.raises(ConfigError, match="both dataloaders and datamodule"):
        getattr(quiet(), verb)(net(ValidatedNet), loader(), datamodule=lw.DataModule())


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize("data", [3, object()])
def test_what_cannot_be_iterated_is_an_error(verb: str, data: Any) -> None:
    with pytest.raises((DataError, ModuleError), match="can be iterated"):
        getattr(quiet(), verb)(net(ValidatedNet), data)


def test_predict_refuses_to_combine() -> None:
    with pytest.raises(ConfigError, match="mode='min_size'"):
        quiet().predict(net(ValidatedNet), lw.CombinedLoader([loader(), loader()], "min_size"))


def test_a_step_that_takes_too_much_is_an_error() -> None:
    class Greedy(ValidatedNet):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int, more: int) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ModuleError, match="takes other arguments than the trainer passes"):
        quiet().test(net(Greedy), loader())


# --- batches ---------------------------------------------------------------------------------------------------------


def test_transfer_hooks_run_in_order_for_every_stage() -> None:
    seen: list[str] = []

    class Moving(ValidatedNet):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append("before")
            return batch

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            seen.append("move")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append("after")
            return [batch[0] * 0, batch[1] * 0]

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append("step")
            return batch[0]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append("step")
            assert (batch[0] == 0).all()
            return self.loss(batch)

    assert (torch.cat(quiet().predict(net(Moving), loader(2))) == 0).all()  # type: ignore[arg-type]
    assert seen == ["before", "move", "after", "step"]
    seen.clear()
    quiet(max_steps=1, limit_val_batches=0).fit(net(Moving), loader(2))
    assert seen == ["before", "move", "after", "step"]


def test_a_data_modules_transfer_hook_wins() -> None:
    class Data(lw.DataModule):
        def predict_dataloader(self) -> Any:
            return loader(2)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return ["data module"]

    class Own(ValidatedNet):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    assert quiet().predict(net(Own), Data()) == [["data module"]]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_custom_collation_and_batches_of_other_things(batch_size: int | None) -> None:
    class Item:
        def __init__(self, x: Tensor) -> None:
            self.x, self.moved = x, False

        def to(self, device: Any) -> Item:
            self.moved = True
            return self

    items = [(Item(torch.ones(2)), "name", 3)] * 4
    data = torch.utils.data.DataLoader(
        items,  # type: ignore[arg-type]
        batch_size=batch_size,
        collate_fn=(lambda batch: batch),
    )

    class Looking(ValidatedNet):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            items = batch if batch_size else [batch]
            assert all(item.moved and name == "name" and number == 3 for item, name, number in items)
            return len(items)

    assert quiet().predict(net(Looking), data) == ([2, 2] if batch_size else [1] * 4)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_limit_of_no_batches_calls_no_hook(verb: str) -> None:
    calls: list[str] = []

    class Noting(lw.Callback):
        pass

    for stage in ("validation", "test", "predict"):
        for moment in ("start", "epoch_start", "epoch_end", "end"):
            name = f"on_{stage}_{moment}"
            setattr(Noting, name, lambda self, trainer, pl_module, name=name: calls.append(name))
    limit = {f"limit_{verb[:3] if verb == 'validate' else verb}_batches": 0}
    trainer = quiet(callbacks=[Noting()], **limit)  # type: ignore[arg-type]
    assert not getattr(trainer, verb)(net(ValidatedNet), loader())
    assert not calls
