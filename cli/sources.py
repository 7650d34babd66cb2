"""Sources of settings: files, environment variables, the command line.

The later ones win, in this order: a checkpoint's configuration, files (as they are named), environment variables, the
command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..settings.names import Trust
from ..settings.tree import CLASS_KEYS, Settings, SettingsTree
from ..yaml_file import parse_scalar, read_with_lines

# Any in this file: values of settings.

PREFIX = "LOOPWRIGHT__"
"""Prefix of environment variables that are settings: LOOPWRIGHT__TRAINER__MAX_EPOCHS is trainer.max_epochs."""

CONFIG_VARIABLE = "LOOPWRIGHT_CONFIG"
"""Environment variable with configuration files, separated by os.pathsep; they precede those of --config."""

SHORT_PREFIX, _SHORT_CONFIG = "LW__", "LW_CONFIG"  # accepted as well; the long names have priority

_ASSIGNMENT = re.compile(r"^(--)?(~?[A-Za-z_][\w.-]*)(\+?=)(.*)$", re.DOTALL)
_OPTION = re.compile(r"^--([A-Za-z_][\w.-]*)(\+?)$")
_SHOWS = ("full", "short")
_FORMS = "write settings as key=value or --key value, files as --config FILE"


@dataclass(frozen=True)
class Assignment:
    """One `key=value`; `op` is "=", "+=" (add to a list) or "~" (remove)."""

    path: str
    text: str
    op: str = "="


@dataclass
class CommandLine:
    """The parsed command line.

    Attributes:
        files: Configuration files, or their content: `{trainer: {max_epochs: 3}}`.
        assignments: In order.
        prints: "full" or "short" for --print-config, empty without it.
        help: Topic of --help; empty for an overview, None if help was not requested.
        wrong: Arguments that are neither an option nor a setting.
    """

    files: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    prints: str = ""
    help: str | None = None
    wrong: list[str] = field(default_factory=list)


def parse_command_line(tokens: Sequence[str]) -> CommandLine:
    """Return the parsed arguments after the subcommand."""
    found = CommandLine()
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token in ("-h", "--help"):
            found.help = rest.pop(0) if rest and not rest[0].startswith("-") else ""
        elif token.startswith("--help="):
            found.help = token.partition("=")[2]
        elif re.fullmatch(r"--[\w.]+\.help(=.*)?", token):
            found.help = _help_topic(token, rest)
        elif token in ("-c", "--config"):
            if not rest:
                found.wrong.append(f"{token} (command line): expected a file after it")
                continue
            found.files.append(rest.pop(0))
        elif token.startswith("--config="):
            found.files.append(token.partition("=")[2])
        elif re.fullmatch(r"--print[-_]config(=.*)?", token):
            found.prints = _shows(token.partition("=")[2], found.wrong)
        else:
            one = _assignment(token, rest)
            if one is None:
                found.wrong.append(f"{token!r} (command line): expected an option or a setting; {_FORMS}")
            else:
                found.assignments.append(one)
    return found


def _help_topic(token: str, rest: list[str]) -> str:
    name, _, value = token.partition("=")
    if value:
        return value
    return rest.pop(0) if rest and not rest[0].startswith("-") else name[2:].removesuffix(".help")


def _shows(text: str, wrong: list[str]) -> str:
    text = {"": "full", "skip_null": "short", "comments": "full"}.get(text, text)
    if text not in _SHOWS:
        wrong.append(f"--print-config={text} (command line): write --print-config or --print-config=short")
    return text


def _assignment(token: str, rest: list[str]) -> Assignment | None:
    if re.fullmatch(r"~[A-Za-z_][\w.]*", token):
        return Assignment(token[1:], "", "~")
    found = _ASSIGNMENT.match(token)
    if found is not None:
        name = found[2].replace("-", "_") if found[1] else found[2]
        return Assignment(name, found[4], found[3])
    option = _OPTION.match(token)
    if option is None:
        return None
    name = option[1].replace("-", "_")
    # An option without a value is a flag: --trainer.fast_dev_run.
    is_switch = not rest or rest[0] in ("-c", "-h") or (rest[0].startswith("--") and len(rest[0]) > 2)
    return Assignment(name, "true" if is_switch else rest.pop(0), "+=" if option[2] else "=")


def gather(
    line: CommandLine,
    *,
    command: str,
    commands: Sequence[str],
    defaults: Mapping[str, object],
    checkpoint: tuple[SettingsTree, str] | None = None,
    variables: Mapping[str, str] | None = None,
    groups: Sequence[str] = ("trainer", *CLASS_KEYS),
    onto: Settings | None = None,
) -> Settings:
    """Return the settings of all sources.

    Args:
        line: The command line.
        command: The subcommand; a file's section of this name overrides the rest of the file.
        commands: All subcommands; the sections of the others are left out.
        defaults: Defaults of the program, by dotted key.
        checkpoint: The configuration of a checkpoint, and its name.
        variables: Environment variables; None is this process's variables.
        groups: Keys whose settings may stand in their own file, as in `data=data.yaml`.
        onto: Settings that these override; None for none.

    Raises:
        ConfigError: Files cannot be read; all are named. Other problems are noted in the settings.
    """
    variables = os.environ if variables is None else variables
    settings = Settings() if onto is None else onto
    settings.problems += line.wrong
    unread: list[ConfigError] = []
    if checkpoint is not None:  # it may come from someone else
        settings.lay(*checkpoint, Trust())
    for path, value in defaults.items():
        settings.assign(path, value, "default of the program")
    given = [one for one in _files_of_environment(variables).split(os.pathsep) if one] + line.files
    files = []
    for text in given:
        inline = _inline(text)
        file = Path("the configuration of the command line" if inline is not None else text)
        if inline is None:
            files.append(file)
        try:
            values, lines = read_with_lines(file) if inline is None else (inline, {})
        except ConfigError as error:
            unread.append(error)
            continue
        values.pop("config", None)  # Lightning's files list their own sources
        own = values.get(command)
        values = {key: value for key, value in values.items() if key not in commands}
        with noted(settings):
            _lay_groups(settings, values, file, groups)
            settings.lay(values, str(file), lines=lines)
            if isinstance(own, dict):
                _lay_groups(settings, own, file, groups)
                below = {path.removeprefix(f"{command}."): line for path, line in lines.items()}
                settings.lay(own, f"{file}, section {command}", lines=below)
    folders = [file.parent for file in files]
    for assignment, source in (*_of_environment(variables), *((one, "command line") for one in line.assignments)):
        with noted(settings):
            _assign(settings, assignment, source, folders, groups)
    if unread:
        raise _unread(unread, settings.problems)
    return settings


def _unread(errors: list[ConfigError], problems: list[str]) -> ConfigError:
    if len(errors) == 1 and not problems:
        return errors[0]
    lines = "".join(f"\n  - {line}" for line in [*(one.what.rstrip(".") for one in errors), *problems])
    fixes = dict.fromkeys(one.fix for one in errors)
    return ConfigError(f"Expected a readable configuration, got:{lines}", fix=" ".join(fixes))


@contextmanager
def noted(settings: Settings) -> Iterator[None]:
    """Record the problems of a source, to report them with all others."""
    try:
        yield
    except ConfigError as error:
        settings.problems.append(f"{error.what.rstrip('.')}; {error.fix.rstrip('.')}")


def _of_environment(variables: Mapping[str, str]) -> Iterator[tuple[Assignment, str]]:
    for prefix in (SHORT_PREFIX, PREFIX):
        for name in sorted(variables):
            if name.startswith(prefix) and len(name) > len(prefix):
                yield Assignment(name[len(prefix) :].lower().replace("__", "."), variables[name]), name


def _files_of_environment(variables: Mapping[str, str]) -> str:
    return variables.get(CONFIG_VARIABLE) or variables.get(_SHORT_CONFIG, "")


def _inline(text: str) -> SettingsTree | None:
    """Return the settings that stand where a file is expected; None if it is the name of a file."""
    if "\n" not in text and not text.lstrip().startswith("{"):
        return None
    found = parse_scalar(text)
    is_mapping = isinstance(found, dict) and all(isinstance(key, str) for key in found)
    return dict(found) if is_mapping else None  # type: ignore[call-overload]  # a mapping, see above


def _assign(settings: Settings, one: Assignment, source: str, folders: Sequence[Path], groups: Sequence[str]) -> None:
    if one.op == "~":
        settings.remove(one.path)
        return
    group = _group_file(one.path, one.text, folders, groups) if one.op == "=" else None
    if group is not None:
        _lay_group(settings, one.path, group)
        return
    settings.assign(one.path, parse_scalar(one.text), source, text=one.text, appends=one.op == "+=")


def _lay_groups(settings: Settings, values: SettingsTree, file: Path, groups: Sequence[str]) -> None:
    """Replace `data: digits` in a file by data/digits.yaml beside it, and `data: digits.yaml` by this file."""
    for key in groups:
        if isinstance(values.get(key), str):
            group = _group_file(key, values[key], [file.parent], groups)
            if group is not None:
                _lay_group(settings, key, group)
                del values[key]


def _lay_group(settings: Settings, key: str, file: Path) -> None:
    values, lines = read_with_lines(file)
    settings.lay({key: values}, str(file), lines={f"{key}.{path}": line for path, line in lines.items()})


def _group_file(key: str, text: str, folders: Sequence[Path], groups: Sequence[str]) -> Path | None:
    """Return the file of a group: `data=digits` is data/digits.yaml beside a --config file, here, or in conf/.

    A name with an ending is the file itself.
    """
    if key in groups and text.endswith((".yaml", ".yml", ".json")):
        return next((folder / text for folder in (*folders, Path()) if (folder / text).is_file()), None)
    if "." in key or not re.fullmatch(r"[\w-]+", text):
        return None
    for folder in (*folders, Path(), Path("conf"), Path("configs")):
        for ending in (".yaml", ".yml"):
            path = folder / key / f"{text}{ending}"
            if path.is_file():
                return path
    return None
