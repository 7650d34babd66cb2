"""`loopwright run-lightning train.py ARGS`: runs a program written for Lightning on Loopwright.

The program replaces this process and runs as `python train.py ARGS` would. Two environment variables install the names
in it and in the processes that it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from textwrap import wrap

from ...compat.lightning import PARITY, child_environment
from ...compat.lightning.parity.switches import SWITCHES, as_text, choose
from ...errors import ConfigError
from ...messages import fitted

_USAGE = """usage: loopwright run-lightning [--parity[=NAMES]] [PYTHON OPTIONS] PROGRAM.py [ARGS]
       loopwright run-lightning [--parity[=NAMES]] [PYTHON OPTIONS] -m MODULE [ARGS]

Run a program written for Lightning on Loopwright: `import lightning` imports Loopwright under Lightning's names, in
this process and in the processes that it starts. Lightning need not be installed. Differences: docs/migrating.md.

  --parity             every number and count is Lightning's, bit for bit on the CPU
  --parity=a,b         only these differences are switched off
  --parity=list        print the differences that can be switched off, by name

  loopwright run-lightning train.py --epochs 3
  torchrun --nproc-per-node 2 --no-python loopwright run-lightning train.py
"""
# Options with which Python ignores PYTHONPATH or sitecustomize.
_REFUSED = {"-E", "-I", "-S"}


def run_lightning(arguments: Sequence[str]) -> int:
    """Replace this process by the program; where that is not possible, run it and return its exit code.

    Args:
        arguments: The program and its arguments, as for Python.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        (sys.stdout if arguments else sys.stderr).write(fitted(_USAGE))
        return 0 if arguments else 2
    environment = {**os.environ, **child_environment(os.environ.get("PYTHONPATH", ""))}
    if arguments[0].partition("=")[0] == "--parity":
        option, arguments = arguments[0], arguments[1:]
        names = option.partition("=")[2] or "1"
        if names == "list":
            sys.stdout.write(_describe_switches())
            return 0
        try:
            environment[PARITY] = as_text(choose(names))
        except ConfigError as error:
            sys.stderr.write(f"run-lightning: {error}\n")
            return 2
        if not arguments:
            sys.stderr.write(fitted(_USAGE))
            return 2
    refused = [option for option in _python_options(arguments) if option in _REFUSED]
    if refused:
        sys.stderr.write(
            f"run-lightning: expected Python options that keep PYTHONPATH and sitecustomize, got {refused[0]}; "
            "omit it.\n"
        )
        return 2
    command = [sys.executable, *arguments]
    if sys.platform == "win32":
        return subprocess.run(command, env=environment, check=False).returncode
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execve(sys.executable, command, environment)  # does not return


def _python_options(arguments: Sequence[str]) -> list[str]:
    """Return the options before the program."""
    options: list[str] = []
    for argument in arguments:
        if not argument.startswith("-") or argument in ("-m", "-c"):
            break
        options.append(argument)
    return options


def _describe_switches() -> str:
    """Return the table of parity for a terminal."""
    lines = []
    for switch in SWITCHES:
        lines.append(switch.name)
        for who, what in (("Lightning", switch.lightning), ("Loopwright", switch.loopwright)):
            lines += wrap(f"{who}: {what}", 100, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"
