"""Training by a DeepSpeed engine: ZeRO stages 0 to 3, with optimizer and parameters in host memory or on disk."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...errors import ConfigError, ModuleError
from ..base import NoLoss, TrainerConfig
from ..distributed.processes import DEFAULT_TIMEOUT, ProcessGroupStrategy, broadcast_tensors
from . import config as configs
from .activations import Activations
from .arguments import facts_of, read_given
from .checks import check_sections
from .engines import Engines

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...accelerators import Accelerator
    from ...precision import Precision
    from .engine import EngineRoot
    from .pipeline.engine import PipelineRoot
    from .precision import DeepSpeedPrecision

__all__ = ["DeepSpeedStrategy"]

logger = logging.getLogger(__name__)

# Any in this file: deepspeed has no types; what users give, and what their steps take and return.


class DeepSpeedStrategy(ProcessGroupStrategy):
    """Several processes whose module and optimizer are run by a DeepSpeed engine, on any kind of device.

    ZeRO stage 1 shards the optimizer's state, stage 2 gradients as well, stage 3 parameters, too; stage 0 shards
    nothing. The engine keeps float32 masters of 16-bit parameters. Module and optimizer are set up together: with the
    Trainer that is so; with Fabric pass both to `setup`, or the optimizer to `setup_optimizers` right after the module.

    Args:
        accelerator: The kind of device; None lets Fabric choose.
        zero_optimization: False is stage 0.
        stage: ZeRO stage, 0 to 3.
        remote_device: Where `configure_model` and `init_module` put parameters in stage 3: "cpu" or "nvme". None: where
            `offload_parameters` says.
        offload_optimizer: Keep optimizer state and masters in the host's memory, where the optimizer then steps.
        offload_parameters: Keep parameters in the host's memory between their uses; stage 3.
        offload_params_device: "cpu" or "nvme".
        nvme_path: Folder on a fast disk, for "nvme".
        params_buffer_count: Buffers for parameters on their way from a disk.
        params_buffer_size: Elements of each.
        max_in_cpu: Elements of parameters that stay in the host's memory with "nvme".
        offload_optimizer_device: "cpu" or "nvme".
        optimizer_buffer_count: Buffers for optimizer state on its way from a disk.
        block_size: Bytes of one read or write of a disk.
        queue_depth: Reads and writes under way at a time.
        single_submit: Submit them one by one.
        overlap_events: Submit and wait at the same time.
        thread_count: Threads of each read or write.
        pin_memory: Pin the host's memory that is used for offloading.
        sub_group_size: Elements of parameters that stage 3 steps at a time.
        contiguous_gradients: Copy gradients into one buffer as they are made.
        overlap_comm: Reduce gradients during the backward pass.
        allgather_partitions: Gather updated parameters by all_gather rather than by broadcasts.
        reduce_scatter: Reduce gradients by reduce_scatter rather than by all_reduce.
        allgather_bucket_size: Elements gathered at a time.
        reduce_bucket_size: Elements reduced at a time.
        zero_allow_untested_optimizer: Accept optimizers that DeepSpeed does not name as tested.
        logging_batch_size_per_gpu: Samples of one micro-batch of one process, for DeepSpeed's log. "auto" or None: from
            the training loader, else 1.
        config: DeepSpeed's configuration: a dict, or the path of a JSON file. None: a file that
            LT_DEEPSPEED_CONFIG_PATH or PL_DEEPSPEED_CONFIG_PATH names, else the arguments above.
        logging_level: Of DeepSpeed's logger.
        parallel_devices: The devices of this node's processes; None lets Fabric choose.
        cluster_environment: Knows ranks and addresses; None lets Fabric choose.
        loss_scale: Of float16; 0 lets it change.
        initial_scale_power: It begins at 2 to this power.
        loss_scale_window: Steps without overflow before it is doubled.
        hysteresis: Overflows before it is halved.
        min_loss_scale: Its least value.
        partition_activations: Cut checkpointed activations over model-parallel ranks.
        cpu_checkpointing: Keep checkpointed activations in the host's memory.
        contiguous_memory_optimization: Copy checkpointed activations into one buffer.
        synchronize_checkpoint_boundary: Synchronise the device at each checkpointed part.
        load_full_weights: Accepted; checkpoints are whole in any case.
        precision_plugin: The precision; None lets Fabric choose.
        process_group_backend: "gloo", "nccl", ...; None: gloo on the CPU, nccl and gloo on CUDA devices.
        timeout: A rank that waits longer than this for another one fails; a timedelta or seconds. None: 30 minutes.
        exclude_frozen_parameters: Leave parameters that are not trained out of checkpoints.
        checkpoint_io: Reads and writes checkpoints; None lets Fabric choose.
        precision: Another name for `precision_plugin`.
        start_method: How processes start where nobody else starts them: "popen", "spawn", "fork", "forkserver".
        uneven: What happens where ranks have unequally many training batches: "stop_all" or "cycle".
        stall_timeout: A run in which nothing moves for so long says where every rank is.
        micro_batches: Into how many parts a PipelineModule cuts a batch. None: as many as it has stages.

    Raises:
        ConfigError: An argument cannot work, or differs from `config`; every problem is named.
    """

    holds_gradients = True
    holds_parameters = True
    configures_optimizers = True
    rebuilds_optimizers = True
    adds_param_groups = False
    sums_gradients_itself = True
    strategy_name = "deepspeed"
    uneven_choices = ("stop_all", "cycle")  # a rank without a batch cannot take part in the engine's backward pass

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
        config: Any = None,
        logging_level: int = logging.WARN,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Any = None,
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
        checkpoint_io: Any = None,
        precision: Precision | None = None,
        start_method: str = "popen",
        uneven: str = "stop_all",
        stall_timeout: timedelta | float | None = None,
        micro_batches: int | None = None,
    ) -> None:
        given = read_given(config, locals())
        problems = given.problems
        if micro_batches is not None and micro_batches < 1:
            problems.append((f"micro_batches={micro_batches!r}", "pass at least 1"))
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            precision=precision,
            uneven=uneven,
            stall_timeout=stall_timeout,
            problems=problems,
        )
        self.given_config = given.config
        self.arguments = given.arguments
        self.where = given.where
        self.stage = configs.stage_of(given.config)
        self.remote_device = remote_device
        self.logging_level = logging_level
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self.micro_batches = micro_batches
        self.has_stages = False
        self.engines = Engines(logging_level)
        self.activations = Activations()
        self._batch_size = logging_batch_size_per_gpu if isinstance(logging_batch_size_per_gpu, int) else None
        self._plan: dict[str, Any] = {}
        self._has_set_rank = self._has_own_optimizer = False

    @property
    def has_module_hooks(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether hooks of submodules communicate: those of the engine do."""
        return True

    @property
    def compile_refusal(self) -> tuple[str, str] | None:  # type: ignore[override]  # a class attribute elsewhere
        """Why `compile=` cannot be used: torch cannot trace stage 3's own arithmetic, nor a pipeline's engine."""
        if self.stage == 3:
            what = "ZeRO stage 3 puts functions of its own into linear layers, which torch.compile cannot trace"
        elif self.has_stages:
            what = "a pipeline's layers are called by DeepSpeed's engine"
        else:
            return None
        return what, "leave it out, use stage=2, or strategy='fsdp'"

    @property
    def shards_parameters(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether each rank holds a part of every parameter, in stage 3; or of the layers, with a PipelineModule."""
        return self.stage == 3 or self.has_stages

    @property
    def helps_in_evaluation(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether `evaluate_without_data` knows what is gathered: once this rank has evaluated a batch."""
        return any(root.evaluated is not None for root in self.engines.live())

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are sharded."""
        return self.stage == 3

    @property
    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration of this run, with all that Trainer or Fabric knows.

        Raises:
            ConfigError: See `configs.settle`.
        """
        return configs.settle(self.given_config, self._facts(), self.where)

    def configure_deepspeed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a configuration with all that Trainer or Fabric knows; override it to change what the engine gets.

        Args:
            config: The user's, or what the constructor's arguments say.
        """
        return configs.settle(config, self._facts(), self.where)

    @property
    def deepspeed_engine(self) -> Any:
        """The DeepSpeedEngine of the module that was set up last; None before its optimizer was.

        For what DeepSpeed alone does: `engine.save_checkpoint` writes its own format, for example.
        """
        root = self.engines.newest()
        return None if root is None else root.engine

    @property
    def global_grad_norm(self) -> Tensor | None:
        """The 2-norm of the last step's gradients, before clipping; None where neither clipping nor ZeRO computed it.

        Shape (), on the engine's device, equal on all ranks; of the order of the norm where gradients were clipped.
        """
        root = self.engines.newest()
        return None if root is None else root.grad_norm

    # -- before the launch ---------------------------------------------------------------------------------------

    def make_precision(self, name: str, device_type: str) -> DeepSpeedPrecision:
        """Return the precision for a name; called by Fabric, in the constructor.

        Raises:
            ConfigError: The engine, or the device, does not have it.
        """
        from .precision import DeepSpeedPrecision

        return DeepSpeedPrecision(name, device_type)

    def apply_trainer_config(self, config: TrainerConfig) -> None:
        """Take what the Trainer is about to do, before processes start.

        Args:
            config: See `TrainerConfig`.

        Raises:
            ConfigError: The configuration says something else; with both values of each. Or it cannot be done.
        """
        self._plan = dict(config)
        settled = self.configure_deepspeed_config(self.given_config)
        if self._plan.get("grad_accumulation_dtype") is not None:
            for what, fix in check_sections(settled, "Trainer(grad_accumulation_dtype='float32')"):
                raise ConfigError(f"{what}.", fix=f"{fix}.")
        self._prepare()

    def _prepare(self) -> None:
        from .ops import prepare

        prepare(self.given_config, self.where)

    def _facts(self) -> configs.Facts:
        dtype = str(self.precision.policy.compute_dtype).removeprefix("torch.")
        return facts_of(self._plan, world_size=self.world_size, batch_size=self._batch_size, dtype=dtype)

    def default_optimizers(self, module: nn.Module) -> Any:
        """Return what the configuration's sections "optimizer" and "scheduler" say, where the module configures none.

        Returns:
            As `configure_optimizers` does; None where there is no such section.
        """
        if "optimizer" not in self.given_config and "scheduler" not in self.given_config:
            return None
        from .optimizers import make_optimizer

        assert self.engines.deepspeed is not None  # its warnings are out of the way
        self._has_own_optimizer = True
        return make_optimizer(self.configure_deepspeed_config(self.given_config), module, self.where)

    # -- processes -----------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """Connect the processes, and let DeepSpeed use the connection."""
        self._prepare()  # before ranks wait for each other, with a time limit
        super().setup_distributed()
        if "LOCAL_RANK" not in os.environ:  # DeepSpeed (0.19) reads it; a run of one process has no launcher
            os.environ["LOCAL_RANK"] = str(self.local_rank)
            self._has_set_rank = True
        from .ops import connect

        deepspeed = self.engines.deepspeed
        connect(deepspeed, backend="nccl" if self.device.type == "cuda" else "gloo", timeout=self.timeout)
        self.activations.configure(deepspeed.checkpointing, self.given_config, self.device.type)
        from .pipeline.layers import build_in_order

        build_in_order()

    def teardown(self) -> None:
        """Let go of engines, then give back devices and connections."""
        if self._has_set_rank:  # it would look like a launcher to the next run
            os.environ.pop("LOCAL_RANK", None)
            self._has_set_rank = False
        self.activations.forget()
        self.engines.forget()
        self._plan = {}
        self.has_stages = False
        super().teardown()

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which a module is built; in stage 3 without memory, until `setup_module` partitions it.

        Args:
            empty_init: In stage 3, False builds it whole, on the CPU. True and None: its values will be those that the
                constructors gave it, bit for bit. Below stage 3 see `Strategy.init_context`.
        """
        if self.stage < 3:
            with super().init_context(empty_init):
                yield
            return
        if empty_init is False:
            yield
            return
        from ..construction.deferred import DeferredInit

        with DeferredInit():
            yield

    def change_context(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which changes of a module without values are made when it gets them."""
        from .partition import has_values

        if self.stage < 3 or has_values(module):
            return nullcontext()
        from ..construction.deferred import DeferredInit

        return DeferredInit()

    def module_to_device(self, module: nn.Module) -> None:
        """Move what is whole; parameters that lie in parts, or have no values yet, stay."""
        from .fragments import is_partitioned
        from .partition import has_values
        from .setup import move_buffers

        if self.stage == 3 and not has_values(module):
            return
        if any(is_partitioned(one) for one in module.parameters()):
            move_buffers(module, self.device)
        else:
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> EngineRoot:
        """Return what runs the module; `setup_optimizer` puts the engine around it. On every rank: it communicates.

        Raises:
            ModuleError: The ranks built different modules.
            ConfigError: It has a PipelineModule that cannot be run.
        """
        from .engine import EngineRoot
        from .partition import is_to_be_partitioned, partition
        from .setup import check_shapes, make_contiguous

        self.configure_topology(module)
        is_automatic = self._plan.get("is_automatic", True)
        if self.has_stages:
            from .setup import setup_stages

            return setup_stages(self, module, is_automatic=is_automatic)
        self.check_module(module)
        check_shapes(module)
        root = EngineRoot(module, self.stage, is_stepped_by_hand=not is_automatic)
        if self.stage == 3 and is_to_be_partitioned(module):
            root.__dict__["first"] = partition(self, module)
            if self.world_size > 1:
                broadcast_tensors(list(module.buffers()))
        else:
            make_contiguous(module)
        root.take_over()  # an earlier engine looks at all parameters, and at those that it did not have
        self.engines.add(root)
        return root

    def place_module(self, module: nn.Module) -> EngineRoot:
        """Return what runs the module in evaluation and manual optimization. It communicates.

        In evaluation that is, in stage 3, an engine without an optimizer.
        """
        root = self.setup_module(module)
        if root.is_stepped_by_hand:
            return root  # the optimizer brings its engine
        if self.stage == 3 or root.is_pipeline:
            from .setup import start

            start(self, root, None)
        elif self.world_size > 1:
            broadcast_tensors([*module.parameters(), *module.buffers()])
        return root

    def configure_topology(self, module: nn.Module) -> None:
        """Find out from a module which ranks read the same data: the stages of one PipelineModule.

        Called before data are distributed; on every rank.

        Raises:
            ModuleError: There are several PipelineModules.
        """
        from .pipeline.start import find_pipeline

        found = find_pipeline(module)
        if found is None and not self.has_stages:
            return
        self.has_stages = found is not None
        rank, size = self.global_rank, self.world_size
        if found is not None:
            grid = found[1].mpu()
            rank, size = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
        self._topology = replace(self.topology, data_rank=rank, data_size=size)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Put an engine around a module and its optimizer.

        Raises:
            ConfigError: There are several optimizers, or none.
        """
        from .setup import several

        if len(optimizers) > 1:
            raise several(len(optimizers))
        root = self.setup_module(module)
        return root, [self.setup_optimizer(one) for one in optimizers]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Put the engine around the optimizer's module, and return what steps both.

        Raises:
            ConfigError: The module has an optimizer already, is not set up, or the optimizer cannot be used.
        """
        from .setup import setup_optimizer

        is_of_config, self._has_own_optimizer = self._has_own_optimizer, False
        return setup_optimizer(self, optimizer, is_of_config=is_of_config)

    def sync_buffers(self, module: nn.Module) -> None:
        """Let all ranks have rank 0's buffers; with a PipelineModule, those of the first replica's stage."""
        if self.has_stages:
            module.sync_buffers()  # type: ignore[operator]  # a PipelineRoot's
        elif self.world_size > 1:
            broadcast_tensors(list(self.unwrap(module).buffers()))

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the module that the user wrote."""
        from .engine import EngineRoot

        return module.module if isinstance(module, EngineRoot) else module

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind_step(self, module: nn.Module, name: str) -> Callable[..., Any]:
        """Return what runs `module.<name>` under the engine's hooks, on every rank at the same time."""
        from .steps import bind_step

        return bind_step(self, module, name)

    def without_data(self, module: nn.Module) -> NoLoss | None:
        """Refuse: a rank without a batch cannot take part in a training step.

        Raises:
            ModuleError: Always.
        """
        raise ModuleError(
            f"rank {self.global_rank} has no training batch, and DeepSpeed needs one on every rank.",
            fix="give all ranks equally many batches, or pass uneven='stop_all' or 'cycle'.",
        )

    def evaluate_without_data(self, module: nn.Module | None) -> None:
        """Take part in an evaluation step for which this rank has no batch, where others have one.

        Parameters are gathered in the order in which this rank's last evaluation step did it.

        Raises:
            DataError: This rank has not evaluated any batch.
        """
        for root in self.engines.without_data(module, self.global_rank):
            root.evaluate_without_data()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not end a window, if enabled: the engine accumulates."""
        from .engine import EngineRoot

        return module.within_window() if enabled and isinstance(module, EngineRoot) else nullcontext()

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Let the engine compute and reduce gradients of a loss (shape ()).

        Raises:
            ConfigError: There is no engine yet.
        """
        root = self.engines.before_backward(has_stages=self.has_stages)
        root.backward(tensor, **_retained(args, kwargs))

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to add a tensor over replicas, in place; see `Strategy.start_sum`."""
        root = self.engines.newest() if self.has_stages else None
        if root is None:
            return super().start_sum(tensor)
        return cast("PipelineRoot", root).start_sum(tensor)

    def discard_gradients(self, module: nn.Module | None) -> None:
        """Forget gradients that wait for the end of a window which was broken off; of all modules for None."""
        from .engine import EngineRoot

        for root in [module] if module is not None else self.engines.live():
            if isinstance(root, EngineRoot) and root.engine is not None:
                root.discard_gradients()

    def local_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors."""
        return tensors

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

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Let the engine step; return whether it did: False if a float16 gradient overflowed."""
        if closure is not None:
            closure()
        return _root_of(optimizer).step()

    # -- state ---------------------------------------------------------------------------------------------------

    def gather_state(self, state: Any) -> Any:
        """Return a state with whole tensors on rank 0's CPU; None stands for them elsewhere. On every rank."""
        from .state import gather

        return gather(state, keep=self.is_global_zero)

    def module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of a module in float32, under the user's names; `gather_state` makes whole what is not."""
        from .saving import saved_module_state

        original = self.unwrap(module)
        state = super().module_state_dict(original)
        return saved_module_state(module, original, state, is_frozen_left_out=self.exclude_frozen_parameters)

    get_module_state_dict = module_state_dict

    def every_weight(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of a module as `module_state_dict` does, with frozen parameters in any case."""
        from .saving import saved_module_state

        original = self.unwrap(module)
        return saved_module_state(module, original, super().module_state_dict(original), is_frozen_left_out=False)

    def load_module_state_dict(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> Any:
        """Put back a state of whole tensors, of any strategy; masters get them in float32. On every rank."""
        from .engine import EngineRoot
        from .saving import fit_module_state

        original = self.unwrap(module)
        if isinstance(module, EngineRoot):
            is_left_out = self.exclude_frozen_parameters
            state = fit_module_state(module, original, state, strict=strict, is_frozen_left_out=is_left_out)
        return super().load_module_state_dict(original, state, strict)

    def optimizer_state(self, optimizer: Optimizer, module: nn.Module | None = None) -> dict[str, Any]:
        """Return the state of an optimizer, by the numbers of the user's parameters; see `gather_state`."""
        from .engine import EngineOptimizer
        from .saving import saved_steps

        if type(optimizer) is not EngineOptimizer:  # type: ignore[comparison-overlap]  # it says that it is one
            return super().optimizer_state(optimizer, module)
        if self.is_global_zero and optimizer.root.has_gradients:
            warnings.warn(
                "gradients that DeepSpeed's engine has accumulated since the last step are not saved with the "
                "optimizer's state",
                stacklevel=2,
            )
        return saved_steps(optimizer)

    get_optimizer_state = optimizer_state

    def load_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], module: nn.Module | None = None
    ) -> None:
        """Put back a state of whole tensors, of any strategy."""
        from .engine import EngineOptimizer
        from .saving import load_steps

        if type(optimizer) is not EngineOptimizer:  # type: ignore[comparison-overlap]  # it says that it is one
            super().load_optimizer_state(optimizer, state, module)
            return
        load_steps(optimizer, state)


def _retained(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a backward pass was given beside the loss, if the engine takes it."""
    if args:
        kwargs = {**dict(zip(("gradient", "retain_graph", "create_graph"), args, strict=False)), **kwargs}
    kwargs = {name: value for name, value in kwargs.items() if value not in (None, False)}
    wrong = sorted(set(kwargs) - {"retain_graph"})
    if wrong:
        raise ConfigError(
            f"backward was given {', '.join(wrong)}, which DeepSpeed's engine does not take.",
            fix="call backward with the loss alone, or with retain_graph.",
        )
    return kwargs


def _root_of(optimizer: Any) -> EngineRoot:
    from .engine import EngineOptimizer

    if type(optimizer) is not EngineOptimizer:
        raise ConfigError(
            f"{type(optimizer).__name__} is not the optimizer that DeepSpeed's engine was set up with.",
            fix="use the optimizer that setup returned.",
        )
    root: EngineRoot = optimizer.root
    return root
