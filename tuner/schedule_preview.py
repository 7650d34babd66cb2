"""Preview of the learning-rate schedule: the rate of each step, as numbers and as a plot, without training."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..callbacks import Callback
from ..errors import ConfigError, names_nearest
from ..trainer.loop.schedule import LRSchedulerConfig, step_scheduler
from ..trainer.run import FitRun
from ..trainer.session.checks import split_datamodule, unwrapped
from .plots import open_axes, show_figure
from .trial import Subject, accumulation_of, isolated, make_trainer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn
    from torch.optim import Optimizer

    from ..data.module import DataModule
    from ..protocols import Loaders, StateDict
    from ..trainer.trainer import Trainer


@dataclass(slots=True)
class SchedulePreview:
    """The learning rates of a planned training.

    Attributes:
        lrs: Name of a parameter group -> the rate of each optimizer step.
        epoch_starts: Indices of the steps at which epochs begin.
        left_out: Schedules that depend on a metric; the preview assumes that they never reduce the rate.
    """

    lrs: dict[str, list[float]] = field(default_factory=dict)
    epoch_starts: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def plot(self, show: bool = False, ax: Axes | None = None) -> Figure:
        """Draw the rates over the steps, with a line where each epoch begins (up to fifty).

        Args:
            show: Whether to open a window.
            ax: matplotlib axes to draw on; None creates a figure.

        Returns:
            The matplotlib figure.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure, axes = open_axes(ax, needed_for="SchedulePreview.plot", show=show)
        for name, rates in self.lrs.items():
            axes.plot(range(len(rates)), rates, label=name)
        if len(self.epoch_starts) <= 50:
            for step in self.epoch_starts[1:]:
                axes.axvline(step, color="0.85", linewidth=0.8, zorder=0)
        axes.set_xlabel("Optimizer step")
        axes.set_ylabel("Learning rate")
        if len(self.lrs) > 1:
            axes.legend()
        show_figure(show=show)
        return figure


class _Rehearsal(Callback):
    """Steps the schedules of a trial through the full training at its beginning, without training."""

    def __init__(self, preview: SchedulePreview, num_steps: int | None, source: Trainer) -> None:
        self.preview = preview
        self.num_steps = num_steps
        self.source = source

    # A trial in processes that were started for it comes back by these.
    def state_dict(self) -> StateDict:
        return asdict(self.preview)

    def load_state_dict(self, state_dict: StateDict) -> None:
        for name, value in state_dict.items():
            setattr(self.preview, name, value)

    def on_fit_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        total = trainer.estimated_stepping_batches if self.num_steps is None else self.num_steps
        run = trainer.latest_run()
        assert isinstance(run, FitRun)
        run.session.open_data()
        if math.isinf(total):
            raise ConfigError(
                "the schedule cannot be previewed to its end: neither max_steps nor the data limit the training.",
                fix="pass num_steps, or set max_steps or max_epochs.",
            )
        with warnings.catch_warnings():
            # Nothing is trained, so optimizers do not step, which torch warns of.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            warnings.filterwarnings("ignore", message="The epoch parameter in")
            self._rehearse(trainer, int(total))
        trainer.fit_loop.max_steps = 0

    def _rehearse(self, trainer: Trainer, total: int) -> None:
        run = trainer.latest_run()
        assert run is not None
        own = run.lifecycle.own("lr_scheduler_step")
        groups = [
            (_name(index, number, optimizer, len(trainer.optimizers)), group)
            for index, optimizer in enumerate(trainer.optimizers)
            for number, group in enumerate(optimizer.param_groups)
        ]
        preview = self.preview
        preview.lrs = {name: [] for name, _ in groups}
        preview.left_out = [type(c.scheduler).__name__ for c in run.schedulers if c.reduce_on_plateau]
        due = [config for config in run.schedulers if not config.reduce_on_plateau]
        batches = trainer.num_training_batches
        step, epoch = 0, 0
        while step < total:
            preview.epoch_starts.append(step)
            steps_of_epoch = math.inf if math.isinf(batches) else math.ceil(batches / self._window(epoch))
            ends_at = min(total, step + max(1, steps_of_epoch))
            is_whole = ends_at == step + steps_of_epoch
            while step < ends_at:
                for name, group in groups:
                    preview.lrs[name].append(float(group["lr"]))
                step += 1
                _step(due, "step", step, own)
            if is_whole:
                epoch += 1
                _step(due, "epoch", epoch, own)

    def _window(self, epoch: int) -> int:
        scheduler = self.source.accumulation_scheduler
        if scheduler is None:
            return self.source.accumulate_grad_batches
        return scheduler.get_accumulate_grad_batches(epoch)


def _step(configs: list[LRSchedulerConfig], interval: str, count: int, own: Any) -> None:
    for config in configs:
        if config.is_due(interval, count):
            step_scheduler(config, None, own)


def _name(index: int, number: int, optimizer: Optimizer, num_optimizers: int) -> str:
    name = f"lr-{type(optimizer).__name__}" + (f"-{index}" if num_optimizers > 1 else "")
    group = optimizer.param_groups[number]
    return name if len(optimizer.param_groups) == 1 else f"{name}/{group.get('name', f'pg{number + 1}')}"


@names_nearest
def preview_schedule(
    trainer: Trainer,
    model: nn.Module,
    train_dataloaders: Loaders = None,
    datamodule: DataModule | None = None,
    num_steps: int | None = None,
) -> SchedulePreview:
    """Return the learning rate of each optimizer step of a training from the start, without training.

    A copy of the module creates its optimizers and schedules, which are stepped as in the Trainer. Call it on every
    rank; all ranks get the same result.

    Args:
        trainer: Trainer whose limits define the length of training.
        model: The module.
        train_dataloaders: Loaders to train with, or a DataModule.
        datamodule: DataModule that provides the loaders instead.
        num_steps: Number of steps to preview; None for the full training.

    Raises:
        ConfigError: Nothing limits the training.
    """
    train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule, "train_dataloaders")
    given = {"train": train_dataloaders} if train_dataloaders is not None else {}
    subject = Subject(trainer, unwrapped(model), datamodule, given)
    preview = SchedulePreview()
    callbacks: list[Callback] = [_Rehearsal(preview, num_steps, trainer)]
    accumulation = dict(accumulation_of(trainer))
    if trainer.accumulation_scheduler is not None:
        accumulation = {}
        callbacks.append(trainer.accumulation_scheduler)
    with isolated(subject), subject.lent() as (module, twin):
        trial = make_trainer(
            subject,
            trainer.fabric,
            callbacks,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            **accumulation,
        )
        trial.fit(module, train_dataloaders, datamodule=twin)
    return preview
