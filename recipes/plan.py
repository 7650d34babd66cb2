"""`plan`: checks settings, model and data of a training, and computes its steps and memory, without a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ..messages import counted
from ..strategies.optional import memory_shares
from .memory import MemoryPlan, Sizes, count_sizes, plan_memory
from .report import describe_data, show_bytes
from .settings import PretrainSettings, TrainSettings
from .step_plan import StepBudget
from .train import Prepared, prepare

# Any in this file: plain values for JSON.


@dataclass(frozen=True)
class PlanReport:
    """What a training would do.

    Attributes:
        command: "finetune" or "pretrain".
        out: Folder of the run.
        continues: Whether a run is in it, which the training would continue.
        strategy: Name of the strategy.
        processes: Number of processes.
        steps: The steps.
        sizes: Of the model.
        memory: Per device.
        data: Counts of the data.
        text: The data as text.
    """

    command: str
    out: str
    continues: bool
    strategy: str
    processes: int
    steps: StepBudget
    sizes: Sizes
    memory: MemoryPlan
    data: dict[str, Any]
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        found = asdict(self)
        found.pop("text")
        found["steps"]["global_batch"] = self.steps.global_batch
        found["memory"].update(state=self.memory.state, total=self.memory.total)
        return found

    def describe(self) -> str:
        """Return the report as text."""
        memory, sizes = self.memory, self.sizes
        frozen = f", {sizes.frozen:,} frozen ({show_bytes(sizes.frozen_bytes)})" if sizes.frozen else ""
        note = "" if memory.is_adamw else ", as for AdamW"
        formula = f"{memory.formula}; P: trained parameters, in float32"
        if memory.width != 4:
            formula = f"P trained parameters of {8 * memory.width} bits; in float32 {memory.formula}"
        rows = {
            "weights": show_bytes(memory.weights),
            "gradients": show_bytes(memory.gradients),
            "optimizer": show_bytes(memory.optimizer) + note,
            "buckets": show_bytes(memory.buffers) if memory.buffers else "",
            "sum": f"{show_bytes(memory.state)} ({formula})",
            "activations": f"about {show_bytes(memory.activations)}",
            "logits": f"at most {show_bytes(memory.logits)}",
            "total": f"about {show_bytes(memory.total)}",
        }
        width = max(map(len, rows))
        start = "continues the run in" if self.continues else "new run in"
        lines = [
            f"{self.command}: {start} {self.out}; everything is valid",
            f"model: {sizes.trained:,} trained parameters{frozen}",
            self.text,
            f"memory per device, {counted(self.processes, 'process')}, {self.strategy}:",
            *(f"  {name:<{width}}  {value}" for name, value in rows.items() if value),
        ]
        return "\n".join(lines)


def plan(settings: TrainSettings) -> PlanReport | None:
    """Check a training and compute its steps and memory. The data are tokenized into the cache; nothing is trained.

    Args:
        settings: The settings of the training.

    Returns:
        The plan; None on ranks other than 0.

    Raises:
        ConfigError: Names everything that is wrong with settings, model and data.
        MissingDependency: A package is not installed.
    """
    command = "pretrain" if isinstance(settings, PretrainSettings) else "finetune"
    with _assumed_cluster(int(settings.trainer.get("num_nodes", 1))):
        prepared = prepare(command, settings)
    return _report(prepared) if prepared.trainer.is_global_zero else None


@contextmanager
def _assumed_cluster(num_nodes: int) -> Iterator[None]:
    """Let this process stand for the first of several machines: nothing is launched or connected."""
    assumed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"} if num_nodes > 1 else {}
    added = {name: value for name, value in assumed.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _report(prepared: Prepared) -> PlanReport:
    settings, trainer = prepared.settings, prepared.trainer
    prepared.data.setup("fit")
    steps, report = prepared.plan(), prepared.data.report
    sizes = count_sizes(settings.model_settings())
    shares = memory_shares(trainer.strategy, trainer.world_size, trainer.num_nodes)
    return PlanReport(
        command=prepared.command,
        out=str(prepared.run.path),
        continues=prepared.run.recipe.is_file(),
        strategy=type(trainer.strategy).__name__,
        processes=trainer.world_size,
        steps=steps,
        sizes=sizes,
        memory=plan_memory(settings, sizes, shares),
        data={name: value for name, value in report.as_dict().items() if name != "first_sample"},
        text=describe_data(report, steps, sizes, in_color=False),
    )
