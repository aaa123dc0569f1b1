// Curves: all charts share one cursor, one zoom and the settings in `view`.

const view = { smoothing: 0.6, timed: false, hidden: new Set(), charts: new Set() };
const SYNC = "report";
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap(size => [size, 2 * size, 5 * size]);
const MARKS = [[/reset/, "bad"], [/resumed/, "accent"], [/./, "warn"]];

const inMinutes = () => Math.max(...report.runs.map(run => run.seconds)) < 2 * 3600;
const at = (run, step) => (view.timed ? between(run.clock, step) / (inMinutes() ? 60 : 3600) : step);
const visible = () => report.runs.filter(run => !view.hidden.has(run));
const paintOf = mark => MARKS.find(([pattern]) => pattern.test(mark))[1];
const paintOfLine = line => color(line.color ?? `r${line.run.number % 8}`);

// A card with a plot that is drawn when it comes into sight. `lines(runs)` gives what is drawn of the runs that are
// not hidden: run, x, y, and how they look.
function chart(name, lines, options = {}) {
  const readout = box("at"), title = el("span", { class: "name", title: options.hint }, name);
  const told = `${name}: curve over steps; arrow keys read it`;
  const plot = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": told });
  const head = box("head", title, readout);
  const card = box(`card chart ${options.labels || several() ? "several" : ""}`, head, plot);
  const own = { card, plot, lines, options, readout, u: null, seen: false, log: false };
  const button = (text, title, act) => {
    const pressed = () => made.getAttribute("aria-pressed") === "true";
    const press = () => { made.setAttribute("aria-pressed", String(!pressed())); act(); draw(own); };
    const looks = { class: "small", title, "aria-label": `${title}: ${name}`, "aria-pressed": "false" };
    const made = el("button", { ...looks, onclick: press }, text);
    return made;
  };
  if (options.log !== false) head.append(button("log", "Logarithmic scale", () => (own.log = !own.log)));
  head.append(button("⤢", "Larger", () => card.classList.toggle("wide")));
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
    const u = [...view.charts].find(one => one.plot === target)?.u, width = target.clientWidth;
    if (u && u.width !== width) u.setSize({ width, height: u.height });
  }
});

function redraw() {
  for (const own of view.charts) {
    own.stale = true;
    if (own.seen) draw(own);
  }
}

// Paper has one width and light colours, and all curves are on it; on the screen they are drawn again in its own.
function toPaper(there) {
  document.documentElement.classList.toggle("paper", there);
  if (there) view.charts.forEach(draw);
  else redraw();
}

function draw(own) {
  own.u?.destroy();
  own.stale = false;
  const series = [], bands = [], tables = [];
  for (const line of own.lines(visible())) {
    const x = line.x.map(step => at(line.run, step)), paint = paintOfLine(line), count = line.y.length;
    const y = own.log ? line.y.map(value => (value > 0 ? value : null)) : line.y;
    const smooth = view.smoothing > 0 && count > 20 && !line.plain;
    const points = { show: count <= 60 && !line.bare && !smooth, size: 5, fill: paint };
    const look = smooth ? { stroke: paint + "50", width: 1 } : { stroke: paint, width: line.width ?? 1.8 };
    series.push({ ...look, points, fill: line.fill, line });
    tables.push([x, y]);
    if (smooth) {
      series.push({ stroke: paint, width: 1.8, points: { show: false } });
      // The slider means the same share of a long run as of one of a hundred points.
      tables.push([x, smoothed(y, view.smoothing ** Math.min(1, 100 / count))]);
    }
    if (line.band) bands.push({ series: [series.length, series.length + line.band], fill: paint + "2e" });
  }
  own.series = series;
  const data = tables.length ? uPlot.join(tables) : [[0], [null]];
  own.u = new uPlot(settings(own, series.length ? series : [{}], bands), data, own.plot);
  own.u.setScale("x", view.range ?? everything());
  resized.observe(own.plot);
  tell(own, null);
}

function settings(own, series, bands) {
  const grid = { stroke: color("line"), width: 1 };
  const axis = { stroke: color("soft"), font: "11px system-ui", ticks: { show: false }, grid };
  const even = (u, splits, number, space, gap) => places(splits, gap);
  const powers = (u, splits) => splits.map(split => (split == null ? "" : shown(split)));
  const steps = view.timed ? {} : { incrs: WHOLE };
  return {
    width: Math.max(own.plot.clientWidth, 60),
    height: own.card.classList.contains("wide") ? 340 : 170,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: {
      sync: { key: SYNC, setSeries: false },
      points: { size: 6 },
      focus: { prox: 1e6 },
      drag: { x: true, y: false, setScale: false },
    },
    scales: { x: { time: false }, y: { distr: own.log ? 3 : 1, range: own.options.range } },
    axes: [{ ...axis, size: 28, values: even, ...steps }, { ...axis, size: 52, values: own.log ? powers : even }],
    series: [{}, ...series.map(one => ({ spanGaps: true, ...one }))],
    bands,
    hooks: {
      draw: [marks],
      setCursor: [u => tell(own, u.cursor.idx)],
      setSelect: [u => selected(own, u)],
      ready: [u => u.over.addEventListener("dblclick", () => zoom(null))],
    },
  };
}

const everything = () => ({ min: 0, max: Math.max(...report.runs.map(run => at(run, run.last)), 1e-9) });

// One range of steps for all charts; null is the whole.
function zoom(range) {
  view.range = range;
  id("whole").disabled = !range;
  for (const own of view.charts) own.u?.setScale("x", range ?? everything());
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
      ctx.strokeStyle = color(paintOf(name));
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
  const u = own.u, parts = [];
  if (!u) return;
  if (place != null && own.series.length) {
    const x = u.data[0][place];
    const here = visible().flatMap(run => run.marks.filter(([step]) => at(run, step) === x));
    const where = view.timed ? `${x.toFixed(2)} ${inMinutes() ? "min" : "h"}` : `step ${whole(x)}`;
    parts.push(span([where, ...here.map(([, name]) => name)].join(" · ")));
  }
  own.series.forEach(({ line }, number) => {
    const values = u.data[number + 1];
    let last = place ?? values.length - 1;
    while (last >= 0 && values[last] == null) last--;
    if (!line || last < 0) return;
    const told = el("b", {}, shown(line.tell ? line.tell(last) : values[last]));
    const key = el("span", { class: "dot", style: `background: ${paintOfLine(line)}` });
    const keyed = (own.options.labels || several()) && !line.bare;
    parts.push(el("span", {}, keyed ? key : null, own.options.labels ? `${line.label} ` : null, told));
  });
  own.readout.replaceChildren(...parts);
}

function walk(own, event) {
  const u = own.u, way = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
  if (event.key === "Escape") zoom(null);
  if (!u || !way) return;
  event.preventDefault();
  const last = u.data[0].length - 1, from = u.cursor.idx ?? (way > 0 ? -1 : last + 1);
  u.setCursor({ left: u.valToPos(u.data[0][Math.min(Math.max(from + way, 0), last)], "x"), top: 10 });
}

// A metric of all runs that have it.
function metricChart(name) {
  const plain = name.startsWith("eval/");
  const lines = runs => runs.filter(run => run.curves[name]).map(run => ({ run, ...run.curves[name], plain }));
  return chart(name, lines, { hint: HINTS[name] });
}
