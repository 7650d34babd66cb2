from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from object_store import ObjectStore, SharedDisk


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["memory", "objects", "shared"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty folder: in memory, in a store that can only put objects, and on a disk with folders."""
    ObjectStore.start()
    if request.param == "shared":
        SharedDisk.start()
        return f"shared://{tmp_path}/shared/logs"
    return f"{request.param}://{uuid.uuid4().hex}/logs"


@pytest.fixture
def objects() -> str:
    ObjectStore.start()
    return "objects://bucket/logs"
