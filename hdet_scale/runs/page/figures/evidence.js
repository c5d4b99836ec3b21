FIGURES.evidence = {
  where: "single", title: "Evidence and moves",
  shown: (run) => !(run.search && !run.rounds),
  note: (run) => {
    const names = Object.keys(run.round.evidence || {});
    const what = names.some((n) => n.startsWith("velocity")) ? "The rule's velocity: above zero it raises the base, below it lowers it." : "The statistic that the rule decides by at each converge.";
    return what + (run.verdicts.length ? " Symbols are its verdicts." : "") + thinned(run);
  },
  names: (run) => {
    const all = Object.keys(run.round.evidence || {}), short = state.factor.replace(/^lr\//, "");
    const fit = all.filter((n) => n.endsWith(state.factor) || n.endsWith(short));
    return fit.length ? fit : all;
  },
  pick(run) {
    // One axis has one unit: the test statistic where there is one.
    const names = this.names(run);
    return names.filter((n) => /^[tz]\b/.test(n)).concat(names)[0];
  },
  label(v) { const kind = this.kind(v); return kind === "diamond" ? (v.length > 30 ? v.slice(0, 28) + "…" : v) : kind; },
  verdicts(run) { return [...new Set(run.verdicts.map(([, v]) => this.label(v)))].slice(0, 6); },
  kind: (v) => (/\bup\b|rais|higher/i.test(v) ? "up" : /\bdown\b|lower|back/i.test(v) ? "down" : "diamond"),
  spec(run) {
    const name = this.pick(run), ys = name ? run.round.evidence[name] : [];
    const y = extent([ys, [0]], 0.14);
    const legend = name ? [{ label: "toward a higher base", color: colour(0), kind: "box" }, { label: "toward a lower base", color: colour(1), kind: "box" }] : [];
    for (const [i, v] of this.verdicts(run).entries()) legend.push({ label: v, color: colour(2 + i), kind: this.kind(v) });
    return { x: xrange([run]), y, ylabel: name || "evidence", legend };
  },
  paint(plot, run) {
    const name = this.pick(run);
    if (!name) { plot.empty(run.rounds ? "this run's rule keeps no evidence" : none(run)); return; }
    plot.phases(run);
    const r = run.round, lower = !name.startsWith("velocity");
    // A slope or t below zero says that a higher rate did better.
    plot.bars(r.from, r.x, r.evidence[name], lower ? colour(1) : colour(0), lower ? colour(0) : colour(1));
    plot.level(0, css("--soft"));
    const seen = this.verdicts(run), under = r.phase.some(Boolean) ? 25 : 9;
    for (const [step, verdict] of run.verdicts) {
      plot.c.fillStyle = colour(2 + Math.max(0, seen.indexOf(this.label(verdict))));
      plot.glyph(this.kind(verdict), plot.sx(step), plot.top + under, 4.5);
      plot.drawn += 1;
    }
  },
  hover(x, run) {
    const i = nearest(run.round.x, x), rows = this.names(run).map((n) => [n, number(run.round.evidence[n][i], 4), colour(0)]);
    const decided = run.verdicts.find(([step]) => step === run.round.x[i]);
    return decided ? [...rows, ["verdict", decided[1], colour(2)]] : rows;
  },
  table(run) {
    const names = Object.keys(run.round.evidence || {}), said = new Map(run.verdicts);
    return [["step", ...names, "verdict"], ...run.round.x.map((x, i) => [x, ...names.map((n) => run.round.evidence[n][i]), said.get(x) || ""])];
  },
};
