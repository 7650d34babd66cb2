"""Which submodule is the model whose sequences are split, and what of it cannot run on parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from ....errors import ModuleError, nearest
from ..pipeline.remote_tensors import RemoteTensor
from .options import Context

# Any in this file: attributes of the user's model.


def check_model(module: nn.Module, options: Context | None, size: int) -> None:
    """Refuse a module whose sequences `size` ranks cannot share; see `find_model` and `check_kernels`."""
    find_model(module, Context() if options is None else options)
    check_kernels(module, size)


def find_model(module: nn.Module, options: Context) -> tuple[str, nn.Module]:
    """Return the name for messages and the model whose calls are split: the one named, or the only child.

    Raises:
        ModuleError: There is no submodule of that name.
    """
    if options.module is not None:
        modules = dict(module.named_modules())
        if options.module not in modules:
            names = [name for name, _ in module.named_children()]
            raise ModuleError(
                f"Expected the name of a submodule of {type(module).__name__} in Context(module=...), got "
                f"{options.module!r}{nearest(options.module, names)}.",
                fix=f"pass one of its submodules: {', '.join(names) or 'it has none'}.",
            )
        return options.module, modules[options.module]
    children = [(name, one) for name, one in module.named_children() if _has_parameters(one)]
    has_own = any(True for _ in module.parameters(recurse=False))
    is_container = len(children) == 1 and isinstance(children[0][1], nn.ModuleList | nn.ModuleDict)
    return children[0] if len(children) == 1 and not (has_own or is_container) else (type(module).__name__, module)


def _has_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters, on this stage of a pipeline or on another one."""
    elsewhere = (isinstance(value, RemoteTensor) for one in module.modules() for value in vars(one).values())
    return any(True for _ in module.parameters()) or any(elsewhere)


def check_kernels(module: nn.Module, size: int) -> None:
    """Refuse models that are known to compute attention where it cannot be seen.

    Raises:
        ModuleError: They are compiled, or their configuration names another kernel than SDPA.
    """
    for name, one in module.named_modules():
        if one._compiled_call_impl is not None or type(one).__name__ == "OptimizedModule":
            raise ModuleError(
                f"Expected a model that is not compiled with cp={size}, got torch.compile on {name or 'the module'}.",
                fix="leave torch.compile (compile=) out, or train with cp=1.",
            )
        chosen = _attribute(_attribute(one, "config"), "_attn_implementation")
        if isinstance(chosen, str) and chosen != "sdpa":
            raise ModuleError(
                f"Expected attention by F.scaled_dot_product_attention with cp={size}, got "
                f"attn_implementation={chosen!r} in the configuration of {name or type(one).__name__}.",
                fix="build the model with attn_implementation='sdpa'.",
            )


def check_window(model: nn.Module, length: int, size: int) -> None:
    """Refuse sliding windows that are narrower than the sequences.

    Args:
        model: The model.
        length: Of full sequences.
        size: Number of parts.

    Raises:
        ModuleError: There is such a window; the message has it.
    """
    for name, one in model.named_modules():
        config = _attribute(one, "config")
        kinds = _attribute(config, "layer_types")
        slides = not isinstance(kinds, list | tuple) or any("sliding" in str(kind) for kind in kinds)
        windows = [_attribute(one, "sliding_window"), _attribute(config, "sliding_window") if slides else None]
        narrow = [window for window in windows if type(window) is int and window < length]
        if narrow:
            raise ModuleError(
                f"Expected attention over full sequences of length {length} with cp={size}, got cp={size} with a "
                f"sliding window of {narrow[0]} in {name or type(one).__name__}.",
                fix=f"train with cp=1, with sequences of up to {narrow[0]}, or with sliding_window=None.",
            )


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute that the user's model may have; None without it."""
    return getattr(owner, name, None)
