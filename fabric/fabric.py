"""`Fabric`: accelerator, strategy, precision and processes behind one small API."""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

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
from ..checkpoint import TorchCheckpointIO
from ..checkpoint.checkpoint_io import before_next_step
from ..console import show_logs
from ..data.hparams import without_omegaconf
from ..data.move import move_to_device
from ..deferred_compiler import defer_compiler_of_optimizers
from ..errors import ArgumentTypeError, ChecksKeywords, ConfigError, LaunchError
from ..messages import warn
from ..precision import MixedPrecision, Precision
from ..precision.base import compute_gradients
from ..protocols import Closure
from ..strategies import NoLoss, SingleDeviceStrategy, Strategy
from ..strategies.adaptive_clipping import clip_adaptively, refuse_engine
from ..strategies.joint_optimizer import JointOptimizer
from ..strategies.optional import ChecksProcesses, PlacesBatches, SetsUpTogether, saves_shards, written_state
from ..tracebacks import show_trimmed
from .launch import InProcessLauncher
from .modules import compiled, converted, run_by, uncompiled
from .resolve import Environment, Parts, resolve
from .seed import choose_rank_states, merge_rank_states, seed_everything
from .state import bare, collect_state, put_back, put_back_state

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from ..accelerators import Accelerator
    from ..protocols import (
        AnyOutput,
        Batch,
        CheckpointPlugin,
        Cluster,
        Devices,
        ReduceOp,
        StateDict,
        StepFunction,
        Tree,
    )
    from .accumulation import Accumulation, Reader, Window
    from .dataloaders import EvaluationPass
    from .watch import Watch
    from .wrappers import FabricModule

log = logging.getLogger(__name__)

T = TypeVar("T")


class Fabric(ChecksKeywords):
    """Runs a handwritten loop on any device, precision and number of processes; the low-level API of Trainer.

    A subclass may define `run(self, ...)`: calling it starts the processes first.

    Args:
        accelerator: Name of the accelerator ("auto", "gpu", "cpu", "cuda", "mps", "tpu") or an Accelerator.
        strategy: "auto", name of a registered strategy, or a Strategy.
        devices: Number of devices per node, -1 for all, indices as a list or string, or "auto".
        num_nodes: Number of nodes (machines).
        precision: Numeric precision: "32-true", "64-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed",
            "float8" or "mxfp8". None is the precision of a plugin or the strategy, else "32-true".
        plugins: Instances of Precision, CheckpointIO, ClusterEnvironment or LayerSync, at most one of each.
        callbacks: Objects whose methods `call` invokes. Installed packages may add more: the entry point group
            "loopwright.fabric.callbacks_factory" names functions that return a callback or a list of them.
        loggers: Loggers for `log`.
        matmul_precision: Precision of float32 matrix products from `launch` (or the first `setup`) to `teardown`:
            "highest", "high" (tf32 where the device has it) or "medium" (bfloat16); None keeps torch's setting.
        when_short: What is done if this machine has fewer devices than `devices`: "raise" an error, or use "fewer".

    Raises:
        ConfigError: Arguments are invalid, alone or in combination; all problems are named.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        plugins: object = None,  # object, here and below: one or several, of classes of the user's
        callbacks: object = None,
        loggers: object = None,
        matmul_precision: str | None = None,
        when_short: str = "raise",
    ) -> None:
        show_trimmed()
        lists = {"devices": devices, "plugins": plugins, "callbacks": callbacks, "loggers": loggers}
        devices, plugins, callbacks, loggers = without_omegaconf(lists).values()
        if matmul_precision not in (None, *MATMUL_PRECISIONS):
            raise ConfigError(
                f"Expected matmul_precision to be one of {', '.join(map(repr, MATMUL_PRECISIONS))} or None, "
                f"got {matmul_precision!r}.",
                fix="pass one of these values.",
            )
        parts = resolve(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            when_short=when_short,
        )
        self._assemble(parts, callbacks=callbacks, loggers=loggers, matmul_precision=matmul_precision)

    @classmethod
    def of_this_process(cls, device: torch.device, precision: Precision) -> Fabric:
        """Return a Fabric for this process alone, regardless of how it was started.

        The environment variables of launchers (torchrun, SLURM, MPI, `loopwright launch`) are ignored.

        Args:
            device: The device to use.
            precision: The precision, which is not copied.
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

    def _assemble(self, parts: Parts, *, callbacks: object, loggers: object, matmul_precision: str | None) -> None:
        """Adopt the parts, and pass them to the strategy."""
        self._matmul_precision = matmul_precision
        self._matmul_before: MatmulState | None = None
        for message in parts.warnings:
            warn(message)
        show_logs()
        for message in parts.notes:
            log.info(message)
        self.accelerator = parts.accelerator
        self.precision = parts.precision
        self.num_nodes = parts.num_nodes
        self.devices = parts.devices
        self.launcher = parts.launcher
        self.layer_sync = parts.layer_sync
        self._callbacks: list[object] = _as_list(callbacks)  # any object with methods
        self._has_found_callbacks = False
        self.loggers: list[Any] = _as_list(loggers)  # Any: a logger's package lies above this one
        self._cluster, self._checkpoint_io = parts.cluster_environment, parts.checkpoint_io
        self._take_strategy(parts.strategy)
        # Whether the strategy may still be replaced: see `adopt_strategy`.
        self.leaves_choice = parts.leaves_choice
        # Whether strategy and launcher support several processes, even if one was requested.
        self._is_one_of_several = self.strategy.start_method is not None and (
            type(self.launcher) is not InProcessLauncher
        )
        self._join_world()
        defer_compiler_of_optimizers()
        if isinstance(self.launcher, InProcessLauncher):
            self.launcher.prepare()
        self.device: torch.device = self.strategy.device
        self._is_set_up = False
        # Whether this process has been connected with the other ranks.
        self.is_connected = False
        # Watch over the other ranks; None with one process, before they are connected, and where they have no store.
        self.watch: Watch | None = None
        self._listeners: list[nn.Module] = []
        self._accumulation: Accumulation | None = None
        # The window of the last micro-batch under `accumulate`, and the loss's divisor within its block.
        self._window: Window | None = None
        self._divisor: int | None = None
        self._is_in_backward = False
        # Whether `no_backward_sync` was used since an optimizer of `setup` has stepped.
        self._is_accumulating = False
        # The loader of the current training pass, and the current evaluation.
        self._reader: Reader | None = None
        self._evaluation: EvaluationPass | None = None
        # Determined once: the hot path calls no method that does nothing.
        self._scales = _does_something(self.precision, "scale_loss")
        self._unscales = _does_something(self.precision, "unscale_gradients")
        # A layer whose precision steps elsewhere sets it to False.
        self.steps_by_precision = _does_something(self.precision, "optimizer_step")

    def _take_strategy(self, strategy: Strategy) -> None:
        """Let a strategy have the other parts, and use it."""
        self.strategy = strategy
        strategy.fill(
            accelerator=self.accelerator,
            precision=self.precision,
            device=self.devices[0],
            parallel_devices=list(self.devices),
            cluster_environment=self._cluster,
            checkpoint_io=self._checkpoint_io,
            make_checkpoint_io=TorchCheckpointIO,
        )
        # (batch, device) -> batch on the device: `to_device` for anything but a module.
        self.move_batch = move_to_device
        if isinstance(strategy, PlacesBatches):
            self.move_batch = functools.partial(_move_placed, strategy.place_batch)

    def adopt_strategy(self, strategy: Strategy) -> None:
        """Replace the strategy by one for the same processes and devices, on every rank, while no module is set up.

        Args:
            strategy: A new strategy with the start method of the present one.

        Raises:
            ConfigError: It cannot use this number of processes.
        """
        if isinstance(strategy, ChecksProcesses):
            strategy.check_processes(self.world_size, self.num_nodes)
        self._checkpoint_io = self.strategy.checkpoint_io
        self._take_strategy(strategy)
        if self._is_set_up:
            strategy.setup_environment()

    def __init_subclass__(cls, **kwargs: object) -> None:
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
            ConfigError: There is no logger.
        """
        if not self.loggers:
            raise ConfigError("Expected a logger, got a Fabric without one.", fix="pass Fabric(loggers=...).")
        return self.loggers[0]

    @property
    def checkpoint_io(self) -> CheckpointPlugin:
        """The checkpoint IO."""
        checkpoint_io = self.strategy.checkpoint_io
        assert checkpoint_io is not None  # `fill` set one
        return checkpoint_io

    @property
    def cluster_environment(self) -> Cluster | None:
        """The cluster environment, with ranks and addresses; None with one process."""
        return self._cluster

    # -- processes -----------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and call `function(fabric, *args, **kwargs)` in each.

        If the processes exist already (torchrun, SLURM, `loopwright launch`) or one is enough, no process is started,
        and calling `launch` is optional. Later calls run their function in the existing processes.

        Args:
            function: Function with the Fabric as its first parameter. None starts the processes, which all continue
                after this call. Required for strategies that spawn or fork.
            args: Further positional arguments.
            kwargs: Further keyword arguments.

        Returns:
            The function's result in this process; rank 0's result in a process that spawned or forked the others. None
            without a function.

        Raises:
            ConfigError: The function is missing, not callable, or takes no argument.
        """
        if function is None:
            if getattr(self.launcher, "starts_processes", False) and not self._is_set_up:
                raise ConfigError(
                    f"Expected a function for Fabric.launch with {_named(self.strategy)}, got None: the function runs "
                    "in new processes, and code after this call does not.",
                    fix="put the training into a function and call fabric.launch(main), with def main(fabric, ...).",
                )
            function, args, kwargs = _do_nothing, (), {}
        elif not callable(function):
            raise ArgumentTypeError(f"Expected a function for Fabric.launch, got {function!r}.", fix="pass a function.")
        elif not _takes_arguments(function):
            raise ConfigError(
                f"Expected a function with a parameter for Fabric.launch, got {function!r}, which takes no arguments.",
                fix="let its first parameter be the Fabric: def main(fabric, ...).",
            )
        if self._is_set_up:
            return function(self, *args, **kwargs)
        return self.launcher.launch(self._run_launched, function, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> AnyOutput:
        """Do nothing; meant to be overridden. Calling it starts the processes first, as `launch` does.

        Args:
            args: Positional arguments of the subclass.
            kwargs: Keyword arguments of the subclass.
        """

    def _run_launched(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        self._setup_environment()
        return function(self, *args, **kwargs)

    def _setup_environment(self) -> None:
        """Connect this process with the others, once."""
        if not self._is_set_up:
            if self._matmul_precision is not None:
                self._matmul_before = capture_matmul_precision()
                set_matmul_precision(self._matmul_precision)
            self._join_world()
            self.strategy.setup_environment()
            self.device = self.strategy.device
            if self.world_size > 1:
                from .watch.shared import watch_over  # not imported where there is one process

                self.watch = watch_over(self.strategy, self.launcher)
            self._is_set_up = self.is_connected = True

    def _join_world(self) -> None:
        """Set rank and world size in the cluster environment, if Loopwright starts the processes."""
        cluster = self._cluster
        if cluster is not None and self._is_one_of_several:
            per_node = len(self.devices)
            cluster.set_world_size(self.num_nodes * per_node)
            cluster.set_global_rank(cluster.node_rank() * per_node + cluster.local_rank())

    def _require_launch(self, name: str) -> None:
        """Connect this process, unless processes have to be started first.

        Raises:
            LaunchError: Processes have to be started first.
        """
        if self._is_set_up:
            return
        are_there = self._cluster is not None and self._cluster.creates_processes_externally
        if self._is_one_of_several and not are_there:
            raise LaunchError(
                f"Expected Fabric.launch before Fabric.{name} with {_named(self.strategy)}, which starts processes.",
                fix="call fabric.launch() first, or put the training into a function and call fabric.launch(main).",
            )
        self.launcher.launch(self._setup_environment)

    def __getstate__(self) -> StateDict:
        # For spawned processes, which do not start others.
        return {**self.__dict__, "launcher": InProcessLauncher(), "_reader": None, "_evaluation": None}

    def teardown(self) -> None:
        """Release the resources of the strategy and the accelerator; the next use acquires them again."""
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
        compile: bool | Mapping[str, object] = False,
        _reapply_compile: bool = True,
    ) -> Any:  # Any: one object, or a tuple of as many as were given
        """Prepare a module and its optimizers for this precision and strategy.

        The module's forward runs in the precision and under the strategy's hooks, an optimizer's `step` through both.
        A module returned by `torch.compile` stays compiled, with its options, inside the strategy's wrapper.

        Args:
            module: The module, which is changed in place; use the returned object instead.
            optimizers: Optimizers of this module's parameters.
            scheduler: Learning rate scheduler of the optimizers, which steps only with them; see `accumulate`.
            move_to_device: Whether to move parameters and buffers to the device.
            compile: Whether to compile the module in place: True, or a dict of arguments of torch.compile. See
                docs/compile.md.
            _reapply_compile: Accepted for compatibility; a compiled module is always compiled again if possible.

        Returns:
            The module; with optimizers, a tuple of it and them; with a scheduler, the scheduler last.

        Raises:
            ConfigError: An object is set up already, on the meta device, or incompatible with the precision.
            LaunchError: The processes have not been started.
        """
        from .checks import check_module, check_optimizers, check_optimizers_of
        from .wrappers import FabricOptimizer, FabricScheduler

        self._require_launch("setup")
        check_module(module)
        check_optimizers("setup", optimizers)
        check_optimizers_of(module, optimizers)
        module = compiled(module, self.strategy, compile)
        module = converted(module, self.strategy, self.precision, moves=move_to_device)
        for optimizer in optimizers:
            self.precision.check_optimizer(optimizer)
        if isinstance(self.strategy, SetsUpTogether):
            running, ready = self.strategy.setup_module_and_optimizers(module, optimizers)
        else:
            running = run_by(self.strategy, module, moves=move_to_device)
            ready = [self.strategy.setup_optimizer(optimizer) for optimizer in optimizers]
        result: list[Any] = [self.wrap_module(running, uncompiled(module))]
        result += [FabricOptimizer.of(optimizer, self) for optimizer in ready]
        if scheduler is not None:
            result.append(FabricScheduler(scheduler, result[1:], self))
        self._announce(result[0], result[1 : 1 + len(ready)])
        return result[0] if len(result) == 1 else tuple(result)

    def setup_module(
        self,
        module: nn.Module,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
        *,
        compile: bool | Mapping[str, object] = False,
    ) -> Any:
        """Prepare a module for this precision and strategy; `setup` also takes its optimizers.

        Args:
            module: The module, which is changed in place; use the returned object instead.
            move_to_device: Whether to move parameters and buffers to the device.
            _reapply_compile: See `setup`.
            compile: See `setup`.

        Raises:
            ConfigError: It is set up already.
            LaunchError: The processes have not been started.
        """
        from .checks import check_module

        self._require_launch("setup_module")
        check_module(module)
        module = compiled(module, self.strategy, compile)
        module = converted(module, self.strategy, self.precision, moves=move_to_device)
        wrapped = self.wrap_module(run_by(self.strategy, module, moves=move_to_device), uncompiled(module))
        self._announce(wrapped)
        return wrapped

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:  # Any: one, or a tuple if several were given
        """Prepare optimizers: `step` goes through strategy and precision.

        Returns:
            The optimizer, or a tuple of several.

        Raises:
            ConfigError: There is no optimizer, or one is set up already, has parameters on the meta device, or is
                incompatible with the precision.
            LaunchError: The processes have not been started.
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
        *dataloaders: object,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        uneven: str | None = None,
    ) -> Any:  # Any: one, or a list if several were given
        """Prepare loaders: each process reads its share, with batches on the device.

        The loader is not recreated; its sampler, batch sampler, collation and workers stay unchanged. Batches are
        distributed: of every `world_size` batches each process gets one, so `batch_size` counts the samples of one
        process. Loaders with a rank-aware sampler, and iterables that cannot be distributed, are unchanged. `set_epoch`
        is called with the number of started passes.

        Args:
            dataloaders: The loaders, in the same order in all processes.
            use_distributed_sampler: Whether to distribute batches over processes; False gives each process all of them.
            move_to_device: Whether to move batches to the device.
            uneven: Handling of a number of batches that does not divide by the number of processes: "stop_all" drops
                the last ones, "cycle" repeats the first ones, "keep" returns every batch once, so that some processes
                get one less. None means "keep" within `torch.no_grad()`, and else the strategy's setting.

        Returns:
            The loader, or a list of several.

        Raises:
            ConfigError: There is no loader, or one is set up already.
            ModuleError: One cannot be iterated.
            LaunchError: The processes have not been started.
        """
        from .checks import refuse_wrapped
        from .dataloaders import FabricDataLoader

        self._require_launch("setup_dataloaders")
        if not dataloaders:
            raise ConfigError("Expected a loader for Fabric.setup_dataloaders, got none.", fix="pass at least one.")
        refuse_wrapped("setup_dataloaders", dataloaders)
        ready = [
            FabricDataLoader(self, loader, is_dealt=use_distributed_sampler, moves=move_to_device, uneven=uneven)
            for loader in dataloaders
        ]
        return ready[0] if len(ready) == 1 else ready

    def prepare_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        """Prepare a module as `setup_module` does, without Fabric's wrapper; on one device, return the module itself.

        For a loop that runs the module through `bind_step` and calls `backward`, `clip_gradients` and
        `optimizer_step` itself, as the Trainer does.

        Args:
            module: The module, which is changed in place.
            move_to_device: Whether to move parameters and buffers to the device.
        """
        self._require_launch("prepare_module")
        module = converted(module, self.strategy, self.precision, moves=move_to_device)
        return run_by(self.strategy, module, moves=move_to_device)

    def prepare_optimizers(self, *optimizers: Optimizer) -> tuple[Optimizer, ...]:
        """Prepare optimizers as `setup_optimizers` does, without Fabric's wrappers.

        Raises:
            ConfigError: There is no optimizer, or one is incompatible with the precision.
        """
        if not optimizers:
            raise ConfigError("Expected an optimizer, got none.", fix="pass at least one.")
        for optimizer in optimizers:
            self.precision.check_optimizer(optimizer)
        return tuple(self.strategy.setup_optimizer(optimizer) for optimizer in optimizers)

    # Any: a FabricModule and its FabricOptimizers, imported where they are made
    def _announce(self, module: Any, optimizers: Sequence[Any] = ()) -> None:
        """Notify the callbacks, and the user's module if it is a `loopwright.Module`, of the setup."""
        original = module.module
        if isinstance(getattr(type(original), "fabric", None), property):
            original.fabric = self
            original.__dict__["_lw_fabric_optimizers"] = list(optimizers)
            if original not in self._listeners:
                self._listeners.append(original)
        self.call("on_after_setup", fabric=self, module=module)

    def wrap_module(self, running: nn.Module, original: nn.Module) -> FabricModule:
        """Return the wrapper of a module; a subclass may have one of another class.

        Args:
            running: The module as the strategy returned it.
            original: The user's module.
        """
        from .wrappers import FabricModule

        return FabricModule(running, original, self)

    def bind_call(self, module: nn.Module, name: str) -> Callable[..., object]:
        """Return a function that runs a method of a `FabricModule` in this precision and strategy.

        Called once per method; a subclass may return another function.

        Args:
            module: The module as the strategy returned it.
            name: Name of the method.
        """
        run = self.strategy.bind_step(module, name)
        precision = self.precision
        converts_output = type(precision).convert_output is not Precision.convert_output
        if precision.has_forward_context or precision.converts_input or converts_output:
            run = _in_precision(run, precision, converts_output=converts_output)
        if not self._scales:
            return run
        from .wrappers import demand_scaled_backward

        return lambda *args, **kwargs: demand_scaled_backward(run(*args, **kwargs), self)

    def bind_step(self, module: nn.Module, name: str) -> StepFunction:
        """Return a function that runs `module.<name>` in this precision and under the strategy's hooks.

        In full precision on one device it is the module's own method.

        Args:
            module: The module returned by `setup_module`.
            name: Name of the method, such as "training_step".
        """
        step = self.strategy.bind_step(bare(module), name)
        precision = self.precision
        if not (precision.has_forward_context or precision.converts_input or precision.converts_output):
            return step
        return _in_precision(step, precision, converts_output=precision.converts_output)

    def init_tensor(self) -> AbstractContextManager[object]:
        """Return a context that creates tensors on the device and in the precision's dtype."""
        return _both(self.device, self.precision.tensor_init_context())

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[object]:
        """Return a context that creates module parameters on the device and in the precision's dtype.

        Args:
            empty_init: Whether to leave parameters uninitialized, for a checkpoint that is loaded next; None for the
                strategy's default, which on one device initializes them.
        """
        self._require_launch("init_module")
        return _both(self.precision.module_init_context(), self.strategy.init_context(empty_init))

    # -- hot path ------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor | NoLoss, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Compute gradients of the loss, scaled by the loss scale and, within `accumulate`, by its share of the window.

        Args:
            tensor: The loss, of shape ().
            args: Positional arguments of `Tensor.backward`.
            model: The model, for engines with several models.
            kwargs: Keyword arguments of `Tensor.backward`.
        """
        # A step on several ranks that returned None takes part as well. (isinstance costs more, at every step.)
        loss: Tensor = tensor.zero if tensor.__class__ is NoLoss else tensor  # type: ignore[assignment]
        if self._divisor is not None and self._window is not None:
            self._window.has_gradients = True
            loss = loss if self._divisor == 1 else loss / self._divisor
        if not self._scales:
            self.strategy.backward(loss, *args, **kwargs)
            return
        self._is_in_backward = True
        try:
            self.strategy.backward(self.precision.scale_loss(loss), *args, **kwargs)
        finally:
            self._is_in_backward = False

    def bind_backward(self) -> Callable[[Tensor], None]:
        """Return a function that does what `backward` does outside `accumulate`; a Trainer binds it once."""
        if self._scales:
            return self.backward
        backward = self.strategy.backward
        is_plain = getattr(backward, "__func__", None) is Strategy.backward
        return compute_gradients if is_plain else backward

    def optimizer_step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step the optimizer.

        Returns:
            Whether the step was made; False if a loss scale is used and a gradient is infinite or NaN.
        """
        optimizer = optimizer.__dict__.get("_without_fabric", optimizer)  # `bare`, without its call
        if before_next_step:  # a save in the background still copies what the step changes
            for finish in tuple(before_next_step):
                finish()
        if self.steps_by_precision:
            return self.precision.optimizer_step(optimizer, closure=closure)
        return self.strategy.optimizer_step(optimizer, closure=closure)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide gradients by the loss scale, to clip or read them; do nothing on a second call or without a scale."""
        if self._unscales:
            self.precision.unscale_gradients(bare(optimizer))

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer | list[Optimizer] | tuple[Optimizer, ...],
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
        *,
        agc_factor: float | None = None,
    ) -> Tensor | None:
        """Unscale and clip the gradients of the optimizer's parameters, in place: by element, total norm, or unit.

        Args:
            module: The module returned by `setup_module`.
            optimizer: The optimizer whose parameters' gradients are clipped; or several that step after one loss, whose
                norm is that of all of their parameters. With a loss scale, an overflow in one skips all of their steps.
            clip_val: Maximum absolute value of an element.
            max_norm: Maximum total norm.
            norm_type: Order of the norm.
            error_if_nonfinite: Whether to raise if the norm is infinite or NaN, which reads it on the host. With a loss
                scale such a norm is not an error: the step is skipped.
            agc_factor: Maximum of each unit's gradient norm as a share of the norm of its weights (adaptive clipping).
                A unit is a row of a matrix, a filter, or a vector. Parameter groups with `agc=False` are left out.

        Returns:
            With `max_norm`, the norm before clipping: shape (), on the device. Otherwise None.

        Raises:
            ConfigError: Not exactly one of `clip_val`, `max_norm` and `agc_factor` is set and positive; or the strategy
                does not support `agc_factor`.
            NonFiniteError: The norm is not finite; see `error_if_nonfinite`.
        """
        limits = {"clip_val": clip_val, "max_norm": max_norm, "agc_factor": agc_factor}
        given = [one for one in limits.values() if one is not None]
        if len(given) != 1 or isinstance(given[0], str) or not given[0] > 0:
            got = ", ".join(f"{name}={value!r}" for name, value in limits.items())
            raise ConfigError(
                f"Expected a positive clip_val, max_norm or agc_factor for Fabric.clip_gradients, got {got}.",
                fix="pass a positive number for exactly one of them.",
            )
        module = bare(module)
        several = [bare(one) for one in optimizer] if isinstance(optimizer, list | tuple) else None
        optimizer = bare(optimizer) if several is None else self._joint(several)
        if self._unscales:
            for one in several or [optimizer]:
                self.precision.unscale_gradients(one)
            if several is not None:
                self.precision.skip_together(several)
        if agc_factor is not None:
            strategy = self.strategy
            refuse_engine(type(strategy).__name__, owns_optimizers=strategy.traits.owns_optimizers)
            clip_adaptively(optimizer, agc_factor)
            return None
        if max_norm is None:
            self.strategy.clip_gradients_value(module, optimizer, given[0])
            return None
        return self.strategy.clip_gradients_norm(
            module, optimizer, max_norm, norm_type, error_if_nonfinite and not self.precision.has_scaler
        )

    def _joint(self, optimizers: list[Optimizer]) -> Optimizer:
        """Return several optimizers as one, for clipping."""
        if not optimizers or (self.strategy.traits.owns_optimizers and len(optimizers) > 1):
            name, got = type(self.strategy).__name__, ", ".join(type(one).__name__ for one in optimizers) or "none"
            raise ConfigError(
                f"Expected one optimizer or several for Fabric.clip_gradients, and one with an engine, got {got} with "
                f"{name}.",
                fix="pass the optimizers that setup returned; with an engine, one with several parameter groups.",
            )
        return optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of forward passes in this precision."""
        return self.precision.forward_context()

    def to_device(self, obj: T) -> T:
        """Return the module (moved in place) or the data on the device, without a copy if it is already there."""
        if isinstance(obj, nn.Module):
            self.strategy.module_to_device(obj)
            return obj
        moved: T = self.move_batch(obj, self.device)
        return moved

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not reduce gradients over ranks, for accumulation.

        Args:
            module: The module returned by `setup_module`.
            enabled: Whether to skip the reduction.
        """
        self._is_accumulating = enabled or self._is_accumulating
        return self.strategy.no_backward_sync(bare(module), enabled)

    # -- accumulation --------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the last micro-batch under `accumulate` ended its window; True without accumulation."""
        return self._window is None or self._window.is_last

    @contextmanager
    def accumulate(self, *models: nn.Module, steps: int = 1) -> Iterator[None]:
        """Run one micro-batch of a window of `steps`, whose gradients make one optimizer step.

        Within the block `backward` divides a loss by the number of micro-batches of the window. Gradients are reduced
        over ranks at the last micro-batch only; `step` and `zero_grad` of optimizers (and `step` of a scheduler given
        to `setup`) do nothing before that. The last micro-batch of a pass over a loader of `setup_dataloaders` ends its
        window, which is then shorter and divides by its own number of micro-batches.

        Args:
            models: Models returned by `setup`, whose gradients are accumulated.
            steps: Number of micro-batches in a window.

        Raises:
            ConfigError: There is no model, or `steps` is not an integer of 1 or more.
        """
        if not models:
            raise ConfigError(
                "Expected a model for Fabric.accumulate, got none.",
                fix="pass the prepared model: fabric.accumulate(model).",
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

    def accumulation_steps(self, dataloader: object, global_batch_size: int) -> int:
        """Return the `steps` of `accumulate` for a global batch size.

        Args:
            dataloader: The training loader, set up or not, whose batch size is that of one rank's micro-batch.
            global_batch_size: Number of samples per optimizer step, over all ranks.

        Raises:
            ConfigError: The loader has no batch size, or its product with the number of ranks does not divide the
                global batch size; the nearest valid values are named.
        """
        from .dataloaders import FabricDataLoader
        from .global_batch import accumulation_steps, micro_batch_size

        if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
            raise ConfigError(
                f"Expected an integer >= 1 for global_batch_size, got {global_batch_size!r}.",
                fix="pass the number of samples per optimizer step.",
            )
        loader = dataloader.loader if isinstance(dataloader, FabricDataLoader) else dataloader
        size = micro_batch_size(loader)
        return accumulation_steps(global_batch_size, size, self.strategy.topology.data_size, loader=loader)

    def _drop_window(self) -> None:
        if self._window is not None and self._accumulation is not None:
            self._accumulation.forget(self._window)
        self._window = None

    # -- collectives ---------------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call the built-in `print` on local rank 0 of each node."""
        if self.local_rank == 0:
            builtins.print(*args, **kwargs)  # noqa: T201

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this."""
        self._require_launch("barrier")
        self.strategy.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src`, of any picklable type."""
        self._require_launch("broadcast")
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: Tree, group: ProcessGroup | bool | None = None, sync_grads: bool = False) -> Any:
        """Return the data of all ranks: tensors and numbers are stacked along a new first dimension (`world_size`).

        On a single device the data itself is returned.

        Args:
            data: A tensor or number, or any structure of them, with the same shapes on all ranks.
            group: Process group; None for all ranks.
            sync_grads: Whether gradients flow back through the gather.
        """
        self._require_launch("all_gather")
        return self.strategy.all_gather(data, group=group, sync_grads=sync_grads)

    def all_reduce(self, data: Tree, group: ProcessGroup | str | None = None, reduce_op: ReduceOp = "mean") -> Any:
        """Return data reduced over ranks; on a single device the data itself.

        Args:
            data: A tensor or number, or any structure of them, with the same shapes on all ranks.
            group: Process group; None for all ranks.
            reduce_op: Reduction: "mean" (or "avg"), "sum", "min", "max", "product", or a `torch.distributed.ReduceOp`.
        """
        self._require_launch("all_reduce")
        return self.strategy.all_reduce(data, group=group, reduce_op=reduce_op)

    reduce = all_reduce

    def reduce_scatter(self, data: T, group: ProcessGroup | str | None = None, reduce_op: ReduceOp = "mean") -> T:
        """Return this rank's chunk of data reduced over ranks: rank `i` gets chunk `i` of dimension 0.

        No gradient flows back. On a single device the data itself is returned.

        Args:
            data: A tensor, or any structure of tensors, with the same shapes on all ranks; dimension 0 is a multiple of
                their number.
            group: Process group; None for all ranks.
            reduce_op: Reduction, as in `all_reduce`.

        Raises:
            ConfigError: The operation is unknown, or dimension 0 is not a multiple of the number of ranks.
        """
        self._require_launch("reduce_scatter")
        scattered: T = self.strategy.reduce_scatter(data, group=group, reduce_op=reduce_op)
        return scattered

    def gather_for_metrics(self, data: T, use_gather_object: bool = False) -> T:
        """Return the data of all ranks, concatenated along the first dimension in rank order, for exact metrics.

        Ranks may have different numbers of samples, or none; there is no padding. Within an evaluation over a loader of
        `setup_dataloaders` call it for every batch or after the loop; a rank without a batch takes part automatically.
        Called for every batch, it preserves the order of the data.

        Args:
            data: A tensor, or a structure of tensors; tensors of shape () are stacked. Lists without tensors are
                joined. None means no data.
            use_gather_object: Accepted for compatibility; objects of any kind are gathered anyway.

        Returns:
            The joined data on the device, the same on all ranks. On a single device the data itself.
        """
        self._require_launch("gather_for_metrics")
        if self.world_size == 1:
            return data
        from .dataloaders import gather_samples

        gathered: T = gather_samples(self, data)
        return gathered

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a context whose block runs on rank 0 first, then on all others.

        If it fails on the first rank, all ranks raise that error, and the others do not run it.

        Args:
            local: Whether the first rank of each node runs first, rather than global rank 0 only.
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
        path: str | Path,
        state: Mapping[str, object],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint and wait for it on all ranks. Called on all ranks.

        Rank 0 writes one file. If the strategy shards, all ranks write a folder, except with `state_dict_type="full"`.
        Plain values are written from rank 0, results of `rng_state` from all ranks. An error on one rank is raised on
        all.

        With `AsyncCheckpointIO` this returns when the state is copied. The checkpoint is complete when the next `save`,
        `load` or `teardown` returns. A failed save is logged at once, and raised by these.

        Args:
            path: File or folder.
            state: Modules, optimizers, other `Stateful` objects, and plain values.
            filter: Key of `state` -> function of (name, value): whether to save an entry.

        Raises:
            ConfigError: A key of the filter is not in the state, or its value is not a function. Or an optimizer is
                saved within a window of `accumulate`, whose gradients would be lost.
        """
        self._require_launch("save")

        def write() -> None:
            if self._accumulation is not None or self._is_accumulating:
                from .accumulation import refuse_within_window

                refuse_within_window(state, self._accumulation, is_accumulating=self._is_accumulating)
            content = collect_state(self.strategy, state, filter)
            if self.world_size > 1:
                from .wrappers import is_wrapped

                others = {name: content[name] for name, obj in state.items() if not is_wrapped(obj)}
                content |= merge_rank_states(others, self.strategy.gather_to_first)
            has_own_part = saves_shards(self.strategy, "sharded")
            content = written_state(self.strategy, content, "sharded")
            if has_own_part or self.is_global_zero:
                self.write_content(content, path)

        self._run_on_all_ranks(write)

    def write_content(self, content: StateDict, path: str | Path) -> None:
        """Write the content that `save` has collected; a subclass may change it first.

        Args:
            content: Tensors and plain values.
            path: A file, or the folder of a sharded checkpoint.
        """
        self.checkpoint_io.save_checkpoint(content, path)

    def load(
        self,
        path: str | Path,
        state: StateDict | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> StateDict:
        """Read a checkpoint, after waiting for background saves. Called on all ranks.

        Both formats load under every strategy and on any number of ranks. If the strategy shards, each rank reads only
        its shards, and verifies its share of the files. Each rank gets the `rng_state` that it saved. An error on one
        rank is raised on all.

        Args:
            path: File or folder.
            state: Modules, optimizers and `Stateful` objects to load in place; other values are replaced by the loaded
                ones. None returns the full content.
            strict: Whether a key of `state` that is missing in the file is an error; also passed to modules.
            weights_only: Whether to refuse pickled objects, which can run code; False only for trusted files. None
                means True.

        Returns:
            Entries of the file that are not in `state`.

        Raises:
            CheckpointError: Keys are missing (all are named), or a state does not fit its object.
        """
        self._require_launch("load")

        content = choose_rank_states(dict(self._read(path, weights_only)), self.global_rank)
        if state is None:
            return content
        return self._run_on_all_ranks(
            lambda: put_back_state(self.strategy, content, state, strict=strict, where=str(path))
        )

    def load_raw(self, path: str | Path, obj: Any, strict: bool = True, *, weights_only: bool | None = None) -> None:
        """Load a file with the bare state of one module, optimizer or other `Stateful` object.

        Called on all ranks; an error on one is raised on all.

        Args:
            path: File.
            obj: Object to load in place.
            strict: Whether missing and unexpected keys of a module are an error.
            weights_only: Whether to refuse pickled objects, which can run code; False only for trusted files. None
                means True.

        Raises:
            ConfigError: The object has no state.
            CheckpointError: The state does not fit.
        """
        self._require_launch("load_raw")

        content = self._read(path, weights_only)

        def load() -> None:
            if not put_back(self.strategy, obj, content, strict):
                raise ConfigError(
                    f"Expected an object with load_state_dict for Fabric.load_raw, got {obj!r}.",
                    fix="pass a module or optimizer.",
                )

        self._run_on_all_ranks(load)

    def _read(self, path: str | Path, weights_only: bool | None) -> Any:
        from ..checkpoint.reading import Ranks, read_on_all_ranks  # not imported where no file is read

        return read_on_all_ranks(
            self.checkpoint_io,
            path,
            Ranks(self.global_rank, self.world_size, self.strategy.gather_objects, self._run_on_all_ranks),
            is_safe=weights_only is not False,
            by_parts=self.strategy.traits.shards_parameters,
        )

    def _run_on_all_ranks(self, function: Callable[[], T]) -> T:
        """Call the function on every rank; an error on one is raised on all."""
        if self.world_size == 1:
            return function()
        from .on_all_ranks import run_on_all_ranks

        return run_on_all_ranks(self.strategy, function)

    # -- callbacks, loggers, seed --------------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Any]:  # Any: see __init__
        """The callbacks, followed by callbacks of installed packages; the list may be modified."""
        if not self._has_found_callbacks:  # on first use: finding them takes some milliseconds
            from .checks import installed_callbacks

            self._has_found_callbacks = True
            self._callbacks += installed_callbacks()
        return self._callbacks

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it, without keyword arguments that it does not take.

        A `loopwright.Module` that was set up is called too, after the callbacks.

        Args:
            hook_name: Name of the method.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        for callback in (*self.callbacks, *self._listeners):
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                warn(f"{type(callback).__name__}.{hook_name} is not a method; it is not called.")
                continue
            method(*args, **_accepted(method, kwargs))

    def log(self, name: str, value: float | Tensor, step: int | None = None) -> None:
        """Log one number to every logger, on rank 0; see `log_dict`."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers to every logger on rank 0. Tensors are read on the host.

        Values of rank 0 are logged: reduce them first if they differ between ranks.

        Args:
            metrics: Name -> number or tensor of one element.
            step: Step on the x-axis; None for the logger's default.

        Raises:
            ConfigError: Tensors have several elements, or each rank has a part of their value; all are named.
        """
        from ..strategies.distributed.shards import is_sharded

        partial = [
            name
            for name, value in metrics.items()
            if is_sharded(value) and any(one.is_partial() for one in value.placements)
        ]
        if partial:
            raise ConfigError(
                f"Expected numbers for Fabric.log_dict, got sharded tensors, whose parts differ by rank: {partial}.",
                fix="call .full_tensor() before, on every rank.",
            )
        wrong = [name for name, value in metrics.items() if isinstance(value, Tensor) and value.numel() != 1]
        if wrong:
            raise ConfigError(
                f"Expected one number per name for Fabric.log_dict, got tensors of another size: {wrong}.",
                fix="log their mean, or one name per element.",
            )
        if not self.is_global_zero:
            return
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for logger in self.loggers:
            self._log_to(logger, numbers, step)

    def _log_to(self, logger: Any, numbers: dict[str, float], step: int | None) -> None:
        logger.log_metrics(numbers, step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed all random generators, by default also in loader workers; see `loopwright.seed_everything`."""
        return seed_everything(seed, workers=True if workers is None else workers, verbose=verbose)


def _does_something(precision: Precision, name: str) -> bool:
    """Return whether a method of the precision does more than the base class's."""
    method = getattr(type(precision), name)
    if method is getattr(MixedPrecision, name):
        return precision.has_scaler  # with bfloat16 it is equivalent to the base class's
    return method is not getattr(Precision, name)


def _in_precision(step: Callable[..., object], precision: Precision, *, converts_output: bool) -> Callable[..., object]:
    """Return the step with inputs cast, in the precision's context."""
    context = precision.forward_context
    converts_input, convert_input = precision.converts_input, precision.convert_input
    convert_output = precision.convert_output

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> AnyOutput:
        if converts_input:
            args, kwargs = convert_input(args), convert_input(kwargs)
        with context():
            output = step(*args, **kwargs)
        return convert_output(output) if converts_output else output

    return run


@contextmanager
def _both(one: AbstractContextManager[object] | torch.device, other: AbstractContextManager[object]) -> Iterator[None]:
    with one, other:
        yield


def _move_placed(place: Callable[[object], object], batch: Batch, device: torch.device) -> object:
    """Return a batch on the device, for a strategy that moves tensors itself."""
    return move_to_device(place(batch), device)


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _takes_arguments(function: Callable[..., object]) -> bool:
    try:
        return bool(inspect.signature(function).parameters)
    except ValueError:  # some built-in functions have no signature
        return True


def _accepted(method: Callable[..., object], kwargs: dict[str, object]) -> dict[str, object]:
    if not kwargs:
        return kwargs
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def _named(strategy: object) -> str:
    return f"the strategy {type(strategy).__name__}"


def _do_nothing(fabric: Fabric) -> None:
    """The function that `launch` runs by default; at module level, so that it can be pickled."""


def _call_run(fabric: Fabric, *args: object, **kwargs: object) -> object:
    return fabric.run(*args, **kwargs)


def _launching(run: Callable[..., object]) -> Callable[..., object]:
    """Return a subclass's `run`, which starts the processes first."""

    @functools.wraps(run)
    def launched(self: Fabric, *args: object, **kwargs: object) -> object:
        if self._is_set_up:
            return run(self, *args, **kwargs)
        return self.launch(_call_run, *args, **kwargs)

    return launched
