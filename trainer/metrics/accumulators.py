"""One logged value over a window and over an epoch, kept on its device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...errors import ModuleError
from ...protocols import Batch, StateDict, Tree

# Values are folded into the running sum in chunks of this size. Chunks are counted from the epoch's beginning, and
# values that are not yet folded are part of a checkpoint, so that a resumed epoch adds in the same order, to the same
# bits.
_CHUNK = 256

Number: TypeAlias = Tensor | float
Logged: TypeAlias = object  # the value of a `log` call: a Number, a Loss, a metric object, or a mistake
LogArgument: TypeAlias = Any  # of a `log` call
Reduction: TypeAlias = "str | Callable[..., object]"  # the name of one, or a function of torch's or Python's
TorchMetric: TypeAlias = Any  # Any: a metric object of torchmetrics, an optional dependency


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on this device: float64, and float32 where the device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def column_of(numbers: list[Any], device: torch.device) -> Tensor:  # Any: Number, distinguished by `kinds`
    """Return numbers and one-element tensors as one tensor on the device, without reading any of them."""
    dtype = accumulation_dtype(device)
    kinds = set(map(type, numbers))
    if Tensor not in kinds and not any(issubclass(kind, Tensor) for kind in kinds):
        return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)
    if kinds == {Tensor} and len({(n.dtype, n.device, n.ndim) for n in numbers}) == 1 and not numbers[0].ndim:
        return torch.stack(numbers).detach().to(device, dtype, non_blocking=True)
    return torch.stack(
        [
            number.detach().reshape(()).to(device, dtype, non_blocking=True)
            if isinstance(number, Tensor)
            else torch.full((), number, dtype=dtype, device=device)
            for number in numbers
        ]
    )


def with_suffix(key: str, suffix: str) -> str:
    """Return a key with a suffix, which comes before the number of a data loader."""
    name, mark, index = key.partition("/dataloader_idx_")
    return f"{name}{suffix}{mark}{index}"


_NUMBERS = frozenset((float, int, bool))  # which nothing changes in place


def version_of(value: Number) -> int:
    """Return how often a tensor was changed in place; 0 for a number."""
    # Inference tensors have no version; they are copied when they are logged.
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def is_metric(value: Logged) -> bool:
    """Whether this is a torchmetrics metric object."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def shapes_of(batch: Batch) -> Tree:
    """Return the sizes of everything in a batch, to compare two batches."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {key: shapes_of(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [shapes_of(value) for value in batch]
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return tuple(shape)
    if isinstance(batch, str | bytes) or not hasattr(batch, "__len__"):
        return type(batch).__name__
    return len(batch)


class ScalarAccumulator:
    """The values of one key from one hook.

    Attributes:
        name: Key as the user passed it, with the data loader's suffix.
        hook: Hook that logged it.
        requested: Arguments of the `log` call that made it; a later call must repeat them.
        where: File and line of that call.
        reduce: "mean", "sum", "min" or "max".
        sync_dist: Whether the value of a step is that of all ranks, at log boundaries.
        rank_zero_only: Whether rank 0's values are the only ones that count.
        weighs: Whether the values of a mean always need their weights, because they are joined with others.
        synchronized: The ranks' common value of the step of `synchronized_window`.
        window: Number of the window that `step_values` belong to.
        step: `global_step` that a step value logged now belongs to.
        version: Sum of the versions of `values` when they were logged: tensors are kept, not copied, so one that was
            changed in place since would count wrongly; it is found by its version. Likewise `step_version`.
        look_at: Number of values at which `inspect` is due.
    """

    __slots__ = (
        "dtype",
        "hook",
        "is_empty",
        "logger",
        "look_at",
        "name",
        "on_epoch",
        "on_step",
        "prog_bar",
        "rank_zero_only",
        "reduce",
        "requested",
        "shapes",
        "step",
        "step_values",
        "step_version",
        "step_weights",
        "sync_dist",
        "synchronized",
        "synchronized_window",
        "total",
        "total_weight",
        "values",
        "version",
        "weighs",
        "weights",
        "where",
        "window",
    )  # fmt: skip

    def __init__(self, name: str, hook: str, *, reduce: str, on_step: bool, on_epoch: bool) -> None:
        self.name = name
        self.hook = hook
        self.reduce = reduce
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.prog_bar = False
        self.logger = True
        self.sync_dist = False
        self.rank_zero_only = False
        self.weighs = on_epoch
        self.synchronized = 0.0
        self.synchronized_window = -1
        self.requested: tuple[LogArgument, ...] | None = None  # the raw arguments, compared by ==
        self.where = "a line of the run that was resumed"
        self.dtype = torch.float32
        self.shapes: Tree = None  # nested sizes of an ambiguous batch, compared by ==
        self.window = -1
        self.step = -1
        self.step_values: list[Number] = []
        self.step_weights: list[Number] = []
        self.step_version = 0
        self.look_at = 2
        self._clear()

    def reset(self) -> None:
        """Forget the epoch's values; the latest step value stays readable."""
        self._clear()

    def _clear(self) -> None:
        self.values: list[Number] = []
        self.weights: list[Number] = []
        self.version = 0
        self.total: Tensor | None = None
        self.total_weight: Tensor | None = None
        self.is_empty = True

    @property
    def step_key(self) -> str:
        """Key of the value of a step."""
        return with_suffix(self.name, "_step") if self.on_epoch else self.name

    @property
    def epoch_key(self) -> str:
        """Key of the value of an epoch."""
        return with_suffix(self.name, "_epoch") if self.on_step else self.name

    @property
    def keys(self) -> set[str]:
        """Every key under which its values can be read."""
        of_epoch = {self.epoch_key, self.name} if self.on_epoch else set()
        return of_epoch | {self.step_key} if self.on_step else of_epoch

    def inspect(self, device: torch.device) -> None:
        """Find a value that was changed since it was logged: at the second value, then at each full chunk, to fold it.

        Raises:
            ModuleError: There is one.
        """
        self.look_at = _CHUNK
        if len(self.values) >= _CHUNK:
            self._fold(device)
        else:
            self._refuse_changed(self.values, self.version)

    def _refuse_changed(self, values: list[Number], version: int) -> None:
        if not version and _NUMBERS.issuperset(map(type, values)):
            return
        if sum(map(version_of, values)) != version:
            raise ModuleError(
                f"the tensor that was logged as {self.name!r} was changed in place afterwards, before it was read.",
                fix=f"log a copy: self.log({self.name!r}, value.clone()).",
            )

    def _fold(self, device: torch.device) -> None:
        self.total, self.total_weight = self.sums(device)
        self.values, self.weights, self.version = [], [], 0

    def sums(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the epoch's reduction so far and, for a mean, its weight: shape (), on the device; nothing is read."""
        total, total_weight = self.total, self.total_weight
        if not self.values:
            assert total is not None
            return total, total_weight
        self._refuse_changed(self.values, self.version)
        values = column_of(self.values, device)
        if self.reduce == "mean":
            weights = column_of(self.weights, device)
            # A weight of 0 hides the value also where it is NaN: 0 elements have no mean.
            part = torch.where(weights == 0, torch.zeros_like(values), values * weights).sum()
            part_weight = weights.sum()
            if total is None or total_weight is None:
                return part, part_weight
            return total + part, total_weight + part_weight
        if self.reduce == "sum":
            part = values.sum()
            return (part if total is None else total + part), None
        # Not amax(): torch_xla 2.9 returns the tensor as it is when no dim is given.
        part = values.min() if self.reduce == "min" else values.max()
        if total is None:
            return part, None
        return (torch.minimum(total, part) if self.reduce == "min" else torch.maximum(total, part)), None

    def epoch_value(self, device: torch.device) -> Tensor | None:
        """Return the epoch's value so far: shape (), on the device; pending values stay as they are."""
        total, weight = self.sums(device)
        # A copy: what was folded inside an inference-mode validation must not leave it.
        return (total if weight is None else total / weight).to(self.dtype, copy=True)

    def step_share(self, device: torch.device) -> tuple[Number, Number]:
        """Return value and weight of the latest window, to be combined with other ranks' values."""
        value = self.step_value(device)
        if len(self.step_weights) == 1:
            return value, self.step_weights[0]
        return value, column_of(self.step_weights, device).sum()

    @property
    def is_step_changed(self) -> bool:
        """Whether a tensor of the latest window was changed in place since it was logged."""
        return sum(version_of(value) for value in self.step_values) != self.step_version

    def step_value(self, device: torch.device) -> Number:
        """Return the value of the latest window: a number that the host knows, or a tensor of shape ()."""
        self._refuse_changed(self.step_values, self.step_version)
        if len(self.step_values) == 1:
            return self.step_values[0]
        values, weights = column_of(self.step_values, device), column_of(self.step_weights, device)
        if self.reduce in ("mean", "metric"):
            value = torch.where(weights == 0, torch.zeros_like(values), values * weights).sum() / weights.sum()
        elif self.reduce == "sum":
            value = values.sum()
        else:
            value = values.min() if self.reduce == "min" else values.max()
        return value.to(self.dtype)

    def state_dict(self, device: torch.device) -> StateDict:
        """Return the epoch's values: plain values and CPU-loadable tensors."""
        return {
            "name": self.name,
            "hook": self.hook,
            "reduce": self.reduce,
            "on_step": self.on_step,
            "on_epoch": self.on_epoch,
            "prog_bar": self.prog_bar,
            "logger": self.logger,
            "rank_zero_only": self.rank_zero_only,
            "dtype": self.dtype,
            "total": self.total,
            "total_weight": self.total_weight,
            "values": column_of(self.values, device) if self.values else None,
            "weights": column_of(self.weights, device) if self.weights else None,
        }

    @classmethod
    def from_state(cls, state: StateDict, device: torch.device) -> ScalarAccumulator:
        """Return an accumulator that continues where `state_dict` was taken."""
        accumulator = cls(
            state["name"],
            state["hook"],
            reduce=state["reduce"],
            on_step=state["on_step"],
            on_epoch=state["on_epoch"],
        )
        accumulator.prog_bar, accumulator.logger, accumulator.dtype = state["prog_bar"], state["logger"], state["dtype"]
        accumulator.rank_zero_only = state.get("rank_zero_only", False)
        for name in ("total", "total_weight"):
            value = state[name]
            setattr(accumulator, name, None if value is None else value.to(device))
        if state["values"] is not None:
            accumulator.values = list(state["values"].to(device).unbind())
            accumulator.weights = list(state["weights"].to(device).unbind())
            accumulator.version = sum(version_of(value) for value in accumulator.values)
        accumulator.is_empty = accumulator.total is None and not accumulator.values
        return accumulator


class MetricAccumulator(ScalarAccumulator):
    """A torchmetrics metric object: it keeps its own state, and computes the epoch's value itself."""

    __slots__ = ("metric",)

    def __init__(self, name: str, hook: str, metric: TorchMetric, *, on_step: bool, on_epoch: bool) -> None:
        self.metric = metric
        super().__init__(name, hook, reduce="metric", on_step=on_step, on_epoch=on_epoch)

    @classmethod
    def from_metric(cls, state: StateDict, metric: TorchMetric) -> MetricAccumulator:
        """Return the accumulator of a metric object in the middle of an epoch."""
        accumulator = cls(state["name"], state["hook"], metric, on_step=state["on_step"], on_epoch=state["on_epoch"])
        accumulator.prog_bar, accumulator.logger = state["prog_bar"], state["logger"]
        accumulator.rank_zero_only = state.get("rank_zero_only", False)
        accumulator.is_empty = False
        return accumulator

    def reset(self) -> None:
        """Reset the metric."""
        super().reset()
        self.metric.reset()

    def inspect(self, device: torch.device) -> None:
        """Forget the batches' values: the metric has counted them."""
        self.values, self.weights, self.version = [], [], 0

    def epoch_value(self, device: torch.device) -> Tensor | None:
        """Return `metric.compute()`; None if the metric has no value."""
        value = self.metric.compute()
        return value if isinstance(value, Tensor) or value is None else torch.tensor(float(value), device=device)
