// What stands above and below the curves: runs at a glance, findings, groups of curves, time.

const REWARD = /^(eval\/.*(@|accuracy|reward|loss|perplexity|margin|win|ref)|(reward\w*|pairs|steps|constraint)\/)/;
const GROUPS = [
  ["Reward and evaluation", REWARD],
  ["Policy: entropy, KL, clipping",
    /^(entropy|kl|policy_kl|monitor|controller\/|ratio|clip_fraction\/|target_kl|kl_coef)/],
  ["Completions", /^(completions|eval\/.*(length|given_up))/],
  ["Learning", /^(loss|grad_norm|lr|updates|advantage\/|epoch|tokens$)/],
  ["Critic", /^critic\//],
  ["Sampler against learner", /^(sampler\/|correction|sequence_filter)/],
  ["Sampling and its waste", /^(dynamic_sampling\/|rollout\/|prompts|throughput\/)/],
  ["Time", /^time\//],
  ["Episodes", /^(episode|environment)\//],
  ["By task", /^task\//],
  ["Other", /./],
];
const FIRST = [/^eval\/.*pass@1$/, /^eval\/.*pass@/, /^eval\//, /^reward\/mean$/, /^reward\/(accuracy|std|zero)/,
  /^reward/, /^entropy$/, /^kl/, /^clip/];
const UNSEEN = /^eval\/.*\/problems$|^reward\/p\d+$|_p\d+$/;
const HINTS = {
  "reward/mean": "Mean reward of the step's completions",
  "reward/zero_std_fraction": "Share of groups whose rewards are all equal: nothing is learned from them",
  "completions/truncated_fraction": "Share of completions cut off at the limit",
  "completions/repetition_fraction": "Share of completions that repeat themselves to their end",
  entropy: "Of the policy at the sampling temperature, mean over tokens, nats: near 0 it explores no more",
  kl: "Distance to the reference, mean over tokens, nats",
  policy_kl: "How far the policy moved within the step, mean over tokens, nats",
  grad_norm: "Global norm of the gradient, before clipping",
  loss: "What is minimised; in reinforcement learning no measure of progress",
  "clip_fraction/high": "Share of tokens whose gradient is cut at the upper bound",
  "clip_fraction/low": "Share of tokens whose gradient is cut at the lower bound",
  "sampler/logp_abs_diff_mean": "Learner against sampler on the same tokens, nats: near 0 where both agree",
  "sampler/logp_abs_diff_max": "The largest difference between learner and sampler on one token, nats",
  "critic/explained_variance": "1 is perfect, 0 no better than the mean",
  "critic/explained_variance_pooled": "Of the last five steps: 1 is perfect, 0 no better than each step's mean",
  "rollout/useful_fraction": "Tokens learned from, over those and the tokens of groups thrown away",
  "rollout/utilisation": "Tokens sampled, over the slots that decode steps computed",
};
// What a run is summed up by: a metric, how it is called, how it is written, and what makes it superfluous.
const TILES = [
  [/^eval\/(.*)\/pass@1$/, "accuracy on $1", percent],
  [/^eval\/pairs\/accuracy$/, "held-out pairs", percent],
  [/^eval\/steps\/accuracy$/, "held-out steps", percent],
  [/^eval\/(.*)\/reward$/, "reward on $1", shown],
  [/^eval\/text\/loss$/, "held-out text loss", shown],
  [/^reward\/mean$/, "reward", shown],
  [/^pairs\/accuracy$/, "pairs", percent],
  [/^pairs\/margin$/, "margin", shown],
  [/^completions\/mean_length$/, "length, tokens", shown],
  [/^entropy$/, "entropy, nats", shown],
  [/^kl$/, "KL, nats", shown],
  [/^loss$/, "loss", shown, /^reward\/mean$/],
  [/^grad_norm$/, "gradient norm", shown],
  [/^completions\/truncated_fraction$/, "cut off", percent],
  [/^throughput\/sampled_tokens_per_s$/, "sampled tokens/s", shown],
  [/^throughput\/mfu$/, "MFU of the updates", percent],
  [/^time\/step_s$/, "time of a step", duration],
];
const MOST_TILES = 8;
const SPLIT = [
  ["rollout", "time/rollout_s", "r0"],
  ["reward", "time/reward_s", "r4"],
  ["update", "time/update_s", "r2"],
  ["evaluation", "time/evaluation_s", "r3"],
];
const CALM = `Looked for: collapse or explosion of entropy and lengths, truncation, repetition, rewards that rise while
  evaluations fall, groups without difference, runaway KL, clipping, disagreement of sampler and learner, spikes of the
  gradient, a stall.`;

const names = () => [...new Set(report.runs.flatMap(run => Object.keys(run.curves)))];
const several = () => report.runs.length > 1;
const titled = (title, run) => (several() ? `${title} · ${run.name}` : title);
const heading = run => (several() ? el("h3", {}, dot(run.number), run.name) : null);

function section(title, ...children) {
  return el("section", { id: title.toLowerCase().replace(/\W+/g, "-") }, el("h2", {}, title), ...children);
}

function atAGlance() {
  return section("Overview", box("runs", ...report.runs.map(glance)), differences());
}

function glance(run) {
  const settings = run.config, known = Object.keys(run.curves);
  const kind = (settings.type ?? "").split(":").pop();
  const source = Object.keys(settings).find(key => /source\.(name|path)$/.test(key));
  const steps = settings.steps ? `${whole(run.last)} of ${whole(settings.steps)} steps` : many(run.last, "step");
  const facts = [kind === "Run" ? null : kind, settings.model, settings["task.name"] ?? settings[source]];
  facts.push(settings["recipe.name"], steps, run.seconds ? duration(run.seconds) : null);
  const tiles = [];
  for (const [pattern, label, style, unless] of TILES) {
    const name = known.find(one => pattern.test(one));
    if (!name || known.some(one => unless?.test(one))) continue;
    tiles.push(tile(run, name, name.replace(pattern, label), style));
  }
  return box("card run", el("h3", {}, dot(run.number), run.name),
    el("p", { class: "facts" }, facts.filter(Boolean).join(" · ")), box("tiles", ...tiles.slice(0, MOST_TILES)));
}

function tile(run, name, label, style) {
  const { x, y } = run.curves[name];
  const from = y.length > 1 ? `from ${style(y[0])}` : "measured once";
  return el("div", { class: "tile", title: name }, box("label", label), box("value", style(y.at(-1))),
    box("from", from), spark(x, y, `var(--r${run.number % 8})`));
}

function spark(x, y, stroke) {
  const node = tag => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const svg = node("svg"), path = node("path");
  const every = Math.ceil(y.length / 80), even = y.length > 80 ? smoothed(y, 0.5 ** (1 / every)) : y;
  [x, y] = [x, even].map(all => all.filter((_, place) => place % every === 0 || place === all.length - 1));
  const least = Math.min(...y), rise = Math.max(...y) - least, width = x.at(-1) - x[0] || 1;
  const height = rise > 1e-9 * Math.abs(least) ? rise : Infinity;
  const points = y.map((value, i) => [(100 * (x[i] - x[0])) / width, 24 - (22 * (value - least)) / height]);
  const drawn = {
    d: `M${points.map(point => point.map(at => at.toFixed(2))).join("L")}`,
    fill: "none", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round",
  };
  for (const [key, value] of Object.entries(drawn)) path.setAttribute(key, value);
  path.style.stroke = stroke;
  svg.setAttribute("viewBox", "0 0 100 26");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  if (y.length > 1) svg.append(path);
  return svg;
}

function diagnosis() {
  const cards = report.runs.flatMap(run => run.findings.map(found => finding(run, found)));
  if (!cards.length) cards.push(box("card calm", el("p", {}, "Nothing stands out."), note(CALM)));
  return section("Findings", ...cards);
}

function finding(run, { kind, step, what, why, remedy }) {
  const act = { class: "step", title: "Show the curves around it", onclick: () => around(run, step) };
  const title = el("h3", {}, el("button", act, `step ${whole(step)}`), titled(kind.replaceAll("_", " "), run));
  return box("card finding", title, el("p", {}, what), note(why), el("p", {}, el("b", {}, "Try: "), remedy));
}

function around(run, step) {
  const reach = Math.max(run.last / 10, 5);
  zoom({ min: at(run, Math.max(step - reach, 0)), max: at(run, Math.min(step + reach, run.last)) });
  id("curves").scrollIntoView();
}

function tools() {
  const smooth = () => { view.smoothing = Number(smoothing.value); redraw(); };
  const turn = () => { view.timed = axis.value === "time"; zoom(null); redraw(); };
  const range = { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, oninput: smooth };
  const smoothing = el("input", range), axis = el("select", { onchange: turn });
  axis.append(el("option", { value: "steps" }, "steps"), el("option", { value: "time" }, "time"));
  const kinds = [...new Set(report.runs.flatMap(run => run.marks.map(([, name]) => name)))];
  return box("tools", ...(several() ? report.runs.map(toggle) : []),
    el("label", {}, "Smoothing", smoothing), el("label", {}, "over", axis),
    el("button", { id: "whole", disabled: true, onclick: () => zoom(null) }, "Whole range"),
    ...kinds.map(name => el("span", { class: "legend" }, el("i", { style: `color: var(--${paintOf(name)})` }), name)));
}

// Shows and hides a run.
function toggle(run) {
  const act = () => {
    view.hidden.has(run) ? view.hidden.delete(run) : view.hidden.add(run);
    made.setAttribute("aria-pressed", String(!view.hidden.has(run)));
    redraw();
  };
  const made = el("button", { class: "toggle", "aria-pressed": "true", onclick: act }, dot(run.number), run.name);
  return made;
}

function curves() {
  const hint = "Drag over a curve to zoom into steps, double-click for the whole; arrow keys read a focused curve.";
  const parts = [tools(), el("p", { class: "hint" }, hint)];
  let left = names().filter(name => !UNSEEN.test(name));
  for (const [title, pattern] of GROUPS) {
    const own = left.filter(name => pattern.test(name)).sort((a, b) => rank(a) - rank(b));
    left = left.filter(name => !own.includes(name));
    if (!own.length) continue;
    const still = own.filter(constant).map(name => `${name} ${shown(valuesOf(name)[0])}`);
    const moving = own.filter(name => !constant(name)).map(metricChart);
    parts.push(el("h3", {}, title), box("charts", ...moving));
    if (still.length) parts.push(el("p", { class: "constants" }, `Constant: ${still.join(", ")}`));
  }
  const [most, there] = report.runs.map(run => run.thinned).reduce((a, b) => (a[1] > b[1] ? a : b));
  const left_out = `Left out: of each curve's ${whole(there)} points at most ${whole(most)} are here, the lowest and
    the highest of each stretch among them. metrics.jsonl has all.`;
  if (there > most) parts.push(note(left_out));
  return section("Curves", ...parts);
}

const valuesOf = name => report.runs.flatMap(run => run.curves[name]?.y ?? []);
const constant = name => new Set(valuesOf(name)).size === 1;

function rank(name) {
  const place = FIRST.findIndex(pattern => pattern.test(name));
  return place < 0 ? FIRST.length : place;
}

// Of rewards and lengths: as they were logged, or of what samples.jsonl holds.
function distributions(run) {
  const charts = [], training = run.rows.filter(row => row.kind === "training");
  const rewards = ["Rewards", "reward/p", row => row.reward];
  const lengths = ["Lengths, tokens", "completions/length_p", row => row.tokens];
  for (const [what, logged, of] of [rewards, lengths]) {
    const known = ["10", "50", "90"].map(share => run.curves[logged + share]), sampled = quantilesOf(training, of);
    if (known.every(Boolean)) charts.push(spread(titled(what, run), known, run));
    else if (sampled[1].x.length > 1) charts.push(spread(titled(`${what}, of the samples`, run), sampled, run));
  }
  return charts;
}

// The median, and the band from the tenth to the ninetieth percentile.
function spread(title, [p10, p50, p90], run) {
  const line = (values, label, more) => ({ run, ...values, label, plain: true, bare: true, ...more });
  const lines = [line(p90, "90 %", { width: 0.01, band: 2 }), line(p50, "median"), line(p10, "10 %", { width: 0.01 })];
  return chart(title, runs => (runs.includes(run) ? lines : []), { labels: true, log: false });
}

const MOST_STRETCHES = 80, LEAST_VALUES = 8;
function quantilesOf(rows, of) {
  const steps = new Set(rows.map(row => row.step)), last = Math.max(...steps, 1);
  const stretch = Math.ceil(Math.max(last / MOST_STRETCHES, (LEAST_VALUES * steps.size) / rows.length || 1));
  const found = new Map();
  for (const row of rows.filter(row => of(row) != null)) {
    const place = Math.min(Math.ceil(row.step / stretch) * stretch, last);
    found.has(place) ? found.get(place).push(of(row)) : found.set(place, [of(row)]);
  }
  const sorted = [...found.values()].map(values => values.sort((a, b) => a - b));
  return [0.1, 0.5, 0.9].map(share => ({ x: [...found.keys()], y: sorted.map(values => quantile(values, share)) }));
}

function time() {
  const runs = report.runs.filter(run => run.curves["time/step_s"]);
  if (!runs.length) return null;
  return section("Time split", ...runs.map(timeOf), box("charts large", ...runs.map(stacked)), ...runs.map(waste));
}

// Mean seconds of a step by what they went into.
function timeOf(run) {
  const steps = run.means["time/step_s"][1];
  const mean = name => { const [value, count] = run.means[name] ?? [0, 0]; return (value * count) / steps; };
  const parts = SPLIT.map(([label, name, paint]) => [label, mean(name), paint]);
  const known = parts.slice(0, 3).reduce((sum, [, value]) => sum + value, 0);
  const there = [...parts, ["other", mean("time/step_s") - known, "r7"]].filter(([, value]) => value > 0);
  const all = there.reduce((sum, [, value]) => sum + value, 0) || 1;
  const told = there.map(([label, value]) => `${label} ${percent(value / all)}`).join(", ");
  const style = (value, paint) => `flex: ${value / all}; background: var(--${paint})`;
  const bars = there.map(([, value, paint]) => el("span", { style: style(value, paint) }));
  const keys = there.map(([label, value, paint]) => {
    const key = el("span", { class: "dot", style: `background: var(--${paint})` });
    return el("span", {}, key, `${label} `, el("b", {}, percent(value / all)), ` ${duration(value)} a step`);
  });
  const split = el("div", { class: "split", role: "img", "aria-label": told }, ...bars);
  return el("div", {}, heading(run), split, box("keys", ...keys));
}

function stacked(run) {
  const lines = runs => {
    if (!runs.includes(run)) return [];
    const steps = run.curves["time/step_s"].x, sums = steps.map(() => 0), found = [];
    for (const [label, name, paint] of SPLIT.slice(0, 3).filter(([, name]) => run.curves[name])) {
      const own = steps.map(step => between(run.curves[name], step));
      own.forEach((value, i) => (sums[i] += value));
      const look = { color: paint, fill: color(paint) + "d0", width: 1, plain: true };
      found.unshift({ run, x: steps, y: [...sums], label, tell: i => own[i], ...look });
    }
    return found;
  };
  const range = (u, least, most) => [0, most * 1.05];
  return chart(titled("Seconds of a step", run), lines, { labels: true, log: false, range });
}

function waste(run) {
  const mean = name => run.means[name]?.[0];
  const sum = name => run.means[name] && Math.round(run.means[name][0] * run.means[name][1]);
  const facts = [
    ["groups kept by the filter", mean("dynamic_sampling/kept_fraction"), percent],
    ["sampled tokens learned from", mean("rollout/useful_fraction"), percent],
    ["slots used", mean("rollout/utilisation"), percent],
    ["prompts begun per prompt needed", mean("dynamic_sampling/rounds"), shown],
    ["groups expired", sum("dynamic_sampling/expired"), shown],
    ["groups missing", sum("dynamic_sampling/missing"), shown],
  ].filter(([, value]) => value != null);
  if (!facts.length) return null;
  const keys = facts.map(([label, value, style]) => el("span", {}, `${label} `, el("b", {}, style(value))));
  return el("div", {}, el("h3", {}, titled("Sampling", run)), box("keys", ...keys));
}
