"""`SpeedTable`: a row for each setting that a search for speed tried, and the settings that it chose."""

from __future__ import annotations

from dataclasses import dataclass

from ..trainer.timeline.phases import readable_time


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One setting, and the speed of steps with it.

    Attributes:
        setting: Name of the setting, such as "num_workers=2"; "as it is" for the unchanged run.
        step_s: Median seconds of a step, including waiting for data; None if it was not measured.
        spread: Interquartile range of the measured times, divided by their median.
        ratio: Time of an unchanged step divided by the time with this setting: above 1 is faster. None if not measured.
        num_steps: Number of measured steps.
        keeps_bits: Whether training computes the same bits with the setting.
        note: Reason why it was not measured, or another remark; else "".
    """

    setting: str
    step_s: float | None = None
    spread: float = 0.0
    ratio: float | None = None
    num_steps: int = 0
    keeps_bits: bool = True
    note: str = ""

    @property
    def is_faster(self) -> bool:
        """Whether steps are faster by at least 3 %, and by more than the spread of the times."""
        return self.ratio is not None and self.ratio - 1 > max(0.03, self.spread)


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """Result of `Tuner.speed`; `str()` returns a readable table.

    Attributes:
        rows: The tried settings; the first row is the unchanged run.
        best: Names of the settings that are fastest together; empty if nothing is faster.
        applied: Settings that `apply=True` has set.
        left: Settings that `apply=True` could not set, and where to set them.
    """

    rows: tuple[SpeedRow, ...]
    best: tuple[str, ...] = ()
    applied: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max([len(row.setting) for row in self.rows], default=0)
        lines = [f"{'setting':<{width}}  {'per step':>9}  {'spread':>6}  {'speedup':>7}"]
        for row in self.rows:
            if row.step_s is None or row.ratio is None:
                lines.append(f"{row.setting:<{width}}  {'-':>9}  {'':>6}  {'':>7}  {row.note}".rstrip())
                continue
            notes = [] if row.keeps_bits else ["changes the last digits"]
            notes += [row.note] if row.note else []
            lines.append(
                f"{row.setting:<{width}}  {readable_time(row.step_s):>9}  {row.spread:>6.0%}  {row.ratio:>7.2f}  "
                f"{'; '.join(notes)}".rstrip()
            )
        lines.append(f"Fastest: {', '.join(self.best)}." if self.best else "Nothing is faster than what there is.")
        if self.applied:
            lines.append(f"Set: {', '.join(self.applied)}.")
        return "\n".join([*lines, *(f"- {text}" for text in self.left)])
