"""Every error that the package raises for its user says what to do about it."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from loopwright import errors

from .sources import ROOT, calls, package_files, place, tree_of


def error_names() -> set[str]:
    """Return the names of LoopwrightError and of every subclass anywhere in the package."""
    names = {"LoopwrightError"}
    classes = [node for file in package_files() for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef)]
    size = 0
    while len(names) != size:
        size = len(names)
        names |= {node.name for node in classes if any(ast.unparse(b).split(".")[-1] in names for b in node.bases)}
    return names


def test_every_error_has_a_fix() -> None:
    # These make their fix from what they are given: the package's name, a number of batches.
    names = error_names() - {"MissingDependency", "WindowEnded"}
    wrong, count = [], 0
    for file in package_files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in names:
                wrong.append(f"{place(file, node)}: {node.exc.id} is raised without a message")
            if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] not in names:
                continue
            count += 1
            fixes = [keyword.value for keyword in node.keywords if keyword.arg == "fix"]
            if not fixes or (isinstance(fixes[0], ast.Constant) and not str(fixes[0].value).strip()):
                wrong.append(f"{place(file, node)}: {ast.unparse(node.func)} has no fix")
            if len(node.args) != 1:
                wrong.append(f"{place(file, node)}: {ast.unparse(node.func)} says nothing, or too much")
    assert not wrong, "\n".join(wrong)
    assert count > 50


def test_hints_name_the_extra_that_has_a_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = [one for name, needs in extras.items() if name not in ("all", "dev", "examples") for one in needs]
    packages = {re.split(r"[\[<>=]", one)[0].lower() for one in needed} - {"numpy", "huggingface_hub"}
    wrong = []
    for file in package_files():
        for node in ast.walk(tree_of(file)):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            plain = set(re.findall(r"pip install ([\w-]+)(?![\w-]*[\[=])", text.lower())) & packages
            wrong += [f"{place(file, node)}: pip install {name}" for name in plain]
        for call in calls(file):
            is_plain = ast.unparse(call.func) == "MissingDependency" and "extra" not in {x.arg for x in call.keywords}
            if is_plain and getattr(call.args[0], "value", None) in packages - {"torch_xla"}:
                wrong.append(f"{place(file, call)}: MissingDependency without extra=")
    assert wrong == []


def test_the_tree_in_the_docstring_names_every_error() -> None:
    for name in errors.__all__:
        assert name in (errors.__doc__ or ""), name


def test_a_fix_is_required() -> None:
    with pytest.raises(TypeError):
        errors.ConfigError("what")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name not in ("MissingDependency", "StopBySignal")])
def test_an_error_says_what_happened_and_then_what_to_do(name: str) -> None:
    error = getattr(errors, name)("it broke.", fix="mend it.")
    assert str(error).splitlines()[0] == "it broke."
    assert "mend it." in str(error).splitlines()[1]
