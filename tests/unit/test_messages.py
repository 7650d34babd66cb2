"""Warnings point at the user's line, on rank 0."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from loopwright import messages


def frame_of(file: str, name: str = "__main__") -> object:
    """Return a frame that runs in a file under a module's name."""
    space: dict[str, object] = {"__name__": name, "sys": sys}
    exec(compile("frame = sys._getframe()", file, "exec"), space)
    return space["frame"]


def test_a_warning_points_at_the_line_of_the_caller_outside_the_package() -> None:
    with pytest.warns(UserWarning, match="something") as caught:
        messages.warn("something")
    assert caught[0].filename == __file__


def test_a_warning_skips_frames_of_the_package_and_of_libraries(tmp_path: Path) -> None:
    library = str(tmp_path / "site-packages" / "other.py")
    space: dict[str, object] = {"__name__": "loopwright.trainer.x", "warn": messages.warn}
    exec(compile("def inner():\n    warn('deep')", "inside.py", "exec"), space)
    outer: dict[str, object] = {"__name__": "other", "inner": space["inner"]}
    exec(compile("def call():\n    inner()", library, "exec"), outer)
    with pytest.warns(UserWarning, match="deep") as caught:
        outer["call"]()  # type: ignore[operator]
    assert caught[0].filename == __file__


def test_other_ranks_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        messages.warn("once is enough")


@pytest.mark.parametrize(
    ("file", "name", "is_ours"),
    [
        ("a.py", "loopwright.trainer.trainer", True),
        ("/usr/bin/loopwright", "__main__", True),
        ("a.py", "__main__", False),
        ("a.py", "loopwrights", False),
    ],
)
def test_frames_of_loopwright_are_known_by_module_and_program(file: str, name: str, is_ours: bool) -> None:
    assert messages.is_of_loopwright(frame_of(file, name)) is is_ours  # type: ignore[arg-type]


def test_frames_that_start_processes_are_no_user_code() -> None:
    assert messages.is_of_library(frame_of("<string>"))  # type: ignore[arg-type]
    assert messages.is_of_library(frame_of("/x/site-packages/a.py"))  # type: ignore[arg-type]
    assert not messages.is_of_library(frame_of("/home/a/train.py"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "unit", "0 units"), (1, "unit", "1 unit"), (2, "unit", "2 units"), (2, "micro-batch", "2 micro-batches"),
     (2, "process", "2 processes"), (3, "entry", "3 entries"), (2, "day", "2 days"), (3, "epoch", "3 epochs")],
)  # fmt: skip
def test_numbers_agree_with_their_nouns(number: int, noun: str, text: str) -> None:
    assert messages.counted(number, noun) == text


def test_a_text_of_help_is_fitted_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    text = """usage: program [OPTIONS] and much more that is longer than it
       program SHORT

A paragraph of several words that is longer
than a line, and so continued.
Kept:
  --option VALUE  a description that has to be continued below
  some.setting: int | str | float | dict[str, int] (default 5)
      Its text, which is so long that it needs a second line.
"""
    assert messages.fitted(text).split("\n") == [
        "usage: program [OPTIONS] and much more that is",
        "longer than it",
        "       program SHORT",
        "",
        "A paragraph of several words that is longer than a",
        "line, and so continued. Kept:",
        "  --option VALUE  a description that has to be",
        "                  continued below",
        "  some.setting: int | str | float | dict[str, int]",
        "      (default 5)",
        "      Its text, which is so long that it needs a",
        "      second line.",
        "",
    ]
