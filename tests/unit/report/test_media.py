"""Logged images, texts and histograms are found and shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import loopwright as lw
from loopwright.report.media import HISTOGRAM, IMAGE, TEXT, Media, chosen, kind_of_image, read_media_folder
from loopwright.report.page_media import render_media
from loopwright.report.runs import LoggedRun, read_runs


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that logged pictures, texts and histograms by two loggers."""
    folder = tmp_path_factory.mktemp("media") / "run"
    loggers = [lw.CSVLogger(folder, name="csv", version=""), lw.TensorBoardLogger(folder, name="tb", version="")]
    for logger in loggers:
        logger.log_metrics({"loss": 1.0}, step=3)
        logger.log_image("samples", [torch.rand(3, 4, 4), torch.rand(3, 4, 4)], step=3, caption=["one", "<two>"])
        logger.log_text("notes", "a & b", step=3)
    loggers[1].experiment.add_histogram("weights", torch.randn(200), 3)
    loggers[1].experiment.add_histogram("weights", torch.randn(200), 6)
    for logger in loggers:
        logger.save()
        logger.finalize("success")
    return folder


def test_media_of_both_kinds_of_loggers_are_read(logged: Path) -> None:
    files = read_media_folder(logged / "csv")
    assert [(one.kind, one.name, one.step, one.caption) for one in files] == [
        (TEXT, "notes", 3, ""), (IMAGE, "samples/0", 3, "one"), (IMAGE, "samples/1", 3, "<two>"),
    ]  # fmt: skip
    [run] = read_runs([logged])
    assert {(one.kind, one.name) for one in run.media} >= {
        (IMAGE, "samples/0"), (IMAGE, "samples/1"), (TEXT, "notes"), (HISTOGRAM, "weights"),
    }  # fmt: skip


def test_what_two_loggers_have_is_shown_once(logged: Path) -> None:
    [run] = read_runs([logged])
    html = render_media([run], [""])
    assert html.count("<img") == 2
    assert html.count("a &amp; b") == 1
    assert "step 3: &lt;two&gt;" in html
    assert html.count("<polyline") == 2
    assert [html.index(heading) for heading in (">Images", ">Texts", ">Histograms")] == sorted(
        html.index(heading) for heading in (">Images", ">Texts", ">Histograms")
    )


def test_captions_of_tensorboard_stand_below_their_pictures(logged: Path) -> None:
    [run] = read_runs([logged / "tb"])
    pictures = chosen(run.media)
    assert [one.caption for one in pictures[IMAGE, "samples/1"]] == ["<two>"]
    assert (TEXT, "samples/1/caption") not in pictures


def test_a_histogram_has_the_counts_that_were_logged(logged: Path) -> None:
    [run] = read_runs([logged / "tb"])
    histogram = next(one for one in run.media if one.kind == HISTOGRAM)
    assert sum(count for _, _, count in histogram.content) == 200
    edges = [(lower, upper) for lower, upper, _ in histogram.content]
    assert all(lower <= upper for lower, upper in edges)


def test_of_many_steps_the_first_and_the_last_are_shown() -> None:
    many = [Media(TEXT, "note", step, str(step)) for step in range(100)]
    steps = [one.step for one in chosen(many)[TEXT, "note"]]
    assert len(steps) == 8
    assert (steps[0], steps[-1]) == (0, 99)


def test_what_is_not_a_picture_is_not_shown() -> None:
    run = LoggedRun("run", media=[Media(IMAGE, "x", 0, b"<svg onload=alert(1)>")])
    assert "<img" not in render_media([run], [""])
    assert kind_of_image(b"\x89PNG....") == "image/png"


def test_a_run_without_media_has_no_section() -> None:
    assert render_media([LoggedRun("run")], [""]) == ""


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (-0.0455, 0.053, ["-0.025", "0", "0.025", "0.05"]),
        (0.0, 1.0, ["0", "0.25", "0.5", "0.75", "1"]),
        (1200.0, 9000.0, ["2000", "4000", "6000", "8000"]),
        (3.0, 3.0, ["3"]),
    ],
)
def test_histograms_have_an_axis_of_round_values_and_the_steps(low: float, high: float, ticks: list[str]) -> None:
    items = [Media(HISTOGRAM, "weights", step, ((low, high, 5.0),)) for step in (1000, 2000)]
    html = render_media([LoggedRun("run", media=items)], [""])
    assert re.findall(r'class="tick"[^>]*>([^<]*)<', html) == ticks
    assert re.findall(r"<text x[^>]*>([^<]*)<", html) == ["1,000", "2,000", "step"]
