"""Random numbers of steps whose ranks share a batch: drawn alike where ranks compute the same, apart where not.

Stages of a pipeline run a step from its beginning, and may use there what was drawn before the blocks: the mask of a
masked language model is needed by the first stage for its input and by the last one for the loss. So a micro-batch
begins on all stages with the same generators, and after a window these continue as if only the code before the blocks
had drawn. Blocks, modules beside them and the code after each block draw from generators that are seeded for them.

Ranks that share a sequence draw alike as well, so that what they compute on full sequences is the same. On parts they
must not: dropout masks would be equal on tokens that lie a part's length apart.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Any in this file: states of generators of Python and NumPy.

_States = tuple[list[Tensor], Any, Any]


class StepNumbers:
    """The generators of torch, Python and NumPy in the pipelined steps of one rank. Does not communicate.

    Args:
        device: Whose generator is used beside the CPU's.
        is_on: Whether generators are changed; else all of this does nothing.

    Attributes:
        counts: How many windows and evaluation steps there were; part of checkpoints.
    """

    def __init__(self, device: torch.device, *, is_on: bool = True) -> None:
        self._device = device
        self._is_on = is_on
        self.counts = {"window": 0, "evaluation": 0}
        self._before: list[_States] = []  # by micro-batch; one more than micro-batches that reached the blocks
        self._number = 0
        self._seed = 0
        self._is_before_blocks = False
        self._places: dict[str, int] = {}  # of modules beside the blocks, by name

    @contextmanager
    def window(self, kind: str) -> Iterator[None]:
        """Return a context for the micro-batches of a window or an evaluation step.

        Args:
            kind: A key of `counts`.
        """
        self.counts[kind] += 1
        if not self._is_on:
            yield
            return
        self._before = [self._capture()]
        digest = hashlib.blake2b(f"{kind} {self.counts[kind]}".encode(), digest_size=8)
        for state in self._before[0][0]:
            digest.update(state.numpy().tobytes())
        self._window_seed = int.from_bytes(digest.digest(), "little")
        try:
            yield
        finally:
            self._restore(self._before[-1])
            self._before = []

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Return a context for a step of the first micro-batch, which is then run once more with the same numbers."""
        self.start(0)
        try:
            yield
        finally:
            del self._before[1:]

    def start(self, number: int) -> None:
        """Begin a step of the micro-batch of this number, on any of this rank's stages."""
        if not self._is_on:
            return
        self._restore(self._before[number])
        self._number = number
        self._seed = _mixed(self._window_seed, number)
        self._is_before_blocks = True

    def leave_step(self) -> None:
        """Note that the first block is called: what follows draws from separate generators."""
        if not self._is_before_blocks:
            return
        self._is_before_blocks = False
        if len(self._before) == self._number + 1:
            self._before.append(self._capture())
        random.seed(self._seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(self._seed & 0xFFFFFFFF)

    def seed(self, place: int) -> None:
        """Seed torch's generators for a block, or for what follows it."""
        for generator in self._generators:
            generator.manual_seed(_mixed(self._seed, place))

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Return a context for a module beside the blocks, after which torch's generators are as before."""
        place = self._places.get(name)
        if place is None:
            place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
            self._places[name] = place
        before = _states_of(self._generators)
        self.seed(place)
        try:
            yield
        finally:
            _set(self._generators, before)

    @cached_property
    def _generators(self) -> list[torch.Generator]:
        return _generators_of(self._device)

    def _capture(self) -> _States:
        numpy = sys.modules.get("numpy")
        return _states_of(self._generators), random.getstate(), None if numpy is None else numpy.random.get_state()

    def _restore(self, states: _States) -> None:
        of_torch, of_python, of_numpy = states
        _set(self._generators, of_torch)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)


@contextmanager
def own_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Return a context in which torch's generators draw this rank's sequence, for a part of a sequence of tokens.

    Rank 0 draws what a single process draws. Afterwards all ranks continue alike, without communication: as before if
    nothing was drawn, and otherwise with a state that follows from the previous one. Python's and NumPy's generators
    are left alone.

    Args:
        rank: Among the ranks that share the sequence; all draw equally often.
        device: Whose generator is used beside the CPU's.
    """
    generators = _generators_of(device)
    before = _states_of(generators)
    if rank:
        _seed_from(generators, f"part {rank}")
    started = _states_of(generators)
    try:
        yield
    finally:
        drawn = _moved(generators, started)
        _set(generators, before)
        _seed_from(drawn, "after the parts")


@contextmanager
def kept_numbers(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Return a context after which torch's generators are as before; entered, it says whether they have moved."""
    generators = _generators_of(device)
    before = _states_of(generators)
    try:
        yield lambda: bool(_moved(generators, before))
    finally:
        _set(generators, before)


def _generators_of(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def _states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    return [one.get_state() for one in generators]


def _set(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _moved(generators: Sequence[torch.Generator], before: Sequence[Tensor]) -> list[torch.Generator]:
    pairs = zip(generators, before, strict=True)
    return [generator for generator, state in pairs if not torch.equal(generator.get_state(), state)]


def _seed_from(generators: Sequence[torch.Generator], label: str) -> None:
    """Seed generators with what follows from their states and a label."""
    for generator in generators:
        state = generator.get_state().numpy().tobytes()
        digest = hashlib.blake2b(state, digest_size=8, key=label.encode()).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)


def _mixed(seed: int, number: int) -> int:
    """Return a seed of 63 bits that follows from another one and a number.

    Source: the finalizer of SplitMix64 (Steele et al. 2014).
    """
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1
