"""`dry_run`: what a start on many ranks would refuse, found on one machine, where some ranks are simulated in turn."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import LoopwrightError
from .simulation import Training, simulate

if TYPE_CHECKING:
    from ..strategies import Strategy, Topology


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was looked at.
        value: What was found.
        is_problem: Whether a real start would refuse it, or train nothing.
        advice: What to do about it; "" if nothing is to be done.
    """

    name: str
    value: str
    is_problem: bool = False
    advice: str = ""


def dry_run(
    training: Training, strategy: str | Strategy, *, devices: int, num_batches: int | None, num_nodes: int = 1
) -> list[Check]:
    """Set up and train a step on ranks of a simulated world: the first, the last, and the first of each stage.

    Args:
        training: What is trained.
        strategy: The strategy; an instance is copied for each rank.
        devices: Number of ranks.
        num_batches: Batches of an epoch in one process; None: unknown.
        num_nodes: Nodes that the ranks are on.

    Returns:
        A check for each rank, or for each problem with the ranks that have it, and one of the data.
    """
    found: dict[tuple[str, str], list[int]] = {}
    topology: Topology | None = None
    has_trained = False
    waiting, done = [0, devices - 1], set[int]()
    while waiting:
        rank = waiting.pop(0)
        if rank in done:
            continue
        done.add(rank)
        own = copy.deepcopy(strategy)
        try:
            usage = simulate(training, own, devices=devices, rank=rank, num_nodes=num_nodes)
        except LoopwrightError as error:
            found.setdefault((error.what, error.fix), []).append(rank)
            continue
        # Of the user's module, or of torch: what reads values of tensors cannot be simulated, and a start may work.
        except Exception as error:
            reason = (str(error) or "no message").splitlines()[0]
            what = f"not known: the step cannot be simulated ({type(error).__name__}: {reason})"
            found.setdefault((what, ""), []).append(rank)
            continue
        assumed = ", if numbers that the step reads are 1 and conditions False" if usage.has_assumed else ""
        found.setdefault((f"trains a step, {usage.peak_bytes / 1e9:.2f} GB at its peak{assumed}", ""), []).append(rank)
        has_trained = True
        if not isinstance(own, str):
            topology = own.topology
            if rank == devices - 1:  # of the last stage
                stages = topology.stage + 1
                waiting += [number * devices // stages for number in range(stages)]
    checks = [
        Check(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}", what, bool(fix), fix)
        for (what, fix), ranks in found.items()
    ]
    if num_batches is not None and has_trained:
        data_size = devices if topology is None else topology.data_size
        checks += check_batches(num_batches, data_size, accumulate=training.accumulate)
    return checks


def check_batches(num_batches: int, data_size: int, *, accumulate: int) -> Sequence[Check]:
    """Compare the batches of an epoch with the ranks that read different ones.

    Args:
        num_batches: Batches of an epoch in one process.
        data_size: Number of ranks that read different data.
        accumulate: Micro-batches per step.
    """
    each, rest = divmod(num_batches, data_size)
    if not each:
        return [
            Check(
                "data",
                f"{num_batches} batches for {data_size} ranks that read different ones: no step would be trained",
                is_problem=True,
                advice="use a smaller batch_size, more data, or fewer ranks; or uneven='cycle' or 'join', if the "
                "strategy has it.",
            )
        ]
    checks = [Check("data", f"{each} batches an epoch for each of {data_size} ranks, of {num_batches}")]
    if rest:
        advice = "add data, or choose a batch_size that divides it, to train on all of it"
        checks.append(
            Check(
                "uneven data",
                f"{rest} batches of an epoch are left over: uneven='stop_all' leaves them out",
                advice=advice,
            )
        )
    if each < accumulate:
        value = f"a window of {accumulate} micro-batches is longer than an epoch of {each}"
        checks.append(Check("accumulation", value, advice="use fewer micro-batches for a step, or more data"))
    return checks
