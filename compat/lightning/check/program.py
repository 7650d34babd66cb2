"""Compares a program's first steps under Lightning and under Loopwright, and prints the result."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .child_program import Outcome, run_side
from .compare import FirstDifference, Trace, find_difference
from .rows import candidates, find_row

__all__ = ["ProgramCheck"]

# Runs that look for the switch of a difference without parity.
_TRIALS = 4


@dataclass
class ProgramCheck:
    """A comparison of a program.

    Attributes:
        command: The program and its arguments, as for Python.
        lightning_python: An interpreter with Lightning.
        python: An interpreter with Loopwright.
        out: Where the answer is written.
        steps: Training steps of each fit.
        timeout_s: How long a side may take, in seconds.
        without_parity: Whether Loopwright without parity is compared, too.
        folder: Where the sides leave their files; None for a folder that is removed.
    """

    command: Sequence[str]
    lightning_python: str
    python: str
    out: TextIO
    steps: int = 4
    timeout_s: float = 600.0
    without_parity: bool = False
    folder: Path | None = None

    def run(self) -> int:
        """Compare, and return the exit code: 0 equal, 1 a difference, 2 the program could not be compared."""
        with self._folder() as folder:
            theirs = self._side(folder / "lightning", "Lightning", None)
            if theirs.record.is_absent:
                self._say(f"{self.lightning_python} has no Lightning. Install it there, or pass --lightning-python.")
                return 2
            if not theirs.record.version[0]:
                self._say(f"Lightning: {theirs.problem}")
                return 2
            ours = self._side(folder / "parity", "Loopwright with --parity", "1")
            self._say_versions(theirs.record, ours.record)
            code = self._judge(theirs, ours, folder)
            if self.without_parity and not theirs.problem:
                self._compare_plain(theirs, folder)
            return code

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        if self.folder is not None:
            yield self.folder.resolve()
            return
        made = Path(tempfile.mkdtemp(prefix="loopwright-check-"))
        try:
            yield made.resolve()
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _side(self, folder: Path, name: str, parity: str | None) -> Outcome:
        python = self.lightning_python if parity is None else self.python
        if name:
            self._say(f"running under {name} ...")
        return run_side(python, self.command, folder, steps=self.steps, parity=parity, timeout_s=self.timeout_s)

    def _judge(self, theirs: Outcome, ours: Outcome, folder: Path) -> int:
        found = find_difference(theirs.record, ours.record)
        for name, side in (("Lightning", theirs), ("Loopwright", ours)):
            if side.problem:
                self._say(f"The program failed under {name}:\n{_indent(side.problem)}")
        if theirs.problem:
            same = "Until then both did the same." if found is None and theirs.record.events else ""
            self._say(f"It cannot be compared to its end. {same}".rstrip())
            if found is not None and ours.record.events:
                self._say_difference(found)
            return 2
        if theirs.record.num_trainers == 0 and theirs.record.num_fabrics == 0:
            self._say("The program made no Trainer and no Fabric: there is nothing to compare.")
            return 2
        if not theirs.record.verbs and not theirs.record.num_fabrics:
            self._say("The program made a Trainer, but called none of its methods: there is nothing to compare.")
            return 2
        if theirs.record.num_fabrics:
            self._say(
                "The program uses Fabric. Of its own loop, the losses of the first backward passes are compared; "
                "hooks, weights and checkpoints are not."
            )
        if found is None and ours.problem:
            self._say(f"Until then both did the same: {ours.record.counts() or 'nothing'}.")
            return 1
        if found is None:
            self._say(f"Equal. Compared: {theirs.record.counts() or 'nothing'}.")
            return 0
        if not ours.problem and self._is_unsteady(theirs.record, found, folder):
            return 2
        self._say_difference(found)
        row = find_row(found)
        if row:
            self._say(f'  docs/migrating.md, "What parity does not change": {row}')
        elif not ours.problem:
            self._say("  No row of docs/migrating.md explains it. Please report it, with the program.")
        return 1

    def _is_unsteady(self, theirs: Trace, found: FirstDifference, folder: Path) -> bool:
        """Whether the program differs from itself in the same place, when it is run again under Lightning."""
        again = self._side(folder / "lightning-again", "Lightning once more, whether it gives the same there", None)
        unsteady = find_difference(theirs, again.record)
        if unsteady is None or (unsteady.where, unsteady.what) != (found.where, found.what):
            return False
        self._say(f"The program gives other results each time it runs under Lightning: {found.what} ({found.where}).")
        self._say("It cannot be compared before its random numbers are seeded.")
        return True

    def _compare_plain(self, theirs: Outcome, folder: Path) -> None:
        plain = self._side(folder / "plain", "Loopwright without --parity", "0")
        self._say("\nWithout --parity:")
        if plain.problem:
            self._say(f"The program failed:\n{_indent(plain.problem)}")
        found = find_difference(theirs.record, plain.record)
        if found is None:
            self._say(f"Equal. Compared: {theirs.record.counts()}.")
            return
        self._say_difference(found)
        switch = self._find_switch(theirs.record, found, folder)
        if switch:
            self._say(f'  docs/migrating.md, "Behavior that differs": switch {switch}, tried.')
        else:
            self._say(f"  None of the likely switches removes it alone: {', '.join(candidates(found)[:_TRIALS])}.")

    def _find_switch(self, theirs: Trace, found: FirstDifference, folder: Path) -> str:
        """Return the switch with which the first difference is gone; empty where none of the likely ones is it."""
        for name in candidates(found)[:_TRIALS]:
            tried = self._side(folder / f"with-{name}", "", name)
            then = find_difference(theirs, tried.record)
            if not tried.problem and (then is None or (then.where, then.what) != (found.where, found.what)):
                return name
        return ""

    def _say_versions(self, theirs: Trace, ours: Trace) -> None:
        self._say(
            f"Lightning {theirs.version[0]} and Loopwright with --parity, "
            f"the first {self.steps} training steps of each fit, in one process on the CPU."
        )
        if theirs.changed:
            self._say(f"Arguments of the Trainer that were changed on both sides: {', '.join(sorted(theirs.changed))}.")
        if ours.version[1] and theirs.version[1] != ours.version[1]:
            self._say(
                f"The versions of torch differ, {theirs.version[1]} and {ours.version[1]}: so may the last digits."
            )

    def _say_difference(self, found: FirstDifference) -> None:
        self._say(f"First difference ({found.where}): {found.what}")
        self._say(f"  Lightning:  {found.theirs}")
        self._say(f"  Loopwright: {found.ours}")

    def _say(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
