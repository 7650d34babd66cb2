"""Prints through which files six things walk: `python benchmarks/walks.py [WALK ...]`. Counts calls; uses no clocks.

    batch      from the end of one training_step to the beginning of the next
    log        a logged value, from self.log to the logger
    fsdp       strategy="fsdp" on rank 0 of two: the Trainer's constructor, then what fit() runs only with "fsdp"
    start      fit(), up to on_train_start
    ckpt_path  the same with ckpt_path=; its files are those that fit() does not run
    exception  an exception in training_step of rank 1 of two, from there to the end of its process

For each walk: the files of Loopwright whose functions ran, in the order of their first call, the folders at the top
level that they are in, and how often the walk entered one of these again; the calls of functions, and how often the
next function was in another folder, at whatever level.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw

__all__ = ["WALKS", "Walk"]

PACKAGE = Path(lw.__file__).resolve().parent


class Report(TypedDict):
    """What a walk has noted; see `Walk`."""

    files: list[str]
    calls: list[str]
    num_calls: int
    num_changes: int


class Walk:
    """The files of the package in which functions were called between `start` and `stop`.

    Attributes:
        files: Each file once, in the order of first calls, relative to the package.
        calls: The file of every call, in order, without repetitions in a row.
        num_calls: How many functions of the package were called.
        all_calls: As `calls`, where these were reduced to some of the files; else empty.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.calls: list[str] = []
        self.num_calls = 0
        self.all_calls: list[str] = []
        self._known: dict[str, str | None] = {}
        self._is_done = False

    def start(self) -> None:
        """Begin to note calls; nothing after `stop`."""
        if not self._is_done:
            sys.setprofile(self._note)

    def stop(self) -> None:
        """Note no more calls."""
        sys.setprofile(None)
        self._is_done = True

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith("<") or frame.f_code.co_name == "<module>":  # generated code, and imports
            return
        if name not in self._known:
            path = Path(name).resolve()
            self._known[name] = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None
        file = self._known[name]
        if file is None or file.startswith(("benchmarks", "tests", ".venv")):
            return
        self.num_calls += 1
        if not self.calls or self.calls[-1] != file:
            self.calls.append(file)
        if file not in self.files:
            self.files.append(file)

    def without(self, other: Walk) -> Walk:
        """Return the files of this walk without those of the other one."""
        rest = Walk()
        rest.files = [file for file in self.files if file not in other.files]
        rest.calls = [file for file in self.calls if file not in other.files]
        return rest

    @property
    def num_changes(self) -> int:
        """How often a function in another folder was called next."""
        folders = [file.rpartition("/")[0] for file in self.all_calls or self.calls]
        return sum(one != before for before, one in pairwise(folders))

    def report(self) -> Report:
        """Return what was noted, as plain values."""
        return {
            "files": self.files,
            "calls": self.calls,
            "num_calls": self.num_calls,
            "num_changes": self.num_changes,
        }


class Net(lw.Module):
    """Two layers; `before` and `after` are called around each training step with its number."""

    def __init__(self, before: Callable[[int], None] | None = None, after: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.before, self.after = before, after
        self.on_log: Callable[[int], None] | None = None
        self.on_start: Callable[[], None] | None = None

    def on_train_start(self) -> None:
        if self.on_start is not None:
            self.on_start()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.before is not None:
            self.before(batch_idx)
        loss: Tensor = self.net(batch[0]).square().mean()
        if self.on_log is not None:
            self.on_log(batch_idx)
            self.log("loss", loss)
        if self.after is not None:
            self.after(batch_idx)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Collected(lw.Logger):
    """Stops a walk at the first row."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk

    @property
    def name(self) -> str:
        return "walk"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        self.walk.stop()

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Keep nothing."""


def data() -> DataLoader[tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4, shuffle=True)


def trainer(**arguments: object) -> lw.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    settings = {"max_steps": 6, "enable_model_summary": False, "log_every_n_steps": 1, **quiet, **arguments}
    return lw.Trainer(**settings)  # type: ignore[arg-type]  # keywords by name, for walks that differ in few


def walk_batch() -> Walk:
    walk = Walk()

    def before(step: int) -> None:
        if step == 4:
            walk.stop()

    def after(step: int) -> None:
        if step == 3:
            walk.start()

    trainer().fit(Net(before, after), data())
    return walk


def walk_log() -> Walk:
    walk = Walk()
    module = Net()
    module.on_log = lambda step: walk.start() if step == 3 else None
    with tempfile.TemporaryDirectory() as folder:
        late = Collected(walk)
        trainer(logger=late, log_every_n_steps=4, default_root_dir=folder).fit(module, data())
    return walk


def walk_fsdp() -> Walk:
    made, fitted = Walk(), {}
    for strategy in ("ddp", "fsdp"):
        if strategy == "fsdp":
            made.start()
        own = trainer(strategy=strategy, devices=2)
        if strategy == "fsdp":
            made.stop()
        walk = fitted[strategy] = Walk()
        module = Net(before=lambda step, walk=walk: walk.stop())  # type: ignore[misc]
        walk.start()
        own.fit(module, data())
    rest = fitted["fsdp"].without(fitted["ddp"])
    made.files += [file for file in rest.files if file not in made.files]
    made.calls += rest.calls
    return made


def walk_start(ckpt_path: str | None = None) -> Walk:
    walk, own, module = Walk(), trainer(max_steps=4), Net()
    module.on_start, batches = walk.stop, data()
    walk.start()
    own.fit(module, batches, ckpt_path=ckpt_path)
    return walk


def walk_ckpt_path() -> Walk:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "a.ckpt"))
        saver = trainer(max_steps=2)
        saver.fit(Net(), data())
        saver.save_checkpoint(path)
        restored = walk_start(path)
        rest = restored.without(walk_start())
    rest.num_calls, rest.all_calls = restored.num_calls, restored.calls
    return rest


def walk_exception() -> Walk:
    walk = Walk()

    def before(step: int) -> None:
        if step == 1 and os.environ["RANK"] == "1":
            walk.start()
            raise ValueError("the fault of this walk")

    try:
        trainer(strategy="ddp", devices=2).fit(Net(before), data())
    except ValueError:
        walk.stop()
    return walk


WALKS: dict[str, Callable[[], Walk]] = {
    "batch": walk_batch,
    "log": walk_log,
    "fsdp": walk_fsdp,
    "start": walk_start,
    "ckpt_path": walk_ckpt_path,
    "exception": walk_exception,
}
OF_RANKS = {"fsdp": 0, "exception": 1}  # walk -> the rank that is looked at


def run(name: str) -> Report:
    """Return the report of a walk, made in one process, or in two that torch's variables describe."""
    size = 2 if name in OF_RANKS else 1
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        processes = []
        for rank in range(size):
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "WALK_REPORT": str(Path(folder, f"{rank}.json"))}
            if size > 1:
                variables.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
                variables.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            command = [sys.executable, __file__, "--run", name]
            processes.append(
                subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )
        errors = [process.communicate()[1].decode() for process in processes]
        file = Path(folder, f"{OF_RANKS.get(name, 0)}.json")
        if not file.exists():
            sys.exit(f"the walk {name} did not end:\n" + "\n".join(errors))
        report: Report = json.loads(file.read_text())
    return report


def room(file: str) -> str:
    return file.partition("/")[0]


def returns(calls: list[str]) -> int:
    """Return how often a walk enters a folder at the top level that it has been in before."""
    rooms = [room(file) for file in calls]
    entered = [one for one, last in zip(rooms, ["", *rooms], strict=False) if one != last]
    return len(entered) - len(set(entered))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"of {', '.join(WALKS)}; default: all")
    parser.add_argument("--run", choices=WALKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        walk = Walk()

        def write() -> None:
            Path(os.environ["WALK_REPORT"]).write_text(json.dumps(walk.report()))

        atexit.register(write)
        walk = WALKS[given.run]()
        return
    print("| walk | files | folders | entered again | calls | changes of folder | files in order |")
    print("|---|---|---|---|---|---|---|")
    for name in given.walks or WALKS:
        found = run(name)
        rooms = {room(file) for file in found["files"]}
        listed = ", ".join(found["files"])
        counts = (len(found["files"]), len(rooms), returns(found["calls"]), found["num_calls"], found["num_changes"])
        print(f"| {name} | {' | '.join(map(str, counts))} | {listed} |")


if __name__ == "__main__":
    main()
