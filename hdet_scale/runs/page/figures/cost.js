FIGURES.cost = {
  where: "single", title: "What a converge costs",
  shown: (run) => !(run.search && !run.rounds),
  note: (run) => {
    const t = run.totals, share = t.seconds > 0 ? `; ${number((100 * t.converge) / t.seconds, 2)} % of the run's time` : "";
    return run.rounds ? `Time of the averaging on the rank that writes, ${bytes(t.bytes)} sent a converge${share}.${thinned(run)}` : none(run);
  },
  ms: (list) => (list || []).map((v) => (finite(v) ? v * 1000 : null)),
  spec(run) {
    const seconds = this.ms(run.round.seconds).filter(finite).sort((a, b) => a - b), probe = this.ms(run.round.probe).filter((v) => v > 0);
    const top = seconds.length ? seconds[Math.floor(0.99 * (seconds.length - 1))] * 1.25 : 1;
    const legend = [{ label: "each converge", color: colour(0), kind: "dot" }, { label: "smoothed", color: colour(0) }];
    if (probe.length) legend.push({ label: "probe", color: colour(1), kind: "dot" });
    return { x: xrange([run]), y: [0, Math.max(top, ...probe.map((v) => v * 1.05)) || 1], ylabel: "time (ms)", legend };
  },
  paint(plot, run) {
    if (!run.rounds) { plot.empty(none(run)); return; }
    const ms = this.ms(run.round.seconds);
    plot.dots(run.round.x, ms, { color: colour(0), radius: ms.length > 400 ? 1.2 : 2.2, alpha: 0.4 });
    plot.line(run.round.x, smooth(ms), { color: colour(0), width: 2.2 });
    plot.dots(run.round.x, this.ms(run.round.probe).map((v) => v || null), { color: colour(1), radius: 2.2, alpha: 0.6 });
  },
  hover(x, run) {
    const i = nearest(run.round.x, x), probe = (run.round.probe || [])[i];
    return [["converge", `${number(run.round.seconds[i] * 1000, 3)} ms`, colour(0)], ...(probe ? [["probe", `${number(probe * 1000, 3)} ms`, colour(1)]] : [])];
  },
  table: (run) => [["step", "converge seconds", "probe seconds"], ...(run.round.x || []).map((x, i) => [x, run.round.seconds[i], (run.round.probe || [])[i]])],
};
