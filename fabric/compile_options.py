"""Options of `compile=` that are Loopwright's own: where compiled code is kept, dimensions that vary, comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError
from ..protocols import AnyFunction, AnyOutput, Options

# Any in this file: options of torch.compile, and what users' modules take and return.

OWN_OPTIONS = ("cache_dir", "dynamic_dims", "compare")
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Loopwright's own options of `compile=`.

    Attributes:
        cache_dir: Folder in which inductor keeps compiled code; None: the one that torch uses.
        dynamic_dims: Dimensions whose sizes differ from batch to batch, in every tensor that has them.
        compare: Number of steps that run uncompiled first, to compare their time.
    """

    cache_dir: str | None = None
    dynamic_dims: tuple[int, ...] = ()
    compare: int = 0


def own_problems(value: Mapping[Any, Any]) -> Iterator[ConfigError]:
    """Yield the problems of the own options in a value of `compile=`."""
    folder, dims, compare = (value.get(name) for name in OWN_OPTIONS)
    if folder is not None and (not isinstance(folder, str | os.PathLike) or not os.fspath(folder)):
        yield ConfigError(
            f"Expected a folder, got compile={{'cache_dir': {folder!r}}}.", fix="pass a path, or leave cache_dir out."
        )
    listed = dims if isinstance(dims, list | tuple) else [] if dims is None else [dims]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in listed):
        yield ConfigError(
            f"Expected dimensions of at least 0, got compile={{'dynamic_dims': {dims!r}}}.",
            fix="pass the dimension that varies, such as 1 for the length of (batch, length), or several.",
        )
    if listed and value.get("dynamic") is False:
        yield ConfigError(
            "Expected either 'dynamic_dims' or 'dynamic': False in compile=, got both.", fix="remove one of the two."
        )
    if compare is not None and (isinstance(compare, bool) or not isinstance(compare, int) or compare < 0):
        yield ConfigError(
            f"Expected a number of steps, got compile={{'compare': {compare!r}}}.",
            fix="pass the number of steps to run uncompiled first, such as 5.",
        )


def split_options(value: Mapping[str, Any]) -> tuple[CompileOptions, Options]:
    """Return Loopwright's options, and the options of torch.compile."""
    rest = {name: one for name, one in value.items() if name not in OWN_OPTIONS}
    folder, dims = value.get("cache_dir"), value.get("dynamic_dims")
    listed = dims if isinstance(dims, list | tuple) else () if dims is None else (dims,)
    path = None if folder is None else os.path.abspath(os.path.expanduser(os.fspath(folder)))
    return CompileOptions(path, tuple(listed), value.get("compare") or 0), rest


def use_cache_dir(folder: str | None, stack: ExitStack) -> None:
    """Let inductor keep compiled code in a folder, which is made, until the stack is closed.

    Raises:
        ConfigError: The folder cannot be made.
    """
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Expected a folder that can be written, got compile={{'cache_dir': {folder!r}}}: {error}.",
            fix="pass another folder.",
        ) from error
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = folder

    def put_back() -> None:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before

    stack.callback(put_back)


def compiler_with(
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]], dims: tuple[int, ...]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a compiler whose functions take sizes of these dimensions as variables, from the first call on.

    Without that, torch compiles the first size as a constant, and again with a variable when it meets a second one.
    """
    if not dims:
        return compiler

    def compile_marked(function: AnyFunction) -> Callable[..., Any]:
        run = compiler(function)

        def marked(*args: Any, **kwargs: Any) -> AnyOutput:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    # torch always takes sizes of 0 and 1 as constants.
                    which = [dim for dim in dims if dim < leaf.ndim and leaf.shape[dim] > 1]
                    if which:
                        torch._dynamo.maybe_mark_dynamic(leaf, which)
            return run(*args, **kwargs)

        return marked

    return compile_marked
