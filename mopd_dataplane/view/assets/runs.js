// Several stores at a glance: what each is at, and its curves.

import { ask } from "./api.js";
import { h, put, svg, table } from "./dom.js";
import { count, number, seconds } from "./format.js";
import { address } from "./state.js";

const WIDTH = 160, HEIGHT = 28;

// A curve without axes, with its last value beside it.
function sparkline(figures, key, digits) {
  const points = figures.filter((f) => f[key] !== null && Number.isFinite(f[key]));
  if (!points.length) return "–";
  const xs = points.map((f) => f.iteration), ys = points.map((f) => f[key]), low = Math.min(...ys), high = Math.max(...ys);
  const x = (v) => (WIDTH - 4) * (v - xs[0]) / (xs.at(-1) - xs[0] || 1) + 2, y = (v) => HEIGHT - 3 - (HEIGHT - 6) * (v - low) / (high - low || 1);
  const path = points.map((f, i) => `${i ? "L" : "M"}${x(f.iteration).toFixed(1)} ${y(f[key]).toFixed(1)}`).join("");
  const line = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `from ${number(ys[0], digits)} to ${number(ys.at(-1), digits)}` },
    svg("path", { d: path }), svg("circle", { cx: x(xs.at(-1)), cy: y(ys.at(-1)), r: 2.5 }));
  return h("span", { class: "row sparked" }, line, number(ys.at(-1), digits));
}

function statusOf(state) {
  if (!state.stage) return "no sample yet";
  if (state.iterations !== null && state.seconds_left === 0 && !state.later.length) return "done";
  const left = state.seconds_left === null ? "" : ` · about ${seconds(state.seconds_left)} left`;
  return `${state.stage} · iteration ${count(state.iteration)}${state.iterations === null ? "" : ` of ${count(state.iterations)}`}${left}`;
}

function ago(iso) {
  return iso ? `${seconds(Math.max(0, (Date.now() - Date.parse(iso)) / 1000))} ago` : "–";
}

export async function runsPage(main, now, { stores, signal }) {
  const states = await Promise.all(stores.map((store, i) => ask("state", { store: i }, { signal }).catch((error) => {
    if (error.name === "AbortError") throw error;
    return { error: error.message };
  })));
  const show = (cell) => ({ state }) => (state.error ? "–" : cell(state));
  put(main, h("h1", {}, `${count(stores.length)} runs`), table([
    { title: "run", word: true, show: ({ store, i }) => h("a", { href: address("home", "", { store: i ? String(i) : "" }), title: store.uri }, store.name) },
    { title: "status", word: true, show: ({ state }) => (state.error ? h("span", { class: "damage" }, state.error) : statusOf(state)) },
    { title: "newest sample", show: show((state) => ago(state.written_at)) },
    { title: "samples", show: ({ store }) => count(store.samples) },
    { title: "reward", show: show((state) => sparkline(state.figures, "reward", 2)) },
    { title: "reverse KL, nat/token", show: show((state) => sparkline(state.figures, "kl", 3)) },
    { title: "length, tokens", show: show((state) => sparkline(state.figures, "response_len", 0)) },
  ], stores.map((store, i) => ({ store, i, state: states[i] })), { class: "runs" }));
  return { keys: {} };
}
