// Log-probabilities of an output as a curve, its least likely tokens marked; `jump` goes to a token of the text.

function curve(call, jump) {
  const { means, lows = [], width = 1, surprises = [], mean } = call.curve;
  const n = means.length,
    all = [...means, ...lows].filter((v) => v !== null && v !== undefined);
  const least = Math.min(-100, ...all),
    H = 60,
    W = 1000;
  const px = (i) => (n > 1 ? (i / (n - 1)) * W : W / 2),
    py = (v) => 2 + (Math.max(least, Math.min(0, v ?? least)) / least) * (H - 4);
  const svg = $("svg").cloneNode();
  const add = (tag, name, attributes) => {
    const node = document.createElementNS(svg.namespaceURI, tag);
    node.setAttribute("class", name);
    for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
    svg.append(node);
  };
  svg.removeAttribute("id");
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "curve");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `log-probabilities of the output, mean ${nats(mean)}`);
  add("line", "grid", { x1: 0, x2: W, y1: 2, y2: 2 });
  add("line", "grid", { x1: 0, x2: W, y1: H - 2, y2: H - 2 });
  const line = (values) => values.map((v, i) => `${i ? "L" : "M"}${px(i).toFixed(1)} ${py(v).toFixed(1)}`).join("");
  if (n > 1) {
    add("path", "area", { d: `${line(means)}L${W} 2L0 2Z` });
    if (lows.length) add("path", "low", { d: line(lows) });
    add("path", "stroke", { d: line(means) });
  } else add("path", "stroke", { d: `M0 ${py(means[0])}L${W} ${py(means[0])}` });
  for (const [, from] of call.versions.slice(1))
    add("line", "version", { x1: (from / call.output) * W, x2: (from / call.output) * W, y1: 0, y2: H });
  const plot = el("div", "plot");
  for (const [value, at] of [
    [0, 6],
    [least, 62],
  ]) {
    const tick = el("span", "y", (value / 100).toFixed(value ? 1 : 0).replace("-", "−"));
    tick.style.top = `${at}px`;
    plot.append(tick);
  }
  const marks = el("div", "marks");
  for (const [place, value, token] of surprises) {
    const mark = button("", () => jump(place));
    mark.style.left = `${(call.output > 1 ? place / (call.output - 1) : 0.5) * 100}%`;
    mark.title = `token ${whole(place)} · ${visible(pieceOf(token))} · ${nats(value)}`;
    mark.setAttribute("aria-label", mark.title);
    mark.tabIndex = -1;
    marks.append(mark);
  }
  plot.append(marks, svg);
  const list = el("div", "surprises");
  for (const [place, value, token] of surprises) {
    const node = button("", () => jump(place));
    node.append(
      el("span", "", JSON.stringify(pieceOf(token)).slice(1, -1)),
      el("span", "muted", `${nats(value)} · ${chance(value)}`),
    );
    node.title = `token ${whole(place)} of the output`;
    list.append(node);
  }
  const heading = el(
    "h3",
    "",
    "Log-probability",
    el(
      "span",
      "note",
      `mean ${nats(mean)}, ${plural(call.output, "token")}${width > 1 ? `, ${width} a point; least in orange` : ""}`,
    ),
  );
  return [heading, plot, surprises.length ? list : ""];
}
