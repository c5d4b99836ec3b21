// Numbers as people write them, and ticks of axes.
const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const power = (e) => "10" + (e < 0 ? "⁻" : "") + [...String(Math.abs(e))].map((d) => SUPERSCRIPT[d]).join("");
function number(v, digits = 4) {
  if (!finite(v)) return "–";
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size >= 0.001 && size < 1e5) {
    return size >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(digits)));
  }
  let e = Math.floor(Math.log10(size)), m = Number((v / 10 ** e).toPrecision(Math.max(1, digits - 1)));
  if (Math.abs(m) >= 10) { m /= 10; e += 1; }
  return m === 1 ? power(e) : `${m} · ${power(e)}`;
}
const exponent = (v) => {
  const e = Math.floor(Math.log10(v) + 1e-9), m = Math.round(v / 10 ** e);
  return m === 1 ? power(e) : `${m} · ${power(e)}`;
};
const whole = (v) => (finite(v) ? Math.round(v).toLocaleString("en") : "–");
function bytes(v) {
  if (!finite(v)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (v >= 1000 && i < units.length - 1) { v /= 1000; i += 1; }
  return `${number(v, 3)} ${units[i]}`;
}
function duration(s) {
  if (!finite(s)) return "–";
  if (s < 120) return `${number(s, 3)} s`;
  return s < 7200 ? `${(s / 60).toFixed(1)} min` : `${(s / 3600).toFixed(1)} h`;
}

function extent(lists, padding = 0.06) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const v of list) if (finite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low > high) return [0, 1];
  if (low === high) { const d = Math.abs(low) * 0.1 || 1; return [low - d, high + d]; }
  const d = (high - low) * padding;
  return [low - d, high + d];
}
function linearTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}
function logTicks(low, high) {
  const a = Math.log10(low), b = Math.log10(high);
  const inner = b - a < 2.5 ? [1, 2, 5] : [1], every = Math.max(1, Math.ceil((b - a) / 6));
  const ticks = [];
  for (let e = Math.floor(a); e <= Math.ceil(b); e++) {
    if (inner.length === 1 && e % every) continue;
    for (const m of inner) { const v = Number(`${m}e${e}`); if (v >= low * 0.999 && v <= high * 1.001) ticks.push(v); }
  }
  return ticks;
}
