"""`evaluate`: loss and perplexity of a model over data, and tasks of lm-eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...errors import ConfigError
from ..data import DataSettings
from ..data.settings import SourceLike
from ..exporting.location import ModelLocation
from ..inference.model import (
    InferenceSettings,
    OpenedModel,
    num_positions,
    open_any,
    quiet_transformers,
    raise_problems,
)
from .held_out import data_batches, held_out_settings, mean_loss
from .tasks import run_tasks, task_problems

# Any in this file: plain values for JSON.

_LENGTH = 2048


@dataclass(frozen=True)
class EvaluateSettings(InferenceSettings):
    """Settings of `evaluate`, besides those of the model.

    Args:
        data: Files or folders; None for the held-out data of the run that the model is from.
        tasks: Tasks of lm-eval: YAML files.
        kind: Kind of the records, "auto" by the keys of each source's first record.
        train_on: Tokens of a chat that count: those of the assistant, of its last message, or all.
        prompt_style: Prompt of instruct and completion data: "alpaca", "plain", a format string, None for the chat
            template, or "auto" as in training.
        max_length: Tokens in a row; None as in training, else 2048 or all that the model has positions for.
        too_long: What happens with longer samples; text is always split, unless it is dropped.
        packing: Whether a row holds several samples; the loss is the same for models that keep them apart.
        micro_batch: Rows that are computed at a time.
        num_workers: Worker processes of the loader.
        cache: Folder of the tokenized data; None for a temporary one.
        limit: Largest number of batches; None for all.
        num_fewshot: Examples before each question of a task; None as the task says.
        task_limit: Largest number of questions of each task; None for all.
        task_batch: Questions of a task that are computed at a time.
        chat_template: Whether questions are written by the chat template.
    """

    data: SourceLike | Sequence[SourceLike] | None = None
    tasks: Path | Sequence[Path] | None = None
    kind: str = "auto"
    train_on: str = "assistant"
    prompt_style: str | None = "auto"
    max_length: int | None = None
    too_long: str = "cut"
    packing: bool = False
    micro_batch: int = 4
    num_workers: int = 0
    cache: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    task_limit: int | None = None
    task_batch: int = 8
    chat_template: bool = False

    def task_files(self) -> list[Path]:
        """Return the files of `tasks`."""
        given = [] if self.tasks is None else [self.tasks] if isinstance(self.tasks, str | Path) else self.tasks
        return [Path(one).expanduser() for one in given]

    def data_settings(self, location: ModelLocation | None = None, limit: int | None = None) -> DataSettings | None:
        """Return the settings of `data`; None without any.

        Args:
            location: The model, by whose training "auto" and None are resolved.
            limit: Number of the model's positions.
        """
        if self.data is None:
            return None
        trained = location.trained if location is not None else {}
        names = ("kind", "train_on", "too_long", "packing", "micro_batch", "num_workers", "cache")
        return DataSettings(
            self.data,
            prompt_style=trained.get("prompt_style") if self.prompt_style == "auto" else self.prompt_style,
            max_length=self.max_length or trained.get("max_length") or min(_LENGTH, limit or _LENGTH),
            group_by_length=not self.packing,
            **{name: getattr(self, name) for name in names},
        )

    @override
    def problems(self) -> list[str]:
        chosen = self.data_settings()
        problems = [*super().problems(), *task_problems(self.task_files()), *(chosen.problems() if chosen else [])]
        for name in ("limit", "task_limit", "task_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name}: Expected at least 1, got {value}.")
        return problems


@dataclass(frozen=True)
class EvaluateReport:
    """How good a model is.

    Attributes:
        model: Where it is.
        loss: Mean cross entropy over the trained tokens of the data, in nats; None without data.
        perplexity: Its exponential.
        tokens: Number of trained tokens.
        rows: Number of rows.
        data: What was evaluated.
        tasks: Metrics of each task.
    """

    model: str
    loss: float | None = None
    perplexity: float | None = None
    tokens: int = 0
    rows: int = 0
    data: str = ""
    tasks: Mapping[str, Mapping[str, float]] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def describe(self) -> str:
        """Return the report as text."""
        lines = [f"model: {self.model}"]
        if self.loss is not None:
            lines += [
                f"data: {self.data} ({self.tokens} trained tokens in {self.rows} rows)",
                f"loss: {self.loss:.6f}",
                f"perplexity: {self.perplexity:.4f}",
            ]
        for task, metrics in (self.tasks or {}).items():
            shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            lines.append(f"{task}: {shown}")
        return "\n".join(lines)


def evaluate(settings: EvaluateSettings) -> EvaluateReport:
    """Compute the loss over data, run tasks, or both.

    Raises:
        ConfigError: Settings or data are invalid; names all problems.
        MissingDependency: lm-eval is not installed, and there are tasks.
    """
    raise_problems(settings.problems())
    with quiet_transformers():
        opened = open_any(settings)
        values: dict[str, Any] = {"model": str(settings.model)}
        if settings.data is not None or not settings.task_files():
            values.update(_loss(opened, settings))
        if settings.task_files():
            values["tasks"] = run_tasks(
                opened,
                settings.task_files(),
                num_fewshot=settings.num_fewshot,
                limit=settings.task_limit,
                batch_size=settings.task_batch,
                uses_template=settings.chat_template,
            )
    return EvaluateReport(**values)


def _loss(opened: OpenedModel, settings: EvaluateSettings) -> dict[str, Any]:
    run, limit = opened.location.run, num_positions(opened.model)
    chosen = settings.data_settings(opened.location, limit)
    is_held_out = chosen is None
    if chosen is None and run is not None:
        chosen = held_out_settings(run, opened.location.settings)
    if chosen is None:
        raise ConfigError(
            f"data: Expected data, or a run with held-out data, got {settings.model} without either.",
            fix="pass data=FILE, or tasks=FILE.",
        )
    if limit is not None and chosen.max_length > limit:
        raise_problems([f"max_length: Expected at most the model's {limit} positions, got {chosen.max_length}."])
    with data_batches(chosen, opened.tokenizer, opened.model, is_held_out=is_held_out) as batches:
        result = mean_loss(opened.model, batches, limit=settings.limit)
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "rows": result.rows,
        "data": "held-out data of the run" if is_held_out else str(chosen.data),
    }
