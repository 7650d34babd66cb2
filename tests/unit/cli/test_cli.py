"""The `loopwright` command."""

from __future__ import annotations

import pytest

from loopwright import __version__
from loopwright.cli import run
from loopwright.trainer.lifecycle import markdown


def test_lifecycle_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lifecycle"]) == 0
    assert capsys.readouterr().out == markdown()


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(["--version"])
    assert capsys.readouterr().out == f"loopwright {__version__}\n"


def test_without_a_command_it_lists_them_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    shown = capsys.readouterr().out
    assert "launch" in shown
    assert "lifecycle" in shown


def test_launch_reads_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--nproc-per-node", "2", "--dry-run", "train.py", "--version"]) == 0
    assert capsys.readouterr().out.endswith("train.py --version\n")
