// The tables work in any browser; the rest waits until the data and the charts' script are unpacked.
for (const table of document.querySelectorAll("table[data-name]")) {
  const place = table.closest(".scroll") || table;
  if (!place.dataset.name) place.dataset.name = table.dataset.name;
  offer(place, ["CSV"], () => save(new Blob([csvOf(table)], { type: "text/csv" }), table.dataset.name.replace(/ /g, "-") + ".csv"));
}
if (byId("parameters")) sortable(byId("parameters"), byId("search"), byId("shown"));

async function start() {
  data = await unpackedData();
  wire();
  applied();
  await loadCharts();
  ready = true;
  drawAll();
  show(view);
  for (const id of Object.keys(CHARTS)) {
    if (byId(id)) offer(byId(id), ["PNG", "SVG"], (format) => saveChart(id, format));
  }
  document.documentElement.dataset.charts = "drawn";
}

function wire() {
  // Links to a place in the page keep what else is selected.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    follow(Object.fromEntries(new URLSearchParams(link.hash.slice(1))));
  });
  byId("view-close").addEventListener("click", () => {
    history.pushState(null, "", location.pathname + location.search);
    applied();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("view").hidden && !event.target.matches("input, select")) byId("view-close").click();
  });
  addEventListener("popstate", applied);

  if (byId("which")) byId("which").addEventListener("change", () => {
    const name = data.histograms[Number(byId("which").value)].name;
    view.parameter = name || undefined;
    history.replaceState(null, "", addressOf(view));
    mark();
    drawAll();
  });
  if (byId("module")) byId("module").addEventListener("change", () => {
    view.module = data.forward.names[Number(byId("module").value)];
    history.replaceState(null, "", addressOf(view));
    mark();
    drawAll();
  });
  for (const group of document.querySelectorAll(".modes")) {
    group.addEventListener("click", (event) => {
      if (!event.target.dataset.mode) return;
      HEATS[group.dataset.of].mode = event.target.dataset.mode;
      for (const button of group.children) button.setAttribute("aria-pressed", button === event.target);
      drawOne(group.dataset.of);
    });
  }
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => {
    if (details.open) Object.keys(CHARTS).filter((id) => details.contains(byId(id)) && !drawn(id)).forEach(drawOne);
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("(max-width: 640px)").addEventListener("change", drawAll);

  // Paper: light colours, and everything unfolded.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = Array.from(document.querySelectorAll("details.section:not([open]), .finding > details:not([open])"));
    for (const details of opened) details.open = true;
    document.documentElement.classList.add("printing");
    drawAll();
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    document.documentElement.classList.remove("printing");
    drawAll();
  });

}

start().catch((error) => {
  document.documentElement.dataset.charts = "failed";
  for (const chart of document.querySelectorAll(".chart")) {
    chart.classList.add("absent");
    chart.textContent = "This chart cannot be drawn here: the browser needs DecompressionStream " +
      `(Chrome 80, Safari 16.4, Firefox 113 or later). The texts and tables are complete. (${error.message})`;
  }
});
