"""`StrategyRegistry` and `AcceleratorRegistry`: Loopwright's registries, with the additional methods of Lightning's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...accelerators import ACCELERATOR_REGISTRY as ACCELERATORS
from ...accelerators.registry import Registry
from ...strategies import STRATEGY_REGISTRY as STRATEGIES

__all__ = ["ACCELERATOR_REGISTRY", "STRATEGY_REGISTRY", "RegistryView"]

# Any in this file: classes of any kind, and their arguments.


class RegistryView:
    """A registry whose `get` makes an instance, and whose entries are dicts. It has the same names as the registry.

    Args:
        registry: Loopwright's.
    """

    def __init__(self, registry: Registry[Any]) -> None:
        self._registry = registry

    def register(
        self, name: str, cls: type | None = None, description: str = "", override: bool = False, **init_params: object
    ) -> object:
        """Register a class under a name, directly or as a decorator."""
        return self._registry.register(name, cls, description, override, **init_params)

    def get(self, name: str, default: object = None) -> Any:
        """Return an instance of the class of this name; `default` if there is no such name."""
        if name not in self._registry and default is not None:
            return default
        return self._registry.create(name)

    def remove(self, name: str) -> None:
        """Forget a name."""
        self._registry.remove(name)

    def available_strategies(self) -> list[str]:
        """Return the names."""
        return self._registry.names()

    def available_accelerators(self) -> set[str]:
        """Return the names."""
        return set(self._registry.names())

    def keys(self) -> list[str]:
        """Return the names."""
        return self._registry.names()

    def __getitem__(self, name: str) -> dict[str, object]:
        entry = self._registry.entry(name)
        return {
            "description": entry.description,
            "init_params": dict(entry.init_params),
            self._registry.kind: entry.cls,
        }

    def __contains__(self, name: object) -> bool:
        return name in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def __str__(self) -> str:
        return f"Registered {self._registry.kind}s: {', '.join(self._registry)}"


STRATEGY_REGISTRY = RegistryView(STRATEGIES)
ACCELERATOR_REGISTRY = RegistryView(ACCELERATORS)
