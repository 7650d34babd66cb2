"""Attention heads: how many a Linear layer computes, and attributes that count them, which are divided among ranks.

A module whose forward writes `q.view(batch, length, self.num_heads, self.head_dim)` needs this rank's number of heads.
One that writes -1 in its place does not, and is left alone: forward's source says which.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import TypeGuard

from torch import nn

COUNTS = (
    "num_heads", "n_heads", "n_head", "nhead", "nheads", "num_attention_heads", "heads",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_heads", "n_local_kv_heads",
)  # fmt: skip
"""Attributes that count heads."""

_OF_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
_RATIOS = (
    "num_key_value_groups", "num_kv_groups", "n_rep", "num_queries_per_kv", "n_groups_per_kv", "q_per_kv",
)  # fmt: skip
"""Attributes that count the heads of queries for each head of keys."""
_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "hd", "dim_head")
_FILLING = ("proj", "projection", "lin", "linear", "layer", "to", "attn", "att", "attention", "c", "w", "x", "self")
_KINDS = {
    **dict.fromkeys(("q", "wq", "query"), "q"),
    **dict.fromkeys(("k", "wk", "key", "v", "wv", "value"), "k"),
    **dict.fromkeys(("kv", "wkv", "keyvalue"), "kv"),
    **dict.fromkeys(("qkv", "wqkv", "querykeyvalue", "c_attn", "in_proj"), "qkv"),
}
_NOT_RUN = {
    "__init__",
    "extra_repr",
    "__repr__",
    "reset_parameters",
    "_reset_parameters",
    "_init_weights",
    "init_weights",
}


def _kind(layer: str) -> str:
    """Return what a layer computes, by its name: "q", "k" (keys or values), "kv", "qkv", or "" for anything else."""
    name = layer.lower()
    return _KINDS.get(name) or _KINDS.get("".join(one for one in name.split("_") if one not in _FILLING), "")


def _head_counts(owner: nn.Module) -> tuple[int | None, int | None, int | None]:
    """Return the numbers of heads of queries and of keys, and the size of a head, as far as attributes have them."""
    counts = {name: one for name in COUNTS if _is_count(one := owner.__dict__.get(name))}
    queries = next((one for name, one in counts.items() if name not in _OF_KEYS), None)
    keys = next((one for name, one in counts.items() if name in _OF_KEYS), None)
    size = next((one for name in _SIZES if _is_count(one := owner.__dict__.get(name))), None)
    of_q, of_k = (_width(owner, kind) for kind in ("q", "k"))
    if size is None and queries is not None and of_q is not None:
        size = of_q // queries
    if size is not None:  # models of transformers have their numbers of heads in the config
        queries = of_q // size if queries is None and of_q is not None else queries
        keys = of_k // size if keys is None and of_k is not None else keys
    return queries, keys, size


def _width(owner: nn.Module, kind: str) -> int | None:
    """Return the output features of a module's first layer of a kind."""
    found = (getattr(one, "out_features", None) for name, one in owner.named_children() if _kind(name) == kind)
    return next((one for one in found if _is_count(one)), None)


def _heads(owner: nn.Module, layer: str, out_features: int) -> int | None:
    """Return the number of heads that a layer computes; None if it is not known."""
    queries, keys, size = _head_counts(owner)
    kind = _kind(layer)
    if not kind and key_layers(owner):
        return None  # of an MLP beside attention
    if size is not None:
        return out_features // size if out_features % size == 0 else None
    return keys if kind == "k" and keys is not None else queries


def head_problem(owner: nn.Module, name: str, out_features: int, tp: int) -> str | None:
    """Return what is wrong with splitting a layer of an attention module among ranks; None if nothing is.

    Args:
        owner: The module that calls the layer.
        name: The layer's full name.
        out_features: The features that it computes.
        tp: Number of ranks.
    """
    layer = name.rpartition(".")[2]
    heads = _heads(owner, layer, out_features)
    if heads is None or heads % tp == 0 or copies_of(owner, layer, out_features, tp) > 1:
        return None
    divisors = [str(one) for one in range(1, heads + 1) if heads % one == 0]
    do = "does" if len(divisors) == 1 else "do"
    return f"{name} has {heads} heads; tp={tp} does not divide them: {', '.join(divisors)} {do}"


def copies_of(owner: nn.Module, layer: str, out_features: int, tp: int) -> int:
    """Return how many ranks compute the same heads of keys or values: above 1 where there are more ranks than heads.

    Args:
        owner: The module that calls the layer.
        layer: The layer's name in it.
        out_features: The features that it computes.
        tp: Number of ranks.
    """
    heads = _heads(owner, layer, out_features) if _kind(layer) == "k" else None
    queries = _head_counts(owner)[0]
    return 1 if queries is not None and queries % tp else _copies(heads, tp)


def _copies(heads: int | None, tp: int) -> int:
    return tp // heads if heads is not None and 0 < heads < tp and tp % heads == 0 else 1


def is_query(layer: str) -> bool:
    """Return whether a layer of that name computes queries alone."""
    return _kind(layer) == "q"


def key_layers(owner: nn.Module) -> list[str]:
    """Return the names of a module's layers that compute keys or values, with or without queries."""
    return [name for name, _ in owner.named_children() if _kind(name) in ("k", "kv", "qkv")]


def packed_parts(owner: nn.Module, layer: str, out_features: int, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the features of each part of a layer that computes several at once, and how many ranks share each part.

    A layer that is named as queries, keys and values has these three, and two of keys and values; any other has two
    equal ones. Arguments as in `copies_of`.
    """
    queries, keys, size = _head_counts(owner)
    kind = _kind(layer)
    if kind == "qkv":
        if size is None and queries is not None:
            size = out_features // (queries + 2 * (keys or queries))
        if queries is None or size is None:
            return (out_features // 3,) * 3, (1, 1, 1)
        of_keys = (out_features - queries * size) // 2
        copies = _copies(of_keys // size, tp)
        return (queries * size, of_keys, of_keys), (1, copies, copies)
    copies = _copies(out_features // 2 // size, tp) if kind == "kv" and size is not None else 1
    return (out_features // 2,) * 2, (copies, copies)


def local_counts(owner: nn.Module, layers: Iterable[str], tp: int) -> dict[str, int]:
    """Return the attributes that count heads and that the module's forward reads, each as its number on a rank.

    Heads of queries are divided where a layer that computes them is split, and heads of keys likewise. A layer whose
    name does not show it counts as both where no layer's does.

    Args:
        owner: The module that calls the layers.
        layers: The names in it of those that are split by output features.
        tp: Number of ranks.
    """
    kinds = {_kind(one) for one in layers}
    if kinds == {""} and not key_layers(owner):
        kinds = {"qkv"}
    read = _read_by(type(owner).__mro__)
    divided = {False: bool(kinds & {"q", "qkv"}), True: bool(kinds & {"k", "kv", "qkv"})}  # by whether it is of keys

    def local(number: int, *, is_of_keys: bool) -> int:
        if not divided[is_of_keys] or (number % tp and not (is_of_keys and _copies(number, tp) > 1)):
            return number
        return max(1, number // tp)

    counts = {name: one for name in COUNTS if name in read and _is_count(one := owner.__dict__.get(name))}
    found = {name: local(one, is_of_keys=name in _OF_KEYS) for name, one in counts.items()}
    queries, keys, _ = _head_counts(owner)
    if queries and keys:
        # Functions of transformers read these of the module that they are given, so its methods need not.
        counts = {
            name: one for name in _RATIOS if _is_count(one := owner.__dict__.get(name)) and one == queries // keys
        }
        ratio = local(queries, is_of_keys=False) // local(keys, is_of_keys=True)
        found.update(dict.fromkeys(counts, ratio))
    return {name: one for name, one in found.items() if one and one != owner.__dict__[name]}


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
