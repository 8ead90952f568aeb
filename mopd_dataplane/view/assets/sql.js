// Any read-only question, in the sandbox of `mopd query`.

import { ask } from "./api.js";
import { copier, h, put, table } from "./dom.js";
import { cell, count, short } from "./format.js";
import { adjust, address } from "./state.js";
import { curlOf } from "./sources.js";

export async function sqlPage(main, { params }, { stores, signal }) {
  const store = stores[Number(params.store || 0)] || stores[0];
  const q = params.q || "select domain, count(*) as samples from samples group by domain order by domain";
  const box = h("textarea", { class: "query", spellcheck: "false", rows: Math.min(24, q.split("\n").length + 1), "aria-label": "SQL", onkeydown: (e) => {
    if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); adjust({ q: box.value }); }
    e.stopPropagation();
  } });
  box.value = q;
  const out = h("div", { "aria-live": "polite" });
  put(main, h("h1", {}, "SQL"), h("p", { class: "lead" }, `Tables: ${Object.keys(store.rows).join(", ")}, and signals_TEACHER_KIND. Read-only; the snapshot of this page. Ctrl-Enter runs it.`), box,
    h("div", { class: "row" }, h("button", { onclick: () => adjust({ q: box.value }) }, "run"), copier(() => box.value, "copy SQL"),
      copier(() => curlOf("sql", { store: params.store || 0, q: box.value }), "copy as curl")), out);
  try {
    const found = await ask("sql", { store: params.store || 0, q }, { signal });
    put(out, h("p", { class: "status" }, `${count(found.total)} rows${found.total > found.rows.length ? `, the first ${count(found.rows.length)}` : ""}`),
      table(found.columns.map((title, i) => ({ title, show: (row) => {
        const text = short(typeof row[i] === "object" && row[i] !== null ? JSON.stringify(row[i]) : cell(row[i]), 300);
        return title === "uid" && row[i] ? h("a", { href: address("sample", row[i], { store: params.store }) }, text) : text;
      } })), found.rows));
  } catch (error) { if (error.name !== "AbortError") put(out, h("pre", { class: "damage", role: "alert" }, error.message)); }
  return { keys: { f: ["edit the query", () => box.focus()] } };
}
