"""Builds of DeepSpeed's operators with the machine's compiler: one process builds, visibly, with a time limit.

torch builds an operator silently in the process that first needs it. Other processes wait for a file `lock`, forever if
its owner was killed. Here the build runs in a child process, which ends with its parent or at a time limit. Processes
that need the same operator take turns by a lock of the operating system, which ends with the build. Builds are in
their own folder, so that a file `lock` found in a turn is that of a killed build: it is removed.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

TIMEOUT_VARIABLE = "LOOPWRIGHT_BUILD_TIMEOUT_S"
"""Environment variable: longest build in seconds."""
DEFAULT_TIMEOUT_S = 1200.0

_SAYS_EVERY_S = 10.0
_LOOKS_EVERY_S = 0.2
_GRACE_S = 10.0
_LINES_SHOWN = 25
_ERROR = re.compile(r"^FAILED: |: (fatal )?error: ")  # ninja's and the compiler's
_COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "TORCH_CUDA_ARCH_LIST")
_ROOT, _STAMP, _LOG = "loopwright-builds", "built.json", "build.log"

# Runs in the child, which has its own process group, and ends the group when the parent has ended. SIGTERM: ninja puts
# compilers into groups of their own, and ends them only when it is asked to end.
_PROGRAM = """
import importlib, os, signal, sys, threading, time
def watch(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)
threading.Thread(target=watch, args=(int(sys.argv[1]),), daemon=True).start()
made = importlib.import_module(sys.argv[2])
for name in sys.argv[3].split("."):
    made = getattr(made, name)
made().load(verbose=False)
"""


def _root() -> Path:
    """Return the folder of our builds: in TORCH_EXTENSIONS_DIR, else in torch's cache."""
    from torch.utils import cpp_extension

    root = Path(cpp_extension._get_build_directory("", False))
    return root if root.name == _ROOT else root / _ROOT


def is_built(name: str) -> bool:
    """Return whether `build` has built an operator for this environment, and no build of it is under way."""
    try:
        folder = _root() / name
    except OSError:  # torch makes the folder, and cannot
        return False
    return _is_current(folder, name) and not (folder / "lock").exists()


def build(name: str, maker: str, *, timeout_s: float | None = None) -> None:
    """Build an operator, unless it is built. Called on every process that needs it: one builds, the others wait.

    Args:
        name: Name of the operator, and of its folder.
        maker: "module:class" of the builder, which has `load(verbose=...)`.
        timeout_s: Longest build. None: LOOPWRIGHT_BUILD_TIMEOUT_S in the environment, else 20 minutes.

    Raises:
        ConfigError: There is no compiler, or no ninja.
        LaunchError: The build failed, with the compiler's message, or took too long.
    """
    if is_built(name):
        return
    limit_s = _limit_s() if timeout_s is None else timeout_s
    folder = _root() / name
    folder.mkdir(parents=True, exist_ok=True)
    with _turn(folder.parent / f"{name}.turn", name, limit_s) as turn:
        if turn is not None:
            _remove_left_over(folder)
        if is_built(name):
            return  # another process's turn came first
        missing = missing_for([name])
        if missing:
            raise ConfigError(
                f"DeepSpeed's {name} must be built, and there is no {' and no '.join(missing)} here.",
                fix=f"{' and '.join(missing.values())}.",
            )
        _compile(folder, name, maker, limit_s, turn)
        (folder / _STAMP).write_text(_stamp(folder, name))


def _limit_s() -> float:
    given = os.environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_TIMEOUT_S)
    limit_s = float(given) if re.fullmatch(r"\d+(\.\d*)?", given) else 0.0
    if limit_s <= 0:
        raise ConfigError(
            f"Expected {TIMEOUT_VARIABLE} to be a positive number, got {given!r}.", fix="set it to seconds."
        )
    return limit_s


def missing_for(names: Iterable[str]) -> dict[str, str]:
    """Return the tools that this machine lacks to build these operators, each with its remedy."""
    names = list(names)
    missing: dict[str, str] = {}
    if not names:
        return missing
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        missing[f"C++ compiler ({compiler})"] = "install g++ (apt install g++)"
    if shutil.which("ninja", path=_path()) is None:
        missing["ninja"] = "install ninja (pip install ninja)"
    if "async_io" in names and not missing and not _has_libaio():
        fix = "install libaio with its headers (apt install libaio-dev), or name their folder in CFLAGS and LDFLAGS"
        missing["libaio, which reads and writes disks,"] = fix
    return missing


def _has_libaio() -> bool:
    """Return whether the compiler can link with libaio."""
    compiler, *flags = (os.environ.get(name, default).split() for name, default in
                        (("CXX", "c++"), ("CFLAGS", ""), ("LDFLAGS", "")))  # fmt: skip
    source = '#include <libaio.h>\nextern "C" int made() { return io_submit(0, 0, 0); }\n'
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "try.cpp").write_text(source)
        command = [*compiler, "-shared", "-fPIC", "try.cpp", *flags[0], *flags[1], "-laio", "-o", "try.so"]
        done = subprocess.run(command, cwd=folder, check=False, stdin=subprocess.DEVNULL, capture_output=True)
    return done.returncode == 0


@contextmanager
def build_environment() -> Iterator[None]:
    """Return a context in which this process finds our builds, and ninja, also if it is beside Python only."""
    ours = _environment()
    before = {key: os.environ.get(key) for key in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key)
            os.environ.update({} if value is None else {key: value})


def _environment() -> dict[str, str]:
    return {"PATH": _path(), "TORCH_EXTENSIONS_DIR": str(_root())}


def _path() -> str:
    """Return PATH with the programs beside Python first: builds must not alternate between versions of ninja."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _is_current(folder: Path, name: str) -> bool:
    try:
        return (folder / _STAMP).read_text() == _stamp(folder, name)
    except FileNotFoundError:
        return False


def _stamp(folder: Path, name: str) -> str:
    """Return what a build depends on, and which build it is."""
    import torch

    facts = {
        "built": (folder / f"{name}.so").stat().st_mtime_ns,
        "torch": str(torch.__version__),
        "deepspeed": importlib.metadata.version("deepspeed"),
        "prefix": sys.prefix,
        "compiler": {key: os.environ[key] for key in _COMPILER_VARIABLES if key in os.environ},
    }
    return json.dumps(facts, indent=1)


# --- locks ---------------------------------------------------------------------------------------------------------


@contextmanager
def _turn(file: Path, name: str, limit_s: float) -> Iterator[int | None]:
    """Return a context for one process at a time, and the lock's descriptor; None where there are no such locks.

    The lock ends when every process that has the descriptor open has ended.
    """
    limit_s = 2 * limit_s + 60.0  # the holder's own limit ends first
    ends = time.monotonic() + limit_s
    with file.open("w") as opened:
        is_first, turn = True, None
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                turn = opened.fileno()
                break
            except BlockingIOError:
                pass
            except OSError as error:  # a file system without such locks
                logger.warning("%s cannot be locked (%s); builds of several processes may collide", file, error)
                break
            if is_first:
                logger.info("waiting for another process of this machine, which builds %s", name)
                is_first = False
            if time.monotonic() > ends:
                raise LaunchError(
                    f"another process has been building DeepSpeed's operator {name} for {limit_s:.0f} s.",
                    fix=f"find the process that has {file} open (lsof), and end it.",
                )
            time.sleep(_LOOKS_EVERY_S)
        yield turn


def _remove_left_over(folder: Path) -> None:
    """Remove the lock of a build that was killed, for which torch would wait forever. Only within a turn."""
    lock = folder / "lock"
    if lock.exists():
        logger.warning("removing %s: the build that made it was killed", lock)
        (folder / _STAMP).unlink(missing_ok=True)  # it may have been building again
        lock.unlink(missing_ok=True)  # of a build that has ended since


# --- the build -----------------------------------------------------------------------------------------------------


def _compile(folder: Path, name: str, maker: str, limit_s: float, turn: int | None) -> None:
    module, _, kind = maker.partition(":")
    began = time.monotonic()
    log = folder / _LOG
    logger.warning("building DeepSpeed's operator %s with the C++ compiler, once; it is kept in %s", name, folder)
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(os.getpid()), module, kind],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **_environment()},
            pass_fds=() if turn is None else (turn,),  # the turn lasts until the build has ended, not its parent
        )
        try:
            while child.poll() is None and (passed := time.monotonic() - began) < limit_s:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=min(_SAYS_EVERY_S, limit_s - passed))
                    break
                passed = time.monotonic() - began
                logger.warning("building %s: for %.0f s of at most %.0f s", name, passed, limit_s)
        finally:
            code = child.poll()
            if code is None:
                _end(child)
            if turn is not None:  # else it may be another build's, for which ours has waited
                (folder / "lock").unlink(missing_ok=True)
    if code is None:
        raise LaunchError(
            f"the build of DeepSpeed's operator {name} took longer than {limit_s:.0f} s and was ended.\n{_said(log)}",
            fix=f"set {TIMEOUT_VARIABLE} to more seconds, or MAX_JOBS to the number of free cores"
            + ("." if turn is not None else f"; or delete {folder / 'lock'}, if no build is running, on any host."),
        )
    if code != 0:
        raise LaunchError(
            f"DeepSpeed's operator {name} could not be built (exit code {code}). The full log is {log}; the error:\n"
            f"{_said(log)}",
            fix="install what is missing: a C++ compiler (apt install g++), ninja (pip install ninja), for async_io "
            "libaio (apt install libaio-dev).",
        )
    logger.warning("built DeepSpeed's operator %s in %.0f s", name, time.monotonic() - began)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the build with all processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)  # ninja ends its compilers
        ends = time.monotonic() + _GRACE_S
        while time.monotonic() < ends:
            child.poll()
            os.killpg(child.pid, 0)  # raises when the group is empty
            time.sleep(_LOOKS_EVERY_S)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _said(log: Path) -> str:
    """Return the compiler's output from its first error on."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((at for at, line in enumerate(lines) if _ERROR.search(line)), len(lines) - _LINES_SHOWN)
    shown = lines[max(0, first) : max(0, first) + _LINES_SHOWN]
    return "\n".join(f"    {line}" for line in shown) or "    (no output)"
