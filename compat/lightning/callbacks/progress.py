"""Lightning's names around the progress bar."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from ....trainer.trainer import Trainer

__all__ = ["Tqdm", "convert_inf", "get_standard_metrics"]


Tqdm = tqdm


def convert_inf(x: int | float | None) -> int | float | None:
    """Return a number of batches as tqdm wants it: None where there is no end."""
    return None if x is None or math.isinf(x) or math.isnan(x) else x


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return what stands beside the bar besides logged values: the version of the run."""
    if not trainer.loggers:
        return {}
    version = trainer.loggers[0].version
    if version in (None, ""):
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}
