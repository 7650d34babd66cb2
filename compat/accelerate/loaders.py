"""What `prepare` makes of loaders: batches of each process by Accelerate's rules, read one ahead."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ...errors import ConfigError
from .configuration import DataLoaderConfiguration
from .finder import refuse
from .operations import concatenate, find_batch_size, send_to_device, slice_tensors
from .processes import synchronize_rng_states
from .state import GradientState, PartialState

# Any in this file: loaders, samplers, data sets and batches of the program's classes.


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order follows from a seed and the epoch.

    Args:
        data_seed: The seed; None is that of torch's generator.
        args, kwargs: Those of `RandomSampler`.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The batches of one process.

    Of `num_processes` batches each process gets one; with `split_batches` each gets its part of every batch. With
    `even_batches` the last ones are completed with samples from the beginning, so that all processes have as many
    batches of one size; with `drop_last` they are left out.

    Args:
        batch_sampler: Yields lists of indices, in the same order on all processes.
        num_processes: Number of processes.
        process_index: Rank of this process.
        split_batches: See above.
        even_batches: See above.
    """

    def __init__(
        self, batch_sampler: Any, num_processes: int = 1, process_index: int = 0, split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:  # fmt: skip
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            _require_multiple(self.batch_size, num_processes)

    @property
    def total_length(self) -> int:
        """Number of batches of all processes."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        total = self.total_length
        if self.split_batches or total % self.num_processes == 0:
            return total if self.split_batches else total // self.num_processes
        has_more = not self.drop_last and (self.even_batches or self.process_index < total % self.num_processes)
        return total // self.num_processes + has_more

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts() if self.split_batches else self._whole()

    def _parts(self) -> Iterator[list[Any]]:
        size = self.batch_size // self.num_processes
        mine = slice(size * self.process_index, size * (self.process_index + 1))
        first: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) < self.batch_size and self.drop_last:
                continue
            if len(batch) < self.batch_size and self.even_batches:
                batch = (batch + first * math.ceil(self.batch_size / len(first)))[: self.batch_size]
            if batch[mine]:
                yield batch[mine]

    def _whole(self) -> Iterator[list[Any]]:
        # Of a group of batches, each process yields its own when the group is known to be complete.
        batches = iter(self.batch_sampler)
        first: list[list[Any]] = []
        while group := list(islice(batches, self.num_processes)):
            first = first or group
            is_complete = len(group) == self.num_processes
            if self.batch_size is not None:
                is_complete = is_complete and len(group[-1]) == self.batch_size
            if not is_complete and self.drop_last:
                return
            if not is_complete and self.even_batches:
                group = self._completed(group, first)
            if self.process_index < len(group):
                yield group[self.process_index]

    def _completed(self, group: list[list[Any]], first: list[list[Any]]) -> list[list[Any]]:
        """Return a group of full batches, with those of the first group after the last ones."""
        if self.batch_size is None:  # batches of any size
            return (group + first * self.num_processes)[: self.num_processes]
        samples, more = ([index for batch in batches for index in batch] for batches in (group, first))
        needed = self.num_processes * self.batch_size
        samples += more * math.ceil(needed / len(more))
        return [samples[start : start + self.batch_size] for start in range(0, needed, self.batch_size)]


class SkipBatchSampler(BatchSampler):
    """The batches of a batch sampler after the first ones.

    Args:
        batch_sampler: The batch sampler.
        skip_batches: Number of batches to leave out.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches

    def __getattr__(self, name: str) -> Any:
        if name in ("batch_sampler", "sampler", "set_epoch"):
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class DataLoaderShard:
    """A loader of one process's batches, on its device. Everything else is delegated to the loader.

    It reads one batch ahead, and so knows the last one.

    Args:
        loader: A DataLoader that yields this process's batches.
        device: Device of the batches; None leaves them where they are.
        generator: Is synchronized over processes at the beginning of a pass.
        rng_types: Which generators are synchronized.
        skip_batches: Number of batches to read without yielding them.
        epoch: Number of the next pass.
        non_blocking: Whether copies to the device are asynchronous.

    Attributes:
        end_of_dataloader: Whether the loop has the last batch.
        remainder: See `GradientState`.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device | None = None, generator: torch.Generator | None = None,
        rng_types: list[Any] | None = None, skip_batches: int = 0, epoch: int = 0, non_blocking: bool = False,
    ) -> None:  # fmt: skip
        self.loader = self.base_dataloader = loader
        self.device, self.non_blocking = device, non_blocking
        self.synchronized_generator, self.rng_types = generator, rng_types or []
        self.skip_batches, self.iteration = skip_batches, epoch
        self.end_of_dataloader, self.remainder = False, -1
        self.gradient_state = GradientState()

    @property  # type: ignore[misc]  # typeshed's __class__ can be assigned; isinstance() reads this one
    def __class__(self) -> Any:
        return type(self.loader)

    def __iter__(self) -> Iterator[Any]:
        synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self._begin()
        yield from islice(self._batches(), self.skip_batches, None)
        # Not after `break`: as with Accelerate, the loader stays the active one until a pass over it ends.
        self.gradient_state.leave(self)
        self.iteration += 1

    def _begin(self) -> None:
        self.end_of_dataloader, self.remainder = False, -1
        size = self.total_batch_size
        if not self.loader.drop_last and size and hasattr(self.dataset, "__len__"):
            self.remainder = self.total_dataset_length % size
        self.gradient_state.enter(self)
        self.set_epoch(self.iteration)

    def _batches(self) -> Iterator[Any]:
        batches = iter(self.loader)
        for batch in batches:
            while True:
                if self.device is not None:
                    batch = send_to_device(batch, self.device, self.non_blocking)
                following = next(batches, batches)
                self.end_of_dataloader = is_last = following is batches
                yield batch
                if is_last:  # a pass within this one sets the attribute, too
                    return
                batch = following

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, also in the samplers or the data set."""
        self.iteration = epoch
        batches: Any = self.loader.batch_sampler
        inner = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
        others = [] if hasattr(inner, "set_epoch") else [self.dataset]
        for one in [batches, getattr(batches, "sampler", None), inner, *others]:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples of a batch over all processes; None if batches have no size."""
        sampler, size = _batch_sampler(self.loader), _batch_size(self.loader)
        is_split = getattr(sampler, "split_batches", False)
        return size if size is None or is_split else size * getattr(sampler, "num_processes", 1)

    @property
    def total_dataset_length(self) -> int:
        """Number of samples over all processes."""
        return int(getattr(self.dataset, "total_length", None) or len(self.dataset))

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self.loader.dataset

    def skipping(self, num_batches: int) -> DataLoaderShard:
        """Return the loader without the first batches of its pass."""
        other = copy.copy(self)
        if isinstance(self.dataset, IterableDataset):
            other.skip_batches = num_batches
        else:
            other.loader = other.base_dataloader = _skipping(self.loader, num_batches)
        return other

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class DataLoaderDispatcher(DataLoaderShard):
    """A loader that rank 0 reads; each process gets its part of a batch of rank 0.

    Args:
        args: Those of `DataLoaderShard`.
        split_batches: Whether a batch of the loader is cut into parts; else one for each process is read.
        slice_fn: Cuts a batch; None is `slice_tensors`.
        kwargs: Those of `DataLoaderShard`.
    """

    def __init__(self, *args: Any, split_batches: bool = False, slice_fn: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.split_batches, self.slice_fn, self.state = split_batches, slice_fn or slice_tensors, PartialState()

    def __len__(self) -> int:
        total = len(self.loader) / (1 if self.split_batches else self.state.num_processes)
        return math.floor(total) if self.loader.drop_last else math.ceil(total)

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples of a batch over all processes; None if it has no size."""
        size = _batch_size(self.loader)
        return size if size is None or self.split_batches else size * self.state.num_processes

    def _batches(self) -> Iterator[Any]:
        size, rank = self.state.num_processes, self.state.process_index
        batches = iter(self.loader)  # on all ranks: it draws from their generators
        first, batch = None, self._next(batches)
        while batch is not None:
            if self.device is not None:
                batch = send_to_device(batch, self.device, self.non_blocking)
            if first is None:
                first = self.slice_fn(batch, slice(0, size), process_index=rank, num_processes=size)
            following = self._next(batches)
            found = find_batch_size(batch) or 0
            self.end_of_dataloader = following is None
            if self.end_of_dataloader:
                self.remainder = found
            share = found // size
            if self.end_of_dataloader and found % size and not self.loader.drop_last:
                batch, share = concatenate([batch, first]), share + 1
            mine = slice(rank * share, (rank + 1) * share)
            yield self.slice_fn(batch, mine, process_index=rank, num_processes=size)
            batch = following

    def _next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch of all processes; None after the last one."""
        group: list[Any] = []
        if self.state.process_index == 0:
            wanted = 1 if self.split_batches else self.state.num_processes
            group = list(islice(batches, wanted))
            is_short = len(group) < wanted and self.loader.drop_last
            group = [] if is_short or not group else [concatenate(group)]
        group = self.state.fabric.broadcast(group)
        return group[0] if group else None


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    *,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    slice_fn_for_dispatch: Any = None,
    **options: Any,
) -> DataLoaderShard:
    """Return a loader that yields this process's share of the batches.

    Args:
        dataloader: A DataLoader; the user's object stays as it is.
        device: Device of the batches.
        num_processes: Number of processes; None is that of the program.
        process_index: Rank of this process; None is that of the program.
        put_on_device: Whether batches are moved to the device.
        rng_types: Generators to synchronize at the beginning of a pass.
        slice_fn_for_dispatch: Cuts the batches that rank 0 reads.
        options: Fields of `DataLoaderConfiguration`.
    """
    state, config = PartialState(), DataLoaderConfiguration(**options)
    size = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    if config.use_stateful_dataloader:
        refuse("use_stateful_dataloader=True", "use accelerator.skip_first_batches(), or lw.Fabric().setup_dataloaders")
    is_iterable = isinstance(dataloader.dataset, IterableDataset)
    is_dispatched = is_iterable and put_on_device if config.dispatch_batches is None else config.dispatch_batches
    if config.split_batches:
        _require_multiple(_batch_size(dataloader), size)
    loader, generator = copy.copy(dataloader), None
    if config.use_seedable_sampler and not is_iterable:
        loader = _seedable(loader, config.data_seed)
    if is_dispatched:
        vars(loader)["generator"] = None
    elif size > 1 and is_iterable:
        refuse("an IterableDataset with dispatch_batches=False on several processes", "leave dispatch_batches at None")
    elif size > 1:
        sampler: Any = getattr(_batch_sampler(loader), "sampler", None)
        if not config.use_seedable_sampler and hasattr(sampler, "generator"):
            if sampler.generator is None:
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            generator = sampler.generator
        batches = BatchSamplerShard(_batch_sampler(loader), size, rank, config.split_batches, config.even_batches)
        loader = _with_batches(loader, batches)
    kinds = [kind for kind in rng_types or ["generator"] if str(kind) != "generator" or generator is not None]
    arguments: Any = (loader, device if put_on_device else None, generator, kinds, 0, 0, config.non_blocking)
    if is_dispatched:
        return DataLoaderDispatcher(*arguments, split_batches=config.split_batches, slice_fn=slice_fn_for_dispatch)
    return DataLoaderShard(*arguments)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return the loader without the first batches of its next pass.

    Args:
        dataloader: A prepared or other DataLoader.
        num_batches: Number of batches of this process.
    """
    if isinstance(dataloader, DataLoaderShard):
        return dataloader.skipping(num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        return DataLoaderShard(dataloader, skip_batches=num_batches)
    return _skipping(dataloader, num_batches)


def _require_multiple(batch_size: int | None, num_processes: int) -> None:
    if batch_size is None or (batch_size > 1 and batch_size % num_processes):
        raise ConfigError(
            f"Expected a batch size that divides by {num_processes} processes with split_batches=True, got "
            f"{batch_size}.",
            fix="change the batch size of the loader or of its batch sampler, or leave split_batches out.",
        )


def _batch_sampler(loader: Any) -> Any:
    """Return what yields lists of indices; None for an iterable data set or a loader without batches."""
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def _batch_size(loader: Any) -> int | None:
    """Return the number of samples in a batch; None if batches have no size."""
    sampler = _batch_sampler(loader)  # its length, and so its truth, may not exist
    return getattr(loader if sampler is None else sampler, "batch_size", None)


def _with_batches(loader: Any, batches: BatchSampler) -> Any:
    """Return a copy of the loader that reads other batches; torch allows no assignment."""
    other = copy.copy(loader)
    vars(other)["sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"] = batches
    return other


def _skipping(loader: Any, num_batches: int) -> Any:
    return _with_batches(loader, SkipBatchSampler(_batch_sampler(loader), num_batches))


def _seedable(loader: Any, data_seed: int | None) -> Any:
    """Return the loader with a `SeedableRandomSampler` in place of torch's."""
    batches = _batch_sampler(loader)
    sampler = getattr(batches, "sampler", None)
    if not isinstance(sampler, RandomSampler):
        return loader
    batches = copy.copy(batches)
    is_whole = sampler.num_samples == len(sampler.data_source)
    batches.sampler = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, None if is_whole else sampler.num_samples, sampler.generator,
        data_seed=data_seed,
    )  # fmt: skip
    return _with_batches(loader, batches)
