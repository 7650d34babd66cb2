"""The names of strategies. Called by fabric/resolve.py, and by users who register their own."""

from __future__ import annotations

from ..accelerators.registry import Registry
from .base import Strategy

__all__ = ["PLANNED_STRATEGIES", "STRATEGY_REGISTRY", "StrategyRegistry"]

PLANNED_STRATEGIES: tuple[str, ...] = (
    "deepspeed",
    *(f"deepspeed_stage_{name}" for name in ("1", "1_offload", "2", "2_offload", "3", "3_offload", "3_offload_nvme")),
    "single_xla",
    "single_tpu",
    "xla",
    "xla_debug",
    "xla_fsdp",
)
"""Names that the field knows and that this version cannot run yet; an error says so."""


class StrategyRegistry(Registry[Strategy]):
    """The strategies that `Trainer(strategy="name")` knows.

    `get(name)` returns the class, `create(name)` an instance made with the arguments that were registered with the
    name; Fabric and Trainer use `create`.
    """

    def __init__(self) -> None:
        super().__init__("strategy")

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
    "dp", f"{__package__}.data_parallel:DataParallelStrategy", "one process that cuts each batch over several devices"
)
_FSDP = f"{__package__}.fsdp:FSDPStrategy"
STRATEGY_REGISTRY.register_lazily("fsdp", _FSDP, "several processes that share one copy of the model")
STRATEGY_REGISTRY.register_lazily(
    "fsdp_cpu_offload", _FSDP, "the same, with parameters and optimizer in the host's memory", cpu_offload=True
)
