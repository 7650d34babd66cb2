"""A PipelineModule before it runs: its layers' first values, the checks, and the engine's configuration."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ....errors import ConfigError, ModuleError
from ..config import Config, section_of, stage_of

if TYPE_CHECKING:
    from ....precision import Precision
    from ..engine_types import Pipeline
    from .engine import PipelineRoot

__all__ = ["adapt_engine", "build_in_order", "check", "find_pipeline", "stage_config"]

# Any in this file: DeepSpeed's layer specs and schedules.


def find_pipeline(module: nn.Module) -> tuple[str, Pipeline] | None:
    """Return the path and the PipelineModule in a module; None if there is none. Imports nothing.

    Raises:
        ModuleError: There are several.
    """
    found = [
        (path, one)
        for path, one in module.named_modules()
        for kind in type(one).__mro__
        if kind.__name__ == "PipelineModule" and kind.__module__.startswith("deepspeed.")
    ]
    if len(found) > 1:
        raise ModuleError(
            f"Expected one PipelineModule in {type(module).__name__}, got {len(found)} "
            f"({', '.join(path for path, _ in found)}).",
            fix="put all layers into one PipelineModule.",
        )
    return cast("tuple[str, Pipeline]", found[0]) if found else None


def check(module: nn.Module, pipe: Pipeline, config: Config, precision: Precision, *, is_automatic: bool) -> None:
    """Raise an error for options that a PipelineModule does not support.

    Args:
        module: The user's module, or the PipelineModule itself.
        pipe: The PipelineModule.
        config: The user's configuration of DeepSpeed.
        precision: Precision of the run.
        is_automatic: Whether optimization is automatic, or a loop of Fabric's user.

    Raises:
        ConfigError: With every problem.
    """
    found: list[tuple[str, str]] = []
    if stage_of(config) > 1:
        found.append((f"ZeRO stage {stage_of(config)} with a PipelineModule", "use stage=0 or 1"))
    offload = section_of(section_of(config, "zero_optimization"), "offload_optimizer")
    if offload.get("device", "none") != "none":
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
        what = f"trained parameters outside the PipelineModule ({', '.join(outside)})"
        found.append((what, "put them into its layers, or freeze them"))
    if found:
        whats, fixes = zip(*found, strict=True)
        raise ConfigError(
            f"DeepSpeedStrategy cannot run {type(module).__name__}: {'; '.join(whats)}.", fix=f"{'; '.join(fixes)}."
        )


def stage_config(config: Config, root: PipelineRoot, *, trains: bool) -> Config:
    """Return the configuration of a pipeline's engine.

    Args:
        config: The strategy's configuration.
        root: The root of the module.
        trains: Whether there is an optimizer; without one, ZeRO has nothing to shard.
    """
    count = root.__dict__["_micro_batches"]
    zero = {**section_of(config, "zero_optimization"), "stage": root.stage} if trains else {"stage": 0}
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


def adapt_engine(root: PipelineRoot) -> None:
    """Let the engine of a PipelineModule leave the reduction and the step to its root."""
    from deepspeed.runtime.pipe import schedule

    engine = root.pipeline_engine
    if root.pipe.tied_comms:
        # DeepSpeed (0.19) broadcasts tied parameters when it builds them, and the first backward pass warns of it.
        warnings.filterwarnings("ignore", r"c10d::broadcast_: an autograd kernel was not registered", UserWarning)
    ours = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)

    class PassesOnly(schedule.TrainSchedule):  # type: ignore[misc]  # deepspeed has no types
        def steps(self) -> Iterator[list[Any]]:
            for commands in super().steps():
                yield [command for command in commands if not isinstance(command, ours)]

    engine._train_schedule = lambda: PassesOnly(
        micro_batches=engine.micro_batches, stages=engine.num_stages, stage_id=engine.stage_id
    )


# --- the first values of layers ------------------------------------------------------------------------------------


def build_in_order() -> None:
    """Let every PipelineModule of this process get the values that `nn.Sequential` of the same layers would have.

    DeepSpeed (0.19) builds the layers of a rank's stage only, so that each stage draws the same random numbers, and
    counts parameters by building all layers before. From now on a rank builds the layers of other stages as well, one
    at a time, and frees each at once.
    """
    from deepspeed.runtime.pipe.module import PipelineModule

    build, choose = PipelineModule._build, PipelineModule._partition_layers
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(choose)
    def _partition_layers(self: Any, *args: Any, **kwargs: Any) -> Any:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            return choose(self, *args, **kwargs)

    @functools.wraps(build)
    def _build(self: Any) -> None:
        if self.seed_layers:  # each layer has its own seed
            build(self)
            return
        with _built(self._layer_specs, range(self._local_start, self._local_stop)):
            build(self)

    PipelineModule._build, PipelineModule._partition_layers = _build, _partition_layers


@contextmanager
def _built(specs: list[Any], own: range) -> Iterator[None]:
    """Build all layers in order, and return a context in which the specs of this rank's stage return theirs."""
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec

    ready: dict[int, nn.Module] = {}  # layer by its number
    tied: set[str] = set()
    for number, spec in enumerate(specs):
        if not isinstance(spec, LayerSpec):
            continue
        numbers = [number]
        if isinstance(spec, TiedLayerSpec):
            if spec.key in tied:
                continue
            tied.add(spec.key)
            # A stage asks the first of its own specs with this key.
            numbers = [at for at in own if isinstance(specs[at], TiedLayerSpec) and specs[at].key == spec.key][:1]
        layer = spec.build()
        ready.update((at, layer) for at in numbers if at in own)
        del layer
    queues: dict[int, deque[nn.Module]] = {}
    for at in sorted(ready):
        queues.setdefault(id(specs[at]), deque()).append(ready[at])  # a spec may occur several times
    patched = {id(spec): spec for spec in specs if id(spec) in queues}
    for key, spec in patched.items():
        next_layer: Callable[[], nn.Module] = queues[key].popleft
        spec.build = lambda log=False, next_layer=next_layer: next_layer()
    try:
        yield
    finally:
        for spec in patched.values():
            del spec.build
