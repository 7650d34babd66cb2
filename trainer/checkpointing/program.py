"""The program of a run, as a full checkpoint records it: what a replay starts again. Imported when one is saved."""

from __future__ import annotations

import os
import re
import sys
from functools import cache

import torch

from ...errors import LaunchError
from ...fabric import Fabric
from ...fabric.launch.command import interpreter_flags, own_command
from ...lazy import START_FOLDER
from ...protocols import StateDict, Tree
from ...report.environment import revision

# Variables that choose what the Trainer does; all others stay unread, for they may hold secrets.
_VARIABLES = re.compile(r"(LOOPWRIGHT_TRAINER_|PL_TRAINER_|LT_)\w+|LOOPWRIGHT_(COMPAT_LIGHTNING|PARITY)")
# What the name of a secret ends in; eos_token and the like are words of a vocabulary.
_NAME = (
    r"(?<!eos[-_])(?<!bos[-_])(?<!pad[-_])(?<!unk[-_])(?<!sep[-_])(?<!cls[-_])(?<!mask[-_])"
    r"(?:token|secret|passw|passwords?|passwd|passphrase|pwd|credentials?|bearer|auth|authorization|signature"
    r"|(?:api|access|account|auth|private|secret|wandb|ssh|encryption|signing|license)[-_.]?key|jwt|cookie"
    r"|(?:^|(?<=--))(?:pass|key))"  # names of many other things end in these
)
_END = re.compile(rf"(?i){_NAME}$")
_WORD = re.compile(r"<.*>|\[.*\]")  # of a vocabulary: image_token is "<image>"
_OPTION = re.compile(rf"(?i)^-.*{_NAME}$")  # its value is the next argument
# In an argument, all that follows the name: NAME=x, ?NAME=x of a URL, {"NAME": "x"}, NAME: x of a header.
_VALUE = re.compile(rf"(?is)({_NAME}[\"']?\s*[=:]).*")
_KEY = re.compile(r"\b(hf|gh[a-z]|github_pat|glpat)[-_][A-Za-z0-9]{16,}\w*")  # as some services write them
_LOGIN = re.compile(r"://[^/\s]+@")
HIDDEN = "***"


def program_record(fabric: Fabric) -> StateDict:
    """Return how this process was started: command, folder, commit, variables, threads, and who starts the ranks.

    "command" is None where there is no command to run again: a prompt, a notebook, `python -c`. Values of arguments
    and variables that bear the name of a secret are hidden.

    Args:
        fabric: Its launcher says who starts the ranks: "program", or "others" (torchrun, a cluster).
    """
    starts = fabric.world_size == 1 or type(fabric.launcher).__name__ in ("ScriptLauncher", "ProcessLauncher")
    return {**_of_process(), "threads": torch.get_num_threads(), "ranks_by": "program" if starts else "others"}


@cache
def _of_process() -> StateDict:
    folder: str | None = None
    try:
        command, folder = own_command(0)
    except LaunchError:
        command = None
    folder = folder or START_FOLDER or os.getcwd()
    script = getattr(sys.modules["__main__"], "__file__", None)
    variables = {
        name: hide_secrets([f"{name}={value}"])[0].partition("=")[2]
        for name, value in os.environ.items()
        if _VARIABLES.fullmatch(name)
    }
    return {
        "command": None if command is None else hide_secrets(command[1 + len(interpreter_flags()) :]),
        "folder": folder,
        "revision": (revision(os.path.dirname(os.path.abspath(script))) if script else None) or revision(folder),
        "variables": variables,
    }


def hide_secrets(arguments: list[str]) -> list[str]:
    """Return the arguments of a command with the values of secrets replaced: `--token=x`, `--api-key x`, logins."""
    shown: list[str] = []
    is_next = False
    for argument in arguments:
        if is_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            hidden = _KEY.sub(HIDDEN, _LOGIN.sub(f"://{HIDDEN}@", argument))
            shown.append(_VALUE.sub(lambda match: match[1] + HIDDEN, hidden))
        is_next = _OPTION.search(argument) is not None
    return shown


def is_secret(name: str, value: Tree) -> bool:
    """Return whether a text has the name or the form of a secret, or one in a dict or list has."""
    if isinstance(value, dict):
        return any(is_secret(str(key), below) for key, below in value.items())
    if isinstance(value, list | tuple):
        return any(is_secret(name, below) for below in value)
    if not isinstance(value, str):
        return False
    is_named = value and name.lower() != "key" and _END.search(name) and not _WORD.fullmatch(value)
    return bool(is_named or _KEY.search(value) or _LOGIN.search(value))
