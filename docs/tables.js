// On a phone each row of a narrow table is a block (style.css): a cell then shows its column's heading. Long names break after a separator,
// short ones never.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
    if (code.textContent.length <= 24) code.style.whiteSpace = "nowrap";
  }
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    table.dataset.columns = headings.length > 4 ? "many" : "few";
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, number) => (cell.dataset.heading = headings[number]));
    }
    for (const code of table.querySelectorAll("td code")) {
      const pieces = code.textContent.split(/(?<=[/_,=:@])|(?<=\.)(?=[a-z])/i);
      code.replaceChildren(...pieces.flatMap((piece) => [piece, document.createElement("wbr")]));
    }
  }
});
