// Saves charts as PNG and SVG, tables as CSV. Nothing leaves the page: a file is a blob.
function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function saveChart(id, format) {
  const chart = byId(id), box = chart.getBoundingClientRect();
  const figure = {
    data: chart.data, config: CONFIG,
    layout: { ...chart.layout, paper_bgcolor: colour("card"), autosize: false, width: box.width, height: box.height },
  };
  const address = await Plotly.toImage(figure, { format, width: box.width, height: box.height, scale: 2 });
  const [head, body] = [address.slice(0, address.indexOf(",")), address.slice(address.indexOf(",") + 1)];
  const content = head.includes("base64") ? Uint8Array.from(atob(body), (c) => c.charCodeAt(0)) : decodeURIComponent(body);
  save(new Blob([content], { type: format === "png" ? "image/png" : "image/svg+xml" }), `${id}.${format}`);
}

// A spreadsheet runs a text that begins with one of these as a formula.
const FORMULA = /^[=+\-@\t\r]/;
function csvOf(table) {
  const cellOf = (cell) => {
    const number = cell.dataset.v !== undefined ? cell.dataset.v : /^-?[\d.]+$/.test(cell.textContent) ? cell.textContent : undefined;
    if (number !== undefined) return number;
    const text = cell.textContent.replace(/\s+/g, " ").trim();
    return `"${(FORMULA.test(text) ? "'" : "") + text.replace(/"/g, '""')}"`;
  };
  const lineOf = (row) => Array.from(row.cells).map(cellOf).join(",");
  return Array.from(table.rows).filter((row) => !row.hidden).map(lineOf).join("\r\n") + "\r\n";
}

function offer(place, labels, onClick) {
  const group = document.createElement("p");
  group.className = "save";
  group.append("Save as ");
  for (const label of labels) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.setAttribute("aria-label", `save ${place.dataset.name} as ${label}`);
    button.addEventListener("click", () => onClick(label.toLowerCase()));
    group.append(button);
  }
  place.after(group);
}
