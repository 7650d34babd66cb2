"""`loopwright migrate check PROGRAM.py`: a program's first steps under Lightning and under parity; or only read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ...compat.lightning.check.child_program import has_lightning
from ...compat.lightning.check.program import ProgramCheck
from ...compat.lightning.check.unserved import find_unserved, local_imports
from ...messages import counted, fitted

_USAGE = """usage: loopwright migrate check [OPTIONS] PROGRAM.py [ARGS]
       loopwright migrate check [OPTIONS] -m MODULE [ARGS]
       loopwright migrate check --static PATH [PATH ...]

Read a program written for Lightning, and list what it uses that Loopwright does not support: imports, attributes of
Lightning's modules and of Trainers, keyword arguments, and overridden methods that are never called.

Where Lightning is installed, the program then runs twice: under Lightning, and under `run-lightning --parity`. Each fit
makes a few steps, in one process on the CPU, in a copy of the working folder. Hook calls, batches, losses, weights,
learning rates, logged rows and checkpoints are compared, and the first difference is named, with the row of
docs/migrating.md that explains it.

  --steps N                training steps of each fit (default: 4)
  --lightning-python PATH  an interpreter with Lightning (default: this one)
  --without-parity         also compare Loopwright without --parity
  --timeout SECONDS        how long each run may take (default: 600)
  --folder PATH            keep the files of the runs there
  --static                 only read; PATH is a file, or a folder whose Python files are read

Exit code: 0 everything is equal, 1 a difference, 2 the program could not be compared. When programs are only read, 1
means that something is not supported, and 2 that a file could not be read.

  loopwright migrate check train.py --epochs 3
  loopwright migrate check --static src
"""


_WITH_VALUE = ("--steps", "--lightning-python", "--timeout", "--folder")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def migrate(arguments: Sequence[str]) -> int:
    """Check programs and return the exit code.

    Args:
        arguments: "check", options, and a program with its arguments, or files and folders.
    """
    if not arguments or arguments[0] != "check" or len(arguments) < 2 or arguments[1] in ("-h", "--help"):
        is_asked = any(one in ("-h", "--help") for one in arguments[:2])
        (sys.stdout if is_asked else sys.stderr).write(fitted(_USAGE))
        return 0 if is_asked else 2
    try:
        options, command = _read_options(arguments[1:])
    except ValueError as error:
        sys.stderr.write(f"migrate check: {error}\n\n{fitted(_USAGE)}")
        return 2
    if options.static or Path(command[0]).is_dir():
        return _read(list(_files(command)))
    paths = [] if command[0] == "-m" else [path.resolve() for path in _program_files(Path(command[0]))]
    code = _read(paths) if paths else 0
    if code == 2:
        return 2
    python = options.lightning_python or sys.executable
    try:
        is_there = has_lightning(python)
    except OSError as error:
        sys.stderr.write(f"migrate check: --lightning-python {python}: {error}\n")
        return 2
    if not is_there and options.lightning_python:
        sys.stderr.write(f"migrate check: {python} has no Lightning: install it there, or pass another interpreter.\n")
        return 2
    if not is_there:
        sys.stdout.write(
            "The program was only read, not run: Lightning is not installed here. Pass --lightning-python PATH, or "
            "install it.\n"
        )
        return code
    check = ProgramCheck(
        command, python, sys.executable, sys.stdout, options.steps, options.timeout, options.without_parity,
        options.folder,
    )  # fmt: skip
    return check.run()


def _read_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and what follows them.

    Raises:
        ValueError: An option is unknown or has a wrong value, or there is no program.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=_positive)
    parser.add_argument("--lightning-python")
    parser.add_argument("--without-parity", action="store_true")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--static", action="store_true")
    parser.set_defaults(steps=4, timeout=600.0)
    own = list(arguments)
    for position, text in enumerate(arguments):
        is_value = position > 0 and arguments[position - 1] in (
            "--steps",
            "--lightning-python",
            "--timeout",
            "--folder",
        )
        if text == "-m" or not (text.startswith("-") or is_value):
            own = list(arguments[:position])
            break
    options = parser.parse_args(own)
    command = list(arguments[len(own) :])
    if not command or command == ["-m"]:
        raise ValueError("expected a program, got none")
    if options.folder is not None and options.folder.exists() and any(options.folder.iterdir()):
        raise ValueError(f"expected --folder to be new or empty, got {options.folder}")
    if not options.static and command[0] != "-m" and not Path(command[0]).exists():
        raise ValueError(f"expected a program, got {command[0]!r}, which does not exist")
    return options, command


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _read(files: Sequence[Path]) -> int:
    """List what is not supported, and return the exit code."""
    code = 0
    for path in files:
        try:
            uses = find_unserved(path.read_text(encoding="utf-8"), str(path))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            code = 2
            continue
        for use in uses:
            sys.stdout.write(f"{_shown(path)}:{use.line}: {use.what}: {use.why}\n")
        code = max(code, int(bool(uses)))
    if not code:
        sys.stdout.write(f"{counted(len(files), 'file')} read: all names that they use of Lightning are supported.\n")
    return code


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


def _program_files(program: Path) -> list[Path]:
    """Return a program and the files beside it that it imports, directly or by others."""
    found = [program.resolve()]
    for path in found:  # it grows
        try:
            found += [one for one in local_imports(path, program.resolve().parent) if one not in found]
        except (OSError, SyntaxError, UnicodeDecodeError):  # named when it is read
            continue
    return found


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(path.rglob("*.py"))
        else:
            yield path
