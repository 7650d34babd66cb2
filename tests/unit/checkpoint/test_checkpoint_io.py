from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.checkpoint import CheckpointIO, TorchCheckpointIO, verify


def test_the_default_plugin_saves_loads_and_removes(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    plugin = TorchCheckpointIO()
    path = tmp_path / "a.ckpt"
    plugin.save_checkpoint(checkpoint, path)
    assert verify(path).sealed
    assert plugin.load_checkpoint(path, map_location="cpu")["epoch"] == 3
    plugin.remove_checkpoint(path)
    assert not path.exists()
    plugin.teardown()


def test_a_plugin_of_a_user_needs_three_methods() -> None:
    class InMemory(CheckpointIO):
        def __init__(self) -> None:
            self.files: dict[str, dict[str, Any]] = {}

        def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
            self.files[str(path)] = checkpoint

        def load_checkpoint(
            self, path: str | Path, map_location: Any = None, weights_only: bool | None = True
        ) -> dict[str, Any]:
            return self.files[str(path)]

        def remove_checkpoint(self, path: str | Path) -> None:
            del self.files[str(path)]

    plugin = InMemory()
    plugin.save_checkpoint({"a": 1}, "x")
    assert plugin.load_checkpoint("x") == {"a": 1}
    assert not plugin.is_background
    plugin.wait_for("x")
    plugin.teardown()
    with pytest.raises(TypeError, match="abstract"):
        CheckpointIO()  # type: ignore[abstract]
