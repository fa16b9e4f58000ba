// The charts over steps: scale, headroom, norm, loss, and the forward pass of one module.
const CAUSES = {
  "overflow": "overflow", "loss non-finite": "loss", "unknown non-finite": "unknown",
  "floor": "floor", "no gradients": "none", "calibration": "none",
};
const SYMBOLS = { skip: "circle", retry: "circle-open", halt: "x" };
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const OVER_STEPS = ["scale", "headroom", "norm", "loss", "forward-steps"];
const MOST_FLAGS = 12;

function allSteps() {
  const [low, high] = data.lines.flatMap((line) => line.step).reduce(
    ([low, high], step) => [Math.min(low, step), Math.max(high, step)], [Infinity, -Infinity]);
  const pad = Math.max(0.5, (high - low) * 0.012);
  return [low - pad, high + pad];
}
function stepAxis(more) {
  const zoom = view.zoom && view.zoom.split("..").map(Number);
  return axis({
    title: named("step"), range: zoom || allSteps(), showgrid: false,
    tickformat: ",d", ticks: "outside", ticklen: 4, tickcolor: colour("line"), ...more,
  });
}

// A resumed run may start again at an earlier step: there the line is interrupted.
function cut(values, line) {
  const made = values.slice();
  for (const at of line.later.slice().reverse()) made.splice(at, 0, null);
  return made;
}

// What is measured in some steps only is joined; else a gap is a step without the number.
function lineOf(line, i, field) {
  const values = line[field], known = values.filter((v) => v !== null).length;
  const some = known > 1 && known < values.length / 2 && (field === "headroom" || field === "norm");
  return {
    type: "scatter", mode: known < 2 || alone(values) ? "lines+markers" : some && known < 200 ? "lines+markers" : "lines",
    connectgaps: some, name: escaped(line.key), x: cut(line.step, line), y: cut(values, line),
    line: {
      color: colour("key" + (1 + (i % 5))), width: 1.6, shape: field === "scale" ? "hv" : "linear",
      dash: DASHES[Math.floor(i / 5) % DASHES.length],
    },
    marker: { color: colour("key" + (1 + (i % 5))), size: known < 2 ? 6 : 4 },
  };
}

// Has a number no neighbour that it could be joined to? Of few numbers only: a mark needs room.
const alone = (values) => values.length < 300 && values.some((v, i) =>
  v !== null && (i === 0 || values[i - 1] === null) && (i + 1 === values.length || values[i + 1] === null));

// Flags of the findings that are seen in a chart, and a line at the step of the address bar. The copy
// in the answer has the first finding's flag only; flags that would cover each other are stacked.
function marksAt(id, chart, where = (step) => step, width = allSteps()[1] - allSteps()[0]) {
  const shapes = [], annotations = [], rows = [];
  const room = width * (narrow() || id === "answer-chart" ? 0.09 : 0.03);
  const upright = (at, more) => shapes.push({
    type: "line", xref: "x", yref: "paper", x0: at, x1: at, y0: 0, y1: 1, ...more,
  });
  data.findings.forEach((found, i) => {
    if (found.chart !== chart || !found.steps.length || i >= MOST_FLAGS || (i && id === "answer-chart")) return;
    for (const step of found.steps) {
      if (where(step) === null) continue;
      upright(where(step), { line: { color: colour(found.severity), width: 1, dash: "dot" } });
    }
    const at = where(found.steps[0]);
    if (at === null) return;
    let row = rows.findIndex((taken) => taken.every((x) => Math.abs(x - at) > room));
    if (row < 0) row = rows.push([]) - 1;
    rows[row].push(at);
    annotations.push({
      xref: "x", yref: "paper", x: at, y: 1, yanchor: "top", yshift: -21 * (row % 8), showarrow: false, captureevents: true,
      text: `<b>${i + 1}</b>`, font: { size: 11, color: colour("card") }, borderpad: 3,
      bgcolor: colour(found.severity), name: "finding " + found.id,
      hovertext: `finding ${i + 1}: ${escaped(tail(found.title, 60))}`,
      hoverlabel: { bgcolor: colour("card"), font: { color: colour("ink") } },
    });
  });
  if (view.step !== undefined && where(Number(view.step)) !== null) {
    upright(where(Number(view.step)), { line: { color: colour("ink"), width: 1.5 } });
  }
  return { shapes, annotations };
}

function drawScale(id) {
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
  draw(id, traces, layout({
    showlegend: traces.length > 1, ...marksAt(id, "scale"),
    margin: { l: narrow() ? 44 : 58, r: 16, t: traces.length > 1 ? 40 : 14, b: 44 },
    xaxis: stepAxis(),
    yaxis: axis({ tickprefix: "2<sup>", ticksuffix: "</sup>", tickformat: "~g", nticks: 7, ...whole("scale") }),
  }));
}

// Exponents are whole numbers: no ticks between them.
function whole(field) {
  const values = sorted(field), low = values[0], high = values[values.length - 1];
  return high - low < 6 ? { dtick: 1, range: [low - 0.6, high + 0.6] } : {};
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
    marks.finding[i] && "finding " + (1 + data.findings.indexOf(findingOf(marks.finding[i]))),
  ].filter(Boolean).join("<br>");
}

function drawCurve(id, field, format, yaxis, shapes = []) {
  const traces = data.lines.map((line, i) => ({
    ...lineOf(line, i, field), hovertemplate: `step %{x:,d}<br>${format}<extra></extra>`,
  }));
  const several = data.lines.length > 1, marks = marksAt(id, field);
  draw(id, traces, layout({
    showlegend: several, ...marks, shapes: [...shapes, ...marks.shapes],
    margin: { l: narrow() ? 44 : 58, r: 16, t: several ? 36 : 14, b: 44 },
    xaxis: stepAxis(), yaxis: axis({ nticks: 6, tickformat: "~g", ...yaxis }),
  }));
}

function drawHeadroom(id) {
  const zero = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: colour("overflow"), width: 1.5, dash: "dot" } };
  drawCurve(id, "headroom", "%{y:.2f} bits", { rangemode: "tozero" }, [zero]);
}

const sorted = (field) =>
  data.lines.flatMap((line) => line[field]).filter((v) => v !== null).sort((a, b) => a - b);
function logarithmic(field) {
  const values = sorted(field), decades = Math.log10(values[values.length - 1] / values[0]);
  if (!(decades > 0.7)) return {};
  return { type: "log", tickformat: "~g", dtick: decades > 2 ? Math.ceil(decades / 6) : "D2" };
}
// If one value is far above all others the axis is logarithmic.
function hasOutlier(field) {
  const values = sorted(field);
  return values[0] > 0 && values[values.length - 1] > 20 * values[values.length >> 1];
}
