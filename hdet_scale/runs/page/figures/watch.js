FIGURES.watch = {
  where: "single", title: "The watch: held-out loss of the run",
  shown: (run) => Boolean(run.watch),
  note: (run) => {
    if (!run.watch) return "";
    const count = run.watch.restarts.length;
    return "Evaluations on held-out batches, until three quarters of the run. " + (count
      ? `The run restarted ${count === 1 ? "once" : `${whole(count)} times`}; the events say why. Numbers in the figure: learning rate ÷ initial rate.`
      : "If the loss had risen while the training loss fell, the run would have restarted at a lower rate.");
  },
  spec(run) {
    if (!run.watch) return { x: [0, 1], y: [0, 1], ylabel: "", legend: [] };
    const legend = [{ label: "held-out loss", color: colour(0) }];
    if (run.watch.restarts.length) legend.push({ label: "restart", color: colour(1), dash: [3, 3] });
    return { x: xrange([run]), y: extent([run.watch.losses], 0.12), ylabel: "held-out loss (nats / token)", legend };
  },
  stretches(run) {
    // An evaluation that restarts the run is the last of its stretch, and has the next one's scale.
    const { x, losses, scales, restarts } = run.watch, ends = [...restarts, Infinity], s = run.search, f = state.factor;
    const first = s && s.taken && finite(s.taken[f]) ? s.taken[f] / s.initial[f] : scales[0];
    return ends.map((end, k) => {
      const mine = x.map((v, i) => i).filter((i) => x[i] <= end && (k === 0 || x[i] > ends[k - 1]));
      return { xs: mine.map((i) => x[i]), ys: mine.map((i) => losses[i]), scale: k ? scales[x.indexOf(ends[k - 1])] : first };
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
