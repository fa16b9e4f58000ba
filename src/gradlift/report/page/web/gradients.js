// The histogram: format windows on top, gradients before and after the scale below.
const unpack = (parts) => parts.slice(1).map((share, i) => [parts[0] + i, share / 1e6]);
const place = (e, fp16 = data.formats[0]) =>
  e < fp16.flushed_below ? ["flushed", "flushed by FP16"]
    : e < fp16.normal_from ? ["subnormal", "subnormal in FP16"]
      : e > fp16.last ? ["overflow", "too large for FP16"] : ["accent", "normal in FP16"];
// The position of a parameter among the histograms; 0 is all of them.
const histogramOf = (name) => Math.max(0, data.histograms.findIndex((h, i) => i > 0 && h.name === name));

function drawHistogram(id, position) {
  const fp16 = data.formats[0];
  const shown = data.histograms[position === undefined ? Number(byId("which").value) : position];
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
    axes["yaxis" + (i + 2)] = axis({
      domain: [floor, floor + height], tickformat: ".2~%", nticks: 4, rangemode: "tozero", fixedrange: true,
      ...(bars.length ? {} : { range: [0, 1], showticklabels: false, showgrid: false }),
    });
    if (!bars.length) notes.push({
      xref: "paper", yref: y + " domain", x: 0.5, y: 0.5, showarrow: false, text: "every finite element was zero",
      font: { size: 13, color: colour("soft") },
    });
    const band = (x0, x1, shade, opacity) => shapes.push({
      type: "rect", layer: "below", xref: "x", yref: y + " domain", x0, x1, y0: 0, y1: 1,
      line: { width: 0 }, fillcolor: colour(shade), opacity,
    });
    band(low, fp16.flushed_below, "flushed", 0.1);
    band(fp16.last + 1, high, "flushed", 0.1);
    band(fp16.flushed_below, fp16.normal_from, "subnormal", 0.08);
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
  draw(id, traces, layout({
    barmode: "overlay", shapes, annotations: notes, ...axes,
    margin: { l: narrow() ? 44 : 58, r: 16, t: 10, b: 40 },
    xaxis: axis({
      range: [low, high], anchor: moved ? "y3" : "y2", tickprefix: "2<sup>", ticksuffix: "</sup>", nticks: narrow() ? 7 : 14,
      title: named("magnitude"),
    }),
    yaxis: axis({ domain: [top, 1], showgrid: false, type: "category", fixedrange: true }),
  }));
}

// Two heatmaps, parameters by sampled steps: gradients, and updates.
const HEATS = {
  heat: {
    modes: { median: "median", low: "smallest", high: "largest", zero: "zeros" }, mode: "median",
    scale: (mode) => (mode === "zero" ? shares() : exponents()),
    text: (heat, r, c) =>
      (heat.median[r][c] === null ? "nothing finite and above zero"
        : `median ${power(heat.median[r][c])}, from ${power(heat.low[r][c])} to ${power(heat.high[r][c])}`) +
      (heat.zero[r][c] === null ? "" : `<br>zeros ${heat.zero[r][c]} %`),
  },
  updates: {
    modes: { ratio: "update / weight", lost: "lost" }, mode: "ratio",
    scale: (mode) => (mode === "lost" ? shares() : ratios()),
    text: (heat, r, c) => [
      heat.ratio[r][c] === null ? "" : `update / weight ${(10 ** heat.ratio[r][c]).toPrecision(2)}`,
      heat.lost[r][c] === null ? "" : `lost ${heat.lost[r][c]} %`,
    ].filter(Boolean).join("<br>") || "not known",
  },
};

function colours(low, high, stops, ticks) {
  const at = (e) => (e - low) / (high - low);
  return { zmin: low, zmax: high, colorscale: stops.map(([e, name]) => [at(e), colour(name)]), ticks };
}
// By where an exponent lies in FP16: red flushed, amber subnormal, blue normal, red near the top.
const exponents = () => colours(-27, 16, [
  [-27, "flushed"], [-25, "flushed"], [-24, "subnormal"], [-15, "subnormal"], [-14, "accent-soft"],
  [12, "accent"], [14.5, "accent"], [15.5, "flushed"], [16, "flushed"],
], { tickvals: [-24, -14, 0, 15], ticktext: [-24, -14, 0, 15].map(power) });
const shares = () => colours(
  0, 100, [[0, "accent-soft"], [50, "subnormal"], [100, "flushed"]], { ticksuffix: " %" });
// Powers of ten: amber does not move, blue is usual, red is as large as the weight itself.
const ratios = () => colours(-8, 0, [
  [-8, "subnormal"], [-6.5, "subnormal"], [-5, "accent-soft"], [-2, "accent"], [-1, "accent"], [-0.5, "flushed"], [0, "flushed"],
], { tickvals: [-8, -6, -4, -2, 0], ticktext: [-8, -6, -4, -2, 0].map((e) => `10<sup>${e}</sup>`) });

function drawHeat(id, which) {
  const heat = data[which], kind = HEATS[which], rows = heat.names.length, most = narrow() ? 14 : 30;
  const { ticks: marked, ...scale } = kind.scale(kind.mode);
  if (id === which) byId(id).style.height = Math.max(240, Math.min(860, 90 + 15 * rows)) + "px";
  const every = Math.max(1, Math.ceil(rows / 50));
  const ticks = heat.names.map((_, i) => i).filter((i) => i % every === 0);
  const texts = heat.names.map((name, r) => heat.step.map((step, c) =>
    `${escaped(tail(name, 48))}<br>step ${grouped(step)}<br>${kind.text(heat, r, c)}`));
  const labels = ticks.map((i) => tail(heat.names[i], most));
  const left = 16 + 6.4 * Math.max(...labels.map((l) => l.length));
  draw(id, [{
    type: "heatmap", z: heat[kind.mode], y: heat.names.map((_, i) => i), hovertext: texts,
    x: heat.step.map((_, i) => i), xgap: heat.step.length < 60 ? 1 : 0, ygap: rows < 80 ? 1 : 0,
    hovertemplate: "%{hovertext}<extra></extra>", hoverongaps: false, ...scale,
    colorbar: {
      orientation: "h", thickness: 8, y: 1, yanchor: "bottom", len: narrow() ? 1 : 0.5, x: narrow() ? 0.5 : 0, xanchor: narrow() ? "center" : "left", outlinewidth: 0,
      tickfont: { size: 11, color: colour("soft") }, ...marked,
      title: { text: kind.modes[kind.mode], side: "top", font: { size: 11, color: colour("soft") } }, ypad: 4,
    },
  }], layout({
    margin: { l: left, r: 16, t: 52, b: 44 }, ...heatMarks(id, which),
    xaxis: {
      ...stepAxis(), title: undefined, range: [-0.5, heat.step.length - 0.5], tickmode: "array", ...ticksOf(heat.step),
    },
    yaxis: axis({ autorange: "reversed", showgrid: false, tickmode: "array", tickvals: ticks, ticktext: labels.map(escaped), tickfont: { size: 11, color: colour("soft") } }),
  }));
}

// Of a heatmap, the rows of a finding's parameters as curves.
const MOST_ROWS = 5;
function drawRows(id, which, found) {
  const heat = data[which], kind = HEATS[which];
  const mode = found.kind === "updates-lost" ? "lost" : kind.mode;
  const named = heat.names.map((_, i) => i).filter((i) => found.parameters.includes(heat.names[i]));
  const rows = (named.length ? named : heat.names.map((_, i) => i)).slice(0, MOST_ROWS);
  const base = mode === "lost" || mode === "zero" ? null : which === "heat" ? 2 : 10;
  draw(id, rows.map((row, i) => ({
    type: "scatter", mode: "lines+markers", name: escaped(tail(heat.names[row], 24)), x: heat.step, y: heat[mode][row],
    hovertext: heat.step.map((step, c) => `${escaped(tail(heat.names[row], 48))}<br>step ${grouped(step)}<br>${kind.text(heat, row, c)}`),
    hovertemplate: "%{hovertext}<extra></extra>",
    line: { color: colour("key" + (1 + i)), width: 1.6 }, marker: { color: colour("key" + (1 + i)), size: 4 },
  })), layout({
    ...marksAt(id, which), showlegend: rows.length > 1, xaxis: stepAxis(),
    margin: { l: narrow() ? 44 : 58, r: 16, t: rows.length > 1 ? 54 : 14, b: 44 },
    yaxis: axis({
      nticks: 6, ...(base ? { tickprefix: base + "<sup>", ticksuffix: "</sup>", tickformat: "~g" } : { ticksuffix: " %", rangemode: "tozero" }),
    }),
  }));
}

// The nearest sample to a step, as a column; the row of the address bar's parameter.
function heatMarks(id, which) {
  const heat = data[which];
  const column = (step) => {
    const after = heat.step.findIndex((s) => s >= step);
    return after < 0 ? heat.step.length - 1 : after > 0 && step - heat.step[after - 1] < heat.step[after] - step ? after - 1 : after;
  };
  const made = marksAt(id, which, column, heat.step.length), row = heat.names.indexOf(view.parameter);
  if (row >= 0) made.shapes.push({
    type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5,
    line: { color: colour("ink"), width: 1.5 },
  });
  return made;
}

function ticksOf(steps) {
  const every = Math.max(1, Math.ceil(steps.length / (narrow() ? 4 : 9)));
  const at = steps.map((_, i) => i).filter((i) => i % every === 0);
  return { tickvals: at, ticktext: at.map((i) => grouped(steps[i])) };
}
