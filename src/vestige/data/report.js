"use strict";
const number = (text) => (text === "" ? NaN : Number(text));
const compare = (a, b) => {
  const x = number(a), y = number(b);
  if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
};
const count = (table) => {
  const rows = [...table.tBodies[0].rows], shown = rows.filter((row) => !row.classList.contains("hidden"));
  const tools = table.closest(".scroll").previousElementSibling;
  tools.querySelector(".count").textContent = shown.length === rows.length ? `${rows.length} rows` : `${shown.length} of ${rows.length} rows`;
};
document.querySelectorAll("table").forEach((table) => {
  table.querySelectorAll("th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.v;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const order = compare(value(a), value(b));
        return value(a) === "" || value(b) === "" ? order : up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  });
  table.querySelectorAll("td").forEach((cell) => { cell.dataset.v ??= cell.textContent; });
  count(table);
});
document.querySelectorAll("input[type=search]").forEach((input) => {
  const table = document.getElementById(input.dataset.table);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    [...table.tBodies[0].rows].forEach((row) => {
      const text = row.textContent.toLowerCase();
      row.classList.toggle("hidden", !words.every((word) => text.includes(word)));
    });
    count(table);
  });
});
const field = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
document.querySelectorAll(".csv").forEach((button) => {
  button.addEventListener("click", () => {
    const table = document.getElementById(button.dataset.table);
    const head = [...table.tHead.rows[0].cells].map((cell) => field(cell.textContent));
    const rows = [...table.tBodies[0].rows].filter((row) => !row.classList.contains("hidden"));
    const lines = [head, ...rows.map((row) => [...row.cells].map((cell) => field(cell.dataset.v)))];
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.map((line) => line.join(",")).join("\n") + "\n"], { type: "text/csv" }));
    link.download = button.dataset.name;
    link.click();
    URL.revokeObjectURL(link.href);
  });
});
document.querySelectorAll(".chip").forEach((chip) => {
  chip.addEventListener("click", () => {
    const off = chip.getAttribute("aria-pressed") === "true", name = chip.dataset.series;
    chip.setAttribute("aria-pressed", String(!off));
    document.querySelectorAll("g.s").forEach((mark) => {
      const series = mark.dataset.series;
      if (series === name || series.startsWith(`${name}, layer `)) mark.classList.toggle("hidden", off);
    });
  });
});
