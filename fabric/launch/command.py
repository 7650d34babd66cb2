"""The command that runs the user's program again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

from ...errors import LaunchError


def own_command(local_rank: int) -> tuple[list[str], str | None]:
    """Return the command that started this process, for another local rank, and the folder to run it in.

    `python [flags] script.py args` and `python [flags] -m module args` are recognized from `__main__`, so that programs
    that run a script for you (a debugger, a coverage tool) do not interfere. Under Hydra, the other ranks get this
    job's values and output folder, and do not write a configuration.

    Args:
        local_rank: Rank among the processes of this node.

    Returns:
        The command, and its working folder (None: this process's).

    Raises:
        LaunchError: The program cannot be run again: an interpreter's prompt, `-c`, standard input, or a process that
            multiprocessing, or a library built on it, has started to run a function.
    """
    if multiprocessing.parent_process() is not None:
        raise LaunchError(
            "Expected a program, which the launcher runs again for the other ranks, got a process that multiprocessing "
            "has started for a function (Process, Pool, ProcessPoolExecutor, joblib).",
            fix="call fit in the main process. Or let the function be sent to the ranks, with strategy='ddp_spawn' or "
            "'ddp_fork'; a daemonic process, such as a Pool's, can start none: use ProcessPoolExecutor.",
        )
    main = sys.modules["__main__"]
    program, typed = _program(main)
    arguments = _arguments(typed)
    folder = None
    hydra = _hydra()
    if hydra is not None:
        arguments, folder = _hydra_arguments(hydra, arguments, local_rank), hydra.runtime.cwd
    if getattr(sys, "frozen", False):  # an executable made of the program (PyInstaller, cx_Freeze)
        return [sys.executable, *arguments], folder
    return [sys.executable, *interpreter_flags(), *program, *arguments], folder


def run_by(file: str, command: list[str]) -> list[str]:
    """Return the command of `own_command` with a script of ours that runs the user's program."""
    flags = interpreter_flags()
    return [*command[: 1 + len(flags)], file, *command[1 + len(flags) :]]


def interpreter_flags() -> list[str]:
    """Return the flags of this interpreter, which follow its path in `own_command`."""
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()  # as multiprocessing does
    return flags


def sweep_job() -> str | None:
    """Return a key of this job among those that the process runs in turn; None outside of Hydra."""
    hydra = _hydra()
    return None if hydra is None else f"{hydra.runtime.output_dir} {hydra.overrides.task}"


def _program(main: ModuleType) -> tuple[list[str], str]:
    """Return the command's part between flags and arguments, and its last word as it was typed."""
    if getattr(sys, "frozen", False):
        return [], sys.argv[0]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # "__main__": a folder or zip file was run
        name = spec.name.removesuffix(".__main__")
        return ["-m", name], name
    file = sys.argv[0] if spec is not None else getattr(main, "__file__", None)
    if not file or not (os.path.isfile(file) or os.path.isdir(file)):  # /dev/stdin is neither, and can be read once
        raise LaunchError(
            "Expected a script or module, which the launcher runs again for the other ranks, got a program from a "
            "prompt, from `python -c`, or from standard input.",
            fix="put it into a file and run that, or use strategy='ddp_fork' (a notebook: 'ddp_notebook').",
        )
    return [os.path.abspath(file)], sys.argv[0]


def _arguments(typed: str) -> list[str]:
    """Return the program's arguments as they were typed; the program may have removed some from `sys.argv`."""
    typed_command = sys.orig_argv[1:]
    if typed in typed_command:
        return typed_command[typed_command.index(typed) + 1 :]
    return sys.argv[1:]


# -- Hydra -----------------------------------------------------------------------------------------------------------


def _hydra() -> Any:  # Any: Hydra's configuration; Hydra is optional
    """Return Hydra's part of the configuration if this program runs under Hydra."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    return module.HydraConfig.get()


def _hydra_arguments(hydra: Any, arguments: list[str], local_rank: int) -> list[str]:
    is_sweep = str(hydra.mode).endswith("MULTIRUN")
    if is_sweep:
        # One job of the sweep: its own values replace the sweep's lists.
        flags = [flag for flag in arguments if flag not in ("-m", "--multirun") and not _is_override(flag)]
        arguments = [*flags, *hydra.overrides.task]
    folder = str(hydra.runtime.output_dir).replace("\\", "\\\\").replace("'", "\\'")
    return [
        *arguments,
        f"hydra.run.dir='{folder}'",
        f"hydra.job.name={hydra.job.name}_rank{local_rank}",
        "hydra.output_subdir=null",
        *(["hydra.mode=RUN"] if is_sweep else []),
    ]


def _is_override(argument: str) -> bool:
    return argument.startswith("~") or ("=" in argument and not argument.startswith("-"))
