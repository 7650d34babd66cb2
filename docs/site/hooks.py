"""What the site needs beyond docs/: the repository's other pages, links to them, and the package without its neighbors.

MkDocs calls these functions. Pages in docs/ link to files of the repository, such as ../benchmarks/RESULTS.md. Those
become pages of the site: Markdown as it is, code in a block.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / ".venv-docs" / "package" / "loopwright"
LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)#\s]+)((?:#[^)\s]+)?\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"^<!-- first:\n(.*?)^-->$\n?", re.MULTILINE | re.DOTALL)
FOLDED = (
    '<details class="setup" markdown="1">\n<summary>Set-up: run this before the examples below</summary>\n\n'
    "```python\n\\1```\n\n</details>\n"
)
LANGUAGES = {".py": "python", ".yaml": "yaml"}


def on_startup(command: str, dirty: bool) -> None:
    """Link the package's own files into one folder: beside them are tests and environments."""
    names = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    for name in names:
        folder = ROOT.joinpath(*name.split(".")[1:])
        linked = PACKAGE.joinpath(*name.split(".")[1:])
        linked.mkdir(parents=True, exist_ok=True)
        for file in linked.glob("*.py"):
            if file.is_symlink():  # never a source, should the folder itself be a link
                file.unlink()
        for file in folder.glob("*.py"):
            (linked / file.name).symlink_to(file)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    waiting = [
        (file.src_uri, file.content_string) for file in files.documentation_pages() if not file.src_uri.startswith("_")
    ]
    while waiting:
        uri, text = waiting.pop()
        for target in _targets(uri, text):
            name = _page_of(target)
            path = ROOT / target
            if target.startswith("docs/") or not path.is_file() or files.get_file_from_path(name) is not None:
                continue
            content = path.read_text(encoding="utf-8")
            if path.suffix != ".md":
                language = LANGUAGES.get(path.suffix, "text")
                content = f"# {target}\n\n````{language}\n{content}````\n"
            files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
            waiting.append((name, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links between pages, and show what the examples need, folded."""
    uri = page.file.src_uri
    here = posixpath.dirname(uri)

    def rewrite(match: re.Match[str]) -> str:
        target = _target(uri, match[2])
        name = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
        if files.get_file_from_path(name) is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(name, here or '.')}{match[3]}"

    parts = FENCE.split(HIDDEN.sub(FOLDED, markdown))
    parts[::2] = [LINK.sub(rewrite, part) for part in parts[::2]]
    return "".join(parts).replace("```python no-run", "```python")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name source files as they are in the repository."""
    return html.replace(".venv-docs/package/loopwright/", "")


def _target(uri: str, link: str) -> str:
    """Return the repository's path of what a page links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_source_of(uri)), link))


def _targets(uri: str, text: str) -> list[str]:
    return [_target(uri, match[2]) for match in LINK.finditer(FENCE.sub("", text))]


def _source_of(uri: str) -> str:
    """Return where a page of the site is in the repository."""
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def _page_of(target: str) -> str:
    """Return the page of the site for a file outside docs/."""
    return f"repository/{target}" + ("" if target.endswith(".md") else ".md")
