"""The order of hooks in whole runs, written out: one callback `C`, the module `M`, the data module `D`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import loopwright as lw

from .order_model import Plan, Schedule
from .order_recorder import EvaluatingModule, Journal, RecordingData, RecordingModule, do, make_module, make_trainer

PEOPLE = {"first": "C", "module": "M", "data": "D"}

# `CM.x` is the callback's x, then the module's; `<name>` stands for a part that comes again and again.
PARTS = {
    "begin": "M.configure_callbacks, M.prepare_data, CM.setup, M.configure_model",
    "end": "CM.on_train_end, CM.on_fit_end, CM.teardown",
    "xfer": "M.on_before_batch_transfer, M.transfer_batch_to_device, M.on_after_batch_transfer",
    "take": "<xfer>, CM.on_train_batch_start, M.training_step",
    "zero": "CM.on_before_zero_grad, M.optimizer_zero_grad",
    "bwd": "CM.on_before_backward, M.backward, CM.on_after_backward",
    "step": "CM.on_before_optimizer_step, M.configure_gradient_clipping, M.optimizer_step",
    "window": "<take>, <zero>, <bwd>, <step>",
    "val-open": "M.on_validation_model_eval, CM.on_validation_start, CM.on_validation_epoch_start",
    "val-batch": "<xfer>, CM.on_validation_batch_start, M.validation_step, CM.on_validation_batch_end",
    "val-close": "CM.on_validation_epoch_end, CM.on_validation_end, M.on_validation_model_train",
    "validate": "<val-open>, <val-batch>, <val-close>",
    "save": "C.state_dict, CM.on_save_checkpoint",
    "load": "M.on_load_checkpoint, C.on_load_checkpoint, C.load_state_dict",
}


def written_out(text: str) -> list[str]:
    """Return the hooks of a trace, without abbreviations."""
    while "<" in text:
        text = re.sub(r"<([a-z-]+)>", lambda match: PARTS[match[1]], text)
    found = []
    for word in re.split(r"[\s,]+", text.strip()):
        who, hook = word.split(".")
        found += [f"{person}.{hook}" for person in who]
    return found


def trace(journal: Journal) -> list[str]:
    return [f"{PEOPLE[call.who]}.{call.hook}" for call in journal.calls if call.who in PEOPLE]


def fit(plan: Plan, **more: Any) -> tuple[Journal, lw.Trainer]:
    journal = Journal()
    trainer = make_trainer(plan, journal, **more)
    trainer.fit(make_module(plan, journal))
    return journal, trainer


def test_fit_with_accumulation_validation_and_checkpoints(tmp_path: Path) -> None:
    plan = Plan(
        3, validation=(3,), accumulate_grad_batches=2, max_epochs=2, num_sanity_val_steps=1,
        schedules=(Schedule("epoch", 1),),
    )  # fmt: skip
    journal = Journal()
    trainer = make_trainer(plan, journal, enable_checkpointing=True, default_root_dir=tmp_path)

    trainer.fit(make_module(plan, journal))

    epoch = """
        CM.on_train_epoch_start,
        <take>, <zero>, <bwd>, CM.on_train_batch_end, <take>, <bwd>, <step>, CM.on_train_batch_end,
        <window>, M.lr_scheduler_step, CM.on_train_batch_end,
        M.on_validation_model_zero_grad, <val-open>, <val-batch>, <val-batch>, <val-batch>, <val-close>,
        CM.on_train_epoch_end, <save>"""
    assert trace(journal) == written_out(f"""
        <begin>, M.configure_optimizers, CM.on_fit_start,
        C.on_sanity_check_start, M.val_dataloader, <validate>, C.on_sanity_check_end,
        M.train_dataloader, CM.on_train_start, {epoch}, {epoch}, <end>""")
    assert trainer.global_step == 4
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["epoch=1-step=4.ckpt"]


def test_fit_with_a_validation_within_the_epoch() -> None:
    journal, _ = fit(Plan(3, validation=(1,), max_epochs=1, val_check_interval=2, schedules=(Schedule("epoch", 1),)))

    assert trace(journal) == written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, M.val_dataloader, CM.on_train_start,
        CM.on_train_epoch_start, <window>, CM.on_train_batch_end, <window>, CM.on_train_batch_end,
        M.on_validation_model_zero_grad, <validate>,
        <window>, M.lr_scheduler_step, CM.on_train_batch_end, CM.on_train_epoch_end, <end>""")


def test_a_validation_that_falls_due_within_a_window_comes_right_after_it() -> None:
    plan = Plan(4, validation=(1,), max_epochs=1, val_check_interval=2, accumulate_grad_batches=3)

    journal, _ = fit(plan)

    assert trace(journal) == written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, M.val_dataloader, CM.on_train_start,
        CM.on_train_epoch_start, <take>, <zero>, <bwd>, CM.on_train_batch_end, <take>, <bwd>, CM.on_train_batch_end,
        <take>, <bwd>, <step>, CM.on_train_batch_end, M.on_validation_model_zero_grad, <validate>,
        <window>, CM.on_train_batch_end, M.on_validation_model_zero_grad, <validate>, CM.on_train_epoch_end, <end>""")


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation(verb: str) -> None:
    plan, journal = Plan(1, validation=(1,)), Journal()
    trainer = make_trainer(plan, journal)

    getattr(trainer, verb)(EvaluatingModule(plan, journal))

    stage = {"validate": "validation"}.get(verb, verb)
    loader = {"validate": "val"}.get(verb, verb)
    last = "" if verb == "predict" else f"M.on_{stage}_model_train,"
    assert trace(journal) == written_out(f"""
        <begin>, M.{loader}_dataloader, M.on_{stage}_model_eval, CM.on_{stage}_start, CM.on_{stage}_epoch_start,
        <xfer>, CM.on_{stage}_batch_start, M.{stage}_step, CM.on_{stage}_batch_end,
        CM.on_{stage}_epoch_end, CM.on_{stage}_end, {last} CM.teardown""")


def test_an_exception_in_a_step() -> None:
    plan, journal = Plan(3, max_epochs=1), Journal()
    module = make_module(plan, journal)
    module.error = ("training_step", 1)

    with pytest.raises(ZeroDivisionError) as caught:
        make_trainer(plan, journal).fit(module)

    assert trace(journal) == written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, CM.on_train_start,
        CM.on_train_epoch_start, <window>, CM.on_train_batch_end, <take>, C.on_exception""")
    assert "training_step" in caught.value.__notes__[0]


def test_resume_after_an_epoch(tmp_path: Path) -> None:
    plan = Plan(
        1, validation=(1,), max_epochs=1, num_sanity_val_steps=1, schedules=(Schedule("epoch", 1),),
    )  # fmt: skip
    _, trainer = fit(plan)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    plan, journal = replace(plan, max_epochs=2), Journal()

    make_trainer(plan, journal).fit(make_module(plan, journal), ckpt_path=tmp_path / "some.ckpt")

    assert trace(journal) == written_out("""
        <begin>, <load>, M.configure_optimizers, CM.on_fit_start,
        C.on_sanity_check_start, M.val_dataloader, <validate>, C.on_sanity_check_end,
        M.train_dataloader, CM.on_train_start, CM.on_train_epoch_start, <window>, M.lr_scheduler_step,
        CM.on_train_batch_end, M.on_validation_model_zero_grad, <validate>, CM.on_train_epoch_end, <end>""")


def test_resume_within_an_epoch_checks_nothing_and_does_not_begin_the_epoch_again(tmp_path: Path) -> None:
    plan = Plan(2, validation=(1,), max_epochs=1, num_sanity_val_steps=1)
    journal = Journal()
    trainer = make_trainer(plan, journal)
    do(trainer, "late", "on_train_batch_end", 0, lambda trainer: trainer.save_checkpoint(tmp_path / "some.ckpt"))
    trainer.fit(make_module(plan, journal))
    journal = Journal()

    make_trainer(plan, journal).fit(make_module(plan, journal), ckpt_path=tmp_path / "some.ckpt")

    assert trace(journal) == written_out("""
        <begin>, <load>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, M.val_dataloader,
        CM.on_train_start, <window>, CM.on_train_batch_end, M.on_validation_model_zero_grad, <validate>,
        CM.on_train_epoch_end, <end>""")
    assert [call.detail for call in journal.calls if call.hook == "training_step"] == [(1,)]


def test_evaluation_of_a_checkpoint(tmp_path: Path) -> None:
    plan = Plan(1, validation=(1,), max_epochs=1)
    _, trainer = fit(plan)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    journal = Journal()

    make_trainer(plan, journal).test(EvaluatingModule(plan, journal), ckpt_path=tmp_path / "some.ckpt")

    assert trace(journal) == written_out("""
        <begin>, <load>, M.test_dataloader, M.on_test_model_eval, CM.on_test_start, CM.on_test_epoch_start,
        <xfer>, CM.on_test_batch_start, M.test_step, CM.on_test_batch_end, CM.on_test_epoch_end, CM.on_test_end,
        M.on_test_model_train, CM.teardown""")


@pytest.mark.parametrize(("weights_only", "expected"), [(False, "<save>"), (True, "M.on_save_checkpoint")])
def test_save_checkpoint(tmp_path: Path, *, weights_only: bool, expected: str) -> None:
    journal, trainer = fit(Plan(1, max_epochs=1))
    journal.calls.clear()

    trainer.save_checkpoint(tmp_path / "some.ckpt", weights_only=weights_only)

    assert trace(journal) == written_out(expected)


def test_load_from_checkpoint(tmp_path: Path) -> None:
    plan = Plan(1, max_epochs=1)
    _, trainer = fit(plan)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    journal = Journal()

    RecordingModule.load_from_checkpoint(tmp_path / "some.ckpt", plan=plan, journal=journal)

    assert trace(journal) == written_out("M.configure_model, M.on_load_checkpoint")


def test_leaving_an_epoch_steps_the_schedules_that_count_epochs() -> None:
    plan = Plan(3, max_epochs=1, leaves_epoch=frozenset({1}), schedules=(Schedule("epoch", 1), Schedule("step", 1)))

    journal, trainer = fit(plan)

    assert trace(journal) == written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, CM.on_train_start,
        CM.on_train_epoch_start, <window>, M.lr_scheduler_step, CM.on_train_batch_end,
        <xfer>, CM.on_train_batch_start, M.lr_scheduler_step, CM.on_train_epoch_end, <end>""")
    assert (trainer.current_epoch, trainer.global_step) == (1, 1)


def test_a_step_without_a_loss() -> None:
    plan = Plan(1, max_epochs=1, without_loss=frozenset({0}), schedules=(Schedule("epoch", 1), Schedule("step", 1)))

    journal, trainer = fit(plan)

    assert trace(journal) == written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, CM.on_train_start,
        CM.on_train_epoch_start, <take>, <zero>, M.lr_scheduler_step, CM.on_train_batch_end,
        CM.on_train_epoch_end, <end>""")
    assert (trainer.current_epoch, trainer.global_step, trainer.progress.skipped_steps) == (1, 0, 1)


def test_a_closure_optimizer_without_a_loss_makes_no_step() -> None:
    class Lbfgs(RecordingModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=1)

    plan, journal = Plan(2, max_epochs=1, without_loss=frozenset({1})), Journal()
    trainer = make_trainer(plan, journal)

    trainer.fit(Lbfgs(plan, journal))

    assert (trainer.global_step, trainer.progress.skipped_steps, trainer.progress.total_batches) == (1, 1, 2)


def test_manual_optimization() -> None:
    journal, trainer = fit(Plan(1, max_epochs=1, is_manual=True, schedules=(Schedule("epoch", 1),)))

    assert trace(journal) == written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, CM.on_train_start,
        CM.on_train_epoch_start, <take>, <bwd>, CM.on_before_optimizer_step, CM.on_train_batch_end,
        CM.on_train_epoch_end, <end>""")
    assert trainer.global_step == 1


def test_an_epoch_that_a_limit_ends_early_continues_in_the_next_fit() -> None:
    plan, journal = Plan(3, max_epochs=1, max_steps=1), Journal()
    trainer, module = make_trainer(plan, journal), make_module(plan, journal)

    trainer.fit(module)

    expected = written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, CM.on_train_start,
        CM.on_train_epoch_start, <window>, CM.on_train_batch_end, CM.on_train_epoch_end, <end>""")
    assert trace(journal) == expected
    assert trainer.current_epoch == 0

    journal.calls.clear()
    trainer.fit_loop.max_steps = -1
    trainer.fit(module)

    assert trace(journal) == written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, CM.on_train_start,
        <window>, CM.on_train_batch_end, <window>, CM.on_train_batch_end, CM.on_train_epoch_end, <end>""")
    assert [call.detail for call in journal.calls if call.hook == "training_step"] == [(1,), (2,)]
    assert (trainer.current_epoch, trainer.global_step) == (1, 3)


def test_the_rest_of_an_epoch_may_have_no_loss() -> None:
    # Nothing but max_steps limits the run; it is not stuck, because the epoch has stepped before.
    plan, journal = Plan(2, max_steps=1, without_loss=frozenset({1})), Journal()
    trainer, module = make_trainer(plan, journal), make_module(plan, journal)
    trainer.fit(module)
    trainer.fit_loop.max_steps = 3

    trainer.fit(module)

    assert (trainer.current_epoch, trainer.global_step) == (2, 3)


def test_a_fit_without_training_only_sets_up() -> None:
    journal, trainer = fit(Plan(2, validation=(1,), limit_train_batches=0, max_epochs=2, num_sanity_val_steps=2))

    assert trace(journal) == written_out("""
        <begin>, M.configure_optimizers, CM.on_fit_start, M.train_dataloader, M.val_dataloader, CM.on_train_start,
        <end>""")
    assert trainer.current_epoch == 0


# --- a data module --------------------------------------------------------------------------------------------------

DATA_BEGIN = "M.configure_callbacks, DM.prepare_data, DCM.setup, M.configure_model"
DATA_XFER = "D.on_before_batch_transfer, D.transfer_batch_to_device, D.on_after_batch_transfer"
DATA_WINDOW = f"{DATA_XFER}, CM.on_train_batch_start, M.training_step, <zero>, <bwd>, <step>, CM.on_train_batch_end"
DATA_VALIDATE = f"""<val-open>, {DATA_XFER}, CM.on_validation_batch_start, M.validation_step,
    CM.on_validation_batch_end, <val-close>"""

# The module of these tests overrides the transfer hooks, too; the data module's are used.
both_override = pytest.mark.filterwarnings("ignore:RecordingData and EvaluatingModule both define on_before_batch")


@both_override
def test_fit_save_and_resume_with_a_data_module(tmp_path: Path) -> None:
    plan, journal = Plan(1, validation=(1,), max_epochs=1, num_sanity_val_steps=1), Journal()
    trainer = make_trainer(plan, journal)

    trainer.fit(make_module(plan, journal), datamodule=RecordingData(plan, journal))

    assert trace(journal) == written_out(f"""
        {DATA_BEGIN}, M.configure_optimizers, CM.on_fit_start,
        C.on_sanity_check_start, D.val_dataloader, {DATA_VALIDATE}, C.on_sanity_check_end,
        D.train_dataloader, CM.on_train_start, CM.on_train_epoch_start, {DATA_WINDOW},
        M.on_validation_model_zero_grad, {DATA_VALIDATE}, CM.on_train_epoch_end,
        CM.on_train_end, CM.on_fit_end, DCM.teardown""")

    journal.calls.clear()
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    assert trace(journal) == written_out("C.state_dict, D.state_dict, CM.on_save_checkpoint")

    plan, journal = replace(plan, max_epochs=2, num_sanity_val_steps=0), Journal()
    trainer = make_trainer(plan, journal)
    trainer.fit(make_module(plan, journal), datamodule=RecordingData(plan, journal), ckpt_path=tmp_path / "some.ckpt")
    assert trace(journal) == written_out(f"""
        {DATA_BEGIN}, M.on_load_checkpoint, D.load_state_dict, C.on_load_checkpoint, C.load_state_dict,
        M.configure_optimizers, CM.on_fit_start, D.train_dataloader, D.val_dataloader, CM.on_train_start,
        CM.on_train_epoch_start, {DATA_WINDOW}, M.on_validation_model_zero_grad, {DATA_VALIDATE},
        CM.on_train_epoch_end, CM.on_train_end, CM.on_fit_end, DCM.teardown""")


@both_override
def test_an_exception_with_a_data_module() -> None:
    plan, journal = Plan(1, validation=(1,), max_epochs=1), Journal()
    module = make_module(plan, journal)
    module.error = ("training_step", 0)

    with pytest.raises(ZeroDivisionError):
        make_trainer(plan, journal).fit(module, datamodule=RecordingData(plan, journal))

    assert trace(journal)[-4:] == written_out("CM.on_train_batch_start, M.training_step, C.on_exception")[-3:] + [
        "D.on_exception"
    ]


def test_transfer_hooks_of_both_are_said() -> None:
    plan, journal = Plan(1, validation=(1,), max_epochs=1), Journal()

    with pytest.warns(UserWarning, match="both define on_before_batch_transfer, transfer_batch_to_device, on_after"):
        make_trainer(plan, journal).fit(make_module(plan, journal), datamodule=RecordingData(plan, journal))


# --- brackets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["first", "module", "late"])
def test_what_starts_ends_in_the_opposite_order(who: str) -> None:
    plan = Plan(
        5, validation=(2, 1), accumulate_grad_batches=2, max_epochs=3, max_steps=8, val_check_interval=3,
        num_sanity_val_steps=1,
    )  # fmt: skip
    journal, _ = fit(plan)
    open_brackets: list[str] = []
    for call in journal.calls:
        if call.who != who:
            continue
        name = {"setup": "on_run_start", "teardown": "on_run_end"}.get(call.hook, call.hook)
        if name.endswith("_start"):
            open_brackets.append(name.removesuffix("_start"))
        elif name.endswith("_end"):
            assert open_brackets.pop() == name.removesuffix("_end")
    assert not open_brackets


def test_with_a_profiler_the_order_is_the_same() -> None:
    plan = Plan(3, validation=(1,), max_epochs=2, num_sanity_val_steps=1, schedules=(Schedule("epoch", 1),))

    plain, _ = fit(plan)
    profiled, _ = fit(plan, profiler="simple")

    assert profiled.calls == plain.calls
