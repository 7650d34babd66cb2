"""`simulate`: runs a real strategy in a simulated world on tensors without memory, and follows what a rank holds."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError, ModuleError
from ..fabric import Fabric
from ..fabric.grad_accumulation import set_grad_accumulation_dtype
from ..precision.base import evaluates_again
from ..precision.mixed import MixedPrecision
from ..strategies import NoLoss, SingleDeviceStrategy, Strategy
from ..strategies.construction.activation_checkpointing import apply_activation_checkpointing
from ..strategies.ddp import DDPStrategy
from ..strategies.ddp.replica import loss_tensor
from ..strategies.distributed.gradients import average_tensors
from ..strategies.mesh.pipeline.blocks import plan_stages
from ..strategies.mesh.pipeline.options import Pipeline
from ..strategies.mesh.pipeline.shapes import shapes_of
from ..strategies.mesh.tensor import auto
from ..strategies.mesh.tensor.heads import head_problem
from ..strategies.mesh.tensor.simulate import group_problem
from ..strategies.optional import RunsWindows, load_strategy_state
from ..strategies.sharded import set_casts_when_gathered
from ..strategies.tree import leaves, map_leaves
from .fake_world import agreed_stages, average_buckets, fake_tensors, fake_world, naming_reads
from .live_memory import LiveMemory

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..strategies.mesh.tensor.graph import LinearGroup


# Any in this file: batches, and what users' steps return.

_MOST_COMPUTED = 1 << 22  # parameters of a block that is computed with to compare
PARTS = 8  # of the passes of a step, of which each has its moment with the most bytes
_MOST_TENSORS = 16  # that a block gets beside its hidden state
_PIPELINE = Pipeline()
_NOTHING = nullcontext()
_TIMED_STEPS = 3
BuildOptimizers = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Made:
    """What a module configures: filled while it is set up.

    Attributes:
        optimizers: The optimizers.
        schedules: Their schedules.
    """

    optimizers: list[Optimizer]
    schedules: list[Any]


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
        batches_per_step: Micro-batches per optimizer step of all ranks, which replaces `accumulate`; None: it holds.
        checkpointing: Policy of activation checkpointing, as in the Trainer; None: none.
        sums_in_float32: Whether gradients of 16-bit parameters are summed in float32.
        casts_when_gathered: Whether mixed precision casts sharded parameters when they are gathered, as on GPUs, and
            not by autocast, which keeps its copies for the backward pass, as on CPUs.
        attach: Lets the module know what it trains with, as a Trainer does; None: it has no Trainer.
        kept: Makes the tensors that are kept beside a module's weights, such as averages of them; None: none.
        names: Names of parameters by id of those that the module's own functions may refer to.
        notes: What the plan does not follow, for its readers.
        blocks: Name of a list of repeated blocks, and how many of them are left; None: the whole module.
    """

    build: Callable[[], nn.Module]
    batch: Any
    precision: str | None = None
    optimizers: BuildOptimizers | None = None
    accumulate: int = 1
    loss: Callable[[nn.Module, Any], Any] | None = None
    pipeline: Pipeline = _PIPELINE
    batches_per_step: int | None = None
    checkpointing: Any = None
    sums_in_float32: bool = False
    casts_when_gathered: bool = False
    attach: Callable[[nn.Module, Fabric, nn.Module, Made], None] | None = None
    kept: Callable[[nn.Module], Iterable[Tensor]] | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    blocks: tuple[str, int] | None = None


@dataclass(frozen=True)
class Pass:
    """The storages of a forward or backward pass.

    Attributes:
        before: Bytes by kind when it begins.
        changes: Kind of each storage that was made or released, and the bytes, in order.
    """

    before: Mapping[str, float]
    changes: Sequence[tuple[str, int]]

    @property
    def after(self) -> dict[str, float]:
        """Bytes by kind when it ends."""
        found = dict(self.before)
        for kind, size in self.changes:
            found[kind] += size
        return found


@dataclass(frozen=True)
class Usage:
    """The memory and communication of a rank in an optimizer step.

    Attributes:
        moments: Bytes by kind, at the moments with the most of each part of a step: parts of forward and backward
            passes in equal numbers of operations, and the optimizer's step.
        after_backward: Bytes by kind, after the last backward pass of a step.
        sent: Bytes sent in rings in a step, by operation.
        passes: Forward and backward passes of the step; empty where the strategy or the module runs them.
        has_assumed: Whether the step read values of tensors without memory; see `LiveMemory`.
        lacks_workspace: Whether an operation keeps a workspace whose size only the device knows.
    """

    moments: Sequence[Mapping[str, float]]
    after_backward: Mapping[str, float]
    sent: Mapping[str, float] = field(default_factory=dict)
    passes: Sequence[Pass] = ()
    has_assumed: bool = False
    lacks_workspace: bool = False

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
        set_casts_when_gathered(fabric.strategy, training.casts_when_gathered)
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
    if training.checkpointing is not None:
        apply_activation_checkpointing(module, training.checkpointing)
    if training.sums_in_float32:
        set_grad_accumulation_dtype(strategy, "float32")
    sums_here = strategy.accumulate_dtype is not None and not strategy.traits.sums_gradients_itself
    with live:
        live.hold([*module.parameters(), *module.buffers(), *(one for _, one in leaves(batch))], "parameters")
        # Ranks compare objects when they are set up, which needs memory; torch's buckets are to have none.
        with around if isinstance(strategy, DDPStrategy) else nullcontext(), live.making("gathered"):
            if isinstance(strategy, SingleDeviceStrategy):  # it would only move the module
                running = module
            else:
                averages_later = sums_here or not _is_automatic(module)
                running = strategy.place_module(module) if averages_later else strategy.setup_module(module)
            if isinstance(running, DistributedDataParallel) and dist.get_backend() == "fake":
                average_buckets(running, lambda bucket: live.hold([bucket], "gathered"))
        original = strategy.unwrap(running)
        live.hold([*original.parameters(), *original.buffers()], "parameters")
        optimizers = _configure(fabric, training, running)
        step = fabric.bind_step(running, "training_step")
        with around:
            kept = [] if training.kept is None else [*training.kept(original)]
            live.hold(kept, "parameters")
            sums = _Sums(fabric, optimizers) if sums_here else None
            _train(fabric, training, running, batch, step, optimizers, live, sums)  # what is made once is made here
            live.hold((one for each in optimizers for one in tree_leaves([*each.state.values()])), "optimizer")
            return _train(fabric, training, running, batch, step, optimizers, live, sums)


def time_step(fabric: Fabric, training: Training) -> float:
    """Return the seconds of an optimizer step of a module with random weights. On every rank: it communicates."""
    module = training.build().to_empty(device="cpu")
    for one in [*module.parameters(), *module.buffers()]:
        with torch.no_grad():
            one.normal_(std=0.02) if one.is_floating_point() else one.zero_()
    if training.checkpointing is not None:
        apply_activation_checkpointing(module, training.checkpointing)
    running = fabric.prepare_module(_trained(module, training.loss).train())
    optimizers = _configure(fabric, training, running)
    step, batch, live = fabric.bind_step(running, "training_step"), fabric.to_device(training.batch), LiveMemory()

    def train(count: int) -> float:
        fabric.barrier()
        begin = time.monotonic()
        for _ in range(count):
            _train(fabric, training, running, batch, step, optimizers, live, None)
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
    sums: _Sums | None,
) -> Usage:
    """Train one optimizer step, and return what it holds and sends."""
    live.sent.clear()
    begin, original = live.moment, fabric.strategy.unwrap(running)
    passes: list[int] = []
    after_backward, middle = live.now(), begin

    def run_window() -> Tensor | None:
        nonlocal after_backward, middle
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = _train_window(fabric, training, running, batch, step, live, passes)
        live.hold((one.grad for one in original.parameters()), "gradients")
        after_backward, middle = live.now(), live.moment
        return loss

    if not _is_automatic(original):
        with live.making("activations"):
            step(batch, 0)
        live.hold((one.grad for one in original.parameters()), "gradients")
        after_backward, middle = live.now(), live.moment
    elif evaluates_again(optimizers[0]):
        fabric.optimizer_step(optimizers[0], run_window)
    else:
        run_window()
        with live.making("optimizer"):
            if sums is not None:
                live.hold(sums.finish(), "gradients")
            for optimizer in optimizers:
                fabric.optimizer_step(optimizer)
    ends = [begin + (middle - begin) * part // PARTS for part in range(PARTS + 1)]
    moments = live.peaks([*ends, live.moment])
    found = [Pass(live.sums(start), live.changes(start, end)) for start, end in itertools.pairwise(passes)]
    return Usage(moments, after_backward, dict(live.sent), found, live.has_assumed, live.lacks_workspace)


def _train_window(
    fabric: Fabric,
    training: Training,
    running: nn.Module,
    batch: Any,
    step: Callable[..., Any],
    live: LiveMemory,
    passes: list[int],
) -> Tensor | None:
    """Run forward and backward passes of a window's micro-batches; return the last loss, detached.

    The moments between passes are added to `passes`.
    """
    strategy, loss = fabric.strategy, None
    with live.making("activations"):
        if strategy.traits.runs_windows and isinstance(strategy, RunsWindows):
            with agreed_stages() if dist.get_backend() == "fake" else nullcontext():
                batches = [batch] * training.accumulate
                strategy.run_window(batches, lambda one, number, counts=True: step(one, number), _loss_of)
            return None
        passes.append(live.moment)
        for number in range(training.accumulate):
            is_last = number == training.accumulate - 1
            with nullcontext() if is_last else fabric.no_backward_sync(running):
                output = step(batch, number)
                loss = output.zero if isinstance(output, NoLoss) else _loss_of(output)
                passes.append(live.moment)
                fabric.backward(loss)
                loss = loss.detach()
                del output
            passes.append(live.moment)
    return loss


class _Sums:
    """Sums of 16-bit gradients in float32, as the Trainer makes them where the strategy does not.

    Args:
        fabric: Of this rank.
        optimizers: Their parameters' gradients are summed.
    """

    def __init__(self, fabric: Fabric, optimizers: Sequence[Optimizer]) -> None:
        self._fabric = fabric
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._all: list[Tensor] = [one for group in groups for one in group["params"] if one.requires_grad]
        self._short = [one for one in self._all if one.element_size() < 4]
        self._sums: dict[Tensor, Tensor] = {}
        for parameter in self._short:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Tensor) -> None:
        gradient, total = parameter.grad, self._sums.get(parameter)
        assert gradient is not None
        if total is None:
            self._sums[parameter] = gradient.float()
        else:
            total.add_(gradient)
        parameter.grad = None

    def finish(self) -> list[Tensor | None]:
        """Average and cast the sums of a window; return the gradients."""
        sums = [self._sums.pop(one, None) for one in self._short]
        if self._fabric.world_size > 1:
            average_tensors(self._short, sums, torch.float32)
            self._fabric.strategy.average_gradients([one for one in self._all if one.element_size() >= 4])
        for index, parameter in enumerate(self._short):
            total, sums[index] = sums[index], None
            parameter.grad = None if total is None else total.to(parameter.dtype)
        return [one.grad for one in self._all]


def _loss_of(output: object) -> Tensor:
    loss = loss_tensor(output)
    if loss is None:
        raise ModuleError(
            f"Expected a loss from training_step to plan with, got {type(output).__name__}.",
            fix="return a tensor, lw.Loss, or a dict with 'loss'; or pass loss= to the plan.",
        )
    return loss


def _configure(fabric: Fabric, training: Training, running: nn.Module) -> Sequence[Optimizer]:
    """Return the optimizers of a training, as they step, and let the module know what it trains with."""
    module, made = fabric.strategy.unwrap(running), Made([], [])
    if training.attach is not None:
        training.attach(module, fabric, running, made)
    inner: Any = module.module if isinstance(module, _WithStep) else module
    if training.optimizers is not None:
        returned = training.optimizers(inner)
    elif hasattr(inner, "configure_optimizers"):
        returned = inner.configure_optimizers()
    else:
        returned = torch.optim.AdamW(inner.parameters())
    parts = [*_flat(returned)]
    found = [one for one in parts if isinstance(one, torch.optim.Optimizer)]
    made.schedules.extend(one for one in parts if hasattr(one, "step") and not isinstance(one, torch.optim.Optimizer))
    if not found and _is_automatic(module):
        raise ConfigError(
            f"Expected optimizers to plan with, got {type(returned).__name__}.",
            fix='pass optimizer= to the plan: "adamw", "sgd", or a function of the module.',
        )
    named = dict(module.named_parameters())
    for optimizer in found:
        for group in optimizer.param_groups:  # a function in an attribute may refer to the module that was copied
            group["params"] = [named.get(training.names.get(id(one), ""), one) for one in group["params"]]
        train = getattr(optimizer, "train", None)
        if callable(train):  # of a schedule-free one
            train()
    made.optimizers.extend(fabric.prepare_optimizers(*found) if found else ())
    return made.optimizers


def _is_automatic(module: nn.Module) -> bool:
    """Return whether optimizers are stepped for the module: always where a function returns the loss."""
    return isinstance(module, _WithStep) or bool(getattr(module, "automatic_optimization", True))


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
    sizes = {name: cast("nn.Linear", module.get_submodule(name)).out_features for name in group.sources}
    uneven = [name for name, size in sizes.items() if size % tp]
    if uneven:
        return f"tp={tp} does not divide the features of {uneven[0]}"
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in sizes}
    heads = (head_problem(owners[name], name, size, tp) for name, size in sizes.items())
    return next((one for one in heads if one is not None), None)


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
