"""`loopwright recipe NAME KEY=VALUE ...`: language models, from data to a chat.

A recipe is a dataclass of settings and a function that takes it. The function returns a report with `describe()` and
`as_dict()`, and raises ConfigError with all problems.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import MissingDependency, nearest
from ...messages import fitted
from ...settings.tree import escaped
from ...yaml_file import write
from ..ending import reporting_errors
from ..recipe_settings import RecipeSettings
from ..sources import CommandLine, gather, parse_command_line

# Any in this file: dataclasses of settings, functions and reports of recipes.


@dataclass(frozen=True)
class Recipe:
    """A recipe by names, so that nothing is imported until it runs.

    Attributes:
        settings: "module:class" of its settings, in the package of recipes.
        function: "module:function".
        text: What it does.
        check: "module:function" that returns what is wrong with the settings, in addition to the checks of their class.
    """

    settings: str
    function: str
    text: str
    check: str = ""

    def settings_class(self) -> Any:
        """Return the class of its settings."""
        return _found(self.settings)

    def run(self, settings: Any) -> Any:
        """Run it and return its report; None on ranks other than 0."""
        return _found(self.function)(settings)


_CHECK, _CHECK_PLAN = "train:check", "plan:check"
RECIPES = {
    "tokenizer": Recipe("tokenizer:TokenizerSettings", "tokenizer:train_tokenizer", "train a tokenizer on texts"),
    "pretrain": Recipe("settings:PretrainSettings", "train:pretrain", "train a model from random values", _CHECK),
    "finetune": Recipe("settings:FinetuneSettings", "train:finetune", "train LoRA adapters, or all parameters", _CHECK),
    "plan": Recipe("settings:PlanFinetuneSettings", "plan:plan", "check a training, without a step", _CHECK_PLAN),
    "chat": Recipe("inference.chat:ChatSettings", "inference.chat:chat", "talk to a model in the terminal"),
    "generate": Recipe("inference.generate:GenerateSettings", "inference.generate:generate", "continue a prompt"),
    "evaluate": Recipe(
        "evaluation.evaluate:EvaluateSettings", "evaluation.evaluate:evaluate", "compute perplexity and run tasks"
    ),
    "export": Recipe("exporting.export:ExportSettings", "exporting.export:export", "write a Hugging Face folder"),
}
_PLAN_OF_PRETRAIN = Recipe(
    "settings:PlanPretrainSettings", "plan:plan", "check a pretraining, without a step", _CHECK_PLAN
)


def recipe(arguments: Sequence[str]) -> int:
    """Run a recipe and return the exit code: 2 for bad input.

    Args:
        arguments: Arguments after `loopwright recipe`.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        (sys.stdout if arguments else sys.stderr).write(fitted(_usage()))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in RECIPES:
        sys.stderr.write(f"loopwright recipe: expected a recipe, got {name!r}{nearest(name, RECIPES)}; "
                         f"recipes: {', '.join(RECIPES)}\n")  # fmt: skip
        return 2
    chosen = RECIPES[name]
    if name == "plan" and rest and rest[0] in ("finetune", "pretrain"):
        chosen = _PLAN_OF_PRETRAIN if rest.pop(0) == "pretrain" else chosen
    # As with `python -m`, modules in the current folder can be imported: an optimizer of the user, for instance.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    is_json = "--json" in rest
    with reporting_errors(f"loopwright recipe {name}"):
        report = _run(name, chosen, parse_command_line([one for one in rest if one != "--json"]), is_json=is_json)
    if report is not None:
        sys.stdout.write(json.dumps(report.as_dict(), indent=1, default=str) if is_json else report.describe())
        sys.stdout.write("\n")
    return 0


def _run(name: str, chosen: Recipe, line: CommandLine, *, is_json: bool) -> Any:
    """Return the report; None after help or a printed configuration."""
    reading = RecipeSettings(f"loopwright recipe {name}", chosen.text, chosen.settings_class())
    if line.help is not None:
        sys.stdout.write(fitted(reading.help(line.help)))
        return None
    # Sections of a file for other recipes are left out; `tokenizer` is a setting of most.
    sections = tuple(one for one in RECIPES if one == name or one not in reading.names)
    gathered = gather(line, command=name, commands=sections, defaults={}, groups=())
    if line.prints:
        sys.stdout.write(write(escaped(reading.completed(gathered, with_defaults=line.prints == "full"))))
        return None
    settings = reading.read(gathered, check=functools.partial(_checked, chosen.check) if chosen.check else None)
    if not is_json:
        return chosen.run(settings)
    # Whatever a training prints goes to stderr: stdout is one JSON document.
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        return chosen.run(settings)
    finally:
        sys.stdout = stdout


def _checked(path: str, settings: Any) -> list[str]:
    problems: list[str] = _found(path)(settings)
    return problems


def _usage() -> str:
    lines = ["usage: loopwright recipe NAME [--config FILE]... [KEY=VALUE]...", ""]
    lines += [f"  {name:10} {one.text}" for name, one in RECIPES.items()]
    lines += [
        "",
        "`plan pretrain` checks a pretraining, `plan` or `plan finetune` a finetuning. `loopwright recipe NAME --help`",
        "shows the settings, `--help KEY` one of them, and `--json` prints the report as JSON.",
    ]
    return "\n".join([*lines, ""])


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        loaded = importlib.import_module(f"loopwright.recipes.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("loopwright", ""):
            raise
        raise MissingDependency(error.name, needed_for="loopwright recipe", extra="recipes") from error
    return getattr(loaded, name)
