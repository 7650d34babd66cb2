"""States of tensor subclasses on two ranks: resumed bit for bit, or refused in the first step."""

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

# Any in this file: arguments of a Trainer, and tensors that may be sharded.


class Even(Net):
    """All its parameters have two rows, or a multiple."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1].expand(-1, 2))


def fit(engine: Any, max_steps: int, kind: type[Net] = Even, **kwargs: Any) -> lw.Trainer:
    path = kwargs.pop("ckpt_path", None)
    trainer = quiet(strategy=engine, devices=2, max_steps=max_steps, max_epochs=-1, **kwargs)
    trainer.fit(net(kind, RoundedMomentum), loader(16), ckpt_path=path)
    return trainer


def full(value: Any) -> list[float]:
    tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.values().tolist() if isinstance(tensor, Rounded) else tensor.tolist()  # type: ignore[no-any-return]


def found(trainer: lw.Trainer) -> list[list[float]]:
    momenta = [state["momentum"] for state in trainer.optimizers[0].state.values()]
    assert all(type(getattr(one, "_local_tensor", one)) is Rounded for one in momenta)
    return [full(one) for one in [*trainer.lightning_module.parameters(), *momenta]]


def strategy(name: str) -> Any:
    return "ddp" if name == "ddp" else lw.FSDPStrategy(state_dict_type=name)


def on_ranks(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch.serialization.add_safe_globals([Rounded])
    results: dict[str, Any] = {}
    for name in ("ddp", "full", "sharded"):
        path = f"{folder}/{name}.ckpt"
        fit(strategy(name), 3).save_checkpoint(path)
        results[name] = [found(fit(strategy(name), 7)), found(fit(strategy(name), 7, ckpt_path=path))]
    results["ddp, resumed by fsdp"] = found(fit("fsdp", 7, ckpt_path=f"{folder}/ddp.ckpt"))
    results["fsdp, resumed by ddp"] = found(fit("ddp", 7, ckpt_path=f"{folder}/full.ckpt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit("fsdp", 1, Net)  # one output on two ranks
    results["warned"] = [str(one.message) for one in caught if "RoundedMomentum" in str(one.message)]
    with pytest.raises(CheckpointError, match=r"(?s)RoundedMomentum.*rounded_states\.Rounded.*ddp"):
        fit("fsdp", 1, Net, enable_checkpointing=True, callbacks=[lw.ModelCheckpoint(folder)])
    return results


def test_they_are_resumed_bit_for_bit_and_uneven_shards_are_refused_in_the_first_step(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path), connect=False)
    for one in (first, second):
        for name in ("ddp", "full", "sharded"):
            once, resumed = one[name]
            assert once == resumed
    # A mean of gradients over ranks is the same sum in ddp and fsdp.
    assert first["ddp, resumed by fsdp"] == first["full"][0]
    assert first["fsdp, resumed by ddp"] == first["ddp"][0]
    assert len(first["warned"]) == 1
    assert "Checkpoints with optimizer states will fail" in first["warned"][0]
    assert not [*tmp_path.glob("epoch*")]
