"""Make the pictures of README.md and docs/ from real runs; needs tmux and chromium, run manually.

`python docs/make_pictures.py terminal` runs the training in a separate terminal and, when it has ended, saves the text
of the terminal with its colors. `tensorboard` takes a screenshot of the curves in TensorBoard, `report` one of the page
that `loopwright report` writes for the run, and `watch` saves the output of `loopwright watch`.

`report-runs` trains examples/digits.py at three learning rates and shows their report; `site` shows a page of the site
that `make docs` has written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
WIDTH, HEIGHT = 110, 60
PORT = 6017
TAGS = "loss|lr/pg1"  # the curves to show
RATES = (0.001, 0.003, 0.01)


def tmux(*arguments: str) -> str:
    command = ["tmux", "-L", "pictures", "-f", os.devnull, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def terminal() -> None:
    """Run `make train` in a terminal, and write what is on the screen at the end to docs/img/terminal.svg.

    The environment variable STEPS shortens the run.
    """
    from rich.console import Console
    from rich.text import Text

    steps = os.environ.get("STEPS")
    command = f"make train STEPS={steps}" if steps else "make train"
    tmux("new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), f"{command}; echo; sleep 3600")
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
    for module, program in (("tensorboard.main", "tensorboard"), ("loopwright", "loopwright")):
        screen = re.sub(rf"\S*python\S* -m {module}", program, screen)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(f"$ {command}\n{screen}"), soft_wrap=True)
    console.save_svg(str(IMAGES / "terminal.svg"), title=command)


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


def report_runs() -> None:
    """Write docs/img/report-runs.png: the HTML report of three runs with images and histograms."""
    from loopwright.report import read_runs, write_report

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # paths on the page are relative
        for rate in RATES:
            _train_digits(Path("digits"), rate)
        page = write_report(read_runs([Path("digits")]), "report.html", title="Digits, three learning rates")
        screenshot(page.absolute().as_uri(), IMAGES / "report-runs.png", width=1400, height=2000)
    _reduce_colors(IMAGES / "report-runs.png")


def _train_digits(folder: Path, rate: float) -> None:
    import loopwright as lw
    from loopwright.callbacks import LearningRateMonitor, SampleLogger, WeightStatistics

    sys.path.insert(0, str(ROOT / "examples"))
    from digits import Classifier, Digits

    def predictions(module: Any, outputs: object, batch: Any) -> tuple[Tensor, list[str]]:  # Any: the example's own
        images, labels = (part[:4] for part in batch)
        found = module(images).argmax(dim=1)
        captions = [f"predicted {one}, is {label}" for one, label in zip(found.tolist(), labels.tolist(), strict=True)]
        return images.view(-1, 1, 8, 8), captions

    lw.seed_everything(0)
    trainer = lw.Trainer(
        accelerator="cpu",
        max_epochs=3,
        log_every_n_steps=5,
        logger=lw.TensorBoardLogger(".", name=str(folder), version=f"lr={rate}"),
        callbacks=[
            LearningRateMonitor(),
            SampleLogger(predictions, name="predictions"),
            WeightStatistics(histogram_bins=30),
        ],
    )
    trainer.fit(Classifier(lr=rate), Digits(batch_size=64))


def _reduce_colors(picture: Path) -> None:
    from PIL import Image

    with Image.open(picture) as image:
        reduced = image.convert("RGB").quantize(255)
    reduced.save(picture, optimize=True)


def site() -> None:
    """Write docs/img/site.png: a guide on the site."""
    page = ROOT / "site" / "guides" / "debugging.html"
    if not page.is_file():
        sys.exit("there is no site; run `make docs` first")
    screenshot(page.as_uri(), IMAGES / "site.png", width=1300, height=900)
    _reduce_colors(IMAGES / "site.png")


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
    pictures = {
        "terminal": terminal,
        "tensorboard": tensorboard,
        "report": report,
        "watch": watch,
        "report-runs": report_runs,
        "site": site,
    }
    for name in sys.argv[1:] or pictures:
        pictures[name]()
