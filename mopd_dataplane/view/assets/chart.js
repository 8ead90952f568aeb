// Lines over steps, iterations or positions: uPlot with our colours, intervals as bands, and a table for screen readers.

/* global uPlot */
import { h } from "./dom.js";
import { number, short, visible } from "./format.js";

const live = new Set();
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const HUES = 8;
const NAME = 40; // characters of a name under a chart

export function closeCharts() {
  live.forEach((chart) => chart.close());
  live.clear();
}

function withAlpha(hex, alpha) {
  const value = Number.parseInt(hex.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
}

const together = new Set(); // charts whose cursors move together
let moving = false;

// Move the cursors of all other charts of the page to the same moment; null takes them away.
function moveOthers(own, shared) {
  if (moving) return;
  moving = true;
  together.forEach((other) => { if (other !== own) other.moveTo(shared); });
  moving = false;
}

// shared: {to(x), from(moment)} for charts whose cursors move together. null where there is nothing to draw.
// lines: [{name, x: [], y: [], low?: [], high?: [], ink?(n): name of its colour}]; options: title, unit, height, marks: [{x, title}], onpick(x)
export function chart(lines, options) {
  const drawn = lines.filter((line) => line.y.some((v) => v !== null && Number.isFinite(v)));
  if (!drawn.length) return null;
  const root = h("figure", { class: "chart" }, h("figcaption", {}, options.title, options.unit ? h("small", {}, ` ${options.unit}`) : null));
  const holder = h("div", { class: "plot", role: "img", "aria-label": described(drawn, options) });
  root.append(holder);
  let plot = null;
  const watch = new ResizeObserver(() => {
    const width = Math.floor(holder.clientWidth);
    if (width < 40) return;
    if (plot) plot.setSize({ width, height: options.height || 190 });
    else plot = build(holder, drawn, options, width, (x) => moveOthers(own, x === null ? null : options.shared.to(x)));
  });
  watch.observe(holder);
  const own = {
    close: () => { watch.disconnect(); if (plot) plot.destroy(); plot = null; together.delete(own); },
    moveTo: (moment) => {
      if (!plot) return;
      const left = moment === null ? -10 : plot.valToPos(options.shared.from(moment), "x");
      plot.setCursor({ left, top: left < 0 ? -10 : plot.over.clientHeight / 2 }, false);
    },
  };
  live.add(own);
  if (options.shared) together.add(own);
  // Move the first mark.
  root.markAt = (x) => {
    options.marks[0].x = x;
    if (plot) plot.redraw(false);
  };
  return root;
}

function described(lines, options) {
  const parts = lines.slice(0, 8).map((line) => {
    const known = line.y.filter((v) => v !== null && Number.isFinite(v));
    return `${line.name}: ${number(known[0])} to ${number(known[known.length - 1])}`;
  });
  return `${options.title}. ${parts.join("; ")}`;
}

// Means over `width` neighbouring values; gaps stay gaps.
function smoothed(values, width) {
  const reach = Math.floor(width / 2), known = (v) => v !== null && v !== undefined && Number.isFinite(v);
  return Array.from(values, (value, i) => {
    if (!known(value)) return null;
    const near = Array.from(values).slice(Math.max(0, i - reach), i + reach + 1).filter(known);
    return near.reduce((sum, v) => sum + v, 0) / near.length;
  });
}

// options.smooth: how many neighbouring values a point is the mean of; the intervals of single values are not drawn then.
function build(holder, lines, options, width, onmove) {
  const xs = [...new Set(lines.flatMap((line) => Array.from(line.x)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const spread = (line, values) => {
    const out = new Array(xs.length).fill(null);
    line.x.forEach((x, i) => { const v = values[i]; out[place.get(x)] = v !== null && Number.isFinite(v) ? v : null; });
    return out;
  };
  const series = [{ label: options.x || "step", value: (u, v) => (v === null || v === undefined ? "" : String(v)) }], columns = [xs], bands = [];
  lines.forEach((line, n) => {
    const ink = colour(line.ink ? line.ink(n) : `--series-${(line.hue ?? n) % HUES}`);
    series.push({ label: short(visible(line.name), NAME), stroke: ink, width: 1.6, spanGaps: true, points: { show: xs.length < 60, size: 5 },
      dash: (line.hue ?? n) >= HUES ? [5, 3] : undefined, value: (u, v) => (v === null || v === undefined ? "" : number(v)) });
    columns.push(spread(line, options.smooth > 1 ? smoothed(line.y, options.smooth) : line.y));
    if (line.low && !(options.smooth > 1)) {
      series.push({ show: true, label: `${line.name} high`, stroke: "transparent", points: { show: false }, class: "u-hide" },
        { show: true, label: `${line.name} low`, stroke: "transparent", points: { show: false }, class: "u-hide" });
      columns.push(spread(line, line.high), spread(line, line.low));
      bands.push({ series: [series.length - 2, series.length - 1], fill: withAlpha(ink, 0.16) });
    }
  });
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const marks = options.marks || [];
  return new uPlot({
    width, height: options.height || 190, series, bands, legend: { live: lines.length <= 6 },
    scales: { x: { time: false, ...(xs.length > 1 ? {} : { range: [xs[0] - 1, xs[0] + 1] }) }, y: { range: (u, low, high) => (low === high ? [Math.min(0, 2 * low), Math.max(0, 2 * high) || 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
    axes: [{ ...axis, size: 28, values: (u, ticks) => ticks.map((v) => (Number.isInteger(v) ? String(v) : "")) },
      { ...axis, size: 54, values: (u, ticks) => ticks.map((v) => String(+v.toPrecision(4)).replace("-", "−")) }],
    cursor: { drag: { x: true, y: false, uni: 12 }, points: { size: 6 } },
    hooks: {
      setCursor: [(u) => { if (options.shared) onmove(u.cursor.left < 0 ? null : u.posToVal(u.cursor.left, "x")); }],
      draw: [(u) => {
        for (const mark of marks) {
          const left = Math.round(u.valToPos(mark.x, "x", true));
          u.ctx.save();
          u.ctx.strokeStyle = colour("--accent");
          u.ctx.setLineDash([4, 4]);
          u.ctx.beginPath();
          u.ctx.moveTo(left, u.bbox.top);
          u.ctx.lineTo(left, u.bbox.top + u.bbox.height);
          u.ctx.stroke();
          u.ctx.fillStyle = colour("--muted");
          u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
          u.ctx.fillText(visible(mark.title), left + 4, u.bbox.top + 12 * devicePixelRatio);
          u.ctx.restore();
        }
      }],
      ready: [(u) => {
        if (!options.onpick) return;
        let down = 0;
        u.over.addEventListener("mousedown", (e) => { down = e.clientX; });
        u.over.addEventListener("click", (e) => {
          if (Math.abs(e.clientX - down) > 3 || u.cursor.idx === null || u.cursor.idx === undefined) return;
          options.onpick(xs[u.cursor.idx]);
        });
      }],
    },
  }, columns, holder);
}
