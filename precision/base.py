"""Full precision, and the interface that every precision has: dtypes as data, and what is done with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.overrides import has_torch_function_unary

from ..deferred_compiler import step_uncompiled
from ..errors import nearest
from ..messages import warn
from ..protocols import AnyBatch, StateDict, Tree
from ..tree import map_tree

# Of the function that torch puts around `step` of each class.
_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__
_is_profiled = torch._C._autograd._profiler_enabled
# Hooks of all optimizers; torch changes these dictionaries in place.
_before_all = torch_optimizer._global_optimizer_pre_hooks
_after_all = torch_optimizer._global_optimizer_post_hooks
# torch's own function around its engine, which `Tensor.backward` ends in: it logs, and keeps the context of threads.
_run: Any = getattr(graph, "_engine_run_backward", None)  # Any: private, so perhaps not there
_of_tensor = Tensor.backward
_of_autograd = torch.autograd.backward
_is_transformed = getattr(torch._C, "_are_functorch_transforms_active", None)


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of one precision, for strategies that cast themselves (sharding, engines)."""

    param_dtype: torch.dtype = torch.float32
    """Of parameters as the optimizer holds them."""
    compute_dtype: torch.dtype = torch.float32
    """Of matrix products in the forward and backward pass."""
    reduce_dtype: torch.dtype = torch.float32
    """Of gradients while they are reduced over ranks."""
    buffer_dtype: torch.dtype = torch.float32
    """Of floating point buffers."""
    output_dtype: torch.dtype = torch.float32
    """Of what `Precision.convert_output` returns."""


class Precision:
    """Full precision ("32-true"): nothing is cast, scaled or entered. The base class of the others.

    Flags mark the methods that have an effect, so that the hot path calls no others.
    """

    precision: str = "32-true"
    """The name that users type."""
    policy: PrecisionPolicy = PrecisionPolicy()
    """The dtypes, as data."""
    has_forward_context: bool = False
    """Whether `forward_context` does something."""
    has_scaler: bool = False
    """Whether losses are scaled, so that an optimizer step can be skipped."""
    reduce_overflow: Callable[[Tensor], object] | None = None
    """Takes the maximum over ranks, in place, of the flag that a scaled gradient overflowed: shape (). Set by
    strategies where ranks may hold other gradients; None: all find the same."""
    keep_buffers: Sequence[str] | None = None
    """Patterns (as of `fnmatch`) of the names of buffers that keep their dtype where a module is converted to 16 bits;
    None: those that are not persistent, as state dicts leave them out."""
    converts_input: bool = False
    """Whether `convert_input` does something."""
    converts_output: bool = False
    """Whether `Fabric.bind_step` passes what a step returns through `convert_output`."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with its parameters and buffers in this precision's dtypes; may change it in place."""
        return module

    def tensor_init_context(self) -> AbstractContextManager[object]:
        """Return a context in which tensors created without a dtype get this precision's dtype."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[object]:
        """Return a context in which parameters are created in this precision's dtype."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context in which the user's steps run: a new one for every use."""
        return nullcontext()

    def step_context(self) -> AbstractContextManager[object]:
        """Return a further context of the user's steps, entered within an engine: a new one for every use.

        For engines that leave the contexts around them before the steps run (DeepSpeed).
        """
        return nullcontext()

    def convert_input(self, data: AnyBatch) -> AnyBatch:
        """Return the data with floating point tensors in the dtype that the forward pass takes."""
        return data

    def convert_output(self, data: AnyBatch) -> AnyBatch:
        """Return the data with floating point tensors in `policy.output_dtype`; gradients flow through."""
        return data

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss

    def holding_scale(self) -> AbstractContextManager[None]:
        """Return a context for backward passes that are run again between unscaling and the step."""
        return nullcontext()

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the loss scale, before they are clipped or read."""

    def skip_together(self, optimizers: Sequence[Optimizer]) -> None:
        """Let an overflow in one of several optimizers skip the steps of all, after `unscale_gradients` of each."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:  # Any: a loss
        """Step the optimizer.

        Args:
            optimizer: It has gradients from `scale_loss(...).backward()`.
            closure: Computes loss and gradients again, for optimizers such as LBFGS; None for all others.

        Returns:
            Whether the step was made: False if it was skipped because a gradient is infinite or NaN.
        """
        if closure is None:
            take_step(optimizer)
        else:
            optimizer.step(closure)
        return True

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise a ConfigError if this precision does not support the optimizer."""

    def state_dict(self) -> StateDict:
        """Return the state as plain values; empty if there is none."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state returned by `state_dict`."""

    def teardown(self) -> None:
        """End the use of this precision after a run."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.precision!r})"


def warn_of_unknown(ignored: Collection[str], module: nn.Module) -> None:
    """Warn of names in `ignore_modules` that the module does not have: the layers that they mean are converted."""
    names = dict(module.named_modules())
    for one in sorted(set(ignored) - set(names)):
        ending = next((name for name in names if name.endswith(f".{one}")), None)
        hint = f" (did you mean {ending!r}?)" if ending else nearest(one, names)
        warn(f"ignore_modules has {one!r}{hint}, and {type(module).__name__} has no module of that name")


@contextmanager
def kept_buffers(module: nn.Module, patterns: Sequence[str] | None) -> Iterator[None]:
    """Return a context that casts a module, in which some buffers keep their dtype, and so all digits.

    Persistent buffers, such as running statistics, take part in operations that demand the dtype of the parameters.
    Others are computed by the module, such as frequencies of rotary embeddings: in bfloat16, which has 8 bits, angles
    at position 500 would be wrong by a radian.

    Args:
        module: The module that is cast in place.
        patterns: See `Precision.keep_buffers`.
    """
    kept = [
        (owner, name, buffer)
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
        and (
            name in owner._non_persistent_buffers_set
            if patterns is None
            else any(fnmatchcase(f"{path}.{name}".lstrip("."), pattern) for pattern in patterns)
        )
    ]
    yield
    for owner, name, buffer in kept:
        cast = owner._buffers.get(name)
        if cast is not None and cast.dtype is not buffer.dtype:
            owner._buffers[name] = buffer.to(cast.device)


class DefaultDtype:
    """A context in which torch's default dtype is another one.

    Args:
        dtype: A floating point dtype.
    """

    __slots__ = ("_before", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._before.pop())


def cast_floats(data: AnyBatch, dtype: torch.dtype) -> AnyBatch:
    """Return the data with each real floating point tensor cast to `dtype`.

    Mappings, lists, tuples, named tuples and dataclass instances are walked and keep their type; a container in
    which nothing changes is returned as it is. Integers, complex tensors and everything else stay.
    """
    return map_tree(data, _is_float, lambda tensor: tensor.to(dtype))


def _is_float(leaf: Tree) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


# -- calls of torch ----------------------------------------------------------------------------------------------------
#
# torch wraps `step` and `zero_grad` of optimizers in a region of its profiler, and `backward` checks all that it might
# be given: more than anything else that a small step adds. They are called without that where nothing listens and
# nothing else can be meant: no profiler, no hook, and no method that was replaced.


def evaluates_again(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` evaluates the model itself, by its closure, as LBFGS does.

    An attribute `evaluates_closure` of the optimizer decides. Else it does if its class requires a closure, or, for a
    class that is not torch's, if it uses the closure for more than `if closure is not None: loss = closure()` at the
    beginning.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and "step" not in vars(optimizer):
        closure = inspect.signature(kind.step).parameters.get("closure")
        declared = getattr(optimizer, "evaluates_closure", None)
        return (closure is not None and closure.default is closure.empty) if declared is None else bool(declared)
    from .closures import read_closure_use  # expensive: it reads source

    return read_closure_use(optimizer).evaluates


def take_step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, or the class's own function within torch's wrapper where nothing listens."""
    # Not __class__: an engine's optimizer says that it is the user's, whose `step` it replaces.
    wrapped: Any = getattr(type(optimizer), "step", None)  # Any: a function with attributes
    if getattr(wrapped, "__code__", None) is not _WRAPPER:
        optimizer.step()
        return
    attributes = optimizer.__dict__
    own = attributes.get("step")
    if own is not None and _counts_calls_of(own, wrapped):
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what the schedule's wrapper would set
        own = None
    if (
        own is None
        and not (attributes["_optimizer_step_pre_hooks"] or attributes["_optimizer_step_post_hooks"])
        and not (_before_all or _after_all or _is_profiled())
    ):
        step_uncompiled(wrapped.__wrapped__, optimizer, *_closure_for(wrapped))
    elif own is None:
        _with_hooks(wrapped.__wrapped__)(optimizer, *_closure_for(wrapped))
    else:
        optimizer.step(*_closure_for(wrapped))


@cache
def _with_hooks(step: Any) -> Callable[..., object]:  # Any: a function with attributes
    """Return what torch puts around `step`, for hooks and profilers."""
    return Optimizer.profile_hook_step(partial(step_uncompiled, step))


@cache
def _closure_for(step: Any) -> tuple[Callable[[], Any], ...]:  # Any: a function, and the loss that is not there
    """Return a closure that computes nothing, for a `step` of the user that requires one; else no argument."""
    if step.__module__.startswith("torch."):
        return ()
    closure = inspect.signature(step).parameters.get("closure")
    return () if closure is None or closure.default is not inspect.Parameter.empty else (_compute_nothing,)


def _compute_nothing() -> None:
    """Stand for a closure where gradients are there already."""


def _counts_calls_of(own: Any, wrapped: Any) -> bool:
    """Return whether an optimizer's own `step` is the class's, wrapped by a schedule that notes its calls."""
    return hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is wrapped


def clear_gradients(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that does what `optimizer.zero_grad()` does."""
    is_plain = type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
    if not is_plain:
        return optimizer.zero_grad

    def clear() -> None:
        if _is_profiled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return clear


def compute_gradients(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Call `loss.backward(*args, **kwargs)`, for a plain loss without what its arguments would need.

    `Tensor.backward` spends 20 microseconds on checks of what it may be given: several tensors, gradients, nested
    tensors, subclasses. A scalar loss without arguments goes to the engine directly, with the same gradient of 1. Where
    anything else could be meant (a subclass, a mode, a transform, a replaced method), torch decides.

    Args:
        loss: The loss: shape ().
        args: Positional arguments of `Tensor.backward`.
        kwargs: Keyword arguments of `Tensor.backward`.
    """
    if (
        loss.__class__ is Tensor
        and not (args or kwargs)
        and loss.requires_grad
        and not loss.ndim
        and loss.dtype.is_floating_point
        and Tensor.backward is _of_tensor
        and torch.autograd.backward is _of_autograd
        and _run is not None
        and _is_transformed is not None
        and not (has_torch_function_unary(loss) or _is_transformed())
    ):
        _run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        loss.backward(*args, **kwargs)


def clip_dense_norm(optimizer: Optimizer, max_norm: float, norm_type: float) -> Tensor | None:
    """Scale the gradients in place so that their total norm is at most `max_norm`; the norm is not read.

    These are the operations of `torch.nn.utils.clip_grad_norm_`, to the same bits, without its search for groups of
    tensors: 30 of its calls are made in place of 130, which is half of its time where there are few tensors.

    Args:
        optimizer: The optimizer, whose parameters' gradients are scaled.
        max_norm: Threshold in units of unscaled gradients.
        norm_type: Order of the norm; may be infinity.

    Returns:
        The norm before clipping: shape (), on the gradients' device. None, with nothing changed, if there are no
        gradients, or if they are not dense tensors of one dtype on one CPU or CUDA device, without a graph; and where
        torch's function is replaced, as torch_xla does.

    Source: Pascanu et al. 2013, eq. 7; 1e-6 is what torch adds to the norm.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not gradients or nn.utils.clip_grad_norm_.__module__ != "torch.nn.utils.clip_grad":
        return None
    device, dtype = gradients[0].device, gradients[0].dtype
    if device.type not in ("cpu", "cuda"):
        return None
    for gradient in gradients:
        if (
            gradient.__class__ is not Tensor
            or gradient.dtype is not dtype
            or gradient.device != device
            or gradient.layout is not torch.strided
            or gradient.requires_grad
        ):
            return None
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, norm_type)), norm_type)
    factor = torch.clamp((norm + 1e-6).reciprocal() * max_norm, max=1.0)
    torch._foreach_mul_(gradients, factor)
    return norm
