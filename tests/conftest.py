"""Fixtures that several test files use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Let the garbage collector leave alone what is there: it takes a second for all that tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
