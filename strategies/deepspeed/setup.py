"""How DeepSpeedStrategy puts engines around modules and optimizers. On every rank: it communicates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...errors import ConfigError, ModuleError
from ..construction.materialize import made_of
from ..distributed.processes import broadcast_tensors
from . import config as configs

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .engine import EngineOptimizer, EngineRoot
    from .pipeline.engine import PipelineRoot
    from .strategy import DeepSpeedStrategy

__all__ = [
    "check_shapes",
    "engine_config",
    "make_contiguous",
    "move_buffers",
    "setup_optimizer",
    "setup_stages",
    "several",
    "start",
]


def engine_config(strategy: DeepSpeedStrategy) -> dict[str, Any]:  # Any: values of a JSON document
    """Return what the engine gets: clipping is ours, and so are optimizer and schedule."""
    config = configs.without_sections(strategy.configure_deepspeed_config(strategy.given_config))
    config["gradient_clipping"] = 0.0
    config.setdefault("steps_per_print", 10**12)
    if strategy.precision.policy.compute_dtype is torch.float16:
        config["fp16"] = {**configs.fp16_section(strategy.arguments), **config.get("fp16", {}), "enabled": True}
    return config


def check_shapes(module: nn.Module) -> None:
    """Refuse parameters of which DeepSpeed (0.19) would say that they cannot be viewed as bytes.

    Raises:
        ModuleError: Parameters have no dimension; names them.
    """
    names = [name for name, one in module.named_parameters() if one.ndim == 0 and not hasattr(one, "ds_id")]
    if names:
        raise ModuleError(
            f"{type(module).__name__} has parameters of shape (): {', '.join(names)}. DeepSpeed expects at least one "
            "dimension.",
            fix="give them one: nn.Parameter(torch.ones(1)); or pass strategy='ddp' or 'fsdp'.",
        )


def make_contiguous(module: nn.Module) -> None:
    """Let parameters lie in the order of their dimensions, which the engine's flat buffers need."""
    for one in module.parameters():
        if not one.is_contiguous():
            one.data = one.data.contiguous()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move a module's buffers, and nothing else."""
    for name, one in list(module.named_buffers()):
        owner = module.get_submodule(name.rpartition(".")[0])
        owner._buffers[name.rpartition(".")[2]] = one.to(device)


def setup_stages(strategy: DeepSpeedStrategy, module: nn.Module, *, is_automatic: bool) -> PipelineRoot:
    """Return what runs a module with a PipelineModule in it.

    Raises:
        ModuleError: The ranks built different modules.
        ConfigError: It cannot be run.
    """
    from .pipeline import start as pipelines
    from .pipeline import state as deepspeed_stages
    from .pipeline.engine import PipelineRoot

    found = pipelines.find_pipeline(module)
    assert found is not None
    path, pipe = found
    precision = strategy.precision
    pipelines.check(module, pipe, strategy.given_config, precision, is_automatic=is_automatic)
    count = strategy.micro_batches or pipe.num_stages
    # In stage 0 the engine would add 16-bit gradients up in masters of its own, where no loss weighs them.
    stage = strategy.stage if precision.policy.compute_dtype is torch.float32 else 1
    root = PipelineRoot(module, path, pipe, stage=stage, micro_batches=count, precision=precision)
    everyone = strategy.gather_objects(deepspeed_stages.described(root))
    root.__dict__["layout"] = deepspeed_stages.learn_names(root, everyone)
    root.sync_buffers()
    strategy.engines.add(root)
    return root


def setup_optimizer(strategy: DeepSpeedStrategy, optimizer: Optimizer, *, is_of_config: bool) -> Optimizer:
    """Put the engine around the optimizer's module, and return what steps both.

    Args:
        strategy: Whose engine.
        optimizer: The user's.
        is_of_config: Whether it was made of the configuration's section "optimizer".

    Raises:
        ConfigError: The module has an optimizer already, is not set up, or the optimizer cannot be used.
    """
    from .state import set_masters, set_own_masters, whole_parameters

    _replace_deferred(optimizer)
    if type(optimizer).__name__ == "LBFGS":
        raise ConfigError(
            "LBFGS cannot be used with DeepSpeedStrategy: it evaluates the model within its step, which the engine "
            "makes.",
            fix="use an optimizer such as AdamW or SGD; or strategy='ddp'.",
        )
    unused = [name for name in ("optimizer", "scheduler") if name in strategy.given_config]
    if unused and not is_of_config and strategy.is_global_zero:
        warnings.warn(
            f"{strategy.where}: what it says under {' and '.join(unused)} does not count, since an optimizer was "
            "made beside it",
            stacklevel=3,
        )
    root = strategy.engines.of(optimizer)
    if root.engine is not None:
        raise several(2)
    has_masters = strategy.precision.policy.compute_dtype != torch.float32
    loaded = root.loaded
    # The engine makes masters of the 16-bit parameters that it has cast: what was there before is put back.
    masters: Mapping[str, Any] = {}
    if has_masters:
        masters = {**whole_parameters(root.module), **(loaded or {})}
    parts = {name: one for name, one in root.first.items() if name not in masters}
    root.__dict__.update(loaded=None, first={})
    if strategy.stage == 0 and strategy.world_size > 1 and not root.is_pipeline:
        broadcast_tensors(list(root.module.buffers()))
    made = start(strategy, root, optimizer)
    if masters:
        set_masters(root, masters)
    if parts:
        set_own_masters(root, parts)
    assert made is not None
    return made  # type: ignore[return-value]  # it says that it is one


def _replace_deferred(optimizer: Optimizer) -> None:
    """Let an optimizer that was made before its module had values have the parameters that got them."""
    for group in optimizer.param_groups:
        for number, old in enumerate(group["params"]):
            new = made_of(old)
            if new is not old:
                group["params"][number] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


def start(strategy: DeepSpeedStrategy, root: EngineRoot, optimizer: Optimizer | None) -> EngineOptimizer | None:
    """Put an engine around a module and its optimizer; or, for evaluation, around the module alone."""
    from .engine import start as start_engine
    from .ops import refusals

    with refusals(strategy.where):
        if root.is_pipeline:
            return _start_stages(strategy, cast("PipelineRoot", root), optimizer)
        return start_engine(strategy.engines.deepspeed, root, optimizer, engine_config(strategy))


def _start_stages(
    strategy: DeepSpeedStrategy, root: PipelineRoot, optimizer: Optimizer | None
) -> EngineOptimizer | None:
    from .pipeline.start import stage_config, start_stages
    from .pipeline.state import group_names, learn_groups

    if optimizer is not None:
        groups = [group["params"] for group in optimizer.param_groups]
        learn_groups(root.layout, strategy.gather_objects(group_names(root, groups)))
    config = stage_config(engine_config(strategy), root, trains=optimizer is not None)
    return start_stages(strategy.engines.deepspeed, root, optimizer, config)


def several(count: int) -> ConfigError:
    """Return the error about several optimizers."""
    return ConfigError(
        f"DeepSpeedStrategy was given {count} optimizers for one module, and an engine steps one.",
        fix="use one optimizer with several parameter groups; or strategy='ddp' or 'fsdp'.",
    )
