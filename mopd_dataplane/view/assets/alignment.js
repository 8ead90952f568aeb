// A response in the student's tokens and, below, in a teacher's own: two rows over one text, in chunks of equal text.

import { diverging, paint } from "./colours.js";
import { h, put } from "./dom.js";
import { count, number, short, shown } from "./format.js";

const AROUND = 40; // chunks on each side of the selected token that exist
const LONGEST = 24; // characters of one token that are shown

// First token of each chunk and the one after its last, from the marks of last tokens.
function spansOf(ends) {
  const spans = [];
  let start = 0;
  ends.forEach((isEnd, i) => { if (isEnd) { spans.push([start, i + 1]); start = i + 1; } });
  return spans;
}

function sum(values, [start, end]) {
  let total = 0;
  for (let i = start; i < end; i += 1) total += values[i];
  return total;
}

function token(text, attributes) {
  return h("span", attributes, short(shown(text), LONGEST) || "·");
}

// The element `root`, and moveTo(position), which shows the chunks around a token of the student; null without chunks.
export function twoRows(data, teacher, onpick) {
  const own = teacher && teacher.alignment;
  if (!own) return null;
  const ours = spansOf(own.ends), theirs = spansOf(own.teacherEnds);
  const rows = h("div", { class: "two-rows", role: "list", onclick: (event) => {
    const node = event.target.closest("[data-i]");
    if (node) onpick(Number(node.dataset.i));
  } });
  const range = h("small", {});
  const root = h("section", { class: "alignment", "aria-label": `Tokens of the student above, tokens of ${teacher.name} below` },
    h("h2", {}, "One text, two tokenizations"),
    h("p", { class: "where" }, `${count(data.length)} tokens of the student above, ${count(own.ids.length)} of ${teacher.name} below, in ${count(ours.length)} chunks of equal text. `, range), rows);

  function chunk(n, selected) {
    const [start, end] = ours[n], [first, last] = theirs[n];
    const log = teacher.logprob ? sum(teacher.logprob, ours[n]) : NaN, sampled = data.sampler ? sum(data.sampler, ours[n]) : NaN;
    const above = [], below = [];
    for (let i = start; i < end; i += 1) above.push(token(data.pieces[i], { class: i === selected ? "chosen" : null, "data-i": i }));
    for (let i = first; i < last; i += 1) below.push(token(own.pieces[i], { title: `id ${own.ids[i]}` }));
    return h("div", { class: "chunk", role: "listitem", "data-chunk": n,
      title: `chunk ${n}: log p of the text ${number(log, 2)} by the teacher, ${number(sampled, 2)} by the student, nat`,
      style: { backgroundColor: paint("diverging", diverging(log - sampled)) } }, h("div", {}, above), h("div", { class: "theirs" }, below));
  }

  function moveTo(position) {
    const at = Math.max(0, ours.findIndex(([, end]) => position < end));
    const first = Math.max(0, at - AROUND), last = Math.min(ours.length, at + AROUND + 1);
    range.textContent = last - first < ours.length ? `Shown: chunks ${first} to ${last - 1}.` : "";
    put(rows, Array.from({ length: last - first }, (_, k) => chunk(first + k, position)));
  }

  return { root, moveTo };
}
