"""Renames what parity touches of the core, one name at a time, and says which renames no test notices.

    python tests/compat/renamed.py [NAME...]

Parity changes objects of the core by name. A name that the core alone changes must not switch it off in silence: each
rename in a copy of the core, consistent within it, must fail tests/unit/compat. It takes some seconds per name.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARITY = ROOT / "compat" / "lightning" / "parity"
OTHERS = ("tests", "docs", "examples", "benchmarks", "site", "build")
_WORD = re.compile(r"[a-zA-Z_]\w+")


def core_files(root: Path) -> list[Path]:
    """Return the sources of the package, without this layer."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    outside = (*OTHERS, "compat")
    return [root / path for path in found if path.parts[0] not in outside and not path.parts[0].startswith(".")]


def touched_names() -> list[str]:
    """Return the names that parity replaces, assigns or, where they are private, reads in objects of the core."""
    names, own = set[str](), set[str]()
    for path in PARITY.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                is_of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                is_touched = isinstance(node.ctx, ast.Store) or node.attr.startswith("_")
                (own if is_of_self and isinstance(node.ctx, ast.Store) else names).update([node.attr] * is_touched)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "patch":
                names.update(one.value for one in node.args[1:2] if isinstance(one, ast.Constant))
            elif isinstance(node, ast.Constant) and str(node.value).startswith("_"):
                names.add(str(node.value))  # of a loop that patches several
            elif isinstance(node, ast.ClassDef):  # what overrides a method of the core
                names.update(one.name for one in node.body if isinstance(one, ast.FunctionDef))
    defined = {word for path in core_files(ROOT) for word in _WORD.findall(path.read_text())}
    return sorted(name for name in names & defined if not name.startswith(("__", "on_")))


def survives(name: str) -> bool:
    """Whether the tests pass after the core has renamed something."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "loopwright"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", *OTHERS, "__pycache__"))
        for path in core_files(copy):
            text = path.read_text()
            renamed = re.sub(rf"\b{name}\b", f"{name}_renamed", text)
            if renamed != text:
                path.write_text(renamed)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-c", str(ROOT / "tests" / "pytest.ini"), "-p",
                   "no:cacheprovider", "--rootdir", str(ROOT / "tests"), "-m", "not slow and not gpu",
                   *(str(ROOT / "tests" / "unit" / "compat" / part) for part in ("test_parity.py", ""))]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    unnoticed = []
    for name in sys.argv[1:] or touched_names():
        alive = survives(name)
        print(f"{name}: {'NOT NOTICED' if alive else 'noticed'}", flush=True)
        unnoticed += [name] * alive
    sys.exit(", ".join(unnoticed))
