"""The data of a run: the source of its loaders, their limits, and how often fit validates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ...data.limit import find_length
from ...data.rng import capture_generators, capture_rng, find_generators, restore_generators, restore_rng
from ...data.stream import BatchStream
from ...errors import ConfigError, ModuleError
from ...messages import warn
from ...protocols import Loaders, StateDict
from ..hooks import DATA_BASES, MODULE_BASES, find_override
from ..loop.eval_loader import EvalLoader, ReadOnce, make_eval_loader, without_shuffle
from .arguments import Arguments, seconds_of

if TYPE_CHECKING:
    from ...data.distributed.shard import Shard
    from ...data.module import DataModule

LOADER_OF = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def _warn_of_samples(given: Loaders, stage: str) -> None:
    """Warn of a data set where a loader is expected: its items are samples, and each would be read as a batch."""
    is_dataset = isinstance(given, Dataset) and not isinstance(given, IterableDataset)
    if is_dataset or isinstance(given, Tensor) or type(given).__name__ == "ndarray":
        kind = type(given).__name__
        warn(
            f"The {'training' if stage == 'train' else stage} data is a {kind}: each of its items is read as a batch. "
            f"If its items are samples, pass DataLoader({'dataset' if is_dataset else 'TensorDataset(...)'}, "
            "batch_size=...)"
        )


class StageLoaders:
    """Loaders of each stage: those passed to the verb, else the data module's, else the module's own.

    Attributes:
        train: The training loaders as the user passed them, but in order with `overfit_batches`; None before they were
            asked for.
        interval_batches: Training batches between two validations; infinity where another rule holds.
        interval_s: Seconds between two validations; None where batches are counted.
        shard: What part of the data this rank reads; None with one rank.
        agree: Lets the ranks agree on a number of batches; None with one rank.
        waits_for_validation: Whether the first validation requests its loaders, not the beginning of fit.
        epoch_of_validation: Epochs completed when the loaders of fit's validations were requested, in an epoch that
            validates; else -1.
        evaluation: How evaluation loaders are distributed: `share` and `count` of `make_eval_loader`; empty with one
            rank.
        make_stream: Makes the stream of the training loaders; takes the arguments of `BatchStream`.
        apart: Opens the context in which fit requests validation loaders before training.
        keeps_generators: Whether generators of the validation loaders are restored after a validation.
        prepare: Called with a stage and its loaders, as the user passed or made them; returns those to read.
        opened: Called with the loaders of an evaluation that were requested.
        counts_all_ranks: Whether the interval between two validations counts the batches of all ranks.
        counted_batches: Batches of an epoch that have data, per rank, where they are so counted.
        pins: Whether training batches are pinned, so that copies to a device overlap with its work.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._module: nn.Module | None = None
        self._datamodule: DataModule | None = None
        self._given: dict[str, Loaders] = {}
        self._has_warned = False
        self.train: Loaders = None
        self.eval: dict[str, EvalLoader] = {}
        self._sizes: dict[str, list[int | float]] = {}
        self.epoch_of_validation = -1
        self.waits_for_validation = False
        self.interval_batches: int | float = math.inf
        self.interval_s: float | None = None
        self.shard: Shard | None = None
        self.agree: Callable[[int], int] | None = None
        self.evaluation: dict[str, Callable[[Loaders], Any]] = {}  # Any: by key
        self.make_stream: Callable[..., BatchStream] = BatchStream
        self.apart: Callable[[], AbstractContextManager[object]] = _kept_rng
        self.keeps_generators = True
        self.prepare: Callable[[str, Loaders], Loaders] = _as_given
        self.opened: Callable[[EvalLoader], None] = _leave
        self.pins = False
        self.counts_all_ranks = False
        self.counted_batches: int | float = math.inf

    def __getstate__(self) -> dict[str, object]:
        """Drop what belongs to a run; the numbers of batches of its loaders are kept."""
        sizes = {**self._sizes, **{stage: list(data.limits) for stage, data in self.eval.items()}}
        left_out = {"_module": None, "_datamodule": None, "shard": None, "agree": None, "prepare": _as_given}
        return {**self.__dict__, **left_out, "_given": {}, "eval": {}, "evaluation": {}, "_sizes": sizes}

    def begin(self, module: nn.Module, datamodule: DataModule | None, given: dict[str, Loaders]) -> None:
        """Forget the loaders of an earlier run; their numbers of batches are kept until the stage runs again."""
        self._sizes.update((stage, list(data.limits)) for stage, data in self.eval.items())
        for stage in given:
            self._sizes.pop(stage, None)
        self._module, self._datamodule, self._given = module, datamodule, given
        self.train, self.eval, self.prepare = None, {}, _as_given
        self.epoch_of_validation = -1
        self.waits_for_validation = False

    @property
    def given(self) -> dict[str, Loaders]:
        """The loaders that were passed to the verb, by stage; None without one."""
        return self._given

    def hook(self, stage: str) -> Callable[[], Loaders] | None:
        """Return the data module's or the module's loader hook, None where neither defines it."""
        name = LOADER_OF[stage]
        if self._datamodule is not None:
            found = find_override(self._datamodule, name, DATA_BASES)
            if found is not None:
                return found
        return find_override(self._module, name, MODULE_BASES)

    def require(self, stage: str, verb: str) -> None:
        """Refuse a verb without data.

        Raises:
            ModuleError: No loader is given.
        """
        if self._given.get(stage) is None and self.hook(stage) is None:
            name = LOADER_OF[stage]
            raise ModuleError(
                f"trainer.{verb} has no data: no loader was passed, and neither a data module nor "
                f"{type(self._module).__name__} defines {name}().",
                fix=f"pass a loader to trainer.{verb}, or define {name}.",
            )

    def _ask(self, stage: str) -> Loaders:
        given = self._given.get(stage)
        if given is None:
            hook = self.hook(stage)
            given = hook() if hook is not None else None
        if given is None:
            raise ModuleError(
                f"{LOADER_OF[stage]}() returned None.", fix="return a DataLoader or another iterable of batches."
            )
        _warn_of_samples(given, stage)
        return self.prepare(stage, given)

    def open_training(self) -> BatchStream:
        """Request the training loaders and return them as one stream; determines the validation interval."""
        loader = self._ask("train")
        if self._arguments.overfit_batches:
            loader = without_shuffle(loader, "training")
        self.train = loader
        name = "overfit_batches" if self._arguments.overfit_batches else "limit_train_batches"
        stream = self.make_stream(
            loader, self._arguments.limit_train_batches, name=name, shard=self.shard, agree=self.agree
        )  # fmt: skip
        if self.pins:
            stream.pin_batches()
        if self.counts_all_ranks:
            length = find_length(loader)
            self._settle_interval(math.inf if length is None else length)
            size = 1 if self.shard is None else self.shard.size
            self.interval_batches /= size
            self.counted_batches = math.inf if length is None else length / size
        else:
            self._settle_interval(stream.num_batches)
        return stream

    def _settle_interval(self, num_batches: int | float) -> None:
        interval = self._arguments.val_check_interval
        self.interval_s, self.interval_batches = None, math.inf
        if num_batches == 0:  # limit_train_batches=0: no training, so nothing to count
            return
        if isinstance(interval, float):
            if interval == 1.0:
                self.interval_batches = num_batches
            elif math.isinf(num_batches):
                raise ConfigError(
                    f"val_check_interval={interval} is a fraction of an epoch, and the training data has no length.",
                    fix="pass a number of batches, or 1.0.",
                )
            else:
                self.interval_batches = max(1, int(num_batches * interval))
        elif isinstance(interval, int):
            if self._arguments.check_val_every_n_epoch is not None and interval > num_batches and self.may_validate():
                raise ConfigError(
                    f"val_check_interval={interval} is more than the {num_batches} training batches of an epoch.",
                    fix="pass a smaller interval, or check_val_every_n_epoch=None to count across epochs.",
                )
            self.interval_batches = interval
        else:
            self.interval_s = seconds_of(cast(Any, interval))  # Any: checked by Arguments

    def may_validate(self) -> bool:
        """Whether fit can validate; logs once which half is missing."""
        if self._module is None or self._arguments.limit_val_batches == 0:
            return False
        has_step = find_override(self._module, "validation_step", MODULE_BASES) is not None
        has_loader = self._given.get("validation") is not None or self.hook("validation") is not None
        if has_step != has_loader and not self._has_warned:
            from .forward_loss import ForwardStep

            self._has_warned = True
            if isinstance(vars(self._module).get("validation_step"), ForwardStep):  # the user did not write it
                return has_step and has_loader
            missing = "validation_step" if has_loader else "loader to validate with"
            warn(f"validation is skipped: there is no {missing}")
        return has_step and has_loader

    def open_eval(self, stage: str) -> EvalLoader:
        """Return the loaders of an evaluation stage with their limits; requests them once."""
        if stage not in self.eval:
            name = f"limit_{LOADER_OF[stage].removesuffix('_dataloader')}_batches"
            limit = getattr(self._arguments, name)
            loaders = self._ask(stage)
            if stage == "validation" and self._arguments.overfit_batches:
                name = "overfit_batches"
                loaders = without_shuffle(loaders, stage)
            self.eval[stage] = make_eval_loader(
                loaders,
                limit,
                name=name,
                mode_error="trainer.predict" if stage == "predict" else None,
                **self.evaluation,
            )
            self.eval[stage].is_off = limit == 0
            self.opened(self.eval[stage])
        return self.eval[stage]

    def open_validation(self) -> EvalLoader | None:
        """Return the loaders to validate with inside fit, None where it does not validate."""
        if "validation" in self.eval or not self.may_validate():
            return self.eval.get("validation")
        with self.apart():  # a random split, for instance, must not advance the generators of training
            return self.open_eval("validation")

    def drop_validation(self) -> None:
        """Request the validation loaders again at the next validation."""
        self.shut_down()
        self.eval.pop("validation", None)

    def shut_down(self) -> None:
        """End persistent workers: if the garbage collector found them, they would take seconds to end."""
        for data in self.eval.values():
            for loader in data.loaders:
                if hasattr(loader, "shut_down"):
                    loader.shut_down()

    def open_sanity(self) -> EvalLoader | None:
        """Return the validation loaders cut to `num_sanity_val_steps`; None where there is no sanity check."""
        count = cast(int, self._arguments.num_sanity_val_steps)
        data = self.open_validation() if count else None
        if data is None:
            return None
        for loader in data.loaders:
            if isinstance(loader, ReadOnce):
                raise loader.error("and the check before training (num_sanity_val_steps) would read from it")
        limit = math.inf if count == -1 else count
        return replace(data, limits=[min(limit, n) for n in data.limits])

    def capture_generators(self) -> StateDict:
        """Return the states of generators that the validation loaders hold in their attributes, by path."""
        return capture_generators(self._generators()) if self.keeps_generators else {}

    def restore_generators(self, states: StateDict) -> None:
        """Restore the states that `capture_generators` returned."""
        restore_generators(self._generators(), states)

    def restore_shared_generators(self, states: StateDict) -> None:
        """Restore those that the training loaders hold, too: a validation must not change the order of training.

        Args:
            states: What `capture_generators` returned before the validation.
        """
        if states:
            restore_generators(self._shared_generators(), states)

    @contextmanager
    def before_validation(self, states: StateDict) -> Iterator[None]:
        """Return a context in which the generators that both hold are as before the current validation."""
        shared = self._shared_generators() if states else {}
        now = capture_generators(shared)
        restore_generators(shared, states)
        yield
        restore_generators(shared, now)

    def _shared_generators(self) -> dict[str, object]:
        trained = {id(one) for one in find_generators(train=self.train).values()}
        return {path: one for path, one in self._generators().items() if id(one) in trained}

    def _generators(self) -> dict[str, object]:
        data = self.eval.get("validation")
        return find_generators(**{f"loader{i}": one for i, one in enumerate(data.loaders)}) if data is not None else {}

    def original(self, stage: str) -> Loaders:
        """Return the loaders of an evaluation stage as the user passed them, None before they were asked for."""
        data = self.eval.get(stage)
        return data.original if data is not None else None

    def num_batches(self, stage: str) -> list[int | float]:
        """Return the batches of each loader of an evaluation stage."""
        data = self.eval.get(stage)
        return list(data.limits if data is not None else self._sizes.get(stage, ()))


def _as_given(stage: str, loaders: Loaders) -> Loaders:
    return loaders


def _leave(data: EvalLoader) -> None:
    """Begin to read when the evaluation does."""


@contextmanager
def _kept_rng() -> Iterator[None]:
    """Restore the global generators after a block."""
    rng = capture_rng()
    yield
    restore_rng(rng)
