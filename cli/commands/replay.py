"""`loopwright replay RUN --step N`: makes one step of a run again, and shows what it consisted of."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.content import OWN_KEY
from ...checkpoint.tools.diff import Tolerance, compare
from ...checkpoint.tools.formats import Reading, open_checkpoint
from ...compat.lightning import SWITCH, child_environment
from ...errors import CheckpointError, ConfigError, LoopwrightError
from ...messages import counted
from ...protocols import StateDict
from ...report.checkpoints import find_checkpoints
from ...report.environment import revision
from ...trainer.checkpointing.program import HIDDEN
from ...trainer.replay import ReplayRequest

# Any in this file: records as JSON has them.

_MOST_SHOWN = 8
_COMPARED = ("state_dict", "optimizer_states")
_DESCRIPTION = """\
Make one step of a run again, bit for bit, and show its losses, gradient norms, weight norms, and which samples each
rank had in each micro-batch. Nothing has to have been logged: the program of the run is started again from the last
checkpoint at or before the step, by the command that the checkpoint records, which is shown first. No file of the run
is written: loggers and checkpoints are switched off.
"""


@dataclass(frozen=True)
class _Checkpoint:
    """A full checkpoint of a run: where it is, the steps made before it, its number of ranks, and the program.

    `rolled_back_ns` is the time of the run's first rollback, or 0.
    """

    path: Path
    steps: int
    world_size: int | None
    program: StateDict | None
    rolled_back_ns: int


def replay(arguments: Sequence[str]) -> int:
    """Replay a step, or find where two runs differ, and return the exit code: 1 if they do, 2 after an error.

    Args:
        arguments: Arguments after `loopwright replay`.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    given = _parser().parse_args(arguments[:end])
    given.command = list(arguments[end + 1 :])
    try:
        if given.step is None and given.compare is None:
            raise ConfigError("Expected --step, got neither it nor --compare.", fix="pass the index of the step.")
        if given.step is not None and given.step < 0:
            raise ConfigError(f"Expected --step of 0 or more, got {given.step}.", fix="pass the index of the step.")
        if given.compare is not None:
            return _compare(given)
        with _folder(given) as folder:
            request = ReplayRequest(
                given.step, folder, keeps_batch=given.save_batch is not None, anomaly=given.anomaly,
                debug=given.rank if given.debug else None, terminal=os.getpid(),
            )  # fmt: skip
            run = _Run(given.run, given)
            start = run.before(given.step)
            ranks = run.play(request, start)
            if given.save_batch is not None:
                saved = [torch.load(request.batch_of(rank), weights_only=True) for rank in range(len(ranks))]
                torch.save({"step": given.step, "ranks": saved}, given.save_batch)
        _print(given, run, start, ranks)
    except LoopwrightError as error:
        sys.stderr.write(f"loopwright replay: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loopwright replay", description=_DESCRIPTION, allow_abbrev=False,
        usage="loopwright replay RUN [options] [-- PROGRAM [ARGS]]",
        epilog="After --: the program and its arguments, where the checkpoint does not record them or hides a secret; "
        "-- -m MODULE for a module.",
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="folder of the run, or one of its checkpoints")
    parser.add_argument(
        "--step", type=int, metavar="N",
        help="index of the step as loggers show it, from 0: N steps were made before; with --compare, the last step "
        "to look at",
    )  # fmt: skip
    parser.add_argument("--compare", metavar="RUN", help="find the first step, rank and tensor that differ")
    parser.add_argument("--save-batch", metavar="FILE", help="write the micro-batches of all ranks as torch.save does")
    parser.add_argument("--debug", action="store_true", help="stop at the first line of training_step with pdb")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank of --debug (default: 0)")
    parser.add_argument("--anomaly", action="store_true", help="turn autograd's anomaly detection on in the step")
    parser.add_argument("--folder", metavar="DIR", help="keep what the replay writes in a new folder here")
    parser.add_argument("--yes", action="store_true", help="run the program that the checkpoint names without asking")
    parser.add_argument("--json", action="store_true", help="print JSON, with the norm of each parameter")
    return parser


@contextmanager
def _folder(given: argparse.Namespace) -> Iterator[str]:
    """Yield a new folder for a replay; it stays where the user has named its parent."""
    if given.folder is not None:
        os.makedirs(given.folder, exist_ok=True)
        yield tempfile.mkdtemp(dir=os.path.abspath(given.folder), prefix="replay-")
        return
    with tempfile.TemporaryDirectory(prefix="loopwright-replay-") as folder:
        yield folder


class _Run:
    """A run on disk: its full checkpoints, and the program that made them.

    Args:
        place: Its folder, or a checkpoint.
        given: The command's options.

    Raises:
        ConfigError: There is nothing at the place.
    """

    def __init__(self, place: str, given: argparse.Namespace) -> None:
        path = Path(place)
        if not path.exists():
            raise ConfigError(f"Expected the folder of a run, got {place!r}, which does not exist.", fix="pass one.")
        is_checkpoint = path.suffix == ".ckpt"
        found = [one for file in ([path] if is_checkpoint else find_checkpoints(path)) if (one := _read(file))]
        self.place, self._given = place, given
        self.checkpoints = sorted(found, key=lambda one: (one.steps, one.path.stat().st_mtime))

    def before(self, step: int) -> _Checkpoint | None:
        """Return the last checkpoint at or before a step; None for the beginning of the run."""
        return next((one for one in reversed(self.checkpoints) if one.steps <= step), None)

    def play(self, request: ReplayRequest, start: _Checkpoint | None) -> list[dict[str, Any]]:
        """Run the program up to the step and return the records of the ranks.

        Raises:
            ConfigError: The program is not known, or ended before the step.
        """
        known = start or (self.checkpoints[0] if self.checkpoints else None)
        size = known.world_size if known is not None else None
        request = replace(
            request, checkpoint=None if start is None else str(start.path.absolute()), world_size=size,
            newest=str(self.checkpoints[-1].path.absolute()) if self.checkpoints else None,
            rolled_back_ns=max((one.rolled_back_ns for one in self.checkpoints), default=0),
        )  # fmt: skip
        command, folder, variables = self._command(known)
        if not self._given.command and not self._given.yes:
            _ask(command, folder, variables)
        environment = {**os.environ, "WANDB_MODE": "disabled", **variables, **request.to_variable()}
        out = sys.stderr if self._given.json else None
        code = subprocess.run(command, cwd=folder, env=environment, stdout=out, check=False).returncode
        records = [json.loads(file.read_text()) for rank in range(size or 1)
                   if (file := request.record_of(rank)).exists()]  # fmt: skip
        if size is None and records:
            records += [json.loads(request.record_of(rank).read_text()) for rank in range(1, records[0]["world_size"])]
        if not records or len(records) != records[0]["world_size"]:
            raise self._problem(request, command, code)
        return records

    def _problem(self, request: ReplayRequest, command: list[str], code: int) -> ConfigError:
        shown = shlex.join(command)
        if request.begun.exists():
            what = f"Expected {shown} to reach step {request.step}, got its end before (exit code {code})."
            return ConfigError(what, fix="see the messages above; replay an earlier step if the run ended before it.")
        return ConfigError(
            f"Expected {shown} to call Trainer.fit, got its end (exit code {code}).",
            fix="see the messages above. A loop written with Fabric has no steps that could be replayed.",
        )

    def _command(self, known: _Checkpoint | None) -> tuple[list[str], str | None, dict[str, str]]:
        """Return the command, its folder, and environment variables."""
        typed = self._given.command
        program = (known.program if known is not None else None) or {}
        folder = program.get("folder")
        if program.get("fit") and not typed:
            raise ConfigError(
                "Expected a run that the program's first call of Trainer.fit made, got one of call "
                f"{program['fit'] + 1}, which depends on the calls before it.",
                fix="write a program after -- whose first call of Trainer.fit makes the run, such as one fold alone.",
            )
        words = typed or program.get("command")
        if not words:
            raise ConfigError(
                f"Expected a checkpoint in {self.place} that records how the program was started, got "
                f"{counted(len(self.checkpoints), 'checkpoint') + ' without' if self.checkpoints else 'none'}.",
                fix=f"write the program and its arguments after --: loopwright replay {self.place} --step N -- "
                "train.py ARGS",
            )
        hidden = [word for word in words if HIDDEN in word] if not typed else []
        if hidden:
            raise ConfigError(
                f"The arguments of the program contain secrets, which are not recorded: {shlex.join(words)}.",
                fix="write the program and its arguments after --.",
            )
        if not typed and not os.path.isdir(str(folder)):
            raise ConfigError(
                f"Expected the folder of the program, got {folder}, which does not exist here.",
                fix="write the program and its arguments after --, in the folder where it is to run.",
            )
        if typed:
            folder = None
        elif program.get("revision") not in (None, _revision(words, str(folder))):
            sys.stderr.write(
                f"loopwright replay: the run was at commit {program['revision']} of the program, this is "
                f"{_revision(words, str(folder))}: if the code of the step differs, so do its figures.\n"
            )
        recorded = program.get("variables", {})
        variables = {name: value for name, value in recorded.items() if HIDDEN not in value}
        missing = [name for name in recorded if name not in variables and name not in os.environ]
        if missing:
            raise ConfigError(
                f"Expected the variables {', '.join(missing)}, whose values contain secrets and are not recorded, got "
                "none.",
                fix="set them as for the run.",
            )
        if SWITCH in variables:
            variables.update(child_environment(os.environ.get("PYTHONPATH", "")))
        if "threads" in program:  # sums are split over threads
            variables["OMP_NUM_THREADS"] = str(program["threads"])
        size = known.world_size if known is not None else None
        if program.get("ranks_by") == "others" and "WORLD_SIZE" not in os.environ:
            return [sys.executable, "-m", "loopwright", "launch", f"--nproc-per-node={size}", *words], folder, variables
        return [sys.executable, *words], folder, variables


def _ask(command: list[str], folder: str | None, variables: dict[str, str]) -> None:
    """Show the program that a checkpoint names, and ask whether to run it: anyone may have written it.

    Raises:
        ConfigError: The user refuses, or there is no terminal.
    """
    words = [*(f"{name}={value}" for name, value in variables.items()), *command]
    lines = [shlex.join(["cd", folder or "."]), shlex.join(words)]
    shown = "".join(f"  {''.join(c if c.isprintable() else repr(c)[1:-1] for c in line)}\n" for line in lines)
    sys.stderr.write(f"The checkpoint names this program:\n{shown}")
    if not sys.stdin.isatty():
        raise ConfigError(
            "Expected a yes to this program, got no terminal at which to ask.",
            fix="pass --yes for a run that you trust, or write the program and its arguments after --.",
        )
    sys.stderr.write("Run it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("The program was not run.", fix="write another one and its arguments after --.")


def _read(path: Path) -> _Checkpoint | None:
    """Return what a checkpoint records about itself; None if a run cannot continue from it."""
    try:
        tree = open_checkpoint(path, Reading(verify=False)).tree
    except CheckpointError as error:
        sys.stderr.write(f"loopwright replay: {path} is left out: {error.what}\n")
        return None
    own = tree.get(OWN_KEY)
    if not isinstance(own, dict) or "rng" not in own:  # weights only, or of another library
        return None
    rolled_back_ns = own["progress"].get("rolled_back_ns", 0)
    program = own.get("program")
    return _Checkpoint(path, own["progress"]["steps"], own.get("world_size"), program, rolled_back_ns)


def _revision(words: list[str], folder: str) -> str | None:
    script = next((word for word in words if os.path.isfile(word)), None)
    return (revision(os.path.dirname(os.path.abspath(script))) if script else None) or revision(folder)


# --- one step ------------------------------------------------------------------------------------------------------


def _print(given: argparse.Namespace, run: _Run, start: _Checkpoint | None, ranks: list[dict[str, Any]]) -> None:
    began = None if start is None else str(start.path)
    if given.json:
        sys.stdout.write(json.dumps({"run": run.place, "checkpoint": began, "ranks": ranks}, indent=2) + "\n")
        return
    sys.stdout.writelines(f"{line}\n" for line in _lines(began, ranks))


def _lines(began: str | None, ranks: list[dict[str, Any]]) -> Iterator[str]:
    first = ranks[0]
    steps = counted(first["step"] - first["began_at"] + 1, "step")
    yield (
        f"Step {first['step']} (epoch {first['epoch']}): {steps} on {counted(len(ranks), 'rank')} from "
        f"{began or 'the beginning of the run'}"
    )
    if first["skipped_windows"]:
        yield f"  {counted(first['skipped_windows'], 'window')} before it made no step"
    for record in ranks:
        yield f"  rank {record['rank']}"
        for number, one in enumerate(record["micro_batches"]):
            loss = f"loss {one['loss']!r}" if "loss" in one else "no loss returned"
            yield f"    micro-batch {number} (batch {one['batch_idx']}): {loss}"
            named = "unknown" if one["samples"] is None else _short(one["samples"])
            yield f"      samples {named}" + (f", ids {_short(one['ids'])}" if "ids" in one else "")
        for number, loss in enumerate(record["backward_losses"]):
            yield f"    backward pass {number}: loss {loss!r}"
        if not record["micro_batches"]:
            yield "    no batch: its data had ended"
    own = [record for record in ranks if record is first or record["gradients"] != first["gradients"]]
    for record in own:  # once where all ranks have the same
        where = f" of rank {record['rank']}" if len(own) > 1 else ""
        for one in record["gradients"]:
            rates = sorted({values["lr"] for values in one["settings"] if "lr" in values})
            lr = f", lr {', '.join(f'{rate:g}' for rate in rates)}" if rates else ""
            yield f"  gradients{where}, {one['optimizer']}: norm {one['norm']!r}{lr}"
            yield from _largest(one["of_parameters"])
        weights = record["weights"]
        yield f"  weights{where}: norm {weights['norm_before']!r} before, {weights['norm']!r} after"
    if first["logged"]:
        yield "  logged: " + ", ".join(f"{name} {value!r}" for name, value in first["logged"].items())


def _largest(norms: dict[str, float]) -> Iterator[str]:
    # A NaN first: it is what one looks for.
    order = sorted(norms, key=lambda name: (norms[name] == norms[name], -norms[name]))
    for name in order[:3]:
        yield f"    {name}: {norms[name]:.6g}"


def _short(values: Any) -> str:
    if isinstance(values, list) and len(values) > _MOST_SHOWN:
        return f"{' '.join(map(str, values[:_MOST_SHOWN]))} ... ({len(values)})"
    return " ".join(map(str, values)) if isinstance(values, list) else str(values)


# --- two runs ------------------------------------------------------------------------------------------------------


def _compare(given: argparse.Namespace) -> int:
    """Find the first difference of two runs, print it, and return 1; 0 if there is none."""
    runs = [_Run(place, given) for place in (given.run, given.compare)]
    sizes = {one.world_size for run in runs for one in run.checkpoints}
    if len(sizes) > 1:
        raise _other_sizes(sizes)
    begin, end, differs = _bracket(runs, given.step)
    empty = next((run.place for run in runs if not (run.checkpoints or given.command)), None)
    if empty is not None:
        raise ConfigError(
            f"Expected a checkpoint in {empty} that records how the program was started, got none.",
            fix="compare runs with full checkpoints, or write a program and its arguments after --, which both are "
            "replayed with.",
        )
    if end is None:
        if begin is None:
            raise ConfigError("Expected checkpoints of the same step in both runs, got none.", fix="pass --step.")
        sys.stdout.write(f"The runs are equal in all their common checkpoints, up to step {begin}.\n")
        return 0
    found: list[list[list[dict[str, Any]]]] = []
    for run in runs:
        with _folder(given) as folder:
            request = ReplayRequest(end - 1, folder, digests=True)
            start = None if begin is None else next(one for one in run.checkpoints if one.steps == begin)
            ranks = run.play(request, start)
            found.append([[json.loads(line) for line in request.digests_of(rank).read_text().splitlines()]
                          for rank in range(len(ranks))])  # fmt: skip
    if len(found[0]) != len(found[1]):
        raise _other_sizes({len(ranks) for ranks in found})
    first = _first_difference(*found)
    if first is None and differs:
        first = {"step": end, "kind": "checkpoint", "name": differs, "rank": None, "values": ["", ""]}
    if given.json:
        result = {"runs": [run.place for run in runs], "from": begin, "to": end, "difference": first}
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        sys.stdout.write(_describe(first, begin, end) + "\n")
    return int(first is not None)


def _other_sizes(sizes: set[int | None]) -> ConfigError:
    return ConfigError(
        f"Expected two runs on the same number of ranks, got {' and '.join(map(str, sorted(sizes, key=str)))}.",
        fix="`loopwright checkpoint diff A B` compares the weights of two checkpoints.",
    )


def _bracket(runs: list[_Run], last: int | None) -> tuple[int | None, int | None, str | None]:
    """Return the last common step whose checkpoints are equal, the first whose are not, and what differs in these.

    None for the first: the beginning of the runs. None for the second: no common checkpoint differs.
    """
    begin: int | None = None
    by_step = [{one.steps: one for one in run.checkpoints} for run in runs]
    for step in sorted(by_step[0].keys() & by_step[1].keys()):
        if last is not None and step > last + 1:
            break
        trees = [open_checkpoint(one[step].path, Reading()).tree for one in by_step]
        first, second = ({key: tree[key] for key in _COMPARED if key in tree} for tree in trees)
        difference = next(compare(first, second, Tolerance()), None)
        if difference is not None:
            return (begin, step, difference.path) if step else (None, 1, difference.path)
        begin = step
    return begin, None if last is None or last < (begin or 0) else last + 1, None


def _first_difference(first: list[list[dict[str, Any]]], second: list[list[dict[str, Any]]]) -> dict[str, Any] | None:
    """Return the first difference of two runs: by step, then by what happened first in it, then by rank."""
    for lines in zip(*first, *second, strict=False):
        ranks = len(first)
        pairs = list(zip(lines[:ranks], lines[ranks:], strict=True))
        longest = max(len(one["digests"]) for one in lines)
        for number in range(longest):
            for rank, (one, other) in enumerate(pairs):
                item, its = (side["digests"][number] if number < len(side["digests"]) else ["nothing", "", "", ""]
                             for side in (one, other))  # fmt: skip
                if item[:3] != its[:3]:
                    step = one["step"]
                    return {"step": step if step == "beginning" else int(step), "rank": rank, "kind": item[0],
                            "name": item[1], "values": [item[3], its[3]]}  # fmt: skip
    return None


def _describe(found: dict[str, Any] | None, begin: int | None, end: int) -> str:
    since = "the beginning" if begin is None else f"step {begin}"
    if found is None:
        return f"The runs are equal from {since} to step {end - 1}."
    if found["kind"] == "checkpoint":
        return (
            f"The checkpoints of step {end} differ in {found['name']}, and the steps from {since} that led to them do "
            "not: one was changed after its step, or the run was not deterministic."
        )
    first, second = found["values"]
    values = "" if not (first or second) else f": {first} and {second}"
    if found["kind"] == "batch":
        values = f", of the same samples {first}" if first == second != "None" else f", of samples {first} and {second}"
    where = f"at {since}, before the first step" if found["step"] == "beginning" else f"in step {found['step']}"
    return f"The first difference is {where}, on rank {found['rank']}: {found['kind']} {found['name']}{values}."
