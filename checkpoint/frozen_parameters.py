"""Frozen parameters that the checkpoints of a module leave out (`exclude_frozen_parameters`), and loading without them.

The names that were left out are in the checkpoint, so that a load can tell them from names that are missing by
mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..errors import CheckpointError
from ..messages import warn
from ..protocols import StateDict
from ..strategies.base import plain_name

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys


def leave_out(state: StateDict, module: nn.Module, stepped: Iterable[Tensor]) -> tuple[StateDict, list[str]]:
    """Return a module's state without its frozen parameters, and the names that were left out.

    A frozen parameter that an optimizer steps is kept: it may have been trained before it was frozen. Entries that
    belong to a parameter (`weight.absmax` of a quantized `weight`) are left out with it.

    Args:
        state: A result of `Strategy.module_state_dict`.
        module: The user's module.
        stepped: The parameters of all optimizers.
    """
    held = {id(one) for one in stepped}
    named = [(plain_name(name), one) for name, one in module.named_parameters(remove_duplicate=False)]
    frozen = [(name, one) for name, one in named if not one.requires_grad]
    names = {name for name, one in frozen if id(one) not in held}
    if len(names) < len(frozen):
        warn(
            f"{type(module).__name__} sets exclude_frozen_parameters, but an optimizer has "
            f"{len(frozen) - len(names)} of its {len(frozen)} frozen parameters, which checkpoints contain therefore; "
            "pass only trained parameters to the optimizer"
        )
    kept = {key: value for key, value in state.items() if not _belongs_to(key, names)}
    return kept, sorted(names)


def check_loaded(module: nn.Module, keys: LoadedKeys, excluded: Collection[str]) -> None:
    """Check what `load_state_dict(strict=False)` returned, as `strict=True` does except for names left out.

    Args:
        module: The module that was loaded.
        keys: Missing and unexpected keys.
        excluded: Names that may be missing.

    Raises:
        CheckpointError: Other names are missing, or names are unexpected; lists all.
    """
    missing = [name for name in keys.missing_keys if not _belongs_to(plain_name(name), excluded)]
    if missing or keys.unexpected_keys:
        raise CheckpointError(
            f"Expected a checkpoint that matches {type(module).__name__} except for frozen parameters that it leaves "
            f"out, got one with {_listed('missing', missing)} and {_listed('unexpected', keys.unexpected_keys)}.",
            fix="build the module with the arguments that it was saved with, or set strict_loading = False, which "
            "ignores missing and unexpected names.",
        )


def _belongs_to(name: str, parameters: Collection[str]) -> bool:
    """Return whether this is the name of one of the parameters, or begins with one: `weight.quant_state.nf4`."""
    while name and name not in parameters:
        name = name.rpartition(".")[0]
    return bool(name)


def _listed(kind: str, names: Sequence[str]) -> str:
    return f"{kind} keys {', '.join(names)}" if names else f"no {kind} keys"
