"""The number of steps that fit takes, as Lightning estimates it."""

from __future__ import annotations

import math

from ....trainer.trainer import Trainer

__all__ = ["estimate_steps"]


def estimate_steps(trainer: Trainer) -> int | float | None:
    """Return the number of steps with the present accumulation, also where a callback changes it later.

    None outside of fit.
    """
    run, loop = trainer.present_run(), trainer.fit_loop
    if run is None:
        return None
    if loop.epoch_limit == -1:
        return math.inf if loop.max_steps == -1 else loop.max_steps
    trainer.open_training(run)
    assert run.stream is not None
    if math.isinf(run.stream.num_batches):
        return loop.max_steps
    scheduler, accumulate = trainer.accumulation_scheduler, trainer.accumulate_grad_batches
    if scheduler is not None and run.plan is not None:
        accumulate = scheduler.get_accumulate_grad_batches(trainer.current_epoch)
    steps = math.ceil(run.stream.num_batches / accumulate) * max(loop.epoch_limit, 1)
    return steps if loop.max_steps == -1 else min(steps, loop.max_steps)
