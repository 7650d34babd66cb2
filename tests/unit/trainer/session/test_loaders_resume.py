"""Every kind of training data through the Trainer: a run resumed within an epoch reads what the whole run read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kept import keep
from loader_kinds import KINDS, WITH_WORKERS, check_resume

# torchdata 0.11 calls a function that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Worker processes are forked: torch must not have threads then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_reads_what_the_uninterrupted_run_read(name: str, tmp_path: Path) -> None:
    check_resume(name, 0, tmp_path, 8, accumulate_grad_batches=2)


@pytest.mark.parametrize("name", keep(WITH_WORKERS, "persistent", "batch_sampler", "prebatched", "stream"))
def test_with_workers_too(name: str, tmp_path: Path) -> None:
    check_resume(name, 2, tmp_path, 2, max_epochs=2)


# Within the data of a PlacedStream nothing tells an epoch that was cut short from one that goes on.
@pytest.mark.parametrize("name", [name for name in KINDS if not name.endswith("placed") and name != "placed_stream"])
def test_with_a_limit_too(name: str, tmp_path: Path) -> None:
    check_resume(name, 0, tmp_path, 5, limit_train_batches=3)
