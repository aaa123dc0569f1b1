// The browser of completions: groups side by side, evaluations, and held-out problems before and after.

const PAGE = 10;
const SHADES = {
  advantages: ["advantage", "both"], sampler_logp: ["log-probability", "unlikely"], entropy: ["entropy", "much"], ratio: ["ratio", "ratio"],
  clipped: ["clipped", "mark"], old_values: ["critic's value", "both"], returns: ["return", "both"], step_rewards: ["step reward", "both"],
};
const SORTS = {
  "as sampled": null,
  "highest reward first": group => -group.score, "lowest reward first": group => group.score,
  "largest difference first": group => -spreadOf(group), "longest first": group => -Math.max(...group.rows.map(row => row.tokens ?? row.completion.length)),
};
const OUTCOMES = { all: () => true, "got better": pair => pair.after > pair.before, "got worse": pair => pair.after < pair.before, "stayed right": pair => pair.after === pair.before && pair.after >= 1, "stayed wrong": pair => pair.after === pair.before && pair.after < 1 };

const score = row => row.reward ?? (row.correct == null ? null : Number(row.correct));
const spreadOf = group => { const found = group.rows.map(score).filter(value => value != null); return Math.max(...found) - Math.min(...found); };

// Rows of one prompt in one step; each answer of an evaluation is for itself.
function grouped(rows) {
  const groups = new Map();
  rows.forEach((row, place) => {
    const key = row.kind === "training" ? `${row.step} ${row.group ?? ""} ${row.prompt}` : place;
    groups.has(key) ? groups.get(key).rows.push(row) : groups.set(key, { kind: row.kind, step: row.step, prompt: row.prompt, rows: [row] });
  });
  return [...groups.values()].map(group => {
    const found = group.rows.map(score).filter(value => value != null);
    return { ...group, score: found.reduce((a, b) => a + b, 0) / (found.length || 1) };
  });
}

// The first and the last evaluation's answers to the same prompt.
function pairsOf(run) {
  const tested = run.groups.filter(group => group.kind === "evaluation");
  if (!tested.length) return [];
  const first = tested[0].step, last = tested.at(-1).step;
  const before = new Map(tested.filter(group => group.step === first).map(group => [group.prompt, group.rows[0]]));
  if (first === last) return [];
  return tested.filter(group => group.step === last && before.has(group.prompt)).map(group => {
    const [old, now] = [before.get(group.prompt), group.rows[0]];
    return { kind: "pair", step: last, prompt: group.prompt, rows: [old, now], before: score(old), after: score(now), score: score(now) };
  });
}

function browser(runs) {
  const list = el("div", { "aria-live": "off" }), count = el("span", { class: "legend", role: "status" }), scale = el("span", { class: "legend" });
  const state = { run: runs[0], most: PAGE };
  const choose = (label, options, value) => { const node = el("select", { "aria-label": label, onchange: () => again() }); fillOptions(node, options, value); return node; };
  const fillOptions = (node, options, value) => { node.replaceChildren(...options.map(([key, text]) => el("option", { value: key, selected: key === value }, text))); };
  const run = choose("Run", runs.map(one => [one.number, one.name]));
  const kind = choose("Kind", []), step = choose("Step", []), outcome = choose("Outcome", Object.keys(OUTCOMES).map(key => [key, key]));
  const sort = choose("Order", Object.keys(SORTS).map(key => [key, key])), shade = choose("Shading", []);
  const find = el("input", { type: "search", placeholder: "Search texts", "aria-label": "Search prompts and completions", oninput: () => again() });
  const least = el("input", { type: "number", step: "any", "aria-label": "Least reward", oninput: () => again() }), most = el("input", { type: "number", step: "any", "aria-label": "Most reward", oninput: () => again() });
  const move = (text, title, way) => el("button", { title, "aria-label": title, onclick: () => turn(way) }, text);
  const turn = way => { const place = step.selectedIndex + way; if (place >= 0 && place < step.options.length) { step.selectedIndex = place; again(); } };
  const stepLabel = el("label", {}, "step", move("‹", "Earlier step (j)", -1), step, move("›", "Later step (k)", 1)), outcomeLabel = el("label", {}, "which", outcome);

  function again() {
    state.most = PAGE;
    if (Number(run.value) !== state.run.number || !kind.options.length) { state.run = report.runs[run.value] ?? runs[0]; kinds(); }
    if (state.kind !== kind.value) { state.kind = kind.value; steps(); }
    fill();
  }
  function kinds() {
    const there = new Set(state.run.groups.map(group => group.kind)), options = [];
    if (state.run.pairs.length) options.push(["pair", "before and after"]);
    if (there.has("training")) options.unshift(["training", "training groups"]);
    if (there.has("evaluation")) options.push(["evaluation", "evaluations"]);
    fillOptions(kind, options, options[0]?.[0]);
    const names = new Set(state.run.rows.flatMap(row => [...Object.keys(row.by_token ?? {}), ...(row.advantage == null ? [] : ["advantages"])]));
    const shades = [...names].filter(name => !["text", "mask", "counted"].includes(name)).map(name => [name, SHADES[name]?.[0] ?? name.replaceAll("_", " ")]);
    fillOptions(shade, [["", shades.length ? "nothing" : "nothing (no values of tokens were written)"], ...shades], "");
    state.kind = null;
  }
  function steps() {
    const found = [...new Set(state.run.groups.filter(group => group.kind === kind.value).map(group => group.step))];
    fillOptions(step, [["", "all"], ...found.map(value => [String(value), value.toLocaleString("en")])], String(found.at(-1) ?? ""));
    stepLabel.hidden = kind.value === "pair";
    outcomeLabel.hidden = kind.value !== "pair";
  }
  function found() {
    const words = find.value.toLowerCase(), low = least.value === "" ? -Infinity : Number(least.value), high = most.value === "" ? Infinity : Number(most.value);
    const fits = row => (score(row) == null ? low === -Infinity && high === Infinity : score(row) >= low && score(row) <= high);
    const has = group => !words || group.prompt.toLowerCase().includes(words) || group.rows.some(row => row.completion.toLowerCase().includes(words));
    const all = kind.value === "pair" ? state.run.pairs.filter(OUTCOMES[outcome.value]) : state.run.groups.filter(group => group.kind === kind.value && (step.value === "" || group.step === Number(step.value)));
    const kept = all.filter(group => has(group) && group.rows.some(fits)), key = SORTS[sort.value];
    return key ? [...kept].sort((a, b) => key(a) - key(b)) : kept;
  }
  function fill() {
    const groups = found(), word = { training: "group", evaluation: "answer", pair: "problem" }[kind.value] ?? "group";
    count.textContent = groups.length ? many(groups.length, word) : "nothing of that kind: widen the search";
    scale.replaceChildren(...legendOf(shade.value));
    const more = el("button", { onclick: () => { state.most += 3 * PAGE; fill(); } }, `Show more (${(groups.length - state.most).toLocaleString("en")} left)`);
    list.replaceChildren(...groups.slice(0, state.most).map(group => groupCard(group, shade.value)), ...(groups.length > state.most ? [more] : []));
  }
  document.addEventListener("keydown", event => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") turn(-1);
    if (event.key === "k") turn(1);
  });
  again();
  return [el("div", { class: "tools" }, runs.length > 1 ? el("label", {}, "run", run) : null, el("label", {}, "show", kind), stepLabel, outcomeLabel, el("label", {}, "order", sort), el("label", {}, "reward", least, "to", most), find),
    el("div", { class: "tools" }, el("label", {}, "shade tokens by", shade), scale, count), list];
}

function groupCard(group, shade) {
  const rewards = group.rows.map(score).filter(value => value != null), pair = group.kind === "pair";
  const facts = [pair ? null : `step ${group.step.toLocaleString("en")}`, group.rows.length > 1 && !pair ? many(group.rows.length, "completion") : null, rewards.length > 1 && !pair ? `mean reward ${shown(group.score)}` : null];
  const top = Math.max(...group.rows.flatMap(row => [row.advantage ?? 0, ...(row.by_token?.[shade] ?? [])]).map(value => Math.abs(value ?? 0)), 1e-9);
  return el("article", { class: `card group ${group.kind}` }, el("div", { class: "meta" }, ...facts.filter(Boolean).map(fact => el("span", {}, fact))), el("div", { class: "prompt" }, group.prompt),
    el("div", { class: "members" }, ...group.rows.map((row, place) => member(row, shade, top, pair ? ["before", "after"][place] : null))));
}

function member(row, shade, top, label) {
  const value = score(row), right = row.correct ?? (value === 1 ? true : value === 0 ? false : null);
  const told = row.correct == null ? (value == null ? "not scored" : `reward ${shown(value)}`) : row.correct ? "right" : "wrong";
  const parts = Object.entries(row.parts ?? {}), facts = [
    label ? `${label}, step ${row.step}` : null, row.advantage == null ? null : `advantage ${shown(row.advantage)}`, row.tokens == null ? null : many(row.tokens, "token"),
    row.finish_reason && row.finish_reason !== "stop" ? { length: "cut off", repetition: "ended: repetition" }[row.finish_reason] ?? row.finish_reason : null,
    ...(parts.length > 1 ? parts.map(([name, part]) => `${name} ${shown(part)}`) : []),
  ];
  return el("div", { class: "member" }, el("div", { class: "meta" }, el("span", { class: `score ${right === true ? "good" : right === false ? "bad" : ""}` }, told), ...facts.filter(Boolean).map(fact => el("span", {}, fact))), textOf(row, shade, top));
}

// Of one group all shades are of one scale, up to `top`.
function textOf(row, shade, top) {
  const texts = row.by_token?.text;
  if (!shade || (!texts && row.advantage == null)) return el("div", { class: "text" }, row.completion || "(nothing)");
  if (!texts) return el("div", { class: "text" }, el("span", { class: "token", style: background(shade, row.advantage, top) }, row.completion || "(nothing)"));
  const values = row.by_token[shade] ?? (shade === "advantages" ? texts.map(() => row.advantage) : []);
  const { mask, counted } = row.by_token;
  return el("div", { class: "text" }, ...texts.map((text, place) => {
    const sampled = mask ? mask[place] : true, kind = sampled ? (counted && !counted[place] ? "token aside" : "token") : "token other";
    return el("span", { class: kind, title: tokenTitle(row, place, sampled), style: sampled ? background(shade, values[place], top) : null }, text.replace(/\n/g, "⏎\n"));
  }));
}

function tokenTitle(row, place, sampled) {
  const told = Object.entries(row.by_token).filter(([name]) => !["text", "mask", "counted"].includes(name)).map(([name, values]) => `${SHADES[name]?.[0] ?? name} ${shown(values[place])}`);
  if (row.by_token.sampler_logp?.[place] != null) told.push(`probability ${percent(Math.exp(row.by_token.sampler_logp[place]))}`);
  return [`token ${place + 1}`, sampled ? null : "not sampled: tool or environment", row.by_token.counted && !row.by_token.counted[place] ? "left out of the loss" : null, ...told].filter(Boolean).join("\n");
}

// How a value of a token is shaded: blue above 0 and orange below, or the stronger the more it says.
function background(shade, value, top) {
  if (value == null) return null;
  const how = SHADES[shade]?.[1] ?? "both";
  const [paint, share] = { both: [value < 0 ? "minus" : "plus", Math.abs(value) / top], unlikely: ["heat", -value / 5], much: ["heat", value / 3], mark: ["heat", value], ratio: [value < 1 ? "minus" : "plus", Math.abs(Math.log(value || 1e-9)) / Math.log(1.5)] }[how];
  return `background: rgba(var(--${paint}), ${(0.62 * Math.min(Math.max(share, 0), 1)).toFixed(3)})`;
}

function legendOf(shade) {
  if (!shade) return [];
  const how = SHADES[shade]?.[1] ?? "both", strong = name => `rgba(var(--${name}), .62)`;
  const ends = { both: ["below 0", "above 0"], unlikely: ["likely", "e⁻⁵ or less"], much: ["0", "3 nats or more"], mark: ["kept", "clipped"], ratio: ["÷ 1.5", "× 1.5"] }[how];
  const from = how === "both" || how === "ratio" ? strong("minus") : "transparent", to = how === "both" || how === "ratio" ? strong("plus") : strong("heat");
  return [ends[0], el("span", { class: "scale", style: `background: linear-gradient(90deg, ${from}, transparent ${from === "transparent" ? "0%" : "50%"}, ${to})` }), ends[1]];
}

function completions() {
  const runs = report.runs.filter(run => run.rows.length);
  const notes = report.runs.filter(run => run.samples[0] < run.samples[1]).map(run => el("p", { class: "note" }, `Left out of ${run.name}: ${(run.samples[1] - run.samples[0]).toLocaleString("en")} of ${run.samples[1].toLocaleString("en")} completions; evenly spaced steps are here, the first and the last among them. samples.jsonl has all.`));
  return section("Completions", ...notes, ...(runs.length ? browser(runs) : [el("p", { class: "note" }, "This kind of run writes no completions.")]));
}
