"""Count a module's parameters, sizes and FLOPs, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...errors import ConfigError
from ...fabric.undisturbed import undisturbed
from ...protocols import Tree
from ...strategies.distributed.shards import all_parameters
from ..sharded_pass import gathered, root_around

_UNITS = (" ", "K", "M", "B", "T")


@dataclass(slots=True)
class LayerSummary:
    """A row of the table.

    Attributes:
        name: Name of the submodule; "other params" for parameters that no listed layer holds.
        layer_type: Class of the submodule.
        num_parameters: Number of its parameters; tied ones count once, uninitialized lazy ones 0.
        training: Whether it is in training mode; None for "other params".
        in_size: Shape of its first input, or a list of shapes; "?" if it did not run.
        out_size: Shape of its output, or a list of shapes; "?" if it did not run.
        flops: Floating-point operations of one forward pass of the example input.
        has_lazy: Whether some of its parameters have no shape yet.
    """

    name: str
    layer_type: str
    num_parameters: int
    training: bool | None = None
    in_size: str | list[Any] = "?"
    out_size: str | list[Any] = "?"
    flops: int = 0
    has_lazy: bool = False

    @property
    def shown_parameters(self) -> str:
        """The count as text: "?" if unknown, "1.2 K+" if lazy parameters will be added."""
        if not self.has_lazy:
            return human_count(self.num_parameters)
        return f"{human_count(self.num_parameters).strip()}+" if self.num_parameters else "?"


@dataclass(slots=True)
class Summary:
    """Parameters, sizes, modes and FLOPs of a module.

    Attributes:
        layers: Rows, in the module's order.
        total_parameters: Number of parameters; tied ones count once.
        trainable_parameters: Number of parameters with requires_grad.
        model_size: Size of the parameters in MB (10**6 bytes).
        total_training_modes: Number of submodules in "train" and in "eval" mode, without the module itself.
        total_flops: FLOPs of one forward pass of the example input.
        has_example: Whether sizes and FLOPs were measured.
        num_lazy: Number of lazy parameters that have no shape yet; no other count includes them.
    """

    layers: list[LayerSummary] = field(default_factory=list)
    total_parameters: int = 0
    trainable_parameters: int = 0
    model_size: float = 0.0
    total_training_modes: dict[str, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    total_flops: int = 0
    has_example: bool = False
    num_lazy: int = 0

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return the table's columns: (title, cells)."""
        modes = {None: "n/a", True: "train", False: "eval"}
        columns = [
            (" ", [str(index) for index in range(len(self.layers))]),
            ("Name", [layer.name for layer in self.layers]),
            ("Type", [layer.layer_type for layer in self.layers]),
            ("Params", [layer.shown_parameters for layer in self.layers]),
            ("Mode", [modes[layer.training] for layer in self.layers]),
        ]
        if self.has_example:
            columns.append(("FLOPs", [human_count(layer.flops) for layer in self.layers]))
            columns.append(("In sizes", [str(layer.in_size) for layer in self.layers]))
            columns.append(("Out sizes", [str(layer.out_size) for layer in self.layers]))
        return columns

    def totals(self) -> list[tuple[str, str]]:
        """Return the rows below the table: (number, meaning)."""
        rows = [
            (human_count(self.trainable_parameters), "Trainable params"),
            (human_count(self.total_parameters - self.trainable_parameters), "Non-trainable params"),
            (human_count(self.total_parameters), "Total params"),
            (f"{self.model_size:,.3f}", "Total size of the parameters (MB)"),
            (str(self.total_training_modes["train"]), "Modules in train mode"),
            (str(self.total_training_modes["eval"]), "Modules in eval mode"),
        ]
        if self.num_lazy:
            rows.append((str(self.num_lazy), "Parameters of lazy layers, not counted: their shapes are not known yet"))
        if self.has_example:
            rows.append((human_count(self.total_flops), "Total FLOPs of the example input"))
        return rows

    def __str__(self) -> str:
        return format_table(self.columns(), self.totals())


def summarize(
    module: nn.Module, max_depth: int = 1, *, forward_context: AbstractContextManager[object] | None = None
) -> Summary:
    """Count parameters, and measure sizes and FLOPs if the module has an `example_input_array`.

    The example runs forward once, in eval mode and without gradients; modes and the generators of random numbers are
    restored afterwards. For a sharded module, counts are those of the full module, and the example runs on all ranks:
    call the function on every rank.

    Args:
        module: Its attribute `example_input_array` is a tensor, a tuple of arguments, or a dict of keyword arguments.
        max_depth: Number of levels of submodules to list; 0 for none, -1 for all.
        forward_context: Context of the forward pass, such as autocast.

    Raises:
        ConfigError: `max_depth` is below -1 or not an integer.
    """
    if not isinstance(max_depth, int) or max_depth < -1:
        raise ConfigError(f"max_depth={max_depth!r}, expected -1, 0 or more.", fix="pass how many levels to list.")
    listed = _listed(module, max_depth)
    summary = Summary(layers=[_row(name, layer) for name, layer in listed])
    counted = {id(parameter) for _, layer in listed for parameter in all_parameters(layer)}
    for parameter in all_parameters(module):
        count = count_elements(parameter)
        summary.num_lazy += is_lazy(parameter)
        summary.total_parameters += count
        summary.trainable_parameters += count if parameter.requires_grad else 0
        summary.model_size += count * parameter.dtype.itemsize / 1e6
    others = sum(count_elements(parameter) for parameter in all_parameters(module) if id(parameter) not in counted)
    for submodule in module.modules():
        if submodule is not module:
            summary.total_training_modes["train" if submodule.training else "eval"] += 1
    example = getattr(module, "example_input_array", None)
    if example is not None:
        summary.has_example = True
        _measure(module, example, dict(listed), summary, forward_context or nullcontext())
    if listed and others:
        summary.layers.append(LayerSummary("other params", "n/a", others, None, "n/a", "n/a"))
    return summary


def _listed(module: nn.Module, max_depth: int) -> list[tuple[str, nn.Module]]:
    if max_depth == 0:
        return []
    named = [(name, layer) for name, layer in module.named_modules() if name]
    return [(name, layer) for name, layer in named if max_depth == -1 or name.count(".") < max_depth]


def _row(name: str, layer: nn.Module) -> LayerSummary:
    count = sum(count_elements(parameter) for parameter in all_parameters(layer))
    has_lazy = any(is_lazy(parameter) for parameter in all_parameters(layer))
    return LayerSummary(name, _class_name(layer), count, layer.training, has_lazy=has_lazy)


def _class_name(layer: nn.Module) -> str:
    """Return the name of the user's class: torch derives one from it for each unit of a sharded module."""
    kind = type(layer)
    if kind.__name__.startswith("FSDP") and len(kind.__bases__) == 2 and kind.__bases__[0].__name__ == "FSDPModule":
        return kind.__bases__[1].__name__
    return kind.__name__


def count_elements(parameter: Tensor) -> int:
    """Return the number of elements of the full parameter; 0 before it is initialized."""
    if is_lazy(parameter):
        return 0
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # a parameter that DeepSpeed has sharded is empty


def is_lazy(parameter: Tensor) -> bool:
    """Return whether the parameter is a lazy layer's and has no shape yet."""
    return isinstance(parameter, nn.parameter.UninitializedParameter)


def _measure(
    module: nn.Module,
    example: Tree,
    listed: dict[str, nn.Module],
    summary: Summary,
    forward_context: AbstractContextManager[object],
) -> None:
    rows = {layer.name: layer for layer in summary.layers}
    handles = [
        layer.register_forward_hook(size_hook(rows[name]), with_kwargs=True)
        for name, layer in listed.items()
        if not isinstance(layer, torch.jit.ScriptModule)  # which takes no hooks
    ]
    counter = FlopCounterMode(display=False)
    forward = gathered(module, module)
    try:
        with undisturbed(module), forward_context, counter:
            example = _moved(example, module)
            if isinstance(example, Mapping):
                forward(**example)
            elif isinstance(example, tuple | list):
                forward(*example)
            else:
                forward(example)
    finally:
        for handle in handles:
            handle.remove()
    # What stands around a sharded module is the counter's outermost one, and has the module under this name.
    around = root_around(module)
    root = type(module).__name__ if around is None else f"{type(around).__name__}.module"
    per_layer = {str(name): sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    summary.total_flops = counter.get_total_flops()
    for name in listed:
        rows[name].flops = per_layer.get(f"{root}.{name}", 0)


def size_hook(row: LayerSummary) -> Any:  # Any: torch's hook type names its own aliases
    """Return a forward hook with keyword arguments that notes the shapes of a module's first input and output."""

    def hook(_: nn.Module, inputs: tuple[Tree, ...], named: Mapping[str, Tree], output: Tree) -> None:
        if row.in_size == "?":
            inputs = (*inputs, *named.values())
            row.in_size = _shape(inputs[0] if len(inputs) == 1 else inputs)
            row.out_size = _shape(output)

    return hook


def _shape(value: Tree) -> str | list[Tree]:
    if hasattr(value, "shape"):
        return list(value.shape)
    if isinstance(value, list | tuple):
        return [_shape(item) for item in value]
    return "?"


def _moved(example: Tree, module: nn.Module) -> Tree:
    parameter = next(module.parameters(), None)
    if isinstance(example, Tensor):
        return example if parameter is None else example.to(parameter.device)
    if isinstance(example, Mapping):
        return {name: _moved(item, module) for name, item in example.items()}
    if isinstance(example, tuple | list):
        return tuple(_moved(item, module) for item in example)
    return example


def human_count(number: int) -> str:
    """Return a count as text: 999 -> "999  ", 1234 -> "1.2 K", 65800000 -> "65.8 M"."""
    groups = max(1, math.ceil(len(str(number)) / 3))
    groups = min(groups, len(_UNITS))
    scaled = number / 1000 ** (groups - 1)
    return (
        f"{int(scaled):,d} {_UNITS[groups - 1]}"
        if groups == 1 or scaled >= 100
        else f"{scaled:,.1f} {_UNITS[groups - 1]}"
    )


def format_table(columns: list[tuple[str, list[str]]], totals: list[tuple[str, str]]) -> str:
    """Return the table as lines of text: columns as (title, cells), then (number, meaning) below them."""
    widths = [max(len(title), *map(len, cells), 0) if cells else len(title) for title, cells in columns]
    header = " | ".join(f"{title:<{width}}" for (title, _), width in zip(columns, widths, strict=True)).rstrip()
    rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
    rows = [
        " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*(cells for _, cells in columns), strict=True)
    ]
    table = [header, rule, *rows, rule] if rows else []
    return "\n".join([*table, *(f"{number:<10}{meaning}" for number, meaning in totals)])
