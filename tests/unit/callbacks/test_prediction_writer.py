"""BasePredictionWriter: what is written, with which indices, once or for each batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from toys import ValidatedNet, loader, net, pairs, quiet

from loopwright.callbacks import BasePredictionWriter
from loopwright.errors import ConfigError, ModuleError


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path, interval: Any) -> None:
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *where: Any
    ) -> None:
        batch, batch_idx, dataloader_idx = where
        content = {"prediction": prediction, "indices": batch_indices, "x": batch[0]}
        torch.save(content, self.folder / f"{dataloader_idx}-{batch_idx}.pt")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save({"predictions": predictions, "indices": batch_indices}, self.folder / "all.pt")


def read(folder: Path) -> dict[str, Any]:
    return {path.stem: torch.load(path) for path in sorted(folder.glob("*.pt"))}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_each_batch_comes_with_the_samples_that_it_has(tmp_path: Path, workers: dict[str, Any]) -> None:
    module, data = net(ValidatedNet), pairs(7)
    shuffled = DataLoader(data, batch_size=2, shuffle=True, **workers)
    done = quiet(callbacks=[Writer(tmp_path, "batch")]).predict(module, shuffled, return_predictions=False)
    assert done is None
    written = read(tmp_path)
    assert list(written) == ["0-0", "0-1", "0-2", "0-3"]
    assert sorted(index for one in written.values() for index in one["indices"]) == list(range(7))
    for one in written.values():
        assert torch.equal(one["x"], data.tensors[0][one["indices"]])
        assert torch.equal(one["prediction"], module(one["x"]))
    assert "IndexRecord" not in type(shuffled.batch_sampler).__name__  # the user's loader is left alone


def test_the_epoch_is_written_at_its_end_beside_what_is_returned(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[Writer(tmp_path, "epoch")])
    returned = trainer.predict(net(ValidatedNet), loader(5, 2))
    written = read(tmp_path)
    assert list(written) == ["all"]
    assert all(torch.equal(a, b) for a, b in zip(written["all"]["predictions"], returned or [], strict=True))
    assert written["all"]["indices"] == [[[0, 1], [2, 3], [4]]]


def test_several_loaders_and_a_limit(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[Writer(tmp_path, "batch_and_epoch")], limit_predict_batches=2)
    module = net(ValidatedNet)
    module.predict_step = lambda batch, batch_idx, dataloader_idx: module(batch[0])
    one_by_one = DataLoader(pairs(3), batch_size=None, sampler=SequentialSampler(range(3)))
    own = DataLoader(pairs(6), batch_sampler=BatchSampler([5, 3, 1], 2, drop_last=False))
    trainer.predict(module, [own, one_by_one])
    written = read(tmp_path)
    assert list(written) == ["0-0", "0-1", "1-0", "1-1", "all"]
    assert written["all"]["indices"] == [[[5, 3], [1]], [[0], [1]]]
    assert [len(one) for one in written["all"]["predictions"]] == [2, 2]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(pairs(4))


@pytest.mark.parametrize("data", [DataLoader(Stream(), batch_size=2), [pairs(2)[:]] * 2])
def test_indices_that_nobody_knows_are_none(tmp_path: Path, data: Any) -> None:
    quiet(callbacks=[Writer(tmp_path, "batch_and_epoch")]).predict(net(ValidatedNet), data)
    written = read(tmp_path)
    assert written["0-0"]["indices"] is None
    assert written["all"]["indices"] == [[None, None]]


def test_two_writers_and_a_second_prediction_keep_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    trainer = quiet(callbacks=[Writer(folder, "epoch") for folder in folders])
    data = loader(4, 2, shuffle=True)
    for _ in range(2):
        trainer.predict(net(ValidatedNet), data)
    first, second = map(read, folders)
    assert first["all"]["indices"] == second["all"]["indices"]
    assert sorted(index for batch in first["all"]["indices"][0] for index in batch) == [0, 1, 2, 3]


def test_a_wrong_interval_and_a_missing_method_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write_interval='step', expected one of \['batch'"):
        Writer(tmp_path, "step")

    class Half(BasePredictionWriter):
        def write_on_batch_end(self, *args: Any) -> None: ...

    with pytest.raises(ModuleError, match="calls write_on_epoch_end, which it does not define"):
        quiet(callbacks=[Half("batch_and_epoch")]).predict(net(ValidatedNet), loader())
