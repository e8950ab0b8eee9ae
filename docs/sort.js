// A click on the head of a column sorts a table by it: numbers as numbers, a second click the other way. Without it tables stay as they are.
document.addEventListener("click", (event) => {
  const head = event.target.closest("thead th");
  if (!head) return;
  const table = head.closest("table");
  const body = table.tBodies[0];
  const column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  const text = (row) => row.cells[column].textContent.trim();
  const number = (row) => parseFloat(text(row).replace(/,/g, ""));
  const rows = [...body.rows].sort((first, second) => {
    const [one, two] = [number(first), number(second)];
    if (isNaN(one) && isNaN(two)) return text(first).localeCompare(text(second));
    return (isNaN(one) - isNaN(two)) || one - two;
  });
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...(down ? rows.reverse() : rows));
});
