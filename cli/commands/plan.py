"""`loopwright plan train.py`: what the program's training would need with each strategy; nothing is trained."""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ...errors import ConfigError, LoopwrightError
from ...planning.formulas import chinchilla_tokens, training_cost, training_flops, training_hours
from ...planning.table import KINDS
from .doctor import print_json, print_text

if TYPE_CHECKING:
    from ...planning import Plan
    from ...trainer import Trainer


# Any in this file: arguments of the user's Trainer.

# The planned machine need not be this one.
_HERE = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "logger": False}


class _Fit(BaseException):
    """Ends the program at its fit."""

    def __init__(self, trainer: Trainer, model: Any, data: Any) -> None:
        super().__init__()
        self.trainer, self.model, self.data = trainer, model, data


def plan(arguments: Sequence[str]) -> int:
    """Run a program until its fit, print the plan of this fit, and return the exit code: 1 if nothing fits.

    Args:
        arguments: Arguments after `loopwright plan`.
    """
    parser = argparse.ArgumentParser(
        prog="loopwright plan",
        description="Run a program until it calls Trainer.fit, and print what that training would need per device with "
        "each strategy: memory by kind, bytes sent per step, pipeline bubble, and the arguments to write. Nothing is "
        "launched, trained or allocated. The exit code is 1 if nothing fits.",
        allow_abbrev=False,
    )
    parser.add_argument("program", help="the program; other arguments are passed to it, as are all those after --")
    parser.add_argument("--devices", type=int, default=1, help="devices per node (default: 1)")
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument("--memory", help="memory of a device, such as 80GB (default: unknown)")
    parser.add_argument("--bandwidth", default="50GB", help="bytes per second between devices (default: 50GB)")
    group = parser.add_argument_group("duration and cost", "of a dense model: 6 FLOPs per parameter and token")
    group.add_argument("--tokens", type=float, help="tokens of the training, such as 140e9 (default: not shown)")
    group.add_argument("--parameters", type=float, help="parameters that a token uses (default: those of the model)")
    group.add_argument("--peak-flops", type=float, help="peak FLOP/s of a device in this precision, such as 989e12")
    group.add_argument("--mfu", type=float, default=0.4, help="fraction of the peak that is reached (default: 0.4)")
    group.add_argument("--price-per-hour", type=float, help="price of a device for an hour")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="simulate ranks of the program's strategy on these devices instead, and print what a start would refuse: "
        "sizes, data, folder of checkpoints; the exit code is 1 if there is such a problem",
    )
    end = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, others = parser.parse_known_args(arguments[:end])
    chosen.arguments = [*others, *arguments[end + 1 :]]
    given: dict[str, Any] = {}
    try:
        _check_length(chosen)
        fit = _fit_of(chosen, given)
        if fit is None:
            sys.stderr.write(f"loopwright plan: expected a call of Trainer.fit in {chosen.program}, got its end.\n")
            return 2
        if chosen.dry_run:
            return _dry_run(fit, given, chosen)
        found = fit.trainer.plan(
            fit.model,
            fit.data,
            devices=chosen.devices,
            num_nodes=chosen.num_nodes,
            memory=chosen.memory,
            bandwidth=chosen.bandwidth,
        )
        length = _length(fit.model, chosen)
    except LoopwrightError as error:
        sys.stderr.write(f"loopwright plan: {error}\n")
        return 2
    if chosen.json:
        sys.stdout.write(json.dumps({**found.to_dict(), "training": length}, indent=2) + "\n")
    else:
        _print(found)
        sys.stdout.write("".join(f"{line}\n" for line in _length_lines(length)))
    return 1 if found.best is None else 0


def _check_length(chosen: argparse.Namespace) -> None:
    """Raise a ConfigError if options for duration and cost are missing or out of range."""
    wanted = [name for name in ("parameters", "peak_flops", "price_per_hour") if getattr(chosen, name) is not None]
    if wanted and chosen.tokens is None:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wanted)
        raise ConfigError(f"Expected --tokens with {names}, got none.", fix="pass the tokens of the training.")
    if chosen.price_per_hour is not None and chosen.peak_flops is None:
        raise ConfigError("Expected --peak-flops with --price-per-hour, got none.", fix="see the device's data sheet.")
    if not 0 < chosen.mfu <= 1:
        raise ConfigError(f"Expected --mfu above 0 and at most 1, got {chosen.mfu:g}.", fix="0.3 to 0.5 is common.")


def _length(model: Any, chosen: argparse.Namespace) -> dict[str, float]:
    """Return figures of the training, as far as the options allow; empty without `--tokens`.

    Raises:
        ConfigError: The module has no parameters yet.
    """
    if chosen.tokens is None:
        return {}
    parameters = int(chosen.parameters or sum(one.numel() for one in model.parameters()))
    if not parameters:
        raise ConfigError(
            "Expected a module with parameters before fit for --tokens, got none.", fix="pass --parameters."
        )
    flops = training_flops(parameters, int(chosen.tokens))
    found = {
        "parameters": parameters,
        "tokens": chosen.tokens,
        "compute_optimal_tokens": chinchilla_tokens(parameters),
        "flops": flops,
    }
    if chosen.peak_flops is not None:
        devices = chosen.devices * chosen.num_nodes
        found |= {"devices": devices, "hours": training_hours(flops, devices, chosen.peak_flops, chosen.mfu)}
        if chosen.price_per_hour is not None:
            found["cost"] = training_cost(found["hours"], devices, chosen.price_per_hour)
    return found


def _length_lines(length: dict[str, float]) -> list[str]:
    if not length:
        return []
    lines = [
        f"{length['tokens']:.3g} tokens with {length['parameters']:.3g} parameters: {length['flops']:.3g} FLOPs "
        f"(6 per parameter and token; compute-optimal: {length['compute_optimal_tokens']:.3g} tokens)."
    ]
    if "hours" in length:
        cost = f", {length['cost']:,.2f} in the currency of the price" if "cost" in length else ""
        count = length["devices"]
        on = "1 device" if count == 1 else f"{count} devices"
        lines.append(f"On {on}: {length['hours']:,.1f} hours{cost}.")
    return lines


def _dry_run(fit: _Fit, given: dict[str, Any], chosen: argparse.Namespace) -> int:
    """Print what a start of the program on the chosen devices would refuse, and return the exit code."""
    from ...trainer.plan_fit import training_of
    from .dry_run import findings_of

    training, num_batches = training_of(fit.trainer, fit.model, fit.data)
    findings = findings_of(
        training,
        "mesh" if given.get("strategy") == "mesh:auto" else given.get("strategy") or "auto",
        devices=chosen.devices,
        num_nodes=chosen.num_nodes,
        num_batches=num_batches,
        folder=Path(fit.trainer.default_root_dir),
    )
    levels = print_json(findings) if chosen.json else print_text(findings)
    return 1 if "problem" in levels else 0


def _fit_of(chosen: argparse.Namespace, given: dict[str, Any]) -> _Fit | None:
    """Run the program until its fit; None if it does not call it. Its Trainer's own arguments are put into `given`."""
    if not os.path.exists(chosen.program):
        raise ConfigError(
            f"Expected a program, got {chosen.program!r}, which does not exist in {os.getcwd()!r}.",
            fix="pass the path of a script that calls Trainer.fit.",
        )
    from ...trainer import Trainer

    def fit(trainer: Trainer, model: Any, train: Any = None, *rest: Any, **given: Any) -> None:
        datamodule = given.get("datamodule", rest[1] if len(rest) > 1 else None)
        train = given.get("train_dataloaders", train)
        data = train if datamodule is None else datamodule
        raise _Fit(trainer, model, data)

    arguments = [chosen.program, *chosen.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(chosen.program)))
    try:
        with (
            patch.object(Trainer, "__init__", _on_this_machine(Trainer.__init__, given)),
            patch.object(Trainer, "fit", fit),
            patch.object(sys, "argv", arguments),
        ):
            runpy.run_path(chosen.program, run_name="__main__")
    except _Fit as reached:
        return reached
    finally:
        sys.path.pop(0)
    return None


def _on_this_machine(construct: Callable[..., None], given: dict[str, Any]) -> Callable[..., None]:
    """Return a constructor that takes the Trainer's arguments for any machine, and leaves out those that choose one."""

    @functools.wraps(construct)
    def on_this_machine(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if str(kwargs.get("precision")) in ("16-mixed", "16", "fp16"):
            kwargs["precision"] = "bf16-mixed"  # of the same sizes; a CPU need not have the other one
        given.update(kwargs)
        construct(trainer, *args, **{**kwargs, **_HERE})

    return on_this_machine


def _print(found: Plan) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write(f"{found}\n")
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    heading, rows = found.cells()
    console = Console()
    console.print(found.title, markup=False, highlight=False)
    for columns in columns_of_tables(found, console.width):
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index in columns:
            table.add_column(heading[index], justify="right" if index else "left", no_wrap=True)
        for row, cells in zip(found.rows, rows, strict=True):
            style = "bold" if row is found.best else "dim" if row.fits is False else None
            table.add_row(*(cells[index] for index in columns), style=style)
        console.print(table, "")
    for line in found.advice():
        console.print(line, markup=False, highlight=False)


def columns_of_tables(found: Plan, width: int) -> list[list[int]]:
    """Return the columns of each table that is printed: one table, or as many as show all columns in this width.

    Each table begins with the names of the strategies, and the first one of several says what fits. Columns without a
    value are left out.
    """
    heading, rows = found.cells()
    columns = list(zip(heading, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    order = [index for index, cells in enumerate(columns) if index and set(cells[1:]) != {"-"}]
    if _width_of([0, *order], widths) > width:
        order.sort(key=lambda index: (heading[index] in KINDS, heading[index] != "fits"))
    tables = [[0]]
    for index in order:
        if len(tables[-1]) > 1 and _width_of([*tables[-1], index], widths) > width:
            tables.append([0])
        tables[-1].append(index)
    return tables


def _width_of(columns: list[int], widths: list[int]) -> int:
    return sum(widths[index] for index in columns) + 2 * (len(columns) - 1)
