"use strict";
// Values and elements: what all sections use. Texts of runs reach the page through textContent alone.

const id = name => document.getElementById(name);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child != null));
  return node;
}

const box = (name, ...children) => el("div", { class: name }, ...children);
const span = (text, name) => el("span", { class: name }, text);
const note = text => el("p", { class: "note" }, text);

// The text of an element that holds gzip in base64.
async function unpack(name) {
  const packed = id(name).textContent;
  let bytes;
  if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(packed);
  else {
    const raw = atob(packed);
    bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// Steps and values from differences of steps and values.
function curve([gaps, values]) {
  let step = 0;
  return { x: gaps.map(gap => (step += gap)), y: values };
}

function shown(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0 || (Number.isInteger(value) && size < 1e5)) return String(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e");
  return size >= 1e3 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3)).toString();
}

// The places of an axis whose marks are `gap` apart, each with the digits that tell it from the next.
function places(splits, gap) {
  const digits = (String(Number(gap.toPrecision(3))).split(".")[1] ?? "").length;
  const written = gap < 1e-4 ? value => (value ? value.toExponential(1) : "0")
    : value => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return splits.map(value => (value == null ? "" : written(value)));
}

const percent = value => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);

function duration(seconds) {
  if (seconds < 100) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const whole = value => value.toLocaleString("en");
const many = (count, one) => `${whole(count)} ${one}${count === 1 ? "" : "s"}`;
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const dot = number => el("span", { class: "dot", style: `background: var(--r${number % 8})` });

// Moving average whose weight on the past is `weight`, without the pull of where it began.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map(value => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// The value of a rising curve between its points.
function between({ x, y }, at) {
  let low = 0, high = x.length - 1;
  if (high < 0 || at <= x[0]) return y[0] ?? 0;
  if (at >= x[high]) return y[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= at) low = middle; else high = middle;
  }
  return y[low] + ((y[high] - y[low]) * (at - x[low])) / (x[high] - x[low]);
}

function quantile(sorted, share) {
  const place = share * (sorted.length - 1), low = Math.floor(place);
  return sorted[low] + (place - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}
