"""The sources of a plan: the user's dict, the module's `tensor_plan()`, a model of transformers, or the graph."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from ....errors import ConfigError
from .adapters import base_of
from .auto import find_by_graph
from .names import Found, match, read_plan, style_named
from .style import Style

# Any in this file: what users and models return as plans.

logger = logging.getLogger(__name__)


def find_styles(module: nn.Module, wanted: object, tp: int) -> Found:
    """Return the styles of the first source that there is.

    Args:
        module: The user's module.
        wanted: `tensor_plan=`: a dict, or "auto".
        tp: Number of ranks.

    Raises:
        ConfigError: `wanted` is something else.
    """
    if isinstance(wanted, Mapping):
        styles, problems = read_plan(wanted, module, "tensor_plan")
        return Found("tensor_plan", styles, problems)
    if wanted != "auto":
        raise ConfigError(
            f"Expected tensor_plan= 'auto' or a dict of patterns and styles, got {wanted!r}.",
            fix="write {'blocks.*.mlp.up': 'colwise', 'blocks.*.mlp.down': 'rowwise'}, or leave it out.",
        )
    own = list(_with_method(module))
    if own:
        return _of_methods(module, own)
    models = list(_of_transformers(module))
    if models:
        return _of_models(models, tp)
    return find_by_graph(module, tp)


def names_styles(module: nn.Module, wanted: object) -> bool:
    """Return whether styles are given by names, and need not be looked for in the graph."""
    if wanted != "auto":
        return True
    return any(True for _ in _with_method(module)) or any(True for _ in _of_transformers(module))


def _with_method(module: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the outermost modules whose `tensor_plan()` returns a plan, with it; None leaves it to the next source."""
    found: list[str] = []
    for name, one in module.named_modules():
        if callable(getattr(type(one), "tensor_plan", None)) and not any(_is_below(name, above) for above in found):
            plan: Any = one.tensor_plan()
            if plan is not None:
                found.append(name)
                yield name, one, plan


def _of_methods(module: nn.Module, own: list[tuple[str, nn.Module, Any]]) -> Found:
    found = Found(" and ".join(f"{type(one).__name__}.tensor_plan()" for _, one, _ in own))
    for name, one, plan in own:
        if not isinstance(plan, Mapping):
            what = f"Expected a dict from {type(one).__name__}.tensor_plan(), got {type(plan).__name__}"
            found.problems.add(what, "return {'blocks.*.mlp.up': 'colwise', ...}")
            continue
        styles, problems = read_plan(plan, one, f"{type(one).__name__}.tensor_plan()")
        found.styles.update({_join(name, inner): style for inner, style in styles.items()})
        found.problems += problems
    return found


def _of_transformers(module: nn.Module) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Yield the outermost models of transformers that have a plan."""
    found: list[str] = []
    for name, one in module.named_modules():
        if any(cls.__name__ == "PreTrainedModel" for cls in type(one).__mro__):
            plan = getattr(one, "tp_plan", None)
            if plan and isinstance(plan, Mapping) and not any(_is_below(name, above) for above in found):
                found.append(name)
                yield name, one, plan


def _of_models(models: list[tuple[str, nn.Module, Mapping[str, str]]], tp: int) -> Found:
    found = Found(" and ".join(f"{type(one).__name__}.tp_plan" for _, one, _ in models))
    for prefix, model, plan in models:
        names = dict(model.named_modules())
        parameters = {name for name, _ in model.named_parameters()}
        full: list[str] = []  # modules that stay whole, with all below them
        styles: dict[str, ParallelStyle] = {}
        for pattern, value in plan.items():
            style = style_named(value)
            matched = match(pattern, names)
            if style is None:
                full += matched
                found.notes.append(f"{pattern} of {found.source} has the style {value!r}, and stays whole.")
            elif not matched and match(pattern, dict.fromkeys(parameters, model)):
                found.notes.append(f"{pattern} of {found.source} is a parameter, and stays whole.")
            else:
                styles.update(dict.fromkeys(matched, style))
        for name, style in styles.items():
            problem = style.problem(base_of(names[name]), tp) if isinstance(style, Style) else None
            if any(_is_below(name, above) for above in full):
                continue
            if problem is not None and not (_needs_partner(style)):
                found.notes.append(f"{_join(prefix, name)} {problem}, and stays whole.")
                continue
            found.styles[_join(prefix, name)] = style
    return found


def _needs_partner(style: ParallelStyle) -> bool:
    return isinstance(style, Style) and (style.has_sharded_output or style.takes_sharded_input)


def _is_below(name: str, above: str) -> bool:
    return not above or name == above or name.startswith(f"{above}.")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
