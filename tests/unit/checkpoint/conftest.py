from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.checkpoint import storage


def small_checkpoint(value: float = 1.0) -> dict[str, Any]:
    return {
        "epoch": 3,
        "state_dict": {"layer.weight": torch.full((2, 3), value), "layer.bias": torch.full((3,), value)},
        "hyper_parameters": {"lr": 0.1, "name": "small"},
    }


@pytest.fixture
def checkpoint() -> dict[str, Any]:
    return small_checkpoint()


@pytest.fixture
def saved(tmp_path: Path, checkpoint: dict[str, Any]) -> Path:
    path = tmp_path / "saved.ckpt"
    storage.save(checkpoint, path)
    return path
