"""The batch-size search: the largest size that fits into memory, found by trials.

Each rank tries each size in a separate run without communication, so that no rank waits for one that runs out of
memory. After each trial the ranks synchronize its result.
"""

from __future__ import annotations

import logging
from collections.abc import Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..accelerators.out_of_memory import free_memory, is_out_of_memory
from ..data.combined import CombinedLoader
from ..data.tree import flatten_loaders, is_collection
from ..errors import ConfigError, ModuleError, RankFailure
from ..messages import warn
from ..protocols import Loaders, Options, StepFunction
from ..trainer.run import FitRun
from ..trainer.session.optimizers import build_optimizers
from .setting import find_setting, write_setting
from .trial import Subject, isolated, kept_weights, make_trainer, single_device_fabric

if TYPE_CHECKING:
    from ..fabric import Fabric

_log = logging.getLogger(__name__)
_STAGE = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
_LOADER = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A batch size, and the number of micro-batches per step.

    Attributes:
        size: Samples in a micro-batch on one device.
        accumulate_grad_batches: Micro-batches per step that keep the global batch; None without `keep_global_batch`.
    """

    size: int
    accumulate_grad_batches: int | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """Arguments of a batch-size search.

    Args:
        mode: "power" doubles the size until memory is exhausted; "binsearch" then bisects.
        steps_per_trial: Number of steps of each trial; from the second on the optimizer's state is in memory.
        init_val: First batch size.
        max_trials: Maximum number of sizes to try.
        batch_arg_name: Name of the attribute or hyperparameter that the loaders read their batch size from.
        margin: For "binsearch", fraction of the found size that is left free if memory was the limit.
        max_val: Largest size to try.
        keep_global_batch: Whether the number of samples per step stays the same: the size divides the current
            batch size times `accumulate_grad_batches`, which is increased accordingly.

    Raises:
        ConfigError: Names everything that is wrong.
    """

    mode: str = "power"
    steps_per_trial: int = 3
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"
    margin: float = 0.05
    max_val: int = 8192
    keep_global_batch: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if self.mode not in ("power", "binsearch"):
            wrong.append(f"mode={self.mode!r}, expected 'power' or 'binsearch'")
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                wrong.append(f"{name}={value!r}, expected an integer of at least 1")
        if not 0 <= self.margin < 1:
            wrong.append(f"margin={self.margin!r}, expected a fraction from 0 to below 1")
        if wrong:
            raise ConfigError(f"batch-size search: {'; '.join(wrong)}.", fix="correct them.")


def find_batch_size_that_fits(subject: Subject, method: str, search: Search) -> BatchSize:
    """Run the search and return what it found; nothing is changed yet. On every rank: it communicates.

    Raises:
        ConfigError: Loaders were passed directly; the attribute does not exist; not even one sample fits; or the
            strategy shards the model.
        ModuleError: The loaders do not use the attribute.
        RankFailure: A trial failed on another rank, with another error than being out of memory.
    """
    _, before = find_setting(subject.owners, (search.batch_arg_name,), requested_by="the batch-size search")
    _refuse(subject, method, search)
    accumulate = subject.trainer.accumulate_grad_batches
    most = search.max_val
    global_batch = None
    if search.keep_global_batch and method == "fit":
        global_batch = int(before) * accumulate
    if subject.trainer.global_batch_size is not None and method == "fit":
        global_batch = max(1, subject.trainer.global_batch_size // subject.trainer.strategy.topology.data_size)
    if global_batch is not None:
        most = min(most, global_batch)
    with isolated(subject) as isolation:
        trials = Trials(subject, method, search, before=int(before))
        size = (subject.trainer.behavior.batch_size_rule or search_sizes)(search, most, trials)
        isolation.keeps_draws = trials.keeps_draws
    if global_batch is None:
        return BatchSize(size)
    size = max(divisor for divisor in range(1, size + 1) if global_batch % divisor == 0)
    return BatchSize(size, global_batch // size)


def _refuse(subject: Subject, method: str, search: Search) -> None:
    trainer = subject.trainer
    if trainer.strategy.traits.shards_parameters:
        raise ConfigError(
            f"the batch-size search tries each size on every device by itself, and {type(trainer.strategy).__name__} "
            "shards the model over them.",
            fix="choose the size manually: train with max_steps=5 and look at the memory (DeviceStatsMonitor).",
        )
    if subject.given.get(_STAGE[method]) is not None:
        raise ConfigError(
            f"the batch-size search for trainer.{method} was given loaders, whose batch size is fixed.",
            fix=f"let the module or a data module define {_LOADER[method]}_dataloader, which builds the loader with "
            f"self.{search.batch_arg_name}.",
        )
    if search.keep_global_batch and method == "fit":
        reason = None
        if trainer.accumulation_scheduler is not None:
            reason = "a GradientAccumulationScheduler changes how many micro-batches make a step"
        elif not getattr(subject.module, "automatic_optimization", True):
            reason = "the trainer does not accumulate in manual optimization"
        if reason is not None:
            raise ConfigError(f"keep_global_batch=True, and {reason}.", fix="leave out one of the two.")


def search_sizes(search: Search, most: int, trials: Trials) -> int:
    """Return the largest size that was tried and fits, less the margin.

    Args:
        search: How to search.
        most: The largest size to try.
        trials: Tries sizes.

    Raises:
        ConfigError: Not even the smallest size fits.
    """
    size, fits, fails = min(search.init_val, most), 0, 0
    for _ in range(search.max_trials):
        most = min(most, trials.most_samples or most)
        size = min(size, most)
        if trials.fits(size):
            fits = size
        else:
            fails = size
        if size == 1 and not fits:
            break
        if fits >= most and not fails:
            break
        if not fails:
            size = min(fits * 2, most)
        elif not fits:
            size = fails // 2
        elif search.mode == "power" or fails - fits <= 1:
            break
        else:
            size = (fits + fails) // 2
    if not fits:
        raise ConfigError(
            f"the batch-size search found no size that fits into memory; the smallest that was tried is {fails}.",
            fix="use less memory (precision='bf16-mixed', a smaller model), or begin with a smaller init_val.",
        )
    if fails and search.mode == "binsearch":
        return max(1, int(fits * (1 - search.margin)))
    return fits


class Trials:
    """Tries sizes.

    Attributes:
        before: The size before the search.
        refuses_unused: Whether a loader that does not use the size is an error; otherwise there is a warning.
        keeps_draws: Whether training continues with the random numbers that follow those of the trials.
        most_samples: Samples that each rank has at most in a batch, once a loader is known; None before, and if no
            loader has a length.
    """

    def __init__(self, subject: Subject, method: str, search: Search, *, before: int) -> None:
        self.before = before
        self._subject = subject
        self._method = method
        self._search = search
        self._tried: dict[int, list[int | None]] = {}  # size -> batch sizes of the loaders
        self.most_samples: int | None = None
        self.refuses_unused = True
        self.keeps_draws = False
        self._has_warned = False

    def fits(self, size: int) -> bool:
        """Whether this size fits, on all ranks.

        Raises:
            RankFailure: A trial failed on another rank; the rank itself raises its own error.
        """
        self._subject.check_signals()
        error: Exception | None = None
        has_memory = True
        try:
            self._run(size)
        except Exception as caught:
            has_memory = not is_out_of_memory(caught)
            error = caught if has_memory else None
            caught.__traceback__ = caught.__traceback__ if has_memory else None  # its frames hold the trial's tensors
        free_memory(self._subject.trainer.fabric.device)
        results = self._subject.trainer.strategy.gather_objects((has_memory, None if error is None else repr(error)))
        if error is not None:
            raise error
        for rank, (_, problem) in enumerate(results):
            if problem is not None:
                raise RankFailure(
                    f"rank {rank} failed in a trial with a batch size of {size}: {problem}.",
                    fix="look at that rank's own error; it is not about memory.",
                )
        all_fit = all(has_memory for has_memory, _ in results)
        _log.info("batch size %d: %s", size, "fits" if all_fit else "out of memory")
        return all_fit

    def open_loaders(self, size: int) -> None:
        """Ask for the loaders of a size, without a step; for a rule whose random numbers depend on it."""
        self._run(size, steps=0)

    def _run(self, size: int, steps: int | None = None) -> None:
        subject, method = self._subject, self._method
        fabric = _fabric_for(subject)
        shares = any(p.device.type == fabric.device.type for p in subject.module.parameters())
        with kept_weights(subject.module) if shares else nullcontext():
            module, datamodule = subject.twins(shares_weights=shares)
            write_setting((module, datamodule), self._search.batch_arg_name, size)
            trial = make_trainer(
                subject, fabric, [], **self._limits(self._search.steps_per_trial if steps is None else steps)
            )
            reserve = self._reserve(fabric)
            verb: StepFunction = getattr(trial, method)
            options = {} if method == "fit" else {"verbose": False} if method != "predict" else {
                "return_predictions": False
            }  # fmt: skip
            verb(module, datamodule=datamodule, **options)
            loader = trial.train_dataloader if method == "fit" else getattr(trial, f"{_LOADER[method]}_dataloaders")
            del reserve
        if steps is None:
            self._note(size, loader)

    def _limits(self, steps: int) -> Options:
        if self._method == "fit":
            # Accumulation takes no more memory: gradients are there in each forward pass but the first.
            return {"max_epochs": -1, "max_steps": steps, "accumulate_grad_batches": 1}
        return {f"limit_{_LOADER[self._method]}_batches": steps, "overfit_batches": 0}

    def _reserve(self, fabric: Fabric) -> torch.Tensor | None:
        """Take the memory that several ranks need beside a single one: a second copy of the gradients, in buckets."""
        if self._method != "fit" or fabric is self._subject.trainer.fabric:
            return None
        parameters = [p for p in self._subject.module.parameters() if p.requires_grad]
        size_bytes = sum(p.numel() * p.element_size() for p in parameters if not torch.nn.parameter.is_lazy(p))
        return torch.empty(size_bytes, dtype=torch.uint8, device=fabric.device)

    def _note(self, size: int, loader: Loaders) -> None:
        loaders = _flat(loader)
        counts = [count for count in map(_count_samples, loaders) if count is not None]
        if counts:
            self.most_samples = max(1, max(counts) // self._subject.trainer.strategy.topology.data_size)
        built = [getattr(one, "batch_size", None) for one in loaders]
        tried = self._tried.setdefault(size, built)
        if any(built) and any(earlier == tried for other, earlier in self._tried.items() if other != size):
            name = self._search.batch_arg_name
            what = (
                f"{_LOADER[self._method]}_dataloader does not use {name}: its batch size is {built[0]}, whatever "
                f"{name} is ({size} was tried)"
            )
            if self.refuses_unused:
                raise ModuleError(f"{what}.", fix=f"build the loader with batch_size=self.{name}.")
            if not self._has_warned:
                self._has_warned = True
                warn(f"{what}. The search has no effect: build the loader with batch_size=self.{name}")


def _fabric_for(subject: Subject) -> Fabric:
    trainer = subject.trainer
    starts = getattr(trainer.fabric.launcher, "starts_processes", False) and not trainer._lw_is_in_child
    if trainer.world_size == 1 and not starts:
        return trainer.fabric
    return single_device_fabric(trainer)


def _flat(loader: Loaders) -> list[Loaders]:
    if isinstance(loader, CombinedLoader):
        return list(loader.flattened)
    return flatten_loaders(loader) if is_collection(loader) else [loader]


def _count_samples(loader: Loaders) -> int | None:
    """Return the samples of a loader's data set; None if unknown."""
    data = getattr(loader, "dataset", None)
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # some iterable data sets declare a length and raise when it is read
        return None


def set_batch_size(subject: Subject, method: str, name: str, found: BatchSize) -> None:
    """Set the size on module and data module, and within a run let it take effect."""
    write_setting(subject.owners, name, found.size)
    trainer, run = subject.trainer, subject.run
    if found.accumulate_grad_batches is not None:
        trainer.accumulate_grad_batches = found.accumulate_grad_batches
    if not isinstance(run, FitRun) or method != "fit" or run.opened is None:
        return
    # Loaders with the earlier size are open: a schedule has counted their batches, or training is under way.
    run.session.reload_loaders()
    if not run.progress.total_batches:
        build_optimizers(run)
