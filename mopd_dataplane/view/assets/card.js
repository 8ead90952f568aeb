// The card of a token: what the student and each teacher gave it, and what they would have said instead.

import { isStatic, once } from "./api.js";
import { diverging, paint } from "./colours.js";
import { h, put } from "./dom.js";
import { number, percent, short, shown, signed } from "./format.js";

const SOURCES = { hidden: "whole vocabulary, from hidden state × head", weights: "whole vocabulary, its weights read again" };

const HEADS = [["", null], ["log p", "natural log of the probability it gave this token"], ["p", "that probability"], ["− student", "log p minus the student's, in nats"],
  ["rank", "place of this token in its stored top-k; 1 is its likeliest"], ["others", "probability outside its stored top-k"]];

let asked = 0;

function versionAt(data, i) {
  const span = data.spans.filter((s) => s.start <= i).pop();
  return span ? span.version : null;
}

function said(data, i) {
  const ranked = data.teachers.some((t) => t.topk), heads = ranked ? HEADS : HEADS.slice(0, 4);
  const place = (t) => (ranked ? [h("td", {}, t?.topk ? (t.topk.rank[i] > 0 ? `${t.topk.rank[i]}` : `> ${t.topk.k}`) : "–"), h("td", {}, t?.topk ? percent(t.topk.tail[i]) : "–")] : null);
  const rows = data.teachers.filter((t) => t.logprob).map((t) => {
    const ratio = data.sampler ? t.logprob[i] - data.sampler[i] : NaN;
    return h("tr", {}, h("th", { scope: "row", title: t.name }, t.name), h("td", {}, number(t.logprob[i])), h("td", {}, percent(Math.exp(t.logprob[i]))),
      h("td", { style: { backgroundColor: paint("diverging", diverging(ratio)) } }, signed(ratio)), place(t));
  });
  return h("table", { class: "said" },
    h("thead", {}, h("tr", {}, heads.map(([t, tip]) => h("th", { scope: "col", title: tip }, t)))),
    h("tbody", {}, h("tr", {}, h("th", { scope: "row" }, "student"), h("td", {}, data.sampler ? number(data.sampler[i]) : "–"),
      h("td", {}, data.sampler ? percent(Math.exp(data.sampler[i])) : "–"), h("td", {}, "–"), place(null)), rows));
}

function stats(data, i) {
  const found = Object.values(data.stats).filter((s) => s.values && !Number.isNaN(s.values[i]));
  return found.length ? h("dl", { class: "facts" }, found.map((s) => h("div", {}, h("dt", {}, s.title), h("dd", {}, `${number(s.values[i])} ${s.unit}`)))) : null;
}

function column(teacher, token) {
  if (teacher.error) return h("div", { class: "candidates" }, h("h3", {}, teacher.teacher), h("p", { class: "damage" }, teacher.error));
  const top = Math.exp(teacher.logprobs[0]);
  const rank = teacher.rank ? `rank ${teacher.rank}` : `not among its ${teacher.k}`;
  return h("div", { class: "candidates" }, h("h3", {}, teacher.teacher),
    h("p", {}, h("small", {}, `${rank} · ${percent(teacher.tail)} on others · ${SOURCES[teacher.source] || `stored top-${teacher.k}`}`)),
    h("ol", {}, teacher.ids.map((id, n) => {
      const p = Math.exp(teacher.logprobs[n]);
      return h("li", { class: id === token ? "sampled" : "" }, h("i", { class: "p", style: { width: `${Math.max(1, 100 * p / top)}%` } }),
        h("span", { class: "mono" }, short(shown(teacher.pieces[n]), 18).replace(/^ $/, "␣") || "·"), h("span", { class: "value" }, percent(p)));
    })));
}

export function card(aside, data, i, { params, uid, store }) {
  const own = (asked += 1);
  const token = data.ids[i], below = h("div", { class: "beside" });
  put(aside, h("h2", {}, h("code", { class: "piece" }, short(shown(data.pieces[i]), 80).replace(/^ $/, "␣") || "·")),
    h("p", { class: "where" }, `position ${i} of ${data.length} · id ${token} · ${data.mask[i] ? `policy v${versionAt(data, i)}` : "not written by the policy"}`),
    data.mask[i] ? said(data, i) : null, stats(data, i), below);
  if (!data.mask[i]) return;
  const student = h("div", { class: "flat" }), teachers = h("div", { class: "flat" });
  put(below, isStatic() ? null : put(student, h("p", { class: "empty" }, h("small", {}, "reading the student's weights…"))), teachers);
  const fill = async (name, place, show) => {
    if (own !== asked) return;
    try {
      const found = await once(name, { store: params.store || 0, uid, position: i }, store.digest);
      if (own === asked) put(place, show(found));
    } catch (error) { if (own === asked) put(place, h("p", { class: "empty" }, h("small", {}, error.message))); }
  };
  setTimeout(async () => {
    if (data.teachers.some((t) => t.kinds.includes("topk") || t.kinds.includes("hidden"))) {
      await fill("candidates", teachers, (found) => [found.note ? h("p", { class: "empty" }, found.note) : null, found.teachers.map((t) => column(t, token))]);
    }
    if (!isStatic()) await fill("student", student, (found) => (found.note ? h("p", { class: "empty" }, h("small", {}, found.note)) : column(found, token)));
  }, 120);
}
