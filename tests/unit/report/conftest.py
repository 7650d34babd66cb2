from __future__ import annotations

from pathlib import Path

import pytest

from .toy_runs import fit


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was trained, logged and saved; tests only read it."""
    folder = tmp_path_factory.mktemp("trained") / "line"
    fit(folder, version=0)
    return folder


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
