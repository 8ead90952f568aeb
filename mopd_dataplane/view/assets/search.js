// Search in decoded text (regular expressions) or in token ids; hits appear as they are found.

import { stream } from "./api.js";
import { h, put, say, select } from "./dom.js";
import { count } from "./format.js";
import { adjust, address } from "./state.js";

let running = null;

export function stopSearch() {
  if (running) running.abort();
  running = null;
}

export function searchPanel(store, params, where) {
  const hits = h("ol", { class: "hits" }), status = h("p", { class: "status", role: "status" });
  const run = async (kind, q) => {
    stopSearch();
    put(hits);
    if (!q) { status.textContent = ""; return; }
    running = new AbortController();
    const own = running;
    status.textContent = "searching…";
    const show = (item) => {
      if (item.error) throw new Error(item.error);
      if (item.hit) hits.append(h("li", {}, h("a", { href: address("sample", item.hit.uid, { store: params.store, t: item.hit.position, f: params.f, w: params.w }) },
        item.hit.uid.slice(0, 10)), h("small", {}, ` v${item.hit.version} · ${item.hit.domain}${item.hit.times > 1 ? ` · ${item.hit.times} times` : ""} `),
        h("span", { class: "mono" }, item.hit.text)));
      else {
        const versions = Object.entries(item.versions).map(([v, n]) => `v${v}: ${n}`).join(", ");
        status.textContent = `${count(item.hits)} samples found in ${count(item.searched)} of ${count(item.total)}${versions ? ` (${versions})` : ""}`;
      }
    };
    try { await stream("search", { store: params.store || 0, kind, q, where }, show, own.signal); say(status.textContent); }
    catch (error) { if (error.name !== "AbortError") { put(status, error.message); status.classList.add("damage"); } }
  };
  let kind = params.sk || "text";
  const box = h("input", { id: "search", type: "search", "aria-label": "Search in responses", value: params.q || "",
    placeholder: "search responses: a regular expression, or token ids", onkeydown: (e) => {
      if (e.key === "Enter") { adjust({ q: box.value, sk: kind }, { keep: true }); status.classList.remove("damage"); run(kind, box.value); }
      if (e.key === "Escape") box.blur();
      e.stopPropagation();
    } });
  const panel = h("section", { class: "search", "aria-label": "Search" },
    h("div", { class: "row" }, box, select("as", kind, [["text", "text (regular expression)"], ["tokens", "token ids in a row"]], (v) => { kind = v; })),
    status, hits);
  if (params.q) run(kind, params.q);
  return panel;
}
