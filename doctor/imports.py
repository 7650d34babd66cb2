"""Import checks of packages, in a separate process.

A broken package may end its process, or take minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_MARK = "loopwright-doctor "
_PROGRAM = f"""
import importlib, json, sys
for name in sys.argv[1:]:
    why = None
    try:
        importlib.import_module(name)
    except BaseException as error:
        why = (type(error).__name__ + ": " + str(error)).strip().splitlines()[0]
    print({_MARK!r} + json.dumps([name, why]), flush=True)
"""


def find_broken(modules: Sequence[str], timeout_s: float) -> dict[str, str]:
    """Return why modules cannot be imported, by name; those that can are left out.

    They are imported one after the other in one process. If the process ends or takes too long, the current module is
    named, and another process continues with the next.

    Args:
        modules: Names as in an import statement.
        timeout_s: Maximum time for a process.
    """
    broken: dict[str, str] = {}
    left = list(modules)
    while left:
        said, end = _import(left, timeout_s)
        for name, why in said.items():
            left.remove(name)
            if why is not None:
                broken[name] = why
        if left:
            broken[left.pop(0)] = end
    return broken


def _import(modules: Sequence[str], timeout_s: float) -> tuple[dict[str, str | None], str]:
    """Return what the process reported for each module that it finished, and how the process ended."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, *modules]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
            end = f"its process ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()  # with what came before
            end = f"it takes longer than {timeout_s:g} s"
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    return dict(map(json.loads, lines)), end
