// One plot on a canvas: axes, legend, and what can be drawn between them. `drawn` counts it.
class Plot {
  constructor(context, width, height, spec) {
    Object.assign(this, { c: context, w: width, h: height, drawn: 0 }, spec);
    const c = this.c;
    c.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    c.fillStyle = css("--card");
    c.fillRect(0, 0, width, height);
    this.title = spec.title && spec.withTitle ? spec.title : "";
    this.yticks = spec.yticks || (spec.ylog ? logTicks(...this.y) : linearTicks(...this.y, (height - 110) / 48));
    this.xticks = spec.xlog ? logTicks(...this.x) : linearTicks(...this.x, Math.max(2, (width - 90) / 110));
    this.xformat = spec.xlog ? exponent : whole;
    const format = spec.yformat || (spec.ylog ? exponent : (v) => number(v, 4));
    this.ylabels = this.yticks.map(format);
    const widest = Math.max(10, ...this.ylabels.map((s) => c.measureText(s).width));
    this.left = Math.ceil(widest) + 34;
    const last = this.xticks.length ? c.measureText(this.xformat(this.xticks[this.xticks.length - 1])).width / 2 : 0;
    this.right = width - Math.max(14, Math.ceil(last) + 4) - (spec.colourbar ? 84 : 0);
    this.top = 8 + (this.title ? 24 : 0) + this.legendRows() * 19 + 6;
    this.bottom = height - 44;
  }
  sx(v) {
    const f = this.xlog ? Math.log : (u) => u;
    return this.left + ((f(v) - f(this.x[0])) / (f(this.x[1]) - f(this.x[0]))) * (this.right - this.left);
  }
  sy(v) {
    const f = this.ylog ? Math.log : (u) => u;
    return this.bottom - ((f(v) - f(this.y[0])) / (f(this.y[1]) - f(this.y[0]))) * (this.bottom - this.top);
  }
  atX(px) {
    const t = (px - this.left) / (this.right - this.left);
    return this.xlog ? this.x[0] * (this.x[1] / this.x[0]) ** t : this.x[0] + t * (this.x[1] - this.x[0]);
  }
  legendRows() {
    let rows = this.legend && this.legend.length ? 1 : 0, x = 60;
    for (const entry of this.legend || []) {
      const size = this.c.measureText(entry.label).width + 44;
      if (x + size > this.w - 10 && x > 60) { rows += 1; x = 60; }
      Object.assign(entry, { x, row: rows - 1 });
      x += size;
    }
    return rows;
  }
  axes() {
    const c = this.c;
    c.lineWidth = 1; c.setLineDash([]);
    c.strokeStyle = css("--grid"); c.fillStyle = css("--soft");
    c.textBaseline = "middle"; c.textAlign = "right";
    this.yticks.forEach((v, i) => {
      const y = Math.round(this.sy(v)) + 0.5;
      if (!this.noGrid) { c.beginPath(); c.moveTo(this.left, y); c.lineTo(this.right, y); c.stroke(); }
      c.fillText(this.ylabels[i], this.left - 7, y);
    });
    c.textAlign = "center"; c.textBaseline = "top";
    for (const v of this.xticks) c.fillText(this.xformat(v), this.sx(v), this.bottom + 7);
    c.strokeStyle = css("--line");
    c.beginPath(); c.moveTo(this.left + 0.5, this.top); c.lineTo(this.left + 0.5, this.bottom + 0.5); c.lineTo(this.right, this.bottom + 0.5); c.stroke();
    c.fillText(this.xlabel || "optimizer step", (this.left + this.right) / 2, this.bottom + 25);
    c.save();
    c.translate(12, (this.top + this.bottom) / 2); c.rotate(-Math.PI / 2); c.textBaseline = "middle";
    c.fillText(this.ylabel, 0, 0);
    c.restore();
    this.drawLegend();
  }
  drawLegend() {
    const c = this.c;
    c.textAlign = "left"; c.textBaseline = "middle";
    if (this.title) { c.save(); c.font = "600 " + c.font; c.fillStyle = css("--ink"); c.fillText(this.title, 14, 18); c.restore(); }
    for (const e of this.legend || []) {
      const x = e.x, y = 15 + e.row * 19 + (this.title ? 24 : 0);
      c.strokeStyle = c.fillStyle = e.color;
      c.globalAlpha = e.alpha || 1;
      if (e.kind === "box") c.fillRect(x, y - 5, 22, 10);
      else if (e.kind) this.glyph(e.kind, x + 11, y);
      else { c.lineWidth = e.width || 2; c.setLineDash(e.dash || []); c.beginPath(); c.moveTo(x, y); c.lineTo(x + 22, y); c.stroke(); c.setLineDash([]); }
      c.globalAlpha = 1;
      c.fillStyle = css("--ink");
      c.fillText(e.label, x + 28, y);
    }
  }
  inside(paint) {
    const c = this.c;
    c.save(); c.beginPath(); c.rect(this.left, this.top - 1, this.right - this.left + 1, this.bottom - this.top + 2); c.clip();
    paint(c);
    c.restore();
  }
  line(xs, ys, { color, width = 2, dashes = [], alpha = 1 }) {
    this.inside((c) => {
      c.strokeStyle = color; c.lineWidth = width; c.globalAlpha = alpha; c.setLineDash(dashes); c.lineJoin = "round";
      c.beginPath();
      let pen = false;
      xs.forEach((x, i) => {
        const ok = finite(ys[i]) && (!this.ylog || ys[i] > 0);
        if (ok) { c[pen ? "lineTo" : "moveTo"](this.sx(x), this.sy(ys[i])); this.drawn += 1; }
        pen = ok;
      });
      c.stroke();
    });
  }
  strokes(from, to, ys, { color, width = 1.6, alpha = 1 }) {
    this.inside((c) => {
      c.strokeStyle = color; c.lineWidth = width; c.globalAlpha = alpha;
      c.beginPath();
      to.forEach((x, i) => {
        if (!finite(ys[i]) || (this.ylog && ys[i] <= 0)) return;
        c.moveTo(this.sx(from[i]), this.sy(ys[i])); c.lineTo(this.sx(x), this.sy(ys[i])); this.drawn += 1;
      });
      c.stroke();
    });
  }
  band(from, to, low, high, { color, alpha = 0.2 }) {
    this.inside((c) => {
      c.fillStyle = color; c.globalAlpha = alpha;
      to.forEach((x, i) => {
        if (!finite(low[i]) || !finite(high[i])) return;
        const a = this.sx(from[i]), top = this.sy(high[i]);
        c.fillRect(a, top, Math.max(0.7, this.sx(x) - a), Math.max(0.7, this.sy(Math.max(low[i], this.y[0])) - top));
        this.drawn += 1;
      });
    });
  }
  bars(from, to, ys, up, down) {
    this.inside((c) => {
      const zero = this.sy(0);
      to.forEach((x, i) => {
        if (!finite(ys[i]) || ys[i] === 0) return;
        c.fillStyle = ys[i] > 0 ? up : down;
        const a = this.sx(from[i]), y = this.sy(ys[i]), w = this.sx(x) - a;
        c.fillRect(a + (w > 4 ? 0.5 : 0), Math.min(y, zero), Math.max(0.7, w > 4 ? w - 1 : w), Math.max(0.7, Math.abs(zero - y)));
        this.drawn += 1;
      });
    });
  }
  dots(xs, ys, { color, radius = 2, alpha = 0.8 }) {
    this.inside((c) => {
      c.fillStyle = color; c.globalAlpha = alpha;
      xs.forEach((x, i) => {
        if (!finite(ys[i])) return;
        c.beginPath(); c.arc(this.sx(x), this.sy(ys[i]), radius, 0, 7); c.fill(); this.drawn += 1;
      });
    });
  }
  whiskers(xs, ys, spans, { color, width = 1.4 }) {
    this.inside((c) => {
      c.strokeStyle = color; c.lineWidth = width;
      c.beginPath();
      xs.forEach((x, i) => {
        if (!finite(ys[i]) || !finite(spans[i])) return;
        const px = this.sx(x), ends = [this.sy(ys[i] - spans[i]), this.sy(ys[i] + spans[i])];
        c.moveTo(px, ends[0]); c.lineTo(px, ends[1]);
        for (const y of ends) { c.moveTo(px - 4, y); c.lineTo(px + 4, y); }
        this.drawn += 1;
      });
      c.stroke();
    });
  }
  glyph(kind, x, y, size = 5) {
    const c = this.c;
    c.beginPath();
    if (kind === "up") { c.moveTo(x, y - size); c.lineTo(x + size, y + size); c.lineTo(x - size, y + size); }
    else if (kind === "down") { c.moveTo(x, y + size); c.lineTo(x + size, y - size); c.lineTo(x - size, y - size); }
    else if (kind === "dot") c.arc(x, y, 3, 0, 7);
    else { c.moveTo(x, y - size); c.lineTo(x + size, y); c.lineTo(x, y + size); c.lineTo(x - size, y); }
    c.closePath(); c.fill();
  }
  rule(x, { color, dashes = [] }) {
    this.inside((c) => {
      c.strokeStyle = color; c.setLineDash(dashes); c.lineWidth = 1;
      c.beginPath(); c.moveTo(this.sx(x), this.top); c.lineTo(this.sx(x), this.bottom); c.stroke();
    });
  }
  level(y, color) {
    this.inside((c) => { c.strokeStyle = color; c.lineWidth = 1; c.beginPath(); c.moveTo(this.left, this.sy(y)); c.lineTo(this.right, this.sy(y)); c.stroke(); });
  }
  phases(run) {
    const { x, from, phase } = run.round;
    if (!phase || !phase.some(Boolean)) return;
    const names = [...new Set(phase.filter(Boolean))];
    for (let i = 0, j; i < phase.length; i = j) {
      for (j = i + 1; j < phase.length && phase[j] === phase[i]; j++);
      if (!phase[i]) continue;
      this.inside((c) => {
        const a = this.sx(from[i]), b = this.sx(x[j - 1]);
        c.fillStyle = colour(3 + names.indexOf(phase[i])); c.globalAlpha = theme() === "dark" ? 0.13 : 0.1;
        c.fillRect(a, this.top, b - a, this.bottom - this.top);
        c.globalAlpha = 1; c.fillStyle = css("--soft"); c.textAlign = "left"; c.textBaseline = "top";
        if (c.measureText(phase[i]).width < b - a - 8) c.fillText(phase[i], a + 5, this.top + 3);
      });
    }
  }
  search(runs, low = false) {
    // One shade for all runs, as wide as the longest search.
    const steps = Math.max(0, ...runs.map((run) => (run.search ? run.search.steps : 0)));
    if (!steps) return;
    this.inside((c) => {
      const a = this.sx(0), b = this.sx(steps);
      c.fillStyle = css("--missing"); c.globalAlpha = 0.2;
      c.fillRect(a, this.top, b - a, this.bottom - this.top);
      c.globalAlpha = 1; c.fillStyle = css("--soft"); c.textBaseline = low ? "bottom" : "top"; c.textAlign = "left";
      c.fillText("search", c.measureText("search").width < b - a - 8 ? a + 5 : b + 4, low ? this.bottom - 4 : this.top + 4);
      this.drawn += 1;
    });
  }
  flag(x, text, { color, dashes = [], row = 0 }) {
    this.inside((c) => {
      const px = this.sx(x), size = c.measureText(text).width + 10, left = px + size + 4 > this.right;
      c.strokeStyle = color; c.lineWidth = 1.6; c.setLineDash(dashes);
      c.beginPath(); c.moveTo(px, this.top); c.lineTo(px, this.bottom); c.stroke();
      const y = this.top + 16 + row * 19, from = left ? px - size - 4 : px + 4;
      c.fillStyle = css("--card"); c.globalAlpha = 0.85; c.fillRect(from, y - 1, size, 17);
      c.fillStyle = css("--ink"); c.globalAlpha = 1; c.textAlign = "left"; c.textBaseline = "top";
      c.fillText(text, from + 5, y + 1);
      this.drawn += 1;
    });
  }
  empty(text) {
    this.c.fillStyle = css("--soft"); this.c.textAlign = "center"; this.c.textBaseline = "middle";
    this.c.fillText(text, this.w / 2, this.h / 2);
    this.drawn += 1;
  }
}
