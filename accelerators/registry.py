"""A registry of named classes, for accelerators and strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, TypeVar, overload

from ..errors import ConfigError, nearest
from .base import Accelerator

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class RegistryEntry(Generic[T]):
    """The class and arguments that are registered under a name."""

    target: type[T] | str  # a class, or its location: "package.module:Class"
    description: str
    init_params: dict[str, object] = field(default_factory=dict)  # arguments of the user's own class

    @property
    def cls(self) -> type[T]:
        """The class, imported at its first use."""
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.partition(":")
        found: type[T] = getattr(import_module(module), name)
        return found

    @property
    def class_name(self) -> str:
        """Name of the class, which is not imported for it."""
        return self.target.partition(":")[2] if isinstance(self.target, str) else self.target.__name__


class Registry(Generic[T]):
    """Names, in any case, and their classes, in the order of registration.

    Args:
        kind: Kind of the classes, for error messages ("accelerator").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._lw_entries: dict[str, RegistryEntry[T]] = {}

    @overload
    def register(
        self, name: str, cls: type[T], description: str | None = None, override: bool = False, **init_params: object
    ) -> type[T]: ...

    @overload
    def register(
        self, name: str, cls: None = None, description: str | None = None, override: bool = False, **init_params: object
    ) -> Callable[[C], C]: ...

    def register(
        self,
        name: str,
        cls: type[Any] | None = None,
        description: str | None = None,
        override: bool = False,
        **init_params: object,  # Any: arguments of the user's own class
    ) -> object:
        """Register a class under a name, either at once or as a decorator (``@registry.register("name")``).

        Args:
            name: Name for users, in any case.
            cls: The class; None to use the result as a decorator. Its other names are `strategy_class` and `strategy`
                in the registry of strategies, and in the same way for other kinds.
            description: One line for listings; None means none.
            override: Whether an earlier class of that name is replaced.
            init_params: Keyword arguments for `create`, so that one class can have several names.

        Returns:
            The class, or the decorator.

        Raises:
            ConfigError: The name is not a string or is taken, the target is not a class, or it was passed twice.
        """
        given: list[Any] = [cls, *(init_params.pop(other, None) for other in (f"{self.kind}_class", self.kind))]
        classes = [one for one in given if one is not None]
        if len(classes) > 1:
            raise ConfigError(
                f"Expected one class for the {self.kind} {name!r}, got {len(classes)} arguments for it.",
                fix=f"pass it once, as in register({name!r}, MyClass).",
            )
        key = self._lw_key(name) if override else self._lw_free_key(name)

        def add(target: type[T]) -> type[T]:
            if not isinstance(target, type):
                raise ConfigError(
                    f"Expected a class for the {self.kind} {name!r}, got {target!r}.",
                    fix=f"pass the class itself, as in register({name!r}, MyClass).",
                )
            self._lw_entries[key] = RegistryEntry(target, description or "", init_params)
            return target

        return add(classes[0]) if classes else add

    def register_lazily(self, name: str, target: str, description: str | None = None, **init_params: object) -> None:
        """Register a class without importing it; `get` and `create` import it.

        Args:
            name: As in `register`.
            target: Location of the class, "package.module:Class".
            description: As in `register`.
            init_params: As in `register`.

        Raises:
            ConfigError: The name is taken.
        """
        self._lw_entries[self._lw_free_key(name)] = RegistryEntry(target, description or "", init_params)

    def get(self, name: str, default: type[T] | None = None) -> type[T]:
        """Return the class registered under a name.

        Args:
            name: The name, in any case.
            default: Returned for an unknown name; None means that an unknown name is an error.

        Raises:
            ConfigError: The name is unknown; the message lists the known ones.
        """
        entry = self._lw_entries.get(self._lw_key(name))
        if entry is not None:
            return entry.cls
        if default is not None:
            return default
        raise self._lw_unknown(name)

    def create(self, name: str, **init_params: Any) -> T:  # Any: arguments of the user's own class
        """Return a new instance of the class registered under a name, made with its registered arguments.

        Args:
            name: The name, in any case.
            init_params: Further arguments; they win over the registered ones.

        Raises:
            ConfigError: The name is unknown; the message lists the known ones.
        """
        entry = self._lw_entries.get(self._lw_key(name))
        if entry is None:
            raise self._lw_unknown(name)
        return entry.cls(**{**entry.init_params, **init_params})

    def remove(self, name: str) -> None:
        """Remove a name; an unknown one is a ConfigError with the known ones."""
        if self._lw_entries.pop(self._lw_key(name), None) is None:
            raise self._lw_unknown(name)

    def description(self, name: str) -> str:
        """Return the line that was given when the name was registered, or an empty string."""
        entry = self._lw_entries.get(self._lw_key(name))
        return entry.description if entry else ""

    def entry(self, name: str) -> RegistryEntry[T]:
        """Return what is registered under a name, in lower case.

        Raises:
            KeyError: Nothing is.
        """
        return self._lw_entries[name.lower()]

    def names(self) -> list[str]:
        """Return all names, in the order in which they were registered."""
        return list(self._lw_entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._lw_entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._lw_entries)

    def _lw_key(self, name: object) -> str:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"Expected a string that is not empty for the name of a {self.kind}, got {name!r}.",
                fix=f"name the {self.kind} with a string, such as {'cpu' if self.kind == 'accelerator' else 'ddp'!r}.",
            )
        return name.lower()

    def _lw_free_key(self, name: object) -> str:
        key = self._lw_key(name)
        if key in self._lw_entries:
            raise ConfigError(
                f"the {self.kind} name {name!r} is already registered, for {self._lw_entries[key].class_name}.",
                fix="choose another name, or pass override=True.",
            )
        return key

    def _lw_unknown(self, name: str) -> ConfigError:
        return ConfigError(
            f"no {self.kind} is registered as {name!r}{nearest(name.lower(), self._lw_entries)}.",
            fix=f"use one of: {', '.join(self._lw_entries) or 'none is registered'}.",
        )


class AcceleratorRegistry(Registry[Accelerator]):
    """The accelerators for `Trainer(accelerator="name")`.

    A new kind of device is one class with `auto_priority` and, if it is a graphics card, `is_gpu`, and one call of
    `register`: "auto" and "gpu" find it.
    """

    def __init__(self) -> None:
        super().__init__("accelerator")

    def available_accelerators(self) -> set[str]:
        """Return the registered names, whether or not this machine has the device."""
        return set(self.names())


ACCELERATOR_REGISTRY = AcceleratorRegistry()
"""The registry that Trainer and Fabric read."""
