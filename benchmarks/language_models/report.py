"""The section of RESULTS.md about finetuning beside other programs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tables import table

from language_models.inputs import LENGTH, MICRO_BATCH
from language_models.peers import NAMES

# Any in this file: measured numbers, as they are in results/latest.json.

Runs = Mapping[str, Sequence[Mapping[str, float]]]  # of a workload: program, then rounds

TITLES = {
    "equal": f"Samples of {LENGTH} tokens, half of them trained",
    "different": f"Samples of different lengths, up to {LENGTH} tokens",
}
# Name in the numbers: heading, digits, name in a sentence.
QUANTITIES = {
    "tokens_per_s": ("trained tokens/s", 0, "trained tokens per second"),
    "cpu_s_per_1000": ("CPU s per 1,000", 2, "CPU time per token"),
    "peak_mib": ("peak MiB", 0, "peak memory"),
    "first_step_s": ("first step s", 1, "time to the first step"),
    "first_step_cpu_s": ("CPU s until then", 1, "CPU time until the first step"),
}


def describe_recipes(numbers: dict[str, Any]) -> list[str]:
    """Return the section."""
    heading = "## Finetuning beside other programs"
    if "skipped" in numbers:
        return [heading, f"Not measured: {numbers['skipped']}."]
    inputs, named = numbers["inputs"], numbers["versions"]
    listed = ", ".join(f"{name} {version}" for name, version in named.items())
    text = [
        heading,
        f"All parameters of a Llama with {inputs['parameters'] / 1e6:.1f} million, random weights, on instruct data of "
        "random words, where only the answers are trained: one epoch, AdamW, float32, no clipping, no gradient "
        "checkpointing; everything else is each program's default. On a CPU, one thread, one process after the other, "
        f"{numbers['rounds']} rounds, in which the order of programs rotates. One environment: {listed}. LitGPT "
        "trains the same weights, converted by its own function (largest difference of logits: "
        f"{inputs['logits_difference']:.1e}); the model was added to its table of models, which has none of this size.",
        "Numbers are medians over rounds, and in parentheses the smallest and the largest. Tokens are trained ones, "
        "over the time from the end of the first step to the end of the last one. Peak memory is that of the process "
        "until its last step. The first step is counted from the start of the command. Batches have "
        f"{MICRO_BATCH} rows; a row is a sample, and with packing up to {LENGTH} tokens of several samples.",
    ]
    for workload, runs in numbers["workloads"].items():
        text += _workload(TITLES[workload], inputs[workload], runs)
    return text


def _workload(title: str, sizes: Mapping[str, int], runs: Runs) -> Iterator[str]:
    yield f"### {title}"
    yield f"{sizes['samples']:,} samples with {sizes['trained_tokens']:,} trained tokens."
    yield table(
        ("", "steps", *(heading for heading, _, _ in QUANTITIES.values()), "loss at the end"),
        (
            (
                NAMES[program],
                f"{rounds[0]['steps']:.0f}",
                *(_range(rounds, name, digits) for name, (_, digits, _) in QUANTITIES.items()),
                f"{statistics.median(one['last_loss'] for one in rounds):.2f}",
            )
            for program, rounds in runs.items()
        ),
    )
    yield "The recipe against the others, where the difference of medians is larger than the spread of either side:"
    yield "\n".join(f"- {line}" for line in rankings(runs))


def _range(rounds: Sequence[Mapping[str, float]], name: str, digits: int) -> str:
    values = [one[name] for one in rounds]
    median = f"**{statistics.median(values):,.{digits}f}**"
    return f"{median} ({min(values):,.{digits}f} - {max(values):,.{digits}f})"


def rankings(runs: Runs, base: str = "recipe") -> Iterator[str]:
    """Give a line for each quantity: the ratio to each other program, or that the spread allows no ranking."""
    for name, (_, _, words) in QUANTITIES.items():
        ranked, unranked = [], []
        for program, rounds in runs.items():
            if program == base:
                continue
            ratio = ranking([one[name] for one in runs[base]], [one[name] for one in rounds])
            if ratio is None:
                unranked.append(NAMES[program])
            else:
                ranked.append(f"{ratio:.2f} of {NAMES[program]}")
        parts = ranked + ([f"no ranking against {', '.join(unranked)}"] if unranked else [])
        yield f"{words}: {'; '.join(parts)}"


def ranking(own: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the ratio of the medians; None if the spread of either side is not smaller than their difference."""
    mine, theirs = statistics.median(own), statistics.median(other)
    spread = max(max(own) - min(own), max(other) - min(other))
    # One round has no spread, and allows no ranking.
    if min(len(own), len(other)) < 2 or not abs(mine - theirs) > spread:
        return None
    return mine / theirs
