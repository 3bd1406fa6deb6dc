// Data, helpers and the page's one state. What comes from the log is written as text only: `el` knows no markup, and
// shows what would hide.

window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
  const note = document.getElementById("failure");
  note.hidden = false;
  note.textContent = `This page failed: ${event.message}`;
});

const page = JSON.parse(document.getElementById("data").textContent);
const { calls, bars, report } = page;
const $ = (id) => document.getElementById(id);

// What would be invisible, or reorder what is around it, by name.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;
const visible = (text) =>
  text.replace(HIDDEN, (c) =>
    c < " "
      ? String.fromCharCode(0x2400 + c.charCodeAt(0))
      : `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );

function el(tag, name, ...kids) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(
    ...kids
      .filter((kid) => kid !== null && kid !== undefined && kid !== "")
      .map((kid) => (typeof kid === "string" ? visible(kid) : kid)),
  );
  return node;
}

function button(label, act, name = "") {
  const node = el("button", name, label);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

const whole = (n) => n.toLocaleString("en-US");
const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;
const short = (n) =>
  n < 10000 ? whole(n) : n < 1e6 ? `${+(n / 1e3).toFixed(n < 1e5 ? 1 : 0)}k` : `${+(n / 1e6).toFixed(2)}M`;
const nats = (hundredths) =>
  hundredths === null || hundredths === undefined ? "not finite" : (hundredths / 100).toFixed(2).replace("-", "−");
const chance = (hundredths) => {
  const p = 100 * Math.exp(hundredths / 100);
  return p >= 10
    ? `${p.toFixed(0)} %`
    : p >= 0.1
      ? `${p.toFixed(1)} %`
      : p >= 0.001
        ? `${p.toFixed(3)} %`
        : "< 0.001 %";
};
function duration(s) {
  if (s < 0.9995) return `${(s * 1000).toFixed(0)} ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

// A moment on an axis.
function clock(s) {
  if (s < 60) return duration(s).replace(".0 s", " s");
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  return s < 3600
    ? `${Math.floor(s / 60)}:${two(s % 60)}`
    : `${Math.floor(s / 3600)}:${two((s % 3600) / 60)}:${two(s % 60)}`;
}

const clip = (text, n) => (text.length > n ? `${text.slice(0, n - 1)}…` : text);

// Colours: of the theme in use, by place in a fixed palette.
let theme = {};
const paint = (name) =>
  (theme[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
const KNOWN = { main: 0, "sub-agent": 1, "main-summary": 2, "sub-agent-summary": 3 };
const others = page.roles.filter((role) => !Object.hasOwn(KNOWN, role));
const roleColour = (role) => `c${Object.hasOwn(KNOWN, role) ? KNOWN[role] : 4 + (others.indexOf(role) % 4)}`;
const versionColour = (version) => `c${[0, 2, 1, 3, 4, 5, 6, 7][Math.max(0, report.versions.indexOf(version)) % 8]}`;
const engineColour = (engine) => `c${[6, 7, 3, 5, 4, 2, 1, 0][engine % 8]}`;
const likelihood = (hundredths) =>
  hundredths > -22
    ? 0
    : hundredths > -69
      ? 1
      : hundredths > -161
        ? 2
        : hundredths > -300
          ? 3
          : hundredths > -460
            ? 4
            : 5;

function key(colour, name = "") {
  const node = el("span", `key ${name}`);
  if (colour) node.style.setProperty("--key", `var(--${colour})`);
  return node;
}

// Relations that the tree implies.
bars.forEach((bar, i) => {
  const [parent, row, start, size, call, sampled, offset, first, last] = bar;
  bars[i] = {
    i,
    parent,
    row,
    start,
    size,
    end: start + size,
    call,
    sampled,
    offset,
    first,
    last,
    steps: parent < 0 ? 0 : bars[parent].steps + 1,
    below: [],
  };
  if (parent >= 0) bars[parent].below.push(i);
});
const rows = 1 + bars.reduce((most, bar) => Math.max(most, bar.row), -1);
const depth = bars.reduce((most, bar) => Math.max(most, bar.end), 1);
const steps = 1 + bars.reduce((most, bar) => Math.max(most, bar.steps), 0);
const byId = new Map(calls.map((call, i) => [call.call, i]));
calls.forEach((call, i) => {
  for (const name of ["parent", "bar"]) call[name] ??= -1;
  for (const name of ["prefix", "prompt", "output", "started", "ended", "sampling", "request"]) call[name] ??= 0;
  for (const name of ["untrainable", "origin", "dialect", "finish", "stop", "tools", "template"]) call[name] ??= "";
  for (const name of ["attempts", "versions", "inserted"]) call[name] ??= [];
  for (const part of [call.before, call.after])
    for (const name of ["tail", "head_logprobs", "tail_logprobs"]) part[name] ??= [];
  Object.assign(call, {
    i,
    delivered: call.delivered ?? false,
    bars: [],
    up: -1,
    down: [],
    leaf: -1,
    curve: call.curve ?? null,
  });
});
for (const bar of bars) if (bar.sampled) calls[bar.call].bars.push(bar.i);
report.leaves.forEach((leaf, i) => {
  calls[byId.get(leaf.call)].leaf = i;
});
for (const call of calls) {
  let at = call.bars.length ? bars[call.bars[0]].parent : call.bar;
  while (at >= 0 && !bars[at].sampled) at = bars[at].parent;
  call.up = at < 0 ? -1 : bars[at].call;
  if (call.up >= 0) calls[call.up].down.push(call.i);
}

// Bars from a root to `bar`.
function path(bar) {
  const found = [];
  for (let at = bar; at >= 0; at = bars[at].parent) found.push(at);
  return found.reverse();
}

// The one state: what is selected (a call or a leaf), what is found, how the tree is drawn. Whoever changes it tells.
const DEFAULTS = { colour: "role", scale: "tokens", tab: "trajectories" };
const CHOICES = {
  colour: ["role", "version", "engine", "likelihood"],
  scale: ["tokens", "steps"],
  tab: ["trajectories", "calls", "text"],
};
const state = { call: -1, leaf: -1, found: [], hover: -1, ...DEFAULTS };
const watchers = [];
function tell() {
  for (const watch of watchers) watch();
}

function select(call, leaf = -1) {
  state.call = call;
  state.leaf = leaf;
  hideTip();
  const told = new URLSearchParams();
  if (call >= 0) told.set("call", calls[call].call);
  else if (leaf >= 0) told.set("leaf", report.leaves[leaf].call);
  for (const [name, usual] of Object.entries(DEFAULTS)) if (state[name] !== usual) told.set(name, state[name]);
  try {
    history.replaceState(null, "", `#${told}`);
  } catch {
    /* a sandboxed page has no history; links into it still work */
  }
  $("says").textContent =
    call >= 0
      ? visible(`Call ${calls[call].name}, ${calls[call].role}`)
      : leaf >= 0
        ? `Trajectory ${leaf + 1}`
        : "Nothing selected";
  tell();
}

function readHash() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const [name, options] of Object.entries(CHOICES))
    state[name] = options.includes(wanted.get(name)) ? wanted.get(name) : DEFAULTS[name];
  state.call = byId.get(wanted.get("call")) ?? -1;
  state.leaf = calls[byId.get(wanted.get("leaf"))]?.leaf ?? -1;
}

// A drawing surface as large as its box, in CSS pixels.
function surface(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function niceStep(span, room) {
  const rough = span / Math.max(1, room);
  const power = 10 ** Math.floor(Math.log10(rough));
  return Math.max(power * [1, 2, 5, 10].find((m) => m * power >= rough), 0);
}

function showTip(event, ...kids) {
  const tip = $("tip");
  tip.replaceChildren(...kids);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 10) : event.clientY + 18}px`;
}
const hideTip = () => {
  $("tip").hidden = true;
};

const pieceOf = (token) => page.tokens[token][1] ?? `${page.tokens[token][0]} `;
const peek = (passage, n = 160) => visible(clip(passage.head.slice(0, 120).map(pieceOf).join(""), n));
