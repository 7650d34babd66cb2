"""`NetworkRates`: bytes per second that this machine sends to other machines and receives from them."""

from __future__ import annotations

import time
from pathlib import Path

from ...errors import MissingDependency

_BYTES_PER_COUNT = 4  # the counters of InfiniBand count words of 32 bits


class NetworkRates:
    """Reads the counters of the machine's network interfaces and of its InfiniBand and RoCE cards.

    RDMA passes by the interfaces' counters, so the cards have values under other names. The loopback interface, over
    which the ranks of one machine communicate, is left out.

    Args:
        sys_class: Where Linux has the counters of cards.
    """

    def __init__(self, sys_class: Path = Path("/sys/class")) -> None:
        self._sys_class = sys_class
        self._counts: dict[str, int] = {}
        self._read_at = 0.0

    def read(self) -> dict[str, float]:
        """Return the rates since the last reading; nothing at the first one.

        Names are `network_sent_bytes_per_sec`, `network_received_bytes_per_sec`, and likewise `infiniband_...` where
        there are such cards.

        Raises:
            MissingDependency: psutil is not installed.
        """
        counts, now = {**_of_interfaces(), **_of_cards(self._sys_class)}, time.monotonic()
        before, seconds = self._counts, now - self._read_at
        self._counts, self._read_at = counts, now
        if seconds <= 0:
            return {}
        # A counter that was reset is behind: no rate then.
        return {
            f"{name}_bytes_per_sec": (count - before[name]) / seconds
            for name, count in counts.items()
            if name in before and count >= before[name]
        }


def _of_interfaces() -> dict[str, int]:
    try:
        import psutil
    except ImportError:
        raise MissingDependency("psutil", needed_for="reading statistics of the network", extra="stats") from None
    found = [one for name, one in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")]
    return {
        "network_sent": sum(one.bytes_sent for one in found),
        "network_received": sum(one.bytes_recv for one in found),
    }


def _of_cards(sys_class: Path) -> dict[str, int]:
    found = {}
    for name, counter in (("infiniband_sent", "port_xmit_data"), ("infiniband_received", "port_rcv_data")):
        files = list(sys_class.glob(f"infiniband/*/ports/*/counters/{counter}"))
        if files:
            found[name] = sum(int(file.read_text()) for file in files) * _BYTES_PER_COUNT
    return found
