"""The compared variants: each is a Trainer's run and the hand-written loop that does the same work."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toy as by_hand
from toy import LoggingToy, Stream, Toy, batches, make, shuffled_loader

import loopwright as lw


class Listener(lw.Callback):
    """Hears two events per step, and does nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def state_key(self) -> str:
        return f"Listener{self.number}"

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None: ...


@dataclass(frozen=True)
class Variant:
    """One way of training.

    Attributes:
        name: What the table calls it.
        aim: What the trainer may add, in words; the table prints it beside the measured value.
        options: Arguments of the Trainer.
        loop: The hand-written loop.
        kind: The module that the Trainer trains; the hand-written loop has the plain one.
        is_terminal: Whether the progress bar believes that it writes to a terminal.
        data: Makes the loader from a number of batches.
        verb: "fit" or "validate".
    """

    name: str
    aim: str
    options: dict[str, Any] = field(default_factory=dict)
    loop: Callable[[Toy, Any], None] = by_hand.train_by_hand
    kind: type[Toy] = Toy
    is_terminal: bool = False
    data: Callable[[int], Any] = batches
    verb: str = "fit"
    listeners: int = 0

    def run_trainer(self, num_batches: int, folder: Path) -> Toy:
        """Train or validate with a new Trainer, and return the module."""
        toy = make(self.kind)
        options = dict(self.options)
        if self.listeners:
            options["callbacks"] = [Listener(number) for number in range(self.listeners)]
        with quiet(self.is_terminal):
            trainer = lw.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, **options)
            if self.verb == "validate":
                trainer.validate(toy, self.data(num_batches), verbose=False)
            else:
                trainer.fit(toy, self.data(num_batches))
        return toy

    def run_by_hand(self, num_batches: int) -> Toy:
        """Do the same work without a trainer, and return the module."""
        toy = make(Toy)
        self.loop(toy, self.data(num_batches))
        return toy


OFF = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
BARE = Variant("bare: `barebones=True`", "10", {"barebones": True})
SWITCHED_OFF = Variant("bar, logger, checkpoint and summary off", "10", OFF)
DEFAULTS = Variant("defaults: bar, TensorBoard, checkpoint", "20")
ON_TERMINAL = Variant("defaults, on a terminal", "20", is_terminal=True)
LOGGED = Variant("defaults and three `self.log`", "23", kind=LoggingToy)
TEN_CALLBACKS = Variant("ten callbacks, two events each", "12", OFF, listeners=10)
ACCUMULATED = Variant(
    "accumulate 4 and clip, per micro-batch",
    "10",
    {**OFF, "accumulate_grad_batches": 4, "gradient_clip_val": 1.0},
    by_hand.accumulate_by_hand,
)
SHUFFLED = Variant("shuffled DataLoader", "10", OFF, data=shuffled_loader)
STREAMED = Variant("iterable that is not a list", "", OFF, data=Stream)
VALIDATED = Variant("validation", "10", OFF, by_hand.validate_by_hand, verb="validate")
LOGGED_VALIDATION = Variant(
    "validation with one `self.log`", "11", OFF, by_hand.validate_by_hand, LoggingToy, verb="validate"
)
VARIANTS = (
    BARE,
    SWITCHED_OFF,
    DEFAULTS,
    ON_TERMINAL,
    LOGGED,
    TEN_CALLBACKS,
    ACCUMULATED,
    SHUFFLED,
    STREAMED,
    VALIDATED,
    LOGGED_VALIDATION,
)


class _Nowhere(io.TextIOWrapper):
    """Swallows what is written, and says whether it is a terminal as its constructor was asked to."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__(open(os.devnull, "wb", buffering=0))  # noqa: SIM115  # closed with the wrapper
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@contextlib.contextmanager
def quiet(is_terminal: bool = False) -> Iterator[None]:
    """Send what a run prints, warns and logs to nowhere."""
    level = logging.getLogger("loopwright").level
    logging.getLogger("loopwright").setLevel(logging.ERROR)
    nowhere = _Nowhere(is_terminal)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("loopwright").setLevel(level)
        sys.stdout.flush()
        nowhere.close()
