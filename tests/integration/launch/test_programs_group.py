"""The program connects the ranks itself, before the Trainer or Fabric: nothing is less than with our own group."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from broken_ranks import Ended, Ranks
from ranks import run_ranks
from torch.distributed import distributed_c10d
from toys import Net, loader

import loopwright as lw
from loopwright.callbacks import Callback
from loopwright.fabric.launch import InProcessLauncher
from loopwright.fabric.watch.shared import watch_over
from loopwright.strategies import DDPStrategy, Strategy
from loopwright.strategies.base import Topology
from loopwright.strategies.distributed import rendezvous

MADE_BY = ["env", "file", "mesh", "no store", "ours"]


def make_group(made_by: str, rank: int, size: int, folder: str) -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the test's process hosts the store
    if made_by == "env":
        dist.init_process_group("gloo")
    elif made_by == "mesh":
        dist.init_device_mesh("cpu", (size,))
    elif made_by != "ours":
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        if made_by == "no store":  # as with MPI, which builds of torch from PyPI do not have
            distributed_c10d._get_default_store = lambda: None  # type: ignore[assignment, return-value]


class WithState(DDPStrategy):
    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self.gather_objects(self.global_rank)}


class OwnNumbers(Callback):
    """Each rank draws its own dropout."""

    def on_train_start(self, trainer: lw.Trainer, pl_module: Any) -> None:
        if trainer.global_step == 0:
            torch.manual_seed(trainer.global_rank)


def fit(folder: str, until: int, ckpt_path: str | None = None, *callbacks: Callback) -> tuple[lw.Trainer, Net]:
    lw.seed_everything(3)
    net = Net(dropout=0.5)
    trainer = lw.Trainer(
        max_steps=until, accelerator="cpu", strategy=WithState(), devices=2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, default_root_dir=folder,
        callbacks=[OwnNumbers(), *callbacks],
    )  # fmt: skip
    trainer.fit(net, loader(64, 4, shuffle=True), ckpt_path=ckpt_path)
    return trainer, net


class StopOn(Callback):
    """One rank asks for the end."""

    def on_train_batch_end(self, trainer: lw.Trainer, pl_module: Any, *args: object) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            trainer.should_stop = True


def _program(rank: int, size: int, folder: str, made_by: str) -> tuple[bool, list[int], bool]:
    make_group(made_by, rank, size, folder)
    path = f"{folder}/half.ckpt"
    _, whole = fit(folder, 12)
    trainer, _ = fit(folder, 5)  # of 8 steps in an epoch
    trainer.save_checkpoint(path)
    _, resumed = fit(folder, 12, path)
    is_equal = all(map(torch.equal, whole.parameters(), resumed.parameters()))
    stopped, _ = fit(folder, 12, None, StopOn())
    steps = stopped.strategy.gather_objects(stopped.global_step)
    if made_by != "ours":
        rendezvous.disconnect()  # what the interpreter's end calls
    return is_equal, steps, dist.is_initialized()


@pytest.mark.parametrize("made_by", MADE_BY)
def test_resume_is_exact_and_the_file_has_what_belongs_to_each_rank(tmp_path: Path, made_by: str) -> None:
    for is_equal, steps, is_left in run_ranks(_program, 2, str(tmp_path), made_by, connect=False):
        assert is_equal
        assert steps[0] == steps[1] < 12
        assert is_left
    checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=False)
    own = checkpoint["loopwright"]
    assert len(own["rng_of_ranks"]) == 2
    assert own["progress"]["samples"] == 5 * 4 * 2
    assert own["strategy"] == {"ranks": [0, 1]}


def _killed(rank: int, size: int, store: Any, folder: str, made_by: str) -> None:
    if made_by == "env":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    else:
        make_group(made_by, rank, size, folder)

    class Killed(Callback):
        def on_train_batch_end(self, trainer: lw.Trainer, pl_module: Any, *args: object) -> None:
            if rank == 1 and trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    fit(folder, 12, None, Killed())


@pytest.mark.parametrize("made_by", ["env", "no store"])
def test_a_killed_rank_is_named(tmp_path: Path, made_by: str) -> None:
    ended: list[Ended] = Ranks(_killed, 2, str(tmp_path), made_by).wait()
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].code == 1
    assert "RankFailure: rank 1" in ended[0].said, ended[0].said


def _group_made_twice(rank: int, size: int) -> list[float]:
    base = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    totals = []
    for number in ("first", "second"):  # torch itself would read the addresses of the first again
        dist.init_process_group("gloo", store=dist.PrefixStore(number, base), rank=rank, world_size=size)
        fabric = lw.Fabric(accelerator="cpu", devices=size)
        fabric.launch()
        watch = fabric.watch
        assert watch is not None
        totals.append(float(fabric.all_reduce(torch.ones(()), reduce_op="sum")))
        dist.destroy_process_group()
    fabric = lw.Fabric(accelerator="cpu", devices=size)  # it makes a group of its own
    fabric.launch()
    return [*totals, float(fabric.all_reduce(torch.ones(()), reduce_op="sum"))]


def test_a_group_that_the_program_makes_again_is_another_one_for_fabric_too() -> None:
    assert run_ranks(_group_made_twice, 2, connect=False) == [[2.0] * 3] * 2


class Collective(Strategy):
    """Ranks that communicate without torch.distributed; here with nobody."""

    topology = Topology(global_rank=0, world_size=2)


def test_ranks_without_a_store_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert watch_over(Collective(), InProcessLauncher()) is None
    assert "if one fails, the others wait" in caplog.text
