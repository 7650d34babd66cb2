"""Arguments of DeepSpeedStrategy: conversion to a configuration, and checks.

Checks return every problem as (what, fix), before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from ...errors import Clauses, ConfigError
from . import config as configs
from .config import ABSENT, Config, at, is_stage, leaves, section_of, stage_of, write

T = TypeVar("T")

_DEVICES = ("none", "cpu", "nvme")
# Keys whose values are objects. DeepSpeed (0.19) ignores a mistyped one with all that it says.
_SECTIONS = ("activation_checkpointing", "aio", "bf16", "fp16", "optimizer", "scheduler", "zero_optimization")
_KEYS = (
    *_SECTIONS, "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "prescale_gradients",
    "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu", "wall_clock_breakdown",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
)  # fmt: skip
# DeepSpeed refuses unknown keys in its other sections.
_KEYS_OF = {
    "activation_checkpointing": tuple(key for _, key, _ in configs.ACTIVATIONS),
    "aio": (
        "block_size", "intra_op_parallelism", "overlap_events", "queue_depth", "single_submit", "thread_count",
        "use_gds",
    ),
    "data_types": ("grad_accum_dtype",),
}  # fmt: skip


def _key(default: T, *paths: str) -> T:
    """Return a field whose value is at these paths of the configuration."""
    return field(default=default, metadata={"paths": paths})


_ZERO, _PARAMETERS = "zero_optimization", "zero_optimization.offload_param"
_OPTIMIZER, _ACTIVATIONS = "zero_optimization.offload_optimizer", "activation_checkpointing"


# What arguments are for that are written to a section which is not always there.
_NEEDED = (
    (_PARAMETERS, "offload_parameters=True"), (_OPTIMIZER, "offload_optimizer=True"), ("fp16", "float16 precision"),
    ("aio", "offloading to 'nvme'"), (_ZERO, "ZeRO"),
)  # fmt: skip


# The name before DeepSpeed 0.16.4 (its #7056), and the one that later versions read.
_THREADS = ("aio.thread_count", "aio.intra_op_parallelism")


@dataclass(frozen=True)
class DeepSpeedArguments:
    """The strategy's arguments that become DeepSpeed's configuration; its docstring describes each."""

    zero_optimization: bool = True
    stage: int = _key(2, f"{_ZERO}.stage")
    remote_device: str | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_params_device: str = _key("cpu", f"{_PARAMETERS}.device")
    nvme_path: str | None = _key("/local_nvme", f"{_OPTIMIZER}.nvme_path", f"{_PARAMETERS}.nvme_path")
    params_buffer_count: int = _key(5, f"{_PARAMETERS}.buffer_count")
    params_buffer_size: int = _key(100_000_000, f"{_PARAMETERS}.buffer_size")
    max_in_cpu: int = _key(1_000_000_000, f"{_PARAMETERS}.max_in_cpu")
    offload_optimizer_device: str = _key("cpu", f"{_OPTIMIZER}.device")
    optimizer_buffer_count: int = _key(4, f"{_OPTIMIZER}.buffer_count")
    block_size: int = _key(1_048_576, "aio.block_size")
    queue_depth: int = _key(8, "aio.queue_depth")
    single_submit: bool = _key(False, "aio.single_submit")
    overlap_events: bool = _key(True, "aio.overlap_events")
    thread_count: int = _key(1, *_THREADS)
    pin_memory: bool = _key(False, f"{_OPTIMIZER}.pin_memory", f"{_PARAMETERS}.pin_memory")
    sub_group_size: int = _key(1_000_000_000_000, f"{_ZERO}.sub_group_size")
    contiguous_gradients: bool = _key(True, f"{_ZERO}.contiguous_gradients")
    overlap_comm: bool = _key(True, f"{_ZERO}.overlap_comm")
    allgather_partitions: bool = _key(True, f"{_ZERO}.allgather_partitions")
    reduce_scatter: bool = _key(True, f"{_ZERO}.reduce_scatter")
    allgather_bucket_size: int = _key(200_000_000, f"{_ZERO}.allgather_bucket_size")
    reduce_bucket_size: int = _key(200_000_000, f"{_ZERO}.reduce_bucket_size")
    zero_allow_untested_optimizer: bool = _key(True, "zero_allow_untested_optimizer")
    loss_scale: float = _key(0, "fp16.loss_scale")
    initial_scale_power: int = _key(16, "fp16.initial_scale_power")
    loss_scale_window: int = _key(1000, "fp16.loss_scale_window")
    hysteresis: int = _key(2, "fp16.hysteresis")
    min_loss_scale: int = _key(1, "fp16.min_loss_scale")
    partition_activations: bool = _key(False, f"{_ACTIVATIONS}.partition_activations")
    cpu_checkpointing: bool = _key(False, f"{_ACTIVATIONS}.cpu_checkpointing")
    contiguous_memory_optimization: bool = _key(False, f"{_ACTIVATIONS}.contiguous_memory_optimization")
    synchronize_checkpoint_boundary: bool = _key(False, f"{_ACTIVATIONS}.synchronize_checkpoint_boundary")

    @property
    def effective_stage(self) -> int:
        """The ZeRO stage, 0 with `zero_optimization=False`."""
        return self.stage if self.zero_optimization else 0

    def section(self, name: str) -> Config:  # Any: values of a JSON document
        """Return one section, whether the run uses it or not."""
        config: Config = {}
        for one in fields(self):
            for path in one.metadata.get("paths", ()):
                write(config, path, getattr(self, one.name))
        section: Config = config[name]
        return section


def build(arguments: DeepSpeedArguments) -> Config:
    """Return the configuration of the constructor's arguments; the section on float16 is added with that dtype."""
    zero = arguments.section("zero_optimization")
    if arguments.effective_stage == 0:
        zero = {"stage": 0}
    if not arguments.offload_optimizer:
        zero.pop("offload_optimizer", None)
    if not arguments.offload_parameters:
        zero.pop("offload_param", None)
    return {
        "zero_allow_untested_optimizer": arguments.zero_allow_untested_optimizer,
        # Torch's optimizers run on the host, too; DeepSpeed's own are faster there, and need a compiler.
        "zero_force_ds_cpu_optimizer": False,
        "activation_checkpointing": arguments.section("activation_checkpointing"),
        "aio": arguments.section("aio"),
        "zero_optimization": zero,
    }


@dataclass(frozen=True)
class ResolvedArguments:
    """The arguments and the configuration of a constructor, combined.

    Attributes:
        config: DeepSpeed's configuration.
        arguments: The arguments, with the configuration's stage.
        where: Location of the configuration, for messages.
        problems: (what, fix) of each invalid argument.
    """

    config: Config
    arguments: DeepSpeedArguments
    where: str
    problems: Clauses


def read_given(config: object, arguments: DeepSpeedArguments) -> ResolvedArguments:
    """Return the configuration of a constructor, with every problem in it.

    Args:
        config: A dict, a path, or None; see `config.read`.
        arguments: The constructor's other arguments.
    """
    where, content, problems = "the strategy's arguments", build(arguments), Clauses()
    try:
        own, place = configs.read(config)
        if own is not None:
            where, problems = place, check_sections(own, place)
            if not problems:
                content, arguments = _combined(own, arguments, where)
    except ConfigError as error:
        problems.add(error.what.rstrip("."), error.fix.rstrip("."))
    problems += check_arguments(arguments) + _check_activations(content, where)
    if arguments.remote_device == "nvme" and stage_of(content) == 3 and at(content, _PARAMETERS) is ABSENT:
        what = "expected offloaded parameters for remote_device='nvme'"
        problems.add(what, "pass offload_parameters=True and offload_params_device='nvme', or remote_device='cpu'")
    return ResolvedArguments(content, arguments, where, problems)


def _combined(config: Config, arguments: DeepSpeedArguments, where: str) -> tuple[Config, DeepSpeedArguments]:
    """Return the user's configuration with what only the arguments say, and the arguments with its stage.

    ZeRO's section is the configuration's, except for arguments that were passed. null is the same as a missing key.
    """
    config = {key: value for key, value in config.items() if value is not None}
    old, new = _THREADS
    if at(config, old) is not ABSENT and at(config, new) is ABSENT:
        write(config, new, at(config, old))
    check_against(config, arguments, where)
    if "zero_optimization" not in config:
        return configs.merged(config, build(arguments)), arguments
    zero = config["zero_optimization"]
    zero = dict(zero) if isinstance(zero, Mapping) else {"stage": stage_of(config)}
    if arguments.stage == DeepSpeedArguments.stage and arguments.zero_optimization and is_stage(zero.get("stage", 0)):
        arguments = replace(arguments, stage=int(zero.get("stage", 0)))
    if zero.get("stage") == "auto":
        del zero["stage"]
    config["zero_optimization"] = zero
    ours = build(arguments)
    standard = build(DeepSpeedArguments(stage=arguments.stage))
    for path, value in leaves(ours.pop("zero_optimization"), "zero_optimization."):
        is_passed = at(standard, path) != value or path == "zero_optimization.stage"
        if is_passed and at(config, path) in (ABSENT, "auto"):
            write(config, path, value)
    return configs.merged(config, ours), arguments


def check_against(config: Config, arguments: DeepSpeedArguments, where: str) -> None:
    """Refuse arguments that contradict the user's configuration.

    Raises:
        ConfigError: With both values of each.
    """
    standard = build(DeepSpeedArguments())
    passed = [(path, value) for path, value in leaves(build(arguments)) if at(standard, path) != value]
    rows = [
        (path, at(config, path), value) for path, value in passed if at(config, path) not in (ABSENT, "auto", value)
    ]
    if rows:
        raise configs.differences(rows, where, "the strategy's arguments")


def without_effect(arguments: DeepSpeedArguments, config: Config) -> list[str]:
    """Return the arguments that were passed and have no effect in an engine's configuration, and why not."""
    zero = section_of(config, "zero_optimization")
    on_disk = "nvme" in [section_of(zero, name).get("device") for name in ("offload_param", "offload_optimizer")]
    found: list[str] = []
    for one in fields(arguments):
        paths = one.metadata.get("paths", ())
        if getattr(arguments, one.name) == one.default or not paths:
            continue
        needs = [next((needed for start, needed in _NEEDED if path.startswith(start)), "") for path in paths]
        is_unused = all(at(config, path) is ABSENT for path in paths)
        if any(needs) and (is_unused or (paths[0].startswith("aio") and not on_disk)):
            found.append(f"{one.name} (for {' or '.join(dict.fromkeys(needs))})")
    decides = section_of(zero, "offload_param").get("device", arguments.remote_device)
    if arguments.remote_device is not None and stage_of(config) != 3:
        found.append("remote_device (for stage=3)")
    elif arguments.remote_device not in (None, decides):
        found.append(f"remote_device (the device of offloaded parameters is {decides!r})")
    return found


# --- checks --------------------------------------------------------------------------------------------------------


def check_arguments(arguments: DeepSpeedArguments) -> Clauses:
    """Return the problems of the constructor's arguments."""
    found = Clauses() if is_stage(arguments.stage) else Clauses([_not_a_stage("stage", arguments.stage)])
    for name in ("offload_params_device", "offload_optimizer_device", "remote_device"):
        value = getattr(arguments, name)
        if value not in _DEVICES and not (name == "remote_device" and value is None):
            found.add(f"expected {name} to be 'cpu' or 'nvme', got {value!r}", "use 'cpu' or 'nvme'")
    stage = arguments.effective_stage
    parameters = arguments.offload_params_device if arguments.offload_parameters else "none"
    optimizer = arguments.offload_optimizer_device if arguments.offload_optimizer else "none"
    found += _check_offload(stage, "offload_parameters", parameters, "offload_optimizer", optimizer)
    if arguments.offload_optimizer and stage == 0:
        found.add("offload_optimizer=True without ZeRO", "use stage=1, 2 or 3")
    if "nvme" in (parameters, optimizer) and not arguments.nvme_path:
        found.add("a device is 'nvme' and nvme_path is missing", "pass nvme_path, a folder on that disk")
    return found


def check_sections(config: Mapping[str, Any], where: str) -> Clauses:  # Any: values of a JSON document
    """Return the problems of the user's configuration that DeepSpeed would ignore, or fail at later."""
    found = Clauses()
    for section, names in (("", _KEYS), *_KEYS_OF.items()):
        for key in section_of(config, section) if section else config:
            match = [] if key in names else get_close_matches(str(key), names, n=1, cutoff=0.85)
            if match:
                place = f"{section}.{key}" if section else str(key)
                found.add(f"{where}: {place!r} is not a key of DeepSpeed", f"write {match[0]!r}")
    for key, value in config.items():
        is_switch = key == "zero_optimization" and isinstance(value, bool)
        if key in _SECTIONS and value is not None and not is_switch and not isinstance(value, Mapping):
            found.add(f"{where}: {key}: expected an object, got {value!r}", "write {...}, or leave it out")
    for path, axis in (("tensor_parallel.autotp_size", "tp"), ("sequence_parallel_size", "cp")):
        size = at(config, path)
        # The ranks of such an axis need the same batches, and here each reads its own.
        if size not in (ABSENT, None, 0, 1):
            what = f"{where}: expected {path} ({axis}) to be 1, got {size!r}"
            found.add(what, f"leave {path.split('.')[0]} out, or use MeshStrategy with {axis}= without DeepSpeed")
    zero = section_of(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage == "auto":
        return found
    if not is_stage(stage):
        found.append(_not_a_stage(f"{where}: zero_optimization.stage", stage))
        return found
    names = ("offload_param", "offload_optimizer")
    parameters, optimizer = (str(section_of(zero, name).get("device", "none")) for name in names)
    found += _check_offload(int(stage), f"{where}: offload_param", parameters, f"{where}: {names[1]}", optimizer)
    dtype = section_of(config, "data_types").get("grad_accum_dtype")
    # DeepSpeed (0.19) then takes its BF16_Optimizer, whose state has another layout.
    if dtype in ("fp32", "float32") and stage_of(config) == 1 and optimizer == "none":
        what = f"{where}: grad_accum_dtype is {dtype!r} in ZeRO stage 1, where DeepSpeed uses another kind of optimizer"
        found.add(what, "use stage 2 or 3, or leave data_types out")
    return found


def _not_a_stage(name: str, value: object) -> tuple[str, str]:
    return f"expected {name} to be a ZeRO stage, got {value!r}", "use 0, 1, 2 or 3"


def _check_offload(stage: int, name: str, parameters: str, other: str, optimizer: str) -> Clauses:
    """Return the problems of the devices that parameters and optimizer are offloaded to."""
    found = Clauses()
    if parameters != "none" and stage != 3:
        found.add(f"{name} in ZeRO stage {stage}, where every process has all parameters", "use stage 3")
    if optimizer == "nvme" and stage != 3:
        found.add(f"{other} on 'nvme' in ZeRO stage {stage}", "use stage 3, or the device 'cpu'")
    return found


def _check_activations(config: Config, where: str) -> Clauses:
    """Return the problems of the section on activation checkpointing."""
    options, found = configs.activation_options(config), Clauses()
    if options["contiguous_checkpointing"] and not options["partition_activations"]:
        what = f"{where}: contiguous_memory_optimization without partition_activations"
        found.add(what, "set partition_activations, too: one buffer is made of the partitions")
    if options["contiguous_checkpointing"] and options["num_checkpoints"] is None:
        what = f"{where}: contiguous_memory_optimization without the number of checkpointed parts of the model"
        found.add(what, 'pass config={"activation_checkpointing": {"number_checkpoints": ...}}')
    return found
