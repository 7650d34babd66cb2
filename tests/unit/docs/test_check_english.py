"""docs/check_english.py finds phrases in prose, strings and comments, and nothing in code."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script


@pytest.fixture
def check_english(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script("docs/check_english.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def problems_in(check_english: ModuleType, name: str, text: str) -> list[str]:
    page = Path(check_english.ROOT) / name
    page.write_text(text)
    found: list[str] = check_english.problems(page)
    return found


def test_a_phrase_is_reported_with_its_line_and_replacement(check_english: ModuleType) -> None:
    assert problems_in(check_english, "page.md", "# Title\n\nIt waits for ever.\n") == [
        "page.md:3: for ever -> forever"
    ]


def test_a_phrase_may_continue_on_the_next_line(check_english: ModuleType) -> None:
    assert problems_in(check_english, "page.md", "Training goes\non.\n") == ["page.md:1: goes on -> continue"]


@pytest.mark.parametrize(
    "text",
    [
        "There is no loader, and so there\nare no batches.",
        "It is no longer needed.",
        "The batch goes on the GPU, the process as a\nwhole.",
        "The value is None. Recommend an amendment to the characteristic.",
        "Optimizer, behavior, analyzer, realistic, promise, exercise, precise.",
        "Quoted: `for ever`, [a link](by hand).",
        "```\nfor ever\n```",
    ],
)
def test_plain_english_and_code_pass(text: str, check_english: ModuleType) -> None:
    assert problems_in(check_english, "page.md", text + "\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "This is no batch.",
        "`x` are no tensors.",
        "none of which",
        "They are dealt.",
        "Nobody asks.",
        "Mend it.",
        "by hand",
    ],
)
def test_other_phrases_do_not(text: str, check_english: ModuleType) -> None:
    assert len(problems_in(check_english, "page.md", text + "\n")) == 1


@pytest.mark.parametrize("word", ["materialise", "deserialised", "Synchronisation", "colours", "neighbour", "misspelt"])
def test_british_spelling_is_reported(word: str, check_english: ModuleType) -> None:
    [problem] = problems_in(check_english, "page.md", f"The {word} of it.\n")
    assert "US spelling" in problem


def test_strings_and_comments_of_python_are_checked_and_names_are_not(check_english: ModuleType) -> None:
    source = '''"""The module."""

dealt = {"colour": 1}  # by hand
error = f"expected {dealt}: it goes "
message = (
    "Training goes "
    f"on with {dealt}"
)
'''
    assert problems_in(check_english, "code.py", source) == [
        "code.py:3: by hand -> manually, hand-written",
        "code.py:3: colour -> US spelling: -or",
        "code.py:6: goes on -> continue",
    ]


def test_only_the_unreleased_section_of_the_changelog_is_checked(check_english: ModuleType) -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n- behaviour\n\n## [0.1.0]\n\n- behaviour\n"
    assert len(problems_in(check_english, "CHANGELOG.md", text)) == 1
