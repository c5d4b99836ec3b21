FIGURES.schedule = {
  where: "together", title: "Schedules compared",
  note: () => `The base of ${state.factor || "the learning rate"} at each step: what the replicas fan out around.`,
  toggles: { log: ["schedule", "log"] },
  spec() {
    const lists = RUNS.map((run) => baseOf(run, state.factor)[1]);
    const log = state.log.schedule && lists.flat().some((v) => v > 0);
    let y = extent(lists);
    if (log) {
      const positive = lists.flat().filter((v) => v > 0), top = Math.max(...positive);
      y = [Math.max(Math.min(...positive), top * 1e-5) * 0.8, top * 1.3];
    } else y[0] = Math.min(0, y[0]) || 0;
    return { x: xrange(RUNS), y, ylog: log, ylabel: `base of the ${unit(state.factor)}` + (log ? " (log scale)" : ""),
      legend: RUNS.map((run, i) => ({ label: run.name, color: colour(i), dash: dash(i) })) };
  },
  paint(plot) { plot.search(RUNS); RUNS.forEach((run, i) => plot.line(...baseOf(run, state.factor), { color: colour(i), width: 2.2, dashes: dash(i) })); },
  hover: (x) => RUNS.map((run, i) => { const [xs, ys] = baseOf(run, state.factor); return [run.name, number(ys[nearest(xs, x)], 4), colour(i)]; }),
  table: () => [["run", "step", `base ${state.factor}`], ...RUNS.flatMap((run) => { const [xs, ys] = baseOf(run, state.factor); return xs.map((x, i) => [run.name, x, ys[i]]); })],
};
