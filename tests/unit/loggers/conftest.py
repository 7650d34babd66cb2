from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test is rank zero of its own directory, however pytest itself was started."""
    for variable in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
