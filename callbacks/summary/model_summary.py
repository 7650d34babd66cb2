"""`ModelSummary`: a table of the model's layers and sizes, before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ..base import AnyModule, Callback, from_rank_zero
from .summary import Summary, format_table, summarize

if TYPE_CHECKING:
    from torch import nn

    from ...trainer import Trainer


class ModelSummary(Callback):
    """Write a table of the module's layers to standard output at the start of fit, on rank zero.

    Args:
        max_depth: Number of levels of submodules to list; 0 for no table, -1 for all levels.
        **summarize_kwargs: Further arguments for `summarize`.

    Raises:
        ConfigError: `max_depth` is below -1 or not an integer.
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:  # Any: what an own `summarize` takes
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ConfigError(
                f"{type(self).__name__}: max_depth={max_depth!r}, expected -1, 0 or more.", fix="pass an integer."
            )
        self._max_depth = max_depth
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Measure the module and show the table."""
        if not self._max_depth:
            return
        # A forward pass of a sharded module takes all ranks.
        summary = self._summary(trainer, pl_module) if trainer.strategy.traits.shards_parameters else None
        from_rank_zero(trainer, lambda: self._lw_show(trainer, pl_module, summary))

    def _lw_show(self, trainer: Trainer, pl_module: AnyModule, summary: Summary | None) -> None:
        if not trainer.is_global_zero:
            return
        summary = summary or self._summary(trainer, pl_module)
        self.summarize(
            summary_data=summary.columns(),
            total_parameters=summary.total_parameters,
            trainable_parameters=summary.trainable_parameters,
            model_size=summary.model_size,
            total_training_modes=summary.total_training_modes,
            total_flops=summary.total_flops,
            **self._summarize_kwargs,
        )

    def _summary(self, trainer: Trainer, module: nn.Module) -> Summary:
        """Return what is shown; may be overridden. On rank 0; on all ranks where the strategy shards."""
        return summarize(module, self._max_depth, forward_context=trainer.fabric.autocast())

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Show the table; may be overridden.

        Args:
            summary_data: Columns as (title, cells).
            total_parameters: Number of parameters.
            trainable_parameters: Number of parameters with requires_grad.
            model_size: Size of the parameters in MB (10**6 bytes).
            total_training_modes: Number of submodules in "train" and in "eval" mode.
            total_flops: FLOPs of one forward pass of the example input; 0 without an example.
            **summarize_kwargs: Arguments from the constructor.
        """
        totals = total_rows(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        print(format_table(summary_data, totals), flush=True)  # noqa: T201  # also without a console, as pythonw


def total_rows(
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
) -> list[tuple[str, str]]:
    """Return the rows below the table: (number, meaning)."""
    summary = Summary(
        total_parameters=total_parameters,
        trainable_parameters=trainable_parameters,
        model_size=model_size,
        total_training_modes=total_training_modes,
        total_flops=total_flops,
        has_example=total_flops > 0,
    )
    return summary.totals()
