FIGURES.replicas = {
  where: "single", title: "Loss by replica",
  shown: (run) => !(run.search && !run.rounds),
  note: (run) => "Each replica's loss in a round less the mean of that round; grey where it had none." + thinned(run),
  difference(run) {
    const mean = meanLosses(run);
    return (run.round.losses || []).map((row) => row.map((v, i) => (finite(v) && finite(mean[i]) ? v - mean[i] : null)));
  },
  limit(rows) {
    const all = rows.flat().filter(finite).map(Math.abs).sort((a, b) => a - b);
    return all.length ? all[Math.floor(0.98 * (all.length - 1))] || 1e-12 : 1;
  },
  spec(run) {
    const n = run.replicas, every = Math.max(1, Math.ceil(n / 12));
    const yticks = []; for (let r = 0; r < n; r += every) yticks.push(r + 0.5);
    return { x: xrange([run]), y: [n || 1, 0], yticks, yformat: (v) => String(v - 0.5), ylabel: "replica", colourbar: true, noGrid: true, legend: [] };
  },
  shade(v, limit) {
    const mix = (a, b, t) => a.map((p, i) => Math.round(p + (b[i] - p) * t));
    if (!finite(v)) return hex(css("--missing"));
    const t = Math.min(1, Math.abs(v) / limit);
    return mix(hex(css("--neutral")), (v < 0 ? BETTER : WORSE)[theme()], t);
  },
  paint(plot, run) {
    const rows = this.difference(run);
    if (!run.rounds) { plot.empty(none(run)); return; }
    const limit = this.limit(rows), { x, from } = run.round;
    const shades = { missing: this.shade(null), table: [] };
    for (let k = -64; k <= 64; k++) shades.table.push(`rgb(${this.shade((k / 64) * limit, limit)})`);
    const missing = `rgb(${shades.missing})`;
    plot.inside((c) => {
      rows.forEach((row, r) => {
        const top = plot.sy(r), height = plot.sy(r + 1) - top;
        row.forEach((v, i) => {
          const k = finite(v) ? Math.round((Math.max(-1, Math.min(1, v / limit)) + 1) * 64) : -1;
          c.fillStyle = k < 0 ? missing : shades.table[k];
          const a = plot.sx(from[i]);
          c.fillRect(a, top, Math.max(0.8, plot.sx(x[i]) - a + 0.4), height - (height > 12 ? 1 : 0));
          plot.drawn += 1;
        });
      });
    });
    const c = plot.c, px = plot.right + 16, h = plot.bottom - plot.top;
    for (let k = 0; k < h; k++) { c.fillStyle = shades.table[Math.round((1 - k / h) * 128)]; c.fillRect(px, plot.top + k, 13, 1.2); }
    c.fillStyle = css("--soft"); c.textAlign = "left"; c.textBaseline = "middle";
    [[1, limit], [0.5, 0], [0, -limit]].forEach(([at, v]) => c.fillText((v > 0 ? "+" : "") + number(v, 2), px + 18, plot.bottom - at * h));
    c.save(); c.translate(plot.w - 8, (plot.top + plot.bottom) / 2); c.rotate(-Math.PI / 2); c.textAlign = "center";
    c.fillText("loss − mean of the round (nats)", 0, 0); c.restore();
  },
  hover(x, run) {
    const i = nearest(run.round.x, x), rows = this.difference(run);
    return rows.slice(0, 12).map((row, r) => [`replica ${r}`, `${number(run.round.losses[r][i], 5)}  (${row[i] > 0 ? "+" : ""}${number(row[i], 2)})`, `rgb(${this.shade(row[i], this.limit(rows))})`]);
  },
  table: (run) => [["step", ...(run.round.losses || []).map((_, r) => `replica ${r}`)], ...run.round.x.map((x, i) => [x, ...run.round.losses.map((row) => row[i])])],
};
