"""`load_weights`: loads a module's state, with one error that lists all mismatches.

Must not import checkpoint/, which imports it.
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
        state: The module's state dict: tensors by name, and the extra state of submodules.
        strict: Whether missing and unexpected names are an error; wrong shapes always are.

    Raises:
        CheckpointError: The state does not match the module; lists all missing and unexpected keys and wrong shapes.
    """
    try:
        keys: LoadedKeys = module.load_state_dict(state, strict=strict)
        return keys
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        has_wrong_shapes = "size mismatch" in str(error)
        raise CheckpointError(
            f"Expected a checkpoint that matches {type(module).__name__}, got {error}",
            fix="build the module with the arguments that it was saved with"
            + (
                "; or, to keep the module's values of tensors whose shapes differ, delete these tensors from "
                "checkpoint['state_dict'] in on_load_checkpoint(checkpoint) and load with strict=False (or set "
                "strict_loading = False)."
                if has_wrong_shapes
                else ", or load with strict=False (or set strict_loading = False), which ignores missing and "
                "unexpected names, but not wrong shapes."
            ),
        ) from error
