// Any read-only question, in the sandbox of `mopd query`.

import { ask } from "./api.js";
import { copier, h, put, table } from "./dom.js";
import { cell, count, short } from "./format.js";
import { adjust, address } from "./state.js";
import { curlOf } from "./sources.js";

export async function sqlPage(main, { params }, { store, signal }) {
  const q = params.q || "select domain, count(*) as samples from samples group by domain order by domain";
  const box = h("textarea", { class: "query", spellcheck: "false", rows: Math.min(24, q.split("\n").length + 1), "aria-label": "SQL", onkeydown: (e) => {
    if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); adjust({ q: box.value }); }
    e.stopPropagation();
  } });
  box.value = q;
  const out = h("div", { "aria-live": "polite" });
  put(main, h("h1", {}, "SQL"), h("p", { class: "lead" }, `Tables: ${Object.keys(store.rows).join(", ")}, and signals_TEACHER_KIND. Views: responses, with decoded text; accuracy; worse_between(v, w). Read-only; the snapshot of this page. Ctrl-Enter runs it. What a column means: mopd help TABLE.`), box,
    h("div", { class: "row" }, h("button", { onclick: () => adjust({ q: box.value }) }, "run"), copier(() => box.value, "copy SQL"),
      copier(() => curlOf("sql", { store: params.store || 0, q: box.value }), "copy as curl")), out);
  try {
    const found = await ask("sql", { store: params.store || 0, q }, { signal });
    put(out, h("p", { class: "status" }, found.more ? `the first ${count(found.rows.length)} rows` : `${count(found.rows.length)} ${found.rows.length === 1 ? "row" : "rows"}`),
      table(found.columns.map((title, i) => ({ title, word: found.rows.some((row) => typeof row[i] === "string"), show: (row) => {
        const text = short(typeof row[i] === "object" && row[i] !== null ? JSON.stringify(row[i]) : cell(row[i]), 300);
        return title === "uid" && row[i] ? h("a", { href: address("sample", row[i], { store: params.store }) }, text) : text;
      } })), found.rows));
  } catch (error) { if (error.name !== "AbortError") put(out, h("pre", { class: "damage", role: "alert" }, error.message)); }
  return { keys: { f: ["edit the query", () => box.focus()] } };
}
