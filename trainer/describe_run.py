"""Files beside the logs of a fit that describe it. Imported when a fit ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..files import only_describes, replace_file
from ..report import write_environment

if TYPE_CHECKING:
    from .trainer import Trainer


def describe_run(trainer: Trainer) -> None:
    """Write the time by phase and the environment of a fit beside its logs, for reports."""
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return
    folder = trainer._lw_output.files_dir(cast("str | None", getattr(trainer.logger, "log_dir", None)))
    if not folder or not os.path.isdir(folder):
        return
    with only_describes(f"What the run ran on, and where its time went, in {folder},"):
        write_environment(folder)
        if trainer._lw_settled is not None:
            replace_file(Path(folder, "strategy.json"), json.dumps(trainer._lw_settled, indent=2) + "\n")
        if trainer.timeline.is_enabled:
            trainer.timeline.save(os.path.join(folder, "timeline.json"))
