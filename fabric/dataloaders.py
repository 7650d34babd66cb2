"""What `Fabric.setup_dataloaders` hands out: a loader that gives each process its share, on its device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..data.combined import CombinedLoader
from ..data.limit import find_length
from ..data.move import move_to_device
from ..data.rng import capture_rng, restore_rng
from ..data.sources.base import announce_epoch
from ..data.stream import BatchStream
from ..data.tree import is_collection
from ..errors import ConfigError, DataError, ModuleError, nearest

if TYPE_CHECKING:
    from ..data.distributed.shard import Shard
    from .fabric import Fabric

__all__ = ["UNEVEN", "EvaluationPass", "FabricDataLoader", "gather_samples"]

# Any in this file: loaders, batches, and results of any kind.

log = logging.getLogger(__name__)

UNEVEN = ("stop_all", "cycle", "keep")
_DATA, _END = "data", "end"


class FabricDataLoader:
    """A loader whose batches are distributed over the processes and moved to the device.

    Where gradients are computed, a pass over it is one of training: all processes get equally many batches. Where they
    are not (within `torch.no_grad` or `torch.inference_mode`), it is one of evaluation: every batch is given once, to
    one process, and some processes may get one batch less. `uneven` of `setup_dataloaders` chooses one for good.

    It is `Stateful`: `fabric.save(path, {"loader": loader, ...})` within a training pass, and `fabric.load`, let the
    next pass continue after the batches that were given, in the same order of samples. Call `state_dict` on all ranks.

    Everything else is the user's loader's.

    Args:
        fabric: The machine.
        loader: The user's loader, which is left alone.
        is_dealt: Whether the batches are distributed; False gives every process all of its own loader.
        moves: Whether batches are moved to the device.
        uneven: One of "stop_all", "cycle" and "keep"; None decides for each pass.

    Attributes:
        loader: The user's loader.
    """

    def __init__(self, fabric: Fabric, loader: object, *, is_dealt: bool, moves: bool, uneven: str | None) -> None:
        if uneven is not None and uneven not in UNEVEN:
            raise ConfigError(
                f"Fabric.setup_dataloaders was given uneven={uneven!r}{nearest(str(uneven), UNEVEN)}.",
                fix=f"pass one of {', '.join(map(repr, UNEVEN))}, or None.",
            )
        # A dict or list of loaders: the shorter ones begin again until the longest ends.
        self.loader = CombinedLoader(loader, mode="max_size_cycle") if is_collection(loader) else loader
        self._fabric = fabric
        self._moves = moves
        self._uneven = uneven
        self._shard = _shard_of(fabric, loader, is_dealt, uneven)
        agree = None if self._shard is None else _agreement(fabric, self._shard)
        self._stream = BatchStream(self.loader, shard=self._shard, agree=agree)
        self._num_passes = 0
        self._current: object = None

    @property
    def device(self) -> torch.device | None:
        """Where batches go; None leaves them where they are."""
        return self._fabric.device if self._moves else None

    def __len__(self) -> int:
        count = find_length(self.loader)
        if count is None:
            raise TypeError(f"{type(self.loader).__name__} does not say how many batches it has")
        shard = self._shard
        if shard is None or not self._stream.is_sharded:
            return count
        if self._is_evaluation():
            return len(range(shard.rank, count, shard.size))
        return shard.count_global_batches(count)

    def __iter__(self) -> Iterator[Any]:
        return self._evaluation() if self._is_evaluation() else self._training()

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"FabricDataLoader({self.loader!r})"

    # -- training ------------------------------------------------------------------------------------------------

    def _training(self) -> Iterator[object]:
        fabric, stream, moves = self._fabric, self._stream, self._moves
        previous = fabric._reader
        mark = self._current = object()
        self._open()
        try:
            # With several processes, whether all of them have a batch is synchronized where it cannot be known.
            more = stream.has_next if self._shard is None else lambda: bool(stream.remaining(1))
            while more():
                fabric._reader = self
                batch = stream.next_batch()
                if self._shard is not None and type(batch).__name__ == "NoBatch":
                    raise DataError(
                        f"{type(self.loader).__name__} gives no batches on rank {fabric.global_rank}, but on others.",
                        fix="give every rank some data, or pass uneven='stop_all'.",
                    )
                yield fabric.to_device(batch) if moves else batch
                if self._current is not mark:
                    raise DataError(
                        f"a second pass over {self!r} began while the first was under way.",
                        fix="finish one pass before the next, or set up two loaders.",
                    )
        finally:
            fabric._reader = previous
            if self._current is mark:
                self._current = None
                stream.close()

    def _open(self) -> None:
        if self._stream.epoch is not None:  # a pass that was under way when its state was saved goes on
            rng = capture_rng()
            self._stream.reopen()
            restore_rng(rng)
            return
        epoch, self._num_passes = self._num_passes, self._num_passes + 1
        topology = self._fabric.strategy.topology
        if self._shard is None and topology.data_size == topology.world_size:
            self._stream.open(epoch)
            return
        from ..data.distributed.indexed import drawn_alike

        # Every process's sampler draws the same order, from rank 0's generators.
        shared: dict[str, Any] = self._fabric.strategy.broadcast(capture_rng())
        with drawn_alike(topology.global_rank, topology.data_rank, shared):
            self._stream.open(epoch, shared)

    def batches_left(self, upto: int) -> int:
        """Return how many batches of a training pass come after the one that was given last, at most `upto`.

        For an iterable of unknown length: 0 at its end, else `upto`. Call it on all ranks.
        """
        if self._current is None:
            return 0
        return self._stream.remaining(upto)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what finding it again needs; call it on all ranks."""
        state = self._stream.state_dict()
        if self._shard is not None and state.get("is_per_rank"):
            from ..data.distributed.shard import merge_states

            state = merge_states(self._fabric.strategy.gather_objects(state))
        return {"num_passes": self._num_passes, "stream": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned: the next training pass continues there.

        Raises:
            DataError: The state belongs to other data.
        """
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
        from ..data.distributed.evaluation import shard_eval

        strategy, count = fabric.strategy, self._count()
        if strategy.shards_parameters and not strategy.helps_in_evaluation and (count is None or count < shard.size):
            raise DataError(
                f"{'an unknown number of' if count is None else count} batches may leave some of {shard.size} "
                f"processes without one, and under {type(strategy).__name__} a process that never had one cannot take "
                "part in the others' steps.",
                fix="evaluate on at least as many batches as there are processes, or pass uneven='stop_all'.",
            )
        previous = fabric._evaluation
        current = fabric._evaluation = EvaluationPass(shard.size, self._count())
        try:
            for batch in _batches_of(shard_eval(self.loader, shard, share=fabric.strategy.broadcast)):
                current.num_batches += 1
                yield fabric.to_device(batch) if self._moves else batch
            if fabric.strategy.shards_parameters and current.lacks_a_batch():
                fabric.strategy.evaluate_without_data(None)
            current.finish(fabric)
        except GeneratorExit:
            # Left by `break`: others may have no batch in this round, and wait for us.
            if current.num_gathers and current.is_in_last_round(shard.rank):
                current.finish(fabric)
            raise
        finally:
            fabric._evaluation = previous

    def _count(self) -> int | None:
        """Return how many batches all processes have together, where they are distributed; None if unknown."""
        return find_length(self.loader) if self._stream.is_sharded else None


def _batches_of(loader: Any) -> Iterator[object]:
    """Return the batches of a loader; a collection of loaders says which they are, too."""
    return (batch for batch, _, _ in loader) if isinstance(loader, CombinedLoader) else iter(loader)


def _shard_of(fabric: Fabric, loader: object, is_dealt: bool, uneven: str | None) -> Shard | None:
    topology = fabric.strategy.topology
    if topology.data_size == 1:
        return None
    from ..data.distributed.shard import Shard

    policy = uneven if uneven is not None else fabric.strategy.uneven
    if policy == "zero_weight":
        raise ConfigError(
            "uneven='zero_weight' needs a loop that makes steps without a batch, which Trainer has and a loop of your "
            "own does not.",
            fix="pass uneven='stop_all' or 'cycle' to the strategy, or to setup_dataloaders.",
        )
    policy = "stop_all" if policy == "keep" else policy
    return Shard(topology.data_rank, topology.data_size, policy, splits=is_dealt)


def _agreement(fabric: Fabric, shard: Shard) -> Any:
    choose = min if shard.uneven == "stop_all" else max
    return lambda number: choose(fabric.strategy.gather_objects(number))


class EvaluationPass:
    """One evaluation, in which a process that has no batch left answers the others until they have none either.

    Batches are not padded, so in the last round some processes have none. If the loop gathers in each round, the others
    would wait for these forever.

    Args:
        size: Number of processes.
        count: Batches of all processes together; None if unknown.

    Attributes:
        num_batches: Batches that this process got.
        num_gathers: How often `gather_for_metrics` was called.
    """

    def __init__(self, size: int, count: int | None) -> None:
        self._size, self._count = size, count
        self.num_batches = self.num_gathers = 0

    def is_in_last_round(self, rank: int) -> bool:
        """Return whether this process has its last batch, and others had none in this round or may have had none."""
        if self._count is None:
            return True
        return bool(self._count % self._size) and (self.num_batches - 1) * self._size + rank >= (
            self._count // self._size * self._size
        )

    def lacks_a_batch(self) -> bool:
        """Return whether other processes have one batch more than this one."""
        return self._count is not None and self.num_batches < -(-self._count // self._size)

    def finish(self, fabric: Fabric) -> None:
        """Answer the other processes' `gather_for_metrics` with nothing, until they have no batch left either."""
        count = self._count
        if count is not None and (not count % self._size or (count > self._size and not self.num_gathers)):
            return  # all have ended, or no process gathers; every process sees this in the same way
        while any(kind != _END for kind, _ in fabric.strategy.gather_objects((_END, None))):
            pass


# -- results ---------------------------------------------------------------------------------------------------------


def gather_samples(fabric: Fabric, data: object) -> object:
    """Return what all processes have, in the order of ranks; see `Fabric.gather_for_metrics`."""
    if fabric._evaluation is not None:
        fabric._evaluation.num_gathers += 1
    everywhere = fabric.strategy.gather_objects((_DATA, move_to_device(data, torch.device("cpu"))))
    parts = [part for kind, part in everywhere if kind == _DATA and part is not None]
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
                f"gather_for_metrics was given lists of tensors of different lengths over the ranks: {lengths}.",
                fix="join each list to one tensor first, with torch.cat.",
            )
        merged = [_merge(list(items)) for items in zip(*parts, strict=True)]
        return type(first)(*merged) if hasattr(first, "_fields") else type(first)(merged)
    return list(parts)


def _has_tensor(data: object) -> bool:
    if isinstance(data, dict):
        return any(map(_has_tensor, data.values()))
    if isinstance(data, (list, tuple)):
        return any(map(_has_tensor, data))
    return isinstance(data, torch.Tensor)
