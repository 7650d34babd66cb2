"""`own_numbers`: random numbers of a rank's own for a part of a sequence.

Ranks that share a sequence draw the same numbers, so that what they compute on full sequences is the same. On parts
they must not: dropout masks would be equal on tokens that lie a part's length apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["kept_numbers", "own_numbers"]


@contextmanager
def own_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Return a context in which torch's generators of the CPU and of a GPU take a course of the rank's own.

    Rank 0 keeps the course that one process takes. Afterwards all ranks continue alike, without communication: as
    before where nothing was drawn, and else on a course that follows from the one before. Python's and NumPy's
    generators are left alone.

    Args:
        rank: Among the ranks that share the sequence; all draw equally often.
        device: Whose generator is used beside the CPU's.
    """
    generators = _generators(device)
    before = [one.get_state() for one in generators]
    if rank:
        _seed(generators, before, f"part {rank}")
    started = [one.get_state() for one in generators]
    try:
        yield
    finally:
        moved = [not torch.equal(one.get_state(), state) for one, state in zip(generators, started, strict=True)]
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        drawn = [one for one, has_moved in zip(generators, moved, strict=True) if has_moved]
        _seed(drawn, [one.get_state() for one in drawn], "after the parts")


@contextmanager
def kept_numbers(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Return a context after which torch's generators are as before; entered, it tells whether they have moved."""
    generators = _generators(device)
    before = [one.get_state() for one in generators]

    def have_moved() -> bool:
        return not all(torch.equal(one.get_state(), state) for one, state in zip(generators, before, strict=True))

    try:
        yield have_moved
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def _seed(generators: list[torch.Generator], states: list[Tensor], label: str) -> None:
    for generator, state in zip(generators, states, strict=True):
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, key=label.encode()).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
