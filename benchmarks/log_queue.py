"""What a thousand logged values per step cost the step, with rows written on the Trainer's thread and by the queue."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from toy import Toy, batches, make
from variants import quiet

import loopwright as lw

SCALARS = 1000
NAMES = [f"value{number}" for number in range(SCALARS)]
LOGGERS = {"CSV": lw.CSVLogger, "JSON lines": lw.JSONLinesLogger, "TensorBoard": lw.TensorBoardLogger}


class Wordy(Toy):
    """Logs a thousand values at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.walls_s: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.walls_s.append(time.perf_counter())
        loss = super().training_step(batch, batch_idx)
        self.log_dict(dict.fromkeys(NAMES, 1.0))
        return loss


def _fit(logger: Any, num_batches: int, folder: Path) -> tuple[float, float]:
    """Return the median step in microseconds, and the seconds that fit took in all."""
    torch.manual_seed(0)
    toy = make(Wordy)
    assert isinstance(toy, Wordy)
    with quiet():
        trainer = lw.Trainer(
            max_epochs=1, accelerator="cpu", logger=logger, log_every_n_steps=1, default_root_dir=folder,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        began = time.perf_counter()
        trainer.fit(toy, batches(num_batches))
        took = time.perf_counter() - began
    steps = [after - before for before, after in zip(toy.walls_s[5:], toy.walls_s[6:], strict=False)]
    return 1e6 * statistics.median(steps), took


def time_logging(*, num_batches: int) -> list[dict[str, Any]]:
    """Return a row for each logger: the median step without a logger, written at once, and queued."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bare, _ = _fit(False, num_batches, Path(folder))
        for name, kind in LOGGERS.items():
            found: dict[str, Any] = {"name": name, "without_us": bare}
            for way, writes_behind in (("at_once", False), ("queued", True)):
                logger = kind(folder, name=f"{name}-{way}")
                logger.writes_behind = writes_behind
                found[f"{way}_us"], found[f"{way}_fit_s"] = _fit(logger, num_batches, Path(folder))
            rows.append(found)
    return rows
