// Labels and notes on a sample: the only thing this page writes.

import { forget, send } from "./api.js";
import { h, put, say } from "./dom.js";
import { clock } from "./format.js";

export function labelPanel(store, uid, labels, params) {
  const list = h("ul", { class: "labels" }), trouble = h("p", { class: "damage" });
  const write = async (body) => {
    try {
      const now = await send("labels", { store: params.store || 0 }, { uid, note: "", ...body });
      forget();
      show(now);
      say(body.removed ? "label removed" : "label added");
      trouble.textContent = "";
    } catch (error) { put(trouble, error.message); }
  };
  const show = (rows) => put(list, rows.map((row) => h("li", { class: "chip on", title: `${row.author}, ${clock(row.created_at)}` }, row.label, row.note ? h("small", {}, ` ${row.note}`) : null,
    h("button", { class: "quiet", "aria-label": `Remove label ${row.label}`, onclick: () => write({ label: row.label, removed: true }) }, "×"))));
  const label = h("input", { "aria-label": "Label", placeholder: "label", maxlength: 64, size: 14, required: true });
  const note = h("input", { "aria-label": "Note", placeholder: "note", maxlength: 4000, size: 40 });
  show(labels || []);
  return h("section", { class: "labelling", "aria-label": "Labels" }, h("h2", {}, "Labels"), list,
    h("form", { class: "row", onsubmit: (e) => {
      e.preventDefault();
      write({ label: label.value, note: note.value }).then(() => { label.value = ""; note.value = ""; });
    } }, label, note, h("button", { type: "submit" }, "add")), trouble);
}
