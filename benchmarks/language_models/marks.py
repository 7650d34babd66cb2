"""A callback that prints `step N loss X` after each optimizer step of a recipe; benchmarks/language_models/peers.py."""

from __future__ import annotations

from typing import Any

import loopwright as lw


class Marks(lw.Callback):
    """Prints each step with the loss of its last micro-batch."""

    # Any: the types of hooks.
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(f"step {trainer.global_step} loss {float(outputs['loss']):.4f}", flush=True)
