"""Loader returned by `Fabric.setup_dataloaders`: yields each process's shard of the batches, on its device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from ..data.combined import CombinedLoader
from ..data.distributed.evaluation import count_eval_rounds, shard_eval
from ..data.distributed.indexed import shared_rng
from ..data.distributed.shard import Shard, merge_states
from ..data.gather import gathering
from ..data.move import move_to_device
from ..data.rng import capture_rng, restore_rng
from ..data.sources.base import announce_epoch
from ..data.sources.stateful import is_stateful
from ..data.stream import BatchStream
from ..data.tree import is_collection
from ..errors import ConfigError, DataError, ModuleError, nearest
from ..protocols import StateDict, Tree
from ..strategies.optional import evaluation_of

if TYPE_CHECKING:
    from .fabric import Fabric

# Any in this file: loaders, batches, and results of any kind.

log = logging.getLogger(__name__)

UNEVEN = ("stop_all", "cycle", "keep")
_DATA, _END = "data", "end"


class FabricDataLoader:
    """A loader whose batches are distributed over the processes and moved to the device.

    With gradients enabled, a pass is a training pass: all processes get the same number of batches. With gradients
    disabled (in `torch.no_grad` or `torch.inference_mode`), it is an evaluation pass: each batch is yielded once, on
    one process, and some processes may get one batch fewer. Passing `uneven` to `setup_dataloaders` selects one for all
    passes.

    It is `Stateful`: after `fabric.save(path, {"loader": loader, ...})` within a training pass and `fabric.load`, the
    next pass continues after the batches already yielded, in the same order of samples. Call `state_dict` on all ranks.

    Everything else is delegated to the user's loader.

    Args:
        fabric: The Fabric that set it up.
        loader: The user's loader; it is not modified.
        is_dealt: Whether the batches are sharded over processes; with False, every process reads its complete loader.
        moves: Whether batches are moved to the device.
        uneven: One of "stop_all", "cycle" and "keep"; None decides for each pass.

    Attributes:
        loader: The user's loader.
    """

    def __init__(self, fabric: Fabric, loader: object, *, is_dealt: bool, moves: bool, uneven: str | None) -> None:
        if uneven is not None and uneven not in UNEVEN:
            raise ConfigError(
                "Expected a valid value of uneven for Fabric.setup_dataloaders, got "
                f"uneven={uneven!r}{nearest(str(uneven), UNEVEN)}.",
                fix=f"pass one of {', '.join(map(repr, UNEVEN))}, or None.",
            )
        # A dict or list of loaders: the shorter ones restart until the longest ends.
        self.loader = CombinedLoader(loader, mode="max_size_cycle") if is_collection(loader) else loader
        self._fabric = fabric
        self._moves = moves
        self._uneven = uneven
        self._shard = _shard_of(fabric, loader, is_dealt, uneven)
        agree = None if self._shard is None else _agreement(fabric, self._shard)
        self._stream = BatchStream(self.loader, shard=self._shard, agree=agree)
        self._num_passes = 0
        self._current: object = None
        # Whether the next or current training pass continues where a state of the user's loader was taken.
        self._has_own_state = False

    @property
    def device(self) -> torch.device | None:
        """Device of the batches; None if they are not moved."""
        return self._fabric.device if self._moves else None

    def __len__(self) -> int:
        count = count_eval_rounds(self.loader)
        if count is None:
            raise TypeError(f"{type(self.loader).__name__} has no known number of batches")
        shard = self._shard
        if shard is None or not self._stream.is_sharded:
            return count
        if self._is_evaluation():
            return len(range(shard.rank, count, shard.size))
        return shard.count_global_batches(count)

    def __iter__(self) -> Iterator[Any]:
        if self._is_evaluation():
            return self._evaluation()
        return self._rest_of_pass() if self._has_own_state else self._training()

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"FabricDataLoader({self.loader!r})"

    # -- training ------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether batches are distributed over processes; else each process reads its complete loader."""
        return self._stream.is_sharded

    def _plain_pass(self) -> Iterator[Any]:
        """Iterate over the user's loader as a plain loop does."""
        loader: Any = self.loader
        for batch in loader:
            yield self._fabric.to_device(batch) if self._moves else batch

    def _rest_of_pass(self) -> Iterator[Any]:
        yield from self._plain_pass()
        self._has_own_state = False

    def _training(self) -> Iterator[object]:
        fabric, stream, moves = self._fabric, self._stream, self._moves
        previous = fabric._reader
        mark = self._current = object()
        if moves and fabric.device.type == "cuda":
            stream.pin_batches()
        self._open()
        try:
            # With several processes and unknown lengths, they synchronize whether each has a batch.
            more = stream.has_next if self._shard is None else lambda: bool(stream.remaining(1))
            while more():
                fabric._reader = self
                batch = stream.next_batch()
                if self._shard is not None and type(batch).__name__ == "NoBatch":
                    raise DataError(
                        f"Expected batches from {type(self.loader).__name__} on every rank, got none on rank "
                        f"{fabric.global_rank}.",
                        fix="provide data on every rank, or pass uneven='stop_all'.",
                    )
                yield fabric.to_device(batch) if moves else batch
                if self._current is not mark:
                    raise DataError(
                        f"Expected one pass at a time over {self!r}, got a second one before the first ended.",
                        fix="finish the first pass, or set up two loaders.",
                    )
        finally:
            fabric._reader = previous
            if self._current is mark:
                self._current = None
                stream.close()

    def _open(self) -> None:
        if self._stream.epoch is not None:  # continue the pass that was active when the state was saved
            rng = capture_rng()
            self._stream.reopen()
            restore_rng(rng)
            return
        epoch, self._num_passes = self._num_passes, self._num_passes + 1
        topology = self._fabric.strategy.topology
        if self._shard is None and topology.data_size == topology.world_size:
            self._stream.open(epoch)
            return
        # Every process's sampler draws the same order, using rank 0's random state.
        shared: StateDict = self._fabric.strategy.broadcast(capture_rng())
        # Copies of rank 0 that draw alike move their generators as it does.
        rank = 0 if self._fabric.strategy.traits.copies_draw_alike else topology.global_rank
        with shared_rng(rank, topology.data_rank, shared):
            self._stream.open(epoch, shared)

    def batches_left(self, upto: int) -> int:
        """Return the number of batches left in a training pass, at most `upto`.

        For an iterable of unknown length: 0 at its end, else `upto`. Call it on all ranks.
        """
        if self._current is None:
            return 0
        return self._stream.remaining(upto)

    def state_dict(self) -> StateDict:
        """Return the position and the state needed to restore it. Call it on all ranks."""
        if self._has_own_state:
            own: StateDict = self.loader.state_dict()  # type: ignore[attr-defined]  # see `load_state_dict`
            return own
        state = self._stream.state_dict()
        if self._shard is not None and state.get("is_per_rank"):
            strategy = self._fabric.strategy
            state = merge_states(strategy.topology.reports(strategy.gather_objects(state)))
        return {"num_passes": self._num_passes, "stream": state}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state returned by `state_dict`; the next training pass continues there.

        A state of the user's loader itself, as Lightning Fabric saves it, is loaded by that loader.

        Raises:
            DataError: The state was saved with different data, or is that of a loader that saves its state.
        """
        self._has_own_state = not {"num_passes", "stream"} <= state_dict.keys()
        if self._has_own_state:
            if not is_stateful(self.loader):
                raise DataError(
                    f"Expected a state of FabricDataLoader, got the entries {sorted(map(str, state_dict))}, which "
                    f"{type(self.loader).__name__} cannot load.",
                    fix="set up the loader whose state was saved, with load_state_dict; or load without this entry.",
                )
            self.loader.load_state_dict(state_dict)
            return
        self._num_passes = state_dict["num_passes"]
        self._stream.load_state_dict(state_dict["stream"])

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _is_evaluation(self) -> bool:
        return self._uneven == "keep" if self._uneven is not None else not torch.is_grad_enabled()

    def _evaluation(self) -> Iterator[object]:
        fabric, shard = self._fabric, self._shard
        epoch, self._num_passes = self._num_passes, self._num_passes + 1
        announce_epoch(self.loader, epoch)
        if shard is None:
            for batch in _batches_of(self.loader):
                yield fabric.to_device(batch) if self._moves else batch
            return
        strategy, count = fabric.strategy, self._count()
        helper = evaluation_of(strategy)
        if helper is not None and not helper.helps_in_evaluation and (count is None or count < shard.size):
            raise DataError(
                f"Expected at least one batch for each of {shard.size} processes, which {type(strategy).__name__} "
                "requires for evaluation, got "
                f"{'an unknown number of batches' if count is None else f'{count} in total'}.",
                fix="evaluate on at least as many batches as there are processes, or pass uneven='stop_all'.",
            )
        previous = fabric._evaluation
        current = fabric._evaluation = EvaluationPass(shard.size, self._count())
        try:
            for batch in _batches_of(shard_eval(self.loader, shard, share=fabric.strategy.broadcast)):
                current.num_batches += 1
                yield fabric.to_device(batch) if self._moves else batch
            if helper is not None and current.lacks_a_batch():
                helper.evaluate_without_data(None)
            current.finish(fabric)
        except GeneratorExit:
            # Left by `break`: other processes may have no batch in this round and wait for this one.
            if current.num_gathers and current.is_in_last_round(shard.rank):
                current.finish(fabric)
            raise
        finally:
            fabric._evaluation = previous

    def _count(self) -> int | None:
        """Return the total number of batches over all processes if they are sharded; None if unknown."""
        return count_eval_rounds(self.loader) if self._stream.is_sharded else None


def _batches_of(loader: Any) -> Iterator[object]:
    """Return the batches of a loader, without the indices that a CombinedLoader adds."""
    return (batch for batch, _, _ in loader) if isinstance(loader, CombinedLoader) else iter(gathering(loader))


def _shard_of(fabric: Fabric, loader: object, is_dealt: bool, uneven: str | None) -> Shard | None:
    topology = fabric.strategy.topology
    if topology.data_size == 1:
        return None
    policy = uneven if uneven is not None else fabric.strategy.uneven
    if policy == "zero_weight":
        raise ConfigError(
            "uneven='zero_weight' cannot be used with Fabric loaders: it requires steps without a batch, which only "
            "Trainer runs.",
            fix="pass uneven='stop_all' or 'cycle' to the strategy, or to setup_dataloaders.",
        )
    policy = "stop_all" if policy == "keep" else policy
    return Shard(topology.data_rank, topology.data_size, policy, splits=is_dealt)


def _agreement(fabric: Fabric, shard: Shard) -> Any:
    choose = min if shard.uneven == "stop_all" else max
    return lambda number: choose(fabric.strategy.gather_objects(number))


class EvaluationPass:
    """One evaluation pass. A process without further batches takes part in the others' collectives until they end.

    Batches are not padded, so some processes may have none in the last round. If the loop gathers in each round, the
    other processes would wait for them forever.

    Args:
        size: Number of processes.
        count: Total number of batches over all processes; None if unknown.

    Attributes:
        num_batches: Number of batches that this process received.
        num_gathers: Number of calls of `gather_for_metrics`.
    """

    def __init__(self, size: int, count: int | None) -> None:
        self._size, self._count = size, count
        self.num_batches = self.num_gathers = 0

    def is_in_last_round(self, rank: int) -> bool:
        """Return whether this is a round in which other processes have, or may have, no batch."""
        if self._count is None:
            return True
        return bool(self._count % self._size) and (self.num_batches - 1) * self._size + rank >= (
            self._count // self._size * self._size
        )

    def lacks_a_batch(self) -> bool:
        """Return whether other processes have one more batch than this one."""
        return self._count is not None and self.num_batches < -(-self._count // self._size)

    def finish(self, fabric: Fabric) -> None:
        """Take part in the other processes' `gather_for_metrics` without data until all have ended."""
        count = self._count
        if count is not None and (not count % self._size or (count > self._size and not self.num_gathers)):
            return  # all have ended, or no process gathers; the condition is equal on all processes
        while any(kind != _END for kind, _ in fabric.strategy.gather_objects((_END, None))):
            pass


# -- results ---------------------------------------------------------------------------------------------------------


def gather_samples(fabric: Fabric, data: Tree) -> Any:
    """Return the data of all processes in rank order; see `Fabric.gather_for_metrics`."""
    if fabric._evaluation is not None:
        fabric._evaluation.num_gathers += 1
    everywhere = fabric.strategy.gather_objects((_DATA, move_to_device(data, torch.device("cpu"))))
    everywhere = fabric.strategy.topology.reports(everywhere)
    parts: list[Any] = []
    seen: set[int] = set()
    for kind, part in everywhere:
        if kind == _DATA and part is not None:
            # Processes with equal data have one object here; each gets its own, which the user may change.
            parts.append(deepcopy(part) if id(part) in seen else part)
            seen.add(id(part))
    return move_to_device(_merge(parts), fabric.device) if parts else None


def _merge(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.ndim else torch.stack(parts)
    if isinstance(first, dict):
        return {key: _merge([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        if not any(_has_tensor(part) for part in parts):
            joined = [item for part in parts for item in part]
            return tuple(joined) if isinstance(first, tuple) else joined
        lengths = sorted({len(part) for part in parts})
        if len(lengths) > 1:
            raise ModuleError(
                f"Expected lists of equal length on all ranks for gather_for_metrics, got lengths {lengths}.",
                fix="concatenate each list into one tensor first, with torch.cat.",
            )
        merged = [_merge(list(items)) for items in zip(*parts, strict=True)]
        return type(first)(*merged) if hasattr(first, "_fields") else type(first)(merged)
    return list(parts)


def _has_tensor(data: Tree) -> bool:
    if isinstance(data, dict):
        return any(map(_has_tensor, data.values()))
    if isinstance(data, (list, tuple)):
        return any(map(_has_tensor, data))
    return isinstance(data, torch.Tensor)
