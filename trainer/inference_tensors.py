"""Advice for torch's error about inference tensors in training, which does not name the tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ..protocols import Tree


def advice_on(error: BaseException, module: nn.Module) -> str | None:
    """Return advice for an error about inference tensors; None for any other.

    Args:
        error: What ended a fit.
        module: Searched for such tensors.
    """
    if not isinstance(error, RuntimeError) or "inference tensor" not in str(error).lower():
        return None
    found = list(_names(module))
    which = (
        f"{type(module).__name__} holds such tensors in {', '.join(found)}" if found else "such a tensor is used here"
    )
    return (
        f"Loopwright: {which}. They were made in a validate, test or predict, which runs in inference mode. To fix it: "
        "pass Trainer(inference_mode=False) to the Trainer that evaluates, or keep a copy made in fit."
    )


def _names(module: nn.Module) -> Iterator[str]:
    """Yield the paths of attributes and buffers that are inference tensors, or containers with one."""
    for path, child in module.named_modules():
        values = {**vars(child), **child._parameters, **child._buffers}
        for name, value in values.items():
            if not name.startswith("_") and _holds_one(value):
                yield f"{path}.{name}".lstrip(".")


def _holds_one(value: Tree) -> bool:
    if isinstance(value, Tensor):
        return value.is_inference()
    if isinstance(value, dict):
        return any(isinstance(item, Tensor) and item.is_inference() for item in value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(item, Tensor) and item.is_inference() for item in value)
    return False
