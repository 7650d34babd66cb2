"""The engines of a DeepSpeedStrategy: DeepSpeed itself, what was set up with it, and whose turn it is."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...errors import ConfigError, DataError
from ..distributed.live_objects import LiveObjects

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .engine import EngineRoot
    from .pipeline.engine import PipelineRoot

__all__ = ["Engines"]


class Engines:
    """The roots that are set up, as long as somebody has them; empty in another process.

    Args:
        logging_level: Of DeepSpeed's logger.
    """

    def __init__(self, logging_level: int) -> None:
        self.logging_level = logging_level
        self._deepspeed: Any = None  # Any: deepspeed has no types
        self._roots: LiveObjects[EngineRoot] = LiveObjects()
        self._last: weakref.ref[EngineRoot] | None = None

    @property
    def deepspeed(self) -> Any:  # Any: as above
        """DeepSpeed's module, which is imported the first time that somebody asks."""
        if self._deepspeed is None:
            from .ops import import_deepspeed

            self._deepspeed = import_deepspeed()
            from deepspeed.utils import logger as own

            own.setLevel(self.logging_level)
        return self._deepspeed

    def add(self, root: EngineRoot) -> None:
        """Remember a root that was set up."""
        self._roots.add(root)

    def live(self) -> list[EngineRoot]:
        """Return the roots that were not freed yet, the newest last; see `LiveObjects`."""
        return list(self._roots)

    def newest(self) -> EngineRoot | None:
        """Return the root that was set up last; None where there is none."""
        roots = self.live()
        return roots[-1] if roots else None

    def forget(self) -> None:
        """Let go of all roots."""
        self._last = None
        self._roots.clear()

    def of(self, optimizer: Optimizer) -> EngineRoot:
        """Return the root whose module has a parameter of the optimizer.

        Raises:
            ConfigError: There is none.
        """
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for root in reversed(self.live()):
            if any(id(one) in own for one in root.module.parameters()):
                return root
        raise ConfigError(
            f"no parameter of {type(optimizer).__name__} is in a module that was set up, and DeepSpeed needs both "
            "together.",
            fix="pass both to fabric.setup(module, optimizer); make the optimizer of the module's own parameters.",
        )

    def ran(self, reference: weakref.ref[EngineRoot]) -> None:
        """Remember whose step was the last with gradients."""
        self._last = reference

    def before_backward(self, *, has_stages: bool) -> EngineRoot:
        """Return the root whose turn it is: the one that ran last; or the pipeline whose gradients wait, or the newest.

        Raises:
            ConfigError: There is no engine yet.
        """
        if has_stages:
            roots = self.live()
            waiting = (root for root in roots if root.is_pipeline and cast("PipelineRoot", root).has_pass)
            root = next(waiting, roots[-1])
        else:
            root = None if self._last is None else self._last()  # type: ignore[assignment]  # narrowed below
        if root is None or root.engine is None:
            raise ConfigError(
                "a backward pass was made before DeepSpeed had an optimizer: its engine needs module and optimizer "
                "together.",
                fix="pass both to fabric.setup(module, optimizer); with the Trainer, return an optimizer from "
                'configure_optimizers, or write a section "optimizer" into the configuration.',
            )
        return root

    def without_data(self, module: nn.Module | None, rank: int) -> list[EngineRoot]:
        """Return the roots that know what an evaluation step gathers: the module, or all for None.

        Raises:
            DataError: There is none.
        """
        from .engine import EngineRoot

        known = [root for root in self._roots.in_use() if root.evaluated is not None]
        if isinstance(module, EngineRoot):
            known = [root for root in known if root is module]
        if not known:
            raise DataError(
                f"rank {rank} has no batch of an evaluation and did not have one before, so that it cannot "
                "know what the other ranks' engines gather.",
                fix="evaluate on at least as many batches as there are ranks, or with strategy='deepspeed_stage_2'.",
            )
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_deepspeed": None, "_last": None}
