// The hands on the tree: pointer, wheel and arrow keys.

(() => {
  const { canvas, box, view, byRow, draw, fit, zoom, pan, show, barAt, start, end, x, unX, least, perPixel } = tree;

  function tip(event, bar) {
    const call = calls[bar.call],
      through = bar.last - bar.first;
    const lines = [
      el(
        "div",
        "",
        key(call ? roleColour(call.role) : "context", "dot"),
        " ",
        el("b", "", bar.sampled ? `${call.role} ${call.name}` : "context"),
      ),
    ];
    const where = `${plural(bar.size, "token")}, ${whole(bar.start)}–${whole(bar.end)}`;
    const shared =
      through > 1 ? ` · in ${whole(through)} trajectories` : through ? "" : " · nothing was sampled after it";
    lines.push(el("div", "muted", (bar.sampled ? `sampled ${where}` : where) + shared));
    if (bar.sampled) {
      const of = call.versions.map(([v]) => v);
      const facts = [
        of.length ? `version ${[...new Set(of)].join(", ")}` : "",
        call.curve ? `mean log-probability ${nats(call.curve.mean)}` : "",
        call.attempts.length > 1 ? `${call.attempts.length} attempts` : "",
        `finish ${call.finish}`,
      ];
      lines.push(el("div", "muted", facts.filter(Boolean).join(" · ")));
      if (call.untrainable) lines.push(el("div", "muted", `not trainable: ${call.untrainable}`));
      if (call.output) lines.push(el("div", "peek", peek(call.after)));
    } else if (call) {
      lines.push(el("div", "muted", `brought by ${call.role} ${call.name}`));
    }
    showTip(event, ...lines);
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = {
      x: event.clientX,
      y: event.clientY,
      from: view.from,
      scroll: box.scrollTop,
      moved: false,
      ...barAt(event),
    };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const dx = event.clientX - drag.x;
      drag.moved ||= Math.hypot(dx, event.clientY - drag.y) > 4;
      if (!drag.moved) return;
      hideTip();
      canvas.classList.add("drag");
      const by = -dx * perPixel();
      box.scrollTop = drag.scroll - (event.clientY - drag.y);
      pan(drag.from + by - view.from);
      return;
    }
    const { bar } = barAt(event);
    canvas.classList.toggle("on", Boolean(bar));
    const hover = bar ? bar.i : -1;
    if (bar) tip(event, bar);
    else hideTip();
    if (hover !== state.hover) {
      state.hover = hover;
      draw();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const was = drag;
    drag = null;
    canvas.classList.remove("drag");
    if (!was || was.moved) return;
    const { bar, px, row } = barAt(event);
    const last = row < 0 ? null : byRow[row][byRow[row].length - 1];
    if (bar && bar.call >= 0) select(bar.call);
    else if (last && px > x(end(last)) && last.first < last.last) select(-1, last.first);
    else select(-1);
  });
  canvas.addEventListener("pointercancel", () => {
    drag = null;
    canvas.classList.remove("drag");
  });
  canvas.addEventListener("pointerleave", () => {
    hideTip();
    if (state.hover >= 0) {
      state.hover = -1;
      draw();
    }
  });
  canvas.addEventListener("dblclick", (event) => {
    const { bar } = barAt(event);
    if (!bar) return fit();
    const room = Math.max(end(bar) - start(bar), least()) * 0.6;
    show(start(bar) - room, end(bar) + room);
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoom(
          Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006),
          unX(event.clientX - canvas.getBoundingClientRect().left),
        );
      } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
        event.preventDefault();
        pan(sideways * perPixel());
      }
    },
    { passive: false },
  );
  box.addEventListener("scroll", draw);

  // Arrows walk the tree: along it, and to the nearest call of the next row.
  function walk(keyName) {
    if (state.call < 0) return select(bars.length ? bars[0].call : -1);
    const call = calls[state.call],
      here = bars[call.bars[0] ?? call.bar];
    if (keyName === "ArrowLeft") {
      if (call.up >= 0) select(call.up);
      return;
    }
    if (keyName === "ArrowRight") {
      if (call.down.length)
        select(call.down.reduce((a, b) => (bars[calls[b].bar].row < bars[calls[a].bar].row ? b : a)));
      return;
    }
    for (
      let row = here.row + (keyName === "ArrowDown" ? 1 : -1);
      row >= 0 && row < rows;
      row += keyName === "ArrowDown" ? 1 : -1
    ) {
      const there = byRow[row].filter((bar) => bar.sampled);
      if (!there.length) continue;
      return select(
        there.reduce((a, b) => (Math.abs(b.start - here.start) < Math.abs(a.start - here.start) ? b : a)).call,
      );
    }
  }
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) {
      event.preventDefault();
      walk(event.key);
    } else if (event.key === "Enter" && state.call >= 0) $("detail").focus();
  });

  canvas.setAttribute(
    "aria-label",
    `${plural(report.calls, "call")} in ${plural(report.leaves.length, "trajectory", "trajectories")}; arrow keys walk from call to call`,
  );
})();
