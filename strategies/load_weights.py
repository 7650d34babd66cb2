"""`load_weights`: loads a module's state, with one error for everything that does not fit.

It stands below checkpoint/, which may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..errors import CheckpointError

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys

__all__ = ["load_weights"]


def load_weights(module: nn.Module, state: Mapping[str, object], *, strict: bool) -> LoadedKeys:
    """Call torch's `load_state_dict`, and return what it returns: missing and unexpected keys.

    Args:
        module: Loaded in place.
        state: Tensors by name, and what a module keeps beside them.
        strict: Whether missing and unexpected names are an error; wrong shapes always are.

    Raises:
        CheckpointError: Names all missing and unexpected keys and wrong shapes at once.
    """
    try:
        keys: LoadedKeys = module.load_state_dict(state, strict=strict)
        return keys
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        has_wrong_shapes = "size mismatch" in str(error)
        raise CheckpointError(
            f"the checkpoint does not fit the module: {error}",
            fix="build the module with the arguments it was saved with"
            + (
                "; or, to keep its own values where shapes differ, delete these from checkpoint['state_dict'] in "
                "on_load_checkpoint(checkpoint) and load with strict=False (or set strict_loading = False)."
                if has_wrong_shapes
                else ", or load with strict=False (or set strict_loading = False), which leaves out missing and "
                "unexpected names (never wrong shapes)."
            ),
        ) from error
