"""Training by a DeepSpeed engine: ZeRO stages 0 to 3, with optimizer and parameters in the host's memory or on a disk.

Made by name ("deepspeed", "deepspeed_stage_3", ...) or by the user; called by Fabric.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError, ModuleError
from . import deepspeed_checks as checks
from . import deepspeed_config as configs
from .base import NoLoss
from .processes import DEFAULT_TIMEOUT, ProcessGroupStrategy, broadcast_tensors
from .replica import Call, loss_tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..accelerators import Accelerator
    from ..precision import Precision
    from .deepspeed_engine import EngineOptimizer, EngineRoot
    from .deepspeed_pipeline import PipelineRoot
    from .deepspeed_precision import DeepSpeedPrecision

__all__ = ["DeepSpeedStrategy"]

logger = logging.getLogger(__name__)

# Any in this file: deepspeed has no types; what users give, and what their steps take and return.

_FLOAT_SECTIONS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


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
        given = locals()
        arguments = configs.Arguments(**{name: given[name] for name in configs.ARGUMENTS})
        problems: list[tuple[str, str]] = []
        where = "the strategy's arguments"
        self.given_config = configs.build(arguments)
        try:
            read, place = configs.read(config)
            if read is not None:
                where = place
                problems += checks.check_sections(read, where)
                if not problems:
                    self.given_config, arguments = configs.combined(read, arguments, where)
        except ConfigError as error:
            problems.append((error.what.rstrip("."), error.fix.rstrip(".")))
        problems += checks.check_arguments(arguments)
        problems += checks.check_activations(self.given_config, where)
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
        self.arguments = arguments
        self.where = where
        self.stage = configs.stage_of(self.given_config)
        self.remote_device = remote_device
        self.logging_level = logging_level
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self._batch_size = logging_batch_size_per_gpu if isinstance(logging_batch_size_per_gpu, int) else None
        self.micro_batches = micro_batches
        self.has_stages = False
        self._plan: dict[str, Any] = {}
        self._deepspeed: Any = None
        self._has_set_rank = self._has_own_optimizer = False
        self._keeps_activations = self._has_configured = False
        self._roots: list[weakref.ref[EngineRoot]] = []
        self._last: weakref.ref[EngineRoot] | None = None

    @property
    def shards_parameters(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether each rank holds a part of every parameter, in stage 3; or of the layers, with a PipelineModule."""
        return self.stage == 3 or self.has_stages

    @property
    def helps_in_evaluation(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        """Whether `evaluate_without_data` knows what is gathered: once this rank has evaluated a batch."""
        return any(root.evaluated is not None for root in self._live_roots())

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
        root = self._newest()
        return None if root is None else root.engine

    @property
    def global_grad_norm(self) -> Tensor | None:
        """The 2-norm of the last step's gradients, before clipping; None where neither clipping nor ZeRO computed it.

        Shape (), on the engine's device, equal on all ranks; of the order of the norm where gradients were clipped.
        """
        root = self._newest()
        return None if root is None else root.grad_norm

    def _newest(self) -> EngineRoot | None:
        roots = self._live_roots()
        return roots[-1] if roots else None

    def _live_roots(self) -> list[EngineRoot]:
        return [root for root in (one() for one in self._roots) if root is not None]

    # -- before the launch ---------------------------------------------------------------------------------------

    def make_precision(self, name: str, device_type: str) -> DeepSpeedPrecision:
        """Return the precision for a name; called by Fabric, in the constructor.

        Raises:
            ConfigError: The engine, or the device, does not have it.
        """
        from .deepspeed_precision import DeepSpeedPrecision

        return DeepSpeedPrecision(name, device_type)

    def read_plan(self, plan: Mapping[str, Any]) -> None:
        """Take what the Trainer is about to do, before processes start.

        Args:
            plan: accumulate_grad_batches, gradient_clip_val, gradient_clip_algorithm, micro_batch_size,
                is_automatic; see `trainer/begin.py`.

        Raises:
            ConfigError: The configuration says something else; with both values of each. Or it cannot be done.
        """
        self._plan = dict(plan)
        self.configure_deepspeed_config(self.given_config)
        self._prepare()

    def _prepare(self) -> None:
        from .deepspeed_ops import prepare

        prepare(self.given_config, self.where)

    def _facts(self) -> configs.Facts:
        plan = self._plan
        dtype = self.precision.policy.compute_dtype
        clip = plan.get("gradient_clip_val", None) or 0.0
        is_norm = plan.get("gradient_clip_algorithm") in (None, "norm")
        return configs.Facts(
            world_size=self.world_size,
            accumulate=plan.get("accumulate_grad_batches"),
            clip=None if not plan else float(clip) if is_norm else 0.0,
            micro_batch=plan.get("micro_batch_size") or self._batch_size,
            dtype=_FLOAT_SECTIONS.get(dtype, str(dtype)),
        )

    def default_optimizers(self, module: nn.Module) -> Any:
        """Return what the configuration's sections "optimizer" and "scheduler" say, where the module configures none.

        Returns:
            As `configure_optimizers` does; None where there is no such section.
        """
        if "optimizer" not in self.given_config and "scheduler" not in self.given_config:
            return None
        from .deepspeed_optimizers import make_optimizer

        self._import()
        self._has_own_optimizer = True
        return make_optimizer(self.configure_deepspeed_config(self.given_config), module, self.where)

    # -- processes -----------------------------------------------------------------------------------------------

    def _import(self) -> Any:
        if self._deepspeed is None:
            from .deepspeed_ops import import_deepspeed

            self._deepspeed = import_deepspeed()
            from deepspeed.utils import logger as own

            own.setLevel(self.logging_level)
        return self._deepspeed

    def setup_distributed(self) -> None:
        """Connect the processes, and let DeepSpeed use the connection."""
        self._prepare()  # before ranks wait for each other, with a time limit
        super().setup_distributed()
        if "LOCAL_RANK" not in os.environ:  # DeepSpeed (0.19) reads it; a run of one process has no launcher
            os.environ["LOCAL_RANK"] = str(self.local_rank)
            self._has_set_rank = True
        from .deepspeed_ops import connect

        connect(self._import(), backend="nccl" if self.device.type == "cuda" else "gloo", timeout=self.timeout)
        self._configure_activations()

    def _configure_activations(self) -> None:
        """Tell `deepspeed.checkpointing`, which is one for the whole process, what the configuration says of it.

        A script that has configured it before keeps that where the configuration says nothing.
        """
        options = configs.activation_options(self.given_config)
        self._has_configured = any(options.values())
        if self.device.type == "cpu":
            # They are there already; DeepSpeed (0.19) would take its copy, which is none, for free to be emptied.
            options["checkpoint_in_cpu"] = False
        checkpointing = self._import().checkpointing
        if self._has_configured or not checkpointing.is_configured():
            checkpointing.configure(None, **options)
        self._keeps_activations = bool(options["contiguous_checkpointing"] or options["checkpoint_in_cpu"])

    def teardown(self) -> None:
        """Let go of engines, then give back devices and connections."""
        if self._has_set_rank:  # it would look like a launcher to the next run
            os.environ.pop("LOCAL_RANK", None)
            self._has_set_rank = False
        if self._has_configured:
            self._import().checkpointing.configure(None)  # nothing is left to a later run of this process
            self._has_configured = False
        self._roots, self._last = [], None
        self._plan = {}
        self.has_stages = False
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_deepspeed": None, "_roots": [], "_last": None}

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which a module is built; in stage 3 each rank keeps its part of every parameter only.

        Args:
            empty_init: Accepted; a parameter has its first values while it is built.
        """
        if self.stage < 3:
            with super().init_context(empty_init):
                yield
            return
        from .deepspeed_ops import refusals

        zero = self._import().zero
        with refusals(self.where):
            # The dtype comes from the configuration: DeepSpeed (0.19) does not listen to its argument for it.
            context = zero.Init(config_dict_or_path=self._engine_config(), remote_device=self.remote_device)
        with context:
            yield

    def change_context(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a module may be changed before it is set up."""
        return nullcontext()

    def module_to_device(self, module: nn.Module) -> None:
        """Move what is whole; parameters that lie in parts stay."""
        from .deepspeed_state import is_partitioned

        if not any(is_partitioned(one) for one in module.parameters()):
            super().module_to_device(module)
            return
        for name, one in list(module.named_buffers()):
            owner = module.get_submodule(name.rpartition(".")[0])
            owner._buffers[name.rpartition(".")[2]] = one.to(self.device)

    def setup_module(self, module: nn.Module) -> EngineRoot:
        """Return what runs the module; `setup_optimizer` puts the engine around it. On every rank: it communicates.

        Raises:
            ModuleError: The ranks built different modules.
            ConfigError: It has a PipelineModule that cannot be run.
        """
        from .deepspeed_engine import EngineRoot

        self.look_at(module)
        if self.has_stages:
            return self._setup_stages(module)
        self.check_module(module)
        root = EngineRoot(module, self.stage, is_stepped_by_hand=not self._plan.get("is_automatic", True))
        root.take_over()
        self._roots = [one for one in self._roots if one() is not None]
        self._roots.append(weakref.ref(root))
        return root

    def place_module(self, module: nn.Module) -> EngineRoot:
        """Return what runs the module in evaluation and manual optimization. It communicates.

        In evaluation that is, in stage 3, an engine without an optimizer.
        """
        root = self.setup_module(module)
        if root.is_stepped_by_hand:
            return root  # the optimizer brings its engine
        if self.stage == 3 or root.is_pipeline:
            self._start(root, None)
        elif self.world_size > 1:
            broadcast_tensors([*module.parameters(), *module.buffers()])
        return root

    def look_at(self, module: nn.Module) -> None:
        """Find out from a module which ranks read the same data: the stages of one PipelineModule.

        Called before data are shared out; on every rank.

        Raises:
            ModuleError: There are several PipelineModules.
        """
        from .deepspeed_pipeline import find_pipeline

        found = find_pipeline(module)
        if found is None and not self.has_stages:
            return
        self.has_stages = found is not None
        rank, size = self.global_rank, self.world_size
        if found is not None:
            grid = found[1].mpu()
            rank, size = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
        self._topology = replace(self.topology, data_rank=rank, data_size=size)

    def _setup_stages(self, module: nn.Module) -> PipelineRoot:
        from . import deepspeed_pipeline, deepspeed_stages

        found = deepspeed_pipeline.find_pipeline(module)
        assert found is not None
        path, pipe = found
        deepspeed_pipeline.check(
            module, pipe, self.given_config, self.precision, is_automatic=self._plan.get("is_automatic", True)
        )
        count = self.micro_batches or pipe.num_stages
        # In stage 0 the engine would add 16-bit gradients up in masters of its own, where no loss weighs them.
        stage = self.stage if self.precision.policy.compute_dtype is torch.float32 else 1
        root = deepspeed_pipeline.PipelineRoot(
            module, path, pipe, stage=stage, micro_batches=count, precision=self.precision
        )
        everyone = self.gather_objects(deepspeed_stages.described(root))
        root.__dict__["layout"] = deepspeed_stages.learn_names(root, everyone)
        root.sync_buffers()
        self._roots = [one for one in self._roots if one() is not None]
        self._roots.append(weakref.ref(root))
        return root

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Put an engine around a module and its optimizer.

        Raises:
            ConfigError: There are several optimizers, or none.
        """
        if len(optimizers) > 1:
            raise _several(len(optimizers))
        root = self.setup_module(module)
        return root, [self.setup_optimizer(one) for one in optimizers]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Put the engine around the optimizer's module, and return what steps both.

        Raises:
            ConfigError: The module has an optimizer already, is not set up, or the optimizer cannot be used.
        """
        from .deepspeed_state import set_masters, whole_parameters

        name = type(optimizer).__name__
        if name == "LBFGS":
            raise ConfigError(
                "LBFGS cannot be used with DeepSpeedStrategy: it evaluates the model within its step, which the engine "
                "makes.",
                fix="use an optimizer such as AdamW or SGD; or strategy='ddp'.",
            )
        unused = [name for name in ("optimizer", "scheduler") if name in self.given_config]
        if unused and not self._has_own_optimizer and self.is_global_zero:
            warnings.warn(
                f"{self.where}: what it says under {' and '.join(unused)} does not count, since an optimizer was "
                "made beside it",
                stacklevel=2,
            )
        self._has_own_optimizer = False
        root = self._root_of(optimizer)
        if root.engine is not None:
            raise _several(2)
        has_masters = self.precision.policy.compute_dtype != torch.float32
        loaded = root.loaded
        # The engine makes masters of the 16-bit parameters that it has cast: what was there before is put back.
        masters: Mapping[str, Any] = {}
        if has_masters:
            masters = {**whole_parameters(root.module), **(loaded or {})}
        root.__dict__["loaded"] = None
        if self.stage == 0 and self.world_size > 1 and not root.is_pipeline:
            broadcast_tensors(list(root.module.buffers()))
        made = self._start(root, optimizer)
        if masters:
            set_masters(root, masters)
        assert made is not None
        return made  # type: ignore[return-value]  # it says that it is one

    def _start(self, root: EngineRoot, optimizer: Optimizer | None) -> EngineOptimizer | None:
        from .deepspeed_engine import start
        from .deepspeed_ops import refusals

        with refusals(self.where):
            if root.is_pipeline:
                return self._start_stages(cast("PipelineRoot", root), optimizer)
            return start(self._import(), root, optimizer, self._engine_config())

    def _start_stages(self, root: PipelineRoot, optimizer: Optimizer | None) -> EngineOptimizer | None:
        from .deepspeed_pipeline import stage_config, start_stages
        from .deepspeed_stages import group_names, learn_groups

        if optimizer is not None:
            groups = [group["params"] for group in optimizer.param_groups]
            learn_groups(root.layout, self.gather_objects(group_names(root, groups)))
        config = stage_config(self._engine_config(), root, trains=optimizer is not None)
        return start_stages(self._import(), root, optimizer, config)

    def _root_of(self, optimizer: Optimizer) -> EngineRoot:
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for root in reversed(self._live_roots()):
            if any(id(one) in own for one in root.module.parameters()):
                return root
        raise ConfigError(
            f"no parameter of {type(optimizer).__name__} is in a module that was set up, and DeepSpeed needs both "
            "together.",
            fix="pass both to fabric.setup(module, optimizer); make the optimizer of the module's own parameters.",
        )

    def _engine_config(self) -> dict[str, Any]:
        """Return what the engine gets: clipping is ours, and so are optimizer and schedule."""
        config = configs.without_sections(self.configure_deepspeed_config(self.given_config))
        config["gradient_clipping"] = 0.0
        config.setdefault("steps_per_print", 10**12)
        if self.precision.policy.compute_dtype is torch.float16:
            config["fp16"] = {**configs.fp16_section(self.arguments), **config.get("fp16", {}), "enabled": True}
        return config

    def sync_buffers(self, module: nn.Module) -> None:
        """Let all ranks have rank 0's buffers; with a PipelineModule, those of the first replica's stage."""
        if self.has_stages:
            module.sync_buffers()  # type: ignore[operator]  # a PipelineRoot's
        elif self.world_size > 1:
            broadcast_tensors(list(self.unwrap(module).buffers()))

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the module that the user wrote."""
        from .deepspeed_engine import EngineRoot

        return module.module if isinstance(module, EngineRoot) else module

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind_step(self, module: nn.Module, name: str) -> Callable[..., Any]:
        """Return what runs `module.<name>` under the engine's hooks, on every rank at the same time."""
        from .deepspeed_engine import EngineRoot

        original = self.unwrap(module)
        step: Callable[..., Any] = original if name == "forward" else getattr(original, name)
        context: Callable[[], AbstractContextManager[Any]] | None = getattr(self.precision, "step_context", None)
        is_pipeline = isinstance(module, EngineRoot) and module.is_pipeline  # the engine is called within the step
        if context is not None and not is_pipeline and self.precision.policy.compute_dtype is not torch.float32:
            step = _within(context, step)
        if not isinstance(module, EngineRoot):
            return step
        if module.is_pipeline:
            stages = cast("PipelineRoot", module)
            if name == "forward" and original is stages.pipe:
                return stages.predict  # its own forward runs the layers of this rank only
            return self._bind_stages(step) if name == "training_step" else stages.count_evaluations(step)
        root, call = module, Call(step, is_training=name == "training_step" and not module.is_stepped_by_hand)
        reference = weakref.ref(root)

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            if not self.shards_parameters:
                output = step(*args, **kwargs)
            else:
                output = (root.run if self.world_size == 1 else root.evaluate)(call, args, kwargs)
            if self._keeps_activations:  # until a backward pass, which does not come
                self._deepspeed.checkpointing.reset()
            return output

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return evaluate(*args, **kwargs)
            self._last = reference
            output = root.run(call, args, kwargs)
            if call.is_training and output.__class__ is not Tensor:
                self._check_loss(output)
            return output

        return run

    def _passed(self) -> EngineRoot | None:
        """Return the pipeline whose gradients wait for `backward`; else the newest one."""
        roots = self._live_roots()
        return next((root for root in roots if root.is_pipeline and cast("PipelineRoot", root).has_pass), roots[-1])

    def _bind_stages(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step, in which the module itself calls the engine."""

        def run(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            if output.__class__ is not Tensor:
                self._check_loss(output)
            return output

        return run

    def _check_loss(self, output: Any) -> None:
        loss = loss_tensor(output)
        if self.world_size > 1 and (loss is None or not loss.requires_grad):
            raise ModuleError(
                f"training_step returned {'no loss' if loss is None else 'a loss without a graph'}, and the backward "
                "passes of the other ranks' engines wait for this one.",
                fix="return lw.Loss(loss_sum, weight=0) or the loss times 0 for a batch that is not to count; or train "
                "with strategy='ddp', where None skips a batch.",
            )

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
        from .deepspeed_engine import EngineRoot

        known = [root for root in self._live_roots() if root.evaluated is not None]
        if isinstance(module, EngineRoot):
            known = [root for root in known if root is module]
        if not known:
            raise DataError(
                f"rank {self.global_rank} has no batch of an evaluation and did not have one before, so that it cannot "
                "know what the other ranks' engines gather.",
                fix="evaluate on at least as many batches as there are ranks, or with strategy='deepspeed_stage_2'.",
            )
        for root in known:
            root.evaluate_without_data()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not end a window, if enabled: the engine accumulates."""
        from .deepspeed_engine import EngineRoot

        return module.within_window() if enabled and isinstance(module, EngineRoot) else nullcontext()

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Let the engine compute and reduce gradients of a loss (shape ()).

        Raises:
            ConfigError: There is no engine yet.
        """
        root = self._passed() if self.has_stages else None if self._last is None else self._last()
        if root is None or root.engine is None:
            raise ConfigError(
                "a backward pass was made before DeepSpeed had an optimizer: its engine needs module and optimizer "
                "together.",
                fix="pass both to fabric.setup(module, optimizer); with the Trainer, return an optimizer from "
                'configure_optimizers, or write a section "optimizer" into the configuration.',
            )
        if args:
            kwargs = {**dict(zip(("gradient", "retain_graph", "create_graph"), args, strict=False)), **kwargs}
        kwargs = {name: value for name, value in kwargs.items() if value not in (None, False)}
        wrong = sorted(set(kwargs) - {"retain_graph"})
        if wrong:
            raise ConfigError(
                f"backward was given {', '.join(wrong)}, which DeepSpeed's engine does not take.",
                fix="call backward with the loss alone, or with retain_graph.",
            )
        root.backward(tensor, **kwargs)

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to add a tensor over replicas, in place; see `Strategy.start_sum`."""
        root = self._newest() if self.has_stages else None
        if root is None:
            return super().start_sum(tensor)
        return cast("PipelineRoot", root).start_sum(tensor)

    def drop_gradients(self, module: nn.Module | None) -> None:
        """Forget gradients that wait for the end of a window which was broken off; of all modules for None."""
        from .deepspeed_engine import EngineRoot

        for root in [module] if module is not None else [one() for one in self._roots]:
            if isinstance(root, EngineRoot) and root.engine is not None:
                root.drop_gradients()

    def own_parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors."""
        return tensors

    def scale_gradients(self, optimizer: Optimizer, factor: Tensor | float) -> None:
        """Multiply the reduced gradients, in place, before they are clipped."""
        self._engine_of(optimizer).scale_gradients(factor)

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
        return self._engine_of(optimizer).clip_norm(max_norm, float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each element of the engine's gradients to [-clip_val, clip_val]."""
        self._engine_of(optimizer).clip_value(clip_val)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Let the engine step; return whether it did: False if a float16 gradient overflowed."""
        if closure is not None:
            closure()
        return self._engine_of(optimizer).step()

    def _engine_of(self, optimizer: Any) -> EngineRoot:
        from .deepspeed_engine import EngineOptimizer

        if type(optimizer) is not EngineOptimizer:
            raise ConfigError(
                f"{type(optimizer).__name__} is not the optimizer that DeepSpeed's engine was set up with.",
                fix="use the optimizer that setup returned.",
            )
        root: EngineRoot = optimizer.root
        return root

    # -- state ---------------------------------------------------------------------------------------------------

    def gather_state(self, state: Any) -> Any:
        """Return a state with whole tensors on rank 0's CPU; None stands for them elsewhere. On every rank."""
        from .deepspeed_state import gather

        return gather(state, keep=self.is_global_zero)

    def module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of a module in float32, under the user's names; `gather_state` makes whole what is not."""
        from .deepspeed_engine import EngineRoot
        from .deepspeed_state import module_state

        original = self.unwrap(module)
        state = super().module_state_dict(original)
        if isinstance(module, EngineRoot) and module.is_pipeline:
            from .deepspeed_stages import whole_state

            return whole_state(cast("PipelineRoot", module), state)
        if self.exclude_frozen_parameters:
            frozen = {name for name, one in original.named_parameters(remove_duplicate=False) if not one.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return module_state(module, state) if isinstance(module, EngineRoot) else state

    get_module_state_dict = module_state_dict

    def load_module_state_dict(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> Any:
        """Put back a state of whole tensors, of any strategy; masters get them in float32. On every rank."""
        from .deepspeed_engine import EngineRoot
        from .deepspeed_state import load_module

        original = self.unwrap(module)
        if not isinstance(module, EngineRoot):
            return super().load_module_state_dict(original, state, strict)
        if module.is_pipeline:
            from .deepspeed_stages import own_state

            state = own_state(cast("PipelineRoot", module), state, strict=strict)
        targets = {
            name: key
            for name in original.state_dict()
            for key in (name, name.replace("_orig_mod.", ""))
            if key in state
        }
        fitted = load_module(module, state, targets)
        if self.exclude_frozen_parameters:
            own = dict(original.named_parameters(remove_duplicate=False))
            fitted = {**{name: one.data for name, one in own.items() if not one.requires_grad}, **fitted}
        return super().load_module_state_dict(original, fitted, strict)

    def optimizer_state(self, optimizer: Optimizer, module: nn.Module | None = None) -> dict[str, Any]:
        """Return the state of an optimizer, by the numbers of the user's parameters; see `gather_state`."""
        from .deepspeed_engine import EngineOptimizer
        from .deepspeed_state import optimizer_state

        if type(optimizer) is not EngineOptimizer:  # type: ignore[comparison-overlap]  # it says that it is one
            return super().optimizer_state(optimizer, module)
        if self.is_global_zero and optimizer.root.has_gradients:
            warnings.warn(
                "gradients that DeepSpeed's engine has accumulated since the last step are not saved with the "
                "optimizer's state",
                stacklevel=2,
            )
        if optimizer.root.is_pipeline:
            from .deepspeed_stages import whole_steps

            return whole_steps(optimizer)
        return optimizer_state(optimizer)

    get_optimizer_state = optimizer_state

    def load_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], module: nn.Module | None = None
    ) -> None:
        """Put back a state of whole tensors, of any strategy."""
        from .deepspeed_engine import EngineOptimizer
        from .deepspeed_state import load_optimizer

        if type(optimizer) is not EngineOptimizer:  # type: ignore[comparison-overlap]  # it says that it is one
            super().load_optimizer_state(optimizer, state, module)
            return
        if optimizer.root.is_pipeline:
            from .deepspeed_stages import own_steps

            state = own_steps(optimizer, state)
        load_optimizer(optimizer, state)


def _within(context: Callable[[], AbstractContextManager[Any]], step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return step(*args, **kwargs)

    return run


def _several(count: int) -> ConfigError:
    return ConfigError(
        f"DeepSpeedStrategy was given {count} optimizers for one module, and an engine steps one.",
        fix="use one optimizer with several parameter groups; or strategy='ddp' or 'fsdp'.",
    )
