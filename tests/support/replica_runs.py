"""Runs of tests/integration/torchft/train.py as replica groups, in processes of their own.

LOOPWRIGHT_KILLS raises the number of kills of each kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

coordination = pytest.importorskip("torchft.coordination")

PROGRAM = Path(__file__).parents[1] / "integration" / "torchft" / "train.py"
NUM_KILLS = int(os.environ.get("LOOPWRIGHT_KILLS", "1"))
PATIENCE_S = 120.0


class Groups:
    """Runs of the program, each a replica group, in processes of their own."""

    def __init__(self, folder: Path, count: int, **config: Any) -> None:
        self.folder, self.config, self.count = folder, config, count
        self.lighthouse = coordination.LighthouseServer(
            bind="[::]:0",
            min_replicas=config.get("needed", 1),
            join_timeout_ms=2000,
            heartbeat_timeout_ms=1000,
            quorum_tick_ms=20,
        )
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.died_at: list[float] = []

    def start(self, group: int) -> None:
        environment = {
            **os.environ, "TORCHFT_LIGHTHOUSE": self.lighthouse.address(), "REPLICA_GROUP_ID": str(group),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        (self.folder / f"died-{group}").unlink(missing_ok=True)
        with open(self.folder / f"log-{group}.txt", "ab") as log:
            command = [sys.executable, str(PROGRAM), str(self.folder), json.dumps(self.config)]
            self.running[group] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def steps(self, group: int) -> list[dict[str, float]]:
        path = self.folder / f"steps-{group}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, what: str, is_there: Any) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_there():
            for group, process in self.running.items():
                if process.poll() not in (None, 0, -signal.SIGKILL) and not (self.folder / f"died-{group}").exists():
                    raise AssertionError(f"group {group} failed:\n{(self.folder / f'log-{group}.txt').read_text()}")
            assert time.monotonic() < until, f"waited for {what}"
            time.sleep(0.01)

    def wait_for_steps(self, group: int, more: int) -> None:
        seen = len(self.steps(group))
        self.wait_for(f"{more} steps of group {group}", lambda: len(self.steps(group)) >= seen + more)

    def kill(self, groups: Sequence[int], place: str, *, rank: int = 0) -> None:
        """Let groups die at a place; return when they are dead."""
        (self.folder / "turn.new").write_text("".join(f"{group}-{rank} {place}\n" for group in groups))
        (self.folder / "turn.new").rename(self.folder / "turn")
        for group in groups:
            self.wait_for(
                f"the end of group {group} in {place}", lambda group=group: self.running[group].poll() is not None
            )
        self.died_at.append(time.time())
        (self.folder / "turn").unlink()

    def end(self) -> dict[int, dict[str, Any]]:
        """Let all groups stop at the same step, and return what they have then."""
        latest = max(self.steps(group)[-1]["step"] for group in self.running)
        self.stop = int(latest) // 5 * 5 + 40  # where a checkpoint is saved
        (self.folder / "stop.new").write_text(str(self.stop))
        (self.folder / "stop.new").rename(self.folder / "stop")
        self.wait_for("the end", lambda: all(one.poll() is not None for one in self.running.values()))
        assert {one.returncode for one in self.running.values()} == {0}, (self.folder / "log-0.txt").read_text()
        return {group: torch.load(self.folder / f"end-{group}.pt", weights_only=False) for group in self.running}

    def reference(self) -> dict[str, Any]:
        """Return what one process has that no one disturbs, without torchft."""
        config = {**self.config, "max_steps": self.stop, "sleep_s": 0.0}
        environment = {name: value for name, value in os.environ.items() if name != "REPLICA_GROUP_ID"}
        command = [sys.executable, str(PROGRAM), str(self.folder), json.dumps(config)]
        (self.folder / "stop").unlink()
        subprocess.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        found: dict[str, Any] = torch.load(self.folder / "end-reference.pt", weights_only=False)
        return found

    def undisturbed(self) -> dict[str, Any]:
        """Return what one group has that no one disturbs, for random numbers that belong to micro-batches."""
        shutil.rmtree(self.folder / "files")
        self.running.clear()
        (self.folder / "stop").unlink()
        self.config = {**self.config, "max_steps": self.stop, "sleep_s": 0.0}
        self.start(0)
        self.wait_for("one group", lambda: self.running[0].poll() is not None)
        found: dict[str, Any] = torch.load(self.folder / "end-0.pt", weights_only=False)
        return found


@contextlib.contextmanager
def replica_groups(folder: Path, count: int, **config: Any) -> Iterator[Groups]:
    groups = Groups(folder, count, **config)
    try:
        for group in range(count):
            groups.start(group)
            if config.get("differs"):  # then group 0 must make the first step, which all others heal from
                groups.wait_for(f"a step of group {group}", lambda group=group: groups.steps(group))
        for group in range(count):
            groups.wait_for_steps(group, 3)
        yield groups
    finally:
        for process in groups.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        groups.lighthouse.shutdown()


def differences(one: Any, other: Any, path: str = "", *, within: float = 0.0) -> list[str]:
    if isinstance(one, dict):
        found = [f"{path}: {one.keys() ^ other.keys()}"] if one.keys() != other.keys() else []
        return found + [
            line
            for key in one
            if key in other
            for line in differences(one[key], other[key], f"{path}/{key}", within=within)
        ]
    if isinstance(one, torch.Tensor):
        largest = float((one.double() - other.double()).abs().max())
        return [f"{path}: {largest}"] if not largest <= within else []
    return [f"{path}: {one} and {other}"] if one != other else []


def check_samples(groups: Groups) -> None:
    """Each micro-batch of a step that was made was read in one order by all; each sample of an epoch counts once."""
    used: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for path in groups.folder.glob("read-[0-9]*.jsonl"):
        for line in path.read_text().split("\n")[:-1]:
            row = json.loads(line)
            used.setdefault((row["epoch"], row["batch"]), set()).add(tuple(row["ids"]))
    assert all(len(ids) == 1 for ids in used.values()), "a micro-batch was read with other samples"
    last = max(epoch for epoch, _ in used)
    for epoch in range(last):
        ids = sorted(one for (of, _), found in used.items() if of == epoch for one in next(iter(found)))
        assert ids == list(range(96)), f"epoch {epoch}"
