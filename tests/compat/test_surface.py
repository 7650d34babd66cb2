"""Compares Lightning's public API with what is served under its names: `make test-lightning`.

Every public module, every public name in it, every parameter of its functions, constructors and methods. What differs
is listed in surface.txt, under the reason why; a difference that is not there fails, and so does a line that is none
any more. With WRITE_EXPECTED=1 the file is written anew: what has no reason yet stands at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("LIGHTNING_PYTHON", "")
PROGRAM = str(Path(__file__).with_name("programs") / "surface.py")
KNOWN = Path(__file__).with_name("surface.txt")

pytestmark = pytest.mark.skipif(not PYTHON, reason="LIGHTNING_PYTHON names no interpreter with Lightning")

# Names that a module has for itself.
OF_A_MODULE = {"log", "warning_cache", "T", "TBroadcast", "TReduce", "TModel", "BType", "T_destination", "call"}


def surface(*command: str) -> dict[str, dict[str, dict[str, Any]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([PYTHON, *command], env=environment, timeout=900, check=True, capture_output=True)
    place = command.index(PROGRAM) + 2
    return json.loads(Path(command[place]).read_text())  # type: ignore[no-any-return]


def problems(theirs: list[list[Any]] | None, ours: list[list[Any]] | None) -> Iterator[str]:
    """Yield why a call that is right there is wrong here."""
    if theirs is None or ours is None:
        return
    named = {name: (number, kind, is_optional) for number, (name, kind, is_optional) in enumerate(ours)}
    takes_more = {kind for _, kind, _ in ours if kind.startswith("VAR_")}
    for number, (name, kind, is_optional) in enumerate(theirs):
        if kind.startswith("VAR_"):
            continue
        if name not in named:
            is_taken = "VAR_KEYWORD" in takes_more or (number < len(ours) and not is_optional)
            if not is_taken:
                yield f"no {name}"
            continue
        place, own_kind, own_optional = named[name]
        if kind == "POSITIONAL_OR_KEYWORD" and (own_kind == "KEYWORD_ONLY" or place != number):
            yield f"{name} stands elsewhere"
        if is_optional and not own_optional:
            yield f"{name} is required"
    known = {name for name, _, _ in theirs}
    if not any(kind.startswith("VAR_") for _, kind, _ in theirs):
        needed = [name for name, kind, is_optional in ours if not is_optional and not kind.startswith("VAR_")]
        if len(needed) > len([1 for _, _, is_optional in theirs if not is_optional]):
            yield from (f"{name} is new and required" for name in needed if name not in known)


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    seen = set()
    for module, names in theirs.items():
        if module not in ours:
            yield f"{module}: does not import"
            continue
        for name, one in names.items():
            if name in OF_A_MODULE:
                continue
            other = ours[module].get(name)
            if other is None:
                yield f"{module}.{name}: is not there"
                continue
            key = json.dumps([name, one, other])
            if key in seen:  # the same object in another module
                continue
            seen.add(key)
            if not other.get("is_served", True):
                yield f"{module}.{name}: is not served"
                continue
            yield from (f"{module}.{name}: {why}" for why in problems(one.get("signature"), other.get("signature")))
            yield from differences_of_members(f"{module}.{name}", one.get("members", {}), other.get("members", {}))


def differences_of_members(owner: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    own = {name: arguments for name, (is_own, arguments) in theirs.items() if is_own}
    missing = [name for name in own if name not in ours]
    if missing:
        yield f"{owner}: has no {' '.join(missing)}"
    for name in own.keys() & ours.keys():
        yield from (f"{owner}.{name}: {why}" for why in problems(own[name], ours[name][1]))


def rewritten(text: str, found: set[str]) -> str:
    """Return the file without what is no difference any more, and with new ones at its end, to be given a reason."""
    lines = text.splitlines()
    kept = [line for line in lines if not line or line.startswith("#") or line in found]
    added = sorted(found - set(lines))
    return "\n".join([*kept, *(["", "# Not sorted yet.", *added] if added else [])]) + "\n"


def test_what_differs_is_known(tmp_path: Path) -> None:
    there, here = str(tmp_path / "theirs.json"), str(tmp_path / "ours.json")
    theirs = surface(PROGRAM, "theirs", there)
    ours = surface("-m", "loopwright", "run-lightning", PROGRAM, "ours", here, there)
    found = sorted(set(differences(theirs, ours)))
    if os.environ.get("WRITE_EXPECTED"):
        KNOWN.write_text(rewritten(KNOWN.read_text(), set(found)))
    known = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    assert sorted(set(found) - set(known)) == [], "not in surface.txt"
    assert sorted(set(known) - set(found)) == [], "only in surface.txt"
