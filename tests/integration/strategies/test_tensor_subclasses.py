"""States of tensor subclasses on two ranks: ddp resumes them bit for bit, fsdp says early that it cannot save them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rounded_states import Rounded, RoundedMomentum
from toys import Net, loader, net, quiet

import loopwright as lw
from loopwright.errors import CheckpointError

# Any in this file: arguments of a Trainer.


def fit(strategy: str, max_steps: int, **kwargs: Any) -> lw.Trainer:
    trainer = quiet(strategy=strategy, devices=2, max_steps=max_steps, max_epochs=-1)
    trainer.fit(net(Net, RoundedMomentum), loader(16), **kwargs)
    return trainer


def on_ranks(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch.serialization.add_safe_globals([Rounded])
    path = f"{folder}/x.ckpt"
    fit("ddp", 3).save_checkpoint(path)
    ddp = [
        [one.tolist() for one in trainer.lightning_module.parameters()]
        for trainer in (fit("ddp", 7), fit("ddp", 7, ckpt_path=path))
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = fit("fsdp", 3)
    with pytest.raises(CheckpointError) as saved:
        sharded.save_checkpoint(f"{folder}/sharded.ckpt")
    with pytest.raises(CheckpointError) as resumed:
        fit("fsdp", 7, ckpt_path=path)
    early = [str(one.message) for one in caught if "RoundedMomentum" in str(one.message)]
    return {"ddp": ddp, "early": early, "saved": str(saved.value), "resumed": str(resumed.value)}


def test_ddp_resumes_them_and_fsdp_refuses_them(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path), connect=False)
    for found in (first, second):
        once, resumed = found["ddp"]
        assert once == resumed
        for refusal in (found["saved"], found["resumed"]):
            assert "RoundedMomentum" in refusal
            assert "rounded_states.Rounded" in refusal
            assert 'strategy="ddp"' in refusal
    assert len(first["early"]) == 1
    assert not second["early"]
    assert not (tmp_path / "sharded.ckpt").exists()
