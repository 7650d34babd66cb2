"""Compilation while a verb runs: the module's steps, or its blocks and other parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...fabric.compile_options import compiler_with, split_options, use_cache_dir
from ...fabric.compile_order import order_ranks
from ...fabric.compiling import (
    CompiledMethod,
    Compiler,
    check_strategy,
    compile_in_place,
    compiled_parts,
    compiler_of,
    configure_dynamo,
    find_blocks,
    find_parts,
)
from ...fabric.recompiles import RecompileWatch
from ...messages import warn
from ..hooks import find_override
from ..module import Module
from .compile_report import CompileReport

if TYPE_CHECKING:
    from ..run import Run

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def begin_compiling(run: Run, given: Compiler | None, options: dict[str, object]) -> ExitStack:
    """Compile what a run will call, in place; closing the returned object restores the module.

    Called after `configure_model` and before the strategy adds its hooks, so that these stay outside of the graphs.

    Args:
        run: Its module is the user's own.
        given: The user's own options for compiling the module, which take precedence over the Trainer's; None without.
        options: Of `Trainer(compile=)`.

    Raises:
        ConfigError: The strategy cannot run compiled code, or the folder for compiled code cannot be made.
    """
    strategy, module, trainer = run.fabric.strategy, run.module, run.trainer
    own, options = split_options(options)
    check_strategy(strategy, given, options)
    compiler = given if given is not None else compiler_with(compiler_of(options), own.dynamic_dims)
    # torch.compile(module) asks for one graph of the whole step; hooks that communicate cannot be a part of one.
    is_by_parts = strategy.traits.has_module_hooks or not run.is_automatic
    blocks = find_blocks(module) if is_by_parts or given is None else []
    stack = ExitStack()
    try:
        configure_dynamo(stack)
        use_cache_dir(own.cache_dir, stack)
        watch = RecompileWatch(is_rank_zero=trainer.is_global_zero)
        if trainer.state.fn == "fit" and trainer.timeline.is_enabled:
            report = CompileReport(watch, trainer.timeline, compare=own.compare, is_rank_zero=trainer.is_global_zero)
            report.start(stack)
        watch.start(stack)
        order_ranks(strategy, options.get("backend", "inductor") if given is None else None, stack)
        if is_by_parts or blocks:
            parts = [*blocks, *find_parts(module, blocks)]
            if not parts and not strategy.traits.has_module_hooks:
                parts = [module]  # its forward computes with its own parameters
            if not parts and not compiled_parts(module) and run.trainer.is_global_zero:
                warn(
                    f"compile= compiles nothing: {type(module).__name__} has only single layers, and under "
                    f"{type(strategy).__name__} submodules are compiled one by one; put layers that work together into "
                    "a submodule with a forward, and call that in the step",
                )
            compile_in_place(parts, compiler, stack)
        else:
            _compile_steps(module, compiler, stack)
    except BaseException:
        stack.close()
        raise
    return stack


def _compile_steps(module: nn.Module, compiler: Compiler, stack: ExitStack) -> None:
    flush = _defer_log(module)
    for name in _STEPS:
        base = (Module,) if name != "predict_step" else ()
        if callable(getattr(module, name, None)) and find_override(module, name, base) is not None:
            CompiledMethod(module, name, compiler, flush).attach(stack)


def _defer_log(module: nn.Module) -> Callable[[], None] | None:
    """Let `self.log` within a graph record values; the returned function logs them after the step.

    So a step with `self.log` is one graph. Elsewhere, `self.log` logs immediately.
    """
    children = [one for one in module.modules() if isinstance(one, Module)]
    if not children or children[0]._lw_log is None:
        return None
    log = children[0]._lw_log
    noted: list[tuple[Any, ...]] = []  # Any: arguments of `log`

    def note(name: str, value: object, *rest: Any) -> None:  # Any: as `noted`
        if not torch.compiler.is_compiling():
            log(name, value, *rest)
            return
        # With a graph of autograd it would be an output of the compiled one that the backward pass has to consider.
        enable_graph = rest[5]
        noted.append((name, value.detach() if isinstance(value, Tensor) and not enable_graph else value, *rest))

    def flush() -> None:
        if noted:
            calls = noted.copy()
            noted.clear()
            for call in calls:
                log(*call)

    for child in children:
        child.__dict__["_lw_log"] = note
    return flush
