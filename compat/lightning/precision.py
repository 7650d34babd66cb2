"""Precisions with the additional methods of Lightning's, and `FSDPPrecision`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import precision as precisions
from ...errors import ConfigError
from ...lazy import is_core
from ...messages import warn
from ...precision.base import DefaultDtype, cast_floats, kept_buffers
from ...strategies.deepspeed import precision as deepspeed
from ...trainer.loop.optimizers import ManagedOptimizer
from ...trainer.module import Module
from .imports.served import Served, serve, served
from .overrides import find_own
from .utilities.part_state import state_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as ShardedDtypes

    from ...fabric import Fabric

__all__ = [
    "DeepSpeedPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "FabricDeepSpeedPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "XLAPrecision",
    "serve_precision",
    "served_precision",
]

P = TypeVar("P", bound=precisions.Precision)

# Any in this file: a precision, and what a program passes on.


def computed() -> None:
    """Replace the closure of an optimizer when the gradients are already computed."""


def _with_model(core: Any) -> Any:
    """Return a method `optimizer_step` that accepts Lightning's arguments and Loopwright's (optimizer, closure)."""

    @wraps(core)
    def optimizer_step(self: Any, optimizer: Optimizer, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        if closure is None and model is not None and not isinstance(model, nn.Module):
            model, closure = None, model
        if model is None and not kwargs:
            return core(self, optimizer, closure)
        if getattr(self, "scaler", None) is not None:
            state_of(self).has_stepped = core(self, optimizer, None if closure is computed else closure)
            return None
        if model is not None or closure is not None:
            kwargs["closure"] = closure
        return optimizer.step(**kwargs)

    del optimizer_step.__wrapped__  # its own signature is that of Lightning
    return optimizer_step


def _main_params(self: Any, optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _connect(self: Any, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, ...]:
    """Return what is passed."""
    return model, optimizers, lr_schedulers


def _pass_on(self: Any, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the loss."""
    return tensor


def _backward(
    self: Any, tensor: Tensor, model: nn.Module | None, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any
) -> None:
    """Run the backward pass, that of a LightningModule where there is one."""
    is_argument = optimizer is None or isinstance(optimizer, Optimizer | ManagedOptimizer)
    others = args if is_argument else (optimizer, *args)
    run = state_of(self).run_backward  # of the strategy, while a program's own precision is at work
    if run is not None:
        run(tensor, *others, **kwargs)
        return
    if isinstance(model, Module):
        model.backward(tensor, *others, **kwargs)
    else:
        tensor.backward(*others, **kwargs)


def _clip_in_strategy(self: Any, optimizer: Optimizer, clip_val: float) -> bool:
    """Clip as the strategy does, while a program's own precision is at work; return whether it is."""
    state = state_of(self)
    if state.run_clipping is not None:
        state.norm = state.run_clipping(optimizer, clip_val)
    return state.run_clipping is not None


def _clip_by_value(self: Any, optimizer: Optimizer, clip_val: float) -> None:
    """Clip the gradients of an optimizer's parameters by value."""
    if _clip_in_strategy(self, optimizer, clip_val):
        return
    nn.utils.clip_grad_value_(self.main_params(optimizer), clip_val)


def _clip_by_norm(self: Any, optimizer: Optimizer, clip_val: float) -> None:
    """Clip the gradients of an optimizer's parameters by their norm."""
    if _clip_in_strategy(self, optimizer, clip_val):
        return
    nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)


def _clip_gradients(
    self: Any, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
) -> None:
    """Clip the gradients of an optimizer's parameters; nothing is clipped with 0."""
    if clip_val <= 0:
        return
    clip = self.clip_grad_by_value if gradient_clip_algorithm == "value" else self.clip_grad_by_norm
    clip(optimizer, clip_val)


def _forward_context(self: Any) -> AbstractContextManager[object]:
    """Return the context in which steps run."""
    context: AbstractContextManager[object] = self.forward_context()
    return context


# Of programs that call a precision themselves. Loopwright calls those around the backward pass and
# for clipping, where they are overridden.
_METHODS = {
    "main_params": _main_params,
    "connect": _connect,
    "pre_backward": _pass_on,
    "post_backward": _pass_on,
    "backward": _backward,
    "clip_grad_by_value": _clip_by_value,
    "clip_grad_by_norm": _clip_by_norm,
    "clip_gradients": _clip_gradients,
    **{f"{stage}_step_context": _forward_context for stage in ("train", "val", "test", "predict")},
}


def served_precision(core: type[P]) -> type[P]:
    """Return a class of precisions with Lightning's methods, and its arguments of `optimizer_step`.

    Args:
        core: A class of the core.
    """
    members: dict[str, object] = {**_METHODS, "optimizer_step": _with_model(core.optimizer_step)}
    if issubclass(core, precisions.MixedPrecision):
        members["autocast_context_manager"] = _forward_context
    return served(core, members, __name__)


def serve_precision(fabric: Fabric) -> None:
    """Let the precision of a Fabric have Lightning's methods, and optimizers step by it where that does something.

    Args:
        fabric: Its precision is chosen.
    """
    precision = fabric.precision
    serve(precision, served_precision)
    core = next(cls for cls in type(precision).__mro__ if is_core(cls) and not isinstance(cls, Served))
    if "optimizer_step" not in find_own(precision):
        is_mixed = core.optimizer_step is precisions.MixedPrecision.optimizer_step  # type: ignore[attr-defined]
        does = core.optimizer_step is not precisions.Precision.optimizer_step  # type: ignore[attr-defined]
        fabric.steps_by_precision = precision.has_scaler if is_mixed else does


Precision = served_precision(precisions.Precision)
MixedPrecision = served_precision(precisions.MixedPrecision)
HalfPrecision = served_precision(precisions.HalfPrecision)
DoublePrecision = served_precision(precisions.DoublePrecision)
XLAPrecision = served_precision(precisions.XLAPrecision)


@served_precision
class DeepSpeedPrecision(deepspeed.DeepSpeedPrecision):
    """`DeepSpeedPrecision` that casts what Lightning's casts: a module in "bf16-true" and "16-true", and every input.

    Args:
        precision: See `loopwright.strategies.deepspeed.precision`.
    """

    @property
    def _is_true(self) -> bool:
        return not self.is_mixed and self.dtype is not torch.float32

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module, in 16 bits if its parameters are to be; the engine's masters begin with these values."""
        with kept_buffers(module, self.keep_buffers):
            return module.to(self.dtype) if self._is_true else module

    def convert_input(self, data: Any) -> Any:
        """Cast floating point tensors to the dtype of the forward pass."""
        return cast_floats(data, self.dtype)

    def module_init_context(self) -> AbstractContextManager[object]:
        """Return the context in which a module is made in the dtype of its parameters."""
        return DefaultDtype(self.dtype) if self._is_true else nullcontext()

    tensor_init_context = module_init_context


class FabricDeepSpeedPrecision(DeepSpeedPrecision):
    """`DeepSpeedPrecision` of Fabric, whose program may run the backward pass by it.

    Args:
        precision: See `loopwright.strategies.deepspeed.precision`.
    """

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of the engine."""
        model.backward(tensor, *args, **kwargs)


class _MadeBy(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, precisions.Precision) and "mixed_precision_config" in dir(instance)


class _HalfOfFSDP(precisions.HalfPrecision):
    @property
    def mixed_precision_config(self) -> ShardedDtypes:
        """The dtypes as FullyShardedDataParallel takes them."""
        warn(f"FSDP with `{self.precision}` enables computation in lower precision; parameters are stored in it, too.")
        return _sharded_dtypes(self.precision)


class FSDPPrecision(metaclass=_MadeBy):
    """Makes the precision of this name, for FSDP: one of the usual ones, for sharding strategies take the plan of any.

    It has `mixed_precision_config`, the dtypes as FullyShardedDataParallel takes them.
    """

    def __new__(cls, precision: str = "32-true", scaler: Any = None) -> Any:
        """Return a MixedPrecision, a HalfPrecision or a Precision.

        Args:
            precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true" or "16-true".
            scaler: A gradient scaler for "16-mixed".

        Raises:
            ConfigError: A scaler is given to another precision, or the precision is another one.
        """
        if scaler is not None and precision != "16-mixed":
            raise ConfigError(
                f"FSDPPrecision got a scaler and precision={precision!r}, which scales no losses.",
                fix="leave scaler out, or pass precision='16-mixed'.",
            )
        made: Any
        if precision.endswith("-mixed"):
            made = MixedPrecision(precision, "cuda" if torch.cuda.is_available() else "cpu", scaler)
        else:
            made = served_precision(_HalfOfFSDP)(precision) if precision != "32-true" else Precision()
            made.scaler = None
        if not isinstance(made, precisions.HalfPrecision):
            made.mixed_precision_config = _sharded_dtypes(precision)
        return made


def _sharded_dtypes(precision: str) -> ShardedDtypes:
    from torch.distributed.fsdp import MixedPrecision as ShardedDtypes

    dtype = {"16": torch.float16, "bf16": torch.bfloat16}.get(precision.partition("-")[0], torch.float32)
    return ShardedDtypes(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype, cast_forward_inputs=False)
