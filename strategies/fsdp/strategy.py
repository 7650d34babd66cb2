"""Fully sharded training: every process holds a shard of each parameter, its gradient and its optimizer state.

The engine is torch's `fully_shard`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...errors import ConfigError, ModuleError
from ...precision.base import compute_gradients
from ..base import NoLoss, non_finite_norm, refuse_complex
from ..capabilities import MemoryShares
from ..construction.activation_checkpointing import choose_checkpointed
from ..construction.deferred import DeferredInit
from ..construction.wrap_policy import choose_units
from ..distributed import gradients
from ..distributed.changes import agree_on_changes, params_of_group
from ..distributed.clipping import scale_to_norm, total_norm
from ..distributed.live_objects import LiveObjects
from ..distributed.processes import DEFAULT_TIMEOUT, ProcessGroupStrategy, broadcast_tensors
from ..distributed.shards import gather_full, is_sharded, local, reading_numbers
from ..tensor_subclasses import refuse_shards, unpack_subclasses
from .arguments import read_arguments
from .fitting import fit_module_state, fit_optimizer_state, fit_state_of
from .plan import ShardingPlan, check_mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys
    from torch.optim import Optimizer

    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import CheckpointPlugin, Cluster, StateDict, StepFunction
    from .root import ShardedRoot
    from .sharding import ShardingTarget

__all__ = ["FSDPStrategy"]

logger = logging.getLogger(__name__)

# Any in this file: what users give for torch's own types, and what their steps take and return.

# Optimizers whose arithmetic needs full parameters, with the reason.
_NEEDS_FULL = {
    "Adafactor": "it changes norms over a full parameter in place",
    "LBFGS": "it computes with all parameters as one vector",
    "SparseAdam": "it needs sparse gradients",
    "ZeroRedundancyOptimizer": "it shards the optimizer state itself",
    "PostLocalSGDOptimizer": "it averages full parameters",
}


class FSDPStrategy(ProcessGroupStrategy):
    """Several processes with one sharded copy of the model, on any kind of device.

    Before a unit of the model (a block, say) runs, its parameters are gathered; afterwards they are freed. The
    backward pass leaves each process with its share of the averaged gradients, and the optimizer steps that share. For
    models and optimizers that do not fit one device; also for saving memory with those that do.

    Args:
        cpu_offload: Keep parameters, gradients and optimizer state in the host's memory; True, False, or torch's
            CPUOffload or CPUOffloadPolicy.
        mixed_precision: torch's MixedPrecision or MixedPrecisionPolicy; replaces the dtypes that follow from
            `precision=`.
        auto_wrap_policy: Which modules are units of their own: a set of classes (or of their names), a function of a
            module, or one of torch's policies. None: repeated blocks and very large modules.
        activation_checkpointing: Modules whose activations are computed again in the backward pass: True for all units,
            classes, or a function of a module.
        activation_checkpointing_policy: Another name for it.
        sharding_strategy: "FULL_SHARD"; "SHARD_GRAD_OP" keeps parameters gathered between forward and backward pass;
            "HYBRID_SHARD" shards within a group and has copies over the groups (by default a node is a group);
            "NO_SHARD" has a copy on every process.
        state_dict_type: "full": one file, written by rank 0; "sharded": a folder, written by all ranks. None: "full" in
            the Trainer, "sharded" in `Fabric.save`. Both load everywhere.
        device_mesh: (copies, shards) for "HYBRID_SHARD", or a DeviceMesh.
        backward_prefetch: Accepted; the next unit is gathered during the backward pass of the present one.
        forward_prefetch: Gather the next unit of the forward pass ahead, on the CPU's side.
        limit_all_gathers: Accepted; it is always so.
        use_orig_params: Accepted; parameters are always the user's own.
        param_init_fn: Fills the parameters of a module that was built on the meta device.
        sync_module_states: Begin with rank 0's values on all ranks. None is True.
        uneven: What happens where ranks have unequally many training batches: "stop_all" ends the epoch for all,
            "cycle" lets the shorter ones begin again.
        kwargs: Further arguments of torch's fully_shard and FullyShardedDataParallel: ignored_modules, ...

    Raises:
        ConfigError: An argument is unknown or cannot be honored; every problem is named.
    """

    strategy_name = "fsdp"
    uneven_choices = ("stop_all", "cycle")  # a rank without a batch cannot take part in gathering
    shards_parameters = True
    sums_gradients_itself = True
    has_module_hooks = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Cluster | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Any = None,
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        backward_prefetch: Any = None,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool | None = None,
        *,
        precision: Precision | None = None,
        start_method: str = "popen",
        uneven: str = "stop_all",
        stall_timeout: timedelta | float | None = None,
        **kwargs: Any,
    ) -> None:
        problems: list[tuple[str, str]] = []
        plan: ShardingPlan | None = None
        try:
            plan = read_arguments(
                cpu_offload=cpu_offload, mixed_precision=mixed_precision, auto_wrap_policy=auto_wrap_policy,
                activation_checkpointing=activation_checkpointing,
                activation_checkpointing_policy=activation_checkpointing_policy, sharding_strategy=sharding_strategy,
                state_dict_type=state_dict_type, device_mesh=device_mesh, backward_prefetch=backward_prefetch,
                forward_prefetch=forward_prefetch, limit_all_gathers=limit_all_gathers, use_orig_params=use_orig_params,
                param_init_fn=param_init_fn, sync_module_states=sync_module_states, **kwargs,
            )  # fmt: skip
        except ConfigError as error:
            problems.append((error.what, error.fix))
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, process_group_backend=process_group_backend,
            timeout=timeout, start_method=start_method, precision=precision, uneven=uneven,
            stall_timeout=stall_timeout, problems=problems,
        )  # fmt: skip
        assert plan is not None
        self.plan = plan
        self._lw_has_told = False
        self._lw_mesh: DeviceMesh | None = None
        self._lw_roots: LiveObjects[ShardedRoot] = LiveObjects()
        # By the id of a parameter that was replaced: it (to know that the id is still its own) and the one that is
        # sharded. For optimizers that were made before.
        self._lw_replaced: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def memory_shares(self, num_processes: int, num_nodes: int) -> MemoryShares:
        """Return how a copy is sharded; see `Strategy.memory_shares`."""
        sizes = check_mesh(self.plan, num_processes, num_nodes)
        shards = num_processes if sizes is None else sizes[1]
        is_held = self.plan.reshard_after_forward is False  # from the first forward to the end of the backward pass
        return MemoryShares(1 if is_held else shards, shards, shards, formula="16 P / N" if shards > 1 else "16 P")

    # -- processes -----------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """The processes as a grid: one axis, "shard", or two, "replicate" and "shard". On every rank: communicates."""
        if self._lw_mesh is None:
            size = self.world_size
            sizes = check_mesh(self.plan, size, self._lw_num_nodes())
            kind = self.device.type
            if isinstance(self.plan.mesh, DeviceMesh):
                self._lw_mesh = self.plan.mesh
            elif sizes is None:
                self._lw_mesh = init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
            else:
                self._lw_mesh = init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))
        return self._lw_mesh

    @property
    def _lw_reduce_group(self) -> ProcessGroup | None:
        """The processes over which gradients are averaged; None: all."""
        return None

    @property
    def _lw_source_group(self) -> ProcessGroup | None:
        """The processes with the same layers, which begin with the values of the first of them; None: all."""
        return None

    def _lw_num_nodes(self) -> int:
        nodes = self.gather_objects(self.topology.node_rank)
        return len(set(nodes))

    def teardown(self) -> None:
        """Release devices and connections after a run."""
        super().teardown()
        self._lw_mesh = None

    def configure_fsdp_auto_wrap_policy(self, module: nn.Module) -> Any:
        """Return which modules are to be units: `auto_wrap_policy`. For overriding, where the model decides.

        Called once, on every rank, before the module is sharded.
        """
        return self.plan.auto_wrap_policy

    def accumulation_refusal(self, dtype: torch.dtype) -> tuple[str, str] | None:
        """Return why gradients cannot be summed in this dtype, and the remedy; see `Strategy.accumulation_refusal`."""
        if self.plan.mixed_precision is not None:
            return "its mixed_precision= sets the dtypes", "pass reduce_dtype=torch.float32 there"
        return super().accumulation_refusal(dtype)

    # -- the model -----------------------------------------------------------------------------------------------

    def check_layers(self, module: nn.Module) -> None:
        """Refuse a module in which a policy chooses nothing; see `Strategy.check_layers`."""
        from .root import root_of

        is_own = type(self).configure_fsdp_auto_wrap_policy is FSDPStrategy.configure_fsdp_auto_wrap_policy
        if root_of(module) is not None or not is_own:  # an override decides in the ranks
            return
        units = [one for _, one in choose_units(module, self.plan.auto_wrap_policy).units]
        if self.plan.activation_checkpointing is not None:
            choose_checkpointed(module, self.plan.activation_checkpointing, units=units)

    @contextmanager
    def init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which a module is built without memory; `setup_module` gives it values unit by unit.

        Args:
            empty_init: True: values will be loaded from a checkpoint, nothing is initialized. None: they will be those
                that the module's constructors gave it, bit for bit. False builds the full module on the CPU.
        """
        if empty_init is False:
            yield
            return
        with DeferredInit(empty=bool(empty_init)):
            yield

    def change_context(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which changes of a module without values are made when it gets them."""
        if not any(one.is_meta for one in [*module.parameters(), *module.buffers()]):
            return nullcontext()
        return DeferredInit()

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the module where it is: `setup_module` moves it unit by unit."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module's parameters, in place, and return what runs it. On every rank: it communicates.

        A module that is sharded already is run as it is.

        Raises:
            ModuleError: The ranks built different modules, or the module cannot be sharded; gives the reason.
        """
        from .root import root_of

        root = root_of(module)
        if root is None:
            root = self._lw_shard(module)
        else:
            self._lw_check_mesh_of(root)
            self.adopt_changes(root)
        self._lw_roots.add(root)
        return root

    place_module = setup_module

    def _lw_shard(self, module: nn.Module) -> ShardedRoot:
        from .sharding import shard

        prepare = self._lw_begin_sharding(module)
        if self.is_global_zero and not self._lw_has_told:
            for note in self.plan.notes:
                logger.warning("%s: %s", type(self).__name__, note)
        self._lw_has_told = True
        # Not the parameters themselves: those that are replaced are to go, and their values with them.
        before: list[tuple[str, weakref.ref[Tensor]]] = [
            (name, weakref.ref(one)) for name, one in module.named_parameters(remove_duplicate=False)
        ]
        root = shard(
            module,
            replace(
                self.plan,
                auto_wrap_policy=self.configure_fsdp_auto_wrap_policy(module),
                accumulate_dtype=self.accumulate_dtype,
            ),
            self._lw_sharding_target(),
            precision=self.precision.policy,
            # In manual optimization a step calls parts of the module, and backward, by itself.
            is_by_parts=not getattr(module, "automatic_optimization", True),
            is_rank_zero=self.is_global_zero,
            prepare=prepare,
            meshes=self._lw_meshes_of_units(module),
        )
        root.layout = self._lw_layout
        after = dict(module.named_parameters(remove_duplicate=False))
        for name, reference in before:
            old = reference()
            if old is not None and after[name] is not old:
                self._lw_replaced[id(old)] = (reference, after[name])
        return root

    def _lw_begin_sharding(self, module: nn.Module) -> Callable[[list[nn.Module]], None] | None:
        """Compare the module over ranks, and return what is called with each unit's modules before it is sharded."""
        self.check_module(module)
        return None

    def _lw_meshes_of_units(self, module: nn.Module) -> dict[nn.Module, DeviceMesh]:
        """Return the modules that are units of their own and sharded over other meshes than `mesh`."""
        return {}

    def _lw_sharding_target(self) -> ShardingTarget:
        """Return the processes over which the module is sharded."""
        from .sharding import ShardingTarget

        return ShardingTarget(self.mesh, self.device)

    @property
    def _lw_layout(self) -> Mapping[str, int]:
        """Sizes of the axes along which ranks have other layers, or parts of them."""
        return {}

    def _lw_check_mesh_of(self, root: ShardedRoot) -> None:
        mine, theirs = self.mesh, root.mesh
        if mine.mesh.tolist() != theirs.mesh.tolist():
            raise ModuleError(
                f"Expected {type(root.module).__name__} to be sharded over {mine}, but it is already sharded over "
                f"{theirs}.",
                fix="build the module again and load its weights from a checkpoint.",
            )
        if self._lw_layout != root.layout:
            raise ModuleError(
                f"Expected {type(root.module).__name__} to have the layout {_shown(self._lw_layout)}, but it already "
                f"has {_shown(root.layout)} of an earlier run.",
                fix="build the module again and load its weights from a checkpoint.",
            )

    def adopt_changes(self, root: ShardedRoot) -> None:
        """Take in parameters that were added to a module since it was sharded; every rank has them in full.

        On every rank: it communicates. They and new buffers become rank 0's.

        Raises:
            ModuleError: Sharded parameters were replaced, the mesh splits layers, or ranks were not changed alike.
        """
        module, changes = root.module, root.changes
        root.check_shards(self.global_rank)
        new = changes.new_parameters(module)
        tensors = [one for one in changes.new_tensors(module) if not is_sharded(one)]
        without_values = [name for name, one in new.items() if one.is_meta]
        if without_values:
            raise ModuleError(
                f"Expected the parameters of {type(module).__name__} as sharded in an earlier run, got new "
                f"parameters: {', '.join(without_values[:5])}{' ...' if len(without_values) > 5 else ''}. They were "
                "built without values, in configure_model or an init context.",
                fix="create them in __init__, before the first run, or in a hook; or build the module again and load "
                "its weights from a checkpoint.",
            )
        if tensors and self.world_size > 1:
            shown = f"{', '.join([*new][:5])}{' ...' if len(new) > 5 else ''}" if new else "buffers"
            if self.model_axes:
                raise ModuleError(
                    f"Expected the parameters of {type(module).__name__} as they were split over "
                    f"{_shown(self.model_axes)}, got new ones on rank {self.global_rank}: {shown}.",
                    fix="create all parameters before the first run, or in configure_model.",
                )
            agree_on_changes(shown, self.global_rank, self.world_size, self.stall_timeout)
            self.check_module(module)
            broadcast_tensors(tensors, self._lw_source_group)
        root.replicate(one for one in new.values() if not is_sharded(one))
        root.settle()

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers to all ranks."""
        if self.world_size > 1:
            buffers = [one for one in self.unwrap(module).buffers() if not is_sharded(one)]
            broadcast_tensors(buffers, self._lw_source_group)

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that no backward pass averaged; see `Strategy.average_gradients`.

        Those of replicated parameters, and those of sharded parameters whose reduction was deferred.
        """
        if self.world_size == 1:
            return
        for root in self._lw_roots:
            if root.changes.is_set:  # in manual optimization; a step that it runs sees it before
                self.adopt_changes(root)
        known = {id(one) for root in self._lw_roots for one in root.replicated}
        replicated = [one for one in parameters if not is_sharded(one) or id(one) in known]
        if replicated:
            gradients.average_gradients(replicated, self._lw_reduce_group)
        for root in self._lw_roots:
            root.average_gradients(parameters)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the module that the user wrote."""
        from .root import ShardedRoot

        return module.module if isinstance(module, ShardedRoot) else module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Set up a module and its optimizers, which may have been made before it was sharded."""
        return self.setup_module(module), [self.setup_optimizer(optimizer) for optimizer in optimizers]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer with its parameters replaced by the sharded ones.

        Raises:
            ConfigError: It needs full parameters.
            ModuleError: It has state for a parameter that was replaced and that does not fit the sharded one.
        """
        self._lw_stepped.pop(id(optimizer), None)
        name = type(optimizer).__name__
        if name in _NEEDS_FULL:
            raise ConfigError(
                f"{name} cannot be used with {type(self).__name__}: {_NEEDS_FULL[name]}.",
                fix="use an optimizer that computes element by element, such as AdamW or SGD; or strategy='ddp'.",
            )
        for group in optimizer.param_groups:
            group["params"] = [self._lw_current(optimizer, parameter) for parameter in group["params"]]
        return optimizer

    def _lw_current(self, optimizer: Optimizer, parameter: Tensor) -> Tensor:
        known = self._lw_replaced.get(id(parameter))
        if known is None or known[0]() is not parameter:
            return parameter
        sharded = known[1]
        state = optimizer.state.pop(parameter, None)
        if state is not None:
            optimizer.state[sharded] = fit_state_of(sharded, state)
        return sharded

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind_step(self, module: nn.Module, name: str) -> StepFunction:
        """Return what runs `module.<name>` while parameters are gathered, on every rank at the same time.

        A pass without gradients leaves no parameter gathered.
        """
        from .root import ShardedRoot

        step = self._lw_step_of(self.unwrap(module), name)
        if not isinstance(module, ShardedRoot):
            return step
        from .steps import bound, bound_training

        is_training = name == "training_step" and not module.is_by_parts
        return bound_training(module, step, self) if is_training else bound(module, step, self)

    def _lw_step_of(self, original: nn.Module, name: str) -> StepFunction:
        """Return the user's own step; it runs while parameters are gathered."""
        step: StepFunction = original if name == "forward" else getattr(original, name)
        return step

    def without_data(self, module: nn.Module) -> NoLoss | None:
        """Refuse: a rank without a batch cannot take part in a training step.

        Raises:
            ModuleError: Always.
        """
        raise ModuleError(
            f"Expected a training batch on every rank with {type(self).__name__}, got none on rank {self.global_rank}.",
            fix="provide the same number of batches on all ranks, or pass uneven='stop_all' or 'cycle'.",
        )

    def evaluate_without_data(self, module: nn.Module | None) -> None:
        """Take part in an evaluation step for which this rank has no batch, where others have one.

        The units are gathered in the order of this rank's last evaluation step, before its first in the order in which
        the module has them.
        """
        from .root import ShardedRoot, run_empty

        roots = [module] if module is not None else self._lw_roots.in_use()
        # A hand-written loop may have set up modules that it does not evaluate.
        evaluated = [one for one in roots if isinstance(one, ShardedRoot) and one.evaluated is not None]
        with self.precision.forward_context():
            for root in evaluated or roots[:1]:
                if isinstance(root, ShardedRoot):
                    run_empty(root)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[object]:
        """Return a context in which backward passes add to full gradients on this rank only, if enabled."""
        from .root import ShardedRoot

        is_deferred = enabled and self.world_size > 1 and isinstance(module, ShardedRoot)
        return _deferring_reduction(cast("ShardedRoot", module)) if is_deferred else nullcontext()

    def backward(self, tensor: Tensor, *args: object, **kwargs: object) -> None:
        """Compute gradients of a loss (shape (), already scaled by the precision); average and shard them."""
        try:
            compute_gradients(tensor, *args, **kwargs)
        except RuntimeError as error:
            from .steps import explain

            explain(error, tensor, self._lw_roots)
            raise
        for root in self._lw_roots:
            root.end_held()
            if not root.is_synchronized:
                root.has_deferred = True
                continue
            root.has_deferred = root.waits_for_average()  # of parts that this pass did not reach
            if root.unused is not None:
                root.unused.settle()
            # Only of a module that this pass went through: one that is not in use any more may still be alive here,
            # and not on the other ranks, which would wait for each other in different collectives.
            if root.reached.is_set:
                root.reached.is_set = False
                self.average_gradients(root.replicated)

    def discard_gradients(self, module: nn.Module | None) -> None:
        """Discard gradients that wait for the end of their window; an optimizer's `zero_grad` does not reach them."""
        for root in self._lw_roots:
            if root.has_deferred and module in (None, root):
                root.discard_gradients()

    def discard_gradients_of(self, optimizer: Optimizer) -> None:
        """Discard those of the optimizer's parameters; another optimizer's window continues."""
        for root in self._lw_roots:
            if root.has_deferred:
                root.discard_gradients(_parameters(optimizer))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> bool:
        """Step the optimizer; see `Strategy.optimizer_step`.

        Raises:
            ModuleError: Gradients of its parameters were not averaged: it would step without them.
        """
        is_first = self._lw_stepped.get(id(optimizer)) != [*map(len, map(params_of_group, optimizer.param_groups))]
        if is_first:
            # A loop that calls the module itself, and not its training_step, may average other gradients itself.
            self._lw_check_stepped(optimizer, [one.changes for one in self._lw_roots if one.is_trained_by_step])
        for root in self._lw_roots:
            if root.held is not None and root.held.are_held:
                root.check_held()
            if root.has_deferred and closure is None and root.waits_for_average(_parameters(optimizer)):
                raise ModuleError(
                    f"Expected averaged gradients in the step of {type(optimizer).__name__}, but all backward passes "
                    "since the last step ran under no_backward_sync.",
                    fix="run the last backward pass of an accumulation window without it: no_backward_sync(model, "
                    "enabled=not is_last).",
                )
        with reading_numbers():
            has_stepped = super().optimizer_step(optimizer, closure)
        if is_first:
            refuse_shards(optimizer, warns=not self.saves_optimizers)
        return has_stepped

    def local_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the local shards of tensors, sharing their memory, without empty ones."""
        return local(tensors)

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
        norm = self._lw_norm_of_gradients(module, _parameters(optimizer), norm_type).to(self.device)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise non_finite_norm()
        scale_to_norm(gradients, max_norm, norm)
        return norm

    def _lw_norm_of_gradients(self, module: nn.Module, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the gradients of a module's parameters, over all ranks that have some of them."""
        return total_norm([one.grad for one in parameters if one.grad is not None], norm_type)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each gradient element of the optimizer's parameters to [-clip_val, clip_val], in place."""
        refuse_complex(_gradients(optimizer), type(self).__name__)
        for part in local(_gradients(optimizer)):
            part.clamp_(-clip_val, clip_val)

    # -- state ---------------------------------------------------------------------------------------------------

    def saves_shards(self, default: str) -> bool:
        """Return whether all ranks write checkpoints, each its local shards; `default` without a choice of the user."""
        return (self.plan.state_dict_type or default) == "sharded"

    def gather_state(self, state: object) -> Any:
        """Return a state with full tensors on rank 0's CPU, and None in their place elsewhere. On every rank."""
        return gather_full(state, keep=self.is_global_zero)

    def module_state_dict(self, module: nn.Module) -> StateDict:
        """Return the state of a module, under the user's names; sharded tensors share memory with the parameters."""
        return super().module_state_dict(self.unwrap(module))

    get_module_state_dict = module_state_dict

    def load_module_state_dict(self, module: nn.Module, state: StateDict, strict: bool = True) -> LoadedKeys:
        """Load a state of full tensors, of tensors in a file, or of sharded ones; see Strategy's."""
        original = self.unwrap(module)
        return super().load_module_state_dict(
            original, fit_module_state(super().module_state_dict(original), state), strict
        )

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict, module: nn.Module | None = None) -> None:
        """Load a state of full tensors, of tensors in a file, or of sharded ones; see Strategy's."""
        fitted = fit_optimizer_state(optimizer, unpack_subclasses(state, optimizer))
        super().load_optimizer_state(optimizer, fitted, module)


# -- inside ------------------------------------------------------------------------------------------------------------


@contextmanager
def _deferring_reduction(root: ShardedRoot) -> Iterator[None]:
    root.set_sync(False)
    try:
        yield
    finally:
        root.set_sync(True)


def _shown(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in layout.items()) or "of fully_shard alone"


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [one.grad for one in _parameters(optimizer) if one.grad is not None]
