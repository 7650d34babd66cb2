"""`KeepGenerators`: validation draws from the generators that shuffle and drop out in Lightning, and not in Loopwright.

With this callback it does in neither, so that everything else can be compared exactly. With PARITY in the environment
it does nothing.
"""

import os
import random

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

__all__ = ["KeepGenerators"]


class KeepGenerators(Callback):
    """Put the generators back after each validation within fit to where they were after the last training batch."""

    def __init__(self):
        self.kept = None

    def on_train_batch_end(self, *arguments):
        """Keep where they are: a validation begins right after this."""
        self.kept = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def on_validation_end(self, *arguments):
        """Put them back."""
        if self.kept is not None and "PARITY" not in os.environ:
            random.setstate(self.kept[0])
            np.random.set_state(self.kept[1])
            torch.set_rng_state(self.kept[2])
