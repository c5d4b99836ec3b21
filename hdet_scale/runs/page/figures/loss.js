FIGURES.loss = {
  where: "together", title: "Loss",
  note: () => "Training loss, mean over the replicas of each round; thin: sampled steps. The first tenth of a run may lie above the frame.",
  spec() {
    const late = RUNS.map((run) => { const [x, y] = mainLoss(run); const cut = lastStep([run]) * 0.1; return y.filter((_, i) => x[i] >= cut); });
    return { x: xrange(RUNS), y: extent(late, 0.08), ylabel: "cross-entropy (nats / token)",
      legend: RUNS.map((run, i) => ({ label: run.name, color: colour(i), dash: dash(i) })) };
  },
  paint(plot) {
    plot.search(RUNS, true);
    RUNS.forEach((run, i) => {
      for (const e of run.events) {
        if (e.event === "quarantine") plot.rule(e.step, { color: colour(1), dashes: [3, 3] });
        if (e.event === "resume") plot.rule(e.step, { color: css("--missing"), dashes: [1, 3] });
      }
      plot.line(run.steps.x, run.steps.loss, { color: colour(i), width: 1, alpha: 0.28 });
      plot.line(...mainLoss(run), { color: colour(i), width: 2.2, dashes: dash(i) });
    });
  },
  hover: (x) => RUNS.map((run, i) => { const [xs, ys] = mainLoss(run); return [run.name, number(ys[nearest(xs, x)], 5), colour(i)]; }),
  table: () => [["run", "step", "loss"], ...RUNS.flatMap((run) => { const [xs, ys] = mainLoss(run); return xs.map((x, i) => [run.name, x, ys[i]]); })],
};
