FIGURES.watch = {
  where: "single", title: "The watch: held-out loss of the run",
  shown: (run) => Boolean(run.watch),
  note(run) {
    if (!run.watch) return "";
    const lowered = this.changes(run).length, back = run.watch.restarts.length;
    const often = (count) => (count === 1 ? "once" : `${whole(count)} times`);
    const weights = back ? `, and the weights went back to those of the lowest loss ${often(back)}` : "";
    return "Evaluations on held-out batches, until three quarters of the run. " + (lowered
      ? `The rate was lowered ${often(lowered)}${weights}; the events say why. Numbers in the figure: learning rate ÷ initial rate.`
      : "If the loss had risen, the rate would have been lowered.");
  },
  spec(run) {
    if (!run.watch) return { x: [0, 1], y: [0, 1], ylabel: "", legend: [] };
    const legend = [{ label: "held-out loss", color: colour(0) }];
    if (run.watch.restarts.length) legend.push({ label: "weights go back", color: colour(1), dash: [3, 3] });
    return { x: xrange([run]), y: extent([run.watch.losses], 0.12), ylabel: "held-out loss (nats / token)", legend };
  },
  first(run) {
    const s = run.search, f = state.factor;
    return s && s.taken && finite(s.taken[f]) ? s.taken[f] / s.initial[f] : run.watch.scales[0];
  },
  changes(run) {
    // Steps after which the run goes on with a lower rate, with or without the weights of before.
    const { x, scales, restarts } = run.watch, before = [this.first(run), ...scales];
    return x.filter((step, i) => restarts.includes(step) || Math.abs(scales[i] / before[i] - 1) > 1e-3);
  },
  stretches(run) {
    // An evaluation that changes the rate is the last of its stretch, and has the next one's scale.
    const { x, losses, scales, restarts } = run.watch, ends = [...this.changes(run), Infinity];
    return ends.map((end, k) => {
      const from = ends[k - 1], joined = k > 0 && !restarts.includes(from);
      const mine = x.map((v, i) => i).filter((i) => x[i] <= end && (k === 0 || x[i] > from || (joined && x[i] === from)));
      return { xs: mine.map((i) => x[i]), ys: mine.map((i) => losses[i]), scale: k ? scales[x.indexOf(from)] : this.first(run) };
    });
  },
  paint(plot, run) {
    if (!run.watch) return;
    plot.search([run], true);
    for (const s of this.stretches(run)) {
      plot.line(s.xs, s.ys, { color: colour(0), width: 2.2 });
      plot.dots(s.xs, s.ys, { color: colour(0), radius: 3.6, alpha: 1 });
      if (s.xs.length) plot.c.fillText(`${number(s.scale, 3)} \u00d7`, plot.sx(s.xs[0]) + 6, plot.sy(finite(s.ys[0]) ? s.ys[0] : 0) - 10);
    }
    for (const step of run.watch.restarts) plot.rule(step, { color: colour(1), dashes: [3, 3] });
  },
  hover(x, run) { const i = nearest(run.watch.x, x); return [["held-out loss", number(run.watch.losses[i], 5), colour(0)]]; },
  table: (run) => [["step", "held-out loss", "learning rate over the initial rate"], ...(run.watch ? run.watch.x.map((x, i) => [x, run.watch.losses[i], run.watch.scales[i]]) : [])],
};
