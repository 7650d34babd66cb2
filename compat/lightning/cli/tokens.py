"""What a LightningCLI takes as typed: its `args`, and the files and variables that `parser_kwargs` name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from typing import Any

__all__ = ["tokens_of"]

# Any in this file: values of settings.


def tokens_of(
    args: Sequence[str] | Mapping[str, Any] | None, parser_kwargs: Mapping[str, Any], commands: Sequence[str]
) -> list[str]:
    """Return the tokens of a command line: default files first, then variables, then what was typed.

    Args:
        args: Tokens, or settings as nested dicts; None: `sys.argv`.
        parser_kwargs: `default_config_files`, `default_env`, `env_prefix`; or these below names of subcommands.
        commands: The subcommands; empty where none is typed.
    """
    if isinstance(args, Mapping):
        typed = _of_settings(args, commands)
    else:
        typed = list(sys.argv[1:] if args is None else args)
    command = next((token for token in typed if token in commands), "")
    own = parser_kwargs.get(command, {}) if command else {}
    found: list[str] = []
    for options in (parser_kwargs, own):
        for pattern in options.get("default_config_files") or ():
            for path in sorted(glob(os.path.expanduser(str(pattern)))):
                found += ["--config", path]
    if parser_kwargs.get("default_env") or own.get("default_env"):
        prefix = own.get("env_prefix", parser_kwargs.get("env_prefix", "PL"))
        found += _of_environment(f"{prefix}_{command.upper()}__" if command else f"{prefix}_")
    return [*found, *typed] if not command else [command, *found, *_without(typed, command)]


def _without(tokens: list[str], command: str) -> list[str]:
    place = tokens.index(command)
    return tokens[:place] + tokens[place + 1 :]


def _of_environment(beginning: str) -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if not name.startswith(beginning):
            continue
        path = name[len(beginning) :].lower().replace("__", ".")
        if path == "config":
            yield from ("--config", value)
        elif path.partition(".")[0] not in ("global_seed", "seed_workers", "trainer_logger"):  # Lightning's own
            yield f"--{path}={value}"


def _of_settings(settings: Mapping[str, Any], commands: Sequence[str]) -> list[str]:
    command = settings.get("subcommand") or next((name for name in commands if name in settings), None)
    if not commands or command is None:
        return list(_leaves(settings, ""))
    return [command, *_leaves(settings.get(command) or {}, "")]


def _leaves(settings: Mapping[str, Any], above: str) -> Iterator[str]:
    for name, value in settings.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        elif name == "config" and not above:
            for one in [value] if isinstance(value, str | os.PathLike) else value:
                yield from ("--config", os.fspath(one))
        else:
            yield f"--{path}={value if isinstance(value, str) else json.dumps(value)}"
