// The browser of completions: groups side by side, evaluations, and held-out problems before and after.

const PAGE = 10;
// What tokens can be shaded by: how it is called, and how its values are graded.
const SHADES = {
  advantages: ["advantage", "signed"],
  sampler_logp: ["log-probability", "unlikely"],
  entropy: ["entropy", "nats"],
  ratio: ["ratio", "ratio"],
  clipped: ["clipped", "mark"],
  old_values: ["critic's value", "signed"],
  returns: ["return", "signed"],
  step_rewards: ["step reward", "signed"],
};
// How much of which colour a value is worth, and what the ends of the scale are called; `top` is the group's largest.
const GRADES = {
  signed: [(value, top) => [value < 0 ? "minus" : "plus", Math.abs(value) / top], "below 0", "above 0"],
  ratio: [value => [value < 1 ? "minus" : "plus", Math.abs(Math.log2(value || 1e-9))], "÷ 2", "× 2"],
  unlikely: [value => ["heat", -value / 5], "likely", "e⁻⁵ or less"],
  nats: [value => ["heat", value / 3], "0", "3 nats or more"],
  mark: [value => ["heat", value], "kept", "clipped"],
};
const NO_VALUES = ["text", "mask", "counted"];
const SORTS = {
  "latest step first": group => -group.step,
  "earliest step first": null,
  "highest reward first": group => -group.score,
  "lowest reward first": group => group.score,
  "largest difference first": group => Math.min(...group.scores) - Math.max(...group.scores),
  "longest first": group => -Math.max(...group.rows.map(row => row.tokens ?? row.completion.length)),
};
const OUTCOMES = {
  all: () => true,
  "got better": ([before, after]) => after > before,
  "got worse": ([before, after]) => after < before,
  "stayed right": ([before, after]) => after === before && after >= 1,
  "stayed wrong": ([before, after]) => after === before && after < 1,
};
const ENDS = { length: "cut off", repetition: "ended: repetition" };

const score = row => row.reward ?? (row.correct == null ? null : Number(row.correct));
const nameOf = shade => SHADES[shade]?.[0] ?? shade.replaceAll("_", " ");
const gradeOf = shade => GRADES[SHADES[shade]?.[1] ?? "signed"];
const metaOf = facts => facts.filter(fact => fact != null).map(fact => span(fact));

function groupOf(kind, step, prompt, rows) {
  const scores = rows.map(score).filter(value => value != null);
  const mean = scores.reduce((a, b) => a + b, 0) / (scores.length || 1);
  return { kind, step, prompt, task: rows[0].task, rows, scores, score: mean };
}

// Two tasks may ask the same.
const problemOf = row => `${row.task ?? ""}\n${row.prompt}`;

// Rows of one prompt in one step; each answer of an evaluation is for itself.
function grouped(rows) {
  const groups = new Map();
  rows.forEach((row, place) => {
    const key = row.kind === "training" ? `${row.step} ${row.group ?? ""} ${problemOf(row)}` : place;
    groups.has(key) ? groups.get(key).push(row) : groups.set(key, [row]);
  });
  return [...groups.values()].map(own => groupOf(own[0].kind, own[0].step, own[0].prompt, own));
}

// The first and the last evaluation's answers to the same prompt.
function pairsOf(run) {
  const tested = run.rows.filter(row => row.kind === "evaluation"), [first, last] = [tested[0], tested.at(-1)];
  if (!tested.length || first.step === last.step) return [];
  const before = new Map(tested.filter(row => row.step === first.step).map(row => [problemOf(row), row]));
  const after = tested.filter(row => row.step === last.step && before.has(problemOf(row)));
  return after.map(row => groupOf("pair", row.step, row.prompt, [before.get(problemOf(row)), row]));
}

function fillOptions(node, options, value) {
  node.replaceChildren(...options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
}

function completions() {
  const runs = report.runs.filter(run => run.rows.length);
  const notes = report.runs.filter(run => run.samples[0] < run.samples[1]).map(({ name, samples: [here, there] }) =>
    note(`Left out of ${name}: ${whole(there - here)} of ${whole(there)} completions; evenly spaced steps are here, the
      first and the last among them. samples.jsonl has all.`));
  if (!runs.length) return section("Completions", note("This kind of run writes no completions."));
  return section("Completions", ...notes, ...browser(runs));
}

function browser(runs) {
  const list = el("div"), count = el("span", { class: "legend", role: "status" }), scale = span("", "legend");
  const choose = (label, options) => {
    const node = el("select", { "aria-label": label, onchange: again });
    fillOptions(node, options);
    return node;
  };
  const input = (label, attributes) => el("input", { "aria-label": label, ...attributes, oninput: again });
  const same = keys => Object.keys(keys).map(key => [key, key]);
  const run = choose("Run", runs.map(one => [one.number, one.name]));
  const kind = choose("Kind", []), task = choose("Task", []), step = choose("Step", []), shade = choose("Shading", []);
  const outcome = choose("Outcome", same(OUTCOMES)), sort = choose("Order", same(SORTS));
  const find = input("Search prompts and completions", { type: "search", placeholder: "Search texts" });
  const least = input("Least reward", { type: "number", step: "any" });
  const most = input("Most reward", { type: "number", step: "any" });
  const move = (text, title, way) => el("button", { title, "aria-label": title, onclick: () => turn(way) }, text);
  const earlier = move("‹", "Earlier step (j)", -1), later = move("›", "Later step (k)", 1);
  const ofStep = el("label", {}, "step", earlier, step, later), ofPair = el("label", {}, "which", outcome);
  const ofTask = el("label", {}, "task", task);
  let shown_run = null, shown_kind = null, room = PAGE;

  function turn(way) {
    const place = step.selectedIndex + way;
    if (ofStep.hidden || place < 0 || place >= step.options.length) return;
    step.selectedIndex = place;
    again();
  }
  function again() {
    room = PAGE;
    if (shown_run !== report.runs[run.value]) kinds();
    if (shown_kind !== kind.value) steps();
    fill();
  }
  function kinds() {
    shown_run = report.runs[run.value];
    shown_kind = null;
    const there = new Set(shown_run.groups.map(group => group.kind)), options = [];
    if (there.has("training")) options.push(["training", "training groups"]);
    if (shown_run.pairs.length) options.push(["pair", "before and after"]);
    if (there.has("evaluation")) options.push(["evaluation", "evaluations"]);
    fillOptions(kind, options);
    const tasks = [...new Set(shown_run.groups.map(group => group.task))].filter(name => name != null);
    fillOptions(task, [["", "all"], ...tasks.map(name => [name, name])]);
    ofTask.hidden = tasks.length < 2;
    const known = new Set(shown_run.rows.flatMap(row => Object.keys(row.by_token ?? {})));
    if (shown_run.rows.some(row => row.advantage != null)) known.add("advantages");
    const shades = [...known].filter(name => !NO_VALUES.includes(name)).map(name => [name, nameOf(name)]);
    fillOptions(shade, [["", shades.length ? "nothing" : "nothing (no values of tokens were written)"], ...shades]);
  }
  function steps() {
    shown_kind = kind.value;
    const own = shown_run.groups.filter(group => group.kind === kind.value).map(group => group.step);
    const options = [...new Set(own)].map(value => [String(value), whole(value)]);
    fillOptions(step, [...options, ["", "all"]], "");
    ofStep.hidden = kind.value === "pair";
    ofPair.hidden = !ofStep.hidden;
  }
  function found() {
    const words = find.value.toLowerCase(), has = text => text.toLowerCase().includes(words);
    const low = least.value === "" ? -Infinity : Number(least.value);
    const high = most.value === "" ? Infinity : Number(most.value);
    const free = low === -Infinity && high === Infinity;
    const fits = group => free || group.scores.some(value => value >= low && value <= high);
    const said = group => has(group.prompt) || group.rows.some(row => has(row.completion));
    const belongs = group => task.value === "" || group.task === task.value;
    const now = group => group.kind === kind.value && (step.value === "" || group.step === Number(step.value));
    const all = ofStep.hidden
      ? shown_run.pairs.filter(pair => OUTCOMES[outcome.value](pair.scores))
      : shown_run.groups.filter(now);
    const kept = all.filter(group => belongs(group) && fits(group) && said(group)), key = SORTS[sort.value];
    return key ? kept.sort((a, b) => key(a) - key(b)) : kept;
  }
  function fill() {
    const groups = found(), left = groups.length - room;
    const word = { training: "group", evaluation: "answer", pair: "problem" }[kind.value];
    const here = left > 0 ? `${whole(room)} of ` : "";
    count.textContent = groups.length ? here + many(groups.length, word) : "nothing of that kind: widen the search";
    scale.replaceChildren(...legendOf(shade.value));
    list.replaceChildren(...groups.slice(0, room).map(group => groupCard(group, shade.value)));
    const widen = () => { room += 3 * PAGE; fill(); };
    if (left > 0) list.append(el("button", { onclick: widen }, `Show more (${whole(left)} left)`));
  }
  document.addEventListener("keydown", event => {
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") turn(-1);
    if (event.key === "k") turn(1);
  });
  again();
  const ofRun = runs.length > 1 ? el("label", {}, "run", run) : null;
  const ofReward = el("label", {}, "reward", least, "to", most);
  const first = box("tools", ofRun, el("label", {}, "show", kind), ofTask, ofStep, ofPair);
  first.append(el("label", {}, "order", sort), ofReward, find);
  return [first, box("tools", el("label", {}, "shade tokens by", shade), scale, count), list];
}

function groupCard(group, shade) {
  const { kind, rows, scores } = group, pair = kind === "pair";
  const facts = [group.task, pair ? null : `step ${whole(group.step)}`];
  if (rows.length > 1 && !pair) facts.push(many(rows.length, "completion"));
  if (scores.length > 1 && !pair) facts.push(`mean reward ${shown(group.score)}`);
  const values = rows.flatMap(row => [row.advantage, ...(row.by_token?.[shade] ?? [])]);
  const top = Math.max(...values.map(value => Math.abs(value ?? 0)), 1e-9);
  const label = place => (pair ? ["before", "after"][place] : null);
  const members = rows.map((row, place) => member(row, shade, top, label(place)));
  const parts = [box("meta", ...metaOf(facts)), box("prompt", group.prompt), box("members", ...members)];
  return el("article", { class: `card group ${kind}` }, ...parts);
}

function member(row, shade, top, label) {
  const value = score(row), parts = Object.entries(row.parts ?? {});
  const right = row.correct ?? { 0: false, 1: true }[value];
  const judged = row.correct == null ? `reward ${shown(value)}` : right ? "right" : "wrong";
  const facts = [label ? `${label}, step ${whole(row.step)}` : null];
  facts.push(row.advantage == null ? null : `advantage ${shown(row.advantage)}`);
  facts.push(row.tokens == null ? null : many(row.tokens, "token"));
  facts.push((row.finish_reason ?? "stop") === "stop" ? null : ENDS[row.finish_reason] ?? row.finish_reason);
  if (row.episode) facts.push(many(turnsOf(row).length, "turn"), `end: ${row.episode.end.replaceAll("_", " ")}`);
  if (parts.length > 1) facts.push(...parts.map(([name, part]) => `${name} ${shown(part)}`));
  const verdict = span(value == null ? "not scored" : judged, `score ${{ true: "good", false: "bad" }[right] ?? ""}`);
  return box("member", box("meta", verdict, ...metaOf(facts)), textOf(row, shade, top));
}

// The text, token by token where tokens are shaded; a completion without any has its advantage alone.
function textOf(row, shade, top) {
  const texts = row.by_token?.text, all = row.completion || "(nothing)";
  const look = value => ({ class: "token", style: background(shade, value, top) });
  const token = (text, value, more) => el("span", { ...look(value), ...more }, text);
  if (!shade && row.episode?.turns.length) return box("text", ...row.episode.turns.map(turnBox));
  if (!shade) return box("text", all);
  if (!texts) return box("text", shade === "advantages" ? token(all, row.advantage) : all);
  const { mask, counted } = row.by_token, values = row.by_token[shade];
  return box("text", ...texts.map((text, place) => {
    const value = values ? values[place] : shade === "advantages" ? row.advantage : null;
    const other = mask && !mask[place], aside = counted && !counted[place];
    const looks = other ? { class: "token other", style: null } : aside ? { class: "token aside" } : {};
    return token(text.replace(/\n/g, "⏎\n"), value, { title: tokenTitle(row, place, other, aside), ...looks });
  }));
}

const turnsOf = row => row.episode.turns.filter(turn => turn.role === "assistant");

// Who spoke, what was said and called, and of the model's turns what they were worth, and the calls that failed.
function turnBox(turn) {
  const facts = [turn.role];
  if (turn.reward) facts.push(`reward ${shown(turn.reward)}`);
  if (turn.errors) facts.push(many(turn.errors, "failed call"));
  return box(`turn ${turn.role}`, box("meta", ...metaOf(facts)), box("", turn.text || "(nothing)"));
}

function tokenTitle(row, place, other, aside) {
  const known = Object.entries(row.by_token).filter(([name]) => !NO_VALUES.includes(name));
  const told = known.map(([name, values]) => `${nameOf(name)} ${shown(values[place])}`);
  const logp = row.by_token.sampler_logp?.[place];
  if (logp != null) told.push(`probability ${percent(Math.exp(logp))}`);
  if (other) told.unshift("not sampled: tool or environment");
  else if (aside) told.unshift("left out of the loss");
  return [`token ${place + 1}`, ...told].join("\n");
}

const tint = (paint, share) => `rgba(var(--${paint}), ${(0.62 * Math.min(Math.max(share, 0), 1)).toFixed(3)})`;

function background(shade, value, top) {
  return value == null ? null : `background: ${tint(...gradeOf(shade)[0](value, top))}`;
}

function legendOf(shade) {
  if (!shade) return [];
  const [, low, high] = gradeOf(shade), signed = ["signed", "ratio"].includes(SHADES[shade]?.[1] ?? "signed");
  const colors = signed ? [tint("minus", 1), "transparent", tint("plus", 1)] : ["transparent", tint("heat", 1)];
  return [low, el("span", { class: "scale", style: `background: linear-gradient(90deg, ${colors.join(", ")})` }), high];
}
