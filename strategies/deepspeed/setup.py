"""Engines around modules and their optimizers. On every rank: making one communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import ConfigError, ModuleError
from ...messages import warn
from ...precision.base import evaluates_again
from ..construction.materialize import made_of
from ..distributed.collectives import broadcast_tensors
from .arguments import without_effect
from .config import Config
from .engine import EngineOptimizer, EngineRoot
from .engine_types import Zero
from .ops import quietly, refusals
from .state import full_parameters, set_local_masters, set_masters

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .strategy import DeepSpeedStrategy

_BLOCK_BYTES = 4096  # of a disk


def engine_config(strategy: DeepSpeedStrategy) -> Config:
    """Return the engine's configuration, without what the Trainer does: clipping, optimizer and schedule."""
    config = strategy.configure_deepspeed_config(strategy.given_config)
    config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    config["gradient_clipping"] = 0.0
    config.setdefault("steps_per_print", 10**12)
    if strategy.precision.policy.compute_dtype is torch.float16:
        config["fp16"] = {**strategy.arguments.section("fp16"), **config.get("fp16", {}), "enabled": True}
    return config


def check_layers(module: nn.Module) -> None:
    """Refuse a PipelineModule, and parameters without a dimension, at which DeepSpeed (0.19) fails with an error.

    Raises:
        ModuleError: With their names.
    """
    for path, layer in module.named_modules():
        kinds = [kind for kind in type(layer).__mro__ if kind.__module__.startswith("deepspeed.")]
        if any(kind.__name__ == "PipelineModule" for kind in kinds):
            raise ModuleError(
                f"Expected layers of torch in {type(module).__name__}, got DeepSpeed's PipelineModule"
                f"{f' at {path}' if path else ''}.",
                fix="put the same layers into an nn.Sequential and split it into stages with strategy='mesh:pp=2'.",
            )
    names = [name for name, one in module.named_parameters() if one.ndim == 0 and not hasattr(one, "ds_id")]
    if names:
        raise ModuleError(
            f"Expected parameters with at least one dimension in {type(module).__name__} for DeepSpeed, got parameters "
            f"of shape (): {', '.join(names)}.",
            fix="make them one-dimensional, as in nn.Parameter(torch.ones(1)), or pass strategy='ddp' or 'fsdp'.",
        )


def make_contiguous(module: nn.Module) -> None:
    """Make parameters contiguous, for the engine's flat buffers."""
    for one in module.parameters():
        if not one.is_contiguous():
            one.data = one.data.contiguous()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move a module's buffers, and nothing else."""
    for owner in module.modules():
        for name, one in owner._buffers.items():
            owner._buffers[name] = None if one is None else one.to(device)


def several(count: int) -> ConfigError:
    """Return the error about several optimizers."""
    return ConfigError(
        f"Expected one optimizer for a module with DeepSpeedStrategy, got {count}.",
        fix="use one optimizer with several parameter groups; or strategy='ddp' or 'fsdp'.",
    )


def setup_optimizer(
    strategy: DeepSpeedStrategy, roots: list[EngineRoot], optimizer: Optimizer, *, is_of_config: bool
) -> Optimizer:
    """Make the engine of an optimizer and its module, and return what steps both.

    Args:
        strategy: The strategy.
        roots: The modules that are set up, the newest last.
        optimizer: The user's optimizer.
        is_of_config: Whether it was made from the configuration's section "optimizer".

    Raises:
        ConfigError: The module has an optimizer already, is not set up, or the optimizer cannot be used.
    """
    _replace_deferred(optimizer)
    if evaluates_again(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be used with DeepSpeedStrategy: it evaluates the model in its step.",
            fix="use an optimizer such as AdamW or SGD, or strategy='ddp'; or set evaluates_closure = False on one "
            "that needs no evaluation.",
        )
    unused = [name for name in ("optimizer", "scheduler") if name in strategy.given_config]
    if unused and not is_of_config and strategy.is_global_zero:
        warn(
            f"{strategy.where}: {' and '.join(unused)} ignored, because the module configures an optimizer.",
        )
    ineffective = without_effect(strategy.arguments, engine_config(strategy))
    if ineffective and strategy.is_global_zero:
        warn(f"{type(strategy).__name__}: arguments without effect: {', '.join(ineffective)}.")
    root = _root_of(roots, optimizer)
    if root.has_engine:
        raise several(2)
    # The engine creates masters from the 16-bit parameters that it has cast. The original values are restored
    # afterwards.
    masters: dict[str, Tensor] = {}
    if strategy.precision.policy.compute_dtype != torch.float32:
        masters = {**full_parameters(root.module), **(root.loaded or {})}
    shards = {name: one for name, one in root.first.items() if name not in masters}
    root.__dict__.update(loaded=None, first={})
    if strategy.stage == 0 and strategy.world_size > 1:
        broadcast_tensors(list(root.module.buffers()))
    made = start(strategy, root, optimizer)
    if masters:
        set_masters(root, masters)
    if shards:
        set_local_masters(root, shards)
    return made  # type: ignore[return-value]  # its __class__ is the optimizer's


def _root_of(roots: Iterable[EngineRoot], optimizer: Optimizer) -> EngineRoot:
    """Return the newest root whose module has a parameter of the optimizer."""
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for root in reversed(list(roots)):
        if any(id(one) in own for one in root.module.parameters()):
            return root
    raise ConfigError(
        "Expected an optimizer with parameters of a module that is set up, which DeepSpeed requires, got "
        f"{type(optimizer).__name__} without any.",
        fix="pass both to fabric.setup(module, optimizer); create the optimizer from the module's parameters.",
    )


def _replace_deferred(optimizer: Optimizer) -> None:
    """Replace parameters of an optimizer that was made before its module had values."""
    for group in optimizer.param_groups:
        for number, old in enumerate(group["params"]):
            new = made_of(old)
            if new is not old:
                group["params"][number] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


def start(strategy: DeepSpeedStrategy, root: EngineRoot, optimizer: Optimizer | None) -> EngineOptimizer | None:
    """Make the engine of a module and its optimizer; or, for evaluation, of the module alone."""
    import deepspeed

    groups = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
    # DeepSpeed saves the configuration, and so the prefix of names for checkpoint/deepspeed/folder.py.
    config = {**engine_config(strategy), "loopwright": {"prefix": "module."}}
    with refusals(strategy.where), quietly():
        engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=config, dist_init_required=False)
    root.__dict__["engine"] = engine
    _match_statistics(root.module)
    if root.stage:
        _adapt_zero(root.zero)
    elif optimizer is not None and hasattr(engine.optimizer, "fp32_groups"):
        # The 16-bit optimizer of stage 0 steps without gradients, to have state: Adam's count would be 1.
        optimizer.state.clear()
    return None if optimizer is None else EngineOptimizer(optimizer, root, groups)


def _match_statistics(module: nn.Module) -> None:
    """Cast running statistics of norms to the dtype of their weights: torch computes with one dtype of both.

    DeepSpeed (0.19) casts parameters to 16 bits, but not buffers.
    """
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        for name in ("running_mean", "running_var"):
            value = getattr(layer, name, None)
            if isinstance(weight, Tensor) and isinstance(value, Tensor):
                setattr(layer, name, value.to(weight.dtype))


# --- workarounds for DeepSpeed 0.19 --------------------------------------------------------------------------------


def _adapt_zero(zero: Zero) -> None:
    """Correct what a ZeRO optimizer gets wrong; without an optimizer, the same for stage 3's parameters."""
    if getattr(zero, "round_robin_gradients", False):
        # It finds masters in the order of the optimizer's groups, unless there is padding between parameters: then it
        # looks for each, which is right in both cases.
        padding, zero.round_robin_bit16_padding = zero.round_robin_bit16_padding, [[1]] * len(zero.bit16_groups)
        zero._link_all_hp_params()
        zero.round_robin_bit16_padding = padding
        zero._hp_optimizer_states_linked = False
    offload = getattr(zero, "parameter_offload", None)
    if offload is not None:
        # It may read a parameter ahead that is used twice in what comes, and fails at the second time.
        offload.get_param_coordinator()._PartitionedParameterCoordinator__prefetch_nvme = False
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is not None:
        swapper.swap_out_gradients = _aligned_only(swapper.swap_out_gradients)
    if getattr(zero, "cpu_offload", False):
        # With 1 it would not sum micro-batches; windows are ours, and may be longer.
        zero.gradient_accumulation_steps = max(2, zero.gradient_accumulation_steps)


def _aligned_only(swap_out: Callable[..., None]) -> Callable[..., None]:
    """Return what writes gradients to a disk, and keeps in memory those that could not be read back.

    A gradient is read straight to its offset in a flat buffer. Where that is not at a block of the disk, direct access
    fails silently, and the step would use what was in the buffer.
    """

    def swap_out_gradients(parameter: object, gradient_offsets: list[int], gradient_tensors: list[Tensor]) -> None:
        for offset, tensor in zip(gradient_offsets, gradient_tensors, strict=True):
            is_aligned = offset * tensor.element_size() % _BLOCK_BYTES == 0
            tensor.swappable = is_aligned  # type: ignore[attr-defined]  # DeepSpeed's tensor
        swap_out(parameter=parameter, gradient_offsets=gradient_offsets, gradient_tensors=gradient_tensors)

    return swap_out_gradients
