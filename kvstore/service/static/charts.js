// Charts as SVG: the hit rate over time, and the break-even curve.

import { count, percent, seconds, svg, tone } from "./dom.js";

const HIGH = 250;
const NARROWEST = 280;
// The chart has one unit of width per pixel, so that its text keeps its size.
let WIDE = 640;
const PAD = { left: 52, right: 12, top: 10, bottom: 26 };

function across(fraction) {
  return PAD.left + fraction * (WIDE - PAD.left - PAD.right);
}

function up(fraction) {
  return HIGH - PAD.bottom - fraction * (HIGH - PAD.top - PAD.bottom);
}

export function fit(id) {
  WIDE = Math.max(NARROWEST, document.getElementById(id).clientWidth);
}

function frame(label, ...content) {
  return svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": label }, ...content);
}

function grid(lines) {
  return lines.map(([fraction, text]) => svg("g", {},
    svg("line", { class: "axis", x1: PAD.left, x2: WIDE - PAD.right, y1: up(fraction), y2: up(fraction) }),
    svg("text", { x: PAD.left - 6, y: up(fraction) + 4, "text-anchor": "end" }, text)));
}

// Hit rates between two samples: [{from, time, fractions: [by tier]}]. A step without lookups is left out.
// The counters restart with the sidecar.
export function hitSteps(history, tiers) {
  const steps = [];
  for (let i = 1; i < history.time_s.length; i += 1) {
    const looked = history.lookup_tokens[i] - history.lookup_tokens[i - 1];
    if (looked <= 0) continue;
    const fractions = tiers.map((tier) => Math.max(0, (history.hit_tokens[tier]?.[i] ?? 0) - (history.hit_tokens[tier]?.[i - 1] ?? 0)) / looked);
    const total = fractions.reduce((sum, fraction) => sum + fraction, 0);
    steps.push({ from: history.time_s[i - 1], time: history.time_s[i], fractions: total > 1 ? fractions.map((fraction) => fraction / total) : fractions });
  }
  return steps;
}

// Stacked steps, one colour per tier.
export function hitChart(history, tiers) {
  const steps = hitSteps(history, tiers);
  if (!steps.length) return null;
  const first = history.time_s[0];
  const last = history.time_s[history.time_s.length - 1];
  const span = Math.max(last - first, 1);
  const bars = steps.map((step) => {
    let base = 0;
    const x = across((step.from - first) / span);
    const width = Math.max(1, across((step.time - first) / span) - x);
    return step.fractions.map((fraction, index) => {
      const top = base + fraction;
      const rect = svg("rect", { class: `area ${tone(tiers, tiers[index])}`, x: x.toFixed(1), width: width.toFixed(1),
        y: up(top).toFixed(1), height: Math.max(0, up(base) - up(top)).toFixed(1) });
      base = top;
      return rect;
    });
  });
  const mean = steps.reduce((sum, step) => sum + step.fractions.reduce((a, b) => a + b, 0), 0) / steps.length;
  const ago = (at) => (last - at < 90 ? `${Math.round(last - at)} s ago` : `${Math.round((last - at) / 60)} min ago`);
  return frame(`Hit rate over time, ${percent(mean)} on average of ${steps.length} samples`,
    grid([[0, "0 %"], [0.5, "50 %"], [1, "100 %"]]), bars,
    svg("text", { x: PAD.left, y: HIGH - 8 }, ago(first)),
    svg("text", { x: across(0.5), y: HIGH - 8, "text-anchor": "middle" }, ago((first + last) / 2)),
    svg("text", { x: WIDE - PAD.right, y: HIGH - 8, "text-anchor": "end" }, "now"));
}

// Seconds to load n tokens from a tier, whose workers read blocks in parallel.
export function loadSeconds(tier, blockTokens, overhead, n) {
  return overhead + Math.ceil(n / blockTokens / Math.max(1, tier.workers_read)) * tier.read_mean_s;
}

// Tokens from which loading is always faster, up to a million tokens; null if it never is.
export function breakEven(tier, blockTokens, overhead, rate) {
  for (let n = blockTokens; n <= 1048576; n = Math.ceil(n * 1.02 / blockTokens) * blockTokens) {
    if (loadSeconds(tier, blockTokens, overhead, n) <= n / rate) {
      const long = 1048576;
      return loadSeconds(tier, blockTokens, overhead, long) <= long / rate ? n : null;
    }
  }
  return null;
}

// Time over prefix length, both on logarithmic axes.
export function evenChart(rows, tiers, blockTokens, overhead, rate) {
  const low = 16;
  const high = 131072;
  const lengths = [];
  for (let n = low; n <= high; n *= 1.25) lengths.push(n);
  const values = [low / rate, high / rate];
  for (const row of rows) values.push(loadSeconds(row, blockTokens, overhead, low), loadSeconds(row, blockTokens, overhead, high));
  const floor = Math.floor(Math.log10(Math.max(1e-6, Math.min(...values))));
  const roof = Math.max(floor + 1, Math.ceil(Math.log10(Math.max(...values))));
  const x = (n) => across(Math.log(n / low) / Math.log(high / low)).toFixed(1);
  const y = (s) => up((Math.log10(Math.max(s, 1e-6)) - floor) / (roof - floor)).toFixed(1);
  const line = (of) => lengths.map((n, i) => `${i ? "L" : "M"}${x(n)} ${y(of(n))}`).join("");
  const ticks = [];
  for (let p = floor; p <= roof; p += 1) ticks.push([(p - floor) / (roof - floor), seconds(10 ** p)]);
  const marks = rows.filter((row) => row.even && row.even >= low && row.even <= high);
  return frame(`Time to load and time to compute. ${rows.map((row) => row.words).join(" ")}`,
    grid(ticks),
    [16, 128, 1024, 8192, 65536].map((n) => svg("text", { x: x(n), y: HIGH - 8, "text-anchor": "middle" }, count(n))),
    svg("path", { class: "compute", d: line((n) => n / rate) }),
    rows.map((row) => svg("path", { class: `curve ${tone(tiers, row.name)}`, d: line((n) => loadSeconds(row, blockTokens, overhead, n)) })),
    marks.map((row) => svg("circle", { class: `mark ${tone(tiers, row.name)}`, r: 6, cx: x(row.even), cy: y(row.even / rate) })));
}
