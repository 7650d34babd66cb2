"""`optimizer_class`: the class of an optimizer by its name, as settings and the command line have it."""

from __future__ import annotations

from torch.optim import Optimizer

from ..errors import ConfigError
from ..settings.names import ClassProblem, find_class


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of an optimizer of torch, or of a package that has it.

    >>> optimizer = lw.optim.optimizer_class("lamb")(self.parameters(), lr=2e-3)

    Args:
        name: A name in any spelling, such as "adamw", "lars" or "AdamW8bit" (docs/optimizers.md lists them), or a path.

    Raises:
        ConfigError: There is no such class, or its package is not installed.
    """
    if not isinstance(name, str):
        raise ConfigError(f"Expected the name of an optimizer, got {name!r}.", fix="pass a name such as 'adamw'.")
    try:
        found = find_class(name, Optimizer)
    except ClassProblem as problem:
        raise ConfigError(f"{problem}.", fix="correct the name, or install the package.") from None
    assert issubclass(found, Optimizer)
    return found
