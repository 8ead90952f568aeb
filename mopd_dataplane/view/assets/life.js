// The life of a sample, in order.

import { once } from "./api.js";
import { h, put } from "./dom.js";
import { clock, count, number, percent, signed, size } from "./format.js";
import { literal, sources } from "./sources.js";
import { address } from "./state.js";

// Facts that are more than a word or a count: their text and their unit.
const UNITS = {
  bytes: (v) => [size(v), ""], "mean reverse KL": (v) => [signed(v, 4), "nat/token"], staleness: (v) => [number(v, 0), v === 1 ? "version" : "versions"],
  "share of the step's trained tokens": (v) => [percent(v), ""], "learning rate": (v) => [v.toExponential(2).replace("-", "−"), ""], "loss of the step": (v) => [number(v, 4), ""],
  "top-p": (v) => [v === 1 ? "off" : String(v), ""], "top-k": (v) => [v === 0 ? "off" : String(v), ""],
};

function fact(name, value) {
  if (value === null || value === undefined || value === "") return null;
  const [text, unit] = UNITS[name] ? UNITS[name](value) : [typeof value === "number" ? (Number.isInteger(value) ? count(value) : number(value, 4)) : String(value), ""];
  return h("div", {}, h("dt", {}, name), h("dd", {}, text, unit ? h("small", {}, ` ${unit}`) : null));
}

function statement(uid) {
  const own = literal(uid);
  return `select created_at as at, 'sampled by ' || policy || ' v' || policy_version_first as what from samples where uid = ${own}
union all select created_at, 'scored by ' || teacher || ', ' || kind from scores where uid = ${own}
union all select created_at, 'reward ' || reward || ' by ' || verifier from rewards where uid = ${own}
union all select created_at, 'planned for ' || stage || ', window ' || "window" from plans
  where list_contains(sample_rows, (select sample_row from (from scores select uid, sample_row union all from rewards select uid, sample_row) where uid = ${own} limit 1))
order by at`;
}

export async function lifePage(main, { id, params }, { store }) {
  const happened = await once("life", { store: params.store || 0, uid: id }, store.digest);
  put(main, h("h1", {}, "Life of ", h("a", { href: address("sample", id, params) }, h("code", {}, id.slice(0, 10)))),
    h("ol", { class: "life" }, happened.map((event) => h("li", { class: event.kind },
      h("h2", {}, event.title), event.at ? h("time", { datetime: event.at }, clock(event.at)) : null,
      h("dl", { class: "facts" }, Object.entries(event.facts).map(([k, v]) => fact(k, v))),
      event.step !== undefined ? h("p", {}, h("a", { href: address("step", event.stage, { store: params.store, n: event.step }) }, "packs of this step")) : null,
      event.uids.length ? h("p", { class: "companions" }, "with ", event.uids.slice(0, 24).map((uid) => [h("a", { href: address("sample", uid, { store: params.store }) }, uid.slice(0, 8)), " "]),
        event.uids.length > 24 ? `and ${event.uids.length - 24} more` : null) : null))),
    sources("life", { store: params.store || 0, uid: id }, statement(id), params));
  return { keys: { u: ["back to the sample", () => { location.hash = address("sample", id, params); }] } };
}
