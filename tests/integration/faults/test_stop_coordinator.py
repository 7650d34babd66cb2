"""A signal to any rank at any moment ends all ranks at the same step, without a collective."""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from broken_ranks import Ranks

from loopwright.fabric.watch import Watch
from loopwright.trainer.loop.run_signals import RunSignals


def say(**values: Any) -> None:
    sys.stderr.write(json.dumps(values) + "\n")


def fit(rank: int, size: int, store: Any, *, seed: int = 0, steps: int = 100_000, watch: Watch | None = None) -> None:
    """Do what fit does: steps and evaluations with a collective each, asking the coordinator before each phase."""
    is_own = watch is None
    if watch is None:
        timeout = datetime.timedelta(seconds=30)
        group = dist.PrefixStore("pg", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=timeout)
        watch = Watch(store, rank=rank, size=size, local_rank=rank, timeout=timeout)
        watch.start()
    rng = random.Random(seed * 100 + rank)
    done, batches = 0, 0
    collectives = 0
    run_signals = RunSignals()
    try:
        with run_signals:
            run_signals.connect(watch)
            coordinator = watch.stop_coordinator
            say(ready=rank)
            try:
                for step in range(steps):
                    if not coordinator.begin():
                        run_signals.stop()
                    time.sleep(rng.random() * 0.003)
                    dist.all_reduce(torch.ones(1))
                    collectives += 1
                    done += 1
                    if step % 7 == 3:  # an evaluation: batches of one's own, then a collective
                        if not coordinator.begin():
                            run_signals.stop()
                        for _ in range(rng.randrange(6)):
                            if not coordinator.within():
                                run_signals.stop()
                            batches += 1
                            time.sleep(0.001)
                        if not coordinator.end():
                            run_signals.stop()
                        dist.all_reduce(torch.ones(1))
                        collectives += 1
                if not coordinator.begin():
                    run_signals.stop()
            finally:
                say(done=done, collectives=collectives, reason=coordinator.reason, position=coordinator.position)
    finally:
        if is_own:
            watch.stop()


def last(said: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads([line for line in said.splitlines() if '"done"' in line][-1])
    return values


@pytest.mark.parametrize("seed", range(6))
def test_sigterm_to_any_rank_ends_all_after_the_same_step(seed: int) -> None:
    rng = random.Random(seed)
    size = 2 + seed % 2
    ranks = Ranks(fit, size, seed=seed)
    for rank in range(size):
        ranks.line(rank, "ready")
    time.sleep(rng.random() * 0.3)
    for rank in rng.sample(range(size), 1 + seed % size):  # one, or several at nearly the same time
        os.kill(ranks.processes[rank].pid or 0, signal.SIGTERM)
        time.sleep(rng.random() * 0.01)
    ended = ranks.wait()
    assert [one.code for one in ended] == [143] * size, ended
    values = [last(one.said) for one in ended]
    assert len({(one["done"], one["collectives"], one["reason"]) for one in values}) == 1, values
    assert values[0]["reason"] == "SIGTERM"


def test_ctrl_c_at_one_rank_interrupts_all() -> None:
    ranks = Ranks(fit, 2)
    for rank in range(2):
        ranks.line(rank, "ready")
    os.kill(ranks.processes[1].pid or 0, signal.SIGINT)
    ended = ranks.wait()
    assert [one.code for one in ended] == [1, 1]
    assert all("KeyboardInterrupt" in one.said for one in ended)
    assert len({last(one.said)["done"] for one in ended}) == 1


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_rank_that_hangs_in_a_collective() -> None:
    def program(rank: int, size: int, store: Any) -> None:
        timeout = datetime.timedelta(hours=1)
        group = dist.PrefixStore("pg", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=timeout)
        watch = Watch(store, rank=rank, size=size, local_rank=rank, timeout=timeout)
        watch.start()
        with RunSignals() as run_signals:
            run_signals.connect(watch)
            say(ready=rank)
            if rank == 0:
                dist.all_reduce(torch.ones(1))  # C++, which no handler interrupts
            time.sleep(600)

    ranks = Ranks(program, 2)
    for rank in range(2):
        ranks.line(rank, "ready")
    time.sleep(0.5)
    for _ in range(2):
        os.kill(ranks.processes[0].pid or 0, signal.SIGINT)
        time.sleep(0.6)
    ended = ranks.wait()
    assert ended[0].code == 130
    assert ended[1].code not in (0, None)


def test_a_second_run_goes_on_after_an_interrupted_one() -> None:
    def program(rank: int, size: int, store: Any) -> None:
        timeout = datetime.timedelta(seconds=30)
        group = dist.PrefixStore("pg", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=timeout)
        watch = Watch(store, rank=rank, size=size, local_rank=rank, timeout=timeout)
        watch.start()
        try:
            fit(rank, size, store, watch=watch)
        except KeyboardInterrupt:
            say(interrupted=rank)
        fit(rank, size, store, watch=watch, steps=20)
        watch.stop()

    ranks = Ranks(program, 2)
    for rank in range(2):
        ranks.line(rank, "ready")
    os.kill(ranks.processes[0].pid or 0, signal.SIGINT)
    ended = ranks.wait()
    assert [one.code for one in ended] == [0, 0], ended
    assert all("interrupted" in one.said for one in ended)
    assert [last(one.said)["done"] for one in ended] == [20, 20]
