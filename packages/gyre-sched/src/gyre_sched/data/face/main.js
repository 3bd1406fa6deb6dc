// The picture inlined in the page, then every newer one the scheduler sends.

const timeline = new Timeline(at("time"));
let latest = JSON.parse(at("data").textContent);
const live = latest.live;

function figures(p) {
  const score = p.steps.length ? p.steps[p.steps.length - 1].mean_score : null;
  const failed = p.proxy.calls_failed ?? 0;
  const failures = Object.values(p.failures).reduce((a, b) => a + b, 0);
  const step = p.steps.length ? p.steps[p.steps.length - 1].step : 0;
  const shownFigures = [
    ["step", p.steps_total ? `${step} / ${p.steps_total}` : String(step)],
    ["burst", p.burst === null ? "–" : String(p.burst)],
    ["version", String(p.version)],
    ["water / capacity", `${p.water} / ${p.capacity}`],
    ["queued", String(p.dispatched - p.started)],
    ["running", String(p.started - p.terminated)],
    ["at the feed", number(p.backlog.waiting ?? 0)],
    ["micro-steps left", number(p.backlog.micro_steps_left ?? 0)],
    ["score of the last step", number(score)],
    ["calls", number(p.proxy.calls ?? 0)],
    ["calls moved", number(p.proxy.calls_moved ?? p.moved)],
    ["calls failed", number(failed), failed > 0],
    ["failures", number(failures), failures > 0],
  ];
  at("figures").replaceChildren(
    ...shownFigures.map(([title, value, bad]) =>
      element("div", { class: bad ? "bad" : null }, element("dt", {}, title), element("dd", {}, value)),
    ),
  );
}

function state(text, kind) {
  at("state").textContent = text;
  at("state").className = `chip ${kind}`;
}

function show(p) {
  latest = p;
  at("name").textContent = p.name;
  document.title = `${p.name}: gyre`;
  if (p.began !== null) {
    const day = new Date(p.began * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const last = new Date(p.at * 1000).toLocaleTimeString();
    at("clock").textContent = `began ${day}; ${span(p.at - p.began)} until the last event at ${last}`;
  }
  if (p.ended) state("ended", "");
  else state(live ? "running" : "as last written", live ? "good" : "warn");
  const alarm = [p.halted ? `Nothing more is dispatched: ${p.halted}` : "", p.damage ? `The journal is damaged ${p.damage}` : ""];
  at("alarm").textContent = alarm.filter(Boolean).join(". ");
  at("alarm").hidden = !alarm.some(Boolean);
  figures(p);
  timeline.show(p);
  const hidden = p.cells.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${p.cells.length} cells are drawn. ` : "";
  const thinned = p.cells.reduce((n, cell) => n + cell.dropped, 0);
  at("timenote").textContent = hidden + (thinned ? `${thinned} older role changes are not drawn.` : "");
  showCells(p);
  showSteps(p);
  showNotes(p);
}

at("legend").append(
  ...[
    ["water", "water level w", "thin"],
    ["capacity", "capacity C_R", "thin"],
    ["muted", "queued", "thin"],
    ...LEGEND,
  ].map(([name, title, kind]) =>
    element("span", {}, element("i", { class: `key ${kind ?? ""}`, style: { "--key": `var(--${name})` } }), title),
  ),
);
show(latest);

if (live) {
  const stream = new EventSource(`events${location.search}`);
  stream.addEventListener("message", (event) => show(JSON.parse(event.data)));
  stream.addEventListener("error", () => {
    if (!latest.ended) state("no connection to the scheduler, trying again", "warn");
  });
}
