"""Fixtures of tests with programs for Lightning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopwright.compat import lightning as compat


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let `import lightning` give Loopwright, in an empty folder, until the test is over."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.chdir(tmp_path)
    compat.install(children=False)
    yield
    compat.uninstall()
