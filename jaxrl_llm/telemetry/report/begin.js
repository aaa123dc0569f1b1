// Opens the page: first what the metrics say, then, once that is on the screen, the completions.

let report;

async function begin() {
  report = JSON.parse(await unpack("history"));
  report.runs.forEach((run, number) => {
    run.number = number;
    for (const [name, packed] of Object.entries(run.curves)) run.curves[name] = curve(packed);
    run.clock = curve(run.clock);
    run.seconds = run.clock.y.at(-1);
    run.marks = [...run.events, ...run.findings.map(found => [found.step, found.kind.replaceAll("_", " ")])];
    run.rows = [];
  });
  const main = id("main");
  main.replaceChildren(...[atAGlance(), diagnosis(), curves(), section("Distributions", el("p", { class: "note" }, "Unpacking …")), time(), section("Completions", el("p", { class: "note" }, "Unpacking …")), settingsTable()].filter(Boolean));
  document.querySelector("nav").replaceChildren(...[...main.children].map(one => el("a", { href: `#${one.id}` }, one.firstChild.textContent)));
  document.querySelector("footer").textContent = `Written by jaxrl-llm on ${report.written} from ${report.runs.map(run => run.directory).join(", ")}.`;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  await Promise.all(report.runs.map(async run => {
    run.rows = rowsOf(await unpack(`samples-${run.number}`));
    run.groups = grouped(run.rows);
    run.pairs = pairsOf(run);
  }));
  id("completions").replaceWith(completions());
  const charts = report.runs.flatMap(distributions);
  const told = charts.length ? [el("p", { class: "hint" }, "The median, and between the tenth and the ninetieth percentile."), el("div", { class: "charts large" }, ...charts)] : [el("p", { class: "note" }, "This kind of run has neither rewards nor lengths.")];
  id("distributions").replaceWith(section("Distributions", ...told));
  document.documentElement.dataset.opened = performance.now().toFixed(0);
}

// A line that a kill has torn is passed over.
function rowsOf(text) {
  return text.split("\n").flatMap(line => { try { return line ? [JSON.parse(line)] : []; } catch { return []; } });
}

begin().catch(error => {
  const old = typeof DecompressionStream === "undefined";
  id("main").replaceChildren(el("p", { class: "card finding" }, old ? "This browser is too old for the report: take one of 2023 or later." : `The report cannot be shown: ${error.message}`));
  throw error;
});
