"""The machine: accelerator, strategy, precision and processes behind one small API. Trainer is built on it."""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..accelerators.matmul_precision import (
    MATMUL_PRECISIONS,
    capture_matmul_precision,
    restore_matmul_precision,
    set_matmul_precision,
)
from ..accelerators.matmul_precision import State as MatmulState
from ..data.hparams import without_omegaconf
from ..data.move import move_to_device
from ..errors import ConfigError, LaunchError
from ..precision import MixedPrecision, Precision
from ..strategies import NoLoss, SingleDeviceStrategy, Strategy
from .launch import InProcessLauncher
from .resolve import Environment, Parts, resolve
from .seed import seed_everything
from .state import bare, collect_state, put_back, put_back_state

if TYPE_CHECKING:
    from .accumulation import Accumulation, Reader, Window
    from .dataloaders import EvaluationPass
    from .watch import Watch

__all__ = ["Fabric"]

log = logging.getLogger(__name__)


class Fabric:
    """Run your own loop on any device, precision and number of processes; the low-level API under Trainer.

    A subclass may define `run(self, ...)`: calling it starts the processes first.

    Args:
        accelerator: "auto", "gpu", "cpu", "cuda", "mps", or an Accelerator.
        strategy: "auto", a registered name, or a Strategy.
        devices: "auto", a number, -1, indices as a list or string.
        num_nodes: Number of machines.
        precision: "32-true", "64-true", "16-true", "16-mixed", "bf16-true" or "bf16-mixed"; None means "32-true" unless
            a plugin or the strategy brings one.
        plugins: One or several of Precision, CheckpointIO, ClusterEnvironment, LayerSync.
        callbacks: One or several objects; `call` finds their methods. Installed packages may add some: the entry point
            group "loopwright.fabric.callbacks_factory" names functions that return a callback or a list of them.
        loggers: One or several loggers for `log`.
        matmul_precision: How float32 matrices are multiplied from `launch` (or the first `setup`) to `teardown`:
            "highest", "high" (tf32 where the device has it) or "medium" (bfloat16); None leaves torch's setting.

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
        matmul_precision: str | None = None,
    ) -> None:
        lists = {"devices": devices, "plugins": plugins, "callbacks": callbacks, "loggers": loggers}
        devices, plugins, callbacks, loggers = without_omegaconf(lists).values()
        if matmul_precision not in (None, *MATMUL_PRECISIONS):
            raise ConfigError(
                f"Fabric: matmul_precision={matmul_precision!r}.",
                fix=f"pass one of {', '.join(map(repr, MATMUL_PRECISIONS))}, or None.",
            )
        parts = resolve(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
        )
        self._assemble(parts, callbacks=callbacks, loggers=loggers, matmul_precision=matmul_precision)

    @classmethod
    def of_this_process(cls, device: torch.device, precision: Precision) -> Fabric:
        """Return a Fabric for this process alone, whoever started it and however many others there are.

        Neither the launcher's variables (torchrun, SLURM, MPI) nor those of `loopwright launch` are read.

        Args:
            device: Where it computes.
            precision: Not copied.
        """
        fabric = cls.__new__(cls)
        parts = resolve(
            accelerator=device.type,
            strategy=SingleDeviceStrategy(device),
            devices=1,
            plugins=[precision],
            environment=Environment(),
        )
        fabric._assemble(parts, callbacks=None, loggers=None, matmul_precision=None)
        return fabric

    def _assemble(self, parts: Parts, *, callbacks: Any, loggers: Any, matmul_precision: str | None) -> None:
        """Take over the parts, and fill the strategy with them."""
        self._matmul_precision = matmul_precision
        self._matmul_before: MatmulState | None = None
        for message in parts.warnings:
            warnings.warn(message, stacklevel=3)
        for message in parts.notes:
            log.info(message)
        self.accelerator = parts.accelerator
        self.strategy = parts.strategy
        self.precision = parts.precision
        self.num_nodes = parts.num_nodes
        self.devices = parts.devices
        self.launcher = parts.launcher
        self.layer_sync = parts.layer_sync
        self._callbacks: list[Any] = _as_list(callbacks)  # Any: any object with methods
        self._has_found_callbacks = False
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
        self._cluster = parts.cluster_environment
        # Whether strategy and launcher are made for several processes, be it that one was asked for.
        self._is_one_of_several = self.strategy.start_method is not None and (
            type(self.launcher) is not InProcessLauncher
        )
        self._join_world()
        self.device: torch.device = self.strategy.device
        self._is_set_up = False
        # Watches the other ranks; None with one process, and before the processes are connected.
        self.watch: Watch | None = None
        self._listeners: list[nn.Module] = []
        self._accumulation: Accumulation | None = None
        # The window of the last micro-batch under `accumulate`, and whether we are within its block.
        self._window: Window | None = None
        self._divisor: int | None = None
        self._is_in_backward = False
        # The loader of the training pass, and the evaluation, that are under way.
        self._reader: Reader | None = None
        self._evaluation: EvaluationPass | None = None
        # Asked once: the hot path calls no method that does nothing.
        places = type(self.strategy).place_batch is not Strategy.place_batch
        self._move_batch = functools.partial(_move_placed, self.strategy.place_batch) if places else move_to_device
        self._scales = _does_something(self.precision, "scale_loss")
        self._unscales = _does_something(self.precision, "unscale_gradients")
        self._precision_steps = _does_something(self.precision, "optimizer_step")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            cls.run = _launching(cls.__dict__["run"])  # type: ignore[method-assign]

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

    @property
    def cluster_environment(self) -> Any:  # Any: a ClusterEnvironment, which one process need not import
        """What knows ranks and addresses; None with one process."""
        return self._cluster

    # -- processes -----------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and call `function(fabric, *args, **kwargs)` in each.

        Where the processes exist already (torchrun, SLURM, `loopwright launch`) or one is enough, nothing is started,
        and calling `launch` is optional. Once started, further calls run their function in the processes that are
        there.

        Args:
            function: Takes the Fabric first; None starts the processes, which then all go on after this call. With
                strategies that spawn or fork, it is required.
            args: Further arguments.
            kwargs: Further keyword arguments.

        Returns:
            What the function returned: in each process its own; in one that spawned or forked the others, that of
            rank 0. None without a function.

        Raises:
            ConfigError: The function cannot be called, takes no argument, or is missing.
        """
        if function is None:
            if getattr(self.launcher, "starts_processes", False) and not self._is_set_up:
                raise ConfigError(
                    f"Fabric.launch needs a function with {_named(self.strategy)}: it runs in new processes, and "
                    "code after this call does not.",
                    fix="put the training into a function and call fabric.launch(main), with def main(fabric, ...).",
                )
            function, args, kwargs = _do_nothing, (), {}
        elif not callable(function):
            raise ConfigError(f"Fabric.launch was given {function!r}, which cannot be called.", fix="pass a function.")
        elif not _takes_arguments(function):
            raise ConfigError(
                f"Fabric.launch was given {function!r}, which takes no arguments.",
                fix="let its first parameter be the Fabric: def main(fabric, ...).",
            )
        if self._is_set_up:
            return function(self, *args, **kwargs)
        return self.launcher.launch(self._run_launched, function, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: a subclass defines it. Calling it starts the processes first, as `launch` does.

        Args:
            args: The subclass's own.
            kwargs: The subclass's own.
        """

    def _run_launched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._setup_environment()
        return function(self, *args, **kwargs)

    def _setup_environment(self) -> None:
        """Connect this process with the others, once: the one place where a process becomes a rank."""
        if not self._is_set_up:
            if self._matmul_precision is not None:
                self._matmul_before = capture_matmul_precision()
                set_matmul_precision(self._matmul_precision)
            self._join_world()
            self.strategy.setup_environment()
            self.device = self.strategy.device
            if self.world_size > 1:
                from .watching import watch_over  # not imported where there is one process

                self.watch = watch_over(self.strategy, self.launcher)
            self._is_set_up = True

    def _join_world(self) -> None:
        """Tell the cluster environment its place among the processes, where we are the ones who start them."""
        cluster = self._cluster
        if cluster is not None and self._is_one_of_several:
            per_node = len(self.devices)
            cluster.set_world_size(self.num_nodes * per_node)
            cluster.set_global_rank(cluster.node_rank() * per_node + cluster.local_rank())

    def _require_launch(self, name: str) -> None:
        """Connect this process if nothing has to be started for it.

        Raises:
            LaunchError: Processes have to be started first.
        """
        if self._is_set_up:
            return
        are_there = self._cluster is not None and self._cluster.creates_processes_externally
        if self._is_one_of_several and not are_there:
            raise LaunchError(
                f"Fabric.{name} was called before the processes of {_named(self.strategy)} were started.",
                fix="call fabric.launch() before it, or put the training into a function and call fabric.launch(main).",
            )
        self.launcher.launch(self._setup_environment)

    def __getstate__(self) -> dict[str, Any]:
        # For processes that are spawned with it: they are there then, and start no others.
        return {**self.__dict__, "launcher": InProcessLauncher(), "_reader": None, "_evaluation": None}

    def teardown(self) -> None:
        """Give back what the strategy and the accelerator hold; the next use sets them up again."""
        self.strategy.teardown()
        self._is_set_up = False
        if self._matmul_before is not None:
            restore_matmul_precision(self._matmul_before)
            self._matmul_before = None

    # -- model and optimizers ------------------------------------------------------------------------------------

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,  # Any: any schedule of torch's or the user's
        move_to_device: bool = True,
        compile: bool | Mapping[str, Any] = False,
        _reapply_compile: bool = True,
    ) -> Any:  # Any: one object, or a tuple of as many as were given
        """Return the module and its optimizers in this precision and as the strategy runs them.

        The module's forward runs in the precision and under the strategy's hooks, an optimizer's `step` through both.
        A module that `torch.compile` returned stays compiled, with its options, inside of what the strategy adds.

        Args:
            module: Changed in place; keep what is returned instead.
            optimizers: Of this module's parameters.
            scheduler: A schedule for them, which then steps when they do; see `accumulate`.
            move_to_device: False leaves parameters and buffers on the devices where they are.
            compile: Compile the module in place: True, or a dict of arguments of torch.compile. See docs/compile.md.
            _reapply_compile: Accepted for compatibility; a compiled module is always compiled again, where it can.

        Returns:
            The module; with optimizers, a tuple of it and them; with a scheduler, the scheduler last.

        Raises:
            ConfigError: Something is set up already, lies on the meta device, or cannot work with the precision.
            LaunchError: The processes are not started yet.
        """
        from .checks import check_module, check_optimizers, check_optimizers_of
        from .wrappers import FabricModule, FabricOptimizer, FabricScheduler

        self._require_launch("setup")
        check_module(module)
        check_optimizers("setup", optimizers)
        check_optimizers_of(module, optimizers)
        module = self._compile(module, compile)
        converted = self._convert(module, move_to_device)
        for optimizer in optimizers:
            self.precision.check_optimizer(optimizer)
        if type(self.strategy).setup_module_and_optimizers is not Strategy.setup_module_and_optimizers:
            running, ready = self.strategy.setup_module_and_optimizers(converted, optimizers)
        else:
            running = self._run_by_strategy(converted, move_to_device)
            ready = [self.strategy.setup_optimizer(optimizer) for optimizer in optimizers]
        result: list[Any] = [FabricModule(running, _uncompiled(converted), self)]
        result += [FabricOptimizer.of(optimizer, self) for optimizer in ready]
        if scheduler is not None:
            result.append(FabricScheduler(scheduler, result[1:], self))
        self._announce(result[0])
        return result[0] if len(result) == 1 else tuple(result)

    def setup_module(
        self,
        module: nn.Module,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
        *,
        compile: bool | Mapping[str, Any] = False,
    ) -> Any:
        """Return the module in this precision and as the strategy runs it; `setup` also takes its optimizers.

        Args:
            module: Changed in place; keep what is returned instead.
            move_to_device: False leaves parameters and buffers on the devices where they are.
            _reapply_compile: See `setup`.
            compile: See `setup`.

        Raises:
            ConfigError: It is set up already.
            LaunchError: The processes are not started yet.
        """
        from .checks import check_module
        from .wrappers import FabricModule

        self._require_launch("setup_module")
        check_module(module)
        module = self._convert(self._compile(module, compile), move_to_device)
        wrapped = FabricModule(self._run_by_strategy(module, move_to_device), _uncompiled(module), self)
        self._announce(wrapped)
        return wrapped

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:  # Any: one, or a tuple if several were given
        """Return the optimizers as the strategy runs them: `step` goes through strategy and precision.

        Returns:
            The optimizer, or a tuple of several.

        Raises:
            ConfigError: None was given, or one is set up already, has parameters on the meta device, or cannot work
                with the precision.
            LaunchError: The processes are not started yet.
        """
        from .checks import check_optimizers
        from .wrappers import FabricOptimizer

        self._require_launch("setup_optimizers")
        check_optimizers("setup_optimizers", optimizers)
        ready = self.prepare_optimizers(*optimizers)
        wrapped = tuple(FabricOptimizer.of(optimizer, self) for optimizer in ready)
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def setup_dataloaders(
        self,
        *dataloaders: Any,  # Any: DataLoaders, or any other iterables of batches
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        uneven: str | None = None,
    ) -> Any:  # Any: one, or a list if several were given
        """Return the loaders so that each process reads its share, with batches on the device.

        The loader is not made anew, and its sampler, batch sampler, collation and workers stay: of every `world_size`
        batches that it has, each process gets one, so `batch_size` counts the samples of one process. Loaders whose
        sampler knows its rank, and iterables that cannot be distributed, are left alone. `set_epoch` is called with the
        number of passes that were begun.

        Args:
            dataloaders: Read by all processes in the same order.
            use_distributed_sampler: False gives every process all batches.
            move_to_device: False leaves batches where the loader puts them.
            uneven: When the batches do not come out even: "stop_all" leaves the last ones out, "cycle" reads the first
                ones again, "keep" gives every batch once, so that some processes get one less. None takes "keep"
                within `torch.no_grad()`, where nothing is learned, and else the strategy's.

        Returns:
            The loader, or a list of several.

        Raises:
            ConfigError: None was given, or one is set up already.
            ModuleError: One cannot be iterated.
            LaunchError: The processes are not started yet.
        """
        from .checks import refuse_wrapped
        from .dataloaders import FabricDataLoader

        self._require_launch("setup_dataloaders")
        if not dataloaders:
            raise ConfigError("Fabric.setup_dataloaders was given no loader.", fix="pass at least one.")
        refuse_wrapped("setup_dataloaders", dataloaders)
        ready = [
            FabricDataLoader(self, loader, is_dealt=use_distributed_sampler, moves=move_to_device, uneven=uneven)
            for loader in dataloaders
        ]
        return ready[0] if len(ready) == 1 else ready

    def prepare_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        """Return the module as `setup_module` does, without a wrapper of Fabric's; on one device, the module itself.

        For a loop that runs the module by `bind_step` and calls `backward`, `clip_gradients` and `optimizer_step`
        itself, as the Trainer's does: nothing stands between it and the strategy.

        Args:
            module: Changed in place.
            move_to_device: False leaves parameters and buffers on the devices where they are.
        """
        self._require_launch("prepare_module")
        return self._run_by_strategy(self._convert(module, move_to_device), move_to_device)

    def prepare_optimizers(self, *optimizers: Optimizer) -> tuple[Optimizer, ...]:
        """Return the optimizers as `setup_optimizers` does, without wrappers of Fabric's.

        Raises:
            ConfigError: None was given, or one cannot work with the precision.
        """
        if not optimizers:
            raise ConfigError("Fabric was given no optimizer to set up.", fix="pass at least one.")
        for optimizer in optimizers:
            self.precision.check_optimizer(optimizer)
        return tuple(self.strategy.setup_optimizer(optimizer) for optimizer in optimizers)

    def _convert(self, module: nn.Module, move_to_device: bool) -> nn.Module:
        with self.strategy.change_context(module):
            module = self.precision.convert_module(module)
        if move_to_device:
            self.strategy.module_to_device(module)
        else:
            devices = sorted({str(parameter.device) for parameter in module.parameters()})
            if len(devices) > 1:
                warnings.warn(
                    f"the parameters of {type(module).__name__} lie on several devices: {', '.join(devices)}; they are "
                    "left there.",
                    stacklevel=3,
                )
        return module

    def _compile(self, module: nn.Module, value: bool | Mapping[str, Any]) -> nn.Module:
        """Return the module compiled in place, if the user asked for it here or by torch.compile."""
        if value is False and _uncompiled(module) is module and "_compile_options" not in vars(module):
            return module
        from .compiling import compile_for_fabric  # not imported where nothing is compiled
        from .wrappers import STEPS

        return compile_for_fabric(module, self.strategy, value, STEPS)

    def _run_by_strategy(self, module: nn.Module, move_to_device: bool) -> nn.Module:
        if not move_to_device and type(self.strategy).setup_module is SingleDeviceStrategy.setup_module:
            return module  # it would do nothing else than move
        return self.strategy.setup_module(module)

    def _announce(self, module: Any) -> None:  # Any: a FabricModule, imported where it is made
        """Tell the user's module, if it is a `loopwright.Module`, and the callbacks that a module was set up."""
        original = module.module
        if isinstance(getattr(type(original), "fabric", None), property):
            original.fabric = self
            if original not in self._listeners:
                self._listeners.append(original)
        self.call("on_after_setup", fabric=self, module=module)

    def _bind_call(self, module: nn.Module, name: str) -> Callable[..., Any]:
        """Return what runs a method of a module for `FabricModule`: in this precision, and as the strategy does."""
        run = self.strategy.bind_step(module, name)
        precision = self.precision
        converts_output = type(precision).convert_output is not Precision.convert_output
        if precision.has_forward_context or precision.converts_input or converts_output:
            run = _in_precision(run, precision, converts_output=converts_output)
        if not self._scales:
            return run
        from .wrappers import demand_scaled_backward

        return lambda *args, **kwargs: demand_scaled_backward(run(*args, **kwargs), self)

    def bind_step(self, module: nn.Module, name: str) -> Callable[..., Any]:
        """Return what runs `module.<name>` in this precision and under the strategy's hooks.

        In full precision on one device it is the module's very method.

        Args:
            module: What `setup_module` returned.
            name: Name of a method, such as "training_step".
        """
        step = self.strategy.bind_step(bare(module), name)
        precision = self.precision
        if not (precision.has_forward_context or precision.converts_input or precision.converts_output):
            return step
        return _in_precision(step, precision, converts_output=precision.converts_output)

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are made on the device and in the precision's dtype."""
        return _both(self.device, self.precision.tensor_init_context())

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which a module's parameters are made on the device and in the precision's dtype.

        Args:
            empty_init: True leaves parameters without values, for a checkpoint that is loaded next; None leaves the
                choice to the strategy, which on one device initialises.
        """
        self._require_launch("init_module")
        return _both(self.precision.module_init_context(), self.strategy.init_context(empty_init))

    # -- hot path ------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor | NoLoss, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Compute gradients; with a loss scale, of the scaled loss; within `accumulate`, of the loss's share.

        Args:
            tensor: A loss, shape ().
            args: Further arguments of `Tensor.backward`.
            model: Only engines with several models need it.
            kwargs: Further keyword arguments of `Tensor.backward`.
        """
        # A step on several ranks that returned None takes part all the same. (isinstance costs more, at every step.)
        loss: Tensor = tensor.zero if tensor.__class__ is NoLoss else tensor  # type: ignore[assignment]
        if self._divisor is not None:
            loss = self._share_of_window(loss)
        if not self._scales:
            self.strategy.backward(loss, *args, **kwargs)
            return
        self._is_in_backward = True
        try:
            self.strategy.backward(self.precision.scale_loss(loss), *args, **kwargs)
        finally:
            self._is_in_backward = False

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step the optimizer.

        Returns:
            Whether the step was made: False if a loss scale is in use and a gradient is infinite or NaN.
        """
        optimizer = optimizer.__dict__.get("_without_fabric", optimizer)  # `bare`, without its call
        if self._precision_steps:
            return self.precision.optimizer_step(optimizer, closure)
        return self.strategy.optimizer_step(optimizer, closure)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Bring gradients to their true size, to clip or read them; do nothing the second time, or without a scale."""
        if self._unscales:
            self.precision.unscale_gradients(bare(optimizer))

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
        module, optimizer = bare(module), bare(optimizer)
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
        return self._move_batch(obj, self.device)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not reduce gradients over ranks, for accumulation.

        Args:
            module: What `setup_module` returned.
            enabled: False does nothing, so that the call can stand in a loop.
        """
        return self.strategy.no_backward_sync(bare(module), enabled)

    # -- accumulation --------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the last micro-batch under `accumulate` ended its window; True where nothing is accumulated."""
        return self._window is None or self._window.is_last

    @contextmanager
    def accumulate(self, *models: nn.Module, steps: int = 1) -> Iterator[None]:
        """Run one micro-batch as a part of a window of `steps`, whose gradients make one optimizer step.

        Within the block `backward` counts a loss as one part in the number of micro-batches of the window, gradients
        are reduced over ranks at its last one only, and `step` and `zero_grad` of optimizers (and `step` of a schedule
        given to `setup`) do nothing before that. The last micro-batch of a pass over a loader of `setup_dataloaders`
        ends its window, which is then shorter; its losses are weighed by the micro-batches that it has.

        Args:
            models: What `setup` returned, whose gradients are accumulated.
            steps: Micro-batches of a window.

        Raises:
            ConfigError: There is no model, or `steps` is no whole number of 1 or more.
        """
        if not models:
            raise ConfigError(
                "Fabric.accumulate was given no model.", fix="pass what setup returned: fabric.accumulate(model)."
            )
        if self._accumulation is None:
            from .accumulation import Accumulation

            self._accumulation = Accumulation()
        inner = tuple(bare(model) for model in models)
        window = self._window = self._accumulation.next_batch(inner, steps, self._reader)
        with ExitStack() as stack:
            if not window.is_last:
                for model in inner:
                    stack.enter_context(self.strategy.no_backward_sync(model))
            before, self._divisor = self._divisor, window.size
            try:
                yield
            finally:
                self._divisor = before

    def accumulation_steps(self, dataloader: Any, global_batch_size: int) -> int:  # Any: any loader
        """Return the `steps` of `accumulate` with which a step takes so many samples over all ranks.

        Args:
            dataloader: The training loader, set up or not; its batch size is that of one rank's micro-batch.
            global_batch_size: Samples per optimizer step.

        Raises:
            ConfigError: The loader does not say its batch size, or that times the number of ranks does not divide;
                names the nearest values that work.
        """
        from .dataloaders import FabricDataLoader  # not imported where nobody asks
        from .global_batch import accumulation_steps, micro_batch_size

        if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
            raise ConfigError(
                f"Fabric.accumulation_steps was given global_batch_size={global_batch_size!r}.",
                fix="pass a whole number >= 1.",
            )
        loader = dataloader.loader if isinstance(dataloader, FabricDataLoader) else dataloader
        size = micro_batch_size(loader)
        return accumulation_steps(global_batch_size, size, self.strategy.topology.data_size, loader=loader)

    def _share_of_window(self, loss: Tensor) -> Tensor:
        assert self._window is not None
        assert self._divisor is not None
        self._window.has_gradients = True
        return loss if self._divisor == 1 else loss / self._divisor

    def _drop_window(self) -> None:
        if self._window is not None and self._accumulation is not None:
            self._accumulation.forget(self._window)
        self._window = None

    # -- collectives ---------------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as the built-in does, on local rank 0 of each node."""
        if self.local_rank == 0:
            builtins.print(*args, **kwargs)  # noqa: T201

    # Any: data of any structure, and process groups, which are of the backend's own type.

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here."""
        self._require_launch("barrier")
        self.strategy.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object, which can be of any kind."""
        self._require_launch("broadcast")
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return data of all ranks: tensors (and numbers) are stacked along a new first dimension, of `world_size`.

        On a single device the data itself is returned.

        Args:
            data: A tensor or number, or any structure of them, with the same shapes on all ranks.
            group: Ranks that take part; None for all.
            sync_grads: Let gradients flow back through the gathering.
        """
        self._require_launch("all_gather")
        return self.strategy.all_gather(data, group=group, sync_grads=sync_grads)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return data reduced over ranks. On a single device the data itself is returned.

        Args:
            data: A tensor or number, or any structure of them, with the same shapes on all ranks.
            group: Ranks that take part; None for all.
            reduce_op: "mean" (or "avg"), "sum", "min", "max", "product", or a `torch.distributed.ReduceOp`.
        """
        self._require_launch("all_reduce")
        return self.strategy.all_reduce(data, group=group, reduce_op=reduce_op)

    reduce = all_reduce

    def reduce_scatter(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return this rank's part of data reduced over ranks: of `n` ranks, rank `i` has the i-th n-th of dimension 0.

        No gradient flows back. On a single device the data itself is returned.

        Args:
            data: A tensor, or any structure of tensors, with the same shapes on all ranks; dimension 0 is a multiple of
                their number.
            group: Ranks that take part; None for all.
            reduce_op: As in `all_reduce`.

        Raises:
            ConfigError: The operation is unknown, or dimension 0 does not divide.
        """
        self._require_launch("reduce_scatter")
        return self.strategy.reduce_scatter(data, group=group, reduce_op=reduce_op)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Return what all ranks have, joined along the first dimension in the order of ranks, for exact metrics.

        Ranks may have different numbers of samples, or none: nothing was padded, so nothing is cut off. Within an
        evaluation over a loader of `setup_dataloaders` call it in every round or after the loop; a rank that has no
        batch left answers by itself. In every round, the order is that of the data.

        Args:
            data: A tensor, or a structure of tensors; tensors of shape () are stacked. Lists without tensors are
                joined. None stands for no data.
            use_gather_object: Accepted for compatibility; objects of any kind are gathered anyway.

        Returns:
            The joined data, on the device, the same on all ranks. On a single device the data itself.
        """
        self._require_launch("gather_for_metrics")
        if self.world_size == 1:
            return data
        from .dataloaders import gather_samples

        return gather_samples(self, data)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a context whose block rank 0 runs first, then all others.

        If it fails on the first rank, all ranks raise that, and the others do not run it.

        Args:
            local: The first rank of each node goes first, rather than global rank 0 alone.
        """
        self._require_launch("rank_zero_first")
        if self.world_size == 1:
            return nullcontext()
        from .on_all_ranks import first_then_rest

        is_first = (self.local_rank if local else self.global_rank) == 0
        return first_then_rest(self.strategy, is_first=is_first)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(
        self,
        path: Any,  # Any: a string, a path object, or a URL
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint, and wait for it on all ranks. Call it on all ranks.

        Rank 0 writes one file; where the strategy shards, and was not told `state_dict_type="full"`, all ranks write a
        folder. An error on one rank, a full disk say, is raised on all.

        With `AsyncCheckpointIO` this returns as soon as the state is copied. The checkpoint is complete when the next
        `save`, a `load` or `teardown` returns. A save that failed is raised by the next `save`, by a `load` of the same
        path, else by `teardown`; and logged at once.

        Args:
            path: The file or folder.
            state: Modules, optimizers and other `Stateful` objects are replaced by their state; the rest is plain.
            filter: For a key of `state`, a function of (name, value) that says which entries of its state are kept.

        Raises:
            ConfigError: The filter names what is not in the state, or is no function.
        """
        self._require_launch("save")

        def write() -> None:
            content = collect_state(self.strategy, state, filter)
            has_own_part = self.strategy.saves_shards("sharded")
            if not has_own_part:
                content = self.strategy.gather_state(content)
            if has_own_part or self.is_global_zero:
                self.checkpoint_io.save_checkpoint(content, path)

        self._run_on_all_ranks(write)

    def load(
        self, path: Any, state: dict[str, Any] | None = None, strict: bool = True, *, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, after waiting for saves in the background. Call it on all ranks.

        Both forms load under every strategy and on any number of ranks. Where the strategy shards, each rank reads its
        parts only, and verifies its share of the files. An error on one rank is raised on all.

        Args:
            path: The file or folder.
            state: Modules, optimizers and `Stateful` objects in it are loaded in place, other entries replaced; None
                gives the whole file.
            strict: Whether a key of `state` that is not in the file is an error; also given to modules.
            weights_only: False reads any pickled object, which can run code: only for files that you trust. None is
                True.

        Returns:
            The entries of the file that are not in `state`.

        Raises:
            CheckpointError: Keys are missing (all are named), or a state does not fit its object.
        """
        self._require_launch("load")

        content = dict(self._read(path, weights_only))
        if state is None:
            return content
        rest: dict[str, Any] = self._run_on_all_ranks(
            lambda: put_back_state(self.strategy, content, state, strict=strict, where=str(path))
        )
        return rest

    def load_raw(self, path: Any, obj: Any, strict: bool = True, *, weights_only: bool | None = None) -> None:
        """Load a file that holds the bare state of one module, optimizer or other `Stateful` object.

        Call it on all ranks; an error on one is raised on all.

        Args:
            path: The file.
            obj: Loaded in place.
            strict: For a module: whether missing and unexpected keys are an error.
            weights_only: False reads any pickled object, which can run code: only for files that you trust. None is
                True.

        Raises:
            ConfigError: The object has no state.
            CheckpointError: The state does not fit.
        """
        self._require_launch("load_raw")

        content = self._read(path, weights_only)

        def load() -> None:
            if not put_back(self.strategy, obj, content, strict):
                raise ConfigError(
                    f"Fabric.load_raw was given {obj!r}, which has no load_state_dict.",
                    fix="pass a module or optimizer.",
                )

        self._run_on_all_ranks(load)

    def _read(self, path: Any, weights_only: bool | None) -> Any:
        from ..checkpoint.reading import Ranks, read_on_all_ranks  # not imported where no file is read

        return read_on_all_ranks(
            self.checkpoint_io,
            path,
            Ranks(self.global_rank, self.world_size, self.strategy.gather_objects, self._run_on_all_ranks),
            is_safe=weights_only is not False,
            by_parts=self.strategy.shards_parameters,
        )

    def _run_on_all_ranks(self, function: Callable[[], Any]) -> Any:
        """Call the function on every rank; an error on one is raised on all."""
        if self.world_size == 1:
            return function()
        from .on_all_ranks import run_on_all_ranks

        return run_on_all_ranks(self.strategy, function)

    # -- callbacks, loggers, seed --------------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Any]:  # Any: see __init__
        """The callbacks, those of installed packages last; the list may be changed."""
        if not self._has_found_callbacks:  # when they are asked for: finding them takes some milliseconds
            from .checks import installed_callbacks

            self._has_found_callbacks = True
            self._callbacks += installed_callbacks()
        return self._callbacks

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method on every callback that has it; keyword arguments that it does not take are left out.

        A `loopwright.Module` that was set up hears what its methods are named after, too, after the callbacks.

        Args:
            hook_name: Any name.
            args: Given to all.
            kwargs: Given to those that take them.
        """
        for callback in (*self.callbacks, *self._listeners):
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                warnings.warn(f"{type(callback).__name__}.{hook_name} is no method; it is not called.", stacklevel=2)
                continue
            method(*args, **_accepted(method, kwargs))

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Send one number to every logger, on rank 0; see `log_dict`."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send numbers to every logger, as Python numbers, on rank 0. Reads tensors on the host.

        They are rank 0's own: reduce them first where they differ between ranks.

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
        if not self.is_global_zero:
            return
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


def _in_precision(step: Callable[..., Any], precision: Precision, *, converts_output: bool) -> Callable[..., Any]:
    """Return the step with inputs cast, in the precision's context."""
    context = precision.forward_context
    converts_input, convert_input = precision.converts_input, precision.convert_input
    convert_output = precision.convert_output

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


def _move_placed(place: Callable[[Any], Any], batch: Any, device: torch.device) -> Any:
    """Return a batch on the device, of a strategy that sends tensors there by itself."""
    return move_to_device(place(batch), device)


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


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that was compiled, so that names of parameters are the user's own."""
    original: nn.Module = module.__dict__.get("_modules", {}).get("_orig_mod", module)
    return original


def _named(strategy: Any) -> str:
    return f"the strategy {type(strategy).__name__}"


def _do_nothing(fabric: Fabric) -> None:
    """What `launch` runs without a function; at the top of the file, so that it can be pickled."""


def _call_run(fabric: Fabric, *args: Any, **kwargs: Any) -> Any:
    return fabric.run(*args, **kwargs)


def _launching(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a subclass's `run` so that the processes are started first."""

    @functools.wraps(run)
    def launched(self: Fabric, *args: Any, **kwargs: Any) -> Any:
        if self._is_set_up:
            return run(self, *args, **kwargs)
        return self.launch(_call_run, *args, **kwargs)

    return launched
