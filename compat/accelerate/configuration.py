"""Accelerate's enumerations, and the classes whose objects are arguments of `Accelerator`.

What the settings mean is in docs/from-accelerate.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import field, make_dataclass
from enum import Enum, StrEnum
from typing import Any

# Any in this file: settings of any type.


class DistributedType(str, Enum):  # noqa: UP042  # str() of a member is its whole name, as in Accelerate
    """How the processes work together; the layer has NO, MULTI_CPU, MULTI_GPU, MULTI_XPU and XLA."""

    NO, MULTI_CPU, MULTI_GPU, MULTI_XPU, XLA = "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "XLA"
    DEEPSPEED, FSDP, MEGATRON_LM, MULTI_NPU, MULTI_HPU = "DEEPSPEED", "FSDP", "MEGATRON_LM", "MULTI_NPU", "MULTI_HPU"
    MULTI_MLU, MULTI_SDAA, MULTI_MUSA, MULTI_NEURON = "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NEURON"


class LoggerType(StrEnum):
    """Names of trackers."""

    ALL, AIM, TENSORBOARD, WANDB, TRACKIO = "all", "aim", "tensorboard", "wandb", "trackio"
    COMETML, MLFLOW, CLEARML, DVCLIVE, SWANLAB = "comet_ml", "mlflow", "clearml", "dvclive", "swanlab"


class DDPCommunicationHookType(StrEnum):
    """How gradients are compressed on their way to the other processes."""

    NO, FP16, BF16, POWER_SGD, BATCHED_POWER_SGD = "no", "fp16", "bf16", "power_sgd", "batched_power_sgd"


class KwargsHandler:
    """The base class of objects in `kwargs_handlers`."""

    def to_dict(self) -> dict[str, Any]:
        """Return all settings."""
        return deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings that differ from the default."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


def _made(name: str, defaults: Mapping[str, Any], *bases: type, **methods: Any) -> Any:
    fields = [(one, Any, field(default=value)) for one, value in defaults.items()]
    return make_dataclass(name, fields, bases=bases, namespace={**methods, "__module__": __name__})


def _set_directories(self: Any, project_dir: Any = None) -> None:
    """Set the folder; logs go there, too, unless they have one."""
    self.project_dir = project_dir
    self.logging_dir = project_dir if self.logging_dir is None else self.logging_dir


_HANDLERS: dict[str, dict[str, Any]] = {
    "AutocastKwargs": {"enabled": True, "cache_enabled": None},
    "DistributedDataParallelKwargs": {
        "dim": 0, "broadcast_buffers": True, "bucket_cap_mb": 25, "find_unused_parameters": False,
        "check_reduction": False, "gradient_as_bucket_view": False, "static_graph": False, "comm_hook": "no",
        "comm_wrapper": "no", "comm_state_option": None,
    },
    "GradScalerKwargs": {
        "init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "enabled": True,
    },
    "ProfileKwargs": {
        "activities": None, "schedule_option": None, "on_trace_ready": None, "record_shapes": False,
        "profile_memory": False, "with_stack": False, "with_flops": False, "with_modules": False,
        "output_trace_dir": None,
    },
    "InitProcessGroupKwargs": {"backend": "nccl", "init_method": None, "timeout": None},
    "GradientAccumulationPlugin": {
        "num_steps": None, "adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False,
    },
}  # fmt: skip
_LOADERS = {
    "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": False,
    "data_seed": None, "non_blocking": False, "use_stateful_dataloader": False,
}  # fmt: skip
_PROJECT = {
    "project_dir": None, "logging_dir": None, "automatic_checkpoint_naming": False, "total_limit": None,
    "iteration": 0, "save_on_each_node": False,
}  # fmt: skip
(
    AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs, InitProcessGroupKwargs,
    GradientAccumulationPlugin,
) = (_made(name, defaults, KwargsHandler) for name, defaults in _HANDLERS.items())  # fmt: skip
DataLoaderConfiguration = _made("DataLoaderConfiguration", _LOADERS)
ProjectConfiguration = _made(
    "ProjectConfiguration",
    _PROJECT,
    set_directories=_set_directories,
    __post_init__=lambda self: self.set_directories(self.project_dir),
)
