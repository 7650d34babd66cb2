"""`Fabric` with the private names that libraries use."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from ... import fabric
from ...accelerators import Accelerator
from ...data.move import apply_to_collection
from ...fabric import wrappers
from ...fabric.dataloaders import FabricDataLoader
from ...fabric.wrappers import FabricOptimizer
from ...precision import Precision
from ...precision.base import cast_floats
from ...strategies import Strategy
from ...strategies.optional import saves_shards
from .callbacks.external import with_external
from .imports.finder import show_paths
from .imports.served import Served
from .objects import trust_objects, with_objects
from .overrides import find_own
from .parity import switches
from .precision import serve_precision

__all__ = ["Fabric", "FabricModule", "find_free_network_port", "unwrap_objects"]


_NUM_BEFORE_CALLBACKS = list(inspect.signature(fabric.Fabric).parameters).index("callbacks")


class FabricModule(wrappers.FabricModule, metaclass=Served):
    """A wrapped module with the attributes that libraries read: the strategy's module and the user's."""

    @property
    def _forward_module(self) -> nn.Module:
        return self._without_fabric

    @property
    def _original_module(self) -> nn.Module:
        return self.module


class Fabric(fabric.Fabric):
    """`lw.Fabric` under Lightning's name.

    Args:
        args, kwargs: Those of `lw.Fabric`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: as in the base class
        for change in switches.functions("arguments"):
            change(kwargs)
        if len(args) < _NUM_BEFORE_CALLBACKS + 1:  # the names of a call may come by position
            kwargs["callbacks"] = with_external(kwargs.get("callbacks"), "fabric")
        super().__init__(*args, **kwargs)
        serve_precision(self)
        for change in switches.functions("fabric"):
            change(self)
        show_paths()

    __init__.__signature__ = inspect.signature(fabric.Fabric.__init__)  # type: ignore[attr-defined]

    def setup_dataloaders(
        self, *dataloaders: object, use_distributed_sampler: bool = True, **kwargs: Any
    ) -> Any:  # Any: as in the base class
        """See `lw.Fabric.setup_dataloaders`."""
        if use_distributed_sampler:
            for insert in switches.functions("sampler"):
                dataloaders = tuple(insert(self, loader) for loader in dataloaders)
        ready = super().setup_dataloaders(*dataloaders, use_distributed_sampler=use_distributed_sampler, **kwargs)
        for change in switches.functions("loader"):
            for one in ready if isinstance(ready, list) else [ready]:
                change(self, one)
        return ready

    def _log_to(self, logger: Any, numbers: dict[str, Any], step: int | None) -> None:
        logger.log_metrics(metrics=numbers, step=step)

    @property
    def logger(self) -> Any:
        """The first logger; an IndexError without any."""
        return self.loggers[0]

    def wrap_module(self, running: nn.Module, original: nn.Module) -> FabricModule:
        """See `lw.Fabric.wrap_module`."""
        return FabricModule(running, original, self)

    def bind_call(self, module: nn.Module, name: str) -> Callable[..., object]:
        """See `lw.Fabric.bind_call`."""
        for bind in switches.functions("method"):
            found: Callable[..., object] | None = bind(self, module, name)
            if found is not None:
                return found
        call = super().bind_call(module, name)
        if "convert_input" in find_own(self.precision):
            return self._converting(call)
        if self.precision.precision != "64-true":
            return call

        @wraps(call)
        def in_default_dtype(*args: Any, **kwargs: Any) -> object:
            return cast_floats(call(*args, **kwargs), torch.get_default_dtype())

        return in_default_dtype

    def _converting(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return a method whose arguments go through the `convert_input` of the program, all of them at once."""
        convert: Any = self.precision.convert_input  # Any: a method of the program

        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> object:
            args, kwargs = convert((args, kwargs))
            return call(*args, **kwargs)

        return run

    @property
    def _precision(self) -> Precision:
        return self.precision

    @property
    def _launched(self) -> bool:
        return self._is_set_up

    @property
    def _strategy(self) -> Strategy:
        return self.strategy

    @property
    def _accelerator(self) -> Accelerator:
        return self.accelerator

    @property
    def _loggers(self) -> list[Any]:  # Any: as in the base class
        return self.loggers

    @_loggers.setter
    def _loggers(self, loggers: list[Any]) -> None:
        self.loggers = loggers

    def write_content(self, content: dict[str, Any], path: Any) -> None:
        """Write a checkpoint, in which objects stay objects; in the folder of a sharded one they are marked."""
        is_folder = saves_shards(self.strategy, "sharded")
        super().write_content(trust_objects(content) if is_folder else with_objects(content), path)


def find_free_network_port() -> int:
    """Return a port of this machine on which no process currently listens."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def unwrap_objects(collection: Any) -> Any:  # Any: wrapped modules, optimizers and loaders, in any collection
    """Return a collection in which each wrapper of Fabric is replaced by the wrapped object."""

    def unwrap(wrapped: Any) -> object:
        if isinstance(wrapped, FabricModule):
            return wrapped.module
        return wrapped.optimizer if isinstance(wrapped, FabricOptimizer) else wrapped.loader

    return apply_to_collection(collection, (FabricModule, FabricOptimizer, FabricDataLoader), unwrap)
