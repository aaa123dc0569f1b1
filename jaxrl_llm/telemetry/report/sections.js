// What stands above and below the curves: runs at a glance, findings, groups of curves, time, settings.

const GROUPS = [
  ["Reward and evaluation", /^(eval\/.*(pass@|maj@|rerank|accuracy|reward|loss|perplexity|margin|win)|reward\/|reward_model\/|pairs\/|steps\/|constraint\/|refusal|win)/],
  ["Policy: entropy, KL, clipping", /^(entropy|kl|policy_kl|monitor|controller\/|ratio|clip_fraction\/|target_kl|kl_coef)/],
  ["Completions", /^(completions|eval\/.*(length|given_up))/],
  ["Learning", /^(loss|grad_norm|lr|updates|advantage\/|epoch|tokens$)/],
  ["Critic", /^critic\//],
  ["Sampler beside learner", /^(sampler\/|correction|sequence_filter)/],
  ["Sampling and its waste", /^(dynamic_sampling\/|rollout\/|prompts|throughput\/)/],
  ["Time", /^time\//],
  ["Other", /./],
];
const FIRST = [/^eval\/.*pass@1$/, /^eval\/.*pass@/, /^eval\//, /^reward\/mean$/, /^reward\/(accuracy|std|zero)/, /^reward/, /^entropy$/, /^kl/, /^clip/];
const UNSEEN = /^eval\/.*\/problems$|^reward\/p\d+$|_p\d+$/;
const HINTS = {
  "reward/mean": "Mean reward of the step's completions",
  "reward/zero_std_fraction": "Share of groups whose rewards are all equal: nothing is learned from them",
  "completions/truncated_fraction": "Share of completions cut off at the limit",
  "completions/repetition_fraction": "Share of completions ended since they only repeated themselves",
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
  "rollout/useful_fraction": "Tokens learned from, over those and the tokens of groups thrown away",
  "rollout/utilisation": "Tokens sampled, over the slots that decode steps computed",
};
const TILES = [
  [/^eval\/(.*)\/pass@1$/, "accuracy on $1", percent], [/^eval\/pairs\/accuracy$/, "held-out pairs", percent], [/^eval\/steps\/accuracy$/, "held-out steps", percent],
  [/^eval\/(.*)\/reward$/, "reward on $1", shown], [/^eval\/text\/loss$/, "held-out text loss", shown],
  [/^reward\/mean$/, "reward", shown], [/^pairs\/accuracy$/, "pairs", percent], [/^pairs\/margin$/, "margin", shown], 
  [/^completions\/mean_length$/, "length, tokens", shown], [/^entropy$/, "entropy, nats", shown], [/^kl$/, "KL, nats", shown],
  [/^loss$/, "loss", shown, /^reward\/mean$/], [/^grad_norm$/, "gradient norm", shown], [/^throughput\/sampled_tokens_per_s$/, "sampled tokens/s", shown],
];
const MOST_TILES = 8;
const SPLIT = [["rollout", "time/rollout_s", "r0"], ["reward", "time/reward_s", "r4"], ["update", "time/update_s", "r2"], ["evaluation", "time/evaluation_s", "r3"]];

const names = () => [...new Set(report.runs.flatMap(run => Object.keys(run.curves)))];
const section = (title, ...children) => el("section", { id: title.toLowerCase().replace(/\W+/g, "-") }, el("h2", {}, title), ...children);

function atAGlance() {
  return section("Overview", el("div", { class: "runs" }, ...report.runs.map(glance)));
}

function glance(run) {
  const settings = run.config, steps = settings.steps ? `${run.last.toLocaleString("en")} of ${settings.steps.toLocaleString("en")} steps` : many(run.last, "step");
  const source = settings["task.name"] ?? settings[Object.keys(settings).find(key => /source\.(name|path)$/.test(key))];
  const kind = (settings.type ?? "").split(":").pop();
  const facts = [kind === "Run" ? "" : kind, settings.model, source, settings["recipe.name"], steps, run.seconds ? duration(run.seconds) : ""];
  const tiles = [];
  for (const [pattern, label, style, unless] of TILES) {
    const known = Object.keys(run.curves), name = known.find(one => pattern.test(one));
    if (name && !known.some(one => unless?.test(one)) && tiles.length < MOST_TILES) tiles.push(tile(run, name, name.replace(pattern, label), style));
  }
  return el("div", { class: "card run" }, el("h3", {}, dot(run.number), run.name), el("p", { class: "facts" }, facts.filter(Boolean).join(" · ")), el("div", { class: "tiles" }, ...tiles));
}

function tile(run, name, label, style) {
  const { x, y } = run.curves[name];
  const from = y.length > 1 ? `from ${style(y[0])}` : "measured once";
  return el("div", { class: "tile", title: name }, el("div", { class: "label" }, label), el("div", { class: "value" }, style(y.at(-1))), el("div", { class: "from" }, from), spark(x, y, `var(--r${run.number % 8})`));
}

function spark(x, y, stroke) {
  const node = tag => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const svg = node("svg"), path = node("path");
  const every = Math.ceil(y.length / 80), even = y.length > 80 ? smoothed(y, 0.5 ** (1 / every)) : y;
  [x, y] = [x, even].map(all => all.filter((_, place) => place % every === 0 || place === all.length - 1));
  const least = Math.min(...y), most = Math.max(...y), span = most - least > 1e-9 * Math.abs(most) ? most - least : Infinity, width = x.at(-1) - x[0] || 1;
  const points = y.map((value, i) => `${((100 * (x[i] - x[0])) / width).toFixed(2)},${(24 - (22 * (value - least)) / span).toFixed(2)}`);
  svg.setAttribute("viewBox", "0 0 100 26");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  for (const [key, value] of Object.entries({ d: `M${points.join("L")}`, fill: "none", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" })) path.setAttribute(key, value);
  path.style.stroke = stroke;
  if (y.length > 1) svg.append(path);
  return svg;
}

function diagnosis() {
  const cards = report.runs.flatMap(run => run.findings.map(found =>
    el("div", { class: "card finding" },
      el("h3", {}, el("button", { class: "step", title: "Show the curves around it", onclick: () => around(run, found.step) }, `step ${found.step.toLocaleString("en")}`), found.kind.replaceAll("_", " "), report.runs.length > 1 ? ` · ${run.name}` : null),
      el("p", {}, found.what), el("p", { class: "note" }, found.why), el("p", {}, el("b", {}, "Try: "), found.remedy))));
  return section("Findings", ...(cards.length ? cards : [el("div", { class: "card calm" }, el("p", {}, "Nothing stands out."), el("p", { class: "note" }, "Looked for: collapse or explosion of entropy and lengths, truncation, repetition, rewards that rise while evaluations fall, groups without difference, runaway KL, clipping, disagreement of sampler and learner, spikes of the gradient, a stall."))]));
}

function around(run, step) {
  const reach = Math.max(run.last / 10, 5);
  zoom({ min: at(run, Math.max(step - reach, 0)), max: at(run, Math.min(step + reach, run.last)) });
  id("curves").scrollIntoView();
}

function tools() {
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, oninput: () => { view.smoothing = Number(smoothing.value); redraw(); } });
  const axis = el("select", { onchange: () => { view.timed = axis.value === "time"; zoom(null); redraw(); } }, el("option", { value: "steps" }, "steps"), el("option", { value: "time" }, "time"));
  const runs = report.runs.length < 2 ? [] : report.runs.map(run => {
    const toggle = el("button", { class: "toggle", "aria-pressed": "true", onclick: () => {
      view.hidden.has(run) ? view.hidden.delete(run) : view.hidden.add(run);
      toggle.setAttribute("aria-pressed", String(!view.hidden.has(run)));
      redraw();
    } }, dot(run.number), run.name);
    return toggle;
  });
  const kinds = [...new Set(report.runs.flatMap(run => run.marks.map(([, name]) => name)))];
  return el("div", { class: "tools" }, ...runs, el("label", {}, "Smoothing", smoothing), el("label", {}, "over", axis),
    el("button", { id: "whole", disabled: true, onclick: () => zoom(null) }, "Whole range"),
    ...kinds.map(name => el("span", { class: "legend" }, el("i", { style: `border-color: ${`var(--${MARKS.find(([pattern]) => pattern.test(name))[1]})`}` }), name)));
}

function curves() {
  const left = new Set(names().filter(name => !UNSEEN.test(name)));
  const parts = [tools(), el("p", { class: "hint" }, "Drag over a curve to zoom into steps, double-click for the whole; arrow keys read a focused curve.")];
  for (const [title, pattern] of GROUPS) {
    const own = [...left].filter(name => pattern.test(name));
    own.forEach(name => left.delete(name));
    const [still, moving] = [own.filter(constant), own.filter(name => !constant(name))];
    if (!own.length) continue;
    moving.sort((a, b) => rank(a) - rank(b));
    parts.push(el("h3", {}, title), el("div", { class: "charts" }, ...moving.map(metricChart)));
    if (still.length) parts.push(el("p", { class: "constants" }, `Constant: ${still.map(name => `${name} ${shown(report.runs.find(run => run.curves[name]).curves[name].y[0])}`).join(", ")}`));
  }
  const [most, there] = report.runs.map(run => run.thinned).reduce((a, b) => (a[1] > b[1] ? a : b));
  if (there > most) parts.push(el("p", { class: "note" }, `Left out: of each curve's ${there.toLocaleString("en")} points at most ${most.toLocaleString("en")} are here, the lowest and the highest of each stretch among them. metrics.jsonl has all.`));
  return section("Curves", ...parts);
}

const rank = name => { const place = FIRST.findIndex(pattern => pattern.test(name)); return place < 0 ? FIRST.length : place; };
const constant = name => { const all = report.runs.flatMap(run => run.curves[name]?.y ?? []); return all.every(value => value === all[0]); };

// Bands from the tenth to the ninetieth percentile, the median between them: of quantiles as they were logged, or of what samples.jsonl holds.
function spread(title, quantiles, run) {
  const [p10, p50, p90] = quantiles;
  const part = (values, more) => ({ run, x: values.x, y: values.y, plain: true, bare: true, ...more });
  return chart(title, runs => (runs.includes(run) ? [part(p90, { width: 0.01, band: 2, label: "90 %" }), part(p50, { label: "median" }), part(p10, { width: 0.01, label: "10 %" })] : []), { labels: true, log: false });
}

function distributions(run) {
  const charts = [];
  const title = (what, from) => `${what}${from}${report.runs.length > 1 ? ` · ${run.name}` : ""}`;
  for (const [what, logged, of] of [["Rewards", "reward/p", row => row.reward], ["Lengths, tokens", "completions/length_p", row => row.tokens]]) {
    const known = ["10", "50", "90"].map(share => run.curves[logged + share]);
    if (known.every(Boolean)) { charts.push(spread(title(what, ""), known, run)); continue; }
    const sampled = quantilesOf(run.rows.filter(row => row.kind === "training"), of);
    if (sampled[1].x.length > 1) charts.push(spread(title(what, ", of the samples"), sampled, run));
  }
  return charts;
}

const MOST_STRETCHES = 80;
function quantilesOf(rows, of) {
  const width = Math.max(1, Math.ceil(Math.max(...rows.map(row => row.step), 1) / MOST_STRETCHES)), found = new Map();
  for (const row of rows) {
    if (of(row) == null) continue;
    const place = Math.ceil(row.step / width) * width;
    found.has(place) ? found.get(place).push(of(row)) : found.set(place, [of(row)]);
  }
  for (const values of found.values()) values.sort((a, b) => a - b);
  return [0.1, 0.5, 0.9].map(share => ({ x: [...found.keys()], y: [...found.values()].map(values => quantile(values, share)) }));
}

function time() {
  const runs = report.runs.filter(run => run.curves["time/step_s"]);
  if (!runs.length) return null;
  return section("Time split", ...runs.map(timeOf), el("div", { class: "charts large" }, ...runs.map(stacked)), ...runs.map(waste));
}

// Mean seconds of a step by what they went into.
function timeOf(run) {
  const mean = name => { const [value, count] = run.means[name] ?? [0, 0]; return (value * count) / run.means["time/step_s"][1]; };
  const parts = SPLIT.map(([label, name, paint]) => [label, mean(name), paint]);
  parts.push(["other", Math.max(mean("time/step_s") - parts.slice(0, 3).reduce((sum, [, value]) => sum + value, 0), 0), "r7"]);
  parts.splice(0, parts.length, ...parts.filter(([, value]) => value > 0));
  const all = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  return el("div", {}, report.runs.length > 1 ? el("h3", {}, dot(run.number), run.name) : null,
    el("div", { class: "split", role: "img", "aria-label": parts.map(([label, value]) => `${label} ${percent(value / all)}`).join(", ") }, ...parts.map(([, value, paint]) => el("span", { style: `flex: ${value / all}; background: var(--${paint})` }))),
    el("div", { class: "keys" }, ...parts.map(([label, value, paint]) => el("span", {}, el("span", { class: "dot", style: `background: var(--${paint})` }), `${label} `, el("b", {}, percent(value / all)), ` ${duration(value)} a step`))));
}

function stacked(run) {
  return chart(`Seconds of a step${report.runs.length > 1 ? ` · ${run.name}` : ""}`, runs => {
    if (!runs.includes(run)) return [];
    const steps = run.curves["time/step_s"].x, sums = steps.map(() => 0), lines = [];
    for (const [label, name, paint] of SPLIT.slice(0, 3)) {
      const part = run.curves[name];
      if (!part) continue;
      steps.forEach((step, i) => (sums[i] += between(part, step)));
      lines.unshift({ run, x: steps, y: [...sums], color: paint, label, plain: true, fill: color(paint) + "d0", width: 1, tell: (x, i) => between(part, steps[Math.min(i, steps.length - 1)]) });
    }
    return lines;
  }, { labels: true, log: false, range: (u, least, most) => [0, most * 1.05] });
}

function waste(run) {
  const mean = name => run.means[name]?.[0], sum = name => run.means[name] && Math.round(run.means[name][0] * run.means[name][1]);
  const facts = [["groups kept by the filter", mean("dynamic_sampling/kept_fraction"), percent], ["sampled tokens learned from", mean("rollout/useful_fraction"), percent], ["slots used", mean("rollout/utilisation"), percent], ["prompts begun per prompt needed", mean("dynamic_sampling/rounds"), shown], ["groups expired", sum("dynamic_sampling/expired"), shown], ["groups missing", sum("dynamic_sampling/missing"), shown]].filter(([, value]) => value != null);
  return facts.length ? el("div", {}, el("h3", {}, `Sampling${report.runs.length > 1 ? ` · ${run.name}` : ""}`), el("div", { class: "keys" }, ...facts.map(([label, value, style]) => el("span", {}, `${label} `, el("b", {}, style(value)))))) : null;
}

function settingsTable() {
  const runs = report.runs.filter(run => Object.keys(run.config).length);
  if (!runs.length) return null;
  const keys = [...new Set(runs.flatMap(run => Object.keys(run.config)))], text = value => (value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));
  const differs = key => new Set(runs.map(run => text(run.config[key]))).size > 1;
  const own = key => !/^origin\.|(^|\.)type$/.test(key);
  const find = el("input", { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", oninput: fill });
  const all = el("input", { type: "checkbox", checked: runs.length < 2, onchange: fill });
  const body = el("tbody"), count = el("span", { class: "legend" });
  function fill() {
    const found = keys.filter(key => (all.checked ? own(key) : differs(key) && own(key)) && (key + runs.map(run => text(run.config[key])).join(" ")).toLowerCase().includes(find.value.toLowerCase()));
    body.replaceChildren(...found.map(key => el("tr", { class: runs.length > 1 && all.checked && differs(key) ? "differs" : null }, el("td", {}, key), ...runs.map(run => el("td", {}, text(run.config[key]))))));
    count.textContent = many(found.length, "setting");
  }
  fill();
  return section("Settings", el("div", { class: "tools" }, find, runs.length > 1 ? el("label", {}, all, "also those that are equal") : null, count),
    el("div", { class: "card table", tabindex: 0, "aria-label": "Settings" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "setting"), ...runs.map(run => el("th", {}, dot(run.number), run.name)))), body)));
}
