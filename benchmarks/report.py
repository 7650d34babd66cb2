"""Convert measured numbers to RESULTS.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp import MODES, NAMES
from growth import describe_growth
from language_models.memory import describe_recipes_memory
from language_models.report import describe_recipes
from many_ranks.measure import describe_many_ranks
from memory import expected
from model_parallel.report import describe_mesh
from peers_steps import describe_peers
from rank_growth import describe_rank_growth
from steps import per_value
from tables import table
from xla import NAMES as XLA_NAMES


def describe(results: dict[str, Any]) -> str:
    """Return RESULTS.md: one section for each part that was measured."""
    where = results["environment"]
    text = [
        "# Benchmark results",
        "Written by `make bench`; the measured numbers are in [results/latest.json](results/latest.json). "
        f"{where['cpu']}, {where['cores']} cores, {where['system']}, Python {where['python']}, torch {where['torch']}, "
        f"one thread. {_dates(results)}"
        + (" **A quick run: the numbers are not meaningful.**" if results["is_quick"] else ""),
    ]
    for part, section in SECTIONS.items():
        if part in results:
            text += section(results[part])
    return "\n\n".join(text) + "\n"


def _dates(results: dict[str, Any]) -> str:
    """Return on which days, and beside how much else, the parts were measured."""
    of_day: dict[str, list[str]] = {}
    for part in SECTIONS:
        if part in results:
            of_day.setdefault(results["when"][part]["date"], []).append(part)
    loads = [results["when"][part]["load"] for part in SECTIONS if part in results]
    days = "; ".join(f"{day}: {', '.join(parts)}" for day, parts in sorted(of_day.items()))
    return f"Measured {days}; load of the machine when a part began at most {max(loads)}."


def _steps(rows: list[dict[str, Any]]) -> list[str]:
    different = [row["name"] for row in rows if not row["weights_equal"]]
    has_earlier = all("earlier_added_us" in row for row in rows)  # put there where a change is to be shown
    return [
        "## Overhead per step",
        "Microseconds of CPU time (all threads) per batch in a hand-written loop, and what the Trainer adds: the 10th "
        "percentile over single batches, and the mean over a run (median of the runs). The mean includes occasional "
        "work such as a log interval. A network of two layers, batches of 8 from memory. The hand-written loop shows, "
        "logs and saves nothing." + (f" Earlier: {rows[0]['earlier']}" if has_earlier else ""),
        table(
            (
                "",
                "hand-written",
                "added",
                *(["added, earlier"] if has_earlier else []),
                "target",
                "hand-written, mean",
                "added, mean",
            ),
            (
                (
                    row["name"],
                    f"{row['hand_us']:.0f}",
                    f"**{row['added_us']:+.1f}**",
                    *([f"{row['earlier_added_us']:+.1f}"] if has_earlier else []),
                    row["aim"],
                    f"{row['hand_mean_us']:.0f}",
                    f"{row['added_mean_us']:+.1f}",
                )
                for row in rows
            ),
        ),
        table(
            ("microseconds", "added", "target"),
            ((name, f"**{value:+.2f}**", aim) for name, value, aim in per_value(rows)),
        ),
        "The final weights equal those of the hand-written loop, bit for bit"
        + (f", EXCEPT in: {', '.join(different)}." if different else "."),
    ]


def _calls(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## Calls per batch",
        "Calls of Python functions + of C functions in the median batch, a measure without noise.",
        table(
            ("", "hand-written", "Trainer", "added"),
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
        "Each read makes the host wait for a GPU. Counted: `.item()` and its equivalents, `.cpu()`, `.numpy()`, "
        "`.tolist()`. Target: none between log boundaries.",
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
            ("", "CPU ms", "wall ms", "modules", "torch loaded", "target"),
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
        "seconds from `fit()`; hand-written, from creating the optimizer, where torch imports its compiler. The "
        "Trainer leaves that out while nothing is compiled.",
        table(
            ("", "process, CPU s", "added", "minimum", "fit, wall s", "target"),
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


def _loading(rows: list[dict[str, Any]]) -> list[str]:
    equal = all(row["equal"] for row in rows)
    return [
        "## Tensors in memory",
        "Microseconds of CPU time per batch of a shuffled DataLoader over a `TensorDataset` of inputs and classes, "
        "without workers: torch's own iteration, and what training reads in its place. "
        + ("The batches are equal, bit for bit." if equal else "**The batches differ.**"),
        table(
            ("", "torch's DataLoader", "Trainer", "ratio"),
            (
                (
                    row["name"],
                    f"{row['torch_us']:.0f}",
                    f"{row['run_us']:.0f}",
                    f"**{row['run_us'] / row['torch_us']:.2f}**",
                )
                for row in rows
            ),
        ),
    ]


def _saving(numbers: dict[str, Any]) -> list[str]:
    return [
        "## Saving a checkpoint",
        f"{numbers['num_parameters'] / 1e6:.0f} million parameters with Adam, {numbers['size_bytes'] / 1e6:.0f} MB; "
        "medians of alternating saves. The hand-written version calls torch.save with a temporary name, syncs the file "
        "to the disk and renames it, as the Trainer does. Target: no additional memory, and no longer than torch.save.",
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


def _stalls(numbers: dict[str, Any]) -> list[str]:
    by_hand, background = numbers["torch"], numbers["background"]
    return [
        "How long a training waits for a save: `AsyncCheckpointIO` in the middle of it, with what it adds to the "
        "next optimizer step, beside torch.save at the same place. CPU: of the thread that trains, without that step. "
        "Wall times include what other programs write to the same disk. Target: 5 %; measured: "
        f"**{100 * background['cpu_s'] / by_hand['cpu_s']:.1f} %** of the CPU time.",
        table(
            ("", "CPU ms", "wall ms, median", "wall ms, least", "first save, wall ms"),
            (
                (name, *(f"{1e3 * row[key]:.0f}" for key in ("cpu_s", "wall_s", "least_s", "first_s")))
                for name, row in (("torch.save and fsync", by_hand), ("AsyncCheckpointIO", background))
            ),
        ),
    ]


def _small_saves(numbers: dict[str, Any]) -> list[str]:
    return [
        f"A checkpoint of {numbers['num_tensors']:,} tensors of four elements takes {numbers['ours_s']:.2f} s of CPU "
        f"time, with torch.save and fsync {numbers['torch_s']:.2f} s; the ratio is **{numbers['ratio']:.2f}** (median "
        "of alternating saves). Target: 1.0.",
    ]


def _logging(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## Logging a thousand values per step",
        f"Wall microseconds of the median step that logs 1,000 values and sends them to the logger immediately "
        f"(`log_every_n_steps=1`); {rows[0]['without_us']:.0f} without a logger. The queue is bounded: a logger that "
        "cannot keep up eventually slows the steps down, and the remaining rows are written before `fit` returns.",
        table(
            ("", "synchronous", "queued", "fit synchronous, s", "fit queued, s"),
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
        "## Overhead per step on two ranks",
        "Two processes with gloo, medians over single steps; CPU time is that of rank 0, all threads. The ratio is to "
        "DistributedDataParallel in a hand-written loop. Target: 1.05 in wall time.",
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
        "The final weights equal those of the hand-written loop, bit for bit"
        + (f", EXCEPT in: {', '.join(different)}." if different else "."),
    ]


def _launch(rows: list[dict[str, Any]]) -> list[str]:
    base = rows[0]["seconds"]
    return [
        "## Launching two ranks",
        "Wall seconds from the start of the command to the end of rank 0's first step, including the import of torch. "
        "The hand-written loop is a script that starts itself a second time at its first line, before it imports "
        "torch, and calls init_process_group.",
        table(
            ("", "seconds", "added"),
            ((r["name"], f"{r['seconds']:.2f}", f"**{r['seconds'] - base:+.2f}**") for r in rows),
        ),
    ]


def _fsdp(numbers: dict[str, Any]) -> list[str]:
    sizes = numbers["sizes"]
    different = [
        f"{name} ({size['elements']:,})"
        for size in sizes
        for mode, name in zip(MODES, NAMES, strict=True)
        if not size["modes"][mode]["weights_equal"]
    ]
    calls = sizes[0]["calls"]
    return [
        "## Overhead per sharded step on two ranks",
        "Two processes with gloo, eight blocks that are separate units, AdamW, batches of 8 in memory; medians of "
        "single steps; CPU time is that of rank 0, all threads. The ratio is to a hand-written loop with torch's "
        "`fully_shard`. Target: 1.05 in wall time.",
        table(
            ("", "elements of a block", "wall ms", "ratio", "CPU ms", "ratio"),
            (
                (
                    name,
                    f"{size['elements']:,}",
                    f"{1e-3 * size['modes'][mode]['wall_us']:.1f}",
                    f"**{size['modes'][mode]['wall_us'] / size['modes']['hand']['wall_us']:.2f}**",
                    f"{1e-3 * size['modes'][mode]['cpu_us']:.1f}",
                    f"{size['modes'][mode]['cpu_us'] / size['modes']['hand']['cpu_us']:.2f}",
                )
                for size in sizes
                for mode, name in zip(MODES, NAMES, strict=True)
            ),
        ),
        "The final weights equal those of the hand-written loop, bit for bit"
        + (f", EXCEPT in: {', '.join(different)}." if different else "."),
        "Calls of Python functions + of C functions in the step with the fewest calls.",
        table(
            ("", "calls", "added"),
            (
                (
                    name,
                    f"{calls[mode][0]:.0f} + {calls[mode][1]:.0f}",
                    f"**{calls[mode][0] - calls['hand'][0]:+.0f} {calls[mode][1] - calls['hand'][1]:+.0f}**",
                )
                for mode, name in zip(MODES, NAMES, strict=True)
            ),
        ),
        *_memory(numbers["memory"]),
    ]


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    count, unit = rows[0]["parameters"], rows[0]["unit"]
    mib = 4 / 2**20  # of one element in float32

    def process(row: dict[str, Any], name: str) -> str:
        return f"{row[name] / 2**20:.1f}" if name in row else "unknown"

    return [
        "### Memory per rank",
        f"{count * mib:.1f} MiB of parameters in units of {unit * mib:.1f} MiB, Adam, negligible activations; MiB on "
        "rank 0. Between two steps: the parameters and Adam's two states, 3 P / N. The peak of a step adds "
        "the gradients, P / N, and at most four units U: gathered parameters and gradients, and communication buffers. "
        "Tensors: inputs and outputs of operations. Process: its peak memory, minus that before the step or before the "
        "model was built with `init_module`.",
        table(
            (
                "ranks",
                "between, 3P/N",
                "tensors",
                "peak, 4P/N + 4U",
                "tensors",
                "step adds, process",
                "building, P/N + U",
                "process",
            ),
            (
                (
                    row["ranks"],
                    f"{3 * count / row['ranks'] * mib:.1f}",
                    f"**{row['resting_bytes'] / 2**20:.1f}**",
                    f"{(4 * count / row['ranks'] + 4 * unit) * mib:.1f}",
                    f"**{row['peak_bytes'] / 2**20:.1f}**",
                    process(row, "step_process_bytes"),
                    f"{(count / row['ranks'] + unit) * mib:.1f}",
                    process(row, "build_process_bytes"),
                )
                for row in rows
            ),
        ),
    ]


def _sharded_saves(numbers: dict[str, Any]) -> list[str]:
    stall = numbers["stall"]
    return [
        "## Sharded checkpoints",
        f"{numbers['speed'][0]['size_bytes'] / 2**20:.0f} MiB of sharded parameters, saved and loaded back into the "
        "module, medians of alternating runs, until the last rank is done. Fabric verifies checksums of all bytes when "
        "it loads, torch.distributed.checkpoint does not.",
        table(
            ("", "ranks", "save, s", "MiB/s", "load, s", "MiB/s"),
            (
                (
                    row["name"],
                    speed["ranks"],
                    f"{row['save_s']:.2f}",
                    f"**{speed['size_bytes'] / 2**20 / row['save_s']:.0f}**",
                    f"{row['load_s']:.2f}",
                    f"**{speed['size_bytes'] / 2**20 / row['load_s']:.0f}**",
                )
                for speed in numbers["speed"]
                for row in speed["rows"]
            ),
        ),
        f"Effect of a save of {stall['megabytes']} MiB (parameters and Adam's states, a folder) on a training on "
        f"{stall['ranks']} ranks: how long it is blocked, and the time of its steps while the file is written.",
        table(
            ("", "blocked, s", "first save, s", "median step, s", "slowest step, s"),
            (
                (
                    row["name"],
                    f"**{row['stall_s']:.2f}**",
                    f"{row['first_stall_s']:.2f}",
                    f"{row['step_s']:.3f}",
                    f"{row['slowest_step_s']:.3f}",
                )
                for row in stall["rows"]
            ),
        ),
    ]


def _deepspeed(numbers: dict[str, Any]) -> list[str]:
    if "skipped" in numbers:
        return ["## Overhead per step with DeepSpeed", f"Not measured: {numbers['skipped']}."]
    names = ("hand-written DeepSpeed", *NAMES[1:])
    rows = [
        (stage["stage"], size, mode, name)
        for stage in numbers["stages"]
        for size in stage["sizes"]
        for mode, name in zip(MODES, names, strict=True)
    ]
    different = [
        f"{name} (stage {stage})" for stage, size, mode, name in rows if not size["modes"][mode]["weights_equal"]
    ]
    return [
        "## Overhead per step with DeepSpeed",
        "Two processes with gloo, eight blocks, AdamW, batches of 8 in memory; medians of single steps; CPU time is "
        "that of rank 0, all threads. The ratio is to the same engine in a hand-written loop. Target: 1.05 in wall "
        "time. Calls: of Python + of C functions in the step with the fewest calls.",
        table(
            ("", "stage", "elements of a block", "wall ms", "ratio", "CPU ms", "ratio", "calls added"),
            (
                (
                    name,
                    stage,
                    f"{size['elements']:,}",
                    f"{1e-3 * size['modes'][mode]['wall_us']:.1f}",
                    f"**{size['modes'][mode]['wall_us'] / size['modes']['hand']['wall_us']:.2f}**",
                    f"{1e-3 * size['modes'][mode]['cpu_us']:.1f}",
                    f"{size['modes'][mode]['cpu_us'] / size['modes']['hand']['cpu_us']:.2f}",
                    " ".join(
                        f"{own - by_hand:+.0f}"
                        for own, by_hand in zip(size["calls"][mode], size["calls"]["hand"], strict=True)
                    )
                    if size["calls"]
                    else "",
                )
                for stage, size, mode, name in rows
            ),
        ),
        "The final weights equal those of the hand-written loop, bit for bit"
        + (f", EXCEPT in: {', '.join(dict.fromkeys(different))}." if different else "."),
    ]


def _xla(numbers: dict[str, Any]) -> list[str]:
    if "skipped" in numbers:
        return ["## Overhead per step with XLA", f"Not measured: {numbers['skipped']}."]
    rows = [
        (devices["devices"], size, name, size["modes"][mode], size["modes"]["hand"])
        for devices in numbers["devices"]
        for size in devices["sizes"]
        for mode, name in XLA_NAMES.items()
    ]
    different = [name for _, _, name, row, _ in rows if row["largest_difference"]]
    return [
        "## Overhead per step with XLA",
        f"torch {numbers['devices'][0]['torch']} and torch_xla on the CPU's runtime, in one process: one device, and "
        "two by SPMD; eight blocks, AdamW, batches of 16 in memory; medians of single steps, CPU time of all threads. "
        "The ratio is to a hand-written loop with torch_xla; target: 1.05 in wall time. Compiled and read: number of "
        "graphs, and of reads from the device, in the second half of the steps; target: none. Calls are those of "
        "Python functions + of C functions in the step with the fewest calls.",
        table(
            (
                "", "devices", "elements of a block",
                "wall ms", "ratio", "CPU ms", "ratio", "compiled", "read", "calls",
            ),
            (
                (
                    name,
                    devices,
                    f"{size['elements']:,}",
                    f"{1e-3 * row['wall_us']:.1f}",
                    f"**{row['wall_us'] / hand['wall_us']:.2f}**",
                    f"{1e-3 * row['cpu_us']:.1f}",
                    f"{row['cpu_us'] / hand['cpu_us']:.2f}",
                    row["compiled"],
                    row["reads"],
                    f"{row['calls'][0]:.0f} + {row['calls'][1]:.0f}",
                )
                for devices, size, name, row, hand in rows
            ),
        ),
        "The final weights equal those of the hand-written loop, bit for bit"
        + (f", EXCEPT in: {', '.join(dict.fromkeys(different))}." if different else "."),
    ]  # fmt: skip


def _compiling(numbers: dict[str, Any]) -> list[str]:
    return [
        "## Compiling",
        f"`Trainer(compile=True)` on {numbers['device']}: examples/gpt (batches of 16 x 128 bytes, width 128), and a "
        "residual network for images (batches of 16 x 3 x 32 x 32, width 32), both with AdamW. Seconds of CPU time "
        "including compilers, in one thread (on a GPU: wall time); variants take turns of eight steps. The first step "
        "includes the compilation, with an empty cache and with the one that an earlier run left. Speedup: the median "
        "step of eager divided by that of the variant, median over turns. Losses, and the largest distance of a weight "
        f"tensor from eager's relative to its norm, after {numbers['steps']} steps. "
        f"Load of the machine at the end: {numbers['load']}.",
        table(
            ("", "layers", "first step s", "with cache s", "step ms", "speedup", "loss", "weights differ by"),
            (
                (
                    f"{row['model']}, {row['variant']}",
                    row["layers"],
                    f"{row['first_s']:.1f}",
                    f"{row['cached_first_s']:.1f}",
                    f"{1e3 * row['step_s']:.1f}",
                    f"**{row['ratio']:.2f}**",
                    f"{row['loss']:.5f}",
                    f"{row['difference']:.0e}" if row["difference"] else "0",
                )
                for row in numbers["rows"]
            ),
        ),
    ]


def _memory_of_strategies(numbers: dict[str, Any]) -> list[str]:
    rows = numbers["rows"]
    parts = ("parameters", "gradients", "optimizer")
    moments = ("resting", "accumulating", "backward_peak", "step_peak", "process")

    def mb(row: dict[str, Any], name: str) -> str:
        return f"{row[name] / 1e6:.1f}" if name in row else "unknown"

    def memory(row: dict[str, Any]) -> tuple[object, ...]:
        form = expected(row["name"], row["precision"], row["ranks"]).total
        size = form * row["elements"]
        return (
            row["name"],
            row["precision"],
            row["ranks"],
            f"{form:.4g} P",
            f"{size / 1e6:.1f}",
            f"**{row['before_step_bytes'] / 1e6:.1f}**",
            f"{100 * (row['before_step_bytes'] / size - 1):+.0f} %",
            *(mb(row, f"{name}_bytes") for name in (*parts, *moments)),
        )

    return [
        "## Memory of each strategy",
        f"{rows[0]['elements'] / 1e6:.1f} million parameters P in eight units, Adam, negligible activations; "
        "MB on rank 0. Expected and measured: after the last backward pass, before the optimizer step, and its "
        "parts: parameters, gradients, moments with masters. Then: between two steps; between two micro-batches of a "
        "window; the peak of the backward pass, and of the optimizer step. All of these are storages of live tensors. "
        "Process: its peak memory, minus that before the model was built.",
        table(
            (
                "", "precision", "ranks", "formula", "expected", "measured", "off", "parameters", "gradients",
                "optimizer", "between steps", "accumulating", "backward", "step", "process",
            ),
            map(memory, rows),
        ),
        "Communication of a step with one micro-batch: collectives, and the bytes of their tensors (the output of "
        "all_gather, the input of reduce_scatter).",
        table(
            ("", "precision", "ranks", "calls", "MB"),
            (
                (
                    row["name"],
                    row["precision"],
                    row["ranks"],
                    ", ".join(f"{calls} {name}" for name, (calls, _) in row["sent"].items()) or "none",
                    ", ".join(f"{size / 1e6:.1f}" for _, size in row["sent"].values()) or "0",
                )
                for row in rows
            ),
        ),
    ]  # fmt: skip


def _surviving(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "## Copies in memory, and the same bits on every number of ranks",
        "Milliseconds per optimizer step on rank 0, by the clock and in CPU time of all threads: the mean over a run "
        "with its copies and waits, the least of runs in turns. CPU time depends less on what else the machine does. "
        "Four million parameters with Adam, batches of 32; ranks with `ddp` on this machine. A copy (`Snapshot`) is "
        "48 MB, and is left out while the one before it is written; its thread shares the cores with the ranks. Eight "
        'micro-batches in a step beside `reproducible="world"`.',
        table(
            ("", "ranks", "micro-batches of a rank", "plain, wall", "wall", "ratio", "plain, CPU", "CPU", "ratio"),
            (
                (
                    row["name"],
                    row["ranks"],
                    row["micro_batches"],
                    *(
                        text
                        for plain, own in zip(row["plain_ms"], row["step_ms"], strict=True)
                        for text in (f"{plain:.1f}", f"{own:.1f}", f"**{own / plain:.2f}**")
                    ),
                )
                for row in rows
            ),
        ),
    ]


SECTIONS: dict[str, Callable[[Any], list[str]]] = {
    "steps": _steps,
    "calls": _calls,
    "peers": describe_peers,
    "growth": describe_growth,
    "rank-growth": describe_rank_growth,
    "many-ranks": describe_many_ranks,
    "reads": _reads,
    "imports": _imports,
    "first-step": _first_steps,
    "loading": _loading,
    "saving": _saving,
    "stalls": _stalls,
    "small-saves": _small_saves,
    "logging": _logging,
    "ranks": _ranks,
    "launch": _launch,
    "fsdp": _fsdp,
    "mesh": describe_mesh,
    "deepspeed": _deepspeed,
    "sharded-saves": _sharded_saves,
    "surviving": _surviving,
    "memory": _memory_of_strategies,
    "xla": _xla,
    "compiling": _compiling,
    "recipes-memory": describe_recipes_memory,
    "recipes": describe_recipes,
}
