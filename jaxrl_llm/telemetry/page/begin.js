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
  const main = id("main"), later = title => section(title, note("Unpacking …"));
  const sections = [atAGlance(), diagnosis(), curves(), later("Distributions"), time(), later("Completions")];
  main.replaceChildren(...[...sections, settingsTable()].filter(Boolean));
  const link = one => el("a", { href: `#${one.id}` }, one.firstChild.textContent);
  document.querySelector("nav").replaceChildren(...[...main.children].map(link));
  const where = report.runs.map(run => run.directory).join(", ");
  document.querySelector("footer").textContent = `Written by jaxrl-llm on ${report.written} from ${where}.`;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => toPaper(true));
  addEventListener("afterprint", () => toPaper(false));
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  await Promise.all(report.runs.map(async run => {
    run.rows = rowsOf(await unpack(`samples-${run.number}`));
    run.groups = grouped(run.rows);
    run.pairs = pairsOf(run);
  }));
  id("completions").replaceWith(completions());
  const charts = report.runs.flatMap(distributions);
  const hint = "The median, and the band from the tenth to the ninetieth percentile.";
  const told = charts.length ? [el("p", { class: "hint" }, hint), box("charts large", ...charts)] : [];
  const none = note("This kind of run has neither rewards nor lengths.");
  id("distributions").replaceWith(section("Distributions", ...(told.length ? told : [none])));
  document.documentElement.dataset.opened = performance.now().toFixed(0);
}

// A line that a kill has torn is passed over.
function rowsOf(text) {
  return text.split("\n").flatMap(line => { try { return line ? [JSON.parse(line)] : []; } catch { return []; } });
}

begin().catch(error => {
  const old = "This browser is too old for the report: take one of 2023 or later.";
  const told = typeof DecompressionStream === "undefined" ? old : `The report cannot be shown: ${error.message}`;
  id("main").replaceChildren(el("p", { class: "card finding" }, told));
  throw error;
});
