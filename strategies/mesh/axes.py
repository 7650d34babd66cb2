"""`MeshAxes`: the sizes of a mesh, read from arguments or from a text such as "fsdp=2,tp=2"."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...errors import ConfigError, nearest

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""Names of the axes, outside in: neighbors on the last one have consecutive ranks, and so share a node."""

REST = -1
"""A size that means the processes that the other axes leave."""

_KNOWN = (*AXES, "ep")


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Sizes of the axes of a mesh of processes.

    Attributes:
        pp: Stages of the pipeline.
        dp: Copies of the model, each with its own data.
        fsdp: Processes over which parameters are sharded, each with its own data.
        cp: Processes that share a sequence.
        tp: Processes that share the matrices of a layer.
        ep: Processes that share the experts of a layer. Not a separate axis: `ep` of the `fsdp` processes do it.

    Raises:
        ConfigError: A size is neither positive nor -1, or several are -1; every problem is named.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in _KNOWN}
        wrong = [f"{name}={size!r}" for name, size in sizes.items() if not _is_size(size, has_rest=name != "ep")]
        if wrong:
            raise ConfigError(
                f"Expected positive sizes of mesh axes, got {', '.join(wrong)}.",
                fix="pass the number of processes along each axis; -1 on one axis is what the others leave.",
            )
        rest = [name for name in AXES if sizes[name] == REST]
        if len(rest) > 1:
            raise ConfigError(
                f"Expected at most one mesh axis of size -1, got {', '.join(rest)}.",
                fix="pass the sizes of all axes but one.",
            )
        if self.fsdp != REST and self.fsdp % self.ep:
            raise _indivisible_experts(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        return (self.pp, self.dp, self.fsdp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """Number of processes. Only of resolved axes."""
        return math.prod(self.sizes)

    @property
    def data_size(self) -> int:
        """Number of processes that read different data. Only of resolved axes."""
        return self.dp * self.fsdp

    @property
    def reduce_size(self) -> int:
        """Number of processes over which a gradient is averaged. Only of resolved axes."""
        return self.dp * self.fsdp * self.cp

    @property
    def layout(self) -> dict[str, int]:
        """Sizes of the axes along which ranks have other layers, or parts of them. Only of resolved axes."""
        sizes = {"pp": self.pp, "tp": self.tp, "ep": self.ep}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def resolve(self, world_size: int) -> MeshAxes:
        """Return the axes for a number of processes, with a size in place of -1.

        Raises:
            ConfigError: The sizes do not multiply to that number.
        """
        known = math.prod(size for size in self.sizes if size != REST)
        rest = [name for name in AXES if getattr(self, name) == REST]
        if rest and world_size % known == 0:
            return replace(self, **{rest[0]: world_size // known})
        if rest:
            raise ConfigError(
                f"Expected a multiple of {known} processes for the mesh {self}, got {world_size}.",
                fix=f"pass devices= (times num_nodes=) as a multiple of {known}, or other sizes.",
            )
        if known != world_size:
            raise ConfigError(
                f"Expected {known} processes for the mesh {self}, got {world_size}.",
                fix=f"pass devices= (times num_nodes=) so that there are {known}, or -1 for one of the sizes.",
            )
        return self

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a global rank on each axis. Only of resolved axes."""
        found: dict[str, int] = {}
        for name, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in AXES}

    def data_rank(self, rank: int) -> int:
        """Return which share of the data a global rank reads: its position on the axes dp and fsdp."""
        place = self.coordinates(rank)
        return place["dp"] * self.fsdp + place["fsdp"]

    def __str__(self) -> str:
        """Return the sizes as a user writes them, and their product: "pp=2, fsdp=2, tp=3 (2 x 2 x 3)"."""
        shown = [name for name in AXES if getattr(self, name) != 1] or ["fsdp"]
        product = " x ".join(str(getattr(self, name)) for name in shown)
        experts = f", ep={self.ep}" if self.ep != 1 else ""
        named = ", ".join(f"{name}={getattr(self, name)}" for name in shown)
        return f"{named}{experts} ({product})" if len(shown) > 1 else f"{named}{experts}"


def read_axes(text: str) -> dict[str, int]:
    """Return the sizes in a text such as "fsdp=2,tp=2".

    Raises:
        ConfigError: The text has another form, or names an unknown axis or one axis twice; every problem is named.
    """
    sizes: dict[str, int] = {}
    problems: list[str] = []
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or not number.removeprefix("-").isdecimal():
            problems.append(f"{part.strip()!r} is not AXIS=NUMBER")
        elif name not in _KNOWN:
            problems.append(f"{name!r} is not an axis{nearest(name, _KNOWN)}")
        elif name in sizes:
            problems.append(f"{name!r} is given twice")
        else:
            sizes[name] = int(number)
    if problems:
        raise ConfigError(
            f"Expected the sizes of mesh axes in 'mesh:{text}', got: {'; '.join(problems)}.",
            fix=f"write AXIS=NUMBER with commas between, as in 'mesh:fsdp=2,tp=2'; the axes are {', '.join(_KNOWN)}.",
        )
    return sizes


def _is_size(size: object, *, has_rest: bool) -> bool:
    return type(size) is int and (size > 0 or (has_rest and size == REST))


def _indivisible_experts(axes: MeshAxes) -> ConfigError:
    return ConfigError(
        f"Expected ep to divide fsdp, got ep={axes.ep} and fsdp={axes.fsdp}.",
        fix="pass a divisor of fsdp as ep: the experts are shared by processes of the fsdp axis.",
    )
