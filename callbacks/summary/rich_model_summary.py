"""`RichModelSummary`: the model summary as a table of `rich`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from ...errors import MissingDependency
from ..progress.terminal import is_terminal
from .model_summary import ModelSummary, total_rows


class RichModelSummary(ModelSummary):
    """Show the table with rich; as plain text if the output is not a terminal.

    Args:
        max_depth: Number of levels of submodules to list; 0 for no table, -1 for all levels.
        **summarize_kwargs: `header_style` of the table, "bold magenta" by default.

    Raises:
        MissingDependency: rich is not installed.
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:  # Any: what an own `summarize` takes
        if find_spec("rich") is None:
            raise MissingDependency("rich", needed_for="RichModelSummary")
        super().__init__(max_depth, **summarize_kwargs)

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
        """Show the table; see `ModelSummary.summarize`."""
        if not is_terminal(sys.stdout):
            ModelSummary.summarize(
                summary_data, total_parameters, trainable_parameters, model_size, total_training_modes, total_flops
            )
            return
        from rich.console import Console
        from rich.table import Table

        console = Console()
        titles = [title for title, _ in summary_data]
        if summary_data and summary_data[0][1]:
            table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
            for title in titles:
                is_number = title in ("Params", "FLOPs")
                table.add_column(title, justify="right" if is_number else "left", no_wrap=title in ("Name", "Params"))
            for row in zip(*(cells for _, cells in summary_data), strict=True):
                table.add_row(*row)
            console.print(table)
        grid = Table.grid(padding=(0, 2))
        rows = total_rows(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        for number, meaning in rows:
            grid.add_row(f"[bold]{number.strip()}[/]", meaning)
        console.print(grid)
