FIGURES.fan = {
  where: "single", title: "The fan",
  note: (run) => (run.search && !run.rounds
    ? "The base that the replicas share, and before it the rates of the search's trials, translated to the run, where they fit into the frame."
    : "The rate of each replica, one stroke a round, and the base that they share.") + thinned(run),
  toggles: { log: ["fan", "log"], relative: [null, "÷ base"] },
  series(run) {
    const f = state.factor, r = run.round, rows = (r.values || {})[f] || [];
    const mid = (r.low && r.low[f] ? r.low[f].map((v, i) => (v + r.high[f][i]) / 2) : []);
    const over = (list) => (state.relative ? list.map((v, i) => (finite(v) && mid[i] ? v / mid[i] : null)) : list);
    return { rows: rows.map(over), low: over((r.low || {})[f] || []), high: over((r.high || {})[f] || []), base: state.relative ? mid.map(() => 1) : null };
  },
  spec(run) {
    const s = this.series(run), [, base] = baseOf(run, state.factor);
    const log = state.log.fan && !state.relative;
    let y = extent([s.low, s.high, state.relative ? [1] : base]);
    if (log) { const used = [...s.low, ...s.high, ...base], all = (used.some((v) => v > 0) || !run.search ? used : run.search.rates[state.factor] || []).filter((v) => v > 0), top = Math.max(...all); y = [Math.max(Math.min(...all), top * 1e-5) * 0.8, top * (run.search ? 6 : 1.3)]; }
    else if (!state.relative) y[0] = [...s.low, ...base].some((v) => v < 0) ? y[0] : 0;
    const legend = s.rows.length && s.rows.length <= 8 ? s.rows.map((_, i) => ({ label: `replica ${i}`, color: colour(i), alpha: 0.9 })) : [];
    if (s.low.length) legend.push({ label: "lowest to highest", color: colour(0), kind: "box", alpha: 0.22 });
    if (run.search) legend.push({ label: "trials of the search", color: colour(3), alpha: 0.75 });
    legend.push({ label: "base", color: css("--ink"), width: 2.4 });
    return { x: xrange([run]), y, ylog: log, legend, ylabel: state.relative ? `${unit(state.factor)} ÷ middle of the fan` : unit(state.factor) + (log ? " (log scale)" : "") };
  },
  paint(plot, run) {
    const s = this.series(run), r = run.round;
    plot.phases(run);
    if (run.search) {
      plot.search([run], true);
      const { from, x, rates } = run.search, mine = rates[state.factor] || [];
      if (!state.relative) plot.strokes(from, x, mine, { color: colour(3), width: 2.2, alpha: 0.75 });
    }
    if (s.low.length) plot.band(r.from, r.x, s.low, s.high, { color: colour(0), alpha: s.rows.length ? 0.12 : 0.3 });
    s.rows.forEach((row, i) => plot.strokes(r.from, r.x, row, { color: colour(i), width: 1.7, alpha: s.rows.length <= 8 ? 0.9 : 0.35 }));
    if (s.base) plot.line(r.x, s.base, { color: css("--ink"), width: 2.4 });
    else plot.line(...baseOf(run, state.factor), { color: css("--ink"), width: 2.4 });
  },
  hover(x, run) {
    const s = this.series(run), i = nearest(run.round.x, x), [xs, ys] = baseOf(run, state.factor);
    const rows = s.rows.slice(0, 8).map((row, k) => [`replica ${k}`, number(row[i], 4), colour(k)]);
    if (!rows.length && s.low.length) rows.push(["lowest", number(s.low[i], 4), colour(0)], ["highest", number(s.high[i], 4), colour(0)]);
    return [["base", s.base ? "1" : number(ys[nearest(xs, x)], 4), css("--ink")], ...rows];
  },
  table(run) {
    const f = state.factor, r = run.round, rows = (r.values || {})[f] || [];
    return [["step", "base", "lowest", "highest", ...rows.map((_, i) => `replica ${i}`)],
      ...r.x.map((x, i) => [x, r.base[f][i], r.low[f][i], r.high[f][i], ...rows.map((row) => row[i])])];
  },
};
