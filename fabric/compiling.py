"""`compile=`: options of torch.compile, and the submodules that are compiled in place.

If the module has repeated blocks, these are compiled (regional compilation: the blocks share one graph, so that compile
time does not grow with depth); otherwise the step or the forward. Names of parameters and submodules do not change.
Hooks of a compiled module run outside its graph, as FSDP's hooks require.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn

from ..errors import ConfigError, Problems, nearest
from ..protocols import AnyOutput
from ..strategies import Strategy
from ..strategies.construction.wrap_policy import repeated_blocks, select_modules
from .compile_options import OWN_OPTIONS, compiler_with, own_problems, split_options, use_cache_dir

# Any in this file: options of torch.compile, and what users' modules take and return.

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles a function: torch.compile with its options, or the compiler of an already compiled module."""

_MOST_GRAPHS = 16
_OPTIONS = ("backend", "mode", "options", "fullgraph", "dynamic")


# -- options -----------------------------------------------------------------------------------------------------------


def compile_problems(value: object) -> list[ConfigError]:
    """Return the problems of a value of `compile=`; an empty list if it is valid."""
    if isinstance(value, bool):
        return []
    if not isinstance(value, Mapping):
        return [
            ConfigError(
                f"Expected compile to be True, False or a dict, got compile={value!r}.",
                fix="pass True, or keyword arguments of torch.compile, such as compile={'mode': 'max-autotune'}.",
            )
        ]
    problems = Problems()
    for name in value:
        if name not in (*_OPTIONS, *OWN_OPTIONS):
            hint = nearest(str(name), (*_OPTIONS, *OWN_OPTIONS))
            problems.add(
                f"Expected arguments of torch.compile, got compile={{{name!r}: ...}}{hint}.",
                fix=f"use {', '.join(_OPTIONS)}; or {', '.join(OWN_OPTIONS)}, which are Loopwright's own.",
            )
    problems += own_problems(value)
    backend, mode = value.get("backend", "inductor"), value.get("mode")
    if isinstance(backend, str):
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            problems.add(
                f"Expected a registered backend, got compile={{'backend': {backend!r}}}{nearest(backend, known)}.",
                fix=f"use one of {', '.join(known)}, or a function.",
            )
    elif not callable(backend):
        problems.add(
            f"Expected the backend to be a name or a function, got compile={{'backend': {backend!r}}}.",
            fix="pass the name of a backend, such as 'inductor', or a function.",
        )
    if mode is not None and value.get("options") is not None:
        problems.add("Expected either 'mode' or 'options' in compile=, got both.", fix="remove one of the two.")
    if mode is not None and backend == "inductor":
        from torch._inductor import list_mode_options

        modes = list(list_mode_options())
        if mode not in modes:
            hint = nearest(str(mode), modes)
            problems.add(
                f"Expected a mode of inductor, got compile={{'mode': {mode!r}}}{hint}.",
                fix=f"use one of {', '.join(modes)}.",
            )
    for name in ("fullgraph", "dynamic"):
        if value.get(name) not in (None, True, False):
            problems.add(
                f"Expected True or False for {name!r}, got compile={{{name!r}: {value[name]!r}}}.",
                fix="pass True or False.",
            )
    return problems


def read_compile(value: Any) -> dict[str, object] | None:
    """Return the options of torch.compile for a value of `compile=`; None if nothing is compiled.

    Raises:
        ConfigError: The value is neither a boolean nor a dict of arguments of torch.compile.
    """
    problems = compile_problems(value)
    if problems:
        raise problems[0]
    if value is False:
        return None
    return {} if value is True else dict(value)


def compiler_of(options: Mapping[str, object]) -> Compiler:
    """Return torch.compile with these options."""
    return functools.partial(torch.compile, **options)


def without_wrapper(module: nn.Module) -> tuple[nn.Module, Compiler | None]:
    """Return the module without torch.compile's wrapper, and its compiler; None if it was not compiled."""
    original = module.__dict__.get("_modules", {}).get("_orig_mod")
    if original is not None and hasattr(module, "dynamo_ctx"):
        return original, cast(Any, module).dynamo_ctx
    options = module.__dict__.get("_lw_compile_options")  # of lw.Module.compile
    return module, None if options is None else compiler_of(options)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of this module (not its submodules) run compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def compiled_parts(module: nn.Module) -> list[str]:
    """Return the paths of compiled submodules; "" if the module itself or one of its steps is compiled."""
    paths = [path for path, one in module.named_modules() if is_compiled(one)]
    if any(isinstance(value, CompiledMethod) for value in vars(module).values()):
        paths.append("")
    return paths


def configure_dynamo(stack: ExitStack) -> None:
    """Configure torch._dynamo, until the stack is closed, for code that several modules and stages share.

    Integer attributes of modules (a layer's index, `self.global_step`) may become variables of a graph; otherwise each
    value would need a separate graph. The recompilation limit is raised because a block has up to eight graphs in a
    regular run: training or evaluation, with or without an input gradient, for one shape or dynamic shapes.
    """
    config = torch._dynamo.config
    limit = max(config.recompile_limit, _MOST_GRAPHS)
    stack.enter_context(config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=limit))


# -- which parts -------------------------------------------------------------------------------------------------------


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a module; an empty list if it has none.

    `module.compile_blocks` names them: classes, names of classes, or a function of a module; an empty list for none.
    Otherwise they are the modules of one class in a ModuleList or Sequential, if at least two have equal shapes.

    Raises:
        ConfigError: `compile_blocks` matches no submodule.
    """
    policy = getattr(module, "compile_blocks", None)
    if policy is None:
        found = [one for _, one in repeated_blocks(module) if not _is_simple(one) and not is_compiled(one)]
        return found if len({_structure(one) for one in found}) < len(found) else []
    if policy is False or (isinstance(policy, (list, tuple, set, frozenset)) and not policy):
        return []
    chosen = [one for _, one in select_modules(module, policy, argument="compile_blocks")[0]]
    inner = {id(part) for one in chosen for part in one.modules() if part is not one}
    return [one for one in chosen if id(one) not in inner and not is_compiled(one)]


def find_parts(module: nn.Module, blocks: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return the outermost submodules to compile in addition to the blocks, except containers and torch's own layers.

    A submodule that holds a block, or a part that the user compiled, is not compiled itself; its children are.
    """
    whole = {id(one) for one in blocks} | {id(one) for one in module.modules() if is_compiled(one)}
    parts: list[nn.Module] = []

    def look(parent: nn.Module) -> None:
        for child in parent.children():
            if id(child) in whole or any(child is one for one in parts):
                continue
            is_called = "forward" in vars(child) or type(child).forward is not nn.Module.forward
            if not is_called or any(id(one) in whole for one in child.modules()):
                look(child)
            elif not _is_simple(child):
                parts.append(child)

    look(module)
    return parts


def _is_simple(module: nn.Module) -> bool:
    """Return whether this is a torch layer without submodules, in which nothing can be fused."""
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _structure(module: nn.Module) -> tuple[object, ...]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (type(module), *((name, tuple(one.shape), one.dtype) for name, one in tensors))


def check_strategy(strategy: Strategy, given: Compiler | None, options: Mapping[str, object]) -> None:
    """Raise a ConfigError with a remedy if the strategy cannot run compiled code."""
    refusal = strategy.traits.compile_refusal
    if strategy.device.type == "xla" and given is None and options.get("backend") != "openxla":
        refusal = ("XLA compiles each step by itself", "leave compile= out, or pass compile={'backend': 'openxla'}")
    if refusal is not None:
        what, fix = refusal
        raise ConfigError(f"compile= cannot be used with {type(strategy).__name__}: {what}.", fix=f"{fix}.")


def compile_for_fabric(module: nn.Module, strategy: Strategy, value: object, steps: Iterable[str]) -> nn.Module:
    """Compile a module in place before the strategy adds its hooks; return it without torch's wrapper.

    Args:
        module: The user's module, or the result of torch.compile for it, whose options are then used.
        strategy: If hooks of submodules communicate, blocks and other submodules are compiled; otherwise the blocks, or
            the full forward and the steps.
        value: The value of `compile=`.
        steps: Names of methods to compile as a unit where the forward is compiled.

    Raises:
        ConfigError: `value` is invalid, or the strategy cannot run compiled code.
    """
    own, options = split_options(read_compile(value) or {})
    if own.compare:
        raise ConfigError(
            "Expected compile= without 'compare' in Fabric, which does not know where a step of your loop ends.",
            fix="leave it out, or use a Trainer.",
        )
    original, given = without_wrapper(module)
    check_strategy(strategy, given, options)
    compiler = given if given is not None else compiler_with(compiler_of(options), own.dynamic_dims)
    blocks = find_blocks(original) if strategy.traits.has_module_hooks or given is None else []
    for_good = ExitStack()
    use_cache_dir(own.cache_dir, for_good)
    if strategy.traits.has_module_hooks or blocks:
        compile_in_place([*blocks, *find_parts(original, blocks)], compiler, for_good)
    else:
        compile_in_place([original], compiler, for_good)
        for name in steps:
            if callable(getattr(original, name, None)):
                CompiledMethod(original, name, compiler).attach(for_good)
    for_good.pop_all()
    return original


# -- compiled in place -------------------------------------------------------------------------------------------------


def compile_in_place(modules: Iterable[nn.Module], compiler: Compiler, stack: ExitStack) -> None:
    """Compile the forward of each module until the stack is closed. The strategy may add its hooks before or after."""
    for module in modules:
        before = module.__dict__.get("_compiled_call_impl")
        module.__dict__["_compiled_call_impl"] = CompiledForward(module, compiler)
        stack.callback(_put_back, module, before)


def _put_back(module: nn.Module, before: object) -> None:
    if before is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = before


class CompiledForward:
    """Calls a module with its forward compiled and its hooks outside the graph.

    `nn.Module.compile` does so for user-defined classes, but (torch 2.13) compiles nothing if forward is defined in
    torch, as in nn.Sequential and nn.TransformerEncoderLayer.
    """

    def __init__(self, module: nn.Module, compiler: Compiler) -> None:
        self._module = module
        self._forward = compiler(_entry(module))

    def __call__(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Call the module: run its hooks and the compiled forward."""
        own = self._module.__dict__
        before = own.get("forward")
        own["forward"] = self._forward
        try:
            return self._module._call_impl(*args, **kwargs)
        finally:
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before


_codes: dict[tuple[object, ...], types.CodeType] = {}
_entries: dict[str, tuple[str, list[str]]] = {}


def _entry(module: nn.Module) -> Callable[..., object]:
    """Return a function that runs the module's forward; modules of the same structure share its code object.

    torch caches compiled graphs per code object of the called function, at most eight for each.
    """
    own = vars(module).get("forward")

    def run(*args: Any, **kwargs: Any) -> AnyOutput:
        if own is not None:
            return own(*args, **kwargs)
        # Looked up late: activation checkpointing and fully_shard change the class.
        return type(module).forward(module, *args, **kwargs)

    key = _structure(module)
    if key not in _codes:
        name = f"{type(module).__name__}_forward_{len(_codes)}"
        _codes[key] = run.__code__.replace(co_name=name, co_qualname=name)
        parameters = list(inspect.signature(own or type(module).forward).parameters)
        _entries[name] = type(module).__name__, parameters if own else parameters[1:]
    return types.FunctionType(_codes[key], run.__globals__, _codes[key].co_name, None, run.__closure__)


def entry_named(name: str) -> tuple[str, list[str]] | None:
    """Return class and argument names of the forward that a function runs, by its name; None if unknown."""
    return _entries.get(name)


class CompiledMethod:
    """A compiled method in a module's attributes. A copy of the module gets the uncompiled method.

    Args:
        module: The user's module.
        name: Name of the method.
        compiler: Compiles the method.
        after: Called after each call that was not part of another compiled function.
    """

    def __init__(self, module: nn.Module, name: str, compiler: Compiler, after: Callable[[], None] | None = None):
        self._module = module
        self._name = name
        self._plain = getattr(module, name)
        self._after = after
        self._run = compiler(self._plain)
        self.__signature__ = inspect.signature(self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Run the compiled method; while another graph is traced, run the uncompiled one."""
        if torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        output = self._run(*args, **kwargs)
        if self._after is not None:
            self._after()
        return output

    def attach(self, stack: ExitStack) -> None:
        """Replace the method until the stack is closed."""
        own = self._module.__dict__
        before = own.get(self._name)
        own[self._name] = self
        stack.callback(own.pop, self._name) if before is None else stack.callback(own.__setitem__, self._name, before)

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        return _plain_method(memo.get(id(self._module), self._module), self._name)

    def __reduce__(self) -> Any:
        return _plain_method, (self._module, self._name)


def _plain_method(module: nn.Module, name: str) -> Any:
    return types.MethodType(getattr(type(module), name), module)
