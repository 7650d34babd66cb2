"""What `self.log` does: values stay on the device as (sum, weight) until a log boundary or the end of an epoch.

One `Metrics` serves one Trainer. The lifecycle sets `table` to that of the running hook, which knows the defaults of
`log` there; the loops say which window and which batch it is. Nothing here reads a device but `read_step` and
`finish_epoch`, which make one packed copy each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..data.move import find_batch_size
from ..errors import ConfigError, ModuleError
from .lifecycle import HOOKS, LOG_RULES, LogRule
from .loss import Loss
from .slots import MetricSlot, ScalarSlot, accumulation_dtype, version_of

__all__ = ["HookTable", "Metrics"]

_REDUCE: dict[Any, str] = {
    "mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max",
    torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", min: "min", max: "max", sum: "sum",
}  # fmt: skip


def _stage_of(hook: str) -> str:
    return next((stage for stage in ("validation", "test") if stage in hook), "train")


class HookTable:
    """The slots that one hook logs to.

    Attributes:
        hook: Name of the hook.
        rule: Defaults of `log` there; None where logging is an error.
        stage: "train", "validation" or "test".
        slots: Key -> slot, for the data loader that is being read.
        by_loader: The same for each data loader.
    """

    __slots__ = ("by_loader", "hook", "rule", "slots", "stage")

    def __init__(self, hook: str, rule: LogRule | None) -> None:
        self.hook = hook
        self.rule = rule
        self.stage = _stage_of(hook)
        self.by_loader: dict[int, dict[str, ScalarSlot]] = {0: {}}
        self.slots = self.by_loader[0]


class Metrics:
    """Values that were logged, by hook and key.

    Attributes:
        device: Where sums live.
        table: Table of the hook that is running now.
        batch: The micro-batch at hand, which tells the weight of a value; None outside of batches.
        window: Number of the present window (or evaluation batch); step values of older ones are not logged again.
        step: `global_step` after the present window.
        is_weighing_steps: Whether a window has several micro-batches, so that step values need weights.
        is_muted: Whether `log` does nothing now (a closure that evaluates a batch again).
        results: Latest epoch value of each key: shape (), on the device.
        result_steps: `global_step` at which each of them was computed.
        progress_bar: Host values for the bar, as of the last log boundary.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._tables = {name: HookTable(name, rule) for name, rule in LOG_RULES.items()}
        self.nowhere = HookTable("", None)
        self.table = self.nowhere
        self.batch: Any = None  # Any: whatever the loader gives
        self._sized: Any = None
        self._size: int | None = None
        self.window = 0
        self.step = 0
        self.is_weighing_steps = False
        self.is_muted = False
        self.is_disabled = False
        self.several_loaders = False
        self.loader_index = 0
        self.results: dict[str, Tensor] = {}
        self.result_steps: dict[str, int] = {}
        self._replaced: dict[str, tuple[Tensor | None, int]] = {}
        self.progress_bar: dict[str, float] = {}
        self._step_slots: list[ScalarSlot] = []

    def table_of(self, hook: str) -> HookTable:
        """Return the table of a hook."""
        return self._tables[hook]

    def log(
        self,
        name: str,
        value: Any,  # Any: number, tensor, Loss, torchmetrics metric
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
    ) -> None:
        """Keep a value; see `Module.log`. Called for every value of every batch: the first lines are the hot path."""
        slot = self.table.slots.get(name)
        asked = (prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx)
        if slot is None or slot.asked != asked:
            if self.is_disabled:
                return
            slot = self._open_slot(name, value, asked)
        if self.is_muted:
            return
        weight: Tensor | float = 1.0
        version = 0
        if value.__class__ is Tensor:
            if value.requires_grad and not enable_graph:
                value = value.detach()
            if slot.reduce == "mean" and (slot.on_epoch or self.is_weighing_steps):
                weight = self._weight(slot) if batch_size is None else batch_size
            try:
                version = value._version
            except RuntimeError:  # an inference tensor
                value = value.clone()
        else:
            value, weight = self._number(slot, value, batch_size)
            version = version_of(value)
        if slot.on_step:
            if slot.window != self.window:
                slot.window = self.window
                slot.step = self.step
                slot.step_values = [value]
                slot.step_weights = [weight]
                slot.step_version = version
            else:
                slot.step_values.append(value)
                slot.step_weights.append(weight)
                slot.step_version += version
        if slot.on_epoch:
            slot.is_empty = False
            slot.values.append(value)
            slot.weights.append(weight)
            slot.version += version
            if len(slot.values) >= slot.look_at:
                slot.inspect(self.device)

    def _number(self, slot: ScalarSlot, value: Any, batch_size: int | None) -> tuple[Any, Tensor | float]:
        """Return value and weight of what is no plain tensor."""
        if isinstance(value, Loss):
            weight = value.weight
            return value.mean().detach(), weight.detach().clone() if isinstance(weight, Tensor) else weight
        if isinstance(slot, MetricSlot):
            cached = getattr(value, "_forward_cache", None) if slot.on_step else 0.0
            if cached is None:
                raise ModuleError(
                    f"log({slot.name!r}): on_step=True needs the metric's value of this batch, and only update() "
                    "was called.",
                    fix="call the metric itself, metric(preds, target), or log it with on_step=False, on_epoch=True.",
                )
            return cached, 1.0
        if isinstance(value, Tensor):
            value = value.detach().clone()  # a parameter: the optimizer changes it in place
        elif not isinstance(value, int | float):
            raise _bad_value(slot.name, value)
        if slot.reduce != "mean" or not (slot.on_epoch or self.is_weighing_steps):
            return value, 1.0
        return value, self._weight(slot) if batch_size is None else batch_size

    def _weight(self, slot: ScalarSlot) -> float:
        batch = self.batch
        if batch is None:
            return 1.0
        if self._sized is not batch:
            self._size = find_batch_size(batch)
            self._sized = batch
        if self._size is not None:
            return self._size
        # The batch does not tell its size. As long as all batches look the same they weigh the same.
        shapes = _shapes(batch)
        if slot.shapes is None:
            slot.shapes = shapes
        elif slot.shapes != shapes:
            raise ModuleError(
                f"log({slot.name!r}): the mean over the epoch needs the size of each batch; the batches differ "
                f"({slot.shapes} and {shapes}) and their tensors do not agree on a first dimension.",
                fix=f"pass it: self.log({slot.name!r}, value, batch_size=n), or log lw.Loss(sum, weight).",
            )
        return 1.0

    def _open_slot(self, name: str, value: Any, asked: tuple[Any, ...]) -> ScalarSlot:
        prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx = asked
        table = self.table
        rule = table.rule
        if rule is None:
            where = f"in {table.hook}" if table.hook else "outside of the trainer's hooks"
            raise ModuleError(
                f"log({name!r}) was called {where}, where nothing can be logged.",
                fix="log in a step, a batch hook or an epoch hook; `python -m loopwright lifecycle` lists them.",
            )
        existing = table.slots.get(name)
        if existing is not None and existing.asked is not None:
            raise ModuleError(
                f"log({name!r}) was called in {table.hook} with other arguments than before: "
                f"{_difference(existing.asked, asked)}.",
                fix="log one key with the same arguments each time, or use another key.",
            )
        step = rule.on_step if on_step is None else on_step
        epoch = rule.on_epoch if on_epoch is None else on_epoch
        if step and not rule.may_step:
            raise ModuleError(
                f"log({name!r}, on_step=True) in {table.hook}: there is no step here.",
                fix="leave on_step out; the value is logged once for the epoch.",
            )
        if not epoch and not rule.may_step:
            raise ModuleError(f"log({name!r}, on_epoch=False) in {table.hook}.", fix="leave on_epoch out.")
        slot = existing or (None if add_dataloader_idx else self._shared_slot(name, asked))
        slot = slot or self._new_slot(name, value, reduce_fx, step, epoch, add_dataloader_idx)
        slot.asked = asked
        slot.prog_bar = bool(prog_bar)
        slot.logger = logger is not False
        if slot.on_step and slot not in self._step_slots:
            self._step_slots.append(slot)
        table.slots[name] = slot
        return slot

    def _shared_slot(self, name: str, asked: tuple[Any, ...]) -> ScalarSlot | None:
        """Return the slot that another loader opened for a key without the loader's number: all count into one."""
        for slots in self.table.by_loader.values():
            slot = slots.get(name)
            if slot is not None and slot.asked in (asked, None):
                return slot
        return None

    def _new_slot(
        self, name: str, value: Any, reduce_fx: Any, on_step: bool, on_epoch: bool, add_dataloader_idx: bool
    ) -> ScalarSlot:
        table = self.table
        if not isinstance(name, str):
            raise ModuleError(f"log got the name {name!r}, expected a string.", fix="pass the key as a string.")
        full = name
        if add_dataloader_idx and "/dataloader_idx_" in name:
            raise ModuleError(
                f"log({name!r}): '/dataloader_idx_' is added by the trainer.",
                fix="choose another name, or pass add_dataloader_idx=False.",
            )
        is_per_loader = table.stage != "train" and ("batch" in table.hook or "step" in table.hook)
        if self.several_loaders and add_dataloader_idx and is_per_loader:
            full = f"{name}/dataloader_idx_{self.loader_index}"
        self._refuse_conflict(full)
        reduce = _REDUCE.get(reduce_fx)
        if _is_metric(value):
            return MetricSlot(full, table.hook, value, on_step=on_step, on_epoch=on_epoch)
        if reduce is None:
            raise ConfigError(
                f"log({name!r}): reduce_fx={reduce_fx!r} is not supported.",
                fix="use 'mean', 'sum', 'min' or 'max', or log a torchmetrics metric for anything else.",
            )
        if isinstance(value, Mapping):
            raise _bad_value(name, value)
        slot = ScalarSlot(full, table.hook, reduce=reduce, on_step=on_step, on_epoch=on_epoch)
        if isinstance(value, Loss):
            value = value.sum
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ModuleError(
                    f"log({name!r}) got a tensor of shape {tuple(value.shape)}, expected one element.",
                    fix="reduce it first, for example with value.mean().",
                )
            slot.dtype = value.dtype if value.dtype == torch.float64 else torch.float32
        else:
            slot.dtype = accumulation_dtype(self.device)
        return slot

    def _refuse_conflict(self, full: str) -> None:
        stage = self.table.stage
        for table in self._tables.values():
            if table is self.table or table.stage != stage:
                continue
            for slots in table.by_loader.values():
                if any(slot.name == full and not slot.is_empty for slot in slots.values()):
                    raise ModuleError(
                        f"log({full!r}) was called in {table.hook} and in {self.table.hook}.",
                        fix="log a key in one hook only, or use two keys.",
                    )

    # --- windows and loaders -------------------------------------------------------------------------------------

    def select_loader(self, stage: str, index: int, *, several: bool) -> None:
        """Log to the slots of this data loader from now on, in the hooks of the stage."""
        self.several_loaders = several
        self.loader_index = index
        for table in self._tables.values():
            if table.stage == stage:
                table.slots = table.by_loader.setdefault(index, {})

    # --- reading -------------------------------------------------------------------------------------------------

    def read_step(self, extra: Tensor | None = None) -> tuple[dict[str, float], float]:
        """Copy the step values of the present window to the host, in one packed copy.

        Args:
            extra: One more value to read with them: shape (), on the device.

        Returns:
            Key -> value for the loggers, and the value of `extra` (0.0 without one).
        """
        fresh = [slot for slot in self._step_slots if slot.window == self.window]
        values = [slot.step_value(self.device) for slot in fresh]
        on_device = [value for value in values if isinstance(value, Tensor)]
        if extra is not None:
            on_device.append(extra)
        numbers = iter(self._pack(on_device))
        row: dict[str, float] = {}
        for slot, value in zip(fresh, values, strict=True):
            number = next(numbers) if isinstance(value, Tensor) else float(value)
            if slot.logger:
                row[slot.step_key] = number
            if slot.prog_bar:
                self.progress_bar[slot.step_key] = number
                if slot.on_epoch:
                    self.progress_bar[slot.name] = number
        return row, next(numbers) if extra is not None else 0.0

    @property
    def has_step_values(self) -> bool:
        """Whether any step value was logged in the present window."""
        return any(slot.window == self.window for slot in self._step_slots)

    def _pack(self, values: list[Tensor]) -> list[float]:
        if not values:
            return []
        dtype = accumulation_dtype(self.device)
        packed = torch.stack([v.detach().reshape(()).to(self.device, dtype, non_blocking=True) for v in values])
        numbers: list[float] = packed.tolist()
        return numbers

    def publish_epoch(self, stage: str, step: int) -> list[ScalarSlot]:
        """Make the epoch's values so far readable in `results`, on the device; return their slots."""
        published = []
        self._replaced = {}
        for slot in self._slots(stage):
            if slot.on_epoch and not slot.is_empty:
                value = slot.epoch_value(self.device)
                for key in {slot.epoch_key, slot.name}:
                    self._replaced[key] = (self.results.get(key), self.result_steps.get(key, 0))
                    self.results[key] = value
                    self.result_steps[key] = step
                slot.finished_window = slot.window
                published.append(slot)
        return published

    def finish_epoch(self, stage: str, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """End the epoch of a stage: publish, copy to the host in one packed copy, and begin anew.

        Returns:
            Key -> value for the loggers, and key -> value of everything.
        """
        slots = self.publish_epoch(stage, step)
        numbers = self._pack([self.results[slot.epoch_key] for slot in slots])
        row, everything = {}, {}
        for slot, number in zip(slots, numbers, strict=True):
            everything[slot.epoch_key] = number
            if slot.logger:
                row[slot.epoch_key] = number
            if slot.prog_bar:
                self.progress_bar[slot.epoch_key] = number
                if slot.on_step:
                    self.progress_bar[slot.name] = number
            slot.reset()
        self._replaced = {}
        return row, everything

    def discard_epoch(self, stage: str) -> None:
        """Forget what a stage logged and put back what it published over: the sanity check leaves no trace."""
        for key, (value, step) in self._replaced.items():
            if value is None:
                del self.results[key], self.result_steps[key]
            else:
                self.results[key], self.result_steps[key] = value, step
        self._replaced = {}
        for slot in self._slots(stage):
            slot.reset()
        for table in self._tables.values():
            if table.stage == stage:
                table.by_loader = {0: {}}
                table.slots = table.by_loader[0]
        self._step_slots = [slot for slot in self._step_slots if _stage_of(slot.hook) != stage]

    def _slots(self, stage: str) -> list[ScalarSlot]:
        """Return the slots of a stage, each once also where several loaders share it."""
        slots = {
            id(slot): slot
            for table in self._tables.values()
            if table.stage == stage
            for by_key in table.by_loader.values()
            for slot in by_key.values()
        }
        return list(slots.values())

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the latest value of each key: shape (), on the device; nothing is read."""
        values = dict(self.results)
        for slot in self._step_slots:
            if slot.step_values:
                value = slot.step_value(self.device)
                if not isinstance(value, Tensor):
                    value = torch.tensor(value, dtype=slot.dtype)
                values[slot.step_key] = value.reshape(())
                if slot.window > slot.finished_window:
                    values[slot.name] = values[slot.step_key]
        return values

    def metric_step(self, name: str) -> int | None:
        """Return the `global_step` at which the value of `callback_metrics[name]` was computed; None without one."""
        for slot in self._step_slots:
            if slot.step_values and name == slot.step_key:
                return slot.step
            if slot.window > slot.finished_window and name == slot.name:
                return slot.step
        return self.result_steps.get(name)

    # --- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, module: torch.nn.Module | None = None) -> dict[str, Any]:
        """Return published values and the sums of the epoch at hand: plain values and tensors.

        Args:
            module: Where metric objects that were logged are named by their path in it.
        """
        return {
            "results": (results := self.callback_metrics()),
            "result_steps": {name: self.metric_step(name) or 0 for name in results},
            "window": self.window,
            "progress_bar": dict(self.progress_bar),
            "slots": [
                {**slot.state_dict(self.device), "loader": loader, "key": key}
                for table in self._tables.values()
                if table.stage == "train"  # a validation that has not ended is repeated
                for loader, slots in table.by_loader.items()
                for key, slot in slots.items()
                if not isinstance(slot, MetricSlot) and slot.on_epoch and not slot.is_empty
            ],
            "metric_slots": self._metric_slots(module) if module is not None else [],
        }

    def _metric_slots(self, module: torch.nn.Module) -> list[dict[str, Any]]:
        paths = {id(child): path for path, child in module.named_modules()}
        return [
            {
                "metric": paths[id(slot.metric)],
                "key": key,
                **{name: getattr(slot, name) for name in ("name", "hook", "on_step", "on_epoch", "prog_bar", "logger")},
            }
            for table in self._tables.values()
            if table.stage == "train"
            for key, slot in table.slots.items()
            if isinstance(slot, MetricSlot) and not slot.is_empty and id(slot.metric) in paths
        ]

    def load_state_dict(self, state_dict: dict[str, Any], module: torch.nn.Module | None = None) -> None:
        """Go on where `state_dict` was taken."""
        self.results = {name: value.to(self.device) for name, value in state_dict["results"].items()}
        self.result_steps = dict(state_dict["result_steps"])
        self.window = state_dict["window"]
        self.progress_bar = dict(state_dict["progress_bar"])
        for state in state_dict["slots"]:
            if state["hook"] in HOOKS:
                table = self._tables[state["hook"]]
                slots = table.by_loader.setdefault(state["loader"], {})
                slots[state["key"]] = ScalarSlot.from_state(state, self.device)
        children = dict(module.named_modules()) if module is not None else {}
        for state in state_dict.get("metric_slots", []):
            metric = children.get(state["metric"])
            if state["hook"] in HOOKS and _is_metric(metric):
                self._tables[state["hook"]].slots[state["key"]] = MetricSlot.from_metric(state, metric)


def _is_metric(value: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def metric_states(module: torch.nn.Module, *, copy: bool = False) -> dict[str, dict[str, Any]]:
    """Return the state of each torchmetrics metric in the module, by its path: torchmetrics leaves it out.

    Args:
        module: The module.
        copy: Whether later updates of the metrics must not reach what is returned.
    """

    def kept(state: Any) -> Any:  # Any: a tensor or a list of tensors
        if isinstance(state, list):
            return [kept(item) for item in state]
        return state.clone() if copy else state

    return {
        path: {
            "update_count": child._update_count,
            "states": {name: kept(getattr(child, name)) for name in child._defaults},
        }
        for path, child in module.named_modules()
        if _is_metric(child)
    }


def load_metric_states(module: torch.nn.Module, states: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    """Put back what `metric_states` returned."""
    for path, child in module.named_modules():
        if path in states and _is_metric(child):
            child._update_count = states[path]["update_count"]
            for name, value in states[path]["states"].items():
                moved = [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
                setattr(child, name, moved)


def _shapes(batch: Any) -> Any:
    """Return the sizes of everything in a batch, to tell whether two batches look alike."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {key: _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return tuple(shape)
    if isinstance(batch, str | bytes) or not hasattr(batch, "__len__"):
        return type(batch).__name__
    return len(batch)


def _bad_value(name: str, value: Any) -> ModuleError:
    if isinstance(value, Mapping):
        return ModuleError(f"log({name!r}) got a dict.", fix="use self.log_dict for several values.")
    return ModuleError(
        f"log({name!r}) got {type(value).__name__}, expected a number, a tensor of one element, lw.Loss or a "
        "torchmetrics metric.",
        fix="convert the value, for example with float(value).",
    )


def _difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx")
    return ", ".join(f"{n}={b!r} and {a!r}" for n, b, a in zip(names, before, now, strict=True) if b != a)
