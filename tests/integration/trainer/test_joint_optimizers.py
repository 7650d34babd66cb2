"""Several optimizers of one loss on two ranks: the weights of one process, also after resuming on another number."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_program import Joint, Program, SaveAt, fit, whole
from ranks import run_ranks
from torch import Tensor

from loopwright.strategies import DDPStrategy, FSDPStrategy

Weights = dict[str, Tensor]


class Orthogonal(Program):
    """Trains the matrices of the blocks by Muon, in its own step, and the rest by AdamW, with schedules."""

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        inner = [name for name, one in named.items() if one.ndim == 2 and ".blocks." in name]
        muon = torch.optim.Muon([named[name] for name in inner], lr=0.02)
        adamw = torch.optim.AdamW([one for name, one in named.items() if name not in inner], lr=1e-2)
        schedules = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.5, total_iters=5) for one in (muon, adamw)]
        return [muon, adamw], [{"scheduler": one, "interval": "step"} for one in schedules]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)


KINDS = {"joint": Joint, "orthogonal": Orthogonal}
STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={"Block"}, state_dict_type="full"),
}


def train(size: int, strategy: str, kind: str, **options: Any) -> Weights:
    made = "auto" if size == 1 else STRATEGIES[strategy]()
    trainer, module, _ = fit(made, size, module=KINDS[kind](), limit_val_batches=0, **options)
    assert len(trainer.optimizers) == 2
    return whole(module)


@cache
def alone(kind: str) -> Weights:
    return train(1, "", kind)


def on_ranks(rank: int, size: int, strategy: str, folder: str) -> dict[str, Weights]:
    found = {}
    for kind in KINDS:
        found[kind] = train(size, strategy, kind, callbacks=[SaveAt(2, f"{folder}/{kind}.ckpt")])
        found[f"{kind} from one process"] = train(size, strategy, kind, ckpt_path=f"{folder}/{kind}-1.ckpt")
    return found


def difference(ours: Weights, theirs: Weights) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_and_resume_as_one_process(strategy: str, tmp_path: Path) -> None:
    for kind in KINDS:
        train(1, "", kind, callbacks=[SaveAt(2, f"{tmp_path}/{kind}-1.ckpt")])
    first, second = run_ranks(on_ranks, 2, strategy, str(tmp_path), connect=False)
    for kind in KINDS:
        first[f"{kind} on one process"] = train(1, "", kind, ckpt_path=f"{tmp_path}/{kind}.ckpt")
    for name, found in first.items():
        wanted = alone(name.split()[0])
        # Sums are in another order. Muon rounds them to bfloat16, which has 8 bits, in steps of 0.02 and below.
        assert difference(found, wanted) < (1e-12 if name.startswith("joint") else 1e-3), name
        if "on one process" not in name:
            assert difference(second[name], found) == 0, name
