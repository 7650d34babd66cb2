"""docs/check_site.py finds what is wrong with a site."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

import loopwright as lw


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_script("docs/check_site.py")


def write(folder: Path, **pages: str) -> Path:
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(body, encoding="utf-8")
    return folder


def test_links_to_pages_and_anchors_that_are_not_there(check: ModuleType, tmp_path: Path) -> None:
    site = write(
        tmp_path,
        index='<a href="other.html#here">x</a><a href="other.html#gone">x</a><a href="none.html">x</a>',
        other='<h2 id="here">x</h2><a href="https://example.org/page">x</a>',
    )
    assert sorted(check.broken_links(site)) == [
        "index.html: other.html has no anchor #gone",
        "index.html: the link 'none.html' leads nowhere",
    ]


def test_scripts_and_fonts_of_other_addresses(check: ModuleType, tmp_path: Path) -> None:
    scripts = '<script src="https://cdn.example.org/a.js"></script><img src="//pictures.example.org">'
    site = write(tmp_path, index=scripts)
    assert sorted(check.broken_links(site)) == [
        "index.html: loads //pictures.example.org",
        "index.html: loads https://cdn.example.org/a.js",
    ]


def test_public_names_that_the_reference_has_not(check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    write(tmp_path / "reference", training='<h2 id="loopwright.Trainer"></h2>')
    assert check.missing_names(tmp_path, ["Trainer", "Module"]) == ["reference: Module is missing"]


def test_what_a_browser_saw(check: ModuleType) -> None:
    fine = {"colors": [["default", "white"], ["slate", "black"]], "search": {"a.html": ""}}
    assert check.judge(fine, "a server") == []
    bad = {
        "narrow": {"a.html": {"width": 500, "title": "A", "widest": "<pre>"}, "b.html": {"width": 375, "title": "B"}},
        "colors": [["default", "white"], ["default", "white"]],
        "search": {"a.html": "not among the results"},
    }
    assert check.judge(bad, "a server") == [
        "a.html: 500 pixels wide on a screen of 375: <pre>",
        "search from a server: a.html is not among the results",
        "dark mode: the switch changes default white to default white",
    ]


def test_every_page_has_a_place_in_the_site(check: ModuleType) -> None:
    config = (check.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"- ([\w./-]+\.md)$", config, re.MULTILINE))
    pages = {path.relative_to(check.ROOT / "docs").as_posix() for path in (check.ROOT / "docs").rglob("*.md")}
    assert listed == pages, "add the page to nav in mkdocs.yml"


def test_every_public_name_is_in_the_reference(check: ModuleType) -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (check.ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: loopwright\.(\w+)$", pages, re.MULTILINE))
    assert {name for name in lw.__all__ if not name.startswith("_")} <= listed, "add the name to docs/reference/"
