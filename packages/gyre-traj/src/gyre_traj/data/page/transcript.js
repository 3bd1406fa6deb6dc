// A trajectory read from its root on: what came in, what was sampled, turn by turn.

const transcript = (() => {
  const PAGE = 30; // turns at a time
  let shown = "";

  // Turns on the way to a bar: a call, where its own context begins, how much of its output is on the way.
  function turns(last) {
    const found = [];
    let from = 0;
    for (const i of path(last)) {
      const bar = bars[i];
      if (!bar.sampled) continue;
      const before = found[found.length - 1];
      if (before?.call === bar.call) before.to = bar.offset + bar.size;
      else found.push({ call: bar.call, from, to: bar.size });
      from = bar.end;
    }
    return found;
  }

  function turn({ call: index, from, to }, number) {
    const call = calls[index],
      start = Math.max(0, from - call.prefix);
    const note = [
      `turn ${number}`,
      `${plural(call.prompt - start, "token")} in`,
      `${whole(to)}${to < call.output ? ` of ${whole(call.output)}` : ""} sampled`,
      call.curve ? `mean ${nats(call.curve.mean)}` : "",
      call.untrainable ? "not trainable" : "",
    ];
    const head = el(
      "div",
      "turnhead",
      detail.roleChip(call.role),
      detail.link(index),
      el("span", "note", note.filter(Boolean).join(" · ")),
    );
    const sampled = el(
      "div",
      "sampled",
      passage(call.after, { size: call.output, first: call.prefix + call.prompt, to }),
    );
    sampled.style.setProperty("--role", `var(--${roleColour(call.role)})`);
    const node = el(
      "div",
      `turn${state.call === index ? " on" : ""}`,
      head,
      call.prompt > start
        ? passage(call.before, { size: call.prompt, first: call.prefix, from: start, inserted: call.inserted })
        : "",
      sampled,
    );
    node.dataset.call = index;
    return node;
  }

  function build() {
    shown = "";
    draw();
  }
  function draw() {
    const leaf = Math.max(0, state.leaf);
    const call = state.call >= 0 ? calls[state.call] : calls[byId.get(report.leaves[leaf]?.call)];
    const now = `${state.call}/${leaf}`;
    if (now === shown) return;
    shown = now;
    const box = $("list"),
      all = call ? turns(call.bar) : [];
    $("listnote").textContent =
      state.call >= 0
        ? `up to call ${call.name}`
        : call
          ? `trajectory ${leaf + 1}${state.leaf < 0 && report.leaves.length > 1 ? ": select another above, or a call" : ""}`
          : "nothing was sampled";
    const list = el("div", "transcript"),
      first = state.call >= 0 ? Math.max(0, all.length - PAGE) : 0;
    let [top, bottom] = [first, first];
    const earlier = button("", () => extend(-1), "more"),
      later = button("", () => extend(1), "more");
    function extend(by) {
      const [a, b] = by < 0 ? [Math.max(0, top - PAGE), top] : [bottom, Math.min(all.length, bottom + PAGE)];
      const nodes = all.slice(a, b).map((one, i) => turn(one, a + i + 1));
      if (by < 0) {
        list.prepend(...nodes);
        top = a;
      } else {
        list.append(...nodes);
        bottom = b;
      }
      earlier.textContent = `Show ${plural(Math.min(PAGE, top), "earlier turn")}`;
      later.textContent = `Show ${plural(Math.min(PAGE, all.length - bottom), "later turn")} of ${whole(all.length - bottom)}`;
      earlier.hidden = top === 0;
      later.hidden = bottom === all.length;
    }
    extend(1);
    box.replaceChildren(earlier, list, later);
    box.scrollTop = 0;
    if (state.call >= 0) list.lastElementChild?.scrollIntoView({ block: "nearest" });
  }
  return { build, draw };
})();
