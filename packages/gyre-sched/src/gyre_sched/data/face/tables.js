// Cells, steps and events as tables; curves over the steps.

function showCells(p) {
  const order = LEGEND.map(([role]) => role);
  const columns = [
    { title: "cell", cell: (r) => (r.cell === 0 ? "0, core" : String(r.cell)) },
    { title: "role", cell: (r) => r.role },
    { title: "for", number: true, cell: (r) => span(p.at - r.since) },
    { title: "engine", cell: (r) => r.engine },
    { title: "capacity", number: true, cell: (r) => number(r.capacity) },
    { title: "version", number: true, cell: (r) => number(r.version) },
    { title: "rollout", number: true, cell: (r) => percent(r.share.rollout) },
    { title: "training", number: true, cell: (r) => percent(r.share.training) },
    { title: "between", number: true, cell: (r) => percent(r.share.switching) },
    {
      title: "share of the time",
      cell: (r) =>
        element(
          "div",
          { class: "share", "aria-hidden": "true" },
          ...order
            .filter((role) => r.share[role])
            .map((role) =>
              element("i", { style: { width: `${r.share[role] * 100}%`, background: `var(--${role})` } }),
            ),
        ),
    },
  ];
  const rows = p.cells.map((cell) => {
    const spent = p.seconds[cell.cell] ?? {};
    const total = Object.values(spent).reduce((a, b) => a + b, 0) || 1;
    const share = {};
    for (const [role, seconds] of Object.entries(spent)) {
      share[shown(role)] = (share[shown(role)] ?? 0) + seconds / total;
    }
    return { ...cell, share, bad: shown(cell.role) === "failed" && !p.ended };
  });
  table(at("cells"), columns, rows);
}

const percent = (value) => (value === undefined ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`);

const STEP_COLUMNS = [
  ["step", "step"],
  ["mean_score", "score"],
  ["executions", "executions"],
  ["excluded", "excluded"],
  ["trajectories", "trajectories"],
  ["tokens_total", "tokens"],
  ["tokens_unique", "unique"],
  ["targets", "targets"],
  ["staleness", "staleness"],
  ["micro_steps", "micro-steps by cell"],
  ["loss", "loss"],
  ["grad_norm", "grad norm"],
  ["version", "version"],
  ["seconds", "seconds"],
];

function showSteps(p) {
  const total = p.steps_total ? ` of ${p.steps_total}` : "";
  const last = p.steps.length ? p.steps[p.steps.length - 1].step : 0;
  const older = p.steps_dropped ? `; the first ${p.steps_dropped} are not shown` : "";
  at("stepnote").textContent = `${last}${total} done${older}`;
  const columns = STEP_COLUMNS.map(([key, title]) => ({ title, number: true, cell: (row) => number(row[key]) }));
  table(at("steps"), columns, [...p.steps].reverse());
  const plots = [
    ["mean_score", "mean score", [0, 1]],
    ["staleness", "staleness (versions)", [0, 1]],
    ["seconds", "seconds a step", [0, 1]],
  ];
  at("plots").replaceChildren(
    ...plots.map(([key, title, range]) => curve(p.steps, key, title, range)).filter((made) => made !== null),
  );
}

function curve(steps, key, title, range) {
  const points = steps.filter((s) => typeof s[key] === "number").map((s) => [s.step, s[key]]);
  if (points.length < 2) return null;
  const values = points.map(([, v]) => v);
  const low = Math.min(range[0], ...values);
  const high = Math.max(range[1], ...values);
  const [first] = points[0];
  const [last] = points[points.length - 1];
  const x = (step) => ((step - first) / (last - first || 1)) * 100;
  const y = (value) => 100 - ((value - low) / (high - low || 1)) * 100;
  const line = points.map(([s, v], i) => `${i ? "L" : "M"}${x(s).toFixed(2)} ${y(v).toFixed(2)}`).join("");
  const svg = drawing("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(
    drawing("line", { class: "grid", x1: 0, x2: 100, y1: 100, y2: 100 }),
    drawing("line", { class: "grid", x1: 0, x2: 100, y1: 0, y2: 0 }),
    drawing("path", { class: "area", d: `${line}L100 100L0 100Z` }),
    drawing("path", { class: "stroke", d: line }),
  );
  const made = element("div", { class: "plot" });
  made.append(
    element("h3", {}, `${title}: ${number(values[values.length - 1])}`),
    svg,
    element(
      "div",
      {},
      element("span", {}, `step ${first}`),
      element("span", {}, `${number(low)} to ${number(high)}`),
      element("span", {}, `step ${last}`),
    ),
  );
  return made;
}

const which = { only: "all" };

function showNotes(p) {
  const failures = Object.entries(p.failures).map(([kind, n]) => `${kind.replaceAll("_", " ")} ${n}`);
  at("failures").textContent = failures.length ? failures.join(", ") : "no failures";
  const choices = [
    ["all", "All"],
    ["failures", "Failures"],
  ];
  at("which").replaceChildren(
    ...choices.map(([name, title]) => {
      const button = element("button", { role: "radio", "aria-checked": String(which.only === name) }, title);
      button.addEventListener("click", () => {
        which.only = name;
        showNotes(p);
      });
      return button;
    }),
  );
  const columns = [
    { title: "at", number: true, cell: (n) => elapsed(n.at - p.began) },
    { title: "cell", number: true, cell: (n) => (n.cell === null ? "" : String(n.cell)) },
    { title: "event", cell: (n) => n.kind.replaceAll("_", " ") },
    { title: "", wide: true, cell: (n) => n.text },
  ];
  const rows = p.notes.filter((n) => which.only === "all" || n.failure).map((n) => ({ ...n, bad: n.failure }));
  table(at("notes"), columns, rows.reverse());
}
