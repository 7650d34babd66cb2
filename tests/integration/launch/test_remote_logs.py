"""Loggers at URLs whose runs are in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.trainer.test_trainer import Net, data
from object_store import SharedDisk
from torch.utils.data import DataLoader

import loopwright as lw

SharedDisk.start()


class Here(lw.Callback):
    """Lets a process that receives it import this file, and know the file system."""


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_rows_of_other_processes_and_of_this_one_are_in_one_file(strategy: str, tmp_path: Path) -> None:
    url = f"shared://{tmp_path}"
    logger = lw.CSVLogger(url)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = lw.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, default_root_dir=url, logger=logger, max_epochs=2,
        log_every_n_steps=1, callbacks=[Here()], profiler=lw.profilers.SimpleProfiler(filename="profile"), **quiet,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(data(), batch_size=4), DataLoader(data(13), batch_size=2))
    folder = tmp_path / "loopwright_logs" / "version_0"
    before = (folder / "metrics.csv").read_text().splitlines()
    assert len(before) > 2
    logger.log_metrics({"error": 0.5}, step=99)
    logger.finalize("success")
    after = (folder / "metrics.csv").read_text().splitlines()
    assert after[:-1] == before
    assert after[-1].endswith(",99")
    names = {path.name for path in folder.iterdir()}
    assert {"environment.json", "fit-profile-0.txt", "fit-profile-1.txt"} <= names
    assert not [name for name in names if name.startswith(".") or ".part-" in name]
