"""The Trainer's arguments: defaults, modes that change others, and every mistake about loops named at once.

Devices, strategy and precision are resolved in fabric/resolve.py.
"""

from __future__ import annotations

import math
import os
from ast import literal_eval
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...accelerators.matmul_precision import MATMUL_PRECISIONS
from ...data.hparams import without_omegaconf
from ...errors import ConfigError, Problems
from ...fabric import Fabric
from ...protocols import Tree
from ..loop.non_finite import POLICIES

if TYPE_CHECKING:
    from ...profilers import Profiler
    from ...strategies import Strategy
    from ..metrics.log_output import LoggerArgument
    from ..replica_groups import TorchFT

# Arguments that may differ between ranks: place of the rank, and output for people.
_PER_RANK = {
    "devices", "default_root_dir", "enable_progress_bar", "enable_model_summary", "logger", "callbacks", "profiler",
}  # fmt: skip
Interval = str | timedelta | dict[str, float]
_ENVIRONMENT_PREFIXES = ("LOOPWRIGHT_TRAINER_", "PL_TRAINER_")


def from_environment(given: Arguments) -> Arguments:
    """Return the arguments, with `LOOPWRIGHT_TRAINER_<NAME>` from the environment where the user passed the default.

    `PL_TRAINER_<NAME>` is accepted, too.
    """
    found: dict[str, Any] = {}  # Any: of each argument's type, or text that `resolve` refuses
    for field in fields(given):
        variables = (f"{prefix}{field.name.upper()}" for prefix in _ENVIRONMENT_PREFIXES)
        raw = next((os.environ[one] for one in variables if one in os.environ), None)
        if raw is None or getattr(given, field.name) is not field.default:
            continue
        try:
            found[field.name] = literal_eval(raw.capitalize() if raw.lower() in ("true", "false", "none") else raw)
        except (ValueError, SyntaxError):
            found[field.name] = raw
    return replace(given, **found)


@dataclass(slots=True)
class Arguments:
    """Arguments of the Trainer, which describes each; `resolve` raises one error with everything that is wrong."""

    # Any: a name or number for the command line, or an object that the program passes
    accelerator: Any = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = None
    plugins: Any = None
    when_short: str = "raise"
    callbacks: Any = None
    default_root_dir: str | Path | None = None
    model_registry: str | None = None
    fast_dev_run: int | bool = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_samples: int | None = None
    max_tokens: int | None = None
    max_time: Interval | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | Interval | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int = 1
    global_batch_size: int | None = None
    accumulate_across_epochs: bool = False
    grad_accumulation_dtype: object = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    matmul_precision: str | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    sync_batchnorm: bool = False
    enable_autolog_hparams: bool = True
    detect_anomaly: bool = False
    barebones: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    nonfinite_loss: str = "warn"
    compile: Any = False  # Any: a flag, a mapping or a function
    activation_checkpointing: Any = None  # Any: a flag, a fraction, or a policy; see `apply_activation_checkpointing`
    offload_activations: bool = False
    on_oom: str = "raise"
    fault_tolerance: TorchFT | None = None
    reproducible: str | None = None
    micro_shards: int | None = None
    profiler: Profiler | str | None = None
    logger: LoggerArgument = None

    def __post_init__(self) -> None:
        for name, value in without_omegaconf(self.values()).items():
            setattr(self, name, value)

    def values(self) -> dict[str, Any]:  # Any: see the fields
        """Return the arguments by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def same_everywhere(self) -> dict[str, Any]:  # Any: see the fields
        """Return the arguments that must be equal on all ranks: all but the place of the rank and output for people."""
        return {name: value for name, value in self.values().items() if name not in _PER_RANK}

    def make_fabric(self) -> Fabric:
        """Return the machine."""
        searches = isinstance(self.strategy, str) and self.strategy.lower() == "mesh:auto"
        fabric = Fabric(
            accelerator=self.accelerator,
            strategy="mesh" if searches else self.strategy,
            devices=self.devices,
            num_nodes=self.num_nodes,
            precision=self.precision,
            plugins=self.plugins,
            when_short=self.when_short,
        )
        fabric.leaves_choice |= searches
        self.prepare(fabric.strategy)
        return fabric

    def prepare(self, strategy: Strategy) -> None:
        """Apply the arguments that concern the strategy to it."""
        strategy.accumulate_dtype = None  # another Trainer may have had this strategy
        if self.grad_accumulation_dtype is not None:
            from ...fabric.grad_accumulation import set_grad_accumulation_dtype

            set_grad_accumulation_dtype(strategy, self.grad_accumulation_dtype)

    def resolve(self) -> Arguments:
        """Check everything, then apply modes and defaults; returns self.

        Raises:
            ConfigError: Names every problem.
        """
        if self.model_registry is not None:
            raise ConfigError(
                f"model_registry={self.model_registry!r}: there is no model registry.",
                fix="save checkpoints with ModelCheckpoint, and upload them with your registry's own client.",
            )
        problems = [*self._wrong_values(), *self._barebones_conflicts()]
        if problems:
            raise combined(problems)
        if self.barebones:
            self.enable_checkpointing = self.enable_progress_bar = self.enable_model_summary = False
            self.logger = False
            self.log_every_n_steps = self.num_sanity_val_steps = 0
            self.nonfinite_loss = "ignore"
        if self.fast_dev_run:
            self._apply_fast_dev_run(int(self.fast_dev_run))
        self.max_samples = None if self.max_samples == -1 else self.max_samples
        self.max_tokens = None if self.max_tokens == -1 else self.max_tokens
        if self.overfit_batches:
            self.limit_train_batches = self.limit_val_batches = self.overfit_batches
        self.num_sanity_val_steps = 2 if self.num_sanity_val_steps is None else self.num_sanity_val_steps
        self.log_every_n_steps = 50 if self.log_every_n_steps is None else self.log_every_n_steps
        for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
            if getattr(self, name) is None:
                setattr(self, name, True)
        self.val_check_interval = 1.0 if self.val_check_interval is None else self.val_check_interval
        if self.reproducible and self.deterministic is None:
            self.deterministic = True
        if self.gradient_clip_algorithm is not None:
            self.gradient_clip_algorithm = self.gradient_clip_algorithm.lower()
        return self

    def _apply_fast_dev_run(self, count: int) -> None:
        self.limit_train_batches = self.limit_val_batches = count
        self.limit_test_batches = self.limit_predict_batches = count
        self.max_steps, self.max_epochs, self.num_sanity_val_steps = count, 1, 0
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1

    def _barebones_conflicts(self) -> list[ConfigError]:
        if not self.barebones:
            return []
        names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger", "log_every_n_steps",
                 "num_sanity_val_steps", "fast_dev_run", "detect_anomaly", "profiler")  # fmt: skip
        wrong = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name)]
        if not wrong:
            return []
        return [
            ConfigError(
                f"barebones=True turns off what {', '.join(wrong)} asks for.",
                fix="leave one of them out.",
            )
        ]

    def _wrong_values(self) -> list[ConfigError]:
        problems = Problems(
            [*self._wrong_flags(), *self._wrong_counts(), *self._wrong_limits(), *self._wrong_validation()]
        )
        if (isinstance(self.fast_dev_run, bool | int) and self.fast_dev_run < 0) or not isinstance(
            self.fast_dev_run, int
        ):
            problems.add(f"fast_dev_run={self.fast_dev_run!r}.", fix="pass True or a number of batches >= 0.")
        if self.max_time is not None:
            try:
                seconds_of(self.max_time)
            except (ValueError, TypeError, AttributeError):
                problems.append(_time_error("max_time", self.max_time))
        value = self.gradient_clip_val
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0):
            problems.add(f"gradient_clip_val={value!r}.", fix="pass a number >= 0, or None for no clipping.")
        algorithm = self.gradient_clip_algorithm
        if algorithm is not None and str(algorithm).lower() not in ("norm", "value", "agc"):
            problems.add(f"gradient_clip_algorithm={algorithm!r}.", fix="pass 'norm', 'value' or 'agc'.")
        if self.global_batch_size is not None and self.accumulate_grad_batches != 1:
            problems.add(
                f"global_batch_size={self.global_batch_size!r} and accumulate_grad_batches="
                f"{self.accumulate_grad_batches!r} are both given, and the first decides the second.",
                fix="leave out one of the two.",
            )
        if not isinstance(self.accumulate_across_epochs, bool):
            problems.add(f"accumulate_across_epochs={self.accumulate_across_epochs!r}.", fix="pass True or False.")
        if not isinstance(self.default_root_dir, str | os.PathLike | None):
            problems.add(f"default_root_dir={self.default_root_dir!r}.", fix="pass a path or a URL, or None.")
        if self.deterministic not in (None, True, False, "warn"):
            problems.add(f"deterministic={self.deterministic!r}.", fix="pass True, False or 'warn'.")
        if self.matmul_precision not in (None, *MATMUL_PRECISIONS):
            problems.add(
                f"matmul_precision={self.matmul_precision!r}.",
                fix=f"pass one of {', '.join(map(repr, MATMUL_PRECISIONS))}, or None.",
            )
        if self.compile is not False:
            from ...fabric.compiling import compile_problems

            problems += compile_problems(self.compile)
        if self.activation_checkpointing is not None:
            from ...strategies.construction.activation_checkpointing import check_checkpointing

            for what, fix in check_checkpointing("activation_checkpointing", self.activation_checkpointing):
                problems.add(f"{what}.", fix=f"{fix}.")
        if self.on_oom not in ("raise", "shrink"):
            problems.add(f"on_oom={self.on_oom!r}.", fix="pass 'raise' or 'shrink'.")
        if self.fault_tolerance is not None and not hasattr(self.fault_tolerance, "min_replicas"):
            problems.add(f"fault_tolerance={self.fault_tolerance!r}.", fix="pass lw.TorchFT(...), or None.")
        if self.reproducible not in (None, "world"):
            problems.add(f"reproducible={self.reproducible!r}.", fix="pass 'world' or None.")
        shards = self.micro_shards
        if (shards is None) != (self.reproducible is None):
            problems.add(
                f"reproducible={self.reproducible!r} and micro_shards={shards!r}.",
                fix="pass both: reproducible='world' and the batches of a step over all ranks.",
            )
        elif shards is not None:
            from ..reproducible_world.checks import wrong_arguments

            problems += wrong_arguments(self.values())
        if self.nonfinite_loss not in POLICIES:
            problems.add(f"nonfinite_loss={self.nonfinite_loss!r}.", fix=f"pass one of {', '.join(POLICIES)}.")
        return problems

    def _wrong_flags(self) -> list[ConfigError]:
        names = (
            "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_autolog_hparams",
            "detect_anomaly", "inference_mode", "barebones", "benchmark", "use_distributed_sampler", "sync_batchnorm",
            "offload_activations",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        return [
            ConfigError(f"{name}={value!r}; expected True or False.", fix=f"pass {name}=True or {name}=False.")
            for name, value in given.items()
            if value is not None and not (hasattr(value, "__bool__") and value in (False, True))
        ]

    def _wrong_counts(self) -> list[ConfigError]:
        rules: tuple[tuple[str, int, bool], ...] = (
            ("max_epochs", -1, True), ("min_epochs", 0, True), ("max_steps", -1, False), ("min_steps", 0, True),
            ("num_sanity_val_steps", -1, True), ("log_every_n_steps", 0, True), ("accumulate_grad_batches", 1, False),
            ("reload_dataloaders_every_n_epochs", 0, False), ("global_batch_size", 1, True),
            ("max_samples", -1, True), ("max_tokens", -1, True),
        )  # fmt: skip
        problems = Problems()
        for name, least, may_be_none in rules:
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                extra = ", -1 for no limit" if least == -1 and name.startswith("max") else ""
                problems.add(f"{name}={value!r}.", fix=f"pass a whole number >= {least}{extra}.")
        return problems

    def _wrong_limits(self) -> list[ConfigError]:
        problems = Problems()
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
                     "overfit_batches"):  # fmt: skip
            value = getattr(self, name)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (isinstance(value, float) and value > 1 and not value.is_integer()):
                problems.add(
                    f"{name}={value!r}.",
                    fix="pass a number of batches (1 is one batch) or a fraction from 0.0 to 1.0 (1.0 is all).",
                )
        return problems

    def _wrong_validation(self) -> list[ConfigError]:
        problems = Problems()
        every = self.check_val_every_n_epoch
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            problems.add(
                f"check_val_every_n_epoch={every!r}.",
                fix="pass a whole number >= 1, or None to count val_check_interval across epochs.",
            )
        interval = self.val_check_interval
        if interval is None:
            interval = 1.0
        if isinstance(interval, bool):
            problems.append(_interval_error(interval))
        elif isinstance(interval, float):
            if every is None:
                problems.add(
                    f"val_check_interval={interval!r} is a fraction of an epoch and check_val_every_n_epoch=None "
                    "counts across epochs.",
                    fix="pass val_check_interval as a number of batches or as a time.",
                )
            elif not 0.0 < interval <= 1.0:
                problems.append(_interval_error(interval))
        elif isinstance(interval, int):
            if interval < 1:
                problems.append(_interval_error(interval))
        else:
            try:
                if seconds_of(interval) <= 0:
                    problems.append(_time_error("val_check_interval", interval))
            except (ValueError, TypeError, AttributeError):
                problems.append(_time_error("val_check_interval", interval))
        return problems


def _interval_error(value: Tree) -> ConfigError:
    return ConfigError(
        f"val_check_interval={value!r}.",
        fix="pass a number of batches >= 1, a fraction of an epoch in (0.0, 1.0], or a time such as '00:00:30:00'.",
    )


def _time_error(name: str, value: Tree) -> ConfigError:
    return ConfigError(
        f"{name}={value!r}.",
        fix="pass 'DD:HH:MM:SS', a datetime.timedelta, or a dict of its arguments such as {'hours': 1}.",
    )


def combined(problems: list[ConfigError]) -> ConfigError:
    """Return one error that names all problems."""
    if len(problems) == 1:
        only = problems[0]
        return ConfigError(f"Trainer: {only.what}", fix=only.fix)
    listed = "\n".join(f"  {number}. {p.what} {p.fix}" for number, p in enumerate(problems, 1))
    return ConfigError(f"Trainer got {len(problems)} invalid arguments:\n{listed}", fix="change each of them.")


def seconds_of(value: str | timedelta | dict[str, float]) -> float:
    """Return the seconds in "DD:HH:MM:SS", a timedelta, or a dict of its arguments.

    Raises:
        ValueError: The string has another form.
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return timedelta(**value).total_seconds()
    parts = value.split(":")
    if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"{value!r} is not DD:HH:MM:SS")
    days, hours, minutes, seconds = (int(part) for part in parts)
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
