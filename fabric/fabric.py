"""The machine: accelerator, strategy, precision and processes behind one small API. Trainer is built on it."""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.move import move_to_device
from ..errors import ConfigError
from ..precision import MixedPrecision, Precision
from ..strategies import SingleDeviceStrategy
from .resolve import resolve
from .seed import seed_everything
from .state import collect_state, put_back, put_back_state

__all__ = ["Fabric"]

log = logging.getLogger(__name__)


class Fabric:
    """Run your own loop on any device and precision; the low-level API under Trainer.

    Args:
        accelerator: "auto", "gpu", "cpu", "cuda", "mps", or an Accelerator.
        strategy: "auto", a registered name, or a Strategy.
        devices: "auto", a number, -1, indices as a list or string.
        num_nodes: Number of machines.
        precision: "32-true", "64-true", "16-true", "16-mixed", "bf16-true" or "bf16-mixed"; None means "32-true" unless
            a plugin or the strategy brings one.
        plugins: One or several of Precision, CheckpointIO, ClusterEnvironment, LayerSync.
        callbacks: One or several objects; `call` finds their methods.
        loggers: One or several loggers for `log`.

    Raises:
        ConfigError: The arguments cannot work, together or by themselves; all problems are named.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",  # Any, here and below: checked by resolve
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: Any = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        parts = resolve(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
        )
        for message in parts.warnings:
            warnings.warn(message, stacklevel=2)
        for message in parts.notes:
            log.info(message)
        self.accelerator = parts.accelerator
        self.strategy = parts.strategy
        self.precision = parts.precision
        self.num_nodes = parts.num_nodes
        self.devices = parts.devices
        self.launcher = parts.launcher
        self.layer_sync = parts.layer_sync
        self.callbacks: list[Any] = _as_list(callbacks)  # Any: any object with methods
        self.loggers: list[Any] = _as_list(loggers)  # Any: a logger's package lies above this one
        self.strategy.fill(
            accelerator=parts.accelerator,
            precision=parts.precision,
            device=parts.devices[0],
            parallel_devices=list(parts.devices),
            cluster_environment=parts.cluster_environment,
            checkpoint_io=parts.checkpoint_io,
            make_checkpoint_io=_default_checkpoint_io,
        )
        self.device: torch.device = self.strategy.device
        self._is_set_up = False
        # Asked once: the hot path calls no method that does nothing.
        self._scales = _does_something(self.precision, "scale_loss")
        self._unscales = _does_something(self.precision, "unscale_gradients")
        self._precision_steps = _does_something(self.precision, "optimizer_step")

    # -- who and where -------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """Rank among all processes."""
        return self.strategy.topology.global_rank

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self.strategy.topology.local_rank

    @property
    def node_rank(self) -> int:
        """Rank of this node."""
        return self.strategy.topology.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.strategy.topology.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return self.strategy.is_global_zero

    @property
    def logger(self) -> Any:  # Any: see __init__
        """The first logger.

        Raises:
            ConfigError: There is none.
        """
        if not self.loggers:
            raise ConfigError("this Fabric has no logger.", fix="pass Fabric(loggers=...).")
        return self.loggers[0]

    @property
    def checkpoint_io(self) -> Any:  # Any: a user's checkpoint IO
        """What reads and writes checkpoints."""
        return self.strategy.checkpoint_io

    # -- processes -----------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and call `function(fabric, *args, **kwargs)` in each.

        Args:
            function: Takes the Fabric first; None only sets this process up.
            args: Further arguments.
            kwargs: Further keyword arguments.

        Returns:
            What the function returned on rank 0; None without a function.

        Raises:
            ConfigError: The function cannot be called, or takes no argument.
        """
        if function is None:
            self._setup_environment()
            return None
        if not callable(function):
            raise ConfigError(f"Fabric.launch was given {function!r}, which cannot be called.", fix="pass a function.")
        if not _takes_arguments(function):
            raise ConfigError(
                f"Fabric.launch was given {function!r}, which takes no arguments.",
                fix="let its first parameter be the Fabric: def main(fabric, ...).",
            )
        return self.launcher.launch(self._run_launched, function, *args, **kwargs)

    def _run_launched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._setup_environment()
        return function(self, *args, **kwargs)

    def _setup_environment(self) -> None:
        if not self._is_set_up:
            self.strategy.setup_environment()
            self.device = self.strategy.device
            self._is_set_up = True

    def teardown(self) -> None:
        """Give back what the strategy and the accelerator hold; the next use sets them up again."""
        self.strategy.teardown()
        self._is_set_up = False

    # -- model and optimizers ------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        """Return the module in this precision and as the strategy runs it; on one device it is not wrapped.

        Args:
            module: Changed in place.
            move_to_device: False leaves parameters and buffers on the devices where they are.
        """
        self._setup_environment()
        module = self.precision.convert_module(module)
        if move_to_device:
            self.strategy.module_to_device(module)
        elif type(self.strategy).setup_module is SingleDeviceStrategy.setup_module:
            return module  # it would do nothing else than move
        return self.strategy.setup_module(module)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:  # Any: one, or a tuple if several were given
        """Return the optimizers as the strategy runs them; on one device they are not wrapped.

        Returns:
            The optimizer, or a tuple of several.

        Raises:
            ConfigError: None was given, or one cannot work with the precision.
        """
        if not optimizers:
            raise ConfigError("Fabric.setup_optimizers was given no optimizer.", fix="pass at least one.")
        for optimizer in optimizers:
            self.precision.check_optimizer(optimizer)
        ready = tuple(self.strategy.setup_optimizer(optimizer) for optimizer in optimizers)
        return ready[0] if len(ready) == 1 else ready

    def bind_step(self, module: nn.Module, name: str) -> Callable[..., Any]:
        """Return what runs `module.<name>` in this precision and under the strategy's hooks.

        In full precision on one device it is the module's very method.

        Args:
            module: What `setup_module` returned.
            name: Name of a method, such as "training_step".
        """
        step = self.strategy.bind_step(module, name)
        precision = self.precision
        if not (precision.has_forward_context or precision.converts_input or precision.converts_output):
            return step
        return _in_precision(step, precision)

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are made on the device and in the precision's dtype."""
        return _both(self.device, self.precision.tensor_init_context())

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which a module's parameters are made on the device and in the precision's dtype.

        Args:
            empty_init: True leaves parameters without values, for a checkpoint that is loaded next; None leaves the
                choice to the strategy, which on one device initialises.
        """
        self._setup_environment()
        return _both(self.precision.module_init_context(), self.strategy.init_context(empty_init))

    # -- hot path ------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Compute gradients; with a loss scale, of the scaled loss.

        Args:
            tensor: A loss, shape ().
            args: Further arguments of `Tensor.backward`.
            model: Only engines with several models need it.
            kwargs: Further keyword arguments of `Tensor.backward`.
        """
        self.strategy.backward(self.precision.scale_loss(tensor) if self._scales else tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step the optimizer.

        Returns:
            Whether the step was made: False if a loss scale is in use and a gradient is infinite or NaN.
        """
        if self._precision_steps:
            return self.precision.optimizer_step(optimizer, closure)
        return self.strategy.optimizer_step(optimizer, closure)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Bring gradients to their true size, to clip or read them; do nothing the second time, or without a scale."""
        if self._unscales:
            self.precision.unscale_gradients(optimizer)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Unscale and clip the gradients of the optimizer's parameters, in place, by element or by total norm.

        Args:
            module: What `setup_module` returned.
            optimizer: Its parameters' gradients are clipped.
            clip_val: Largest absolute value of an element.
            max_norm: Largest total norm.
            norm_type: Order of the norm.
            error_if_nonfinite: Raise if the norm is infinite or NaN; this reads it on the host. With a loss scale such
                a norm is no error: the step will be skipped.

        Returns:
            With `max_norm`, the norm before clipping: shape (), on the device. With `clip_val`, None.

        Raises:
            ConfigError: Not exactly one of `clip_val` and `max_norm` is given, or it is not positive.
            NonFiniteError: See `error_if_nonfinite`.
        """
        limit = clip_val if max_norm is None else max_norm
        if limit is None or (clip_val is not None and max_norm is not None) or not limit > 0:
            raise ConfigError(
                f"Fabric.clip_gradients was given clip_val={clip_val!r} and max_norm={max_norm!r}.",
                fix="pass a positive number for exactly one of the two.",
            )
        if self._unscales:
            self.precision.unscale_gradients(optimizer)
        if max_norm is None:
            self.strategy.clip_gradients_value(module, optimizer, limit)
            return None
        return self.strategy.clip_gradients_norm(
            module, optimizer, max_norm, norm_type, error_if_nonfinite and not self.precision.has_scaler
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which this precision runs forward passes."""
        return self.precision.forward_context()

    def to_device(self, obj: Any) -> Any:  # Any: a module, tensor, or any structure of tensors
        """Return the module (moved in place) or the data on the device; what is there already is not copied."""
        if isinstance(obj, nn.Module):
            self.strategy.module_to_device(obj)
            return obj
        return move_to_device(obj, self.device)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not reduce gradients over ranks, for accumulation.

        Args:
            module: What `setup_module` returned.
            enabled: False does nothing, so that the call can stand in a loop.
        """
        return self.strategy.no_backward_sync(module, enabled)

    # -- collectives ---------------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as the built-in does, on local rank 0 of each node."""
        if self.local_rank == 0:
            builtins.print(*args, **kwargs)  # noqa: T201  the one place where the library prints

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here."""
        self.strategy.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object."""
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks stacked along a new first dimension; with one rank, the data itself.

        Args:
            data: A tensor or any structure of tensors, of the same shapes on all ranks.
            group: Ranks that take part; None for all.
            sync_grads: Let gradients flow back through the gathering.
        """
        return self.strategy.all_gather(data, group, sync_grads)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """Return a tensor (or any structure of tensors) reduced over ranks, with "mean", "sum", "min" or "max"."""
        return self.strategy.all_reduce(data, group, reduce_op)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Run the block on rank 0 first, then on all others.

        Args:
            local: On the first rank of each node, rather than on global rank 0.
        """
        is_first = (self.local_rank if local else self.global_rank) == 0
        if not is_first:
            self.barrier("rank_zero_first")
        try:
            yield
        finally:
            if is_first:
                self.barrier("rank_zero_first")

    # -- files ---------------------------------------------------------------------------------------------------

    def save(
        self,
        path: Any,  # Any: a string, a path object, or a URL
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint on rank 0, and wait for it on all ranks.

        Args:
            path: The file.
            state: Modules, optimizers and other `Stateful` objects are replaced by their state; the rest is plain.
            filter: For a key of `state`, a function of (name, value) that says which entries of its state are kept.

        Raises:
            ConfigError: The filter names what is not in the state, or is no function.
        """
        content = collect_state(self.strategy, state, filter)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(content, path)
        self.barrier("save")

    def load(
        self, path: Any, state: dict[str, Any] | None = None, strict: bool = True, *, weights_only: bool = True
    ) -> dict[str, Any]:
        """Read a checkpoint.

        Args:
            path: The file.
            state: Modules, optimizers and `Stateful` objects in it are loaded in place, other entries replaced; None
                gives the whole file.
            strict: Whether a key of `state` that is not in the file is an error; also given to modules.
            weights_only: False reads any pickled object, which can run code: only for files that you trust.

        Returns:
            The entries of the file that are not in `state`.

        Raises:
            CheckpointError: Keys are missing (all are named), or a state does not fit its object.
        """
        content = dict(self.checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=weights_only))
        self.barrier("load")
        if state is None:
            return content
        return put_back_state(self.strategy, content, state, strict=strict, where=str(path))

    def load_raw(self, path: Any, obj: Any, strict: bool = True, *, weights_only: bool = True) -> None:
        """Load a file that holds the bare state of one module, optimizer or other `Stateful` object.

        Args:
            path: The file.
            obj: Loaded in place.
            strict: For a module: whether missing and unexpected keys are an error.
            weights_only: False reads any pickled object, which can run code: only for files that you trust.

        Raises:
            ConfigError: The object has no state.
            CheckpointError: The state does not fit.
        """
        content = self.checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)
        if not put_back(self.strategy, obj, content, strict):
            raise ConfigError(
                f"Fabric.load_raw was given {obj!r}, which has no load_state_dict.", fix="pass a module or optimizer."
            )

    # -- callbacks, loggers, seed --------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method on every callback that has it; keyword arguments that it does not take are left out.

        Args:
            hook_name: Any name.
            args: Given to all.
            kwargs: Given to those that take them.
        """
        for callback in self.callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                warnings.warn(f"{type(callback).__name__}.{hook_name} is no method; it is not called.", stacklevel=2)
                continue
            method(*args, **_accepted(method, kwargs))

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Send one number to every logger; see `log_dict`."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send numbers to every logger, as Python numbers. Reads tensors on the host.

        Args:
            metrics: Numbers, or tensors of one element.
            step: The x-axis; None leaves it to the logger.

        Raises:
            ConfigError: Tensors of several elements; all are named.
        """
        wrong = [name for name, value in metrics.items() if isinstance(value, Tensor) and value.numel() != 1]
        if wrong:
            raise ConfigError(
                f"Fabric.log_dict takes one number per name, but these tensors have another size: {wrong}.",
                fix="log their mean, or one name per element.",
            )
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for logger in self.loggers:
            logger.log_metrics(numbers, step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed all generators, by default also in loader workers; see `loopwright.seed_everything`."""
        return seed_everything(seed, workers=True if workers is None else workers, verbose=verbose)


def _does_something(precision: Precision, name: str) -> bool:
    """Return whether a method of the precision does more than the base class's."""
    method = getattr(type(precision), name)
    if method is getattr(MixedPrecision, name):
        return precision.has_scaler  # with bfloat16 it is as good as the base class's
    return method is not getattr(Precision, name)


def _default_checkpoint_io() -> Any:
    from ..checkpoint import TorchCheckpointIO  # takes a few milliseconds that a run without files does not need

    return TorchCheckpointIO()


def _in_precision(step: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """Return the step with inputs cast, in the precision's context."""
    context = precision.forward_context
    converts_input, convert_input = precision.converts_input, precision.convert_input
    converts_output, convert_output = precision.converts_output, precision.convert_output

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        if converts_input:
            args, kwargs = convert_input(args), convert_input(kwargs)
        with context():
            output = step(*args, **kwargs)
        return convert_output(output) if converts_output else output

    return run


@contextmanager
def _both(one: AbstractContextManager[Any] | torch.device, other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _takes_arguments(function: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(function).parameters)
    except ValueError:  # some built-in functions have no signature
        return True


def _accepted(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not kwargs:
        return kwargs
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}
