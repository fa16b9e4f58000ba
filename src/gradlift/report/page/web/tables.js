// The table of parameters: sort by a head, search by name.
function sortable(table, search, count) {
  const body = table.tBodies[0], rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);
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
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    let left = 0;
    for (const row of rows) {
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
      left += !row.hidden;
    }
    count.textContent = wanted ? `${grouped(left)} of ${grouped(rows.length)}` : "";
  });
}
