"""`Sharder`: shards the modules of a strategy, and keeps what runs them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...errors import ConfigError, ModuleError
from ..distributed import gradients
from ..distributed.changes import agree_on_changes
from ..distributed.collectives import broadcast_tensors
from ..distributed.live_objects import LiveObjects
from ..distributed.shards import is_sharded
from .fitting import fit_state_of
from .root import ShardedRoot, run_empty
from .sharding import ShardingTarget, shard
from .steps import explain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from ..parallel import ParallelStrategy
    from .plan import ShardingPlan

logger = logging.getLogger(__name__)

# Optimizers whose arithmetic needs full parameters, with the reason.
_NEEDS_FULL = {
    "Adafactor": "it changes norms over a full parameter in place",
    "LBFGS": "it computes with all parameters as one vector",
    "SparseAdam": "it needs sparse gradients",
    "ZeroRedundancyOptimizer": "it shards the optimizer state itself",
    "PostLocalSGDOptimizer": "it averages full parameters",
}
# The same for classes of a package, by its name.
_OF_PACKAGES = {
    "bitsandbytes": dict.fromkeys(
        ("AdamW8bit", "Adam8bit", "PagedAdamW8bit", "PagedAdam8bit", "Lion8bit", "PagedLion8bit", "LAMB", "LAMB8bit",
         "LARS", "LARS8bit", "AdamW", "Adam", "Lion", "SGD", "SGD8bit", "AdEMAMix", "AdEMAMix8bit"),
        "its kernels take no sharded tensors (torchao.optim.AdamW8bit does)",
    ),
    "pytorch_optimizer": {
        "LARS": "it copies lists of full tensors",
        "Lamb": "it changes norms over a full parameter in place",
        "SOAP": "it keeps full matrices of statistics",
    },
}  # fmt: skip


def _why_full(kind: type[Optimizer]) -> str | None:
    """Return why an optimizer needs full parameters; None if it does not, or if it is not known."""
    of_package = _OF_PACKAGES.get(kind.__module__.partition(".")[0], _NEEDS_FULL)
    return of_package.get(kind.__name__)


class Sharder:
    """Shards modules over the processes of a strategy.

    Args:
        strategy: Provides ranks, devices and the precision.

    Attributes:
        roots: What runs the modules that are in use.
    """

    def __init__(self, strategy: ParallelStrategy) -> None:
        self._strategy = strategy
        self.roots: LiveObjects[ShardedRoot] = LiveObjects()
        self._target: ShardingTarget | None = None
        self._has_told = False
        # By the id of a parameter that was replaced: it (to know that the id is still its own) and the one that is
        # sharded. For optimizers that were made before.
        self._replaced: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    # -- modules -------------------------------------------------------------------------------------------------

    def shard(
        self,
        module: nn.Module,
        plan: ShardingPlan,
        target: ShardingTarget,
        *,
        layout: Mapping[str, int],
        prepare: Callable[[list[nn.Module]], None] | None,
        meshes: Mapping[nn.Module, DeviceMesh],
    ) -> ShardedRoot:
        """Shard a module's parameters in place, and return what runs it; see `sharding.shard`.

        Args:
            module: The same on all ranks, or as its layers were split.
            plan: How it is sharded.
            target: The processes.
            layout: Sizes of the axes along which ranks have other layers, or parts of them.
            prepare: See `sharding.shard`.
            meshes: See there.
        """
        strategy = self._strategy
        if strategy.is_global_zero and not self._has_told:
            for note in plan.notes:
                logger.warning("%s: %s", type(strategy).__name__, note)
        self._has_told = True
        self._target = target
        # Not the parameters themselves: those that are replaced are to go, and their values with them.
        before: list[tuple[str, weakref.ref[Tensor]]] = [
            (name, weakref.ref(one)) for name, one in module.named_parameters(remove_duplicate=False)
        ]
        root = shard(
            module,
            plan,
            target,
            precision=strategy.precision.policy,
            # In manual optimization a step calls parts of the module, and backward, by itself.
            is_by_parts=not getattr(module, "automatic_optimization", True),
            is_rank_zero=strategy.is_global_zero,
            prepare=prepare,
            meshes=meshes,
        )
        root.layout = layout
        after = dict(module.named_parameters(remove_duplicate=False))
        for name, reference in before:
            old = reference()
            if old is not None and after[name] is not old:
                self._replaced[id(old)] = (reference, after[name])
        return root

    def take_over(self, root: ShardedRoot, target: ShardingTarget, layout: Mapping[str, int]) -> None:
        """Continue with a module that an earlier run has sharded. On every rank: it communicates.

        Raises:
            ModuleError: It was sharded or split otherwise, or `adopt_changes` refuses it.
        """
        name = type(root.module).__name__
        if target.mesh.mesh.tolist() != root.mesh.mesh.tolist():
            raise ModuleError(
                f"Expected {name} to be sharded over {target.mesh}, but it is already sharded over {root.mesh}.",
                fix="build the module again and load its weights from a checkpoint.",
            )
        if layout != root.layout:
            raise ModuleError(
                f"Expected {name} to have the layout {_shown(layout)}, but it already has {_shown(root.layout)} of an "
                "earlier run.",
                fix="build the module again and load its weights from a checkpoint.",
            )
        self._target = target
        self.adopt_changes(root)

    def adopt_changes(self, root: ShardedRoot) -> None:
        """Take in parameters that were added to a module since it was sharded; every rank has them in full.

        On every rank: it communicates. They and new buffers become rank 0's.

        Raises:
            ModuleError: Sharded parameters were replaced, the mesh splits layers, or ranks were not changed alike.
        """
        module, changes, strategy = root.module, root.changes, self._strategy
        root.check_shards(strategy.global_rank)
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
        if tensors and strategy.world_size > 1:
            shown = f"{', '.join([*new][:5])}{' ...' if len(new) > 5 else ''}" if new else "buffers"
            if strategy.traits.model_axes:
                raise ModuleError(
                    f"Expected the parameters of {type(module).__name__} as they were split over "
                    f"{_shown(strategy.traits.model_axes)}, got new ones on rank {strategy.global_rank}: {shown}.",
                    fix="create all parameters before the first run, or in configure_model.",
                )
            agree_on_changes(shown, strategy.global_rank, strategy.world_size, strategy.stall_timeout)
            strategy.check_module(module)
            assert self._target is not None, "the module is sharded"
            broadcast_tensors(tensors, self._target.source_group)
        root.replicate(one for one in new.values() if not is_sharded(one))
        root.settle()

    def evaluate_without_data(self, module: nn.Module | None) -> None:
        """Gather the units of an evaluation step for which this rank has no batch, as its last one did."""
        roots = [module] if module is not None else self.roots.in_use()
        # A hand-written loop may have set up modules that it does not evaluate.
        evaluated = [one for one in roots if isinstance(one, ShardedRoot) and one.evaluated is not None]
        with self._strategy.precision.forward_context():
            for root in evaluated or roots[:1]:
                if isinstance(root, ShardedRoot):
                    run_empty(root)

    # -- optimizers ----------------------------------------------------------------------------------------------

    def replace_parameters(self, optimizer: Optimizer) -> None:
        """Replace the parameters of an optimizer by the sharded ones, in place.

        Raises:
            ConfigError: It needs full parameters.
            ModuleError: It has state for a parameter that was replaced and that does not fit the sharded one.
        """
        reason = _why_full(type(optimizer))
        if reason is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot be used with {type(self._strategy).__name__}: {reason}.",
                fix="use an optimizer that computes element by element, such as AdamW or SGD; or strategy='ddp'.",
            )
        for group in optimizer.param_groups:
            group["params"] = [self._current(optimizer, parameter) for parameter in group["params"]]

    def _current(self, optimizer: Optimizer, parameter: Tensor) -> Tensor:
        known = self._replaced.get(id(parameter))
        if known is None or known[0]() is not parameter:
            return parameter
        sharded = known[1]
        state = optimizer.state.pop(parameter, None)
        if state is not None:
            optimizer.state[sharded] = fit_state_of(sharded, state)
        return sharded

    def check_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Refuse a step of an optimizer whose gradients were not averaged.

        Raises:
            ModuleError: It would step without them.
        """
        for root in self.roots:
            if root.held is not None and root.held.are_held:
                root.check_held()
            if root.has_deferred and not has_closure and root.waits_for_average(parameters_of(optimizer)):
                raise ModuleError(
                    f"Expected averaged gradients in the step of {type(optimizer).__name__}, but all backward passes "
                    "since the last step ran under no_backward_sync.",
                    fix="run the last backward pass of an accumulation window without it: no_backward_sync(model, "
                    "enabled=not is_last).",
                )

    # -- gradients -----------------------------------------------------------------------------------------------

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that no backward pass averaged, on every rank: it communicates.

        These are gradients of replicated parameters, and of sharded parameters whose reduction was deferred.
        """
        if self._strategy.world_size == 1 or self._target is None:
            return
        for root in self.roots:
            if root.changes.is_set:  # in manual optimization; a step that it runs sees it before
                self.adopt_changes(root)
        known = {id(one) for root in self.roots for one in root.replicated}
        replicated = [one for one in parameters if not is_sharded(one) or id(one) in known]
        if replicated:
            gradients.average_gradients(replicated, self._target.reduce_group)
        for root in self.roots:
            root.average_gradients(parameters)

    def discard_gradients(self, module: nn.Module | None, optimizer: Optimizer | None) -> None:
        """Discard gradients that wait for the end of their window; see `Strategy.discard_gradients`."""
        for root in self.roots:
            if root.has_deferred and module in (None, root):
                root.discard_gradients(None if optimizer is None else parameters_of(optimizer))

    def end_backward(self) -> None:
        """Average what a backward pass leaves to be averaged. On every rank: it communicates."""
        for root in self.roots:
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

    def explain(self, error: RuntimeError, loss: Tensor) -> None:
        """Add the cause to an error of a backward pass, where a parameter was read as a DTensor."""
        explain(error, loss, self.roots)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in all groups of an optimizer."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def _shown(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in layout.items()) or "of fully_shard alone"
