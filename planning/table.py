"""`Plan` and `Row`: memory and communication of a training with each strategy, as values, JSON and a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SPARE = 0.1
KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered")
"""Kinds of storages: "gathered" are full parameters of sharded units, and communication buffers."""


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy, and the memory and communication of a device with it.

    Attributes:
        name: Name of the strategy.
        line: The Trainer's arguments for it.
        devices: Number of devices that it uses.
        held: Bytes by kind at the peak of a step: "parameters", "gradients", "optimizer", "activations", and "gathered"
            (full parameters of sharded units, and communication buffers).
        sent: Bytes that a device sends in a step.
        bubble: Fraction of the time that a pipeline stage waits.
        memory: Memory of a device in bytes; None if unknown.
        bandwidth: Bytes per second from a device to the next.
        note: Limits of the estimate; "" without any.
        is_complete: Whether activations are counted.
    """

    name: str
    line: str
    devices: int
    held: Mapping[str, float]
    sent: float = 0.0
    bubble: float = 0.0
    memory: float | None = None
    bandwidth: float = 50e9
    note: str = ""
    is_complete: bool = True

    @property
    def kind(self) -> str:
        """The kind of strategy; see `kind_of`."""
        return kind_of(self.name)

    @property
    def peak(self) -> float:
        """Peak memory of a device in a step, in bytes."""
        return sum(self.held.values())

    @property
    def spare(self) -> float | None:
        """Bytes of the device that are free at the peak; negative if memory is missing. None if unknown."""
        return None if self.memory is None else self.memory - self.peak

    @property
    def fits(self) -> bool | None:
        """Whether a tenth of the memory stays free, for allocations of kernels and fragmentation; None if unknown."""
        return None if self.memory is None else self.peak <= (1 - SPARE) * self.memory

    @property
    def seconds(self) -> float:
        """Seconds that sending takes in a step, without overlap with computation."""
        return self.sent / self.bandwidth


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory and communication of a training with each strategy; `str()` returns a table.

    Attributes:
        rows: One row for each usable strategy, in order of preference.
        devices: Number of devices.
        memory: Memory of a device in bytes; None if unknown.
        bandwidth: Bytes per second from a device to the next.
        left_out: Strategies that cannot be used, and the reasons.
        notes: What the plan of this training does not follow.
    """

    rows: tuple[Row, ...]
    devices: int
    memory: float | None = None
    bandwidth: float = 50e9
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def fitting(self) -> list[Row]:
        """The rows that fit; if the memory is unknown, all rows."""
        return [row for row in self.rows if row.fits is not False and (row.is_complete or not self.memory)]

    @property
    def best(self) -> Row | None:
        """The recommended row; None if nothing fits.

        Of the rows that fit and use several devices, the first kind of strategy is recommended; of this kind, the row
        that sends least. If no such row fits, the first row that does; if the memory is unknown, every row fits.
        """
        fitting = self.fitting
        several = [row for row in fitting if row.devices > 1]
        first = next(iter(several or fitting), None)
        peers = [row for row in several if first is not None and row.kind == first.kind]
        return min(peers, key=lambda row: row.sent) if peers else first

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        rows = [
            {**asdict(row), "peak": row.peak, "fits": row.fits, "spare": row.spare, "seconds": row.seconds}
            for row in self.rows
        ]
        best = self.best
        return {
            "devices": self.devices,
            "memory": self.memory,
            "bandwidth": self.bandwidth,
            "rows": rows,
            "best": None if best is None else best.name,
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and the rows of the table."""
        heading = ["strategy", *KINDS, "peak", "sent/step", "time", "bubble"]
        if self.memory is not None:
            heading.append("fits")
        return heading, [self._cells_of(row) for row in self.rows]

    def _cells_of(self, row: Row) -> list[str]:
        found = [row.name, *(show_size(row.held.get(kind, 0.0)) for kind in KINDS), show_size(row.peak)]
        found += [show_size(row.sent), f"{1000 * row.seconds:.1f} ms" if row.sent else "-"]
        found.append(f"{row.bubble:.0%}" if row.bubble else "-")
        if row.spare is not None:
            found.append(_verdict(row, row.spare))
        return found

    def remarks(self) -> list[str]:
        """Return notes on rows, and unusable strategies with the reasons."""
        notes = [f"{note[0].upper()}{note[1:]}." for note in self.notes]
        by_note: dict[str, list[str]] = {}
        for row in self.rows:
            by_note.setdefault(row.note, []).append(row.name)
        notes += [f"{', '.join(names)}: {note}." for note, names in by_note.items() if note]
        return notes + [f"{name} is left out: {why}" for name, why in self.left_out.items()]

    def advice(self) -> list[str]:
        """Return the lines below the table: notes, unusable strategies, and the recommended arguments."""
        lines = self.remarks()
        best = self.best
        if best is not None:
            lines.append(f"Write: lw.Trainer({best.line}{_devices_of(best)})")
            if best.devices > 1:
                lines.append('Or let fit choose: strategy="auto"; or "mesh:auto", which also times steps of meshes.')
        elif self.rows:
            least = min(self.rows, key=lambda row: row.peak)
            lines.append(
                f"Nothing fits with a tenth to spare. The least is {least.name} with {show_size(least.peak)}: use more "
                "devices, a smaller micro-batch or shorter sequences, bf16-true, or train fewer parameters (LoRA)."
            )
        return lines

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *self.advice()])

    def lines(self) -> list[str]:
        """Return title and table, as lines of text."""
        heading, rows = self.cells()
        widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
        lines = []
        for name, *cells in [heading, *rows]:
            right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *right]))
        return [self.title, *lines]

    @property
    def title(self) -> str:
        """Title of the table."""
        count = "1 device" if self.devices == 1 else f"{self.devices} devices"
        of = "" if self.memory is None else f" of {show_size(self.memory)}"
        return f"Per device at the peak of a step, on {count}{of}; time of sending at {show_size(self.bandwidth)}/s:"


def _verdict(row: Row, spare: float) -> str:
    if row.fits:
        return f"yes, {show_size(spare)} left"
    return f"no, {show_size(-spare)} lack" if spare < 0 else f"no, only {show_size(spare)} left"


def _devices_of(row: Row) -> str:
    return "" if "devices=" in row.line or row.devices == 1 else f", devices={row.devices}"


def kind_of(name: str) -> str:
    """Return the kind of a strategy: "tp" and "pp" have several meshes, other names are kinds of one strategy."""
    return next((axis for axis in ("pp", "tp") if f"{axis}=" in name), name)


def read_size(size: str | float) -> float:
    """Return a number of bytes.

    Args:
        size: Bytes, or a text with a unit, such as "80GB" or "16GiB".

    Raises:
        ConfigError: The text has another form.
    """
    if not isinstance(size, str):
        return float(size)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*?)(?:/s)?\s*", size)
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigError(f"Expected a size such as '80GB', got {size!r}.", fix="pass bytes, or a text in GB or GiB.")
    return float(found[1]) * _UNITS[found[2].upper()]


def show_size(size: float) -> str:
    """Return a size with a unit: "1.50 GB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f} {unit.replace('K', 'k')}"
    return f"{size:.0f} B"
