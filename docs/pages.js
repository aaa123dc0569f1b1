// For phones (style.css): cells of narrow tables show their column's heading, names break after a separator or not at all, and pictures
// open alone at a tap.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    table.dataset.columns = headings.length > 4 ? "many" : "few";
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].slice(1).forEach((cell, number) => {
        const heading = headings[number + 1];
        if (heading && headings.length > 2 && heading !== "meaning") cell.dataset.heading = `${heading}: `;
      });
    }
  }
  for (const code of document.querySelectorAll(".md-typeset :is(p, li, td) > code")) {
    if (code.children.length) continue;
    const pieces = code.textContent.split(/(?<=[/_,=:@ ])|(?<=\.)(?=[a-z])/i);
    const whole = code.textContent.length <= (code.closest("td") ? 16 : 34);
    code.replaceChildren(
      ...(whole ? [code.textContent] : pieces).flatMap((piece) => {
        const part = document.createElement("span");
        part.textContent = piece;
        part.style.whiteSpace = whole || piece.length <= 24 ? "nowrap" : "normal";
        return [part, document.createElement("wbr")];
      }),
    );
  }
  for (const picture of document.querySelectorAll('.md-typeset p > img:not([src^="data:"])')) {
    const link = document.createElement("a");
    link.href = picture.src;
    picture.replaceWith(link);
    link.append(picture);
  }
});
