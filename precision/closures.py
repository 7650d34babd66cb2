"""How an optimizer's `step` uses its closure, read in its source: loaded for optimizers that are not torch's own."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.optim import Optimizer

from ..protocols import StepFunction


@dataclass(frozen=True, slots=True)
class ClosureUse:
    """An optimizer's use of the closure of its step.

    Attributes:
        evaluates: Whether it evaluates the model itself. Else it calls the closure once before everything, if at all,
            and what it returns is only returned.
        reads_before: Whether it reads gradients before its first evaluation, as sharpness-aware minimization does.
    """

    evaluates: bool
    reads_before: bool = False


# `if closure is not None: with torch.enable_grad(): loss = closure()`, or the same as an expression.
_OPENING = re.compile(
    r"if closure(?: is not None)?:\n(?: +with .*enable_grad\(\):\n)? +(?:(?P<loss>\w+)(?:: .+)? = )?closure\(\)"
    r"|(?P<value>\w+)(?:: .+)? = (?:closure\(\) if closure(?: is not None)? else None"
    r"|None if closure is None else closure\(\))"
)
_INNER_STEP = re.compile(r"(?:super\(.*\)|self\.(?P<attribute>\w+))\.step")
_HARMLESS = ("self._cuda_graph_capture_health_check()",)
_PLAIN = ClosureUse(evaluates=False)
_UNKNOWN = ClosureUse(evaluates=True, reads_before=True)


def read_closure_use(optimizer: Optimizer) -> ClosureUse:
    """Return how the optimizer uses a closure. An attribute `evaluates_closure` of it decides, if there is one."""
    found = _use_in(optimizer, _steps_of(optimizer))
    declared = getattr(optimizer, "evaluates_closure", None)
    if declared is None or bool(declared) == found.evaluates:
        return found
    return _UNKNOWN if declared else _PLAIN


def reads_gradients_first(optimizer: Optimizer) -> bool:
    """Return whether gradients must be there when a step begins that evaluates the model itself."""
    return read_closure_use(optimizer).reads_before


def _steps_of(optimizer: Optimizer) -> Iterator[Callable[..., Any]]:
    """Yield the `step` that is called, then the `step` of each base class."""
    first = inspect.unwrap(optimizer.step)
    first = getattr(first, "__func__", first)
    yield first
    for kind in type(optimizer).__mro__:
        if "step" in vars(kind) and (step := inspect.unwrap(vars(kind)["step"])) is not first:
            yield step


def _use_in(optimizer: Optimizer, steps: Iterator[Callable[..., Any]]) -> ClosureUse:
    step = next(steps, None)
    if step is None:
        return _PLAIN
    closure = inspect.signature(step).parameters.get("closure")
    if (step.__module__ or "").startswith("torch."):
        return ClosureUse(evaluates=closure is not None and closure.default is closure.empty)
    try:
        found = _read(step)
    except (OSError, TypeError, SyntaxError):  # without source
        return _UNKNOWN
    if not isinstance(found, str):
        return found
    inner = optimizer if found == "super" else getattr(optimizer, found, None)
    if not isinstance(inner, Optimizer):
        return _UNKNOWN
    return _use_in(inner, steps) if inner is optimizer else read_closure_use(inner)


@cache
def _read(step: StepFunction) -> ClosureUse | str:
    """Return the use, or to which `step` the closure is only handed on: "super", or an attribute of the optimizer."""
    [function] = ast.parse(textwrap.dedent(inspect.getsource(step))).body
    if not isinstance(function, ast.FunctionDef):
        raise TypeError("not a function")
    arguments = [*function.args.posonlyargs, *function.args.args]
    if arguments and arguments[0].arg != "closure":  # else a function of an instance
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id == arguments[0].arg:
                node.id = "self"  # whatever the class calls it
    takes = inspect.signature(step).parameters
    names = {one.name for one in takes.values() if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    names = {"closure"} if "closure" in takes else names
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id in names]
    if not uses or _opens(function, len(uses)):
        return _PLAIN
    handed: str | None = _handed_on(function, names, len(uses))
    return handed or ClosureUse(evaluates=True, reads_before=_reads_before(function))


def _opens(function: ast.FunctionDef, num_uses: int) -> bool:
    """Whether the closure is used only in the field's opening of a step, and its loss is only returned.

    Before the opening are constants and checks that raise. Anything else there may change parameters.
    """
    for statement in function.body:
        text = ast.unparse(statement)
        opening = _OPENING.fullmatch(text)
        if opening is not None:
            loss = opening["loss"] or opening["value"]
            returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
            reads = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == loss]
            others = [node for node in reads if isinstance(node.ctx, ast.Load) and node not in returned]
            return num_uses == 2 and not others
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        is_check = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise)
        does_something = any(isinstance(node, ast.Call | ast.For | ast.While) for node in ast.walk(statement))
        if "closure" in text or (does_something and not is_check and text not in _HARMLESS):
            return False
    return False


def _handed_on(function: ast.FunctionDef, names: set[str], num_uses: int) -> str | None:
    """Return whose `step` gets the closure and nothing else does: "super", or an attribute; None: it is used here."""
    found = None
    for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
        given = [*call.args, *(one.value for one in call.keywords)]
        bare = [one.value if isinstance(one, ast.Starred) else one for one in given]
        of_closure = [one for one in bare if isinstance(one, ast.Name) and one.id in names]
        if of_closure and len(of_closure) == num_uses == len(bare) and isinstance(call.func, ast.Attribute):
            match = _INNER_STEP.fullmatch(ast.unparse(call.func))
            found = match and (match["attribute"] or "super")
    return found


def _reads_before(function: ast.FunctionDef) -> bool:
    """Whether a gradient may be read before the first call of the closure: as `.grad`, or by a method."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Call | ast.Attribute)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        text = ast.unparse(node)
        if text == "closure()":
            return False
        is_method = isinstance(node, ast.Call) and text.startswith(("self.", "super()"))
        if text.endswith(".grad") or (is_method and text not in _HARMLESS):
            return True
    return True
