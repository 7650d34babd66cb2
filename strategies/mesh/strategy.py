"""`MeshStrategy`: a model spread over the axes of a mesh of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from ..capabilities import MemoryShares
from ..fsdp.root import root_of
from .axes import REST, MeshAxes, read_axes
from .checks import check_arguments, check_context, check_pipeline
from .context.model import check_kernels, find_model
from .context.options import Context
from .context.setup import set_up
from .layers import MeshLayers
from .pipeline.blocks import plan_stages
from .pipeline.gradients import norm_over_stages
from .pipeline.setup import runner_of, split_module
from .pipeline.stages import Stages, check_precision
from .pipeline.state import (
    gather_stages,
    own_module_state,
    own_optimizer_state,
    runner_in,
    stage_optimizer,
    stages_state,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys
    from torch.optim import Optimizer

    from ...protocols import StateDict, StepFunction
    from .context.parallel import ContextParallel

__all__ = ["MeshStrategy"]

T = TypeVar("T")

# Any in this file: batches, what steps take and return, entries of states, and arguments of FSDPStrategy.


class MeshStrategy(MeshLayers):
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
        axes = MeshAxes(pp=pp, dp=dp, fsdp=left if fsdp is None else fsdp, cp=cp, tp=tp, ep=ep)
        check_context(context)
        check_arguments(fsdp_arguments)
        super().__init__(
            axes,
            tensor_plan=tensor_plan,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            verify=verify,
            **fsdp_arguments,
        )
        check_pipeline(pipeline)
        self.pipeline = pipeline
        self.context = context
        self._lw_contexts: dict[nn.Module, ContextParallel] = {}  # by the user's modules
        self._lw_stages = Stages(pipeline)
        self._lw_expected_axes = axes  # resolved when the number of processes is known, before they start
        if pp != 1:  # a stage needs its parameters for all micro-batches of a window
            self.plan = replace(self.plan, reshard_after_forward=False)

    @classmethod
    def read_options(cls, text: str) -> dict[str, Any]:
        """Return the arguments in the options of a name, such as "fsdp=2,tp=2" in "mesh:fsdp=2,tp=2"."""
        return {**read_axes(text)}

    def check_processes(self, num_processes: int, num_nodes: int) -> None:
        """Compare the sizes of the axes with the number of processes; see `Strategy.check_processes`."""
        axes = self._lw_expected_axes = self.axes.resolve(num_processes)
        if axes.pp > 1:
            self._lw_stages.options.num_stages(axes.pp)

    def memory_shares(self, num_processes: int, num_nodes: int) -> MemoryShares:
        """Return over which axes parameters and activations are split; see `Strategy.memory_shares`."""
        axes = self.axes.resolve(num_processes)
        shards = axes.fsdp * axes.tp * axes.pp * axes.cp
        formula = f"16 P / {shards}" if shards > 1 else "16 P"
        return MemoryShares(shards, shards, shards, activations=axes.cp * axes.tp, formula=formula)

    @property
    def model_axes(self) -> Mapping[str, int]:  # type: ignore[override]  # it is not set, but follows from the axes
        """Sizes of the axes that split one copy of a module, without those of size 1; -1 before it is known."""
        sizes = {name: getattr(self.axes, name) for name in ("pp", "cp", "tp", "ep")}
        return {name: size for name, size in sizes.items() if size != 1}

    def teardown(self) -> None:
        """Release devices and connections after a run."""
        super().teardown()
        self._lw_contexts = {}

    def check_layers(self, module: nn.Module) -> None:
        """Refuse a module that cannot be split along these axes; see `Strategy.check_layers`."""
        if root_of(module) is not None:  # of an earlier run: its layers are those of a rank
            return
        super().check_layers(module)
        axes = self._lw_expected_axes
        if axes.ep > 1:
            from .experts.sharding import check_layers

            check_layers(module, axes.ep)
        if axes.tp > 1:
            from .tensor.plan import check_plan

            check_plan(module, self.tensor_plan, tp=axes.tp, **self._lw_in_parts)
        if axes.cp > 1:
            find_model(module, Context() if self.context is None else self.context)
            check_kernels(module, axes.cp)
        if axes.pp > 1:
            check_precision(self.precision)
            plan_stages(module, self._lw_stages.options, axes.pp)

    def backward(self, tensor: Tensor, *args: object, **kwargs: object) -> None:
        """Compute gradients of a loss (shape (), already scaled by the precision); average and shard them."""
        with self._lw_in_backward() as around:
            if self.loss_parallel:
                from .tensor.loss import losses_in_parts

                around.enter_context(losses_in_parts())
            super().backward(tensor, *args, **kwargs)

    @contextmanager
    def _lw_in_backward(self) -> Iterator[ExitStack]:
        """Return a context for backward passes, in which activations are computed again as in the forward pass."""
        with ExitStack() as around:
            # One for all modules: they replace attention alike.
            if (context := next(iter(self._lw_contexts.values()), None)) is not None:
                around.enter_context(context.in_backward())
            yield around

    # -- pipeline stages -----------------------------------------------------------------------------------------

    @property
    def runs_windows(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the axes
        """Whether windows are run through pipeline stages."""
        return self.has_stages

    @property
    def parts_per_batch(self) -> int:  # type: ignore[override]  # it is not set, but follows from the options
        """Number of parts into which each batch is split for the stages."""
        return self._lw_stages.options.micro_batches if self.has_stages else 1

    @property
    def holds_parameters(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the axes
        """Whether parameters are on other ranks, so that callbacks cannot average or prune the model here."""
        return self.has_stages

    @property
    def compile_refusal(self) -> tuple[str, str] | None:  # type: ignore[override]  # it follows from the axes
        """Why `compile=` cannot be used with pipeline stages or parts of sequences; None without them."""
        if (size := self._lw_expected_axes.cp) > 1:
            what = f"attention in compiled code cannot be replaced by attention over the parts of cp={size}"
            return (what, "leave compile= out, or train without cp")
        if not self.has_stages:
            return super().compile_refusal
        return ("a step of a pipeline stage leaves the module in the middle", "leave compile= out, or train without pp")

    @property
    def has_last_stage(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the axes
        """Whether steps run to their end on this rank."""
        if not self.is_connected or not self.has_stages:
            return True
        return self.last_stage_rank == self.topology.stage

    @property
    def last_stage_rank(self) -> int:
        """The place in a pipeline of the rank with the last stage."""
        return self._lw_stages.last_rank(self.resolved_axes.pp)

    @property
    def _lw_stage_group(self) -> ProcessGroup:
        group = self.groups.pipeline
        assert group is not None, "there are stages"
        return group

    def _lw_begin_sharding(self, module: nn.Module) -> Callable[[list[nn.Module]], None] | None:
        super()._lw_begin_sharding(module)
        prepare = self._lw_begin_splitting(module)
        if self.groups.experts is not None:
            from .experts.sharding import preparing

            prepare = preparing(module, self.groups.experts, prepare)
        if self.has_stages:
            from .experts.stages import leave_results

            check_precision(self.precision)
            split_module(
                module,
                self._lw_stages.options,
                self._lw_stage_group,
                rank=self.topology.stage,
                device=self.device,
                # Parts of sequences draw from generators of their own.
                seeds_blocks=self.resolved_axes.cp == 1,
            )
            leave_results(module)
        return prepare

    def _lw_step_of(self, original: nn.Module, name: str) -> StepFunction:
        step = self._lw_split_step(super()._lw_step_of(original, name), original, name)
        return self._lw_stages.bind(step, original, name)

    def state_dict(self) -> StateDict:
        """Return the shapes that stages exchange, with which a resumed run begins. On every rank: it communicates."""
        return self._lw_stages.add_state(super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load what `state_dict` returned, now or when the module is set up."""
        super().load_state_dict(state_dict)
        self._lw_stages.load_state_dict(state_dict)

    def run_window(
        self, batches: Sequence[object], step: Callable[..., Any], share: Callable[[Any], Tensor]
    ) -> Sequence[Any]:
        """Run forward and backward passes of a window's micro-batches through all stages; see `Strategy.run_window`."""
        with self._lw_in_backward():  # backward passes are among the forward passes
            return self._lw_stages.run_window(
                batches,
                step,
                share,
                loss_parallel=self.loss_parallel,
                verifies=self._lw_take_verification() and self.resolved_axes.cp == 1,
            )

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """Return the last stage's tensor, on every rank of its pipeline; see `Strategy.from_last_stage`."""
        if not self.has_stages or not self.is_connected:
            return tensor
        dist.broadcast(tensor, group=self._lw_stage_group, group_src=self.last_stage_rank)
        return tensor

    def _lw_norm_of_gradients(self, module: nn.Module, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        runner = runner_of(self.unwrap(module))
        if runner is None:
            return super()._lw_norm_of_gradients(module, parameters, norm_type)
        return norm_over_stages(runner.split, runner.group, parameters, norm_type, self.device)

    def module_state_dict(self, module: nn.Module) -> StateDict:
        """Return the state of a module under the user's names; what other stages have is gathered by `gather_state`."""
        runner = runner_of(self.unwrap(module))
        if runner is None:
            return super().module_state_dict(module)
        with runner.split.in_parts():
            return stages_state(runner, super().module_state_dict(module))

    get_module_state_dict = module_state_dict

    def load_module_state_dict(self, module: nn.Module, state: StateDict, strict: bool = True) -> LoadedKeys:
        """Load a state of any layout; see `Strategy.load_module_state_dict`."""
        runner = runner_of(self.unwrap(module))
        if runner is None:
            return super().load_module_state_dict(module, state, strict)
        with runner.split.in_parts():
            return super().load_module_state_dict(module, own_module_state(runner.split, state), strict)

    def of_stages(self, module: nn.Module, facts: dict[str, T]) -> dict[str, T]:
        """Return facts about modules and parameters from the ranks that have these; see `Strategy.of_stages`."""
        runner = runner_of(self.unwrap(module))
        return facts if runner is None else runner.joined(facts)

    def optimizer_state(self, optimizer: Optimizer, module: nn.Module | None = None) -> StateDict:
        """Return the state of an optimizer; those of the stages are joined by `gather_state`."""
        state = super().optimizer_state(optimizer, module)
        runner = None if module is None else runner_of(self.unwrap(module))
        return state if runner is None else stage_optimizer(runner, optimizer, state)

    get_optimizer_state = optimizer_state

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict, module: nn.Module | None = None) -> None:
        """Load a state of any layout; see `Strategy.load_optimizer_state`. A resumed run is not verified."""
        self._lw_is_to_verify = False
        runner = None if module is None else runner_of(self.unwrap(module))
        own = state if runner is None else own_optimizer_state(runner.split, optimizer, state)
        super().load_optimizer_state(optimizer, own, module)

    def arrange_shards(self, state: object) -> Any:
        """Return the state under the names of all stages, with this rank's shards; see `Strategy.arrange_shards`."""
        runner = runner_in(state) if self.has_stages else None
        if runner is None:
            return super().arrange_shards(state)
        from .pipeline.shards import arrange_shards

        axes = self.resolved_axes
        mesh = self.groups.shards if axes.world_size == axes.pp else None
        return arrange_shards(runner, state, mesh, keep=self.is_global_zero)

    def gather_state(self, state: object) -> Any:
        """Return a state with full tensors of all stages on rank 0's CPU; see `Strategy.gather_state`."""
        runner = runner_in(state) if self.has_stages else None
        return super().gather_state(state) if runner is None else gather_stages(runner, state, keep=self.is_global_zero)

    # -- shared sequences ----------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module's parameters, in place, and let its steps share sequences; see `FSDPStrategy`."""
        root = super().setup_module(module)
        original = self.unwrap(root)
        if self.resolved_axes.cp > 1 and original not in self._lw_contexts:
            self._lw_contexts[original] = set_up(
                original,
                self.context,
                self.groups.full["cp"],
                self.device,
                verifies=self.verify,
                same_batch=self.groups.same_batch,
                tp=self.resolved_axes.tp,
            )
        return root

    place_module = setup_module

    def bind_step(self, module: nn.Module, name: str) -> StepFunction:
        """Return what runs `module.<name>`, on this rank's parts of sequences where these are shared."""
        step = super().bind_step(module, name)
        context = self._lw_contexts.get(self.unwrap(module))
        return step if context is None else context.bind(step, name)

    @property
    def logs_parts(self) -> bool:  # type: ignore[override]  # it is not set, but follows from the arguments
        """Whether the ranks that share sequences log values of their parts."""
        return self.context is not None and self.context.batch is not None and self.resolved_axes.cp > 1
