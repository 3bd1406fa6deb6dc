// Header, toolbar, find, keys; then the first drawing.

(() => {
  const sum = (dict) => Object.keys(dict).length;
  const figures = el("dl", "figures");
  const figure = (value, name, title = "", kind = "") => {
    const node = el("div", kind, el("dt", "", name), el("dd", "", value));
    node.title = title;
    figures.append(node);
  };
  figure(whole(report.calls), report.calls === 1 ? "call" : "calls");
  figure(whole(report.leaves.length), report.leaves.length === 1 ? "trajectory" : "trajectories");
  figure(short(report.tokens_unique), "tokens", `${whole(report.tokens_unique)} tokens on at least one trajectory`);
  figure(short(report.trainable), "trainable", `${whole(report.trainable)} sampled tokens that may be loss targets`);
  const saved = (of) => (of > 0 ? `${Math.floor((100 * (of - report.tokens_unique)) / of)} %` : "–");
  figure(
    saved(report.tokens_total),
    "saved by sharing",
    `trajectories one by one would hold ${whole(report.tokens_total)} tokens, the tree holds ${whole(report.tokens_unique)}`,
  );
  figure(
    saved(page.apart),
    "saved against calls",
    `calls one by one, each with its whole prompt, would hold ${whole(page.apart)} tokens, the tree holds ${whole(report.tokens_unique)}`,
  );
  figure(
    report.versions.length > 3 ? `${report.versions[0]}–${report.versions.at(-1)}` : report.versions.join(", ") || "–",
    report.versions.length === 1 ? "version" : "versions",
  );
  if (page.began > 0) figure(duration(page.took), "took");
  if (report.undelivered)
    figure(
      whole(report.undelivered),
      "undelivered",
      "calls whose answer the harness never got whole, as far as is recorded",
      "bad",
    );
  if (sum(report.untrainable))
    figure(
      whole(sum(report.untrainable)),
      "not trainable",
      "calls whose output is no loss target; see the list of reasons",
      "bad",
    );
  if (report.empty) figure(whole(report.empty), "empty", "calls that generated nothing");
  const began = page.began > 0 ? page.began : page.created;
  const about = [
    page.model,
    began > 0 ? new Date(began * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "",
    page.torn ? `${whole(page.torn)} bytes of a torn tail` : "",
    page.skipped ? `${plural(page.skipped, "record")} of unknown kinds` : "",
  ];
  $("head").append(
    el(
      "div",
      "name",
      el("h1", "", clip(report.execution, 200) || "(unnamed)"),
      el("div", "sub", about.filter(Boolean).join(" · ")),
    ),
    figures,
  );
  document.title = `${visible(clip(report.execution, 80))} · trajectory tree`;

  function choice(box, name, options) {
    for (const [value, label] of options) {
      const node = button(label, () => {
        state[name] = value;
        refresh(name);
      });
      node.setAttribute("role", "radio");
      node.dataset.value = value;
      box.append(node);
    }
    box.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const nodes = [...box.children],
        next = nodes[(nodes.indexOf(document.activeElement) + by + nodes.length) % nodes.length];
      next.focus();
      next.click();
    });
  }
  function mark(box, value) {
    for (const node of box.children) {
      node.setAttribute("aria-checked", node.dataset.value === value);
      node.tabIndex = node.dataset.value === value ? 0 : -1;
    }
  }
  choice($("colour"), "colour", [
    ["role", "Role"],
    ["version", "Version"],
    ["engine", "Engine"],
    ["likelihood", "Likelihood"],
  ]);
  choice($("scale"), "scale", [
    ["tokens", "Tokens"],
    ["steps", "Steps"],
  ]);

  function refit() {
    tree.layout();
    tree.fit();
  }
  function refresh(changed) {
    if (changed === "scale") refit();
    toolbar();
    select(state.call, state.leaf);
  }
  function toolbar() {
    mark($("colour"), state.colour);
    mark($("scale"), state.scale);
    const item = (colour, name, kind = "") => el("span", "", key(colour, kind), clip(name, 32));
    const legend = {
      role: () => page.roles.slice(0, 8).map((role) => item(roleColour(role), role)),
      version: () => report.versions.slice(0, 8).map((version) => item(versionColour(version), `version ${version}`)),
      engine: () => page.engines.slice(0, 8).map((engine, i) => item(engineColour(i), engine)),
      likelihood: () => ["≥ 80 %", "50 %", "20 %", "5 %", "1 %", "less"].map((name, i) => item(`p${i}`, name)),
    }[state.colour]();
    const extra = [item("context", "context", "thin")];
    if (calls.some((call) => call.untrainable)) extra.push(item("", "not trainable", "hatched"));
    $("legend").replaceChildren(...legend, ...extra);
  }

  // Find: in names, roles, engines and endings at once, and in the text that the page holds.
  const haystack = calls.map((call) =>
    [call.call, call.role, call.finish, call.origin, ...call.attempts.map(([e, , end]) => `${page.engines[e]} ${end}`)]
      .join(" ")
      .toLowerCase(),
  );
  const texts = calls.map(() => null);
  const textOf = (i) =>
    (texts[i] ??= [calls[i].before, calls[i].after]
      .map((part) => [...part.head, ...part.tail].map(pieceOf).join(""))
      .join("\n")
      .toLowerCase());
  let at = -1;
  function search() {
    const wanted = $("find").value.trim().toLowerCase();
    state.found = wanted
      ? calls
          .filter((call) => haystack[call.i].includes(wanted) || textOf(call.i).includes(wanted))
          .map((call) => call.i)
      : [];
    at = -1;
    $("found").textContent = wanted ? `${state.found.length || "none"}` : "";
    tree.draw();
  }
  function next(by) {
    if (!state.found.length) return;
    at = (at + by + state.found.length) % state.found.length;
    $("found").textContent = `${at + 1} / ${state.found.length}`;
    select(state.found[at]);
  }
  $("find").addEventListener("input", search);
  $("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      $("find").value = "";
      search();
      $("tree").focus();
      event.stopPropagation();
    }
  });
  $("in").addEventListener("click", () => tree.zoom(1 / 1.6));
  $("out").addEventListener("click", () => tree.zoom(1.6));
  $("fit").addEventListener("click", tree.fit);
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      "+": () => tree.zoom(1 / 1.6),
      "=": () => tree.zoom(1 / 1.6),
      "-": () => tree.zoom(1.6),
      0: tree.fit,
      f: tree.focus,
      Escape: () => select(-1),
      "/": () => $("find").focus(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  watchers.push(() => {
    const call = calls[state.call];
    if (call) tree.reveal(bars[call.bars[0] ?? call.bar]);
    tree.draw();
    timeline.draw();
    detail.draw();
    lists.draw();
  });
  const layout = () => {
    timeline.layout();
    tree.layout();
  };
  window.addEventListener("resize", layout);
  window.addEventListener("hashchange", () => {
    const before = state.scale;
    readHash();
    toolbar();
    lists.build();
    if (state.scale !== before) refit();
    tell();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    theme = {};
    tree.restyle();
    timeline.draw();
  });

  readHash();
  toolbar();
  lists.build();
  timeline.layout();
  refit();
  tell();
  document.documentElement.dataset.ready = "true";
})();
