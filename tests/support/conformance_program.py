"""A script that Fabric runs again for every process: `program.py folder`, with a task in the folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from conformance import make_fabric, train_all, train_all_by_trainer

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    entry, cases = torch.load(folder / "task", weights_only=False)
    fabric = make_fabric(entry, cases[0].precision)
    fabric.launch()
    by_trainer = train_all_by_trainer(entry, cases, str(folder))
    states = train_all(fabric, cases, str(folder))
    if fabric.is_global_zero:
        torch.save((states, by_trainer), folder / "states")
