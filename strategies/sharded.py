"""`ShardedStrategy`: the base class of strategies that shard parameters over a mesh of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import Clauses, ModuleError, own_arguments
from ..precision.base import compute_gradients
from .base import NoLoss, Strategy, Topology, non_finite_norm, refuse_complex
from .construction.activation_checkpointing import choose_checkpointed
from .construction.deferred import DeferredInit
from .construction.wrap_policy import choose_units
from .distributed.changes import params_of_group
from .distributed.clipping import scale_to_norm, total_norm
from .distributed.collectives import broadcast_tensors
from .distributed.shards import gather_full, is_sharded, local, reading_numbers
from .fsdp import broken_pass
from .fsdp.arguments import OF_PROCESSES, read_arguments
from .fsdp.fitting import fit_module_state, fit_optimizer_state
from .fsdp.root import ShardedRoot, root_of
from .fsdp.sharder import Sharder, parameters_of
from .fsdp.sharding import ShardingTarget
from .fsdp.steps import bound, bound_training
from .mesh.axes import AXES, MeshAxes
from .mesh.groups import MeshGroups, make_groups
from .mesh.split import ModuleSplit
from .parallel import ParallelStrategy
from .tensor_subclasses import refuse_shards, unpack_subclasses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys
    from torch.optim import Optimizer

    from ..protocols import Batch, StateDict, StepFunction
    from .mesh.context.options import Context
    from .mesh.layers import TensorSplit
    from .mesh.pipeline.stages import Stages

T = TypeVar("T")

# Any in this file: arguments by name, batches, what steps take and return, and entries of states.


class ShardedStrategy(ParallelStrategy):
    """The base class of strategies with processes along the axes of a mesh, over which parameters are sharded.

    A `Sharder` shards parameters over the axes dp, fsdp and cp; a `ModuleSplit` splits the module itself: layers over
    tp, stages over pp, sequences over cp, experts over ep.

    Args:
        axes: Sizes of the axes.
        arguments: Arguments of FSDPStrategy, by name.
        tensor: Splits layers over the axis tp; None does not split them.
        stages: Splits the module over the axis pp; None is one stage.
        context: How sequences are split over the axis cp; None is the defaults.
        verify: Whether the first batch of a run is compared with the unsplit module.

    Raises:
        ConfigError: An argument is unknown or unsupported; every problem is named.
    """

    traits = replace(
        ParallelStrategy.traits,
        uneven_choices=("stop_all", "cycle"),  # a rank without a batch cannot take part in gathering
        shards_parameters=True,
        sums_gradients_itself=True,
        has_module_hooks=True,
    )
    saves_optimizers = False
    helps_in_evaluation = True
    """Whether this rank can call `evaluate_without_data`: also before its first batch."""
    total_norm: Callable[[Sequence[Tensor], float], Tensor] = staticmethod(total_norm)
    """Returns the norm of sharded gradients, on every rank; see `clipping.total_norm`."""
    axis_names: Mapping[str, str] = {axis: axis for axis in AXES}
    """Names of the axes in `device_mesh`, by those of `AXES`."""

    def __init__(
        self,
        axes: MeshAxes,
        arguments: Mapping[str, Any],
        *,
        tensor: TensorSplit | None = None,
        stages: Stages | None = None,
        context: Context | None = None,
        verify: bool = False,
    ) -> None:
        problems = Clauses()
        of_plan = {name: one for name, one in arguments.items() if name not in OF_PROCESSES}
        plan = read_arguments(of_plan, problems, own_arguments(type(self)))
        super().__init__(**{name: one for name, one in arguments.items() if name in OF_PROCESSES}, problems=problems)
        # A stage needs its parameters for all micro-batches of a window.
        self.plan = plan if stages is None else replace(plan, reshard_after_forward=False)
        if plan.mixed_precision is not None:
            refusal = ("its mixed_precision= sets the dtypes", "pass reduce_dtype=torch.float32 there")
            self.traits = replace(self.traits, accumulation_refusal=refusal)
        self.axes = axes
        self._lw_sharder = Sharder(self)
        self._lw_split = ModuleSplit(tensor, stages, context, verify=verify)
        self._lw_groups: MeshGroups | None = None
        self._lw_resolved: tuple[int, MeshAxes, MeshAxes] | None = None  # number of processes, axes, and these resolved
        self._lw_expect(axes)

    # -- processes -----------------------------------------------------------------------------------------------

    def check_processes(self, num_processes: int, num_nodes: int) -> None:
        """Compare the sizes of the axes with the number of processes; see `ChecksProcesses.check_processes`."""
        axes = self.axes.resolve(num_processes)
        self._lw_expect(axes)
        self._lw_split.check_processes(axes)

    def _lw_expect(self, axes: MeshAxes) -> None:
        """Set what follows from the axes; they are resolved when the number of processes is known."""
        self._lw_expected_axes = axes
        self.traits = self._lw_split.traits(self.traits, axes)

    @property
    def resolved_axes(self) -> MeshAxes:
        """The sizes of the axes for the number of processes, without -1."""
        size, known = self.world_size, self._lw_resolved
        if known is None or known[0] != size or known[1] is not self.axes:  # asked several times in a step
            known = self._lw_resolved = (size, self.axes, self.axes.resolve(size))
        return known[2]

    @property
    def topology(self) -> Topology:
        """Ranks and sizes; `data_rank` is the position on the axes dp and fsdp."""
        if self._lw_topology is not None:
            return self._lw_topology
        found = super().topology
        if found.world_size == 1 and not self.is_connected:  # not launched yet
            return found
        axes, rank = self.axes.resolve(found.world_size), found.global_rank  # resolved_axes asks for the topology
        size, copies = axes.world_size // axes.pp, axes.cp * axes.tp
        first = size * self._lw_last_stage(axes)
        of_last_stage = range(first, first + size)  # which has the losses
        context = self._lw_split.context
        logs_parts = axes.cp > 1 and context is not None and context.batch is not None
        return replace(
            found,
            data_rank=axes.data_rank(rank),
            data_size=axes.data_size,
            stage=axes.coordinates(rank)["pp"],
            reporting_ranks=None if axes.pp * copies == 1 else tuple(of_last_stage[::copies]),
            logging_ranks=tuple(of_last_stage[:: axes.tp]) if logs_parts else None,
            logging_place=rank % size // axes.tp,
        )

    @property
    def groups(self) -> MeshGroups:
        """The meshes and process groups. Read it on every rank: the first access communicates."""
        if self._lw_groups is None:
            self._lw_groups = self._lw_make_groups()
        return self._lw_groups

    def _lw_make_groups(self) -> MeshGroups:
        return make_groups(self.device.type, self.resolved_axes, self.axis_names)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of processes with all axes, including axes of size 1, such as `device_mesh["tp"]`.

        None before the processes are connected.
        """
        return self.groups.full if self.is_connected else None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded: the axis dp, if there are copies, and fsdp with cp."""
        return self.groups.shards

    def setup_environment(self) -> None:
        """Connect the processes and make their groups. Called once in every process."""
        super().setup_environment()
        self._lw_expect(self.resolved_axes)
        self._lw_groups = None
        # Here, where all ranks are: a first collective may be that of a few.
        if self.is_connected and self.groups.full is not None:
            # torch (2.13) asks the ranks of the first gradient only, which may be the same on all ranks of an axis.
            self.precision.reduce_overflow = _largest_on_all_ranks

    def teardown(self) -> None:
        """Release devices and connections after a run."""
        self.precision.reduce_overflow = None
        super().teardown()
        self._lw_groups = None
        self._lw_split.forget()

    # -- data ----------------------------------------------------------------------------------------------------

    @property
    def batch_norm_group(self) -> ProcessGroup | None:
        """The ranks over which batch norms are synchronized: ranks with the same layers that read different data."""
        return self.groups.reduce if self.is_connected else None

    @property
    def _lw_data_group(self) -> ProcessGroup | None:  # type: ignore[override]  # it follows from the axes
        """The ranks that read different data: those with this one's coordinates on pp, cp and tp; None: all."""
        return self.groups.data if self.is_connected else None

    @property
    def _lw_tensor_group(self) -> ProcessGroup | None:  # type: ignore[override]  # it follows from the axes
        """The ranks over which tensors are reduced and gathered: those that log different values; None: all."""
        logs_parts = self.is_connected and self.topology.logging_ranks is not None
        return self.groups.reduce if logs_parts else self._lw_data_group

    # -- before the launch ---------------------------------------------------------------------------------------

    def configure_fsdp_auto_wrap_policy(self, module: nn.Module) -> Any:
        """Return the policy that selects units, `auto_wrap_policy` by default; override it for a policy by model.

        Called once, on every rank, before the module is sharded.
        """
        return self.plan.auto_wrap_policy

    def check_layers(self, module: nn.Module) -> None:
        """Refuse a module that cannot be sharded or split along these axes; see `ChecksLayers.check_layers`."""
        if root_of(module) is not None:  # of an earlier run: its layers are those of a rank
            return
        is_own = type(self).configure_fsdp_auto_wrap_policy is ShardedStrategy.configure_fsdp_auto_wrap_policy
        if is_own:  # an override decides in the ranks
            units = [one for _, one in choose_units(module, self.plan.auto_wrap_policy).units]
            if self.plan.activation_checkpointing is not None:
                choose_checkpointed(module, self.plan.activation_checkpointing, units=units)
        self._lw_split.check(module, self._lw_expected_axes, self.precision)

    @contextmanager
    def init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which a module is built without memory; `setup_module` initializes it unit by unit.

        Args:
            empty_init: True initializes nothing, for values that are loaded from a checkpoint. None gives the values
                that the module's constructors set, bit for bit. False builds the full module on the CPU.
        """
        if empty_init is False:
            yield
            return
        with DeferredInit(empty=bool(empty_init)):
            yield

    def change_context(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context that defers changes of a module without values until it is initialized."""
        if not any(one.is_meta for one in [*module.parameters(), *module.buffers()]):
            return nullcontext()
        return DeferredInit()

    # -- the model -----------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `setup_module` moves the module unit by unit."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Split and shard the module's parameters in place, and return its wrapper. On every rank: it communicates.

        A module that is sharded already is not sharded again.

        Raises:
            ModuleError: The ranks built different modules, or the module cannot be sharded; the message has the reason.
        """
        root = root_of(module)
        if root is None:
            root = self._lw_shard(module)
        else:
            self._lw_sharder.take_over(root, self._lw_target(), self.resolved_axes.layout)
        self._lw_sharder.roots.add(root)
        self._lw_split.share_sequences(root.module, self)
        return root

    place_module = setup_module

    def _lw_shard(self, module: nn.Module) -> ShardedRoot:
        prepare = self._lw_prepare(module)
        plan = replace(
            self.plan,
            auto_wrap_policy=self.configure_fsdp_auto_wrap_policy(module),
            accumulate_dtype=self.accumulate_dtype,
        )
        root = self._lw_sharder.shard(
            module,
            plan,
            self._lw_target(),
            layout=self.resolved_axes.layout,
            prepare=prepare,
            meshes=self._lw_split.meshes(module, self.groups.expert_shards),
        )
        self._lw_split.finish(root)
        return root

    def _lw_prepare(self, module: nn.Module) -> Callable[[list[nn.Module]], None] | None:
        """Compare the module over ranks and split it; return what is called with each unit before it is sharded."""
        self.check_module(module)
        return self._lw_split.begin(module, self)

    def _lw_target(self) -> ShardingTarget:
        """Return the processes over which the module is sharded."""
        plan, groups = self.plan, self.groups
        # Where nothing is to be gathered or averaged, what fully_shard does besides may still be wanted.
        is_sharded = (
            self.resolved_axes.reduce_size > 1
            or plan.offload
            or plan.mixed_precision is not None
            or self.accumulate_dtype is not None
        )
        return ShardingTarget(
            groups.shards, self.device, groups.reduce, groups.stage, is_sharded=is_sharded, seeds_by_name=True
        )

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast the first rank's buffers to all ranks with the same layers."""
        if self.world_size > 1:
            buffers = [one for one in self.unwrap(module).buffers() if not is_sharded(one)]
            broadcast_tensors(buffers, self.groups.stage)

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that no backward pass averaged; see `Strategy.average_gradients`."""
        self._lw_sharder.average_gradients(parameters)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's module."""
        return module.module if isinstance(module, ShardedRoot) else module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer with its parameters replaced by the sharded ones; see `Sharder.replace_parameters`."""
        self._lw_stepped.pop(id(optimizer), None)
        self._lw_sharder.replace_parameters(optimizer)
        return optimizer

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind_step(self, module: nn.Module, name: str) -> StepFunction:
        """Return a function that runs `module.<name>` with gathered parameters, on every rank at the same time.

        A pass without gradients leaves no parameter gathered. A rank runs its stages, and its parts of split layers
        and sequences.
        """
        original = self.unwrap(module)
        step: StepFunction = original if name == "forward" else getattr(original, name)
        step = self._lw_split.bind(step, original, name, has_stages=self.traits.has_stages)
        if isinstance(module, ShardedRoot):
            is_training = name == "training_step" and not module.is_by_parts
            step = (bound_training if is_training else bound)(module, step, self, self._lw_sharder.adopt_changes)
        return self._lw_split.bind_sequences(step, original, name)

    def without_data(self, module: nn.Module) -> NoLoss | None:
        """Raise an error: a rank without a batch cannot take part in a training step.

        Raises:
            ModuleError: Always.
        """
        raise ModuleError(
            f"Expected a training batch on every rank with {type(self).__name__}, got none on rank {self.global_rank}.",
            fix="provide the same number of batches on all ranks, or pass uneven='stop_all' or 'cycle'.",
        )

    def evaluate_without_data(self, module: nn.Module | None) -> None:
        """Take part in an evaluation step for which other ranks have a batch and this rank has none.

        The units are gathered in the order of this rank's last evaluation step, before its first in the order in which
        the module has them.
        """
        self._lw_sharder.evaluate_without_data(module)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[object]:
        """Return a context in which backward passes add to full gradients on this rank only, if enabled."""
        if enabled and self.world_size > 1 and isinstance(module, ShardedRoot):
            return module.without_sync()
        return nullcontext()

    def backward(self, tensor: Tensor, *args: object, **kwargs: object) -> None:
        """Compute gradients of a loss (shape (), already scaled by the precision); average and shard them."""
        with self._lw_split.in_backward():
            try:
                compute_gradients(tensor, *args, **kwargs)
            except RuntimeError as error:
                self._lw_sharder.explain(error, tensor)
                raise
            self._lw_sharder.end_backward()

    def discard_gradients(self, module: nn.Module | None, optimizer: Optimizer | None = None) -> None:
        """Discard gradients that wait for the end of their window; an optimizer's `zero_grad` does not reach them."""
        self._lw_sharder.discard_gradients(module, optimizer)

    def count_collectives(self) -> dict[str, int]:
        """Return how many collectives this rank has begun, by process group; see `RejoinsPasses`."""
        return broken_pass.count_collectives()

    def skip_collectives(self, counts: Mapping[str, int]) -> AbstractContextManager[object]:
        """Return a context that skips the next collectives of this rank; see `RejoinsPasses`."""
        return broken_pass.SkippedCollectives(counts)

    def break_off(self, module: nn.Module) -> None:
        """Free the state and the gradients of an interrupted pass; see `RejoinsPasses`."""
        if isinstance(module, ShardedRoot):
            broken_pass.break_off(module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> bool:
        """Step the optimizer; see `Strategy.optimizer_step`.

        Raises:
            ModuleError: Gradients of its parameters were not averaged: it would step without them.
        """
        is_first = self._lw_stepped.get(id(optimizer)) != [*map(len, map(params_of_group, optimizer.param_groups))]
        if is_first:
            # A loop that calls the module itself, and not its training_step, may average other gradients itself.
            self._lw_check_stepped(optimizer, [one.changes for one in self._lw_sharder.roots if one.is_trained_by_step])
        self._lw_sharder.check_step(optimizer, has_closure=closure is not None)
        with reading_numbers():
            has_stepped = super().optimizer_step(optimizer, closure)
        if is_first:
            refuse_shards(optimizer, warns=not self.saves_optimizers)
        return has_stepped

    def scale_gradients(self, optimizer: Optimizer, factor: Tensor | float) -> None:
        """Multiply the reduced gradients of the optimizer's parameters, in place, before they are clipped."""
        shards = local(_gradients(optimizer))
        if shards:
            torch._foreach_mul_(shards, factor)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the gradients of the optimizer's parameters in place so that their total norm is at most `max_norm`.

        On every rank: it communicates, once for each axis of the mesh. See `Strategy.clip_gradients_norm`.
        """
        gradients = _gradients(optimizer)
        runner = self._lw_split.runner(self.unwrap(module))
        if runner is None:
            norm = self.total_norm(gradients, norm_type).to(self.device)
        else:
            from .mesh.pipeline.gradients import norm_over_stages

            norm = norm_over_stages(runner.split, runner.group, parameters_of(optimizer), norm_type, self.device)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise non_finite_norm()
        scale_to_norm(gradients, max_norm, norm)
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each gradient element of the optimizer's parameters to [-clip_val, clip_val], in place."""
        refuse_complex(_gradients(optimizer), type(self).__name__)
        for part in local(_gradients(optimizer)):
            part.clamp_(-clip_val, clip_val)

    # -- pipeline stages -----------------------------------------------------------------------------------------

    @property
    def has_last_stage(self) -> bool:
        """Whether steps run to the end on this rank: on the last stage."""
        has_stages = self.is_connected and self.traits.has_stages
        return not has_stages or self._lw_last_stage(self.resolved_axes) == self.topology.stage

    def _lw_last_stage(self, axes: MeshAxes) -> int:
        """Return the place in a pipeline of the rank with the last stage."""
        stages = self._lw_split.stages
        return 0 if stages is None else stages.last_rank(axes.pp)

    def run_window(self, batches: Sequence[Batch], step: StepFunction, share: Callable[[Any], Tensor]) -> Sequence[Any]:
        """Run the passes of a window's micro-batches through all stages; see `RunsWindows.run_window`."""
        return self._lw_split.run_window(batches, step, share, has_full_sequences=self.resolved_axes.cp == 1)

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """Return the last stage's tensor, on every rank of its pipeline; see `HasStages.from_last_stage`."""
        if self.traits.has_stages and self.is_connected:
            dist.broadcast(tensor, group=self.groups.pipeline, group_src=self._lw_last_stage(self.resolved_axes))
        return tensor

    def of_stages(self, module: nn.Module, facts: dict[str, T]) -> dict[str, T]:
        """Return facts about modules and parameters from the ranks that have these; see `HasStages.of_stages`."""
        runner = self._lw_split.runner(self.unwrap(module))
        return facts if runner is None else runner.joined(facts)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the shapes that stages exchange, for a resumed run. On every rank: it communicates."""
        stages = self._lw_split.stages
        return {} if stages is None else stages.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load a state returned by `state_dict`, now or when the module is set up."""
        if self._lw_split.stages is not None:
            self._lw_split.stages.load_state_dict(state_dict)

    def saves_shards(self, default: str) -> bool:
        """Return whether all ranks write their shards of checkpoints; `default` decides if the user did not."""
        return (self.plan.state_dict_type or default) == "sharded"

    def arrange_shards(self, state: T) -> T:
        """Return the state under the names of all stages, with this rank's shards; see `SavesShards.arrange_shards`."""
        if self._lw_split.stages is None:
            return state
        axes = self.resolved_axes
        mesh = self.groups.shards if axes.world_size == axes.pp else None
        return self._lw_split.stages.arrange_shards(state, mesh, keep=self.is_global_zero)

    def gather_state(self, state: T) -> T:
        """Return a state with full tensors on rank 0's CPU, and None in their place elsewhere. On every rank."""
        gather = gather_full if self._lw_split.stages is None else self._lw_split.stages.gather
        return gather(state, keep=self.is_global_zero)

    def module_state_dict(self, module: nn.Module) -> StateDict:
        """Return the state of a module, under the user's names; sharded tensors share memory with the parameters.

        `gather_state` gathers the states of other stages.
        """
        original = self.unwrap(module)
        with self._lw_split.in_parts(original):
            return self._lw_split.all_names(original, super().module_state_dict(original))

    def load_module_state_dict(self, module: nn.Module, state: StateDict, strict: bool = True) -> LoadedKeys:
        """Load a state of any layout: of full tensors, of tensors in a file, or of sharded ones; see Strategy's."""
        original = self.unwrap(module)
        state = self._lw_split.own_state(original, state)
        with self._lw_split.in_parts(original):
            fitted = fit_module_state(super().module_state_dict(original), state)
            return super().load_module_state_dict(original, fitted, strict)

    def optimizer_state(self, optimizer: Optimizer, module: nn.Module | None = None) -> StateDict:
        """Return the state of an optimizer; `gather_state` joins the states of the stages."""
        original = None if module is None else self.unwrap(module)
        return self._lw_split.with_names(original, optimizer, super().optimizer_state(optimizer, module))

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict, module: nn.Module | None = None) -> None:
        """Load a state of any layout: of full tensors, of tensors in a file, or of sharded ones; see Strategy's.

        A resumed run is not verified.
        """
        original = None if module is None else self.unwrap(module)
        state = self._lw_split.own_optimizer_state(original, optimizer, state)
        fitted = fit_optimizer_state(optimizer, unpack_subclasses(state, optimizer))
        super().load_optimizer_state(optimizer, fitted, module)


def _largest_on_all_ranks(tensor: Tensor) -> None:
    dist.all_reduce(tensor, dist.ReduceOp.MAX)


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [one.grad for one in parameters_of(optimizer) if one.grad is not None]


def set_casts_when_gathered(strategy: Strategy, casts: bool) -> None:
    """Let a strategy cast sharded parameters when it gathers them, or leave that to autocast, whatever the device.

    Called before modules are set up. Strategies that shard nothing stay as they are.
    """
    if isinstance(strategy, ShardedStrategy):
        strategy.plan = replace(strategy.plan, casts_when_gathered=casts)
