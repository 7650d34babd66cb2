"""Streaming data sets of other packages: a resumed run sees the samples of an uninterrupted one, each once."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from apart import add_apart_to_path

import loopwright as lw

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # of webdataset, where a pass is not read up
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the same in generators
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # of mosaicml-streaming, for tiny shards
]

NUM_SAMPLES, BATCH_SIZE = 24, 4


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    add_apart_to_path(monkeypatch)
    # The data sets of pictures import torchvision, which needs the CUDA build of torch; none is used here.
    monkeypatch.setitem(sys.modules, "streaming.vision", ModuleType("streaming.vision"))


class Seen(lw.Module):
    """Keeps the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.steps: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.append(torch.as_tensor(batch["x"]).flatten().tolist())
        torch.rand(3), random.random()  # which must not change the order
        return self.weight.square()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def webdataset(folder: Path, num_workers: int, *, rng: Any = random) -> Any:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    for number in range(4):
        if not (folder / f"{number}.tar").exists():
            with wds.TarWriter(str(folder / f"{number}.tar")) as writer:
                for key in range(6 * number, 6 * number + 6):
                    writer.write({"__key__": f"{key:03d}", "x.cls": key})
    data = wds.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=10, seed=1)
    data = data.shuffle(10, rng=rng).decode().rename(x="x.cls").map(without_key).batched(BATCH_SIZE, collation_fn=join)
    return wds.WebLoader(data, batch_size=None, num_workers=num_workers)


def without_key(sample: dict[str, Any]) -> dict[str, int]:
    return {"x": sample["x"]}


def join(samples: list[dict[str, int]]) -> dict[str, list[int]]:
    return {"x": [sample["x"] for sample in samples]}


def litdata(folder: Path, num_workers: int) -> Any:
    package = pytest.importorskip("litdata", reason="no litdata: make .venv/apart/installed")
    if not (folder / "index.json").exists():
        cache = package.streaming.Cache(str(folder), chunk_size=5)
        for number in range(NUM_SAMPLES):
            cache[number] = {"x": number}
        cache.done()
        cache.merge()
    data = package.StreamingDataset(str(folder), shuffle=True)
    return package.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=num_workers)


def mosaicml(folder: Path, num_workers: int) -> Any:
    package = pytest.importorskip("streaming", reason="no mosaicml-streaming: make .venv/apart/installed")
    if not (folder / "index.json").exists():
        with package.MDSWriter(out=str(folder), columns={"x": "int"}, size_limit=120) as writer:
            for number in range(NUM_SAMPLES):
                writer.write({"x": number})
    package.base.util.clean_stale_shared_memory()
    data = package.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH_SIZE, num_canonical_nodes=2)
    return package.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=num_workers)


def fit(folder: Path, loader: Any, ckpt_path: str | None = None, max_steps: int = -1) -> list[list[int]]:
    lw.seed_everything(3, verbose=False)
    module = Seen()
    trainer = lw.Trainer(
        max_epochs=2, max_steps=max_steps, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[lw.ModelCheckpoint(dirpath=folder, save_last=True)],
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module.steps


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [webdataset, litdata, mosaicml])
def test_a_resumed_run_sees_each_sample_of_the_epoch_once_and_in_the_same_step(
    tmp_path: Path, make: Callable[..., Any], num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    whole = fit(tmp_path / "whole", make(data, num_workers))
    per_epoch = len(whole) // 2
    for epoch in (whole[:per_epoch], whole[per_epoch:]):
        assert sorted(number for step in epoch for number in step) == list(range(NUM_SAMPLES))
    assert whole[:per_epoch] != whole[per_epoch:]
    for stop in (3, per_epoch, per_epoch + 2):
        folder = tmp_path / f"stopped-{stop}"
        first = fit(folder, make(data, num_workers), max_steps=stop)
        assert first + fit(folder, make(data, num_workers), ckpt_path="last") == whole
    assert "other batches" not in caplog.text


def test_a_pipeline_of_webdataset_that_shuffles_by_the_clock_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    fit(tmp_path, webdataset(data, 0, rng=random.Random(1)), max_steps=4)
    fit(tmp_path, webdataset(data, 0, rng=random.Random(2)), ckpt_path="last")
    assert "yields other batches than before the stop" in caplog.text


class Counting(torch.utils.data.DataLoader[Any]):
    """A loader that keeps its own epoch."""

    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def test_a_resume_at_the_end_of_an_epoch_starts_workers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of mosaicml-streaming wait for each other, and did so forever after some had been started in vain."""
    made: list[Any] = []
    make = torch.utils.data.DataLoader._get_iterator
    monkeypatch.setattr(torch.utils.data.DataLoader, "_get_iterator", lambda self: made.append(self) or make(self))
    samples = [{"x": number} for number in range(NUM_SAMPLES)]
    first = fit(tmp_path, Counting(samples, batch_size=BATCH_SIZE), max_steps=NUM_SAMPLES // BATCH_SIZE)
    made.clear()
    rest = fit(tmp_path, Counting(samples, batch_size=BATCH_SIZE), ckpt_path="last")
    assert rest == first
    assert len(made) == 1
