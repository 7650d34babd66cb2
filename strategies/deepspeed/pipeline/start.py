"""DeepSpeed's PipelineModule, before it runs: found in a module, checked, and with an engine around it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ....errors import ConfigError, ModuleError
from ..config import stage_of
from ..engine import EngineOptimizer, link_in_order, match_statistics
from ..ops import quietly

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ....precision import Precision
    from .engine import PipelineRoot

__all__ = ["check", "find_pipeline", "stage_config", "start_stages"]

# Any in this file: deepspeed has no types.


def find_pipeline(module: nn.Module) -> tuple[str, Any] | None:
    """Return the path and the PipelineModule in a module; None where there is none. Imports nothing.

    Raises:
        ModuleError: There are several.
    """
    found = [
        (path, one)
        for path, one in module.named_modules()
        if any(
            kind.__name__ == "PipelineModule" and kind.__module__.startswith("deepspeed.") for kind in type(one).__mro__
        )
    ]
    if len(found) > 1:
        raise ModuleError(
            f"{type(module).__name__} has {len(found)} PipelineModules ({', '.join(path for path, _ in found)}), and "
            "an engine runs one.",
            fix="put all layers into one PipelineModule.",
        )
    return found[0] if found else None


def check(module: nn.Module, pipe: Any, config: Mapping[str, Any], precision: Precision, *, is_automatic: bool) -> None:
    """Refuse what cannot work with a PipelineModule.

    Args:
        module: The user's, or the PipelineModule itself.
        pipe: The PipelineModule.
        config: DeepSpeed's, as the user has it.
        precision: Of the run.
        is_automatic: Whether the Trainer, or a loop of Fabric's user, makes the steps.

    Raises:
        ConfigError: With every problem.
    """
    found: list[tuple[str, str]] = []
    zero = config.get("zero_optimization") or {}
    stage = stage_of(dict(config))
    if stage > 1:
        found.append((f"ZeRO stage {stage} with a PipelineModule", "use stage=0 or 1"))
    if isinstance(zero, Mapping) and (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        found.append(("offload_optimizer with a PipelineModule", "leave it out"))
    if precision.policy.compute_dtype is torch.float16:
        found.append((f"precision={precision.precision!r} with a PipelineModule", "use 'bf16-mixed' or '32-true'"))
    axes = [axis for axis in pipe.topology().get_axis_names() if axis not in ("pipe", "data")]
    if axes:
        found.append((f"a PipelineModule with the axes {axes}", "use the axes 'pipe' and 'data' only"))
    if not is_automatic:
        found.append(("manual optimization with a PipelineModule", "use automatic optimization, or Fabric"))
    own = {id(one) for one in pipe.parameters()}
    outside = [name for name, one in module.named_parameters() if one.requires_grad and id(one) not in own]
    if outside:
        found.append(
            (
                f"parameters beside the PipelineModule, which its engine does not train ({', '.join(outside)})",
                "put them into its layers, or freeze them",
            )
        )
    if found:
        whats, fixes = zip(*found, strict=True)
        raise ConfigError(
            f"DeepSpeedStrategy cannot run {type(module).__name__}: {'; '.join(whats)}.", fix=f"{'; '.join(fixes)}."
        )


def stage_config(config: dict[str, Any], root: PipelineRoot, *, trains: bool) -> dict[str, Any]:
    """Return the configuration of the engine of a pipeline.

    Args:
        config: Of the strategy.
        root: Around the module.
        trains: Whether there is an optimizer; without one, ZeRO has nothing to shard.
    """
    count = root.__dict__["_micro_batches"]
    zero = {**(config.get("zero_optimization") or {}), "stage": root.stage} if trains else {"stage": 0}
    if zero["stage"]:
        # Gradients are taken out of the parameters and put back between passes: no hook may have moved them.
        zero.update(overlap_comm=False, contiguous_gradients=False)
    result = {key: value for key, value in config.items() if key != "steps_per_print"}  # it would print losses
    return {
        **result,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,  # for DeepSpeed's log only
        "gradient_accumulation_steps": count,
        "train_batch_size": count * root.grid.get_data_parallel_world_size(),
    }


def start_stages(
    deepspeed: Any, root: PipelineRoot, optimizer: Optimizer | None, config: dict[str, Any]
) -> EngineOptimizer | None:
    """Put an engine around a PipelineModule and its optimizer. On every rank: it communicates."""
    groups = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
    with quietly():
        engine, *_ = deepspeed.initialize(model=root.pipe, optimizer=optimizer, config=config, dist_init_required=False)
    if root.pipe.tied_comms:
        # DeepSpeed (0.19) broadcasts tied parameters when it builds them, and the first backward pass warns of it.
        warnings.filterwarnings("ignore", r"c10d::broadcast_: an autograd kernel was not registered", UserWarning)
    engine._train_schedule = _schedule_of(engine)
    root.__dict__["engine"] = engine
    match_statistics(root.module)
    link_in_order(root.zero)
    return None if optimizer is None else EngineOptimizer(optimizer, root, groups)


def _schedule_of(engine: Any) -> Callable[[], Any]:
    """Return what makes the engine's schedule of a batch, without the reduction and the step at its end."""
    from deepspeed.runtime.pipe import schedule

    ours = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)

    class PassesOnly(schedule.TrainSchedule):  # type: ignore[misc]  # deepspeed has no types
        def steps(self) -> Iterator[list[Any]]:
            for commands in super().steps():
                yield [command for command in commands if not isinstance(command, ours)]

    def make() -> Any:
        return PassesOnly(micro_batches=engine.micro_batches, stages=engine.num_stages, stage_id=engine.stage_id)

    return make
