"""Topics of `--help TOPIC`: everything, a key, a parameter, or a class."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any

from ..callbacks import Callback
from ..errors import ConfigError
from ..lazy import home_of
from ..loggers import Logger
from ..profilers import Profiler
from ..settings.names import ClassProblem, find_class, known_classes, known_makers
from ..settings.parameters import Parameter, parameters_of
from ..settings.tree import SettingsTree
from .help_text import describe_class, describe_parameter, overview
from .program import Program
from .trainer_types import TRAINER_TYPES

# Any in this file: classes of any kind, and settings.


def help_on(program: Program, topic: str, tree: SettingsTree) -> str:
    """Return the text of --help.

    Args:
        program: The available settings.
        topic: A key (`model`), a parameter (`trainer.callbacks`, `max_epochs`), a class; empty for an overview.
        tree: The current settings, which may name the classes of model and data.

    Raises:
        ConfigError: The topic is unknown.
    """
    groups = _groups(program, tree)
    if not topic:
        return overview(
            program.shown, program.subcommands.get(program.subcommand or "", ""), groups, list(program.values.values())
        )
    kinds = _kinds(program)
    if topic in kinds:
        return f"{topic}: name a class; its parameters are then {topic}.PARAMETER\n{_names(kinds[topic])}"
    if groups.get(topic) is not None:
        return describe_class(groups[topic], topic, _of_trainer() if topic == "trainer" else {})
    parameters = list(_parameters(program, groups, topic))
    if parameters:
        return "".join(_one(*found) for found in parameters)
    makers = known_makers(kinds.values())
    if topic in makers:
        return describe_class(makers[topic], "")
    try:
        return describe_class(find_class(topic, object if "." in topic else tuple(kinds.values())), "")
    except ClassProblem as problem:
        what = f"name a class first, as in {topic}=package.module.Class" if topic in groups else str(problem)
        raise ConfigError(
            f"Expected a topic of --help, got {topic}: {what}.",
            fix=f"name one of {', '.join(groups)}, a parameter as trainer.max_epochs, or a class by its path.",
        ) from None


def _groups(program: Program, tree: SettingsTree) -> dict[str, Any]:
    found: dict[str, Any] = {"trainer": program.trainer_class}
    for key in program.bases:
        try:
            found[key] = program.class_of(key, tree.get(key))
        except ClassProblem:
            found[key] = program.bases[key][0]
    return {**found, **program.declared.classes}


def _kinds(program: Program) -> dict[str, type[object]]:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from ..strategies import Strategy

    # Keys at the top, and those of the Trainer, which are topics as trainer.callbacks.
    return {
        "optimizer": Optimizer,
        "lr_scheduler": LRScheduler,
        "trainer.callbacks": Callback,
        "trainer.logger": Logger,
        "trainer.strategy": Strategy,
        "trainer.profiler": Profiler,
        **{f"class of {key}": base for key, (_, base) in program.bases.items()},
    }


def _of_trainer() -> dict[str, Any]:
    return {name: annotation() for name, annotation in TRAINER_TYPES.items()}


def _parameters(program: Program, groups: dict[str, Any], topic: str) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters of a name with their prefix: `max_epochs`, `trainer.max_epochs`, `ckpt_path`."""
    key, _, name = topic.rpartition(".")
    if not key and name in program.values:
        yield "", program.values[name]
    for group, target in groups.items():
        found = None if target is None or key not in ("", group) else parameters_of(target).named.get(name)
        if found is not None:
            annotation = _of_trainer().get(name, found.annotation) if group == "trainer" else found.annotation
            yield f"{group}.", Parameter(name, annotation, found.default, found.text)


def _one(prefix: str, parameter: Parameter) -> str:
    lines = describe_parameter(parameter, prefix)
    wanted = [parameter.annotation, *typing.get_args(parameter.annotation)]
    for base in (one for one in wanted if inspect.isclass(one) and home_of(one).startswith(("loopwright", "torch"))):
        lines.append(_names(base).rstrip("\n"))
    return "\n".join(lines) + "\n"


def _names(base: type[Any]) -> str:
    names = sorted({one.__name__ for one in known_classes([base]) if one is not base} | known_makers([base]).keys())
    return f"  one of {', '.join(names)}; or your own class by its path (--help CLASS shows its parameters)\n"
