// Labels and notes on a sample: the only thing this page writes.

import { ask, forget, send } from "./api.js";
import { h, put, say } from "./dom.js";
import { clock, count, short } from "./format.js";

const OFFERED = 8; // labels that one click gives

// Labels that samples bear, those of most samples first, with how many bear each.
export async function labelCounts(store) {
  const counts = new Map();
  for (const { label } of await ask("labelled", { store }).catch(() => [])) counts.set(label, (counts.get(label) || 0) + 1);
  return [...counts].sort(([, a], [, b]) => b - a);
}

export function labelPanel(store, uid, labels, params) {
  const list = h("ul", { class: "labels" }), offers = h("div", { class: "row chips" }), trouble = h("p", { class: "damage" });
  const write = async (body) => {
    try {
      const now = await send("labels", { store: params.store || 0 }, { uid, note: "", ...body });
      forget();
      show(now);
      say(body.removed ? "label removed" : "label added");
      trouble.textContent = "";
    } catch (error) { put(trouble, error.message); }
  };
  const offer = async (rows) => {
    const others = (await labelCounts(params.store || 0)).filter(([name]) => !rows.some((row) => row.label === name));
    put(offers, others.slice(0, OFFERED).map(([name, n]) => h("button", { class: "chip", type: "button", title: `${count(n)} samples bear this label`, onclick: () => write({ label: name }) }, `+ ${short(name, 24)}`)));
  };
  const show = (rows) => {
    draw(rows);
    offer(rows);
  };
  const draw = (rows) => put(list, rows.map((row) => h("li", { class: "chip on", title: `${row.author}, ${clock(row.created_at)}` }, row.label, row.note ? h("small", {}, ` ${row.note}`) : null,
    h("button", { class: "quiet", "aria-label": `Remove label ${row.label}`, onclick: () => write({ label: row.label, removed: true }) }, "×"))));
  const label = h("input", { "aria-label": "Label", placeholder: "label", maxlength: 64, size: 14, required: true });
  const note = h("input", { "aria-label": "Note", placeholder: "note", maxlength: 4000, size: 40 });
  show(labels || []);
  return h("section", { class: "labelling", "aria-label": "Labels" }, h("h2", {}, "Labels"), list,
    h("form", { class: "row", onsubmit: (e) => {
      e.preventDefault();
      write({ label: label.value, note: note.value }).then(() => { label.value = ""; note.value = ""; });
    } }, label, note, h("button", { type: "submit" }, "add")), offers, trouble);
}
