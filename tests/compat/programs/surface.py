"""Writes what a namespace has as JSON: `surface.py theirs OUT`, then `surface.py ours OUT THEIRS`.

For every public module of Lightning: its public names, with the signature of each function and constructor, and the
public methods and properties of each class. "ours" answers for the modules and names in THEIRS.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import sys
import warnings

ROOTS = ("lightning", "lightning.pytorch", "lightning.fabric")


def defined(body):
    """Yield the names that a module's source defines."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from defined(node.body)
            yield from defined(node.orelse)
        elif isinstance(node, ast.Try):
            yield from defined(node.body)


def signature(target):
    try:
        found = inspect.signature(target)
    except (ValueError, TypeError):
        return None
    return [[one.name, one.kind.name, one.default is not one.empty] for one in found.parameters.values()]


def described(value):
    if inspect.isclass(value):
        members = {}
        for name in dir(value):
            if name.startswith("_"):
                continue
            owner = next((one for one in value.__mro__ if name in vars(one)), None)
            if owner is not None:
                found = inspect.getattr_static(value, name)
                found = getattr(found, "__func__", found)
                own = owner.__module__.partition(".")[0] in ("lightning", "loopwright")
                members[name] = [own, signature(found) if callable(found) else None]
        is_served = all(kind.__name__ != "Absent" for kind in type(value).__mro__)
        return {"kind": "class", "signature": signature(value), "members": members, "is_served": is_served}
    if inspect.ismodule(value):
        return {"kind": "module"}
    return {"kind": "function", "signature": signature(value)} if inspect.isroutine(value) else {"kind": "value"}


def source(module):
    with open(module.__file__) as file:
        return file.read()


def theirs():
    modules = ["lightning"]
    for root in ROOTS[1:]:
        package = importlib.import_module(root)
        modules += [root, *(one.name for one in pkgutil.walk_packages(package.__path__, f"{root}."))]
    found = {}
    for name in modules:
        if any(part.startswith("_") for part in name.split(".")):
            continue
        module = importlib.import_module(name)
        names = {*defined(ast.parse(source(module)).body), *getattr(module, "__all__", ())}
        found[name] = {
            one: described(getattr(module, one))
            for one in sorted(names)
            if not one.startswith("_") and hasattr(module, one)
        }
    return found


def ours(path):
    with open(path) as file:
        wanted = json.load(file)
    found = {}
    for name, names in wanted.items():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        found[name] = {one: described(getattr(module, one)) for one in names if hasattr(module, one)}
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    surface = theirs() if sys.argv[1] == "theirs" else ours(sys.argv[3])
    with open(sys.argv[2], "w") as out:
        json.dump(surface, out)
