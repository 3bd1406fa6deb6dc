// Calls over time, a group of lanes an engine: what ran side by side, and which calls moved to another engine.
// When a call moved is not recorded: its time is shared out by the tokens of its attempts.

const timeline = (() => {
  const canvas = $("time"),
    box = $("timescroll");
  const TOP = 20,
    RIGHT = 16;
  const timed = calls.filter((call) => page.began > 0 && call.ended >= call.started && call.ended > 0);
  const total = Math.max(page.took, 1e-3);
  const parts = []; // {call, engine, from, to, lane}
  for (const call of timed) {
    const attempts = call.attempts.length ? call.attempts : [[-1, 1, ""]];
    const all = attempts.reduce((sum, [, tokens]) => sum + tokens + 1, 0);
    let at = call.started;
    for (const [engine, tokens] of attempts) {
      const to = at + ((call.ended - call.started) * (tokens + 1)) / all;
      parts.push({ call: call.i, engine, from: at, to });
      at = to;
    }
  }
  const groups = []; // {engine, lanes: [end of each], first}
  for (const engine of [...page.engines.keys(), -1]) {
    const mine = parts.filter((part) => part.engine === engine).sort((a, b) => a.from - b.from || a.call - b.call);
    if (!mine.length) continue;
    const lanes = [];
    for (const part of mine) {
      let lane = lanes.findIndex((end) => end <= part.from + 1e-9);
      if (lane < 0) lane = lanes.push(0) - 1;
      lanes[lane] = part.to;
      part.lane = lane;
    }
    groups.push({ engine, lanes: lanes.length });
  }
  const lanes = groups.reduce((sum, group) => sum + group.lanes, 0);
  const named = page.engines.length > 0;
  let width = 0,
    laneHeight = 10,
    tops = new Map(),
    drawn = [];

  function layout() {
    $("timebox").hidden = !parts.length;
    if (!parts.length) return;
    laneHeight = Math.max(3, Math.min(13, Math.floor(120 / Math.max(1, lanes))));
    let top = TOP;
    tops = new Map();
    for (const group of groups) {
      tops.set(group.engine, top);
      top += Math.max(group.lanes * laneHeight, 13) + 5;
    }
    box.style.height = `${Math.min(top + 4, 190)}px`;
    width = box.clientWidth;
    canvas.dataset.height = top + 4;
    draw();
  }

  const left = () => (named ? 92 : 16);
  const x = (seconds) => left() + (seconds / total) * (width - left() - RIGHT);
  const top = (part) => tops.get(part.engine) + part.lane * laneHeight;

  function draw() {
    if (!parts.length || !width) return;
    const height = Number(canvas.dataset.height);
    const pen = surface(canvas, width, height);
    pen.textBaseline = "middle";
    pen.font = "10.5px system-ui, sans-serif";
    const step = timeStep(total / Math.max(1, (width - left()) / 95));
    for (let at = 0; at <= total + 1e-9; at += step) {
      const px = Math.round(x(at)) + 0.5;
      pen.strokeStyle = paint("line");
      pen.beginPath();
      pen.moveTo(px, TOP - 4);
      pen.lineTo(px, height);
      pen.stroke();
      pen.fillStyle = paint("muted");
      pen.textAlign = at === 0 ? "left" : "center";
      if (px < width - 24) pen.fillText(at === 0 ? "0" : clock(at), px, 8);
    }
    pen.textAlign = "left";
    for (const group of groups) {
      if (!named) break;
      pen.fillStyle = paint("muted");
      pen.fillText(
        group.engine < 0 ? "no engine" : visible(clip(page.engines[group.engine], 13)),
        16,
        tops.get(group.engine) + Math.max(group.lanes * laneHeight, 13) / 2,
      );
    }
    const onPath =
      state.leaf >= 0
        ? new Set(
            bars
              .filter((bar) => bar.sampled && bar.first <= state.leaf && state.leaf < bar.last)
              .map((bar) => bar.call),
          )
        : null;
    drawn = [];
    let before = null;
    for (const part of parts) {
      const call = calls[part.call],
        x0 = x(part.from),
        w = Math.max(1.5, x(part.to) - x0 - 0.5),
        y = top(part),
        h = laneHeight - (laneHeight > 5 ? 2 : 1);
      pen.globalAlpha = onPath && !onPath.has(part.call) ? 0.22 : 1;
      if (before && before.call === part.call) {
        // it moved
        pen.strokeStyle = paint("edge");
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(x0, top(before) + h / 2);
        pen.lineTo(x0, y + h / 2);
        pen.stroke();
      }
      const colour =
        state.colour === "version" && call.versions.length
          ? versionColour(call.versions[0][0])
          : state.colour === "engine"
            ? part.engine < 0
              ? "edge"
              : engineColour(part.engine)
            : state.colour === "likelihood" && call.curve
              ? `p${likelihood(call.curve.mean)}`
              : state.colour === "role"
                ? roleColour(call.role)
                : "edge";
      pen.fillStyle = paint(colour);
      pen.fillRect(x0, y, w, h);
      if (state.call === part.call) {
        pen.strokeStyle = paint("accent");
        pen.lineWidth = 2;
        pen.strokeRect(x0 - 1.5, y - 1.5, w + 3, h + 3);
      }
      pen.globalAlpha = 1;
      drawn.push([part, x0, x0 + w, y, y + laneHeight]);
      before = part;
    }
    canvas.dataset.parts = parts.length;
  }

  function timeStep(rough) {
    const steps = [
      0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600,
      7200, 14400, 28800,
    ];
    return steps.find((step) => step >= rough) ?? niceStep(rough, 1);
  }

  function partAt(event) {
    const area = canvas.getBoundingClientRect(),
      px = event.clientX - area.left,
      py = event.clientY - area.top;
    let best = null,
      near = 4;
    for (const [part, x0, x1, y0, y1] of drawn) {
      if (py < y0 || py > y1) continue;
      const gap = px < x0 ? x0 - px : px > x1 ? px - x1 : 0;
      if (gap < near) [best, near] = [part, gap];
    }
    return best;
  }
  canvas.addEventListener("pointermove", (event) => {
    const part = partAt(event);
    canvas.classList.toggle("on", Boolean(part));
    if (!part) return hideTip();
    const call = calls[part.call],
      took = call.ended - call.started;
    const lines = [el("div", "", key(roleColour(call.role), "dot"), " ", el("b", "", `${call.role} ${call.name}`))];
    lines.push(
      el(
        "div",
        "muted",
        `from ${duration(call.started)}, ${duration(took)} · ${plural(call.output, "token")}${took > 0 ? ` · ${(call.output / took).toFixed(1)} a second` : ""}`,
      ),
    );
    if (call.attempts.length > 1)
      lines.push(
        el(
          "div",
          "muted",
          `${call.attempts.length} attempts: ${call.attempts.map(([e, n]) => `${clip(page.engines[e], 40)} ${n}`).join(" → ")} tokens`,
        ),
      );
    showTip(event, ...lines);
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const part = partAt(event);
    select(part ? part.call : -1);
  });

  // Most calls under way at one moment.
  const busiest = () => {
    const events = timed
      .flatMap((call) => [
        [call.started, 1],
        [call.ended, -1],
      ])
      .sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    let now = 0,
      most = 0;
    for (const [, by] of events) most = Math.max(most, (now += by));
    return most;
  };
  const moved = calls.filter((call) => new Set(call.attempts.map(([engine]) => engine)).size > 1).length;
  const again = calls.filter((call) => call.attempts.length > 1).length;
  $("timenote").textContent = parts.length
    ? [
        `${plural(page.engines.length, "engine")}`,
        `at most ${plural(busiest(), "call")} at once`,
        moved ? `${plural(moved, "call")} moved between engines` : "",
        again > moved ? `${again - moved} continued on the same engine` : "",
      ]
        .filter(Boolean)
        .join(" · ")
    : "";
  return { draw, layout };
})();
