"""Imports inside the package go one way, so that each folder can be read with only those below it in mind."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx

from .sources import ROOT, package_files, place, tree_of

# A folder or file may import what stands in an earlier row, and itself.
LAYERS = (
    {"errors", "messages", "protocols"},
    {"yaml_file"},
    {"console", "deferred_compiler", "files", "lazy", "remote", "sagemaker", "tree"},
    {"tracebacks"},
    {"settings"},
    {"accelerators"},
    {"optim", "precision"},
    {"strategies"},
    {"checkpoint", "data"},
    {"fabric"},
    {"planning"},
    {"callbacks", "loggers", "profilers", "report", "schedules", "doctor"},
    {"trainer"},
    {"demos", "integrations", "tuner"},
    {"compat"},
    {"cli"},
    {"recipes"},
    {"__main__"},
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

# Imports within a function that go to the side or up: (file or folder, imported part) and why.
DOCUMENTED = {
    ("compat/lightning/cli", "cli"): "Lightning's command line has the types of the Trainer's arguments",
    ("settings/names.py", "precision"): "imports bitsandbytes as precision does, without code from the hub",
    ("settings/typed.py", "loggers"): "a logger gets the folder of the run where its own is not set",
    ("checkpoint/hparams.py", "data"): "puts saved hyperparameters into the module that it builds",
    ("callbacks/batch_size_finder.py", "tuner"): "searches when a verb begins",
    ("callbacks/sentinel/callback.py", "trainer"): "runs a window again, with the loop's own parts",
    ("callbacks/monitors/spike_detection.py", "trainer"): "rolls a run back",
    ("callbacks/lr_finder.py", "tuner"): "searches when fit begins",
    ("data/module.py", "checkpoint"): "DataModule.load_from_checkpoint reads a checkpoint",
}

# Annotations that name lw.Trainer, because users annotate it there: a hook whose base takes a wider type could not be
# overridden with `trainer: lw.Trainer`, and `self.trainer` of a module or data module is theirs to use.
OF_USERS = ("callbacks/", "data/module.py", "trainer/module.py")

# Folders whose modules are looked up by name when they are first used.
LATE = {"compat/lightning/cli"}


def imports(file: Path) -> Iterator[tuple[ast.AST, str, bool]]:
    """Give what a file imports of the package: the node, the part, and whether it is within a function."""
    parts = file.relative_to(ROOT).parts

    def walk(node: ast.AST, *, is_lazy: bool) -> Iterator[tuple[ast.AST, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and child.level:
                folder = parts[: len(parts) - child.level]
                target = [*folder, *(child.module or "").split(".")]
                target = [name for name in target if name]
                for name in [target[0]] if target else [alias.name for alias in child.names]:
                    yield child, name, is_lazy
            elif isinstance(child, ast.Import | ast.ImportFrom):
                names = [child.module or ""] if isinstance(child, ast.ImportFrom) else [a.name for a in child.names]
                assert not any(name.split(".")[0] == "loopwright" for name in names), (
                    f"{place(file, child)}: imports inside the package are relative"
                )
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, is_lazy=is_lazy or is_function)

    yield from walk(tree_of(file), is_lazy=False)


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_part_of_the_package_has_its_place_in_the_order() -> None:
    assert {part_of(file) for file in package_files()} - {"__init__"} == set(RANK)


def test_imports_go_one_way() -> None:
    wrong = []
    used = set()
    for file in package_files():
        here = part_of(file)
        if here == "__init__":
            continue  # looks public names up when they are first used
        for node, part, is_lazy in imports(file):
            if part in ("__version__", here) or RANK[part] < RANK[here]:
                continue
            path = file.relative_to(ROOT)
            documented = {(str(path), part), (str(path.parent), part)} & set(DOCUMENTED)
            if documented and (is_lazy or str(path.parent) in LATE):
                used |= documented
                continue
            wrong.append(f"{place(file, node)}: {here} imports {part}")
    assert not wrong, "\n".join(wrong)
    assert used == set(DOCUMENTED), "an exception that nothing needs any more"


def test_lazy_alone_decides_whose_a_class_is() -> None:
    # A class may show another library's path: `is_core` and `home_of` see through it.
    by_path = re.compile(r"""\.__module__\b.*("loopwright|_OWN|_PACKAGE|__package__|__name__\.partition)""")
    lines = [(file, line) for file in package_files() for line in file.read_text().splitlines()]
    assert [f"{file.relative_to(ROOT)}: {line.strip()}" for file, line in lines if by_path.search(line)] == []


def test_few_files_know_each_other_by_their_types() -> None:
    graph = import_graph()
    trainer = "trainer/trainer.py"
    graph.remove_edges_from([(file, trainer) for file in graph if file.startswith(OF_USERS)])
    largest = max(networkx.strongly_connected_components(graph), key=len)
    assert len(largest) <= 20, sorted(largest)


def import_graph() -> networkx.DiGraph[str]:
    """Return which file imports which, also within functions and for types; a package's name is where it is defined."""
    files = {str(file.relative_to(ROOT)): tree_of(file) for file in package_files()}
    homes = {
        (key, alias): home
        for key, tree in files.items()
        if key.endswith("__init__.py")
        for alias, home in _relative_imports(key, tree)
    }
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for key, tree in files.items():
        if key.endswith("__init__.py"):
            continue  # a list of names
        for name, target in _relative_imports(key, tree):
            while (f"{target}/__init__.py", name) in homes:
                target = homes[f"{target}/__init__.py", name]
            for found in (f"{target}.py", f"{target}/{name}.py"):
                if found in files and found != key:
                    graph.add_edge(key, found)
    return graph


def _relative_imports(key: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = key.split("/")[: -node.level]
            target = "/".join([*folder, *(node.module or "").split(".")]).rstrip("/")
            yield from ((alias.name, target) for alias in node.names)
