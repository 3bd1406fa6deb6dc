// The tree: depth in tokens to the right, a row for each way to a leaf. Bars thinner than a pixel merge.

const tree = (() => {
  const canvas = $("tree"),
    box = $("treescroll");
  const TOP = 26,
    LEFT = 16;
  let RIGHT = 178; // room for what is written behind the rows
  const view = { from: 0, to: 1 }; // part of the axis in sight
  let rowHeight = 24,
    width = 0,
    height = 0,
    drawn = [];
  const picked = new Set(page.selected.length < report.leaves.length ? page.selected.map(([leaf]) => leaf) : []);
  const byRow = Array.from({ length: rows }, () => []);
  for (const bar of bars) byRow[bar.row].push(bar);

  const least = () => (state.scale === "tokens" ? 8 : 2); // of the axis in sight at most zoom
  const full = () => (state.scale === "tokens" ? depth : steps);
  const start = (bar) => (state.scale === "tokens" ? bar.start : bar.steps);
  const end = (bar) => (state.scale === "tokens" ? bar.end : bar.steps + 1);
  const x = (value) => LEFT + ((value - view.from) / (view.to - view.from)) * (width - LEFT - RIGHT);
  const unX = (px) => view.from + ((px - LEFT) / (width - LEFT - RIGHT)) * (view.to - view.from);
  const y = (row) => TOP + row * rowHeight - box.scrollTop + 4;

  function clamp() {
    const span = Math.min(full(), Math.max(Math.min(least(), full()), view.to - view.from));
    view.from = Math.max(0, Math.min(view.from, full() - span));
    view.to = view.from + span;
  }
  function zoom(factor, at = (view.from + view.to) / 2) {
    view.from = at - (at - view.from) * factor;
    view.to = at + (view.to - at) * factor;
    clamp();
    draw();
  }
  function pan(by) {
    const span = view.to - view.from;
    view.from = Math.max(0, Math.min(view.from + by, full() - span));
    view.to = view.from + span;
    draw();
  }
  function show(from, to) {
    [view.from, view.to] = [from, to];
    clamp();
    draw();
  }
  const fit = () => show(0, full());

  function reveal(bar) {
    const [a, b] = [start(bar), end(bar)];
    if (b < view.from || a > view.to) pan((a + b) / 2 - (view.from + view.to) / 2);
    const top = bar.row * rowHeight;
    if (top < box.scrollTop || top + rowHeight > box.scrollTop + height - TOP - 8) box.scrollTop = top - height / 2;
  }

  // Runs of an output with one colour each: [from, to, colour].
  function runs(call) {
    if (state.colour === "version" && call.versions.length)
      return call.versions.map(([v, a, b]) => [a, b, versionColour(v)]);
    if (state.colour === "engine" && call.attempts.length) {
      let at = 0;
      return call.attempts.map(([engine, tokens]) => [at, (at += tokens), engineColour(engine)]);
    }
    if (state.colour === "likelihood" && call.curve) {
      const { means, width: each = 1 } = call.curve;
      return means.map((mean, i) => [i * each, Math.min(call.output, (i + 1) * each), `p${likelihood(mean)}`]);
    }
    return [[0, call.output, state.colour === "role" ? roleColour(call.role) : "edge"]];
  }

  let hatching = null;
  function hatch(pen) {
    if (hatching) return hatching;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const p = tile.getContext("2d");
    p.strokeStyle = paint("hatch");
    p.lineWidth = 2.4;
    p.beginPath();
    for (const d of [-6, 0, 6]) {
      p.moveTo(d - 1, 7);
      p.lineTo(d + 7, -1);
    }
    p.stroke();
    return (hatching = pen.createPattern(tile, "repeat"));
  }

  const contextColour = (bar) => (state.colour === "role" && bar.call >= 0 ? roleColour(calls[bar.call].role) : "edge");

  function drawBar(pen, bar, x0, x1) {
    const call = calls[bar.call],
      top = y(bar.row),
      tall = rowHeight - Math.max(3, rowHeight * 0.28);
    const w = Math.max(1, x1 - x0 - (x1 - x0 > 4 ? 1 : 0));
    const alpha = pen.globalAlpha;
    if (!bar.sampled) {
      const thin = Math.max(3, Math.round(tall * 0.5));
      pen.fillStyle = paint("context");
      pen.fillRect(x0, top + (tall - thin) / 2, w, thin);
      pen.globalAlpha = alpha * 0.32;
      pen.fillStyle = paint(contextColour(bar));
      pen.fillRect(x0, top + (tall - thin) / 2, w, thin);
      pen.globalAlpha = alpha;
      return;
    }
    const scale = (x1 - x0) / bar.size;
    for (const [a, b, colour] of runs(call)) {
      const from = Math.max(a, bar.offset) - bar.offset,
        to = Math.min(b, bar.offset + bar.size) - bar.offset;
      if (to <= from) continue;
      pen.fillStyle = paint(colour);
      pen.fillRect(
        x0 + from * scale,
        top,
        Math.min((to - from) * scale, w - from * scale) + (to < bar.size ? 0.5 : 0),
        tall,
      );
    }
    if (call.untrainable) {
      pen.fillStyle = hatch(pen);
      pen.fillRect(x0, top, w, tall);
      pen.strokeStyle = paint(runs(call)[0][2]);
      if (w > 3 && tall > 5) pen.strokeRect(x0 + 0.5, top + 0.5, w - 1, tall - 1);
    }
  }

  function label(pen, bar, x0, x1) {
    if (rowHeight < 18 || x1 - x0 < 18) return;
    const call = calls[bar.call],
      tall = rowHeight - Math.max(3, rowHeight * 0.28);
    const left = Math.max(x0, LEFT) + (bar.parent >= 0 && bars[bar.parent].below.length > 1 ? 4 : 0),
      room = Math.min(x1, width - RIGHT) - left - 8;
    const size = short(bar.size),
      text = bar.sampled && room > 110 ? `${visible(call.name)} · ${size}` : size;
    pen.font = `${bar.sampled ? "600 " : ""}10.5px system-ui, sans-serif`;
    if (pen.measureText(text).width > room) return;
    if (bar.sampled && call.untrainable) return;
    pen.fillStyle = bar.sampled ? (state.colour === "likelihood" ? paint("text") : paint("panel")) : paint("muted");
    pen.fillText(text, left + 4, y(bar.row) + tall / 2 + (bar.sampled ? 0.5 : rowHeight >= 24 ? 0.5 : 0));
  }

  function draw() {
    if (!width) return;
    const pen = surface(canvas, width, height);
    const tall = rowHeight - Math.max(3, rowHeight * 0.28);
    const lit = state.leaf >= 0 ? (bar) => bar.first <= state.leaf && state.leaf < bar.last : null;
    const [top, bottom] = [
      Math.floor((box.scrollTop - 4) / rowHeight) - 1,
      Math.ceil((box.scrollTop + height) / rowHeight),
    ];
    pen.textBaseline = "middle";
    drawn = [];
    let merged = 0,
      single = 0;

    axis(pen);
    pen.save();
    pen.beginPath();
    pen.rect(0, TOP, width, height - TOP);
    pen.clip();

    // Branches, behind the bars: from the parent's row down to the child's.
    pen.lineWidth = 1.3;
    for (const bar of bars) {
      if (bar.parent < 0 || bars[bar.parent].row === bar.row) continue;
      const at = Math.round(x(start(bar))) + 0.5,
        from = y(bars[bar.parent].row) + tall / 2,
        to = y(bar.row) + tall / 2;
      if (at < 0 || at > width || to < TOP || from > height) continue;
      const bend = Math.min(5, to - from);
      pen.strokeStyle = paint("edge");
      pen.globalAlpha = lit && !lit(bar) ? 0.25 : 1;
      pen.beginPath();
      pen.moveTo(at - bend, from);
      pen.lineTo(at - bend, to - bend);
      pen.quadraticCurveTo(at - bend, to, at, to);
      pen.stroke();
    }

    for (let row = Math.max(0, top); row < Math.min(rows, bottom); row++) {
      let pending = null; // a pixel that several bars share
      const flush = () => {
        if (!pending) return;
        pen.globalAlpha = pending.lit ? 1 : 0.22;
        const part = pending.sampled / pending.size,
          high = tall * (0.5 + 0.5 * part);
        pen.fillStyle = paint(part > 0 ? pending.colour : "context");
        pen.fillRect(pending.px, y(row) + (tall - high) / 2, 1, high);
        pending = null;
      };
      for (const bar of byRow[row]) {
        const x0 = x(start(bar)),
          x1 = x(end(bar));
        if (x1 < 0 || x0 > width) continue;
        const on = !lit || lit(bar);
        if (x1 - x0 < 1) {
          const px = Math.floor(x0);
          if (pending && pending.px !== px) flush();
          pending ??= { px, size: 0, sampled: 0, colour: "edge", lit: false };
          pending.size += bar.size;
          if (bar.sampled)
            [pending.sampled, pending.colour] = [pending.sampled + bar.size, runs(calls[bar.call])[0][2]];
          pending.lit ||= on;
          merged++;
        } else {
          flush();
          pen.globalAlpha = on ? 1 : 0.22;
          drawBar(pen, bar, x0, x1);
          label(pen, bar, x0, x1);
          single++;
        }
        drawn.push([bar, x0, Math.max(x1, x0 + 1)]);
      }
      flush();
      rowEnd(pen, row, tall, lit);
    }
    pen.globalAlpha = 1;
    forks(pen, tall, lit);
    marks(pen, tall);
    pen.restore();
    canvas.dataset.bars = single;
    canvas.dataset.merged = merged;
    canvas.dataset.rows = rows;
  }

  function axis(pen) {
    pen.font = "10.5px system-ui, sans-serif";
    const step = Math.max(1, niceStep(view.to - view.from, (width - LEFT - RIGHT) / 90));
    for (let at = Math.ceil(view.from / step) * step; at <= view.to + 1e-9; at += step) {
      const px = Math.round(x(at)) + 0.5;
      pen.strokeStyle = paint("line");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(px, TOP - 5);
      pen.lineTo(px, height);
      pen.stroke();
      pen.fillStyle = paint("muted");
      pen.textAlign = at === 0 ? "left" : "center";
      pen.fillText(step < 1000 ? whole(at) : short(at), at === 0 ? px - 1 : px, 12);
    }
    pen.textAlign = "left";
    pen.fillStyle = paint("faint");
    pen.textAlign = "right";
    pen.fillText(state.scale === "tokens" ? "tokens deep" : "nodes deep", width - 10, 12);
    pen.textAlign = "left";
    if (view.to - view.from < full() - 1e-9) {
      // where in the whole we are
      const room = width - LEFT - RIGHT;
      pen.fillStyle = paint("soft");
      pen.fillRect(LEFT, 1, room, 3);
      pen.fillStyle = paint("edge");
      pen.fillRect(LEFT + (view.from / full()) * room, 1, Math.max(3, ((view.to - view.from) / full()) * room), 3);
    }
  }

  function rowLabel(row) {
    const last = byRow[row][byRow[row].length - 1];
    if (last.first === last.last) return `generated nothing · ${visible(clip(calls[last.call].role, 24))}`;
    const leaf = report.leaves[last.first];
    return `${last.first + 1} · ${visible(clip(leaf.role, 24))} · ${plural(leaf.turns, "turn")}${leaf.delivered ? "" : " · undelivered"}${picked.has(last.first) ? " · drawn" : ""}`;
  }

  function rowEnd(pen, row, tall, lit) {
    const last = byRow[row][byRow[row].length - 1];
    if (rowHeight < 11 || !last) return;
    const at = Math.max(LEFT, x(end(last))) + 8;
    if (x(end(last)) < 0 || at > width - 20) return;
    const leaf = last.first < last.last ? report.leaves[last.first] : null;
    pen.globalAlpha = lit && !lit(last) ? 0.35 : 1;
    pen.font = `${state.leaf >= 0 && state.leaf === last.first && leaf ? "600 " : ""}${rowHeight < 15 ? 9.5 : 11}px system-ui, sans-serif`;
    pen.fillStyle = leaf && !leaf.delivered ? paint("bad") : paint("muted");
    pen.fillText(rowLabel(row), at, y(row) + tall / 2 + 0.5);
    pen.globalAlpha = 1;
  }

  function forks(pen, tall, lit) {
    if (rowHeight < 8) return;
    const seen = new Set();
    for (const bar of bars) {
      if (bar.below.length < 2 || (lit && !lit(bar))) continue;
      const at = x(end(bar)),
        spot = `${Math.round(at)}/${bar.row}`;
      if (at < 0 || at > width || seen.has(spot)) continue;
      seen.add(spot);
      const r = Math.min(3.6, rowHeight / 5);
      pen.beginPath();
      pen.arc(at - 0.5, y(bar.row) + tall / 2, r, 0, 7);
      pen.fillStyle = paint("panel");
      pen.fill();
      pen.lineWidth = 1.6;
      pen.strokeStyle = paint("text");
      pen.stroke();
    }
  }

  function marks(pen, tall) {
    const frame = (index, colour, grow) => {
      const bar = bars[index],
        x0 = x(start(bar)),
        x1 = Math.max(x0 + 2, x(end(bar)));
      pen.strokeStyle = paint(colour);
      pen.lineWidth = 2;
      pen.strokeRect(x0 - grow, y(bar.row) - grow, x1 - x0 + 2 * grow - 1, tall + 2 * grow);
    };
    for (const call of state.found) {
      const bar = bars[calls[call].bars[0] ?? calls[call].bar];
      if (!bar) continue;
      const at = Math.max(x(start(bar)), 0) + 2,
        top = y(bar.row) - 1;
      pen.fillStyle = paint("accent");
      pen.beginPath();
      pen.moveTo(at - 4, top - 4);
      pen.lineTo(at + 4, top - 4);
      pen.lineTo(at, top + 2);
      pen.fill();
    }
    if (state.call >= 0) {
      const call = calls[state.call];
      pen.lineWidth = 2;
      pen.strokeStyle = paint("accent");
      for (const i of path(call.bars[0] ?? call.bar)) {
        // the way there
        const bar = bars[i],
          under = y(bar.row) + tall + 1.5;
        pen.beginPath();
        pen.moveTo(x(start(bar)), under);
        pen.lineTo(Math.max(x(start(bar)) + 1, x(end(bar)) - 1), under);
        pen.stroke();
      }
      for (const i of call.bars.length ? call.bars : [call.bar]) if (i >= 0) frame(i, "accent", 1.5);
    }
    if (state.hover >= 0) frame(state.hover, "text", 0);
  }

  function layout() {
    width = box.clientWidth;
    const pen = canvas.getContext("2d");
    pen.font = "11px system-ui, sans-serif";
    RIGHT = 84;
    byRow.forEach((line, row) => {
      const part = end(line[line.length - 1]) / full(),
        needed = pen.measureText(rowLabel(row)).width + 18;
      RIGHT = Math.min(260, Math.max(RIGHT, (needed - (1 - part) * (width - LEFT)) / Math.max(part, 0.05)));
    });
    const most = innerWidth <= 880 ? 420 : Math.max(150, innerHeight * 0.46);
    rowHeight = Math.max(12, Math.min(rows < 6 ? 36 : 30, Math.floor((most - TOP - 10) / Math.max(1, rows))));
    const content = TOP + rows * rowHeight + 10;
    height = Math.min(content, most);
    box.style.height = `${height}px`;
    $("treespace").style.height = `${Math.max(0, content - height)}px`;
    draw();
  }

  function barAt(event) {
    const { left, top } = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - left, event.clientY - top];
    const row = Math.floor((py - TOP - 4 + box.scrollTop) / rowHeight);
    if (py < TOP || row < 0 || row >= rows) return { px, py, bar: null, row: -1 };
    let best = null,
      near = 4;
    for (const [bar, x0, x1] of drawn) {
      if (bar.row !== row) continue;
      const gap = px < x0 ? x0 - px : px > x1 ? px - x1 : 0;
      if (gap < near || (gap === 0 && bar.sampled && x1 - x0 < 3)) [best, near] = [bar, gap];
    }
    return { px, py, bar: best, row };
  }

  // Zoom to the selected call.
  function focus() {
    const call = calls[state.call];
    if (!call) return;
    const own = bars[call.bars[0] ?? call.bar];
    const room = Math.max(end(own) - start(own), least());
    show(start(own) - room, end(own) + room);
  }
  const restyle = () => {
    hatching = null;
    draw();
  };

  const perPixel = () => (view.to - view.from) / (width - LEFT - RIGHT);
  return {
    canvas,
    box,
    view,
    byRow,
    draw,
    layout,
    fit,
    focus,
    zoom,
    pan,
    show,
    reveal,
    restyle,
    barAt,
    start,
    end,
    x,
    unX,
    least,
    perPixel,
  };
})();
