"""`StepBudget`: optimizer steps of a training, from rows, ranks, micro-batch and global batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..fabric.global_batch import accumulation_steps
from ..messages import counted


@dataclass(frozen=True)
class StepBudget:
    """Optimizer steps of a training.

    Attributes:
        ranks: Ranks that read different data.
        micro_batch: Rows per rank and micro-batch.
        accumulate: Micro-batches per step.
        rows: Rows of an epoch.
        left_out: Rows that no rank reads in an epoch, because the ranks would have unequal numbers of micro-batches.
        steps_per_epoch: Steps of an epoch.
        num_steps: Steps of the training.
        epochs: Times that the data are read; not whole where steps or tokens are given.
        tokens_per_step: Tokens of a full step on average, without padding.
        trained_per_step: Those of them that are trained.
    """

    ranks: int
    micro_batch: int
    accumulate: int
    rows: int
    left_out: int
    steps_per_epoch: int
    num_steps: int
    epochs: float
    tokens_per_step: float
    trained_per_step: float

    @property
    def global_batch(self) -> int:
        """Rows of a full step over all ranks."""
        return self.ranks * self.micro_batch * self.accumulate

    def describe(self) -> str:
        """Return one line."""
        return (
            f"{self.num_steps:,} steps of {counted(self.global_batch, 'row')} ({counted(self.ranks, 'rank')} x "
            f"{self.micro_batch} x {self.accumulate}), {self.epochs:.3g} epoch{'s' if self.epochs != 1 else ''} of "
            f"{self.rows:,} rows, about {self.trained_per_step:,.0f} trained tokens per step"
        )


def accumulation(global_batch: int, micro_batch: int, ranks: int) -> tuple[int, str]:
    """Return the micro-batches per step, and a problem where the numbers do not divide; one of them is empty.

    Args:
        global_batch: Rows per step over all ranks.
        micro_batch: Rows per rank and micro-batch.
        ranks: Ranks that read different data.
    """
    try:
        return accumulation_steps(global_batch, micro_batch, ranks, loader=None), ""
    except ConfigError:
        unit = micro_batch * ranks
        below = global_batch // unit * unit
        nearest = " or ".join(str(size) for size in (below, below + unit) if size)
        return 0, (
            f"global_batch: Expected a multiple of {unit} ({counted(ranks, 'rank')} x micro_batch="
            f"{micro_batch}), such as {nearest}, got {global_batch}."
        )


def plan_steps(
    *,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    rows: int,
    tokens: int,
    trained: int,
    takes_all: bool,
    limit: tuple[str, int],
) -> StepBudget:
    """Return the steps of a training.

    Args:
        ranks: Ranks that read different data.
        micro_batch: Rows per rank and micro-batch.
        accumulate: Micro-batches per step.
        rows: Rows of an epoch.
        tokens: Tokens of an epoch, without padding.
        trained: Trained tokens of an epoch.
        takes_all: Whether ranks without a micro-batch at the end of an epoch take part in its last step; otherwise
            micro-batches that do not suffice for all ranks are left out.
        limit: "epochs", "steps" or "tokens", and how many.
    """
    batches = -(-rows // micro_batch)
    per_rank = -(-batches // ranks) if takes_all else batches // ranks
    left_out = 0 if takes_all else max(0, rows - per_rank * ranks * micro_batch)
    per_epoch = -(-per_rank // accumulate)
    kind, number = limit
    if kind == "tokens":
        read = tokens * (rows - left_out) / rows if rows else 0
        num_steps = -(-number * per_epoch // max(1, round(read)))
    else:
        num_steps = number * per_epoch if kind == "epochs" else number
    share = ranks * micro_batch * accumulate / rows if rows else 0.0
    return StepBudget(
        ranks=ranks,
        micro_batch=micro_batch,
        accumulate=accumulate,
        rows=rows,
        left_out=left_out,
        steps_per_epoch=per_epoch,
        num_steps=num_steps,
        epochs=float(number) if kind == "epochs" else num_steps / per_epoch if per_epoch else 0.0,
        tokens_per_step=min(1.0, share) * tokens,
        trained_per_step=min(1.0, share) * trained,
    )
