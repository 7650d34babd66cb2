"""`Sentinel(on_difference="rollback")`: the run continues, with the same bits as without the fault."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import loopwright as lw
from loopwright.loggers import CSVLogger


class Net(lw.Module):
    """Flips a bit of a weight on one rank before some steps, of a gradient in negative ones, or computes it wrongly."""

    def __init__(self, flips: tuple[int, ...] = (), wrong: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.flips, self.wrong = [*flips], [*wrong]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.flip(self.global_step, self.model[0].weight.detach())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.flip(-self.global_step, self.model[0].weight.grad)

    def flip(self, step: int, tensor: Any) -> None:
        if step in self.flips:
            self.flips.remove(step)
            if self.global_rank == self.trainer.world_size - 1:
                tensor.view(torch.int32).reshape(-1)[-1] ^= 1 << 12

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.global_step in self.wrong:
            self.wrong.remove(self.global_step)
            loss.register_hook(lambda gradient: gradient * 1.25)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Dies(lw.Callback):
    """Is killed in the step after the rollback, on every rank."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (self.root / "rollbacks.json").exists():
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: Path, size: int, net: Net, *callbacks: Any, saves: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(1)
    data = DataLoader(torch.randn(20 * size, 4), batch_size=2, shuffle=True)
    ckpt_path = arguments.pop("ckpt_path", None)
    saves = saves or lw.ModelCheckpoint(root / "checkpoints", every_n_train_steps=3, save_top_k=-1)
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, default_root_dir=root, callbacks=[*callbacks, saves], max_epochs=2,
        logger=CSVLogger(root, name="log", version=0), log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, **arguments,
    )  # fmt: skip
    trainer.fit(net, data, ckpt_path=ckpt_path)
    states = [one.tolist() for state in trainer.optimizers[0].state_dict()["state"].values() for one in state.values()]
    weights = {name: one.tolist() for name, one in trainer.full_state_dict(net).items()}
    return trainer.global_step, weights, states, torch.rand(2).tolist()


def rows(root: Path) -> str:
    return (root / "log" / "version_0" / "metrics.csv").read_text()


def files(root: Path) -> list[str]:
    return sorted(one.name for one in (root / "checkpoints").iterdir() if not one.name.endswith(".abandoned"))


def entries(root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((root / "rollbacks.json").read_text())
    return found


def both(rank: int, size: int, root: Path, strategy: str, flips: tuple[int, ...]) -> Any:
    sentinel = lw.Sentinel(every=4, on_difference="rollback")
    plain = train(root / "plain", size, Net(), strategy=strategy)
    return plain, train(root / "flipped", size, Net(flips), sentinel, strategy=strategy)


@pytest.mark.parametrize("flips", [(4,), (19,), (-9,), (-19,), (5, 13)])
def test_replicas_go_back_to_a_checkpoint_that_was_compared(flips: tuple[int, ...], tmp_path: Path) -> None:
    for plain, flipped in run_ranks(both, 2, tmp_path, "ddp", flips, connect=False):
        assert flipped == plain
    assert rows(tmp_path / "flipped") == rows(tmp_path / "plain")
    assert files(tmp_path / "flipped") == files(tmp_path / "plain")
    found = entries(tmp_path / "flipped")
    assert len(found) == len(flips)
    assert "rank" in found[0]["reason"]
    assert "model.0.weight" in found[0]["reason"]


def again(rank: int, size: int, root: Path) -> str:
    sentinel = lw.Sentinel(every=4, on_difference="rollback")
    with pytest.raises(lw.SentinelError) as caught:
        train(root, size, Net((4, 9)), sentinel, strategy="ddp")
    return str(caught.value)


def test_the_same_rank_a_second_time_stops_the_run_and_is_named(tmp_path: Path) -> None:
    texts = run_ranks(again, 3, tmp_path, connect=False)
    assert len(set(texts)) == 1
    assert "It is not the first time on rank 2" in texts[0]


def test_a_wrong_gradient_goes_back_behind_the_last_step_that_was_run_twice(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", 1, Net())
    sentinel = lw.Sentinel(replay_every=5, on_difference="rollback")
    assert train(tmp_path / "wrong", 1, Net(wrong=(9,)), sentinel) == plain
    assert rows(tmp_path / "wrong") == rows(tmp_path / "plain")
    assert files(tmp_path / "wrong") == files(tmp_path / "plain")
    (entry,) = entries(tmp_path / "wrong")
    assert (entry["step"], entry["to_step"], entry["kind"]) == (10, 3, "played step")  # 5 was run twice
    assert [Path(one).name for one in entry["abandoned"]] != []


def test_without_a_checkpoint_from_before_the_error_says_what_to_keep(tmp_path: Path) -> None:
    saves = lw.ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3)
    sentinel = lw.Sentinel(replay_every=5, on_difference="rollback")
    with pytest.raises(lw.SentinelError, match=r"no full checkpoint up to step 5 is left.*keep_last="):
        train(tmp_path, 1, Net(wrong=(9,)), sentinel, saves=saves)


def killed(root: Path, is_async: bool) -> None:
    torch.set_num_threads(1)
    plugins = [lw.AsyncCheckpointIO()] if is_async else None
    saves = lw.ModelCheckpoint(root / "checkpoints", every_n_train_steps=3, save_top_k=-1, save_last=True)
    sentinel = lw.Sentinel(replay_every=5, on_difference="rollback")
    train(root, 1, Net(wrong=(9,)), sentinel, Dies(root), saves=saves, plugins=plugins)


@pytest.mark.parametrize("is_async", [False, True])
def test_killed_right_after_the_rollback_the_run_takes_no_abandoned_checkpoint(is_async: bool, tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(tmp_path / "killed", is_async))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left = tmp_path / "killed" / "checkpoints"
    assert {one.name for one in left.iterdir()} >= {"epoch=0-step=6.ckpt.abandoned", "epoch=0-step=9.ckpt.abandoned"}
    # As if it had been killed even before it had renamed one.
    (left / "epoch=0-step=9.ckpt.abandoned").rename(left / "epoch=0-step=9.ckpt")
    sentinel = lw.Sentinel(replay_every=5, on_difference="rollback")
    saves = [lw.ModelCheckpoint(tmp_path / name / "checkpoints", every_n_train_steps=3, save_top_k=-1, save_last=True)
             for name in ("killed", "plain")]  # fmt: skip
    step, weights, states, _ = train(tmp_path / "killed", 1, Net(), sentinel, saves=saves[0], ckpt_path="last")
    plain = train(tmp_path / "plain", 1, Net(), saves=saves[1])
    assert (step, weights, states) == plain[:3]
    assert rows(tmp_path / "killed") == rows(tmp_path / "plain")
    assert files(tmp_path / "killed") == files(tmp_path / "plain")
