"""Prints the structure of the package as numbers: `python benchmarks/structure.py [GIT_REF ...]`.

Without a reference the files on disk are counted; with references, one column each, as of those commits. Counted per
room (a folder): files, lines, and `Any` per thousand lines. Counted over the package: functions above 40 and 80 lines,
`Any` per thousand lines, documented public things, imports within functions, and import cycles when typing-only imports
count as imports.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

__all__ = ["Structure", "measure", "sources_of"]

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = frozenset(("tests", "docs", "examples", "benchmarks", "build", "site", "runs"))
CROWDED = 25


@dataclass
class Structure:
    """The numbers of one tree.

    Attributes:
        rooms: Folder -> (files, lines, occurrences of the name `Any`).
        functions: Lengths of all functions, in lines.
        any_names: Occurrences of the name `Any` in code: annotations, imports, casts.
        lines: Lines of all files.
        public: Public modules, classes, functions and methods, and how many of them have a docstring.
        local_imports: Import statements within functions.
        cycles: Groups of modules that import each other, typing-only imports included: their sizes, largest first.
    """

    rooms: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    functions: list[int] = field(default_factory=list)
    any_names: int = 0
    lines: int = 0
    public: tuple[int, int] = (0, 0)
    local_imports: int = 0
    cycles: list[int] = field(default_factory=list)

    def share_above(self, lines: int) -> float:
        """Return the share of functions that are longer than `lines`."""
        return sum(length > lines for length in self.functions) / max(len(self.functions), 1)


def sources_of(ref: str | None) -> dict[str, str]:
    """Return the package's Python files, path -> text: of the working tree, or of a commit."""
    if ref is None:
        names = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
        texts = {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}
    else:
        packed = subprocess.check_output(["git", "archive", ref], cwd=ROOT)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            members = [one for one in archive.getmembers() if one.name.endswith(".py")]
            texts = {one.name: _text(archive, one) for one in members}
    return {name: text for name, text in texts.items() if PurePosixPath(name).parts[0] not in OUTSIDE}


def measure(sources: dict[str, str]) -> Structure:
    """Count everything in `sources`: path -> text."""
    result = Structure()
    trees = {name: ast.parse(text, name) for name, text in sources.items()}
    rooms: dict[str, list[tuple[int, int]]] = defaultdict(list)
    documented = public = 0
    for name, tree in trees.items():
        any_names = len(re.findall(r"\bAny\b", sources[name]))
        rooms[str(PurePosixPath(name).parent)].append((sources[name].count("\n"), any_names))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                result.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
        result.any_names += any_names
        result.local_imports += sum(1 for _ in _local_imports(tree))
        for node in _public(tree):
            public += 1
            documented += ast.get_docstring(node) is not None
    for room, files in sorted(rooms.items()):
        result.rooms[room] = len(files), sum(lines for lines, _ in files), sum(found for _, found in files)
    result.lines = sum(lines for _, lines, _ in result.rooms.values())
    result.public = (public, documented)
    result.cycles = _cycles(trees)
    return result


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = archive.extractfile(member)
    assert file is not None
    return file.read().decode()


def _local_imports(tree: ast.AST, *, is_local: bool = False) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and is_local:
            yield node
        inside = is_local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _local_imports(node, is_local=inside)


def _public(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    yield tree
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        yield node
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
                yield member


def _cycles(trees: dict[str, ast.Module]) -> list[int]:
    """Return the sizes of the strongly connected groups of more than one module; imports in functions do not count."""
    modules = {_module(name): name for name in trees}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for module, name in modules.items():
        folder = PurePosixPath(name).parts[:-1]
        local = set(_local_imports(trees[name]))
        for node in ast.walk(trees[name]):
            if not isinstance(node, ast.ImportFrom) or not node.level or node in local:
                continue
            base = (*folder[: len(folder) - node.level + 1], *(node.module or "").split("."))
            target = ".".join(part for part in base if part)
            for alias in node.names:
                found = f"{target}.{alias.name}".lstrip(".")
                edges[module].add(found if found in modules else target)
    return sorted((len(group) for group in _components(edges) if len(group) > 1), reverse=True)


def _module(name: str) -> str:
    parts = PurePosixPath(name).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's strongly connected components (Tarjan 1972, SIAM J. Comput. 1(2))."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in edges:
                continue
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group: list[str] = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            found.append(group)

    sys.setrecursionlimit(10_000)
    for node in edges:
        if node not in index:
            visit(node)
    return found


def _rows(columns: list[Structure]) -> Iterator[list[str]]:
    def row(name: str, values: list[str]) -> list[str]:
        return [name, *values]

    files = [sum(count for count, _, _ in one.rooms.values()) for one in columns]
    yield row("files", [f"{count:,}" for count in files])
    yield row("lines", [f"{one.lines:,}" for one in columns])
    yield row("rooms", [str(len(one.rooms)) for one in columns])
    crowded = [[f"{room} {count}" for room, (count, _, _) in one.rooms.items() if count > CROWDED] for one in columns]
    yield row(f"rooms above {CROWDED} files", [", ".join(rooms) or "none" for rooms in crowded])
    yield row("functions above 40 lines", [f"{one.share_above(40):.1%}" for one in columns])
    yield row("functions above 80 lines", [f"{one.share_above(80):.1%}" for one in columns])
    yield row("`Any` per 1,000 lines", [f"{1000 * one.any_names / one.lines:.1f}" for one in columns])
    yield row("public things documented", [f"{one.public[1] / one.public[0]:.1%}" for one in columns])
    yield row("imports within functions", [str(one.local_imports) for one in columns])
    cycles = [", ".join(map(str, one.cycles)) or "none" for one in columns]
    yield row("import cycles with typing-only imports (modules in each)", cycles)
    for room in sorted({room for one in columns for room in one.rooms}):
        counted = [one.rooms.get(room) for one in columns]
        yield row(room, ["" if one is None else _room(*one) for one in counted])


def _room(files: int, lines: int, any_names: int) -> str:
    density = 1000 * any_names / lines if lines else 0.0
    return f"{files} files, {lines:,} lines, {density:.1f} `Any`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("refs", nargs="*", metavar="GIT_REF", help="commits to compare with the files on disk")
    refs = parser.parse_args().refs
    columns = [measure(sources_of(ref)) for ref in [*refs, None]]
    print(f"| | {' | '.join([*refs, 'now'])} |")
    print("|---" * (len(columns) + 1) + "|")
    for cells in _rows(columns):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
