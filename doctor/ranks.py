"""Checks of several ranks together: their versions, the links of their machines, and all_reduce between them."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..messages import counted, show_ranks
from .devices import run_nvidia_smi
from .finding import Finding, Level, show_size
from .links import Links, find_links

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..fabric import Fabric
    from .all_reduce import Rate

SIZES = (4 << 10, 1 << 20, 64 << 20)
"""Bytes of the tensors that are reduced: for the latency, for a small and for a large bucket of gradients."""

_SECTION = "ranks"
_BANDWIDTH = "all_reduce"
_MUST_BE_EQUAL = ("Python", "torch", "CUDA", "NCCL")
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS")
# May differ between ranks, and do not change what they do together.
_OWN_VARIABLES = ("NCCL_HOSTID", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
_MOST_PACKAGES = 12
_SLOW_ETHERNET_GBITS = 50.0
_ADVICE = {
    "nccl": "set NCCL_DEBUG=INFO, which shows the network that NCCL chooses; then NCCL_SOCKET_IFNAME, NCCL_IB_HCA or "
    "NCCL_IB_DISABLE=1: see docs/slow-networks.md",
    "gloo": "set GLOO_SOCKET_IFNAME to the interface that joins the machines: see docs/slow-networks.md",
}


@dataclass(frozen=True)
class RankFacts:
    """What one rank is.

    Attributes:
        machine: Rank of its machine.
        host: Host name of its machine.
        versions: Versions and devices, by name.
        packages: Versions of all installed packages, by name.
        variables: Environment variables of the network and of threads.
        links: Links of its machine; None except on one rank of each machine.
    """

    machine: int
    host: str
    versions: Mapping[str, str]
    packages: Mapping[str, str]
    variables: Mapping[str, str]
    links: Links | None


def examine_ranks(fabric: Fabric, began: float) -> Iterator[Finding]:
    """Yield findings about all ranks; every rank runs it, and the findings are the same on all.

    Args:
        fabric: Connected by gloo.
        began: time.monotonic() before the ranks were connected.
    """
    import torch.distributed as dist

    took_s = time.monotonic() - began
    ranks: list[Any] = [None] * fabric.world_size  # RankFacts, after the next line
    dist.all_gather_object(ranks, facts_of_rank(fabric))
    yield judge_places(ranks, took_s)
    yield from compare(ranks)
    links = {one.machine: one.links for one in ranks if one.links is not None}
    for machine, found in sorted(links.items()):
        yield Finding("links", _name_machine(ranks, machine), found.describe())
    counts = [sum(one.machine == machine for one in ranks) for machine in sorted(links)]
    yield advise_mesh(list(links.values()), counts)
    yield from _examine_all_reduce(fabric, ranks, list(links.values()))


def facts_of_rank(fabric: Fabric) -> RankFacts:
    """Return what this rank is."""
    import torch

    versions = {"loopwright": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    versions["torch"] = torch.__version__
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = run_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
        versions["driver"] = driver[0] if driver else "none"
    is_cuda = fabric.device.type == "cuda"
    versions["device"] = torch.cuda.get_device_name(fabric.device) if is_cuda else fabric.device.type
    return RankFacts(
        machine=fabric.node_rank,
        host=socket.gethostname(),
        versions=versions,
        packages=installed_packages(),
        variables={
            name: value or "empty"
            for name, value in os.environ.items()
            if name.startswith(_VARIABLES) and name not in _OWN_VARIABLES
        },
        links=find_links() if fabric.local_rank == 0 else None,
    )


def installed_packages() -> dict[str, str]:
    """Return the versions of packages by normalized name."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        if one.name:  # the first one on sys.path is imported; names differ in - and _ between installers
            found.setdefault(re.sub(r"[-_.]+", "-", one.name).lower(), one.version)
    return found


def judge_places(ranks: Sequence[RankFacts], took_s: float) -> Finding:
    """Return which rank runs where.

    Args:
        ranks: Facts of all ranks, in their order.
        took_s: Seconds until all were connected.
    """
    machines = sorted({one.machine for one in ranks})
    places = (
        f"{show_ranks([rank for rank, one in enumerate(ranks) if one.machine == machine])} on "
        f"{_name_machine(ranks, machine)}"
        for machine in machines
    )
    value = f"{counted(len(ranks), 'rank')} connected in {took_s:.1f} s: {'; '.join(places)}"
    return Finding(_SECTION, "connection", value)


def compare(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield findings about versions, packages and variables; what differs is named by rank.

    Args:
        ranks: Facts of all ranks, in their order.
    """
    for name in dict.fromkeys(name for one in ranks for name in one.versions):
        found = _ranks_by_value(ranks, [one.versions.get(name, "none") for one in ranks])
        if len(found) == 1:
            yield Finding(_SECTION, name, f"{next(iter(found))} on all ranks")
        elif name in _MUST_BE_EQUAL:
            yield Finding(
                _SECTION, name, _show(found), Level.PROBLEM, "install the same version, or image, on all machines"
            )
        else:
            advice = "the slowest rank sets the pace" if name == "device" else "install the same version everywhere"
            yield Finding(_SECTION, name, _show(found), Level.WARNING, advice)
    for kind, tables, advice in (
        ("packages", [one.packages for one in ranks], "install the same versions on all machines"),
        ("variables", [one.variables for one in ranks], "set the same variables for all ranks"),
    ):
        names = sorted({name for table in tables for name in table})
        unequal = {name: _ranks_by_value(ranks, [table.get(name, "none") for table in tables]) for name in names}
        unequal = {name: found for name, found in unequal.items() if len(found) > 1}
        if not unequal:
            yield Finding(_SECTION, kind, f"{counted(len(names), kind.removesuffix('s'))}, equal on all ranks")
        for name in list(unequal)[:_MOST_PACKAGES]:
            yield Finding(_SECTION, f"{kind.removesuffix('s')} {name}", _show(unequal[name]), Level.WARNING, advice)
        if len(unequal) > _MOST_PACKAGES:
            rest = ", ".join(list(unequal)[_MOST_PACKAGES:])
            yield Finding(_SECTION, f"other {kind}", f"not equal on all ranks: {rest}", Level.WARNING, advice)


def advise_mesh(links: Sequence[Links], counts: Sequence[int]) -> Finding:
    """Return which axes of a mesh fit the links: tp needs the fastest, then fsdp, then dp and pp.

    Args:
        links: Of each machine.
        counts: Number of ranks on each machine.
    """
    local = min(counts)
    if not any(one.gpus for one in links):
        inside = "no links between GPUs: ddp, or fsdp to save memory"
    elif all(one.has_nvlink for one in links):
        inside = f"NVLink joins the GPUs of a machine: tp of up to {local}, and fsdp"
    else:
        inside = "NVLink does not join all GPUs of a machine: ddp or fsdp, and tp only between GPUs that NVLink joins"
    if len(links) == 1:
        return Finding("links", "mesh", inside)
    slowest = min(one.network_gbits for one in links)
    rate = f"{slowest:g} Gb/s" if slowest else "unknown rate"
    if all(one.infiniband for one in links) or slowest >= _SLOW_ETHERNET_GBITS:
        between = "fsdp or dp over all of them; keep tp within a machine"
    elif local > 1:
        between = f"fsdp within a machine and copies between them (strategy='mesh:dp={len(links)},fsdp={local}'), or pp"
    else:
        between = "ddp with accumulation, or pp"
    return Finding("links", "mesh", f"{inside}; between machines ({rate}): {between}")


def _examine_all_reduce(fabric: Fabric, ranks: Sequence[RankFacts], links: Sequence[Links]) -> Iterator[Finding]:
    """Measure all ranks over each backend; then, on several machines, within them and between them."""
    import torch
    import torch.distributed as dist

    from .all_reduce import AllReduceError, measure

    if fabric.world_size == 1:
        yield Finding(_BANDWIDTH, "ranks", "one rank: there is nothing to measure", Level.NOTE, "--nproc-per-node 2")
        return
    own = dist.get_default_backend_for_device(fabric.device)
    for backend in dict.fromkeys(("gloo", own)):
        device = torch.device("cpu") if backend == "gloo" else fabric.device
        try:
            for group, sizes, title in _groups(ranks, backend):
                for size_bytes in sizes:
                    rate = measure(group, size_bytes, device)
                    yield _judge(rate, backend, title, links, ranks)
        except AllReduceError as error:
            shown = _ranks_by_value(ranks, [error.reasons.get(rank, "") for rank in range(len(ranks))])
            shown.pop("", None)
            yield Finding(_BANDWIDTH, backend, _show(shown), Level.PROBLEM, _ADVICE.get(backend, ""))


def _groups(ranks: Sequence[RankFacts], backend: str) -> Iterator[tuple[ProcessGroup, Sequence[int], str]]:
    """Yield the groups of this rank to measure: the group, the sizes, and which ranks it has."""
    import torch.distributed as dist

    limit = timedelta(seconds=120)
    machines: dict[int, list[int]] = {}
    for rank, one in enumerate(ranks):
        machines.setdefault(one.machine, []).append(rank)
    everyone = list(range(len(ranks)))
    yield dist.new_group(everyone, backend=backend, timeout=limit), SIZES, f"all {len(ranks)} ranks"
    sizes = {len(members) for members in machines.values()}
    if len(machines) > 1 and sizes != {1}:
        mine, _ = dist.new_subgroups_by_enumeration(list(machines.values()), backend=backend, timeout=limit)
        assert mine is not None  # each rank is on one machine
        yield mine, SIZES[-1:], "within a machine"
        if len(sizes) == 1:  # the first ranks of all machines, the second ones, ...: all at the same time
            columns = [list(column) for column in zip(*machines.values(), strict=True)]
            mine, _ = dist.new_subgroups_by_enumeration(columns, backend=backend, timeout=limit)
            assert mine is not None
            yield mine, SIZES[-1:], f"between machines, {len(columns)} groups at the same time"


def _judge(rate: Rate, backend: str, title: str, links: Sequence[Links], ranks: Sequence[RankFacts]) -> Finding:
    """Return the finding of a rate; that of all ranks is compared with what the links allow."""
    name = f"{backend}, {show_size(rate.size_bytes)}"
    value = f"{rate.seconds * 1e3:.2f} ms, bus bandwidth {rate.bus_bandwidth / 1e9:.2f} GB/s, {title}"
    least = least_bandwidth(backend, links) if title.startswith("all") and rate.size_bytes == SIZES[-1] else 0.0
    if rate.bus_bandwidth >= least:
        return Finding(_BANDWIDTH, name, value)
    machine = _name_machine(ranks, ranks[rate.slowest].machine)
    value += f"; the links allow more than {least / 1e9:.2f}. Slowest: rank {rate.slowest} on {machine}"
    return Finding(_BANDWIDTH, name, value, Level.WARNING, _ADVICE.get(backend, "see docs/slow-networks.md"))


def least_bandwidth(backend: str, links: Sequence[Links]) -> float:
    """Return the bus bandwidth in bytes per second below which something is wrong; 0 if unknown.

    It is far below what the links reach: half of NVLink's slowest generation, a fifth of PCIe 4, and a third of a
    network's rate. gloo's TCP connections reach about 10 Gb/s, whatever the network.

    Args:
        backend: "nccl", "gloo" or another one.
        links: Of each machine.
    """
    if len(links) > 1:
        gbits = min(one.network_gbits for one in links)
        return (min(gbits, 10.0) if backend == "gloo" else gbits) * 1e9 / 8 / 3
    if backend != "nccl":
        return 0.0
    return 40e9 if links[0].has_nvlink else 5e9 if links[0].gpus else 0.0


def _ranks_by_value(ranks: Sequence[RankFacts], values: Sequence[str]) -> dict[str, str]:
    """Return the ranks that have each value, as text with their hosts."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    hosts = {value: sorted({ranks[rank].host for rank in members}) for value, members in found.items()}
    return {
        value: f"{show_ranks(members)} ({', '.join(hosts[value][:3])}{', ...' if len(hosts[value]) > 3 else ''})"
        for value, members in found.items()
    }


def _show(found: Mapping[str, str]) -> str:
    return "; ".join(f"{value} on {where}" for value, where in found.items())


def _name_machine(ranks: Sequence[RankFacts], machine: int) -> str:
    host = next(one.host for one in ranks if one.machine == machine)
    return f"machine {machine} ({host})"
