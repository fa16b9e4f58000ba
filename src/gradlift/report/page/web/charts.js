// Which charts there are, and what a click in one means.
const CHARTS = {
  scale: drawScale,
  headroom: drawHeadroom,
  norm: (id) => drawCurve(id, "norm", "norm %{y:.4g}", logarithmic("norm")),
  loss: (id) => drawCurve(id, "loss", "loss %{y:.5g}", hasOutlier("loss") ? logarithmic("loss") : {}),
  histogram: drawHistogram,
  heat: (id) => drawHeat(id, "heat"),
  forward: drawForward,
  "forward-steps": drawForwardSteps,
  updates: (id) => drawHeat(id, "updates"),
};
let ready = false; // once plotly is there

const draw = (id, traces, figure) => Plotly.react(byId(id), traces, figure, { ...CONFIG, doubleClick: false });
const shownNow = (element) => element && !element.closest("details:not([open])");
const drawn = (id) => Boolean(byId(id) && byId(id).data);

function drawOne(id) {
  if (!ready || !shownNow(byId(id))) return;
  const first = !drawn(id);
  CHARTS[id](id);
  if (first) listen(id);
}

// A small copy in the answer: the chart in which one sees the first finding.
function drawCopy() {
  const copy = byId("answer-chart");
  if (!ready || !copy) return;
  const which = copy.dataset.of, found = data.findings[0];
  const first = !copy.data;
  if (which === "histogram") drawHistogram(copy.id, histogramOf(found.parameters[0]));
  else if (which === "forward-steps") drawForwardSteps(copy.id, Number(copy.dataset.row));
  else if (HEATS[which]) drawRows(copy.id, which, found);
  else CHARTS[which](copy.id);
  if (first) copy.on("plotly_click", () => follow({ finding: found.id, chart: which }));
}

function drawAll() {
  Object.keys(CHARTS).forEach(drawOne);
  drawCopy();
}

function listen(id) {
  const chart = byId(id);
  chart.on("plotly_click", ({ points: [point] }) => {
    if (id === "heat" || id === "updates") {
      follow({ parameter: data[id].names[point.y], step: data[id].step[point.x] });
    } else if (id === "forward") {
      follow({ module: data.forward.names[point.y], chart: "forward-steps" });
    } else if (OVER_STEPS.includes(id)) {
      // A mark lies on the line: the click may be the line's.
      const finding = id === "scale" && marksOver(point.x).map((i) => data.marks.finding[i]).find(Boolean);
      follow({ step: point.x, ...(finding ? { finding } : {}) });
    }
  });
  chart.on("plotly_clickannotation", ({ annotation }) => {
    if (annotation.name && annotation.name.startsWith("finding ")) follow({ finding: annotation.name.slice(8) });
  });
  if (!OVER_STEPS.includes(id)) return;
  // Zooming into one chart over steps zooms the others.
  chart.on("plotly_relayout", (change) => {
    const range = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (!zooming && range[0] !== undefined) zoom(range.map((step) => Math.round(step * 10) / 10), id);
  });
  chart.on("plotly_doubleclick", () => zoom(null));
}

let zooming = false;
function zoom(range, from) {
  zooming = true;
  view.zoom = range ? range.join("..") : undefined;
  history.replaceState(null, "", addressOf(view));
  const update = { "xaxis.range": range || stepAxis().range };
  Promise.all(OVER_STEPS.filter((id) => id !== from && drawn(id)).map((id) => Plotly.relayout(byId(id), update)))
    .then(() => { zooming = false; });
}
