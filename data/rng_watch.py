"""`RngWatch`: which global generators code draws from, known without drawing from them."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeAlias

import torch

from ..protocols import Tree
from .rng import KINDS, native, to_plain

_WORDS = 624  # of the state of a Mersenne Twister, which Python's and NumPy's generators are

State: TypeAlias = object  # of a generator, in a form that can be compared


class RngWatch:
    """Watches Python's, NumPy's and torch's global CPU generators between `begin` and `moved`.

    A state is compared as bytes in memory: half a microsecond for Python's and NumPy's generator and two for torch's,
    where to keep them apart (`RngStream`) takes 150.

    Args:
        kinds: Generators to watch, out of "python", "numpy" and "torch".
    """

    def __init__(self, kinds: Iterable[str] = KINDS) -> None:
        wanted = set(kinds)
        self.kinds = [kind for kind in KINDS if kind in wanted]
        self._read = [_READERS[kind]() for kind in self.kinds]
        self._before: list[Any] = []  # Any: a State, which each kind takes apart

    def begin(self) -> None:
        """Note where the generators are."""
        self._before = [read() for read in self._read]

    def moved(self) -> list[str]:
        """Return which of them have moved since `begin`."""
        before, now = self._before, [read() for read in self._read]
        if now == before:
            return []
        return [kind for kind, old, new in zip(self.kinds, before, now, strict=True) if old != new]

    def put_back(self, kind: str) -> Tree:
        """Put Python's or torch's generator where `begin` saw it, and return that as a plain value."""
        before = self._before[self.kinds.index(kind)]
        if kind == "torch":
            state: Any = torch.frombuffer(bytearray(before), dtype=torch.uint8)  # Any: of each kind another
        else:
            state = before if not isinstance(before[0], bytes) else _unpacked(*before)
        native(kind)[1](state)
        return to_plain(kind, state)


def _unpacked(state: bytes, gauss: float | None) -> tuple[Tree, ...]:
    index, *words = struct.unpack(f"=i{_WORDS}I", state)
    return (random.getstate()[0], (*words, index), gauss)


@cache
def _read_python() -> Callable[[], State]:
    generator = getattr(random.random, "__self__", None)
    size = 4 + 4 * _WORDS
    offset = object.__basicsize__
    if not isinstance(generator, random.Random) or type(generator).__basicsize__ < offset + size:
        return random.getstate
    own: Any = generator  # Any: `gauss_next` is an attribute that typeshed leaves out
    memory = memoryview((ctypes.c_char * size).from_address(id(own) + offset))
    # CPython does not promise where its state is: that memory is read only if it holds what `getstate` says.
    if sys.implementation.name != "cpython" or _unpacked(bytes(memory), own.gauss_next) != own.getstate():
        return random.getstate
    return lambda: (bytes(memory), own.gauss_next)


@cache
def _read_torch() -> Callable[[], State]:
    generator = torch.default_generator
    memory = ctypes.c_char * generator.get_state().numel()

    def read() -> bytes:
        state = generator.get_state()
        return memory.from_address(state.data_ptr()).raw

    return read


def _read_numpy() -> Callable[[], State]:
    found: Any = None
    memory: Any = b""
    legacy = False

    def read() -> State:
        nonlocal found, memory, legacy
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        generator = numpy.random.get_bit_generator()
        if generator is not found:
            found = generator
            legacy = type(generator) is numpy.random.MT19937
            if legacy:  # the address is public for the sake of compiled code
                address = generator.ctypes.state_address
                memory = memoryview((ctypes.c_char * (4 * _WORDS + 4)).from_address(address))
        return (id(found), bytes(memory) if legacy else repr(generator.state))

    return read


_READERS: dict[str, Callable[[], Callable[[], State]]] = {
    "python": _read_python,
    "numpy": _read_numpy,
    "torch": _read_torch,
}
