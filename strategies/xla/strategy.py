"""Data parallel training by XLA: one process, whose graphs run on all devices of a host (SPMD).

The program is that of one device with the full batch; tensors are marked with their sharding over the devices, and
XLA's compiler adds the communication.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...accelerators.xla import import_xla, is_runtime_started
from ...errors import ConfigError
from ...protocols import Batch, CheckpointPlugin, Cluster, StateDict
from ..base import plain_name
from ..tree import leaves, map_leaves
from .process import XLAProcessStrategy, state_like_parameters

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...accelerators import Accelerator
    from ...precision import Precision

__all__ = ["XLAStrategy"]

logger = logging.getLogger(__name__)

# Any in this file: torch_xla is not annotated; batches of any structure.

_Shards = Sequence[tuple[Tensor, object]]
_Indices = Sequence[tuple[object, Sequence[slice] | EllipsisType]]


class XLAStrategy(XLAProcessStrategy):
    """One process that trains on all XLA devices of this host, each with a copy of the module.

    A loader's `batch_size` counts the samples of all devices together; each device computes its shard, and gradients
    are those of the full batch, also with `lw.Loss(sum, weight)`. Batch norm sees the full batch. There is one rank, so
    collectives return their argument. Batches are sharded along their first dimension; a batch that does not divide is
    computed by every device, with the same result.

    Args:
        parallel_devices: The devices, all of the runtime's; None: those of `devices=`.
        sync_module_states: Accepted; one process has one state, which every device gets.
        cluster_environment: None; there is one process.

    Raises:
        ConfigError: `cluster_environment` was given.
    """

    strategy_name = "xla"
    traits = replace(XLAProcessStrategy.traits, has_several_devices=True)
    data_axis = "data"
    """Name of the mesh axis that batches are sharded over."""

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sync_module_states: bool = True,
        *,
        cluster_environment: Cluster | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator, checkpoint_io, precision_plugin, debug=debug, precision=precision,
            parallel_devices=parallel_devices,
        )  # fmt: skip
        if cluster_environment is not None:
            raise ConfigError(
                f"Expected cluster_environment=None for {type(self).__name__}, which uses one process for all devices "
                f"of a host, got {cluster_environment!r}.",
                fix="remove cluster_environment=.",
            )
        self.sync_module_states = sync_module_states
        self._lw_mesh: Any = None
        self._lw_batch_sharding: BatchSharding | None = None

    # -- devices -------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[torch.device]:
        """The devices that a batch is sharded over."""
        return list(self.parallel_devices or [self.device])

    @property
    def num_devices(self) -> int:
        """Number of XLA devices that this process computes on."""
        return len(self.devices)

    @property
    def device(self) -> torch.device:
        """The device of tensors; a virtual device that represents all devices if there are several."""
        return torch.device("xla", 0)

    @device.setter
    def device(self, device: torch.device) -> None:
        raise ConfigError(
            f"{type(self).__name__} uses all devices, so its device cannot be set to {device}.",
            fix="use SingleDeviceXLAStrategy(device).",
        )

    def _lw_last_index(self) -> int:
        return self.num_devices - 1

    def before_devices(self) -> None:
        """Switch SPMD on, until this process ends.

        Raises:
            ConfigError: The runtime has another number of devices.
        """
        if self.num_devices == 1:
            return
        runtime = import_xla("torch_xla.runtime")
        if is_runtime_started():
            self._lw_check_count()  # before SPMD is switched on
        if not runtime.is_spmd():
            runtime.use_spmd()
        self._lw_check_count()

    def _lw_check_count(self) -> None:
        count = int(import_xla("torch_xla.runtime").global_runtime_device_count())
        if count != self.num_devices:
            raise ConfigError(
                f"Expected {count} devices, all of XLA's runtime in this process, for {type(self).__name__}, got "
                f"{self.num_devices}.",
                fix=f"pass devices={count}; on a CPU CPU_NUM_DEVICES sets the number, before the runtime starts.",
            )

    @property
    def mesh(self) -> Any:
        """torch_xla's Mesh of the devices, with one axis, `data_axis`."""
        if self._lw_mesh is None:
            spmd = import_xla("torch_xla.distributed.spmd")
            self._lw_mesh = spmd.Mesh(list(range(self.num_devices)), (self.num_devices,), (self.data_axis,))
            spmd.set_global_mesh(self._lw_mesh)
        return self._lw_mesh

    # -- sharding of tensors --------------------------------------------------------------------------------------

    def place_parameters(self, module: nn.Module) -> None:
        """Copy parameters and buffers to every device."""
        if self.num_devices > 1:
            for parameter in module.parameters():
                self.mark(parameter, self.spec_of(parameter))
            for buffer in module.buffers():
                self.mark(buffer, _replicated(buffer))

    def spec_of(self, parameter: Tensor) -> tuple[str | None, ...]:
        """Return the mesh's axis for each dimension of a parameter; None for a dimension that is not sharded."""
        return _replicated(parameter)

    def place_optimizer(self, optimizer: Optimizer) -> None:
        """Shard the optimizer's state as its parameters are."""
        if self.num_devices > 1:
            for parameter, tensor in state_like_parameters(optimizer):
                self.mark(tensor, self.spec_of(parameter))

    def mark(self, tensor: Tensor, spec: tuple[str | None, ...]) -> None:
        """Set the sharding of a tensor, unless it has one."""
        lib = import_xla()._XLAC
        if not lib._get_xla_sharding_spec(tensor):
            # torch_xla's mark_sharding, without the object that it returns.
            lib._xla_mark_sharding(tensor, self.mesh.get_op_sharding(spec))

    def load_module_state_dict(
        self, module: nn.Module, state: StateDict, strict: bool = True
    ) -> Any:  # Any: torch's result
        """Load a state of host tensors; see `Strategy`. Each device gets its shard of a parameter only."""
        return super().load_module_state_dict(module, self._lw_send_shards(self.unwrap(module), state), strict)

    def _lw_send_shards(self, module: nn.Module, state: StateDict) -> StateDict:
        """Return a state whose sharded tensors are on the devices: torch's copy would send each device all of them."""
        targets = {plain_name(name): one for name, one in module.named_parameters(remove_duplicate=False)}
        names: list[str] = []
        tensors: list[Tensor] = []
        specs: list[Any] = []
        for name, value in state.items():
            target = targets.get(plain_name(name))
            if target is None or type(value) is not Tensor or value.device.type != "cpu" or value.shape != target.shape:
                continue  # torch copies it, or names the misfit
            spec = self.spec_of(target)
            if any(spec):
                names.append(name)
                tensors.append(value.to(target.dtype))
                specs.append(
                    import_xla("torch_xla.distributed.spmd").ShardingSpec(self.mesh, spec).xla_spec(tensors[-1])
                )
        if not names:
            return state
        sent = import_xla()._XLAC._xla_tensors_from_aten(tensors, [str(self.device)] * len(tensors), specs)
        result = copy(state)  # with the versions of modules, which torch keeps in an attribute
        result.update(zip(names, sent, strict=True))
        return result

    def copy_to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return full tensors on the host, from shards that are copied one by one.

        torch_xla would gather them on the devices: a graph that is compiled again at each save, and memory for each.
        """
        lib = import_xla()._XLAC
        copies: dict[int, Tensor] = {}
        # Shards can be read only when the graphs that compute them have ended.
        lib._xla_sync_multi(tensors, devices=[], wait=True, sync_xla_data=False)
        import_xla("torch_xla.core.xla_model").wait_device_ops()
        sharded = [tensor for tensor in tensors if "devices=" in lib._get_xla_sharding_spec(tensor)]
        for tensor, shards, indices in zip(
            sharded, lib._get_local_shards(sharded), lib._get_local_shard_replica_and_indices(sharded), strict=True
        ):
            copies[id(tensor)] = _joined(tensor, shards, indices)
        rest = [tensor for tensor in tensors if id(tensor) not in copies]
        copies.update(zip(map(id, rest), super().copy_to_host(rest), strict=True))
        return [copies[id(tensor)] for tensor in tensors]

    def input_sharding(self) -> BatchSharding | None:
        """Return the sharding of batches: along their first dimension."""
        if self.num_devices == 1:
            return None
        if self._lw_batch_sharding is None:
            self._lw_batch_sharding = BatchSharding(self.mesh, self.data_axis, self.num_devices)
        return self._lw_batch_sharding

    def place_batch(self, batch: Batch) -> Batch:
        """Return a batch whose host tensors were sent to the devices, a shard to each, without waiting.

        Called by Fabric before it moves the rest.
        """
        sharding = self.input_sharding()
        found = {id(leaf): leaf for _, leaf in leaves(batch) if type(leaf) is Tensor and leaf.device.type == "cpu"}
        if sharding is None or not found:
            return batch
        tensors = list(found.values())
        specs = [sharding.xla_spec(tensor) for tensor in tensors]
        sent = import_xla()._XLAC._xla_tensors_from_aten(tensors, [str(self.device)] * len(tensors), specs)
        on_device = dict(zip(found, sent, strict=True))
        return map_leaves(batch, lambda leaf: on_device.get(id(leaf), leaf))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices={self.num_devices})"


def _joined(tensor: Tensor, shards: _Shards, indices: _Indices) -> Tensor:
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (shard, _), (_, index) in zip(shards, indices, strict=True):
        if isinstance(index, EllipsisType):
            return shard.clone()
        # The last shard may be padded.
        full[tuple(index)] = shard[tuple(slice(0, one.stop - one.start) for one in index)]
    return full


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile's


def _replicated(tensor: Tensor) -> tuple[None, ...]:
    return (None,) * tensor.ndim


class BatchSharding:
    """Sharding of batches over the devices: along the first dimension, for any number of dimensions.

    It replaces torch_xla's ShardingSpec, which is for one number of dimensions, also in torch_xla's loader.

    Args:
        mesh: torch_xla's Mesh.
        axis: Name of the sharded axis.
        size: Number of devices on it.
    """

    minibatch = False
    """For torch_xla: the batch is that of all devices, not this host's."""

    def __init__(self, mesh: Any, axis: str, size: int) -> None:
        self._mesh = mesh
        self._axis = axis
        self._size = size
        self._specs: dict[int, Any] = {}
        self._has_warned = False

    def xla_spec(self, tensor: Tensor) -> Any:
        """Return torch_xla's sharding of one host tensor; None for one that is replicated."""
        if not tensor.ndim:
            return None
        if tensor.shape[0] % self._size:
            self._warn(tensor.shape[0])
            return None
        spec = self._specs.get(tensor.ndim)
        if spec is None:
            spmd = import_xla("torch_xla.distributed.spmd")
            spec = self._specs[tensor.ndim] = spmd.ShardingSpec(self._mesh, (self._axis, *_replicated(tensor)[1:]))
        return spec.xla_spec(tensor)

    def _warn(self, samples: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A batch of %d samples cannot be split evenly over %d devices, so each computes the full batch. Use a "
                "batch_size that is a multiple of %d, and drop_last=True",
                samples, self._size, self._size,
            )  # fmt: skip
