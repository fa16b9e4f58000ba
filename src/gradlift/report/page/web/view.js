// The address bar holds what is looked at: #step=120&parameter=head.weight. Links set it, back and
// forward restore it.
function read() {
  const found = {};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (VIEW.includes(name)) found[name] = value;
  }
  if (!/^\d{1,18}$/.test(found.step)) delete found.step;
  if (!/^-?\d+(\.\d+)?\.\.-?\d+(\.\d+)?$/.test(found.zoom)) delete found.zoom;
  if (!(found.chart in CHARTS) && found.chart !== "calls") delete found.chart;
  return found;
}

function addressOf(wanted) {
  const parts = new URLSearchParams();
  for (const name of VIEW) if (wanted[name] !== undefined) parts.set(name, wanted[name]);
  const text = parts.toString();
  return text ? "#" + text : location.pathname + location.search;
}

// What is not named stays, but a place to scroll to is of one click only.
function follow(change) {
  const { finding, chart, ...kept } = view;
  const wanted = addressOf({ ...kept, ...change });
  if (wanted === location.hash) show(change); // there already: scroll to it again
  else if (wanted.startsWith("#")) location.hash = wanted;
  else { history.pushState(null, "", wanted); applied(); }
}

function applied() {
  const before = view;
  view = read();
  if (view.step !== undefined && view.zoom) {
    const [low, high] = view.zoom.split("..").map(Number);
    if (view.step < low || view.step > high) delete view.zoom;
  }
  const changed = {};
  for (const name of VIEW) if (view[name] !== undefined && view[name] !== before[name]) changed[name] = view[name];
  if (byId("which") && view.parameter !== before.parameter) byId("which").value = histogramOf(view.parameter);
  if (byId("module") && view.module !== undefined) {
    const row = data.forward.names.indexOf(view.module);
    if (row >= 0) byId("module").value = row;
  }
  mark();
  show(changed);
  drawAll();
}

// Rows of tables that the view names.
function mark() {
  for (const row of document.querySelectorAll("tr[aria-current]")) row.removeAttribute("aria-current");
  for (const [row, about] of rows) {
    const { parameter, module, step } = about;
    const last = Number(row.dataset.last || step);
    if (parameter !== undefined ? parameter === view.parameter
      : module !== undefined ? module === view.module
        : view.step !== undefined && Number(step) <= Number(view.step) && Number(view.step) <= last) {
      row.setAttribute("aria-current", "true");
    }
  }
  bar();
}

// What the first link of each row leads to.
const linked = (row) => Object.fromEntries(new URLSearchParams(row.querySelector("a").hash.slice(1)));
const rows = Array.from(document.querySelectorAll("tbody tr")).filter((row) => row.querySelector("a"))
  .map((row) => [row, linked(row)]);

// Opens what is folded around an element, and scrolls to it.
function reveal(element) {
  if (!element) return;
  for (let at = element.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
  const inner = element.matches("article") && element.querySelector("details");
  if (inner) inner.open = true;
  element.scrollIntoView({ block: element.matches("tr, article") ? "nearest" : "center" });
}

function show(changed) {
  const article = changed.finding !== undefined && document.querySelector(`[data-finding="${CSS.escape(changed.finding)}"]`);
  const rowOf = (name) => (rows.find(([, about]) => about[name] === changed[name]) || [null])[0];
  if (article) { reveal(article); article.focus({ preventScroll: true }); }
  else if (changed.chart !== undefined) reveal(byId(changed.chart));
  else if (changed.parameter !== undefined) reveal(histogramOf(changed.parameter) ? byId("histogram") : rowOf("parameter"));
  else if (changed.module !== undefined) reveal(byId("module") ? byId("forward-steps") : rowOf("module"));
  else if (changed.step !== undefined && !Object.keys(CHARTS).some((id) => inSight(byId(id)))) reveal(byId("scale"));
}

function inSight(element) {
  if (!shownNow(element)) return false;
  const box = element.getBoundingClientRect();
  return box.top < innerHeight && box.bottom > 0;
}

// The bar at the foot: the selected step, parameter and module in words.
function bar() {
  const foot = byId("view"), parts = [];
  const add = (text, to) => {
    const part = document.createElement(to ? "a" : "span");
    part.textContent = text;
    if (to) part.href = addressOf(to);
    parts.push(part);
  };
  if (view.step !== undefined) {
    add(stepText(Number(view.step)));
    const finding = findingAt(Number(view.step));
    if (finding) add(`finding ${1 + data.findings.indexOf(finding)}`, { ...view, chart: undefined, finding: finding.id });
    const [before, after] = neighbours(Number(view.step));
    if (before !== undefined) add("previous mark", { ...view, chart: undefined, finding: undefined, step: before });
    if (after !== undefined) add("next mark", { ...view, chart: undefined, finding: undefined, step: after });
  }
  if (view.parameter !== undefined) add("parameter " + view.parameter);
  if (view.module !== undefined) add("module " + view.module);
  foot.hidden = !parts.length;
  byId("view-text").replaceChildren(...parts.flatMap((part, i) => (i ? [" · ", part] : [part])));
}

const marksOver = (step) => data.marks.first.map((_, i) => i)
  .filter((i) => data.marks.first[i] <= step && step <= data.marks.last[i]);

function findingAt(step) {
  const listed = data.findings.find((f) => f.steps.includes(step));
  return listed || findingOf(marksOver(step).map((i) => data.marks.finding[i]).find(Boolean));
}

function neighbours(step) {
  const steps = [...data.marks.first, ...data.findings.flatMap((f) => f.steps)];
  const before = steps.filter((s) => s < step), after = steps.filter((s) => s > step);
  return [before.length ? Math.max(...before) : undefined, after.length ? Math.min(...after) : undefined];
}

function stepText(step) {
  const parts = [];
  for (const line of data.lines) {
    const at = line.step.lastIndexOf(step);
    if (at < 0) continue;
    if (line.key) parts.push(line.key + ":");
    if (line.scale[at] !== null) parts.push("scale " + plainPower(line.scale[at]));
    if (line.headroom[at] !== null) parts.push(`headroom ${line.headroom[at].toFixed(1)} bits`);
    if (line.norm[at] !== null) parts.push("norm " + line.norm[at].toPrecision(4));
    if (line.loss[at] !== null) parts.push("loss " + line.loss[at].toPrecision(4));
  }
  for (const i of marksOver(step)) {
    parts.push(`${data.marks.what[i]}: ${data.marks.cause[i]}`);
    if (data.marks.culprit[i]) parts.push("first: " + data.marks.culprit[i]);
  }
  return `step ${grouped(step)}` + (parts.length ? ", " + parts.join(", ").replace(/:, /g, ": ") : ": its numbers are not drawn");
}
