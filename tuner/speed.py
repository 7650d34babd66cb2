"""The search for speed: short trials of settings that change how fast a step is, and hardly what it computes."""

from __future__ import annotations

import functools
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..accelerators.usage import synchronize
from ..callbacks import Callback
from ..data.tree import change_loader, changed_loader
from ..errors import ConfigError, nearest
from ..optim.fused import fuse, is_fusable
from ..protocols import AnyLoaders, Options, Tree
from ..trainer.hooks import DATA_BASES, MODULE_BASES, find_override
from ..trainer.session.loaders import LOADER_OF
from .setting import MissingSetting, find_setting, write_setting
from .speed_table import SpeedRow, SpeedTable
from .trial import Subject, accumulation_of, isolated, make_trainer

if TYPE_CHECKING:
    from ..data.module import DataModule
    from ..protocols import Batch, Loaders, StepOutput
    from ..trainer.trainer import Trainer

# Any in this file: values of settings, and what the user's hooks return.

SETTINGS = ("fused", "compile", "channels_last", "matmul_precision", "pin_memory", "num_workers", "prefetch_factor")
"""The settings that can be tried, in this order."""

_OF_LOADER = ("pin_memory", "num_workers", "prefetch_factor")
_AS_IT_IS = "as it is"
_WARM_UP = 3
_MOST_STEPS = 10**6  # never reached: a number that schedules can be made for
_GROUPS = 12
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value of a setting.

    Attributes:
        kind: One of SETTINGS.
        value: The value.
    """

    kind: str
    value: Any

    @property
    def name(self) -> str:
        return f"{self.kind}={self.value!r}"

    @property
    def keeps_bits(self) -> bool:
        return self.kind in _OF_LOADER


# -- the search --------------------------------------------------------------------------------------------------------


def read_settings(settings: Sequence[str] | None) -> tuple[str, ...]:
    """Return the settings to try, in the order of SETTINGS.

    Raises:
        ConfigError: A name is unknown.
    """
    if settings is None:
        return SETTINGS
    given = [settings] if isinstance(settings, str) else list(settings)
    unknown = [one for one in given if one not in SETTINGS]
    if unknown:
        raise ConfigError(
            f"Tuner.speed: Expected settings of {', '.join(SETTINGS)}, got {unknown[0]!r}"
            f"{nearest(unknown[0], SETTINGS)}.",
            fix="correct the name, or leave settings= out to try all of them.",
        )
    return tuple(one for one in SETTINGS if one in given)


def find_fastest(
    subject: Subject, settings: Sequence[str], seconds: float, clock: Callable[[], float] | None = None
) -> tuple[SpeedTable, list[_Setting]]:
    """Try each setting, and return the table and the settings that are fastest together. Nothing is changed.

    Args:
        subject: What the trials train copies of.
        settings: Names of SETTINGS.
        seconds: Seconds of measured steps per value.
        clock: Returns seconds; None: `time.perf_counter`.
    """
    trials = _Trials(subject, seconds, clock or perf_counter)
    first = trials.measure(())
    trials.base_times = list(first.times)
    rows: list[SpeedRow] = []
    singles: list[tuple[SpeedRow, tuple[_Setting, ...]]] = []
    for kind in settings:
        reason = trials.reason_against(kind)
        if reason is not None:
            rows.append(SpeedRow(kind, note=reason))
            continue
        base = _fastest(singles, "num_workers") if kind == "prefetch_factor" else ()
        for value in trials.values(kind, base):
            changes = (*base, _Setting(kind, value))
            row = trials.row(changes)
            rows.append(row)
            singles.append((row, changes))
    chosen: list[_Setting] = []
    again = None
    if rows and singles:
        again = trials.measure(())  # what else the machine does may have changed
        trials.base_times += again.times
    singles = [(trials.compared(row), changes) for row, changes in singles]
    rows = [trials.compared(row) for row in rows]
    winners = _winners(singles)
    fastest = min((one for one in singles if one[0].is_faster), key=lambda one: one[0].step_s or 0, default=None)
    if len(winners) > 1:
        together = trials.compared(trials.row(tuple(winners)))
        rows.append(together)
        if together.is_faster and fastest is not None and (together.step_s or 0) <= (fastest[0].step_s or 0):
            chosen = winners
    if not chosen and fastest is not None:
        chosen = list(fastest[1])
    num_steps = first.num_steps + (again.num_steps if again is not None else 0)
    base_row = trials.base_row(num_steps)
    return SpeedTable((base_row, *rows), tuple(one.name for one in chosen)), chosen


def _winners(singles: Sequence[tuple[SpeedRow, tuple[_Setting, ...]]]) -> list[_Setting]:
    """Return the fastest value of each setting that has a faster one."""
    best: dict[str, tuple[SpeedRow, tuple[_Setting, ...]]] = {}
    for row, changes in singles:
        kind = changes[0].kind  # a prefetch factor comes with a number of workers, and competes with it
        if row.is_faster and (kind not in best or (row.step_s or 0) < (best[kind][0].step_s or 0)):
            best[kind] = row, changes
    return [one for _, changes in best.values() for one in changes]


def _fastest(singles: Sequence[tuple[SpeedRow, tuple[_Setting, ...]]], kind: str) -> tuple[_Setting, ...]:
    of_kind = [(row, changes) for row, changes in singles if changes[0].kind == kind and row.step_s is not None]
    return min(of_kind, key=lambda one: one[0].step_s or 0)[1] if of_kind else ()


class _Trials:
    """Runs trials of a subject, and compares them with the run as it is.

    Attributes:
        base_times: Seconds per step of the run as it is.
        loader: The training loader, once a trial has asked for it.
    """

    def __init__(self, subject: Subject, seconds: float, clock: Callable[[], float]) -> None:
        self._subject, self._seconds, self._clock = subject, seconds, clock
        self.base_times: list[float] = []
        self.loader: Loaders = None
        self._fuses: bool | None = None

    def measure(self, changes: tuple[_Setting, ...]) -> _StepClock:
        """Train a copy with these changes, and return its times. Everything is as before afterwards."""
        subject, trainer = self._subject, self._subject.trainer
        by_kind = {one.kind: one.value for one in changes}
        steps = _StepClock(self._seconds, self._clock, trainer.fabric.device, is_fused=bool(by_kind.get("fused")))
        limits: Options = {"compile": by_kind.get("compile", trainer._lw_arguments.compile)}
        if "matmul_precision" in by_kind:
            limits["matmul_precision"] = by_kind["matmul_precision"]
        with isolated(subject), subject.lent() as (module, datamodule):
            if "channels_last" in by_kind:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own lacks it
            given = _changed_loaders(subject, module, datamodule, by_kind)
            trial = make_trainer(
                subject,
                trainer.fabric,
                [steps],
                max_epochs=-1,
                max_steps=_MOST_STEPS,
                **accumulation_of(trainer),
                **limits,
            )
            trial.timeline.is_enabled = False
            trial.fit(module, given, datamodule=datamodule)
            if not changes:
                self.loader = trial.train_dataloader
                self._fuses = steps.can_fuse
            del trial, module, datamodule
        if not steps.times:
            raise ConfigError(
                "Tuner.speed: training ended before a step was measured.",
                fix="pass more data, or look at limit_train_batches and max_steps.",
            )
        return steps

    def row(self, changes: tuple[_Setting, ...]) -> SpeedRow:
        """Return the row of a trial; one that fails says why."""
        name = ", ".join(one.name for one in changes)
        keeps_bits = all(one.keeps_bits for one in changes)
        try:
            steps = self.measure(changes)
        except Exception as error:  # a setting that this model cannot have is a result, whatever it raises
            lines = str(error).strip().splitlines()
            note = f"failed: {type(error).__name__}: {lines[0] if lines else ''}"[:100]
            return SpeedRow(name, keeps_bits=keeps_bits, note=note)
        is_slow = any(one.kind == "compile" for one in changes)
        note = f"the first step takes {steps.first_s:.3g} s" if is_slow else ""
        times = steps.times
        return SpeedRow(
            name, statistics.median(times), _spread(times), num_steps=steps.num_steps, keeps_bits=keeps_bits, note=note
        )

    def compared(self, row: SpeedRow) -> SpeedRow:
        """Return the row with its ratio to the run as it is."""
        if row.step_s is None:
            return row
        base_s = statistics.median(self.base_times)
        return replace(row, ratio=base_s / row.step_s if row.step_s else 1.0)

    def base_row(self, num_steps: int) -> SpeedRow:
        """Return the row of the run as it is."""
        times = self.base_times
        return SpeedRow(_AS_IT_IS, statistics.median(times), _spread(times), 1.0, num_steps)

    def reason_against(self, kind: str) -> str | None:
        """Return why a setting is not tried; None if it is."""
        trainer, module = self._subject.trainer, self._subject.module
        device = trainer.fabric.device
        if kind in _OF_LOADER and not isinstance(self.loader, DataLoader):
            return f"the training data is a {type(self.loader).__name__}, not a DataLoader"
        if kind == "fused" and not self._fuses:
            return "the optimizer is fused, or torch has no fused one for it"
        if kind == "compile":
            if trainer._lw_arguments.compile is not False or trainer.fabric.strategy.traits.compile_refusal is not None:
                return (
                    "the run is compiled" if trainer._lw_arguments.compile is not False else "the strategy refuses it"
                )
            if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
                return "there is no C++ compiler"
        if kind == "channels_last" and not any(one.ndim == 4 for one in module.parameters()):
            return "there is no two-dimensional convolution"
        if kind == "matmul_precision" and trainer._lw_arguments.matmul_precision is not None:
            return "the Trainer's matmul_precision is set"
        if kind == "pin_memory" and device.type == "cpu":
            return "the device is the CPU"
        return None

    def values(self, kind: str, base: tuple[_Setting, ...]) -> Iterator[Any]:
        """Yield the values of a setting to try, without the present one."""
        loader: AnyLoaders = self.loader
        if kind == "num_workers":
            most = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
            counts = {0, 1, 2, 4, most}
            yield from sorted(count for count in counts if count <= max(most, 1) and count != loader.num_workers)
        elif kind == "prefetch_factor":
            workers = base[0].value if base else loader.num_workers
            present = loader.prefetch_factor or 2
            yield from (count for count in (4, 8) if workers and count != present)
        elif kind == "matmul_precision":
            yield "high"
        elif kind == "pin_memory":
            yield not loader.pin_memory
        else:
            yield True


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, median, third = statistics.quantiles(times, n=4)
    return (third - first) / median if median else 0.0


class _StepClock(Callback):
    """Measures steps of a trial in groups, and ends it after enough seconds.

    The device is waited for at the end of a group only, so that its work overlaps that of the host as in training.

    Attributes:
        times: Seconds per step of each group.
        num_steps: Steps in these groups.
        first_s: Seconds until the first step was over.
        can_fuse: Whether an optimizer can be fused that is not.
    """

    hears_every_step = True

    def __init__(self, seconds: float, clock: Callable[[], float], device: torch.device, *, is_fused: bool) -> None:
        self._seconds, self._clock, self._device, self._is_fused = seconds, clock, device, is_fused
        self.times: list[float] = []
        self.num_steps = 0
        self.first_s = 0.0
        self.can_fuse = False
        self._left = _WARM_UP
        self._in_group = 0
        self._since = self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        for optimizer in trainer.optimizers:
            self.can_fuse |= is_fusable(optimizer)
            if self._is_fused:
                fuse(optimizer)
        self._since = self._now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        if not trainer.at_step_boundary:
            return
        if self._left:
            if self._left == _WARM_UP:
                self.first_s = self._now() - self._since
            self._left -= 1
            if not self._left:
                self._since = self._began = self._now()
            return
        self._in_group += 1
        if self._clock() - self._since < self._seconds / _GROUPS:
            return
        now = self._now()
        self.times.append((now - self._since) / self._in_group)
        self.num_steps += self._in_group
        self._since, self._in_group = now, 0
        if now - self._began >= self._seconds and len(self.times) >= _FEWEST:
            trainer.should_stop = True

    def _now(self) -> float:
        synchronize(self._device)
        return self._clock()


# -- loaders -----------------------------------------------------------------------------------------------------------


def _changed_loaders(subject: Subject, module: nn.Module, datamodule: DataModule | None, changes: Options) -> Loaders:
    """Return the loader to pass to a trial, changed; one that a hook builds is changed when the hook is called."""
    options = {name: changes[name] for name in _OF_LOADER if name in changes}
    given = subject.given.get("train")
    if not options:
        return given
    if given is not None:
        return changed_loader(given, **_options_of(given, options))
    name = LOADER_OF["train"]
    for owner, bases in ((datamodule, DATA_BASES), (module, MODULE_BASES)):
        hook = None if owner is None else find_override(owner, name, bases)
        if hook is not None:
            vars(owner)[name] = functools.partial(_built, hook, options)
            break
    return None


def _built(hook: Callable[[], AnyLoaders], options: Options) -> AnyLoaders:
    loader = hook()
    return changed_loader(loader, **_options_of(loader, options))


def _options_of(loader: AnyLoaders, options: Options) -> Options:
    """Return the options with those that DataLoader derives from the number of workers."""
    workers = options.get("num_workers", loader.num_workers)
    found = dict(options)
    if not workers:
        return {**found, "prefetch_factor": None, "persistent_workers": False}
    if loader.prefetch_factor is None:
        found.setdefault("prefetch_factor", 2)
    return found


# -- setting what was found --------------------------------------------------------------------------------------------


class _FusedOptimizers:
    """Stands for a module's `configure_optimizers`, and fuses the optimizers that it returns."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> Any:
        made = type(self._module).configure_optimizers(self._module)  # type: ignore[attr-defined]  # it has one
        _fuse_all(made)
        return made


def _fuse_all(made: Tree) -> None:
    if isinstance(made, Optimizer):
        fuse(made)
    elif isinstance(made, Mapping):
        _fuse_all(made.get("optimizer"))
    elif isinstance(made, list | tuple):
        for one in made:
            _fuse_all(one)


def apply_settings(subject: Subject, table: SpeedTable, chosen: Sequence[_Setting]) -> SpeedTable:
    """Set the settings on trainer, module and loader, and return the table with what was set and what could not be."""
    applied, left = [], []
    for one in chosen:
        remedy = _apply(subject, one)
        if remedy is None:
            applied.append(one.name)
        else:
            left.append(f"{one.name} is not set: {remedy}")
    return replace(table, applied=tuple(applied), left=tuple(left))


def _apply(subject: Subject, setting: _Setting) -> str | None:
    """Set one; return what the user has to do instead, None if it is set."""
    trainer, module = subject.trainer, subject.module
    if setting.kind in ("compile", "matmul_precision"):
        if setting.kind == "matmul_precision":
            return "pass it to the Trainer"
        trainer._lw_arguments.compile = setting.value
    elif setting.kind == "channels_last":
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own lacks it
    elif setting.kind == "fused":
        if "configure_optimizers" in vars(module):
            return "pass fused=True to the optimizer, or make it with lw.optim.adamw"
        module.__dict__["configure_optimizers"] = _FusedOptimizers(module)
    else:
        return _apply_to_loader(subject, setting)
    return None


def _apply_to_loader(subject: Subject, setting: _Setting) -> str | None:
    given: AnyLoaders = subject.given.get("train")
    if given is not None:
        change_loader(given, **_options_of(given, {setting.kind: setting.value}))
        return None
    try:
        name, _ = find_setting(subject.owners, (setting.kind,), requested_by="Tuner.speed")
    except MissingSetting:
        return "train_dataloader builds the loader: pass it there"
    write_setting(subject.owners, name, setting.value)
    return None
