"""The first difference between two records: planted ones are found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright.compat.lightning.check.compare import FirstDifference, Trace, find_difference, read_record
from loopwright.compat.lightning.check.rows import NOT_COVERED, candidates, find_row
from loopwright.compat.lightning.parity.switches import SWITCHES

ROOT = Path(__file__).parents[4]
CONTEXT = {"callbacks": ["Callback"], "accumulated": 1, "is_resumed": False, "interval": "1.0"}
Events = list[dict[str, Any]]


def events() -> Events:
    """Return what a fit of two steps leaves."""
    found = [event("library", "lightning.pytorch", 0, version="2.6.6", torch="2.13.0", verb=0)]
    found.append(event("verb", "fit", 0, **CONTEXT))
    for step in range(2):
        found += [
            event("weights", "weights", step, **{"layer.weight": [f"digest {step}", 1.0 + step, 0.5]}),
            event("rates", "learning rates", step, **{"optimizer 0, group 0": 0.1}),
            event("hook", "Net.training_step", step + 1, epoch=0, step=step, **{"argument 1": step}),
            event("batch", "batch of Net.training_step", step + 1, digest=f"data {step}"),
            event("result", "result of Net.training_step", step + 1, value=0.5 - step / 10),
            event("hook", "Note.on_train_batch_end", step + 1, epoch=0, step=step + 1),
            event("row", "row of logger 0", step + 1, **{"at step": step, "loss": 0.5}),
        ]
    found.append(event("hook", "Note.on_train_end", 2, epoch=1, step=2))
    found.append(event("checkpoint", "checkpoints/epoch=0-step=2.ckpt", 2, event="written", epoch=0, global_step=2))
    found.append(event("end", "end", 2, error="", frames=""))
    return found


def event(kind: str, name: str, clock: int, *, verb: int = 1, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "verb": verb, "clock": clock, "values": values}


def record(found: Events, folder: Path) -> Trace:
    path = folder / "record.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return read_record(path)


def compare(change: Callable[[Events], object], folder: Path) -> FirstDifference | None:
    theirs, ours = events(), events()
    change(ours)
    return find_difference(record(theirs, folder), record(ours, folder))


def position(found: Events, kind: str, number: int = 0) -> int:
    return [index for index, one in enumerate(found) if one["kind"] == kind][number]


def set_value(kind: str, number: int, **values: Any) -> Callable[[Events], object]:
    return lambda found: found[position(found, kind, number)]["values"].update(values)


def rename(kind: str, number: int, name: str) -> Callable[[Events], object]:
    return lambda found: found[position(found, kind, number)].update(name=name)


def test_equal_records_have_no_difference(tmp_path: Path) -> None:
    assert compare(lambda found: None, tmp_path) is None
    assert record(events(), tmp_path).counts() == (
        "1 fit, 2 training steps, 2 batches, 5 hook calls, 2 losses and results, 2 states of the weights, "
        "2 states of the learning rates, 2 logged rows, 1 events of checkpoint files"
    )


@pytest.mark.parametrize(
    ("change", "kind", "what", "where"),
    [
        (
            set_value("weights", 1, **{"layer.weight": ["other", 2.0000001, 0.5]}),
            "weights", "the weights: layer.weight", "training step 1",
        ),
        (
            lambda found: found.pop(position(found, "hook", 1)),
            "hook", "a missing hook call under Loopwright: Note.on_train_batch_end", "training step 1",
        ),
        (
            lambda found: found.insert(position(found, "hook", 1), event("hook", "Note.on_extra", 1, epoch=0, step=0)),
            "hook", "an additional hook call under Loopwright: Note.on_extra", "training step 1",
        ),
        (rename("hook", 1, "Note.on_other"), "hook", "another hook call", "training step 1"),
        (set_value("hook", 3, step=1), "hook", "Note.on_train_batch_end: step", "training step 2"),
        (set_value("row", 1, loss=0.25), "row", "row of logger 0: loss", "training step 2"),
        (set_value("row", 0, more=1.0), "row", "row of logger 0: more", "training step 1"),
        (rename("checkpoint", 0, "checkpoints/epoch=0-step=1.ckpt"), "checkpoint", "another checkpoint file", "step 2"),
        (
            lambda found: found.pop(position(found, "checkpoint")),
            "checkpoint", "a missing checkpoint file under Loopwright: checkpoints/epoch=0-step=2.ckpt", "step 2",
        ),
        (set_value("batch", 1, digest="x"), "batch", "the data of the batch of Net.training_step: digest", "step 2"),
        (set_value("result", 0, value=0.4), "result", "result of Net.training_step: value", "training step 1"),
        (
            set_value("rates", 0, **{"optimizer 0, group 0": 0.2}),
            "rates", "the learning rates: optimizer 0, group 0", "before the first training step",
        ),
    ],
)  # fmt: skip
def test_a_planted_difference_is_named(
    change: Callable[[Events], object], kind: str, what: str, where: str, tmp_path: Path
) -> None:
    found = compare(change, tmp_path)
    assert found is not None
    assert (found.kind, found.what) == (kind, what)
    assert found.where.endswith(where)
    assert found.where.startswith("call 1 of the Trainer, fit")


def test_values_of_both_sides_are_shown(tmp_path: Path) -> None:
    found = compare(set_value("row", 1, loss=0.25), tmp_path)
    assert found is not None
    assert (found.theirs, found.ours) == ("loss=0.5", "loss=0.25")
    weights = compare(set_value("weights", 1, **{"layer.weight": ["other", 2.5, 0.5]}), tmp_path)
    assert weights is not None
    assert weights.theirs == "layer.weight=[0.5, ...] with norm 2.0"
    missing = compare(lambda events: events.pop(position(events, "hook", 4)), tmp_path)
    assert missing is not None
    assert (missing.theirs, missing.ours) == ("Note.on_train_end (epoch=1, step=2)", "nothing")


def test_the_earliest_of_several_differences_counts(tmp_path: Path) -> None:
    def change(found: Events) -> None:
        set_value("result", 0, value=0.4)(found)
        set_value("weights", 1, **{"layer.weight": ["other", 2.0, 0.5]})(found)
        found.pop(position(found, "checkpoint"))

    found = compare(change, tmp_path)
    assert found is not None
    assert found.kind == "result"


def test_counts_before_the_first_step_of_a_resumed_fit_are_not_compared(tmp_path: Path) -> None:
    def records(*, is_resumed: bool) -> list[Trace]:
        sides = [events(), events()]
        for number, side in enumerate(sides):
            set_value("verb", 0, is_resumed=is_resumed)(side)
            side.insert(2, event("hook", "Note.on_fit_start", 0, epoch=number, step=2 * number))
        return [record(side, tmp_path) for side in sides]

    assert find_difference(*records(is_resumed=True)) is None
    assert find_difference(*records(is_resumed=False)) is not None


def test_another_method_of_the_trainer_is_a_difference(tmp_path: Path) -> None:
    found = compare(rename("verb", 0, "validate"), tmp_path)
    assert found is not None
    assert (found.kind, found.theirs, found.ours) == ("verb", "fit", "validate")


def test_a_program_that_was_killed_leaves_a_record_that_is_not_complete(tmp_path: Path) -> None:
    record(events(), tmp_path)
    path = tmp_path / "record.jsonl"
    path.write_text(path.read_text()[:-20])
    assert not read_record(path).is_complete
    assert not read_record(tmp_path / "absent").is_complete


# --- rows of the documents -------------------------------------------------------------------------------------------


def test_rows_that_parity_does_not_cover_are_found(tmp_path: Path) -> None:
    theirs, ours = events(), events()
    for side in (theirs, ours):
        set_value("verb", 0, callbacks=["Callback", "BatchSizeFinder"])(side)
    set_value("weights", 1, **{"layer.weight": ["other", 2.0, 0.5]})(ours)
    found = find_difference(record(theirs, tmp_path), record(ours, tmp_path))
    assert found is not None
    assert find_row(found).startswith("A search of")


def test_no_row_is_invented(tmp_path: Path) -> None:
    found = compare(set_value("weights", 1, **{"layer.weight": ["other", 2.0, 0.5]}), tmp_path)
    assert found is not None
    assert find_row(found) == ""


def test_each_row_stands_in_the_documents() -> None:
    document = " ".join((ROOT / "docs/migrating.md").read_text().split())
    assert [row.text for row in NOT_COVERED if row.text not in document] == []


def test_every_switch_is_a_candidate(tmp_path: Path) -> None:
    found = compare(set_value("batch", 0, digest="x"), tmp_path)
    assert found is not None
    assert candidates(found)[0] == "reading"
    assert sorted(candidates(found)) == sorted(switch.name for switch in SWITCHES)
