"""`StatefulSource`: a loader that can save and restore its own position."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from typing import TypeGuard, cast

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from ...errors import DataError
from ...protocols import Batch, Loader, Loaders, StateDict, Stateful, StatefulLoader, Tree
from ..limit import find_length
from ..rng import RngStream, capture_rng, derive_key, is_same, restore_rng
from .base import Source

log = logging.getLogger(__name__)
_NOTHING: Batch = object()


def is_stateful(loader: Loaders) -> TypeGuard[StatefulLoader]:
    """Return whether the loader has `load_state_dict`, and a `state_dict` that can be called without arguments.

    Streaming data sets whose own loader counts for them (litdata, mosaicml-streaming) take the position as an argument.
    """
    state_dict = getattr(loader, "state_dict", None)
    if not callable(state_dict) or not callable(getattr(loader, "load_state_dict", None)):
        return False
    try:
        parameters = inspect.signature(state_dict).parameters.values()
    except ValueError:  # compiled code often has no signature
        return True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(one.default is not inspect.Parameter.empty or one.kind in variable for one in parameters)


def has_stateful_data(loader: Loaders) -> TypeGuard[DataLoader[Batch]]:
    """Return whether this is a DataLoader that reads, in this process, a streaming data set which saves its position.

    With workers, each of them has its own data set, whose position the loader does not know.
    """
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
        and not loader.num_workers
        and is_stateful(loader.dataset)
    )


class StatefulSource(Source):
    """A loader with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader.

    Its state is taken on demand, at the last batch that was given. One without a length is read one batch ahead,
    to know the end of the epoch; then its state is taken before each look, and it draws from random numbers of its
    own.

    A loader whose loaded state says that it is at the end of a pass may end the next pass at once, as the rest of that
    one, or begin a new pass: both are understood.

    A state that is the same after the first batch of a pass as after the second has no position. A resumed pass of such
    a loader begins with the state from before the pass, and reads the batches that were given again.

    Args:
        loader: The loader.
        keeper: Owner of the state; None is the loader itself. Iterating over the loader must continue where its loaded
            state was taken.
    """

    kind = "stateful"
    loader: Loader

    def __init__(self, loader: Loader, keeper: Stateful | None = None) -> None:
        super().__init__(loader)
        self._keeps_own_state = keeper is None
        self._keeper = cast(Stateful, loader) if keeper is None else keeper
        self._iterator: Iterator[Batch] = iter(())
        self._ahead: Batch = _NOTHING
        self._before_ahead: StateDict = {}
        self._stream: RngStream | None = None
        self._has_ended = False
        self._may_be_rest = False  # whether the pass may be the empty rest of one that had ended
        self._is_broken = False  # whether reading raised an error
        # Whether its state has a position; None: not known yet. That of a DataLoader (torchdata's) has, and asking for
        # it before a pass would start the workers.
        self._seeks = True if isinstance(self._keeper, DataLoader) else None
        self._opening: StateDict = {}  # before the pass, unless it seeks
        self._after_first: Tree = _NOTHING  # the loader's state after the first batch, until `_seeks` is known
        self._is_resumed = False

    @override
    def begin(self, epoch: int) -> None:
        state, self._loaded = self._loaded, None
        self._open(epoch)
        if state is not None:
            self._leave_epoch(state)
        self._opening = {}
        if not self._seeks:
            self._opening = {"loader": copy.deepcopy(self._keeper.state_dict()), "rng": capture_rng()}
        self._iterate()

    def _iterate(self) -> None:
        self._after_first = _NOTHING
        key = derive_key(capture_rng(), self._epoch, "stateful") if self.length is None else None
        self._iterator = iter(self.loader)
        if key is not None:
            self._stream = RngStream(key)

    @override
    def resume(self, epoch: int) -> None:
        state = self._loaded
        assert state is not None
        self._open(epoch)
        self.position = state["position"]
        if state["is_at_end"]:  # nothing to give; `begin` of the next epoch needs the state
            self._has_ended = True
            return
        self._loaded = None
        if not state.get("seeks", True):
            self._read_again(state)
            return
        self._keeper.load_state_dict(state["loader"])
        self._is_resumed = bool(self.position)
        self._iterator = iter(self.loader)
        if self.length is None:
            self._stream = RngStream(b"")
            self._stream.load_state_dict(state["stream"])

    def _read_again(self, state: StateDict) -> None:
        """Go to the position of a state without one: begin the pass, and read what was given."""
        self._seeks = False
        self._opening = {name: state[name] for name in ("loader", "rng")}
        log.warning(
            "The state_dict of %s has no position in its pass: reading %d batches again.",
            type(self._keeper).__name__,
            state["position"],
        )
        restore_rng(state["rng"])
        self._keeper.load_state_dict(copy.deepcopy(state["loader"]))
        self.position = 0
        self._iterate()
        while self.position < state["position"]:
            if not self.has_next():
                raise DataError(
                    f"{type(self.loader).__name__} ended after {self.position} batches; before the stop it had yielded "
                    f"{state['position']}.",
                    fix="resume with the data that the run had, or from a checkpoint made at the end of an epoch.",
                )
            self.take()

    def _leave_epoch(self, state: StateDict) -> None:
        """Bring the loader to where it was when the loaded epoch was left, so that iterating begins another one."""
        self._keeper.load_state_dict(state["loader"])
        self._may_be_rest = state["is_at_end"]
        is_torchdata = isinstance(self.loader, DataLoader) and (
            type(self.loader)._get_iterator is not DataLoader._get_iterator
        )
        if state["is_at_end"] and self._keeps_own_state and is_torchdata:
            # It makes the iterator of the epoch that was left, and its `__iter__` would draw for both. Any other loader
            # would start workers for nothing.
            with RngStream(b""):
                cast("DataLoader[Batch]", self.loader)._get_iterator()
        elif state["position"] and not state["is_at_end"] and state.get("seeks", True):
            with RngStream(b""):
                iter(self.loader)  # what was left; the iteration after this one is the new epoch

    def _open(self, epoch: int) -> None:
        self._epoch = epoch
        self.length = find_length(self.loader)
        self.position, self._is_open, self._has_ended = 0, True, False
        self._ahead = _NOTHING
        self._stream = None
        self._may_be_rest = self._is_broken = self._is_resumed = False

    def _fetch(self) -> Batch:
        """Return the next batch, or _NOTHING at the end of the pass."""
        self._is_broken = True  # unless this returns: a generator that raised says that it has ended
        batch = next(self._iterator, _NOTHING)
        if self._may_be_rest and batch is _NOTHING:
            self._iterator = iter(self.loader)
            batch = next(self._iterator, _NOTHING)
        self._may_be_rest = self._is_broken = False
        if self._seeks is None and batch is not _NOTHING:
            self._find_out()
        return batch

    def _find_out(self) -> None:
        """Compare the states after the first and the second batch of a pass; called after each."""
        state = self._keeper.state_dict()
        if self._after_first is _NOTHING:
            self._after_first = copy.deepcopy(state)
            return
        self._seeks = not is_same(self._after_first, state)
        self._after_first = _NOTHING
        if self._is_resumed and not self._seeks:
            raise self._began_again()

    def _began_again(self) -> DataError:
        return DataError(
            f"Expected {type(self.loader).__name__} to continue its pass after load_state_dict, got its first batches "
            "again.",
            fix="let load_state_dict go to the position at which state_dict was called; or remove both methods, so "
            "that batches are read again up to the position.",
        )

    @override
    def has_next(self) -> bool:
        if not self._is_open or self._has_ended:
            return False
        if self.length is not None:
            return self.position < self.length
        if self._ahead is _NOTHING:
            assert self._stream is not None
            self._before_ahead = self._capture()
            with self._stream:
                self._ahead = self._fetch()
            self._has_ended = self._ahead is _NOTHING
        return not self._has_ended

    @override
    def take(self) -> Batch:
        if self.length is None:
            if not self.has_next():
                raise StopIteration
            batch, self._ahead = self._ahead, _NOTHING
        else:
            batch = self._fetch()
            if batch is _NOTHING:
                raise DataError(
                    f"{type(self.loader).__name__} says that it has {self.length} batches, but it ended after "
                    f"{self.position}.",
                    fix="correct its __len__, or remove it.",
                )
            if self.position + 1 == self.length:
                # So that the loader's state says that its epoch has ended.
                more = next(self._iterator, _NOTHING)
                if self._is_resumed and more is not _NOTHING:
                    raise self._began_again()
        self.position += 1
        return batch

    @override
    def close(self) -> None:
        self._iterator = iter(())
        self._ahead = _NOTHING
        self._is_open = False

    @override
    def can_go_back(self, back: int) -> bool:
        return back == 0  # the loader says where it is, not where it was

    @override
    def state_dict(self, back: int = 0) -> StateDict:
        if self._loaded is not None and not self._is_open:
            return self._loaded
        if self.length is None and not self._is_broken and self.position < self.most:
            self.has_next()  # after a pass's last batch, some loaders have the state of the next pass's beginning
        position = {
            "kind": self.kind,
            "is_open": self._is_open,
            "is_at_end": self._has_ended or (self.length is not None and self.position >= self.length),
            "epoch": self._epoch,
            "position": self.position,
            "seeks": self._seeks is not False,
        }
        if self._loaded is not None:
            return {**self._loaded, **position}
        if self._seeks is False and self._is_open and not position["is_at_end"]:
            return {**position, **self._opening, "stream": {}}
        return {**position, **(self._before_ahead if self._ahead is not _NOTHING else self._capture())}

    def _capture(self) -> StateDict:
        return {
            "loader": self._keeper.state_dict(),
            "stream": {} if self._stream is None else self._stream.state_dict(),
        }
