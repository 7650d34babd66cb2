"""From what the user typed to DeepSpeed's configuration: pure functions on plain values.

The Trainer's values are the source. A configuration of the user's own may repeat them, say "auto", or say nothing;
where it says something else, the run stops before any process starts, with both values side by side.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError

__all__ = [
    "ENVIRONMENT_VARIABLES",
    "Arguments",
    "Facts",
    "activation_options",
    "build",
    "check_against",
    "combined",
    "differences",
    "is_stage",
    "read",
    "settle",
    "stage_of",
    "without_sections",
]

# Any in this file: values of a JSON document.
Config = dict[str, Any]

ENVIRONMENT_VARIABLES = ("LT_DEEPSPEED_CONFIG_PATH", "PL_DEEPSPEED_CONFIG_PATH")
"""Where a file's path may stand; the first that is set counts."""

# DeepSpeed 0.19 clips at 1.0 where nothing is written.
_NO_CLIPPING = 0.0


@dataclass(frozen=True)
class Arguments:
    """What DeepSpeedStrategy was given that becomes DeepSpeed's configuration; its docstring says what each is."""

    zero_optimization: bool = True
    stage: int = 2
    remote_device: str | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_params_device: str = "cpu"
    nvme_path: str | None = "/local_nvme"
    params_buffer_count: int = 5
    params_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    offload_optimizer_device: str = "cpu"
    optimizer_buffer_count: int = 4
    block_size: int = 1_048_576
    queue_depth: int = 8
    single_submit: bool = False
    overlap_events: bool = True
    thread_count: int = 1
    pin_memory: bool = False
    sub_group_size: int = 1_000_000_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool = True
    allgather_partitions: bool = True
    reduce_scatter: bool = True
    allgather_bucket_size: int = 200_000_000
    reduce_bucket_size: int = 200_000_000
    zero_allow_untested_optimizer: bool = True
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: int = 1
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False


@dataclass(frozen=True)
class Facts:
    """What Trainer or Fabric knows.

    Attributes:
        world_size: Number of processes.
        accumulate: Micro-batches of a window; None where the loop is the user's own.
        clip: Largest gradient norm, 0 for none; None where the loop is the user's own.
        micro_batch: Samples of one micro-batch of one process; None where nobody knows.
        dtype: "float32", "bfloat16" or "float16": of the parameters that the engine computes with.
        global_batch: Samples of one step over all processes; None where nobody knows.
        grad_dtype: "fp32" for sums of gradients in float32; None leaves it to the configuration.
    """

    world_size: int = 1
    accumulate: int | None = None
    clip: float | None = None
    micro_batch: int | None = None
    dtype: str = "float32"
    global_batch: int | None = None
    grad_dtype: str | None = None


# --- arguments -----------------------------------------------------------------------------------------------------


def build(arguments: Arguments) -> Config:
    """Return the configuration that the constructor's arguments say."""
    a = arguments
    config: Config = {
        "zero_allow_untested_optimizer": a.zero_allow_untested_optimizer,
        # Torch's optimizers run on the host, too; DeepSpeed's own, which are faster there, are built by a compiler.
        "zero_force_ds_cpu_optimizer": False,
        "activation_checkpointing": {
            "partition_activations": a.partition_activations,
            "cpu_checkpointing": a.cpu_checkpointing,
            "contiguous_memory_optimization": a.contiguous_memory_optimization,
            "synchronize_checkpoint_boundary": a.synchronize_checkpoint_boundary,
        },
        "aio": {
            "block_size": a.block_size,
            "queue_depth": a.queue_depth,
            "single_submit": a.single_submit,
            "overlap_events": a.overlap_events,
            "thread_count": a.thread_count,
        },
    }
    if not a.zero_optimization or a.stage == 0:
        config["zero_optimization"] = {"stage": 0}
        return config
    zero: Config = {
        "stage": a.stage,
        "contiguous_gradients": a.contiguous_gradients,
        "overlap_comm": a.overlap_comm,
        "allgather_partitions": a.allgather_partitions,
        "reduce_scatter": a.reduce_scatter,
        "allgather_bucket_size": a.allgather_bucket_size,
        "reduce_bucket_size": a.reduce_bucket_size,
        "sub_group_size": a.sub_group_size,
    }
    if a.offload_optimizer:
        zero["offload_optimizer"] = {
            "device": a.offload_optimizer_device,
            "nvme_path": a.nvme_path,
            "buffer_count": a.optimizer_buffer_count,
            "pin_memory": a.pin_memory,
        }
    if a.offload_parameters:
        zero["offload_param"] = {
            "device": a.offload_params_device,
            "nvme_path": a.nvme_path,
            "buffer_count": a.params_buffer_count,
            "buffer_size": a.params_buffer_size,
            "max_in_cpu": a.max_in_cpu,
            "pin_memory": a.pin_memory,
        }
    config["zero_optimization"] = zero
    return config


# --- a configuration of the user's own -----------------------------------------------------------------------------


def read(config: Any, environment: Mapping[str, str] | None = None) -> tuple[Config | None, str]:
    """Return the user's configuration and where it stands; None where there is none.

    Args:
        config: A dict, a path, or None: then the environment may name a file.
        environment: None takes this process's.

    Raises:
        ConfigError: There is no such file, or it is no JSON object.
    """
    where = "config="
    if config is None:
        variables = os.environ if environment is None else environment
        for name in ENVIRONMENT_VARIABLES:
            if variables.get(name):
                config, where = variables[name], f"{name}={variables[name]}"
                break
        else:
            return None, ""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config)), where
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config={config!r} is neither a dict nor a path.", fix="pass one of the two.")
    path = Path(config)
    if where == "config=":
        where = f"config={str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{where}: there is no such file.", fix="pass the path of a JSON file, or a dict.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: this is no JSON: {error}.", fix="mend the file.") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where}: the file has a {type(content).__name__}, expected a JSON object.", fix="mend the file."
        )
    return content, where


def combined(config: Config, arguments: Arguments, where: str) -> tuple[Config, Arguments]:
    """Return the user's configuration with what only the arguments say, and the arguments with its stage.

    Of ZeRO the configuration alone decides, but for what was passed to the strategy. null is the same as no key.

    Raises:
        ConfigError: They say different things; with both values of each.
    """
    check_against(config, arguments, where)
    config = {key: value for key, value in config.items() if value is not None}
    zero = config.get("zero_optimization")
    if zero is None:
        return merged(config, build(arguments)), arguments
    if not isinstance(zero, Mapping):
        zero = {"stage": stage_of(config)}
    if arguments.stage == Arguments.stage and arguments.zero_optimization and is_stage(zero.get("stage", 0)):
        arguments = replace(arguments, stage=int(zero.get("stage", 0)))
    given = build(arguments)
    standard = build(Arguments(stage=arguments.stage))
    zero = {key: value for key, value in zero.items() if key != "stage" or value != "auto"}
    own: Config = {**config, "zero_optimization": zero}
    for path, value in _leaves(given):
        is_said = _at(standard, path) != value or path == "zero_optimization.stage"
        if path.startswith("zero_optimization.") and is_said and _at(own, path) in (_ABSENT, "auto"):
            _write(own, path, value)
    del given["zero_optimization"]
    return merged(own, given), arguments


def check_against(config: Config, arguments: Arguments, where: str) -> None:
    """Refuse arguments that say something else than the user's configuration.

    Raises:
        ConfigError: With both values of each.
    """
    if arguments == Arguments():
        return
    standard = build(Arguments())
    said = [(path, value) for path, value in _leaves(build(arguments)) if _at(standard, path) != value]
    rows = [(path, _at(config, path), value) for path, value in said]
    rows = [(path, theirs, ours) for path, theirs, ours in rows if theirs not in (_ABSENT, "auto") and theirs != ours]
    if rows:
        raise differences(rows, where, "the strategy's arguments")


def is_stage(value: Any) -> bool:
    """Return whether a value names a ZeRO stage; DeepSpeed takes a text for the number, too."""
    return not isinstance(value, bool) and str(value) in ("0", "1", "2", "3")


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a configuration; 0 without ZeRO, or where it is none."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return int(zero is True)
    stage = zero.get("stage", 0)
    return int(stage) if is_stage(stage) else 0


def settle(config: Config, facts: Facts, where: str) -> Config:
    """Return the configuration with everything that Trainer or Fabric knows; "auto" is filled in.

    Args:
        config: The arguments' or the user's own.
        facts: The source.
        where: Where the configuration stands, for the message.

    Raises:
        ConfigError: It says something else than `facts`, with both values of each; or "auto" has no value here.
    """
    result = copy.deepcopy(config)
    rows: list[tuple[str, Any, Any]] = []

    def put(path: str, known: Any, otherwise: Any) -> Any:
        """Return the value of a key: what is known, else what is written, else something that does no harm."""
        written = _at(result, path)
        is_open = written in (_ABSENT, "auto")
        if known is not None and not is_open and written != known:
            rows.append((path, written, known))
        value = known if known is not None else otherwise if is_open else written
        _write(result, path, value)
        return value

    whole = _at(result, "train_batch_size")
    if facts.global_batch is not None and whole not in (_ABSENT, "auto", facts.global_batch):
        rows.append(("train_batch_size", whole, facts.global_batch))
        raise differences(rows, where, "Trainer, Fabric and loaders")
    accumulate = put("gradient_accumulation_steps", facts.accumulate, 1)
    put("gradient_clipping", facts.clip, _NO_CLIPPING)
    micro = facts.micro_batch
    is_open = _at(result, "train_micro_batch_size_per_gpu") in (_ABSENT, "auto")
    if micro is None and is_open and whole not in (_ABSENT, "auto"):
        micro = whole // (accumulate * facts.world_size) or 1
    micro = put("train_micro_batch_size_per_gpu", micro, 1)
    put("train_batch_size", micro * accumulate * facts.world_size, None)
    if facts.grad_dtype is not None:
        put("data_types.grad_accum_dtype", facts.grad_dtype, None)
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if _at(result, section) is not _ABSENT or facts.dtype == dtype:
            put(f"{section}.enabled", facts.dtype == dtype, None)
    if rows:
        raise differences(rows, where, "Trainer, Fabric and loaders")
    _drop_auto(result, where)
    return result


def fp16_section(arguments: Arguments) -> Config:
    """Return the section on loss scaling that the arguments say."""
    return {
        "loss_scale": arguments.loss_scale,
        "initial_scale_power": arguments.initial_scale_power,
        "loss_scale_window": arguments.loss_scale_window,
        "hysteresis": arguments.hysteresis,
        "min_loss_scale": arguments.min_loss_scale,
    }


def activation_options(config: Mapping[str, Any]) -> Config:
    """Return the arguments of `deepspeed.checkpointing.configure` that a configuration says."""
    section = config.get("activation_checkpointing") or {}
    return {
        argument: False if section.get(key) == "auto" else section.get(key, otherwise)
        for argument, key, otherwise in _ACTIVATIONS
    }


def without_sections(config: Config) -> Config:
    """Return the configuration without optimizer and scheduler: the Trainer has them."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}


def differences(rows: Iterable[tuple[str, Any, Any]], left: str, right: str) -> ConfigError:
    """Return the error about values that are not equal, side by side."""
    table = [("", left, right), *((path, _shown(one), _shown(other)) for path, one, other in rows)]
    first, second = (max(len(row[column]) for row in table) for column in (0, 1))
    lines = "".join(f"\n  {path:<{first}}  {one:<{second}}  {other}" for path, one, other in table)
    return ConfigError(
        f"DeepSpeed's configuration says something else than the run does:{lines}",
        fix='let the two be equal, write "auto" into the configuration, or leave the keys out.',
    )


# --- inside --------------------------------------------------------------------------------------------------------

_ABSENT: Any = object()

# Argument of DeepSpeed's function, key in its section, value where the key is not there.
_ACTIVATIONS: tuple[tuple[str, str, Any], ...] = (
    ("partition_activations", "partition_activations", False),
    ("contiguous_checkpointing", "contiguous_memory_optimization", False),
    ("num_checkpoints", "number_checkpoints", None),
    ("checkpoint_in_cpu", "cpu_checkpointing", False),
    ("synchronize", "synchronize_checkpoint_boundary", False),
    ("profile", "profile", False),
)

# Filled in by deepspeed_optimizers.py, where the section counts.
FILLED_LATER = ("scheduler.params.total_num_steps", "scheduler.params.warmup_max_lr")

# Sections whose "auto" is DeepSpeed's own default, so that leaving the key out is the same.
_OPTIONAL = ("zero_optimization", "fp16", "bf16", "aio", "activation_checkpointing", "optimizer", "scheduler")


def _drop_auto(config: Config, where: str) -> None:
    open_keys = [path for path, value in _leaves(config) if value == "auto" and path not in FILLED_LATER]
    wrong = [path for path in open_keys if path.split(".")[0] not in _OPTIONAL]
    if wrong:
        raise ConfigError(
            f'{where}: "auto" has no value for {", ".join(wrong)}.', fix="write the value, or leave the key out."
        )
    for path in open_keys:
        *parents, last = path.split(".")
        section = config
        for name in parents:
            section = section[name]
        del section[last]


def _leaves(config: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        path = f"{before}{key}"
        found += _leaves(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
    return found


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value


def _write(config: Config, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        config = config.setdefault(name, {})
    config[last] = value


def _shown(value: Any) -> str:
    return "-" if value is _ABSENT else json.dumps(value) if _is_json(value) else repr(value)


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)


def merged(config: Config, other: Config) -> Config:
    """Return `config` with what only `other` has, section by section."""
    result = dict(config)
    for key, value in other.items():
        if key not in result:
            result[key] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(result[key], Mapping):
            result[key] = merged(dict(result[key]), dict(value))
    return result


ARGUMENTS = tuple(one.name for one in fields(Arguments))
