"""DeepSpeed's configuration as plain values: reading it, and filling in what Trainer or Fabric knows.

The Trainer's values are the source. The user's configuration may repeat them, say "auto", or leave them out. A value
that differs is an error before any process starts, with both values side by side, unless the configuration takes
precedence (`config_wins`) and the Trainer can do the same.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError

Config = dict[str, Any]  # Any: values of a JSON document
Row = tuple[str, object, object]

ENVIRONMENT_VARIABLES = ("LOOPWRIGHT_DEEPSPEED_CONFIG_PATH", "LT_DEEPSPEED_CONFIG_PATH", "PL_DEEPSPEED_CONFIG_PATH")
"""Variables that may hold a file's path; the first one that is set counts."""
ABSENT: object = object()

# Argument of `deepspeed.checkpointing.configure`, key in the configuration's section, default.
ACTIVATIONS = (
    ("partition_activations", "partition_activations", False),
    ("contiguous_checkpointing", "contiguous_memory_optimization", False),
    ("num_checkpoints", "number_checkpoints", None),
    ("checkpoint_in_cpu", "cpu_checkpointing", False),
    ("synchronize", "synchronize_checkpoint_boundary", False),
    ("profile", "profile", False),
)
# Filled in by optimizers.py, where the section is used.
_FILLED_LATER = ("scheduler.params.total_num_steps", "scheduler.params.warmup_max_lr")
# Sections in which "auto" is DeepSpeed's own default, so that leaving the key out is the same.
_OPTIONAL = ("zero_optimization", "fp16", "bf16", "aio", "activation_checkpointing", "optimizer", "scheduler")


@dataclass(frozen=True)
class Facts:
    """Facts about a run that Trainer or Fabric provides.

    Attributes:
        world_size: Number of processes.
        accumulate: Micro-batches per accumulation window; None in a handwritten loop.
        clip: Largest gradient norm, 0 for none; None in a handwritten loop.
        micro_batch: Samples in one micro-batch of one process; None if unknown.
        dtype: "float32", "bfloat16" or "float16": compute dtype of the parameters.
        global_batch: Samples in one step over all processes; None if unknown.
        grad_dtype: "fp32" for gradient sums in float32; None leaves it to the configuration.
    """

    world_size: int = 1
    accumulate: int | None = None
    clip: float | None = None
    micro_batch: int | None = None
    dtype: str = "float32"
    global_batch: int | None = None
    grad_dtype: str | None = None


def facts_of(plan: Mapping[str, Any], *, world_size: int, batch_size: int | None, dtype: str) -> Facts:
    """Return what the Trainer's plan says about a run; the plan is empty in a handwritten loop."""
    is_norm = plan.get("gradient_clip_algorithm") in (None, "norm")
    return Facts(
        world_size=world_size,
        accumulate=plan.get("accumulate_grad_batches"),
        clip=float(plan.get("gradient_clip_val") or 0.0) * is_norm if plan else None,
        micro_batch=plan.get("micro_batch_size") or batch_size,
        dtype=dtype,
        global_batch=plan.get("global_batch_size"),
        grad_dtype=plan.get("grad_accumulation_dtype"),
    )


def read(config: object, environment: Mapping[str, str] = os.environ) -> tuple[Config | None, str]:
    """Return the user's configuration and its location for messages; None if there is none.

    Args:
        config: A dict, a path, or None: then an environment variable may name a file.
        environment: The environment variables.

    Raises:
        ConfigError: The file is missing, or does not hold a JSON object.
    """
    where = "config="
    if config is None:
        name = next((name for name in ENVIRONMENT_VARIABLES if environment.get(name)), None)
        if name is None:
            return None, ""
        config, where = environment[name], f"{name}={environment[name]}"
    elif isinstance(config, str | os.PathLike):
        where = f"config={os.fspath(config)!r}"
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config)), where
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"Expected config to be a dict or a path, got {config!r}.", fix="pass one of the two.")
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}.", fix="pass the path of a JSON file, or a dict.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: the file is not valid JSON: {error}.", fix="correct the file.") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where}: expected a JSON object, got a {type(content).__name__}.",
            fix="write an object, {...}, into the file.",
        )
    return content, where


def is_stage(value: object) -> bool:
    """Return whether a value names a ZeRO stage; DeepSpeed accepts the number as a string, too."""
    return not isinstance(value, bool) and str(value) in ("0", "1", "2", "3")


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration; empty if it is missing, or is not an object."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a configuration; 0 without ZeRO, or if the value is not a stage."""
    if config.get("zero_optimization") is True:
        return 1
    stage = section_of(config, "zero_optimization").get("stage", 0)
    return int(stage) if is_stage(stage) else 0


def taken_over(config: Mapping[str, Any], facts: Facts) -> Facts:
    """Return the facts with accumulation and clipping as the configuration has them, where the Trainer can do the same.

    A `train_batch_size` without accumulation implies one, if the size of a micro-batch is known.

    Raises:
        ConfigError: One of the values is out of range.
    """
    accumulate, clip = at(config, "gradient_accumulation_steps"), at(config, "gradient_clipping")
    for key, value, least in (("gradient_accumulation_steps", accumulate, 1), ("gradient_clipping", clip, 0)):
        if isinstance(value, int | float) and not value >= least:
            raise ConfigError(
                f"Expected {key} of at least {least} in DeepSpeed's configuration, got {value!r}.",
                fix="correct the configuration.",
            )
    total, micro = at(config, "train_batch_size"), (facts.micro_batch or 0) * facts.world_size
    if not isinstance(accumulate, int) and isinstance(total, int) and micro and total % micro == 0:
        accumulate = total // micro
    if isinstance(accumulate, int) and facts.accumulate is not None and facts.global_batch is None:
        facts = replace(facts, accumulate=accumulate)
    return replace(facts, clip=float(clip)) if isinstance(clip, int | float) and facts.clip is not None else facts


def precision_of(config: Mapping[str, Any], name: str) -> str:
    """Return the 16-bit precision that a configuration turns on, mixed unless `name` is not; without one `name`."""
    kind = "true" if name in ("16-true", "bf16-true") else "mixed"
    found = [short for section, short in (("bf16", "bf16"), ("fp16", "16"))
             if section_of(config, section).get("enabled") is True]  # fmt: skip
    return f"{found[0]}-{kind}" if found else name


def settle(config: Config, facts: Facts, where: str) -> Config:
    """Return the configuration with everything that Trainer or Fabric knows, and without "auto".

    Args:
        config: The user's configuration, or the one built from the strategy's arguments.
        facts: What Trainer or Fabric knows.
        where: Location of the configuration, for messages.

    Raises:
        ConfigError: A value differs from `facts`, or "auto" has no value here.
    """
    result = copy.deepcopy(config)
    rows: list[Row] = []

    def put(path: str, known: Any, otherwise: Any) -> Any:  # Any: values of a JSON document
        """Return the value of a key: the known one, else the written one, else a harmless one."""
        written = at(result, path)
        is_open = written in (ABSENT, "auto")
        if known is not None and not is_open and written != known:
            rows.append((path, written, known))
        value = known if known is not None else otherwise if is_open else written
        write(result, path, value)
        return value

    total = at(result, "train_batch_size")
    if facts.global_batch is not None and total not in (ABSENT, "auto", facts.global_batch):
        raise differences([("train_batch_size", total, facts.global_batch)], where, "Trainer, Fabric and loaders")
    accumulate = put("gradient_accumulation_steps", facts.accumulate, 1)
    put("gradient_clipping", facts.clip, 0.0)  # DeepSpeed 0.19 clips at 1.0 without this key
    micro = facts.micro_batch
    is_open = at(result, "train_micro_batch_size_per_gpu") in (ABSENT, "auto")
    if micro is None and is_open and isinstance(total, int):
        micro = total // (accumulate * facts.world_size) or 1
    micro = put("train_micro_batch_size_per_gpu", micro, 1)
    put("train_batch_size", micro * accumulate * facts.world_size, None)
    if facts.grad_dtype is not None:
        put("data_types.grad_accum_dtype", facts.grad_dtype, None)
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if section in result or facts.dtype == dtype:
            put(f"{section}.enabled", facts.dtype == dtype, None)
    if rows:
        raise differences(rows, where, "Trainer, Fabric and loaders")
    _drop_auto(result, where)
    return result


def activation_options(config: Mapping[str, Any]) -> Config:
    """Return the arguments of `deepspeed.checkpointing.configure` that a configuration names."""
    section = section_of(config, "activation_checkpointing")
    found = {argument: section.get(key, default) for argument, key, default in ACTIVATIONS}
    return {argument: False if value == "auto" else value for argument, value in found.items()}


def differences(rows: Iterable[Row], left: str, right: str) -> ConfigError:
    """Return the error about values that differ, side by side."""
    table = [("", left, right), *((path, _shown(one), _shown(other)) for path, one, other in rows)]
    first, second = (max(len(row[column]) for row in table) for column in (0, 1))
    lines = "".join(f"\n  {path:<{first}}  {one:<{second}}  {other}" for path, one, other in table)
    return ConfigError(
        f"Expected values of the run in DeepSpeed's configuration, got:{lines}",
        fix='make the values equal, write "auto" into the configuration, remove the keys, or pass config_wins=True to '
        "DeepSpeedStrategy for accumulation, clipping and precision.",
    )


def _shown(value: object) -> str:
    return "-" if value is ABSENT else json.dumps(value, default=repr)


def _drop_auto(config: Config, where: str) -> None:
    open_keys = [path for path, value in leaves(config) if value == "auto" and path not in _FILLED_LATER]
    wrong = [path for path in open_keys if path.split(".")[0] not in _OPTIONAL]
    if wrong:
        raise ConfigError(
            f'{where}: Expected a value for {", ".join(wrong)}, got "auto", which is not supported for it.',
            fix="write the value, or remove the key.",
        )
    for path in open_keys:
        section, _, key = path.rpartition(".")
        del at(config, section)[key]


# --- keys by their path --------------------------------------------------------------------------------------------


def leaves(config: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Return (path, value) of each value that is not a section, with dots between sections and keys."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        found += leaves(value, f"{before}{key}.") if isinstance(value, Mapping) else [(f"{before}{key}", value)]
    return found


def at(config: Mapping[str, Any], path: str) -> Any:  # Any: a value of a JSON document
    """Return the value at a path, or `ABSENT`."""
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return ABSENT
        value = value[name]
    return value


def write(config: Config, path: str, value: object) -> None:
    """Set the value at a path; sections are made."""
    *parents, last = path.split(".")
    for name in parents:
        config = config.setdefault(name, {})
    config[last] = value


def merged(config: Config, other: Config) -> Config:
    """Return `config` with what only `other` has, section by section."""
    result = copy.deepcopy(config)
    for path, value in leaves(other):
        if at(result, path) is ABSENT and (key := path.split(".")[0]) and isinstance(result.get(key, {}), Mapping):
            write(result, path, value)
    return result
