"""The loop's event order and counters, over random plans, against the model in order_model.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from loopwright.errors import ConfigError, DataError

from .order_model import Call, Model, Plan, Schedule, StuckError
from .order_recorder import Journal, do, is_complete, make_module, make_trainer

EVENTS_THAT_STOP = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
    "on_train_batch_end", "on_validation_end", "on_validation_batch_end", "on_train_epoch_end",
)  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    batches = draw(st.integers(1, 7))
    is_manual = draw(st.sampled_from((False, False, False, True)))
    max_epochs, max_steps = draw(
        st.sampled_from(("epochs", "steps", "both")).flatmap(
            lambda kind: st.tuples(
                st.sampled_from((None, -1)) if kind == "steps" else st.sampled_from((1, 2, 3, 4, 0)),
                st.just(-1) if kind == "epochs" else st.sampled_from((*range(1, 13), 0)),
            )
        )
    )
    ordinals = st.integers(0, 14)
    every = draw(st.sampled_from((1, 1, 2, 3, None)))
    counts = st.integers(1, 5 if every else 12)
    interval = draw(counts if every is None else st.one_of(st.none(), counts, st.sampled_from((0.25, 0.5, 0.6, 1.0))))
    return Plan(
        batches=batches,
        is_sized=draw(st.booleans()),
        validation=draw(st.sampled_from(((), (1,), (2,), (3,), (1, 1), (2, 3)))),
        limit_train_batches=draw(st.sampled_from((None, None, None, 3, 5, 8, 1.0, 0.7, 0.5, 1, 0, 0.0))),
        limit_val_batches=draw(st.sampled_from((None, None, None, None, 1, 2, 1.0, 0.5, 0, 0.0))),
        accumulate_grad_batches=1 if is_manual else draw(st.integers(1, 4)),
        max_epochs=max_epochs,
        max_steps=max_steps,
        min_epochs=draw(st.one_of(st.none(), st.integers(0, 3))),
        min_steps=draw(st.one_of(st.none(), st.integers(0, 8))),
        val_check_interval=interval,
        check_val_every_n_epoch=every,
        num_sanity_val_steps=draw(st.integers(-1, 3)),
        without_loss=draw(st.frozensets(ordinals, max_size=8)),
        leaves_epoch=draw(st.frozensets(ordinals, max_size=1)),
        stops=draw(st.frozensets(st.tuples(st.sampled_from(EVENTS_THAT_STOP), st.integers(0, 6)), max_size=1)),
        schedules=tuple(
            draw(st.lists(st.builds(Schedule, st.sampled_from(("step", "epoch")), st.integers(1, 3)), max_size=2))
        ),
        is_manual=is_manual,
    )


thoroughly = settings(deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def compare(expected: list[Call], got: list[Call]) -> None:
    for place, (want, have) in enumerate(zip_longest(expected, got)):
        if want != have:
            before = [f"{call.who}.{call.hook}{call.detail}" for call in got[max(0, place - 12) : place]]
            pytest.fail(f"call {place}: expected {want}, got {have}; before it: {', '.join(before)}")


@thoroughly
@given(plans())
def test_fit_fires_the_hooks_and_counts_as_documented(plan: Plan) -> None:
    journal = Journal()
    module = make_module(plan, journal)
    if plan.is_refused():
        event("refused")
        with pytest.raises(ConfigError):
            make_trainer(plan, journal).fit(module)
        return
    model = Model(plan)
    expected: list[Call] = []
    is_stuck = False
    try:
        for call in model.fit():
            expected.append(call)
    except StuckError:
        is_stuck = True
    trainer = make_trainer(plan, journal)

    if is_stuck:
        event("stuck")
        with pytest.raises(DataError, match="without an optimizer step"):
            trainer.fit(module)
    else:
        trainer.fit(module)

    note_what_happened(plan, expected)
    compare(expected, journal.calls)
    now = model.counters
    assert trainer.global_step == now.global_step
    assert trainer.current_epoch == now.current_epoch
    assert trainer.progress.total_batches == now.total_batches
    assert trainer.progress.samples == now.samples
    assert trainer.progress.skipped_steps == now.skipped_steps
    stepped = [call.detail[0] for call in expected if call.hook == "lr_scheduler_step"]
    assert [schedule.steps for schedule in module.schedules] == [
        stepped.count(number) for number in range(len(plan.schedules))
    ]


def note_what_happened(plan: Plan, calls: list[Call]) -> None:
    """Tell `--hypothesis-show-statistics` how often the interesting things come up."""
    fired = [call.hook for call in calls if call.who == "module"]
    starts, ends = fired.count("on_train_batch_start"), fired.count("on_train_batch_end")
    epochs = fired.count("on_train_epoch_end")
    event(f"validates: {'on_validation_model_zero_grad' in fired}")
    event(f"leaves an epoch: {starts > ends}")
    event(f"trains: {ends > 0}, manual: {plan.is_manual}")
    event(f"cut short: {epochs > (calls[-1].current_epoch if calls else 0)}")


# --- resuming -------------------------------------------------------------------------------------------------------

CHECKPOINT_HOOKS = ("state_dict", "on_save_checkpoint", "load_state_dict", "on_load_checkpoint")


@st.composite
def resumed_plans(draw: st.DrawFn) -> tuple[Plan, str, int]:
    """Return a plan that ends by itself, and the call of a hook of the late callback that saves a checkpoint."""
    plan = draw(plans())
    assume(not plan.is_refused() and plan.limit_train_batches != 0)
    if plan.max_epochs in (None, -1):
        plan = replace(plan, max_epochs=3)
    plan = replace(plan, stops=frozenset())
    places: dict[str, int] = {}
    for call in Model(plan).fit():
        if call.who == "late" and call.hook in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
            places[call.hook] = places.get(call.hook, 0) + 1
    assume(places)
    hook = draw(st.sampled_from(sorted(places)))
    return plan, hook, draw(st.integers(0, places[hook] - 1))


@pytest.mark.slow
@thoroughly
@pytest.mark.filterwarnings("ignore:trainer.fit has nothing to do")
@given(resumed_plans())
def test_a_resumed_run_fires_what_the_uninterrupted_run_fires_after_the_checkpoint(case: tuple[Plan, str, int]) -> None:
    plan, hook, number = case
    with TemporaryDirectory() as folder:
        path = Path(folder) / "some.ckpt"
        journal = Journal()
        module, trainer = make_module(plan, journal), make_trainer(plan, journal)
        at: dict[str, Any] = {}

        def save(trainer: Any) -> None:
            if trainer.at_step_boundary and not trainer.sanity_checking:
                at.update(place=len(journal.calls), counts=dict(journal.counts), step=trainer.global_step)
                trainer.save_checkpoint(path)

        do(trainer, "late", hook, number, save)
        trainer.fit(module)
        if not at:
            event("no checkpoint")
            return
        event(f"checkpoint in {hook}")
        resumed = Journal()
        twin, second = make_module(plan, resumed), make_trainer(plan, resumed)
        begins: list[int] = []

        def begin(trainer: Any) -> None:
            begins.append(len(resumed.calls))
            resumed.counts = dict(at["counts"])  # calls are numbered on from there

        do(second, "late", "on_train_start", 0, begin)
        second.fit(twin, ckpt_path=path)

    # What the validation does after its last event needs no repetition: the resumed run has not begun one.
    rest = [call for call in journal.calls[at["place"] :] if call.hook not in CHECKPOINT_HOOKS]
    if hook == "on_validation_end":
        assert rest.pop(0).hook == "on_validation_model_train"
    compare(rest, resumed.calls[begins[0] :])
    assert second.progress.state_dict().items() >= {
        (name, value) for name, value in trainer.progress.state_dict().items() if name != "validated_s"
    }
    assert [schedule.steps for schedule in twin.schedules] == [schedule.steps for schedule in module.schedules]
    for ours, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_recorder_listens_to_every_hook_of_the_table() -> None:
    assert is_complete()
