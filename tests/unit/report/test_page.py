"""What is in the page; test_page_in_browser.py opens it."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from loopwright.errors import ConfigError
from loopwright.report.checkpoints import CheckpointFile
from loopwright.report.page import render_page, write_report
from loopwright.report.runs import LoggedRun, Series, read_runs


class Reader(HTMLParser):
    """Takes a page apart: texts of elements by tag, attributes that name addresses, and what was left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.data: dict[str, Any] = {}
        self._id: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "action", "srcset")]
        self._id = dict(attributes).get("id")
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._id == "data" and self.open[-1] == "script":
            self.data = json.loads(data)
        elif self.open and self.open[-1] not in ("script", "style") and data.strip():
            self.texts.append((self.open[-1], data))

    def all_text(self) -> str:
        return "\n".join(text for _, text in self.texts)


def two_runs() -> list[LoggedRun]:
    one = LoggedRun("one", [Path("logs/one")], ["CSV"], {"loss": Series("loss", [0, 5], [2.0, 1.0])})
    two = LoggedRun("two", [Path("logs/two")], ["CSV"], {"loss": Series("loss", [0, 5], [3.0, 0.5])})
    one.config, two.config = {"lr": "0.1", "width": "8"}, {"lr": "0.2", "width": "8"}
    return [one, two]


def test_the_page_is_complete_and_refers_to_no_address(trained: Path) -> None:
    page = Reader(render_page(read_runs([trained])))
    assert page.open == []
    assert page.addresses == ["data:,"]


def test_the_page_forbids_every_request(trained: Path) -> None:
    text = render_page(read_runs([trained]))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "unsafe-eval" not in policy


def test_the_page_holds_the_curves_as_they_were_logged(trained: Path) -> None:
    (run,) = read_runs([trained])
    page = Reader(render_page([run]))
    curves = {curve["name"]: curve for chart in page.data["charts"] for curve in chart["curves"]}
    for name in ("train_loss", "val_loss", "lr-SGD"):
        assert curves[name]["steps"] == run.series[name].steps
        assert curves[name]["values"] == run.series[name].values
    assert len(page.data["charts"][0]["curves"]) == 2  # both losses in the first
    assert page.data["runs"][0]["axes"]["time"][0][-1] == 23


def test_the_tables_can_be_read_without_scripts(trained: Path) -> None:
    (run,) = read_runs([trained])
    text = Reader(render_page([run], title="Line")).all_text()
    for shown in ("Line", "train_loss", "last.ckpt", "best", "last", "0.1", "torch", "Environment", "Configuration"):
        assert shown in text
    assert f"{min(run.series['val_loss'].values):.6g} " in text


def test_runs_are_compared_and_differences_marked() -> None:
    text = render_page(two_runs())
    marked = re.findall(r'<tr class="differs">(.*?)</tr>', text)
    assert len(marked) == 1
    assert "lr" in marked[0]
    assert "width" not in marked[0]
    page = Reader(text)
    assert [curve["run"] for curve in page.data["charts"][0]["curves"]] == [0, 1]
    assert page.data["runs"][1]["name"] == "two"


def test_what_is_not_finite_is_a_gap_and_is_said() -> None:
    runs = two_runs()
    runs[0].series["loss"] = Series("loss", list(range(9)), [1.0, math.nan, *[math.inf] * 6, 2.0])
    page = Reader(render_page(runs))
    assert page.data["charts"][0]["curves"][0]["values"] == [1.0, *[None] * 7, 2.0]
    assert "one: loss is not finite at step 1, 2, 3, 4, 5, … (7 in all)" in page.all_text()


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028&amp;'\""


def test_names_are_shown_as_they_are_whatever_they_hold(tmp_path: Path) -> None:
    run = LoggedRun(EVIL, [Path(EVIL)], [EVIL], {EVIL: Series(EVIL, [0, 1], [1.0, 2.0])})
    run.config, run.environment, run.problems = {EVIL: EVIL}, {EVIL: EVIL}, [EVIL]
    run.timeline, run.timeline_notes = {EVIL: 1.0}, [EVIL]
    run.checkpoints = [CheckpointFile(Path(EVIL), 1, 0, 10, 0.0, (EVIL,), 1.0, EVIL, EVIL)]
    for runs in ([run], [run, *two_runs()]):
        page = Reader(render_page(runs, title=EVIL))
        assert page.open == []
        assert page.addresses == ["data:,"]
        assert page.data["runs"][0]["name"] == EVIL
        assert page.all_text().count("alert(2)") >= 8


def test_a_long_run_makes_no_long_page() -> None:
    steps = list(range(100_000))
    run = LoggedRun("long", [Path("x")], ["CSV"], {"loss": Series("loss", steps, [1 / (1 + step) for step in steps])})
    run.axes["time"] = (steps, [float(step) for step in steps])
    library = len(render_page(two_runs()))
    assert len(render_page([run])) < library + 200_000


def test_the_page_of_a_plain_run_has_less_than_two_megabytes(trained: Path) -> None:
    assert len(render_page(read_runs([trained])).encode()) < 2_000_000


def test_runs_are_called_what_they_do_not_share() -> None:
    runs = two_runs()
    runs[0].name, runs[1].name = "logs/lr=0.1/a", "logs/lr=0.2/a"
    page = Reader(render_page(runs))
    assert [run["name"] for run in page.data["runs"]] == ["lr=0.1/a", "lr=0.2/a"]


def test_the_heading_names_what_runs_share_and_their_number() -> None:
    runs = [LoggedRun(f"logs/a/version_{number}", [Path("x")], ["CSV"], {}) for number in range(12)]
    page = Reader(render_page(runs))
    assert ("h1", "logs/a: 12 runs") in page.texts
    assert ("td", "version_11") in page.texts
    assert ("td", "logs/a/version_11") not in page.texts


def test_runs_without_metrics_are_listed_and_fill_nothing_else() -> None:
    failed = [LoggedRun(f"logs/version_{number}", [Path(f"logs/version_{number}")], ["CSV"]) for number in range(13)]
    failed[3].timeline, failed[3].problems = {"forward": 1.0}, ["x.yaml cannot be read"]
    good = two_runs()
    for number, run in enumerate(good):
        run.name = f"logs/version_{20 + number}"
    page = Reader(render_page([*failed[:7], *good, *failed[7:]]))
    assert [run["name"] for run in page.data["runs"]] == ["version_20", "version_21"]
    assert ("h1", "logs: 2 runs") in page.texts
    assert ("summary", "13 runs without metrics") in page.texts
    text = page.all_text()
    assert [text.count(f"version_{number}\n") for number in (3, 12)] == [2, 2]  # name and folder, in the list
    assert "version_3: x.yaml cannot be read" in text
    assert "Where the time went" not in text
    assert page.data["colors"][:2] == ["#0072b2", "#d55e00"]


def test_runs_that_all_lack_metrics_are_shown() -> None:
    run = LoggedRun("run", [Path("run")], ["CSV"], timeline={"forward": 1.0})
    text = Reader(render_page([run])).all_text()
    assert "without metrics" not in text
    assert "Where the time went" in text


def test_tables_have_no_empty_columns() -> None:
    runs = two_runs()
    heads = [text for tag, text in Reader(render_page(runs)).texts if tag == "th"]
    assert "checkpoints" not in heads
    assert "training time" not in heads
    runs[0].axes["time"] = ([0, 5], [0.0, 0.002])
    runs[1].checkpoints = [CheckpointFile(Path("logs/two/a.ckpt"), 7, None, 10, 0.0)]
    runs[1].timeline = {"forward": 3.0}
    page = Reader(render_page(runs))
    heads = [text for tag, text in page.texts if tag == "th"]
    assert {"checkpoints", "training time", "size"} <= set(heads)
    assert not {"is", "score"} & set(heads)
    assert heads[heads.index("phase") + 1 : heads.index("metric")] == ["two"]
    assert ("td", "2 ms") in page.texts
    assert ("td", "7") in page.texts  # steps of the checkpoint, beyond what was logged


def test_tests_come_after_training_and_validation_in_their_chart() -> None:
    names = ["test_loss", "train_loss", "val_loss"]
    run = LoggedRun("run", [Path("x")], ["CSV"], {name: Series(name, [1], [1.0]) for name in names})
    assert Reader(render_page([run])).data["charts"][0]["names"] == ["train_loss", "val_loss", "test_loss"]


def test_twenty_runs_have_twenty_colors() -> None:
    runs = [LoggedRun(f"run{number}", [Path("x")], ["CSV"], two_runs()[0].series) for number in range(20)]
    page = Reader(render_page(runs))
    assert len(set(page.data["colors"][:20])) == 20


def test_hundreds_of_metrics_are_folded_and_shorter() -> None:
    names = [f"layer{number}/grad_norm" for number in range(100)] + [
        f"layer{number}/weight_norm" for number in range(100)
    ]
    series = {name: Series(name, list(range(1000)), [1.0] * 1000) for name in names}
    text = render_page([LoggedRun("wide", [Path("x")], ["CSV"], series)])
    groups = re.findall(r'<details class="many"( open)?><summary><h2>([^<]*?) ?<', text)
    assert ("", "Gradients and weights: layer99") in groups
    assert [heading for _, heading in groups][:3] == [f"Gradients and weights: layer{number}" for number in range(3)]
    assert len(Reader(text).data["charts"][0]["curves"][0]["steps"]) == 300


def test_the_timeline_is_shown_as_fractions_of_the_total() -> None:
    runs = two_runs()
    runs[0].timeline, runs[0].timeline_notes = {"forward": 3.0, "data wait": 1.0}, ["bound by: compute"]
    page = Reader(render_page(runs))
    assert page.data["runs"][0]["phases"] == [["forward", 0.75], ["data wait", 0.25]]
    assert page.data["runs"][1]["phases"] == []
    assert "3 s, 75.0%" in page.all_text()
    assert "bound by: compute" in page.all_text()


def test_advice_for_several_runs_is_given_once() -> None:
    runs = two_runs()
    for run in runs:
        run.timeline, run.timeline_notes = {"forward": 3.0}, ["bound by: compute"]
    page = Reader(render_page(runs))
    assert page.all_text().count("bound by: compute") == 1
    after = [text for _, text in page.texts[page.texts.index(("li", "bound by: compute ")) :]]
    assert [text for text in after if text.strip()][1:3] == ["one", "two"]


def test_small_phases_share_a_color_so_that_each_color_is_one_thing() -> None:
    run = LoggedRun("one", [Path("logs/one")], ["CSV"], {"loss": Series("loss", [0, 5], [2.0, 1.0])})
    run.timeline = {f"phase {number}": float(number) for number in range(1, 15)}
    phases = Reader(render_page([run])).data["runs"][0]["phases"]
    assert [name for name, _ in phases] == [*(f"phase {number}" for number in range(8, 15)), "other"]
    assert sum(part for _, part in phases) == pytest.approx(1)


def test_a_page_is_replaced_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    assert write_report(two_runs(), path) == path
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("path", ["", "no/such/page.html"])
def test_a_place_where_no_file_can_be_is_an_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="director"):
        write_report(two_runs(), tmp_path / path)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_a_smoothing_out_of_range_is_an_error(smoothing: float) -> None:
    with pytest.raises(ConfigError, match="smoothing="):
        render_page(two_runs(), smoothing=smoothing)


def test_no_runs_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no runs"):
        render_page([])


def test_names_that_utf_8_cannot_write_are_shown_by_their_codes(tmp_path: Path) -> None:
    name = "a\udcff"
    run = LoggedRun(name, [Path("logs/one")], ["CSV"], {"b\ud800": Series("b\ud800", [0, 5], [2.0, 1.0])})
    page = Reader(write_report([run], tmp_path / "page.html").read_text(encoding="utf-8"))
    assert r"b\ud800" in page.all_text()
    assert page.data["runs"][0]["name"] == name
