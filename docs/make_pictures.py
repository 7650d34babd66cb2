"""Make the pictures of README.md and docs/ from a real run of `make train`; needs tmux and chromium, run manually.

`python docs/make_pictures.py terminal` runs the training in a separate terminal and, when it has ended, saves the text
of the terminal with its colors. `tensorboard` takes a screenshot of the curves in TensorBoard, `report` one of the page
that `loopwright report` writes for the run, and `watch` saves the output of `loopwright watch`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
WIDTH, HEIGHT = 110, 60
PORT = 6017
TAGS = "loss|lr/pg1"  # the curves to show


def tmux(*arguments: str) -> str:
    command = ["tmux", "-L", "pictures", "-f", os.devnull, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def terminal() -> None:
    """Run `make train` in a terminal, and write what is on the screen at the end to docs/img/terminal.svg."""
    from rich.console import Console
    from rich.text import Text

    tmux("new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), "make train; echo; sleep 3600")
    try:
        screen = ""
        while "Where to look" not in screen:
            time.sleep(2)
            screen = tmux("capture-pane", "-e", "-p")
        time.sleep(1)
        screen = tmux("capture-pane", "-e", "-p").rstrip()
    finally:
        tmux("kill-server")
    # The interpreter's path is specific to this machine.
    screen = screen.replace(f"{sys.executable} -m tensorboard.main", "tensorboard")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi("$ make train\n" + screen), soft_wrap=True)
    console.save_svg(str(IMAGES / "terminal.svg"), title="make train")


def find_browser() -> str:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium is not installed")
    return browser


def screenshot(address: str, picture: Path, *, width: int, height: int) -> None:
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                find_browser(),
                "--headless=new",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                "--virtual-time-budget=20000",
                f"--screenshot={picture}",
                address,
            ],
            check=True,
            capture_output=True,
            timeout=180,
        )


def report() -> None:
    """Write docs/img/report.png: the HTML report of runs/gpt."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "loopwright", "report", "runs/gpt", "-o", page], check=True, cwd=ROOT)
        screenshot(page.as_uri(), IMAGES / "report.png", width=1400, height=1100)


def watch() -> None:
    """Write docs/img/watch.svg: the curves of runs/gpt in a terminal."""
    from rich.console import Console

    from loopwright.report import read_runs, render_terminal

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(render_terminal(read_runs([ROOT / "runs" / "gpt"]), (WIDTH, 44)))
    console.save_svg(str(IMAGES / "watch.svg"), title="loopwright watch runs/gpt")


def tensorboard() -> None:
    """Write docs/img/tensorboard.png: the scalars of runs/gpt."""
    find_browser()
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", "runs/gpt", "--host", "127.0.0.1", "--port", str(PORT)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_curves()
        address = f"http://127.0.0.1:{PORT}/?forceSVG=true&tagFilter={quote(TAGS)}#timeseries"
        screenshot(address, IMAGES / "tensorboard.png", width=1700, height=620)
    finally:
        server.terminate()
        server.wait()


def _wait_for_curves() -> None:
    address = f"http://127.0.0.1:{PORT}/data/runs"
    for _ in range(120):
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if len(answer.read()) > len("[]"):
                    return
        except OSError:
            continue
    sys.exit("TensorBoard shows no run in runs/gpt; run `make train` first")


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    pictures = {"terminal": terminal, "tensorboard": tensorboard, "report": report, "watch": watch}
    for name in sys.argv[1:] or pictures:
        pictures[name]()
