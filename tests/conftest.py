"""Fixtures that several test files use."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

# A shell's background job ignores Ctrl-C, and so would all programs that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Let the garbage collector leave alone what is there: it takes a second for all that tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
