"""Fixtures that several test files use."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest

# Tests fork: with several threads, OpenMP hangs in a fork. `make test` sets it, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job ignores Ctrl-C, and so would all programs that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what is imported and collected: it would walk all of it, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Let the garbage collector leave alone what is there: it takes a second for all that tests have imported."""
    gc.collect()
    gc.freeze()
