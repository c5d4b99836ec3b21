FIGURES.search = {
  where: "single", title: "The search: loss by learning rate",
  shown: (run) => Boolean(run.search),
  note: (run) => {
    const s = run.search;
    if (!s) return "";
    const times = (words) => words.replace(/(\d) x\b/g, "$1 ×");
    const said = s.stages.filter((stage) => stage.verdict).map((stage) => `${stage.verdict[0].toUpperCase()}${times(stage.verdict.slice(1))}.`).join(" ");
    const how = !s.taken ? `is under way, ${whole(s.steps)} steps so far`
      : s.completed ? `took ${whole(s.steps)} of ${whole(run.totals.steps)} steps`
      : `ended early after ${whole(s.steps)} steps (${times(s.verdict)})`;
    return `${said} Each point is a short, complete schedule, evaluated after its decay; a bar is two standard errors of the difference to the initial rate; the search ${how}.`;
  },
  stages: (run) => run.search.stages.map((s, i) => ({ xs: s.rates[state.factor] || [], ys: s.losses, errors: s.errors, name: `${s.name} stage`, width: s.name === "second" ? 2.4 : 1.6, color: colour(i) })),
  top(run) {
    // Too low a rate ends near the initial loss, too high a one anywhere. Losses far above the
    // others leave the frame: they would flatten the rest of the loss curve.
    const points = this.stages(run).flatMap((s) => s.xs.map((x, i) => [x, s.ys[i]])).filter(([, v]) => finite(v)).sort((a, b) => a[1] - b[1]);
    if (!points.length) return 1;
    const [best, low] = points[0], losses = points.map(([, v]) => v);
    const below = points.filter(([x]) => x <= best).map(([, v]) => v), middle = losses[Math.floor(losses.length / 2)];
    return Math.min(losses[losses.length - 1], Math.max(...below, low + 2.5 * (middle - low)));
  },
  spec(run) {
    if (!run.search) return { x: [0, 1], y: [0, 1], ylabel: "", legend: [] };
    const stages = this.stages(run), top = this.top(run), xs = stages.flatMap((s) => s.xs);
    const legend = stages.map((s) => ({ label: s.name, color: s.color, width: s.width }));
    if (stages.some((s) => s.ys.some((v) => !finite(v) || v > top))) legend.push({ label: "above the frame, or diverged", color: css("--soft"), kind: "up" });
    const y = extent([stages.flatMap((s) => s.ys.filter((v) => finite(v) && v <= top))], 0.1);
    y[1] += 0.22 * (y[1] - y[0]);  // room for the flags
    return { x: [Math.min(...xs) / 1.6, Math.max(...xs) * 1.6], xlog: true, y, legend,
      xlabel: "peak learning rate of a trial, translated to the run (log scale)",
      ylabel: "loss after the decay (nats / token)" };
  },
  paint(plot, run) {
    if (!run.search) return;
    const top = this.top(run), { initial, taken } = run.search, f = state.factor;
    for (const s of this.stages(run)) {
      plot.line(s.xs, s.ys, { color: s.color, width: s.width });
      plot.whiskers(s.xs, s.ys, s.errors.map((e, i) => (finite(e) && Math.abs(s.xs[i] / initial[f] - 1) > 1e-3 ? 2 * e : null)), { color: s.color });
      plot.dots(s.xs, s.ys.map((v) => (finite(v) && v <= top ? v : null)), { color: s.color, radius: 4, alpha: 1 });
      s.xs.forEach((x, i) => {
        if (finite(s.ys[i]) && s.ys[i] <= top) return;
        plot.c.fillStyle = s.color;
        plot.glyph("up", plot.sx(x), plot.top + 8, 5);
        plot.drawn += 1;
      });
    }
    const kept = taken && taken[f] === initial[f];
    if (finite(initial[f])) plot.flag(initial[f], `initial rate${kept ? ", kept" : ""}: ${number(initial[f], 3)}`, { color: css("--soft"), dashes: [5, 4] });
    if (taken && !kept) plot.flag(taken[f], `proposed rate: ${number(taken[f], 3)}`, { color: colour(2), row: 1 });
  },
  at: (x) => `learning rate ${number(x, 3)}`,
  hover(x, run) {
    const near = (xs) => xs.reduce((best, v, i) => (Math.abs(Math.log(v / x)) < Math.abs(Math.log(xs[best] / x)) ? i : best), 0);
    return this.stages(run).map((s) => { const i = near(s.xs); return [`${s.name}, ${number(s.xs[i], 3)}:`, finite(s.ys[i]) ? number(s.ys[i], 5) + (finite(s.errors[i]) ? ` \u00b1 ${number(s.errors[i], 2)}` : "") : "diverged", s.color]; });
  },
  table: (run) => [["stage", "learning rate", "loss", "standard error"], ...(run.search ? run.search.stages : []).flatMap((s) => (s.rates[state.factor] || []).map((x, i) => [s.name, x, s.losses[i], s.errors[i]]))],
};
