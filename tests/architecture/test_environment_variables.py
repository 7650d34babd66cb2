"""Environment variables have one prefix, and each of them is in the tables of docs/terminal.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from .sources import ROOT, package_files, tree_of

_NAME = re.compile(r"(LOOPWRIGHT|LW|PL|LT)_[A-Z_]+")
_TABLE = (ROOT / "docs" / "terminal.md").read_text(encoding="utf-8").partition("## Environment variables")[2]
# Where Lightning's names, and the short ones of settings, are read or set; other files ask these.
_OTHER_NAMES = {
    "cli/commands/launch.py",
    "cli/commands/launch_ray.py",
    "cli/sources.py",
    "compat/accelerate/state.py",
    "compat/lightning/check/child_program.py",
    "compat/lightning/parity/ranks.py",
    "compat/lightning/parity/workers.py",
    "compat/lightning/trainer.py",
    "fabric/launch/prestart.py",
    "fabric/resolve.py",
    "fabric/seed.py",
    "strategies/deepspeed/config.py",
    "trainer/session/arguments.py",
}


def variables() -> dict[str, set[str]]:
    """Return names of variables, or their beginnings, by the files that hold them as text."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in package_files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
                found[file.relative_to(ROOT).as_posix()].add(node.value)
    return found


def documented() -> set[str]:
    """Return the names in the tables; LOOPWRIGHT_TRAINER_ for LOOPWRIGHT_TRAINER_<ARGUMENT>."""
    return {match.group() for match in _NAME.finditer(_TABLE)}


def test_only_files_for_the_names_of_others_hold_another_prefix() -> None:
    others = {file for file, names in variables().items() if any(not name.startswith("LOOPWRIGHT_") for name in names)}
    assert others == _OTHER_NAMES


def test_every_variable_is_documented() -> None:
    names = {name for file in variables().values() for name in file}
    assert {"LOOPWRIGHT_LOG_LEVEL", "PL_GLOBAL_SEED", "LW_CONFIG"} <= names
    # The beginning of two names, and an instance of PL_TRAINER_<ARGUMENT>.
    assert names - documented() == {"LOOPWRIGHT_COMPAT_", "PL_TRAINER_LOGGER"}


def test_every_documented_variable_exists() -> None:
    text = "\n".join(file.read_text(encoding="utf-8") for file in package_files())
    examples = {"LOOPWRIGHT_TRAINER_MAX_EPOCHS", "LOOPWRIGHT__TRAINER__MAX_EPOCHS"}
    assert {name for name in documented() if name not in text} <= examples
