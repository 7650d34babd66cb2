"use strict";
// Draws the charts of the page from the JSON in #data; page.py made both. Plotly is in the page, nothing is fetched.
(async () => {
  // Plotly, compressed and in base 85: five characters for four bytes.
  async function unpack(node) {
    const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
    const value = new Uint8Array(128);
    [...digits].forEach((digit, number) => { value[digit.charCodeAt(0)] = number; });
    const text = node.textContent, bytes = new DataView(new ArrayBuffer((text.length / 5) * 4));
    for (let from = 0, to = 0; from < text.length; from += 5, to += 4) {
      let group = 0;
      for (let next = from; next < from + 5; next++) group = group * 85 + value[text.charCodeAt(next)];
      bytes.setUint32(to, group);
    }
    const packed = new Blob([new Uint8Array(bytes.buffer, 0, Number(node.dataset.size))]);
    const script = document.createElement("script");
    script.textContent = await new Response(packed.stream().pipeThrough(new DecompressionStream("deflate"))).text();
    document.head.append(script);
  }

  document.body.dataset.ready = "no";
  await unpack(document.getElementById("plotly"));
  const data = JSON.parse(document.getElementById("data").textContent);
  const controls = Object.fromEntries(["smoothing", "axis", "log", "marks"].map((id) => [id, document.getElementById(id)]));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const dashes = ["solid", "dash", "dot", "dashdot", "longdash"];
  const axisTitles = { step: "optimizer steps", time: "training time", epoch: "epochs", samples: "samples", tokens: "tokens" };
  const hidden = new Set();
  const drawn = [];
  let isZooming = false, zoomed = null;

  // Plotly reads a little HTML in its texts; names are shown as they are.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function position(axis, step) {
    const [steps, values] = axis;
    if (step <= steps[0]) return values[0];
    let low = 0, high = steps.length - 1;
    if (step >= steps[high]) return values[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return values[low] + ((step - steps[low]) / (steps[high] - steps[low])) * (values[high] - values[low]);
  }

  function places(run, steps) {
    if (controls.axis.value === "step") return steps;
    const axis = run.axes[controls.axis.value];
    if (!axis) return null; // this run did not log it
    const scale = controls.axis.value === "time" ? data.time.scale : 1;
    return steps.map((step) => position(axis, step) * scale);
  }

  // Exponential moving average without the bias of its start; gaps stay gaps.
  function smooth(values, weight) {
    let average = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      average = weight * average + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return average / total;
    });
  }

  function style() {
    const get = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return { ink: get("--ink"), dim: get("--dim"), line: get("--line"), card: get("--card") };
  }

  function traces(chart) {
    const weight = Number(controls.smoothing.value);
    const list = [];
    const inRuns = new Set(chart.curves.map((curve) => curve.run));
    const names = chart.names;
    chart.curves.forEach((curve) => {
      const run = data.runs[curve.run];
      if (hidden.has(curve.run)) return;
      const x = places(run, curve.steps);
      if (x === null) return;
      const number = names.indexOf(curve.name);
      const single = data.runs.length === 1;
      const color = single ? data.colors[number % data.colors.length] : data.colors[curve.run % data.colors.length];
      const dash = single ? "solid" : dashes[number % dashes.length];
      const label = single ? curve.name : names.length > 1 || inRuns.size < 2 ? run.name + " · " + curve.name : run.name;
      const isSmooth = chart.smooth && weight > 0 && curve.values.length > 12;
      const few = curve.values.length <= 30;
      const common = { x, type: "scatter", legendgroup: single ? label : curve.name, hoverlabel: { namelength: -1 } };
      if (curve.low) {
        const quiet = { ...common, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
        list.push({ ...quiet, y: curve.low });
        list.push({ ...quiet, y: curve.high, fill: "tonexty", fillcolor: color + "22" });
      }
      if (isSmooth) {
        list.push({ ...common, y: curve.values, mode: "lines", line: { color, width: 1, dash }, opacity: 0.3,
          hoverinfo: "skip", showlegend: false });
      }
      list.push({ ...common, name: plain(label), y: isSmooth ? smooth(curve.values, weight) : curve.values,
        mode: few ? "lines+markers" : "lines", line: { color, width: 2, dash }, marker: curve.values.length === 1 ? { size: 10, color, symbol: "diamond" } : { size: 5, color },
        showlegend: single, connectgaps: false, hovertemplate: "%{y:.6g}" });
    });
    // Colors are runs, named once at the top of the page; a chart's own legend says what its dashes are.
    if (data.runs.length > 1 && names.length > 1) names.forEach((name, number) => list.push({
      x: [null], y: [null], type: "scatter", mode: "lines", name: plain(name), legendgroup: name, hoverinfo: "skip",
      showlegend: true, line: { color: style().dim, width: 2, dash: dashes[number % dashes.length] } }));
    return list;
  }

  // Checkpoints of the runs in a chart: others would stretch its axis.
  function marks(chart) {
    if (!controls.marks || !controls.marks.checked) return [];
    const { dim } = style();
    const inChart = new Set(chart.curves.map((curve) => curve.run));
    return data.runs.flatMap((run, number) => {
      const x = hidden.has(number) || !inChart.has(number) ? null : places(run, run.checkpoints);
      const color = data.runs.length === 1 ? dim : data.colors[number % data.colors.length];
      return (x || []).map((at) => ({ type: "line", xref: "x", yref: "paper", x0: at, x1: at, y0: 0, y1: 1,
        layer: "below", line: { color, width: 1, dash: "dot" } }));
    });
  }

  // Where all values are the same, up to rounding, Plotly would show one unit around them, on which 0.001 is 0.
  function flat(list) {
    const values = list.flatMap((one) => one.y).filter((value) => value !== null);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (!values.length || high - low > size * 1e-9) return {};
    if (controls.log.checked) return low > 0 ? { range: [Math.log10(low) - 0.5, Math.log10(low) + 0.5] } : {};
    return { range: [low - (0.1 * size || 1), high + (0.1 * size || 1)] };
  }

  function layout(chart, list) {
    const { ink, dim, line, card } = style();
    const axis = controls.axis.value;
    const frame = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
    return {
      margin: { l: 56, r: 12, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12, family: "system-ui, sans-serif" }, hovermode: "x unified",
      hoverlabel: { bgcolor: card }, modebar: { bgcolor: "rgba(0,0,0,0)", color: dim, activecolor: ink }, shapes: marks(chart), uirevision: axis,
      legend: { orientation: "h", yanchor: "top", y: -0.2, x: 0, font: { size: 11 } }, showlegend: true,
      xaxis: { ...frame, ...(zoomed ? { range: [...zoomed] } : {}), title: { text: axis === "time" ? data.time.title : axisTitles[axis], font: { size: 11 } } },
      yaxis: { ...frame, ...flat(list), type: controls.log.checked ? "log" : "linear", exponentformat: "e", hoverformat: ".6g" },
    };
  }

  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

  function drawChart(chart) {
    const isNew = !chart.node.data;
    const list = traces(chart);
    Plotly.react(chart.node, list, layout(chart, list), config);
    if (isNew) {
      // Zooming one chart zooms all of them: the same stretch of training is looked at everywhere.
      chart.node.on("plotly_relayout", (change) => {
        const isRange = "xaxis.range[0]" in change;
        if (isZooming || !(isRange || change["xaxis.autorange"])) return;
        const same = isRange
          ? { "xaxis.range": [change["xaxis.range[0]"], change["xaxis.range[1]"]] }
          : { "xaxis.autorange": true };
        isZooming = true;
        zoomed = isRange ? same["xaxis.range"] : null;
        const others = drawn.filter((other) => other !== chart && other.node.data);
        Promise.all(others.map((other) => Plotly.relayout(other.node, { ...same }))).finally(() => { isZooming = false; });
      });
    }
  }

  function drawPhases() {
    const node = document.getElementById("timeline");
    if (!node) return;
    const runs = data.runs.filter((run) => run.phases.length);
    const names = [...new Set(runs.flatMap((run) => run.phases.map((phase) => phase[0])))];
    const { ink, dim, line } = style();
    const bars = names.map((name, number) => ({
      type: "bar", orientation: "h", name: plain(name), y: runs.map((run) => plain(run.name)),
      x: runs.map((run) => 100 * (run.phases.find((phase) => phase[0] === name) || [name, 0])[1]),
      marker: { color: data.colors[number % data.colors.length] }, hovertemplate: "%{x:.1f} %",
    }));
    Plotly.react(node, bars, {
      barmode: "stack", height: 110 + 36 * runs.length, margin: { l: 56, r: 24, t: 8, b: 56 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 },
      legend: { orientation: "h", traceorder: "normal", yref: "container", y: 0, yanchor: "bottom", x: 0 }, showlegend: true,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: dim, activecolor: ink },
      xaxis: { gridcolor: line, ticksuffix: " %", range: [0, 100] }, yaxis: { automargin: true, autorange: "reversed" },
    }, config);
  }

  // What is folded or filtered away is drawn when it appears.
  const isShown = (chart) => chart.node.closest("details").open && !chart.node.parentNode.hidden;

  function filter() {
    const text = document.getElementById("filter").value.trim();
    let pattern;
    try { pattern = new RegExp(text, "i"); } catch { pattern = { test: (name) => name.includes(text) }; }
    const cards = [...document.querySelectorAll(".chart[data-names]")];
    cards.forEach((card) => { card.hidden = !card.dataset.names.split("\n").some((name) => pattern.test(name)); });
    document.querySelectorAll("details").forEach((group) => {
      const inside = [...group.querySelectorAll(".chart[data-names]")];
      if (!inside.length) return;
      group.hidden = inside.every((card) => card.hidden);
      if (text && !group.hidden) group.open = true;
    });
    document.querySelectorAll("#numbers tbody tr").forEach((row) => {
      row.hidden = !pattern.test(row.firstChild.textContent);
    });
    const found = cards.filter((card) => !card.hidden).length;
    document.getElementById("shown").textContent = text ? `${found} of ${cards.length}` : "";
    drawAll();
  }

  // One chart at a time, so that the page answers while it draws hundreds of them.
  let turn = 0;
  function drawAll() {
    const mine = ++turn;
    document.body.dataset.ready = "no";
    let next = 0;
    (function step() {
      if (mine !== turn) return;
      while (next < drawn.length && !isShown(drawn[next])) next++;
      if (next < drawn.length) { drawChart(drawn[next++]); setTimeout(step, 0); return; }
      drawPhases();
      document.body.dataset.ready = "yes";
    })();
  }

  data.charts.forEach((chart, number) => drawn.push({ ...chart, node: document.getElementById("chart-" + number) }));
  const every = document.getElementById("every");
  if (every) every.addEventListener("change", () => {
    document.querySelectorAll("input[data-run]").forEach((box) => {
      box.checked = every.checked;
      if (box.checked) hidden.delete(Number(box.dataset.run)); else hidden.add(Number(box.dataset.run));
    });
    drawAll();
  });
  document.getElementById("filter").addEventListener("input", filter);
  document.querySelectorAll("details").forEach((group) => group.addEventListener("toggle", () => {
    if (document.body.dataset.ready === "yes" && group.open) drawAll();
  }));
  document.querySelectorAll("input[data-run]").forEach((box) => box.addEventListener("change", () => {
    if (box.checked) hidden.delete(Number(box.dataset.run)); else hidden.add(Number(box.dataset.run));
    drawAll();
  }));
  controls.smoothing.addEventListener("input", () => {
    document.getElementById("smoothed").textContent = Number(controls.smoothing.value).toFixed(2);
  });
  Object.values(controls).filter(Boolean).forEach((control) => control.addEventListener("change", drawAll));
  dark.addEventListener("change", drawAll);
  drawAll();
})();
