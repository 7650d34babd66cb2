"""Training by a DeepSpeed engine: ZeRO stages 0 to 3, with optimizer and parameters in host memory or on disk."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError, DataError, ModuleError
from ...messages import warn
from ..base import NoLoss, TrainerConfig, plain_name
from ..construction.deferred import DeferredInit
from ..distributed.collectives import broadcast_tensors
from ..distributed.live_objects import LiveObjects
from ..parallel import DEFAULT_TIMEOUT, ParallelStrategy
from ..traits import MemoryShares
from . import config as configs
from . import ops, setup
from .arguments import DeepSpeedArguments, check_sections, read_given
from .config import Config
from .engine import EngineOptimizer, EngineRoot
from .optimizers import make_optimizer
from .partition import has_values, is_to_be_partitioned, partition
from .precision import DeepSpeedPrecision
from .state import gather, is_partitioned, load_module, load_optimizer, module_state, optimizer_state
from .steps import Step, bind_step

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys
    from torch.optim import Optimizer

    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import CheckpointPlugin, Cluster, StateDict, T
    from .engine_types import Engine, State

_log = logging.getLogger(__name__)


class DeepSpeedStrategy(ParallelStrategy):
    """Several processes whose module and optimizer are run by a DeepSpeed engine, on any kind of device.

    ZeRO stage 1 shards the optimizer's state, stage 2 also gradients, stage 3 also parameters; stage 0 shards nothing.
    The engine keeps float32 masters of 16-bit parameters. Module and optimizer are set up together: the Trainer does
    so; with Fabric pass both to `setup`, or the optimizer to `setup_optimizers` right after the module.

    Args:
        zero_optimization: Whether ZeRO is used; False is stage 0.
        stage: ZeRO stage, 0 to 3.
        remote_device: Device of the parameters that `configure_model` and `init_module` build in stage 3: "cpu" or
            "nvme". None, and offloaded parameters, have the device of `offload_parameters`.
        offload_optimizer: Whether optimizer state and masters are in host memory, where the optimizer then steps.
        offload_parameters: Whether parameters are in host memory between their uses; stage 3.
        offload_params_device: Device for `offload_parameters`: "cpu" or "nvme".
        nvme_path: Folder on a fast disk, for "nvme".
        params_buffer_count: Number of buffers for parameters that are read from disk.
        params_buffer_size: Number of elements in each of these buffers.
        max_in_cpu: Number of parameter elements that stay in host memory with "nvme".
        offload_optimizer_device: Device for `offload_optimizer`: "cpu" or "nvme".
        optimizer_buffer_count: Number of buffers for optimizer state that is read from disk.
        block_size: Bytes of one read or write of a disk.
        queue_depth: Number of concurrent reads and writes.
        single_submit: Whether reads and writes are submitted one by one.
        overlap_events: Whether submitting and waiting overlap.
        thread_count: Threads of each read or write.
        pin_memory: Whether host memory for offloading is pinned.
        sub_group_size: Number of parameter elements in one step of stage 3's optimizer.
        contiguous_gradients: Whether gradients are copied into one buffer as they are computed.
        overlap_comm: Whether gradients are reduced during the backward pass.
        allgather_partitions: Whether updated parameters are gathered by all_gather, else by broadcasts.
        reduce_scatter: Whether gradients are reduced by reduce_scatter, else by all_reduce.
        allgather_bucket_size: Number of elements gathered at a time.
        reduce_bucket_size: Number of elements reduced at a time.
        zero_allow_untested_optimizer: Whether to accept optimizers that DeepSpeed does not list as tested.
        logging_batch_size_per_gpu: Samples in one micro-batch of one process, for DeepSpeed's log. "auto" and None are
            the training loader's batch size, else 1.
        config: DeepSpeed's configuration: a dict, or the path of a JSON file. None is the file in
            LOOPWRIGHT_DEEPSPEED_CONFIG_PATH, else the arguments above.
        logging_level: Level of DeepSpeed's logger.
        loss_scale: Loss scale of float16; 0 is dynamic.
        initial_scale_power: Base-2 logarithm of the first dynamic loss scale.
        loss_scale_window: Number of steps without overflow before the scale is doubled.
        hysteresis: Number of overflows before the scale is halved.
        min_loss_scale: Smallest dynamic loss scale.
        partition_activations: Whether checkpointed activations are partitioned over model-parallel ranks.
        cpu_checkpointing: Whether checkpointed activations are kept in host memory.
        contiguous_memory_optimization: Whether checkpointed activations are copied into one buffer.
        synchronize_checkpoint_boundary: Whether the device is synchronized at each checkpointed part.
        load_full_weights: Accepted for compatibility; checkpoints always contain full tensors.
        exclude_frozen_parameters: Whether checkpoints omit parameters that are not trained.
        uneven: Behavior for unequal numbers of training batches on ranks: "stop_all" or "cycle".
        config_wins: Whether accumulation, clipping and precision are those of `config`, where it has values, instead of
            the Trainer's; what was taken is logged. Clipping by value, manual optimization, `global_batch_size` and the
            loaders' batch size must agree nevertheless.

    Raises:
        ConfigError: An argument is invalid, or differs from `config`; every problem is listed.
    """

    strategy_name = "deepspeed"
    traits = replace(
        ParallelStrategy.traits,
        owns_optimizers=True,
        holds_parameters=True,
        sums_gradients_itself=True,
        keeps_packed_weights=False,  # the engine casts parameters
        uneven_choices=("stop_all", "cycle"),  # a rank without a batch cannot take part in the engine's backward pass
        has_module_hooks=True,
    )

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        zero_optimization: bool = True,
        stage: int = 2,
        remote_device: str | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        nvme_path: str | None = "/local_nvme",
        params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000,
        max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu",
        optimizer_buffer_count: int = 4,
        block_size: int = 1_048_576,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = True,
        thread_count: int = 1,
        pin_memory: bool = False,
        sub_group_size: int = 1_000_000_000_000,
        contiguous_gradients: bool = True,
        overlap_comm: bool = True,
        allgather_partitions: bool = True,
        reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000,
        reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True,
        logging_batch_size_per_gpu: str | int | None = "auto",
        config: Config | str | os.PathLike[str] | None = None,
        logging_level: int = logging.WARN,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Cluster | None = None,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: int = 1,
        partition_activations: bool = False,
        cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False,
        synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        exclude_frozen_parameters: bool = False,
        *,
        checkpoint_io: CheckpointPlugin | None = None,
        precision: Precision | None = None,
        start_method: str = "popen",
        uneven: str = "stop_all",
        stall_timeout: timedelta | float | None = None,
        config_wins: bool = False,
    ) -> None:
        read = read_given(
            config,
            DeepSpeedArguments(
                zero_optimization=zero_optimization, stage=stage, remote_device=remote_device,
                offload_optimizer=offload_optimizer, offload_parameters=offload_parameters,
                offload_params_device=offload_params_device, nvme_path=nvme_path,
                params_buffer_count=params_buffer_count, params_buffer_size=params_buffer_size, max_in_cpu=max_in_cpu,
                offload_optimizer_device=offload_optimizer_device, optimizer_buffer_count=optimizer_buffer_count,
                block_size=block_size, queue_depth=queue_depth, single_submit=single_submit,
                overlap_events=overlap_events, thread_count=thread_count, pin_memory=pin_memory,
                sub_group_size=sub_group_size, contiguous_gradients=contiguous_gradients, overlap_comm=overlap_comm,
                allgather_partitions=allgather_partitions, reduce_scatter=reduce_scatter,
                allgather_bucket_size=allgather_bucket_size, reduce_bucket_size=reduce_bucket_size,
                zero_allow_untested_optimizer=zero_allow_untested_optimizer, loss_scale=loss_scale,
                initial_scale_power=initial_scale_power, loss_scale_window=loss_scale_window, hysteresis=hysteresis,
                min_loss_scale=min_loss_scale, partition_activations=partition_activations,
                cpu_checkpointing=cpu_checkpointing, contiguous_memory_optimization=contiguous_memory_optimization,
                synchronize_checkpoint_boundary=synchronize_checkpoint_boundary,
            ),
        )  # fmt: skip
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, process_group_backend=process_group_backend,
            timeout=timeout, start_method=start_method, precision=precision, uneven=uneven,
            stall_timeout=stall_timeout, problems=read.problems,
        )  # fmt: skip
        self.given_config = read.config
        self.arguments = read.arguments
        self.where = read.where
        self.config_wins = config_wins
        self.stage = configs.stage_of(read.config)
        if self.stage == 3:
            what = "ZeRO stage 3 replaces functions of linear layers with ones that torch.compile cannot trace"
            refusal = (what, "leave it out, use stage=2, or strategy='fsdp'")
            self.traits = replace(self.traits, shards_parameters=True, compile_refusal=refusal)
        self.remote_device = remote_device
        self.logging_level = logging_level
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self.keeps_activations = False  # in DeepSpeed's buffers, until a backward pass
        self.last_root: weakref.ref[EngineRoot] | None = None  # of the last step with gradients
        self._lw_roots: LiveObjects[EngineRoot] = LiveObjects()
        self._lw_batch_size = logging_batch_size_per_gpu if isinstance(logging_batch_size_per_gpu, int) else None
        self._lw_plan: dict[str, Any] = {}  # Any: the Trainer's plan
        self._lw_has_set_rank = self._lw_has_configured_activations = self._lw_has_own_optimizer = False

    def __getstate__(self) -> StateDict:  # Any: attributes
        return {**self.__dict__, "last_root": None}

    def memory_shares(self, num_processes: int, num_nodes: int) -> MemoryShares:
        """Return the number of processes over which the ZeRO stage shards; see `SharesMemory.memory_shares`."""
        if self.stage == 0:
            return MemoryShares()
        shared = num_processes if self.stage == 3 else 1
        formula = "20 P / N" if self.stage == 3 else "4 P + 16 P / N"
        return MemoryShares(
            shared, num_processes, num_processes, has_float32_copies=True, casts_parameters=True, formula=formula
        )

    @property
    def helps_in_evaluation(self) -> bool:
        """Whether this rank can call `evaluate_without_data`: only after it has evaluated a batch."""
        return any(root.evaluated is not None for root in self._lw_roots)

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are sharded."""
        return self.stage == 3

    @property
    def config(self) -> Config:
        """DeepSpeed's configuration for this run, completed with values from Trainer or Fabric.

        Raises:
            ConfigError: See `config.settle`.
        """
        return configs.settle(self.given_config, self._lw_facts(), self.where)

    def configure_deepspeed_config(self, config: Config) -> Config:
        """Return a configuration completed with values from Trainer or Fabric; override it to change the engine's.

        Args:
            config: The user's configuration, or the one built from the constructor's arguments.
        """
        return configs.settle(config, self._lw_facts(), self.where)

    @property
    def _lw_newest(self) -> EngineRoot | None:
        return next(reversed(list(self._lw_roots)), None)

    @property
    def deepspeed_engine(self) -> Engine | None:
        """The DeepSpeedEngine of the module that was set up last; None before its optimizer is set up.

        Use it for features that only DeepSpeed has, such as `engine.save_checkpoint`, which writes DeepSpeed's format.
        """
        root = self._lw_newest
        return None if root is None else root.engine

    @property
    def global_grad_norm(self) -> Tensor | None:
        """The 2-norm of the last step's gradients, before clipping; None if neither clipping nor ZeRO computed it.

        Shape (), on the engine's device, equal on all ranks. If gradients were clipped, it has the order of that norm.
        """
        root = self._lw_newest
        return None if root is None else root.grad_norm

    # -- before the launch ---------------------------------------------------------------------------------------

    def make_precision(self, name: str, device_type: str) -> DeepSpeedPrecision:
        """Return the precision of this name; called by Fabric, in the constructor.

        Raises:
            ConfigError: The engine, or the device, does not support it.
        """
        wanted = configs.precision_of(self.given_config, name) if self.config_wins else name
        if wanted != name:
            _log.info("DeepSpeedStrategy: precision=%r, from %s.", wanted, self.where)
        return DeepSpeedPrecision(wanted, device_type)

    def check_processes(self, num_processes: int, num_nodes: int) -> None:
        """Refuse a machine without DeepSpeed, before processes start; plans need only the strategy.

        Raises:
            MissingDependency: DeepSpeed is not installed.
        """
        if find_spec("deepspeed") is None:
            raise ops.missing_deepspeed()

    def apply_trainer_config(self, config: TrainerConfig) -> TrainerConfig:
        """Apply the Trainer's configuration, before processes start.

        Args:
            config: See `TrainerConfig`.

        Returns:
            The values that the Trainer must take instead: with `config_wins`, those of DeepSpeed's configuration.

        Raises:
            ConfigError: The configuration differs, with both values of each; or it cannot be done.
        """
        self._lw_plan = dict(config)
        taken = self._lw_take_over() if self.config_wins and config["is_automatic"] else TrainerConfig()
        settled = self.configure_deepspeed_config(self.given_config)
        if self._lw_plan.get("grad_accumulation_dtype") is not None:
            for what, fix in check_sections(settled, "Trainer(grad_accumulation_dtype='float32')"):
                raise ConfigError(f"{what}.", fix=f"{fix}.")
        ops.prepare(self.given_config, self.where)
        return taken

    def _lw_take_over(self) -> TrainerConfig:
        """Replace accumulation and clipping in the plan by DeepSpeed's, and return them."""
        before, taken = self._lw_facts(), TrainerConfig()
        after = configs.taken_over(self.given_config, before)
        if after.accumulate != before.accumulate:
            taken["accumulate_grad_batches"] = after.accumulate
        if after.clip != before.clip and self._lw_plan.get("gradient_clip_algorithm") in (None, "norm"):
            taken["gradient_clip_val"] = after.clip
        if taken:
            shown = ", ".join(f"{name}={value!r}" for name, value in taken.items())
            _log.info("DeepSpeedStrategy: %s, from %s.", shown, self.where)
        self._lw_plan.update(taken)
        return taken

    def _lw_facts(self) -> configs.Facts:
        dtype = str(self.precision.policy.compute_dtype).removeprefix("torch.")
        return configs.facts_of(self._lw_plan, world_size=self.world_size, batch_size=self._lw_batch_size, dtype=dtype)

    def default_optimizers(self, module: nn.Module) -> Config | None:
        """Return what the configuration's sections "optimizer" and "scheduler" describe, for modules without their own.

        Returns:
            As `configure_optimizers` does; None without such sections.
        """
        if "optimizer" not in self.given_config and "scheduler" not in self.given_config:
            return None
        ops.import_deepspeed(self.logging_level)
        self._lw_has_own_optimizer = True
        return make_optimizer(self.configure_deepspeed_config(self.given_config), module, self.where)

    # -- processes -----------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """Connect the processes, and let DeepSpeed use the connection."""
        ops.prepare(self.given_config, self.where)  # before ranks wait for each other, with a time limit
        super().setup_distributed()
        if "LOCAL_RANK" not in os.environ:  # DeepSpeed (0.19) reads it; a run of one process has no launcher
            os.environ["LOCAL_RANK"] = str(self.local_rank)
            self._lw_has_set_rank = True
        ops.import_deepspeed(self.logging_level)
        ops.connect(backend="nccl" if self.device.type == "cuda" else "gloo", timeout=self.timeout)
        self._lw_has_configured_activations = True
        self.keeps_activations = ops.configure_activations(self.given_config, self.device.type)

    def teardown(self) -> None:
        """Release engines, then devices and connections."""
        if self._lw_has_set_rank:  # it would look like a launcher to the next run
            os.environ.pop("LOCAL_RANK", None)
        if self._lw_has_configured_activations:
            ops.forget_activations(self.given_config)
        self._lw_has_set_rank = self._lw_has_configured_activations = False
        self.last_root, self._lw_plan = None, {}
        self._lw_roots.clear()
        super().teardown()

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which a module is built; in stage 3 without memory, until `setup_module` partitions it.

        Args:
            empty_init: In stage 3, False builds it in full, on the CPU. True and None: its values will be those of its
                constructors, bit for bit. Below stage 3 see `Strategy.init_context`.
        """
        if self.stage < 3:
            with super().init_context(empty_init):
                yield
            return
        with nullcontext() if empty_init is False else DeferredInit():
            yield

    def change_context(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which changes of a module without values are deferred until it has them."""
        return nullcontext() if self.stage < 3 or has_values(module) else DeferredInit()

    def module_to_device(self, module: nn.Module) -> None:
        """Move full parameters and buffers; parameters that are partitioned, or have no values yet, stay."""
        if self.stage == 3 and not has_values(module):
            return
        if any(is_partitioned(one) for one in module.parameters()):
            setup.move_buffers(module, self.device)
        else:
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> EngineRoot:
        """Return what runs the module; `setup_optimizer` makes its engine. On every rank: it communicates.

        Raises:
            ModuleError: The ranks built different modules, or ones that DeepSpeed cannot run here.
        """
        self.check_module(module)
        setup.check_layers(module)
        root = EngineRoot(module, self.stage, is_manual=not self._lw_plan.get("is_automatic", True))
        if self.stage == 3 and is_to_be_partitioned(module):
            root.__dict__["first"] = partition(self, module)
            if self.world_size > 1:
                broadcast_tensors(list(module.buffers()))
        else:
            setup.make_contiguous(module)
        root.take_over()  # an earlier engine looks at all parameters, and at those that it did not have
        self._lw_roots.add(root)
        return root

    def place_module(self, module: nn.Module) -> EngineRoot:
        """Return what runs the module in evaluation and manual optimization. It communicates.

        For evaluation in stage 3, that is an engine without an optimizer.
        """
        root = self.setup_module(module)
        if root.is_manual:
            return root  # the engine is made with the optimizer
        if self.stage == 3:
            setup.start(self, root, None)
        elif self.world_size > 1:
            broadcast_tensors([*module.parameters(), *module.buffers()])
        return root

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Make the engine of a module and its optimizer.

        Raises:
            ConfigError: There are several optimizers.
        """
        if len(optimizers) > 1:
            raise setup.several(len(optimizers))
        root = self.setup_module(module)
        return root, [self.setup_optimizer(one) for one in optimizers]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make the engine of the optimizer and its module, and return what steps both.

        Raises:
            ConfigError: The module has an optimizer already, is not set up, or the optimizer cannot be used.
        """
        is_of_config, self._lw_has_own_optimizer = self._lw_has_own_optimizer, False
        return setup.setup_optimizer(self, list(self._lw_roots), optimizer, is_of_config=is_of_config)

    def sync_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks."""
        if self.world_size > 1:
            broadcast_tensors(list(self.unwrap(module).buffers()))

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's module."""
        return module.module if isinstance(module, EngineRoot) else module

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind_step(self, module: nn.Module, name: str) -> Step:
        """Return a function that runs `module.<name>` under the engine's hooks, on every rank at the same time."""
        return bind_step(self, module, name)

    def without_data(self, module: nn.Module) -> NoLoss | None:
        """Refuse: a rank without a batch cannot take part in a training step.

        Raises:
            ModuleError: Always.
        """
        raise ModuleError(
            f"Expected a training batch on every rank with DeepSpeed, got none on rank {self.global_rank}.",
            fix="provide the same number of batches on all ranks, or pass uneven='stop_all' or 'cycle'.",
        )

    def evaluate_without_data(self, module: nn.Module | None) -> None:
        """Take part in an evaluation step for which this rank has no batch, where others have one.

        Parameters are gathered in the order of this rank's last evaluation step.

        Raises:
            DataError: This rank has not evaluated any batch.
        """
        known = [root for root in self._lw_roots.in_use() if root.evaluated is not None]
        if isinstance(module, EngineRoot):
            known = [root for root in known if root is module]
        if not known:
            raise DataError(
                "Expected at least one evaluation batch on every rank with ZeRO stage 3, got none on rank "
                f"{self.global_rank}.",
                fix="evaluate on at least as many batches as there are ranks, or use strategy='deepspeed_stage_2'.",
            )
        for root in known:
            root.evaluate_without_data()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not end a window, if enabled: the engine accumulates."""
        return module.within_window() if enabled and isinstance(module, EngineRoot) else nullcontext()

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:  # Any: arguments of Tensor.backward
        """Let the engine compute and reduce gradients of a loss (shape ()).

        Raises:
            ConfigError: There is no engine yet, or it does not take an argument.
        """
        options = {**dict(zip(("gradient", "retain_graph", "create_graph"), args, strict=False)), **kwargs}
        wrong = sorted(key for key, value in options.items() if value not in (None, False) and key != "retain_graph")
        if wrong:
            raise ConfigError(
                "Expected no arguments of backward except the loss and retain_graph with DeepSpeed, got "
                f"{', '.join(wrong)}.",
                fix="remove these arguments.",
            )
        root = None if self.last_root is None else self.last_root()
        if root is None or not root.has_engine:
            raise ConfigError(
                "backward was called before DeepSpeed had an optimizer. Its engine requires both a module and an "
                "optimizer.",
                fix="pass both to fabric.setup(module, optimizer); with the Trainer, return an optimizer from "
                'configure_optimizers, or add a section "optimizer" to the configuration.',
            )
        root.backward(tensor, retain_graph=bool(options.get("retain_graph")))

    def discard_gradients(self, module: nn.Module | None, optimizer: Optimizer | None = None) -> None:
        """Discard gradients of a window that ends without a step; of all modules for None."""
        for root in [module] if module is not None else list(self._lw_roots):
            if isinstance(root, EngineRoot) and root.has_engine:
                root.discard_gradients()

    def scale_gradients(self, optimizer: Optimizer, factor: Tensor | float) -> None:
        """Multiply the reduced gradients, in place, before they are clipped."""
        _root_of(optimizer).scale_gradients(factor)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the engine's gradients so that their total norm is at most `max_norm`.

        On every rank: it communicates. See `Strategy.clip_gradients_norm`.
        """
        return _root_of(optimizer).clip_norm(max_norm, float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each element of the engine's gradients to [-clip_val, clip_val]."""
        _root_of(optimizer).clip_value(clip_val)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> bool:
        """Let the engine step; return whether it did: False if a float16 gradient overflowed."""
        if closure is not None:
            closure()
        return _root_of(optimizer).step()

    # -- state ---------------------------------------------------------------------------------------------------

    def gather_state(self, state: T) -> T:
        """Return a state with full tensors on rank 0's CPU, None elsewhere. On every rank."""
        return gather(state, keep=self.is_global_zero)

    def module_state_dict(self, module: nn.Module) -> State:
        """Return the state of a module in float32, under the user's names; `gather_state` makes its tensors full."""
        return self._lw_module_state(module, has_frozen=not self.exclude_frozen_parameters)

    def every_weight(self, module: nn.Module) -> State:
        """Return the state of a module as `module_state_dict` does, always with frozen parameters."""
        return self._lw_module_state(module, has_frozen=True)

    def _lw_module_state(self, module: nn.Module, *, has_frozen: bool) -> State:
        original = self.unwrap(module)
        state = super().module_state_dict(original)
        if not has_frozen:
            frozen = {name for name, one in original.named_parameters(remove_duplicate=False) if not one.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return module_state(module, state) if isinstance(module, EngineRoot) else state

    def load_module_state_dict(self, module: nn.Module, state: State, strict: bool = True) -> LoadedKeys:
        """Load a state with full tensors, of any strategy; masters get them in float32. On every rank."""
        original = self.unwrap(module)
        if isinstance(module, EngineRoot):
            names = ((name, key) for name in original.state_dict() for key in (name, plain_name(name)))
            state = load_module(module, state, {name: key for name, key in names if key in state})
            if self.exclude_frozen_parameters:
                parameters = original.named_parameters(remove_duplicate=False)
                state = {**{name: one.data for name, one in parameters if not one.requires_grad}, **state}
        return super().load_module_state_dict(original, state, strict)

    def optimizer_state(self, optimizer: Optimizer, module: nn.Module | None = None) -> State:
        """Return the state of an optimizer, by the numbers of the user's parameters; see `gather_state`."""
        own = _engine_optimizer(optimizer)
        if own is None:
            return super().optimizer_state(optimizer, module)
        if self.is_global_zero and own.root.has_gradients:
            warn(
                "Gradients that DeepSpeed accumulated since the last step are not saved with the optimizer's state.",
            )
        return optimizer_state(own)

    def load_optimizer_state(self, optimizer: Optimizer, state: State, module: nn.Module | None = None) -> None:
        """Load a state with full tensors, of any strategy."""
        own = _engine_optimizer(optimizer)
        if own is None:
            super().load_optimizer_state(optimizer, state, module)
        else:
            load_optimizer(own, state)


def _engine_optimizer(optimizer: object) -> EngineOptimizer | None:
    # isinstance() would ask for its __class__, which is the user's optimizer's.
    return optimizer if type(optimizer) is EngineOptimizer else None


def _root_of(optimizer: Optimizer) -> EngineRoot:
    own = _engine_optimizer(optimizer)
    if own is None:
        raise ConfigError(
            f"Expected the optimizer that DeepSpeed was set up with, got another {type(optimizer).__name__}.",
            fix="use the optimizer that setup returns.",
        )
    root: EngineRoot = own.root
    return root
