"""What a LightningCLI reads besides the command line: the files and variables that `parser_kwargs` name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from typing import Any

from ....cli.sources import parse_command_line, read_source

__all__ = ["find_subcommand", "tokens_before"]

# Any in this file: values of settings.


def tokens_before(options: Mapping[str, Any], own: Mapping[str, Any], command: str) -> list[str]:
    """Return what precedes the command line, in its form: default files first, then variables.

    Args:
        options: `default_config_files`, `default_env`, `env_prefix`.
        own: The same of the subcommand.
        command: The subcommand; empty where none is typed.
    """
    found: list[str] = []
    for one in (options, own):
        for pattern in one.get("default_config_files") or ():
            for path in sorted(glob(os.path.expanduser(str(pattern)))):
                found += ["--config", path]
    if options.get("default_env") or own.get("default_env"):
        prefix = own.get("env_prefix", options.get("env_prefix", "PL"))
        found += _of_environment(f"{prefix}_{command.upper()}__" if command else f"{prefix}_")
    return found


def find_subcommand(tokens: Sequence[str], commands: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Return the subcommand of a command line: as typed, or as a variable or its files say.

    Args:
        tokens: What is typed.
        commands: All subcommands.
        options: `default_env` and `env_prefix`.
    """
    for token in tokens:
        if token in commands:
            return token
    variable = os.environ.get(f"{options.get('env_prefix', 'PL')}_SUBCOMMAND") if options.get("default_env") else None
    if variable in commands:
        return variable
    line = parse_command_line(tokens)
    sections: dict[str, None] = {}
    for file in line.files:
        content = read_source(file)
        if content.get("subcommand") in commands:
            return str(content["subcommand"])
        sections.update(dict.fromkeys(name for name in commands if name in content))
    return next(iter(sections)) if len(sections) == 1 else None


def _of_environment(beginning: str) -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if not name.startswith(beginning):
            continue
        path = name[len(beginning) :].lower().replace("__", ".")
        if path == "config":
            yield from ("--config", value)
        elif path.partition(".")[0] not in (
            "global_seed",
            "seed_workers",
            "subcommand",
            "trainer_logger",
        ):  # Lightning's own
            yield f"--{path}={value}"
