"""`SampleLogger`: images and text of samples, sent to the loggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ...errors import ConfigError
from ...fabric.undisturbed import undisturbed
from ..base import AnyModule, Callback, as_hook
from .measuring import LogSteps

if TYPE_CHECKING:
    from ...protocols import AnyBatch, AnyOutput
    from ...trainer import Trainer

# Any: pictures in one of the forms that Logger.log_image takes, alone or with their captions; or text.
MakeSamples: TypeAlias = "Callable[[AnyModule, AnyOutput, AnyBatch], Any]"

_STAGES = ("train", "validation", "test")


class SampleLogger(Callback):
    """Create images and text from a batch, and send them to every logger that can show them.

    In validation and test, samples come from the first batch of the first loader; in training, from the last batch of
    every n-th step. The functions run without gradients and with the module in eval mode. Random generators are
    restored, so that training does not change. They are called on every rank that has the batch; rank 0 logs.

    Args:
        images: Function `(pl_module, outputs, batch)` that returns images, or a pair of images and a list of captions.
            `outputs` is the output of the step. Images are a tensor of shape (N, C, H, W), or a list of images in a
            form that `Logger.log_image` lists.
        text: Function `(pl_module, outputs, batch)` that returns text in Markdown.
        stage: Stage that is sampled: "train", "validation" or "test".
        every_n_steps: Number of training steps between samples; None is `log_every_n_steps`.
        num_samples: Maximum number of images.
        name: Name of the logged samples, after the stage.

    Raises:
        ConfigError: Neither function is given, or an argument is invalid.
    """

    def __init__(
        self,
        images: MakeSamples | None = None,
        text: MakeSamples | None = None,
        *,
        stage: str = "validation",
        every_n_steps: int | None = None,
        num_samples: int = 8,
        name: str = "samples",
    ) -> None:
        problems = ["neither images nor text is given"] if images is None and text is None else []
        problems += [f"stage={stage!r} is not one of {list(_STAGES)}"] if stage not in _STAGES else []
        problems += (
            [f"every_n_steps={every_n_steps} is below 1"] if every_n_steps is not None and every_n_steps < 1 else []
        )
        problems += [f"every_n_steps={every_n_steps} counts steps of training, and stage={stage!r}"
                     ] if every_n_steps is not None and stage != "train" else []  # fmt: skip
        problems += [f"num_samples={num_samples} is below 1"] if num_samples < 1 else []
        if problems:
            raise ConfigError(f"SampleLogger: {'; '.join(problems)}.", fix="change these arguments.")
        self.images, self.text = images, text
        self.stage, self.every_n_steps = stage, every_n_steps
        self.num_samples, self.name = num_samples, name
        self._lw_log_steps = LogSteps()

    def on_train_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Record the first step: a resumed run logged it already."""
        self._lw_log_steps.start(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Create samples of a step that is due."""
        every = self.every_n_steps or trainer.log_every_n_steps
        if self.stage == "train" and self._lw_log_steps.is_due(trainer, every):
            self._lw_log(trainer, pl_module, outputs, batch)

    def _lw_evaluated(
        self,
        stage: str,
        trainer: Trainer,
        pl_module: AnyModule,
        outputs: AnyOutput,
        batch: AnyBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Make samples of the first batch."""
        if self.stage == stage and batch_idx == dataloader_idx == 0 and not trainer.sanity_checking:
            self._lw_log(trainer, pl_module, outputs, batch)

    on_validation_batch_end = as_hook(_lw_evaluated, "validation")
    on_test_batch_end = as_hook(_lw_evaluated, "test")

    def _lw_log(self, trainer: Trainer, pl_module: AnyModule, outputs: AnyOutput, batch: AnyBatch) -> None:
        with undisturbed(pl_module):
            images = self.images(pl_module, outputs, batch) if self.images is not None else None
            text = self.text(pl_module, outputs, batch) if self.text is not None else None
        if not trainer.is_global_zero:
            return
        step = max((trainer.global_step if trainer.state.fn == "fit" else trainer.parts.output.records_at[0]) - 1, 0)
        key = f"{self.stage}/{self.name}"
        captions = None
        if isinstance(images, tuple):
            images, captions = images
        if images is not None:
            images = list(images[: self.num_samples])
            more = {} if captions is None else {"caption": list(captions[: self.num_samples])}
            for logger in trainer.loggers:
                trainer._lw_output.tell(
                    logger, lambda logger=logger: logger.log_image(key, images, step=step, **more)  # type: ignore[misc]
                )  # fmt: skip
        if text is not None:
            for logger in trainer.loggers:
                trainer._lw_output.tell(
                    logger, lambda logger=logger: logger.log_text(key, text, step=step)  # type: ignore[misc]
                )  # fmt: skip

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: stage, name and interval distinguish instances."""
        return self._generate_state_key(stage=self.stage, every_n_steps=self.every_n_steps, name=self.name)
