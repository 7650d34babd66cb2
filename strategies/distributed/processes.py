"""The base class of strategies whose processes communicate through torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ConfigError, LaunchError, ModuleError, nearest
from ..constructors import inherit_descriptions
from ..parallel import ParallelStrategy
from .changes import Changes, params_of_group
from .collectives import host_device, same_everywhere
from .layer_sync import check_sync_batchnorm
from .rendezvous import connect

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import CheckpointPlugin, Cluster

__all__ = ["DEFAULT_TIMEOUT", "ProcessGroupStrategy", "broadcast_tensors"]

START_METHODS = ("popen", "spawn", "fork", "forkserver")
UNEVEN = ("stop_all", "cycle", "zero_weight")
DEFAULT_TIMEOUT = timedelta(seconds=1800)
MOST_STALL = timedelta(seconds=300)


class ProcessGroupStrategy(ParallelStrategy):
    """The base class of strategies with several processes that communicate through torch.distributed.

    It starts and connects processes, compares the module over ranks (`check_module`), and provides the collectives.
    Derive from it to add an engine.

    The docstring of a subclass describes only its further arguments; the descriptions below are added to it.

    Args:
        accelerator: The kind of device; None lets Fabric choose.
        parallel_devices: The devices of this node's processes; None lets Fabric choose.
        cluster_environment: Provides ranks and addresses; None lets Fabric choose.
        checkpoint_io: Reads and writes checkpoints; None lets Fabric choose.
        precision_plugin: The precision; None lets Fabric choose.
        process_group_backend: "gloo", "nccl", "mpi", ...; None: gloo on the CPU, nccl and gloo on CUDA devices.
        timeout: Time after which a rank that waits for another one fails; a timedelta or seconds. None: 30 minutes.
        start_method: How processes are started if no other launcher starts them: "popen" (runs the command again),
            "spawn", "fork", "forkserver".
        precision: Another name for `precision_plugin`.
        uneven: Behavior if the numbers of training batches differ between ranks.
        stall_timeout: Time without progress after which every rank reports its stack traces; None: 5 minutes, or
            `timeout` if that is shorter.
        problems: Pairs (problem, fix) that the subclass found in its arguments.

    Raises:
        ConfigError: An argument is invalid; every problem is listed.
    """

    uneven_choices: tuple[str, ...] = UNEVEN
    """Valid values of `uneven`."""
    timeout: timedelta
    stall_timeout: timedelta

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
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, precision=precision
        )
        found = [*problems, *_wrong_choice("start_method", start_method, START_METHODS)]
        found += _wrong_choice("uneven", uneven, self.uneven_choices)
        self.timeout = _duration(timeout, DEFAULT_TIMEOUT, "timeout", found)
        self.stall_timeout = _duration(stall_timeout, min(self.timeout, MOST_STALL), "stall_timeout", found)
        if found:
            whats, fixes = zip(*found, strict=True)
            raise ConfigError(f"{type(self).__name__}: {'; '.join(whats)}.", fix=f"{'; '.join(dict.fromkeys(fixes))}.")
        self.start_method = start_method
        self.uneven = uneven
        self.process_group_backend = process_group_backend
        # By the id of an optimizer: the sizes of its groups when their parameters were looked at.
        self._lw_stepped: dict[int, list[int]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        inherit_descriptions(cls)

    # -- processes -----------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """Connect the processes, unless they are already connected.

        Raises:
            LaunchError: This build of torch has no torch.distributed, or ranks are missing; lists them.
        """
        if not dist.is_available():
            raise LaunchError(
                f"{type(self).__name__} requires torch.distributed, which this build of torch does not include.",
                fix="install another build of torch, or train on one device.",
            )
        connect(self.cluster, backend=self._lw_backend(), timeout=self.timeout, device=self.device)

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
        if same_everywhere("\n".join(described), device=host_device(self.device)):
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r}, world_size={self.world_size})"


def broadcast_tensors(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
    """Overwrite tensors with those of the group's first rank, in place.

    Args:
        tensors: The same number, shapes and dtypes on all ranks of the group.
        group: Ranks that take part; None for all.
    """
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for tensor in tensors:
        if tensor.layout is not torch.strided:  # ranks may have other numbers of elements
            box = [tensor.detach()]
            dist.broadcast_object_list(box, src=first, group=group)
            tensor.detach().copy_(box[0])
    dense_ones = [as_bytes(tensor.detach()) for tensor in tensors if tensor.layout is torch.strided]
    copies = [(tensor, tensor.contiguous()) for tensor in dense_ones]
    for work in [dist.broadcast(dense, src=first, group=group, async_op=True) for _, dense in copies]:
        work.wait()
    for tensor, dense in copies:
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return an 8-bit floating-point tensor as bytes, which all backends send, sharing memory; others as they are."""
    is_small = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if is_small else tensor


def _wrong_choice(name: str, value: object, choices: Sequence[str]) -> list[tuple[str, str]]:
    if value in choices:
        return []
    what = f"Expected {name} to be one of {', '.join(choices)}, got {name}={value!r}{nearest(str(value), choices)}"
    return [(what, f"pass a listed value of {name}")]


def _duration(value: object, default: timedelta, name: str, problems: list[tuple[str, str]]) -> timedelta:
    if value is None:
        return default
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return timedelta(seconds=value)
    if isinstance(value, timedelta) and value > timedelta():
        return value
    problems.append(
        (
            f"Expected {name} to be a positive duration, got {name}={value!r}",
            f"pass {name} as a timedelta or in seconds",
        )
    )
    return default
