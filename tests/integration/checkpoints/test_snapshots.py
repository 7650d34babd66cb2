"""`Snapshot` on several ranks: parts of a node, all ranks or none, and other numbers of ranks."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from toys import Net, loader, net

import loopwright as lw

pytestmark = pytest.mark.slow


class Failing(Net):
    """Fails in a step on every rank; waits for copies, so that each step has its own."""

    fails_at = -1

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, 0.01), dropout=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for thread in threading.enumerate():
            if thread.name == "loopwright-checkpoint":
                thread.join()
        if self.trainer.global_step == self.fails_at:
            raise ZeroDivisionError
        return self.loss(batch)


class Start(lw.Callback):
    """Keeps the step at which training began."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step


def train(
    rank: int, size: int, folder: Path, strategy: str, fails_at: int = -1, num_nodes: int = 1, every: int = 5
) -> Any:
    """Return where the fit resumed, the weights at its end, and its warnings."""
    node = rank * num_nodes // size
    if num_nodes > 1:
        os.environ.update(NODE_RANK=str(node), LOCAL_RANK=str(rank % (size // num_nodes)))
    memory = folder / f"memory{node}"
    memory.mkdir(parents=True, exist_ok=True)
    module = net(Failing)
    module.fails_at = fails_at
    start = Start()
    lw.seed_everything(3, verbose=False)
    trainer = lw.Trainer(
        max_epochs=2, accelerator="cpu", devices=size // num_nodes, num_nodes=num_nodes, strategy=strategy,
        logger=False, enable_progress_bar=False, enable_model_summary=False, global_batch_size=8,
        callbacks=[
            start, lw.Snapshot(1, folder=memory), lw.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=every)
        ],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(64, 2, shuffle=True), ckpt_path="last")
        except ZeroDivisionError:
            return None
    return start.step, trainer.full_state_dict(module), [str(one.message) for one in caught]


def around(rank: int, size: int, folder: Path, strategy: str, num_nodes: int = 1, loses: int | None = None) -> Any:
    whole = train(rank, size, folder / "undisturbed", strategy, num_nodes=num_nodes)
    train(rank, size, folder / "run", strategy, fails_at=8, num_nodes=num_nodes)
    if loses is not None and rank == loses:
        shutil.rmtree(folder / "run" / f"memory{rank * num_nodes // size}")
    return whole, train(rank, size, folder / "run", strategy, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("strategy", "size", "num_nodes"),
    [("ddp", 2, 1), ("fsdp", 2, 1), ("ddp", 2, 2), ("fsdp", 2, 2), ("mesh:dp=2,fsdp=2", 4, 2)],
)  # fmt: skip
def test_ranks_continue_from_their_copies_bit_for_bit(tmp_path: Path, strategy: str, size: int, num_nodes: int) -> None:
    whole, resumed = run_ranks(around, size, tmp_path, strategy, num_nodes, connect=False)[0]
    assert resumed[0] == 8
    assert whole[1].keys() == resumed[1].keys()
    assert all(torch.equal(resumed[1][name], value) for name, value in whole[1].items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_node_without_its_part_lets_all_ranks_use_the_checkpoint(tmp_path: Path, strategy: str) -> None:
    whole, resumed = run_ranks(around, 2, tmp_path, strategy, 2, 1, connect=False)[0]
    assert resumed[0] == 5
    assert any("not every node has the copy of step 8" in line for line in resumed[2])
    assert all(torch.equal(resumed[1][name], value) for name, value in whole[1].items())


def fail(rank: int, size: int, folder: Path, strategy: str) -> Any:
    return train(rank, size, folder, strategy, fails_at=8)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_one_node_another_number_of_ranks_continues(tmp_path: Path, strategy: str) -> None:
    run_ranks(fail, 2, tmp_path, strategy, connect=False)
    step, weights, _ = train(0, 1, tmp_path, "auto")
    assert step == 8
    assert all(value.isfinite().all() for value in weights.values())


def test_copies_of_two_nodes_are_not_used_after_one_of_them_has_gone_back(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path, "fsdp", 8, 2, connect=False)
    assert sorted(path.name[:6] for path in tmp_path.rglob("memory*/*/*/*/*.ckpt")) == [
        "step=7",
        "step=7",
        "step=8",
        "step=8",
    ]
    # One node cannot use shards of two: from step 5, with a checkpoint at step 6 that is newer than the copies.
    assert run_ranks(train, 1, tmp_path, "fsdp", 7, 1, 6, connect=False) == [None]
    assert run_ranks(train, 2, tmp_path, "fsdp", -1, 2, connect=False)[0][0] == 6
