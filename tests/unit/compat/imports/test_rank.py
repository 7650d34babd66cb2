"""Libraries read the rank from lightning-utilities, where Lightning leaves it when it is imported."""

from __future__ import annotations

from importlib.util import module_from_spec
from pathlib import Path

import pytest

from loopwright.compat.lightning.imports.finder import LightningFinder
from loopwright.compat.lightning.imports.rank import UTILITIES

CODE = "def rank_zero_only(fn):\n    return fn\n"


@pytest.mark.parametrize(
    ("code", "rank"), [(CODE, 3), (f"{CODE}rank_zero_only.rank = 1\n", 1)], ids=["not set", "set by somebody"]
)
def test_the_rank_of_this_process_is_on_the_decorator(
    code: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "rank_zero.py").write_text(code)
    spec = LightningFinder().find_spec(UTILITIES, [str(tmp_path)])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.rank_zero_only.rank == rank


def test_a_package_that_is_not_installed_is_not_found(tmp_path: Path) -> None:
    assert LightningFinder().find_spec(UTILITIES, [str(tmp_path)]) is None
