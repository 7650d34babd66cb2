"""Data parallel training by XLA with a process for each device: replicas.

Processes start as with torch_xla's `launch`, by Loopwright's launchers, which return results and failures. Tensors are
summed on the devices, by the runtime; objects, decisions and barriers go through the hosts' process group (gloo), so
that they do not wait for a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...accelerators.xla import import_xla, is_runtime_started
from ...errors import LaunchError
from ...protocols import CheckpointPlugin, Cluster, ReduceOp, StateDict, StepOutput, Tree
from ..base import NoLoss, Strategy
from ..ddp.replica import loss_tensor, replace_loss
from ..distributed.collectives import op_name
from ..parallel import DEFAULT_TIMEOUT, ParallelStrategy
from ..tree import map_leaves
from .collectives import Collectives, HostCollectives, RuntimeCollectives, gather_with_gradient, reduce_as
from .process import EVALUATIONS, Step, XLAProcessStrategy, of_xla

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from ...accelerators import Accelerator
    from ...precision import Precision

# Any in this file: torch_xla is not annotated; batches, and what the user's steps take and return.


class XLAReplicasStrategy(XLAProcessStrategy):
    """A process for each XLA device, with a copy of the module each; gradients are averaged after backward.

    A loader's `batch_size` counts the samples of one process, as with "ddp". A step is three graphs: the rank's forward
    and backward passes; the sum of gradients over ranks, equal on all of them; clipping and optimizer step. So ranks
    may have batches of different shapes, or none, and no rank waits for a graph that another one does not run.

    A CPU's runtime connects no processes. There gradients go through the host, to try a program without a TPU.

    Args:
        sync_module_states: Whether all ranks start with rank 0's parameters and buffers. False: they are equal already.
        one_graph: Whether a step is one graph, which XLA can schedule better. Then all ranks must have batches of the
            same shapes in every step, a loss in each, and gradients of the same parameters: pass drop_last=True.
        uneven: Behavior for unequal numbers of training batches on ranks: see DDPStrategy.

    Raises:
        ConfigError: An argument is invalid; every problem is listed.
    """

    strategy_name = "xla_replicas"
    traits = of_xla(ParallelStrategy.traits)
    start_method = "popen"
    exchanges_in_backward = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sync_module_states: bool = True,
        cluster_environment: Cluster | None = None,
        *,
        one_graph: bool = False,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        precision: Precision | None = None,
        uneven: str = "stop_all",
        stall_timeout: timedelta | float | None = None,
    ) -> None:
        super().__init__(
            accelerator, checkpoint_io, precision_plugin, debug=debug, precision=precision,
            parallel_devices=parallel_devices, cluster_environment=cluster_environment, process_group_backend="gloo",
            timeout=timeout, start_method=start_method, uneven=uneven, stall_timeout=stall_timeout,
        )  # fmt: skip
        self.sync_module_states = sync_module_states
        self.one_graph = one_graph
        self._lw_collectives: Collectives | None = None
        # Modules whose gradients backward averages, and those whose forward ran since the last backward pass.
        self._lw_averaged: WeakSet[nn.Module] = WeakSet()
        self._lw_forwarded: list[nn.Module] = []
        self._lw_is_deferred = False
        self._lw_sums: list[Tensor] = []

    # -- processes -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The only device of this process; its index is that of this process's runtime."""
        return torch.device("xla", 0) if self._lw_device is None else self._lw_device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._lw_device = device

    def setup_environment(self) -> None:
        """Start the runtime with this process's device, and connect the processes. Called once in every process."""
        super().setup_environment()
        self._lw_collectives = self._lw_find_collectives()

    def start_runtime(self) -> None:
        """Start the runtime with the device of this process, unless it is started.

        Raises:
            ConfigError: torch_xla is missing.
            LaunchError: This process cannot have its own device, or cannot train with XLA.
        """
        self._lw_start_own_runtime()
        self._lw_device = torch.device(import_xla().device())
        super().start_runtime()

    def _lw_start_own_runtime(self) -> None:
        runtime = import_xla("torch_xla.runtime", needed_for=type(self).__name__)
        if is_runtime_started():
            if runtime.is_spmd():
                raise LaunchError(
                    f"{type(self).__name__} requires a separate device in each process, but this process has enabled "
                    "XLA's SPMD mode, which cannot be disabled.",
                    fix="use another process, or strategy='xla'.",
                )
            return
        if os.environ.get("PJRT_DEVICE", "").upper() == "CPU":
            os.environ["CPU_NUM_DEVICES"] = "1"
        local_size = len(self.parallel_devices or [None])
        # As in each process of torch_xla's `launch`; it has no public name.
        start = import_xla("torch_xla._internal.pjrt")
        if local_size > 1:
            start.initialize_multiprocess(self.topology.local_rank, local_size)

    def _lw_find_collectives(self) -> Collectives:
        runtime = import_xla("torch_xla.runtime")
        count = int(runtime.world_size())
        if count == self.world_size:
            return RuntimeCollectives(self.gather_objects(int(runtime.global_ordinal())))
        if runtime.device_type() == "CPU" and count == 1:
            return HostCollectives()
        raise LaunchError(
            f"Expected {self.world_size} devices in XLA's runtime, one for each process, got {count} on rank "
            f"{self.global_rank}.",
            fix="set devices= to the number of chips of a host, and use no XLA device before the processes start. On "
            "chips with two cores (TPU v2, v3), use strategy='xla'.",
        )

    def _lw_seed(self) -> None:
        """Seed each rank's device differently, from the seed of torch's generator."""
        seed = torch.initial_seed() + self.global_rank * 0x9E3779B97F4A7C15
        import_xla("torch_xla.core.xla_model").set_rng_state(seed % 2**63)

    def __getstate__(self) -> StateDict:
        return {
            **super().__getstate__(),
            "_lw_averaged": None,
            "_lw_forwarded": [],
            "_lw_sums": [],
            "_lw_collectives": None,
        }

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state, _lw_averaged=WeakSet())

    @property
    def _lw_communicates(self) -> bool:
        return self._lw_collectives is not None and self.world_size > 1

    @property
    def collectives(self) -> Collectives:
        """Collectives of device tensors, once the processes are connected."""
        assert self._lw_collectives is not None
        return self._lw_collectives

    # -- the model -----------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module itself, with rank 0's values; from now on backward averages its gradients.

        Raises:
            ModuleError: The ranks built different modules, or parameters have no shape yet; names them.
        """
        module = self.place_module(module)
        if self._lw_communicates:
            self._lw_averaged.add(module)
        return module

    def place_module(self, module: nn.Module) -> nn.Module:
        """Return the module itself, with the parameters and buffers of rank 0. On every rank: it communicates."""
        self.module_to_device(module)
        self._lw_averaged.discard(module)
        if self._lw_communicates:
            self.check_module(module)
            if self.sync_module_states:
                self._lw_take_from_first([*module.parameters(), *module.buffers()])
        return module

    def sync_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks."""
        if self._lw_communicates:
            self._lw_take_from_first(list(module.buffers()))

    @torch.no_grad()
    def _lw_take_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with rank 0's."""
        floats = [one for one in tensors if one.is_floating_point()]
        others = [one for one in tensors if not one.is_floating_point()]
        if not self.is_global_zero:
            for one in floats:
                one.zero_()
        with self._lw_alone():
            self.collectives.sum_in_place(floats)
        if others:
            first = self.broadcast(others)
            for one, value in zip(others, first, strict=True):
                one.copy_(value)
            self.mark_step()

    # -- steps ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _lw_alone(self) -> Iterator[None]:
        """Return a context whose operations are their own graph."""
        self.mark_step()
        yield
        self.mark_step()

    def _lw_collective(self) -> AbstractContextManager[None]:
        return nullcontext() if self.one_graph else self._lw_alone()

    def bind_step(self, module: nn.Module, name: str) -> Step:
        """Return a function that runs `module.<name>`; the backward pass after it averages gradients.

        Evaluation steps do not communicate. "training_step" returns `NoLoss` instead of None.
        """
        step = super().bind_step(module, name)
        if module not in self._lw_averaged or name in EVALUATIONS:
            return step

        def run(*args: object, **kwargs: object) -> StepOutput:
            output = step(*args, **kwargs)
            if not torch.is_grad_enabled():
                return output
            if all(one is not module for one in self._lw_forwarded):
                self._lw_forwarded.append(module)
            if name != "training_step" or output.__class__ is Tensor:
                return output
            loss = loss_tensor(output)
            if output is None:
                return NoLoss(self._lw_zero())
            if loss is not None and not loss.requires_grad:
                # A sum of weight 0 without a graph: this rank takes part nevertheless.
                return replace_loss(output, loss + self._lw_zero().to(loss.dtype))
            return output

        return run

    def _lw_zero(self) -> Tensor:
        return torch.zeros((), device=self.device, requires_grad=True)

    def without_data(self, module: nn.Module) -> NoLoss | None:
        """Take part in a training step for which this rank has no batch."""
        if module not in self._lw_averaged:
            return None
        self._lw_forwarded = [module]
        return NoLoss(self._lw_zero())

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Iterator[None]:
        """Return a context in which backward passes add to the gradients of this rank only, if enabled."""
        before, self._lw_is_deferred = self._lw_is_deferred, enabled or self._lw_is_deferred
        try:
            yield
        finally:
            self._lw_is_deferred = before

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss (shape (), already scaled by the precision), and average them over ranks."""
        super().backward(tensor, *args, **kwargs)
        if self._lw_is_deferred or not self._lw_forwarded:
            return
        forwarded, self._lw_forwarded = self._lw_forwarded, []
        found = {id(one): one for module in forwarded for one in module.parameters() if one.requires_grad}
        self.average_gradients(list(found.values()))

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over ranks, in place; see `Strategy.average_gradients`. Waits for hosts, not devices."""
        if not self._lw_communicates:
            return
        trained = [one for one in parameters if one.requires_grad]
        if not self.one_graph:
            self._lw_fill_gaps(trained)
            for one in trained:
                if one.grad is not None:
                    # A gradient may be a view, of a transposed product for example; a graph that reads a view differs
                    # from one that reads zeros.
                    one.grad = one.grad.clone()
        gradients = [one.grad for one in trained if one.grad is not None]
        sums, self._lw_sums = self._lw_sums, []
        with self._lw_collective():
            self.collectives.sum_in_place(gradients, 1 / self.world_size)
            self.collectives.sum_in_place(sums)

    def _lw_fill_gaps(self, parameters: Sequence[Tensor]) -> None:
        """Set zeros as gradients that other ranks alone have: all ranks must run the same graph."""
        there = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8)
        if there.numel():
            dist.all_reduce(there, dist.ReduceOp.MAX)
        for one, is_there in zip(parameters, there.tolist(), strict=True):
            if is_there and one.grad is None:
                one.grad = torch.zeros_like(one)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale gradients so that their total norm is at most `max_norm`; see `Strategy`."""
        if error_if_nonfinite and self.one_graph:
            self.mark_step()  # a read would execute the graph with the sum in it
        return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)

    def discard_gradients(self, module: nn.Module | None, optimizer: Optimizer | None = None) -> None:
        """Forget what waits for the end of a window that was interrupted."""
        self._lw_forwarded, self._lw_sums = [], []

    # -- collectives ---------------------------------------------------------------------------------------------

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a tensor over ranks, in place: together with the gradients of the next backward pass."""
        if not self._lw_communicates:
            return lambda: tensor
        self._lw_sums.append(tensor)

        def finish() -> Tensor:
            if any(one is tensor for one in self._lw_sums):  # no backward pass came
                self.average_gradients([])
            return tensor

        return finish

    reduce_scatter = Strategy.reduce_scatter  # by all_reduce: XLA's own would need a graph that differs by rank

    def all_reduce(self, tensor: Tree, group: ProcessGroup | str | None = None, reduce_op: ReduceOp = "mean") -> Any:
        """Return a tensor, number, or structure of them, reduced over ranks; see `ParallelStrategy`."""
        if isinstance(group, str):  # all_reduce(tensor, "sum")
            reduce_op, group = group, None
        if not self._lw_communicates:
            return tensor
        op = op_name(reduce_op)

        def reduced(leaf: Tree) -> object:
            if not _is_of_device(leaf):
                found = super(XLAReplicasStrategy, self).all_reduce(_on_host(leaf), group, op)
                return found.to(self.device) if isinstance(found, Tensor) and not isinstance(leaf, Tensor) else found
            own = leaf.detach().clone()  # not a view, as in average_gradients
            with self._lw_alone():
                return reduce_as(self.collectives, own, op, self.world_size)

        return map_leaves(tensor, reduced)

    def all_gather(self, tensor: Tree, group: ProcessGroup | bool | None = None, sync_grads: bool = False) -> Any:
        """Return a tensor, number, or structure of them, of all ranks, stacked; see `ParallelStrategy`."""
        if isinstance(group, bool):  # all_gather(tensor, True)
            sync_grads, group = group, None
        if not self._lw_communicates:
            return tensor

        def gathered(leaf: Tree) -> object:
            if not _is_of_device(leaf):
                found = super(XLAReplicasStrategy, self).all_gather(_on_host(leaf), group, sync_grads)
                return found.to(self.device) if isinstance(found, Tensor) and not isinstance(leaf, Tensor) else found
            if sync_grads and leaf.requires_grad and torch.is_grad_enabled():
                return gather_with_gradient(self.collectives, leaf, self.global_rank, self._lw_alone)
            own = leaf.detach().clone()
            with self._lw_alone():
                return self.collectives.gather(own)

        return map_leaves(tensor, gathered)

    # -- state ---------------------------------------------------------------------------------------------------

    def module_state_dict(self, module: nn.Module) -> StateDict:
        """Return the full state of a module on the host: a rank may save alone, without gathering."""
        state: StateDict = self.gather_state(super().module_state_dict(module))
        return state

    def optimizer_state(self, optimizer: Optimizer, module: nn.Module | None = None) -> StateDict:
        """Return the full state of an optimizer on the host, as `module_state_dict` does."""
        state: StateDict = self.gather_state(super().optimizer_state(optimizer, module))
        return state


def _is_of_device(leaf: Tree) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.device.type == "xla"


def _on_host(leaf: Tree) -> object:
    """Return a number as a tensor of the host, so that it does not wait for the device."""
    return torch.tensor(leaf) if isinstance(leaf, bool | int | float | complex) else leaf
