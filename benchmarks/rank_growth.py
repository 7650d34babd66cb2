"""How the cost of a step and of the start grows with the number of ranks: 1, 2, 4 and 8 processes; run.py prints it.

This file is also the program that is measured: `python benchmarks/rank_growth.py 4 100`. All numbers are those of a
rank, and none is wall time: more processes than cores share these.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from growth import exponent
from tables import table

__all__ = ["describe_rank_growth", "measure_rank_growth"]

WAYS = ("hand-written DDP", "Trainer")
_COSTS = (
    # key, of what, unit
    ("cpu_us", "a step", "CPU us"),
    ("calls", "a step", "calls"),
    ("collectives", "a step", "collectives"),
)


def measure_rank_growth(*, is_quick: bool) -> list[dict[str, Any]]:
    """Return rows with name, cost, unit, sizes (numbers of ranks), values (one for each), and exponent."""
    from ranks import run_program  # a name that tests have, too

    sizes = (1, 2) if is_quick else (1, 2, 4, 8)
    found = [run_program([__file__, str(size), "30" if is_quick else "100"]) for size in sizes]
    rows = [
        _row(way, what, unit, sizes, [one[way][key] for one in found]) for key, what, unit in _COSTS for way in WAYS
    ]
    return [*rows, _row("Trainer", "the start, to the launch", "CPU ms", sizes, [one["start_cpu_ms"] for one in found])]


def _row(name: str, what: str, unit: str, sizes: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    slope = exponent(sizes, values)
    return {"name": name, "cost": what, "unit": unit, "sizes": list(sizes), "values": list(values), "exponent": slope}


def describe_rank_growth(rows: list[dict[str, Any]]) -> list[str]:
    """Return the section of RESULTS.md."""
    sizes = ", ".join(map(str, rows[0]["sizes"]))
    return [
        "## Growth over ranks",
        f"Costs of one rank with {sizes} processes (`ddp`, gloo, the toy of the first table): CPU time of all its "
        "threads and calls of Python functions, medians of steps, averaged over the ranks; collectives in a step; CPU "
        "time from the start of the interpreter to the end of the launch, imports included. Wall time is not shown: "
        "the processes share the cores of one machine, and the CPU time of a step also holds what switching between "
        "them costs. Exponent: as above. Target: at most 1; none, or 0 from two ranks on, for calls, collectives and "
        "start. With one rank the Trainer wraps nothing and communicates nothing. Where a step takes 10 ms of wall "
        "time, as with many processes on few cores, its timeline measures each step, in more calls.",
        table(
            ("", "cost of", "unit", *(f"{size}" for size in rows[0]["sizes"]), "exponent"),
            (
                (
                    row["name"],
                    row["cost"],
                    row["unit"],
                    *(f"{value:,.0f}" for value in row["values"]),
                    "**none**" if row["exponent"] is None else f"**{row['exponent']:.2f}**",
                )
                for row in rows
            ),
        ),
    ]


# --- the program that is measured -----------------------------------------------------------------------------------


class Meter:
    """What a rank has used so far: CPU time, and what is counted while it is entered with `with`."""

    def __init__(self) -> None:
        self.calls = 0
        self.marks: list[tuple[float, int, int]] = []

    def mark(self) -> None:
        """Note the state; called where a step begins."""
        from torch.distributed.distributed_c10d import _world

        groups: list[Any] = list(_world.pg_map)  # Any: the method is missing in torch's types
        collectives = sum(group._get_sequence_number_for_group() for group in groups)
        self.marks.append((time.process_time(), self.calls, collectives))

    def __enter__(self) -> Meter:
        def note(frame: Any, event: str, argument: Any) -> None:  # Any: of the interpreter
            self.calls += event == "call"

        sys.setprofile(note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def per_step(self, kind: int) -> float:
        """Return the median difference between two steps: of CPU time (0), calls (1) or collectives (2)."""
        kept = self.marks[10:]
        return statistics.median(after[kind] - before[kind] for before, after in itertools.pairwise(kept))


def main() -> None:
    """Train in a handwritten loop and with the Trainer, once for CPU time, once for counts; rank 0 prints averages."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from toy import Toy, batches, make
    from variants import OFF, quiet

    import loopwright as lw

    ranks, num_batches = (int(argument) for argument in sys.argv[1:3])
    fabric = lw.Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    start_cpu_ms = 1e3 * time.process_time()
    data = batches(num_batches * ranks)
    own = data[fabric.global_rank :: ranks]

    class Metered(Toy):
        meter: Meter

        def training_step(self, batch: Any, batch_idx: int) -> Any:  # Any: as in Toy
            self.meter.mark()
            x, y = batch
            return torch.nn.functional.mse_loss(self.net(x), y)

        def forward(self, batch: Any, batch_idx: int) -> Any:
            return self.training_step(batch, batch_idx)

    def by_hand(toy: Any) -> None:
        model = DistributedDataParallel(toy)
        optimizer = toy.configure_optimizers()
        for index, batch in enumerate(own):
            loss = model(batch, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def by_trainer(toy: Any) -> None:
        options: dict[str, Any] = {**OFF, "max_epochs": 1, "accelerator": "cpu", "devices": ranks, "strategy": "ddp"}
        lw.Trainer(**options).fit(toy, data)

    numbers: dict[str, Any] = {}
    ways: dict[str, Callable[[Any], None]] = dict(zip(WAYS, (by_hand, by_trainer), strict=True))
    for name, way in ways.items():
        timed, counted = Meter(), Meter()
        with quiet():
            for meter in (timed, counted):
                toy: Any = make(Metered)
                toy.meter = meter
                if meter is counted:
                    with meter:
                        way(toy)
                else:
                    way(toy)
        of_rank = [1e6 * timed.per_step(0), counted.per_step(1), counted.per_step(2)]
        of_ranks = fabric.all_gather(torch.tensor([*of_rank, start_cpu_ms], dtype=torch.float64)).reshape(-1, 4)
        cpu_us, calls, collectives, start = of_ranks.mean(0).tolist()
        numbers[name] = {"cpu_us": cpu_us, "calls": calls, "collectives": collectives}
        numbers["start_cpu_ms"] = start
    if fabric.global_rank == 0:
        print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
