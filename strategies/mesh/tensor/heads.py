"""Attention heads: how many a Linear layer computes, and attributes that count them, which are divided among ranks.

A module whose forward writes `q.view(batch, length, self.num_heads, self.head_dim)` needs this rank's number of heads.
One that writes -1 in its place does not, and is left alone: forward's source says which.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import TypeGuard

from torch import nn

__all__ = ["COUNTS", "head_problem", "local_counts"]

COUNTS = (
    "num_heads", "n_heads", "n_head", "nhead", "nheads", "num_attention_heads", "heads",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_heads", "n_local_kv_heads",
)  # fmt: skip
"""Attributes that count heads."""

_OF_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "hd", "dim_head")
_NOT_RUN = {
    "__init__",
    "extra_repr",
    "__repr__",
    "reset_parameters",
    "_reset_parameters",
    "_init_weights",
    "init_weights",
}


def head_problem(owner: nn.Module, name: str, out_features: int, tp: int) -> str | None:
    """Return what is wrong with splitting a layer of an attention module among ranks; None if nothing is.

    Args:
        owner: The module that calls the layer.
        name: The layer's full name.
        out_features: The features that it computes.
        tp: Number of ranks.
    """
    heads = _heads(owner, name.rpartition(".")[2], out_features)
    if heads is None or heads % tp == 0:
        return None
    divisors = [str(one) for one in range(1, heads + 1) if heads % one == 0]
    do = "does" if len(divisors) == 1 else "do"
    return f"{name} has {heads} heads; tp={tp} does not divide them: {', '.join(divisors)} {do}"


def _heads(owner: nn.Module, layer: str, out_features: int) -> int | None:
    size = next((one for name in _SIZES if _is_count(one := owner.__dict__.get(name))), None)
    if size is not None:
        return out_features // size if out_features % size == 0 else None
    counts = {name: one for name in COUNTS if _is_count(one := owner.__dict__.get(name))}
    is_key = layer.lower().lstrip("w")[:1] in ("k", "v") or layer.lower().startswith(("key", "value"))
    of_keys = [one for name, one in counts.items() if name in _OF_KEYS]
    if is_key and of_keys:
        return of_keys[0]
    return next((one for name, one in counts.items() if name not in _OF_KEYS), None)


def local_counts(owner: nn.Module, tp: int) -> dict[str, int]:
    """Return the attributes that count heads and that the module's forward reads, each divided by `tp`."""
    read = _read_by(type(owner).__mro__)
    counts = {name: one for name in COUNTS if name in read and _is_count(one := owner.__dict__.get(name))}
    return {name: one // tp for name, one in counts.items() if one % tp == 0}


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@cache
def _read_by(classes: tuple[type, ...]) -> frozenset[str]:
    """Return the attributes of `self` that the methods of these classes read, without those that do not compute."""
    found: set[str] = set()
    for one in classes:
        if one.__module__.partition(".")[0] in ("torch", "builtins", "abc"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError, SyntaxError):  # made without a source file: nothing is known of it
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name not in _NOT_RUN and function.args.args:
                found |= _attributes(function, function.args.args[0].arg)
    return frozenset(found)


def _attributes(function: ast.FunctionDef, of: str) -> set[str]:
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == of}
