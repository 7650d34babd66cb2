"""`simulate`: runs a real strategy in a simulated world on tensors without memory, and follows what a rank holds."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError, ModuleError
from ..fabric import Fabric
from ..precision.mixed import MixedPrecision
from ..strategies import NoLoss, SingleDeviceStrategy, Strategy
from ..strategies.ddp import DDPStrategy
from ..strategies.ddp.replica import loss_tensor
from ..strategies.mesh.pipeline.blocks import plan_stages
from ..strategies.mesh.pipeline.options import Pipeline
from ..strategies.mesh.pipeline.shapes import shapes_of
from ..strategies.mesh.tensor import auto
from ..strategies.mesh.tensor.simulate import group_problem
from ..strategies.optional import RunsWindows, load_strategy_state
from ..strategies.tree import leaves, map_leaves
from .fake_world import agreed_stages, average_buckets, fake_tensors, fake_world, naming_reads
from .live_memory import LiveMemory

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..strategies.mesh.tensor.graph import LinearGroup


# Any in this file: batches, and what users' steps return.

_MOST_COMPUTED = 1 << 22  # parameters of a block that is computed with to compare
_PARTS = 8  # of the passes of a step, of which each has its moment with the most bytes
_MOST_TENSORS = 16  # that a block gets beside its hidden state
_PIPELINE = Pipeline()
_NOTHING = nullcontext()
_TIMED_STEPS = 3
BuildOptimizers = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Training:
    """The training to simulate.

    Attributes:
        build: Returns the module.
        batch: A batch of one process.
        precision: Name of the precision.
        optimizers: Makes the optimizers of a module; None: its `configure_optimizers`, or AdamW without one.
        accumulate: Micro-batches per optimizer step.
        loss: Returns the loss of a module on a batch; None: its `training_step`, or what its forward returns.
        pipeline: As the strategy was given, where it has stages.
        blocks: Name of a list of repeated blocks, and how many of them are left; None: the whole module.
    """

    build: Callable[[], nn.Module]
    batch: Any
    precision: str | None = None
    optimizers: BuildOptimizers | None = None
    accumulate: int = 1
    loss: Callable[[nn.Module, Any], Any] | None = None
    pipeline: Pipeline = _PIPELINE
    blocks: tuple[str, int] | None = None


@dataclass(frozen=True)
class Usage:
    """The memory and communication of a rank in an optimizer step.

    Attributes:
        moments: Bytes by kind, at the moments with the most of each part of a step: parts of forward and backward
            passes in equal numbers of operations, and the optimizer's step.
        after_backward: Bytes by kind, after the last backward pass of a step.
        sent: Bytes sent in rings in a step, by operation.
    """

    moments: Sequence[Mapping[str, float]]
    after_backward: Mapping[str, float]
    sent: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> Mapping[str, float]:
        """Bytes by kind, at the moment of the step with the most."""
        return max(self.moments, key=lambda one: sum(one.values()))

    @property
    def peak_bytes(self) -> float:
        """The most bytes in a step."""
        return sum(self.peak.values())

    @property
    def sent_bytes(self) -> float:
        """The bytes sent in a step."""
        return sum(self.sent.values())


def simulate(
    training: Training, strategy: str | Strategy, *, devices: int = 1, rank: int = 0, num_nodes: int = 1
) -> Usage:
    """Return what a rank would hold and send, without memory for tensors, and without other processes.

    Args:
        training: What is trained.
        strategy: The strategy; an instance is used up.
        devices: Number of ranks.
        rank: The one that is measured.
        num_nodes: Nodes that they are on.

    Raises:
        ConfigError: The strategy refuses this training.
        ModuleError: It refuses the module.
        NeedsValues: The module reads values of tensors.
        Exception: Of the module.
    """
    fake = fake_tensors()
    with (
        quiet(),
        naming_reads(),
        patch.object(auto, "group_problem", _problem),
        fake_world(devices, rank, num_nodes=num_nodes) as cluster,
    ):
        fabric = Fabric(
            accelerator="cpu",
            strategy=strategy,
            devices=devices // num_nodes,
            num_nodes=num_nodes,
            precision=training.precision,
            plugins=[cluster],
        )
        if isinstance(fabric.precision, MixedPrecision):
            fabric.precision.scaler = None  # it reads whether gradients are finite, and holds nothing
        with torch.device("meta"):
            module = training.build()
            if training.blocks is not None:
                name, count = training.blocks
                del cast("nn.ModuleList", module.get_submodule(name))[count:]
            module = fabric.precision.convert_module(module)
        with fake:
            remove_memory(module)
            batch = map_leaves(training.batch, _without_memory)
            _tell_shapes(fabric, _trained(module, training.loss), batch, training.pipeline)
        live = LiveMemory(fake)

        def run(fabric: Fabric) -> Usage:
            return measure(fabric, training, module, batch, live, around=fake)

        try:
            usage: Usage = fabric.launch(run)
        finally:
            fabric.teardown()
        return usage


def measure(
    fabric: Fabric,
    training: Training,
    module: nn.Module,
    batch: Any,
    live: LiveMemory,
    *,
    around: AbstractContextManager[object] = _NOTHING,
) -> Usage:
    """Train two steps on one batch, as the Trainer does, and return what the second one holds.

    Args:
        fabric: Of this rank; its processes are connected.
        training: What is trained.
        module: As `training.build` returned it, in the precision's dtype.
        batch: The batch, with or without memory.
        live: Follows the storages.
        around: A context for what makes tensors: `fake_tensors`, or none.
    """
    module = _trained(module, training.loss)
    module.train()
    strategy = fabric.strategy
    with live:
        live.hold([*module.parameters(), *module.buffers(), *(one for _, one in leaves(batch))], "parameters")
        # Ranks compare objects when they are set up, which needs memory; torch's buckets are to have none.
        with around if isinstance(strategy, DDPStrategy) else nullcontext(), live.making("gathered"):
            is_alone = isinstance(strategy, SingleDeviceStrategy)  # it would only move the module
            running = module if is_alone else strategy.setup_module(module)
            if isinstance(running, DistributedDataParallel) and dist.get_backend() == "fake":
                average_buckets(running, lambda bucket: live.hold([bucket], "gathered"))
        original = strategy.unwrap(running)
        live.hold([*original.parameters(), *original.buffers()], "parameters")
        optimizers = fabric.prepare_optimizers(*_optimizers(training, original))
        step = fabric.bind_step(running, "training_step")
        with around:
            _train(fabric, training, running, batch, step, optimizers, live)  # what is made once is made here
            return _train(fabric, training, running, batch, step, optimizers, live)


def time_step(fabric: Fabric, training: Training) -> float:
    """Return the seconds of an optimizer step of a module with random weights. On every rank: it communicates."""
    module = training.build().to_empty(device="cpu")
    for one in [*module.parameters(), *module.buffers()]:
        with torch.no_grad():
            one.normal_(std=0.02) if one.is_floating_point() else one.zero_()
    running = fabric.prepare_module(_trained(module, training.loss).train())
    optimizers = fabric.prepare_optimizers(*_optimizers(training, fabric.strategy.unwrap(running)))
    step, batch, live = fabric.bind_step(running, "training_step"), fabric.to_device(training.batch), LiveMemory()

    def train(count: int) -> float:
        fabric.barrier()
        begin = time.monotonic()
        for _ in range(count):
            _train(fabric, training, running, batch, step, optimizers, live)
        if fabric.device.type == "cuda":
            torch.cuda.synchronize(fabric.device)
        fabric.barrier()
        return (time.monotonic() - begin) / count

    train(1)  # what is made once is made here
    return train(_TIMED_STEPS)


def _train(
    fabric: Fabric,
    training: Training,
    running: nn.Module,
    batch: Any,
    step: Callable[..., Any],
    optimizers: Sequence[Optimizer],
    live: LiveMemory,
) -> Usage:
    """Train one optimizer step, and return what it holds and sends."""
    live.sent.clear()
    begin, original = live.moment, fabric.strategy.unwrap(running)
    for optimizer in optimizers:
        optimizer.zero_grad()
    _train_window(fabric, training, running, batch, step, live)
    live.hold((one.grad for one in original.parameters()), "gradients")
    after_backward, middle = live.now(), live.moment
    with live.making("optimizer"):
        for optimizer in optimizers:
            fabric.optimizer_step(optimizer)
    ends = [begin + (middle - begin) * part // _PARTS for part in range(_PARTS + 1)]
    return Usage(live.peaks([*ends, live.moment]), after_backward, dict(live.sent))


def _train_window(
    fabric: Fabric, training: Training, running: nn.Module, batch: Any, step: Callable[..., Any], live: LiveMemory
) -> None:
    """Run forward and backward passes of a window's micro-batches."""
    strategy = fabric.strategy
    with live.making("activations"):
        if strategy.traits.runs_windows and isinstance(strategy, RunsWindows):
            with agreed_stages() if dist.get_backend() == "fake" else nullcontext():
                batches = [batch] * training.accumulate
                strategy.run_window(batches, lambda one, number, counts=True: step(one, number), _loss_of)
            return
        for number in range(training.accumulate):
            is_last = number == training.accumulate - 1
            with nullcontext() if is_last else fabric.no_backward_sync(running):
                output = step(batch, number)
                fabric.backward(output.zero if isinstance(output, NoLoss) else _loss_of(output))
                del output


def _loss_of(output: object) -> Tensor:
    loss = loss_tensor(output)
    if loss is None:
        raise ModuleError(
            f"Expected a loss from training_step to plan with, got {type(output).__name__}.",
            fix="return a tensor, lw.Loss, or a dict with 'loss'; or pass loss= to the plan.",
        )
    return loss


def _optimizers(training: Training, module: nn.Module) -> list[Optimizer]:
    """Return the optimizers of a training."""
    inner = module.module if isinstance(module, _WithStep) else module
    make: Any = training.optimizers or getattr(type(inner), "configure_optimizers", None)
    made = torch.optim.AdamW(inner.parameters()) if make is None else make(inner)
    found = [one for one in _flat(made) if isinstance(one, torch.optim.Optimizer)]
    if not found:
        raise ConfigError(
            f"Expected optimizers to plan with, got {type(made).__name__}.",
            fix='pass optimizer= to the plan: "adamw", "sgd", or a function of the module.',
        )
    return found


def _flat(made: Any) -> Iterator[Any]:
    """Yield what is in any of the forms that `configure_optimizers` returns."""
    if isinstance(made, Mapping):
        made = list(made.values())
    if isinstance(made, list | tuple):
        for one in made:
            yield from _flat(one)
    else:
        yield made


class _WithStep(nn.Module):
    """A module with a training step, around one that has none."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a batch."""
        return self._loss(self.module, batch)


def _trained(module: nn.Module, loss: Callable[[nn.Module, Any], Any] | None) -> nn.Module:
    if loss is None and hasattr(module, "training_step"):
        if not getattr(module, "automatic_optimization", True):
            raise ModuleError(
                "manual optimization cannot be planned: training_step steps the optimizers itself.",
                fix="pass lw.plan a function loss=, which returns the loss of a module and a batch.",
            )
        return module
    return _WithStep(module, loss or _forward_loss)


def _forward_loss(module: nn.Module, batch: Any) -> Any:
    """Return the loss that a module's forward returns, as models of transformers do."""
    if isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, list | tuple) else module(batch)
    return output.loss if hasattr(output, "loss") else output


def _tell_shapes(fabric: Fabric, module: nn.Module, batch: Any, options: Pipeline) -> None:
    """Let pipeline stages know the shapes that they exchange, as a checkpoint does: no other rank sends any."""
    pp = fabric.strategy.traits.model_axes.get("pp", 1)
    if pp == 1:
        return
    plan = plan_stages(module, options, pp)
    blocks, seen = list(module.get_submodule(plan.list).children()), {}

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        seen[blocks.index(block)] = (list(hidden.shape), str(hidden.dtype).removeprefix("torch."))

    handles = [blocks[first].register_forward_pre_hook(note, with_kwargs=True) for first in plan.bounds[1:-1]]
    with fabric.precision.forward_context(), torch.no_grad():
        step: Any = module.training_step
        loss = _loss_of(step(batch, 0))
    for handle in handles:
        handle.remove()
    ends = [None, *(seen[first] for first in plan.bounds[1:-1]), ([], str(loss.dtype).removeprefix("torch."))]
    shapes = [
        {shapes_of(batch): {stage: (ends[stage], ends[stage + 1]) for stage in options.stages_of(rank, pp)}}
        for rank in range(pp)
    ]
    # Nothing else is sent than hidden states, however many tensors blocks get beside them.
    splits = [[first, count] for first in plan.bounds[1:-1] for count in range(_MOST_TENSORS)]
    told = {"schedule": options.schedule, "bounds": list(plan.bounds), "shapes": shapes}
    load_strategy_state(fabric.strategy, {"pipeline": {**told, "splits": [splits] * pp}})


def remove_memory(module: nn.Module) -> None:
    """Replace parameters and buffers by ones without memory, in place; called within `fake_tensors`."""
    made: dict[Tensor, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if tensor not in made:
            made[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                made[tensor] = nn.Parameter(made[tensor], requires_grad=tensor.requires_grad)
        return made[tensor]

    for one in module.modules():
        both: tuple[dict[str, Any], ...] = (one._parameters, one._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = replaced(tensor)


def _without_memory(leaf: Any) -> Any:
    """Return a tensor of the same shape without memory; called within `fake_tensors`."""
    if not isinstance(leaf, Tensor):
        return leaf
    empty = torch.zeros if not leaf.is_floating_point() else torch.empty
    return empty(leaf.shape, dtype=leaf.dtype)


def _problem(module: nn.Module, group: LinearGroup, tp: int) -> str | None:
    """Return why layers cannot be split, as `group_problem`, but for large ones by their sizes only.

    Numbers show whether a split computes the same: for layers of a few million parameters that takes seconds, and more
    memory than a plan may take.
    """
    if sum(one.numel() for one in module.parameters()) <= _MOST_COMPUTED:
        return group_problem(module, group, tp)
    sizes = {name: cast("nn.Linear", module.get_submodule(name)) for name in (*group.sources, group.sink)}
    uneven = [name for name in group.sources if sizes[name].out_features % tp]
    return f"tp={tp} does not divide the features of {uneven[0]}" if uneven else None


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which nothing is said: what is tried is not what the user chose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
