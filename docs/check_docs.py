"""Check the documentation: `make docs-test`. Runs every example, follows every link, compares generated pages.

The Python blocks of a page run one after the other as one program, in its own process and empty folder, with
warnings as errors; `python docs/check_docs.py docs/data.md` checks one page only. A block that begins with "```python
no-run" is only shown. A comment "<!-- first: ... -->" is code that a page needs; the site shows it folded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^```python\n(.*?)^```$|^<!-- first:\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?[^)]*\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FENCE = re.compile(r"```.*?```", re.DOTALL)
GENERATED = {"docs/lifecycle.md": ["-m", "loopwright", "lifecycle"]}


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]


def program(page: Path) -> str:
    """Return the page's code, each line where it stands on the page, so that a traceback names the page's line."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in CODE.finditer(text):
        group = 1 if match.group(1) is not None else 2
        first = text.count("\n", 0, match.start(group))
        for offset, line in enumerate(match.group(group).splitlines()):
            lines[first + offset] = line
    return "\n".join(lines)


def run_examples(page: Path) -> str | None:
    """Return what went wrong, or None."""
    code = program(page)
    if not code.strip():
        return None
    seed = int(os.environ.get("DOCS_SEED", "0"))
    runner = f"import sys, torch; torch.manual_seed({seed}); "
    runner += "exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__'})"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", runner, str(page.relative_to(ROOT))],
            input=code,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    if done.returncode == 0:
        return None
    return f"{page.relative_to(ROOT)}: an example fails\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def anchors(page: Path) -> set[str]:
    """Return the fragments that links can have: one for each heading of the page, formed as GitHub does."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    problems = []
    for target, fragment in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        linked = page.parent / target if target else page
        if not linked.exists():
            problems.append(f"{page.relative_to(ROOT)}: the link {target!r} leads nowhere")
        elif fragment and linked.suffix == ".md" and fragment not in anchors(linked):
            problems.append(f"{page.relative_to(ROOT)}: {target or page.name} has no heading #{fragment}")
    return problems


def out_of_date(name: str, command: list[str]) -> str | None:
    fresh = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    page = ROOT / name
    if page.exists() and page.read_text(encoding="utf-8") == fresh:
        return None
    return f"{name}: out of date; run `make docs`"


def main(names: list[str]) -> int:
    chosen = [Path(name).resolve() for name in names] or pages()
    unknown = [str(page) for page in chosen if page not in pages()]
    if unknown:
        sys.exit(f"docs-test: expected pages of the documentation, got {', '.join(unknown)}")
    problems = [problem for page in chosen for problem in broken_links(page)]
    if not names:
        problems += [problem for name, command in GENERATED.items() if (problem := out_of_date(name, command))]
    with ThreadPoolExecutor(max_workers=2) as pool:
        problems += [problem for problem in pool.map(run_examples, chosen) if problem]
    for problem in problems:
        print(problem, file=sys.stderr)
    count = sum(bool(program(page).strip()) for page in chosen)
    print(f"docs-test: {len(chosen)} pages, {count} with examples, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
