// Elements, formats and colours. What the run says is written as text, never as markup.

const at = (id) => document.getElementById(id);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "style") for (const [key, v] of Object.entries(value)) made.style.setProperty(key, v);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

const drawing = (tag, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// draining, entering, leaving and refreshing belong neither to sampling nor to training
const SHOWN = { rollout: "rollout", training: "training", failed: "failed", fenced: "failed", starting: "starting" };
const shown = (role) => SHOWN[role] ?? "switching";
const LEGEND = [
  ["rollout", "rollout"],
  ["training", "training"],
  ["switching", "between (draining, entering, leaving, refreshing)"],
  ["failed", "failed"],
  ["starting", "starting"],
];

function span(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(s % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function elapsed(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(s / 3600);
  const rest = `${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "object") return Object.entries(value).map(([k, v]) => `${k}:${v}`).join(" ");
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : value.toPrecision(4);
}

function table(into, columns, rows) {
  const head = element("tr", {}, ...columns.map((c) => element("th", { class: c.number ? "n" : null, scope: "col" }, c.title)));
  const body = rows.map((row) =>
    element(
      "tr",
      { class: row.bad ? "bad" : null },
      ...columns.map((c) => element("td", { class: c.number ? "n" : c.wide ? "wide" : null }, c.cell(row))),
    ),
  );
  into.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

const tip = {
  show(event, text) {
    const box = at("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
    box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 8))}px`;
  },
  hide() {
    at("tip").hidden = true;
  },
};
