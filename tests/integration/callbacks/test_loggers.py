"""Loggers of tracking services on two ranks: one run per fit, which rank 0 begins, and a resume goes on in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toys
from ranks import run_ranks

from loopwright.loggers import JSONLinesLogger, MLFlowLogger
from loopwright.strategies import DDPStrategy


class Logging(toys.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


def fit(rank: int, size: int, root: Path, epochs: int, checkpoint: str | None) -> Any:
    loggers = [JSONLinesLogger(root / "lines"), MLFlowLogger(save_dir=root / "mlruns")]
    trainer = toys.quiet(
        devices=size, strategy=DDPStrategy(), max_epochs=epochs, logger=loggers, log_every_n_steps=1,
        enable_checkpointing=bool(checkpoint is None), default_root_dir=root,
    )  # fmt: skip
    trainer.fit(toys.net(Logging), toys.loader(16, 2), ckpt_path=checkpoint)
    if checkpoint is None:
        trainer.save_checkpoint(root / "end.ckpt")
    return loggers[0].version, loggers[1].version


def test_two_ranks_make_one_run_and_a_resume_goes_on_in_it(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    first = run_ranks(fit, 2, tmp_path, 1, None)
    again = run_ranks(fit, 2, tmp_path, 2, str(tmp_path / "end.ckpt"))
    assert first[0] == again[0]
    assert [version for _, version in first[1:]] == [None]
    lines = (tmp_path / "lines" / "loopwright_logs" / "version_0" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    assert [(row["step"], row["samples"]) for row in rows] == [(step, 4 * step + 4) for step in range(8)]
    reader = MLFlowLogger(save_dir=tmp_path / "mlruns", run_id=first[0][1])
    assert [point.step for point in reader.experiment.get_metric_history(reader.run_id, "loss")] == list(range(8))
    runs = [folder for folder in (tmp_path / "mlruns").glob("*/*") if (folder / "metrics").is_dir()]
    assert len(runs) == 1
