"""`StrategyRegistry`: the names of strategies."""

from __future__ import annotations

from typing import Any

from ..accelerators.registry import Registry
from ..errors import ConfigError
from .base import Strategy
from .optional import ReadsOptions


class StrategyRegistry(Registry[Strategy]):
    """The strategies that `Trainer(strategy="name")` knows.

    `get(name)` returns the class, `create(name)` an instance made with the arguments that were registered with the
    name, and with its options ("mesh:fsdp=2,tp=2"); Fabric and Trainer use `create`.
    """

    def __init__(self) -> None:
        super().__init__("strategy")

    def create(self, name: str, **init_params: Any) -> Strategy:  # Any: arguments of the strategy's own class
        """Return a new instance for a name, which may have options: "mesh:fsdp=2,tp=2".

        Args:
            name: The name, in any case; options follow a colon, in the form of the class's `read_options`.
            init_params: Further arguments; they take precedence over the options and the registered ones.

        Raises:
            ConfigError: The name is unknown; the message lists the known ones. Or the class cannot read the options.
        """
        head, colon, options = name.partition(":") if isinstance(name, str) else (name, "", "")
        if colon:
            kind = self.get(head)
            if not issubclass(kind, ReadsOptions):
                raise ConfigError(
                    f"Expected the name of {kind.__name__} without options, got ':{options}' after it.",
                    fix=f"leave ':{options}' out, or pass an instance with arguments: strategy={kind.__name__}(...).",
                )
            init_params = {**kind.read_options(options), **init_params}
        return super().create(head, **init_params)

    def available_strategies(self) -> list[str]:
        """Return the registered names."""
        return self.names()


STRATEGY_REGISTRY = StrategyRegistry()
"""The registry that Trainer and Fabric read."""

# By name only: a run on one device imports none of them.
_DDP = f"{__package__}.ddp:DDPStrategy"
_LAUNCHES = {
    "ddp": ("popen", "several processes, started by running the command again"),
    "ddp_spawn": ("spawn", "several processes, started as new ones that import the script"),
    "ddp_fork": ("fork", "several processes, started as copies of this one"),
    "ddp_notebook": ("fork", "several processes, started as copies of this one, for notebooks"),
}
for _name, (_method, _text) in _LAUNCHES.items():
    STRATEGY_REGISTRY.register_lazily(_name, _DDP, _text, start_method=_method)
for _name, (_method, _text) in _LAUNCHES.items():
    for _flag in (False, True):
        STRATEGY_REGISTRY.register_lazily(
            f"{_name}_find_unused_parameters_{str(_flag).lower()}",
            _DDP,
            f"{_text}; parameters {'may be left out of a step' if _flag else 'are used in every step'}",
            start_method=_method,
            find_unused_parameters=_flag,
        )
STRATEGY_REGISTRY.register_lazily(
    "dp", f"{__package__}.data_parallel:DataParallelStrategy", "one process that splits each batch over several devices"
)
_FSDP = f"{__package__}.fsdp:FSDPStrategy"
STRATEGY_REGISTRY.register_lazily("fsdp", _FSDP, "several processes that share one copy of the model")
STRATEGY_REGISTRY.register_lazily(
    "fsdp_cpu_offload", _FSDP, "the same, with parameters and optimizer in the host's memory", cpu_offload=True
)
STRATEGY_REGISTRY.register_lazily(
    "mesh",
    f"{__package__}.mesh:MeshStrategy",
    'several processes along the axes of a mesh, with sizes as in "mesh:dp=2,fsdp=4"',
)
_SINGLE_XLA, _XLA = f"{__package__}.xla.single_device:SingleDeviceXLAStrategy", f"{__package__}.xla:XLAStrategy"
STRATEGY_REGISTRY.register_lazily("single_xla", _SINGLE_XLA, "one process on one XLA device, such as a TPU core")
STRATEGY_REGISTRY.register_lazily("single_tpu", _SINGLE_XLA, "the same")
STRATEGY_REGISTRY.register_lazily("xla", _XLA, "one process whose graphs run on all XLA devices of a host")
STRATEGY_REGISTRY.register_lazily("xla_debug", _XLA, "the same, and torch_xla reports what it compiles", debug=True)
STRATEGY_REGISTRY.register_lazily(
    "xla_fsdp",
    f"{__package__}.xla.fsdp:XLAFSDPStrategy",
    "the same as xla, with each parameter sharded over the devices",
)
STRATEGY_REGISTRY.register_lazily(
    "xla_replicas", f"{__package__}.xla.replicas:XLAReplicasStrategy", "several processes, one XLA device each"
)
_DEEPSPEED = f"{__package__}.deepspeed:DeepSpeedStrategy"
_ON_DISK = {"remote_device": "nvme", "offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
STRATEGY_REGISTRY.register_lazily("deepspeed", _DEEPSPEED, "several processes run by DeepSpeed, ZeRO stage 2")
for _stage in (1, 2, 3):
    STRATEGY_REGISTRY.register_lazily(
        f"deepspeed_stage_{_stage}", _DEEPSPEED, f"the same, ZeRO stage {_stage}", stage=_stage
    )
    STRATEGY_REGISTRY.register_lazily(
        f"deepspeed_stage_{_stage}_offload",
        _DEEPSPEED,
        f"the same, stage {_stage}, with {'parameters and ' if _stage == 3 else ''}optimizer in the host's memory",
        stage=_stage,
        offload_optimizer=True,
        offload_parameters=_stage == 3,
    )
STRATEGY_REGISTRY.register_lazily(
    "deepspeed_stage_3_offload_nvme",
    _DEEPSPEED,
    "the same, stage 3, with parameters and optimizer on a disk",
    stage=3,
    offload_optimizer=True,
    offload_parameters=True,
    **_ON_DISK,
)
