// What several figures take from a run.
const lastStep = (runs) => Math.max(1, ...runs.map((r) => r.totals.steps));
const xrange = (runs) => [0, lastStep(runs)];
function meanLosses(run) {
  const rows = run.round.losses || [];
  return (run.round.x || []).map((_, i) => {
    const known = rows.map((row) => row[i]).filter(finite);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  });
}
function smooth(ys) {
  const reach = Math.max(1, Math.round(ys.length / 60));
  return ys.map((_, i) => {
    const near = ys.slice(Math.max(0, i - reach), i + reach + 1).filter(finite);
    return near.length ? near.reduce((a, b) => a + b) / near.length : null;
  });
}
// A rule may explore at the beginning only: then the rounds are not the whole of the run.
const explored = (run) => run.rounds && run.round.x[run.round.x.length - 1] >= 0.8 * run.totals.steps;
const mainLoss = (run) => (explored(run) || !run.steps.x.length ? [run.round.x, meanLosses(run)] : [run.steps.x, smooth(run.steps.loss)]);
const baseOf = (run, factor) => {
  const name = run.factors.includes(factor) ? factor : run.factors[0];
  return run.steps.x.length ? [run.steps.x, run.steps.base[name] || []] : [run.round.x, (run.round.base || {})[name] || []];
};
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (low < high) { const m = (low + high) >> 1; if (xs[m] < x) low = m + 1; else high = m; }
  return low;
};
const unit = (factor) => (factor.startsWith("lr") ? "learning rate" : factor.replaceAll("_", " "));
const none = (run) => `${run.name} has no rounds: its replicas never trained at different rates`;
const thinned = (run) => (run.group > 1 ? ` A point is the mean of ${run.group} rounds.` : "");

// Filled by figures/*.js, in the order of the page.
const FIGURES = {};
