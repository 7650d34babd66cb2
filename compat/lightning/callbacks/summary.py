"""Lightning's names around the summary of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ....callbacks.summary.summary import Summary, format_table, human_count, size_hook
from ....callbacks.summary.summary import summarize as measure

__all__ = [
    "LayerSummary",
    "ModelSummary",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]

UNKNOWN_SIZE = "?"
NOT_APPLICABLE = "n/a"
LEFTOVER_PARAMS_NAME = "other params"
PARAMETER_NUM_UNITS = [" ", "K", "M", "B", "T"]


class LayerSummary:
    """Type, size and mode of one module; the shapes of its input and output are those of its first forward pass.

    Args:
        module: The module; it has a hook until its first forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._row = measure(nn.ModuleDict({"module": module})).layers[0]
        self._note = size_hook(self._row)
        is_script = isinstance(module, torch.jit.ScriptModule)  # takes no hooks
        self._handle: RemovableHandle | None = None
        if not is_script:
            self._handle = module.register_forward_hook(self._hook, with_kwargs=True)

    def _hook(self, module: nn.Module, inputs: tuple[object, ...], named: Mapping[str, object], output: object) -> None:
        self._note(module, inputs, named, output)
        self.detach_hook()

    def detach_hook(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def in_size(self) -> str | list[Any]:  # Any: nested shapes
        """Shape of the input, or a list of shapes; "?" before the first forward pass."""
        return self._row.in_size or UNKNOWN_SIZE

    @property
    def out_size(self) -> str | list[Any]:  # Any: nested shapes
        """Shape of the output, or a list of shapes; "?" before the first forward pass."""
        return self._row.out_size or UNKNOWN_SIZE

    @property
    def layer_type(self) -> str:
        """Class of the module."""
        return self._row.layer_type

    @property
    def num_parameters(self) -> int:
        """Number of parameters in it, without uninitialized ones."""
        return self._row.num_parameters

    @property
    def training(self) -> bool:
        """The mode of the module."""
        return self._module.training


class ModelSummary:
    """The summary of a module, with its columns as lists.

    Args:
        model: The module.
        max_depth: Levels of submodules to list; 0 none, -1 all.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        self._summary: Summary = measure(model, max_depth)
        self._model = model
        self._max_depth = max_depth
        rows = [layer for layer in self._summary.layers if layer.name != LEFTOVER_PARAMS_NAME]
        for layer in rows:  # of a number, and of nothing
            layer.in_size, layer.out_size = layer.in_size or UNKNOWN_SIZE, layer.out_size or UNKNOWN_SIZE
        self.layer_names = [layer.name for layer in rows]
        self.layer_types = [layer.layer_type for layer in rows]
        self.param_nums = [layer.num_parameters for layer in rows]
        self.training_modes = [layer.training for layer in rows]
        self.in_sizes = [layer.in_size for layer in rows]
        self.out_sizes = [layer.out_size for layer in rows]
        self.flop_counts = [layer.flops for layer in rows]
        self.total_layer_params = sum(self.param_nums)

    def __getattr__(
        self, name: str
    ) -> Any:  # Any: total_parameters, trainable_parameters, model_size, total_flops, ...
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._summary, name)

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Submodules in "train" and in "eval" mode now, the module itself left out."""
        modes = [module.training for module in self._model.modules()][1:]
        return {"train": modes.count(True), "eval": modes.count(False)}

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        """Return the columns of the table: title and cells."""
        return self._summary.columns()

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules that are listed."""
        found = dict(self._model.named_modules())
        return [(name, found[name]) for name in self.layer_names]

    def __str__(self) -> str:
        """Return the table, in Lightning's words."""
        summary = self._summary
        counts = [
            (human_count(summary.trainable_parameters), "Trainable params"),
            (human_count(summary.total_parameters - summary.trainable_parameters), "Non-trainable params"),
            (human_count(summary.total_parameters), "Total params"),
            (get_formatted_model_size(summary.model_size), "Total estimated model params size (MB)"),
            (str(self.total_training_modes["train"]), "Modules in train mode"),
            (str(self.total_training_modes["eval"]), "Modules in eval mode"),
            (human_count(summary.total_flops), "Total Flops"),
        ]
        return format_table(self._columns(), counts)

    __repr__ = __str__

    def _columns(self) -> list[tuple[str, list[str]]]:
        columns = self._summary.columns()
        if self._summary.has_example:
            return columns
        rows = self._summary.layers
        return [*columns, ("FLOPs", [NOT_APPLICABLE if one.training is None else human_count(0) for one in rows])]


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """Return the summary of a module."""
    return ModelSummary(lightning_module, max_depth)


def get_human_readable_count(number: int) -> str:
    """Return a count, 0 or more, as text: "12.3 K"."""
    assert number >= 0, number
    return human_count(number)


def get_formatted_model_size(total_model_size: float) -> str:
    """Return a size in MB as text."""
    return f"{total_model_size:,.3f}"


def parse_batch_shape(batch: object) -> str | list[object]:  # a nested batch
    """Return the shape of a tensor, or those in a list; "?" for anything else."""
    if hasattr(batch, "shape"):
        return list(batch.shape)
    if isinstance(batch, list | tuple):
        return [parse_batch_shape(item) for item in batch]
    return UNKNOWN_SIZE
