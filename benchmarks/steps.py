"""What a trainer adds to a step: CPU time, Python calls and reads from the device; run.py prints them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy import LoggingToy, Toy, batches, make, shuffled_loader, train_by_hand
from variants import DEFAULTS, LOGGED, SWITCHED_OFF, TEN_CALLBACKS, VARIANTS, Variant, quiet

import loopwright as lw
from loopwright.trainer.metrics.current_values import CurrentValues

WARM_UP = 20  # steps at the beginning of each run that are not counted: first allocations, first branches


def differences(values: list[float]) -> list[float]:
    return [after - before for before, after in zip(values[WARM_UP:], values[WARM_UP + 1 :], strict=False)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def time_steps(*, num_batches: int, rounds: int) -> list[dict[str, Any]]:
    """Time each variant and its hand-written loop in turns, so that a slow moment of the machine hits both.

    Returns:
        One row per variant; times in microseconds of CPU time per batch.
    """
    torch.set_num_threads(1)
    rows = []
    for variant in VARIANTS:
        hand: list[list[float]] = []
        trainer: list[list[float]] = []
        weights_equal = True
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                gc.collect()
                expected = variant.run_by_hand(num_batches)
                gc.collect()
                actual = variant.run_trainer(num_batches, Path(folder))
            hand.append(differences(expected.began_s))
            trainer.append(differences(actual.began_s))
            if variant.verb == "fit" and variant.data is not shuffled_loader:
                weights_equal &= same_weights(expected, actual)
        hand_us, trainer_us = (1e6 * percentile(list(itertools.chain(*chunks)), 0.1) for chunks in (hand, trainer))
        rows.append(
            {
                "name": variant.name,
                "aim": variant.aim,
                "hand_us": hand_us,
                "added_us": trainer_us - hand_us,
                # A mean holds what happens now and then (a log interval, a drawn bar); the median is free of bursts.
                "hand_mean_us": 1e6 * statistics.median(statistics.mean(chunk) for chunk in hand),
                "added_mean_us": 1e6
                * statistics.median(
                    statistics.mean(ours) - statistics.mean(theirs) for ours, theirs in zip(trainer, hand, strict=True)
                ),
                "weights_equal": weights_equal,
            }
        )
    return rows


def per_value(rows: list[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """Return what one logged value, and one callback that hears one event, cost: name, microseconds, aim."""
    added = {row["name"]: row["added_us"] for row in rows}
    return [
        ("one `self.log`", (added[LOGGED.name] - added[DEFAULTS.name]) / 3, "1"),
        ("one callback and event", (added[TEN_CALLBACKS.name] - added[SWITCHED_OFF.name]) / 20, "0.1"),
    ]


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def count_calls(*, num_batches: int) -> list[dict[str, Any]]:
    """Count calls of Python functions and of C functions per batch: the median batch, free of noise."""
    rows = []
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            hand = _profiled(variant, lambda v: v.run_by_hand(num_batches))
            trainer = _profiled(variant, lambda v, f=Path(folder): v.run_trainer(num_batches, f))  # type: ignore[misc]
        rows.append({"name": variant.name, "hand": hand, "trainer": trainer})
    return rows


def _profiled(variant: Variant, run: Callable[[Variant], Toy]) -> tuple[float, float]:
    counts = {"call": 0, "c_call": 0}
    marks: list[tuple[int, int]] = []
    steps = (Toy.training_step.__code__, Toy.validation_step.__code__, LoggingToy.validation_step.__code__)

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1
            if event == "call" and frame.f_code in steps:
                marks.append((counts["call"], counts["c_call"]))

    sys.setprofile(count)
    try:
        run(variant)
    finally:
        sys.setprofile(None)
    return (
        statistics.median(differences([float(mark[0]) for mark in marks])),
        statistics.median(differences([float(mark[1]) for mark in marks])),
    )


class _Reads(TorchDispatchMode):
    """Counts each read of a number from a tensor, at the step where it happens."""

    def __init__(self, module: Toy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.module = module
        self.at: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.at.append(len(self.module.began_s))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _copies(module: Toy) -> Iterator[list[int]]:
    """Note the step of each call of a Tensor's cpu, numpy and tolist, which read many numbers at once."""
    at: list[int] = []
    originals = {name: getattr(torch.Tensor, name) for name in ("cpu", "numpy", "tolist")}

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            at.append(len(module.began_s))
            return original(self, *args, **kwargs)

        return read

    for name, original in originals.items():
        setattr(torch.Tensor, name, noting(original))
    try:
        yield at
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def count_reads(*, num_batches: int, log_every: int) -> list[dict[str, Any]]:
    """Count reads from the device in a run with bar, logger, three logged values and clipping.

    Between log boundaries the bar draws by the clock. On the CPU it reads the values of that moment, which waits for
    nothing; it is denied them here, because on a GPU it takes those whose copy is complete.

    Returns:
        One row for the hand-written loop and one for the Trainer: all reads, and those that were not at a log boundary.
    """
    rows = []
    for name in ("hand-written loop, no logging", "Trainer, three values, bar, loggers, clipping"):
        toy = make(LoggingToy if name.startswith("Trainer") else Toy)
        with (
            tempfile.TemporaryDirectory() as folder,
            quiet(is_terminal=True),
            mock.patch.object(CurrentValues, "read", return_value={}),
            _copies(toy) as copies,
        ):
            reads = _Reads(toy)
            if name.startswith("Trainer"):
                trainer = lw.Trainer(
                    max_epochs=1,
                    accelerator="cpu",
                    devices=1,
                    default_root_dir=folder,
                    log_every_n_steps=log_every,
                    gradient_clip_val=1.0,
                    enable_checkpointing=False,
                )
                with reads:
                    trainer.fit(toy, batches(num_batches))
            else:
                with reads:
                    train_by_hand(toy, batches(num_batches))
        inside = [at for at in reads.at + copies if 1 <= at < num_batches]
        rows.append(
            {
                "name": name,
                "steps": num_batches,
                "log_every": log_every,
                "at_boundaries": sum(at % log_every == 0 for at in inside),
                "between": sum(at % log_every != 0 for at in inside),
            }
        )
    return rows
