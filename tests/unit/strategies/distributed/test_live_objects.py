"""Objects that a strategy remembers without keeping them alive."""

from __future__ import annotations

import gc
import pickle

from torch import nn

from loopwright.strategies.distributed.live_objects import LiveObjects


class Cycle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["me"] = self


def test_what_is_added_twice_is_there_once_and_in_order() -> None:
    known: LiveObjects[nn.Module] = LiveObjects()
    modules = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for one in [*modules, modules[0]]:
        known.add(one)
    assert list(known) == modules
    known.discard(modules[0])
    assert list(known) == modules[1:]
    known.clear()
    assert list(known) == []


def test_a_cycle_that_the_program_has_dropped_is_alive_and_not_in_use() -> None:
    known: LiveObjects[nn.Module] = LiveObjects()
    kept = Cycle()
    gc.disable()
    try:
        known.add(kept)
        known.add(Cycle())
        assert len(list(known)) == 2
        assert known.in_use() == [kept]
    finally:
        gc.enable()


def test_another_process_has_none_of_them() -> None:
    known: LiveObjects[nn.Module] = LiveObjects()
    module = nn.Linear(1, 1)
    known.add(module)
    assert list(pickle.loads(pickle.dumps(known))) == []
    assert list(known) == [module]
