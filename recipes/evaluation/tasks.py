"""Tasks of lm-eval from local YAML files, on an opened model. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ...errors import ConfigError, MissingDependency
from ..inference.model import OpenedModel

# Any in this file: results of lm-eval.

_NOT_METRICS = ("alias", "sample_len")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def task_problems(files: Sequence[Path]) -> list[str]:
    """Return which files of tasks do not exist, as `tasks: Expected ..., got ...`."""
    return [f"tasks: Expected a YAML file of a task, got {file}." for file in files if not file.is_file()]


def run_tasks(
    opened: OpenedModel,
    files: Sequence[Path],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    uses_template: bool = False,
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task by name.

    Args:
        opened: The model.
        files: YAML files of lm-eval with `task`. Functions that they name (`!function`) are executed.
        num_fewshot: Examples before each question; None as the task says.
        limit: Largest number of questions of each task.
        batch_size: Questions that are computed at a time.
        uses_template: Whether questions are written by the chat template.

    Raises:
        ConfigError: A file is not a task.
        MissingDependency: lm-eval is not installed.
    """
    with _offline():
        try:
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise MissingDependency("lm-eval", needed_for="tasks=", extra="eval") from error
        folders = sorted({str(file.resolve().parent) for file in files})
        names = [_name(file) for file in files]
        manager = TaskManager(include_path=list(folders), include_defaults=False)
        results: Any = simple_evaluate(
            model=HFLM(pretrained=opened.model, tokenizer=opened.tokenizer, batch_size=batch_size),
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            apply_chat_template=uses_template,
            log_samples=False,
        )
    return {name: _numbers(metrics) for name, metrics in results["results"].items()}


def _name(file: Path) -> str:
    """Return the name of a task: that of its file's entry `task`."""

    class TaskLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        """Reads functions as their names."""

    TaskLoader.add_multi_constructor("!", lambda loader, suffix, node: None)
    try:
        values = yaml.load(file.read_text(), TaskLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"tasks: Expected a YAML file, got {file} ({error}).", fix="correct the file.") from error
    name = values.get("task") if isinstance(values, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(
            f"tasks: Expected a YAML file with the entry task, got {file}.", fix="add `task: NAME` to it."
        )
    return name


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a task: `acc`, and of another filter than none `exact_match,strict`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_METRICS
    }


@contextmanager
def _offline() -> Iterator[None]:
    """Set the variables that keep lm-eval's packages from the network, for as long as it lasts."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
