"""`Pipeline`: how a model is split into stages, and in which order these run the micro-batches of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....errors import ConfigError, Problems, nearest


@dataclass(frozen=True, slots=True)
class Schedule:
    """The definition of a schedule.

    Attributes:
        torch_name: Name of the class in `torch.distributed.pipelining`.
        stages_per_rank: Number of stages on each rank, unless split points say otherwise.
        is_v: Whether rank r of n has stages r and 2n - 1 - r; else r, r + n, r + 2n, ...
        splits_backward: Whether gradients of inputs and of parameters are computed one after the other.
    """

    torch_name: str
    stages_per_rank: int = 1
    is_v: bool = False
    splits_backward: bool = False

    def stages_of(self, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
        """Return the numbers of a rank's stages, ascending."""
        if self.is_v:
            return (rank, num_stages - 1 - rank)
        return tuple(range(rank, num_stages, num_ranks))


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe"),
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved": Schedule("ScheduleInterleaved1F1B", 2),
    "zero-bubble": Schedule("ScheduleInterleavedZeroBubble", 2, splits_backward=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", 2, is_v=True, splits_backward=True),
    "dualpipev": Schedule("ScheduleDualPipeV", 2, is_v=True, splits_backward=True),
}


@dataclass(frozen=True)
class Pipeline:
    """How `MeshStrategy` splits a model over its axis `pp`.

    The blocks of one `ModuleList` or `Sequential` are split into stages. Submodules that are registered before it
    belong to the first stage, submodules after it to the last one. A pipelined step runs the micro-batches of an
    accumulation window.

    Args:
        module: Name of the submodule to split, such as "model"; `training_step` calls it once. None is the submodule
            with the largest list of repeated blocks.
        split: "even" gives stages equal numbers of parameters, as far as blocks allow; or the names of the first blocks
            of the second and later stages, such as ["model.blocks.4"].
        schedule: Order of forward and backward passes. "gpipe": all forward passes, then all backward passes. "1f1b":
            they alternate, which takes less memory. "interleaved" and "zero-bubble": several stages on each rank (two,
            unless `split` names more), for less idle time. "zbv" and "dualpipev": two stages on each rank, with the
            first and the last stage on rank 0.
        micro_batches: Number of parts into which each batch of the loader is split along its first dimension. The
            parts run through the stages one after the other, also with `accumulate_grad_batches=1`.

    Raises:
        ConfigError: An argument is invalid; every problem is named.
    """

    module: str | None = None
    split: str | Sequence[str] = "even"
    schedule: str = "1f1b"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        problems = Problems()
        if not (self.module is None or (isinstance(self.module, str) and self.module)):
            what = f"Expected Pipeline(module=...) to be the name of a submodule, got {self.module!r}."
            problems.add(what, fix="pass a name or None.")
        _check_split(self.split, problems)
        if self.schedule not in SCHEDULES:
            near = nearest(self.schedule.lower(), SCHEDULES) if isinstance(self.schedule, str) else ""
            names = ", ".join(map(repr, SCHEDULES))
            what = f"Expected Pipeline(schedule=...) to be one of {names}, got {self.schedule!r}{near}."
            problems.add(what, fix="pass one of these names.")
        if not (type(self.micro_batches) is int and self.micro_batches > 0):
            what = f"Expected Pipeline(micro_batches=...) to be a positive number, got {self.micro_batches!r}."
            problems.add(what, fix="pass the number of parts into which each batch is split.")
        problems.refuse()

    def stages_of(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return the numbers of a rank's stages, ascending."""
        return SCHEDULES[self.schedule].stages_of(rank, num_ranks, self.num_stages(num_ranks))

    def num_stages(self, num_ranks: int) -> int:
        """Return the number of stages on all ranks of a pipeline.

        Raises:
            ConfigError: The schedule does not support the number of stages that the split points define.
        """
        schedule = SCHEDULES[self.schedule]
        default = schedule.stages_per_rank * num_ranks
        if isinstance(self.split, str):
            return default
        wanted = len(self.split) + 1
        can_have_more = schedule.stages_per_rank > 1 and not schedule.is_v
        if wanted == default or (can_have_more and wanted > num_ranks and wanted % num_ranks == 0):
            return wanted
        multiple = f" or more, a multiple of {num_ranks} less one" if can_have_more else ""
        raise ConfigError(
            f"Expected {default - 1} split points{multiple} for pp={num_ranks} and schedule={self.schedule!r}, "
            f"got {len(self.split)}: {', '.join(self.split)}.",
            fix="name the first block of each stage but the first, or pass split='even'.",
        )


def _check_split(split: object, problems: Problems) -> None:
    if split == "even":
        return
    if isinstance(split, str) or not isinstance(split, Sequence):
        near = nearest(str(split), ["even"])
        problems.add(
            f"Expected Pipeline(split=...) to be 'even' or a list of names, got {split!r}{near}.",
            fix="pass 'even', or the names of the blocks with which stages begin.",
        )
    elif not split or not all(isinstance(one, str) for one in split):
        what = f"Expected names of blocks in Pipeline(split=...), got {list(split)!r}."
        problems.add(what, fix="pass names, or 'even'.")
    elif len(set(split)) < len(split):
        what = f"Expected each block once in Pipeline(split=...), got {list(split)!r}."
        problems.add(what, fix="leave the second one out.")
