"""`loopwright run-accelerate train.py ARGS`: runs a program written for Hugging Face Accelerate on Loopwright.

One process replaces this one and runs as `python train.py ARGS` would; several are started by `loopwright launch`.
Environment variables install the names in them and in the processes that they start.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...compat.accelerate import child_environment
from ...errors import ConfigError, LoopwrightError
from .launch import launch

_EPILOG = """  loopwright run-accelerate train.py --epochs 3
  loopwright run-accelerate --num-processes 2 --cpu train.py
  torchrun --nproc-per-node 2 --no-python loopwright run-accelerate train.py
"""


def run_accelerate(arguments: Sequence[str]) -> int:
    """Replace this process by the program, or start it in several processes; return the exit code where it returns.

    Args:
        arguments: Options, the program and its arguments.
    """
    given = _parser().parse_args(arguments)
    try:
        _check(given)
    except LoopwrightError as error:
        sys.stderr.write(f"loopwright run-accelerate: {error}\n")
        return 2
    environment = child_environment(os.environ.get("PYTHONPATH", ""))
    if given.cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    if given.mixed_precision is not None:
        environment["ACCELERATE_MIXED_PRECISION"] = given.mixed_precision
    kind = ["-m"] if given.module else []
    if given.config is not None or (given.num_processes or 1) > 1:
        return _launch([*_launch_options(given), *kind, *given.program], environment)
    command = [sys.executable, *kind, *given.program]
    if sys.platform == "win32":
        return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execve(sys.executable, command, {**os.environ, **environment})  # does not return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loopwright run-accelerate",
        usage="loopwright run-accelerate [options] train.py [arguments]\n"
        "       loopwright run-accelerate [options] -m module [arguments]",
        description="Run a program written for Hugging Face Accelerate on Loopwright: `import accelerate` imports "
        "Loopwright under Accelerate's names, in this process and in the processes that it starts. Accelerate need "
        "not be installed. Differences: docs/from-accelerate.md.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-m", "--module", action="store_true", help="run the program as a module, as `python -m` does")
    parser.add_argument(
        "--num-processes",
        "--num_processes",
        type=int,
        metavar="N",
        help="number of processes on this machine, started by `loopwright launch` (default: 1, or that of --config)",
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU where the machine has a GPU")
    parser.add_argument(
        "--mixed-precision",
        "--mixed_precision",
        choices=("no", "fp16", "bf16"),
        help="precision where the program names none (default: that of --config, else no)",
    )
    parser.add_argument(
        "--config",
        "--config-file",
        "--config_file",
        metavar="FILE",
        help="a file of `accelerate config`, or of `loopwright launch`; the command line has priority",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _check(given: argparse.Namespace) -> None:
    # A file of `loopwright launch` may name the program.
    if not given.program and given.config is None:
        raise ConfigError(
            "Expected a program, got options only.",
            fix="write its name after the options: loopwright run-accelerate --num-processes 2 train.py",
        )
    if given.program and not given.module and not Path(given.program[0]).exists():
        raise ConfigError(
            f"Expected a script, got {given.program[0]!r}, which does not exist in {os.getcwd()!r}.",
            fix="pass the path of a script, or -m and the name of a module, after the options.",
        )
    if given.num_processes is not None and given.num_processes < 1:
        raise ConfigError(
            f"Expected at least one process, got --num-processes {given.num_processes}.",
            fix="pass their number on this machine, or leave the option out for one.",
        )
    has_launcher = int(os.environ.get("WORLD_SIZE") or 1) > 1
    if has_launcher and (given.config is not None or (given.num_processes or 1) > 1):
        raise ConfigError(
            f"Expected no --num-processes and no --config in one of {os.environ['WORLD_SIZE']} processes that a "
            "launcher has started (WORLD_SIZE).",
            fix="pass them to the launcher, or call `loopwright run-accelerate` without it.",
        )


def _launch_options(given: argparse.Namespace) -> list[str]:
    options = [] if given.num_processes is None else [f"--nproc-per-node={given.num_processes}"]
    options += ["--accelerator=cpu"] if given.cpu else []
    return options + ([] if given.config is None else [f"--config={given.config}"])


def _launch(arguments: list[str], environment: dict[str, str]) -> int:
    os.environ.update(environment)
    return launch(arguments)
