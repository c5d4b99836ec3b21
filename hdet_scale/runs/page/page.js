// The page: figures, their exports and tooltips, the tables, and what can be chosen.
function download(name, blob) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
const cell = (v) => (v === null || v === undefined ? "" : /[",\n]/.test(String(v)) ? `"${String(v).replaceAll('"', '""')}"` : String(v));
const saveCsv = (name, rows) => download(name, new Blob([rows.map((r) => r.map(cell).join(",")).join("\n") + "\n"], { type: "text/csv" }));

function render(id, canvas, width, height, scale, withTitle) {
  const figure = FIGURES[id], run = current();
  canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const title = figure.where === "single" ? `${figure.title}: ${run.name}` : figure.title;
  const plot = new Plot(context, width, height, { ...figure.spec(run), title, withTitle });
  plot.axes();
  figure.paint(plot, run);
  return plot;
}
function draw(id) {
  const figure = FIGURES[id], canvas = figure.canvas, shown = !figure.shown || figure.shown(current());
  figure.node.style.display = shown ? "" : "none";
  if (!shown) { canvas.dataset.drawn = ""; return; }
  figure.caption.textContent = figure.note(current());
  figure.plot = render(id, canvas, canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1, false);
  canvas.dataset.drawn = figure.plot.drawn;
}
function drawAll() { Object.keys(FIGURES).forEach(draw); }

function build(id) {
  const figure = FIGURES[id];
  figure.canvas = el("canvas");
  figure.canvas.setAttribute("role", "img");
  figure.canvas.setAttribute("aria-label", figure.title);
  figure.caption = el("p");
  const png = el("button", { type: "button", textContent: "PNG", title: "save as a picture" });
  const table = el("button", { type: "button", textContent: "CSV", title: "save the numbers" });
  png.onclick = () => { const canvas = el("canvas"); render(id, canvas, 960, 440, 2, true); canvas.toBlob((blob) => download(`${id}.png`, blob)); };
  table.onclick = () => saveCsv(`${id}.csv`, figure.table(current()));
  const toggles = Object.entries(figure.toggles || {}).map(([kind, [key, text]]) => {
    const on = () => (kind === "log" ? state.log[key] : state.relative);
    const button = el("button", { type: "button", textContent: text });
    button.setAttribute("aria-pressed", on());
    button.onclick = () => { if (kind === "log") state.log[key] = !on(); else state.relative = !on(); button.setAttribute("aria-pressed", on()); draw(id); };
    return button;
  });
  const cross = el("div", { className: "cross" }), tip = el("div", { className: "tip" });
  const area = el("div", { className: "plot" }, figure.canvas, cross, tip);
  area.onmousemove = (e) => hover(figure, area, cross, tip, e);
  area.onmouseleave = () => { cross.style.display = tip.style.display = "none"; };
  const node = el("figure", { className: "card", id },
    el("figcaption", {}, el("div", {}, el("h2", { textContent: figure.title }), figure.caption), ...toggles, png, table), area);
  figure.node = node;
  document.getElementById(figure.where).append(node);
}
function hover(figure, area, cross, tip, event) {
  const plot = figure.plot, box = area.getBoundingClientRect(), px = event.clientX - box.left, run = current();
  const off = px < plot.left || px > plot.right || (figure.where === "single" && !run.rounds && !run.search);
  cross.style.display = tip.style.display = off ? "none" : "block";
  if (off) return;
  const x = plot.atX(px);
  Object.assign(cross.style, { left: `${px}px`, top: `${plot.top}px`, height: `${plot.bottom - plot.top}px` });
  const rows = figure.hover(x, run).map(([label, value, shade]) => {
    const key = el("i"); key.style.background = shade;
    return el("div", {}, key, `${label}  ${value}`);
  });
  tip.replaceChildren(el("b", { textContent: figure.at ? figure.at(x) : `step ${whole(x)}` }), ...rows);
  tip.style.top = `${plot.top + 6}px`;
  tip.style.left = px > box.width / 2 ? `${px - tip.offsetWidth - 12}px` : `${px + 12}px`;
}

function summary() {
  const head = [["run"], ["engine"], ["model"], ["replicas × shards", 1], ["steps", 1], ["loss, last 5 %", 1], ["base LR, highest", 1], ["base LR, last", 1],
    ["converge", 1], ["tokens / s", 1], ["quarantined", 1], ["resumed", 1]];
  const rows = RUNS.map((run, i) => {
    const t = run.totals, base = baseOf(run, run.factors[0])[1].filter(finite), what = run.run;
    const key = el("span", { className: "key" }); key.style.background = colour(i);
    const name = el("td", {}, key, run.name, " ");
    if (!run.finished) name.append(el("span", { className: "tag", textContent: "not finished" }));
    const share = t.seconds > 0 && run.rounds ? `${number((100 * t.converge) / t.seconds, 2)} %` : "–";
    const cells = [what.engine || "–", what.size || "–"];
    const numbers = [`${run.replicas || what.replicas || 1} × ${what.shards || 1}`, whole(t.steps), number(t.loss, 5),
      number(base.length ? Math.max(...base) : null, 4), number(base[base.length - 1], 4), share, whole(t.speed), whole(t.quarantined), whole(t.resumes)];
    return el("tr", {}, name, ...cells.map((textContent) => el("td", { textContent })), ...numbers.map((textContent) => el("td", { textContent, className: "n" })));
  });
  const top = el("tr", {}, ...head.map(([textContent, right]) => el("th", { textContent, className: right ? "n" : "" })));
  document.getElementById("summary").replaceChildren(top, ...rows);
  document.getElementById("what").textContent = RUNS.map((run) => `${run.name}: ${[run.search && `a search of ${whole(run.search.trials)} trial${run.search.trials === 1 ? "" : "s"}`, run.rounds && `${whole(run.rounds)} rounds`].filter(Boolean).join(", ") || "plain training"}`).join("   ·   ");
}
function events() {
  const all = RUNS.flatMap((run) => run.events.map((e) => ({ ...e, run: run.name })));
  const head = el("tr", {}, ...["run", "step", "event", "what"].map((textContent, i) => el("th", { textContent, className: i === 1 ? "n" : "" })));
  const rows = all.map((e) => el("tr", {}, el("td", { textContent: e.run }), el("td", { className: "n", textContent: whole(e.step) }),
    el("td", {}, el("span", { className: "tag", textContent: e.event })), el("td", { textContent: e.text })));
  if (!rows.length) rows.push(el("tr", {}, el("td", { colSpan: 4, textContent: "Nothing out of the ordinary: no quarantine, no resume, no clamp." })));
  document.getElementById("events").replaceChildren(head, ...rows);
  document.getElementById("eventscsv").onclick = () => saveCsv("events.csv", [["run", "step", "event", "what"], ...all.map((e) => [e.run, e.step, e.event, e.text])]);
}
function choose(id, names, set) {
  const select = document.getElementById(id);
  select.replaceChildren(...names.map((textContent, value) => el("option", { textContent, value })));
  select.onchange = () => { set(Number(select.value)); drawAll(); };
  document.getElementById(`pick${id}`).style.display = names.length > 1 ? "" : "none";
}
function pickRun(index) {
  state.run = index;
  const run = current();
  if (!run.factors.includes(state.factor)) state.factor = run.factors[0] || "";
  choose("factor", run.factors, (i) => { state.factor = run.factors[i]; });
  document.getElementById("factor").value = Math.max(0, run.factors.indexOf(state.factor));
}
function setTheme(dark) {
  root.classList.toggle("dark", dark);
  document.getElementById("theme").textContent = dark ? "light" : "dark";
  summary();
  drawAll();
}

Object.keys(FIGURES).forEach(build);
choose("run", RUNS.map((run) => run.name), pickRun);
pickRun(first);
document.getElementById("run").value = state.run;
events();
const prefers = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(prefers.matches);
prefers.onchange = (e) => setTheme(e.matches);
document.getElementById("theme").onclick = () => setTheme(theme() === "light");
let waiting = 0;
window.onresize = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); };
root.dataset.ready = Math.round(performance.now());
