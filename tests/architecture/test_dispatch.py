"""Hooks are called from one place, and the classes that declare them agree with the table."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest

import loopwright as lw
from loopwright.trainer.lifecycle import EVENTS, HOOKS, Event, hook_names

from .sources import ROOT, calls, package_files, place

# The last one saves a module outside of a run, where there is no lifecycle.
# replay.py tells the progress bar of its end, which calls no hooks.
DISPATCH = {"trainer/lifecycle.py", "trainer/hooks.py", "trainer/replay.py", "compat/lightning/attached.py"}

# Calls of a compiled event: `life.on_...` and `run.lifecycle.on_...`.
COMPILED = re.compile(r"(^|\.|_)(life|lifecycle)$")

BASES: dict[str, type] = {"callbacks": lw.Callback, "module": lw.Module, "datamodule": lw.DataModule}


def test_only_the_lifecycle_calls_hooks() -> None:
    events = {event.name for event in EVENTS if event.kind == "event"}
    wrong = []
    for file in package_files():
        if str(file.relative_to(ROOT)) in DISPATCH:
            continue
        for call in calls(file):
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in events:
                continue
            receiver = ast.unparse(call.func.value)
            if COMPILED.search(receiver) or receiver == "super()":
                continue
            is_hook_name = call.func.attr.startswith("on_")
            if is_hook_name or re.search(r"module|callback|listener", receiver):
                wrong.append(f"{place(file, call)}: {ast.unparse(call.func)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("listener", BASES)
def test_a_base_class_declares_exactly_the_hooks_of_the_table(listener: str) -> None:
    base = BASES[listener]
    declared = {name for name in dir(base) if name.startswith("on_") and callable(getattr(base, name))}
    named = hook_names(listener)
    assert declared - {"on_gpu"} == {name for name in named if name.startswith("on_")}
    assert not [name for name in named if not hasattr(base, name)]


@pytest.mark.parametrize(
    ("event", "listener"),
    # A step declares what it wants of batch, batch_idx and dataloader_idx.
    [(event, listener) for event in EVENTS for listener in event.listeners if event.kind != "step"],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_declared_hook_takes_the_arguments_of_the_table(event: Event, listener: str) -> None:
    parameters = list(inspect.signature(getattr(BASES[listener], event.name)).parameters.values())[1:]
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if listener == "callbacks" and event.kind == "event":
        assert [p.name for p in named[:2]] == ["trainer", "pl_module"]
        named = named[2:]
    expected = [argument.strip() for argument in event.arguments.split(",") if argument.strip()]
    assert [p.name for p in named] == [argument.split("=")[0] for argument in expected]
    for parameter, argument in zip(named, expected, strict=True):
        if "=" in argument:
            assert repr(parameter.default) == argument.split("=")[1]


def test_the_table_has_each_hook_once() -> None:
    assert len(HOOKS) == len(EVENTS)
    known = {"callbacks", "module", "datamodule"}
    assert all(event.listeners and set(event.listeners) <= known for event in EVENTS)


def test_the_drawing_of_the_order_names_hooks_only() -> None:
    from loopwright.trainer.lifecycle import ORDER

    words = set(re.findall(r"\bon_[a-z_]+\b(?!\*)", ORDER))
    assert words <= set(HOOKS), words - set(HOOKS)
    undrawn: Any = {event.name for event in EVENTS if event.kind == "event"} - set(re.findall(r"[a-z_]+", ORDER))
    evaluation = {name for name in undrawn if re.match(r"on_(test|predict)_", name)}
    assert undrawn - evaluation <= {"on_exception", "on_save_checkpoint"}
