"""The data module of an earlier verb, whose hooks Lightning also calls when a verb receives loaders."""

from __future__ import annotations

from typing import Any

from ....data.module import DataModule
from ....trainer.hooks import DATA_BASES, Hook, find_override
from ....trainer.run import Run
from ..actions import lifecycle_of

__all__ = ["call_earlier_data_module"]


def call_earlier_data_module(run: Run) -> None:
    """Let a verb without a data module call `prepare_data`, `setup` and `teardown` of the latest one."""
    trainer = run.trainer
    if run.datamodule is not None:
        vars(trainer)["_lw_earlier_datamodule"] = run.datamodule
        return
    earlier: DataModule | None = vars(trainer).get("_lw_earlier_datamodule")
    if earlier is None:
        return
    lifecycle = lifecycle_of(run)
    lifecycle.earlier_datamodule = earlier

    def first(name: str) -> Any:  # Any: what `wrap` takes
        def around(fire: Hook) -> Hook:
            def hook(stage: str) -> None:
                own = find_override(earlier, name, DATA_BASES)
                if own is not None:
                    own(stage=trainer.state.fn)
                fire(stage)

            return hook

        return around

    for name in ("setup", "teardown"):
        lifecycle.wrap(name, first(name))
