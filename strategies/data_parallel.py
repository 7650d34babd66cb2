"""One process on several devices: each batch is split over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply, replicate

from ..errors import ModuleError
from .distributed.collectives import op_name
from .parallel import ParallelStrategy
from .tree import leaves, map_leaves

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..accelerators import Accelerator
    from ..precision import Precision
    from ..protocols import CheckpointPlugin, ReduceOp, StepFunction, Tree

# Any in this file: batches, and outputs of the user's steps.


class DataParallelStrategy(ParallelStrategy):
    """One process that splits each training batch over several devices, with a copy of the module on each.

    On CUDA devices the module is copied to every device at every step, and the chunks run in threads, as in torch's
    DataParallel. On the CPU the chunks run one after the other, so that "dp" can be tried anywhere.

    Limitations compared with "ddp": copying and Python's lock make it slow. Chunks do not see each other: batch norm
    normalizes over a chunk, only the first device's statistics are kept, and dropout draws per chunk. Attributes that
    the module sets in a step are lost on CUDA devices, except buffers changed in place on the first one. `log` in
    training_step is called once for each chunk. Evaluation steps run on the first device, with the full batch. Only
    tensors (in lists, tuples, mappings and dataclasses) are split, along a first dimension that is the same for all of
    them; everything else goes to every device.

    A mean loss is averaged over the chunks by their sizes; both values of `Loss(sum, weight)` are added. The gradient
    is therefore that of the full batch. Scalars of other outputs are averaged, and tensors are concatenated.

    Args:
        accelerator: The kind of device; None lets Fabric choose.
        parallel_devices: The devices; None is the devices of `devices=`.
        checkpoint_io: Reads and writes checkpoints; None lets Fabric choose.
        precision_plugin: The precision; None lets Fabric choose.
        precision: Another name for `precision_plugin`.
    """

    strategy_name = "dp"
    traits = replace(
        ParallelStrategy.traits,
        uneven_choices=(),  # one process reads all data
        accumulation_refusal=("torch adds up the gradients of its devices", "pass strategy='ddp'"),
        compile_refusal=("it copies the module at each step, but only the original is compiled", "use strategy='ddp'"),
    )

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, None, checkpoint_io, precision_plugin, precision=precision)
        self.start_method = None

    @property
    def devices(self) -> list[torch.device]:
        """The devices that a batch is split over."""
        return list(self.parallel_devices or [self.device])

    def bind_step(self, module: nn.Module, name: str) -> StepFunction:
        """Return a function that runs `module.<name>`; "training_step" and "forward" run on all devices."""
        step: StepFunction = module if name == "forward" else getattr(module, name)
        devices = self.devices
        if name not in ("training_step", "forward") or len(devices) == 1:
            return step
        join = _join_loss if name == "training_step" else _join_outputs

        def run(*args: object, **kwargs: object) -> object:
            size = _batch_size((args, kwargs))
            if size is None or size < 2:
                return step(*args, **kwargs)
            parts = _split((args, kwargs), size, len(devices))
            if devices[0].type == "cpu":
                outputs = [step(*part_args, **part_kwargs) for part_args, part_kwargs in parts]
            else:
                outputs = _on_devices(module, name, devices[: len(parts)], parts)
            return join(outputs, _sizes(size, len(devices)))

        return run

    # -- collectives of one process ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tree, group: ProcessGroup | str | None = None, reduce_op: ReduceOp = "mean") -> Any:
        """Return the mean (or sum, min, max, product) of each tensor's elements, one per device.

        The mean of integers is a float64.
        """
        if isinstance(group, str):
            reduce_op = group
        op = op_name(reduce_op)

        def reduced(leaf: Tree) -> object:
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return leaf
            if op == "mean":
                return leaf.mean() if leaf.is_floating_point() or leaf.is_complex() else leaf.double().mean()
            if op == "sum":
                return leaf.sum()
            return leaf.prod() if op == "product" else getattr(leaf, op)()

        return map_leaves(tensor, reduced)


# -- splitting ---------------------------------------------------------------------------------------------------------


def _batch_size(data: Tree) -> int | None:
    """Return the size that the first dimensions of all tensors share; None where they differ or there are none."""
    sizes = {leaf.shape[0] for _, leaf in leaves(data) if isinstance(leaf, Tensor) and leaf.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def _sizes(size: int, count: int) -> list[int]:
    """Return the sizes of at most `count` chunks, as in torch.chunk."""
    step = -(-size // count)
    return [min(step, size - start) for start in range(0, size, step)]


def _split(data: Tree, size: int, count: int) -> list[Any]:
    parts = []
    start = 0
    for length in _sizes(size, count):
        part = slice(start, start + length)
        parts.append(map_leaves(data, partial(_slice_of, part=part)))
        start += length
    return parts


def _slice_of(leaf: Tree, part: slice) -> object:
    return leaf[part] if isinstance(leaf, Tensor) and leaf.ndim else leaf


class _Step(nn.Module):
    """A module whose forward is one of the user's steps; copies of it run that step on copies of the module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name

    def forward(self, *args: object, **kwargs: object) -> object:
        step = self.module if self.name == "forward" else getattr(self.module, self.name)
        return step(*args, **kwargs)


def _on_devices(module: nn.Module, name: str, devices: Sequence[torch.device], parts: Sequence[object]) -> list[Any]:
    """Run the parts on copies of the module, in threads, and move the outputs to the first device."""
    copies = replicate(_Step(module, name), list(devices), detach=not torch.is_grad_enabled())
    moved = [_moved(part, device) for part, device in zip(parts, devices, strict=True)]
    outputs = parallel_apply(copies, [m[0] for m in moved], [m[1] for m in moved], list(devices))
    return [_moved(output, devices[0]) for output in outputs]


def _moved(data: Tree, device: torch.device) -> Any:
    return map_leaves(data, lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf)


# -- joining -----------------------------------------------------------------------------------------------------------


def _join_loss(outputs: Sequence[Any], sizes: Sequence[int]) -> object:
    """Return one training step's output from the outputs of its parts.

    Raises:
        ModuleError: The parts returned different types.
    """
    given = [(output, size) for output, size in zip(outputs, sizes, strict=True) if output is not None]
    if not given:
        return None
    first, kept = given[0][0], [size for _, size in given]
    if any(type(output) is not type(first) for output, _ in given):
        raise ModuleError(
            "Expected the same type from training_step for all parts of a batch with strategy='dp', got "
            f"{' and '.join(sorted({type(output).__name__ for output, _ in given}))}.",
            fix="return the same type for every batch.",
        )
    values = [output for output, _ in given]
    if isinstance(first, Mapping):
        adds = "loss_sum" in first and "weight" in first
        joined = {}
        for key in first:
            items = [value[key] for value in values]
            if adds and key in ("loss_sum", "weight"):
                joined[key] = _sum(items)
            elif key == "loss":
                joined[key] = _join_loss(items, kept)
            else:
                joined[key] = _join_extra(items, kept)
        return joined
    if dataclasses.is_dataclass(first) and hasattr(first, "sum") and hasattr(first, "weight"):
        changed: Any = dataclasses.replace(  # type: ignore[type-var]
            first, sum=_sum([one.sum for one in values]), weight=_sum([one.weight for one in values])
        )
        return changed
    return _join_extra(values, kept)


def _sum(values: Sequence[Any]) -> object:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _join_extra(values: Sequence[Any], sizes: Sequence[int]) -> object:
    """Join tensors along the batch, average scalars by the sizes of their parts, keep the first of anything else."""
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(values))
    if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
        return _sum([value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True)])
    return first


def _join_outputs(outputs: Sequence[object], sizes: Sequence[int]) -> object:
    """Return what a module's forward returns for the full batch: tensors joined, scalars as one tensor of them."""
    columns = zip(*([leaf for _, leaf in leaves(output)] for output in outputs), strict=True)
    joined = iter([_join_leaf(column) for column in columns])
    return map_leaves(outputs[0], lambda _: next(joined))


def _join_leaf(values: Sequence[Any]) -> object:
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    return torch.cat(list(values)) if first.ndim else torch.stack(list(values))
