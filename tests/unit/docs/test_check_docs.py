"""docs/check_docs.py finds what is wrong with a page."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script


@pytest.fixture
def check_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script("docs/check_docs.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_blocks_of_a_page_share_names_and_hidden_code_runs_first(check_docs: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- first:\na = 1\n-->\ntext\n```python\nb = a + 1\n```\n\n```python\nassert b == 2\n```\n")
    assert check_docs.run_examples(page) is None


def test_a_failing_example_is_named_with_the_line_of_the_page(check_docs: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\nassert x == 2\n```\n")
    problem = check_docs.run_examples(page)
    assert problem is not None
    assert 'File "page.md", line 5' in problem


def test_a_warning_is_a_problem(check_docs: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport warnings\nwarnings.warn('careful')\n```\n")
    assert "careful" in check_docs.run_examples(page)


def test_blocks_that_are_only_shown_do_not_run(check_docs: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python no-run\nraise SystemExit(1)\n```\n")
    assert check_docs.run_examples(page) is None


def test_broken_links_are_found_and_code_is_not_a_link(check_docs: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Part\n[here](page.md#part) [gone](gone.md) [web](https://example.org)\n```\na[0](x)\n```\n")
    assert check_docs.broken_links(page) == ["page.md: the link 'gone.md' leads nowhere"]


def test_links_to_missing_headings_are_found(check_docs: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title: `code`\n\n[a](#a-title-code) [b](page.md#a-title-code) [c](#gone) [d](page.md#gone)\n")
    assert check_docs.broken_links(page) == ["page.md: page.md has no heading #gone"] * 2
