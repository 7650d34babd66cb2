"""`plan`: checks settings, model and data of a training, and computes its steps and memory, without a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ..messages import counted
from ..planning.formulas import chinchilla_tokens
from ..strategies.optional import memory_shares
from .memory import MemoryPlan, Sizes, count_sizes, plan_memory
from .model.checks import model_problems
from .report import describe_data, show_bytes
from .run_folder import TrainingFolder
from .settings import PretrainSettings, TrainSettings
from .step_plan import StepBudget
from .train import Prepared, prepare, refused
from .train import check as check_training
from .trainer_arguments import find_machine

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
        steps: The steps; None without data.
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
    steps: StepBudget | None
    sizes: Sizes
    memory: MemoryPlan
    data: dict[str, Any]
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        found = asdict(self)
        found.pop("text")
        if self.steps is not None:
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
        start = f"{'continues the run' if self.continues else 'new run'} in {self.out}; everything is valid"
        if self.steps is None:
            start = "memory and work, from the model's configuration; pass data=... and out=... to check everything"
        lines = [
            f"{self.command}: {start}",
            f"model: {sizes.trained:,} trained parameters{frozen}",
            self.text,
            f"memory per device, {counted(self.processes, 'process')}, {self.strategy}:",
            *(f"  {name:<{width}}  {value}" for name, value in rows.items() if value),
        ]
        return "\n".join(lines)


def plan(settings: TrainSettings) -> PlanReport | None:
    """Check a training and compute its steps and memory. The data are tokenized into the cache; nothing is trained.

    Args:
        settings: The settings of the training. Of `PlanFinetuneSettings` and `PlanPretrainSettings` without data, model
            and strategy are checked, and memory and work are computed.

    Returns:
        The plan; None on ranks other than 0.

    Raises:
        ConfigError: Names everything that is wrong with settings, model and data.
        MissingDependency: A package is not installed.
    """
    command = "pretrain" if isinstance(settings, PretrainSettings) else "finetune"
    with _assumed_cluster(int(settings.trainer.get("num_nodes", 1))):
        if not settings.data:
            return _report_of_model(command, settings)
        prepared = prepare(command, settings)
    return _report(prepared) if prepared.trainer.is_global_zero else None


def check(settings: TrainSettings) -> list[str]:
    """Return what is wrong with settings, model and first records, as `name: Expected ..., got ...`.

    Raises:
        MissingDependency: A package is not installed.
    """
    return check_training(settings) if settings.data else _problems_of_model(settings)


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


def _problems_of_model(settings: TrainSettings) -> list[str]:
    """Return what is wrong with the settings and the model; no tokenizer and no data are asked for."""
    problems = [one for one in settings.problems() if not one.startswith("data:")]
    return [*problems, *model_problems(settings.model_settings())]


def _report_of_model(command: str, settings: TrainSettings) -> PlanReport:
    problems = _problems_of_model(settings)
    machine, found = find_machine(settings, TrainingFolder(settings.out.expanduser()))
    if machine is None or problems:
        raise refused(command, [*problems, *found])
    sizes = count_sizes(settings.model_settings())
    world_size = machine.strategy.world_size
    shares = memory_shares(machine.strategy, world_size, int(settings.trainer.get("num_nodes", 1)))
    text = f"work: about {(6 * sizes.trained + 4 * sizes.frozen) / 1e9:,.1f} GFLOPs per token"
    if command == "pretrain":
        tokens = chinchilla_tokens(sizes.trained)
        text += f"; {tokens / 1e9:,.0f} billion tokens are compute-optimal for a model of this size"
    return PlanReport(
        command=command,
        out=str(settings.out),
        continues=False,
        strategy=type(machine.strategy).__name__,
        processes=world_size,
        steps=None,
        sizes=sizes,
        memory=plan_memory(settings, sizes, shares),
        data={},
        text=text,
    )


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
