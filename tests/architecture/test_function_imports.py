"""Imports within functions: only of what is optional, or costs more than 50 ms. All others stand at the top of a file.

An import may stand within a function if it is of

1. a package that is not required: it may be absent;
2. a module that takes more than 50 ms over `import torch` (`HEAVY`), or a module of the package that imports one, or
   torch, where the file that imports it does without;
3. a module that `import loopwright.Trainer` does not load, in a file that it does load, or that a verb loads as well
   (the sessions): a feature of some runs;
4. an engine (`strategies/ddp`, ...), a part of a mesh (`strategies/mesh/pipeline`, ...) or a command of the command
   line: a process uses one of several;
5. a part that stands in a later row of the order of imports (`test_import_order.DOCUMENTED`);
6. a package that a run needs for its terminal or for URLs alone (`RARELY_NEEDED`), or a module of the package that
   imports it: the first step does not wait for it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .sources import ROOT, package_files, place, tree_of
from .test_import_order import DOCUMENTED

MIN_MS = 50
# Module -> milliseconds over `import torch`, measured with torch 2.13 on a CPU in fresh interpreters.
HEAVY = {
    "omegaconf": 88,
    "tensorboard": 117,
    "torch._dynamo": 1370,
    "torch._inductor": 1344,
    "torch.distributed.checkpoint": 508,
    "torch.distributed.fsdp": 495,
    "torch.distributed.tensor": 445,
    "torch.utils.cpp_extension": 297,
    "torch.utils.tensorboard": 124,
}
# Packages that come with a required one, by the name under which they are imported.
COMES_WITH_REQUIRED = {"google": "tensorboard", "yaml": "omegaconf", "typing_extensions": "torch"}
RARELY_NEEDED = {"rich", "fsspec"}
PLATFORM = {"fcntl", "readline", "resource"}  # absent on Windows
MESH_PARTS = {"pipeline", "tensor", "context", "experts"}
ENGINES = {"ddp", "deepspeed", "fsdp", "mesh", "xla"}
# (file, module): why an import stands within a function although no rule above allows it.
EXCUSED = {
    ("cli/commands/launch.py", "loopwright.cli.commands.launch_ray"): "one of two ways to start, of which one is used",
    ("report/sources.py", "google.protobuf.message"): "in one `try` with tensorboard",
    ("strategies/deepspeed/builds.py", "torch.utils"): "its cpp_extension is heavy",
    ("strategies/deepspeed/builds.py", "torch"): "only to name the version of torch",
    (
        "strategies/ddp/comm_hooks.py",
        "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    ): "one of several hooks, of which a run uses one",
    (
        "strategies/ddp/comm_hooks.py",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    ): "needs numpy, which may be absent",
}


def test_only_optional_or_expensive_imports_stand_within_functions() -> None:
    wrong = []
    excused = set()
    for file in package_files():
        for node in _imports(tree_of(file), is_local=True):
            for target in _targets(file, node):
                if _is_allowed(file, target):
                    continue
                key = (str(file.relative_to(ROOT)), target)
                excused.add(key)
                if key not in EXCUSED:
                    wrong.append(f"{place(file, node)}: import {target} at the top of the file")
    assert not wrong, "\n".join(wrong)
    assert excused == set(EXCUSED), "an excuse that nothing needs any more"


def test_no_cycle_at_run_time() -> None:
    edges = {module: _own(file) for module, file in _modules().items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for other in sorted(edges[module]):
            visit(other, (*path, module))
        done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize("module", sorted(HEAVY))
def test_what_is_called_heavy_is_not_loaded_by_torch(module: str) -> None:
    # The milliseconds depend on the machine; that a module adds to `import torch` does not.
    assert HEAVY[module] > MIN_MS
    assert module not in _started() or module.split(".")[0] == "loopwright"


def _is_allowed(file: Path, target: str) -> bool:
    module, modules = _name(file), _modules()
    if target not in modules:
        root = target.split(".")[0]
        if (
            root in PLATFORM
            or root in RARELY_NEEDED
            or (root not in _required() and root not in sys.stdlib_module_names)
        ):
            return True
        if module in _started() and target not in _started():
            return True
        needs = _needs(target)
        return bool(needs - _closure(module))
    if any(module in loaded and target not in loaded for loaded in (_started(), _in_verbs())):
        return True
    engine = target.split(".")[2] if target.startswith("loopwright.strategies.") else ""
    if engine in ENGINES and not module.startswith(f"loopwright.strategies.{engine}"):
        return True
    parts = target.split(".")[:4]
    is_part = parts[:3] == ["loopwright", "strategies", "mesh"] and parts[-1] in MESH_PARTS
    if is_part and module.split(".")[:4] != parts:
        return True
    if module == "loopwright.cli" and target.startswith("loopwright.cli.commands."):
        return True
    if (str(file.relative_to(ROOT)), target.split(".")[1] if "." in target else "") in DOCUMENTED:
        return True
    return bool(_closure(target) - _closure(module))


def _needs(target: str) -> set[str]:
    """Return what makes an import expensive or optional: torch, a heavy module, or a package that may be absent."""
    heavy = {name for name in HEAVY if target == name or target.startswith(f"{name}.")}
    root = target.split(".")[0]
    if root == "torch":
        return heavy | {"torch"}
    if root in RARELY_NEEDED:
        return {root}
    return heavy if root in _required() or root in sys.stdlib_module_names else {root}


@cache
def _closure(module: str) -> frozenset[str]:
    """Return what importing a module of the package needs at the top of the files that this loads."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        file = _modules()[one]
        waiting += _own(file)
        if "." in one:
            waiting.append(one.rpartition(".")[0])
        for target in _at_top(file) - _own(file):
            found |= _needs(target)
    return frozenset(found)


def _own(file: Path) -> frozenset[str]:
    return _at_top(file) & _modules().keys()


@cache
def _at_top(file: Path) -> frozenset[str]:
    """Return what a file imports outside functions."""
    nodes = _imports(tree_of(file), is_local=False)
    return frozenset(target for node in nodes for target in _targets(file, node))


def _imports(tree: ast.AST, *, is_local: bool, inside: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            if inside is is_local:
                yield node
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(node, is_local=is_local, inside=inside or is_function)


def _targets(file: Path, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        package = ("loopwright", *file.relative_to(ROOT).parts[:-1])
        base = ".".join((*package[: len(package) - node.level + 1], *([node.module] if node.module else [])))
    for alias in node.names:
        name = f"{base}.{alias.name}"
        home = _homes(base).get(alias.name)
        yield name if name in _modules() else f"{base}.{home}" if home is not None else base


def _name(file: Path) -> str:
    parts = ("loopwright", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _modules() -> dict[str, Path]:
    return {_name(file): file for file in package_files()}


@cache
def _homes(package: str) -> dict[str, str]:
    """Return the names that a package imports when they are first used, and their modules (`lazy.attach`)."""
    if package not in _modules():
        return {}
    tree = tree_of(_modules()[package])
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    tables = [call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "attach"]
    found: dict[str, str] = {}
    for table in tables:
        if isinstance(table, ast.Name):
            values = [one.value for one in tree.body if isinstance(one, ast.Assign) and _assigns(one, table.id)]
            values += [one.value for one in tree.body if isinstance(one, ast.AnnAssign) and _assigns(one, table.id)]
        else:
            values = [table]
        found.update(ast.literal_eval(values[0]) if values and values[0] is not None else {})
    return found


def _assigns(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


@cache
def _required() -> frozenset[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    names = {re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0] for line in project["dependencies"]}
    assert set(COMES_WITH_REQUIRED.values()) <= names
    return frozenset(names | set(COMES_WITH_REQUIRED))


@cache
def _in_verbs() -> frozenset[str]:
    """Return the modules that are loaded when a Trainer has begun to train and to evaluate."""
    names = ", ".join(f"loopwright.trainer.session.{name}" for name in ("fit", "evaluation"))
    program = f"import torch, loopwright, sys; loopwright.Trainer; import {names}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    return frozenset(done.stdout.split())


@cache
def _started() -> frozenset[str]:
    """Return the modules that are loaded after `import torch` and `loopwright.Trainer`."""
    program = "import torch, loopwright, sys; loopwright.Trainer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    return frozenset(done.stdout.split())
