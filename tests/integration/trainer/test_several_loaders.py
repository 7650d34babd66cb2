"""Evaluation of several loaders on several ranks: every key under its loader, on all ranks, as in one process.

Loaders of different lengths, such that some ranks have no batch of a loader; keys that only some ranks or loaders log,
in another order on each rank; metric objects; every mode of a combined loader.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torchmetrics
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw

# Any in this file: batches, loaders, and results that travel between processes.


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(1, 1).double()
        self.shared = torchmetrics.MeanMetric()
        self.each = nn.ModuleList(torchmetrics.SumMetric() for _ in range(4))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        # With a combined loader, a batch of each member, or None where one has ended.
        x = batch[0] if isinstance(batch[0], Tensor) else torch.cat([one[0] for one in batch if one is not None])
        keys: dict[str, Tensor] = {"mean": x.mean(), "error": self.net(x).square().mean()}
        # In another order on each rank, and some only where the data say so.
        for key in sorted(keys, reverse=bool(self.trainer.global_rank)):
            self.log(key, keys[key], batch_size=len(x))
        self.log("of all", x.mean(), add_dataloader_idx=False, batch_size=len(x))
        if x.max() > 4:
            self.log("large", x.max(), reduce_fx="max")
            self.log("largest", x.max(), reduce_fx="max", add_dataloader_idx=False)
        if dataloader_idx == 1:
            self.log("second alone", x.sum(), reduce_fx="sum", add_dataloader_idx=False)
        self.shared.update(x)
        self.log("object", self.shared, add_dataloader_idx=False)
        self.each[dataloader_idx].update(x)  # type: ignore[operator]  # a metric
        self.log("own object", self.each[dataloader_idx])

    def on_validation_epoch_end(self) -> None:
        self.log("end", 7.0)

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return dataloader_idx, batch[0].flatten().tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loaders(*counts: int) -> list[DataLoader[Any]]:
    """Return loaders of whole numbers, of which each loader has others; two in a batch."""
    samples = [torch.arange(count, dtype=torch.float64).unsqueeze(1) + number for number, count in enumerate(counts)]
    return [DataLoader(TensorDataset(one), batch_size=2) for one in samples]


CASES: dict[str, Any] = {
    "longer and shorter": lambda: loaders(7, 1, 4),
    "one batch each": lambda: loaders(2, 2, 2),
    "one that is empty": lambda: loaders(6, 0, 3),
    "by name": lambda: dict(zip("ab", loaders(3, 9), strict=True)),
    "sequential": lambda: lw.CombinedLoader(loaders(5, 2), "sequential"),
    "min_size": lambda: lw.CombinedLoader(loaders(5, 4), "min_size"),
    "max_size": lambda: lw.CombinedLoader(loaders(5, 4), "max_size"),
}


def evaluate(name: str, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, make in CASES.items():
        module = Net()
        saving = lw.ModelCheckpoint(os.environ["FOLDER"], monitor="mean/dataloader_idx_1", save_top_k=1)
        trainer = lw.Trainer(
            accelerator="cpu", devices=size, strategy=name, logger=False, enable_progress_bar=False, max_epochs=1,
            enable_model_summary=False, callbacks=[saving] if case == "longer and shorter" else None,
            enable_checkpointing=case == "longer and shorter", precision="64-true",
        )  # fmt: skip
        data = make()
        results = trainer.validate(module, data, verbose=False)
        found[case] = {
            "results": results,
            "keys": sorted(trainer.callback_metrics),
            "tested": [sorted(one) for one in trainer.test(module, data, verbose=False)],
            "predicted": None if case in ("min_size", "max_size") else trainer.predict(module, data),
        }
        if case == "longer and shorter":
            trainer.fit(module, loaders(8)[0], data)
            found[case]["monitored"] = float(saving.best_model_score)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("name", "size"), [("ddp", 2), ("fsdp", 2), ("ddp", 3)])
def test_keys_lie_under_their_loaders_on_every_rank_as_in_one_process(
    name: str, size: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    alone = evaluate("auto", 1)
    everywhere = run_ranks(lambda rank, size: evaluate(name, size), size, connect=False)
    for rank, found in enumerate(everywhere):
        for case, expected in alone.items():
            got = found[case]
            assert got.keys() == expected.keys()
            assert len(got["results"]) == len(expected["results"])
            for index, (mine, theirs) in enumerate(zip(got["results"], expected["results"], strict=True)):
                # Sums over ranks are added in another order, in float64.
                assert mine == pytest.approx(theirs, rel=1e-12), (rank, case, index)
            for what in ("keys", "tested", "predicted"):
                assert got[what] == expected[what], (rank, case, what)
            assert got.get("monitored") == pytest.approx(expected.get("monitored"))
        assert str(found) == str(everywhere[0]), rank  # to the last bit, and in the same order
    first = alone["longer and shorter"]["results"]
    assert "second alone" in first[1]
    assert "second alone" not in first[0]
    assert {"of all", "object", "end"} <= set(first[2])
