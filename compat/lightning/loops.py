"""Loops as libraries read them: a run's counts in the form of Lightning's progress, and the sources of their data.

Counts are computed from the run when they are read, so that there is one count, which includes restored checkpoints.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from torch import Tensor
from typing_extensions import override

from ...checkpoint.tools.convert import lightning_loop
from ...data.tree import flatten_loaders, is_collection
from ...trainer.hooks import DATA_BASES, MODULE_BASES, Hook, find_override
from ...trainer.loop.fit_loop import FitLoop
from ...trainer.run import FitRun
from ..absent import refuse
from .overrides import find_own

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...protocols import Loader, Loaders, StateDict
    from ...trainer.run import Run
    from ...trainer.trainer import Trainer
    from .parity.progress import Count, LoopCounts
    from .sessions import LightningFitSession
    from .trainer import Trainer as LightningTrainer

__all__ = ["BatchProgress", "LoopView", "TrackedCounts", "TrainLoop", "count_evaluations", "refuse_own_loop"]

_BATCH_HOOKS = frozenset(
    (
        "on_train_batch_start",
        "training_step",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    )
)
_RESTORED = "pass ckpt_path to trainer.fit, which restores counts"


class _FreeCounts:
    """Progress of one kind. Assigning to a count has no effect: programs correct what Lightning counts twice."""

    ready: int
    started: int
    processed: int
    completed: int

    def __init__(self, **counts: int) -> None:
        self.__dict__.update(counts)

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())


class TrackedCounts(_FreeCounts):
    """Read-only progress of one kind: numbers of events that are ready, started, processed and completed."""

    def __setattr__(self, name: str, value: object) -> None:
        refuse(f"an assignment to {name!r} of a loop's progress", _RESTORED)


class BatchProgress(NamedTuple):
    """Counts of batches.

    Attributes:
        total: Since the start of training.
        current: Of the present epoch.
        is_last_batch: Whether the present batch is the epoch's last.
    """

    total: TrackedCounts
    current: TrackedCounts
    is_last_batch: bool = False

    def state_dict(self) -> StateDict:
        """Return the counts, as a checkpoint of Lightning has them."""
        counts = {"total": dict(vars(self.total)), "current": dict(vars(self.current))}
        return {**counts, "is_last_batch": self.is_last_batch}


class LoopView:
    """A loop of a trainer: its progress and its data.

    Args:
        trainer: The trainer.
        stage: "train", "validation", "test" or "predict"; Lightning's verbs mean the same.
        *_arguments: Further arguments of Lightning's, without effect, since the loop cannot be replaced.
        **_options: The same.
    """

    verbose = True
    restarting = False
    _trainer: Trainer
    _stage: str
    _key: str

    def __init__(self, trainer: Trainer, stage: str, *_arguments: object, **_options: object) -> None:
        stage = {"validate": "validation", "fit": "train"}.get(stage, stage)
        self.__dict__.update(_trainer=trainer, _stage=stage, _key=stage)

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        return self._trainer

    @property
    def _data_source(self) -> _DataSource:
        return _DataSource(self._trainer, self._stage)

    @property
    def max_batches(self) -> int | float | list[int | float]:
        """Batches of an epoch."""
        return self._trainer.num_training_batches if self._stage == "train" else self._batches()

    def _batches(self) -> list[int | float]:
        return self._trainer.parts.loaders.num_batches(self._stage)

    @property
    def num_dataloaders(self) -> int:
        """Number of loaders."""
        return len(self._batches())

    @property
    def _combined_loader(self) -> SimpleNamespace | None:
        given = (
            self._trainer.train_dataloader
            if self._stage == "train"
            else self._trainer.parts.loaders.original(self._stage)
        )
        return None if given is None else SimpleNamespace(iterables=given, flattened=_flat(given))

    # --- counts ----------------------------------------------------------------------------------------------------

    @property
    def batch_progress(self) -> BatchProgress | Count:
        """Counts of batches; while a batch is trained on, it is ready and not completed."""
        counts = self._counts
        if counts is not None:
            return counts.batch if self._stage == "train" else counts.evaluated[self._key]
        if self._stage != "train":
            return self._evaluated_batches()
        run = self._trainer.latest_run()
        if run is None:
            none = dict.fromkeys(("ready", "started", "processed", "completed"), 0)
            return BatchProgress(TrackedCounts(**none), TrackedCounts(**none))
        ready, processed, completed = _counts_of_batches(run)
        before = run.progress.total_batches - run.progress.batches_in_epoch
        if not run.progress.epoch_open and run.progress.total_batches:
            before = run.progress.total_batches - completed
        current = {"ready": ready, "started": ready, "processed": processed, "completed": completed}
        total = {name: before + count for name, count in current.items()}
        is_last = run.opened is not None and ready > 0 and not run.opened.has_next()
        return BatchProgress(TrackedCounts(**total), TrackedCounts(**current), is_last)

    def _evaluated_batches(self) -> BatchProgress:
        counted = getattr(self._trainer, "evaluated", {}).get(self._key, [0, 0, 0, 0])
        counts = dict(zip(("ready", "started", "processed", "completed"), counted, strict=True))
        is_last = counts["ready"] > 0 and counts["ready"] == sum(self._batches())
        return BatchProgress(TrackedCounts(**counts), TrackedCounts(**counts), is_last)

    @property
    def _counts(self) -> LoopCounts | None:
        return getattr(self._trainer, "loop_counts", None)

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch; -1 before the first."""
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch since the start of training; -1 before the first."""
        return self.batch_progress.total.ready - 1

    @property
    def global_step(self) -> int:
        """Training steps taken."""
        return self._trainer.global_step

    @property
    def _batches_that_stepped(self) -> int:
        run = self._trainer.present_run()
        is_in_batch = run is not None and run.has_stepped and run.metrics.table.hook == "on_train_batch_end"
        return self._trainer.global_step - is_in_batch  # it is counted after the batch's hooks

    @property
    def automatic_optimization(self) -> SimpleNamespace:
        """Counts of optimizer steps: `optim_progress.optimizer_steps`."""
        counted = self._counts
        if counted is not None:
            optimizer = SimpleNamespace(step=counted.step, zero_grad=counted.zero_grad)
            steps = counted.step.total.completed
            return SimpleNamespace(optim_progress=SimpleNamespace(optimizer_steps=steps, optimizer=optimizer))
        steps = self._trainer.global_step if self._is_automatic else 0
        counts = _FreeCounts(ready=steps, started=steps, completed=steps)
        step = SimpleNamespace(total=counts, current=counts)
        optimizer = SimpleNamespace(step=step, zero_grad=step)
        return SimpleNamespace(optim_progress=SimpleNamespace(optimizer_steps=steps, optimizer=optimizer))

    @property
    def scheduler_progress(self) -> SimpleNamespace | Count:
        """Counts of steps of schedules: `scheduler_progress.total.completed`."""
        if self._counts is not None:
            return self._counts.schedule
        configs = self._trainer.lr_scheduler_configs
        steps = sum(getattr(config.scheduler, "last_epoch", 0) for config in configs)
        return SimpleNamespace(total=TrackedCounts(ready=steps, completed=steps))

    @property
    def manual_optimization(self) -> SimpleNamespace:
        """Counts of steps in manual optimization: `optim_step_progress.total.completed`."""
        if self._counts is not None:
            return SimpleNamespace(optim_step_progress=self._counts.manual)
        steps = 0 if self._is_automatic else self._trainer.global_step
        counts = _FreeCounts(ready=steps, completed=steps)
        return SimpleNamespace(optim_step_progress=SimpleNamespace(total=counts, current=counts))

    @property
    def _is_automatic(self) -> bool:
        return bool(getattr(self._trainer.lightning_module, "automatic_optimization", True))

    @property
    def done(self) -> bool:
        """Whether the epoch's last batch is done."""
        progress = self.batch_progress
        return progress.is_last_batch and progress.current.processed == progress.current.ready

    def _should_accumulate(self) -> bool:
        progress, size = self.batch_progress, self._trainer.accumulate_grad_batches
        return not progress.is_last_batch and bool(progress.current.ready % size)

    # --- its parts -------------------------------------------------------------------------------------------------

    @property
    def val_loop(self) -> LoopView:
        """The validation within fit."""
        view = LoopView(self._trainer, "validation")
        view.__dict__["_key"] = "fit"
        return view

    @property
    def epoch_loop(self) -> LoopView:
        """The batches of an epoch."""
        return self

    @property
    def inference_mode(self) -> bool:
        """Whether evaluations run under `torch.inference_mode`, not `no_grad`."""
        return bool(self._trainer.parts.arguments.inference_mode)

    @staticmethod
    def _print_results(results: list[dict[str, Tensor]], stage: str) -> None:
        """Print the metrics of each loader; programs override it.

        Args:
            results: Metrics by name, one dict for each loader; shapes ().
            stage: "validate" or "test".
        """
        print(_table_of(results, stage))  # noqa: T201  # as Lightning does

    def state_dict(self, prefix: str = "") -> StateDict:
        """Return the loop's counts in the form of Lightning's checkpoints.

        Args:
            prefix: Text before each key.
        """
        if self._stage != "train":
            counts = self.batch_progress.state_dict()
            if self._stage == "predict":
                del counts["is_last_batch"]
            return {f"{prefix}state_dict": {}, f"{prefix}batch_progress": counts}
        every = cast("TrainLoop", self._trainer.fit_loop).state_dict()
        own = {key.partition(".")[2]: value for key, value in every.items() if key.startswith("epoch_loop.")}
        return {f"{prefix}{key}": value for key, value in own.items()}

    def load_state_dict(self, state_dict: StateDict, prefix: str = "") -> NoReturn:
        """Raise an error, because a run restores its counts at its beginning."""
        refuse(f"load_state_dict of the loop for {self._stage!r}", _RESTORED)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_batches_that_stepped":
            return  # programs correct what Lightning counts once per optimizer; here it is right
        refuse(f"an assignment to {name!r} of the loop for {self._stage!r}", _RESTORED)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"Loopwright's loop for {self._stage!r} has no {name!r}; see docs/migrating.md.")


def count_evaluations(trainer: Any, run: Run) -> None:
    """Let the batches of evaluations be counted in `trainer.evaluated`: from zero for each evaluation.

    Args:
        trainer: A Trainer of this layer.
        run: Its run.
    """
    for stage in ("validation", "test", "predict"):
        key = "fit" if trainer.state.fn == "fit" else stage
        run.lifecycle.wrap(f"on_{stage}_start", partial(_count_from_zero, trainer.evaluated, key))
        for event, first in (("start", 0), ("end", 2)):
            run.lifecycle.wrap(f"on_{stage}_batch_{event}", partial(_count, trainer.evaluated, key, first))


def _count_from_zero(evaluated: dict[str, list[int]], key: str, fire: Hook) -> Hook:
    def begin() -> object:
        evaluated[key] = [0, 0, 0, 0]
        return fire()

    return begin


def _count(evaluated: dict[str, list[int]], key: str, first: int, fire: Hook) -> Hook:
    def counted(*arguments: Any) -> object:  # a batch and its number
        evaluated[key][first] += 1
        result: object = fire(*arguments)
        evaluated[key][first + 1] += 1
        return result

    return counted


def refuse_own_loop(name: str, loop: object) -> None:
    """Raise an error for a loop of the program that overrides more than the printing of results; accept any other.

    Raises:
        NotServed: Its class overrides methods.
    """
    own = sorted(name for name, value in find_own(loop).items() if callable(value) or isinstance(value, property))
    methods = [method for method in own if not method.startswith("__") or method == "__init__"]
    if methods == ["_print_results"]:
        methods = []
    if not isinstance(loop, LoopView) or methods:
        refuse(
            f"trainer.{name} = {type(loop).__name__}, which has {', '.join(methods) or 'another base'},",
            "loops cannot be replaced; hooks of the module and callbacks run at each point of one",
        )


def _table_of(results: list[dict[str, Tensor]], stage: str) -> str:
    keys = list(dict.fromkeys(key for found in results for key in found))
    names = {key: key.partition("/dataloader_idx_")[0] for key in keys}
    rows = [[f"{stage.capitalize()} metric", *(f"DataLoader {index}" for index in range(len(results)))]]
    for name in dict.fromkeys(names.values()):
        values = ([found[key].item() for key in found if names[key] == name] for found in results)
        rows.append([name, *(str(found[0]) if found else "" for found in values)])
    widths = [max(len(row[column]) for row in rows) + 6 for column in range(len(rows[0]))]
    line = "─" * sum(widths)
    head, *body = ["".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([line, head, line, *body, line])


class TrainLoop(FitLoop):
    """The loop of fit, with the names of the parts of Lightning's."""

    restarting = False

    @override
    def run(self, run: FitRun, restore: Callable[[], None] | None) -> None:
        """Train, unless parity counts a fit that has nothing to do."""
        counts = cast("LightningTrainer", self.trainer).loop_counts
        if counts is None or not counts.is_fit_over:
            super().run(run, restore)

    @override
    def run_epoch(self, run: FitRun) -> None:
        """Run one epoch, as an activity for profilers."""
        run.lifecycle.bracketed(super().run_epoch, "run_training_epoch")(run)

    @property
    def epoch_loop(self) -> LoopView:
        """The batches of an epoch."""
        return LoopView(self.trainer, "train")

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        return cast("Trainer", self._trainer)

    @property
    def _data_source(self) -> object:
        return self.epoch_loop._data_source

    @property
    def _combined_loader(self) -> object:
        return self.epoch_loop._combined_loader

    @property
    def epoch_progress(self) -> SimpleNamespace | Count:
        """Counts of epochs, read-only: `epoch_progress.current.completed`."""
        if self.epoch_loop._counts is not None:
            return self.epoch_loop._counts.epoch
        run, done = self.trainer.present_run(), self.trainer.current_epoch
        begun = done + (run is not None and run.opened is not None and self._trainer.state.stage == "train")
        processed = done + (run is not None and run.is_epoch_over and begun > done)
        counts = TrackedCounts(ready=begun, started=begun, processed=processed, completed=done)
        return SimpleNamespace(current=counts, total=counts)

    @property
    def max_batches(self) -> int | float:
        """Micro-batches of an epoch."""
        return self.trainer.num_training_batches

    @property
    def _counts(self) -> LoopCounts | None:
        return getattr(self._trainer, "loop_counts", None)

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch since the start of training."""
        return self.epoch_loop.total_batch_idx

    @property
    def done(self) -> bool:
        """Whether no further step is to be taken."""
        return self.is_done

    @property
    def skip(self) -> bool:
        """Whether there is nothing to train on."""
        return self.is_done or self._trainer.limit_train_batches == 0

    def _should_accumulate(self) -> bool:
        return self.epoch_loop._should_accumulate()

    def setup_data(self) -> None:
        """Load the training data now, so that `trainer.num_training_batches` is known."""
        run = self.trainer.present_run()
        if isinstance(run, FitRun):
            fit_session_of(run).num_training_batches()

    def state_dict(self, prefix: str = "") -> StateDict:
        """Return the counts of training in the form of Lightning's checkpoints.

        Args:
            prefix: Text before each key.
        """
        counts = lightning_loop(self._trainer.progress.state_dict())
        for key, loop in (("epoch_loop", self.epoch_loop), ("epoch_loop.val_loop", self.epoch_loop.val_loop)):
            counts[f"{key}.batch_progress"] = loop.batch_progress.state_dict()
        return {f"{prefix}{key}": value for key, value in counts.items()}

    def load_state_dict(self, state_dict: StateDict, prefix: str = "") -> NoReturn:
        """Raise an error, because a run restores its counts at its beginning."""
        refuse("fit_loop.load_state_dict", _RESTORED)


class _DataSource(NamedTuple):
    """The source of a loop's loaders."""

    trainer: Trainer
    stage: str

    def is_defined(self) -> bool:
        """Whether loaders were given, or module or data module have the hook."""
        hook = f"{_HOOK[self.stage]}_dataloader"
        owners = ((self.trainer.datamodule, DATA_BASES), (self.trainer.lightning_module, MODULE_BASES))
        given = (
            self.trainer.train_dataloader if self.stage == "train" else self.trainer.parts.loaders.original(self.stage)
        )
        return given is not None or any(
            owner is not None and find_override(owner, hook, bases) is not None for owner, bases in owners
        )

    @property
    def instance(self) -> object:  # what has the loaders
        """The loaders that were given, or the data module or module that makes them."""
        given = (
            self.trainer.train_dataloader if self.stage == "train" else self.trainer.parts.loaders.original(self.stage)
        )
        if given is not None:
            return given
        return self.trainer.datamodule if self.trainer.datamodule is not None else self.trainer.lightning_module


_HOOK = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}


def _counts_of_batches(run: Run) -> tuple[int, int, int]:
    """Return how many batches of the epoch are ready, processed and completed."""
    hook = run.metrics.table.hook
    index = run.batch_idx
    if hook == "on_train_batch_end":
        return index + 1, index + 1, index
    if hook in _BATCH_HOOKS or not run.at_boundary:
        return index + 1, index, index
    if not run.progress.total_batches:
        return 0, 0, 0
    done = run.progress.batches_in_epoch if run.progress.epoch_open else index + 1
    return done, done, done


def _flat(loaders: Loaders) -> list[Loader]:
    flattened = getattr(loaders, "flattened", None)
    if flattened is not None:
        return list(flattened)
    found: Any = flatten_loaders(loaders) if is_collection(loaders) else [loaders]
    return list(found)


def fit_session_of(run: Run) -> LightningFitSession:
    """Return the session of a run of fit, which is one of this layer."""
    return cast("LightningFitSession", cast(FitRun, run).session)


def trainer_of(run: Run) -> LightningTrainer:
    """Return the Trainer of a run, whose parts know it as a `TrainerView`."""
    return cast("LightningTrainer", run.trainer)
