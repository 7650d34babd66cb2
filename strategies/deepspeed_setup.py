"""How DeepSpeedStrategy puts engines around modules and optimizers. On every rank: it communicates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..errors import ConfigError
from . import deepspeed_config as configs
from .processes import broadcast_tensors

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .deepspeed import DeepSpeedStrategy
    from .deepspeed_engine import EngineOptimizer, EngineRoot
    from .deepspeed_pipeline import PipelineRoot

__all__ = ["cut_as_built", "engine_config", "move_buffers", "setup_optimizer", "setup_stages", "several", "start"]


def engine_config(strategy: DeepSpeedStrategy) -> dict[str, Any]:  # Any: values of a JSON document
    """Return what the engine gets: clipping is ours, and so are optimizer and schedule."""
    config = configs.without_sections(strategy.configure_deepspeed_config(strategy.given_config))
    config["gradient_clipping"] = 0.0
    config.setdefault("steps_per_print", 10**12)
    if strategy.precision.policy.compute_dtype is torch.float16:
        config["fp16"] = {**configs.fp16_section(strategy.arguments), **config.get("fp16", {}), "enabled": True}
    return config


def cut_as_built(strategy: DeepSpeedStrategy) -> AbstractContextManager[Any]:
    """Return a context in which each rank keeps its part of every parameter only, as modules are built."""
    from .deepspeed_ops import refusals

    with refusals(strategy.where):
        # The dtype comes from the configuration: DeepSpeed (0.19) does not listen to its argument for it.
        return strategy.engines.deepspeed.zero.Init(  # type: ignore[no-any-return]  # deepspeed has no types
            config_dict_or_path=engine_config(strategy), remote_device=strategy.remote_device
        )


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
    from . import deepspeed_pipeline_start as pipelines
    from . import deepspeed_stages
    from .deepspeed_pipeline import PipelineRoot

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
    from .deepspeed_state import set_masters, whole_parameters

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
    root.__dict__["loaded"] = None
    if strategy.stage == 0 and strategy.world_size > 1 and not root.is_pipeline:
        broadcast_tensors(list(root.module.buffers()))
    made = start(strategy, root, optimizer)
    if masters:
        set_masters(root, masters)
    assert made is not None
    return made  # type: ignore[return-value]  # it says that it is one


def start(strategy: DeepSpeedStrategy, root: EngineRoot, optimizer: Optimizer | None) -> EngineOptimizer | None:
    """Put an engine around a module and its optimizer; or, for evaluation, around the module alone."""
    from .deepspeed_engine import start as start_engine
    from .deepspeed_ops import refusals

    with refusals(strategy.where):
        if root.is_pipeline:
            return _start_stages(strategy, cast("PipelineRoot", root), optimizer)
        return start_engine(strategy.engines.deepspeed, root, optimizer, engine_config(strategy))


def _start_stages(
    strategy: DeepSpeedStrategy, root: PipelineRoot, optimizer: Optimizer | None
) -> EngineOptimizer | None:
    from .deepspeed_pipeline_start import stage_config, start_stages
    from .deepspeed_stages import group_names, learn_groups

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
