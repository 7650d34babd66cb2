"""`finetune` on one process: the folder of a run, the report, the global batch, resuming, and everything refused."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from recipe_models import import_libraries
from recipe_runs import largest_difference, make_inputs, poison, same_bits, settings, weights
from recipe_texts import write_jsonl

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.errors import ConfigError, NonFiniteError
from loopwright.loggers import CSVLogger
from loopwright.recipes.exporting.export import export_run
from loopwright.recipes.model.settings import LoraSettings
from loopwright.recipes.run_folder import TrainingFolder
from loopwright.recipes.train import check, finetune

# Any in this file: settings.


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_libraries()
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_run_writes_its_folder_and_reports_what_it_did(inputs: Path, tmp_path: Path) -> None:
    report = finetune(settings(inputs, tmp_path / "run", val_fraction=0.2, epochs=2, micro_batch=2))

    assert report is not None
    assert report.is_complete
    assert report.steps == report.num_steps == 2 * -(-report.data["rows"] // 2)
    assert report.trained_tokens == 2 * report.data["trained_tokens"]
    assert report.positions == 2 * (report.data["tokens"] + report.data["padded_tokens"])
    assert report.train_loss is not None
    assert report.val_loss is not None
    assert report.best_val_loss is not None
    assert report.parameters > 0 < report.frozen_parameters
    assert {"recipe.yaml", "tokenizer", "checkpoints", "report.json", "report.txt", "cache"} <= {
        one.name for one in (tmp_path / "run").iterdir()
    }
    assert {one.name for one in (tmp_path / "run" / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == report.steps
    assert f"{report.trained_tokens:,} trained" in report.describe()


def test_the_result_is_exported_once(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[Path] = []

    def counted(run: Path, to: Path) -> None:
        exported.append(to)
        export_run(run, to)

    monkeypatch.setattr("loopwright.recipes.train.export_run", counted)
    finetune(settings(inputs, tmp_path / "run", steps=1))
    assert len(exported) == 1


@pytest.mark.parametrize("packing", [True, False])
def test_weights_do_not_depend_on_the_split_of_the_global_batch(inputs: Path, tmp_path: Path, packing: bool) -> None:
    found = {}
    for micro in (1, 2, 8):
        run = tmp_path / str(micro)
        finetune(settings(inputs, run, global_batch=8, micro_batch=micro, packing=packing, epochs=2))
        found[micro] = weights(run)

    # Sums of float32 in another order: 1e-7 relative, grown over the steps.
    assert largest_difference(found[1], found[8]) < 1e-6
    assert largest_difference(found[2], found[8]) < 1e-6


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest_sizes(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of 3 .* such as 6 or 9, got 8"):
        finetune(settings(inputs, tmp_path / "run", global_batch=8, micro_batch=3))


class Stop(lw.Callback):
    """Ends a training in the middle of its first epoch."""

    def on_train_batch_end(self, trainer: lw.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 3


def test_the_same_settings_continue_the_run_with_the_same_bits(inputs: Path, tmp_path: Path) -> None:
    def given(run: str, **trainer: Any) -> Any:
        return settings(inputs, tmp_path / run, micro_batch=1, save_every=2, epochs=2, trainer=trainer)

    finetune(given("whole"))
    stopped = finetune(given("parts", callbacks=[Stop()]))
    assert stopped is not None
    assert stopped.steps == 3
    assert "not complete" in stopped.describe()
    report = finetune(given("parts"))

    assert report is not None
    assert report.is_complete
    assert report.trained_tokens == 2 * report.data["trained_tokens"]
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


class Interrupt(lw.Callback):
    """Sends the signal of Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: lw.Trainer, *others: Any) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(signal.SIGINT)


def test_an_interruption_loses_no_step(inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, shared = tmp_path / "run", {"steps": 5, "micro_batch": 2}
    for step in (2, 3):
        caplog.clear()
        with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
            finetune(settings(inputs, run, **shared, trainer={"callbacks": [Interrupt(step)]}))
        assert [one.name for one in (run / "checkpoints").iterdir()] == ["interrupted.ckpt"]
        assert "continue with the same command" in caplog.text
    resumed = finetune(settings(inputs, run, **shared))
    alone = finetune(settings(inputs, tmp_path / "alone", **shared))

    assert resumed is not None
    assert alone is not None
    assert resumed.trained_tokens == alone.trained_tokens  # no step twice
    assert same_bits(weights(run), weights(tmp_path / "alone"))
    assert [one.name for one in (run / "checkpoints").iterdir()] == ["last.ckpt"]


class NaNGradient(lw.Callback):
    """Makes a gradient NaN at the third step, whose loss is finite."""

    def on_before_optimizer_step(self, trainer: lw.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 2:
            next(one for one in pl_module.parameters() if one.grad is not None).grad.fill_(float("nan"))


def last_step(run: Path) -> int:
    """Return the step of the last checkpoint, whose weights must be finite; no other checkpoint may be there."""
    assert [one.name for one in (run / "checkpoints").iterdir()] == ["last.ckpt"]
    assert all(bool(one.isfinite().all()) for one in weights(run).values())
    return int(storage.load(run / "checkpoints" / "last.ckpt")["global_step"])


def test_a_loss_that_is_not_finite_ends_the_training_with_its_records(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, "Question 5 ")
    chosen = {"packing": False, "micro_batch": 1, "global_batch": 2, "save_every": 1, "epochs": 1}
    with pytest.raises(NonFiniteError, match=r"loss was nan at batch (\d+) .*chats.jsonl, record 6; now") as caught:
        finetune(settings(inputs, tmp_path / "run", **chosen))
    batch = int(str(caught.value).partition("at batch ")[2].partition(" ")[0])
    assert batch > 2, "the checkpoint is of an earlier step"
    assert last_step(tmp_path / "run") == batch // 2  # the step before


@pytest.mark.parametrize("save_every", [1, 2])
def test_weights_that_are_not_finite_are_in_no_checkpoint(inputs: Path, tmp_path: Path, save_every: int) -> None:
    given = settings(
        inputs, tmp_path / "run", packing=False, micro_batch=2, steps=8, save_every=save_every, seed=3,
        trainer={"callbacks": [NaNGradient()]},
    )  # fmt: skip
    expected = {
        1: "Expected finite weights after step 3, got NaN",  # before the next loss
        2: r"at batch 3 .*, after a step whose gradients had a norm of nan: .*chats.jsonl, records \d+, \d+; now",
    }
    with pytest.raises(NonFiniteError, match=expected[save_every]):
        finetune(given)
    assert last_step(tmp_path / "run") == 2


def test_learning_rate_and_norm_of_gradients_are_logged(inputs: Path, tmp_path: Path) -> None:
    chosen = {"learning_rate": 1e-3, "warmup": 0.5, "schedule": "linear", "steps": 4}
    logger = CSVLogger(tmp_path / "run", name="logs", version="")
    finetune(settings(inputs, tmp_path / "run", trainer={"log_every_n_steps": 1, "logger": logger}, **chosen))
    with (tmp_path / "run" / "logs" / "metrics.csv").open() as rows:
        found = [row for row in csv.DictReader(rows) if row["learning_rate"]]
    # Of the step itself, and not of the next one.
    assert [float(row["learning_rate"]) for row in found] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])
    assert all(float(row["grad_norm"]) > 0 for row in found)


def test_an_adapter_of_the_output_layer_is_exported(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "head"
    report = finetune(settings(inputs, run, lora=LoraSettings(targets=["lm_head"]), steps=1))
    assert report is not None
    card = (run / "model" / "README.md").read_text()
    assert "\n# head\n" in card  # the name of the run
    assert "\nlearning_rate: 0.0002\n" in card
    assert TrainingFolder(run).read()["used"] == {  # type: ignore[index]
        "learning_rate": 0.0002, "dtype": "float32", "strategy": "SingleDeviceStrategy", "devices": 1,
        "precision": "32-true",
    }  # fmt: skip
    assert {one.name for one in run.iterdir()}.isdisjoint({"model.new"})
    assert export_run(run, tmp_path / "merged", merge=True).effect > 0  # type: ignore[operator]


def test_a_complete_run_is_not_trained_again(inputs: Path, tmp_path: Path) -> None:
    first = finetune(settings(inputs, tmp_path / "run", steps=2))
    before = (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes()
    again = finetune(settings(inputs, tmp_path / "run", steps=2))

    assert first is not None
    assert again is not None
    assert again.steps == 2
    assert again.trained_tokens == first.trained_tokens
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes() == before


def test_other_settings_are_refused_by_name_unless_forced(inputs: Path, tmp_path: Path) -> None:
    finetune(settings(inputs, tmp_path / "run", steps=1, micro_batch=2))
    with pytest.raises(ConfigError) as caught:
        finetune(settings(inputs, tmp_path / "run", steps=2, learning_rate=1e-3, global_batch=4))
    for name in ("steps: Expected 1,", "learning_rate: Expected nothing,", "global_batch: Expected auto,"):
        assert name in str(caught.value)

    finetune(settings(inputs, tmp_path / "run", steps=1, micro_batch=1, global_batch=2))  # the same global batch
    forced = finetune(settings(inputs, tmp_path / "run", steps=2, learning_rate=1e-3, resume="force"))
    assert forced is not None
    assert forced.steps == 2
    assert forced.global_batch == 2


def test_a_training_that_ends_within_an_epoch_is_validated_at_its_end(inputs: Path, tmp_path: Path) -> None:
    report = finetune(settings(inputs, tmp_path / "run", steps=2, val_fraction=0.2, max_length=64))
    every = finetune(settings(inputs, tmp_path / "every", steps=2, val_fraction=0.2, max_length=64, val_every=2))

    assert report is not None
    assert every is not None
    assert report.epochs < 1
    assert report.val_loss == every.val_loss == every.best_val_loss is not None
    assert report.train_loss == every.train_loss is not None


def test_tokens_are_rounded_up_to_steps(inputs: Path, tmp_path: Path) -> None:
    report = finetune(settings(inputs, tmp_path / "run", tokens=200, micro_batch=1))

    assert report is not None
    mean = report.data["tokens"] / report.data["rows"]
    assert (report.steps - 1) * mean < 200 <= report.steps * mean
    assert report.is_complete


def test_full_finetuning_with_classes_of_the_user(inputs: Path, tmp_path: Path) -> None:
    report = finetune(
        settings(
            inputs, tmp_path / "run", method="full", steps=2, optimizer={"class_path": "SGD", "init_args": {"lr": 0.1}},
            lr_scheduler={"class_path": "StepLR", "init_args": {"step_size": 1}},
        )
    )  # fmt: skip
    assert report is not None
    assert report.frozen_parameters == 0


def test_all_mistakes_are_named_at_once(inputs: Path, tmp_path: Path) -> None:
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [{"question": "Hi"}])
    with pytest.raises(ConfigError) as caught:
        finetune(
            settings(
                inputs, tmp_path / "run", data=str(wrong), max_length=4096, epochs=1, steps=3, global_batch=7,
                micro_batch=2, optimizer="AdamV", schedule="cosin", val_every=3, resume="yes", method="full",
                quantize="nf4", trainer={"max_steps": 4, "max_tim": 3}, strategy="dpd",
            )
        )  # fmt: skip
    text = str(caught.value)
    for part in (
        f"{wrong}:1: Expected",
        "got the keys question",
        "max_length: Expected at most 128, the model's, got 4096",
        "steps: Expected one of epochs, steps, tokens, got epochs and steps",
        "optimizer: no Optimizer is called 'AdamV' (did you mean 'Adam'?)",
        "schedule: Expected one of constant, cosine, linear, polynomial, wsd, got 'cosin' (did you mean 'cosine'?)",
        "val_every: Expected val_data or val_fraction beside it, got neither",
        "resume: Expected one of auto, force, got 'yes'",
        "quantize: Expected method=lora beside it",
        "trainer.max_steps: Expected the setting steps instead",
        "trainer.max_tim: Expected an argument of the Trainer, got max_tim (did you mean 'max_time'?)",
    ):
        assert part in text
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_a_wrong_setting_is_named_before_the_data_are_tokenized(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="schedule: Expected one of") as caught:
        finetune(settings(inputs, tmp_path / "run", schedule="cosin"))
    assert "got 1 problem" in str(caught.value)
    assert check(settings(inputs, tmp_path / "run")) == []
    assert not list(tmp_path.rglob("tokens-*"))
    assert not list(tmp_path.rglob("rows-*"))


def test_a_tokenizer_larger_than_the_embedding_is_refused(inputs: Path, tmp_path: Path) -> None:
    from recipe_models import save_model
    from recipe_texts import small_tokenizer

    model = save_model(tmp_path / "small", vocab_size=300)
    small_tokenizer().save_pretrained(str(model))
    with pytest.raises(ConfigError, match="tokenizer: Expected at most 300 tokens, .* got 336"):
        finetune(settings(inputs, tmp_path / "run", model=model))


@pytest.mark.parametrize("content", ["file", "others", "pretrain"])
def test_a_folder_of_something_else_is_refused(inputs: Path, tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    if content == "file":
        run.write_text("")
    else:
        run.mkdir()
        name, text = ("thesis.tex", "") if content == "others" else ("recipe.yaml", "command: pretrain\nsettings: {}\n")
        (run / name).write_text(text)
    expected = {"file": "Expected a folder, got the file", "others": "with thesis.tex", "pretrain": "a run of pretrain"}
    with pytest.raises(ConfigError, match=expected[content]):
        finetune(settings(inputs, run))


def test_a_missing_model_is_named_with_the_mistakes_of_settings(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        finetune(settings(inputs, tmp_path / "run", model=tmp_path / "none", epochs=0))
    assert "epochs: Expected at least 1, got 0" in str(caught.value)
    assert f"model: Expected an existing path, got {tmp_path / 'none'}" in str(caught.value)
