"""A rank that starts early: it imports torch, waits, and runs the user's program as an interpreter would.

`python [flags] waiting_rank.py script.py args` or `... waiting_rank.py -m module args`. It is run by its path and must
not import the package before `sys.path` is that of the user's program; imports by other modules have no effect.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import json
import os
import runpy
import signal
import sys
import warnings
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import NoReturn

WAITS = "LOOPWRIGHT_WAITING"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Import, wait for the environment, and run the program; end silently if the launching process ends."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: ends here without a traceback
    plan = json.loads(os.environ[WAITS])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != plan["parent"]:
        os._exit(0)
    os.set_inheritable(plan["pipe"], False)
    program = sys.argv[1:]
    _take_the_place_of(program)
    warned = _import(plan["modules"])
    environment = json.loads(_read(plan["pipe"], int.from_bytes(_read(plan["pipe"], 8), "little")))
    os.environ.clear()
    os.environ.update(environment)
    importlib.invalidate_caches()
    signal.signal(signal.SIGINT, interrupt)
    for args in warned:
        warnings.showwarning(*args)
    try:
        if program[0] == "-m":
            _run_module(program[1])
        else:
            _run_script(program[0])
    except SystemExit:
        raise
    except BaseException:
        _hide_this_file()
        raise


def _take_the_place_of(program: list[str]) -> None:
    """Set the arguments and the first folder of `sys.path` to what the interpreter would set for the program."""
    own = sys.orig_argv.index(__file__)
    sys.orig_argv = [*sys.orig_argv[:own], *sys.orig_argv[own + 1 :]]
    is_module = program[0] == "-m"
    sys.argv = ["-m", *program[2:]] if is_module else program
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(program[0]))


def _import(modules: dict[str, str | None]) -> list[tuple[str, type[Warning], str, int]]:
    """Import modules; return what they warned of, which a rank shows, and a process that is not needed does not.

    Args:
        modules: Names, and the files that the launching process has imported.
    """
    warned: list[tuple[str, type[Warning], str, int]] = []
    show = warnings.showwarning

    def note(message: str, category: type[Warning], filename: str, lineno: int, *rest: object) -> None:
        warned.append((message, category, filename, lineno))

    warnings.showwarning = note  # type: ignore[assignment]
    try:
        for name, file in modules.items():
            if getattr(importlib.import_module(name), "__file__", None) != file:
                os._exit(1)  # the program changes where modules are found
    except BaseException:  # the program meets it again, in a rank that starts at the launch
        os._exit(1)
    warnings.showwarning = show
    return warned


def _read(pipe: int, size: int) -> bytes:
    """Return this number of bytes; end the process if the launching process has ended."""
    data = b""
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            _end()
        data += part
    return data


def _end() -> NoReturn:
    os._exit(0)


def _run_module(name: str) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` calls


def _run_script(file: str) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
    vars(main).update(__builtins__=builtins, __annotations__={})
    with io.open_code(file) as text:
        code = compile(text.read(), file, "exec", dont_inherit=True)
    exec(code, vars(main))


def _hide_this_file() -> None:
    """Let the traceback of what the program has raised begin in the program."""
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


if __name__ == "__main__":
    main()
