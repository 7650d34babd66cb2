"""`simulate`: runs a real strategy in a simulated world on tensors without memory, and follows what a rank holds."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError, ModuleError
from ..fabric import Fabric
from ..strategies import NoLoss, SingleDeviceStrategy, Strategy
from ..strategies.ddp import DDPStrategy
from ..strategies.ddp.replica import loss_tensor
from ..strategies.optional import RunsWindows
from ..strategies.tree import leaves, map_leaves
from .fake_world import average_buckets, fake_tensors, fake_world
from .live_memory import LiveMemory

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Training", "Usage", "measure", "simulate"]

# Any in this file: batches, and what users' steps return.

_NOTHING = nullcontext()
BuildOptimizers = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        build: Returns the module.
        batch: A batch of one process.
        precision: Name of the precision.
        optimizers: Makes the optimizers of a module; None: its `configure_optimizers`, or AdamW without one.
        accumulate: Micro-batches per optimizer step.
        loss: Returns the loss of a module on a batch; None: its `training_step`, or what its forward returns.
    """

    build: Callable[[], nn.Module]
    batch: Any
    precision: str | None = None
    optimizers: BuildOptimizers | None = None
    accumulate: int = 1
    loss: Callable[[nn.Module, Any], Any] | None = None


@dataclass(frozen=True)
class Usage:
    """What a rank holds and sends in an optimizer step.

    Attributes:
        peak: Bytes by kind, at the moment of the second step with the most.
        after_backward: Bytes by kind, after the last backward pass of a step.
        sent: Bytes sent in rings in a step, by operation.
    """

    peak: Mapping[str, float]
    after_backward: Mapping[str, float]
    sent: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float:
        """The bytes at that moment."""
        return sum(self.peak.values())

    @property
    def sent_bytes(self) -> float:
        """The bytes sent in a step."""
        return sum(self.sent.values())


def simulate(training: Training, strategy: str | Strategy, *, devices: int = 1, rank: int = 0) -> Usage:
    """Return what a rank would hold and send, without memory for tensors, and without other processes.

    Args:
        training: What is trained.
        strategy: The strategy; an instance is used up.
        devices: Number of ranks.
        rank: The one that is measured.

    Raises:
        ConfigError: The strategy refuses this training.
        ModuleError: It refuses the module.
        Exception: Of the module; one of `fake_world.NEEDS_VALUES` where it reads values of tensors.
    """
    fake = fake_tensors()
    with _quiet(), fake_world(devices, rank) as cluster:
        fabric = Fabric(
            accelerator="cpu",
            strategy=strategy,
            devices=devices,
            precision=training.precision,
            plugins=[cluster],
        )
        with torch.device("meta"):
            module = fabric.precision.convert_module(training.build())
        with fake:
            remove_memory(module)
            batch = map_leaves(training.batch, _without_memory)
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
    after_backward = live.now()
    with live.making("optimizer"):
        for optimizer in optimizers:
            fabric.optimizer_step(optimizer)
    return Usage(live.peak(begin), after_backward, dict(live.sent))


def _train_window(
    fabric: Fabric, training: Training, running: nn.Module, batch: Any, step: Callable[..., Any], live: LiveMemory
) -> None:
    """Run forward and backward passes of a window's micro-batches."""
    strategy = fabric.strategy
    with live.making("activations"):
        if strategy.traits.runs_windows and isinstance(strategy, RunsWindows):
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
        return module
    return _WithStep(module, loss or _forward_loss)


def _forward_loss(module: nn.Module, batch: Any) -> Any:
    """Return the loss that a module's forward returns, as models of transformers do."""
    if isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, list | tuple) else module(batch)
    return output.loss if hasattr(output, "loss") else output


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Return a context in which nothing is said: what is tried is not what the user chose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
