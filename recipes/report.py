"""`RunReport`: the result of a training, as text and as JSON; and the text about the data at its beginning."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..callbacks import ModelCheckpoint
from ..fabric.peak_flops import mfu
from ..fabric.throughput import per_second
from ..files import only_describes, replace_file
from ..planning.formulas import chinchilla_tokens, training_flops

if TYPE_CHECKING:
    from pathlib import Path

    from ..trainer.trainer import Trainer
    from .data import DataReport
    from .memory import Sizes
    from .meter import Meter
    from .run_folder import TrainingFolder
    from .step_plan import StepBudget

_COUNTS = {
    "cut": "cut",
    "dropped": "dropped",
    "split": "split",
    "untrained": "left out, because nothing in them is trained",
}
_GREEN, _END = "\033[32m", "\033[0m"


@dataclass(frozen=True)
class RunReport:
    """The result of a training.

    Attributes:
        command: "finetune" or "pretrain".
        out: Folder of the run.
        model: Folder of the trained model; None if it was not written.
        steps: Optimizer steps of the run until now.
        num_steps: Optimizer steps of the training.
        epochs: Times that the data were read.
        global_batch: Rows per step over all ranks.
        ranks: Ranks that read different data.
        train_loss: Loss per trained token of the last step, over all ranks; None without a step.
        first_train_loss: That of the first step.
        val_loss: Loss per trained token of the last validation; None without validation.
        best_val_loss: The lowest one.
        seconds: Of training, without validation, of all runs in this folder.
        trained_tokens: Tokens with a label that were read.
        real_tokens: Tokens that were read, by the share of padding in an epoch.
        positions: Tokens that were read, padding included.
        parameters: Number of trained parameters.
        frozen_parameters: Number of frozen parameters.
        memory_bytes: Peak memory of each rank: of its device, or of its process on a CPU.
        mfu: Share of the devices' peak FLOP/s, estimated with 6 FLOPs per trained parameter and token and 4 per frozen
            one, without attention scores; None if the peak is unknown.
        data: Counts of the data.
        notes: What was done differently from the settings.
    """

    command: str
    out: str
    model: str | None
    steps: int
    num_steps: int
    epochs: float
    global_batch: int
    ranks: int
    train_loss: float | None
    first_train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    seconds: float
    trained_tokens: int
    real_tokens: int
    positions: int
    parameters: int
    frozen_parameters: int
    memory_bytes: list[int]
    mfu: float | None
    data: dict[str, Any]  # Any: counts, texts and lists
    notes: list[str]

    @property
    def is_complete(self) -> bool:
        """Whether all steps were taken."""
        return self.steps >= self.num_steps

    def as_dict(self) -> dict[str, Any]:  # Any: plain values for JSON
        """Return the report as plain values, with rates."""
        return {**asdict(self), "is_complete": self.is_complete, **self._rates()}

    def _rates(self) -> dict[str, float]:
        counts = {"trained_tokens": self.trained_tokens, "real_tokens": self.real_tokens, "positions": self.positions}
        return per_second(counts, self.seconds)

    def describe(self) -> str:
        """Return the report as text."""
        rates = self._rates()
        trained, frozen = self.parameters, self.frozen_parameters
        rows = {
            "steps": f"{self.steps:,} of {self.num_steps:,}, {self.epochs:.3g} epochs, {self.global_batch} rows each",
            "parameters": f"{trained:,} trained" + (f", {frozen:,} frozen" if frozen else ""),
            "training loss": _arrow(self.first_train_loss, self.train_loss),
            "validation loss": _validation(self.val_loss, self.best_val_loss),
            "tokens": f"{self.trained_tokens:,} trained, {self.real_tokens:,} read, {self.positions:,} with padding",
            "tokens/s": f"{rates['trained_tokens_per_sec']:,.0f} trained, {rates['real_tokens_per_sec']:,.0f} read, "
            f"{rates['positions_per_sec']:,.0f} with padding, in {self.seconds:,.1f} s of training",
            "memory": ", ".join(map(show_bytes, self.memory_bytes))
            + (" (ranks)" if len(self.memory_bytes) > 1 else ""),
            "MFU": "" if self.mfu is None else f"{self.mfu:.1%}",
            "long samples": _changed(self.data),
            "model": self.model or "",
        }
        width = max(map(len, rows))
        title = f"{self.command}: {self.out}" + ("" if self.is_complete else ", not complete; repeat the command")
        lines = [f"  {name:<{width}}  {value}" for name, value in rows.items() if value]
        return "\n".join([title, *lines, *(f"  {note}" for note in self.notes)])

    def write(self, run: TrainingFolder) -> None:
        """Write report.json and report.txt."""
        with only_describes(f"The report {run.report}"):
            replace_file(run.report.with_suffix(".txt"), self.describe() + "\n")
            replace_file(run.report, json.dumps(self.as_dict(), indent=1) + "\n")

    @classmethod
    def of_complete(cls, run: TrainingFolder) -> RunReport | None:
        """Return the report of a run that is complete, with its model; None if it is not."""
        if not run.report.is_file() or not run.model.is_dir():
            return None
        values = json.loads(run.report.read_text(encoding="utf-8"))
        found = cls(**{one.name: values[one.name] for one in fields(cls)})
        return found if found.is_complete else None


def make_report(
    command: str, trainer: Trainer, meter: Meter, plan: StepBudget, data: DataReport, *, out: Path, notes: Sequence[str]
) -> RunReport:
    """Return the report of a training that ended; on rank 0.

    Args:
        command: "finetune" or "pretrain".
        trainer: The Trainer.
        meter: What was measured.
        plan: The steps of the training.
        data: Counts of the data.
        out: Folder of the run.
        notes: What was done differently from the settings.
    """
    totals = meter.totals
    positions = int(totals["positions"])
    in_epoch = data.tokens + data.padded_tokens
    best = [
        one.best_model_score
        for one in trainer.checkpoint_callbacks
        if isinstance(one, ModelCheckpoint) and one.monitor == "val_loss"
    ]
    peak = meter.peak_flops * len(meter.memory_bytes) if meter.peak_flops else None
    steps, limit = int(totals["steps"]), trainer.fit_loop.epoch_limit
    # An epoch has fewer steps where a part of the run left out a remainder that these ranks would have read.
    has_read_all = limit != -1 and trainer.current_epoch >= limit
    return RunReport(
        command=command,
        out=str(out),
        model=None,
        steps=steps,
        num_steps=steps if has_read_all else plan.num_steps,
        epochs=totals["steps"] / plan.steps_per_epoch,
        global_batch=plan.global_batch,
        ranks=plan.ranks,
        train_loss=meter.last_loss,
        first_train_loss=meter.first_loss,
        val_loss=None,
        best_val_loss=_number(best[0] if best else None),
        seconds=totals["seconds"],
        trained_tokens=int(totals["trained"]),
        real_tokens=max(int(totals["trained"]), round(positions * data.tokens / max(1, in_epoch))),
        positions=positions,
        parameters=meter.parameters[0],
        frozen_parameters=meter.parameters[1],
        memory_bytes=meter.memory_bytes,
        mfu=mfu(meter.flops_per_token * positions, totals["seconds"], peak),
        data={name: value for name, value in data.as_dict().items() if name != "first_sample"},
        notes=[*data.notes, *notes, *_remainder(plan)],
    )


def describe_data(data: DataReport, plan: StepBudget, sizes: Sizes, *, in_color: bool) -> str:
    """Return the text at the beginning of a training: counts, steps, and the first sample with its trained parts.

    Args:
        data: Counts of the data.
        plan: The steps of the training.
        sizes: Of the model.
        in_color: Whether trained text is green; else it is between `[[` and `]]`.
    """
    held_out = f", {data.val_samples:,} held out" if data.val_samples else ""
    positions = data.tokens + data.padded_tokens
    padding = f"{data.padded_tokens / positions:.1%}" if positions else "0%"
    lines = [
        f"data: {data.samples:,} samples in {data.rows:,} rows{held_out}; {data.tokens:,} tokens, "
        f"{data.trained_tokens:,} trained; {padding} padding",
        *([f"long samples: {text}"] if (text := _changed(data.as_dict())) else []),
        *data.notes,
        f"steps: {plan.describe()}",
        *_remainder(plan),
        _compute(plan, sizes),
        f"first sample, trained text {'in green' if in_color else 'in [[ ]]'}:",
        _marked(data.first_sample, in_color=in_color),
    ]
    return "\n".join(lines)


def _marked(sample: list[tuple[str, bool]], *, in_color: bool) -> str:
    start, end = (_GREEN, _END) if in_color else ("[[", "]]")
    text = "".join(f"{start}{part}{end}" if is_trained else part for part, is_trained in sample)
    return text if len(text) <= 2000 else f"{text[:2000]}{_END if in_color else ''} ..."


def _remainder(plan: StepBudget) -> list[str]:
    if not plan.left_out:
        return []
    return [
        f"{plan.left_out} of {plan.rows} rows are left out of each epoch: {plan.ranks} ranks need equally many "
        f"micro-batches of {plan.micro_batch}."
    ]


def _compute(plan: StepBudget, sizes: Sizes) -> str:
    """Return a line about the FLOPs of the training; a frozen parameter needs no gradient of its own: 4 per token."""
    tokens = round(plan.num_steps * plan.tokens_per_step)
    flops = training_flops(sizes.trained, tokens) + 4 * sizes.frozen * tokens
    line = f"compute: {tokens:,} tokens, about {flops:.3g} FLOPs"
    return line if sizes.frozen else f"{line}; compute-optimal: {chinchilla_tokens(sizes.trained):,} tokens"


def _changed(counts: dict[str, Any]) -> str:
    return ", ".join(f"{counts[name]:,} {text}" for name, text in _COUNTS.items() if counts[name])


def _arrow(first: float | None, last: float | None) -> str:
    if last is None:
        return ""
    return f"{last:.4f}" if first is None or first == last else f"{first:.4f} -> {last:.4f}"


def _validation(last: float | None, best: float | None) -> str:
    if last is None:
        return ""
    perplexity = f" (perplexity {math.exp(min(last, 700)):,.2f})"
    return f"{last:.4f}{perplexity}" + ("" if best is None or best == last else f", best {best:.4f}")


def _number(value: Any) -> float | None:  # Any: a tensor or number
    return None if value is None else float(value)


def show_bytes(size: float) -> str:
    """Return a size with a unit: "1.50 GB"."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"
