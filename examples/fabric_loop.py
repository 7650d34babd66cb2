"""A hand-written loop on any number of processes: `python examples/fabric_loop.py --devices 2 --strategy ddp`.

Classifies points on two spirals. Shows what `lw.Fabric` handles in your own loop: processes, devices, precision,
gradient accumulation, exact evaluation, and checkpoints. A stopped run resumes where it was: the checkpoint also has
the position in the data and the random generators of all ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import loopwright as lw
from loopwright.fabric import rng_state, set_rng_state


def spirals(count: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
    """Return points on two spirals, shape (count, 2), and the spiral of each point, 0 or 1, shape (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    angle = 1 + 9 * torch.rand(count, generator=generator).sqrt()
    turned = angle + torch.pi * labels
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], 1) / 10
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), labels)


def evaluate(fabric: lw.Fabric, model: nn.Module, loader: Any) -> float:
    """Return the accuracy over all ranks. Batches are not padded: every point counts once."""
    model.eval()
    hits, count = 0, 0
    with torch.no_grad():
        for points, labels in loader:
            hits += int((model(points).argmax(1) == labels).sum())
            count += len(labels)
    model.train()
    total = fabric.all_reduce(torch.tensor([hits, count]), reduce_op="sum")
    return float(total[0]) / float(total[1])


def train(fabric: lw.Fabric, epochs: int, steps_per_window: int, file: Path) -> float:
    lw.Fabric.seed_everything(0, verbose=False)
    layers = nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)
    net = nn.Sequential(*layers)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=5e-3))
    lw.Fabric.seed_everything(fabric.global_rank, verbose=False)  # other dropout masks on each rank
    loaders = DataLoader(spirals(1280, 1), batch_size=16, shuffle=True), DataLoader(spirals(301, 2), batch_size=50)
    train_loader, test_loader = fabric.setup_dataloaders(*loaders)
    state = {"model": model, "optimizer": optimizer, "loader": train_loader, "epoch": 0, "rng": None}
    if file.exists():
        fabric.load(file, state)
        set_rng_state(state["rng"])
        fabric.print(f"Resuming in epoch {state['epoch'] + 1}.")

    for epoch in range(state["epoch"], epochs):
        for points, labels in train_loader:
            with fabric.accumulate(model, steps=steps_per_window):
                fabric.backward(F.cross_entropy(model(points), labels))
                if fabric.sync_gradients:
                    fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        state["epoch"] = epoch + 1
        if state["epoch"] % 10 == 0 or state["epoch"] == epochs:
            fabric.print(f"epoch {state['epoch']:3}: {evaluate(fabric, model, test_loader):.1%} correct")
            fabric.save(file, {**state, "rng": rng_state()})
    return evaluate(fabric, model, test_loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="1")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, ddp_fork, fsdp, ...")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step and process")
    parser.add_argument("--file", type=Path, default=Path("spirals.ckpt"))
    given = parser.parse_args()
    fabric = lw.Fabric(devices=given.devices, strategy=given.strategy, precision=given.precision)
    accuracy = fabric.launch(train, given.epochs, given.accumulate, given.file)
    fabric.print(f"{accuracy:.1%} of 301 new points correct")


if __name__ == "__main__":
    main()
