"""Windows that continue in the next epoch, on several ranks: the weights of one process, and exact resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from toys import Net, loader, momentum, net, quiet

import loopwright as lw
from loopwright.callbacks import ModelCheckpoint
from loopwright.strategies.ddp.strategy import DDPStrategy
from loopwright.strategies.fsdp.strategy import FSDPStrategy

# The same sums in float32, added up in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


class Weighted(Net):
    """A sum whose weight differs by batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = (self.net(batch[0]) - batch[1]).square()
        weights = (batch[0][:, :1] > 0).float() + 0.5
        return lw.Loss((losses * weights).sum(), weights.sum())


def trained(
    rank: int, size: int, kind: type[Net], strategy: str, folder: str | None = None, resume: str | None = None
) -> Any:
    """Return steps and weights of three epochs of five global batches, in windows of four."""
    chosen: Any = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[strategy]() if size > 1 else "auto"
    callbacks = [] if folder is None else [ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")]
    trainer = quiet(
        devices=size, strategy=chosen, max_epochs=3, accumulate_grad_batches=4, accumulate_across_epochs=True,
        enable_checkpointing=bool(callbacks), callbacks=callbacks,
    )  # fmt: skip
    module = net(kind, momentum)
    trainer.fit(module, loader(20, 4 // size), ckpt_path=resume)
    state: dict[str, Tensor] = trainer.strategy.gather_state(trainer.strategy.module_state_dict(module))
    return trainer.global_step, {name: value.clone() for name, value in state.items() if value is not None}


def both(rank: int, size: int, strategy: str, folder: str) -> list[Any]:
    results = []
    for kind in (Net, Weighted):
        place = f"{folder}/{kind.__name__}"
        results.append(trained(rank, size, kind, strategy, folder=place))
        results.append(trained(rank, size, kind, strategy, resume=f"{place}/epoch=0.ckpt"))
        results.append(trained(rank, size, kind, strategy, resume=f"{place}/epoch=1.ckpt"))
    return results


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_weights_are_those_of_one_process_and_resumes_are_exact(strategy: str, tmp_path: Path) -> None:
    alone = [trained(0, 1, kind, strategy) for kind in (Net, Weighted)]
    result = run_ranks(both, 2, strategy, str(tmp_path), connect=False, timeout_s=120)[0]
    for number, (steps, weights) in enumerate(alone):
        whole, *resumed = result[3 * number : 3 * number + 3]
        assert [one[0] for one in (whole, *resumed)] == [steps] * 3 == [4] * 3
        for name, value in weights.items():
            torch.testing.assert_close(whole[1][name], value, **TOLERANCE)
            assert all(torch.equal(one[1][name], whole[1][name]) for one in resumed), name
