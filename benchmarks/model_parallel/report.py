"""The section of RESULTS.md about `MeshStrategy`."""

from __future__ import annotations

from typing import Any

from tables import table

# Any in this file: measured numbers, as they are in results/latest.json.

MODES = {"hand": "hand-written", "trainer": "Trainer"}
AXES = {"tp": "tp=2", "pp": "pp=2, 1f1b"}


def describe_mesh(numbers: dict[str, Any]) -> list[str]:
    """Return the section."""
    rows = [(axis, size) for axis in AXES for size in numbers["axes"][axis]]
    different = [
        f"{AXES[axis]} ({size['size']['name']}, by {size['largest_difference']:.1e})"
        for axis, size in rows
        if size["largest_difference"]
    ]
    return [
        "## Overhead per step with a mesh",
        "All of it was measured on a CPU with gloo; no GPU was available. Two processes, a small transformer, AdamW. "
        "Hand-written: a loop over torch's `parallelize_module` with ColwiseParallel and RowwiseParallel (tp=2), or "
        "`PipelineStage` and `Schedule1F1B` with four micro-batches (pp=2). Both sides take turns in the same "
        "processes. Ratio: the median over turns of the ratio of median steps, and its smallest and largest value. CPU "
        "time is that of both processes. Target: 1.10 in wall time. The first steps do not count, and `verify=False` "
        "leaves out the comparison of split layers with full ones, which belongs to the first step.",
        table(
            (
                "", "width", "blocks", "micro-batch", "hand-written, wall ms", "Trainer, wall ms", "ratio", "from - to",
                "CPU ms", "CPU ms", "ratio",
            ),
            (_times(axis, size) for axis, size in rows),
        ),
        "The final weights equal those of the hand-written loop, bit for bit"
        + (f", EXCEPT in: {', '.join(different)}." if different else "."),
        "Calls of Python functions + of C functions in the step with the fewest calls, on each rank, where the model "
        "is smallest.",
        table(
            ("", "", "rank 0", "rank 1", "added, rank 0", "added, rank 1"),
            (_calls(axis, size, mode) for axis, size in rows if size["modes"]["hand"]["calls"] for mode in MODES),
        ),
        "### Waiting in a pipeline",
        "The share of a step in which a rank waits, with blocks that sleep, four on each rank: forward 10 ms, backward "
        "20 ms (`PYTHONPATH=benchmarks python -m model_parallel.bubbles`); the fastest of three steps. "
        "Formula: (P - 1) / (V M + P - 1) with P ranks, V stages on each, and M micro-batches. Gradients of weights "
        "take no time here, which zero-bubble would fill the waiting with: its formula is that of interleaved.",
        table(
            ("schedule", "P", "V", "M", "step, s", "waiting", "formula"),
            (
                (
                    row["schedule"],
                    row["ranks"],
                    row["stages_per_rank"],
                    row["count"],
                    f"{row['step_s']:.3f}",
                    f"**{row['bubble']:.3f}**",
                    f"{row['theory']:.3f}",
                )
                for row in numbers["bubbles"]
            ),
        ),
    ]  # fmt: skip


def _times(axis: str, row: dict[str, Any]) -> tuple[object, ...]:
    size, modes = row["size"], row["modes"]
    least, most = row["ratios"]
    return (
        f"{AXES[axis]}, {size['name']}",
        size["width"],
        size["blocks"],
        f"{size['batch']} x {size['length']}",
        *(f"{1e-3 * modes[mode]['wall_us']:.1f}" for mode in MODES),
        f"**{row['ratio']:.2f}**",
        f"{least:.2f} - {most:.2f}",
        *(f"{1e-3 * modes[mode]['cpu_us']:.1f}" for mode in MODES),
        f"{row['cpu_ratio']:.2f}",
    )


def _calls(axis: str, row: dict[str, Any], mode: str) -> tuple[object, ...]:
    by_hand, own = row["modes"]["hand"]["calls"], row["modes"][mode]["calls"]
    added = [[mine - theirs for mine, theirs in zip(*pair, strict=True)] for pair in zip(own, by_hand, strict=True)]
    return (
        AXES[axis],
        MODES[mode],
        *(f"{python:.0f} + {c:.0f}" for python, c in own),
        *(("", "") if mode == "hand" else (f"**{python:+.0f} {c:+.0f}**" for python, c in added)),
    )
