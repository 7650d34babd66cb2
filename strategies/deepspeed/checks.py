"""What cannot work in DeepSpeedStrategy's arguments and in a configuration, found before any process starts.

Each function returns every problem as (what, fix).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from .config import Arguments, activation_options, is_stage, stage_of

__all__ = ["check_activations", "check_arguments", "check_sections"]

# Any in this file: values of a JSON document.

_DEVICES = ("none", "cpu", "nvme")

# Keys whose values are objects; a mistyped one would be passed over by DeepSpeed (0.19), as would all it says.
_SECTIONS = ("activation_checkpointing", "aio", "bf16", "fp16", "optimizer", "scheduler", "zero_optimization")
_KEYS = (
    *_SECTIONS,
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "prescale_gradients",
    "steps_per_print",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)


def check_arguments(arguments: Arguments) -> list[tuple[str, str]]:
    """Return the problems of the constructor's arguments."""
    found = []
    if not is_stage(arguments.stage):
        found.append((f"stage={arguments.stage!r} is no ZeRO stage", "use 0, 1, 2 or 3"))
    for name in ("offload_params_device", "offload_optimizer_device", "remote_device"):
        value = getattr(arguments, name)
        if value not in _DEVICES and not (name == "remote_device" and value is None):
            found.append((f"{name}={value!r} is unknown", "use 'cpu' or 'nvme'"))
    stage = arguments.stage if arguments.zero_optimization else 0
    if arguments.offload_parameters and stage != 3:
        found.append(
            (f"offload_parameters=True with stage={stage}, where every process has all of them", "use stage=3")
        )
    if arguments.offload_optimizer and stage == 0:
        found.append(("offload_optimizer=True without ZeRO", "use stage=1, 2 or 3"))
    if arguments.offload_optimizer and arguments.offload_optimizer_device == "nvme" and stage != 3:
        found.append((f"offload_optimizer_device='nvme' with stage={stage}", "use stage=3, or the device 'cpu'"))
    uses_nvme = "nvme" in (
        arguments.offload_params_device if arguments.offload_parameters else None,
        arguments.offload_optimizer_device if arguments.offload_optimizer else None,
    )
    if uses_nvme and not arguments.nvme_path:
        found.append(("a device is 'nvme' and nvme_path is not given", "pass nvme_path, a folder on that disk"))
    return found


def check_sections(config: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """Return the problems of a configuration of the user's own: what DeepSpeed would pass over, or fail at later."""
    found = []
    for key, value in config.items():
        match = [] if key in _KEYS else get_close_matches(str(key), _KEYS, n=1, cutoff=0.85)
        if match:
            found.append((f"{where}: {key!r} is no key of DeepSpeed's", f"write {match[0]!r}"))
        is_switch = key == "zero_optimization" and isinstance(value, bool)
        if key in _SECTIONS and value is not None and not is_switch and not isinstance(value, Mapping):
            found.append((f"{where}: {key} is {value!r}, expected an object", "write {...}, or leave it out"))
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") == "auto":
        return found
    written = zero.get("stage", 0)
    if not is_stage(written):
        found.append((f"{where}: zero_optimization.stage is {written!r}, which is no ZeRO stage", "use 0, 1, 2 or 3"))
        return found
    stage = stage_of(dict(config))
    devices = {name: _device_of(zero.get(name)) for name in ("offload_optimizer", "offload_param")}
    if devices["offload_param"] != "none" and stage != 3:
        found.append((f"{where}: offload_param in stage {stage}, where every process has all of them", "use stage 3"))
    if devices["offload_optimizer"] == "nvme" and stage != 3:
        found.append((f"{where}: offload_optimizer on 'nvme' in stage {stage}", "use stage 3, or the device 'cpu'"))
    types = config.get("data_types")
    accumulates = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    # DeepSpeed (0.19) takes its BF16_Optimizer then, whose parts are others.
    if accumulates in ("fp32", "float32") and stage == 1 and devices["offload_optimizer"] == "none":
        found.append(
            (
                f"{where}: grad_accum_dtype is {accumulates!r} in stage 1, where DeepSpeed keeps bfloat16 parameters "
                "in another kind of optimizer",
                "use stage 2 or 3, where it works, or leave data_types out",
            )
        )
    return found


def _device_of(section: Any) -> str:
    return str(section.get("device", "none")) if isinstance(section, Mapping) else "none"


def check_activations(config: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """Return the problems of the section on activation checkpointing."""
    options = activation_options(config)
    if not options["contiguous_checkpointing"]:
        return []
    found = []
    if not options["partition_activations"]:
        found.append(
            (
                f"{where}: contiguous_memory_optimization without partition_activations, of whose parts it makes one "
                "buffer",
                "set partition_activations, too",
            )
        )
    if options["num_checkpoints"] is None:
        found.append(
            (
                f"{where}: contiguous_memory_optimization needs to know how many parts of the model are checkpointed",
                'pass config={"activation_checkpointing": {"number_checkpoints": ...}}',
            )
        )
    return found
