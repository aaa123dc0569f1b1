// Curves: all charts share one cursor, one zoom and the settings in `view`.

const view = { smoothing: 0.6, timed: false, hidden: new Set(), charts: new Set() };
const SYNC = "report";
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap(size => [size, 2 * size, 5 * size]);
const MARKS = [[/reset/, "bad"], [/resumed/, "accent"], [/./, "warn"]];

const inMinutes = () => Math.max(...report.runs.map(run => run.seconds)) < 2 * 3600;
const at = (run, step) => (view.timed ? between(run.clock, step) / (inMinutes() ? 60 : 3600) : step);
const visible = () => report.runs.filter(run => !view.hidden.has(run));
const markColor = name => color(MARKS.find(([pattern]) => pattern.test(name))[1]);

// A card with a plot that is drawn when it comes into sight. `lines(runs)` gives [{run, x, y, label, color, band, ...}].
function chart(name, lines, options = {}) {
  const head = el("div", { class: "head" }, el("span", { class: "name", title: options.hint }, name), el("span", { class: "at" }));
  const plot = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${name}: curve over steps; arrow keys read it` });
  const card = el("div", { class: `card chart ${options.labels || report.runs.length > 1 ? "several" : ""}` }, head, plot);
  const own = { card, plot, lines, options, u: null, seen: false, log: false, readout: head.lastChild };
  if (options.log !== false) {
    head.append(button("log", "Logarithmic scale", () => (own.log = !own.log)));
  }
  head.append(button("⤢", "Larger", () => card.classList.toggle("wide")));
  function button(text, title, act) {
    const made = el("button", { class: "small", title, "aria-label": `${title}: ${name}`, "aria-pressed": "false", onclick: () => {
      made.setAttribute("aria-pressed", String(made.getAttribute("aria-pressed") === "false"));
      act();
      draw(own);
    } }, text);
    return made;
  }
  plot.addEventListener("keydown", event => walk(own, event));
  view.charts.add(own);
  sight.observe(card);
  return card;
}

const sight = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    const own = [...view.charts].find(one => one.card === target);
    own.seen = isIntersecting;
    if (isIntersecting && (!own.u || own.stale)) draw(own);
  }
}, { rootMargin: "200px" });

const resized = new ResizeObserver(entries => {
  for (const { target } of entries) {
    const own = [...view.charts].find(one => one.plot === target);
    if (own?.u && own.u.width !== target.clientWidth) own.u.setSize({ width: target.clientWidth, height: own.u.height });
  }
});

function redraw() {
  for (const own of view.charts) {
    own.stale = true;
    if (own.seen) draw(own);
  }
}

function draw(own) {
  own.u?.destroy();
  own.stale = false;
  const lines = own.lines(visible());
  const series = [], bands = [], tables = [];
  for (const line of lines) {
    const x = line.x.map(step => at(line.run, step));
    if (own.log) line.y = line.y.map(value => (value > 0 ? value : null));
    const paint = color(line.color ?? `r${line.run.number % 8}`);
    const smooth = view.smoothing > 0 && line.y.length > 20 && !line.plain;
    const points = { show: line.y.length <= 60 && !line.bare, size: 5, fill: paint };
    series.push({ stroke: line.edge ?? (smooth ? paint + "50" : paint), width: line.width ?? (smooth ? 1 : 1.8), points: smooth ? { show: false } : points, fill: line.fill, line });
    tables.push([x, line.y]);
    if (smooth) {
      series.push({ stroke: paint, width: 1.8, points: { show: false }, smooth: true });
      // The slider means the same share of a long run as of one of a hundred points.
      tables.push([x, smoothed(line.y, view.smoothing ** Math.min(1, 100 / line.y.length))]);
    }
    if (line.band) bands.push({ series: [series.length, series.length + line.band], fill: paint + "2e" });
  }
  own.series = series;
  const data = tables.length ? uPlot.join(tables) : [[0], [null]];
  if (!tables.length) series.push({});
  own.u = new uPlot(settings(own, series, bands), data, own.plot);
  own.u.setScale("x", view.range ?? whole());
  resized.observe(own.plot);
  tell(own, null);
}

function settings(own, series, bands) {
  const axis = { stroke: color("soft"), font: "11px system-ui", ticks: { show: false }, grid: { stroke: color("line"), width: 1 } };
  const values = (u, splits, number, space, gap) => (own.log && number ? splits.map(split => (split == null ? "" : shown(split))) : places(splits, gap));
  return {
    width: Math.max(own.plot.clientWidth, 60),
    height: own.card.classList.contains("wide") ? 340 : 170,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: SYNC, setSeries: false }, points: { size: 6 }, focus: { prox: 1e6 }, drag: { x: true, y: false, setScale: false } },
    scales: { x: { time: false }, y: { distr: own.log ? 3 : 1, range: own.options.range } },
    axes: [{ ...axis, size: 28, values, ...(view.timed ? {} : { incrs: WHOLE }) }, { ...axis, size: 52, values }],
    series: [{}, ...series.map(one => ({ spanGaps: true, ...one }))],
    bands,
    hooks: {
      draw: [u => marks(u)],
      setCursor: [u => tell(own, u.cursor.idx)],
      setSelect: [u => selected(own, u)],
      ready: [u => u.over.addEventListener("dblclick", () => zoom(null))],
    },
  };
}

const whole = () => ({ min: 0, max: Math.max(...report.runs.map(run => at(run, run.last)), 1e-9) });

// One range of steps for all charts; null is the whole.
function zoom(range) {
  view.range = range;
  id("whole").disabled = !range;
  for (const own of view.charts) own.u?.setScale("x", range ?? whole());
}

// The selection shows in all charts; the one under the pointer acts on it.
function selected(own, u) {
  const { left, width } = u.select;
  if (width < 4) return;
  u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  if (own.plot.matches(":hover")) zoom({ min: u.posToVal(left, "x"), max: u.posToVal(left + width, "x") });
}

function marks(u) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.setLineDash([4, 4]);
  for (const run of visible()) {
    for (const [step, name] of run.marks) {
      const x = Math.round(u.valToPos(at(run, step), "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = markColor(name);
      ctx.globalAlpha = 0.65;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

// What stands under the cursor; without one, each line's last value.
function tell(own, place) {
  const u = own.u;
  if (!u || !own.series.length) return;
  const parts = [];
  if (place != null && u.data[0].length > place) {
    const x = u.data[0][place];
    const happened = visible().flatMap(run => run.marks.filter(([step]) => at(run, step) === x).map(([, name]) => name));
    parts.push(el("span", {}, view.timed ? `${x.toFixed(2)} ${inMinutes() ? "min" : "h"}` : `step ${x.toLocaleString("en")}`, ...happened.map(name => ` · ${name}`)));
  }
  own.series.forEach((one, number) => {
    if (!one.line || one.line.quiet) return;
    const values = u.data[number + 1];
    let last = place ?? values.length - 1;
    while (last >= 0 && values[last] == null) last--;
    if (last < 0) return;
    const of = own.options.labels || report.runs.length > 1;
    const value = one.line.tell ? one.line.tell(u.data[0][last], last) : values[last];
    parts.push(el("span", {}, of && !one.line.bare ? el("span", { class: "dot", style: `background:${color(one.line.color ?? `r${one.line.run.number % 8}`)}` }) : null, own.options.labels ? `${one.line.label} ` : null, el("b", {}, shown(value))));
  });
  own.readout.replaceChildren(...parts);
}

function walk(own, event) {
  const u = own.u, way = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
  if (event.key === "Escape") zoom(null);
  if (!u || !way) return;
  event.preventDefault();
  const idx = Math.min(Math.max((u.cursor.idx ?? (way > 0 ? -1 : u.data[0].length)) + way, 0), u.data[0].length - 1);
  u.setCursor({ left: u.valToPos(u.data[0][idx], "x"), top: 10 });
}

// A metric of all runs that have it.
function metricChart(name) {
  const lines = runs => runs.filter(run => run.curves[name]).map(run => ({ run, ...run.curves[name], plain: name.startsWith("eval/") }));
  return chart(name, lines, { hint: HINTS[name] });
}
