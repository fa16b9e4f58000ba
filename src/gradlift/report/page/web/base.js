// Draws the report from the data in the page. Every name is escaped, since plotly interprets some
// HTML in its texts.
let data; // what the charts show, once it is unpacked
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
const plainPower = (e) => `2^${Number.isInteger(e) ? e : e.toFixed(2)}`;
const percent = (share) => (100 * share).toPrecision(3).replace(/\.?0+$/, "") + " %";

const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false };
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

// What the address bar holds: step, parameter, module, finding, chart, zoom.
const VIEW = ["step", "parameter", "module", "finding", "chart", "zoom"];
let view = {};
const findingOf = (id) => data.findings.find((f) => f.id === id);
