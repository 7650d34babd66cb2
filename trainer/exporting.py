"""Exporting a module's forward: TorchScript, ONNX, and programs of torch.export."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import fsspec
import torch
from torch import nn

from ..data.move import move_to_device
from ..errors import ConfigError, MissingDependency, ModuleError
from ..fabric.compiling import CompiledMethod
from ..fabric.undisturbed import evaluating
from ..protocols import Options
from ..strategies.distributed.shards import is_sharded

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ..protocols import Batch
    from .module import Module

# Any in this file: arguments of torch's exporters, and what torch.onnx.export returns.

# Attributes that stand for a compiled forward while a Trainer runs it compiled.
_COMPILED = "_compiled_call_impl"


def export_script(
    module: Module, file_path: str | Path | None, method: str, example_inputs: Batch, kwargs: Options
) -> torch.jit.ScriptModule:
    """Return the module as TorchScript; see `Module.to_torchscript`."""
    if method not in ("script", "trace"):
        raise ConfigError(
            f"to_torchscript got method={method!r}, expected 'script' or 'trace'.", fix="pass one of them."
        )
    inputs: dict[str, Batch] = {}
    if method == "trace":
        args, named = _sample_of(module, "to_torchscript(method='trace')", "example_inputs", example_inputs)
        inputs = {"example_kwarg_inputs": named} if named else {"example_inputs": args}
        if named and args:
            raise ConfigError(
                "to_torchscript(method='trace') got inputs by position and by name.", fix="pass all of them one way."
            )
    with _exporting(module), _scripting(module):
        script: torch.jit.ScriptModule = (
            torch.jit.script(module, **kwargs) if method == "script" else torch.jit.trace(module, **inputs, **kwargs)
        )
    if file_path is not None:
        _write(file_path, lambda file: torch.jit.save(script, file))
    return script


def export_onnx(module: Module, file_path: str | Path | None, input_sample: Batch, kwargs: Options) -> object:
    """Export with torch.onnx; see `Module.to_onnx`."""
    args, named = _sample_of(module, "to_onnx", "input_sample", input_sample)
    package = "onnxscript" if kwargs.get("dynamo", True) else "onnx"
    if importlib.util.find_spec(package) is None:
        raise MissingDependency(package, needed_for="Module.to_onnx", extra="onnx")
    if file_path is not None:
        Path(file_path).parent.mkdir(parents=True, exist_ok=True)
    with _exporting(module):
        return torch.onnx.export(module, args, file_path, kwargs=named or None, **kwargs)


def export_program(
    module: Module, file_path: str | Path | None, example_inputs: Batch, kwargs: Options
) -> ExportedProgram:
    """Return the module as a program of torch.export; see `Module.to_export`."""
    args, named = _sample_of(module, "to_export", "example_inputs", example_inputs)
    with _exporting(module):
        program = torch.export.export(module, args, named or None, **kwargs)
    if file_path is not None:
        _write(file_path, lambda file: torch.export.save(program, file))
    return program


def _write(path: str | Path, save: Callable[[IO[bytes]], None]) -> None:
    if "://" in str(path):
        with fsspec.open(str(path), "wb") as file:
            save(file)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        save(file)


def _sample_of(module: Module, verb: str, argument: str, sample: Batch) -> tuple[tuple[Batch, ...], dict[str, Batch]]:
    """Return what forward is called with, by position and by name, on the module's device.

    Raises:
        ConfigError: There is no sample.
    """
    sample = module.example_input_array if sample is None else sample
    if sample is None:
        raise ConfigError(
            f"{type(module).__name__}.{verb} needs an input to run forward with.",
            fix=f"pass {argument}=, or set self.example_input_array.",
        )
    sample = move_to_device(sample, module.device)
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple | list) else (sample,)), {}


@contextmanager
def _exporting(module: nn.Module) -> Iterator[None]:
    """Put every submodule into evaluation, uncompiled and detached from its run, without gradients; and back."""
    if any(is_sharded(parameter) for parameter in module.parameters()):
        raise ModuleError(
            f"the parameters of {type(module).__name__} are sharded over processes, and an exporter needs all of each.",
            fix="save a checkpoint, load it in one process with load_from_checkpoint, and export that.",
        )
    hidden = [(one, name, one.__dict__.pop(name)) for one in module.modules() for name in _hidden(one)]
    try:
        with evaluating(module), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # torch warns that torch.export replaces TorchScript; a user who requests TorchScript has a reason.
            warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
            yield
    finally:
        for one, name, value in hidden:
            one.__dict__[name] = value


@contextmanager
def _scripting(module: Module) -> Iterator[None]:
    """Let attributes that need a Trainer be missing, also in users' properties."""
    base: Any = next(cls for cls in type(module).__mro__ if "_lw_is_scripting" in vars(cls))
    base._lw_is_scripting = True
    try:
        yield
    finally:
        base._lw_is_scripting = False


def _hidden(module: nn.Module) -> list[str]:
    """Return attributes that a run has put on the module and that an exporter must not see."""
    own = module.__dict__
    names = [_COMPILED] if own.get(_COMPILED) is not None else []
    return names + [name for name, value in own.items() if isinstance(value, CompiledMethod)]
