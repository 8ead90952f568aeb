// The state of a run, at the top of the first page and of the page of the run.

import { h } from "./dom.js";
import { count, number, seconds } from "./format.js";
import { address } from "./state.js";

// How far the run is, its figures from the first iteration to the newest, and the worst answer of each teacher.
export function runState(state, store, params) {
  if (!state.stage) return h("section", { class: "state", "aria-label": "State of the run" }, h("p", { class: "empty" }, "No sample has been committed yet."));
  const first = state.figures[0], newest = state.figures.at(-1), fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  const change = (key, digits) => (newest[key] === null ? null : first.iteration === newest.iteration || first[key] === null ? number(newest[key], digits)
    : `${number(first[key], digits)} → ${number(newest[key], digits)}`);
  const measured = [["reward", change("reward", 2)], ["reverse KL, nat/token", change("kl", 3)], ["length, tokens", change("response_len", 0)]];
  const left = state.seconds_left === null ? null : state.seconds_left > 0 ? `about ${seconds(state.seconds_left)}` : "none, all iterations are done";
  return h("section", { class: "state", "aria-label": "State of the run" },
    h("dl", { class: "facts" }, fact("stage", state.stage),
      fact("iteration", `${count(state.iteration)}${state.iterations === null ? "" : ` of ${count(state.iterations)}`}`),
      left ? fact("time left of the stage, at its pace", left) : null, state.later.length ? fact("then", state.later.join(", ")) : null,
      measured.filter(([, value]) => value !== null).map(([name, value]) => fact(name, value)), fact("samples", count(store.samples))),
    state.worst.length ? h("p", { class: "worst" }, h("span", { class: "where" }, "Worst newest answer, by teacher: "),
      state.worst.map((w, i) => [i ? " · " : "", h("a", { href: address("sample", w.uid, { store: params.store, teacher: w.teacher }) },
        w.teacher), h("small", {}, ` ${number(w.kl, 2)} nat/token`)])) : null);
}
