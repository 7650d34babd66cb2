"""docs/check_site.py finds what is wrong with a site."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_a_line_that_a_page_hides_is_found(check: ModuleType) -> None:
    page = check.Elements()
    page.feed(
        "<p>x = 0</p><pre><code>import torch\nx = <b>1</b>\n</code></pre><p>y</p><pre><code>print(x)\n</code></pre>"
    )
    assert check.hidden_code({"a": page}, {"a": "import torch\n\nx = 1\nprint(x)"}) == []
    assert "not show: x = 0" in check.hidden_code({"a": page}, {"a": "import torch\nx = 0"})[0]
    assert "not show: x = 1" in check.hidden_code({"a": page}, {"a": "print(x)\nx = 1"})[0]


def test_every_name_that_a_page_uses_is_in_the_reference(check: ModuleType) -> None:
    folder = check.ROOT / "docs"
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (folder / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: loopwright\.(\S+)$", pages, re.MULTILINE))
    used = {name for name in lw.__all__ if not name.startswith("_")}
    for page in [check.ROOT / "README.md", *folder.rglob("*.md")]:
        for node in ast.walk(ast.parse(check.check_docs.program(page))):
            used |= set(_names(node))
    known = {name.split(".")[-1] for name in listed}
    assert {name for name in used if name.split(".")[-1] not in known} == set(), "add the name to docs/reference/"


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the public functions and classes that an import or a dotted name takes from the package."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loopwright"):
        dotted = [f"{node.module}.{name.name}" for name in node.names]
    elif isinstance(node, ast.Attribute) and re.fullmatch(r"(lw|loopwright)(\.\w+)+", ast.unparse(node)):
        dotted = [ast.unparse(node)]
    else:
        return
    for name in dotted:
        path = name.split(".")[1:]
        found: Any = lw
        for index, part in enumerate(path):
            found = getattr(found, part, None) or importlib.import_module(f"loopwright.{'.'.join(path[: index + 1])}")
            if not isinstance(found, ModuleType):  # what follows is a method or an attribute, in the entry of the class
                yield ".".join(path[: index + 1])
                break
