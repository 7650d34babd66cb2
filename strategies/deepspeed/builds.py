"""Builds of operators with the machine's compiler: one process of a machine builds, visibly, and not for ever.

torch builds an operator within the process that first asks for it, in silence; other processes wait for a file `lock`,
and for ever where the one that made it was killed. Here the build runs in a child process, which ends with its parent
or at a time limit; the processes that want the same operator take turns by a lock of the system's, which ends with its
holder; and a file `lock` that nobody holds is named and removed.
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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import ConfigError, LaunchError

__all__ = ["TIMEOUT_VARIABLE", "build", "folder_of", "holders", "is_built", "missing_for", "tools_on_path"]

logger = logging.getLogger(__name__)

TIMEOUT_VARIABLE = "LOOPWRIGHT_BUILD_TIMEOUT_S"
"""Environment variable: seconds that a build may take."""
DEFAULT_TIMEOUT_S = 1200.0

_SAYS_EVERY_S = 10.0
_LOOKS_EVERY_S = 0.2
_GRACE_S = 10.0
# A lock of an unknown build has no owner if no process here has it open, and nothing was written beside it for so
# long. It may be that of another host, or of a container with a /proc of its own.
_QUIET_S = 180.0
_LINES_SHOWN = 25
_ERROR = re.compile(r"^FAILED: |: (fatal )?error: ")  # ninja's and the compiler's
# What decides how a compiler is called, beside versions and places.
_COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "TORCH_CUDA_ARCH_LIST")
_STAMP, _MACHINE, _LOG = "loopwright-built.json", "loopwright-builder", "loopwright-build.log"

# Runs in the child, whose process group is its own. It ends the group when its parent is gone. SIGTERM, since compilers
# are in groups that ninja has made, and ninja ends them only if it is asked to end.
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


def folder_of(name: str) -> Path:
    """Return the folder in which torch builds an operator: in TORCH_EXTENSIONS_DIR, else in its own cache."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory("", False), name)


def is_built(name: str) -> bool:
    """Return whether `build` has built an operator here for this environment, and nobody is at it."""
    try:
        place = folder_of(name)
    except OSError:  # it is made where it is not there
        return False
    return _is_current(place, name) and not (place / "lock").exists()


def build(name: str, maker: str, *, timeout_s: float | None = None) -> None:
    """Build an operator, unless it is there; the next `load` of it finds everything made.

    Called on every process that needs it: one builds and says so every ten seconds, and the others wait.

    Args:
        name: Of the operator, and of its folder.
        maker: "module:class" of what builds it: made without arguments, it has `load(verbose=...)`.
        timeout_s: Then the compiler is ended. None: LOOPWRIGHT_BUILD_TIMEOUT_S in the environment, else 20 minutes.

    Raises:
        ConfigError: There is no compiler, or no ninja.
        LaunchError: The build failed, with what the compiler said; or it took too long.
    """
    if is_built(name):
        return
    limit_s = _limit(timeout_s)
    place = folder_of(name)
    place.mkdir(parents=True, exist_ok=True)
    with _turn(place.parent / f"{name}.turn", name, limit_s):
        _free(place, name, limit_s)
        if _is_current(place, name):
            return  # somebody else's turn came first
        missing = missing_for([name])
        if missing:
            raise ConfigError(
                f"DeepSpeed's {name} must be built, and there is no {' and no '.join(missing)} here.",
                fix=f"{' and '.join(missing.values())}.",
            )
        _compile(place, name, maker, limit_s)
        (place / _STAMP).write_text(_stamp(place, name))


def missing_for(names: Iterable[str]) -> dict[str, str]:
    """Return what this machine lacks to build these operators, each thing with its remedy."""
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
        missing["libaio, which reads and writes disks,"] = (
            "install libaio with its headers (apt install libaio-dev), or name their place in CFLAGS and LDFLAGS"
        )
    return missing


def _has_libaio() -> bool:
    """Return whether programs can be linked with libaio; tried with the compiler, in a fraction of a second."""
    flags = [*os.environ.get("CFLAGS", "").split(), *os.environ.get("LDFLAGS", "").split()]
    source = '#include <libaio.h>\nextern "C" int made() { return io_submit(0, 0, 0); }\n'
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "try.cpp").write_text(source)
        command = [
            *os.environ.get("CXX", "c++").split(),
            "-shared",
            "-fPIC",
            "try.cpp",
            *flags,
            "-laio",
            "-o",
            "try.so",
        ]
        done = subprocess.run(command, cwd=folder, check=False, stdin=subprocess.DEVNULL, capture_output=True)
    return done.returncode == 0


@contextmanager
def tools_on_path() -> Iterator[None]:
    """Return a context in which this process finds ninja, also where it is installed beside Python only."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = _path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def _limit(timeout_s: float | None) -> float:
    if timeout_s is not None:
        return timeout_s
    given = os.environ.get(TIMEOUT_VARIABLE)
    if not given:
        return DEFAULT_TIMEOUT_S
    try:
        limit_s = float(given)
    except ValueError:
        limit_s = 0.0
    if limit_s <= 0:
        raise ConfigError(f"{TIMEOUT_VARIABLE}={given!r} is no positive number.", fix="set it to seconds, or unset it.")
    return limit_s


# --- what is there -------------------------------------------------------------------------------------------------


def _is_current(place: Path, name: str) -> bool:
    try:
        return (place / _STAMP).read_text() == _stamp(place, name)
    except FileNotFoundError:
        return False


def _stamp(place: Path, name: str) -> str:
    """Return what a build depends on, and which one it is."""
    import torch

    facts = {
        "built": (place / f"{name}.so").stat().st_mtime_ns,
        "torch": str(torch.__version__),
        "deepspeed": importlib.metadata.version("deepspeed"),
        "prefix": sys.prefix,
        "compiler": {key: os.environ[key] for key in _COMPILER_VARIABLES if key in os.environ},
    }
    return json.dumps(facts, indent=1)


def _path() -> str:
    """Return PATH with the programs beside Python first: ninja versions, whose logs differ, must not take turns."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


# --- whose turn it is ----------------------------------------------------------------------------------------------


@contextmanager
def _turn(file: Path, name: str, limit_s: float) -> Iterator[None]:
    """Return a context that one process at a time is in; it is left when the process ends, however it does."""
    began = time.monotonic()
    # The holder's own limit comes first; then this is the next one's turn.
    ends = began + 2 * limit_s + 60.0
    with file.open("w") as opened:
        is_first = True
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                # Without such locks, torch's own file is all that agrees with other processes.
                logger.warning("%s cannot be locked (%s); builds of several processes may meet", file, error)
                break
            if is_first:
                logger.info("waiting for another process of this machine, which builds %s", name)
                is_first = False
            if time.monotonic() > ends:
                raise LaunchError(
                    f"another process has been building DeepSpeed's operator {name} for {ends - began:.0f} s.",
                    fix=f"look which one has {file} open (lsof), and end it.",
                )
            time.sleep(_LOOKS_EVERY_S)
        yield


def _free(place: Path, name: str, limit_s: float) -> None:
    """Wait for a build that is not ours, and remove the lock of one that was killed.

    Raises:
        LaunchError: It does not end.
    """
    lock = place / "lock"
    began = said = time.monotonic()
    while lock.exists():
        owners = holders(lock)
        if owners == [] and _is_left_over(lock):
            logger.warning("removing %s: the build that made it was killed, and the next one would wait for ever", lock)
            lock.unlink(missing_ok=True)
            (place / _STAMP).unlink(missing_ok=True)  # it may have been building again
            return
        now = time.monotonic()
        who = f"process {', '.join(map(str, owners))}" if owners else "no process that can be seen here"
        if now - began > limit_s:
            raise LaunchError(
                f"{lock} has been there for {now - began:.0f} s, and a build of {name} would wait for it; it is held "
                f"by {who}.",
                fix="end that process; or delete the file, if no build is running, also on no other host.",
            )
        if now - said >= _SAYS_EVERY_S:
            logger.warning("waiting since %.0f s for %s, held by %s", now - began, lock, who)
            said = now
        time.sleep(_LOOKS_EVERY_S)


def holders(lock: Path) -> list[int] | None:
    """Return the processes that have a lock open, as a build has all the time; None where that cannot be seen."""
    if not Path("/proc/self/fd").is_dir():
        return None
    wanted = os.path.realpath(lock)
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended, or is another user's
            if any(_points_at(one, wanted) for one in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _points_at(link: Path, wanted: str) -> bool:
    try:
        return os.readlink(link) == wanted
    except OSError:  # closed this moment
        return False


def _is_left_over(lock: Path) -> bool:
    """Return whether a lock that no process here has open is nobody's."""
    try:
        before = lock.stat()
        newest = max(one.stat().st_mtime for one in lock.parent.iterdir())
    except OSError:  # removed this moment
        return False
    maker = lock.parent / _MACHINE
    is_ours = maker.is_file() and maker.read_text() == _machine()
    if not is_ours and time.time() - newest < _QUIET_S:
        return False
    # Its owner closes the file and removes it then: look again, for one that was between the two.
    time.sleep(_LOOKS_EVERY_S)
    try:
        return lock.stat().st_ino == before.st_ino and holders(lock) == []
    except FileNotFoundError:
        return False


def _machine() -> str:
    """Return a name for what has one /proc: a boot of a machine, or a container on it."""
    name = socket.gethostname()
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        name = f"{name} {boot} {os.readlink('/proc/self/ns/pid')}"
    return name


# --- the build -----------------------------------------------------------------------------------------------------


def _compile(place: Path, name: str, maker: str, limit_s: float) -> None:
    module, _, kind = maker.partition(":")
    began = time.monotonic()
    log = place / _LOG
    (place / _MACHINE).write_text(_machine())
    logger.warning("building DeepSpeed's operator %s with the C++ compiler, once; it is kept in %s", name, place)
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(os.getpid()), module, kind],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PATH": _path()},
        )
        try:
            code = _wait(child, name, began, limit_s)
        except BaseException:
            _end(child, place)
            raise
    if code is None:
        _end(child, place)
        raise LaunchError(
            f"the build of DeepSpeed's operator {name} took longer than {limit_s:.0f} s and was ended.\n{_said(log)}",
            fix=f"set {TIMEOUT_VARIABLE} to more seconds, or MAX_JOBS to the number of free cores.",
        )
    if code != 0:
        _drop_lock(place)
        raise LaunchError(
            f"DeepSpeed's operator {name} could not be built (exit code {code}). All that was said is in {log}; the "
            f"error:\n{_said(log)}",
            fix="install what is missing: a C++ compiler (apt install g++), ninja (pip install ninja), for async_io "
            "libaio (apt install libaio-dev).",
        )
    logger.warning("built DeepSpeed's operator %s in %.0f s", name, time.monotonic() - began)


def _wait(child: subprocess.Popen[bytes], name: str, began: float, limit_s: float) -> int | None:
    """Return the exit code of the build; None at the time limit."""
    while True:
        passed = time.monotonic() - began
        try:
            return child.wait(timeout=max(0.0, min(_SAYS_EVERY_S, limit_s - passed)))
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - began
            if passed >= limit_s:
                return None
            logger.warning("building %s: for %.0f s of at most %.0f s", name, passed, limit_s)


def _end(child: subprocess.Popen[bytes], place: Path) -> None:
    """End the build with all that it has started, and remove its lock."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)  # ninja ends its compilers, which are in groups of their own
        ends = time.monotonic() + _GRACE_S
        while time.monotonic() < ends:
            child.poll()
            os.killpg(child.pid, 0)  # raises when nobody of the group is left
            time.sleep(_LOOKS_EVERY_S)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    _drop_lock(place)


def _drop_lock(place: Path) -> None:
    """Remove the lock of our own build, which has ended; not that of another one, for which it may have waited."""
    if not holders(place / "lock"):
        (place / "lock").unlink(missing_ok=True)


def _said(log: Path) -> str:
    """Return what the compiler said, from its first error on."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((at for at, line in enumerate(lines) if _ERROR.search(line)), None)
    shown = lines[-_LINES_SHOWN:] if first is None else lines[first : first + _LINES_SHOWN]
    return "\n".join(f"    {line}" for line in shown) or "    (nothing was said)"
