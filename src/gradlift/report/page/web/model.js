// The forward pass: each module's range against float16's largest number, and one over steps.
const LAST = 16; // 65504 is just below 2^16

function drawForward(id) {
  const all = data.forward, rows = all.names.length, most = narrow() ? 16 : 34;
  const low = Math.min(...all.low.filter((e) => e !== null), 0), high = Math.max(LAST + 1, ...all.high) + 0.5;
  const shade = (i) =>
    all.bad[i] || all.high[i] >= LAST ? "overflow"
      : all.high[i] >= LAST - 2 ? "subnormal" : all.dtype[i] === "float16" ? "accent" : "none";
  const labels = all.names.map((name) => escaped(tail(name, most)));
  if (id === "forward") byId(id).style.height = Math.max(170, 70 + 19 * rows) + "px";
  const from = all.names.map((_, i) => (all.low[i] === null ? all.high[i] : all.low[i]) - 0.12);
  const texts = all.names.map((name, i) => [
    escaped(tail(name, 48)), `${escaped(all.type[i])}, ${escaped(all.dtype[i])}`,
    all.low[i] === null ? "" : `largest output from ${power(all.low[i])} to ${power(all.high[i])}`,
    `at step ${grouped(all.at[i])}: ` + (all.bad[i] ? "not finite" : `${(LAST - all.high[i]).toFixed(1)} bits below 65504`),
  ].filter(Boolean).join("<br>"));
  const row = all.names.indexOf(view.module);
  draw(id, [{
    type: "bar", orientation: "h", y: all.names.map((_, i) => i), base: from,
    x: all.names.map((_, i) => all.high[i] - from[i] + 0.12), width: 0.62,
    marker: { color: all.names.map((_, i) => colour(shade(i))) },
    hovertext: texts, hovertemplate: "%{hovertext}<extra></extra>",
  }], layout({
    margin: { l: 16 + 6.6 * Math.max(...all.names.map((n) => tail(n, most).length)), r: 16, t: 22, b: 40 },
    xaxis: axis({
      range: [Math.max(low - 1, -24), high], tickprefix: "2<sup>", ticksuffix: "</sup>", tickformat: "d",
      nticks: narrow() ? 6 : 12, title: named("largest |output|"),
    }),
    yaxis: axis({
      autorange: "reversed", showgrid: false, tickmode: "array", fixedrange: true,
      tickvals: all.names.map((_, i) => i), ticktext: labels, tickfont: { size: 11, color: colour("soft") },
    }),
    shapes: [limit("x", LAST), ...(row < 0 ? [] : [{
      type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5,
      line: { color: colour("ink"), width: 1.5 },
    }])],
    annotations: [{
      xref: "x", yref: "paper", x: LAST, y: 1, yanchor: "bottom", showarrow: false, text: "65504",
      font: { size: 11, color: colour("overflow") },
    }],
  }));
}

function limit(along, at) {
  const [fixed, free] = along === "x" ? ["x", "y"] : ["y", "x"];
  return {
    type: "line", [fixed + "ref"]: fixed, [free + "ref"]: "paper", [fixed + "0"]: at, [fixed + "1"]: at,
    [free + "0"]: 0, [free + "1"]: 1, line: { color: colour("overflow"), width: 1.5, dash: "dot" },
  };
}

function drawForwardSteps(id, row) {
  const all = data.forward, i = row === undefined ? Number(byId("module").value) : row, marks = marksAt(id, "forward");
  const y = all.tops[i], known = y.filter((v) => v !== null).length;
  draw(id, [{
    type: "scatter", mode: known > 40 ? "lines" : "lines+markers", x: all.step, y,
    line: { color: colour("accent"), width: 1.6 }, marker: { color: colour("accent"), size: 5 },
    customdata: y.map((e) => (e === null ? "" : power(e))),
    hovertemplate: "step %{x:,d}<br>largest |output| %{customdata}<extra></extra>",
  }], layout({
    ...marks, shapes: [limit("y", LAST), ...marks.shapes], xaxis: stepAxis(),
    yaxis: axis({ tickprefix: "2<sup>", ticksuffix: "</sup>", tickformat: "~g", nticks: 6, range: span(y) }),
  }));
}

const span = (values) => {
  const known = values.filter((v) => v !== null);
  return [Math.min(0, ...known) - 1, Math.max(LAST, ...known) + 1.5];
};
