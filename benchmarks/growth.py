"""How costs grow with sizes: callbacks, logged values, parameter tensors, epochs, checkpoints, loaders, ranks.

Each curve is measured twice: CPU time, and calls of Python functions, which have no noise. run.py prints them.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from steps import percentile
from tables import table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toy import Batch, Toy, batches, make
from variants import OFF, Listener, quiet

import loopwright as lw

__all__ = ["CURVES", "Clock", "Curve", "describe_growth", "exponent", "measure_growth"]


class Clock:
    """CPU microseconds of the process, or the number of Python calls so far.

    Args:
        counts: Whether calls are counted, while the clock is entered with `with`.
    """

    def __init__(self, *, counts: bool) -> None:
        self.counts = counts
        self.calls = 0

    def now(self) -> float:
        return float(self.calls) if self.counts else 1e6 * time.process_time()

    def typical(self, values: Sequence[float]) -> float:
        """Return what one step takes: the 10th percentile of times, the median of counts."""
        return percentile(list(values), 0.5 if self.counts else 0.1)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"

    def __enter__(self) -> Clock:
        if self.counts:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self.counts:
            sys.setprofile(None)


@dataclass(frozen=True)
class Curve:
    """A cost against a size.

    Attributes:
        name: What the table calls it.
        unit: Of what the cost is.
        sizes: The first is subtracted from the others, cost and size.
        quick: The sizes of a quick run.
        measure: (size, clock) -> cost.
    """

    name: str
    unit: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    measure: Callable[[int, Clock], float]


class Noting(Toy):
    """A toy that notes a clock at each training step."""

    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.marks.append(self.clock.now())
        x, y = batch[0] if isinstance(batch[0], (list, tuple)) else batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        nn.functional.mse_loss(self.net(batch[0]), batch[1])


def _step(module: Any, clock: Clock, data: Any, *, skip: int = 10, **options: Any) -> float:
    """Fit, and return what a step takes."""
    module.clock = clock
    with tempfile.TemporaryDirectory() as folder, quiet(), clock:
        arguments = {**OFF, "max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": Path(folder)}
        lw.Trainer(**{**arguments, **options}).fit(module, data)
    return clock.typical([after - before for before, after in itertools.pairwise(module.marks[skip:])])


class Deaf(lw.Callback):
    """Hears nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def state_key(self) -> str:
        return f"Deaf{self.number}"


def _listeners(size: int, clock: Clock) -> float:
    return _step(make(Noting), clock, batches(80), callbacks=[Listener(number) for number in range(size)])


def _deaf(size: int, clock: Clock) -> float:
    return _step(make(Noting), clock, batches(80), callbacks=[Deaf(number) for number in range(size)])


class Wordy(Noting):
    """Logs many values at each step."""

    names: tuple[str, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict(dict.fromkeys(self.names, 1.0))
        return loss


def _logged(size: int, clock: Clock) -> float:
    module = make(Wordy)
    assert isinstance(module, Wordy)
    module.names = tuple(f"value{number}" for number in range(size))
    return _step(module, clock, batches(30), skip=5)


class Many(lw.Module):
    """A model of many parameters of one element."""

    clock: Clock

    def __init__(self, size: int) -> None:
        super().__init__()
        self.parts: list[Tensor] = [nn.Parameter(torch.zeros(1)) for _ in range(size)]
        self.weights = nn.ParameterList(self.parts)
        self.marks: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.marks.append(self.clock.now())
        return torch.cat(self.parts).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, foreach=True)


def _tensors(size: int, clock: Clock) -> float:
    return _step(Many(size), clock, batches(6), skip=2)


def _tensors_by_hand(size: int, clock: Clock) -> float:
    module = Many(size)
    module.clock = clock
    optimizer = module.configure_optimizers()
    with clock:
        for index, batch in enumerate(batches(6)):
            loss = module.training_step(batch, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return clock.typical([after - before for before, after in itertools.pairwise(module.marks[2:])])


def _fit_of_tensors(size: int, clock: Clock) -> float:
    module = Many(size)
    module.clock = clock
    with clock, quiet():
        began = clock.now()
        lw.Trainer(max_steps=1, accelerator="cpu", devices=1, **OFF).fit(module, batches(1))  # type: ignore[arg-type]
        return clock.now() - began


def _epochs(size: int, clock: Clock) -> float:
    module = make(Noting)
    assert isinstance(module, Noting)
    module.clock = clock
    with clock, quiet():
        began = clock.now()
        trainer = lw.Trainer(max_epochs=size, accelerator="cpu", devices=1, **OFF)  # type: ignore[arg-type]
        trainer.fit(module, batches(1))
        return clock.now() - began


class Watched(Noting):
    """Logs what its checkpoints are compared by: each is better than those before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", -float(batch_idx))
        return loss


def _kept(size: int, clock: Clock) -> float:
    with tempfile.TemporaryDirectory() as folder:
        keep = lw.ModelCheckpoint(dirpath=folder, monitor="loss", save_top_k=size, every_n_train_steps=1)
        data = batches(size + 20)
        return _step(make(Watched), clock, data, skip=size, callbacks=[keep], enable_checkpointing=True)


def _loader(count: int) -> DataLoader[Any]:
    return DataLoader(batches(count), batch_size=None)  # type: ignore[arg-type]  # a list is a map-style data set


def _loaders(size: int, clock: Clock) -> float:
    return _step(make(Noting), clock, [_loader(40) for _ in range(size)])


def _validation_loaders(size: int, clock: Clock) -> float:
    module = make(Noting)
    assert isinstance(module, Noting)
    with quiet():
        trainer = lw.Trainer(accelerator="cpu", devices=1, **OFF)  # type: ignore[arg-type]
        loaders = [_loader(4) for _ in range(size)]
        trainer.validate(module, loaders, verbose=False)
        with clock:
            began = clock.now()
            trainer.validate(module, loaders, verbose=False)
            return clock.now() - began


STEP = "a step"
_TENSORS = (1, 10, 100, 1_000, 10_000, 100_000)
CURVES = (
    Curve("callbacks that hear two events", STEP, (0, 1, 10, 30, 100), (0, 10, 30), _listeners),
    Curve("callbacks that hear nothing", STEP, (0, 1, 10, 30, 100), (0, 10, 30), _deaf),
    Curve("logged values", STEP, (0, 1, 10, 100, 1_000, 10_000), (0, 10, 100), _logged),
    Curve("parameter tensors, hand-written", STEP, _TENSORS, (1, 10, 100), _tensors_by_hand),
    Curve("parameter tensors", STEP, _TENSORS, (1, 10, 100), _tensors),
    Curve("parameter tensors", "a fit of one step", _TENSORS, (1, 10, 100), _fit_of_tensors),
    Curve("epochs of one batch", "the fit", (1, 10, 100, 1_000), (1, 10, 20), _epochs),
    Curve("checkpoints kept", "a step that saves", (1, 4, 16, 64), (1, 2, 4), _kept),
    Curve("loaders of the training data", STEP, (1, 10, 100), (1, 4, 8), _loaders),
    Curve("validation loaders", "a validation, 4 batches each", (1, 10, 100), (1, 4, 8), _validation_loaders),
)


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float | None:
    """Return the exponent of growth: the slope of log(cost - first cost) over log(size - first size).

    Args:
        sizes: In rising order; the first and its cost are subtracted from the others.
        costs: As many.

    Returns:
        The slope by least squares over the points that add a fifth of the first cost at least, and 1; None with fewer
        than two such points: it does not grow.
    """
    points = [
        (math.log(size - sizes[0]), math.log(cost - costs[0]))
        for size, cost in zip(sizes[1:], costs[1:], strict=True)
        if cost - costs[0] >= max(0.2 * costs[0], 1.0)
    ]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def measure_growth(*, is_quick: bool, rounds: int = 1) -> list[dict[str, Any]]:
    """Measure all curves.

    Returns:
        A row for each: name, unit, sizes, microseconds of CPU time (the smallest of all rounds, in which the sizes take
        turns), Python calls, and the exponents of both, None where nothing grows.
    """
    torch.set_num_threads(1)
    rows = []
    for curve in CURVES:
        sizes = curve.quick if is_quick else curve.sizes
        turns = [[curve.measure(size, Clock(counts=False)) for size in sizes] for _ in range(1 if is_quick else rounds)]
        us = [min(values) for values in zip(*turns, strict=True)]
        calls = [curve.measure(size, Clock(counts=True)) for size in sizes]
        rows.append(_row(curve.name, curve.unit, sizes, us, calls))
    return rows


def _row(
    name: str, unit: str, sizes: Sequence[int], us: Sequence[float], calls: Sequence[float] | None
) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        "sizes": list(sizes),
        "us": list(us),
        "calls": None if calls is None else list(calls),
        "exponent": exponent(sizes, us),
        "exponent_of_calls": None if calls is None else exponent(sizes, calls),
    }


def describe_growth(rows: list[dict[str, Any]]) -> list[str]:
    """Return the section of RESULTS.md."""

    def points(row: dict[str, Any], name: str) -> str:
        values = row[name]
        return "" if values is None else ", ".join(f"{value:,.0f}" for value in values)

    def slope(value: float | None) -> str:
        return "none" if value is None else f"{value:.2f}"

    return [
        "## Growth",
        "CPU microseconds (all threads), and calls of Python functions, of a Trainer without bar, logger and summary, "
        "against a size. Exponent: the slope of the logarithms, by least squares, where the cost of the first size is "
        "subtracted from the others, and the first size too; over the points that add at least a fifth of the first "
        "cost. None: fewer than two do. A step: the 10th percentile. Parameters have one "
        "element each, with SGD; hand-written is the plain loop. Target: at most 1; small sizes lie below it, because "
        "part of their cost is fixed, and what leaves the processor's caches lies above it.",
        table(
            ("", "cost of", "sizes", "CPU us", "exponent", "calls", "exponent"),
            (
                (
                    row["name"],
                    row["unit"],
                    ", ".join(f"{size:,}" for size in row["sizes"]),
                    points(row, "us"),
                    f"**{slope(row['exponent'])}**",
                    points(row, "calls"),
                    "" if row["calls"] is None else f"**{slope(row['exponent_of_calls'])}**",
                )
                for row in rows
            ),
        ),
    ]
