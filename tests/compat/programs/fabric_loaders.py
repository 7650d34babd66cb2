"""Loaders of a Fabric on two spawned processes: order of samples, states, and what a module gets."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

# Any: loaders of any library.


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Counting(DataLoader[Any]):
    """A loader that counts its passes, and saves no position."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def work(fabric: Any, folder: str) -> None:
    L.seed_everything(7, verbose=False)
    data: Any = range(14)
    loaders: dict[str, Any] = {
        "in order": DataLoader(data, 4),
        "shuffled": DataLoader(data, 4, shuffle=True),
        "without the last": DataLoader(data, 4, drop_last=True),
        "generator": DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
        "weighted": DataLoader(data, 4, sampler=WeightedRandomSampler(torch.ones(14).tolist(), 14)),
        "stream": DataLoader(Stream(), 2),
        "worker": DataLoader(data, 4, shuffle=True, num_workers=1),
    }
    seen: dict[str, Any] = {}
    for name, loader in loaders.items():
        ready = fabric.setup_dataloaders(loader)
        seen[name] = [read(ready), read(ready)]
        with torch.no_grad():
            seen[name].append(read(ready))
    ready = fabric.setup_dataloaders(loaders["shuffled"], use_distributed_sampler=False)
    seen["not distributed"] = [read(ready), len(ready)]
    seen["drawn"] = [torch.rand(1).item(), random.random()]

    model = fabric.setup(torch.nn.Linear(2, 2))
    model.register_forward_pre_hook(lambda module, inputs: seen.update(input=str(inputs[0].dtype)))
    seen["output"] = str(model(torch.ones(1, 2)).dtype)

    ready = fabric.setup_dataloaders(Counting(data, 4))
    read(ready)
    next(iter(ready))
    fabric.save(f"{folder}/a.ckpt", {"loader": ready, "step": 1})
    seen["file"] = torch.load(f"{folder}/a.ckpt")
    ready = fabric.setup_dataloaders(Counting(data, 4))
    fabric.load(f"{folder}/a.ckpt", {"loader": ready, "step": 0})
    seen["loaded"] = read(ready)
    Path(folder, f"{fabric.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn", precision="bf16-mixed")
    fabric.launch(work, sys.argv[1])
    found = {str(rank): json.loads(Path(sys.argv[1], f"{rank}.json").read_text()) for rank in range(2)}
    print(json.dumps(found))
