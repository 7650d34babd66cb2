"""Classes by name: `EarlyStopping`, `early_stopping`, `tensorboard`, `torch.optim.Adam`, `my.module.Net`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from ..lazy import home_of, is_core, origin
from ..tracebacks import where_raised

# Any in this file: classes of any kind.


class ClassProblem(Exception):
    """A name does not lead to a matching class; the message gives the reason."""


class NotTrusted(ClassProblem):
    """A file from an unknown source names what it must not."""


@dataclass(frozen=True)
class Trust:
    """The classes that a file of possibly unknown origin may name.

    It may name classes only. A class must be imported already and derive from the class in the parameter's annotation.
    A trusted class is imported if necessary, and is also accepted if the annotation names no class.

    Attributes:
        classes: Classes that the reader of the file trusts.
    """

    classes: tuple[type[object] | ModuleType, ...] = ()

    def find(self, path: str) -> object:
        """Return the object at a dotted path.

        Raises:
            NotTrusted: It is not imported, and not trusted.
            ClassProblem: A trusted module does not have it.
        """
        path = path.replace(":", ".")
        for one in self.classes:
            if isinstance(one, ModuleType):
                if path.startswith(f"{one.__name__}."):
                    return import_object(path)
            elif path in (one.__qualname__, ".".join(origin(one)), f"{one.__module__}.{one.__qualname__}"):
                return one
        found = imported_object(path)
        if found is None:
            raise NotTrusted(f"{path} is not imported, and a file with the state of a model cannot import it")
        return found

    def check(self, found: object, bases: tuple[type[object], ...], name: str) -> type[object]:
        """Return a class that the file names.

        Raises:
            NotTrusted: It is something else, or only resembles the classes of the annotation.
        """
        if not inspect.isclass(found):
            raise NotTrusted(f"{name} is not a class, and a file with the state of a model can name classes only")
        # Not issubclass, whose answer a class may define: Popen counts as an AbstractContextManager.
        if any(base is not object and base in found.__mro__ for base in bases):
            return found
        if self._holds(found) and issubclass(found, bases):
            return found
        if object in bases:
            raise NotTrusted(f"{name} is named where the annotation names no class")
        raise NotTrusted(f"expected a {' or '.join(one.__name__ for one in bases)}, got {name}")

    def _holds(self, found: type[object]) -> bool:
        homes = tuple(f"{one.__name__}." for one in self.classes if isinstance(one, ModuleType))
        return found in self.classes or f"{home_of(found)}.".startswith(homes)


def imported_object(path: str) -> object:
    """Return the object at a dotted path without importing anything but Loopwright's parts; None if it is not there."""
    parts = path.split(".")
    loopwright = importlib.import_module("..", __package__)
    if parts[0] == loopwright.__name__ and len(parts) > 1:
        rooms = {home.partition(".")[0] for home in loopwright._HOME.values()}
        if parts[1] in (loopwright._HOME if len(parts) == 2 else {*rooms, "optim", "schedules"}):
            return import_object(path)
    for count in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            # Not getattr: a module or class may import or compute what it is asked for.
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
        if found is not None:
            return found
    return None


def import_object(path: str) -> Any:
    """Return the object at a dotted path; a colon may precede the last part.

    Raises:
        ClassProblem: It cannot be imported.
    """
    parts = path.replace(":", ".").split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue  # a shorter part of it may be a module
            where = where_raised(error)
            raise ClassProblem(
                f"{path}: the module {name} needs {error.name}, which is not installed{f' ({where})' if where else ''}"
            ) from error
        except Exception as error:  # raised by the module's own code
            text = error.msg if isinstance(error, SyntaxError) else error
            raise ClassProblem(
                f"{path}: importing {name} raised {type(error).__name__}: {text} ({where_raised(error)})"
            ) from error
        for number, part in enumerate(parts[count:], count):
            if not hasattr(found, part):
                near = get_close_matches(part, dir(found), n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ClassProblem(f"{path}: {'.'.join(parts[:number])} has no {part!r}{hint}")
            found = getattr(found, part)
        return found
    raise ClassProblem(f"{path}: module {parts[0]!r} not found in the current folder or among installed packages")


def find_class(name: str, base: type[Any] | tuple[type[object], ...], trust: Trust | None = None) -> type[object]:
    """Return the class of a name.

    Args:
        name: A dotted path, or the name of a known subclass; upper and lower case, underscores, and the base's own name
            at the end do not matter ("csv" is CSVLogger).
        base: What it must be a subclass of.
        trust: What may be named; None if the user has written the name.

    Raises:
        ClassProblem: There is none, or several; or it is something else.
    """
    bases = base if isinstance(base, tuple) else (base,)
    if trust is not None and ("." in name or ":" in name or object in bases):
        return trust.check(trust.find(name), bases, name)
    shown = " or ".join(one.__name__ for one in bases)
    if "." in name or ":" in name:
        found = import_object(name)
        if not inspect.isclass(found):
            raise ClassProblem(f"expected a class of {shown}, got {name}")
        if not issubclass(found, bases):
            raise ClassProblem(f"expected a {shown}, got {name}")
        return found
    own = [one for one in bases if one.__name__ == name and not inspect.isabstract(one)]
    known = list(dict.fromkeys([*own, *known_classes(bases)]))
    endings = [_folded(one.__name__) for one in bases]
    matches = [one for one in known if one.__name__ == name] or [
        one
        for one in known
        if _folded(name) and _folded(one.__name__) in (_folded(name), *(_folded(name) + ending for ending in endings))
    ]
    # The program's own classes come first, then those that a program for Lightning sees under its names.
    own = [one for one in matches if one.__module__ == "__main__"] or [one for one in matches if _is_served(one)]
    usual = [one for one in matches if one.__module__.startswith("torch.") or not _is_installed(one)]
    if not own and not usual and (of_package := _of_package(name, bases)) is not None:
        return of_package if trust is None else trust.check(of_package, bases, name)
    own = own or _without_other_libraries(matches)
    if len(own) == 1:
        return own[0] if trust is None else trust.check(own[0], bases, name)
    if own:
        paths = ", ".join(sorted(".".join(origin(one)) for one in own))
        raise ClassProblem(f"{name} is ambiguous ({paths}): write the full path")
    near = get_close_matches(name, [*(one.__name__ for one in known), *known_makers(bases)], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ClassProblem(f"no {shown} is called {name!r}{hint}; write package.module.Class for your own class")


# Names of optimizers of other packages, folded as in `find_class`. They mean the same classes
# whatever else is imported, unless the program or torch has a class of the name.
_OPTIMIZERS = {
    **{one.lower(): f"pytorch_optimizer.{one}" for one in ("AdEMAMix", "Lamb", "LARS", "Lion", "Prodigy", "SOAP")},
    **{f"{one.lower()}schedulefree": f"schedulefree.{one}ScheduleFree" for one in ("AdamW", "RAdam", "SGD")},
    **{one.lower(): f"bitsandbytes.optim.{one}" for one in ("Adam8bit", "AdamW8bit", "Lion8bit", "PagedAdamW8bit")},
    **{one.lower(): f"torchao.optim.{one}" for one in ("AdamW4bit", "AdamWFp8")},
}


def _of_package(name: str, bases: tuple[type[object], ...]) -> type[object] | None:
    """Return the optimizer of another package that a name without a path means; None for other names.

    Raises:
        ClassProblem: The package is not installed.
    """
    path = _OPTIMIZERS.get(_folded(name)) if any(base.__name__ == "Optimizer" for base in bases) else None
    if path is None:
        return None
    package = path.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        wanted = {"bitsandbytes": "'loopwright[qlora]'", "torchao": "'loopwright[float8]'"}.get(package, package)
        raise ClassProblem(f"{name} is {path}, and {package} is not installed: pip install {wanted}")
    if package == "bitsandbytes":
        from ..precision.quantized import import_bitsandbytes

        import_bitsandbytes()  # without code from the hub
    found: type[object] = import_object(path)
    return found


def find_maker(name: str, base: type[Any], trust: Trust | None = None) -> Callable[..., object]:
    """Return the class of a name, as `find_class`, or a function by its path that is annotated to return such a class.

    Names of `known_makers` need no path. With `trust`, the function must be one of Loopwright's public ones.

    Raises:
        ClassProblem: There is none, or several; or it is something else.
    """
    if name.lower() in (known := known_makers((base,))):
        return known[name.lower()]
    if "." in name or ":" in name:
        found: Any = import_object(name) if trust is None else imported_object(name)
        if inspect.isfunction(found) and (trust is None or is_core(found)):
            try:
                made = typing.get_type_hints(found).get("return")
            except NameError:  # an annotation for type checkers only
                made = None
            if inspect.isclass(made) and issubclass(made, base):
                return found
    return find_class(name, base, trust)


def known_makers(bases: Iterable[type[object]]) -> dict[str, Callable[..., object]]:
    """Return Loopwright's functions that can be named without a path, where one of the classes is a schedule's."""
    if not any(base.__name__ == "LRScheduler" for base in bases):
        return {}
    schedules: dict[str, Callable[..., object]] = importlib.import_module("..schedules", __package__).SCHEDULES
    return schedules


def known_classes(bases: Iterable[type[object]]) -> Iterator[type[object]]:
    """Yield subclasses that can be named without a path: Loopwright's public ones, torch's, and imported ones."""
    bases = tuple(bases)
    seen: set[type[Any]] = set()
    for one in [*_public(bases), *_below(bases)]:
        if one not in seen and not one.__name__.startswith("_") and not inspect.isabstract(one):
            seen.add(one)
            yield one


def _public(bases: tuple[type[object], ...]) -> Iterator[type[object]]:
    """Yield Loopwright's public classes and torch's optimizers and schedules, which may not be imported yet."""
    loopwright = importlib.import_module("..", __package__)
    folders = {home_of(base).split(".")[1] for base in bases if is_core(base)}
    for name, home in loopwright._HOME.items():
        if home.partition(".")[0] in folders:
            found = getattr(loopwright, name)
            if inspect.isclass(found) and issubclass(found, bases):
                yield found
    if any(base.__module__.startswith("torch.optim") for base in bases):
        import torch

        for module in (torch.optim, torch.optim.lr_scheduler):
            for found in vars(module).values():
                if inspect.isclass(found) and issubclass(found, bases):
                    yield found


def _below(bases: Iterable[type[object]]) -> Iterator[type[object]]:
    for base in bases:
        for one in base.__subclasses__() if base is not object else ():
            # A class that was imported again, or created in a function, cannot be named.
            is_there = getattr(sys.modules.get(home_of(one)), one.__name__, None) is one
            # Loopwright's nameable classes are public, or represent another library's.
            if is_there and (_is_served(one) or not is_core(one)):
                yield one
            yield from _below([one])


def _without_other_libraries(matches: list[type[object]]) -> list[type[object]]:
    """Return those of torch and Loopwright if all others are of installed packages, which something has imported."""
    usual = [one for one in matches if is_core(one) or one.__module__.partition(".")[0] == "torch"]
    others = [one for one in matches if one not in usual]
    return usual if usual and all(map(_is_installed, others)) else matches


def _is_installed(one: type[object]) -> bool:
    package = sys.modules.get(one.__module__.partition(".")[0])
    file = getattr(package, "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_served(one: type[object]) -> bool:
    """Return whether a class represents one of another library, in a program written for that library.

    An import hook that serves another library's names says in `serves_classes_of` in which package such classes are.
    """
    homes = (getattr(finder, "serves_classes_of", None) for finder in sys.meta_path)
    return any(home is not None and home_of(one).startswith(home) for home in homes)


def _folded(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
