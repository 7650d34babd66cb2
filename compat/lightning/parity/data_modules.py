"""The data module of an earlier verb, whose hooks Lightning calls also when a verb gets loaders."""

from __future__ import annotations

from typing import Any

from ....data.module import DataModule
from ....trainer.hooks import Hook, data_bases, find_override
from ....trainer.run import Run
from ..patch import patch

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
    lifecycle = run.lifecycle
    all_own = lifecycle.all_own

    def all_own_with_earlier(name: str) -> list[Hook]:
        hook = find_override(earlier, name, data_bases()) if name == "prepare_data" else None
        return [*([] if hook is None else [hook]), *all_own(name)]

    def first(name: str) -> Any:  # Any: what `wrap` takes
        def around(fire: Hook) -> Hook:
            def hook(stage: str) -> None:
                own = find_override(earlier, name, data_bases())
                if own is not None:
                    own(stage=trainer.state.fn)
                fire(stage)

            return hook

        return around

    patch(lifecycle, "all_own", all_own_with_earlier)
    for name in ("setup", "teardown"):
        lifecycle.wrap(name, first(name))
