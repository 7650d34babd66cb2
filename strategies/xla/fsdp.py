"""Sharded training by XLA: as with `XLAStrategy`, and each parameter sharded over the devices.

The recipe is that of torch_xla's SpmdFullyShardedDataParallel (FSDPv2), in place: parameters are marked as sharded,
outputs of units as sharded along the batch, and gradients pass a barrier. So XLA's compiler gathers parameters before a
unit runs and scatters gradients after it. The module keeps its classes and the names of its parameters; torch_xla would
wrap every unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...accelerators.xla import import_xla
from ...errors import Clauses, nearest, own_arguments
from ..construction.activation_checkpointing import (
    apply_activation_checkpointing,
    check_checkpointing,
    choose_checkpointed,
)
from ..construction.wrap_policy import check_policy, choose_units
from ..tree import leaves
from .process import XLAProcessStrategy
from .sharding import Spec, replicated

if TYPE_CHECKING:
    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import CheckpointPlugin, Cluster, StepOutput

# Any in this file: torch_xla is not annotated; policies are classes, functions, or objects of torch.

_STATE_DICT_TYPES = (None, "full", "sharded")
_MARK = "_loopwright_xla_unit"


class XLAFSDPStrategy(XLAProcessStrategy):
    """One process that trains on all XLA devices of this host, which share one sharded copy of the parameters.

    Each parameter, its gradient and its optimizer state are sharded over the devices along the longest dimension; one
    that is shorter than the number of devices is replicated. The rest is as with `XLAStrategy`.

    Args:
        parallel_devices: The devices; None is the devices of `devices=`.
        auto_wrap_policy: Modules that are units, whose parameters are gathered and freed together: as for
            FSDPStrategy, a set of classes (or of their names), a function of a module, or one of torch's policies.
            None selects repeated blocks and very large modules.
        activation_checkpointing_policy: Modules whose activations are recomputed in the backward pass: True for all
            units, classes, or a function of a module.
        state_dict_type: "full" or None: one file with full tensors. "sharded" is refused: one process has all shards.
        sequential_save: Accepted; there is one process, which writes one file.
        sync_module_states: Accepted; one process has one state.
        activation_checkpointing: Another name for `activation_checkpointing_policy`.
        cluster_environment: Accepted as None only.
        kwargs: Arguments of torch_xla's XlaFullyShardedDataParallel whose values agree with this strategy
            (`reshard_after_forward=True`, `flatten_parameters=False`); others are refused.

    Raises:
        ConfigError: An argument is not supported; every problem is named.
    """

    strategy_name = "xla_fsdp"
    traits = replace(XLAProcessStrategy.traits, has_several_devices=True, holds_parameters=True)
    data_axis = "fsdp"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing_policy: Any = None,
        state_dict_type: str | None = None,
        sequential_save: bool = False,
        debug: bool = False,
        sync_module_states: bool = True,
        *,
        activation_checkpointing: Any = None,
        cluster_environment: Cluster | None = None,
        precision: Precision | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator, checkpoint_io, precision_plugin, debug=debug, precision=precision,
            parallel_devices=parallel_devices, cluster_environment=cluster_environment,
        )  # fmt: skip
        problems = Clauses(check_policy("auto_wrap_policy", auto_wrap_policy))
        given = (activation_checkpointing_policy, activation_checkpointing)
        if None not in given:
            problems.add("two arguments select the checkpointed modules", "pass activation_checkpointing_policy= only")
        policy = next((one for one in given if one is not None and one is not False), None)
        problems += check_checkpointing("activation_checkpointing_policy", policy)
        if state_dict_type not in _STATE_DICT_TYPES:
            hint = nearest(str(state_dict_type), ("full", "sharded"))
            problems.add(f"state_dict_type={state_dict_type!r} is unknown{hint}", 'pass "full" or nothing')
        elif state_dict_type == "sharded":
            problems.add('state_dict_type="sharded", but one process has all shards', 'pass "full" or nothing')
        problems += _refused(kwargs)
        problems.refuse(type(self).__name__)
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = policy
        self.sequential_save = sequential_save
        self.sync_module_states = sync_module_states

    def check_layers(self, module: nn.Module) -> None:
        """Raise an error for a module in which a policy selects nothing; see `ChecksLayers.check_layers`."""
        units = [one for _, one in choose_units(module, self.auto_wrap_policy).units]
        if self.activation_checkpointing_policy is not None:
            choose_checkpointed(module, self.activation_checkpointing_policy, units=units)

    def place_module(self, module: nn.Module) -> nn.Module:
        """Return the module as it runs in evaluation: sharded as well."""
        return self.setup_module(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module's parameters over the devices, in place, and return it.

        Raises:
            ConfigError: A policy selects no module, or is not a policy.
        """
        units = [one for _, one in choose_units(module, self.auto_wrap_policy).units]
        if self.activation_checkpointing_policy is not None:
            apply_activation_checkpointing(module, self.activation_checkpointing_policy, units=units)
        super().setup_module(module)
        if self.num_devices > 1:
            for unit in units:
                if not getattr(unit, _MARK, False):
                    unit.register_forward_pre_hook(_set_barrier)
                    unit.register_forward_hook(self._lw_shard_output)
                    setattr(unit, _MARK, True)
        return module

    def spec_of(self, parameter: Tensor) -> Spec:
        """Return the mesh's axis for each dimension of a parameter: the longest is sharded."""
        shape = list(parameter.shape)
        if not shape or max(shape) < self.num_devices:
            return replicated(parameter)
        longest = shape.index(max(shape))
        return tuple(self.data_axis if dim == longest else None for dim in range(len(shape)))

    def _lw_shard_output(self, unit: nn.Module, args: object, output: StepOutput) -> None:
        lib = import_xla()._XLAC
        for _, leaf in leaves(output):
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] % self.num_devices == 0:
                spec = (self.data_axis, *replicated(leaf)[1:])
                lib._xla_mark_sharding(leaf, self.mesh.get_op_sharding(spec))


def _set_barrier(unit: nn.Module, args: object) -> None:
    """End the backward pass of a unit in a barrier, so that XLA does not fuse it with the next one's.

    torch's full backward hook, as in torch_xla, would warn if no input of a unit needs a gradient.
    """
    if not torch.is_grad_enabled():
        return
    for _, leaf in leaves(args):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(partial(_barrier, unit))


def _barrier(unit: nn.Module, gradient: Tensor) -> None:
    gradients = [one.grad for one in unit.parameters() if one.grad is not None]
    import_xla("torch_xla.core.xla_model").optimization_barrier_([*gradients, gradient])


def _refused(kwargs: dict[str, object]) -> list[tuple[str, str]]:
    """Return the problems of further arguments of torch_xla's classes."""
    harmless: dict[str, Callable[[object], bool]] = {
        "reshard_after_forward": lambda value: value is True,
        "flatten_parameters": lambda value: value is False,
        "pin_layout_in_collective_ops": lambda value: True,  # all collectives are the compiler's
        "execute_sharding_on_init": lambda value: True,
    }
    return [
        (f"{name}={value!r} is not supported{nearest(name, own_arguments(XLAFSDPStrategy))}", f"leave {name} out")
        for name, value in kwargs.items()
        if name not in harmless or not harmless[name](value)
    ]
