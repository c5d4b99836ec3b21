// The runs, what is chosen on the page, and colours for a light and a dark one.
const RUNS = JSON.parse(document.getElementById("data").textContent).runs;
// Okabe and Ito's palette, and the same hues lighter for a dark page; runs differ by dash too.
const PALETTES = {
  light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D1F", "#56B4E9", "#7B4FB5", "#7F7F7F"],
  dark: ["#56B4E9", "#F0A04B", "#2CC295", "#E59CC8", "#F0E442", "#8FC7FF", "#BFA2EE", "#A6A6A6"],
};
const DASHES = [[], [7, 3], [2, 2.5], [9, 3, 2, 3]];
const BETTER = { light: [0, 114, 178], dark: [86, 180, 233] };
const WORSE = { light: [213, 94, 0], dark: [240, 150, 60] };
const root = document.documentElement;
// Rates of a search span decades, those of a round a few per cent: a log scale for the first.
const first = Math.max(0, RUNS.findIndex((run) => run.rounds || run.search));
const state = { run: first, factor: "", log: { schedule: true, fan: Boolean(RUNS[first].search && !RUNS[first].rounds) }, relative: false };

const theme = () => (root.classList.contains("dark") ? "dark" : "light");
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const colour = (i) => PALETTES[theme()][i % PALETTES.light.length];
const dash = (i) => DASHES[i % DASHES.length];
const current = () => RUNS[state.run];
const finite = (v) => typeof v === "number" && Number.isFinite(v);
const el = (tag, attributes = {}, ...inside) => {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...inside);
  return node;
};
function hex(value) {
  const v = value.replace("#", "");
  return [0, 2, 4].map((i) => parseInt(v.slice(i, i + 2), 16));
}
