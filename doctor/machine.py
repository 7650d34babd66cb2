"""Cores, memory, shared memory and limits of this process."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Level, show_size

_SECTION = "machine"
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 512 << 20  # Docker gives 64 MiB, which one worker's batches fill
_LEAST_FILES = 4096  # each tensor that a loader's worker sends holds a file open
_NO_LIMIT = 1 << 60


def examine() -> Iterator[Finding]:
    """Yield findings about the machine and the limits of this process."""
    yield Finding(_SECTION, "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    python = platform.python_version()
    yield Finding(_SECTION, "Python", f"{python}, {sys.executable}")
    cores = usable_cores()
    yield Finding(_SECTION, "cores", f"{cores} usable of {os.cpu_count()}")
    yield judge_threads(os.environ.get("OMP_NUM_THREADS"), cores)
    total, available = memory()
    if total:
        is_short = available < total / 10
        yield Finding(
            _SECTION,
            "memory",
            f"{show_size(available)} available of {show_size(total)}",
            Level.WARNING if is_short else Level.OK,
            "end what else uses it, before processes of a run are killed for it" if is_short else "",
        )
    if _SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(_SHARED_MEMORY)
        yield judge_shared_memory(usage.total, usage.free)
    if sys.platform != "win32":
        import resource

        yield judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity and its container's quota count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = max(1, min(cores, round(int(quota[0]) / int(quota[1]))))
    return cores


def memory() -> tuple[int, int]:
    """Return bytes of memory and of what is available, of this container if it has a limit; zeros where unknown."""
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()) else 0
    total = pages * os.sysconf("SC_PAGE_SIZE") if pages else 0
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    kilobytes = lines.get("MemAvailable", "").split()
    available = int(kilobytes[0]) * 1024 if kilobytes else total
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    used = _read("/sys/fs/cgroup/memory.current") or _read("/sys/fs/cgroup/memory/memory.usage_in_bytes")
    if limit.isdigit() and int(limit) < min(total, _NO_LIMIT) and used.isdigit():
        total = int(limit)
        available = min(available, total - int(used))
    return total, available


def judge_threads(variable: str | None, cores: int) -> Finding:
    """Return what OMP_NUM_THREADS means on a machine with this number of cores."""
    name = "OMP_NUM_THREADS"
    if variable is None:
        return Finding(_SECTION, name, f"not set: each process computes with {cores} threads")
    if not variable.isdigit() or int(variable) == 0:
        return Finding(_SECTION, name, f"{variable!r} is not a number of threads", Level.WARNING, f"unset {name}")
    if int(variable) > cores:
        advice = f"set it to at most {cores}, divided by the processes of a run on the CPU"
        return Finding(_SECTION, name, f"{variable}, more than there are cores", Level.WARNING, advice)
    return Finding(_SECTION, name, variable)


def judge_shared_memory(total: int, free: int) -> Finding:
    """Return whether workers of data loaders have room for their batches, which they hand over in shared memory."""
    value = f"{show_size(free)} free of {show_size(total)}"
    if free >= _LEAST_SHARED:
        return Finding(_SECTION, "shared memory", value)
    advice = "start the container with --shm-size=8g or --ipc=host; or use num_workers=0"
    if total >= _LEAST_SHARED:
        advice = f"remove what dead processes left in {_SHARED_MEMORY}"
    return Finding(
        _SECTION, "shared memory", f"{value}: data loaders with workers end with a bus error", Level.WARNING, advice
    )


def judge_open_files(soft: int, hard: int) -> Finding:
    """Return whether a process may hold enough files open; -1 stands for no limit."""
    shown = "no limit" if soft < 0 else str(soft)
    if soft < 0 or soft >= _LEAST_FILES:
        return Finding(_SECTION, "open files", shown)
    can_raise = hard < 0 or hard >= _LEAST_FILES
    advice = (
        f"ulimit -n {65536 if hard < 0 else min(hard, 65536)}"
        if can_raise
        else "let an administrator raise it (limits.conf)"
    )
    advice += ", or torch.multiprocessing.set_sharing_strategy('file_system')"
    return Finding(
        _SECTION,
        "open files",
        f"{shown}: loaders with many workers fail with 'too many open files'",
        Level.WARNING,
        advice,
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""  # another kernel, or no control group
