"""Two records of a program, and the first difference between them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any  # Any in this file: values of JSON

__all__ = ["FirstDifference", "Trace", "TraceEvent", "find_difference", "read_record"]

# Kinds of events that are compared; each is its own sequence within a verb.
KINDS = ("batch", "hook", "result", "weights", "rates", "row", "checkpoint", "metrics")
_NAMES = {
    "batch": "batches",
    "hook": "hook calls",
    "result": "losses and results",
    "weights": "states of the weights",
    "rates": "states of the learning rates",
    "row": "logged rows",
    "checkpoint": "events of checkpoint files",
    "metrics": "metrics and counts at the end",
}


@dataclass(frozen=True)
class TraceEvent:
    """Something that happened in a program.

    Attributes:
        position: Its number in the record.
        kind: What it is; see `KINDS`.
        name: What it is about.
        verb: Number of the verb within the program, from 1; 0 before the first.
        clock: Training steps of the verb that had begun.
        values: What is compared.
    """

    position: int
    kind: str
    name: str
    verb: int
    clock: int
    values: dict[str, Any]


@dataclass
class Trace:
    """What happened in a program on one side.

    Attributes:
        events: All that is compared, in order.
        verbs: Each call of fit, validate, test, predict or of a search, with its context.
        version: Version of Lightning; that of torch. Empty where the program did not begin.
        frames: The last frames of the error that ended the program, and its text; empty if it ended well.
        is_complete: Whether the program ended by itself, also by an error.
        num_trainers: How many Trainers the program made.
        num_fabrics: How many Fabrics.
        is_absent: Whether there is no Lightning.
        changed: Arguments of Trainers that the program passed, and the limits changed.
    """

    events: list[TraceEvent] = field(default_factory=list)
    verbs: list[TraceEvent] = field(default_factory=list)
    version: tuple[str, str] = ("", "")
    frames: str = ""
    is_complete: bool = False
    num_trainers: int = 0
    num_fabrics: int = 0
    is_absent: bool = False
    changed: set[str] = field(default_factory=set)

    def counts(self) -> str:
        """Return how much was recorded, in words."""
        verbs = Counter(one.name for one in self.verbs)
        found = Counter(one.kind for one in self.events)
        steps = sum(one.kind == "hook" and one.name.endswith(".training_step") for one in self.events)
        parts = [f"{count} {name}" for name, count in verbs.items()]
        parts += [f"{steps} training steps"] if steps else []
        parts += [f"{found[kind]} {_NAMES[kind]}" for kind in KINDS if found[kind]]
        return ", ".join(parts)


@dataclass(frozen=True)
class FirstDifference:
    """The first difference between two records.

    Attributes:
        kind: The kind of what differs.
        where: Verb, step and epoch, in words.
        what: What differs, in words.
        theirs: Lightning's side, in words.
        ours: Loopwright's.
        verb: The verb during which it happened, None before the first.
        names: Names of the values that differ; of hooks and rows, the name itself where that differs.
        clock: Training steps of the verb that had begun.
    """

    kind: str
    where: str
    what: str
    theirs: str
    ours: str
    verb: TraceEvent | None
    names: tuple[str, ...]
    clock: int


def read_record(path: Path) -> Trace:
    """Return a record from its file; a program that was killed leaves its beginning."""
    record = Trace()
    if not path.is_file():
        return record
    for position, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        try:
            found = json.loads(line)
        except json.JSONDecodeError:  # the last line of a process that was killed
            break
        event = TraceEvent(position, found["kind"], found["name"], found["verb"], found["clock"], found["values"])
        if event.kind == "verb":
            record.verbs.append(event)
        elif event.kind == "library":
            record.version = (event.values["version"], event.values["torch"])
        elif event.kind == "trainer":
            record.num_trainers += 1
            record.changed.update(event.values["changed"])
        elif event.kind == "fabric":
            record.num_fabrics += 1
        elif event.kind == "absent":
            record.is_absent = True
        elif event.kind == "end":
            record.is_complete, record.frames = True, event.values["frames"]
        else:
            record.events.append(event)
    return record


def find_difference(theirs: Trace, ours: Trace) -> FirstDifference | None:
    """Return what differs first; None if nothing does.

    Calls, rows, weights and files are sequences of their own, because a row may be written before or after a hook is
    called. Of their first differences, the one that was recorded first is returned.

    Args:
        theirs: Lightning's record.
        ours: Loopwright's.
    """
    verbs = max([0, *(one.verb for one in [*theirs.events, *ours.events, *theirs.verbs, *ours.verbs])])
    for number in range(verbs + 1):
        verb = _verb(theirs, number)
        if _name(verb) != _name(_verb(ours, number)):
            return FirstDifference(
                "verb", f"call {number} of the Trainer", "another method of the Trainer is called",
                _name(verb), _name(_verb(ours, number)), verb, (), 0,
            )  # fmt: skip
        found = [
            one
            for kind in KINDS
            if (one := _first(kind, _of(theirs, number, kind), _of(ours, number, kind), verb, number)) is not None
        ]
        if found:
            return min(found, key=lambda one: one[0])[1]
    return None


def _verb(record: Trace, number: int) -> TraceEvent | None:
    return next((one for one in record.verbs if one.verb == number), None)


def _name(verb: TraceEvent | None) -> str:
    return "none" if verb is None else verb.name


def _of(record: Trace, number: int, kind: str) -> list[TraceEvent]:
    found = [one for one in record.events if one.verb == number and one.kind == kind]
    verb = _verb(record, number)
    if kind != "hook" or verb is None or not verb.values.get("is_resumed"):
        return found
    # Before the first step of a resumed fit, counts are those of the checkpoint here, and zero in Lightning.
    return [one if one.clock else replace(one, values=_without_counts(one.values)) for one in found]


def _without_counts(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in ("epoch", "step")}


def _first(
    kind: str, theirs: Sequence[TraceEvent], ours: Sequence[TraceEvent], verb: TraceEvent | None, number: int
) -> tuple[int, FirstDifference] | None:
    for index in range(max(len(theirs), len(ours))):
        there = theirs[index] if index < len(theirs) else None
        here = ours[index] if index < len(ours) else None
        if there is not None and here is not None and (there.name, there.values) == (here.name, here.values):
            continue
        position = min(one.position for one in (there, here) if one is not None)
        known = there or here
        assert known is not None
        what, names = _describe(there, here, theirs[index + 1 : index + 2], ours[index + 1 : index + 2])
        is_same = there is not None and here is not None and there.name == here.name and names != (there.name,)
        only = names if is_same else ()
        return position, FirstDifference(
            kind, _where(known, verb, number), what, _show(there, only), _show(here, only), verb, names, known.clock
        )
    return None


def _where(event: TraceEvent, verb: TraceEvent | None, number: int) -> str:
    parts = [f"call {number} of the Trainer, {_name(verb)}" if verb is not None else "outside of the Trainer's methods"]
    if event.clock:
        parts.append(f"training step {event.clock}")
    elif _name(verb) == "fit":
        parts.append("before the first training step")
    return ", ".join(parts)


def _describe(
    there: TraceEvent | None, here: TraceEvent | None, after: Sequence[TraceEvent], after_here: Sequence[TraceEvent]
) -> tuple[str, tuple[str, ...]]:
    """Return what differs in words, and the names of the values that do."""
    known = there or here
    assert known is not None
    noun = {"hook": "hook call", "row": "logged row", "checkpoint": "checkpoint file"}.get(known.kind, known.kind)
    if there is None or (here is not None and _is_next(there, after_here) and not _is_next(here, after)):
        assert here is not None
        return f"an additional {noun} under Loopwright: {here.name}", (here.name,)
    if here is None or (_is_next(here, after) and not _is_next(there, after_here)):
        return f"a missing {noun} under Loopwright: {there.name}", (there.name,)
    if there.name != here.name:
        return f"another {noun}", (there.name, here.name)
    names = sorted(
        name
        for name in {*there.values, *here.values}
        if there.values.get(name, _ABSENT) != here.values.get(name, _ABSENT)
    )
    text = {
        "weights": "the weights",
        "batch": f"the data of the {there.name}",
        "rates": "the learning rates",
        "metrics": there.name,
    }.get(there.kind, there.name)
    return f"{text}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}", tuple(names)


_ABSENT = object()


def _is_next(event: TraceEvent, following: Sequence[TraceEvent]) -> bool:
    """Whether an event follows on the other side, so that one of that side was left out or added."""
    is_call = event.kind in ("hook", "row", "checkpoint")
    return is_call and any((one.name, one.values) == (event.name, event.values) for one in following)


def _show(event: TraceEvent | None, names: Sequence[str]) -> str:
    """Return a side in words: the values with these names, all of them without names."""
    if event is None:
        return "nothing"
    shown = {name: event.values.get(name, _ABSENT) for name in names[:3]} if names else event.values
    text = ", ".join(f"{name}={_value(value)}" for name, value in list(shown.items())[:8])
    if names:
        return text
    return f"{event.name} ({text})" if text else event.name


def _value(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, list):
        digest, norm, first = value
        return digest if norm is None else f"[{first!r}, ...] with norm {norm!r}"
    return repr(value)
