"""Files beside the logs that describe a fit or an evaluation. Imported when one ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..files import only_describes, replace_file
from ..report import add_evaluated, write_environment

if TYPE_CHECKING:
    from .trainer import Trainer


def describe_run(trainer: Trainer) -> None:
    """Write the time by phase and the environment of a fit beside its logs, for reports."""
    with only_describes("What the run ran on, and where its time went,"):
        folder = _folder(trainer)  # asked for the first time, a logger makes it
        if folder is None:
            return
        write_environment(folder)
        if trainer._lw_settled is not None:
            replace_file(Path(folder, "strategy.json"), json.dumps(trainer._lw_settled, indent=2) + "\n")
        if trainer.timeline.is_enabled:
            trainer.timeline.save(os.path.join(folder, "timeline.json"))


def describe_evaluation(trainer: Trainer, checkpoint: str) -> None:
    """Write which checkpoint was evaluated, so that reports show the metrics with those of its run."""
    with only_describes("Which checkpoint was evaluated,"):
        folder = _folder(trainer)
        if folder is not None:
            add_evaluated(folder, checkpoint)


def _folder(trainer: Trainer) -> str | None:
    """Return the directory of files beside the logs; None on other ranks, and if nothing is written."""
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return None
    folder = trainer._lw_output.files_dir(cast("str | None", getattr(trainer.logger, "log_dir", None)))
    return folder if folder and os.path.isdir(folder) else None
