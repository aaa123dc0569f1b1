// Settings: where runs differ, and the table of all.

// The settings of a run by name: what is shown, and whether it differs from its default. The class of a value, such as
// the loss, stands under the name of the value.
function settingsOf(run) {
  const own = Object.entries(run.config).filter(([key]) => !/^(origin\.|type$|chosen$)/.test(key));
  const chosen = Array.isArray(run.config.chosen) ? run.config.chosen : [];
  const text = value => (typeof value === "string" ? value : JSON.stringify(value));
  return new Map(own.map(([key, value]) => {
    const named = key.endsWith(".type") && /:/.test(value), name = named ? key.slice(0, -".type".length) : key;
    const differs = chosen.some(one => one === key || key.startsWith(`${one}.`));
    return [name, { text: named ? value.split(":").pop() : text(value), differs }];
  }));
}

// Names and texts of settings, with those first that differ from their defaults. A class whose name only repeats the
// setting's is left out.
function settingRows(runs) {
  const all = runs.map(settingsOf), names = [...new Set(all.flatMap(one => [...one.keys()]))];
  const rows = names.map(name => ({
    name,
    texts: all.map(one => one.get(name)?.text ?? ""),
    chosen: all.some(one => one.get(name)?.differs),
  }));
  for (const row of rows) row.differ = new Set(row.texts).size > 1;
  const plain = text => text.toLowerCase().replaceAll("_", "");
  const shown = rows.filter(({ name, texts, differ }) => differ || plain(texts[0]) !== plain(name.split(".").pop()));
  return [...shown.filter(row => row.chosen), ...shown.filter(row => !row.chosen)];
}

const configured = () => report.runs.filter(run => Object.keys(run.config).length);
const MOST_DIFFERENCES = 12;

// Where runs differ, next to their results; of values of different classes the classes alone.
function differences() {
  const runs = configured(), all = settingRows(runs).filter(row => row.differ && !row.name.startsWith("output."));
  const rows = all.filter(row => !all.some(other => row.name.startsWith(`${other.name}.`)));
  if (runs.length < 2) return null;
  const told = rows.slice(0, MOST_DIFFERENCES).map(({ name, texts }) =>
    el("span", {}, `${name} `, el("b", {}, texts.map(text => text || "–").join(" | "))));
  const left = rows.length - told.length;
  if (left > 0) told.push(el("a", { href: "#settings" }, `${whole(left)} more`));
  return box("card keys differences", span("Differ in"), ...(told.length ? told : [span("no setting")]));
}

function settingsTable() {
  const runs = configured();
  if (!runs.length) return null;
  const rows = settingRows(runs), known = rows.some(row => row.chosen);
  const looks = { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting" };
  const find = el("input", { ...looks, oninput: fill });
  const all = el("input", { type: "checkbox", checked: runs.length < 2, onchange: fill });
  const body = el("tbody"), count = span("", "legend");
  const part = title => el("tr", { class: "part" }, el("th", { colspan: runs.length + 1 }, title));
  function row({ name, texts, differ }) {
    const made = el("tr", {}, ...[name, ...texts].map(cell => el("td", {}, cell)));
    made.classList.toggle("differs", all.checked && differ);
    return made;
  }
  function fill() {
    const has = ({ name, texts }) => [name, ...texts].join(" ").toLowerCase().includes(find.value.toLowerCase());
    const found = rows.filter(one => (all.checked || one.differ) && has(one));
    const parts = [["not the default", true], ["defaults", false]].map(([title, chosen]) => {
      const own = found.filter(one => one.chosen === chosen).map(row);
      return known && own.length ? [part(title), ...own] : own;
    });
    body.replaceChildren(...parts.flat());
    count.textContent = many(found.length, "setting");
  }
  fill();
  const titles = el("tr", {}, el("th", {}, "setting"), ...runs.map(run => el("th", {}, dot(run.number), run.name)));
  const more = runs.length > 1 ? el("label", {}, all, "also those that are equal") : null;
  const table = el("table", {}, el("thead", {}, titles), body);
  return section("Settings", box("tools", find, more, count),
    el("div", { class: "card table", tabindex: 0, role: "region", "aria-label": "Settings" }, table));
}
