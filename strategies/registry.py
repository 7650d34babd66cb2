"""The names of strategies. Called by fabric/resolve.py, and by users who register their own."""

from __future__ import annotations

from ..accelerators.registry import Registry
from .base import Strategy

__all__ = ["PLANNED_STRATEGIES", "STRATEGY_REGISTRY", "StrategyRegistry"]

_LAUNCHES = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")

PLANNED_STRATEGIES: tuple[str, ...] = (
    *_LAUNCHES,
    *(f"{name}_find_unused_parameters_{flag}" for name in _LAUNCHES for flag in ("false", "true")),
    "dp",
    "deepspeed",
    *(f"deepspeed_stage_{name}" for name in ("1", "1_offload", "2", "2_offload", "3", "3_offload", "3_offload_nvme")),
    "fsdp",
    "fsdp_cpu_offload",
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
