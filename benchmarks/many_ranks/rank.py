"""The program that is measured: `python benchmarks/many_ranks/rank.py SIZE STRATEGY` prints counts of each phase."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from many_ranks.world import LOCAL, Counts, Partner, SimulatedStore, World, middle_of

STEPS = 6

Phase = dict[str, float]


class Phases:
    """What was used in each phase."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._before: Phase | None = None
        self._began_s = 0.0
        self.found: dict[str, list[Phase]] = {}

    def begin(self) -> None:
        """Begin a phase."""
        self._before, self._began_s = dict(self._counts), self._counts.cpu_s()

    def end(self, name: str) -> None:
        """End the phase, and note it under this name."""
        assert self._before is not None
        used = {kind: self._counts[kind] - self._before.get(kind, 0) for kind in self._counts}
        self.found.setdefault(name, []).append({**used, "cpu_s": self._counts.cpu_s() - self._began_s})

    def medians(self) -> dict[str, Phase]:
        """Return the medians over phases with the same name."""
        return {
            name: {kind: statistics.median(one.get(kind, 0) for one in rows) for kind in rows[-1]}
            for name, rows in self.found.items()
        }


def fit(phases: Phases, size: int, strategy_name: str, folder: str) -> None:
    """Train a few steps, and save."""
    import torch
    from torch import nn

    import loopwright as lw

    is_sharded = strategy_name == "fsdp"

    class Net(lw.Module):
        def __init__(self) -> None:
            super().__init__()
            # As many rows as the largest world has ranks, so that each rank has a part of each tensor.
            self.layers = nn.ModuleList([nn.Linear(8, 4096), nn.Linear(8, 4096)])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                phases.end("start")
            elif batch_idx > 2:
                phases.end("step")
            phases.begin()
            return sum(layer(batch[0]) for layer in self.layers).square().mean()

        def on_train_end(self) -> None:
            phases.begin()
            self.trainer.save_checkpoint(f"{folder}/checkpoint")
            phases.end("save")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    options: dict[str, Any] = {"process_group_backend": "simulated"}
    if is_sharded:
        strategy: Any = lw.FSDPStrategy(auto_wrap_policy={nn.Linear}, state_dict_type="sharded", **options)
    else:
        strategy = lw.DDPStrategy(**options)
    phases.begin()
    lw.seed_everything(1)
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * size, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)
    trainer = lw.Trainer(
        max_epochs=1, accelerator="cpu", devices=min(LOCAL, size), num_nodes=max(1, size // LOCAL),
        strategy=strategy, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(), loader)


def observe(phases: Phases, size: int, rank: int) -> None:
    """Count what the watch does: when it starts, each second, at a stop, at a failure, and when ranks are late."""
    from loopwright.fabric.failure import Failure
    from loopwright.fabric.watch.stop_coordinator import StopCoordinator
    from loopwright.fabric.watch.watch import Watch

    counts = phases._counts
    store = SimulatedStore(size, rank, counts)
    watch = Watch(store, rank=rank, size=size, local_rank=rank % LOCAL)
    watch._signal_wakeup.open()
    phases.begin()
    watch._introduce()
    watch._tick()
    phases.end("watch: start")
    for _ in range(3):
        phases.begin()
        watch._next_second = 0.0
        for _ in range(4):
            watch._tick()
        phases.end("watch: a second")

    phases.begin()
    coordinator = StopCoordinator(SimulatedStore(size, rank, counts), rank=rank, size=size)
    coordinator.begin()
    coordinator.request("SIGTERM")
    while coordinator.poll():
        pass
    assert not coordinator.begin()
    phases.end("a stop")

    phases.begin()
    failure = Failure.of(ValueError("planted"), rank=rank, place={"step": 3})
    watch._post(failure, 1)
    phases.end("a failure")


def late(phases: Phases, size: int, rank: int) -> None:
    """Count a collective that times out because the last rank did not come."""
    from loopwright.fabric.watch.watch import Watch

    counts = phases._counts
    store = SimulatedStore(size, rank, counts)
    watch = Watch(store, rank=rank, size=size, local_rank=rank % LOCAL)
    watch._signal_wakeup.open()
    watch._introduce()
    watch._tick()
    store.missing.add(size - 1)
    phases.begin()
    watch._stall_reporter.request_finding("a collective timed out")
    watch._may_have_status_request = True
    request = watch._failure_store.new_status_request()
    assert request is not None
    watch._answer(*request, now=time.monotonic() - 10)
    while watch._stall_reporter.is_open:
        watch._stall_reporter.advance([], time.monotonic())
    phases.end("a time-out")


def measure(size: int, rank: int, strategy: str, folder: str, connection: Connection, results: Connection) -> None:
    """Send the counts of one rank."""
    import torch

    torch.set_num_threads(1)
    partner = Partner(connection, is_first=rank == 0)
    with World(size=size, rank=rank, partner=partner, folder=folder) as world:
        phases = Phases(world.counts)
        fit(phases, size, strategy, folder)
        observe(phases, size, rank)
        late(phases, size, rank)
    results.send(phases.medians())


def main() -> None:
    """Print the counts of the first rank and of a middle one, as JSON."""
    size, strategy = int(sys.argv[1]), sys.argv[2]
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    found: list[dict[str, Phase]] = []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank, end in zip((0, middle_of(size)), ends, strict=True):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=measure, args=(size, rank, strategy, folder, end, sender))
            process.start()
            sender.close()
            started.append((process, receiver))
        for process, receiver in started:
            try:
                found.append(receiver.recv())
            except EOFError:
                sys.exit(f"a simulated rank of {size} failed")
            process.join()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
