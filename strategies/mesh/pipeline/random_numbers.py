"""`StepNumbers`: random numbers of pipelined steps, which do not depend on the stage that draws them.

Every stage runs a step from its beginning, and may use there what was drawn before the blocks: the mask of a masked
language model is needed by the first stage for its input and by the last one for the loss. So a micro-batch begins on
all stages with the same generators, and these continue behind a window as if only the code before the blocks had
drawn. Blocks, modules beside them and the code behind each block draw from generators that are seeded for them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch

__all__ = ["StepNumbers"]

# Any in this file: states of generators of Python and NumPy.

_States = tuple[list[torch.Tensor], Any, Any]


class StepNumbers:
    """The generators of torch, Python and NumPy in the steps of one rank. Does not communicate.

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
        """Note that the first block is called: what follows draws from generators of its own."""
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

    def beside(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a module beside the blocks, after which torch's generators are as before."""
        place = self._places.get(name)
        if place is None:
            place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
            self._places[name] = place
        return _Beside(self._generators, _mixed(self._seed, place))

    @cached_property
    def _generators(self) -> list[torch.Generator]:
        device = self._device
        if device.type != "cuda":
            return [torch.default_generator]
        index = torch.cuda.current_device() if device.index is None else device.index
        return [torch.default_generator, torch.cuda.default_generators[index]]

    def _capture(self) -> _States:
        numpy = sys.modules.get("numpy")
        states = [one.get_state() for one in self._generators]
        return states, random.getstate(), None if numpy is None else numpy.random.get_state()

    def _restore(self, states: _States) -> None:
        of_torch, of_python, of_numpy = states
        for generator, state in zip(self._generators, of_torch, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)


class _Beside:
    """A context in which generators are seeded, and after which they are as before."""

    __slots__ = ("_before", "_generators", "_seed")

    def __init__(self, generators: list[torch.Generator], seed: int) -> None:
        self._generators, self._seed = generators, seed

    def __enter__(self) -> None:
        self._before = [one.get_state() for one in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)


def _mixed(seed: int, number: int) -> int:
    """Return a seed of 63 bits that follows from another one and a number.

    Source: the finalizer of SplitMix64 (Steele et al. 2014).
    """
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1
