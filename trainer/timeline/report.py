"""The report of a timeline: fractions, the bottleneck, the limit of the step, and remedies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...messages import counted
from .phases import STEP_PHASES, readable_time

if TYPE_CHECKING:
    from .timeline import Timeline

_GROUPS = {
    "data": ("data", "transfer"),
    "compute": ("forward", "backward"),
    # An optimizer reads and writes each weight and its state, and does little with them.
    "memory": ("optimizer", "clip"),
    "communication": ("communication",),
    "overhead": ("hooks", "loop", "schedule", "logging", "epoch"),
}
_ADVICE = {
    "data": "the device waits for data: raise num_workers and prefetch_factor of the DataLoader, set pin_memory=True "
    "and persistent_workers=True (lw.Tuner(trainer).speed(model, loader) tries them), or prepare samples beforehand",
    "transfer": "moving batches takes long: set pin_memory=True, send smaller dtypes, and convert on the device",
    "compute": "the device computes: use precision='bf16-mixed' or torch.compile, a faster attention, or more devices; "
    "raise the batch size if the device is not full (trainer.timeline.counts_operations = True tells whether operators "
    "wait for arithmetic or for memory)",
    "memory-bound": "operators wait for memory, not for arithmetic: fuse them with torch.compile, use a narrower dtype "
    "(precision='bf16-mixed'), and larger batches",
    "memory": "the optimizer is bound by memory: use its fused=True or foreach=True, accumulate_grad_batches to step "
    "less often, or shard its state",
    "communication": "ranks wait for gradients, or for a slower rank: compress them (ddp_comm_hook='bf16') or gather "
    "parameters less often (fsdp: sharding_strategy='SHARD_GRAD_OP', larger units), raise accumulate_grad_batches or "
    "the batch size, and compare the ranks' data and forward times",
    "overhead": "the host is busy with other things than the step: log less often (log_every_n_steps), do less in "
    "callbacks, and give each step more work",
    "launching": "the device is idle while the host launches its work: use torch.compile (mode='reduce-overhead' "
    "records CUDA graphs) or larger batches",
    "validation": "validation takes a large part: validate less often (val_check_interval, check_val_every_n_epoch) "
    "or on fewer batches (limit_val_batches)",
    "checkpoint": "checkpoints take a large part: save less often (every_n_train_steps, train_time_interval)",
    "first step": "the first step takes a large part of this short fit (compilation, tuning): measure a longer one",
}
_FUSED_ALREADY = (
    "the optimizer takes {share:.0%} of a step: accumulate_grad_batches steps less often; with several devices its "
    "state can be sharded (strategy='fsdp')"
)
_FUSED_IS_FASTER = (
    "the optimizer takes {share:.0%} of a step: a step of {name}(fused=True), which lw.optim.{function} chooses, took "
    "{fused} in a trial here, not {present}; accumulate_grad_batches steps less often"
)
_WORTH_SAYING = 0.1
_WORTH_FUSING = 1.1
_BAR = 30


@dataclass(frozen=True)
class TimelineReport:
    """The time of a fit by phase. `str()` returns a readable table, `as_dict()` plain values.

    Attributes:
        seconds: Seconds of each phase over the whole fit; their sum is `total_s`.
        total_s: Seconds of the fit's loop.
        num_steps: Optimizer steps.
        num_measured: How many of them were measured phase by phase.
        first_step_s: Seconds of the first step, which is not in the phases.
        clock: "host", "device" (events in its stream) or "synchronized" (the host waited for it between phases).
        bottleneck: Phase with the largest part.
        bound: What binds a step: "data", "compute", "memory", "communication" or "overhead".
        advice: What to do about each part of a tenth or more, the largest first.
        intensity: Floating-point operations per byte; None unless operations were counted.
        idle_fraction: In how many steps the device was idle when the host was done; None on a CPU.
        compiled: What torch.compile cost and gains, as text; None where nothing was compiled.
        waited_for: Ranks that the others waited for, and in which phase, as text; known on each rank after the fit.
    """

    seconds: dict[str, float]
    total_s: float
    num_steps: int
    num_measured: int
    first_step_s: float
    clock: str
    bottleneck: str
    bound: str
    advice: tuple[str, ...]
    intensity: float | None = None
    idle_fraction: float | None = None
    compiled: str | None = None
    waited_for: tuple[str, ...] = ()

    @property
    def fractions(self) -> dict[str, float]:
        """Part of each phase in the whole fit; their sum is 1, or 0 without any time."""
        return {phase: taken / self.total_s if self.total_s else 0.0 for phase, taken in self.seconds.items()}

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON and loggers."""
        names = self.__dataclass_fields__
        return {**{name: getattr(self, name) for name in names}, "advice": list(self.advice),
                "waited_for": list(self.waited_for), "fractions": self.fractions}  # fmt: skip

    def __str__(self) -> str:
        fractions = self.fractions
        present = sorted((phase for phase in fractions if fractions[phase] > 0), key=lambda p: -fractions[p])
        width = max([len(phase) for phase in present], default=0)
        lines = [
            f"Timeline: {self.total_s:.3g} s, {counted(self.num_steps, 'step')}, {self.num_measured} of them measured "
            f"({self.clock} time)"
        ]
        for phase in present:
            part = fractions[phase]
            bar = "#" * round(part * _BAR)
            lines.append(f"  {phase:<{width}}  {part:6.1%}  {self.seconds[phase]:9.4g} s  {bar}".rstrip())
        if not present:
            return "\n".join([*lines, "  nothing was measured"])
        lines.append(f"Bottleneck: {self.bottleneck} ({fractions[self.bottleneck]:.1%}). Bound by: {self.bound}.")
        if self.idle_fraction is not None:
            lines.append(f"The device was idle at the end of {self.idle_fraction:.0%} of the measured steps.")
        if self.intensity is not None:
            lines.append(f"Floating-point operations per byte: {self.intensity:.3g}.")
        if self.compiled is not None:
            lines.append(f"{self.compiled}.")
        lines += [f"{text[0].upper()}{text[1:]}." for text in self.waited_for]
        return "\n".join([*lines, *(f"- {text}" for text in self.advice)])


def make_report(timeline: Timeline) -> TimelineReport:
    """Return the report of what the timeline has measured so far."""
    seconds = timeline.seconds()
    total = sum(seconds.values())
    groups = {group: sum(seconds[phase] for phase in phases) for group, phases in _GROUPS.items()}
    counted = timeline.operations
    is_starved = groups["compute"] + groups["memory"] > 0 and (timeline.idle_fraction or 0) > 0.5
    bound = max(groups, key=lambda group: groups[group])
    if bound == "compute" and counted is not None and counted.is_memory_bound:
        bound = "memory"
    if bound in ("compute", "memory") and is_starved:
        bound = "overhead"
    first = timeline.first_step
    return TimelineReport(
        seconds=seconds,
        total_s=total,
        num_steps=timeline.num_steps,
        num_measured=timeline.num_measured,
        first_step_s=first.duration_s if first is not None else 0.0,
        clock=timeline.clock,
        bottleneck=max(seconds, key=lambda phase: seconds[phase]),
        bound=bound,
        advice=_advice(
            timeline, seconds, groups, total, is_memory_bound=counted is not None and counted.is_memory_bound,
            is_starved=is_starved,
        ),
        intensity=counted.intensity if counted is not None else None,
        idle_fraction=timeline.idle_fraction,
        compiled=timeline.compiled,
        waited_for=tuple(map(str, timeline.stragglers())),
    )  # fmt: skip


def _advice(
    timeline: Timeline,
    seconds: dict[str, float],
    groups: dict[str, float],
    total: float,
    *,
    is_memory_bound: bool,
    is_starved: bool,
) -> tuple[str, ...]:
    parts = {**groups, **{phase: seconds[phase] for phase in ("validation", "checkpoint", "first step")}}
    texts = []
    for name in sorted(parts, key=lambda name: -parts[name]):
        if not total or parts[name] < _WORTH_SAYING * total:
            break
        key = name
        if name == "data" and seconds["transfer"] > seconds["data"]:
            key = "transfer"
        elif name == "compute":
            key = "launching" if is_starved else "memory-bound" if is_memory_bound else "compute"
        texts.append(_advice_on_optimizer(timeline, seconds) if key == "memory" else _ADVICE[key])
    return tuple(texts)


def _advice_on_optimizer(timeline: Timeline, seconds: dict[str, float]) -> str:
    is_known, trial = timeline.try_optimizer()
    in_steps = sum(seconds[phase] for phase in STEP_PHASES)
    share = sum(seconds[phase] for phase in _GROUPS["memory"]) / in_steps
    if trial is not None and trial.speedup >= _WORTH_FUSING:
        return _FUSED_IS_FASTER.format(
            share=share, name=trial.name, function=trial.name.lower(), fused=readable_time(trial.fused_s),
            present=readable_time(trial.present_s),
        )  # fmt: skip
    return _FUSED_ALREADY.format(share=share) if is_known else _ADVICE["memory"]


assert set(STEP_PHASES) <= {phase for phases in _GROUPS.values() for phase in phases}
