"""How the layer changes the core by name: what it replaces must exist, what it adds must not."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import loopwright.compat.lightning
from loopwright import Trainer
from loopwright.compat.lightning.patch import extend, patch

LAYER = Path(loopwright.compat.lightning.__file__).parent


class _Core:
    kind = "core"

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> str:
        return self.kind

    @property
    def fails(self) -> int:
        raise AttributeError("before a run")


class _Slotted:
    __slots__ = ("step",)


@pytest.mark.parametrize("owner", [_Core(), _Core, _Slotted(), Trainer(logger=False), sys, SimpleNamespace()])
def test_a_name_that_does_not_exist_is_not_replaced(owner: object) -> None:
    with pytest.raises(AttributeError, match="no attribute '_step_renamed'"):
        patch(owner, "_step_renamed", None)


def test_an_object_gets_a_replacement_for_itself() -> None:
    core, other = _Core(), _Core()
    patch(core, "step", lambda: "patched")
    patch(core, "count", 3)
    assert (core.step(), core.count, other.step(), other.count) == ("patched", 3, "core", 0)
    del core.step
    assert core.step() == "core"


def test_a_property_that_fails_now_can_be_replaced_in_its_class() -> None:
    class Sub(_Core):
        pass

    patch(Sub, "fails", 3)
    assert (Sub().fails, "fails" in vars(_Core)) == (3, True)


def test_an_addition_hides_nothing() -> None:
    class Own(_Core):
        pass

    extend(Own, "more", 1)
    assert Own().more == 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'step' already"):
        extend(Own, "step", None)


def test_parity_changes_the_core_by_patch_only() -> None:
    found = []
    for path in sorted((LAYER / "parity").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                found.append(f"{place} setattr")
            is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr != "__class__"
            if is_private and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) != "self":
                found.append(f"{place} {ast.unparse(node)} =")
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_log_every_n_steps", "_log_step"])
def test_the_numbers_of_lightning_tell_a_name_that_the_core_has_changed(name: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
    try:
        from renamed import survives  # a script: `python tests/compat/renamed.py` tries every name
    finally:
        sys.path.pop(0)
    assert not survives(name)
