// The search in responses, as a condition of the table: text (a regular expression) or token ids.

import { h, select } from "./dom.js";
import { count } from "./format.js";
import { adjust } from "./state.js";

// How far a search is, where the page shows what it is doing.
export function searchProgress(main, { searched, total, hits }) {
  const line = main.querySelector(".reading-all, .empty");
  if (line) line.textContent = `searching: ${count(hits)} found in ${count(searched)} of ${count(total)} samples…`;
}

// refusal: what is wrong with the search.
export function searchBar(params, refusal) {
  let kind = params.sk || "text";
  const run = (q) => adjust({ q, sk: q && kind !== "text" ? kind : "", page: "", at: "" });
  const box = h("input", { id: "search", type: "search", "aria-label": "Search in responses", value: params.q || "", "aria-invalid": refusal ? "true" : null,
    placeholder: "a regular expression in responses, or token ids", onkeydown: (e) => {
      if (e.key === "Enter") run(box.value);
      if (e.key === "Escape") box.blur();
      e.stopPropagation();
    } });
  return [h("div", { class: "row" }, h("label", { class: "prefix", for: "search" }, "search"), box,
    select("as", kind, [["text", "text (regular expression)"], ["tokens", "token ids in a row"]], (v) => { kind = v; if (params.q) run(box.value); }),
    params.q ? h("button", { class: "quiet", onclick: () => run("") }, "clear search") : null),
  refusal ? h("p", { class: "damage refusal", role: "alert" }, h("span", { class: "where" }, "The table is shown without this search. "), refusal) : null];
}
