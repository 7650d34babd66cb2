"""Connections between several processes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from .finding import Finding, Level

_SECTION = "processes"
_SLOW_S = 1.0
_LONGEST_S = 5.0
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_OURS = ("LOOPWRIGHT_", "LW_", "LT_", "PL_")
_THEIRS = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES", "PJRT_DEVICE")


def examine() -> Iterator[Finding]:
    """Yield findings about backends of torch.distributed, names and connections of this host, and variables."""
    yield _backends()
    yield _store()
    yield _host_name()
    yield from judge_variables(os.environ)


def _backends() -> Finding:
    import torch.distributed as dist

    if not dist.is_available():
        advice = "install a build of torch with it"
        return Finding(_SECTION, "torch.distributed", "not in this build of torch", Level.PROBLEM, advice)
    found = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    return Finding(_SECTION, "torch.distributed", f"backends: {', '.join(found)}")


def _store() -> Finding:
    """Connect to a store as the processes of a run do on one host."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch's types do not say so

    began = time.monotonic()
    listening = socket.create_server(("127.0.0.1", 0))
    try:
        # torch would try for minutes, and print a page for each attempt.
        socket.create_connection(listening.getsockname(), timeout=_LONGEST_S).close()
    except OSError as error:
        listening.close()
        value = f"127.0.0.1 cannot be reached ({error}): this host can run one process only"
        return Finding(_SECTION, "connections", value, Level.PROBLEM, "bring the interface up: ip link set lo up")
    port = listening.getsockname()[1]
    server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())
    client = TCPStore("127.0.0.1", port, None, False)
    client.set("loopwright", "doctor")
    took_s = time.monotonic() - began
    del client, server
    if took_s < _SLOW_S:
        return Finding(_SECTION, "connections", f"two processes of this host find each other in {took_s * 1e3:.0f} ms")
    advice = "put '127.0.0.1 localhost' into /etc/hosts: torch asks DNS for the name of 127.0.0.1, and gets no answer"
    return Finding(_SECTION, "connections", f"it takes {took_s:.1f} s to connect to 127.0.0.1", Level.WARNING, advice)


def _host_name() -> Finding:
    name = socket.gethostname()
    found: list[str] = []

    def resolve() -> None:
        try:
            found.append(socket.gethostbyname(name))
        except OSError as error:
            found.append(f"cannot be resolved ({error})")

    # A name server that does not answer would hold this process for as long as the system's resolver waits.
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(_LONGEST_S)
    if found and not found[0].startswith("cannot"):
        return Finding(_SECTION, "host name", f"{name} is {found[0]}")
    value = f"{name} {found[0] if found else 'is not resolved within 5 s'}"
    advice = "only runs on several machines need it: set MASTER_ADDR to an address, or add the name to /etc/hosts"
    return Finding(_SECTION, "host name", value, Level.NOTE, advice)


def judge_variables(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings about variables that change what a run does; those that may hold secrets are left out."""
    ranks = [name for name in _RANKS if name in variables]
    if "RANK" in ranks or "WORLD_SIZE" in ranks:
        yield Finding(
            _SECTION,
            "variables of a launcher",
            f"{', '.join(f'{name}={variables[name]}' for name in ranks)} are set: a run joins the launcher's ranks",
            Level.WARNING,
            f"unset {' '.join(ranks)}, if this shell is not a launcher's",
        )
    if "SLURM_JOB_ID" in variables:
        interactive = variables.get("SLURM_JOB_NAME") in ("bash", "interactive")
        text = (
            "in an interactive job: devices= and num_nodes= are not checked against it" if interactive else "in a job"
        )
        yield Finding(_SECTION, "SLURM", f"{text}, {variables.get('SLURM_NTASKS', '1')} tasks")
    for name in sorted(variables):
        if name.startswith(_OURS) and not any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD")):
            yield Finding(_SECTION, name, f"{variables[name]} (Loopwright reads it)")
        elif name.startswith(_THEIRS):
            yield Finding(_SECTION, name, variables[name])
