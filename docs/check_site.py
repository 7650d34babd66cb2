"""Check the site that `make docs` built, in a real browser: `make docs-test`.

Links lead somewhere, nothing comes from another address, the reference has every public name, and a page shows all the
code that its examples ran with. In chromium: no page
is wider than a phone, search finds each guide by its title, also when pages are opened from the folder, and the switch
makes pages dark. Without chromium these say that they were skipped.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import check_docs

ROOT = Path(__file__).resolve().parent.parent
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 375  # CSS pixels
TIMEOUT_S = 240
EMPTY_INDEX = {"config": {"lang": ["en"], "separator": "[\\s\\-]+", "pipeline": []}, "docs": []}

# Each probe sends what it saw to the server. A page is looked at in an iframe, as wide as the screen would be.
COMMON = """<!doctype html><meta charset="utf-8"><body><script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const until = async (ask, ms) => { for (let left = ms; left > 0; left -= 20) {
  const answer = ask(); if (answer) return answer; await wait(20); } return ask(); };
const open_ = (address, width) => new Promise((done) => { const frame = document.createElement("iframe");
  frame.style = `border:0;width:${width}px;height:900px`; frame.src = address;
  frame.onload = () => done(frame); document.body.append(frame); });
const tell = (seen) => fetch(ANSWER, { method: "POST", mode: "no-cors", body: JSON.stringify(seen) });
const search = async (page, titles) => { const seen = {};
  const input = await until(() => page.querySelector("input.md-search__input"), 5000);
  const toggle = page.querySelector("#__search");
  toggle.checked = true; toggle.dispatchEvent(new Event("change")); input.focus();
  for (const [address, title] of titles) { input.value = title; input.dispatchEvent(new Event("keyup"));
    const found = () => [...page.querySelectorAll(".md-search-result__link")]
      .map((link) => new URL(link.href).pathname).filter((path) => path.endsWith("/" + address));
    seen[address] = (await until(() => found().length, 20000)) ? "" : "not among the results"; }
  return seen; };
"""
NARROW = """(async () => { const seen = {}; let next = 0;
  const look = async () => { while (next < PAGES.length) { const page = PAGES[next++];
    const frame = await open_("/narrow/" + page, PHONE); await wait(50);
    const root = frame.contentDocument.documentElement;
    seen[page] = { width: root.scrollWidth, title: frame.contentDocument.title };
    if (root.scrollWidth > PHONE) seen[page].widest = [...frame.contentDocument.querySelectorAll("main *")]
      .filter((one) => one.getBoundingClientRect().right > PHONE + 1).map((one) => one.outerHTML.slice(0, 160))[0];
    frame.remove(); } };
  await Promise.all([look(), look(), look()]); await tell({ narrow: seen }); })();"""
WIDE = """(async () => { const frame = await open_("/index.html", 1300); const page = frame.contentDocument;
  const look = () => [page.body.dataset.mdColorScheme, frame.contentWindow.getComputedStyle(page.body).backgroundColor];
  const before = look();
  const label = await until(() => page.querySelector(".md-header__option label:not([hidden])"), 5000);
  label.click(); await wait(300); const after = look();
  await tell({ colors: [before, after], search: await search(page, TITLES) }); })();"""
FOLDER = """(async () => { await tell({ search: await search(document, TITLES) }); })();"""


class Elements(HTMLParser):
    """The addresses, the anchors and the code of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []  # by the page itself, without a click
        self.anchors: set[str] = set()
        self.code: list[str] = []
        self._is_code = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        values = dict(attrs)
        self._is_code = self._is_code or tag == "pre"
        self.anchors.update(value for name in ("id", "name") if (value := values.get(name)))
        if tag == "a" and (target := values.get("href")):
            self.links.append(target)
        for name in ("src", "href") if tag in ("script", "link", "img", "iframe", "source") else ():
            if (target := values.get(name)) and values.get("rel") not in ("canonical", "next", "prev"):
                self.loaded.append(target)

    def handle_endtag(self, tag: str) -> None:
        """Note where a block of code ends."""
        self._is_code = self._is_code and tag != "pre"

    def handle_data(self, data: str) -> None:
        """Note code."""
        if self._is_code:
            self.code.append(data)


def read_pages(site: Path) -> dict[Path, Elements]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Elements()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def broken_links(site: Path) -> list[str]:
    """Return what pages link to and is not there, and what they load from elsewhere."""
    pages, problems = read_pages(site), []
    for page, elements in pages.items():
        if page.name == "404.html":  # its links are those of the server's root
            continue
        name = page.relative_to(site)
        for target in elements.loaded:
            if urlsplit(target).netloc:
                problems.append(f"{name}: loads {target}")
        for target in {*elements.links, *elements.loaded}:
            address, fragment = urldefrag(target)
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            linked = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            linked = linked / "index.html" if linked.is_dir() else linked
            if not linked.is_file():
                problems.append(f"{name}: the link {target!r} leads nowhere")
            elif fragment and linked in pages and unquote(fragment) not in pages[linked].anchors | {"__tabbed"}:
                problems.append(f"{name}: {linked.relative_to(site)} has no anchor #{fragment}")
    return problems


def missing_names(site: Path, names: list[str]) -> list[str]:
    """Return the public names that the reference does not have."""
    anchors = {anchor for path, page in read_pages(site / "reference").items() if path for anchor in page.anchors}
    return [f"reference: {name} is missing" for name in names if f"loopwright.{name}" not in anchors]


def hidden_code(pages: dict[str, Elements], programs: dict[str, str]) -> list[str]:
    """Return the first line of each program that its page does not show where it runs, so that a copy would fail."""
    problems = []
    for name, program in programs.items():
        shown = iter("".join(pages[name].code).splitlines())
        for line in filter(str.strip, program.splitlines()):
            if line not in shown:  # `in` continues after the last one that was found
                problems.append(f"{name}: the examples run with a line that the page does not show: {line}")
                break
    return problems


class Server(http.server.ThreadingHTTPServer):
    """The site and the probes on this machine, and the answers of the browser."""

    def __init__(self, site: Path, probes: dict[str, str]) -> None:
        self.site, self.probes = site, probes
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, the probes, and below /narrow/ the same pages with an empty index, which is quicker."""

    server: Server

    def do_GET(self) -> None:
        """Serve a file or a probe."""
        name = urlsplit(self.path).path
        if name.removeprefix("/") in self.server.probes:
            self._send(self.server.probes[name.removeprefix("/")].encode(), "text/html")
        elif name == "/narrow/search/search_index.json":
            self._send(json.dumps(EMPTY_INDEX).encode(), "application/json")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Take an answer."""
        self.server.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(b"", "text/plain")

    def translate_path(self, path: str) -> str:
        """Return the file of an address."""
        name = unquote(urlsplit(path).path).removeprefix("/narrow").lstrip("/")
        return str(self.server.site / name)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def browser(address: str) -> Iterator[None]:
    """Run chromium on a page, and end it with all its processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--window-size=1400,1000", "--remote-debugging-port=0", f"--user-data-dir={profile}", address,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def look(site: Path, titles: list[tuple[str, str]]) -> list[str]:
    """Return what is wrong with the pages in a browser."""
    pages = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    probes: dict[str, str] = {}
    server = Server(site, probes)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    values = {"ANSWER": f"{address}/seen", "PAGES": pages, "PHONE": PHONE, "TITLES": titles}
    start = COMMON + "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    probes.update({"narrow-probe": f"{start}{NARROW}</script>", "wide-probe": f"{start}{WIDE}</script>"})
    # Opened from the folder, a page cannot look into another: the probe is part of a page.
    opened = site / "folder-probe.html"
    script = start[start.index("<script>") :] + FOLDER + "</script></body>"
    opened.write_text((site / "index.html").read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    problems = []
    try:
        for where in (f"{address}/narrow-probe", f"{address}/wide-probe", opened.as_uri()):
            with browser(where):
                try:
                    seen = server.answers.get(timeout=TIMEOUT_S)
                except queue.Empty:
                    problems.append(f"{where}: the browser gave no answer within {TIMEOUT_S} s")
                else:
                    problems += judge(seen, "the folder" if where.startswith("file:") else "a server")
    finally:
        opened.unlink()
        server.shutdown()
    return problems


def judge(seen: dict[str, Any], origin: str) -> list[str]:
    """Return what is wrong with what a probe saw."""
    problems = [
        f"{page}: {one['width']} pixels wide on a screen of {PHONE}: {one.get('widest', '')}"
        for page, one in seen.get("narrow", {}).items()
        if one["width"] > PHONE
    ]
    problems += [f"{page}: without a title" for page, one in seen.get("narrow", {}).items() if not one["title"]]
    problems += [f"search from {origin}: {page} is {what}" for page, what in seen.get("search", {}).items() if what]
    if "colors" in seen:
        (before, light), (after, dark) = seen["colors"]
        if (before, after) != ("default", "slate") or light == dark:
            problems.append(f"dark mode: the switch changes {before} {light} to {after} {dark}")
    return problems


def guides(site: Path) -> list[tuple[str, str]]:
    """Return address and title of each page to be found: all but the reference, and files of the repository."""
    listed = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        if page.name != "index.md" and not name.startswith(("reference/", "design/")):
            title = page.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
            listed.append((name, title.replace("`", "")))
    return listed


def main() -> int:
    import loopwright

    site = ROOT / "site"
    names = [name for name in loopwright.__all__ if not name.startswith("_")]
    problems = broken_links(site) + missing_names(site, names)
    pages = {path.relative_to(site).as_posix(): page for path, page in read_pages(site).items()}
    programs = {
        page.relative_to(ROOT / "docs").with_suffix(".html").as_posix(): check_docs.program(page)
        for page in (ROOT / "docs").rglob("*.md")
    }
    problems += hidden_code(pages, programs)
    if BROWSER is None:
        print("docs-test: SKIPPED the site in a browser: chromium is not installed (apt-get install chromium)")
    else:
        problems += look(site, guides(site))
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"docs-test: {len(read_pages(site))} pages of the site, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
