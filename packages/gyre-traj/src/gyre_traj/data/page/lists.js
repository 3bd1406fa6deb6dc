// Trajectories and calls as tables: click selects, a heading sorts.

const ordinal = (n) => `${n}${["th", "st", "nd", "rd"][n % 100 > 10 && n % 100 < 14 ? 0 : n % 10] ?? "th"}`;

const lists = (() => {
  const MOST = 1000; // rows shown; find reaches the others
  const brief = (text) =>
    text
      .split(/( |(?=[:,]))/)
      .map((word) => (byId.has(word) ? calls[byId.get(word)].name : word))
      .join("");
  const role = (name) => el("span", "", key(roleColour(name), "dot"), ` ${clip(name, 40)}`);
  const rank = new Map(page.selected.map(([leaf, targets], i) => [leaf, [i + 1, targets]]));
  const kinds = {
    trajectories: {
      label: `Trajectories ${whole(report.leaves.length)}`,
      note: `drawn: by a selection with J_max ${page.j_max ?? "unlimited"}, seed ${page.seed}`,
      items: report.leaves,
      columns: [
        ["#", (leaf, i) => i + 1, String, "n"],
        ["leaf", (leaf) => calls[byId.get(leaf.call)].name, (v) => el("span", "mono", v), "ellipsis"],
        ["role", (leaf) => leaf.role, role, "ellipsis"],
        ["turns", (leaf) => leaf.turns, whole, "n"],
        ["tokens", (leaf) => leaf.tokens, whole, "n"],
        ["trainable", (leaf) => leaf.trainable, whole, "n"],
        ["versions", (leaf) => leaf.versions.join(", ") || "–", String],
        [
          "drawn",
          (leaf, i) => rank.get(i)?.[0] ?? 1e9,
          (v) => (v < 1e9 ? `${ordinal(v)}, ${plural(page.selected[v - 1][1], "target")}` : "–"),
        ],
        ["why it is there", (leaf) => (leaf.delivered ? "" : "undelivered; ") + brief(leaf.why), String, "wide"],
      ],
      on: (i) => state.leaf === i,
      go: (i) => select(-1, state.leaf === i ? -1 : i),
    },
    calls: {
      label: `Calls ${whole(calls.length)}`,
      note: "",
      items: calls,
      columns: [
        ["call", (call) => call.name, (v) => el("span", "mono", v), "ellipsis"],
        ["role", (call) => call.role, role, "ellipsis"],
        ["start", (call) => call.started, (v) => (page.began > 0 ? duration(v) : "–"), "n"],
        ["took", (call) => call.ended - call.started, (v) => (page.began > 0 && v >= 0 ? duration(v) : "–"), "n"],
        ["prompt", (call) => call.prompt, whole, "n"],
        ["sampled", (call) => call.output, whole, "n"],
        ["log-prob", (call) => call.curve?.mean ?? 1e9, (v) => (v < 1e9 ? nats(v) : "–"), "n"],
        ["version", (call) => [...new Set(call.versions.map(([v]) => v))].join(", ") || "–", String],
        ["engine", (call) => call.attempts.map(([e]) => page.engines[e]).join(" → "), (v) => clip(v, 60), "ellipsis"],
        ["finish", (call) => call.finish, (v) => clip(v, 20)],
        [
          "",
          (call) =>
            [
              call.delivered ? "" : "undelivered",
              call.untrainable ? "not trainable" : "",
              call.down.length > 1 ? "fork" : "",
              call.leaf >= 0 ? "leaf" : "",
            ]
              .filter(Boolean)
              .join(", "),
          String,
          "wide",
        ],
      ],
      on: (i) => state.call === i,
      go: (i) => select(state.call === i ? -1 : i),
    },
  };
  const tabs = [...Object.entries(kinds).map(([kind, { label }]) => [kind, label]), ["text", "Text"]];
  let sort = { column: -1, down: false },
    lines = [];

  function build() {
    for (const tab of $("tabs").children) tab.setAttribute("aria-selected", tab.dataset.kind === state.tab);
    lines = [];
    if (state.tab === "text") return transcript.build();
    const { items, columns, note } = kinds[state.tab];
    const order = items.map((_, i) => i);
    if (sort.column >= 0) {
      const of = columns[sort.column][1];
      order.sort((a, b) => {
        const [p, q] = [of(items[a], a), of(items[b], b)];
        return (p < q ? -1 : p > q ? 1 : a - b) * (sort.down ? -1 : 1);
      });
    }
    const head = el("tr");
    columns.forEach(([name, , , kind = ""], c) => {
      const label = button(name + (sort.column === c ? (sort.down ? " ↓" : " ↑") : ""), () => {
        sort = { column: c, down: sort.column === c && !sort.down };
        build();
      });
      const cell = el("th", kind, label);
      cell.setAttribute("aria-sort", sort.column === c ? (sort.down ? "descending" : "ascending") : "none");
      head.append(cell);
    });
    const body = el("tbody");
    lines = order.slice(0, MOST).map((i) => {
      const line = el("tr", "", ...columns.map(([, of, write, kind = ""]) => el("td", kind, write(of(items[i], i)))));
      line.tabIndex = 0;
      line.addEventListener("click", () => kinds[state.tab].go(i));
      line.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          kinds[state.tab].go(i);
        }
        const next =
          event.key === "ArrowDown" ? line.nextSibling : event.key === "ArrowUp" ? line.previousSibling : null;
        if (next) {
          event.preventDefault();
          next.focus();
        }
      });
      body.append(line);
      return [i, line];
    });
    const table = el("table", "", el("thead", "", head), body);
    $("list").replaceChildren(table);
    $("listnote").textContent = items.length > MOST ? `the first ${whole(MOST)}; find reaches all` : note;
    draw();
  }
  function draw() {
    if (state.tab === "text") transcript.draw();
    for (const [i, line] of lines) {
      const on = kinds[state.tab].on(i);
      if (on && !line.classList.contains("on")) line.scrollIntoView({ block: "nearest" });
      line.classList.toggle("on", on);
    }
  }
  for (const [kind, label] of tabs) {
    const tab = button(label, () => {
      state.tab = kind;
      sort = { column: -1, down: false };
      build();
      select(state.call, state.leaf);
    });
    tab.dataset.kind = kind;
    tab.setAttribute("role", "tab");
    $("tabs").append(tab);
  }
  return { build, draw };
})();
