"""`MeshStrategy`: a model spread over the axes of a mesh of processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ConfigError
from ..base import Topology, non_finite_norm
from ..distributed.clipping import scale_to_norm, total_norm
from ..fsdp.root import root_of
from ..fsdp.strategy import FSDPStrategy
from .axes import AXES, REST, MeshAxes, read_axes
from .context.options import Context
from .context.setup import set_up
from .groups import MeshGroups
from .pipeline.options import Pipeline
from .pipeline.setup import runner_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys
    from torch.optim import Optimizer

    from ...protocols import StateDict, StepFunction
    from ..fsdp.root import ShardedRoot
    from ..fsdp.sharding import Place
    from .context.parallel import ContextParallel
    from .pipeline.window import PipelineRunner
    from .tensor import TensorPlan

__all__ = ["MeshStrategy"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Any in this file: structures of tensors and numbers, and arguments of FSDPStrategy.


class MeshStrategy(FSDPStrategy):
    """Processes as a mesh: pipeline stages, copies, shards, context and tensors, each along an axis of its own.

    The axes are, outside in: `pp`, `dp`, `fsdp`, `cp`, `tp`; ranks that follow each other are neighbors on the last
    one. Ranks that differ on `pp`, `cp` or `tp` only read the same batches, draw the same random numbers, and count
    once in metrics, sums and numbers of samples. `topology.data_rank` is the position on `dp` and `fsdp`.

    Collectives on tensors (`all_reduce`, `reduce_scatter`, `all_gather`, `start_sum`) are over the ranks that read
    different data: those with the same coordinates on `pp`, `cp` and `tp`. Objects, decisions, `broadcast` and
    `barrier` are over all ranks.

    Args:
        dp: Number of copies of the model, each with its own data.
        fsdp: Number of processes that share a copy as shards, each with its own data; -1: those that the other axes
            leave. None: -1, or 1 where another axis is -1.
        tp: Number of processes that share the matrices of a layer.
        pp: Number of pipeline stages.
        cp: Number of processes that share a sequence.
        ep: Number of processes, among those of `fsdp`, that share the experts of a layer.
        tensor_plan: How matrices are split over `tp`.
        sequence_parallel: Whether norms and dropouts between split layers run on parts of the sequence.
        loss_parallel: Whether the cross entropy is computed on parts of the vocabulary.
        pipeline: A `Pipeline`; None: its defaults.
        context: A `Context`; None: its defaults.
        verify: Whether the first batch of a run is compared with the model that is not split.
        fsdp_arguments: Arguments of FSDPStrategy, but for `device_mesh`, which follows from the axes.

    Raises:
        ConfigError: A size or another argument cannot be honored; names it.
    """

    strategy_name = "mesh"
    copies_draw_alike = True
    axis_names: Mapping[str, str] = {axis: axis for axis in AXES}
    """Names of the axes in `device_mesh`, by those of `AXES`."""

    def __init__(
        self,
        *,
        dp: int = 1,
        fsdp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        tensor_plan: Any = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        pipeline: Any = None,
        context: Any = None,
        verify: bool = True,
        **fsdp_arguments: Any,
    ) -> None:
        left = 1 if REST in (dp, tp, pp, cp) else REST
        self.axes = MeshAxes(pp=pp, dp=dp, fsdp=left if fsdp is None else fsdp, cp=cp, tp=tp, ep=ep)
        _check_experts(self.axes)
        _check_context(self.axes, context)
        _check_arguments(fsdp_arguments)
        super().__init__(**fsdp_arguments)
        self.tensor_plan = tensor_plan
        self.sequence_parallel = sequence_parallel
        self.loss_parallel = loss_parallel
        self.pipeline = pipeline
        self.context = context
        self.verify = verify
        self._groups: MeshGroups | None = None
        self._is_to_verify = verify
        self._tensor_plan: TensorPlan | None = None  # of the module that is being sharded
        self._contexts: dict[nn.Module, ContextParallel] = {}  # by the user's modules
        self._runner: PipelineRunner | None = None  # of the module that is trained
        self._kept_shapes: object = None  # of a checkpoint
        _check_pipeline(pipeline)
        _check_loss(pp, loss_parallel=loss_parallel)
        if pp != 1:  # a stage needs its parameters for all micro-batches of a window
            self.plan = replace(self.plan, reshard_after_forward=False)

    @classmethod
    def read_options(cls, text: str) -> dict[str, Any]:
        """Return the arguments in the options of a name, such as "fsdp=2,tp=2" in "mesh:fsdp=2,tp=2"."""
        return {**read_axes(text)}

    # -- processes -----------------------------------------------------------------------------------------------

    def check_processes(self, num_processes: int, num_nodes: int) -> None:
        """Compare the sizes of the axes with the number of processes; see `Strategy.check_processes`."""
        axes = self.axes.resolve(num_processes)
        if axes.pp > 1:
            self._pipeline_options.num_stages(axes.pp)

    @property
    def topology(self) -> Topology:
        """Ranks and sizes; `data_rank` is the position on the axes dp and fsdp."""
        if self._topology is not None:
            return self._topology
        found = super().topology
        if found.world_size == 1 and not self.is_connected:  # not launched yet
            return found
        axes, rank = self.axes.resolve(found.world_size), found.global_rank  # resolved_axes asks for the topology
        stage = axes.coordinates(rank)["pp"]
        return replace(found, data_rank=axes.data_rank(rank), data_size=axes.data_size, stage=stage)

    @property
    def reporting_ranks(self) -> list[int] | None:  # type: ignore[override]  # it follows from the axes
        """For each share of the data the first of the ranks with the last stage, which has the loss; None: all."""
        axes = self.resolved_axes
        copies = axes.cp * axes.tp
        if axes.pp * copies == 1:
            return None
        size = axes.data_size * copies  # of a stage
        first = self._last_stage_rank * size
        return list(range(first, first + size, copies))

    @property
    def resolved_axes(self) -> MeshAxes:
        """The sizes of the axes for the number of processes, without -1."""
        return self.axes.resolve(self.world_size)

    @property
    def has_stages(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the axes
        """Whether ranks hold different layers."""
        return (self.resolved_axes if self.is_connected else self.axes).pp != 1

    @property
    def groups(self) -> MeshGroups:
        """The meshes and process groups. On every rank: the first access communicates."""
        if self._groups is None:
            self._groups = MeshGroups(self.device.type, self.resolved_axes, self.axis_names)
        return self._groups

    @property
    def device_mesh(self) -> DeviceMesh | None:  # type: ignore[override]  # it is not set, but follows from the axes
        """The processes as a mesh with all axes, also those of size 1: `device_mesh["tp"]` is one of them.

        None before the processes are connected.
        """
        return self.groups.full if self.is_connected else None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded: the axes dp, where there are copies, and fsdp with cp."""
        return self.groups.shards

    def setup_environment(self) -> None:
        """Connect the processes and make their groups. Called once in every process."""
        super().setup_environment()
        if self.is_connected:
            self._groups = None
            self.groups  # noqa: B018  # here, where all ranks are: a first collective may be that of a few

    def teardown(self) -> None:
        """Release devices and connections after a run."""
        super().teardown()
        self._groups = None
        self._contexts = {}

    def check_layers(self, module: nn.Module) -> None:
        """Refuse a module without experts that `ep` ranks can share; see `Strategy.check_layers`."""
        if self.axes.ep > 1:
            from .experts.sharding import check_experts

            check_experts(module, self.axes.ep)

    def _meshes_of_units(self, module: nn.Module) -> dict[nn.Module, DeviceMesh]:
        mesh = self.groups.expert_shards
        if mesh is None:
            return {}
        from .experts.sharding import experts_in

        layers = (one.experts for one in experts_in(module).values())
        return {one: mesh for one in layers if any(True for _ in one.parameters())}  # not those of other stages

    def _place(self) -> Place:
        from ..fsdp.sharding import Place

        plan, groups = self.plan, self.groups
        # Where nothing is to be gathered or averaged, what fully_shard does besides may still be wanted.
        is_sharded = (
            self.resolved_axes.reduce_size > 1
            or plan.offload
            or plan.mixed_precision is not None
            or self.accumulate_dtype is not None
        )
        return Place(groups.shards, self.device, groups.reduce, groups.stage, is_sharded)

    @property
    def _reduce_group(self) -> ProcessGroup | None:
        return self.groups.reduce

    @property
    def _source_group(self) -> ProcessGroup | None:
        return self.groups.stage

    # -- tensor parallel layers ------------------------------------------------------------------------------------

    def _shard(self, module: nn.Module) -> ShardedRoot:
        self._tensor_plan = None
        root = super()._shard(module)
        root.tensor_plan, self._tensor_plan = self._tensor_plan, None
        if root.tensor_plan is not None:
            root.tensor_plan.finish(module)
        return root

    def _begin_splitting(self, module: nn.Module) -> Callable[[list[nn.Module]], None] | None:
        """Return what splits the layers of a unit over the axis tp; None where it has one process."""
        size = self.resolved_axes.tp
        if size == 1:
            return None
        from .tensor import resolve_plan

        plan = self._tensor_plan = resolve_plan(
            module,
            self.tensor_plan,
            tp=size,
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
        )
        if self.is_global_zero:
            logger.info("%s", plan)
            for note in plan.notes:
                logger.warning("%s", note)
        return lambda modules: plan.apply(modules, module, self.groups.tensor)

    def _split_step(self, step: StepFunction, original: nn.Module, name: str) -> StepFunction:
        root = root_of(original)
        plan = None if root is None else root.tensor_plan
        if plan is None or name == "forward":
            return step
        from .steps import split_step, verified_step

        step = split_step(plan, original, step)
        # With stages no rank runs all layers in one step.
        is_whole = name == "training_step" and not self.has_stages
        return verified_step(plan, original, step, self._take_verification) if is_whole else step

    def _take_verification(self) -> bool:
        """Return whether the split layers are to be compared now: once, in the first batch of a first run."""
        is_due, self._is_to_verify = self._is_to_verify, False
        return is_due

    def backward(self, tensor: Tensor, *args: object, **kwargs: object) -> None:
        """Compute gradients of a loss (shape (), already scaled by the precision); average and shard them."""
        context = next(iter(self._contexts.values()), None)
        with ExitStack() as around:
            if context is not None:
                around.enter_context(context.in_backward())
            if self.loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                around.enter_context(loss_parallel())
            super().backward(tensor, *args, **kwargs)

    # -- pipeline stages -----------------------------------------------------------------------------------------

    @property
    def runs_windows(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the axes
        """Whether windows are run through pipeline stages."""
        return self.has_stages

    @property
    def holds_parameters(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the axes
        """Whether parameters are on other ranks, so that callbacks cannot average or prune the model here."""
        return self.has_stages

    @property
    def compile_refusal(self) -> tuple[str, str] | None:  # type: ignore[override]  # it follows from the axes
        """Why `compile=` cannot be used with pipeline stages; None without them."""
        if not self.has_stages:
            return super().compile_refusal
        return ("a step of a pipeline stage leaves the module in the middle", "leave compile= out, or train without pp")

    @property
    def has_last_stage(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the axes
        """Whether steps run to their end on this rank."""
        if not self.is_connected or not self.has_stages:
            return True
        return self._last_stage_rank == self.topology.stage

    @property
    def _last_stage_rank(self) -> int:
        """The place in the pipeline of the rank with the last stage."""
        options, num_ranks = self._pipeline_options, self.resolved_axes.pp
        last = options.num_stages(num_ranks) - 1
        return next(rank for rank in range(num_ranks) if last in options.stages_of(rank, num_ranks))

    @property
    def _pipeline_options(self) -> Pipeline:
        return self.pipeline if self.pipeline is not None else Pipeline()

    @property
    def _stage_group(self) -> ProcessGroup:
        return self.groups.full["pp"].get_group()

    def _begin_sharding(self, module: nn.Module) -> Callable[[list[nn.Module]], None] | None:
        super()._begin_sharding(module)
        prepare = self._begin_splitting(module)
        if self.groups.experts is not None:
            from .experts.sharding import preparing

            prepare = preparing(module, self.groups.experts, prepare)
        if self.has_stages:
            from .pipeline.setup import split_module

            if self.precision.has_scaler:
                raise ConfigError(
                    "Expected a precision without loss scaling with pipeline stages, got "
                    f"{self.precision.precision!r}.",
                    fix="pass precision='bf16-mixed', 'bf16-true' or '32-true'.",
                )
            split_module(
                module, self._pipeline_options, self._stage_group, rank=self.topology.stage, device=self.device
            )
        return prepare

    def _step_of(self, original: nn.Module, name: str) -> StepFunction:
        step, runner = self._split_step(super()._step_of(original, name), original, name), runner_of(original)
        if runner is None:
            return step
        if name != "training_step":
            return runner.evaluated(step)
        self._runner = runner
        runner.load_state_dict(self._kept_shapes)
        return runner.staged(step)

    def state_dict(self) -> StateDict:
        """Return the shapes that stages exchange, with which a resumed run begins. On every rank: it communicates."""
        state = super().state_dict()
        return state if self._runner is None else {**state, "pipeline": self._runner.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load what `state_dict` returned, now or when the module is set up."""
        super().load_state_dict(state_dict)
        self._kept_shapes = state_dict.get("pipeline")
        if self._runner is not None:
            self._runner.load_state_dict(self._kept_shapes)

    def run_window(
        self, batches: Sequence[object], step: Callable[..., Any], share: Callable[[Any], Tensor]
    ) -> Sequence[Any]:
        """Run forward and backward passes of a window's micro-batches through all stages; see `Strategy.run_window`."""
        from .pipeline.setup import run_window

        assert self._runner is not None
        return run_window(self._runner, batches, step, share)

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """Return the last stage's tensor, on every rank of its pipeline; see `Strategy.from_last_stage`."""
        if not self.has_stages or not self.is_connected:
            return tensor
        dist.broadcast(tensor, group=self._stage_group, group_src=self._last_stage_rank)
        return tensor

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale gradients so that their total norm, over all stages, is at most `max_norm`; see FSDPStrategy's."""
        runner = runner_of(self.unwrap(module))
        if runner is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        from .pipeline.gradients import counted_elsewhere, norm_over_stages

        trained = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        elsewhere = counted_elsewhere(runner.split)
        own = total_norm([one.grad for one in trained if id(one) not in elsewhere], norm_type)
        norm = norm_over_stages(own.to(self.device), norm_type, self._stage_group)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise non_finite_norm()
        scale_to_norm([one.grad for one in trained], max_norm, norm)
        return norm

    def module_state_dict(self, module: nn.Module) -> StateDict:
        """Return the state of a module under the user's names; what other stages have is gathered by `gather_state`."""
        state = super().module_state_dict(module)
        runner = runner_of(self.unwrap(module))
        if runner is None:
            return state
        from .pipeline.state import stages_state

        return stages_state(runner, state)

    get_module_state_dict = module_state_dict

    def load_module_state_dict(self, module: nn.Module, state: StateDict, strict: bool = True) -> LoadedKeys:
        """Load a state of any layout; see `Strategy.load_module_state_dict`."""
        runner = runner_of(self.unwrap(module))
        if runner is not None:
            from .pipeline.state import own_module_state

            state = own_module_state(runner.split, state)
        return super().load_module_state_dict(module, state, strict)

    def optimizer_state(self, optimizer: Optimizer, module: nn.Module | None = None) -> StateDict:
        """Return the state of an optimizer; those of the stages are joined by `gather_state`."""
        state = super().optimizer_state(optimizer, module)
        runner = None if module is None else runner_of(self.unwrap(module))
        if runner is None:
            return state
        from .pipeline.state import stage_optimizer

        return stage_optimizer(runner, optimizer, state)

    get_optimizer_state = optimizer_state

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict, module: nn.Module | None = None) -> None:
        """Load a state of any layout; see `Strategy.load_optimizer_state`. A resumed run is not verified."""
        self._is_to_verify = False
        runner = None if module is None else runner_of(self.unwrap(module))
        if runner is not None:
            from .pipeline.state import own_optimizer_state

            state = own_optimizer_state(runner.split, optimizer, state)
        super().load_optimizer_state(optimizer, state, module)

    def arrange_shards(self, state: object) -> Any:
        """Return the state under the names of all stages, with this rank's shards; see `Strategy.arrange_shards`."""
        if not self.has_stages:
            return super().arrange_shards(state)
        from .pipeline.shards import arrange_shards
        from .pipeline.state import runner_in

        runner = runner_in(state)
        if runner is None:
            return super().arrange_shards(state)
        axes = self.resolved_axes
        mesh = self.groups.shards if axes.world_size == axes.pp else None
        return arrange_shards(runner, state, mesh, keep=self.is_global_zero)

    def gather_state(self, state: object) -> Any:
        """Return a state with full tensors of all stages on rank 0's CPU; see `Strategy.gather_state`."""
        if not self.has_stages:
            return super().gather_state(state)
        from .pipeline.state import gather_stages, runner_in

        runner = runner_in(state)
        return super().gather_state(state) if runner is None else gather_stages(runner, state, keep=self.is_global_zero)

    # -- shared sequences ----------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module's parameters, in place, and let its steps share sequences; see `FSDPStrategy`."""
        root = super().setup_module(module)
        original = self.unwrap(root)
        if self.resolved_axes.cp > 1 and original not in self._contexts:
            self._contexts[original] = set_up(
                original,
                self.context,
                self.groups.full[self.axis_names.get("cp", "cp")],
                self.device,
                verifies=self.verify,
            )
        return root

    place_module = setup_module

    def bind_step(self, module: nn.Module, name: str) -> StepFunction:
        """Return what runs `module.<name>`, on this rank's parts of sequences where these are shared."""
        step = super().bind_step(module, name)
        context = self._contexts.get(self.unwrap(module))
        return step if context is None else context.bind(step, name)

    @property
    def _logs_parts(self) -> bool:
        """Whether the ranks that share sequences log values of their parts."""
        return self.context is not None and self.context.batch is not None and self.resolved_axes.cp > 1

    def gather_logged(self, obj: T) -> list[T]:
        """Return the objects of the ranks whose logged values count; see `Strategy.gather_logged`."""
        return self.gather_objects(obj)[:: self.resolved_axes.tp] if self._logs_parts else self.gather_reports(obj)

    @property
    def logged_place(self) -> tuple[int, int]:
        """Which object of `gather_logged` is of this rank, and their number."""
        if not self._logs_parts:
            return self.report_place
        tp = self.resolved_axes.tp
        return self.global_rank // tp, self.world_size // tp

    # -- collectives over the ranks that read different data -------------------------------------------------------

    def all_reduce(self, tensor: object, group: ProcessGroup | str | None = None, reduce_op: object = "mean") -> Any:
        """Return a tensor, number or structure, reduced over the ranks that read different data, or over `group`."""
        if isinstance(group, str):  # all_reduce(tensor, "sum")
            group, reduce_op = None, group
        return super().all_reduce(tensor, self._data_group(group), reduce_op)

    reduce = all_reduce

    def reduce_scatter(
        self, tensor: object, group: ProcessGroup | str | None = None, reduce_op: object = "mean"
    ) -> Any:
        """Return this rank's chunk of a reduction over the ranks that read different data, or over `group`."""
        if isinstance(group, str):  # reduce_scatter(tensor, "sum")
            group, reduce_op = None, group
        return super().reduce_scatter(tensor, self._data_group(group), reduce_op)

    def all_gather(self, tensor: object, group: ProcessGroup | bool | None = None, sync_grads: bool = False) -> Any:
        """Return tensors of the ranks that read different data, or of `group`, stacked along a new first dimension."""
        if isinstance(group, bool):  # all_gather(tensor, True)
            sync_grads, group = group, None
        return super().all_gather(tensor, self._data_group(group), sync_grads)

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to add a tensor over the ranks that read different data; see `Strategy.start_sum`."""
        if not self.is_connected:
            return lambda: tensor
        work = dist.all_reduce(tensor, group=self.groups.data, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return tensor

        return finish

    def _data_group(self, group: ProcessGroup | None) -> ProcessGroup | None:
        if group is not None or not self.is_connected:
            return group
        return self.groups.reduce if self._logs_parts else self.groups.data


def _check_context(axes: MeshAxes, context: object) -> None:
    """Refuse options of context parallelism of another class, and pipeline stages beside it."""
    if context is not None and not isinstance(context, Context):
        raise ConfigError(
            f"Expected context= to be a Context, got {context!r}.",
            fix='pass context=Context(inputs={"input_ids": 1}), or leave it out.',
        )
    others = [f"{name}={size}" for name, size in (("pp", axes.pp), ("tp", axes.tp)) if size != 1]
    if axes.cp != 1 and others:
        raise ConfigError(
            f"Expected cp={axes.cp} with the axes dp and fsdp only, got {', '.join(others)}: not available together.",
            fix="pass cp=1, or leave the other axes out.",
        )


def _check_experts(axes: MeshAxes) -> None:
    others = [f"{name}={getattr(axes, name)}" for name in ("pp", "cp", "tp") if getattr(axes, name) != 1]
    if axes.ep > 1 and others:
        raise ConfigError(
            f"Expected ep={axes.ep} with the axes dp and fsdp only, got {', '.join(others)}: not available together.",
            fix="leave out ep, or the other axes.",
        )


def _check_pipeline(pipeline: object) -> None:
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise ConfigError(f"Expected pipeline= to be a Pipeline, got {pipeline!r}.", fix="pass Pipeline(...), or None.")


def _check_loss(pp: int, *, loss_parallel: bool) -> None:
    if loss_parallel and pp != 1:
        raise ConfigError(
            f"Expected loss_parallel=False with pipeline stages, got True and pp={pp}: not available together.",
            fix="leave loss_parallel out, or train without pp; sequence_parallel=True is available with pp.",
        )


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of FSDPStrategy that say what the axes say."""
    for name in ("device_mesh", "mesh"):
        if arguments.get(name) is not None:
            raise ConfigError(
                f"Expected {name}= to be left out of MeshStrategy, got {arguments[name]!r}: it follows from the axes.",
                fix="pass the number of copies as dp= and the number of shards as fsdp=.",
            )
    chosen = arguments.get("sharding_strategy")
    name = str(getattr(chosen, "name", chosen))
    if chosen is not None and name not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise ConfigError(
            f"Expected sharding_strategy='FULL_SHARD' or 'SHARD_GRAD_OP' for MeshStrategy, got {chosen!r}.",
            fix="leave it out, and pass the number of copies as dp= and the number of shards as fsdp=.",
        )
