"""`loopwright replay` asks before it runs the program that a checkpoint names: anyone may have written it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from loopwright.cli.commands import replay as command


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """Return a checkpoint whose program makes a file, and that file."""
    checkpoint, made = tmp_path / "last.ckpt", tmp_path / "made"
    checkpoint.touch()
    words = ["-c", f"open({str(made)!r}, 'w') # \x1b[2K"]
    program = {"command": words, "folder": str(tmp_path), "variables": {"SIZE": "2"}}
    monkeypatch.setattr(command, "_read", lambda path: command._Checkpoint(path, 0, 1, program, 0))
    return str(checkpoint), made


def test_a_program_is_not_run_where_no_one_can_be_asked(
    foreign: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, made = foreign
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert command.replay([checkpoint, "--step", "1"]) == 2
    shown = capsys.readouterr().err
    assert "SIZE=2" in shown
    assert str(made) in shown
    assert "\x1b" not in shown
    assert "got no terminal at which to ask" in shown
    assert not made.exists()
    assert command.replay([checkpoint, "--step", "1", "--yes"]) == 2  # it calls no Trainer.fit
    assert made.exists()


@pytest.mark.parametrize(
    ("answer", "is_run"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_a_program_is_run_after_a_yes(
    foreign: tuple[str, Path],
    answer: str,
    is_run: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint, made = foreign
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert command.replay([checkpoint, "--step", "1"]) == 2
    assert made.exists() is is_run
    assert ("The program was not run." in capsys.readouterr().err) is not is_run
