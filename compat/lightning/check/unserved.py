"""Uses of Lightning that are not supported, found in the source of a program before anything runs.

`find_unserved` reads the text of a file. It knows names that are imported, attributes of imported modules, of Trainers
and of `self.trainer`, keyword arguments of what is called by an imported name, and overridden methods that are never
called.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import MissingDependency
from ...absent import NotServed
from .. import install, is_installed, uninstall
from ..imports.finder import ROOTS
from ..imports.never_called import find_never_called

__all__ = ["Use", "find_unserved", "local_imports"]


class Use(NamedTuple):
    """A use of something that is not supported.

    Attributes:
        line: Its line, from 1.
        what: The name, attribute or argument.
        why: What is wrong with it.
    """

    line: int
    what: str
    why: str


def find_unserved(source: str, filename: str) -> list[Use]:
    """Return the uses of Lightning in a program that are not supported, by line.

    Args:
        source: Its text.
        filename: Named in errors.

    Raises:
        SyntaxError: The text is not Python.
    """
    tree = ast.parse(source, filename)
    was_installed = is_installed()
    if not was_installed:
        install(children=False, parity=False)
    try:
        return sorted(set(_Reader(tree).uses()))
    finally:
        if not was_installed:
            uninstall()


class _Reader:
    """Reads one file.

    Args:
        tree: Its syntax.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._objects: dict[str, Any] = {}  # Any: a module of the tables, or what a name means
        self._trainers = {"self.trainer"}
        self._trainer: Any = None
        self._bases: dict[str, list[type]] = {}  # class of the program -> its base classes

    def uses(self) -> Iterator[Use]:
        """Yield what is not supported."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                yield from self._read_import(node)
            elif isinstance(node, ast.ImportFrom) and not node.level and _is_lightning(node.module):
                yield from self._read_names(node)
        if not self._objects:
            return
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                found = self._find(node.value.func)
                if inspect.isclass(found) and found.__name__ == "Trainer":
                    self._trainers.update(ast.unparse(target) for target in node.targets)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef):
                yield from self._read_class(node)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield from self._read_attribute(node)
            elif isinstance(node, ast.Call):
                yield from self._read_call(node)

    # --- imports ---------------------------------------------------------------------------------------------------

    def _read_import(self, node: ast.Import) -> Iterator[Use]:
        for alias in node.names:
            if not _is_lightning(alias.name):
                continue
            try:
                module = import_module(alias.name)
            except ImportError:
                yield Use(node.lineno, alias.name, "cannot be imported")
                continue
            root = alias.name.split(".")[0]
            self._objects[alias.asname or root] = module if alias.asname else sys.modules[root]

    def _read_names(self, node: ast.ImportFrom) -> Iterator[Use]:
        place = str(node.module)
        try:
            module = import_module(place)
        except ImportError:
            yield Use(node.lineno, place, "cannot be imported")
            return
        for alias in node.names:
            if alias.name == "*":
                names = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
                self._objects.update(names)
                continue
            try:
                found = getattr(module, alias.name)
            except (AttributeError, ImportError) as error:
                yield Use(node.lineno, f"{place}.{alias.name}", _why_not_found(error))
                continue
            self._objects[alias.asname or alias.name] = found
            yield from _absence(node.lineno, f"{place}.{alias.name}", found)

    # --- uses ------------------------------------------------------------------------------------------------------

    def _find(self, node: ast.expr) -> Any:
        """Return what an expression means by imported names; None where that is unknown."""
        if isinstance(node, ast.Name):
            return self._objects.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._find(node.value)
        try:
            return getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
        except MissingDependency:  # `_read_attribute` reports it
            return None

    def _read_attribute(self, node: ast.Attribute) -> Iterator[Use]:
        text = ast.unparse(node)
        owner = self._find(node.value)
        if inspect.ismodule(owner) and _is_lightning(owner.__name__):
            try:
                found = getattr(owner, node.attr)
            except (AttributeError, ImportError) as error:
                yield Use(node.lineno, text, _why_not_found(error))
                return
            yield from _absence(node.lineno, text, found)
        elif ast.unparse(node.value) in self._trainers and not self._has_trainer(node.attr):
            yield Use(node.lineno, text, "a Trainer has no such attribute here")

    def _has_trainer(self, name: str) -> bool:
        if self._trainer is None:
            make = import_module("lightning.pytorch").Trainer
            self._trainer = make(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        # Some properties raise their own error outside of a run.
        return hasattr(type(self._trainer), name) or hasattr(self._trainer, name)

    def _read_class(self, node: ast.ClassDef) -> Iterator[Use]:
        bases: list[type] = []
        for expression in node.bases:
            found = self._find(expression)
            if inspect.isclass(found):
                bases.append(found)
            elif isinstance(expression, ast.Name):
                bases += self._bases.get(expression.id, [])
        self._bases[node.name] = bases
        methods = {one.name: one.lineno for one in node.body if isinstance(one, ast.FunctionDef)}
        for base in bases:
            for name, owner in find_never_called(base).items():
                for method in (name,) if name != "*" else tuple(methods):
                    if method in methods and method != "__init__":
                        yield Use(methods[method], f"{node.name}.{method}", f"overrides {owner}'s, never called here")

    def _read_call(self, node: ast.Call) -> Iterator[Use]:
        found = self._find(node.func)
        if found is None or not callable(found) or _is_absent(found):
            return
        try:
            parameters = inspect.signature(found).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            return
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in parameters:
                yield Use(node.lineno, f"{ast.unparse(node.func)}({keyword.arg}=...)", "takes no such argument here")


def _why_not_found(error: Exception) -> str:
    if isinstance(error, MissingDependency):
        return f"the package {error.package!r} is not installed here: {error.fix}"
    return "is not a name of that module here"


def _is_lightning(name: str | None) -> bool:
    return name is not None and name.split(".")[0] in ROOTS


def _is_absent(found: object) -> bool:
    if inspect.ismodule(found):  # an unknown name of one may import a package that is not installed
        return False
    return hasattr(type(found), "_why") or "_why" in vars(type(found)) or hasattr(found, "_why")


def _absence(line: int, name: str, found: object) -> Iterator[Use]:
    """Yield that a name can be imported, and not used."""
    if _is_absent(found):
        yield Use(line, name, str(getattr(found, "_why", NotServed.__doc__)))


def local_imports(path: Path, folder: Path) -> list[Path]:
    """Return the files in a program's folder that a file imports.

    Args:
        path: The file.
        folder: Where the program's own modules are.

    Raises:
        OSError: The file cannot be read.
        SyntaxError: It is not Python.
    """
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    homes = {folder, path.parent}
    found = {
        file.resolve()
        for name in names
        for home in homes
        for file in (home.joinpath(*name.split(".")).with_suffix(".py"), home.joinpath(*name.split("."), "__init__.py"))
        if file.is_file()
    }
    return sorted(found)
