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
from ...protocols import StateDict
from ...report.environment import revision

# Variables that choose what the Trainer does; all others stay unread, for they may hold secrets.
_VARIABLES = re.compile(r"(LOOPWRIGHT_TRAINER_|PL_TRAINER_|LT_)\w+|LOOPWRIGHT_(COMPAT_LIGHTNING|PARITY)")
# An option whose name ends so; eos_token and the like are words of a vocabulary.
_SECRET = re.compile(
    r"(?i)(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)"
    r"(token|secret|passw|password|passwd|credentials?|(api|access|private|secret)[-_.]?key)$"
)
_LOGIN = re.compile(r"://[^/@\s]+@")
HIDDEN = "***"


def program_record(fabric: Fabric) -> StateDict:
    """Return how this process was started: command, folder, commit, variables, threads, and who starts the ranks.

    "command" is None where there is no command to run again: a prompt, a notebook, `python -c`. Values of arguments
    that bear the name of a secret are hidden.

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
    folder = folder or os.getcwd()
    script = getattr(sys.modules["__main__"], "__file__", None)
    variables = {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)}
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
        name, equals, _ = argument.partition("=")
        if is_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif equals and _SECRET.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_LOGIN.sub(f"://{HIDDEN}@", argument))
        is_next = argument.startswith("-") and not equals and _SECRET.search(argument) is not None
    return shown
