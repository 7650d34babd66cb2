"""The program `loopwright` itself."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from loopwright import __main__ as program


def test_output_that_nobody_reads_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)

        def run(arguments: Any) -> int:
            sys.stdout.write("a line\n")
            return 0

        monkeypatch.setattr(program, "run", run)
        assert program.main() == 141
        sys.stdout.write("more, at the end\n")
        sys.stdout.flush()


def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "run", lambda arguments: 3)
    assert program.main() == 3
