// A column's histogram in its head: grey is all, colour is what matches. Click a bar, or drag over several, to filter.

import { h, say } from "./dom.js";
import { count, number } from "./format.js";

function label(data, column, bin, i) {
  if (data.kind === "word" || data.kind === "flag") return bin.value === null ? "none" : String(bin.value);
  const low = data.low + i * data.width, high = low + data.width;
  if (data.kind === "time") return new Date(low * 1000).toISOString().slice(0, 19).replace("T", " ");
  if (data.whole && data.width === 1) return number(low, 0);
  return `${number(low, data.whole ? 0 : 3)} to ${number(high, data.whole ? 0 : 3)}`;
}

export function condition(data, column, from, to) {
  if (data.kind === "flag") return { c: column, flag: data.bins[from].value === "true" };
  if (data.kind === "word") return { c: column, in: data.bins.slice(from, to + 1).map((bin) => bin.value) };
  const round = (v) => Number(v.toPrecision(12));
  const found = { c: column };
  // The first and the last bar are open: they hold all below and above.
  if (from > 0) found.ge = round(data.low + from * data.width);
  if (to < data.bins.length - 1) found.lt = round(data.low + (to + 1) * data.width);
  if (from === 0 && to === data.bins.length - 1) found.known = true;
  if (data.kind === "time") found.time = true;
  return found;
}

export function histogram(data, column, filtered, onfilter) {
  const tallest = Math.max(1, ...data.bins.map((bin) => bin.all));
  const height = (n) => (n ? `${Math.max(6, 100 * Math.sqrt(n / tallest))}%` : "0");
  let from = null, at = 0;
  const bars = data.bins.map((bin, i) => {
    const text = `${label(data, column, bin, i)}: ${count(bin.here)} of ${count(bin.all)}`;
    return h("div", { class: "bar", role: "option", id: `h-${column}-${i}`, "aria-label": text, title: text, "data-i": i },
      h("i", { class: "all", style: { height: height(bin.all) } }), h("i", { class: "here", style: { height: height(bin.here) } }));
  });
  const range = (a, b) => {
    const [low, high] = a < b ? [a, b] : [b, a];
    bars.forEach((bar, i) => bar.classList.toggle("picked", i >= low && i <= high));
    return [low, high];
  };
  const finish = (to) => {
    if (from === null) return;
    const [low, high] = range(from, to);
    from = null;
    onfilter(condition(data, column, low, high));
  };
  const index = (event) => {
    const bar = event.target.closest(".bar");
    return bar ? Number(bar.dataset.i) : null;
  };
  const root = h("div", {
    class: `histogram${filtered ? " filtered" : ""}`, role: "listbox", tabindex: -1,
    "aria-label": `Histogram of ${column}; arrows choose a bar, Enter filters`,
    onpointerdown: (e) => { from = index(e); if (from !== null) { e.preventDefault(); range(from, from); } },
    onpointerover: (e) => { if (from !== null && index(e) !== null) range(from, index(e)); },
    onpointerup: (e) => { if (index(e) !== null) finish(index(e)); else from = null; },
    onpointerleave: () => { if (from !== null) { from = null; bars.forEach((bar) => bar.classList.remove("picked")); } },
    onkeydown: (e) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (step) {
        e.preventDefault(); e.stopPropagation();
        at = Math.min(bars.length - 1, Math.max(0, at + step));
        range(at, at);
        root.setAttribute("aria-activedescendant", bars[at].id);
        say(bars[at].getAttribute("aria-label"));
      } else if (e.key === "Enter" && bars.length) { e.preventDefault(); e.stopPropagation(); from = at; finish(at); }
    },
  }, bars);
  return root;
}
