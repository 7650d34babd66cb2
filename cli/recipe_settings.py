"""`RecipeSettings`: a dataclass of settings from files, environment and command line, with all problems at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from ..errors import ConfigError, nearest
from ..messages import counted
from ..settings.build import Building
from ..settings.complete import complete, written_default
from ..settings.parameters import EMPTY, Parameter, parameters_of
from ..settings.tree import CLASS_KEYS, WRONG, Settings, SettingsTree, is_class_node, resolve
from ..settings.typed import Typed
from .help_text import describe_class, describe_parameter
from .litgpt_options import LITGPT_OPTIONS, options_in
from .sources import CONFIG_VARIABLE, PREFIX

# Any in this file: values of settings, and dataclasses of them.

# Annotations of values that are written as text, not as Python objects.
_SOURCES = str | list[str | dict[str, Any]] | dict[str, Any]
_PATHS = ("data", "val_data")
# The recipe itself converts the arguments of these classes.
_CLASSES = ("trainer", "strategy", "optimizer", "lr_scheduler")

_USAGE = f"""\
usage: {{program}} [--config FILE]... [KEY=VALUE]...

{{text}}

Settings are KEY=VALUE or --KEY VALUE. KEY+=VALUE adds to a list, ~KEY removes a setting of a file.
  --config FILE, -c FILE     a YAML file; later files override earlier ones
  --print-config[=short]     print the merged settings of all sources and exit; short: without defaults
  --json                     print the report as JSON
  --help [KEY]               show this text, or the help on a setting, such as lora, lora.r or trainer.max_time

Sources in increasing priority: files, environment variables ({PREFIX}LORA__R=8; {CONFIG_VARIABLE} names files),
command line.
"""


class RecipeSettings:
    """Reads the settings of a recipe.

    Args:
        program: The command, for messages.
        text: What it does.
        settings_class: The dataclass.
    """

    def __init__(self, program: str, text: str, settings_class: Any) -> None:
        self._program, self._text, self._class = program, text, settings_class
        factories = {one.name: one.default_factory for one in fields(settings_class)}
        self._named = {
            name: Parameter(
                name, _annotation_of(one), _default_of(one, factories[name]), _text_on(settings_class, name)
            )
            for name, one in parameters_of(settings_class).named.items()
        }

    @property
    def names(self) -> list[str]:
        """Names of the settings."""
        return list(self._named)

    def read(self, settings: Settings, *, check: Callable[[Any], list[str]] | None = None) -> Any:
        """Return the dataclass.

        Args:
            settings: Settings of all sources.
            check: Returns what is wrong with the dataclass, to report it together with other problems. None calls its
                method `problems`, if it has one.

        Raises:
            ConfigError: Names all problems, also those that `check` finds in the valid settings.
        """
        tree, values, problems = self._values(settings)
        if not problems:
            return self._class(**values)
        raise self._refused([*problems, *self._class_problems(tree, values, check)])

    def completed(self, settings: Settings, *, with_defaults: bool) -> SettingsTree:
        """Return the settings as YAML values.

        Args:
            settings: Settings of all sources.
            with_defaults: Whether defaults are added.

        Raises:
            ConfigError: Names all problems, except missing settings.
        """
        tree, plans, problems = self._planned(settings)
        if problems:
            raise self._refused(problems)
        found = {}
        for name, one in self._named.items():
            if name in plans:
                found[name] = complete(plans[name], tree[name], with_defaults=with_defaults)
            elif with_defaults and (default := written_default(one)) is not EMPTY:
                found[name] = default
        return found

    def help(self, topic: str) -> str:
        """Return the text of --help.

        Args:
            topic: A setting, also a nested one; empty for all.

        Raises:
            ConfigError: No setting has this name.
        """
        if not topic:
            lines = [_USAGE.format(program=self._program, text=self._text)]
            for one in self._named.values():
                lines += describe_parameter(one, "")
            return "\n".join(lines) + "\n"
        head, _, rest = topic.partition(".")
        if head not in self._named:
            raise ConfigError(
                f"Expected a setting, got {topic!r}{nearest(head, self._named)}.",
                fix=f"name one of {', '.join(self._named)}.",
            )
        below = _class_below(head, self._named[head].annotation)
        if not rest:
            text = "\n".join(describe_parameter(self._named[head], "")) + "\n"
            return text if below is None else f"{text}\n{describe_class(below, head)}"
        known = {} if below is None else parameters_of(below).named
        if rest not in known:
            raise ConfigError(
                f"Expected a setting of {head}, got {rest!r}{nearest(rest, known)}.",
                fix=f"name one of {', '.join(known)}." if known else f"see --help {head}.",
            )
        return "\n".join(describe_parameter(known[rest], f"{head}.")) + "\n"

    # -- values --------------------------------------------------------------------------------------------------

    def _planned(self, settings: Settings) -> tuple[SettingsTree, dict[str, Any], list[str]]:
        """Return the settings, each converted to its type or planned, and the problems."""
        resolved = resolve(settings, self._default)
        tree = {name: _text_of(name, value) for name, value in resolved.items()}
        typed = Typed(settings, problems=list(settings.problems))
        plans = {}
        for name, value in tree.items():
            options = [] if name in self._named and name != "data" else list(options_in(name, resolved[name]))
            if options:
                typed.problems += [
                    f"{settings.named(one)}: unknown setting; LitGPT's {one} is {LITGPT_OPTIONS[one]} here"
                    for one in options
                ]
                plans[name] = WRONG
            elif unknown := list(_below_path(settings, name, resolved[name])):
                typed.problems += unknown
                plans[name] = WRONG
            elif name not in self._named:
                hint = nearest(name, self._named) or f"; settings: {', '.join(self._named)}"
                typed.problems.append(f"{settings.named(name)}: unknown setting{hint}")
            elif name in _CLASSES and isinstance(value, dict):
                plans[name] = value
            else:
                plans[name] = typed.value(value, self._named[name].annotation, name)
        return tree, plans, typed.problems

    def _values(self, settings: Settings) -> tuple[SettingsTree, dict[str, Any], list[str]]:
        tree, plans, problems = self._planned(settings)
        problems += [
            f"{one.name}: required" for one in self._named.values() if one.is_required and one.name not in tree
        ]
        building = Building(settings, collects=True)
        made = {name: building.made(value) for name, value in plans.items() if value is not WRONG}
        values = {name: value for name, value in made.items() if value is not WRONG}
        return tree, values, [*problems, *building.problems]

    def _class_problems(
        self, tree: SettingsTree, values: dict[str, Any], check: Callable[[Any], list[str]] | None
    ) -> list[str]:
        """Return what is wrong with the settings that were converted, in addition to those that were not."""
        needed = {one.name for one in fields(self._class) if one.default is MISSING and one.default_factory is MISSING}
        check = check or getattr(self._class, "problems", None)
        if check is None or needed - values.keys():
            return []
        # A wrong setting has its default here; problems of that default are not the user's.
        wrong = tree.keys() - values.keys()
        return [one for one in check(self._class(**values)) if one.partition(":")[0].partition(".")[0] not in wrong]

    def _default(self, tree: SettingsTree, path: str) -> Any:
        return self._named[path].default if path in self._named else EMPTY

    def _refused(self, problems: list[str]) -> ConfigError:
        lines = list(dict.fromkeys(problems))
        return ConfigError(
            f"Expected valid settings, got {counted(len(lines), 'problem')}:"
            + "".join(f"\n  - {line}" for line in lines),
            fix=f"correct these settings; `{self._program} --help` lists the available ones.",
        )


def _default_of(parameter: Parameter, factory: Any) -> Any:
    return parameter.default if factory is MISSING else factory()


def _annotation_of(parameter: Parameter) -> Any:
    if parameter.name not in _PATHS:
        return parameter.annotation
    return _SOURCES | None if parameter.default is None else _SOURCES


def _text_on(settings_class: Any, name: str) -> str:
    """Return the description of a setting, from the first class that has one."""
    found = (parameters_of(one).named.get(name) for one in settings_class.__mro__ if one is not object)
    return next((one.text for one in found if one is not None and one.text), "")


def _text_of(name: str, value: Any) -> Any:
    """Return the text that a source wrote where an earlier source has a mapping, so that it looks like a class."""
    is_path = name in CLASS_KEYS[:2] and is_class_node(value)
    return value["class_path"] if is_path else value


def _below_path(settings: Settings, name: str, value: Any) -> Iterator[str]:
    """Yield a problem for each setting below a path, but for those of an earlier source, which the path replaces."""
    if name not in CLASS_KEYS[:2] or not is_class_node(value):
        return
    source, fix = settings.origin(f"{name}.class_path"), ""
    if name == "data":
        fix = f"; data is a path here: write data.path={value['class_path']} for a source with settings"
    for key in value.get("init_args", ()):
        at = f"{name}.init_args.{key}"
        if name == "model" or settings.origin(at) == source:
            yield f"{settings.named(f'{name}.{key}', at)}: unknown setting{fix}"


def _class_below(name: str, annotation: Any) -> Any:
    """Return the class whose arguments are the settings below a setting; None without one."""
    if name == "trainer":
        from ..trainer.trainer import Trainer

        return Trainer
    members = getattr(annotation, "__args__", (annotation,))
    return next((one for one in members if hasattr(one, "__dataclass_fields__")), None)
