// Where a view comes from: the SQL that answers it in `mopd query`, and the request as curl.

import { isStatic, link } from "./api.js";
import { copier, h } from "./dom.js";
import { go } from "./state.js";

export const quote = (text) => `'${String(text).replace(/'/g, "'\\''")}'`;
export const literal = (text) => `'${String(text).replace(/'/g, "''")}'`;

export function curlOf(name, params) {
  return `curl -H "Authorization: Bearer $MOPD_VIEW_TOKEN" ${quote(new URL(link(name, params), location.href.split("#")[0]))}`;
}

// name, asked: of the request; statements: SQL, one or several; params: of the address.
export function sources(name, asked, statements, params) {
  if (isStatic()) return null;
  return h("details", { class: "sources" }, h("summary", {}, "SQL and curl of this page"),
    [statements].flat().map((sql) => [h("pre", { class: "sql" }, sql), h("div", { class: "row" }, copier(sql, "copy SQL"),
      h("button", { class: "quiet", type: "button", onclick: () => go("sql", "", { store: params.store, q: sql }) }, "edit as a query"))]),
    h("div", { class: "row" }, copier(() => curlOf(name, asked), "copy as curl")));
}
