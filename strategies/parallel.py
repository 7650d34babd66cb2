"""`ParallelStrategy`: the base class of strategies with several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import Clauses, ConfigError, LaunchError, ModuleError, nearest
from .base import ALONE, CPU, Given, Strategy, Topology
from .constructors import inherit_descriptions
from .distributed import collectives
from .distributed.changes import Changes, params_of_group
from .distributed.layer_sync import check_sync_batchnorm
from .distributed.rendezvous import connect

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from ..accelerators import Accelerator
    from ..precision import Precision
    from ..protocols import CheckpointPlugin, Cluster, ReduceOp, Tree

START_METHODS = ("popen", "spawn", "fork", "forkserver")
UNEVEN = ("stop_all", "cycle", "zero_weight")
DEFAULT_TIMEOUT = timedelta(seconds=1800)
MOST_STALL = timedelta(seconds=300)

_NOT_CHOSEN = ("undefined", "fake")  # backends of torch that connect nothing

T = TypeVar("T")


class ParallelStrategy(Strategy):
    """The base class of strategies with several processes, one device each, that torch.distributed connects.

    It starts and connects processes, compares the module over ranks (`check_module`), and provides the collectives;
    before the processes are connected, each returns its argument, as with one process. Derive from it to add an engine.

    The docstring of a subclass describes only its further arguments; the descriptions below are added to it.

    Args:
        accelerator: The kind of device; None lets Fabric choose.
        parallel_devices: The devices of this node's processes; None lets Fabric choose.
        cluster_environment: Provides ranks and addresses; None lets Fabric choose.
        checkpoint_io: Reads and writes checkpoints; None lets Fabric choose.
        precision_plugin: The precision; None lets Fabric choose.
        process_group_backend: "gloo", "nccl", "mpi", ...; None is gloo on the CPU, nccl and gloo on CUDA devices.
        timeout: Time after which a rank that waits for another one fails: a timedelta or seconds. None is 30 minutes.
        start_method: How processes are started if no other launcher starts them: "popen" (runs the command again),
            "spawn", "fork", "forkserver".
        precision: Another name for `precision_plugin`.
        uneven: Behavior if the numbers of training batches differ between ranks.
        stall_timeout: Time without progress after which every rank reports its stack traces; None is 5 minutes, or
            `timeout` if that is shorter.
        problems: Pairs (problem, fix) that the subclass found in its arguments.

    Raises:
        ConfigError: An argument is invalid; every problem is listed.
    """

    traits = replace(Strategy.traits, has_several_devices=True, uneven_choices=UNEVEN)
    start_method: str | None = "popen"
    """How processes start; None: there is one process, even if the program has connected it with others."""

    # On the class, so that a subclass whose __init__ does not call ours works.
    timeout: timedelta = DEFAULT_TIMEOUT
    stall_timeout: timedelta = MOST_STALL
    process_group_backend: str | None = None
    _lw_given_devices: list[torch.device] | None = None
    _lw_given_cluster: Cluster | None = None
    _lw_topology: Topology | None = None  # fixed once the processes are connected
    # The ranks over which tensors are reduced and gathered, and those that read different data; None: all.
    _lw_tensor_group: ProcessGroup | None = None
    _lw_data_group: ProcessGroup | None = None

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Cluster | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        precision: Precision | None = None,
        uneven: str = "stop_all",
        stall_timeout: timedelta | float | None = None,
        problems: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin, precision=precision)
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        found = Clauses(problems)
        _check_choice("start_method", start_method, START_METHODS, found)
        if self.traits.uneven_choices:
            _check_choice("uneven", uneven, self.traits.uneven_choices, found)
        self.timeout = _duration(timeout, DEFAULT_TIMEOUT, "timeout", found)
        self.stall_timeout = _duration(stall_timeout, min(self.timeout, MOST_STALL), "stall_timeout", found)
        found.refuse(type(self).__name__)
        self.start_method = start_method
        self.uneven = uneven
        self.process_group_backend = process_group_backend
        # By the id of an optimizer: the sizes of its groups when their parameters were looked at.
        self._lw_stepped: dict[int, list[int]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        inherit_descriptions(cls)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node's processes: the user's, else Fabric's; None without either."""
        if self._lw_given_devices is not None:
            return self._lw_given_devices
        return self._lw_filled.get("parallel_devices")

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        self._lw_given_devices = None if devices is None else list(devices)

    @property
    def cluster_environment(self) -> Cluster | None:
        """The cluster environment: the user's, else Fabric's; None without either."""
        if self._lw_given_cluster is not None:
            return self._lw_given_cluster
        return self._lw_filled.get("cluster_environment")

    @cluster_environment.setter
    def cluster_environment(self, cluster: Cluster | None) -> None:
        self._lw_given_cluster = cluster

    @property
    def given(self) -> Given:
        """The arguments of the constructor, or what the user set on the strategy."""
        devices = self._lw_given_devices
        return replace(
            super().given,
            parallel_devices=None if devices is None else tuple(devices),
            cluster_environment=self._lw_given_cluster,
        )

    def fill(self, **choices: object) -> None:
        """Set the objects that Fabric chose; see `Strategy.fill`."""
        super().fill(**choices)
        self._lw_topology = None

    @property
    def cluster(self) -> Cluster | None:
        """The cluster environment: the user's, else Fabric's; None without either."""
        return self.cluster_environment

    @property
    def topology(self) -> Topology:
        """Ranks and sizes, from the cluster environment; without one, from the process group."""
        if self._lw_topology is not None:
            return self._lw_topology
        if self.start_method is None:
            return ALONE
        cluster = self.cluster
        if cluster is not None:
            rank, size = cluster.global_rank(), cluster.world_size()
            return Topology(rank, cluster.local_rank(), cluster.node_rank(), size, rank, size)
        if not self.is_connected:
            return ALONE
        rank, size = dist.get_rank(), dist.get_world_size()
        local = int(os.environ.get("LOCAL_RANK", rank))
        return Topology(rank, local, int(os.environ.get("GROUP_RANK", 0)), size, rank, size)

    @property
    def device(self) -> torch.device:
        """The device of this process, selected by its local rank.

        Raises:
            ConfigError: There are fewer devices than processes on this node.
        """
        if self._lw_device is not None:
            return self._lw_device
        devices = self.parallel_devices
        if not devices:
            return CPU
        local_rank = self.topology.local_rank
        if local_rank < len(devices):
            device: torch.device = devices[local_rank]
            return device
        if devices[0].type == "cpu":
            return CPU
        raise ConfigError(
            f"Expected a device for the process with local rank {local_rank}, got {len(devices)} on this node: "
            f"{', '.join(map(str, devices))}.",
            fix=f"start {len(devices)} processes per node, or pass devices={local_rank + 1} if the node has as many.",
        )

    @device.setter
    def device(self, device: torch.device) -> None:
        self._lw_device = device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """`num_replicas` and `rank` for a sampler; None with one process."""
        topology = self.topology
        return None if self.start_method is None else {"num_replicas": topology.data_size, "rank": topology.data_rank}

    # -- processes -----------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether this process is connected with others, so that collectives communicate."""
        return self.start_method is not None and dist.is_available() and dist.is_initialized()

    def setup_environment(self) -> None:
        """Make the device current and connect the processes. Called once in every process."""
        super().setup_environment()
        if self.start_method is not None:
            self.setup_distributed()
        self._lw_topology = None
        self._lw_topology = self.topology

    def setup_distributed(self) -> None:
        """Connect the processes, unless they are already connected.

        Raises:
            LaunchError: This build of torch lacks torch.distributed or the backend; or ranks are missing, which it
                lists.
        """
        if not dist.is_available():
            raise LaunchError(
                f"{type(self).__name__} requires torch.distributed, which this build of torch does not include.",
                fix="install another build of torch, or train on one device.",
            )
        backend = self._lw_backend()
        missing = [one for one in backend.split(",") if not dist.is_backend_available(one.rpartition(":")[2])]
        if missing and not dist.is_initialized():
            every = [one for one in dist.Backend.backend_list if one not in _NOT_CHOSEN]
            known = [*filter(dist.is_backend_available, every)]
            raise LaunchError(
                f"Expected a backend that this build of torch.distributed has, got "
                f"process_group_backend={backend!r}{nearest(backend, known)}.",
                fix=f"pass one of {', '.join(known)}, or leave process_group_backend out.",
            )
        connect(self.cluster, backend=backend, timeout=self.timeout, device=self.device)

    def _lw_backend(self) -> str:
        if self.process_group_backend is not None:
            return self.process_group_backend
        # Objects and numbers on the host are sent through gloo, so that they do not wait for the GPU.
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    # -- the model -----------------------------------------------------------------------------------------------

    def check_module(self, module: nn.Module) -> None:
        """Compare names, shapes and dtypes over ranks, because tensors are sent by position. Call it on every rank.

        Raises:
            ModuleError: The ranks built different modules, or parameters have no shape yet; lists them.
        """
        check_sync_batchnorm(module, self.device)
        lazy = [name for name, one in module.named_parameters() if isinstance(one, nn.UninitializedParameter)]
        if lazy:
            raise ModuleError(
                f"Expected parameters with a shape in {type(module).__name__}, got uninitialized parameters: "
                f"{', '.join(lazy)}.",
                fix="run the lazy modules once on a batch before training, for example in configure_model.",
            )
        described = [
            f"{name}: {tuple(one.shape)} {one.dtype} {'trained' if one.requires_grad else 'frozen'}"
            for name, one in [*module.named_parameters(), *module.named_buffers()]
        ]
        if collectives.same_everywhere("\n".join(described), device=collectives.host_device(self.device)):
            return
        everyone = self.gather_objects(described)
        lines = []
        for rank, theirs in enumerate(everyone):
            strange = [line for line in theirs if any(line not in others for others in everyone)]
            shown = "; ".join(strange[:5]) or f"{len(theirs)} tensors, in another order"
            lines.append(f"\n  rank {rank}: {shown}{' ...' if len(strange) > 5 else ''}")
        raise ModuleError(
            f"Expected the same {type(module).__name__} on all ranks, got different tensors:{''.join(lines)}",
            fix="build the module from the same configuration, files and library versions on all ranks.",
        )

    def _lw_check_stepped(self, optimizer: Optimizer, modules: Sequence[Changes]) -> None:
        """Refuse parameters of an optimizer that have gradients and have been in none of these modules.

        Raises:
            ModuleError: Their gradients are not averaged; lists them by group and shape.
        """
        strange = [
            f"parameter {index} of group {number} {tuple(one.shape)}"
            for number, group in enumerate(optimizer.param_groups)
            for index, one in enumerate(group["params"])
            if one.grad is not None and not any(module.has_had(one) for module in modules)
        ]
        if modules and strange:
            raise ModuleError(
                f"Expected parameters of the module in {type(optimizer).__name__}, whose gradients "
                f"{type(self).__name__} averages over ranks, got others on rank {self.global_rank}: "
                f"{'; '.join(strange[:5])}{' ...' if len(strange) > 5 else ''}.",
                fix="assign the layer to an attribute of the module before it is added to the optimizer; a plain list "
                "or dict does not register it, nn.ModuleList and nn.ModuleDict do.",
            )
        self._lw_stepped[id(optimizer)] = [*map(len, map(params_of_group, optimizer.param_groups))]

    # -- collectives; on every rank, in the same order -------------------------------------------------------------

    def all_reduce(self, tensor: Tree, group: ProcessGroup | str | None = None, reduce_op: ReduceOp = "mean") -> Any:
        """Return a tensor, number, or structure of them, reduced over ranks; nothing is changed in place.

        Args:
            tensor: A tensor, number or structure of them, equal in structure, shapes and dtypes on all ranks. Numbers
                become tensors.
            group: Ranks that take part; None for all ranks that read different data.
            reduce_op: "mean" ("avg"), "sum", "min", "max", "product", or torch's own. Integers have a float64 mean.

        Raises:
            RankFailure: On the CPU: shapes, dtypes or structure differ; lists the difference of each rank.
        """
        if isinstance(group, str):  # all_reduce(tensor, "sum")
            reduce_op, group = group, None
        if not self.is_connected:
            return tensor
        return collectives.all_reduce(
            tensor, group=group or self._lw_tensor_group, reduce_op=reduce_op, device=self.device
        )

    def reduce_scatter(
        self, tensor: Tree, group: ProcessGroup | str | None = None, reduce_op: ReduceOp = "mean"
    ) -> Any:
        """Return this rank's chunk of a reduction over ranks; see `Strategy.reduce_scatter`.

        Raises:
            ConfigError: The operation is unknown, or dimension 0 is not divisible by the number of ranks.
            RankFailure: On the CPU: shapes, dtypes or structure differ; lists the difference of each rank.
        """
        if isinstance(group, str):  # reduce_scatter(tensor, "sum")
            reduce_op, group = group, None
        if not self.is_connected:
            collectives.op_name(reduce_op)
            collectives.check_divides(tensor, 1)
            return tensor
        return collectives.reduce_scatter(
            tensor, group=group or self._lw_tensor_group, reduce_op=reduce_op, device=self.device
        )

    def all_gather(self, tensor: Tree, group: ProcessGroup | bool | None = None, sync_grads: bool = False) -> Any:
        """Return a tensor, number, or structure of them, of all ranks, stacked along a new first dimension.

        Args:
            tensor: A tensor, number or structure of them, equal in structure, shapes and dtypes on all ranks. Numbers
                become tensors.
            group: Ranks that take part; None for all ranks that read different data.
            sync_grads: Whether gradients flow back to the ranks' tensors.

        Raises:
            RankFailure: On the CPU: shapes, dtypes or structure differ; lists the difference of each rank.
        """
        if isinstance(group, bool):  # all_gather(tensor, True)
            sync_grads, group = group, None
        if not self.is_connected:
            return tensor
        return collectives.all_gather(
            tensor, group=group or self._lw_tensor_group, sync_grads=sync_grads, device=self.device
        )

    def broadcast(self, obj: T = None, src: int = 0, *, tensor: T = None) -> T:  # type: ignore[assignment]
        """Return rank `src`'s object, which must be picklable; its tensors are received on this rank's device.

        `tensor` is another name for `obj`.
        """
        obj = obj if tensor is None else tensor
        if not self.is_connected:
            return obj
        return collectives.broadcast(obj, src=src, device=self.device)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this method."""
        if self.is_connected:
            collectives.barrier(self.device)

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start an asynchronous in-place sum of a tensor over ranks; see `Strategy.start_sum`."""
        if not self.is_connected:
            return lambda: tensor
        work = dist.all_reduce(tensor, group=self._lw_data_group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return tensor

        return finish

    def gather_objects(self, obj: T) -> list[T]:
        """Return the objects of all ranks in rank order, on every rank; they may differ in kind and size."""
        if not self.is_connected:
            return [obj]
        return collectives.gather_objects(obj)

    def gather_to_first(self, obj: T) -> list[T] | None:
        """Return the objects of all ranks in rank order, on rank 0; None on the others. On every rank."""
        if not self.is_connected or "xla" in str(dist.get_backend_config()):  # has no gather
            return super().gather_to_first(obj)
        return collectives.gather_to_first(obj)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks (or with all=False, any rank) decided True. Reads the device."""
        if not self.is_connected:
            return bool(decision)
        device = collectives.host_device(self.device)
        reduced = collectives.all_reduce(int(decision), group=None, reduce_op="min" if all else "max", device=device)
        return bool(reduced)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r}, world_size={self.world_size})"


ProcessGroupStrategy = ParallelStrategy
"""Another name of the base class, by which strategies were derived from it before it connected processes."""


def _check_choice(name: str, value: str, choices: Sequence[str], problems: Clauses) -> None:
    if value not in choices:
        what = f"Expected {name} to be one of {', '.join(choices)}, got {name}={value!r}{nearest(str(value), choices)}"
        problems.add(what, f"pass a listed value of {name}")


def _duration(value: object, default: timedelta, name: str, problems: Clauses) -> timedelta:
    if value is None:
        return default
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return timedelta(seconds=value)
    if isinstance(value, timedelta) and value > timedelta():
        return value
    problems.add(
        f"Expected {name} to be a positive duration, got {name}={value!r}", f"pass {name} as a timedelta or in seconds"
    )
    return default
