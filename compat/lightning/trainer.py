"""`Trainer` with Lightning's defaults, its state as enum members, and the private names that libraries use.

It also accepts what Loopwright refuses by itself: methods that look like hooks, hooks that do not take the loader's
number, batches whose tensors disagree about their size, and objects in checkpoints.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...checkpoint.content import LIGHTNING_VERSION_KEY, OWN_KEY
from ...checkpoint.tools.convert import lightning_loop
from ...data.limit import find_length, resolve_limit
from ...fabric.world import checks_deferred
from ...protocols import StorageOptions
from ...strategies import ParallelStrategy
from ...strategies.optional import saves_shards
from ...trainer import trainer
from ...trainer.checkpointing.saving import Saving
from ...trainer.metrics.accumulators import with_suffix
from ...trainer.run import FitRun
from . import connectors, sessions
from .actions import STEP
from .attached import collect_attached
from .behavior import BEHAVIOR
from .callbacks.external import with_external
from .enums import TrainerState
from .errors import NotAttached
from .imports.finder import VERSION, show_paths
from .loggers import TensorBoardLogger
from .loops import LoopView, TrainLoop, fit_session_of, refuse_own_loop
from .metrics import LightningMetrics
from .objects import part_hyperparameters, trust_objects, with_objects
from .optimizers import replace_optimizers
from .overrides import check_overrides
from .own_parts import serve_overrides
from .parity import switches
from .profilers import PyTorchProfiler
from .strategies import serve_parts
from .utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from ...protocols import StateDict
    from ...trainer.behavior import Behavior
    from ...trainer.run import Run
    from .parity.progress import LoopCounts

__all__ = ["Trainer"]

_LIMITS_OF_BATCHES = {f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")}
_ENVIRONMENT_LOGGER = "PL_TRAINER_LOGGER"


class Trainer(trainer.Trainer):
    """`lw.Trainer` as programs for Lightning expect it.

    Logs go to `lightning_logs`, checkpoints have Lightning's entries too, and hold whatever pickle can write; a method
    that looks like a hook is a warning. Arguments are those of `lw.Trainer`.

    Attributes:
        evaluated: Counts of batches of evaluations.
        loop_counts: Counts of loops, where parity counts as Lightning does.
        has_fitted: Whether a fit has begun.
        decides_alone: Whether each rank judges the values that it has.
    """

    def __init__(self, **arguments: Any) -> None:  # Any: see lw.Trainer
        root = os.path.expanduser(str(arguments.get("default_root_dir") or os.getcwd()))
        is_default = arguments.get("logger") in (None, True) and _ENVIRONMENT_LOGGER not in os.environ
        if is_default and not (arguments.get("fast_dev_run") or arguments.get("barebones")):
            arguments["logger"] = TensorBoardLogger(root)
        if str(arguments.get("profiler")).lower() == "pytorch":
            arguments["profiler"] = PyTorchProfiler()
        _take_level()
        arguments["callbacks"] = with_external(arguments.get("callbacks"), "pytorch")
        for change in switches.functions("arguments"):
            change(arguments)
        with checks_deferred() as self._lw_deferred_checks:
            super().__init__(**arguments)
        check_overrides(self.fabric.strategy, "strategy")
        check_overrides(self.fabric.precision, "precision")
        check_overrides(self.fabric.accelerator, "accelerator")
        serve_parts(self)
        self.fabric.leaves_choice = False  # Lightning's "auto" is ddp, and this strategy has its members now
        if isinstance(self.fabric.strategy, ParallelStrategy):
            rank_zero_only.rank = self.global_rank  # on several nodes, no variable has it before the processes start
        serve_overrides(self)
        self.profiler.STEP_ACTION = STEP
        self.state = TrainerState()
        self.evaluated: dict[str, list[int]] = {}
        self.loop_counts: LoopCounts | None = None
        self.decides_alone = False
        self._lw_own_loops: dict[str, LoopView] = {}
        self._lw_saving = _Saving(self)
        limits = {name: getattr(self.fit_loop, name) for name in ("max_epochs", "min_epochs", "max_steps", "min_steps")}
        self.fit_loop = TrainLoop(self, seams=self.behavior.loop, **limits)
        is_disabled = self._lw_metrics.is_disabled
        self._lw_metrics = LightningMetrics(self.fabric.device)
        self._lw_metrics.is_disabled = is_disabled
        self._lw_metrics.shows_evaluated_batches = False
        self._checkpoint_connector = connectors._CheckpointConnector(self)
        self._callback_connector = connectors._CallbackConnector(self)
        self._accelerator_connector = connectors._AcceleratorConnector(self)
        self._lw_has_parity = False
        self.has_fitted = False
        show_paths()

    __init__.__signature__ = inspect.signature(trainer.Trainer.__init__)  # type: ignore[attr-defined]

    def make_behavior(self) -> Behavior:
        """Return what a Trainer of Lightning does at the seams, with what parity changes."""
        behavior = BEHAVIOR
        for change in switches.functions("behavior"):
            behavior = change(behavior)
        return behavior

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send host numbers to all loggers; within a window, at the step that it will make."""
        run = self.present_run()
        is_within = isinstance(run, FitRun) and fit_session_of(run).is_within_window
        if is_within and step is None and "step" not in metrics:
            metrics, step = {**metrics, "epoch": self.progress.epochs}, self.progress.steps
        super().log_metrics(metrics, step)

    @override
    def synchronize_metrics(self, *names: str) -> None:
        """Make values equal on all ranks, unless each decides for itself."""
        if not self.decides_alone:
            super().synchronize_metrics(*names)

    @override
    def managed_schedulers(self) -> list[Any]:  # Any: schedules of any library
        """Return the schedules that a module steps itself: as they are, where each rank decides for itself."""
        if self.decides_alone:
            return [config.scheduler for config in self.lr_scheduler_configs]
        return super().managed_schedulers()

    def __getattr__(self, name: str) -> Any:  # Any: arguments differ in type
        found = super().__getattr__(name)
        return 1.0 if found is None and name in _LIMITS_OF_BATCHES else found

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Values for the bar: of a key that was logged by step and by epoch, the two."""
        for refresh in switches.functions("bar"):
            refresh(self)
        found = super().progress_bar_metrics
        return {name: value for name, value in found.items() if with_suffix(name, "_epoch") not in found}

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Latest value of everything logged, without single batches of an evaluation: in torch's default dtype.

        Loopwright adds up numbers in float64. With precision="64-true", values stay as they are.
        """
        found = super().callback_metrics
        if self.precision == "64-true":
            return found
        dtype = torch.get_default_dtype()
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}

    @property
    def is_last_batch(self) -> bool:
        """Whether the present training batch is the epoch's last; after fit, whether its last batch was."""
        return super().is_last_batch or (
            self._lw_run is None and self.fit_loop.epoch_loop.batch_progress.is_last_batch  # type: ignore[attr-defined]
        )

    @property
    def num_val_batches(self) -> list[int | float]:
        """Validation batches of each loader, also of those that are combined into one."""
        return self._lw_batches_of_each("validation", super().num_val_batches)

    @property
    def num_test_batches(self) -> list[int | float]:
        """Test batches of each loader, also of those that are combined into one."""
        return self._lw_batches_of_each("test", super().num_test_batches)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of the sanity check of each loader; empty before the first fit."""
        return super().num_sanity_val_batches if self.has_fitted else []

    def _lw_batches_of_each(self, stage: str, counts: list[int | float]) -> list[int | float]:
        data = self._lw_loaders.eval.get(stage)
        if data is None or data.combined is None:
            return counts
        limit = getattr(self, f"limit_{'val' if stage == 'validation' else stage}_batches")
        lengths = [find_length(member) for member in data.combined.flattened]
        return [math.inf if one is None else resolve_limit(limit, one, "limit") for one in lengths]

    def attach_module(self, module: nn.Module | None) -> None:
        """Attach a module to the Trainer outside of a run, as `trainer.strategy.connect(module)` does."""
        self._lw_spawned_module = module

    def num_loaders(self, stage: str) -> int:
        """Return how many loaders an evaluation has: "validation", "test" or "predict"."""
        return len(self._lw_loaders.num_batches(stage))

    @property
    def logged_metrics(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Latest value of each key for the loggers, including values not yet sent: shape (), on the device."""
        found = super().logged_metrics
        values = {
            name: torch.tensor(value, device=self.fabric.device) for name, value in found.items() if name != "epoch"
        }
        metrics = cast(LightningMetrics, self._lw_metrics)
        waiting = {name: value.to(torch.get_default_dtype()) for name, value in metrics.waiting_for_loggers().items()}
        return {**values, **waiting}

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Number of steps that fit takes; after it, that it would take."""
        for estimate in switches.functions("estimate"):
            found: int | float | None = estimate(self)
            if found is not None:
                return found
        if self._lw_run is not None or self._lw_last_run is None:
            return super().estimated_stepping_batches
        epochs, limit = self.max_epochs, self.max_steps
        steps = math.inf
        if epochs not in (None, -1):
            scheduler, batches = self.accumulation_scheduler, self.num_training_batches
            sizes = (
                [self.accumulate_grad_batches] * epochs
                if scheduler is None
                else [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(epochs)]
            )
            steps = sum(math.ceil(batches / size) for size in sizes)
        return steps if limit == -1 else min(steps, limit)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the present or last fit."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        replace_optimizers(self, optimizers)

    def metric_step(self, name: str) -> int | None:
        """Return the `global_step` at which `callback_metrics[name]` was computed; None where there is no such key."""
        found = super().metric_step(name)
        return None if found is None else found + self.progress.global_step - self.progress.steps

    def _lw_fit_session(self, model: nn.Module, **arguments: Any) -> sessions.LightningFitSession:
        self._lw_begin_parity()
        return sessions.LightningFitSession(self, model, **arguments)

    def _lw_evaluation_session(
        self, verb: str, model: nn.Module | None, **arguments: Any
    ) -> sessions.LightningEvaluationSession:
        self._lw_begin_parity()
        return sessions.LightningEvaluationSession(self, verb, model, **arguments)

    def _lw_begin_parity(self) -> None:
        """Put in place, in the process that runs a verb, what parity needs."""
        if not self._lw_has_parity:
            self._lw_has_parity = True
            for change in switches.functions("trainer"):
                change(self)
        self._lw_check_world()

    def _lw_check_world(self) -> None:
        """Compare the processes with the arguments: configurations for other machines may be made, not run."""
        while self._lw_deferred_checks:
            self._lw_deferred_checks.pop()()

    def _lw_launch(self, verb: str, model: nn.Module | None, **arguments: object) -> Any:  # Any: what the verb returns
        self._lw_check_world()
        return super()._lw_launch(verb, model, **arguments)

    def save_checkpoint_to(
        self,
        filepaths: Sequence[str | Path],
        weights_only: bool | None = None,
        storage_options: StorageOptions | None = None,
    ) -> None:
        """Write one checkpoint to several paths, also that of a module that is attached outside of a run."""
        module = self.lightning_module
        if self.latest_run() is None and self._lw_spawned_checkpoint is None and module is None:
            raise NotAttached(
                "trainer.save_checkpoint was called before a module was attached.", fix="call trainer.fit first."
            )
        if self.latest_run() is not None or self._lw_spawned_checkpoint is not None:
            super().save_checkpoint_to(filepaths, weights_only, storage_options)
            return
        if self.is_global_zero:
            assert module is not None
            checkpoint = collect_attached(self, module, is_weights_only=bool(weights_only))
            self._lw_saving.write(checkpoint, filepaths, storage_options)

    def _lw_take_loop(self, stage: str, name: str, loop: object) -> None:
        refuse_own_loop(name, loop)
        self._lw_own_loops[stage] = cast("LoopView", loop)

    def _lw_show_results(self, verb: str, results: list[Mapping[str, float]]) -> None:
        loop = self.validate_loop if verb == "validate" else self.test_loop
        loop._print_results([{key: torch.tensor(value) for key, value in one.items()} for one in results], verb)

    @property
    def validate_loop(self) -> LoopView:
        """The validation of `trainer.validate`."""
        return self._lw_own_loops.get("validation") or LoopView(self, "validation")

    @validate_loop.setter
    def validate_loop(self, loop: object) -> None:
        self._lw_take_loop("validation", "validate_loop", loop)

    @property
    def test_loop(self) -> LoopView:
        """The loop of `trainer.test`."""
        return self._lw_own_loops.get("test") or LoopView(self, "test")

    @test_loop.setter
    def test_loop(self, loop: object) -> None:
        self._lw_take_loop("test", "test_loop", loop)

    @property
    def predict_loop(self) -> LoopView:
        """The loop of `trainer.predict`."""
        return LoopView(self, "predict")

    @predict_loop.setter
    def predict_loop(self, loop: object) -> None:
        refuse_own_loop("predict_loop", loop)

    @property
    def _model(self) -> nn.Module | None:
        return self.lightning_module

    @_model.setter
    def _model(self, model: nn.Module | None) -> None:
        self._lw_spawned_module = model

    @property
    def _results(self) -> connectors.ResultsView:
        return connectors.ResultsView(self, self._lw_results)

    @property
    def _precision_plugin(self) -> object:  # a precision of any kind
        return self.precision_plugin


class _Saving(Saving):
    """Writes checkpoints that hold objects, and have what Lightning looks for in one."""

    @override
    def save(
        self,
        run: Run,
        filepaths: Sequence[str | Path],
        *,
        is_weights_only: bool,
        storage_options: StorageOptions | None,
    ) -> None:
        """Take a checkpoint and write it to each path; with parity, also within a window."""
        is_training = run is self._trainer.present_run() and isinstance(run, FitRun) and run.opened is not None
        count = fit_session_of(run).counting_window if is_training else None
        with nullcontext() if count is None or run.at_boundary else count():
            super().save(run, filepaths, is_weights_only=is_weights_only, storage_options=storage_options)

    def check_weights(self, module: nn.Module) -> None:
        """Accept weights of any class; see `Saving.check_weights`."""

    def complete(self, checkpoint: StateDict) -> None:
        """Add Lightning's own entries, which hooks and libraries look for."""
        own = checkpoint.get(OWN_KEY)
        if isinstance(own, dict) and not saves_shards(self._trainer.strategy, "full"):
            checkpoint.setdefault(LIGHTNING_VERSION_KEY, VERSION)
            loop, counts = lightning_loop(own.get("progress", {})), cast("Trainer", self._trainer).loop_counts
            checkpoint.setdefault("loops", {"fit_loop": loop if counts is None else {**loop, **counts.fit_state()}})

    def write_to(
        self, checkpoint: StateDict, filepaths: Sequence[str | Path], storage_options: StorageOptions | None
    ) -> None:
        own = checkpoint.get(OWN_KEY)
        if isinstance(own, dict) and saves_shards(self._trainer.strategy, "full"):
            checkpoint = trust_objects(part_hyperparameters(checkpoint))
        elif isinstance(own, dict):
            checkpoint = with_objects(checkpoint)
            self.complete(checkpoint)
        super().write_to(checkpoint, filepaths, storage_options)


def _take_level() -> None:
    """Apply the levels of Lightning's loggers, as set by `getLogger("lightning.pytorch").setLevel(ERROR)`."""
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning"):
        level = logging.getLogger(name).level
        if level != logging.NOTSET:
            logging.getLogger("loopwright").setLevel(level)
            return
