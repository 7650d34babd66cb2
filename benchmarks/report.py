"""Turn measured numbers into RESULTS.md; run.py calls `describe`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from steps import per_value


def describe(results: dict[str, Any]) -> str:
    """Return RESULTS.md: one section for each part that was measured."""
    where = results["environment"]
    text = [
        "# What Loopwright costs",
        "Written by `make bench`; the numbers behind it are in [results/latest.json](results/latest.json). "
        f"{where['cpu']}, {where['cores']} cores, {where['system']}, Python {where['python']}, torch {where['torch']}, "
        f"one thread, load {where['load']} at the start, {where['date']}."
        + (" **A quick run: the numbers mean nothing.**" if results["is_quick"] else ""),
    ]
    for part, section in SECTIONS.items():
        if part in results:
            text += section(results[part])
    return "\n\n".join(text) + "\n"


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    names = list(header)
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _steps(rows: list[dict[str, Any]]) -> list[str]:
    different = [row["name"] for row in rows if not row["weights_equal"]]
    return [
        "## A step",
        "Microseconds of CPU time (all threads) that a batch takes by hand, and what the Trainer adds: the 10th "
        "percentile over single batches, and the mean over a run (median of the runs), which also holds what happens "
        "only now and then, such as a log interval. A network of two layers, batches of 8 from memory. By hand nothing "
        "is shown, logged or saved.",
        table(
            ("", "by hand", "added", "aim", "by hand, mean", "added, mean"),
            (
                (
                    row["name"],
                    f"{row['hand_us']:.0f}",
                    f"**{row['added_us']:+.1f}**",
                    row["aim"],
                    f"{row['hand_mean_us']:.0f}",
                    f"{row['added_mean_us']:+.1f}",
                )
                for row in rows
            ),
        ),
        table(
            ("microseconds", "added", "aim"),
            ((name, f"**{value:+.2f}**", aim) for name, value, aim in per_value(rows)),
        ),
        "The weights at the end equal those of the loop by hand, bit for bit"
        + (f", EXCEPT in: {', '.join(different)}." if different else "."),
    ]


def _calls(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## Calls per batch",
        "Calls of Python functions + of C functions in the median batch: free of noise.",
        table(
            ("", "by hand", "Trainer", "added"),
            (
                (
                    row["name"],
                    f"{row['hand'][0]:.0f} + {row['hand'][1]:.0f}",
                    f"{row['trainer'][0]:.0f} + {row['trainer'][1]:.0f}",
                    f"**{row['trainer'][0] - row['hand'][0]:+.0f} {row['trainer'][1] - row['hand'][1]:+.0f}**",
                )
                for row in rows
            ),
        ),
    ]


def _reads(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## Reads from the device",
        "Each one makes the host wait for a GPU. Counted: `.item()` and everything like it, `.cpu()`, `.numpy()`, "
        "`.tolist()`. Aim: none between log boundaries.",
        table(
            ("", "steps", "at log boundaries", "between them"),
            ((row["name"], row["steps"], row["at_boundaries"], f"**{row['between']}**") for row in rows),
        ),
    ]


def _imports(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## Imports",
        "Fresh processes, medians.",
        table(
            ("", "CPU ms", "wall ms", "modules", "torch loaded", "aim"),
            (
                (
                    row["name"],
                    f"**{1e3 * row['cpu_s']:.0f}**",
                    f"{1e3 * row['wall_s']:.0f}",
                    row["modules"],
                    "yes" if row["has_torch"] else "no",
                    row["aim"],
                )
                for row in rows
            ),
        ),
    ]


def _first_steps(rows: list[dict[str, Any]]) -> list[str]:
    base = rows[0]["process_cpu_s"]
    return [
        "## The first step",
        "CPU seconds from the start of the process to the end of the first step (fresh processes, medians), and wall "
        "seconds from `fit()`; by hand, from making the optimizer, which is where torch imports its compiler.",
        table(
            ("", "process, CPU s", "added", "least", "fit, wall s", "aim"),
            (
                (
                    row["name"],
                    f"{row['process_cpu_s']:.2f}",
                    f"**{row['process_cpu_s'] - base:+.2f}**",
                    f"{row['process_cpu_min_s']:.2f}",
                    f"{row['fit_s']:.2f}",
                    row["aim"],
                )
                for row in rows
            ),
        ),
    ]


def _saving(numbers: dict[str, Any]) -> list[str]:
    return [
        "## A save",
        f"{numbers['num_parameters'] / 1e6:.0f} million parameters with Adam, {numbers['size_bytes'] / 1e6:.0f} MB; "
        "medians of saves in turns. By hand, torch.save writes to a temporary name, which is synced to the disk and "
        "renamed, as the Trainer does it, too. Aim: no memory, and no longer than torch.save.",
        table(
            ("", "seconds", "CPU s", "memory added, MiB"),
            (
                (name, f"{row['wall_s']:.2f}", f"{row['cpu_s']:.2f}", f"**{row['peak_mib']:.0f}**")
                for name, row in (
                    ("torch.save and fsync", numbers["torch"]),
                    ("trainer.save_checkpoint", numbers["trainer"]),
                )
            ),
        ),
    ]


def _logging(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## A thousand values per step",
        f"Wall microseconds of the median step that logs 1,000 values and sends them to the logger at once "
        f"(`log_every_n_steps=1`); {rows[0]['without_us']:.0f} without a logger. The queue is bounded: a logger that "
        "cannot keep up slows the steps down in the end, and what is left is written before `fit` returns.",
        table(
            ("", "written at once", "queued", "fit at once, s", "fit queued, s"),
            (
                (
                    row["name"],
                    f"{row['at_once_us']:.0f}",
                    f"**{row['queued_us']:.0f}**",
                    f"{row['at_once_fit_s']:.2f}",
                    f"{row['queued_fit_s']:.2f}",
                )
                for row in rows
            ),
        ),
    ]


def _ranks(rows: list[dict[str, Any]]) -> list[str]:
    base = rows[0]
    different = [row["name"] for row in rows if not row["weights_equal"]]
    return [
        "## A step on two ranks",
        "Two processes with gloo, medians over single steps; CPU time is that of rank 0, all threads. The ratio is to "
        "DistributedDataParallel in a loop by hand. Aim: 1.05 in wall time.",
        table(
            ("", "wall us", "ratio", "CPU us", "ratio"),
            (
                (
                    row["name"],
                    f"{row['wall_us']:.0f}",
                    f"**{row['wall_us'] / base['wall_us']:.2f}**",
                    f"{row['cpu_us']:.0f}",
                    f"{row['cpu_us'] / base['cpu_us']:.2f}",
                )
                for row in rows
            ),
        ),
        "The weights at the end equal those of the loop by hand, bit for bit"
        + (f", EXCEPT in: {', '.join(different)}." if different else "."),
    ]


def _launch(rows: list[dict[str, Any]]) -> list[str]:
    base = rows[0]["seconds"]
    return [
        "## Launching two ranks",
        "Wall seconds from the start of the command to the end of rank 0's first step, importing torch included; by "
        "hand, a script that starts itself a second time and calls init_process_group.",
        table(
            ("", "seconds", "added"),
            ((r["name"], f"{r['seconds']:.2f}", f"**{r['seconds'] - base:+.2f}**") for r in rows),
        ),
    ]


SECTIONS: dict[str, Callable[[Any], list[str]]] = {
    "steps": _steps,
    "calls": _calls,
    "reads": _reads,
    "imports": _imports,
    "first-step": _first_steps,
    "saving": _saving,
    "logging": _logging,
    "ranks": _ranks,
    "launch": _launch,
}
