"""Random numbers: seeding all generators, and saving and restoring their state bitwise."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..console import show_logs
from ..data.rng import KINDS, RngStream, capture_rng, derive_key, kinds_that_moved, restore_rng, seed_global_generators
from ..errors import CheckpointError, ConfigError, names_nearest
from ..messages import warn
from ..protocols import StateDict

log = logging.getLogger(__name__)

# Lightning's names, by which its libraries and its programs hand a seed on; LOOPWRIGHT_SEED is what a user sets.
_SEED = "PL_GLOBAL_SEED"
_OWN_SEED = "LOOPWRIGHT_SEED"
_WORKERS = "PL_SEED_WORKERS"
_LARGEST = 2**32 - 1


@names_nearest
def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators (the latter on all devices).

    The environment variables PL_GLOBAL_SEED and PL_SEED_WORKERS ("0" or "1") are set, so that processes started from
    here do the same.

    Args:
        seed: Seed from 0 to 4294967295, converted by `int()`. None for PL_GLOBAL_SEED or
            LOOPWRIGHT_SEED of the environment, or else 0.
        workers: Whether the Trainer also seeds each loader worker, from the seed, the worker's index and the rank.
        verbose: Whether to log the seed at level INFO, and to warn if it is 0 because none is given.

    Returns:
        The seed.

    Raises:
        ConfigError: The seed is not an integer, or out of range.
    """
    chosen = _seed_from_environment(warns=verbose) if seed is None else _to_integer(seed, "seed")
    if not 0 <= chosen <= _LARGEST:
        raise ConfigError(
            f"Expected seed to be in the range 0 to {_LARGEST}, got seed={chosen}.",
            fix="pass a seed within the range, such as 42.",
        )
    if verbose:
        show_logs()
        log.info("Seed set to %d.", chosen)
    os.environ[_SEED] = str(chosen)
    os.environ[_WORKERS] = str(int(bool(workers)))
    random.seed(chosen)
    try:
        import numpy
    except ImportError:
        pass  # not importable, so not used in this process
    else:
        numpy.random.seed(chosen)
    torch.manual_seed(chosen)
    return chosen


def known_seed(variables: Mapping[str, str] | None = None) -> str | None:
    """Return the seed of the last `seed_everything`, here or in the process that started this one; None without one.

    Args:
        variables: Environment variables; None is this process's variables.
    """
    return (os.environ if variables is None else variables).get(_SEED)


def wanted_seed(variables: Mapping[str, str] | None = None) -> int | None:
    """Return the seed in LOOPWRIGHT_SEED; None without one.

    Args:
        variables: Environment variables; None is this process's variables.

    Raises:
        ConfigError: It is not an integer.
    """
    text = (os.environ if variables is None else variables).get(_OWN_SEED)
    return None if text is None else _to_integer(text, f"the environment variable {_OWN_SEED}")


def reset_seed() -> None:
    """Seed again with PL_GLOBAL_SEED, as the last `seed_everything` did; do nothing without one.

    Raises:
        ConfigError: The program has set it to something else than an integer in the range of seeds.
    """
    if known_seed() is not None:
        seed_everything(workers=os.environ.get(_WORKERS, "0") == "1", verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed the generators of a loader worker from the loader's seed, the worker's number and the rank.

    Two workers, two ranks, or two epochs never share a stream.

    Args:
        worker_id: Index of the worker, from the DataLoader.
        rank: Global rank; None reads RANK or LOCAL_RANK from the environment, else 0.
    """
    if rank is None:
        rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
    # The DataLoader has seeded torch with a number that is new in every epoch, plus the worker's number.
    base = torch.initial_seed() - worker_id
    seed_global_generators(f"worker {base} {worker_id} {rank}".encode())


def rng_state(include_cuda: bool = True) -> StateDict:
    """Return the state of all generators of this process as tensors and plain values, ready for a checkpoint.

    `Fabric.save` keeps the states of all ranks, and `Fabric.load` returns each rank its own.

    Args:
        include_cuda: Whether to include the generators of all CUDA (and MPS) devices in use.

    Returns:
        "python", "numpy" (if imported), "torch" (uint8 tensor on the CPU), "cuda" (a list of such, one per device,
        if CUDA is initialized), "mps".
    """
    state = capture_rng()
    if not include_cuda:
        state.pop("cuda", None)
    elif torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: StateDict) -> None:
    """Restore a state of `rng_state` bitwise. Device generators that are not in the state are unchanged.

    Raises:
        CheckpointError: The state of a generator cannot be restored.
    """
    try:
        restore_rng(state)
        if "mps" in state and torch.backends.mps.is_available():
            torch.mps.set_rng_state(state["mps"].cpu())
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The state of the random generators cannot be restored: {type(error).__name__}: {error}.",
            fix="load only the weights, or resume with the versions of Python, NumPy and torch that saved the "
            "checkpoint.",
        ) from error


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the state of all generators when the block ends, also after an exception.

    Args:
        include_cuda: Whether to include CUDA and MPS devices in use.
    """
    state = rng_state(include_cuda)
    try:
        yield
    finally:
        set_rng_state(state)


# -- of several ranks, in a checkpoint of Fabric -----------------------------------------------------------------------


def merge_rank_states(content: StateDict, gather: Callable[[StateDict], list[StateDict] | None]) -> StateDict:
    """Return the content with the states of all ranks in each result of `rng_state`. Called on all ranks.

    A merged state is rank 0's state, with the states of all ranks under "ranks". The other ranks do not write it; they
    merge their own state alone.

    Args:
        content: Dicts and lists of any depth.
        gather: Returns the objects of all ranks, in their order, on rank 0; None on the others.
    """
    found: StateDict = {}
    _replace_states(content, found.setdefault)
    everywhere = gather(found) or [found]

    def merge(path: str, own: StateDict) -> StateDict:
        states = [states.get(path, own) for states in everywhere]
        return {**states[0], "ranks": states}

    merged: StateDict = _replace_states(content, merge)
    return merged


def choose_rank_states(content: StateDict, rank: int) -> StateDict:
    """Return the content with the state of one rank in place of each merged state.

    A rank that did not exist when they were saved continues like rank 0 with the generators that were alike on all
    ranks. Others get a sequence that depends on rank 0's and on the rank; generators of its devices are not restored.

    Args:
        content: Dicts and lists of any depth.
        rank: Global rank.
    """

    def choose(path: str, merged: StateDict) -> StateDict:
        states: list[StateDict] = merged.get("ranks", [merged])
        if rank < len(states):
            return states[rank]
        first = states[0]
        apart = set().union(*(kinds_that_moved(first, state) for state in states))
        if not apart:
            return first
        with RngStream(derive_key(first, "rank", rank), apart):
            drawn = capture_rng()
        return {kind: (drawn if kind in apart else first)[kind] for kind in KINDS if kind in first}

    chosen: StateDict = _replace_states(content, choose)
    return chosen


def _replace_states(value: Any, replace: Callable[[str, Any], Any], path: str = "") -> Any:  # Any: content
    """Return a value in which each state of `rng_state` is replaced, by (path, state)."""
    if type(value) is list:
        return [_replace_states(item, replace, f"{path}/{index}") for index, item in enumerate(value)]
    if type(value) is not dict:
        return value
    python = value.get("python")
    if type(python) is dict and python.keys() == {"version", "state", "gauss"} and "torch" in value:
        return replace(path, value)
    return {key: _replace_states(item, replace, f"{path}/{key}") for key, item in value.items()}


def _seed_from_environment(*, warns: bool) -> int:
    known = known_seed()
    seed = wanted_seed() if known is None else _to_integer(known, f"the environment variable {_SEED}")
    if seed is None and warns:
        warn("seed_everything() was called without a seed; it uses 0.")
    return seed or 0


def _to_integer(value: Any, name: str) -> int:  # Any: the user's value
    number: int | None = None
    with suppress(TypeError, ValueError, OverflowError):  # named below
        number = int(value)
    if number is None or (isinstance(value, float) and number != value):
        raise ConfigError(f"Expected {name} to be an integer, got {value!r}.", fix="set it to an integer such as 42.")
    return number
