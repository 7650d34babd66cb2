"""`SentinelError`: what `Sentinel` has found."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import LoopwrightError


@dataclass(frozen=True, slots=True)
class Deviation:
    """A difference.

    Attributes:
        kind: "weight", "gradient", "optimizer state", "buffer" or "played step".
        parameter: Name of the first parameter or buffer that differs; "" if none can be named.
        tensors: What differs of it, such as "weight" and "exp_avg".
        ranks: The ranks with other bits than the majority; all that were compared if there is no majority.
        is_decided: Whether a majority decides which ranks are wrong.
        hosts: Host of each of these ranks.
        devices: Device of each of these ranks.
        agreed_step: `global_step` after which the ranks agreed for the last time; -1 if they did not yet.
        step: `global_step` after which the difference was seen.
        checkpoints: Checkpoints that were written after `agreed_step`.
    """

    kind: str
    parameter: str
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    is_decided: bool
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    agreed_step: int
    step: int
    checkpoints: tuple[str, ...] = ()


class SentinelError(LoopwrightError, RuntimeError):
    """Ranks with the same weights, gradients or optimizer states have other bits, or a step gives other gradients.

    It is raised on every rank.

    Attributes:
        deviation: Where, and since when.
    """

    _lw_arguments = ("fix", "deviation")

    def __init__(self, what: str, *, fix: str, deviation: Deviation) -> None:
        super().__init__(what, fix=fix)
        self.deviation = deviation
