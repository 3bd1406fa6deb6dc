// Tokens as text: coloured by log-probability, special ones and what the template inserted marked.

const decoded = page.tokens.some(([, text]) => text !== null);

// `part` of a prompt or output of `size` tokens, the first of them `first` deep; its tokens [from, to) only.
function passage(part, { size, first, from = 0, to = size, inserted = [], out = false }) {
  const text = el("div", `text${decoded ? "" : " ids"}`);
  const write = (tokens, logprobs, at) => {
    for (let k = Math.max(0, from - at); k < Math.min(tokens.length, to - at); k++) {
      const [id, piece, special] = page.tokens[tokens[k]],
        place = at + k,
        value = logprobs[k];
      if (piece === "") continue; // a later token has the whole character
      const node = el("i");
      if (special) node.className = "sp";
      else if (value !== undefined && value !== null) node.className = `l${likelihood(value)}`;
      const added = inserted.some(([a, b]) => a <= place && place < b);
      if (added) node.classList.add("ins");
      if (out) node.dataset.out = place;
      visible(piece ?? String(id))
        .split("\n")
        .forEach((line, j) => {
          if (j) node.append(el("span", "ctl", "↵"), "\n");
          if (line) node.append(line);
        });
      const likely =
        value === undefined
          ? ""
          : value === null
            ? " · log-probability not finite"
            : ` · log-probability ${nats(value)} (${chance(value)})`;
      node.title = `token ${whole(first + place)} · id ${id}${likely}${added ? " · inserted by the template" : ""}`;
      text.append(node, piece === null ? " " : "");
    }
  };
  write(part.head, part.head_logprobs, 0);
  const tail = size - part.tail.length,
    missing = Math.min(to, tail) - Math.max(from, part.head.length);
  if (missing > 0 && part.cut) text.append(el("span", "gap", `${plural(missing, "token")} left out of this page`));
  if (part.tail.length) write(part.tail, part.tail_logprobs, tail);
  return text;
}

// A long text shows its beginning, and a button for the rest.
function folded(text, part) {
  const shown = part.head.length + part.tail.length;
  if (shown < 260) return [text];
  text.classList.add("folded");
  const more = button(
    `Show all${part.cut ? " that is here" : ""}: ${plural(shown, "token")}`,
    () => {
      text.classList.remove("folded");
      more.remove();
    },
    "more",
  );
  return [text, more];
}
