"""Links of this machine: between its GPUs, and to other machines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .devices import run_nvidia_smi

_SYS = Path("/sys/class")
_ACTIVE = "4: ACTIVE"


@dataclass(frozen=True)
class Links:
    """Links of one machine.

    Attributes:
        gpus: Link of each pair of GPUs as `nvidia-smi topo -m` names it: NV18 (18 NVLinks), PIX, PXB, PHB, NODE, SYS.
        infiniband: Gigabits per second of each active port of an InfiniBand or RoCE card, by "card (link layer)".
        ethernet: Gigabits per second of each connected network interface with a physical device; 0 if unknown.
    """

    gpus: dict[str, str]
    infiniband: dict[str, float]
    ethernet: dict[str, float]

    @property
    def has_nvlink(self) -> bool:
        """Whether NVLink joins each pair of GPUs."""
        return bool(self.gpus) and all(link.startswith("NV") for link in self.gpus.values())

    @property
    def network_gbits(self) -> float:
        """Gigabits per second of the fastest network, or of all InfiniBand ports together; 0 if unknown."""
        return sum(self.infiniband.values()) or max(self.ethernet.values(), default=0.0)

    def describe(self) -> str:
        """Return the links in one line."""
        kinds = sorted(set(self.gpus.values()))
        parts = [f"GPUs joined by {' and '.join(kinds)}"] if kinds else []
        parts += [f"{name} {gbits:g} Gb/s" for name, gbits in self.infiniband.items()]
        parts += [f"{name} (Ethernet) {_show(gbits)}" for name, gbits in self.ethernet.items()]
        return ", ".join(parts) or "no GPUs, no InfiniBand, and no physical network interface found"


def find_links() -> Links:
    """Return the links of this machine."""
    return Links(read_topology(run_nvidia_smi("topo", "-m")), read_infiniband(_SYS), read_ethernet(_SYS))


def read_topology(text: str) -> dict[str, str]:
    """Return the link of each pair of GPUs, by names such as "0-1".

    Args:
        text: Output of `nvidia-smi topo -m`: a matrix with GPUs and network cards as rows and columns.
    """
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    header = lines[0] if lines else []  # cards before the GPUs have columns, too
    columns = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    rows = {words[0]: words[1:] for words in lines[1:] if words[0] in columns}
    return {
        f"{first[3:]}-{second[3:]}": rows[first][header.index(second)]
        for position, first in enumerate(columns)
        for second in columns[position + 1 :]
        if first in rows and len(rows[first]) > header.index(second)
    }


def read_infiniband(sys_class: Path) -> dict[str, float]:
    """Return the rates of active ports of InfiniBand and RoCE cards, in gigabits per second.

    Args:
        sys_class: /sys/class.
    """
    found = {}
    for port in sorted(sys_class.glob("infiniband/*/ports/*")):
        rate = _read(port / "rate").split()  # "400 Gb/sec (4X NDR)"
        if _read(port / "state") == _ACTIVE and rate:
            layer = _read(port / "link_layer")
            number = "" if port.name == "1" else f" port {port.name}"
            name = f"{port.parent.parent.name}{number} ({'RoCE' if layer == 'Ethernet' else layer or 'InfiniBand'})"
            found[name] = float(rate[0])
    return found


def read_ethernet(sys_class: Path) -> dict[str, float]:
    """Return the rates of connected interfaces with a physical device, in gigabits per second; 0 if unknown.

    Args:
        sys_class: /sys/class.
    """
    found = {}
    for interface in sorted(sys_class.glob("net/*")):
        if (interface / "device").exists() and _read(interface / "operstate") == "up":
            speed = _read(interface / "speed")  # in Mb/s; -1, or an error, where the driver does not know it
            found[interface.name] = max(0, int(speed)) / 1000 if speed.lstrip("-").isdecimal() else 0.0
    return found


def _show(gbits: float) -> str:
    return f"{gbits:g} Gb/s" if gbits else "at an unknown rate"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
