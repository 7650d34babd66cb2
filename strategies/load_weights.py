"""`load_weights`: loads a module's state, with one error that lists all mismatches.

Must not import checkpoint/, which imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..errors import CheckpointError
from .base import plain_name, plain_names

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys


def load_weights(module: nn.Module, state: Mapping[str, object], *, strict: bool) -> LoadedKeys:
    """Call torch's `load_state_dict`, and return what it returns: missing and unexpected keys.

    Args:
        module: Loaded in place.
        state: The module's state dict: tensors by name, and the extra state of submodules. Either may be compiled.
        strict: Whether missing and unexpected names are an error; wrong shapes always are.

    Raises:
        CheckpointError: The state does not match the module; lists all missing and unexpected keys and wrong shapes.
    """
    own = {plain_name(name): name for name in module.state_dict()}
    state = plain_names(state)
    if any(plain != name for plain, name in own.items()):
        state = {own.get(name, name): value for name, value in state.items()}
    if not strict and state and own and not set(own.values()) & set(state):
        raise CheckpointError(
            f"Expected weights of {type(module).__name__}, got a state without any of its names: it has "
            f"{sorted(map(str, state))[:3]}, and the module {sorted(own)[:3]}.",
            fix="pass the checkpoint of this module, or rename the entries before they are loaded.",
        )
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
                else "; or rename, add or delete entries of checkpoint['state_dict'] in on_load_checkpoint(checkpoint)."
                " Loaded with strict=False, parameters that are missing in the file keep their initial values."
            ),
        ) from error
