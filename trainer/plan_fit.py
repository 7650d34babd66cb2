"""`plan_fit`: the plan of a fit that is not run."""

from __future__ import annotations

import copy
import itertools
import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..callbacks.averaging.base import Averaging
from ..callbacks.averaging.weights import kept_dtype, tensors_of
from ..data.combined import CombinedLoader
from ..data.limit import find_length, resolve_limit
from ..data.module import DataModule
from ..data.tree import is_collection
from ..errors import DataError, ModuleError
from ..fabric.global_batch import micro_batch_size
from ..planning.planner import choices, plan_choices
from ..planning.simulation import Made, Training
from ..strategies.tree import leaves
from .hooks import DATA_BASES, MODULE_BASES, find_override
from .loop import manual
from .loop.fit_loop import estimate_steps
from .loop.optimizers import ManagedOptimizer
from .module import Module

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..fabric import Fabric
    from ..planning.table import Plan
    from ..protocols import Closure
    from ..strategies import Strategy
    from .loop.optimizers import OptimizerOwner
    from .run import Run
    from .session.arguments import Arguments
    from .view import TrainerView


# Any in this file: loaders, batches, a Trainer's arguments, and optimizers in either form.

_MOST_BATCHES = 4


def plan_fit(
    trainer: TrainerView, module: nn.Module, data: Any, *, devices: int, num_nodes: int, **options: Any
) -> Plan:
    """Return what a fit of the Trainer would need with each strategy; see `Trainer.plan`."""
    training, _ = training_of(trainer, module, data)
    return plan_choices(training, choices(devices, num_nodes), devices=devices * num_nodes, **options)


def training_of(trainer: TrainerView, module: nn.Module, data: Any) -> tuple[Training, int | None]:
    """Return what a fit of the Trainer trains, and its batches of an epoch in one process; None if unknown."""
    owner = _without_values(module) if data is None else module  # its own hooks are called, and it is not changed
    loader, batch, notes = _first_batch(owner, data)
    arguments: Any = cast("Any", trainer._lw_itself)._lw_arguments  # of the class that a view leaves out
    length = find_length(loader)
    num_batches = length
    if length is not None:
        num_batches = int(resolve_limit(arguments.limit_train_batches, length, "limit_train_batches"))

    def build() -> nn.Module:
        copied = _without_values(module)
        if isinstance(copied, Module):
            copied.trainer = cast("Any", PlannedTrainer(trainer, num_batches, loader))
        configure = getattr(copied, "configure_model", None)
        if callable(configure):
            configure()
        return copied

    def attach(module: nn.Module, fabric: Fabric, running: nn.Module, made: Made) -> None:
        seen = getattr(module, "_lw_trainer", None)
        if isinstance(seen, PlannedTrainer):
            seen.fabric, seen.model, seen.made = fabric, running, made

    averages = [one for one in trainer.callbacks if isinstance(one, Averaging) and _is_on_device(one)]
    wanted, micro = arguments.global_batch_size, micro_batch_size(loader)
    training = Training(
        build,
        batch,
        trainer.fabric.strategy.precision.precision,
        accumulate=trainer.accumulate_grad_batches,
        batches_per_step=None if wanted is None or micro is None else wanted // micro,
        checkpointing=arguments.activation_checkpointing or None,
        sums_in_float32=trainer.strategy.accumulate_dtype is not None,
        attach=attach,
        kept=lambda module: [_average_of(one) for _ in averages for one in tensors_of(module).values()],
        names={id(parameter): name for name, parameter in module.named_parameters()},
        notes=(*notes, *_not_followed(arguments)),
    )
    return training, num_batches


def _is_on_device(average: Averaging) -> bool:
    return average.device is None or average.device.type != "cpu"


def _average_of(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=kept_dtype(tensor), requires_grad=False)


def _not_followed(arguments: Arguments) -> list[str]:
    """Return what the plan leaves out of a Trainer's arguments."""
    found = []
    if arguments.compile:
        found.append("compile= is not followed: a compiled step usually keeps fewer activations")
    if arguments.offload_activations:
        found.append("offload_activations= is not followed: all activations are counted on the device")
    return found


class PlannedTrainer:
    """The Trainer as a module sees it in a plan: a fit with a number of steps, in a simulated world.

    Args:
        trainer: Everything else is its own.
        num_batches: Of an epoch in one process; None if unknown.
        loader: Its training loader.

    Attributes:
        fabric: Of the simulated rank.
        model: The module, as the strategy runs it.
        made: Optimizers and schedules of the simulated training.
        unreduced: Optimizers whose gradients a backward pass has changed; see `manual.reduce_gradients`.
    """

    def __init__(self, trainer: TrainerView, num_batches: int | None, loader: Any) -> None:
        self._trainer, self._num_batches = trainer, num_batches
        self.fabric, self.train_dataloader = trainer.fabric, loader
        self.model: nn.Module | None = None
        self.made = Made([], [])
        self.unreduced: list[Optimizer] = []
        self._lw_toggles = manual.Toggles()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    @property
    def strategy(self) -> Strategy:
        """The strategy of the simulated rank."""
        return self.fabric.strategy

    @property
    def world_size(self) -> int:
        """Number of simulated ranks."""
        return self.fabric.world_size

    @property
    def global_rank(self) -> int:
        """The simulated rank."""
        return self.fabric.global_rank

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The steps of a fit: schedules are built with it, whose length takes no memory."""
        ranks = self.strategy.topology.data_size
        num_batches = math.inf if self._num_batches is None else max(self._num_batches // ranks, 1)
        return estimate_steps(cast("TrainerView", self), num_batches)

    # -- manual optimization ---------------------------------------------------------------------------------------

    def latest_run(self) -> PlannedTrainer:
        """Return the owner of `managed`."""
        return self

    @property
    def managed(self) -> list[ManagedOptimizer]:
        """The optimizers as the module gets them."""
        return [ManagedOptimizer(one, cast("OptimizerOwner", self), self._step) for one in self.made.optimizers]

    def managed_schedulers(self) -> list[Any]:
        """Return the schedules as the module gets them."""
        return self.made.schedules

    def manual_backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run a backward pass."""
        self.strategy.backward(self.fabric.precision.scale_loss(loss), *args, **kwargs)
        if self.world_size > 1:
            self.unreduced = list(self.made.optimizers)
            manual.give_back(cast("Run", self))

    def clip_gradients(self, optimizer: Any, value: float | None = None, algorithm: str | None = None) -> Tensor | None:
        """Clip gradients; see `Trainer.clip_gradients`."""
        value = self._trainer.gradient_clip_val if value is None else value
        algorithm = algorithm or self._trainer.gradient_clip_algorithm
        return manual.clip_gradients(cast("Run", self), manual.plain_optimizer(optimizer), value, algorithm)

    def _lw_toggle(self, optimizer: Any) -> None:
        manual.give_back(cast("Run", self))
        self._lw_toggles.toggle(manual.plain_optimizer(optimizer), self.made.optimizers)

    def _lw_untoggle(self, optimizer: Any) -> None:
        self._lw_toggles.untoggle(manual.plain_optimizer(optimizer))

    def _step(self, optimizer: Optimizer, closure: Closure | None) -> bool:
        def evaluate() -> object:
            loss = None if closure is None else closure()
            manual.reduce_gradients(cast("Run", self), optimizer)
            return loss

        if closure is None:
            evaluate()
        has_stepped = self.fabric.optimizer_step(optimizer, None if closure is None else evaluate)
        manual.give_back(cast("Run", self))
        return has_stepped


def _first_batch(module: nn.Module, data: Any) -> tuple[Any, Any, list[str]]:
    """Return the loader, the largest of the first training batches, on the host, and notes on it."""
    loader = data
    source = data if isinstance(data, DataModule) else module if data is None else None
    if source is not None:
        for name, arguments in (("prepare_data", ()), ("setup", ("fit",))):
            getattr(source, name, lambda *_: None)(*arguments)
        loader = getattr(source, "train_dataloader", lambda: None)()
    if is_collection(loader):  # as fit reads them
        loader = CombinedLoader(loader, "max_size_cycle")
    first = itertools.islice(loader if loader is not None else (), _MOST_BATCHES)
    batches = [batch[0] if isinstance(loader, CombinedLoader) else batch for batch in first]
    if not batches:
        of = type(data if data is not None else module).__name__
        raise DataError(
            f"Expected a training batch to plan with, got none from {of}.",
            fix="pass a loader, or a data module whose train_dataloader returns batches.",
        )
    sizes = [sum(one.nbytes for _, one in leaves(batch)) for batch in batches]
    notes = []
    if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]:  # the last one of all may be smaller
        notes.append(
            f"batches differ in size: planned with the largest of the first {len(sizes)}; others may need more"
        )
    batch = batches[sizes.index(max(sizes))]
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        own = data if isinstance(data, DataModule) and find_override(data, hook, DATA_BASES) else module
        change = find_override(own, hook, (*MODULE_BASES, *DATA_BASES))
        batch = batch if change is None else change(batch, 0)
    return loader, batch, notes


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    lazy = [name for name, one in module.named_parameters() if is_lazy(one)]
    if lazy:
        raise ModuleError(
            f"Expected parameters with shapes to plan with, got lazy ones: {', '.join(lazy)}.",
            fix="run a batch through the module first, or pass the sizes of its layers.",
        )
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(module, memo)
