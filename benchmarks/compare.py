"""Which rows of the step benchmark became slower since a commit, and by which commit: `make bench ARGS=--compare`.

The present tree and the other commit, in its own worktree, take turns with the same programs. A row is the
Trainer's step divided by the handwritten one of the same turn, so that a slow moment of the machine cancels.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Change", "compare", "find_slow_commit", "main", "report", "turns_of"]

ROOT = Path(__file__).resolve().parents[1]
ROWS = (
    "BARE",
    "SWITCHED_OFF",
    "DEFAULTS",
    "LOGGED",
    "TEN_CALLBACKS",
    "ACCUMULATED",
    "SHUFFLED",
    "STREAMED",
    "VALIDATED",
)
LEAST = 0.02  # of a step, below which a difference is not looked at

Ratios = dict[str, float]  # row -> step of the Trainer, divided by the handwritten one


@dataclass(frozen=True)
class Change:
    """One row on both sides.

    Attributes:
        row: Its name.
        before: Median of the other commit's turns.
        now: Median of the present tree's turns.
        spread: The largest distance of a turn from its side's median.
    """

    row: str
    before: float
    now: float
    spread: float

    @property
    def is_slower(self) -> bool:
        """Whether the row takes longer by more than its spread."""
        return self.now - self.before > max(self.spread, LEAST)


def compare(before: Sequence[Ratios], now: Sequence[Ratios]) -> list[Change]:
    """Return the change of each row that both sides have, from the turns of each side."""
    changes = []
    for row in before[0]:
        if row not in now[0]:
            continue
        sides = [[turn[row] for turn in turns] for turns in (before, now)]
        medians = [statistics.median(values) for values in sides]
        spread = max(abs(value - median) for values, median in zip(sides, medians, strict=True) for value in values)
        changes.append(Change(row, medians[0], medians[1], spread))
    return changes


def turns_of(measures: Sequence[Callable[[], Ratios]], turns: int) -> list[list[Ratios]]:
    """Measure several sides in turns, each first in every other turn; return the turns of each side."""
    found: list[list[Ratios]] = [[] for _ in measures]
    for turn in range(turns):
        order = range(len(measures)) if turn % 2 == 0 else reversed(range(len(measures)))
        for index in order:
            found[index].append(measures[index]())
    return found


def find_slow_commit(commits: Sequence[str], is_slow: Callable[[str], bool]) -> str:
    """Return the first commit that is slow, by bisection.

    Args:
        commits: In the order in which they were made; the last is slow.
        is_slow: Whether a commit is slow; asked about as few as possible.
    """
    first, last = 0, len(commits) - 1
    while first < last:
        middle = (first + last) // 2
        if is_slow(commits[middle]):
            last = middle
        else:
            first = middle + 1
    return commits[first]


def report(changes: Sequence[Change], commit: str) -> str:
    """Return what became slower, or that nothing did, with all rows."""
    lines = [f"The Trainer's step over the handwritten one: {commit[:12]}, then the present tree (and the spread)."]
    for change in changes:
        verdict = "SLOWER" if change.is_slower else ""
        line = f"  {change.row:<16}{change.before:6.3f} -> {change.now:6.3f}  (+- {change.spread:.3f})  {verdict}"
        lines.append(line.rstrip())
    slow = [change.row for change in changes if change.is_slower]
    lines.append(
        f"Slower by more than the spread: {', '.join(slow)}." if slow else "Nothing is slower than its spread."
    )
    return "\n".join(lines)


# --- trees -----------------------------------------------------------------------------------------------------------


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def stored_commit() -> str:
    """Return the commit that stored the results which RESULTS.md shows."""
    return _git("log", "-1", "--format=%H", "--", "benchmarks/results/latest.json")


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check a commit out into its own folder, for a block."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def measure_tree(tree: Path, rows: Sequence[str], num_batches: int) -> Ratios:
    """Return the ratios of a tree's package, measured in its own process with this tree's programs."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "loopwright").symlink_to(tree)
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(num_batches), *rows]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the steps of {tree} could not be measured:\n{done.stderr}")
    ratios: Ratios = json.loads(done.stdout.splitlines()[-1])
    return ratios


def main(
    commit: str | None,
    *,
    bisects: bool,
    is_quick: bool,
    measure: Callable[[Path, Sequence[str], int], Ratios] = measure_tree,
) -> int:
    """Compare the present tree with a commit, print the rows, and with `bisects` the commit that made one slower.

    Args:
        commit: What to compare with; None: the commit of the stored results.
        bisects: Whether to search for the commit where a row is slower.
        is_quick: Whether to measure a few steps only; the numbers mean nothing then.
        measure: (tree, rows, number of batches) -> ratios.

    Returns:
        The exit status: 1 where a row is slower.
    """
    chosen = _git("rev-parse", commit) if commit is not None else stored_commit()
    rows, num_batches, turns = (ROWS[:1], 40, 1) if is_quick else (ROWS, 600, 5)
    with worktree(chosen) as tree:
        sides = turns_of([lambda: measure(tree, rows, num_batches), lambda: measure(ROOT, rows, num_batches)], turns)
    changes = compare(*sides)
    print(report(changes, chosen))
    slow = [change for change in changes if change.is_slower]
    if slow and bisects:
        worst = max(slow, key=lambda change: change.now - change.before)
        commits = _git("rev-list", "--reverse", "--first-parent", f"{chosen}..HEAD").splitlines()
        if not commits:
            print(f"{worst.row} became slower by what is not committed.")
            return 1

        def is_slow(candidate: str) -> bool:
            with worktree(candidate) as there:
                values = [measure(there, [worst.row], num_batches)[worst.row] for _ in range(3)]
            return statistics.median(values) > (worst.before + worst.now) / 2

        found = find_slow_commit(commits, is_slow)
        print(f"{worst.row} became slower with {_git('log', '-1', '--format=%h %s', found)}")
    return 1 if slow else 0


def _measure_here(num_batches: int, names: Sequence[str]) -> Ratios:
    import gc

    import torch
    import variants
    from steps import differences, percentile

    torch.set_num_threads(1)
    ratios = {}
    for name in names:
        variant = getattr(variants, name)
        gc.collect()
        hand = percentile(differences(variant.run_by_hand(num_batches).began_s), 0.1)
        with tempfile.TemporaryDirectory() as folder:
            gc.collect()
            ours = percentile(differences(variant.run_trainer(num_batches, Path(folder)).began_s), 0.1)
        ratios[name] = ours / hand
    return ratios


if __name__ == "__main__":
    print(json.dumps(_measure_here(int(sys.argv[1]), sys.argv[2:])))
