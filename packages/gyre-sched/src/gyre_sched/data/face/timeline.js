// Water level against capacity, and under it, on the same clock, the role of every cell.

const ROW = 18;
const CHART = 150;
const TOP = 20;
const LEFT = 66;
const RIGHT = 14;
const AXIS = 20;
const MOST_ROWS = 64;
const GAP = 24; // pixels between the chart and the cells: the versions' line
const MARK_GAP = 30; // pixels between two words of a mark

class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.picture = null;
    canvas.addEventListener("pointermove", (e) => this.point(e));
    canvas.addEventListener("pointerleave", () => tip.hide());
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(picture) {
    this.picture = picture;
    this.draw();
  }

  x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT);
  }

  time(x) {
    return this.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.to - this.from);
  }

  draw() {
    const p = this.picture;
    if (!p || p.began === null) return;
    this.rows = p.cells.slice(0, MOST_ROWS);
    this.width = this.canvas.clientWidth;
    this.height = TOP + CHART + GAP + this.rows.length * ROW + AXIS;
    this.from = p.began;
    this.to = Math.max(p.at, p.began + 1);
    const ratio = devicePixelRatio || 1;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const c = this.canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    this.drawAxis(c);
    this.drawLevels(c);
    this.drawMarks(c);
    this.drawCells(c);
  }

  drawAxis(c) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    const least = ((this.to - this.from) / Math.max(1, this.width - LEFT - RIGHT)) * 80;
    const step = steps.find((s) => s >= least) ?? Math.ceil(least / 86400) * 86400;
    c.textAlign = "center";
    for (let t = 0; t <= this.to - this.from; t += step) {
      const x = Math.round(this.x(this.from + t)) + 0.5;
      c.strokeStyle = colour("soft");
      c.beginPath();
      c.moveTo(x, TOP);
      c.lineTo(x, this.height - AXIS);
      c.stroke();
      c.fillStyle = colour("muted");
      c.fillText(elapsed(t), x, this.height - AXIS / 2);
    }
  }

  drawLevels(c) {
    const { levels } = this.picture;
    const most = Math.max(1, ...levels.map((l) => Math.max(l[1], l[2])));
    this.y = (value) => TOP + CHART - (value / most) * CHART;
    c.textAlign = "right";
    for (const value of [0, Math.round(most / 2), most]) {
      const y = Math.round(this.y(value)) + 0.5;
      c.strokeStyle = colour("line");
      c.beginPath();
      c.moveTo(LEFT, y);
      c.lineTo(this.width - RIGHT, y);
      c.stroke();
      c.fillStyle = colour("muted");
      c.fillText(String(value), LEFT - 8, y);
    }
    const path = (index) => {
      const line = new Path2D();
      let last = null;
      for (const level of levels) {
        const x = this.x(level[0]);
        if (last !== null) line.lineTo(x, this.y(last));
        if (last === null) line.moveTo(x, this.y(level[index]));
        else line.lineTo(x, this.y(level[index]));
        last = level[index];
      }
      if (last !== null) line.lineTo(this.x(this.to), this.y(last));
      return line;
    };
    const water = path(1);
    if (levels.length) {
      const area = new Path2D(water);
      area.lineTo(this.x(this.to), this.y(0));
      area.lineTo(this.x(levels[0][0]), this.y(0));
      c.globalAlpha = 0.16;
      c.fillStyle = colour("water");
      c.fill(area);
      c.globalAlpha = 1;
    }
    c.lineWidth = 1.5;
    c.strokeStyle = colour("water");
    c.stroke(water);
    c.strokeStyle = colour("capacity");
    c.stroke(path(2));
    c.lineWidth = 1;
    c.setLineDash([2, 3]);
    c.strokeStyle = colour("muted");
    c.stroke(path(3));
    c.setLineDash([]);
  }

  drawMarks(c) {
    const { transfers, bursts, versions } = this.picture;
    let free = -Infinity;
    c.textAlign = "left";
    for (const [time, burst] of bursts) {
      const x = Math.round(this.x(time)) + 0.5;
      c.strokeStyle = colour("faint");
      c.setLineDash([4, 3]);
      c.beginPath();
      c.moveTo(x, 4);
      c.lineTo(x, this.height - AXIS);
      c.stroke();
      c.setLineDash([]);
      if (x < free) continue;
      c.fillStyle = colour("muted");
      c.fillText(`burst ${burst}`, x + 4, 8);
      free = x + 54;
    }
    free = -Infinity;
    for (const [time, version] of versions) {
      const x = this.x(time);
      c.fillStyle = colour("training");
      c.beginPath();
      c.arc(x, TOP + CHART + GAP / 2, 2.5, 0, 7);
      c.fill();
      if (x < free) continue;
      c.fillStyle = colour("muted");
      c.fillText(`v${version}`, x + 5, TOP + CHART + GAP / 2);
      free = x + MARK_GAP;
    }
    for (const [time, , water] of transfers) {
      const x = this.x(time);
      const y = this.y(water);
      c.fillStyle = colour("training");
      c.beginPath();
      c.moveTo(x, y + 1);
      c.lineTo(x - 4, y - 7);
      c.lineTo(x + 4, y - 7);
      c.fill();
    }
  }

  drawCells(c) {
    this.rows.forEach((cell, row) => {
      const y = this.rowTop(row);
      c.textAlign = "right";
      c.fillStyle = colour("muted");
      c.fillText(cell.cell === 0 ? "core 0" : `cell ${cell.cell}`, LEFT - 8, y + ROW / 2 - 1);
      for (const [role, began, ended] of cell.spans) {
        const x = this.x(began);
        const width = Math.max(1, this.x(ended ?? this.to) - x);
        c.fillStyle = colour(shown(role));
        c.fillRect(x, y + 1, width, ROW - 4);
      }
    });
  }

  rowTop(row) {
    return TOP + CHART + GAP + row * ROW;
  }

  point(event) {
    const p = this.picture;
    if (!p || p.began === null) return;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    if (x < LEFT || x > this.width - RIGHT) return tip.hide();
    const time = this.time(x);
    const row = Math.floor((y - this.rowTop(0)) / ROW);
    if (row >= 0 && row < this.rows.length) return this.tellCell(event, this.rows[row], time);
    const level = p.levels.findLast((l) => l[0] <= time);
    if (!level) return tip.hide();
    const near = p.transfers.find(([t]) => Math.abs(this.x(t) - x) < 5);
    const lines = [
      `${elapsed(time - p.began)}`,
      `water ${level[1]}, capacity ${level[2]}`,
      `queued ${level[3]}, at the feed ${level[4]}`,
    ];
    if (near) lines.push(`cell ${near[1]} leaves rollout: w = ${near[2]}, C_R = ${near[3]}`);
    tip.show(event, lines.join("\n"));
  }

  tellCell(event, cell, time) {
    const found = cell.spans.findLast(([, began]) => began <= time);
    if (!found) return tip.hide();
    const [role, began, ended] = found;
    const lasted = span((ended ?? this.to) - began);
    tip.show(event, `cell ${cell.cell}: ${role}\n${elapsed(began - this.from)}, ${ended ? "for" : "since"} ${lasted}`);
  }
}
