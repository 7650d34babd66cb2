"""Random numbers of ranks: different ones for ranks that read different data, the same for copies that need it.

Ranks that work on the same samples (along a tensor or context parallel axis) must draw the same dropout masks: their
strategy has `copies_draw_alike`, and their generators draw the same sequence. With stages, this holds within each
stage.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ...data.rng import capture_rng, derive_key, restore_rng, seed_global_generators
from ...errors import ModuleError
from ...protocols import StateDict

if TYPE_CHECKING:
    from ...strategies import Strategy

Places = Sequence[tuple[int, int]]
"""Data rank and stage of each rank that saved."""


def align_copies(strategy: Strategy) -> None:
    """Let ranks that read the same data continue with the generators of the first of them. On every rank.

    Nothing is done where all ranks read different data, or copies need not draw alike.
    """
    topology = strategy.topology
    if not strategy.traits.copies_draw_alike or topology.data_size == topology.world_size:
        return
    everywhere = strategy.gather_objects((topology.data_rank, _portable(capture_rng(), strategy.device)))
    first = next(state for data_rank, state in everywhere if data_rank == topology.data_rank)
    restore_rng(first)


def separate(strategy: Strategy) -> None:
    """Give ranks that read different data different random numbers, so that dropout differs, too. On every rank.

    Rank 0, and the copies of it that draw alike, keep its sequence, which is that of a single process.
    """
    align_copies(strategy)
    rank, _ = _drawn_as(strategy)
    if rank:
        seed_global_generators(derive_key(capture_rng(), "rank", rank))


def check_copies(strategy: Strategy) -> None:
    """Compare the generators of masks over ranks that must draw alike. On every rank, once per epoch.

    Raises:
        ModuleError: On every rank: some of them have drawn what their copies did not draw; names them.
    """
    topology = strategy.topology
    if not strategy.traits.copies_draw_alike or topology.data_size == topology.world_size:
        return
    state = _portable(capture_rng(), strategy.device)
    cuda = state["cuda"][0].numpy().tobytes() if state.get("cuda") else b""
    mark = zlib.crc32(state["torch"].numpy().tobytes() + cuda)
    courses: dict[tuple[int, int], dict[int, list[int]]] = {}
    for rank, (place, theirs) in enumerate(strategy.gather_objects(((topology.data_rank, topology.stage), mark))):
        courses.setdefault(place, {}).setdefault(theirs, []).append(rank)
    unlike = [list(ranks.values()) for ranks in courses.values() if len(ranks) > 1]
    if unlike:
        listed = "; ".join(" and ".join(map(str, groups)) for groups in unlike)
        raise ModuleError(
            "Expected ranks that work on the same samples to have drawn the same random numbers, got different states "
            f"of torch's generators on ranks {listed}: their dropout masks would differ.",
            fix="draw on all ranks, or from your own torch.Generator in code that depends on the rank, such as "
            "`if self.global_rank == 0`.",
        )


# --- in checkpoints --------------------------------------------------------------------------------------------------


def collect(strategy: Strategy, own: StateDict, *, everywhere: bool = False) -> StateDict:
    """Return the generators of all ranks for a checkpoint, and which shares of the data these read. On every rank.

    Rank 0, which writes them, has the states of all ranks; other ranks have only theirs. They are 14 KB for each rank.

    Args:
        strategy: Connects the ranks.
        own: State of this rank's generators.
        everywhere: Whether all ranks have the states of all, since several of them write.
    """
    gather = strategy.gather_objects if everywhere else strategy.gather_to_first
    if not strategy.traits.copies_draw_alike:
        return {"rng_of_ranks": gather(own) or [own]}
    topology = strategy.topology
    mine = ((topology.data_rank, topology.stage), _portable(own, strategy.device))
    of_all = gather(mine) or [mine]
    return {"rng_of_ranks": [state for _, state in of_all], "rng_places": [place for place, _ in of_all]}


def own_state(strategy: Strategy, states: Sequence[StateDict], places: Places | None) -> StateDict | None:
    """Return the state in which this rank's generators were saved; None where another number of ranks read the data.

    Args:
        strategy: Knows this rank's place now.
        states: Of all ranks that saved, by global rank.
        places: Of these ranks; None: each read its own share of the data.
    """
    rank, size = _drawn_as(strategy)
    if places is None:
        places = [(number, 0) for number in range(len(states))]
    if 1 + max(data_rank for data_rank, _ in places) != size:
        return None
    # Copies choose the same state, whatever the mesh was: the one of their stage, if there was such a stage.
    own = [(stage, state) for (data_rank, stage), state in zip(places, states, strict=True) if data_rank == rank]
    return next((state for stage, state in own if stage == strategy.topology.stage), own[0][1])


def resumed(strategy: Strategy, states: Sequence[StateDict], places: Places | None) -> Callable[[], None]:
    """Return a function that restores this rank's generators.

    Exact on as many ranks that read different data as saved. On another number, rank 0 and its copies continue as rank
    0 was, and the others get a sequence that depends on rank 0's and their number.

    Args:
        strategy: Knows this rank's place now.
        states: Of all ranks that saved, by global rank.
        places: Data rank and stage of each of them; None: each read its own share of the data.
    """
    own = own_state(strategy, states, places)
    rank, size = _drawn_as(strategy)
    if own is not None or rank == 0:
        state = states[0] if own is None else own
        return lambda: restore_rng(state)

    def derive() -> None:
        restore_rng(states[0])
        seed_global_generators(derive_key(states[0], "rank", rank, "of", size))

    return derive


def _drawn_as(strategy: Strategy) -> tuple[int, int]:
    """Return this rank's number among those that draw different numbers, and how many these are."""
    topology = strategy.topology
    if strategy.traits.copies_draw_alike:
        return topology.data_rank, topology.data_size
    return topology.global_rank, topology.world_size


def _portable(state: StateDict, device: torch.device) -> StateDict:
    """Return a state in which every GPU has the sequence of this process's GPU: its copies compute on other GPUs."""
    if device.type != "cuda" or "cuda" not in state:
        return state
    index = torch.cuda.current_device() if device.index is None else device.index
    return {**state, "cuda": [state["cuda"][index]] * len(state["cuda"])}
