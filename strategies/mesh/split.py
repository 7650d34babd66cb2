"""`ModuleSplit`: a module that is split itself over the axes of a mesh, beside the sharding of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from ...precision import Precision
    from ...protocols import Batch, StateDict, StepFunction
    from ..fsdp.root import ShardedRoot
    from ..sharded import ShardedStrategy
    from ..traits import Traits
    from .axes import MeshAxes
    from .context.options import Context
    from .context.parallel import ContextParallel
    from .layers import TensorSplit
    from .pipeline.stages import Stages
    from .pipeline.window import PipelineRunner

# Any in this file: what steps return. Each split is imported where its axis has several ranks.


class ModuleSplit:
    """Layers split over the axis tp, stages over pp, sequences over cp and experts over ep.

    Each is there only where its axis has several processes; without any of them, the methods do nothing.

    Args:
        tensor: Splits layers; None: they are left whole.
        stages: Splits the module into stages; None: there is one.
        context: How sequences are split; None: the defaults.
        verify: Whether the first batch of a run is compared with the module that is not split.
    """

    def __init__(
        self, tensor: TensorSplit | None, stages: Stages | None, context: Context | None, *, verify: bool
    ) -> None:
        self.tensor = tensor
        self.stages = stages
        self.context = context
        self.verify = verify
        self._is_to_verify = verify
        self._contexts: dict[nn.Module, ContextParallel] = {}  # by the user's modules

    # -- before the launch ---------------------------------------------------------------------------------------

    def check_processes(self, axes: MeshAxes) -> None:
        """Refuse numbers of stages that these processes cannot have."""
        if self.stages is not None and axes.pp > 1:
            self.stages.options.num_stages(axes.pp)

    def traits(self, traits: Traits, axes: MeshAxes) -> Traits:
        """Return a strategy's traits with those that follow from the axes."""
        sizes = {name: getattr(axes, name) for name in ("pp", "cp", "tp", "ep")}
        stages = None if axes.pp == 1 else self.stages
        refusal = None
        if axes.cp > 1:
            what = f"attention in compiled code cannot be replaced by attention over the parts of cp={axes.cp}"
            refusal = (what, "leave compile= out, or train without cp")
        elif stages is not None:
            what = "a step of a pipeline stage leaves the module in the middle"
            refusal = (what, "leave compile= out, or train without pp")
        return replace(
            traits,
            model_axes={name: size for name, size in sizes.items() if size != 1},
            has_stages=stages is not None,
            runs_windows=stages is not None,
            parts_per_batch=1 if stages is None else stages.options.micro_batches,
            holds_parameters=stages is not None,  # those of other stages are on other ranks
            compile_refusal=refusal,
        )

    def check(self, module: nn.Module, axes: MeshAxes, precision: Precision) -> None:
        """Refuse a module that cannot be split along these axes. Does not communicate."""
        if axes.ep > 1:
            from .experts.sharding import check_layers

            check_layers(module, axes.ep)
        if self.tensor is not None and axes.tp > 1:
            self.tensor.check(module, axes.tp)
        if axes.cp > 1:
            from .context.model import check_model

            check_model(module, self.context, axes.cp)
        if self.stages is not None and axes.pp > 1:
            self.stages.check(module, axes.pp, precision)

    # -- the model -----------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, strategy: ShardedStrategy) -> Callable[[list[nn.Module]], None] | None:
        """Split a module, in place, and return what is called with each unit before it is sharded."""
        axes, groups, prepare = strategy.resolved_axes, strategy.groups, None
        if self.tensor is not None and axes.tp > 1:
            assert groups.tensor is not None, "it is an axis of every mesh with layers that are split"
            prepare = self.tensor.begin(module, groups.tensor, is_rank_zero=strategy.is_global_zero)
        if groups.experts is not None:
            from .experts.sharding import preparing

            prepare = preparing(module, groups.experts, prepare)
        if self.stages is not None and groups.pipeline is not None:
            from .experts.sharding import leave_results

            self.stages.split(
                module,
                groups.pipeline,
                rank=strategy.topology.stage,
                device=strategy.device,
                precision=strategy.precision,
                # Parts of sequences draw from separate generators.
                seeds_blocks=axes.cp == 1,
            )
            leave_results(module)
        return prepare

    def finish(self, root: ShardedRoot) -> None:
        """Let the root know how its layers are split, when it is sharded."""
        if self.tensor is not None:
            self.tensor.finish(root)

    def meshes(self, module: nn.Module, mesh: DeviceMesh | None) -> dict[nn.Module, DeviceMesh]:
        """Return the modules that are units and sharded over another mesh than the strategy's: experts."""
        if mesh is None:
            return {}
        from .experts.sharding import experts_in

        layers = (one.experts for one in experts_in(module).values())
        return {one: mesh for one in layers if any(True for _ in one.parameters())}  # not those of other stages

    def share_sequences(self, module: nn.Module, strategy: ShardedStrategy) -> None:
        """Let steps of the user's module, which is sharded already, run on parts of sequences where cp has several."""
        axes, groups = strategy.resolved_axes, strategy.groups
        if axes.cp == 1 or module in self._contexts:
            return
        from .context.parallel import share_sequences

        assert groups.full is not None, "sequences are shared along an axis of it"
        runner = self.runner(module)
        self._contexts[module] = share_sequences(
            module,
            self.context,
            groups.full["cp"],
            strategy.device,
            verifies=self.verify,
            same_batch=groups.same_batch,
            tp=axes.tp,
            stages=None if runner is None else runner.split,
        )

    def forget(self) -> None:
        """Release modules, after a run."""
        self._contexts = {}

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind(self, step: StepFunction, module: nn.Module, name: str, *, has_stages: bool) -> StepFunction:
        """Return what runs a step on this rank's stages and parts of layers.

        Args:
            step: Runs `module.<name>`.
            module: The user's module.
            name: Of its method.
            has_stages: Whether ranks have different stages: then no rank runs all layers in one step.
        """
        if self.tensor is not None:
            is_whole = name == "training_step" and not has_stages
            step = self.tensor.bind(step, module, name, self._take_verification if is_whole else None)
        return step if self.stages is None else self.stages.bind(step, module, name)

    def bind_sequences(self, step: StepFunction, module: nn.Module, name: str) -> StepFunction:
        """Return what runs a step, bound already, on this rank's parts of sequences."""
        context = self._contexts.get(module)
        return step if context is None else context.bind(step, name)

    def in_backward(self) -> AbstractContextManager[object]:
        """Return a context for backward passes, in which activations are computed again as in the forward pass."""
        around = ExitStack()
        if self._contexts:  # one for all modules: they replace attention alike
            around.enter_context(next(iter(self._contexts.values())).in_backward())
        if self.tensor is not None:
            around.enter_context(self.tensor.in_backward())
        return around

    def run_window(
        self,
        batches: Sequence[Batch],
        step: StepFunction,
        share: Callable[[Any], Tensor],
        *,
        has_full_sequences: bool,
    ) -> Sequence[Any]:
        """Run a window through all stages; see `RunsWindows.run_window`."""
        assert self.stages is not None, "called only where there are stages"
        verifies = self._take_verification() and has_full_sequences
        return self.stages.run_window(batches, step, share, in_backward=self.in_backward(), verifies=verifies)

    def _take_verification(self) -> bool:
        """Return whether the split module is to be compared now: once, in the first batch of a first run."""
        is_due, self._is_to_verify = self._is_to_verify, False
        return is_due

    def runner(self, module: nn.Module | None) -> PipelineRunner | None:
        """Return what runs the stages of the user's module; None where there is one stage."""
        if self.stages is None or module is None:
            return None
        from .pipeline.stages import runner_of

        return runner_of(module)

    # -- state ---------------------------------------------------------------------------------------------------

    def in_parts(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which the state of the user's module is that of this rank's stages."""
        runner = self.runner(module)
        return nullcontext() if runner is None else runner.split.in_parts()

    def all_names(self, module: nn.Module, state: StateDict) -> StateDict:
        """Return a module's state under the names of all stages; what other stages have is gathered later."""
        runner = self.runner(module)
        if runner is None:
            return state
        from .pipeline.state import stages_state

        return stages_state(runner, state)

    def own_state(self, module: nn.Module, state: StateDict) -> StateDict:
        """Return this rank's part of a module's state."""
        runner = self.runner(module)
        if runner is None:
            return state
        from .pipeline.state import own_module_state

        return own_module_state(runner.split, state)

    def with_names(self, module: nn.Module | None, optimizer: Optimizer, state: StateDict) -> StateDict:
        """Return an optimizer's state with names, by which the stages' states are joined."""
        runner = self.runner(module)
        if runner is None:
            return state
        from .pipeline.state import stage_optimizer

        return stage_optimizer(runner, optimizer, state)

    def own_optimizer_state(self, module: nn.Module | None, optimizer: Optimizer, state: StateDict) -> StateDict:
        """Return this rank's part of an optimizer's state; a resumed run is not verified."""
        self._is_to_verify = False
        runner = self.runner(module)
        if runner is None:
            return state
        from .pipeline.state import own_optimizer_state

        return own_optimizer_state(runner.split, optimizer, state)
