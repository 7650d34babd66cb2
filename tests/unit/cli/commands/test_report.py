"""`loopwright report` and `loopwright watch`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import loopwright as lw
from loopwright.cli import run


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    logger = lw.CSVLogger(tmp_path / "runs", name=None, version="first")
    for step in range(30):
        logger.log_metrics({"train_loss": 1 / (step + 1)}, step=step)
    logger.save()
    return tmp_path / "runs" / "first"


def test_report_writes_a_page_and_says_what_is_in_it(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = logged.parent / "page.html"
    assert run(["report", str(logged), "-o", str(page), "--title", "My run", "--smoothing", "0.3"]) == 0
    assert capsys.readouterr().out.startswith(f"{page}: 1 run, 1 metric, 0 checkpoints, ")
    text = page.read_text(encoding="utf-8")
    assert "<h1>My run</h1>" in text
    assert 'step="0.01" value="0.30"' in text


def test_report_writes_to_the_working_directory(logged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(logged)
    assert run(["report", f"base={logged}", "--no-checkpoints"]) == 0
    assert "<h1>base</h1>" in Path("report.html").read_text(encoding="utf-8")


def test_report_names_what_could_not_be_read(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logged / "hparams.yaml").write_text("[")
    assert run(["report", str(logged), "-o", str(logged / "page.html")]) == 0
    assert "hparams.yaml cannot be read" in capsys.readouterr().err


def test_watch_prints_the_curves_once_where_there_is_no_terminal(
    logged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], ["--once"], ["--metric", "*loss", "--smoothing", "0.5"]):
        assert run(["watch", str(logged), *arguments]) == 0
        shown = capsys.readouterr().out
        assert "first  step 29" in shown
        assert "train_loss 0.03333" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere"], "No such directory: nowhere"),
        (["watch", "nowhere"], "No such directory: nowhere"),
        (["report", "RUN", "--smoothing", "1"], "smoothing=1.0"),
        (["watch", "RUN", "--metric", "los"], "No metric is named 'los'"),
        (["report", "RUN", "-o", "no/such/page.html"], "in a directory that does not exist"),
    ],
)
def test_what_cannot_be_done_is_said(
    logged: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(logged) if word == "RUN" else word for word in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"loopwright {arguments[0]}: ")
    assert message in said
    assert "To fix it" in said


def test_a_directory_without_metrics_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "No logged metrics were found" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "package"), [("report", "plotly"), ("watch", "plotille")])
def test_a_missing_package_is_named_with_the_way_to_get_it(
    logged: Path, command: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert run([command, str(logged)]) == 2
    assert "pip install 'loopwright[report]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["report"], ["watch"], ["watch", ".", "--every", "0"], ["report", ".", "--out"]])
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(arguments)
