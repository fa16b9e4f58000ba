"use strict";
// Draws the report's charts from the JSON in the page. Every name is escaped, since plotly
// interprets some HTML in its texts.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const escaped = (text) =>
    String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const tail = (name, most) => (name.length > most ? "…" + name.slice(1 - most) : name);
  const narrow = () => innerWidth < 640;
  const PAPER = 660; // what A4 and letter leave between their margins, in pixels
  const printing = () => document.documentElement.classList.contains("printing");
  const grouped = (n) => Number(n).toLocaleString("en");
  const power = (e) => `2<sup>${Number.isInteger(e) ? e : e.toFixed(2)}</sup>`;
  const percent = (share) => (100 * share).toPrecision(3).replace(/\.?0+$/, "") + " %";

  const CAUSES = {
    "overflow": "overflow", "loss non-finite": "loss", "unknown non-finite": "unknown",
    "floor": "floor", "no gradients": "none", "calibration": "none",
  };
  const SYMBOLS = { skip: "circle", retry: "circle-open", halt: "x" };
  const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false };
  const OVER_STEPS = ["scale", "headroom", "norm", "loss"];

  const axis = (more) => ({
    gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false,
    tickfont: { size: 12, color: colour("soft") }, automargin: false, ...more,
  });
  const layout = (more) => ({
    ...(printing() ? { width: PAPER } : { autosize: true }),
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12.5, color: colour("ink") },
    margin: { l: narrow() ? 44 : 58, r: 16, t: 14, b: 44 },
    // On a touch screen dragging over a chart scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hovermode: "closest", hoverdistance: 40, showlegend: false,
    hoverlabel: {
      bgcolor: colour("card"), bordercolor: colour("line"), align: "left",
      font: { color: colour("ink"), size: 12.5 },
    },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12.5 } },
    ...more,
  });
  const named = (text) => ({ text, font: { size: 12, color: colour("soft") }, standoff: 4 });
  const ends = data.lines.flatMap((line) => line.step).reduce(
    ([low, high], step) => [Math.min(low, step), Math.max(high, step)], [Infinity, -Infinity]);
  const pad = Math.max(0.5, (ends[1] - ends[0]) * 0.012);
  const stepAxis = () => axis({
    title: named("step"), range: [ends[0] - pad, ends[1] + pad], showgrid: false, tickformat: ",d", ticks: "outside", ticklen: 4, tickcolor: colour("line"),
  });
  const draw = (id, traces, figure) => Plotly.react(byId(id), traces, figure, CONFIG);

  // A resumed run may start again at an earlier step: there the line is interrupted.
  function cut(values, line) {
    const made = values.slice();
    for (const at of line.later.slice().reverse()) made.splice(at, 0, null);
    return made;
  }

  function lineOf(line, i, field) {
    const known = line[field].filter((v) => v !== null).length;
    return {
      type: "scatter", mode: known > 1 ? "lines" : "markers", name: escaped(line.key),
      x: cut(line.step, line), y: cut(line[field], line),
      line: { color: colour("key" + (1 + (i % 5))), width: 1.6, shape: field === "scale" ? "hv" : "linear" },
      marker: { color: colour("key" + (1 + (i % 5))), size: 6 },
    };
  }

  function drawScale() {
    const marks = data.marks, groups = new Map();
    // A mark lies on the line: both have the same hover text.
    const marked = new Map(marks.first.map((step, i) => [marks.key[i] + " " + step, i]));
    const textOf = (line, i) => {
      const mark = marked.get(line.key + " " + line.step[i]);
      if (mark !== undefined) return markText(mark);
      return `step ${grouped(line.step[i])}` + (line.scale[i] === null ? "" : `<br>scale ${power(line.scale[i])}`);
    };
    const traces = data.lines.map((line, i) => ({
      ...lineOf(line, i, "scale"), hovertext: cut(line.step.map((_, at) => textOf(line, at)), line),
      hovertemplate: "%{hovertext}<extra></extra>", showlegend: data.lines.length > 1,
    }));
    marks.first.forEach((_, i) => {
      const group = marks.cause[i] + ", " + marks.what[i];
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(i);
    });
    for (const [group, members] of groups) {
      const x = [], y = [], texts = [];
      for (const i of members) {
        const ends = marks.first[i] === marks.last[i] ? [marks.first[i]] : [marks.first[i], marks.last[i]];
        for (const step of ends) { x.push(step); y.push(marks.scale[i]); texts.push(markText(i)); }
        x.push(null); y.push(null); texts.push("");
      }
      const shade = colour(CAUSES[marks.cause[members[0]]] || "unknown");
      traces.push({
        type: "scatter", mode: "lines+markers", name: escaped(group), x, y, hovertext: texts,
        hovertemplate: "%{hovertext}<extra></extra>", line: { color: shade, width: 3 },
        marker: {
          color: shade, size: 8, symbol: SYMBOLS[marks.what[members[0]]] || "circle",
          line: { color: colour("card"), width: marks.what[members[0]] === "skip" ? 1 : 1.5 },
        },
        showlegend: true,
      });
    }
    for (const t of traces) if (t.marker.symbol && t.marker.symbol !== "circle") t.marker.line.color = t.marker.color;
    draw("scale", traces, layout({
      showlegend: traces.length > 1,
      margin: { l: narrow() ? 44 : 58, r: 16, t: traces.length > 1 ? 40 : 14, b: 44 },
      xaxis: stepAxis(),
      yaxis: axis({ tickprefix: "2<sup>", ticksuffix: "</sup>", tickformat: "~g", nticks: 7 }),
    }));
  }

  function markText(i) {
    const marks = data.marks;
    const where = marks.first[i] === marks.last[i]
      ? `step ${grouped(marks.first[i])}`
      : `steps ${grouped(marks.first[i])} to ${grouped(marks.last[i])}, ${grouped(marks.times[i])} of them`;
    return [
      where,
      escaped(marks.cause[i]) + ", " + escaped(marks.what[i]),
      marks.scale[i] === null ? "" : "scale " + power(marks.scale[i]),
      marks.culprit[i] && "first: " + escaped(tail(marks.culprit[i], 48)),
      marks.key[i] && "loss: " + escaped(marks.key[i]),
    ].filter(Boolean).join("<br>");
  }

  function drawCurve(id, format, yaxis, more) {
    const traces = data.lines.map((line, i) => ({
      ...lineOf(line, i, id), hovertemplate: `step %{x:,d}<br>${format}<extra></extra>`,
    }));
    const several = data.lines.length > 1;
    draw(id, traces, layout({
      showlegend: several,
      margin: { l: narrow() ? 44 : 58, r: 16, t: several ? 36 : 14, b: 44 },
      xaxis: stepAxis(), yaxis: axis({ nticks: 6, tickformat: "~g", ...yaxis }), ...more,
    }));
  }

  function drawHeadroom() {
    const zero = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: colour("overflow"), width: 1.5, dash: "dot" } };
    drawCurve("headroom", "%{y:.2f} bits", { rangemode: "tozero" }, { shapes: [zero] });
  }

  const sorted = (field) =>
    data.lines.flatMap((line) => line[field]).filter((v) => v !== null).sort((a, b) => a - b);
  function logarithmic(field) {
    const values = sorted(field), decades = Math.log10(values[values.length - 1] / values[0]);
    return { type: "log", tickformat: "~g", ...(decades > 2 ? { dtick: Math.ceil(decades / 6) } : {}) };
  }
  // If one value is far above all others the axis is logarithmic.
  function hasOutlier(field) {
    const values = sorted(field);
    return values[0] > 0 && values[values.length - 1] > 20 * values[values.length >> 1];
  }

  // The histogram: format windows on top, gradients before and after the scale below.
  const unpack = (packed) => packed.slice(1).map((parts, i) => [packed[0] + i, parts / 1e6]);
  const fp16 = data.formats[0];
  const place = (e) =>
    e < fp16.flushed_below ? ["flushed", "flushed by FP16"]
      : e < fp16.normal_from ? ["subnormal", "subnormal in FP16"]
        : e > fp16.last ? ["overflow", "too large for FP16"] : ["accent", "normal in FP16"];

  function drawHistogram() {
    const shown = data.histograms[Number(byId("which").value)];
    const moved = JSON.stringify(shown.true) !== JSON.stringify(shown.scaled) && shown.true.length;
    const panels = moved ? [["true", "true"], ["scaled", "as scaled"]] : [["scaled", "gradients"]];
    const exponents = panels.flatMap(([which]) => unpack(shown[which]).map(([e]) => e));
    const low = Math.max(-160, Math.min(-27, ...exponents) - 1), high = Math.min(140, Math.max(17, ...exponents) + 2);
    const traces = [], shapes = [], notes = [], axes = {};
    const top = moved ? 0.79 : 0.7, height = moved ? 0.3 : 0.58;
    panels.forEach(([which, title], i) => {
      const bars = unpack(shown[which]), y = "y" + (i + 2), floor = moved ? (1 - i) * 0.39 : 0;
      const lost = (name) => bars.filter(([e]) => place(e)[0] === name).reduce((sum, [, s]) => sum + s, 0);
      traces.push({
        type: "bar", x: bars.map(([e]) => e + 0.5), y: bars.map(([, s]) => s), xaxis: "x", yaxis: y, width: 0.86,
        marker: { color: bars.map(([e]) => colour(place(e)[0])) },
        customdata: bars.map(([e, s]) => [power(e), percent(s), place(e)[1]]),
        hovertemplate: "%{customdata[0]}: %{customdata[1]}<br>%{customdata[2]}<extra></extra>",
      });
      axes["yaxis" + (i + 2)] = axis({ domain: [floor, floor + height], tickformat: ".2~%", nticks: 4, rangemode: "tozero", fixedrange: true });
      shapes.push(
        { type: "rect", layer: "below", xref: "x", yref: y + " domain", x0: low, x1: fp16.flushed_below, y0: 0, y1: 1, line: { width: 0 }, fillcolor: colour("flushed"), opacity: 0.1 },
        { type: "rect", layer: "below", xref: "x", yref: y + " domain", x0: fp16.last + 1, x1: high, y0: 0, y1: 1, line: { width: 0 }, fillcolor: colour("flushed"), opacity: 0.1 },
        { type: "rect", layer: "below", xref: "x", yref: y + " domain", x0: fp16.flushed_below, x1: fp16.normal_from, y0: 0, y1: 1, line: { width: 0 }, fillcolor: colour("subnormal"), opacity: 0.08 },
      );
      notes.push({
        xref: "paper", yref: y + " domain", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", showarrow: false,
        text: `<b>${title}</b>: flushed ${percent(lost("flushed"))}, subnormal ${percent(lost("subnormal"))}` +
          (lost("overflow") ? `, too large ${percent(lost("overflow"))}` : "") + `${narrow() ? "" : ", zeros " + percent(shown.zero)}`,
        font: { size: narrow() ? 11 : 12.5, color: colour("ink") },
      });
    });
    const rows = data.formats.slice().reverse();
    const clip = (e) => Math.max(low, Math.min(high, e));
    for (const [from, to, opacity, word] of [["flushed_below", "normal_from", 0.35, "subnormal"], ["normal_from", "last", 0.95, "normal"]]) {
      const upTo = (f) => (to === "last" ? f.last + 1 : f[to]);
      traces.push({
        type: "bar", orientation: "h", xaxis: "x", yaxis: "y", width: 0.5, opacity,
        y: rows.map((f) => f.name), base: rows.map((f) => clip(f[from])),
        x: rows.map((f) => clip(upTo(f)) - clip(f[from])),
        marker: { color: rows.map((f) => colour(f.name === "FP16" ? "accent" : "none")) },
        customdata: rows.map((f) => [power(f[from]), power(upTo(f))]),
        hovertemplate: `%{y}, ${word}: %{customdata[0]} to %{customdata[1]}<extra></extra>`,
      });
    }
    draw("histogram", traces, layout({
      barmode: "overlay", shapes, annotations: notes, ...axes,
      margin: { l: narrow() ? 44 : 58, r: 16, t: 10, b: 40 },
      xaxis: axis({
        range: [low, high], anchor: moved ? "y3" : "y2", tickprefix: "2<sup>", ticksuffix: "</sup>", nticks: narrow() ? 7 : 14,
        title: named("magnitude"),
      }),
      yaxis: axis({ domain: [top, 1], showgrid: false, type: "category", fixedrange: true }),
    }));
  }

  // Colours by where an exponent lies in FP16: red flushed, amber subnormal, blue normal, red top.
  function heatScale() {
    const low = -27, high = 16, at = (e) => (e - low) / (high - low);
    const stops = [
      [low, "flushed"], [-25, "flushed"], [-24, "subnormal"], [-15, "subnormal"], [-14, "accent-soft"],
      [12, "accent"], [14.5, "accent"], [15.5, "flushed"], [high, "flushed"],
    ];
    return { zmin: low, zmax: high, colorscale: stops.map(([e, name]) => [at(e), colour(name)]) };
  }

  let mode = "median";
  function drawHeat() {
    const heat = data.heat, rows = heat.names.length, most = narrow() ? 14 : 30;
    const zero = mode === "zero";
    const word = { median: "median", low: "smallest", high: "largest", zero: "zeros" }[mode];
    byId("heat").style.height = Math.max(240, Math.min(860, 90 + 15 * rows)) + "px";
    const every = Math.max(1, Math.ceil(rows / 50));
    const ticks = heat.names.map((_, i) => i).filter((i) => i % every === 0);
    const texts = heat.names.map((name, r) => heat.step.map((step, c) =>
      `${escaped(tail(name, 48))}<br>step ${grouped(step)}<br>` +
      (heat.median[r][c] === null ? "nothing finite and above zero"
        : `median ${power(heat.median[r][c])}, from ${power(heat.low[r][c])} to ${power(heat.high[r][c])}`) +
      (heat.zero[r][c] === null ? "" : `<br>zeros ${heat.zero[r][c]} %`)));
    const labels = ticks.map((i) => tail(heat.names[i], most));
    const left = 16 + 6.4 * Math.max(...labels.map((l) => l.length));
    draw("heat", [{
      type: "heatmap", z: heat[mode], y: heat.names.map((_, i) => i), hovertext: texts,
      x: heat.step.map((_, i) => i), xgap: heat.step.length < 60 ? 1 : 0, ygap: rows < 80 ? 1 : 0,
      hovertemplate: "%{hovertext}<extra></extra>", hoverongaps: false,
      ...(zero ? { zmin: 0, zmax: 100, colorscale: [[0, colour("accent-soft")], [0.5, colour("subnormal")], [1, colour("flushed")]] } : heatScale()),
      colorbar: {
        orientation: "h", thickness: 8, y: 1, yanchor: "bottom", len: narrow() ? 1 : 0.5, x: narrow() ? 0.5 : 0, xanchor: narrow() ? "center" : "left", outlinewidth: 0,
        tickfont: { size: 11, color: colour("soft") },
        ...(zero ? { ticksuffix: " %" } : { tickvals: [-24, -14, 0, 15], ticktext: [-24, -14, 0, 15].map(power) }),
        title: { text: word, side: "top", font: { size: 11, color: colour("soft") } }, ypad: 4,
      },
    }], layout({
      margin: { l: left, r: 16, t: 52, b: 44 },
      xaxis: {
        ...stepAxis(), title: undefined, range: [-0.5, heat.step.length - 0.5], tickmode: "array", ...ticksOf(heat.step),
      },
      yaxis: axis({ autorange: "reversed", showgrid: false, tickmode: "array", tickvals: ticks, ticktext: labels.map(escaped), tickfont: { size: 11, color: colour("soft") } }),
    }));
  }

  function ticksOf(steps) {
    const every = Math.max(1, Math.ceil(steps.length / (narrow() ? 4 : 9)));
    const at = steps.map((_, i) => i).filter((i) => i % every === 0);
    return { tickvals: at, ticktext: at.map((i) => grouped(steps[i])) };
  }

  const CHARTS = {
    scale: drawScale, headroom: drawHeadroom,
    norm: () => drawCurve("norm", "norm %{y:.4g}", logarithmic("norm")),
    loss: () => drawCurve("loss", "loss %{y:.5g}", hasOutlier("loss") ? logarithmic("loss") : {}),
    histogram: drawHistogram, heat: drawHeat,
  };
  const drawAll = () => Object.keys(CHARTS).filter(byId).forEach((id) => CHARTS[id]());

  // Zooming into one chart over steps zooms the others.
  function link() {
    const charts = OVER_STEPS.map(byId).filter(Boolean);
    let following = false;
    for (const chart of charts) {
      chart.on("plotly_relayout", (change) => {
        const range = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
        if (following || range[0] === undefined) return;
        following = true;
        const update = { "xaxis.range": range };
        Promise.all(charts.filter((c) => c !== chart).map((c) => Plotly.relayout(c, update)))
          .then(() => { following = false; });
      });
    }
  }

  // The table: sort by a head, search by name, show a name's histogram.
  function table() {
    const body = byId("parameters").tBodies[0], rows = Array.from(body.rows);
    const heads = Array.from(byId("parameters").tHead.rows[0].cells);
    const valueOf = (row, column) => {
      const cell = row.cells[column];
      if (!("v" in cell.dataset)) return cell.textContent;
      return cell.dataset.v === "" ? null : Number(cell.dataset.v);
    };
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "descending"
        ? false : column > 0 || head.getAttribute("aria-sort") === "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const sign = descending ? -1 : 1;
      rows.sort((a, b) => {
        const x = valueOf(a, column), y = valueOf(b, column);
        if (x === null || y === null) return (x === null) - (y === null); // unknown: always last
        return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
      });
      body.append(...rows);
    }));
    byId("search").addEventListener("input", (event) => {
      const wanted = event.target.value.trim().toLowerCase();
      let left = 0;
      for (const row of rows) {
        row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
        left += !row.hidden;
      }
      byId("shown").textContent = wanted ? `${grouped(left)} of ${grouped(rows.length)}` : "";
    });
    body.addEventListener("click", (event) => {
      const button = event.target.closest("[data-show]");
      if (!button || !byId("which")) return;
      byId("which").value = button.dataset.show;
      drawHistogram();
      byId("gradients").scrollIntoView({ behavior: "smooth" });
    });
  }

  drawAll();
  link();
  if (byId("parameters")) table();
  if (byId("which")) byId("which").addEventListener("change", drawHistogram);
  if (byId("modes")) byId("modes").addEventListener("click", (event) => {
    if (!event.target.dataset.mode) return;
    mode = event.target.dataset.mode;
    for (const button of byId("modes").children) button.setAttribute("aria-pressed", button === event.target);
    drawHeat();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("(max-width: 640px)").addEventListener("change", drawAll);
  // Print in light colours.
  const print = (on) => { document.documentElement.classList.toggle("printing", on); drawAll(); };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
