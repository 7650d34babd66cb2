"""The page in a browser: it draws, its controls work, nothing fails and nothing is fetched."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright.report.page import render_page
from loopwright.report.runs import read_runs

from .toy_runs import falling, write_lines

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

# Uses the controls as a hand would, and writes down what is drawn after each.
PROBE = """
<pre id="seen"></pre><script>(async () => {
  const ready = () => new Promise((done) => { const look = () =>
    document.body.dataset.ready === "yes" ? done() : setTimeout(look, 5); setTimeout(look, 0); });
  const drawn = () => [...document.querySelectorAll(".plot")].filter((plot) => plot.data).map((plot) => ({
    title: plot.parentNode.firstChild.textContent, lines: plot.querySelectorAll("path.js-line").length,
    legend: [...plot.querySelectorAll(".legendtext")].map((text) => text.textContent),
    axis: plot.querySelector(".xtitle")?.textContent, y: plot.layout.yaxis.type, range: plot.layout.xaxis.range,
    yrange: plot.layout.yaxis.range,
    marks: (plot.layout.shapes || []).length,
    traces: plot.data.map((one) => ({ name: one.name, x: one.x, y: one.y, opacity: one.opacity })) }));
  const set = async (id, value) => { const control = document.querySelector(id);
    if (control.type === "checkbox") control.checked = value; else control.value = value;
    control.dispatchEvent(new Event("change")); await ready(); };
  const seen = {};
  await ready(); seen.begin = drawn();
  await set("#smoothing", "0"); seen.raw = drawn();
  await set("#axis", "time"); seen.time = drawn();
  await set("#log", true); await set("#marks", false); seen.log = drawn();
  await set("[data-run='0']", false); seen.hidden = drawn();
  await set("#axis", "step");
  await Plotly.relayout(document.getElementById("chart-0"), {"xaxis.range[0]": 10, "xaxis.range[1]": 20});
  await new Promise((done) => setTimeout(done, 200)); seen.zoomed = drawn();
  const box = document.getElementById("filter");
  box.value = "^VAL_loss"; box.dispatchEvent(new Event("input")); await ready();
  const seeable = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());
  seen.filtered = { charts: seeable(".chart[data-names] h3").map((one) => one.textContent),
    shown: document.getElementById("shown").textContent,
    rows: seeable("#numbers tbody tr").map((row) => row.firstChild.textContent) };
  box.value = ""; box.dispatchEvent(new Event("input")); await ready();
  seen.runs = [...document.querySelectorAll("#runs label")].map((one) => one.textContent);
  const plot = document.getElementById("chart-0"), group = plot.closest("details");
  group.open = false; await new Promise((done) => setTimeout(done, 50)); Plotly.purge(plot); delete plot.data;
  await set("#log", false); const before = Boolean(plot.data);
  group.open = true; await new Promise((done) => setTimeout(done, 50)); await ready();
  seen.folded = { before, after: Boolean(plot.data) };
  seen.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.getElementById("seen").textContent = JSON.stringify(seen);
})();</script></body>"""


CONSTANT: dict[str, Callable[[int], float]] = {
    "small": lambda step: 0.001,
    "negative": lambda step: -5.0,
    "zero": lambda step: 0.0,
    "rounded": lambda step: 7.0 * (1 + step * 1e-12),
    "gaps": lambda step: 2.0 if step % 2 else math.nan,
}


def browse(page: Path, folder: Path, *options: str) -> tuple[str, str]:
    """Return the page's elements as they are at the end, and what was said on the console."""
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000", "--enable-logging=stderr",
        "--window-size=1400,1600", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.fixture(scope="module")
def page(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    rows = [
        {
            "step": step,
            "wall_s": step / 10,
            "val_loss": value,
            "train_loss": value / 2,
            "<b>odd</b> & name": value,
            **{name: of(step) for name, of in CONSTANT.items()},
        }
        for step, value in enumerate(falling(40))
    ]
    write_lines(folder / "other", rows)
    (folder / "other" / "timeline.json").write_text(json.dumps({"seconds": {"forward": 3, "backward": 5}}))
    path = folder / "page.html"
    path.write_text(render_page(read_runs([trained, folder / "other"]), smoothing=0.9), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def seen(page: Path) -> dict[str, Any]:
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    text, console = browse(probe, page.parent, "--dump-dom")
    found = re.search(r'<pre id="seen">(.*?)</pre>', text, re.DOTALL)
    assert found is not None, console
    assert found[1], console or text[:3000]
    return {**json.loads(html.unescape(found[1])), "console": console}


def chart(state: list[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(one for one in state if one["title"] == title)


def named(one: dict[str, Any]) -> dict[str, Any]:
    return {trace["name"]: trace for trace in one["traces"] if trace.get("name")}


def test_every_chart_is_drawn_with_the_curves_of_both_runs(seen: dict[str, Any]) -> None:
    assert {one["title"] for one in seen["begin"]} >= {"loss", "learning rate", "steps_per_sec"}
    loss = chart(seen["begin"], "loss")
    assert {"line · train_loss", "line · val_loss", "other · train_loss", "other · val_loss"} <= named(loss).keys()
    assert loss["lines"] >= 4
    assert loss["axis"] == "optimizer steps"


def test_runs_have_one_legend_and_charts_only_that_of_their_metrics(seen: dict[str, Any]) -> None:
    assert chart(seen["begin"], "loss")["legend"] == ["train_loss", "val_loss"]
    assert chart(seen["begin"], "steps_per_sec")["legend"] == []
    assert seen["runs"] == ["line", "other"]


def test_names_are_shown_as_they_were_logged(seen: dict[str, Any]) -> None:
    traces = named(chart(seen["begin"], "<b>odd</b> & name"))
    assert html.escape("other · <b>odd</b> & name") in traces  # Plotly reads HTML in them


def test_smoothing_draws_a_calmer_line_over_what_was_logged(seen: dict[str, Any]) -> None:
    raw, smooth = chart(seen["raw"], "loss"), chart(seen["begin"], "loss")
    assert named(raw)["other · val_loss"]["y"] == falling(40)
    calm = named(smooth)["other · val_loss"]["y"]
    assert calm[0] == pytest.approx(falling(40)[0])
    assert sum(abs(b - a) for a, b in itertools.pairwise(calm)) < 4
    faded = [trace for trace in smooth["traces"] if trace.get("opacity") == 0.3]
    assert falling(40) in [trace["y"] for trace in faded]
    assert not [trace for trace in raw["traces"] if trace.get("opacity") == 0.3]


def test_the_axis_can_be_the_time(seen: dict[str, Any]) -> None:
    loss = chart(seen["time"], "loss")
    assert loss["axis"] == "training time, s"
    assert named(loss)["other · val_loss"]["x"] == pytest.approx([step / 10 for step in range(40)])


def test_logarithmic_and_marks_of_checkpoints_are_switched(seen: dict[str, Any]) -> None:
    assert {one["y"] for one in seen["time"] if one["title"] == "loss"} == {"linear"}
    assert chart(seen["log"], "loss")["y"] == "log"
    assert chart(seen["time"], "loss")["marks"] == 1  # the best and the last are of the same step
    assert chart(seen["log"], "loss")["marks"] == 0


def test_a_run_can_be_hidden(seen: dict[str, Any]) -> None:
    shown = {name for name in named(chart(seen["hidden"], "loss")) if "·" in name}
    assert shown == {"other · train_loss", "other · val_loss"}


def test_a_filter_leaves_the_charts_that_it_names(seen: dict[str, Any]) -> None:
    assert seen["filtered"]["charts"] == ["loss"]
    assert seen["filtered"]["shown"].startswith("1 of ")
    assert set(seen["filtered"]["rows"]) == {"val_loss"}


def test_a_folded_group_is_drawn_when_it_is_opened(seen: dict[str, Any]) -> None:
    assert seen["folded"] == {"before": False, "after": True}


@pytest.mark.parametrize("name", ["learning rate", *CONSTANT])
def test_the_vertical_axis_of_a_constant_is_about_its_value(seen: dict[str, Any], name: str) -> None:
    value = 0.1 if name == "learning rate" else CONSTANT[name](1)
    low, high = chart(seen["begin"], name)["yrange"]
    margin = 0.1 * abs(value) or 1.0
    assert (low, high) == pytest.approx((value - margin, value + margin))
    if value > 0:
        low, high = chart(seen["log"], name)["yrange"]
        assert (low, high) == pytest.approx((math.log10(value) - 0.5, math.log10(value) + 0.5))


def test_zooming_one_chart_zooms_the_others(seen: dict[str, Any]) -> None:
    charts = [one for one in seen["zoomed"] if one["title"] in ("loss", "steps_per_sec", "<b>odd</b> & name")]
    assert len(charts) == 3
    assert all(one["range"] == [10, 20] for one in charts)


def test_nothing_is_fetched_and_nothing_fails(seen: dict[str, Any]) -> None:
    assert [address for address in seen["requests"] if not address.startswith(("data:", "blob:"))] == []
    assert seen["console"] == ""


def test_the_curves_can_be_seen(page: Path) -> None:
    from PIL import Image

    picture = page.with_name("page.png")
    browse(page, page.parent, f"--screenshot={picture}")
    with Image.open(picture) as image:
        pixels = image.convert("RGB")
        assert pixels.size == (1400, 1600)
        colors = {color: count for count, color in pixels.getcolors(1 << 24) or []}
    # A line of two pixels across a chart of some 400: each run in its own colour.
    assert colors.get((0x00, 0x72, 0xB2), 0) > 300
    assert colors.get((0xD5, 0x5E, 0x00), 0) > 300
