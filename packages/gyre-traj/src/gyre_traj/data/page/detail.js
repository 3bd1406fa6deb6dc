// What is selected, or the execution as a whole.

const detail = (() => {
  const box = $("detail");
  const chip = (text, kind = "", colour = "") => el("span", `chip ${kind}`, colour ? key(colour) : "", text);
  const roleChip = (role) => chip(clip(role, 60), "", roleColour(role));
  const facts = (...pairs) => {
    const list = el("dl", "facts");
    for (const [name, ...value] of pairs)
      if (value.some((v) => v !== "" && v !== null)) list.append(el("dt", "", name), el("dd", "", ...value));
    return list;
  };
  const link = (call) => button(calls[call].name, () => select(call), "link");
  const links = (found) =>
    found
      .slice(0, 12)
      .flatMap((call, i) => [i ? " " : "", link(call)])
      .concat(found.length > 12 ? ` and ${found.length - 12} more` : "");
  // A reason names calls by their whole id: make those links.
  function reason(text) {
    return text.split(/( |(?=[:,]))/).map((word) => (byId.has(word) ? link(byId.get(word)) : word));
  }
  function table(head, lines) {
    const node = el("table"),
      first = el("tr");
    for (const [name, kind = ""] of head) first.append(el("th", kind, name));
    node.append(el("thead", "", first));
    const body = el("tbody");
    for (const line of lines) body.append(el("tr", "", ...line.map((cell, i) => el("td", head[i][1] ?? "", cell))));
    node.append(body);
    return node;
  }

  function whyHere(call) {
    const said = [...reason(call.origin)];
    if (call.parent >= 0 && call.up !== call.parent) said.push("; its record names ", link(call.parent), " as parent");
    else if (call.parent < 0 && call.up >= 0) said.push("; found by its tokens, its record names no parent");
    return said;
  }
  function afterwards(call) {
    if (!call.output) return ["generated nothing: it is nobody's parent"];
    if (!call.down.length)
      return call.leaf >= 0
        ? ["nothing continues it: a leaf, ", button(`trajectory ${call.leaf + 1}`, () => select(-1, call.leaf), "link")]
        : ["nothing continues it"];
    const split =
      call.bars.length > 1 ? ` · forked inside its output after ${plural(bars[call.bars[1]].offset, "token")}` : "";
    return [
      call.down.length > 1 ? `${call.down.length} calls continue it: ` : "continued by ",
      ...links(call.down),
      split,
    ];
  }

  function shared(call) {
    // of its prompt, tokens that older calls brought
    let sum = 0;
    for (const i of path(call.bars.length ? bars[call.bars[0]].parent : call.bar)) {
      const bar = bars[i],
        from = Math.max(bar.start, call.prefix);
      if (bar.end > from && (bar.sampled || bar.call !== call.i)) sum += bar.end - from;
    }
    return sum;
  }

  function callDetail(call) {
    const took = call.ended - call.started,
      timed = page.began > 0 && call.ended > 0;
    const known = shared(call);
    const title = el("h2", "", roleChip(call.role), el("span", "mono", call.name));
    if (call.leaf >= 0) title.append(chip("leaf"));
    if (call.down.length > 1) title.append(chip("fork"));
    if (!call.delivered) title.append(chip("undelivered", "bad"));
    if (call.untrainable) title.append(chip("not trainable", "warn"));
    if (!call.output) title.append(chip("empty", "warn"));
    if (!["stop", "length"].includes(call.finish)) title.append(chip(call.finish, "bad"));
    const nodes = [
      title,
      el("div", "id mono", clip(call.call, 200)),
      facts(
        ["here because", ...whyHere(call)],
        ["then", ...afterwards(call)],
        ["tokens", `${whole(call.prefix)} before + ${whole(call.prompt)} prompt → ${whole(call.output)} sampled`],
        ["finish", call.finish, call.stop ? ` at ${JSON.stringify(call.stop)}` : ""],
        ["delivered", call.delivered ? "yes" : "no: the harness never got the whole answer, as far as is recorded"],
        [
          "trainable",
          call.output ? (call.untrainable ? `no: ${call.untrainable}` : `yes, ${plural(call.output, "token")}`) : "",
        ],
        [
          "time",
          timed
            ? `${duration(call.started)} after the first call, for ${duration(took)}${took > 0 && call.output ? `: ${(call.output / took).toFixed(1)} tokens a second` : ""}`
            : "",
        ],
        ["engine", call.attempts.length === 1 ? attempt(call) : call.attempts.length ? "" : "not recorded"],
        ["versions", ...versions(call)],
        ["dialect", call.dialect],
      ),
    ];
    if (call.attempts.length > 1) {
      nodes.push(el("h3", "", `${call.attempts.length} attempts`));
      nodes.push(
        table(
          [["engine"], ["tokens", "n"], ["ended", "wide"]],
          call.attempts.map(([engine, tokens, end]) => [clip(page.engines[engine], 80), whole(tokens), end]),
        ),
      );
    }
    if (call.curve) nodes.push(...curve(call, jump));
    if (call.output)
      nodes.push(
        el("h3", "", "Output", el("span", "note", plural(call.output, "token"))),
        ...folded(passage(call.after, { size: call.output, first: call.prefix + call.prompt, out: true }), call.after),
      );
    const had = known ? `, ${whole(known)} of them brought by older calls` : "";
    nodes.push(
      el(
        "h3",
        "",
        "Prompt",
        el(
          "span",
          "note",
          call.prompt
            ? `${plural(call.prompt, "token")}${call.parent >= 0 ? " after its parent's" : ""}${had}`
            : "nothing new",
        ),
      ),
    );
    if (call.prompt)
      nodes.push(
        ...folded(
          passage(call.before, { size: call.prompt, first: call.prefix, inserted: call.inserted }),
          call.before,
        ),
      );
    nodes.push(settings("Sampling", page.settings[call.sampling]));
    nodes.push(
      settings(
        "Record",
        [
          ["call", call.call],
          ["tools hash", call.tools],
          ["template hash", call.template],
          ...page.settings[call.request].map(([k, v]) => [`request: ${k}`, v]),
        ].filter(([, v]) => v),
      ),
    );
    return nodes;
  }

  function attempt(call) {
    const [[engine, tokens, end]] = call.attempts;
    return (
      clip(page.engines[engine], 80) +
      (tokens === call.output ? "" : `, ${plural(tokens, "token")}`) +
      (end === call.finish ? "" : `, ended: ${end}`)
    );
  }
  function versions(call) {
    if (!call.versions.length) return [call.output ? "not recorded" : ""];
    if (call.versions.length === 1) return [`${call.versions[0][0]}`];
    return call.versions.flatMap(([v, a, b], i) => [
      i ? ", " : "",
      key(versionColour(v), "dot"),
      ` ${v} (${whole(a)}–${whole(b)})`,
    ]);
  }

  function settings(name, pairs) {
    const box_ = el("details", "", el("summary", "", name));
    box_.append(facts(...pairs.map(([k, v]) => [clip(k, 40), el("span", "mono", v)])));
    return pairs.length ? box_ : "";
  }

  function jump(place) {
    const token = box.querySelector(`[data-out="${place}"]`);
    if (!token) return;
    const text = token.closest(".text");
    if (text.classList.contains("folded")) text.nextSibling.click(); // its button shows all
    for (const old of box.querySelectorAll(".at")) old.classList.remove("at");
    token.classList.add("at");
    token.scrollIntoView({ block: "center" });
  }

  function leafDetail(index) {
    const leaf = report.leaves[index],
      end = byId.get(leaf.call),
      drawnAs = page.selected.findIndex(([i]) => i === index);
    const turns = path(calls[end].bar)
      .map((i) => bars[i])
      .filter((bar) => bar.sampled)
      .map((bar) => bar.call)
      .filter((call, i, all) => all.indexOf(call) === i);
    return [
      el("h2", "", roleChip(leaf.role), `Trajectory ${index + 1}`, leaf.delivered ? "" : chip("undelivered", "bad")),
      facts(
        ["ends with", link(end)],
        ["here because", ...reason(leaf.why)],
        ["tokens", `${whole(leaf.tokens)}, ${whole(leaf.trainable)} trainable`],
        ["versions", leaf.versions.join(", ") || "not recorded"],
        [
          "selection",
          drawnAs < 0
            ? `not drawn by J_max ${page.j_max ?? "unlimited"}, seed ${page.seed}`
            : `drawn ${ordinal(drawnAs + 1)}, for ${plural(page.selected[drawnAs][1], "target")} (J_max ${page.j_max ?? "unlimited"}, seed ${page.seed})`,
        ],
      ),
      el("h3", "", plural(leaf.turns, "turn")),
      table(
        [["call"], ["role"], ["prompt", "n"], ["sampled", "n"], ["log-prob", "n"]],
        turns
          .slice(0, 500)
          .map((call) => [
            link(call),
            clip(calls[call].role, 24),
            whole(calls[call].prompt),
            whole(calls[call].output),
            calls[call].curve ? nats(calls[call].curve.mean) : "–",
          ]),
      ),
    ];
  }

  function overview() {
    const why = new Map();
    for (const text of Object.values(report.untrainable)) why.set(text, (why.get(text) ?? 0) + 1);
    const engines = page.engines.map((name, e) => [
      name,
      calls.filter((call) => call.attempts.some(([i]) => i === e)).length,
      calls.reduce((sum, call) => sum + call.attempts.reduce((s, [i, n]) => s + (i === e ? n : 0), 0), 0),
    ]);
    const sampled = report.versions.map((v) => [
      v,
      calls.reduce((sum, call) => sum + call.versions.reduce((s, [of, a, b]) => s + (of === v ? b - a : 0), 0), 0),
    ]);
    const targets = page.selected.reduce((sum, [, n]) => sum + n, 0);
    const left = Object.entries(page.left_out);
    return [
      el("h2", "", "Execution"),
      el("p", "muted", "Select a bar, a row or a moment to see the call, its text and how likely each token was."),
      el("h3", "", "Roles"),
      table(
        [["role"], ["calls", "n"], ["sampled", "n"], ["trainable", "n"]],
        report.roles.map((r) => [roleChip(r.role), whole(r.calls), whole(r.sampled), whole(r.trainable)]),
      ),
      sampled.length ? el("h3", "", "Weight versions") : "",
      sampled.length
        ? table(
            [["version"], ["sampled", "n"]],
            sampled.map(([v, n]) => [chip(String(v), "", versionColour(v)), whole(n)]),
          )
        : "",
      engines.length ? el("h3", "", "Engines") : "",
      engines.length
        ? table(
            [["engine"], ["calls", "n"], ["tokens", "n"]],
            engines.map(([name, n, t], e) => [chip(clip(name, 60), "", engineColour(e)), whole(n), whole(t)]),
          )
        : "",
      el("h3", "", "Selection", el("span", "note", `J_max ${page.j_max ?? "unlimited"}, seed ${page.seed}`)),
      el(
        "p",
        "",
        `${plural(page.selected.length, "trajectory", "trajectories")} drawn of ${whole(report.leaves.length)}, ${plural(targets, "target")} of ${whole(report.trainable)} trainable`,
      ),
      left.length ? el("p", "muted", `left out: ${left.map(([role, n]) => `${whole(n)} of ${role}`).join(", ")}`) : "",
      why.size ? el("h3", "", "Not trainable") : "",
      why.size
        ? table(
            [
              ["calls", "n"],
              ["why", "wide"],
            ],
            [...why].map(([text, n]) => [whole(n), text]),
          )
        : "",
      el("h3", "", "Keys"),
      keys(
        [["←", "→"], "the call before, the call after"],
        [["↑", "↓"], "the row above, the row below"],
        [["+", "−", "0"], "zoom in, out, show all"],
        [["f"], "zoom to the selected call"],
        [["/"], "find"],
        [["Esc"], "select nothing"],
        [["Ctrl"], "with the wheel: zoom; drag moves"],
      ),
      el(
        "p",
        "note",
        `Texts of more than ${whole(page.limit)} tokens are cut in the middle (${page.cut ? plural(page.cut, "text") : "none here"}). ${page.tokens.some(([, t]) => t !== null) ? "" : "No tokenizer was given: ids stand for text. "}Tree figures: gyre-traj inspect.`,
      ),
    ];
  }
  function keys(...lines) {
    const list = el("div", "keys");
    for (const [names, what] of lines)
      list.append(el("span", "", ...names.flatMap((k, i) => [i ? " " : "", el("kbd", "", k)])), el("span", "", what));
    return list;
  }

  let shown = "";
  function draw() {
    const now = `${state.call}/${state.leaf}`;
    if (now === shown) return;
    shown = now;
    const nodes =
      state.call >= 0 ? callDetail(calls[state.call]) : state.leaf >= 0 ? leafDetail(state.leaf) : overview();
    box.replaceChildren(...nodes.filter(Boolean));
    box.scrollTop = 0;
  }
  return { draw, roleChip, link };
})();
