"""States of random generators as plain values."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..protocols import AnyDataset, AnySampler, StateDict, Tree

# The global CPU generators.
KINDS = ("python", "numpy", "torch")

# Depth to which the attributes of samplers and data sets are searched for generators.
_SEARCH_DEPTH = 4
_SEARCH_LIMIT = 2000


def capture_rng() -> StateDict:
    """Return the state of Python's, NumPy's and torch's global generators, without drawing from them.

    NumPy is included if it is imported, CUDA (all devices) if it is initialized, and XLA if its runtime is started. It
    does not wait for a device.

    Returns:
        Plain values and CPU tensors, which `torch.save` writes and `torch.load(weights_only=True)` reads.
    """
    state: StateDict = {"python": _python_to_plain(random.getstate()), "torch": torch.default_generator.get_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _numpy_to_plain(numpy.random.get_state(legacy=False))
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    xla = _started_xla()
    if xla is not None:
        state["xla"] = xla.get_rng_state()
    return state


def restore_rng(state: StateDict) -> None:
    """Restore the state of every global generator exactly.

    CUDA devices that this machine lacks are ignored, and so is NumPy if it is not installed.

    Args:
        state: A result of `capture_rng`, possibly of another process.
    """
    random.setstate(_python_from_plain(state["python"]))
    torch.default_generator.set_state(state["torch"])
    if "numpy" in state:
        try:
            import numpy
        except ImportError:
            pass  # this process cannot draw from it either
        else:
            numpy.random.set_state(_numpy_from_plain(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, index)
    xla = _started_xla()
    if "xla" in state and xla is not None:
        xla.set_rng_state(state["xla"])


def restore_kinds(states: StateDict) -> None:
    """Restore the global CPU generators that are in the state, a part of what `capture_rng` returns."""
    for kind, state in states.items():
        native(kind)[1](_from_plain(kind, state))


def _started_xla() -> Any:  # Any: a module of torch_xla, which is not annotated
    """Return where XLA's generator is, if its runtime is started: asking for its state would start it."""
    package = sys.modules.get("torch_xla")
    binding = getattr(package, "_XLAC", None)
    if binding is None or not binding._xla_runtime_is_initialized():
        return None
    return sys.modules.get("torch_xla.core.xla_model")


class RngStream:
    """A second sequence of the global generators, entered with `with`, for code whose draws must be repeatable.

    What runs inside draws from this stream; the generators outside neither notice nor influence it. CUDA generators
    are shared with the outside.

    Entering and leaving costs 2 microseconds for torch, 25 for Python's generator and 140 for NumPy's, so only those
    that are needed should be named.

    Args:
        key: Seeds the stream: equal keys give equal draws.
        kinds: Global generators that belong to it: "python", "numpy", "torch".
    """

    def __init__(self, key: bytes, kinds: Iterable[str] = KINDS) -> None:
        numpy = sys.modules.get("numpy")
        wanted = [kind for kind in KINDS if kind in set(kinds) and (kind != "numpy" or numpy is not None)]
        self._kinds = wanted
        self._get = [native(kind)[0] for kind in wanted]
        self._set = [native(kind)[1] for kind in wanted]
        self._outside: list[Tree] = []
        before = [get() for get in self._get]
        for kind in wanted:
            _seed(kind, key)
        self._own = [get() for get in self._get]
        self._write(before)

    def __enter__(self) -> RngStream:
        self._outside = [get() for get in self._get]
        self._write(self._own)
        return self

    def __exit__(self, *error: object) -> None:
        self._own = [get() for get in self._get]
        self._write(self._outside)

    def state_dict(self) -> StateDict:
        """Return where the stream is, as plain values and tensors."""
        return {kind: to_plain(kind, state) for kind, state in zip(self._kinds, self._own, strict=True)}

    def load_state_dict(self, state: StateDict) -> None:
        """Go to where `state_dict` was taken; a kind that is not in the state is not changed."""
        self._own = [
            _from_plain(kind, state[kind]) if kind in state else own
            for kind, own in zip(self._kinds, self._own, strict=True)
        ]

    def _write(self, states: list[Tree]) -> None:
        for put, state in zip(self._set, states, strict=True):
            put(state)


def moved_numpy() -> Callable[[], bool]:
    """Return a function that tells whether NumPy's global generator has moved since; each takes a microsecond."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return lambda: False
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        before_slow = numpy.random.get_state(legacy=False)
        return lambda: not is_same(_numpy_to_plain(before_slow), _numpy_to_plain(numpy.random.get_state(legacy=False)))
    # NumPy's own way to this state copies number by number; the address is public for the sake of compiled code.
    address, size = generator.ctypes.state_address, 624 * 4 + 4
    before = ctypes.string_at(address, size)
    return lambda: ctypes.string_at(address, size) != before


def native(kind: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:  # Any: a form of the generator's own
    """Return how to read and write a generator in its own form, which is quicker than plain values."""
    if kind == "python":
        return random.getstate, random.setstate
    if kind == "torch":
        return torch.default_generator.get_state, torch.default_generator.set_state
    numpy_random = sys.modules["numpy"].random
    return partial(numpy_random.get_state, legacy=False), numpy_random.set_state


def to_plain(kind: str, state: Any) -> Tree:
    """Return a generator's state, in its own form, as `capture_rng` does."""
    if kind == "python":
        return _python_to_plain(state)
    return state if kind == "torch" else _numpy_to_plain(state)


def _from_plain(kind: str, state: Any) -> Tree:
    if kind == "python":
        return _python_from_plain(state)
    return state if kind == "torch" else _numpy_from_plain(state)


def _seed(kind: str, key: bytes) -> None:
    # The three generators are the same algorithm: equal seeds would give equal draws.
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=kind.encode()).digest(), "little")
    if kind == "python":
        random.seed(seed)
    elif kind == "torch":
        torch.default_generator.manual_seed(seed >> 1)
    else:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def seed_global_generators(key: bytes) -> None:
    """Seed Python's, NumPy's (when imported) and torch's CPU generators, each differently, from one key."""
    for kind in KINDS:
        if kind != "numpy" or "numpy" in sys.modules:
            _seed(kind, key)


def kinds_that_moved(before: StateDict, after: StateDict) -> set[str]:
    """Return which global CPU generators were drawn from between two calls of `capture_rng`."""
    return {kind for kind in KINDS if kind in after and (kind not in before or not is_same(before[kind], after[kind]))}


def is_same(left: Any, right: Any) -> bool:  # Any: states of any form
    """Return whether two states are equal: plain values, tensors and arrays in dicts, lists and tuples."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    same = left == right
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def derive_key(state: StateDict, *labels: str | int) -> bytes:
    """Return 16 bytes that depend on torch's generator in a `capture_rng` state and on the labels, drawing nothing."""
    digest = hashlib.blake2b(bytes(state["torch"].tolist()), digest_size=16)
    digest.update(repr(labels).encode())
    return digest.digest()


def find_generators(**roots: AnyDataset | AnySampler) -> StateDict:
    """Return the generators that objects hold in their attributes, by path.

    Looked for: `torch.Generator`, `random.Random`, NumPy's `Generator` and `RandomState`, in attributes, lists, tuples
    and dicts. One that is reached on two paths is named once.

    Args:
        roots: Objects to look into (samplers, data sets, loaders), by the first part of their paths.
    """
    found: StateDict = {}
    seen: set[int] = set()
    queue: list[tuple[str, Tree, int]] = [(name, root, 0) for name, root in roots.items()]
    while queue and len(seen) < _SEARCH_LIMIT:
        path, value, depth = queue.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_generator(value):
            found[path] = value
        elif depth < _SEARCH_DEPTH:
            queue.extend((f"{path}.{name}", child, depth + 1) for name, child in _children(value))
    return found


def capture_generators(generators: StateDict) -> StateDict:
    """Return the state of each generator of `find_generators`, as plain values and tensors."""
    states: StateDict = {}
    for path, generator in generators.items():
        if isinstance(generator, torch.Generator):
            states[path] = generator.get_state()
        elif isinstance(generator, random.Random):
            states[path] = _python_to_plain(generator.getstate())
        elif hasattr(generator, "bit_generator"):
            states[path] = _numpy_to_plain(generator.bit_generator.state)
        else:
            states[path] = _numpy_to_plain(generator.get_state(legacy=False))
    return states


def restore_generators(generators: StateDict, states: StateDict) -> None:
    """Restore the generators that are in both; the others are left alone."""
    for path, generator in generators.items():
        state = states.get(path)
        if state is None:
            continue
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(_python_from_plain(state))
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = _numpy_from_plain(state)
        else:
            generator.set_state(_numpy_from_plain(state))


def seed_generators(generators: StateDict, key: bytes) -> None:
    """Seed each generator of `find_generators` by the key and its path."""
    for path, generator in generators.items():
        seed = int.from_bytes(hashlib.blake2b(key + path.encode(), digest_size=8).digest(), "little")
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed >> 1)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed & 0xFFFFFFFF)


def _is_generator(value: Tree) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _children(value: Tree) -> Iterator[tuple[str, Tree]]:
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, (list, tuple)):
        members = list(enumerate(value[:64])) if len(value) <= 64 else []
    elif isinstance(value, (Tensor, torch.nn.Module, type, ModuleType)) or (
        callable(value) and not hasattr(value, "__dict__")
    ):
        return
    else:
        members = list(getattr(value, "__dict__", {}).items())
    if len(members) > 256:  # a table of data, not a description
        return
    for name, child in members:
        if not isinstance(child, (str, bytes, int, float, Tensor, type, type(None))):
            yield str(name), child


def _python_to_plain(state: tuple[Tree, ...]) -> StateDict:
    version, words, gauss = state
    return {"version": version, "state": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def _python_from_plain(state: StateDict) -> tuple[Tree, ...]:
    return (state["version"], tuple(state["state"].tolist()), state["gauss"])


def _numpy_to_plain(state: Tree) -> Tree:
    """Turn a NumPy bit generator's state (dicts, arrays, integers of any size) into plain values and tensors."""
    if isinstance(state, dict):
        return {key: _numpy_to_plain(value) for key, value in state.items()}
    if hasattr(state, "dtype") and hasattr(state, "shape") and hasattr(state, "tobytes"):
        data = torch.frombuffer(bytearray(state.tobytes()), dtype=torch.uint8)
        return {"dtype": str(state.dtype), "shape": list(state.shape), "data": data}
    if isinstance(state, int) and state.bit_length() > 63:
        return {"big_int": str(state)}
    return state


def _numpy_from_plain(state: Tree) -> Any:
    if not isinstance(state, dict):
        return state
    if set(state) == {"big_int"}:
        return int(state["big_int"])
    if set(state) == {"dtype", "shape", "data"}:
        import numpy

        data = bytes(state["data"].tolist())
        return numpy.frombuffer(data, dtype=state["dtype"]).reshape(state["shape"]).copy()
    return {key: _numpy_from_plain(value) for key, value in state.items()}
