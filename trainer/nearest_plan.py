"""`nearest_that_fits`: what would fit after a fit has run out of memory, by its plan. Imported when that happens."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ..data.move import find_batch_size
from ..data.parts import split_batch
from ..planning.planner import choices, plan_choices
from ..planning.simulation import Training
from ..planning.table import SPARE, Plan, Row, show_size
from .plan_fit import training_of

if TYPE_CHECKING:
    from ..protocols import Batch
    from .view import TrainerView

_DEVICES = (1, 2, 4, 8)
_TRIES = 3
_MOST_S = 15.0  # after which no further row is started


def nearest_that_fits(trainer: TrainerView, module: nn.Module, batch: Batch, *, memory: float) -> str:
    """Return what would fit after a fit on one device has run out of memory, by the plan: a line for each option.

    Args:
        trainer: The Trainer, with the precision and accumulation of the fit.
        module: The module, which is not changed.
        batch: The batch that was too large, on any device.
        memory: Of the device, in bytes.
    """
    training, _ = training_of(trainer, module, [batch])
    until = time.monotonic() + _MOST_S

    def tried(training: Training, devices: int) -> Plan:
        chosen, left_s = choices(devices), max(until - time.monotonic(), 0.0)
        return plan_choices(training, chosen, devices=devices, memory=memory, limit_s=left_s)

    plan = tried(training, 1)
    now = next((row for row in plan.rows if row.name == "single_device"), None)
    if now is not None and now.fits:
        return (
            f"By the plan this fit takes {show_size(now.peak)} of {show_size(memory)}: the rest is further memory of "
            "its code, memory of other programs, or gaps between allocations."
        )
    lines = [] if now is None else _smaller(training, now, memory)
    for devices in _DEVICES:
        plan = plan if devices == 1 else tried(training, devices)
        if plan.best is not None:
            lines.append(f"  {_shown(plan.best)}, with the batch as it is")
            break
    if not lines:
        return (
            f"No row of the plan that was ready in {_MOST_S:g} s fits into {show_size(memory)}: "
            "trainer.plan(module, data, devices=..., memory=...) shows all."
        )
    return "\n".join([f"What fits into {show_size(memory)} with a tenth to spare, by the plan:", *lines])


def _smaller(training: Training, full: Row, memory: float) -> list[str]:
    """Return the line of a smaller batch on one device, whose size follows from two rows; none where none fits."""
    size = find_batch_size(training.batch) or 1
    if size == 1:
        return []

    def peak(length: int) -> float:
        part = split_batch(training.batch, -(-size // length))[0][0]
        plan = plan_choices(replace(training, batch=part), choices(1)[:1], devices=1, memory=memory)
        return plan.rows[0].peak

    half = -(-size // 2)
    per_sample = (full.peak - peak(half)) / (size - half)
    most = (1 - SPARE) * memory
    fitting = size - math.ceil((full.peak - most) / per_sample) if per_sample > 0 else 0
    # Between two sizes the peak is at most what lies on the line; below both, an optimizer's step may take more.
    for _ in range(_TRIES):
        if fitting < 1 or fitting >= half or peak(fitting) <= most:
            break
        fitting //= 2
    else:
        return []
    if fitting < 1:
        return []
    return [f"  lw.Trainer(on_oom='shrink'), or a batch size of {fitting} in place of {size}, on this device"]


def _shown(row: Row) -> str:
    devices = "" if "devices=" in row.line else f", devices={row.devices}"
    return f"lw.Trainer({row.line}{devices}): {show_size(row.peak)} at the peak"
